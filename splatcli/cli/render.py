"""``splat render``: renders views of a model to images, EXR files, a video or a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from splatcli.cli import options
from splatcli.cli.model_views import ground_truth_of, refuse_for_views, views_of
from splatcli.cli.typer_command import Command
from splatcli.errors import UsageError
from splatcli.sizes import counted

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from splatcli.cli.console import Output
    from splatcli.cli.model import Model
    from splatcli.render.images import RenderSettings
    from splatcli.render.output import Target
    from splatcli.render.scoring import GroundTruth
    from splatcli.render.selection import PathOptions, Views
    from splatcli.render.view_renderer import RenderedView, RenderProjection, ViewRenderer
    from splatcli.scene.scene import Scene
    from splatcli.train.events import ViewScore


#: Words of --views that are never the name of a model.
_NAMES = ("test", "train", "all", "orbit", "ellipse", "spiral", "interpolate")


class RenderCommand(Command):
    """Lets ``--views`` stand alone for ``--views test``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _complete_views(args))


def _complete_views(args: list[str]) -> list[str]:
    """Let ``--views`` take the next word, unless there is none, it is an option, or it is a model that exists."""
    full: list[str] = []
    for position, arg in enumerate(args):
        full.append(arg)
        if arg == "--":
            return full + args[position + 1 :]
        if arg == "--views":
            following = args[position + 1] if position + 1 < len(args) else "-"
            is_views = following in _NAMES or following.lower().endswith((".json", *_image_suffixes()))
            is_model = bool(following) and not is_views and Path(following).exists()
            if following.startswith("-") or is_model:
                full.append("test")
    return full


def _image_suffixes() -> tuple[str, ...]:
    from splatcli.scene.find_images import SUFFIXES

    return SUFFIXES


@dataclass(frozen=True)
class RenderArguments:
    """The arguments and options of ``splat render``."""

    model: options.Model = None
    views: Annotated[
        str | None,
        typer.Option(
            "--views",
            metavar="[VIEWS]",
            help="test (also when nothing follows), train, all; images by name, with commas; a path: orbit, ellipse, "
            "spiral, interpolate; or a .json with cameras.  [default: test; orbit for a video]",
        ),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="PLACE",
            help="Folder for the images; x.mp4, x.gif or x.webp for a video; x.png or x.exr for a single view; "
            "- for stdout.  "
            "[default: renders/ in the run folder]",
        ),
    ] = None
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="png, exr, mp4, gif, webp, or raw: RGB frames, 8 bits, for a pipe.  [default: as -o ends, else png; "
            "raw for several views on stdout]",
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
            help="Size of the images; the vertical field of view stays. Needed for a camera file without one.  "
            "[default: that of the cameras]",
        ),
    ] = None
    projection: Annotated[
        str | None,
        typer.Option(
            "--projection",
            metavar="MODEL",
            help="pinhole; fisheye, 180 degrees from corner to corner; equirectangular, all around; or ortho, which "
            "shows the same extent at the scene's median depth.  [default: that of the cameras]",
        ),
    ] = None
    background: Annotated[
        str | None,
        typer.Option(
            "--background",
            metavar="COLOUR",
            help="A colour name of CSS, #rrggbb, #rgb or r,g,b from 0 to 1.  [default: as trained, else black]",
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
            help="Frames per second of a video, and of a camera path that --save-cameras writes.  [default: as in the "
            "camera file, else 30]",
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
    fov: Annotated[
        float | None,
        typer.Option(
            "--fov",
            metavar="DEGREES",
            min=1.0,
            max=170.0,
            help="Vertical field of view of a path.  [default: that of the cameras; of a fisheye, that of its middle]",
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

    def __post_init__(self) -> None:
        options.refuse_stdout(self.save_cameras, "--save-cameras", "cameras.json")


def render(args: RenderArguments) -> int:
    """Render views of a model as images, or a camera path as a video.

    Prints the paths of its output, one per line. A checkpoint has its cameras; a PLY or a model of another program
    needs a camera file, or the scene with --data; orbit and ellipse go around it without. Where the images of the
    views exist, PSNR and SSIM are reported on stderr. `splat docs cameras` describes camera paths, camera files and
    the kinds of images.

    \b
    Examples:
      splat render --views
      splat render output/scene --views all -o images --what rgb,depth,normals
      splat render output/scene --views view_00.png,view_08.png --side-by-side
      splat render output/scene --views test -o compare --side-by-side
      splat render output/scene --views orbit -o orbit.mp4 --size 1280x720
      splat render output/scene --views orbit -o orbit.gif --size 480x360 --frames 60 --fps 15
      splat render output/scene --views interpolate --loop --what rgb,depth -o tour.mp4
      splat render output/scene --views orbit --fov 70 -o wide.mp4
      splat render output/scene --views camera_path.json -o film.mp4
      splat render output/scene --views test --projection fisheye -o fisheye
      splat render output/scene --views all --projection ortho -o maps
      splat render output/scene --views orbit --projection equirectangular --size 3840x1920 -o around.mp4
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
    from splatcli.native.backend import resolve_device
    from splatcli.render.output import check_format
    from splatcli.render.view_renderer import parse_kinds, parse_projection, parse_range, parse_size
    from splatcli.train.backgrounds import parse_background

    output = None if args.output is None else stdout_or(args.output, json=args.json)
    with open_output(json=args.json, quiet=args.quiet) as out:
        opts = RenderOptions(
            output=output,
            format=args.format,
            kinds=parse_kinds(args.what) if args.what is not None else None,
            side_by_side=args.side_by_side,
            size=parse_size(args.size) if args.size is not None else None,
            projection=parse_projection(args.projection) if args.projection is not None else None,
            background=parse_background(args.background) if args.background is not None else None,
            depth_range=parse_range(args.depth_range) if args.depth_range is not None else None,
            fps=args.fps,
            save_cameras=args.save_cameras,
            data=args.data,
        )
        check_format(output, args.format)  # before the model is read
        views = _default_views(opts) if args.views is None else args.views
        if args.views is None and views == "orbit":
            out.message("the camera moves round the model: --views orbit; --views test for the held-out images")
        path_options = _path_options(args, views)
        wanted = resolve_device(args.device)
        path = find_model(args.model, out=out, allow_older=args.allow_older)

        def views_for(model: Model | None) -> tuple[Views, Scene | None]:
            return views_of(model, views, args.data, args.cameras, path_options, opts.size)

        loaded = load_model(
            path,
            wanted,
            import_options=args.foreign.import_options(),
            cameras=lambda: views_for(None)[0].cameras,
            out=out,
        )
        chosen, scene = views_for(loaded)
        render_views(loaded, chosen, scene, opts, out)
    return 0


def _default_views(opts: RenderOptions) -> str:
    """Return the views without --views: a path where a video is asked for, unless it shows images of the scene."""
    from splatcli.render.images import COMPARED
    from splatcli.render.video import VIDEOS

    named = None if opts.output is None else opts.output.suffix.lower().removeprefix(".")
    compares = opts.side_by_side if opts.kinds is None else set(opts.kinds) & set(COMPARED)
    return "orbit" if (opts.format or named) in VIDEOS and not compares else "test"


def _path_options(args: RenderArguments, views: str) -> PathOptions:
    """Return how the camera moves along a path. Raises UsageError for options that do not apply to these views."""
    from splatcli.render.selection import PATHS, PathOptions
    from splatcli.render.view_renderer import parse_numbers

    facing = tuple(name for name in PATHS if name != "interpolate")
    for flag, given, concerns in (
        ("--frames", args.frames, PATHS),
        ("--loop", args.loop, PATHS),
        ("--order", args.order, ("interpolate",)),
        ("--focus", args.focus, facing),
        ("--fov", args.fov, PATHS),
    ):
        if given:
            refuse_for_views(flag, views, concerns)
    if args.order not in (None, "name", "nearest"):
        raise UsageError(f"{args.order!r} is not an order", where="--order", remedy="name or nearest")
    shown = {"fisheye": "a fisheye shows 180 degrees from corner to corner", "equirectangular": "a panorama shows all"}
    if args.fov is not None and args.projection in shown:
        raise UsageError(shown[args.projection], where="--fov, --projection", remedy="leave one out")
    if args.save_cameras is not None and args.projection == "equirectangular":
        raise UsageError(
            "camera files hold no panoramas",
            where="--save-cameras, --projection",
            remedy="leave one out; without --projection the cameras are those at the positions of the panoramas",
        )
    if args.cameras is not None and views not in PATHS:
        raise UsageError("only paths are made from cameras", where="--cameras", remedy=f"--views {args.cameras}")
    point = None
    if args.focus is not None:
        x, y, z = parse_numbers(args.focus, 3, "--focus", "a point in scene units, as 0.5,-1,3")
        point = (x, y, z)
    return PathOptions(args.frames, args.loop, args.order == "nearest", point, fov=args.fov)


#: Views at most whose files are being written while others are rendered.
_WRITERS = 8

#: Frames a second of a video by default.
_FPS = 30.0


@dataclass(frozen=True)
class RenderOptions:
    """The output options of the command line; None where one is not given."""

    output: Path | None
    format: str | None
    kinds: tuple[str, ...] | None
    side_by_side: bool
    size: tuple[int, int] | None
    projection: RenderProjection | None
    background: tuple[float, float, float] | None
    depth_range: tuple[float, float] | None
    fps: float | None
    save_cameras: Path | None
    data: Path | None


def render_views(model: Model, chosen: Views, scene: Scene | None, opts: RenderOptions, out: Output) -> None:
    """Render the views ``chosen``. scene: the scene of these views, if it is not that of the model's run."""
    from splatcli.output_files import check_file_place, check_place
    from splatcli.render.images import ModelRenderer, median_distance
    from splatcli.render.output import resolve_target
    from splatcli.render.view_renderer import ViewRenderer

    if opts.projection == "equirectangular":
        chosen = chosen.panoramas(opts.size)
    elif opts.size is not None:
        chosen = chosen.sized(*opts.size)
    if opts.projection is not None and opts.projection != "equirectangular":
        chosen = chosen.projected(opts.projection, lambda camera: median_distance(model.gaussians, camera))
    if chosen.note is not None:
        out.note(chosen.note)
    target = resolve_target(opts.output, opts.format, len(chosen.cameras), _renders_folder(model, chosen.label))
    if target.file is not None:
        check_file_place(target.file)
    elif target.folder is not None:
        check_place(target.folder / "view.png", named=target.folder)
    kinds = _kinds(opts, target, chosen)
    ground_truth = _ground_truth(model, chosen, scene, opts, needed=bool({"photo", "error"} & set(kinds)), out=out)
    model_renderer = ModelRenderer(
        model.gaussians, _render_settings(model, opts, target), with_normals="normals" in kinds
    )
    if opts.save_cameras is not None:
        _save_cameras(opts.save_cameras, chosen, opts.fps, out)
    near_far = (0.0, 0.0)
    if "depth" in kinds and target.format != "exr":
        near_far = opts.depth_range or model_renderer.depth_range(chosen.cameras)
        near, far = near_far
        out.message(
            f"depth colours: red at {near:.4g} and nearer, violet at {far:.4g} and farther (Turbo over 1/depth)"
        )
    renderer = ViewRenderer(model_renderer, kinds, ground_truth, near_far)
    foreign = None if scene is None or model.checkpoint is not None else scene.root
    rendering = _Rendering(renderer, chosen, target, kinds, opts, foreign, out)
    facts: dict[str, Any] = {"depth_range": near_far} if near_far[1] else {}
    if target.is_video:
        rendering.write_video(facts)
    elif target.folder is None and target.file is None:
        rendering.write_stdout()
    else:
        rendering.write_images(facts)


def _save_cameras(path: Path, chosen: Views, fps: float | None, out: Output) -> None:
    """Write cameras in the layout of splat, or of nerfstudio when the file is named so."""
    from splatcli.output_files import write_bytes
    from splatcli.render.camera_files import camera_path_json, cameras_json, is_camera_path

    if is_camera_path(path):
        text, notes = camera_path_json(chosen.cameras, fps or chosen.fps or _FPS)
    else:
        text, notes = cameras_json(chosen.cameras), []
    write_bytes(path, text.encode())
    out.note(*notes)
    out.message(f"cameras written: {path}")


@dataclass(frozen=True)
class _Rendering:
    """Renders views one after the other, writes them and collects their scores.

    foreign: the scene of the views, where nothing says that the model was trained on it.
    """

    renderer: ViewRenderer
    views: Views
    target: Target
    kinds: tuple[str, ...]
    opts: RenderOptions
    foreign: Path | None
    out: Output
    scores: list[ViewScore] = field(default_factory=list)

    def write_images(self, facts: dict[str, Any]) -> None:
        """Write a file for each view; several kinds of image go to a folder each. facts: for the result."""
        from splatcli.output_files import image_paths

        names = (camera.name for camera in self.views.cameras)
        if self.target.folder is None:
            assert self.target.file is not None
            paths = [self.target.file]
        else:
            paths = image_paths(names, self.target.folder, f".{self.target.format}")
        written: list[Path] = []
        for rendered, made in _write_in_threads(self._write_view, self._rendered_views(), paths):
            written += made.values()
            event: dict[str, Any] = {"view": rendered.camera.name, "path": next(iter(made.values()))}
            event |= {"paths": made} if len(made) > 1 else {}
            event |= {"psnr": rendered.score.psnr, "ssim": rendered.score.ssim} if rendered.score else {}
            self.out.event("rendered", event)
        self.out.result({"paths": written, **self._mean_scores(), **facts}, written)

    def write_video(self, facts: dict[str, Any]) -> None:
        """Write all frames to one video file or stream. facts: for the result."""
        from splatcli.render.video import write_video

        file, count = self.target.file, len(self.views.cameras)
        (width, height), fps = self.views.sizes[0], self.opts.fps or self.views.fps or _FPS
        width *= len(self.kinds)
        if file is not None:
            write_video(file, (_side_by_side(rendered) for rendered in self._rendered_views()), (width, height), fps)
            facts |= {"frames": count, "fps": fps, "width": width, "height": height}
            self.out.result({"paths": [file], **self._mean_scores(), **facts}, [file])
            return
        self.out.message(
            f"raw frames: {count} of {width}x{height}, 8-bit RGB, top row first; ffmpeg options: "
            f"-f rawvideo -pix_fmt rgb24 -s {width}x{height} -r {fps:g} -i -"
        )
        self.write_stdout(raw=True)

    def write_stdout(self, *, raw: bool = False) -> None:
        """Write the images to stdout until the reader closes the pipe."""
        from splatcli.render.images import png_bytes

        for rendered in self._rendered_views():
            image = _side_by_side(rendered)
            if not self.out.data(image.tobytes() if raw else png_bytes(image)):
                return
        self._mean_scores()

    def _write_view(self, rendered: RenderedView, path: Path) -> dict[str, Path]:
        """Write the images of a view; return their files by kind."""
        from splatcli.output_files import write_bytes
        from splatcli.render.exr import channels, write_exr
        from splatcli.render.images import png_bytes

        if self.target.format == "exr":
            write_exr(path, channels(rendered.maps, self.kinds))
            return {"exr": path}
        if self.opts.side_by_side or len(self.kinds) == 1:
            write_bytes(path, png_bytes(_side_by_side(rendered)))
            return {"rgb": path}
        assert self.target.folder is not None, "several images of a view"
        made: dict[str, Path] = {}
        for kind, image in rendered.images.items():
            made[kind] = self.target.folder / kind / path.relative_to(self.target.folder)
            write_bytes(made[kind], png_bytes(image))
        return made

    def _rendered_views(self) -> Iterator[RenderedView]:
        from splatcli.cli.console import ProgressBar

        with ProgressBar(self.out) as progress:
            for done, camera in enumerate(self.views.cameras, 1):
                rendered = self.renderer.render_view(camera)
                if (score := rendered.score) is not None:
                    self.scores.append(score)
                    progress.print(f"{camera.name}: PSNR {score.psnr:.2f} dB  SSIM {score.ssim:.4f}")
                yield rendered
                progress.update("views", done, len(self.views.cameras))

    def _mean_scores(self) -> dict[str, float | None]:
        """Return mean PSNR and SSIM of the views that have images, and print them."""
        from splatcli.train.evaluate import mean_scores, unlike_note

        if not self.scores:
            return {"psnr": None, "ssim": None}
        psnr, ssim = mean_scores(self.scores)
        self.out.message(f"mean over {counted(len(self.scores), 'view')}: PSNR {psnr:.2f} dB  SSIM {ssim:.4f}")
        if self.foreign is not None and (note := unlike_note(psnr, self.foreign)) is not None:
            self.out.warn(note)
        return {"psnr": psnr, "ssim": ssim}


def _write_in_threads(
    write: Callable[[RenderedView, Path], dict[str, Path]], views: Iterator[RenderedView], paths: list[Path]
) -> Iterator[tuple[RenderedView, dict[str, Path]]]:
    """Yield each view with what ``write`` returns, in order; it works in threads while the next views are rendered.

    An error of ``write`` is raised in its view's place; views that come after it may be written.
    """
    from collections import deque
    from concurrent.futures import Future, ThreadPoolExecutor

    from splatcli import machine
    from splatcli.checkpoint.atomic import ended_by_signals

    workers = min(machine.cores(), _WRITERS)
    pending: deque[tuple[RenderedView, Future[dict[str, Path]]]] = deque()
    with ended_by_signals(), ThreadPoolExecutor(workers) as pool:  # which waits for files that are being written
        for rendered, path in zip(views, paths, strict=True):
            if len(pending) == workers:
                before, done = pending.popleft()
                yield before, done.result()
            pending.append((rendered, pool.submit(write, rendered, path)))
        for before, done in pending:
            yield before, done.result()


def _side_by_side(rendered: RenderedView) -> NDArray[np.uint8]:
    from splatcli.render.images import side_by_side

    return side_by_side(list(rendered.images.values()))


def _kinds(opts: RenderOptions, target: Target, chosen: Views) -> tuple[str, ...]:
    """Return the kinds of image to write for each view. Raise UsageError for options that exclude each other."""
    from splatcli.render import exr
    from splatcli.render.camera_files import is_camera_path
    from splatcli.render.images import COMPARED
    from splatcli.render.video import MAX_GIF_FPS

    exr_only = target.format == "exr"
    kinds = opts.kinds or (exr.DEFAULT if exr_only else ("photo", "rgb", "error") if opts.side_by_side else ("rgb",))
    if exr_only:
        exr.check_installed()
        for flag, given in (("--side-by-side", opts.side_by_side), ("--background", opts.background)):
            if given:
                raise UsageError(
                    "EXR files have an alpha channel and no background or joined images",
                    where=flag,
                    remedy=f"leave {flag} out",
                )
        if set(kinds) & set(COMPARED):
            raise UsageError("photo and error are not EXR channels", where="--what", remedy="--format png")
    if opts.depth_range is not None and ("depth" not in kinds or exr_only):
        raise UsageError("no depth image is written", where="--depth-range", remedy="--what depth, not as EXR")
    takes_fps = target.is_video or (opts.save_cameras is not None and is_camera_path(opts.save_cameras))
    if opts.fps is not None and not takes_fps:
        raise UsageError("images have no frame rate", where="--fps", remedy="write a video: -o x.mp4")
    if target.format == "png" and target.folder is None and len(kinds) > 1 and not opts.side_by_side:
        raise UsageError(
            f"one file cannot hold {len(kinds)} images ({', '.join(kinds)})",
            where="-o",
            remedy="--side-by-side or a folder",
        )
    if target.format == "gif" and (opts.fps or chosen.fps or _FPS) > MAX_GIF_FPS:
        raise UsageError(
            f"a GIF has at most {MAX_GIF_FPS:g} frames a second", where="--fps", remedy="--fps 30; or -o x.webp"
        )
    if target.is_video and len(chosen.sizes) > 1:
        sizes = " and ".join(f"{w}x{h}" for w, h in chosen.sizes[:3])
        raise UsageError(
            f"the views have {len(chosen.sizes)} sizes ({sizes}); a video needs one",
            where="--views",
            remedy="--size {}x{}".format(*chosen.sizes[0]),
        )
    return kinds


def _render_settings(model: Model, opts: RenderOptions, target: Target) -> RenderSettings:
    settings = model.render_settings()
    if target.format == "exr":  # has alpha instead of a background
        return replace(settings, background=(0.0, 0.0, 0.0))
    return settings if opts.background is None else replace(settings, background=opts.background)


def _renders_folder(model: Model, label: str) -> Path:
    """Return renders/<step>_<views> in the run folder, or beside a model that has no run."""
    from splatcli.cli.model import run_folder

    checkpoint = model.checkpoint
    stem = model.path.stem if checkpoint is None else f"{checkpoint.step:06d}"
    return (run_folder(model.path) or model.path.parent) / "renders" / f"{stem}_{label}"


def _ground_truth(
    model: Model, chosen: Views, scene: Scene | None, opts: RenderOptions, *, needed: bool, out: Output
) -> GroundTruth | None:
    """Return the images to compare with; None when the views have none, or, with a note, when the scene is missing.

    needed: raise UsageError or SceneError instead.
    """
    checkpoint = model.checkpoint
    if not chosen.from_run or (scene is None and checkpoint is None):
        if needed:
            raise UsageError(
                "these views have no images of their size and projection",
                where="--what",
                remedy="--views test, without --size and --projection",
            )
        return None
    return ground_truth_of(checkpoint, scene, opts.data, opts.background, needed=needed, out=out)
