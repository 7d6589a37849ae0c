"""``splat eval``: a checkpoint and its scene in, figures out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from splatcli.cli import options
from splatcli.cli.tables import Table
from splatcli.errors import SceneError, UsageError
from splatcli.progress import track
from splatcli.sizes import counted

if TYPE_CHECKING:
    from splatcli.checkpoint.state import Checkpoint
    from splatcli.cli.model import Model
    from splatcli.config import Config
    from splatcli.render.scoring import GroundTruth
    from splatcli.render.sheet import Extremes
    from splatcli.scene.scene import Scene
    from splatcli.train.events import ViewScore


@dataclass(frozen=True)
class EvalArguments:
    """The arguments and options of ``splat eval``."""

    model: options.Model = None
    views: Annotated[
        str, typer.Option("--views", metavar="VIEWS", help="test, train, all, or images by name, with commas.")
    ] = "test"
    sheet: Annotated[
        Path | None,
        typer.Option(
            "--sheet", metavar="PNG", help="Also write a contact sheet: image, render and error map, worst views first."
        ),
    ] = None
    sheet_views: Annotated[
        int | None,
        typer.Option(
            "--sheet-views",
            metavar="N",
            min=1,
            help="Number of views on the sheet, half of them the worst and half the best.  [default: 12]",
        ),
    ] = None
    color_corrected: Annotated[
        bool,
        typer.Option(
            "--color-corrected",
            help="Also report cc_psnr and cc_ssim, after the affine colour map that fits each render to its image.",
        ),
    ] = False
    lpips: Annotated[
        str | None,
        typer.Option(
            "--lpips",
            metavar="NET",
            help="Also report LPIPS by vgg or alex; needs pip install 'splatcli[lpips]' and weights.",
        ),
    ] = None
    data: options.Data = None
    resolution: Annotated[
        float | None,
        typer.Option(
            "-r",
            "--resolution",
            metavar="F",
            help="Size of the images, as of splat train; for a model without a run.",
        ),
    ] = None
    projection: Annotated[
        str | None,
        typer.Option(
            "--projection",
            metavar="MODEL",
            help="Camera of distorted lenses, as of splat train: auto, pinhole or fisheye; for a model without a run.",
        ),
    ] = None
    white_background: Annotated[
        bool,
        typer.Option(
            "--white-background", help="Render over white, transparent images too; for a model without a run."
        ),
    ] = False
    allow_older: options.AllowOlder = False
    device: options.Device = "auto"
    json: options.Json = False
    quiet: options.Quiet = False
    foreign: options.ForeignModelOptions = field(default_factory=options.ForeignModelOptions)

    def __post_init__(self) -> None:
        if self.sheet_views is not None and self.sheet is None:
            raise UsageError("there is no sheet to put views on", where="--sheet-views", remedy="add --sheet sheet.png")
        options.require_png(self.sheet, "--sheet")
        if self.resolution is not None and not self.resolution > 0:
            raise UsageError(f"{self.resolution:g} is no size", where="-r", remedy="1, 2, 4, 8 or a width in pixels")
        if self.lpips not in (None, "vgg", "alex"):
            raise UsageError(f"{self.lpips!r} is no network of LPIPS", where="--lpips", remedy="vgg or alex")


def evaluate(args: EvalArguments) -> int:
    """Evaluate a model on held-out images.

    Prints the means of PSNR, SSIM and the other metrics over the views, the number of Gaussians and the path of the
    sheet. With --json: one object with every view and the protocol that makes figures comparable
    (`splat docs metrics`). A model of another program is evaluated with the cameras of the scene that --data names.

    \b
    Examples:
      splat eval output/scene
      splat eval output/scene --sheet sheet.png
      splat eval output/scene --color-corrected --lpips vgg
      splat eval output/scene --json > figures.json
      splat eval point_cloud.ply --data scene/ -r 2
      splat eval point_cloud.ply --data scene/ --white-background
    """
    from splatcli.cli.console import open_output
    from splatcli.cli.model import find_model, load_model
    from splatcli.config import Config
    from splatcli.native.backend import resolve_device
    from splatcli.output_files import check_file_place
    from splatcli.render.scoring import GroundTruth, Lpips
    from splatcli.render.selection import PATHS
    from splatcli.render.sheet import MOST_VIEWS, Extremes
    from splatcli.scene.read import read_scene
    from splatcli.train.backgrounds import image_background
    from splatcli.train.run_scene import run_scene

    data = args.data
    if args.views in PATHS or args.views.lower().endswith(".json"):
        raise UsageError(
            f"{args.views!r} names no views with images",
            where="--views",
            remedy="test, train, all, or images by name, with commas",
        )
    if args.sheet is not None:
        check_file_place(args.sheet)
    with open_output(json=args.json, quiet=args.quiet) as out:
        wanted = resolve_device(args.device)
        # First, so that a missing package is an error before the model is loaded.
        network = None if args.lpips is None else Lpips(args.lpips, wanted)
        path = find_model(args.model, out=out, allow_older=args.allow_older)
        loaded = load_model(
            path,
            wanted,
            import_options=args.foreign.import_options(),
            cameras=None if data is None else lambda: read_scene(data, Config().data).cameras,
            out=out,
        )
        checkpoint = loaded.checkpoint
        if checkpoint is None and data is None:
            raise UsageError(
                f"{loaded.origin} has neither cameras nor images",
                where=path,
                remedy="name its scene: --data DIR",
            )
        config = _protocol_of(args, checkpoint)
        if checkpoint is not None:
            scene = run_scene(checkpoint, data, image_background(config), alike=False)
        else:
            assert data is not None
            scene = read_scene(data, config.data.images_only(), background=image_background(config))
        ground_truth = GroundTruth(scene, color_corrected=args.color_corrected, lpips=network)
        extremes = (
            None if args.sheet is None else Extremes(MOST_VIEWS if args.sheet_views is None else args.sheet_views)
        )
        facts, lines, remarks = _measure(loaded, config, scene, ground_truth, args.views, extremes)
        for remark in remarks:
            out.message(remark)
        if args.sheet is not None and extremes is not None:
            _write_sheet(args.sheet, extremes, facts)
            facts["sheet"] = args.sheet
            lines.append(f"sheet {args.sheet}")
        out.result({"model": path, **facts}, lines, [_table(facts)])
    return 0


def _protocol_of(args: EvalArguments, checkpoint: Checkpoint | None) -> Config:
    """Return the settings by which images are read and shown: the run's, else the command line's."""
    from splatcli.config import Config, with_settings

    given: dict[str, Any] = {}
    if args.resolution is not None:
        given["data.resolution"] = args.resolution
    if args.projection is not None:
        given["data.projection"] = args.projection
    if args.white_background:
        given["train.background"] = "white"
    if checkpoint is None:
        return with_settings(Config(), given)
    if given:
        raise UsageError(
            "a run is evaluated at the size, by the cameras and over the background that it was trained with",
            where={"data.resolution": "-r", "data.projection": "--projection"}.get(min(given), "--white-background"),
            remedy="leave it out, or evaluate an export: splat eval FILE --data SCENE",
        )
    return checkpoint.config


def _measure(
    model: Model, config: Config, scene: Scene, ground_truth: GroundTruth, views: str, extremes: Extremes | None
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return the metrics as a JSON object and as lines, and remarks on them. Raise SceneError for a missing image.

    extremes: gets every comparison, and keeps the images of the worst and best.
    """
    from splatcli.render.images import render_pixels
    from splatcli.render.scoring import means
    from splatcli.render.selection import KnownCameras, select_views
    from splatcli.scene.borders import border_note
    from splatcli.train.backgrounds import evaluation_background, evaluation_colour
    from splatcli.train.evaluate import protocol, unlike_note

    checkpoint = model.checkpoint
    settings = model.render_settings()
    if checkpoint is None:
        settings = replace(settings, background=evaluation_colour(config))
    owner = scene if checkpoint is None else checkpoint
    scores, fitted, indices, figures = [], [], [], []
    refined = scene.cameras if checkpoint is None else checkpoint.refined_cameras()
    chosen = select_views(views, KnownCameras(refined, owner.train, owner.test), images_only=True)
    for camera in track(chosen.cameras, "views"):
        if ground_truth.is_fully_masked(camera.name):
            continue
        one = ground_truth.compare(camera.name, render_pixels(model.gaussians, camera, settings))
        if one is None:
            raise SceneError(
                f"the scene has no image {camera.name} of {camera.width}x{camera.height} pixels",
                where=scene.root,
                remedy="name the scene that the run was trained on: --data DIR",
            )
        scores.append(one.score)
        fitted.append(one.score.psnr if one.cc_psnr is None else one.cc_psnr)
        indices.append(one.index)
        figures.append(one.figures)
        if extremes is not None:
            extremes.add(one)

    if not figures:
        raise SceneError(
            "the masks hide every pixel of these views",
            where=scene.root,
            remedy="evaluate other views (--views all), or correct the masks",
        )
    unlike, behind, borders = None, None, border_note(scene, indices)
    if checkpoint is None:
        if any(scene.images.may_be_transparent(index) for index in indices):
            behind = evaluation_background(config)
        unlike = unlike_note(sum(score.psnr for score in scores) / len(scores), scene.root)
    mean = means(figures)
    facts: dict[str, Any] = {
        **mean,
        "num_gaussians": len(model.gaussians),
        "step": None if checkpoint is None else checkpoint.step,
        "views": [
            {"name": name, **values} for name, values in zip((score.name for score in scores), figures, strict=True)
        ],
        "protocol": {**protocol(config, scene, indices), **ground_truth.protocol(), "views_of": views},
    }
    lines = [f"{name} {value:.{_digits(name)}f}" for name, value in mean.items()]
    return (
        facts,
        [*lines, f"num_gaussians {len(model.gaussians)}"],
        [
            *(note for note in (unlike, borders) if note is not None),
            *_remarks(scores, fitted, views, shown=extremes is not None, behind=behind),
        ],
    )


def _table(facts: dict[str, Any]) -> Table:
    """Return the metrics for a terminal: means, and the views at both ends."""
    views = facts["views"]
    rows = []
    for name in (key for key in views[0] if key != "name"):
        values = [(view[name], view["name"]) for view in views]
        best, worst = (min, max) if name.startswith("lpips") else (max, min)
        digits = _digits(name)
        ends = [f"{value:.{digits}f} ({view})" for value, view in (worst(values), best(values))]
        rows.append([name.upper().replace("_", " "), f"{facts[name]:.{digits}f}", *ends])
    title = f"{counted(len(views), 'view')}, {facts['num_gaussians']:,} Gaussians" + (
        f", sheet {facts['sheet']}" if "sheet" in facts else ""
    )
    return Table(rows, ("metric", "mean", "worst view", "best view"), title)


def _remarks(scores: list[ViewScore], fitted: list[float], views: str, *, shown: bool, behind: str | None) -> list[str]:
    """Return what is suspicious in the scores, with remedies.

    fitted: PSNR with the render's colours fitted. shown: a contact sheet is written. behind: the background of
    transparent images and a model that may be of another one; None where there is no such doubt.
    """
    from splatcli.train.evaluate import FITTED_DB
    from splatcli.train.outlier_views import score_note

    remarks = []
    note = score_note(scores, {score.name: value for score, value in zip(scores, fitted, strict=True)})
    if note is not None:
        remarks.append(
            f"{note}\n  help: {'see the sheet' if shown else f'--views {views} --sheet sheet.png shows them'}; a view "
            "that no other covers, a wrong pose and fog before the camera look different"
        )
    mean, corrected = sum(score.psnr for score in scores) / len(scores), sum(fitted) / len(fitted)
    if corrected - mean > FITTED_DB:
        cause, remedy = "the images differ in exposure or white balance", "splat train --ppisp learns that"
        if behind is not None:
            cause = f"images that are transparent are compared over {behind}, or {cause}"
            remedy = (
                "leave out --white-background for a model that was trained over black"
                if behind == "white"
                else "--white-background for a model that was trained over white"
            )
        remarks.append(
            f"with the colours of each render fitted, PSNR is {corrected:.2f} dB, {corrected - mean:.1f} dB higher: "
            f"{cause}\n  help: {remedy}; --color-corrected reports it"
        )
    return remarks


def _digits(figure: str) -> int:
    """Return the number of decimals to print."""
    return 3 if figure.endswith("psnr") else 4


def _write_sheet(path: Path, extremes: Extremes, facts: dict[str, Any]) -> None:
    """Write the contact sheet of ``extremes`` with the metrics ``facts`` in its title. Raise OutputError."""
    from splatcli.output_files import write_bytes
    from splatcli.render.images import png_bytes
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
