"""Options that several commands share, so that they are spelt and explained the same everywhere."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from splatcli.errors import UsageError

if TYPE_CHECKING:
    from splatcli.checkpoint.foreign.imported import ImportOptions as Taken

Json = Annotated[bool, typer.Option("--json", help="One JSON object per line on stdout instead of plain lines.")]

Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Nothing on stderr but errors.")]

Model = Annotated[
    Path | None,
    typer.Argument(
        metavar="[MODEL]",
        help="Checkpoint, file of splats (.ply, .spz, .sog, ...) or run folder, also of other programs. Without it: "
        "the path that comes through a pipe, else the newest run under output/.",
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

#: Names of one option; under the second one the processors are no answer.
RANKS = ("--ranks", "--gpus")

Ranks = Annotated[
    int | None,
    typer.Option(
        *RANKS,
        metavar="N",
        min=1,
        help="Share the work among N processes of this machine: a GPU each, or with --device cpu its processors.",
    ),
]

Distributed = Annotated[
    str | None,
    typer.Option(
        "--distributed",
        metavar="MODE",
        help="Share the views of a batch among processes: those of --ranks, or those that torchrun has started. "
        "replicated: each holds all Gaussians; sharded: each holds a part of them.  [default with --ranks: replicated]",
    ),
]

Data = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", help="Where the scene is now, if it is not where it was trained."),
]

VramBudget = Annotated[
    str | None,
    typer.Option(
        "--vram-budget",
        metavar="SIZE",
        help="Take no more memory than this, as 8GiB or 800M: of the GPU, or of the machine with --device cpu; growth "
        "stops where it is used up.  [default: what is free]",
    ),
]

Offload = Annotated[
    bool,
    typer.Option(
        "--offload",
        help="For scenes that do not fit the memory: SH coefficients and their moments, three quarters of a Gaussian, "
        "lie on the host while a GPU trains, and in a file in the run folder with --device cpu. Slower; the same bits.",
    ),
]

Port = Annotated[
    int | None,
    typer.Option(
        "--port",
        metavar="N",
        min=0,
        max=65535,
        help="Port of the page; 0: any that is free.  [default: the first free one from 8080 on]",
    ),
]

Host = Annotated[
    str,
    typer.Option("--host", metavar="ADDRESS", help="Where the page is served; 0.0.0.0: to all who reach this machine."),
]

Viewer = Annotated[
    bool, typer.Option("--viewer", help="Show the run in a browser while it trains, at the address that is told.")
]

ViewerPort = Annotated[
    int | None,
    typer.Option(
        "--viewer-port",
        metavar="N",
        min=0,
        max=65535,
        help="The same at this port; 0: any that is free.  [default: the first free one from 8080 on]",
    ),
]

ViewerHost = Annotated[
    str | None,
    typer.Option(
        "--viewer-host",
        metavar="ADDRESS",
        help="The same for others too; 0.0.0.0: all who reach this machine.  [default: 127.0.0.1]",
    ),
]

# How a scene is read: the same flags wherever one is read for the first time.

Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="LAYOUT",
        help="colmap, nerfstudio, blender or that of a plug-in.  [default: what the folder holds]",
    ),
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

MaskMode = Annotated[
    str | None,
    typer.Option(
        "--mask-mode",
        metavar="MODE",
        help="What masks hide: ignore takes no part in anything; transparent is empty, and shows the background.  "
        "[default: ignore]",
    ),
]

Depths = Annotated[
    str | None,
    typer.Option(
        "--depths",
        metavar="DIR",
        help="Hold depths to the maps in this folder inside the scene, one a photo (PNG, TIFF, .npy or .npz): z along "
        "the optical axis, 0 where unknown.",
    ),
]

DepthLoss = Annotated[
    bool,
    typer.Option(
        "--depth-loss",
        help="Hold depths to what the scene says: maps that transforms.json names, else the points that each photo is "
        "known to see.",
    ),
]

DepthScale = Annotated[
    float | None,
    typer.Option(
        "--depth-scale",
        metavar="X",
        help="Scene units that 1 in a depth map is.  [default: depth_unit_scale_factor of transforms.json, else 0.001 "
        "for whole numbers and 1 for others]",
    ),
]

CacheBudget = Annotated[
    str | None,
    typer.Option(
        "--cache-budget",
        metavar="SIZE",
        help="Keep decoded photos in so much memory, as 8GiB or 800M, and decode the others each time.  [default: a "
        "quarter of it]",
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
    mask_mode: str | None,
    depths: str | None,
    depth_loss: bool,
    depth_scale: float | None,
    max_pixels: int | None,
    strict: bool,
    skip_bad_images: bool,
    skip_missing: bool,
    allow_outside: bool,
    drop_bad_points: bool,
    scene_extent: float | None,
) -> dict[str, Any]:
    """The settings that the flags above stand for; None where a flag was not given."""
    if depth_loss and depths is not None:
        raise UsageError(
            "--depths and --depth-loss exclude each other",
            remedy="give one: --depths DIR holds to the maps in it, --depth-loss to what the scene itself says",
        )
    return {
        "data.format": format,
        "data.model": model,
        "data.images": images,
        "data.masks": masks,
        "data.mask_mode": mask_mode,
        "data.depths": "auto" if depth_loss else depths,
        "data.depth_scale": depth_scale,
        "data.max_pixels": max_pixels,
        "data.strict": strict or None,
        "data.skip_bad_images": skip_bad_images or None,
        "data.skip_missing": skip_missing or None,
        "data.allow_outside": allow_outside or None,
        "data.drop_bad_points": drop_bad_points or None,
        "data.scene_extent": scene_extent,
    }


class Space(Enum):
    """What ``--param-space`` may say."""

    RAW = "raw"
    ACTIVATED = "activated"


ParamSpace = Annotated[
    Space | None,
    typer.Option(
        "--param-space",
        metavar="SPACE",
        help="Of a model of another program: raw takes its scales for logarithms and its opacities for logits whatever "
        "they look like, activated takes logarithms and logits of them.  [default: told from the values, refused in "
        "doubt]",
        show_default=False,
    ),
]

AllowOlder = Annotated[
    bool,
    typer.Option(
        "--allow-older",
        help="Of a run whose newest checkpoint is damaged, take the newest that is sound instead of ending with 11.",
    ),
]
Lenient = Annotated[bool, typer.Option("--lenient", help="Ignore what follows the data of a file of splats.")]

DropNonfinite = Annotated[
    bool,
    typer.Option("--drop-nonfinite", help="Leave out Gaussians with NaN or infinite values instead of refusing them."),
]


def import_options(space: Space | None, lenient: bool, drop_nonfinite: bool) -> Taken:
    """These three options as the readers of models take them."""
    from splatcli.checkpoint.activation_check import Space as Known
    from splatcli.checkpoint.foreign.imported import ImportOptions

    return ImportOptions(None if space is None else Known(space.value), lenient, drop_nonfinite)


def check_import_options(space: Space | None, lenient: bool, drop_nonfinite: bool, *, given: bool) -> None:
    """Raises UsageError when one of them is there, but no model of another program that it could concern."""
    named = {"--param-space": space, "--lenient": lenient, "--drop-nonfinite": drop_nonfinite}
    for flag, value in named.items():
        if value and not given:
            raise UsageError("no model is named that this could concern", where=flag, remedy="--init MODEL")


def blocks(text: str) -> str:
    """What ``--blocks`` says. Raises UsageError."""
    from splatcli.scene.partition import parse_blocks

    try:
        strips, columns = parse_blocks(text)
    except ValueError as error:
        raise UsageError(str(error), where="--blocks", remedy="e.g. --blocks 2x3") from None
    return f"{strips}x{columns}"


def check_blocks(output: Path | None, *, overwrite: bool, max_time: str | None, block: int | None) -> None:
    """Raises UsageError where blocks are asked for with what they cannot be trained with."""
    if block is not None and output is None:
        raise UsageError("jobs of one scene need one folder", where="--block", remedy="name it with -o DIR")
    if overwrite:
        raise UsageError(
            "blocks that are done stay, and the others go on", where="--overwrite", remedy="leave it out, or another -o"
        )
    if max_time is not None:
        raise UsageError("each block takes its time", where="--max-time", remedy="give --iterations")


def cap(text: str | None) -> int | str | None:
    """What ``--cap-max`` says: a number, "auto" or "none". Raises UsageError."""
    if text in (None, "auto", "none"):
        return text
    try:
        return int(text)
    except ValueError:
        raise UsageError(
            f"{text!r} is no number of Gaussians", where="--cap-max", remedy="e.g. 500000, auto or none"
        ) from None


def time_limit(text: str) -> float:
    """Seconds of ``--max-time``. Raises UsageError."""
    from splatcli.train.step_time import seconds_of

    try:
        return seconds_of(text)
    except ValueError:
        raise UsageError(f"{text!r} is no length of time", where="--max-time", remedy="e.g. 60s, 5m or 1.5h") from None


def without_ranks(arguments: list[str]) -> list[str]:
    """A command line that asks for ranks, without that and without how they share the work."""
    kept = []
    pending = iter(arguments)
    for word in pending:
        if word in (*RANKS, "--distributed"):
            next(pending, None)
        elif not word.startswith(tuple(f"{name}=" for name in (*RANKS, "--distributed"))):
            kept.append(word)
    return kept


def name_of_ranks(arguments: list[str]) -> str:
    """The one of its names under which a command line asks for ranks."""
    return next((name for name in RANKS for word in arguments if word.split("=")[0] == name), RANKS[0])
