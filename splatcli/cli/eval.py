"""``splat eval``: a checkpoint and its scene in, figures out."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from splatcli.cli import options
from splatcli.errors import SceneError, UsageError

if TYPE_CHECKING:
    from splatcli.cli.model import Model
    from splatcli.config import Config
    from splatcli.scene.scene import Scene


def evaluate(
    model: options.Model = None,
    views: Annotated[str, typer.Option("--views", metavar="VIEWS", help="test, train or all.")] = "test",
    sheet: Annotated[
        Path | None,
        typer.Option("--sheet", metavar="PNG", help="Also write a contact sheet: each photo beside its render."),
    ] = None,
    data: options.Data = None,
    param_space: options.ParamSpace = None,
    lenient: options.Lenient = False,
    drop_nonfinite: options.DropNonfinite = False,
    device: options.Device = "auto",
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Measure a model against photos that training never saw.

    Prints the mean PSNR and SSIM over the views, the number of Gaussians and the path of the sheet, if one is made.
    With --json: one object with every view and the protocol, without which figures do not compare. A model of another
    program is measured with the cameras of the scene that --data names.

    \b
    Examples:
      splat eval output/scene
      splat eval output/scene --sheet sheet.png
      splat eval output/scene --json > figures.json
      splat eval point_cloud.ply --data scene/
    """
    if views not in ("test", "train", "all"):
        raise UsageError(f"{views!r} names no views with photos", where="--views", remedy="test, train or all")

    from splatcli.cli.device import resolve_device
    from splatcli.cli.drive import photo_background
    from splatcli.cli.model import find_model, load_model
    from splatcli.cli.output import speaking
    from splatcli.config import Config
    from splatcli.scene.read import read_scene

    with speaking(json=json, quiet=quiet) as out:
        wanted = resolve_device(device)
        path = find_model(model)
        loaded = load_model(
            path,
            wanted,
            reading=options.reading(param_space, lenient, drop_nonfinite),
            cameras=None if data is None else lambda: read_scene(data, Config().data).cameras,
            say=out.note,
        )
        checkpoint = loaded.checkpoint
        if checkpoint is None and data is None:
            raise UsageError(
                f"this knows neither cameras nor photos: {loaded.origin}",
                where=path,
                remedy="name the scene whose frame the model is in: --data DIR",
            )
        config = Config() if checkpoint is None else checkpoint.config
        root = Path(checkpoint.dataset.root) if checkpoint is not None and data is None else data
        assert root is not None
        scene = read_scene(root, config.data, background=photo_background(config))
        facts, lines = _measure(loaded, config, scene, views, sheet)
        out.result({"model": path, **facts}, lines)
    return 0


def _measure(
    model: Model, config: Config, scene: Scene, views: str, sheet: Path | None
) -> tuple[dict[str, Any], list[str]]:
    """The figures as JSON's object and as lines; raises SceneError for a photo that is missing."""
    from splatcli.train.metrics import mean_scores, protocol
    from splatcli.views.pictures import Look, png_bytes, render_pixels, write_bytes
    from splatcli.views.scoring import Photos
    from splatcli.views.selection import select_views
    from splatcli.views.sheet import Pair, contact_sheet

    checkpoint, photos = model.checkpoint, Photos(scene)
    look = Look() if checkpoint is None else Look.trained(checkpoint)
    owner = scene if checkpoint is None else checkpoint
    compared = []
    for camera in select_views(views, owner.cameras, owner.train, owner.test).cameras:
        if photos.hides_all(camera.name):
            continue
        one = photos.compare(camera.name, render_pixels(model.gaussians, camera, look))
        if one is None:
            raise SceneError(
                f"there is no photo {camera.name} of {camera.width}x{camera.height} pixels",
                where=scene.root,
                remedy="give the folder that the run was trained on: --data DIR",
            )
        compared.append(one)

    if not compared:
        raise SceneError(
            "the masks hide all of every view that was asked for",
            where=scene.root,
            remedy="evaluate others: --views all, or correct the masks",
        )
    psnr, ssim = mean_scores([one.score for one in compared])
    count, step = len(model.gaussians), None if checkpoint is None else checkpoint.step
    facts: dict[str, Any] = {
        "psnr": psnr,
        "ssim": ssim,
        "num_gaussians": count,
        "step": step,
        "views": [asdict(one.score) for one in compared],
        "protocol": {**protocol(config, scene, [one.index for one in compared]), "views_of": views},
    }
    lines = [f"psnr {psnr:.3f}", f"ssim {ssim:.4f}", f"num_gaussians {count}"]
    if sheet is not None:
        pairs = [Pair(c.truth, c.pixels, f"{c.score.name}   {c.score.psnr:.2f} dB") for c in compared]
        steps = "" if step is None else f"step {step}   "
        title = f"photo | render   {steps}{count:,} Gaussians   PSNR {psnr:.2f} dB   SSIM {ssim:.4f}"
        write_bytes(sheet, png_bytes(contact_sheet(pairs, title)))
        facts["sheet"] = sheet
        lines.append(f"sheet {sheet}")
    return facts, lines
