"""``splat sfm``: images or videos in, a scene with cameras out."""

from __future__ import annotations

import os
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from splatcli.cli import options
from splatcli.cli.console import Output, ProgressBar, format_time
from splatcli.errors import OutputError
from splatcli.output_files import OUTPUT, scene_name
from splatcli.sizes import counted

if TYPE_CHECKING:
    from splatcli.config import DataConfig
    from splatcli.scene.scene import Scene
    from splatcli.sfm.images import SfmInput
    from splatcli.sfm.options import SfmOptions
    from splatcli.sfm.run import SfmResult


@dataclass(frozen=True)
class SfmArguments:
    """The arguments and options of ``splat sfm``."""

    images: Annotated[
        Path, typer.Argument(metavar="IMAGES", help="Folder of images or of videos, with its sub-folders; or a video.")
    ]
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="DIR", help="Folder of the scene.  [default: output/NAME-sfm]"),
    ] = None
    camera_model: Annotated[
        str | None,
        typer.Option(
            "--camera-model",
            metavar="MODEL",
            help="Lens: SIMPLE_RADIAL, OPENCV, RADIAL, PINHOLE, SIMPLE_PINHOLE, OPENCV_FISHEYE, FULL_OPENCV or "
            "THIN_PRISM_FISHEYE.  [default: auto, SIMPLE_RADIAL or the one that predicts held-out observations better]",
        ),
    ] = None
    camera_per: Annotated[
        str | None,
        typer.Option(
            "--camera-per",
            metavar="WHAT",
            help="Images that share a camera: those of a folder, all, or none (image), always of one size and "
            "one focal length.  [default: folder]",
        ),
    ] = None
    matching: Annotated[
        str | None,
        typer.Option(
            "--matching",
            metavar="HOW",
            help="exhaustive: all pairs of images; retrieval: images that look alike; sequential: these and neighbours "
            "in name order.  [default: auto, exhaustive for up to 60 images, else sequential; with --cameras "
            "the images of the nearest poses]",
        ),
    ] = None
    mapper: Annotated[
        str | None,
        typer.Option(
            "--mapper",
            metavar="HOW",
            help="incremental: add image after image; global: all at once (GLOMAP), for many images, less robust.  "
            "[default: incremental]",
        ),
    ] = None
    frames: Annotated[
        int | None,
        typer.Option(
            "--frames",
            metavar="N",
            help="Use N images only, the sharpest of N equal stretches; of a video up to N, none of those in which the "
            "camera stands.  [default: all images; 120 frames of a video, 40 of a 360 degree camera; up to 300 of "
            "several]",
        ),
    ] = None
    max_image_size: Annotated[
        int | None,
        typer.Option(
            "--max-image-size", metavar="N", help="Extract features from images reduced to N pixels.  [default: 1600]"
        ),
    ] = None
    max_features: Annotated[
        int | None,
        typer.Option("--max-features", metavar="N", help="Maximum features per image.  [default: 8192]"),
    ] = None
    masks: Annotated[
        str | None,
        typer.Option(
            "--masks",
            metavar="DIR",
            help="Folder of masks, relative to IMAGES, or none; masked pixels have no features.  [default: masks/ in "
            "IMAGES or beside it]",
        ),
    ] = None
    georeference: Annotated[
        str | None,
        typer.Option(
            "--georeference",
            metavar="HOW",
            help="Align the model with the GPS positions in the EXIF of the images, in metres east, north and up: auto "
            "(if these fix scale and tilt), on or off.  [default: auto]",
        ),
    ] = None
    scale_from: Annotated[
        str | None,
        typer.Option(
            "--scale-from",
            metavar="A,B,LENGTH",
            help="Give the model metres: the cameras of the images A and B are LENGTH metres apart.",
        ),
    ] = None
    gcp: Annotated[
        Path | None,
        typer.Option(
            "--gcp",
            metavar="FILE",
            help="Align the model with ground control points: OpenDroneMap's gcp_list.txt, or LOCAL metres.",
        ),
    ] = None
    cameras: Annotated[
        Path | None,
        typer.Option(
            "--cameras",
            metavar="SCENE",
            help="Keep the cameras of this scene, of any kind that `splat train` reads, and triangulate points only.",
        ),
    ] = None
    nerfstudio: Annotated[
        bool, typer.Option("--nerfstudio", help="Also write transforms.json and sparse_pc.ply, for nerfstudio.")
    ] = False
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", help="Seed of all random numbers.  [default: 42]")
    ] = None
    device: options.Device = "auto"
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace cameras that are already in DIR, and reuse none.")
    ] = False
    json: options.Json = False
    quiet: options.Quiet = False


#: Options of SfmOptions that go to it as they are given.
_GIVEN = (
    *("camera_model", "camera_per", "matching", "mapper", "frames", "max_image_size", "max_features"),
    *("georeference", "scale_from", "seed"),
)


def sfm(args: SfmArguments) -> int:
    """Estimate the cameras of images by structure from motion.

    Prints the folder of the scene: images/ and masks/ (links to the images and their masks), sparse/0/ (a COLMAP model)
    and sfm.json (the report). An existing folder with other files is refused. The result for the same images and
    options is reused. `splat train IMAGES` runs this by itself.

    \b
    Examples:
      splat sfm images/
      splat sfm images/ -o scene/ --camera-model OPENCV
      splat sfm walk.mp4 --frames 200
      splat sfm clips/
      splat sfm flight/ --gcp gcp_list.txt --nerfstudio
      splat sfm scan/ --cameras scan/ -o scan-with-points/
      splat sfm images/ --json | tail -1
    """
    from splatcli.cli.console import open_output

    given: dict[str, Any] = {name: getattr(args, name) for name in _GIVEN}
    with open_output(json=args.json, quiet=args.quiet) as out:
        from splatcli.scene.control_points import read_control_points
        from splatcli.sfm.images import find_input
        from splatcli.sfm.options import SfmOptions

        if args.images.is_dir():  # a walk through a large tree takes minutes
            out.message(f"looking for images and videos in {args.images}")
        inputs = None
        if args.cameras is None:
            _note_cameras(args.images, out)
        else:
            from splatcli.config import DataConfig
            from splatcli.scene.read import read_scene
            from splatcli.sfm.triangulate import known_cameras

            scene = read_scene(args.cameras, DataConfig(resolution=1))
            inputs = find_input(args.images, args.masks)
            given["cameras"] = known_cameras(scene, inputs)
            if left_out := len(inputs.names) - len(given["cameras"]):
                what = f"not among the views of {args.cameras}"
                out.note(f"{counted(left_out, f'image is {what}', f'images are {what}')}, and left out")
        if args.gcp is not None:
            given["control_points"] = read_control_points(args.gcp).as_dict()
        chosen = SfmOptions(**{name: value for name, value in given.items() if value is not None})
        if args.nerfstudio:
            from splatcli.sfm.nerfstudio import check_lens_known, write_transforms

            check_lens_known(chosen.camera_model)
        if inputs is None:  # after the options, whose mistakes are found sooner
            inputs = find_input(args.images, args.masks)
        result = find_cameras(inputs, chosen, place=args.output, overwrite=args.overwrite, device=args.device, out=out)
        facts = {name: value for name, value in result.facts.items() if name != "key"}
        if args.nerfstudio:
            facts["transforms"] = write_transforms(result.folder)
        out.result({"path": result.folder, "reused": result.reused, **facts}, [result.folder])
    return 0


def _note_cameras(images: Path, out: Output) -> None:
    """Print a note where the folder of the images has cameras, which are estimated anew."""
    from splatcli.errors import SceneError
    from splatcli.scene.read import camera_files

    try:
        files = camera_files(images) if images.is_dir() else None
    except (OSError, SceneError):  # whatever is wrong with those cameras
        return
    if files is not None:
        scene = shlex.quote(str(images))
        out.note(
            f"{images} has cameras ({files}), and others are estimated here; splat train {scene} takes those "
            f"that it has, splat sfm {scene} --cameras {scene} triangulates points with them"
        )


#: Seconds between two plain lines of progress, and between two JSON objects.
_PLAIN_EVERY, _JSON_EVERY = 10.0, 1.0

#: Phase -> what is counted.
_COUNTED = {
    "frames": "frames read",
    "upright copies": "images",
    "features": "images",
    "matching": "pairs",
    "mapping": "images registered",
    "more frames": "frames read",
    "more features": "images",
    "more matching": "pairs",
    "more mapping": "images registered",
    "matching again": "pairs",
    "matching more": "pairs",
    "mapping again": "images registered",
    "mapping neighbours": "images registered",
    "mapping as fisheye": "images registered",
    "lens": "adjustments",
    "triangulation": "models",
    "masks": "masks",
}


def find_cameras(
    inputs: SfmInput,
    chosen: SfmOptions,
    *,
    device: str,
    out: Output,
    place: Path | None = None,
    beside: Path = OUTPUT,
    overwrite: bool = False,
    automatic: bool = False,
    seconds: float | None = None,
) -> SfmResult:
    """Run structure from motion with progress, and report on stderr. Arguments as of run_sfm().

    seconds: after which TooSlowError is raised where the rest takes longer; None: no limit.
    """
    from splatcli.sfm.points_request import Deadline
    from splatcli.sfm.report import doubts, lines, notes
    from splatcli.sfm.run import gpu_wanted, run_sfm

    gpu = gpu_wanted(device)
    with _PhaseProgress(out) as progress:
        report = progress.report if seconds is None else Deadline(seconds, progress.report)
        result = run_sfm(
            inputs,
            chosen,
            place=place,
            beside=beside,
            overwrite=overwrite,
            gpu=gpu,
            progress=report,
            automatic=automatic,
        )
    folder = result.folder
    if result.reused:
        what = "points" if chosen.cameras is not None else "cameras"
        out.message(f"{what} found before are used: {_relative(folder)}")
        if result.is_earlier and chosen.cameras is None:
            anew = shlex.join(["splat", "sfm", str(inputs.path), "-o", str(folder), "--overwrite"])
            out.note(f"an earlier version found them; {anew} finds them anew, in another frame")
    else:
        out.message("\n".join(lines(result.facts)))
    out.note(*notes(result.facts))
    for doubt in doubts(result.facts):
        out.warn(doubt)
    return result


def scene_with_cameras(images: Path, masks: str | None, *, beside: Path, device: str, out: Output) -> Path:
    """Return the scene made of images without cameras or videos. device: that of training. beside: as of run_sfm()."""
    from splatcli.sfm.images import find_input
    from splatcli.sfm.options import SfmOptions

    out.message(f"{scene_name(images)} has no cameras: splat sfm estimates them first")
    inputs = find_input(images, masks)
    return find_cameras(inputs, SfmOptions(), beside=beside, device=_sfm_device(device), out=out).folder


def _sfm_device(device: str) -> str:
    """Return the device of structure from motion, given that of training: pycolmap may lack a GPU that torch has."""
    return "cpu" if device == "cpu" else "auto"


def scene_with_points(
    scene: Scene, data: DataConfig, *, beside: Path, device: str, out: Output, seconds: float | None
) -> Path | None:
    """Return the folder of points triangulated with the cameras of a scene that has none.

    seconds: that it may take. None where images, cameras or time give too few, or where the folder cannot be made; a
    message says so. The other arguments are those of scene_with_cameras().
    """
    from splatcli.errors import ResourceError, SceneError
    from splatcli.sfm.options import SfmOptions
    from splatcli.sfm.points_request import LEAST_POINTS, TooSlowError, points_request, with_fewer_features
    from splatcli.sfm.run import made_before

    given_as = shlex.quote(data.scene)
    command = f"splat sfm {given_as} --cameras {given_as}"
    began = time.monotonic()
    try:
        inputs, chosen, suffices = points_request(scene, data, seconds)
        if not suffices and made_before(inputs, chosen, beside) is None:
            out.note(
                f"training begins with random points, because the time is too short for others; {command} "
                "triangulates better ones (docs/quality.md)"
            )
            return None
        out.message(
            "the scene has no points: splat sfm triangulates them first, and keeps them beside the run for later "
            "ones; --init random starts without"
        )
        while True:
            left = None if seconds is None else seconds - (time.monotonic() - began)
            try:
                result = find_cameras(
                    inputs,
                    chosen,
                    device=_sfm_device(device),
                    out=out,
                    beside=beside,
                    automatic=True,
                    seconds=left,
                )
                break
            except TooSlowError as slow:
                assert seconds is not None
                fewer = with_fewer_features(chosen, slow, seconds - (time.monotonic() - began))
                if fewer is None:
                    raise
                chosen = fewer
    except (SceneError, ResourceError, OutputError) as error:
        out.warn(f"training begins with random points, because no others can be triangulated: {error.what}")
        return None
    if chosen.max_image_size < SfmOptions().max_image_size and not result.reused:
        reason = "training images of this size" if seconds is None else "the time and training images of this size"
        out.note(
            f"features were found at {chosen.max_image_size} pixels, for {reason}; {command} finds more points, "
            "for --points"
        )
    if result.facts["points"] < LEAST_POINTS:
        out.warn(f"training begins with random points: only {result.facts['points']} could be triangulated")
        return None
    return result.folder


def lacks_cameras(path: Path, data: DataConfig) -> bool:
    """Return whether ``path`` is a video or holds images or videos only.

    False for one that cannot be read, which is found later.
    """
    from splatcli.scene.read import has_images_only
    from splatcli.sfm.images import is_video

    if data.format or data.model or data.images:
        return False  # the layout is given
    try:
        return is_video(path) or (path.is_dir() and has_images_only(path))
    except OSError:
        return False


def _relative(folder: Path) -> str:
    return os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder)


class _PhaseProgress(ProgressBar):
    """A bar for each phase on a terminal, a line every ten seconds in a log, an object a second with --json."""

    def __init__(self, out: Output) -> None:
        super().__init__(out)
        self._last = (0.0, "")

    def report(self, phase: str, done: int, total: int) -> None:
        """Show how far a phase is."""
        if self.on_terminal:
            self.update(phase, done, total)
            return
        now, (then, before) = time.monotonic(), self._last
        rate = self._rate(phase, now, done)
        every = _JSON_EVERY if self._out.json else _PLAIN_EVERY
        if done < total and phase == before and now - then < every:
            return
        self._last = (now, phase)
        self._out.event("sfm", {"phase": phase, "done": done, "total": total})
        if not self._out.json:
            left = f"  {format_time((total - done) / rate)} left" if rate is not None and done < total else ""
            self._out.message(f"{phase}: {done} of {total} {_COUNTED[phase]}{left}")
