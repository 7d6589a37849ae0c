"""The work of ``splat render``: renders each view and writes images, EXR files, a video or a stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from splatcli.errors import SceneError, UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from splatcli.cli.console import Output, ProgressBar
    from splatcli.cli.model import Model
    from splatcli.render.images import RenderSettings
    from splatcli.render.output import Target
    from splatcli.render.scoring import GroundTruth
    from splatcli.render.selection import Views
    from splatcli.render.view_renderer import RenderedView, ViewRenderer
    from splatcli.scene.camera import Camera
    from splatcli.scene.scene import Scene
    from splatcli.train.events import ViewScore

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
    background: tuple[float, float, float] | None
    depth_range: tuple[float, float] | None
    fps: float | None
    save_cameras: Path | None
    data: Path | None


def render_views(model: Model, chosen: Views, scene: Scene | None, opts: RenderOptions, out: Output) -> None:
    """Render the views ``chosen``. scene: the scene of these views, if it is not that of the model's run."""
    from splatcli.render.images import ModelRenderer
    from splatcli.render.output import resolve_target
    from splatcli.render.view_renderer import ViewRenderer

    if opts.size is not None:
        chosen = chosen.sized(*opts.size)
    target = resolve_target(opts.output, opts.format, len(chosen.cameras), default_folder(model, chosen.label))
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
        out.note(f"depth colours: red at {near:.4g} and nearer, violet at {far:.4g} and farther (Turbo over 1/depth)")
    session = _RenderSession(ViewRenderer(model_renderer, kinds, ground_truth, near_far), chosen.cameras, out)
    facts: dict[str, Any] = {"depth_range": near_far} if near_far[1] else {}
    if target.is_video:
        _write_video(session, chosen, target, opts, len(kinds), facts, out)
    elif target.folder is None and target.file is None:
        _write_stdout(session, out)
    else:
        _write_images(session, target, kinds, opts.side_by_side, facts, out)


def _save_cameras(path: Path, chosen: Views, fps: float | None, out: Output) -> None:
    """Write cameras in the layout of splat, or of nerfstudio when the file is named so."""
    from splatcli.render.camera_files import SUFFIX, camera_path_json, cameras_json
    from splatcli.render.images import write_bytes

    if path.name.lower().endswith(SUFFIX):
        text, notes = camera_path_json(chosen.cameras, fps or chosen.fps or _FPS)
    else:
        text, notes = cameras_json(chosen.cameras), []
    write_bytes(path, text.encode())
    for note in notes:
        out.note(f"note: {note}")
    out.note(f"cameras written: {path}")


class _RenderSession:
    """Renders the views one after the other and collects their scores."""

    def __init__(self, renderer: ViewRenderer, cameras: list[Camera], out: Output) -> None:
        self._renderer = renderer
        self.cameras = cameras
        self._out = out
        self._scores: list[ViewScore] = []

    def rendered_views(self) -> Iterator[RenderedView]:
        from splatcli.cli.console import ProgressBar

        with ProgressBar(self._out) as progress:
            for done, camera in enumerate(self.cameras, 1):
                rendered = self._renderer.render_views(camera)
                self._collect(rendered, progress)
                yield rendered
                progress.update("views", done, len(self.cameras))

    def _collect(self, rendered: RenderedView, progress: ProgressBar) -> None:
        if rendered.score is not None:
            self._scores.append(rendered.score)
            progress.print(f"{rendered.camera.name}: PSNR {rendered.score.psnr:.2f} dB  SSIM {rendered.score.ssim:.4f}")

    def figures(self) -> dict[str, float | None]:
        """Return mean PSNR and SSIM of the views that have images, and print them."""
        from splatcli.train.evaluate import mean_scores

        if not self._scores:
            return {"psnr": None, "ssim": None}
        psnr, ssim = mean_scores(self._scores)
        self._out.note(f"mean over {len(self._scores)} views: PSNR {psnr:.2f} dB  SSIM {ssim:.4f}")
        return {"psnr": psnr, "ssim": ssim}


def _write_images(
    session: _RenderSession,
    target: Target,
    kinds: tuple[str, ...],
    side_by_side: bool,
    facts: dict[str, Any],
    out: Output,
) -> None:
    """Write a file for each view; several kinds of image go to a folder each."""
    from splatcli.render.images import image_paths, png_bytes, write_bytes
    from splatcli.render.output import channels, write_exr

    if target.folder is None:
        assert target.file is not None
        paths = [target.file]
    else:
        paths = image_paths((camera.name for camera in session.cameras), target.folder, f".{target.format}")
    written: list[Path] = []
    for rendered, path in zip(session.rendered_views(), paths, strict=True):
        made: dict[str, Path] = {}
        if target.format == "exr":
            write_exr(path, channels(rendered.maps, kinds))
            made["exr"] = path
        elif side_by_side or len(kinds) == 1:
            write_bytes(path, png_bytes(_side_by_side(rendered)))
            made["rgb"] = path
        else:
            assert target.folder is not None
            for kind, image in rendered.images.items():
                made[kind] = target.folder / kind / path.relative_to(target.folder)
                write_bytes(made[kind], png_bytes(image))
        written += made.values()
        event: dict[str, Any] = {"view": rendered.camera.name, "path": next(iter(made.values()))}
        event |= {"paths": made} if len(made) > 1 else {}
        event |= {"psnr": rendered.score.psnr, "ssim": rendered.score.ssim} if rendered.score else {}
        out.event("rendered", event)
    out.result({"paths": written, **session.figures(), **facts}, written)


def _write_video(
    session: _RenderSession,
    chosen: Views,
    target: Target,
    opts: RenderOptions,
    across: int,
    facts: dict[str, Any],
    out: Output,
) -> None:
    """Write all frames to one video file or stream."""
    from splatcli.render.output import write_video

    (width, height), fps = chosen.sizes[0], opts.fps or chosen.fps or _FPS
    width *= across
    if target.file is not None:
        write_video(
            target.file, (_side_by_side(rendered) for rendered in session.rendered_views()), (width, height), fps
        )
        facts |= {"frames": len(session.cameras), "fps": fps, "width": width, "height": height}
        out.result({"paths": [target.file], **session.figures(), **facts}, [target.file])
        return
    out.note(
        f"raw frames: {len(session.cameras)} of {width}x{height}, 8-bit RGB, top row first; ffmpeg options: "
        f"-f rawvideo -pix_fmt rgb24 -s {width}x{height} -r {fps:g} -i -"
    )
    _write_stdout(session, out, raw=True)


def _write_stdout(session: _RenderSession, out: Output, *, raw: bool = False) -> None:
    """Write the images to stdout until the reader closes the pipe."""
    from splatcli.render.images import png_bytes

    for rendered in session.rendered_views():
        image = _side_by_side(rendered)
        if not out.data(image.tobytes() if raw else png_bytes(image)):
            return
    session.figures()


def _side_by_side(rendered: RenderedView) -> NDArray[np.uint8]:
    from splatcli.render.images import side_by_side

    return side_by_side(list(rendered.images.values()))


def _kinds(opts: RenderOptions, target: Target, chosen: Views) -> tuple[str, ...]:
    """Return the kinds of image to write for each view. Raise UsageError for options that exclude each other."""
    from splatcli.render import output
    from splatcli.render.images import COMPARED

    exr_only = target.format == "exr"
    kinds = opts.kinds or (output.DEFAULT if exr_only else ("photo", "rgb", "error") if opts.side_by_side else ("rgb",))
    if exr_only:
        output.check_installed()
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
    if opts.fps is not None and not target.is_video:
        raise UsageError("images have no frame rate", where="--fps", remedy="write a video: -o x.mp4")
    if target.format == "png" and target.folder is None and len(kinds) > 1 and not opts.side_by_side:
        raise UsageError(
            f"one file cannot hold {len(kinds)} images ({', '.join(kinds)})",
            where="-o",
            remedy="--side-by-side or a folder",
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
    from splatcli.render.images import RenderSettings

    settings = RenderSettings.trained(model.checkpoint) if model.checkpoint else RenderSettings()
    if target.format == "exr":  # has alpha instead of a background
        return replace(settings, background=(0.0, 0.0, 0.0))
    return settings if opts.background is None else replace(settings, background=opts.background)


def default_folder(model: Model, label: str) -> Path:
    """Return renders/<step>_<views> in the run folder, or beside a model that has no run."""
    from splatcli.cli.model import run_folder

    checkpoint = model.checkpoint
    stem = model.path.stem if checkpoint is None else f"{checkpoint.step:06d}"
    return (run_folder(model.path) or model.path.parent) / "renders" / f"{stem}_{label}"


def _ground_truth(
    model: Model, chosen: Views, scene: Scene | None, opts: RenderOptions, *, needed: bool, out: Output
) -> GroundTruth | None:
    """Return the images to compare with; None, with a note, when the scene is missing.

    needed: raise UsageError or SceneError instead.
    """
    from splatcli.cli.training import image_background
    from splatcli.render.scoring import GroundTruth
    from splatcli.scene.read import read_scene

    checkpoint = model.checkpoint
    if not chosen.from_run or (scene is None and checkpoint is None):
        if needed:
            raise UsageError(
                "these views have no images of their size", where="--what", remedy="--views test, without --size"
            )
        return None
    if scene is not None:
        return GroundTruth(scene)
    assert checkpoint is not None
    root = opts.data or Path(checkpoint.dataset.root)
    try:
        data = checkpoint.config.data.without_depths()
        return GroundTruth(read_scene(root, data, background=image_background(checkpoint.config)))
    except SceneError as error:
        if opts.data is not None or needed:
            raise
        out.note(f"note: renders are not compared with images: {error.what} ({error.where})")
        return None
