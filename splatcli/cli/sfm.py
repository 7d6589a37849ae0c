"""``splat sfm``: photos or a video in, a scene with cameras out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from splatcli.cli import options


def sfm(
    photos: Annotated[
        Path, typer.Argument(metavar="PHOTOS", help="Folder of photos, with its sub-folders; or a video.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="DIR", help="Folder of the scene.  [default: output/NAME-sfm]"),
    ] = None,
    camera_model: Annotated[
        str | None,
        typer.Option(
            "--camera-model",
            metavar="MODEL",
            help="Lens: SIMPLE_RADIAL, OPENCV, RADIAL, PINHOLE, SIMPLE_PINHOLE or OPENCV_FISHEYE.  "
            "[default: SIMPLE_RADIAL]",
        ),
    ] = None,
    camera_per: Annotated[
        str | None,
        typer.Option(
            "--camera-per",
            metavar="WHAT",
            help="Photos that share a lens: of a folder, image (each has its own) or all; of one size and one zoom "
            "always.  [default: folder]",
        ),
    ] = None,
    matching: Annotated[
        str | None,
        typer.Option(
            "--matching",
            metavar="HOW",
            help="exhaustive: all pairs; retrieval: photos that look alike; sequential: neighbours in name order as "
            "well.  [default: auto, exhaustive for up to 200 photos, else sequential]",
        ),
    ] = None,
    frames: Annotated[
        int | None,
        typer.Option(
            "--frames",
            metavar="N",
            help="Take only N, the sharpest of as many equal stretches.  [default: all photos, 120 frames of a video]",
        ),
    ] = None,
    max_image_size: Annotated[
        int | None,
        typer.Option(
            "--max-image-size", metavar="N", help="Look for features in photos reduced to N pixels.  [default: 1600]"
        ),
    ] = None,
    max_features: Annotated[
        int | None, typer.Option("--max-features", metavar="N", help="Features kept of a photo.  [default: 8192]")
    ] = None,
    masks: Annotated[
        str | None,
        typer.Option(
            "--masks",
            metavar="DIR",
            help="Folder of masks as seen from PHOTOS, or none; what they hide gives no features.  [default: masks/ in "
            "PHOTOS or beside it]",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of all random choices.  [default: 42]")] = None,
    device: options.Device = "auto",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace cameras that are already in DIR, and never reuse any.")
    ] = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Find the cameras of photos by structure from motion.

    Prints the folder of the scene: images/ and masks/ (the photos and their masks, linked), sparse/0/ (a COLMAP model)
    and sfm.json (the report). An existing folder with anything else in it is refused.
    The same photos and options are solved once. `splat train PHOTOS` does this by itself.

    \b
    Examples:
      splat sfm photos/
      splat sfm photos/ -o scene/ --camera-model OPENCV
      splat sfm walk.mp4 --frames 200
      splat sfm photos/ --json | tail -1
    """
    from splatcli.cli.find_cameras import cameras_of
    from splatcli.cli.output import speaking

    given: dict[str, Any] = {
        "camera_model": camera_model,
        "camera_per": camera_per,
        "matching": matching,
        "frames": frames,
        "max_image_size": max_image_size,
        "max_features": max_features,
        "seed": seed,
    }
    with speaking(json=json, quiet=quiet) as out:
        from splatcli.sfm.options import SfmOptions

        chosen = SfmOptions(**{name: value for name, value in given.items() if value is not None})
        solved = cameras_of(photos, chosen, place=output, overwrite=overwrite, device=device, masks=masks, out=out)
        facts = {name: value for name, value in solved.facts.items() if name != "key"}
        out.result({"path": solved.folder, "reused": solved.reused, **facts}, [solved.folder])
    return 0
