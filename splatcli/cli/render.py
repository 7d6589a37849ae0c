"""``splat render``: renders views of a model to images, EXR files, a video or a stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from splatcli.cli import options
from splatcli.errors import UsageError

if TYPE_CHECKING:
    from splatcli.cli.model import Model
    from splatcli.render.selection import PathOptions, Views
    from splatcli.scene.scene import Scene

#: Words of --views that are never the name of a model.
_NAMES = ("test", "train", "all", "orbit", "ellipse", "spiral", "interpolate")


class RenderCommand(options.Command):
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


@dataclass(frozen=True)
class RenderArguments:
    """The arguments and options of ``splat render``."""

    model: options.Model = None
    views: Annotated[
        str,
        typer.Option(
            "--views",
            metavar="[VIEWS]",
            help="test (also when nothing follows), train, all; a path: orbit, ellipse, spiral, interpolate; or a "
            ".json with cameras.",
            show_default=False,
        ),
    ] = "test"
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="PLACE",
            help="Folder for the images; x.mp4 for a video; x.png or x.exr for a single view; - for stdout.  "
            "[default: renders/ in the run folder]",
        ),
    ] = None
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="png, exr, mp4, or raw: RGB frames, 8 bits, for a pipe.  [default: as -o ends, else png; raw for "
            "several views on stdout]",
        ),
    ] = None
    what: Annotated[
        str | None,
        typer.Option(
            "--what",
            metavar="KINDS",
            help="rgb, depth, alpha, normals, photo (the image of the scene), error: one or several with commas, each "
            "in its own folder, in one EXR file, or side by side.  [default: rgb; rgb,alpha,depth as EXR]",
        ),
    ] = None
    side_by_side: Annotated[
        bool,
        typer.Option(
            "--side-by-side",
            help="Write one image per view with all of --what from left to right, as in videos.  [default: several "
            "images; photo,rgb,error without --what]",
        ),
    ] = False
    size: Annotated[
        str | None,
        typer.Option(
            "--size",
            metavar="WxH",
            help="Size of the images; the vertical field of view stays.  [default: that of the cameras]",
        ),
    ] = None
    background: Annotated[
        str | None,
        typer.Option(
            "--background", metavar="COLOUR", help="black, white, #rrggbb or r,g,b.  [default: as trained, else black]"
        ),
    ] = None
    depth_range: Annotated[
        str | None,
        typer.Option(
            "--depth-range",
            metavar="NEAR,FAR",
            help="Depths shown in red and violet, scene units.  [default: the 2nd and 98th percentile over the views]",
        ),
    ] = None
    frames: Annotated[
        int | None,
        typer.Option(
            "--frames",
            metavar="N",
            min=1,
            max=108_000,
            help="Number of frames of a path.  [default: 120; interpolate: 10 from camera to camera, at least 120]",
        ),
    ] = None
    fps: Annotated[
        float | None,
        typer.Option(
            "--fps",
            metavar="F",
            min=0.01,
            max=1000.0,
            help="Frames per second of a video.  [default: as in the camera file, else 30]",
        ),
    ] = None
    loop: Annotated[bool, typer.Option("--loop", help="Close the path of interpolate, as other paths are.")] = False
    order: Annotated[
        str | None,
        typer.Option(
            "--order",
            metavar="ORDER",
            help="Order of the cameras on the path of interpolate: name, or nearest, which visits the nearest camera "
            "left.  [default: name]",
        ),
    ] = None
    focus: Annotated[
        str | None,
        typer.Option(
            "--focus",
            metavar="X,Y,Z",
            help="Point that orbit, ellipse and spiral face.  [default: the point nearest to all optical axes]",
        ),
    ] = None
    cameras: Annotated[
        Path | None,
        typer.Option("--cameras", metavar="JSON", help="Cameras to make paths from, for a model without cameras."),
    ] = None
    save_cameras: Annotated[
        Path | None,
        typer.Option(
            "--save-cameras",
            metavar="JSON",
            help="Also write the cameras of the frames, for --views; as a camera path of nerfstudio where the name "
            "ends in camera_path.json.",
        ),
    ] = None
    data: options.Data = None
    allow_older: options.AllowOlder = False
    device: options.Device = "auto"
    json: options.Json = False
    quiet: options.Quiet = False
    foreign: options.ForeignModelOptions = field(default_factory=options.ForeignModelOptions)


def render(args: RenderArguments) -> int:
    """Render views of a model as images, or a camera path as a video.

    Prints the paths of its output, one per line. A checkpoint has its cameras; a PLY or a model of another program
    needs a camera file, or the scene with --data. Where the images of the views exist, PSNR and SSIM are reported on
    stderr. docs/cameras.md describes camera paths, camera files and the kinds of images.

    \b
    Examples:
      splat render --views
      splat render output/scene --views all -o images --what rgb,depth,normals
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

    output = None if args.output is None else stdout_or(args.output)
    with open_output(json=args.json, quiet=args.quiet) as out:
        if args.json and str(output) == "-":
            raise UsageError("--json and -o - both want stdout", where="-o", remedy="leave one out")
        request = RenderOptions(
            output=output,
            format=args.format,
            kinds=parse_kinds(args.what) if args.what is not None else None,
            side_by_side=args.side_by_side,
            size=parse_size(args.size) if args.size is not None else None,
            background=parse_background(args.background) if args.background is not None else None,
            depth_range=parse_range(args.depth_range) if args.depth_range is not None else None,
            fps=args.fps,
            save_cameras=args.save_cameras,
            data=args.data,
        )
        path_options = _path_options(args)
        wanted = resolve_device(args.device)
        path = find_model(args.model, out=out, allow_older=args.allow_older)
        import_options = args.foreign.import_options()
        loaded = load_model(
            path,
            wanted,
            import_options=import_options,
            cameras=lambda: _views_of(None, args.views, args.data, args.cameras, path_options)[0].cameras,
            echo=out.note,
        )
        chosen, scene = _views_of(loaded, args.views, args.data, args.cameras, path_options)
        render_views(loaded, chosen, scene, request, out)
    return 0


def _path_options(args: RenderArguments) -> PathOptions:
    """Return how the camera moves along a path. Raises UsageError for options that do not apply to these views."""
    from splatcli.render.selection import PATHS, PathOptions
    from splatcli.render.view_renderer import parse_numbers

    around = tuple(name for name in PATHS if name != "interpolate")
    for flag, given, concerns in (
        ("--frames", args.frames, PATHS),
        ("--loop", args.loop, PATHS),
        ("--order", args.order, ("interpolate",)),
        ("--focus", args.focus, around),
    ):
        if given and args.views not in concerns:
            raise UsageError(
                f"it does not apply to --views {args.views}", where=flag, remedy=f"with --views {' or '.join(concerns)}"
            )
    if args.order not in (None, "name", "nearest"):
        raise UsageError(f"{args.order!r} is not an order", where="--order", remedy="name or nearest")
    if args.cameras is not None and args.views not in PATHS:
        raise UsageError("only paths are made from cameras", where="--cameras", remedy=f"--views {args.cameras}")
    point = None
    if args.focus is not None:
        x, y, z = parse_numbers(args.focus, 3, "--focus", "a point in scene units, as 0.5,-1,3")
        point = (x, y, z)
    return PathOptions(args.frames, args.loop, args.order == "nearest", point)


def _views_of(
    model: Model | None, views: str, data: Path | None, cameras: Path | None, path_options: PathOptions
) -> tuple[Views, Scene | None]:
    """Return the views to render, and their scene if it is not that of the model's run.

    model: None before it is loaded; only a checkpoint of splat has cameras.
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
