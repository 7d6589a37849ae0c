"""``splat sfm``: photos or a video in, a scene with cameras out."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from splatcli.cli import options
from splatcli.cli.console import Output
from splatcli.cli.model import OUTPUT
from splatcli.errors import OutputError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from splatcli.config import DataConfig
    from splatcli.sfm.options import SfmOptions
    from splatcli.sfm.run import SfmResult


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
    from splatcli.cli.console import open_output

    given: dict[str, Any] = {
        "camera_model": camera_model,
        "camera_per": camera_per,
        "matching": matching,
        "frames": frames,
        "max_image_size": max_image_size,
        "max_features": max_features,
        "seed": seed,
    }
    with open_output(json=json, quiet=quiet) as out:
        from splatcli.sfm.options import SfmOptions

        chosen = SfmOptions(**{name: value for name, value in given.items() if value is not None})
        solved = cameras_of(photos, chosen, place=output, overwrite=overwrite, device=device, masks=masks, out=out)
        facts = {name: value for name, value in solved.facts.items() if name != "key"}
        out.result({"path": solved.folder, "reused": solved.reused, **facts}, [solved.folder])
    return 0


#: Seconds between two plain lines of progress, and between two JSON objects.
_PLAIN_EVERY, _JSON_EVERY = 10.0, 1.0

#: Phase -> what is counted.
_COUNTED = {"frames": "frames looked at", "features": "photos", "matching": "pairs", "mapping": "photos placed"}


def cameras_of(
    photos: Path,
    chosen: SfmOptions,
    *,
    place: Path | None = None,
    beside: Path = OUTPUT,
    overwrite: bool = False,
    device: str = "auto",
    masks: str | None = None,
    out: Output,
) -> SfmResult:
    """Structure from motion with progress, and its report on stderr. Arguments as for run_sfm().

    masks: see find_footage().
    """
    from splatcli.sfm.images import find_footage
    from splatcli.sfm.run import doubts, gpu_wanted, lines, run_sfm

    footage = find_footage(photos, masks)
    gpu = gpu_wanted(device)
    with _Teller(out) as teller:
        solved = run_sfm(footage, chosen, place=place, beside=beside, overwrite=overwrite, gpu=gpu, tell=teller.tell)
    folder = solved.folder
    if solved.reused:
        out.note(f"cameras found before are used: {_shown(folder)}")
    else:
        out.note("\n".join(lines(solved.facts)))
    for doubt in doubts(solved.facts):
        out.warn(doubt)
    return solved


def scene_of(path: Path, data: DataConfig, *, run: Path, overwrite: bool, device: str, out: Output) -> Path:
    """The scene to train on: ``path`` itself, or for photos without cameras, or a video, the one made of them.

    run: the folder that the run is going to be in. Raises OutputError, before the work, when it will be refused.
    """
    from splatcli.checkpoint.run_dir import has_content
    from splatcli.scene.read import has_photos_only
    from splatcli.sfm.images import is_video
    from splatcli.sfm.options import SfmOptions

    if data.format or data.model or data.images:
        return path  # says what is there
    try:
        lacks_cameras = is_video(path) or (path.is_dir() and has_photos_only(path))
    except OSError:
        return path  # whoever reads the scene has the words for it
    if not lacks_cameras:
        return path
    if run.is_dir() and has_content(run) and not overwrite:
        raise OutputError(
            "the output folder exists and is not empty",
            where=run,
            remedy="--overwrite moves a run aside, or choose another -o",
        )
    out.note(f"{path.resolve().name} has no cameras: they are found first, as splat sfm does")
    gpu = "cpu" if device == "cpu" else "auto"
    return cameras_of(path, SfmOptions(), beside=run.parent, device=gpu, masks=data.masks, out=out).folder


def _shown(folder: Path) -> str:
    return os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder)


class _Teller:
    """A bar for each phase on a terminal, a line now and then in a log, an object a second with --json."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._last = (0.0, "")

    def __enter__(self) -> Self:
        if not self._out.json and not self._out.quiet and sys.stderr is not None and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description:<9}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bars = Progress(*columns, console=Console(stderr=True))
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def tell(self, phase: str, done: int, total: int) -> None:
        """How far a phase is."""
        if self._bars is not None:
            if phase not in self._tasks:
                self._tasks[phase] = self._bars.add_task(phase, total=total)
            self._bars.update(self._tasks[phase], completed=done, total=total)
            return
        now, (then, before) = time.monotonic(), self._last
        every = _JSON_EVERY if self._out.json else _PLAIN_EVERY
        if done < total and phase == before and now - then < every:
            return
        self._last = (now, phase)
        self._out.event("sfm", {"phase": phase, "done": done, "total": total})
        if not self._out.json:
            self._out.note(f"{phase}: {done} of {total} {_COUNTED[phase]}")
