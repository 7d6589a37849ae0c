"""``splat compare``: two models, or a model and the photos of its scene, over the same views."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from splatcli.cli import options
from splatcli.cli.typer_command import exclusion
from splatcli.errors import SceneError, UsageError
from splatcli.output_files import refuse_existing
from splatcli.progress import track

if TYPE_CHECKING:
    from splatcli.cli.compare_report import Report
    from splatcli.cli.console import Output
    from splatcli.cli.model import Model
    from splatcli.render.comparison import Comparer, Rendered, ViewFigures, ViewImages
    from splatcli.render.selection import Views
    from splatcli.scene.scene import Scene

#: Views of a path, and around models without cameras, by default.
_FRAMES = 24
#: Views on a page or sheet by default.
_PICTURES = 12
#: Ends of names that are no folders.
_OTHER_FILES = {".gif", ".htm", ".jpeg", ".jpg", ".json", ".mp4", ".pdf", ".ply", ".svg", ".webp"}


@dataclass(frozen=True)
class CompareArguments:
    """The arguments and options of ``splat compare``."""

    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="[A]",
            help="Checkpoint, file of splats (.ply, .spz, .sog, ...) or run folder, also of other programs. Without "
            "it: the path from a pipe, else the newest run under output/.",
            show_default=False,
        ),
        options.MODEL_EXISTS,
    ] = None
    other: Annotated[
        Path | None,
        typer.Argument(
            metavar="[B]",
            help="Another such model; or a scene, with whose photos A is compared.  [default: the scene of A]",
            show_default=False,
        ),
        options.MODEL_EXISTS,
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="PLACE",
            help="compare.html for a page with a slider for each view; compare.png for a contact sheet; a folder for a "
            "picture of each view: A, B, their difference and the photo side by side.",
            show_default=False,
        ),
    ] = None
    views: Annotated[
        str | None,
        typer.Option(
            "--views",
            metavar="VIEWS",
            help="test, train, all; images by name, with commas; a path: orbit, ellipse, spiral, interpolate; or a "
            ".json with cameras: those of A, else of B.  [default: test; from all around where no cameras are known]",
        ),
    ] = None
    frames: Annotated[
        int | None,
        typer.Option(
            "--frames",
            metavar="N",
            min=1,
            max=10_000,
            help=f"Number of views of a path or from all around.  [default: {_FRAMES}]",
        ),
    ] = None
    pictures: Annotated[
        int | None,
        typer.Option(
            "--pictures",
            metavar="N",
            min=1,
            max=200,
            help="Number of views on a page or sheet: those with the largest difference, the worst and the median.  "
            f"[default: {_PICTURES}]",
        ),
    ] = None
    background: Annotated[
        str | None,
        typer.Option(
            "--background",
            metavar="COLOUR",
            help="A colour name of CSS, #rrggbb, #rgb or r,g,b from 0 to 1, for both.  [default: as A was trained, "
            "else B, else black]",
        ),
    ] = None
    overwrite: Annotated[bool, typer.Option("-w", "--overwrite", help="Replace files that are already there.")] = False
    data: options.Data = None
    allow_older: options.AllowOlder = False
    device: options.Device = "auto"
    json: options.Json = False
    quiet: options.Quiet = False
    foreign: options.ForeignModelOptions = field(default_factory=options.ForeignModelOptions)

    def __post_init__(self) -> None:
        output = self.output
        if output is not None and output.suffix.lower() in _OTHER_FILES:
            raise UsageError(
                f"a comparison is not written as {output.suffix}",
                where="-o",
                remedy=f"-o {output.with_suffix('.html')}, -o {output.with_suffix('.png')}, or a folder",
            )
        if str(output) == "-":
            raise UsageError("stdout gets the figures", where="-o", remedy="-o compare.html")
        if self.pictures is not None and (output is None or not _is_file(output)):
            raise UsageError(
                "only a page and a sheet show some of the views", where="--pictures", remedy="add -o compare.html"
            )
        if output is not None and _is_file(output):
            refuse_existing(output, overwrite=self.overwrite)


def compare(args: CompareArguments) -> int:
    """Compare two models, or a model with the photos of its scene, view by view.

    Prints PSNR and SSIM of A and of B against the photos, those of A against B, and the same of every view; number of
    Gaussians, SH degree and size of both. Views are those of A's cameras, else of B's, else from all around the models.
    Where B is a scene, and without B, A is compared with photos alone (`splat docs compare`).

    \b
    Examples:
      splat compare output/scene scene.spz -o compare.html
      splat compare output/scene scene.ply -o compare.png
      splat compare output/scene/ckpts/ckpt_007000.pt output/scene --views all
      splat compare output/scene -o photos.html
      splat compare scene.ply scene/
      splat compare scene.ply scene.spz --views cameras.json -o pictures/
      splat compare scene.ply scene.spz --json > figures.json
    """
    from splatcli.cli.compare_report import Report
    from splatcli.cli.console import open_output
    from splatcli.native.backend import resolve_device
    from splatcli.output_files import check_place
    from splatcli.train.backgrounds import parse_background

    if args.output is not None:
        check_place(args.output)
    background = None if args.background is None else parse_background(args.background)
    with open_output(json=args.json, quiet=args.quiet) as out:
        device = resolve_device(args.device)
        other, data = _second_model_and_scene(args)
        models = [_load(args.model, args, device, out)]
        if other is not None:
            models.append(_load(other, args, device, out))
        owner = next((model for model in models if model.checkpoint is not None), models[0])
        chosen, scene = _views(args, owner, models, data)
        if chosen.note is not None:
            out.note(chosen.note)
        if owner.checkpoint is not None and len(models) == 2:
            chosen = _shared_views(chosen, owner, models[1 - models.index(owner)], out)
        comparer = _comparer(models, owner, chosen, scene, data, background, out)
        places = _picture_files(args, chosen)
        figures = list(_measure(comparer, chosen, places))
        if not figures:
            raise SceneError(
                "no view has a photo of its size that masks do not hide",
                where=data or (owner.checkpoint.dataset.root if owner.checkpoint else owner.path),
                remedy="name the scene that the run was trained on: splat compare MODEL SCENE",
            )
        report = Report(models, chosen.label, figures)
        for remark in report.remarks():
            out.warn(remark)
        facts, lines = report.facts(), report.lines()
        if args.output is not None:
            if not places:
                _write_chosen(args.output, report, comparer, args.pictures or _PICTURES)
            facts["output"] = args.output
            lines.append(f"output {args.output}")
        out.result(facts, lines, report.tables(args.output))
    return 0


# --- models and views -------------------------------------------------------------------------------------------------


def _second_model_and_scene(args: CompareArguments) -> tuple[Path | None, Path | None]:
    """Return B where it is a model, and the folder of the scene where one is named. Raises UsageError."""
    from splatcli.cli.model import is_run_folder

    first, other = args.model, args.other
    if first is not None and first.is_dir() and not is_run_folder(first) and other is not None:
        raise UsageError(
            "this folder holds no run, but perhaps a scene", where=first, remedy=f"splat compare {other} {first}"
        )
    if other is None or not other.is_dir() or is_run_folder(other):
        return other, args.data
    if args.data is not None:
        raise exclusion("--data", str(other), remedy="name one scene")
    return None, other


def _load(given: Path | None, args: CompareArguments, device: str, out: Output) -> Model:
    from splatcli.cli.model import find_model, load_model, refuse_empty

    path = find_model(given, out=out, allow_older=args.allow_older)
    model = load_model(path, device, import_options=args.foreign.import_options(), out=out)
    refuse_empty(model, " to compare")
    return model


def _views(
    args: CompareArguments, owner: Model, models: Sequence[Model], data: Path | None
) -> tuple[Views, Scene | None]:
    """Return the views, and their scene where that is not the one of the owner's run. Raises UsageError."""
    from splatcli.cli.model_views import refuse_for_views, views_of
    from splatcli.formats.transform import PLY_UP
    from splatcli.render.outside import views_from_outside
    from splatcli.render.selection import PATHS, PathOptions, Views

    frames = args.frames or _FRAMES
    if owner.checkpoint is None and data is None and args.views is None:
        if len(models) == 1:
            raise UsageError(
                f"{owner.origin} has neither cameras nor photos",
                where=owner.path,
                remedy="name another model, or the scene: splat compare MODEL scene/",
            )
        around = views_from_outside(owner.gaussians, PLY_UP, frames)
        return Views("outside", around, from_run=False), None
    views = args.views or "test"
    if args.frames is not None:
        refuse_for_views("--frames", views, PATHS)
    return views_of(owner, views, data, None, PathOptions(frames))


def _shared_views(chosen: Views, owner: Model, other: Model, out: Output) -> Views:
    """Return the views that two runs share. Raises UsageError where there are none."""
    ours, theirs = owner.checkpoint, other.checkpoint
    if ours is None or theirs is None or not chosen.from_run:
        return chosen
    known = {camera.name for camera in theirs.cameras}
    shared = [camera for camera in chosen.cameras if camera.name in known]
    if not shared:
        raise UsageError(
            f"none of the {len(chosen.cameras)} {chosen.label} views of {owner.path} is a view of {other.path}",
            where="--views",
            remedy="name runs of one scene, or cameras in a frame that both have: --views cameras.json",
        )
    left_out = len(chosen.cameras) - len(shared)
    if left_out:
        out.note(f"{left_out} of {len(chosen.cameras)} views are not among those of {other.path}; left out")
    seen = {theirs.cameras[index].name for index in theirs.train}
    trained = sum(camera.name in seen for camera in shared)
    if chosen.label == "test" and trained:
        out.warn(
            f"{trained} of the {len(shared)} views are held out in {owner.path} but training views of {other.path}, "
            "which flatters the latter"
        )
    return replace(chosen, cameras=shared)


def _comparer(
    models: Sequence[Model],
    owner: Model,
    chosen: Views,
    scene: Scene | None,
    data: Path | None,
    background: tuple[float, float, float] | None,
    out: Output,
) -> Comparer:
    from splatcli.cli.model_views import ground_truth_of
    from splatcli.render.comparison import Comparer

    photos = None
    if chosen.from_run and (scene is not None or owner.checkpoint is not None):
        other = next((model for model in models if model is not owner), None)
        needed = other is None
        photos = ground_truth_of(owner.checkpoint, scene, data, background, needed=needed, out=out, other=other)
    elif len(models) == 1:
        raise UsageError(
            f"the views of {chosen.label} have no photos to compare one model with",
            where="--views",
            remedy="--views test, train or all; or name a second model",
        )
    a, *others = [_rendered(model, owner, chosen, background, out) for model in models]
    return Comparer(a, others[0] if others else None, photos)


def _rendered(
    model: Model, owner: Model, chosen: Views, background: tuple[float, float, float] | None, out: Output
) -> Rendered:
    """Return a model as it is rendered from the cameras of ``owner``."""
    import numpy as np

    from splatcli.render.comparison import Rendered, own_cameras

    ours, theirs = owner.checkpoint, model.checkpoint
    settings = model.render_settings()
    if background is None and ours is not None:
        background = owner.render_settings().background
    if background is not None:
        settings = replace(settings, background=background)
    if ours is None or model is owner:
        return Rendered(model.gaussians, settings)
    if theirs is None:
        if owner.antialiased and not model.antialiased:
            out.note(f"{model.path} is rendered without --antialiased, with which {owner.path} was trained")
        return Rendered(model.gaussians, settings)
    shift = np.subtract(ours.dataset.offset, theirs.dataset.offset)
    known = theirs.refined_cameras() if chosen.from_run else []
    return Rendered(model.gaussians, settings, own_cameras(known, shift))


# --- measuring and writing --------------------------------------------------------------------------------------------


def _is_file(output: Path) -> bool:
    return output.suffix.lower() in (".html", ".png") and not output.is_dir()


def _picture_files(args: CompareArguments, chosen: Views) -> dict[str, Path]:
    """Return the file of each view's picture in a folder; empty for a page, a sheet and no output."""
    from splatcli.output_files import image_paths

    if args.output is None or _is_file(args.output):
        return {}
    names = [camera.name for camera in chosen.cameras]
    places = dict(zip(names, image_paths(names, args.output), strict=True))
    for path in places.values():
        refuse_existing(path, overwrite=args.overwrite)
    return places


def _measure(comparer: Comparer, chosen: Views, places: dict[str, Path]) -> Iterator[ViewFigures]:
    """Yield the figures of the views that can be compared, and write their pictures where they have places."""
    from splatcli.output_files import write_bytes
    from splatcli.render.comparison import score
    from splatcli.render.images import png_bytes, side_by_side

    for camera in track(chosen.cameras, "views"):
        shown = comparer.images(camera)
        if shown is None:
            continue
        if camera.name in places:
            write_bytes(places[camera.name], png_bytes(side_by_side(list(shown.images.values()))))
        yield score(camera, shown)


def _write_chosen(output: Path, report: Report, comparer: Comparer, most: int) -> None:
    """Write the page or the sheet of the views that ``choose`` picks, rendered again. Raises OutputError."""
    from splatcli.output_files import write_bytes
    from splatcli.render.comparison import choose
    from splatcli.render.images import png_bytes

    def shown() -> Iterator[tuple[ViewFigures, str, ViewImages]]:
        for view, reason in track(choose(report.views, most), "pictures"):
            images = comparer.images(view.camera)
            assert images is not None, "it was compared before"
            yield view, reason, images

    if output.suffix.lower() == ".html":
        write_bytes(output, report.page(shown()))
    else:
        write_bytes(output, png_bytes(report.sheet(shown())))
