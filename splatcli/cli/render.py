"""``splat render``: a model and cameras in, pictures or a video out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from splatcli.cli import options
from splatcli.errors import UsageError

if TYPE_CHECKING:
    from splatcli.cli.model import Model
    from splatcli.render.selection import PathOptions, Views
    from splatcli.scene.scene import Scene

#: Words of --views that are never the name of a model.
_NAMES = ("test", "train", "all", "orbit", "ellipse", "spiral", "interpolate")


class RenderCommand(TyperCommand):
    """Lets ``--views`` stand alone for ``--views test``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _complete_views(args))


def _complete_views(args: list[str]) -> list[str]:
    """``--views`` takes the next word, unless there is none, it is an option, or it is a model that exists."""
    full: list[str] = []
    for position, arg in enumerate(args):
        full.append(arg)
        if arg == "--":
            return full + args[position + 1 :]
        if arg == "--views":
            following = args[position + 1] if position + 1 < len(args) else "-"
            is_views = following in _NAMES or following.lower().endswith(".json")
            if following.startswith("-") or (not is_views and Path(following).exists()):
                full.append("test")
    return full


def render(
    model: options.Model = None,
    views: Annotated[
        str,
        typer.Option(
            "--views",
            metavar="[VIEWS]",
            help="test (also when nothing follows), train, all; a path: orbit, ellipse, spiral, interpolate; or a "
            ".json with cameras.",
            show_default=False,
        ),
    ] = "test",
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="PLACE",
            help="Folder for the pictures; x.mp4 for a video; x.png or x.exr for a single view; - for stdout.  "
            "[default: renders/ in the run folder]",
        ),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="png, exr, mp4, or raw: RGB frames, 8 bits, for a pipe.  [default: as -o ends, else png; raw for "
            "several views on stdout]",
        ),
    ] = None,
    what: Annotated[
        str | None,
        typer.Option(
            "--what",
            metavar="KINDS",
            help="rgb, depth, alpha, normals, photo, error: one or several with commas, each in a folder of its own, "
            "in one EXR file, or side by side.  [default: rgb; rgb,alpha,depth as EXR]",
        ),
    ] = None,
    side_by_side: Annotated[
        bool,
        typer.Option(
            "--side-by-side",
            help="One picture a view with all of --what from left to right, as videos have them.  [default: several "
            "pictures; photo,rgb,error when --what is not given]",
        ),
    ] = False,
    size: Annotated[
        str | None,
        typer.Option(
            "--size",
            metavar="WxH",
            help="Size of the pictures; the vertical field of view stays.  [default: that of the cameras]",
        ),
    ] = None,
    background: Annotated[
        str | None,
        typer.Option(
            "--background", metavar="COLOUR", help="black, white, #rrggbb or r,g,b.  [default: as trained, else black]"
        ),
    ] = None,
    depth_range: Annotated[
        str | None,
        typer.Option(
            "--depth-range",
            metavar="NEAR,FAR",
            help="Depths that are red and violet, scene units.  [default: the 2nd and 98th percentile over the views]",
        ),
    ] = None,
    frames: Annotated[
        int | None,
        typer.Option(
            "--frames",
            metavar="N",
            min=1,
            max=108_000,
            help="Length of a path.  [default: 120; interpolate: 10 from camera to camera, 120 at least]",
        ),
    ] = None,
    fps: Annotated[
        float | None,
        typer.Option(
            "--fps",
            metavar="F",
            min=0.01,
            max=1000.0,
            help="Frames a second of a video.  [default: as the camera file says, else 30]",
        ),
    ] = None,
    loop: Annotated[bool, typer.Option("--loop", help="interpolate ends where it began; the other paths do.")] = False,
    order: Annotated[
        str | None,
        typer.Option(
            "--order",
            metavar="ORDER",
            help="interpolate goes from camera to camera by name, or to the nearest that is left.  [default: name]",
        ),
    ] = None,
    focus: Annotated[
        str | None,
        typer.Option(
            "--focus",
            metavar="X,Y,Z",
            help="What orbit, ellipse and spiral look at.  [default: the point nearest to all optical axes]",
        ),
    ] = None,
    cameras: Annotated[
        Path | None,
        typer.Option(
            "--cameras", metavar="JSON", help="Cameras that paths are made from, for a model that carries none."
        ),
    ] = None,
    save_cameras: Annotated[
        Path | None,
        typer.Option(
            "--save-cameras",
            metavar="JSON",
            help="Also write the cameras of the frames, for --views; as nerfstudio's camera path where the name ends "
            "in camera_path.json.",
        ),
    ] = None,
    data: options.Data = None,
    allow_older: options.AllowOlder = False,
    param_space: options.ParamSpace = None,
    lenient: options.Lenient = False,
    drop_nonfinite: options.DropNonfinite = False,
    device: options.Device = "auto",
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Render views of a model as pictures, or a flight through it as a video.

    Prints the paths of what it wrote, one a line. A checkpoint carries its cameras; a PLY or a model of another program
    needs a file of them, or the scene with --data. Where the photos are at hand, PSNR and SSIM are told on stderr.
    docs/cameras.md has the paths and camera files, and what each kind of picture shows.

    \b
    Examples:
      splat render --views
      splat render output/scene --views all -o pictures --what rgb,depth,normals
      splat render output/scene --views test -o compare --side-by-side
      splat render output/scene --views orbit -o orbit.mp4 --size 1280x720
      splat render output/scene --views interpolate --loop --what rgb,depth -o tour.mp4
      splat render output/scene --views camera_path.json -o film.mp4
      splat render output/scene --views orbit -o orbit.mp4 --save-cameras orbit.camera_path.json
      splat render output/scene --views test --format exr --what rgb,alpha,depth
      splat render point_cloud.ply --views cameras.json --background white
      splat render point_cloud.ply --views ellipse --cameras cameras.json -o ellipse.mp4
      splat render chkpnt30000.pth --data scene/ --views
      splat render --views orbit --size 640x480 -o - | ffmpeg -f rawvideo -pix_fmt rgb24 -s 640x480 -i - orbit.webm
      splat train scene/ -q | splat render --views
    """
    from splatcli.cli.console import open_output, stdout_or
    from splatcli.cli.model import find_model, load_model
    from splatcli.cli.render_views import RenderOptions, render_views
    from splatcli.native.backend import resolve_device
    from splatcli.render.images import parse_background
    from splatcli.render.view_renderer import parse_kinds, parse_range, parse_size

    output = None if output is None else stdout_or(output)
    with open_output(json=json, quiet=quiet) as out:
        opts = RenderOptions(
            output=output,
            format=format,
            kinds=parse_kinds(what) if what is not None else None,
            side_by_side=side_by_side,
            size=parse_size(size) if size is not None else None,
            background=parse_background(background) if background is not None else None,
            depth_range=parse_range(depth_range) if depth_range is not None else None,
            fps=fps,
            save_cameras=save_cameras,
            data=data,
        )
        path_options = _path_options(views, frames, loop, order, focus)
        if cameras is not None and views not in _NAMES[3:]:
            raise UsageError("only paths are made from cameras", where="--cameras", remedy=f"--views {cameras}")
        if json and str(output) == "-":
            raise UsageError("--json and -o - both want stdout", where="-o", remedy="leave one out")
        wanted = resolve_device(device)
        path = find_model(model, out=out, allow_older=allow_older)
        import_options = options.import_options(param_space, lenient, drop_nonfinite)
        loaded = load_model(
            path,
            wanted,
            import_options=import_options,
            cameras=lambda: _views_of(None, views, data, cameras, path_options)[0].cameras,
            echo=out.note,
        )
        chosen, scene = _views_of(loaded, views, data, cameras, path_options)
        render_views(loaded, chosen, scene, opts, out)
    return 0


def _path_options(views: str, frames: int | None, loop: bool, order: str | None, focus: str | None) -> PathOptions:
    """How a path is flown. Raises UsageError for what does not concern these views."""
    from splatcli.render.selection import PATHS, PathOptions
    from splatcli.render.view_renderer import parse_numbers

    around = tuple(name for name in PATHS if name != "interpolate")
    for flag, given, concerns in (
        ("--frames", frames, PATHS),
        ("--loop", loop, PATHS),
        ("--order", order, ("interpolate",)),
        ("--focus", focus, around),
    ):
        if given and views not in concerns:
            raise UsageError(
                f"it does not concern --views {views}", where=flag, remedy=f"with --views {' or '.join(concerns)}"
            )
    if order not in (None, "name", "nearest"):
        raise UsageError(f"{order!r} is no order", where="--order", remedy="name or nearest")
    point = None
    if focus is not None:
        x, y, z = parse_numbers(focus, 3, "--focus", "a point in scene units, as 0.5,-1,3")
        point = (x, y, z)
    return PathOptions(frames, loop, order == "nearest", point)


def _views_of(
    model: Model | None, views: str, data: Path | None, cameras: Path | None, path_options: PathOptions
) -> tuple[Views, Scene | None]:
    """The views to render, and the scene that they are from when it is not that of the model's own run.

    model: None where it is not read yet; only a checkpoint of ours carries cameras.
    """
    from dataclasses import replace

    from splatcli.config import DataConfig
    from splatcli.render.camera_files import read_cameras
    from splatcli.render.images import median_distance
    from splatcli.render.selection import select_views
    from splatcli.scene.read import read_scene

    if model is not None:
        gaussians = model.gaussians
        path_options = replace(path_options, distance=lambda camera: median_distance(gaussians, camera))
    if cameras is not None:
        given = read_cameras(cameras)
        return select_views(views, given, range(len(given)), [], path_options), None
    if model is not None and model.checkpoint is not None:
        own = model.checkpoint
        return select_views(views, own.refined_cameras(), own.train, own.test, path_options), None
    if data is None or views.lower().endswith(".json"):
        return select_views(views, [], [], [], path_options), None
    scene = read_scene(data, DataConfig())
    return select_views(views, scene.cameras, scene.train, scene.test, path_options), scene
