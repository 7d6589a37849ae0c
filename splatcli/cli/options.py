"""Options that several commands share, so that they are spelt and explained the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="One JSON object per line on stdout instead of plain lines.")]

Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Nothing on stderr but errors.")]

Model = Annotated[
    Path | None,
    typer.Argument(
        metavar="[MODEL]",
        help="Checkpoint, PLY or run folder. Without it: the path that comes through a pipe, else the newest run "
        "under output/.",
        show_default=False,
    ),
]

StopAt = Annotated[
    int | None,
    typer.Option(
        "--stop-at",
        metavar="K",
        min=1,
        help="End after step K of the same schedule; `splat resume` goes on from there.",
    ),
]

Device = Annotated[str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:1.")]

Data = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", help="Where the scene is now, if it is not where it was trained."),
]

# How a scene is read: the same flags wherever one is read for the first time.

Format = Annotated[
    str | None,
    typer.Option("--format", metavar="LAYOUT", help="colmap, nerfstudio or blender.  [default: what the folder holds]"),
]

ColmapModel = Annotated[
    str | None, typer.Option("--model", metavar="DIR", help="COLMAP model inside the scene.  [default: the largest]")
]

Images = Annotated[str | None, typer.Option("--images", metavar="DIR", help="Image folder inside the scene.")]

Masks = Annotated[
    str | None,
    typer.Option(
        "--masks",
        metavar="DIR",
        help="Folder of masks inside the scene, none, or alpha.  [default: the layout's own, or masks/]",
    ),
]

MaxPixels = Annotated[
    int | None,
    typer.Option(
        "--max-pixels", metavar="N", help="Refuse larger photos.  [default: what a quarter of the memory decodes]"
    ),
]

Strict = Annotated[
    bool, typer.Option("--strict", help="Decode every photo before the first step, and refuse damaged ones.")
]

SkipBadImages = Annotated[
    bool, typer.Option("--skip-bad-images", help="Decode every photo first, and leave damaged ones out.")
]

SkipMissing = Annotated[bool, typer.Option("--skip-missing", help="Go on without photos that are not there.")]

AllowOutside = Annotated[
    bool, typer.Option("--allow-outside", help="Read photos that the scene's files place outside its folder.")
]

DropBadPoints = Annotated[bool, typer.Option("--drop-bad-points", help="Leave out points that are NaN or infinite.")]

SceneExtent = Annotated[
    float | None,
    typer.Option(
        "--scene-extent", metavar="SIZE", help="The scene's size in its own units.  [default: from the cameras]"
    ),
]


def data_flags(
    *,
    format: str | None,
    model: str | None,
    images: str | None,
    masks: str | None,
    max_pixels: int | None,
    strict: bool,
    skip_bad_images: bool,
    skip_missing: bool,
    allow_outside: bool,
    drop_bad_points: bool,
    scene_extent: float | None,
) -> dict[str, Any]:
    """The settings that the flags above stand for; None where a flag was not given."""
    return {
        "data.format": format,
        "data.model": model,
        "data.images": images,
        "data.masks": masks,
        "data.max_pixels": max_pixels,
        "data.strict": strict or None,
        "data.skip_bad_images": skip_bad_images or None,
        "data.skip_missing": skip_missing or None,
        "data.allow_outside": allow_outside or None,
        "data.drop_bad_points": drop_bad_points or None,
        "data.scene_extent": scene_extent,
    }
