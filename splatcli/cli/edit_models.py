"""The models of ``splat edit``: each is read and edited, then they are put together; the effects are printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from splatcli.cli.model import find_model, is_run_folder, load_model, refuse_empty
from splatcli.errors import SceneError, UsageError

if TYPE_CHECKING:
    from splatcli.checkpoint.state import Checkpoint
    from splatcli.cli.console import Output
    from splatcli.cli.edit import EditArguments
    from splatcli.cli.model import Model
    from splatcli.edit.clean import Photos
    from splatcli.edit.operations import EditedModel, Effect, Operation
    from splatcli.scene.scene import Scene

#: The value of --overlap that drops Gaussians.
DENSEST = "densest"


@dataclass(frozen=True)
class EditedPart:
    """One of the models after its own operations, before all are put together.

    effects: of its operations, for --json. offset: from the input, None for a file of splats.
    place: notes that say where it lies in the input and on the Earth.
    checkpoint: where one is written, and for --refine. scene: for --refine.
    uses_data: the scene that --data names was read. dropped: Gaussians with NaN or infinite values that the reader left
    out, for operations on all models.
    """

    path: Path
    model: EditedModel
    operations: Sequence[Operation]
    effects: list[dict[str, Any]]
    offset: tuple[float, ...] | None
    place: Sequence[str]
    checkpoint: Checkpoint | None
    scene: Scene | None
    uses_data: bool
    dropped: int


@dataclass
class EditResult:
    """All models together after all operations. facts: for --json.

    is_moved: whether the first was. place: notes that say where it lies in the input and on the Earth: those of the
    first, or of the model that it was aligned with last.
    """

    model: EditedModel
    facts: dict[str, Any]
    is_moved: bool
    place: Sequence[str]


def with_align_targets(operations: Sequence[Operation], out: Output) -> list[Operation]:
    """Return the operations; those of ``--align-to`` have the cameras and Gaussians of the model or scene named."""
    from splatcli.config import DataConfig
    from splatcli.edit.operations import AlignTo
    from splatcli.scene.georeference import place_text
    from splatcli.scene.read import read_scene

    done: list[Operation] = []
    for one in operations:
        if isinstance(one, AlignTo):
            cameras, gaussians, frame = [], None, list[str]()
            if one.path.is_dir() and not is_run_folder(one.path):
                scene = read_scene(one.path, DataConfig())
                cameras, offset = scene.cameras, tuple(scene.offset.tolist())
                frame = _frame(offset, None if scene.place is None else place_text(scene.place))
            else:
                other = load_model(find_model(one.path, out=out), out=out)
                if other.checkpoint is not None:
                    cameras = other.checkpoint.refined_cameras()
                    frame = _frame(other.offset, other.place_note())
                gaussians = replace(other.gaussians, shN=other.gaussians.shN[:, :0].clone())
            places = {camera.name: camera.center for camera in cameras}
            one = replace(one, places=places, gaussians=gaussians, frame=frame)
        done.append(one)
    return done


def _frame(offset: tuple[float, ...], on_earth: str | None) -> list[str]:
    """Return the notes that say where coordinates lie in the input and on the Earth."""
    from splatcli.scene.georeference import offset_text

    return [*([offset_text(offset)] if any(offset) else []), *([on_earth] if on_earth else [])]


def edit_model(
    path: Path, operations: Sequence[Operation], together: Sequence[Operation], args: EditArguments, out: Output
) -> EditedPart:
    """Read a model, apply its own operations, and print their effects. together: the operations of all models."""
    from splatcli.edit.operations import AlignTo, Clean, EditedModel, KeepFinite, Level, Simplify, apply_operations

    alone = len(args.models or []) < 2
    following = [*operations, *(together if alone else [])]
    loaded = _load(path, [*operations, *together], args, out)
    checkpoint = loaded.checkpoint
    if checkpoint is None and args.writes_checkpoint:
        raise UsageError(
            f"{loaded.path} is no checkpoint of splat, and holds no state of a run",
            where="-o",
            remedy="-o edited.ply; to train on: splat train SCENE --init edited.ply",
        )
    scene = None if args.refine is None else _scene_to_refine_on(loaded, following, args.data)
    of_file, photos = None, None
    if checkpoint is not None and any(isinstance(one, Clean) for one in following):
        photos = _photos(checkpoint, args.data, out)
    elif (
        checkpoint is None
        and args.data is not None
        and any(isinstance(one, AlignTo | Clean | Level | Simplify) for one in following)
    ):
        of_file, photos = _scene_of_file(loaded, args.data, out)
    model = EditedModel.as_read(loaded.gaussians, checkpoint, antialiased=loaded.antialiased, scene=of_file)
    model = replace(model, photos=photos, dropped=None if args.picture is None else [])
    model, effects = apply_operations(model, operations, nonfinite=loaded.dropped)
    return EditedPart(
        path=loaded.path,
        model=model,
        operations=operations,
        effects=_report(effects, loaded.path, args, out),
        offset=None if checkpoint is None else tuple(checkpoint.dataset.offset),
        place=_frame(loaded.offset, loaded.place_note()),
        checkpoint=checkpoint if args.writes_checkpoint or args.refine is not None else None,
        scene=scene,
        uses_data=scene is not None or photos is not None,
        dropped=0 if any(isinstance(one, KeepFinite) for one in operations) else loaded.dropped,
    )


def _load(path: Path, operations: Sequence[Operation], args: EditArguments, out: Output) -> Model:
    from splatcli.edit.operations import KeepFinite

    import_options = args.foreign.import_options()
    if any(isinstance(one, KeepFinite) for one in operations):
        import_options = replace(import_options, drop_nonfinite=True)
    model = load_model(path, import_options=import_options, out=out)
    refuse_empty(model, " to edit")
    return model


def _scene_to_refine_on(model: Model, operations: Sequence[Operation], data: Path | None) -> Scene:
    """Return the scene whose photos ``--refine`` trains on. Raises UsageError, SceneError."""
    from splatcli.edit.refine import check_refinable, scene_of

    if model.checkpoint is None:
        raise UsageError(
            f"{model.path} is a file of splats, which has no photos to train on",
            where="--refine",
            remedy="name the run or its checkpoint; or splat train SCENE --init FILE",
        )
    check_refinable(operations)
    return scene_of(model.checkpoint, data)


def _scene_of_file(model: Model, data: Path, out: Output) -> tuple[Scene, Photos]:
    """Return the scene that ``--data`` names for a file of splats, and its photos.

    Cameras have the size at which the model was trained. Raises SceneError.
    """
    from splatcli.config import DataConfig
    from splatcli.edit.clean import Photos
    from splatcli.scene.read import read_scene

    scene = read_scene(data, DataConfig().images_only())
    photos, divisor = Photos.of_scene(scene, model.gaussians, antialiased=model.antialiased)
    if divisor == 1:
        return scene, photos
    out.note(f"images are compared at 1/{divisor} of their width and height, where the model's renders fit best")
    return replace(scene, cameras=[camera.scaled(1 / divisor) for camera in scene.cameras]), photos


def _photos(checkpoint: Checkpoint, data: Path | None, out: Output) -> Photos | None:
    """Return the photos for ``--clean``; None, and a note, where they are gone and ``data`` does not name their scene.

    Raises SceneError where it does and they are not there.
    """
    from splatcli.edit.clean import Photos

    try:
        return Photos.of_checkpoint(checkpoint, data)
    except SceneError as error:
        if data is not None:
            raise
        out.note(f"--clean goes without photos: {error.what} ({error.where}); --data DIR names where they are")
        return None


def _report(effects: Sequence[Effect], path: Path | None, args: EditArguments, out: Output) -> list[dict[str, Any]]:
    """Print the effect of each operation, and return the facts. path: of the model; None for all together."""
    facts = []
    for one in effects:
        line = f"{path if path is not None else 'all'}: {one.line()}"
        if not args.dry_run:
            out.message(line)
        facts.append({"model": path, "operation": one.label, one.verb: one.touched, "left": one.left, "line": line})
    return facts


def warn_of_differences(parts: Sequence[EditedPart], out: Output) -> None:
    """Warn of models that do not belong together as they are."""
    from splatcli.edit.operations import AlignTo, Move

    first = parts[0]
    known: list[EditedPart] = []
    for part in parts:
        if part is not first and part.model.metadata.antialiased != first.model.metadata.antialiased:
            out.warn(f"{part.path}: it and {first.path} were not both trained with --antialiased")
        if part.offset is None:
            continue
        moved = any(isinstance(one, Move | AlignTo) for one in part.operations)
        other = next((one for one in known if one.offset != part.offset), None)
        if other is not None and other.offset is not None and not moved:
            shift = ",".join(f"{a - b:.9g}" for a, b in zip(part.offset, other.offset, strict=True))
            out.warn(
                f"{part.path}: it is stored at another offset from the input than {other.path}; if the two belong "
                f"together, name --translate {shift} after it"
            )
        known.append(part)


def join_models(
    parts: Sequence[EditedPart], operations: Sequence[Operation], args: EditArguments, out: Output
) -> EditResult:
    """Put the models together, apply the operations of all, and print their effects.

    Several models have no cameras and photos in common.
    """
    from splatcli.edit.operations import AlignTo, EditedModel, Level, Move, apply_operations, merged
    from splatcli.edit.overlap import resolve_overlap

    model = parts[0].model
    effects = [effect for part in parts for effect in part.effects]
    if len(parts) > 1:
        left = [part.model.gaussians for part in parts]
        dropped = None if args.picture is None else [gone for part in parts for gone in part.model.dropped or ()]
        if args.overlap == DENSEST:
            left, overlap = resolve_overlap(left, dropped)
            for part, one in zip(parts, overlap, strict=True):
                effects += _report([one], part.path, args, out)
        model = EditedModel(merged(left), model.metadata, dropped=dropped)
    model, applied = apply_operations(model, operations, nonfinite=sum(part.dropped for part in parts))
    effects += _report(applied, None, args, out)
    reads = [part.path for part in parts]
    touched = [*(fact.get("changed", 0) for fact in parts[0].effects), *(one.touched for one in applied)]
    moves = [
        one
        for one, count in zip([*parts[0].operations, *operations], touched, strict=True)
        if count and isinstance(one, Move | Level | AlignTo)
    ]
    place = parts[0].place if not moves else moves[-1].frame if isinstance(moves[-1], AlignTo) else ()
    facts = {"reads": reads, "operations": effects, "num_gaussians": len(model.gaussians)}
    return EditResult(model, facts, bool(moves), place)


def refine_result(result: EditResult, part: EditedPart, steps: int, out: Output, *, dry_run: bool) -> None:
    """Train the Gaussians on the photos of the one model's run, and print that; only say so with ``--dry-run``."""
    from splatcli.edit.refine import refine
    from splatcli.native.backend import resolve_device

    assert part.checkpoint is not None, "it is read for --refine"
    assert part.scene is not None, "it is read for --refine"
    gaussians, photos = result.model.gaussians, len(part.scene.train)
    line = f"{len(gaussians):,} Gaussians, {steps:,} steps on the photos of {photos:,} training views"
    if dry_run:
        line = f"all: --refine {steps}: not run; {line}"
    else:
        refined = refine(gaussians, part.checkpoint, part.scene, steps, resolve_device("auto"))
        result.model = replace(result.model, gaussians=refined)
        line = f"all: --refine {steps}: {line}"
        out.message(line)
    result.facts["refine"] = {"steps": steps, "photos": photos, "line": line}
