"""``splat info``: a path in, a description of its content out."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from splatcli.cli import options
from splatcli.cli.tables import Table
from splatcli.cli.typer_command import Exists, SettingFlags
from splatcli.errors import SceneError, SplatError, UsageError

if TYPE_CHECKING:
    from splatcli.checkpoint.foreign.imported import ImportOptions


#: How the states of findings are shown.
_STATES = {"found": "found", "none": "-", "warning": "WARNING"}

#: The settings that have flags here, too: how a scene is read.
_SCENE_SETTINGS = tuple(
    f"data.{name}"
    for name in (
        *("format", "model", "images", "masks", "mask_mode", "depths", "depth_scale", "depth_type"),
        *("max_pixels", "skip_missing", "allow_outside", "drop_bad_points", "scene_extent"),
        *("points", "skip_bad_images", "strict"),
    )
)


@dataclass(frozen=True)
class InfoArguments:
    """The arguments and options of ``splat info``; ``settings``: dotted key -> given value."""

    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="[PATH]",
            help="Checkpoint, file of splats (.ply, .spz, .sog, ...), run folder or scene, also of other programs. "
            "Without it: the path from a pipe, else the newest run under output/.",
            show_default=False,
        ),
        Exists("this path does not exist", "name a checkpoint, PLY, run folder or scene"),
    ] = None
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="PNG", help="For a scene, also draw its cameras and points from above and from the side."
        ),
    ] = None
    verbose: Annotated[
        bool,
        typer.Option("--verbose", help="For a model, also print why its values are taken for raw or activated."),
    ] = False
    json: options.Json = False
    quiet: options.Quiet = False
    settings: Annotated[dict[str, Any], SettingFlags(_SCENE_SETTINGS)] = field(default_factory=dict)
    foreign: options.ForeignModelOptions = field(default_factory=options.ForeignModelOptions)

    def __post_init__(self) -> None:
        options.require_png(self.plot, "--plot")


def info(args: InfoArguments) -> int:
    """Describe a file or folder and its content.

    A scene is checked as `splat train` checks it before it starts, with the same flags, problems and notes. The report
    lists what was found, what was not, and what looks wrong, with a remedy. Images without cameras are counted. For a
    model it gives size and bounds, and says whether the other commands take it; --verbose adds whether the values of
    another program's file are raw or activated, and why. --json has everything.

    \b
    Examples:
      splat info scene/
      splat info scene/ --plot cameras.png
      splat info scene/ --model sparse/1
      splat info output/scene
      splat info results/garden/ckpts/ckpt_29999_rank0.pt
      splat info scene.ply --json
    """
    from splatcli.cli.console import open_output
    from splatcli.cli.model import find_model, is_run_folder, load_model
    from splatcli.formats.registry import is_own_checkpoint
    from splatcli.output_files import check_file_place

    if args.plot is not None:
        check_file_place(args.plot)
    with open_output(json=args.json, quiet=args.quiet) as out:
        if args.path is not None and args.path.is_dir() and not is_run_folder(args.path):
            bare = _has_no_cameras(args.path, args.settings)
            if args.plot is not None and bare:
                raise UsageError(
                    "these images have no cameras to plot",
                    where="--plot",
                    remedy=f"run splat sfm {args.path} first",
                )
            facts = _photo_facts(args.path) if bare else _scene_or_models(args.path, args.settings, args.plot)
        else:
            if args.plot is not None:
                raise UsageError(
                    "only the cameras of a scene are plotted", where="--plot", remedy="name a scene folder"
                )
            found = find_model(args.path, out=out, allow_older=True)
            import_options = args.foreign.import_options()
            is_run = args.path is not None and args.path.is_dir() and found.suffix != ".json"  # of an unbundled SOG
            if is_own_checkpoint(found):
                facts = _checkpoint_facts(load_model(found, import_options=import_options))
                facts |= {"kind": "run"} if is_run else {}
            else:
                facts = _foreign_facts(found, import_options)
                facts |= {"kind": "foreign run", "train_on": _train_on(args.path)} if is_run else {}
        rows, findings = _rows(facts, verbose=args.verbose), facts.get("findings", [])
        out.result(facts, _lines(rows, findings), _tables(rows, findings))
    return 0


def _has_no_cameras(path: Path, settings: dict[str, Any]) -> bool:
    from splatcli.scene.read import has_images_only

    return not any(settings.get(f"data.{name}") for name in ("format", "model", "images")) and has_images_only(path)


def _photo_facts(path: Path) -> dict[str, Any]:
    """Return the facts of a folder of images without cameras."""
    from splatcli.scene.images import max_pixels
    from splatcli.sfm.images import find_input, readable

    inputs = find_input(path)
    headers, bad = readable(inputs, max_pixels(None))
    return {
        "kind": "photos",
        "path": path,
        "num_photos": len(inputs.names),
        "sizes": sorted({f"{header.width}x{header.height}" for header in headers.values()}),
        "unreadable": sorted(bad),
        "not_read": list(inputs.unread),
        "copies": list(inputs.copies),
        "cameras": "none: splat sfm finds them, and splat train does so first",
    }


def _checkpoint_facts(model: Any) -> dict[str, Any]:
    gaussians, checkpoint = model.gaussians, model.checkpoint
    facts: dict[str, Any] = {
        "kind": "checkpoint",
        **_table_facts(model.path, gaussians.means, gaussians.sh_degree),
        "step": checkpoint.step,
        "iterations": checkpoint.config.train.iterations,
        "active_sh_degree": checkpoint.active_sh_degree,
        "num_train": len(checkpoint.train),
        "num_test": len(checkpoint.test),
        "scene": checkpoint.dataset.root,
        "scene_kind": checkpoint.dataset.kind,
        "scene_present": Path(checkpoint.dataset.root).is_dir(),
        "resumable": checkpoint.moments is not None,
    }
    if checkpoint.skipped:
        facts["skipped_views"] = [checkpoint.cameras[checkpoint.train[row]].name for row in checkpoint.skipped]
    if checkpoint.loss is not None:
        facts["loss"] = f"{checkpoint.loss}, a function of its own: splatcli.Trainer.resume(RUN, loss=...) continues it"
    if any(checkpoint.dataset.offset):
        facts["offset"] = list(checkpoint.dataset.offset)
    return facts


def _table_facts(path: Path, means: Any, sh_degree: int) -> dict[str, Any]:
    from splatcli.formats.registry import bytes_on_disk

    facts: dict[str, Any] = {
        "path": path,
        "bytes": bytes_on_disk(path),
        "num_gaussians": len(means),
        "sh_degree": sh_degree,
    }
    if len(means):
        facts["bounds"] = [means.amin(dim=0).tolist(), means.amax(dim=0).tolist()]
    return facts


def _foreign_facts(path: Path, import_options: ImportOptions) -> dict[str, Any]:
    """Return the facts of a PLY or a checkpoint of another program, also of one that other commands refuse."""
    from splatcli.checkpoint.foreign.imported import to_gaussians
    from splatcli.errors import ModelFileError
    from splatcli.formats.registry import CHECKPOINT, format_of, import_model

    known = format_of(path)
    try:
        model = import_model(path, lenient=import_options.lenient)
    except ModelFileError as error:
        if known.name != "ply":
            raise
        return _header_facts(path, error)
    bad = model.nonfinite()
    finite = model.without_nonfinite() if bad else model
    facts = {
        "kind": "foreign checkpoint" if known is CHECKPOINT else known.name,
        "format": model.origin,
        **_table_facts(path, finite.columns.means, model.sh_degree),
        "num_gaussians": len(model),
    }
    worst = max(finite.space_checks(), key=lambda found: (found.problem is not None, found.space.value != "raw"))
    facts |= {
        "space": worst.space.value,
        "evidence": list(worst.evidence),
        "says_raw": model.declared,
        "unit_quaternions": finite.quats_are_unit(),
        "nonfinite": bad,
    }
    notes = [*model.notes, *finite.remarks()]
    try:
        notes = to_gaussians(model, import_options, path)[1]
        facts |= {"usable": True}
    except ModelFileError as error:
        facts |= {"usable": False, "problem": error.what, "help": error.remedy}
    return facts | {"notes": notes}


def _train_on(run: Path | None) -> str:
    return f"splat train SCENE --init {shlex.quote(str(run))}; other commands take it, but splat resume does not"


def _header_facts(path: Path, problem: SplatError) -> dict[str, Any]:
    """Return the header of a PLY without valid splats. A PLY without a sound header is an error."""
    from splatcli.formats.ply import read_ply_header

    header = read_ply_header(path, lenient=True)
    return {
        "kind": "ply",
        "format": f"PLY, {header.format}",
        "path": path,
        "bytes": path.stat().st_size,
        "elements": [f"{part.count} x {part.name}: {' '.join(part.properties)}" for part in header.elements],
        "comments": header.comments,
        "usable": False,
        "problem": problem.what,
        "help": problem.remedy,
    }


def _scene_or_models(path: Path, settings: dict[str, Any], plot: Path | None) -> dict[str, Any]:
    """Return the facts of a scene. Raise SceneError, which names the models in a folder without cameras."""
    from splatcli.cli.model import models_below
    from splatcli.scene.read import NoCamerasError

    try:
        return _scene_facts(path, settings, plot)
    except NoCamerasError as error:
        below = models_below(path)
        if below is None:
            raise
        raise SceneError(
            "neither a scene nor a run, but there are models in it", where=error.where, remedy=f"name {below}"
        ) from None


def _scene_facts(path: Path, settings: dict[str, Any], plot: Path | None) -> dict[str, Any]:
    from splatcli.config import build_config
    from splatcli.scene.inspect import inspect_scene, mask_notes, masked_share, scene_notes
    from splatcli.scene.read import read_scene

    scene = read_scene(path, build_config(settings).data)
    if plot is not None:
        from splatcli.output_files import scene_name, write_bytes
        from splatcli.render.camera_map import draw_camera_map
        from splatcli.render.images import png_bytes

        write_bytes(plot, png_bytes(draw_camera_map(scene, f"{scene_name(path)}: {len(scene.cameras)} views")))
    share = (masked_share(scene.images) or (None,))[0]
    return {
        "kind": "scene",
        "path": path,
        "scene_kind": scene.kind,
        "num_cameras": len(scene.cameras),
        "num_train": len(scene.train),
        "num_test": len(scene.test),
        "num_points": len(scene.points.xyz) if scene.points is not None else 0,
        "sizes": sorted({f"{camera.width}x{camera.height}" for camera in scene.cameras}),
        "extent": scene.extent,
        **({"offset": scene.offset.tolist()} if scene.offset.any() else {}),
        "missing_photos": [c.name for i, c in enumerate(scene.cameras) if not scene.images.has(i)],
        **({"hidden": share} if share is not None else {}),
        **({"plot": plot} if plot is not None else {}),
        "notes": [*scene.notes, *mask_notes(scene.images), *scene_notes(scene)],
        "findings": [finding.as_dict() for finding in inspect_scene(scene)],
    }


def _lines(rows: list[tuple[str, str]], findings: list[dict[str, Any]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {text}" for name, text in rows] + _finding_lines(findings)


def _tables(rows: list[tuple[str, str]], findings: list[dict[str, Any]]) -> list[Table]:
    """Return what _lines() says, for a terminal."""
    found = [
        (_STATES[one["state"]], one["subject"], one["text"] + (f"\nhelp: {one['help']}" if one["help"] else ""))
        for one in findings
    ]
    return [Table(rows), *([Table(found)] if found else [])]


def _rows(facts: dict[str, Any], *, verbose: bool) -> list[tuple[str, str]]:
    """Return the facts to show, by name: the main ones of a model, or all if ``verbose``."""
    shown = dict(facts)
    shown.pop("findings", None)
    rows = list(_model_rows(shown)) if "num_gaussians" in facts or "usable" in facts else []
    rest = shown if verbose or not rows else {}
    return rows + [(_NAMES.get(key, key.replace("_", " ")), _text(value)) for key, value in rest.items()]


#: Names of facts that are not those of their keys.
_NAMES = {
    "space": "values",
    "says_raw": "file says that they are raw",
    "nonfinite": "NaN or infinite",
    "num_cameras": "cameras",
    "num_photos": "photos",
    "num_points": "points",
    "num_train": "training views",
    "num_test": "held-out views",
}


def _model_rows(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the main facts of a model, by name, and take them out of ``facts``."""
    kind = facts.pop("kind")
    form = facts.pop("format", None)
    yield "kind", kind if form is None else form if kind not in _CHECKPOINTS else f"{kind}: {form}"
    yield "path", str(facts.pop("path"))
    if "num_gaussians" in facts:
        yield "Gaussians", f"{facts.pop('num_gaussians'):,}"
        yield "SH degree", str(facts.pop("sh_degree"))
    size = facts.pop("bytes")
    yield "size", f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size:,} bytes"
    if "bounds" in facts:
        spans = zip("xyz", *facts.pop("bounds"), strict=True)
        yield "bounds", ", ".join(f"{axis} {low:.4g} to {high:.4g}" for axis, low, high in spans)
    if "step" in facts:
        step, last = facts.pop("step"), facts.pop("iterations")
        yield "step", f"{step:,} of {last:,}"
        yield "views", f"{facts.pop('num_train')} to train on, {facts.pop('num_test')} held out"
        there = "" if facts.pop("scene_present") else ", which is not there"
        yield "scene", f"{facts.pop('scene')} ({facts.pop('scene_kind')}){there}"
        further = "the run is finished" if step >= last else "splat resume continues the run"
        yield "state", f"sound; {further if facts.pop('resumable') else 'it is a model alone, which does not resume'}"
    elif facts.pop("usable"):
        yield "state", "sound; the other commands take it"
    else:
        yield "state", f"not taken by other commands: {facts.pop('problem')}"
        if (remedy := facts.pop("help")) is not None:
            yield "help", remedy
    for key in ("skipped_views", "loss", "offset", "train_on", "elements"):
        if key in facts:
            yield key.replace("_", " "), _text(facts.pop(key))
    if notes := facts.pop("notes", []):
        yield "notes", _text(notes)


#: Kinds whose format does not say what they are.
_CHECKPOINTS = ("foreign checkpoint", "foreign run")


def _finding_lines(findings: list[dict[str, Any]]) -> list[str]:
    """Return a line for each finding, and its remedy below."""
    lines = [""] if findings else []
    for finding in findings:
        lines.append(f"{_STATES[finding['state']]:<8}  {finding['subject']:<10}  {finding['text']}")
        if finding["help"] is not None:
            lines.append(f"{'':<22}help: {finding['help']}")
    return lines


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        parts = [f"({_text(part)})" if isinstance(part, list) else _text(part) for part in value]
        return "; ".join(parts) or "none"
    return str(value)
