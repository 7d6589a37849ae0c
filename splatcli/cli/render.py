"""``splat render``: a model and cameras in, PNG files out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from splatcli.cli import options
from splatcli.errors import SceneError, UsageError

if TYPE_CHECKING:
    from splatcli.cli.model import Model
    from splatcli.cli.output import Output
    from splatcli.scene.scene import Scene
    from splatcli.views.scoring import Photos
    from splatcli.views.selection import Views


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
            is_model = not following.lower().endswith(".json") and Path(following).exists()
            if following.startswith("-") or is_model:
                full.append("test")
    return full


def render(
    model: options.Model = None,
    views: Annotated[
        str,
        typer.Option(
            "--views",
            metavar="[VIEWS]",
            help="test (also when nothing follows), train, all, or a .json with cameras.",
            show_default=False,
        ),
    ] = "test",
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="DIR",
            help="Folder for the PNG files; - writes the PNG of a single view to stdout.  "
            "[default: renders/ in the run folder]",
        ),
    ] = None,
    background: Annotated[
        str | None,
        typer.Option(
            "--background", metavar="COLOUR", help="black, white, #rrggbb or r,g,b.  [default: as trained, else black]"
        ),
    ] = None,
    data: options.Data = None,
    param_space: options.ParamSpace = None,
    lenient: options.Lenient = False,
    drop_nonfinite: options.DropNonfinite = False,
    device: options.Device = "auto",
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Render views of a model as PNG files.

    Prints their paths, one a line. A checkpoint carries its cameras; a PLY or a model of another program needs a
    file of them, or the scene with --data. Where the photos are at hand, PSNR and SSIM are told on stderr.

    \b
    Examples:
      splat render --views
      splat render output/scene --views all -o pictures
      splat render point_cloud.ply --views cameras.json --background white
      splat render chkpnt30000.pth --data scene/ --views
      splat train scene/ -q | splat render --views
    """
    from splatcli.cli.device import resolve_device
    from splatcli.cli.model import find_model, load_model
    from splatcli.cli.output import speaking

    with speaking(json=json, quiet=quiet) as out:
        wanted = resolve_device(device)
        path = find_model(model)
        reading = options.reading(param_space, lenient, drop_nonfinite)
        loaded = load_model(
            path, wanted, reading=reading, cameras=lambda: _views_of(None, views, data)[0].cameras, say=out.note
        )
        _render(loaded, views, output, background, data, out)
    return 0


def _render(
    model: Model, views: str, output: Path | None, background: str | None, data: Path | None, out: Output
) -> None:
    from splatcli.train.metrics import mean_scores
    from splatcli.views.pictures import Look, parse_background, picture_paths, png_bytes, render_pixels, write_bytes
    from splatcli.views.scoring import Photos

    checkpoint = model.checkpoint
    chosen, scene = _views_of(model, views, data)
    look = Look.trained(checkpoint) if checkpoint else Look()
    if background is not None:
        look = replace(look, background=parse_background(background))
    if output is not None and str(output) == "-":
        if len(chosen.cameras) != 1:
            raise UsageError(
                f"-o - wants one view, and --views {views} has {len(chosen.cameras)}",
                where="-o",
                remedy="name a folder with -o, or a file of one camera with --views",
            )
        out.data(png_bytes(render_pixels(model.gaussians, chosen.cameras[0], look)))
        return

    paths = picture_paths((camera.name for camera in chosen.cameras), output or default_folder(model, chosen.label))
    photos = Photos(scene) if scene is not None else _photos(model, chosen, data, out)
    scores = []
    for camera, path in zip(chosen.cameras, paths, strict=True):
        pixels = render_pixels(model.gaussians, camera, look)
        write_bytes(path, png_bytes(pixels))
        facts: dict[str, object] = {"view": camera.name, "path": path}
        compared = photos.compare(camera.name, pixels) if photos and not photos.hides_all(camera.name) else None
        if compared is not None:
            score = compared.score
            scores.append(score)
            facts |= {"psnr": score.psnr, "ssim": score.ssim}
            out.note(f"{camera.name}: PSNR {score.psnr:.2f} dB  SSIM {score.ssim:.4f}")
        out.event("rendered", facts)
    psnr, ssim = mean_scores(scores) if scores else (None, None)
    if scores:
        out.note(f"mean of {len(scores)} views: PSNR {psnr:.2f} dB  SSIM {ssim:.4f}")
    out.result({"paths": paths, "psnr": psnr, "ssim": ssim}, paths)


def _views_of(model: Model | None, views: str, data: Path | None) -> tuple[Views, Scene | None]:
    """The views to render, and the scene that they are from when it is not that of the model's own run.

    model: None where it is not read yet; only a checkpoint of ours carries cameras.
    """
    from splatcli.config import DataConfig
    from splatcli.scene.read import read_scene
    from splatcli.views.selection import select_views

    if model is not None and model.checkpoint is not None:
        checkpoint = model.checkpoint
        return select_views(views, checkpoint.refined_cameras(), checkpoint.train, checkpoint.test), None
    if data is None or views.lower().endswith(".json"):
        return select_views(views, [], [], []), None
    scene = read_scene(data, DataConfig())
    return select_views(views, scene.cameras, scene.train, scene.test), scene


def default_folder(model: Model, label: str) -> Path:
    """renders/<step>_<views> in the folder of the run, or beside the model where there is no run."""
    from splatcli.cli.model import run_folder

    checkpoint = model.checkpoint
    stem = model.path.stem if checkpoint is None else f"{checkpoint.step:06d}"
    return (run_folder(model.path) or model.path.parent) / "renders" / f"{stem}_{label}"


def _photos(model: Model, chosen: Views, data: Path | None, out: Output) -> Photos | None:
    """The photos to compare with; None, and a note that says why, when the scene is not there."""
    from splatcli.cli.drive import photo_background
    from splatcli.scene.read import read_scene
    from splatcli.views.scoring import Photos

    checkpoint = model.checkpoint
    if checkpoint is None or not chosen.from_run:
        return None
    root = data or Path(checkpoint.dataset.root)
    try:
        return Photos(read_scene(root, checkpoint.config.data, background=photo_background(checkpoint.config)))
    except SceneError as error:
        if data is not None:
            raise
        out.note(f"note: no comparison with the photos: {error.what} ({error.where})")
        return None
