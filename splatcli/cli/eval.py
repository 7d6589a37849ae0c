"""``splat eval``: a checkpoint and its scene in, figures out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from splatcli.cli import options
from splatcli.errors import SceneError, UsageError

if TYPE_CHECKING:
    from splatcli.cli.model import Model
    from splatcli.config import Config
    from splatcli.render.scoring import GroundTruth
    from splatcli.render.sheet import Extremes
    from splatcli.scene.scene import Scene


def evaluate(
    model: options.Model = None,
    views: Annotated[str, typer.Option("--views", metavar="VIEWS", help="test, train or all.")] = "test",
    sheet: Annotated[
        Path | None,
        typer.Option(
            "--sheet", metavar="PNG", help="Also write a contact sheet: photo, render and error map, worst views first."
        ),
    ] = None,
    sheet_views: Annotated[
        int | None,
        typer.Option(
            "--sheet-views",
            metavar="N",
            min=1,
            help="Views on the sheet; of more than that, half the worst and half the best.  [default: 12]",
        ),
    ] = None,
    color_corrected: Annotated[
        bool,
        typer.Option(
            "--color-corrected",
            help="Also cc_psnr and cc_ssim: after an affine change of colour that fits each render to its photo.",
        ),
    ] = False,
    lpips: Annotated[
        str | None,
        typer.Option(
            "--lpips", metavar="NET", help="Also LPIPS by vgg or alex; needs pip install 'splatcli[lpips]' and weights."
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
    """Measure a model against photos that training never saw.

    Prints the mean PSNR and SSIM over the views, what else is asked for, the number of Gaussians and the path of the
    sheet, if one is made. With --json: one object with every view and the protocol, without which figures do not
    compare (docs/metrics.md). A model of another program is measured with the cameras of the scene that --data names.

    \b
    Examples:
      splat eval output/scene
      splat eval output/scene --sheet sheet.png
      splat eval output/scene --color-corrected --lpips vgg
      splat eval output/scene --json > figures.json
      splat eval point_cloud.ply --data scene/
    """
    if views not in ("test", "train", "all"):
        raise UsageError(f"{views!r} names no views with photos", where="--views", remedy="test, train or all")

    if sheet_views is not None and sheet is None:
        raise UsageError("there is no sheet to put views on", where="--sheet-views", remedy="add --sheet sheet.png")
    if lpips not in (None, "vgg", "alex"):
        raise UsageError(f"{lpips!r} is no network of LPIPS", where="--lpips", remedy="vgg or alex")

    from splatcli.cli.console import open_output
    from splatcli.cli.model import find_model, load_model
    from splatcli.cli.training import image_background
    from splatcli.config import Config
    from splatcli.native.backend import resolve_device
    from splatcli.render.scoring import GroundTruth, Lpips
    from splatcli.render.sheet import MOST_VIEWS, Extremes
    from splatcli.scene.read import read_scene

    with open_output(json=json, quiet=quiet) as out:
        wanted = resolve_device(device)
        # First of all, so that what is not installed is told before minutes are spent.
        network = None if lpips is None else Lpips(lpips, wanted)
        path = find_model(model, out=out, allow_older=allow_older)
        loaded = load_model(
            path,
            wanted,
            import_options=options.import_options(param_space, lenient, drop_nonfinite),
            cameras=None if data is None else lambda: read_scene(data, Config().data).cameras,
            echo=out.note,
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
        scene = read_scene(root, config.data.without_depths(), background=image_background(config))
        ground_truth = GroundTruth(scene, color_corrected=color_corrected, lpips=network)
        extremes = None if sheet is None else Extremes(MOST_VIEWS if sheet_views is None else sheet_views)
        facts, lines = _measure(loaded, config, scene, ground_truth, views, extremes)
        if sheet is not None and extremes is not None:
            _write_sheet(sheet, extremes, facts)
            facts["sheet"] = sheet
            lines.append(f"sheet {sheet}")
        out.result({"model": path, **facts}, lines)
    return 0


def _measure(
    model: Model, config: Config, scene: Scene, ground_truth: GroundTruth, views: str, extremes: Extremes | None
) -> tuple[dict[str, Any], list[str]]:
    """The figures as JSON's object and as lines; raises SceneError for a photo that is missing.

    extremes: gets to see every comparison; pictures live no longer than it wants them.
    """
    from splatcli.render.images import RenderSettings, render_pixels
    from splatcli.render.scoring import means
    from splatcli.render.selection import select_views
    from splatcli.train.evaluate import protocol

    checkpoint = model.checkpoint
    settings = RenderSettings() if checkpoint is None else RenderSettings.trained(checkpoint)
    owner = scene if checkpoint is None else checkpoint
    names, indices, figures = [], [], []
    refined = scene.cameras if checkpoint is None else checkpoint.refined_cameras()
    for camera in select_views(views, refined, owner.train, owner.test).cameras:
        if ground_truth.is_fully_masked(camera.name):
            continue
        one = ground_truth.compare(camera.name, render_pixels(model.gaussians, camera, settings))
        if one is None:
            raise SceneError(
                f"there is no photo {camera.name} of {camera.width}x{camera.height} pixels",
                where=scene.root,
                remedy="give the folder that the run was trained on: --data DIR",
            )
        names.append(one.score.name)
        indices.append(one.index)
        figures.append(one.figures)
        if extremes is not None:
            extremes.add(one)

    if not figures:
        raise SceneError(
            "the masks hide all of every view that was asked for",
            where=scene.root,
            remedy="evaluate others: --views all, or correct the masks",
        )
    mean = means(figures)
    facts: dict[str, Any] = {
        **mean,
        "num_gaussians": len(model.gaussians),
        "step": None if checkpoint is None else checkpoint.step,
        "views": [{"name": name, **values} for name, values in zip(names, figures, strict=True)],
        "protocol": {**protocol(config, scene, indices), **ground_truth.protocol(), "views_of": views},
    }
    lines = [f"{name} {value:.{_digits(name)}f}" for name, value in mean.items()]
    return facts, [*lines, f"num_gaussians {len(model.gaussians)}"]


def _digits(figure: str) -> int:
    """Decimals worth printing."""
    return 3 if figure.endswith("psnr") else 4


def _write_sheet(path: Path, extremes: Extremes, facts: dict[str, Any]) -> None:
    """The contact sheet of ``extremes`` with the figures ``facts`` over it. Raises OutputError."""
    from splatcli.render.images import png_bytes, write_bytes
    from splatcli.render.sheet import contact_sheet

    title = f"PSNR {facts['psnr']:.2f} dB   SSIM {facts['ssim']:.4f}   {extremes.describe()}"
    steps = "" if facts["step"] is None else f"step {facts['step']:,}, "
    others = (
        f"{name} {facts[name]:.{_digits(name)}f}"
        for name in ("cc_psnr", "cc_ssim", "lpips", "cc_lpips")
        if name in facts
    )
    subtitle = ", ".join([f"{steps}{facts['num_gaussians']:,} Gaussians", *others])
    write_bytes(path, png_bytes(contact_sheet(extremes.ranked(), title, subtitle)))
