"""``splat edit``: models in, operations in the order of the command line, one file out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from splatcli.cli import options
from splatcli.cli.edit_order import ORDERED, OUTPUT, operations_by_model
from splatcli.cli.export import COMMENTED, LOD_LEVELS, offset_note, place_note, write_stream
from splatcli.errors import OutputError, SceneError, UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from splatcli.checkpoint.state import Checkpoint
    from splatcli.cli.console import Output
    from splatcli.cli.model import Model
    from splatcli.edit.clean import Photos
    from splatcli.edit.operations import Effect, Operation
    from splatcli.edit.transform import Similarity
    from splatcli.formats.format import ExportMetadata, Format
    from splatcli.gaussians import Gaussians
    from splatcli.scene.camera import Camera
    from splatcli.scene.scene import Scene

#: The value of --overlap that drops Gaussians.
_DENSEST = "densest"
#: The end of the name of a checkpoint.
_CHECKPOINT = ".pt"


def _option(*names: str, metavar: str, text: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=text, show_default=False, rich_help_panel="Operations")


@dataclass(frozen=True)
class EditArguments:
    """The arguments and options of ``splat edit``.

    The operations' own fields are there for the help: EditCommand moves what they are given to ``ordered``.
    """

    models: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Checkpoints, files of splats (.ply, .spz, .sog, ...) or run folders, also of other programs; several "
            "are put together in their own coordinates. Without one: the path from a pipe, else the newest run under "
            "output/.",
            show_default=False,
        ),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(
            *OUTPUT,
            metavar="FILE",
            help="File to write; the end of its name selects the format, as for splat export, and .pt a checkpoint for "
            "splat resume, where Gaussians are only dropped. - writes a PLY to stdout.  [required]",
            show_default=False,
        ),
    ] = None
    translate: Annotated[
        list[str] | None, _option("-t", "--translate", metavar="X,Y,Z", text="Add to the positions.")
    ] = None
    rotate: Annotated[
        list[str] | None,
        _option(
            *("-r", "--rotate"),
            metavar="X,Y,Z",
            text="Rotate about the origin by degrees about the x axis, then about the y axis, then about the z axis, "
            "each of them fixed.",
        ),
    ] = None
    level: Annotated[
        list[str] | None,
        _option(
            "--level",
            metavar="AXIS",
            text="Rotate about the origin so that up is along AXIS: -y, as in most PLY files, y, z, x, -x or -z. Up is "
            "that of the training cameras of a checkpoint, else the normal of the dominant plane.",
        ),
    ] = None
    align_to: Annotated[
        list[str] | None,
        _option(
            "--align-to",
            metavar="OTHER",
            text="Rotate, scale and move onto OTHER: a run, a checkpoint, a scene or a file of splats. The training "
            "cameras come onto those of the same images; where one of both has none, Gaussians onto Gaussians.",
        ),
    ] = None
    scale: Annotated[
        list[str] | None, _option("-s", "--scale", metavar="S", text="Scale from the origin by a factor.")
    ] = None
    scale_from: Annotated[
        list[str] | None,
        _option(
            "--scale-from",
            metavar="X0,Y0,Z0,X1,Y1,Z1,LENGTH",
            text="Scale from the origin so that these two points are LENGTH apart.",
        ),
    ] = None
    crop: Annotated[
        list[str] | None,
        _option(
            "--crop",
            metavar="REGION",
            text="Keep Gaussians whose mean is inside box:X0,Y0,Z0,X1,Y1,Z1, sphere:X,Y,Z,RADIUS, seen along z "
            "polygon:z:X0,Y0,X1,Y1,X2,Y2 of any number of corners, or one of the regions on the lines of file:PATH.",
        ),
    ] = None
    crop_out: Annotated[
        list[str] | None,
        _option("--crop-out", metavar="REGION", text="Drop Gaussians whose mean is inside such a region."),
    ] = None
    filter: Annotated[
        list[str] | None,
        _option(
            "--filter",
            metavar="CONDITION",
            text="Keep Gaussians that match, for example 'opacity>0.1' or 'scale<=2': x, y, z, opacity, scale (longest "
            "standard deviation), min_scale, anisotropy (longest by shortest), volume (of the ellipsoid at one "
            "standard deviation), with < <= > >= == or !=. nan: drop those with NaN or infinite values.",
        ),
    ] = None
    sh_degree: Annotated[
        list[str] | None, _option("--sh-degree", metavar="D", text="Leave out SH coefficients above degree D.")
    ] = None
    simplify: Annotated[
        list[str] | None,
        _option(
            "--simplify",
            metavar="N",
            text="Merge neighbours until N Gaussians are left: a number (100k), a share (0.5) or 50%. The cameras of a "
            "checkpoint tell which ones the images need.",
        ),
    ] = None
    clean: Annotated[
        list[str] | None,
        _option(
            "--clean",
            metavar="[light|normal|strong]",
            text="Drop floaters: by the photos and cameras of a checkpoint, and in a file of splats by their "
            "neighbours.  [default: normal]",
        ),
    ] = None
    reorder: Annotated[
        list[str] | None,
        _option(
            "--reorder", metavar="morton", text="Sort Gaussians along a Z curve: neighbours in space, in the file."
        ),
    ] = None
    ordered: Annotated[list[str] | None, typer.Option(ORDERED, hidden=True)] = None
    refine: Annotated[
        int | None,
        typer.Option(
            "--refine",
            metavar="STEPS",
            min=1,
            help="After all operations, train the Gaussians that are left for STEPS steps on the photos of the run's "
            "training views; none is added or removed. For one run or checkpoint whose photos are there.",
            show_default=False,
            rich_help_panel="Operations",
        ),
    ] = None
    overwrite: Annotated[bool, typer.Option("-w", "--overwrite", help="Replace a file that is already there.")] = False
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print how many Gaussians each operation touches, and write nothing."),
    ] = False
    overlap: Annotated[
        str,
        typer.Option(
            "--overlap",
            metavar="HOW",
            help="Where several models fill the same space: keep all of them, or only the densest one there.",
        ),
    ] = "keep"
    picture: Annotated[
        Path | None,
        typer.Option(
            "--picture",
            metavar="FILE.png",
            help="Also draw what is dropped, in red over what stays; with --dry-run that is all that is written.",
            show_default=False,
        ),
    ] = None
    data: options.Data = None
    allow_older: options.AllowOlder = False
    json: options.Json = False
    quiet: options.Quiet = False
    foreign: options.ForeignModelOptions = field(default_factory=options.ForeignModelOptions)

    def __post_init__(self) -> None:
        if self.output is None and not self.dry_run:
            raise UsageError("no file to write is named", where="-o", remedy="splat edit MODEL -o edited.ply --scale 2")
        if any((self.translate, self.rotate, self.scale)):
            raise UsageError("an operation is in one word with another flag", where="-t, -r, -s", remedy="-w -t 0,0,1")
        if self.output is not None and self.output.suffix.lower() in (".pth", ".ckpt"):
            raise UsageError("checkpoints of other programs are only read", where="-o", remedy="-o edited.pt")
        if self.writes_checkpoint:
            self._check_checkpoint()
        if self.overlap not in ("keep", _DENSEST):
            raise UsageError(f"there is no {self.overlap!r}", where="--overlap", remedy="keep or densest")
        if self.overlap == _DENSEST and len(self.models or []) < 2:
            raise UsageError("one model overlaps no other", where="--overlap", remedy="name several models")
        if self.refine is not None and len(self.models or []) > 1:
            raise UsageError(
                "several models have no photos in common to train on",
                where="--refine",
                remedy="refine each in a command of its own, and put the files together",
            )
        if self.picture is not None and self.picture.suffix.lower() != ".png":
            raise UsageError("pictures are PNG files", where="--picture", remedy="--picture edit.png")
        if self.output is not None and self.output.suffix.lower() == ".json":
            raise UsageError(
                "cameras alone are not edited",
                where="-o",
                remedy="splat export MODEL -o cameras.json, or -o edited.ply",
            )

    @property
    def writes_checkpoint(self) -> bool:
        return self.output is not None and self.output.suffix.lower() == _CHECKPOINT

    def _check_checkpoint(self) -> None:
        remedy = "-o edited.ply; to train on: splat train SCENE --init edited.ply"
        if len(self.models or []) > 1:
            raise UsageError("several models are no state of one run", where="-o", remedy=remedy)
        if self.refine is not None:
            raise UsageError("--refine does not train the state of the run", where="-o", remedy=remedy)
        if self.output is not None and self.output.absolute().parent.name == "ckpts":
            raise UsageError(
                "a run writes its own checkpoints there",
                where=self.output,
                remedy="-o edited.pt; splat resume edited.pt continues in a run folder of its own",
            )


def edit(args: EditArguments) -> int:
    """Move, cut and clean models after training, and put several together.

    Prints the path of the file. Operations apply in the order given: those after a MODEL to that model, those after -o
    to all together. Rotations turn SH coefficients along, so that the scene looks the same from a camera that moves
    with it; the first view of a page moves, too. Coordinates are those of a PLY. A file that is there stays without -w
    (`splat docs edit`).

    \b
    Examples:
      splat edit output/scene -o small.spz --crop sphere:0,0,0,5 --filter 'opacity>0.05'
      splat edit scene.ply -o upright.ply --rotate 90,0,0 --scale 0.5
      splat edit room.ply chair.ply --scale 0.1 --translate 1,0,2 -o both.ply
      splat edit download.ply -o clean.ply --filter nan --filter 'scale<3' --reorder morton
      splat edit output/scene -o phone.sog --simplify 50%
      splat edit output/scene -o phone.sog --simplify 25% --refine 500
      splat edit output/scene -o clean.ply --clean
      splat edit east.ply west.ply -o both.ply --overlap densest
      splat edit output/scene -o clean.pt --clean && splat resume clean.pt --iterations 10000
      splat edit scene.ply --crop-out box:-1,-1,-1,1,1,1 --dry-run --picture edit.png
    """
    from splatcli.cli.console import open_output

    own, together = operations_by_model(args.ordered or [], len(args.models or [None]))
    target = _Target.of(args, [*own[0], *together])
    with open_output(json=args.json, quiet=args.quiet) as out:
        own = [_with_others(operations, out) for operations in own]
        together = _with_others(together, out)
        given: list[Path | None] = [*args.models] if args.models else [None]
        parts = [_part(path, operations, together, args, out) for path, operations in zip(given, own, strict=True)]
        _warn_of_differences(parts, out)
        metadata = _metadata(parts[0], target, out)
        whole = _together(parts, together, args, out)
        metadata = _moved_metadata(metadata, whole.similarity)
        if parts[0].to_refine is not None and args.refine is not None:
            whole.gaussians, line = _refined(whole.gaussians, *parts[0].to_refine, args.refine, out, args.dry_run)
            photos = len(parts[0].to_refine[1].train)
            whole.facts["refine"] = {"steps": args.refine, "photos": photos, "line": line}
        if args.picture is not None:
            _draw(whole.gaussians, whole.dropped, whole.cameras, whole.up, metadata.antialiased, args.picture)
            whole.facts["picture"] = args.picture
            out.note(f"{args.picture}: what is dropped, in red over what stays")
        if args.dry_run:
            lines = [f"reads  {part.path}" for part in parts]
            lines += [one["line"] for one in whole.facts["operations"]]
            lines += [whole.facts["refine"]["line"]] if "refine" in whole.facts else []
            lines += [f"makes  {target.path or 'a file'}: {len(whole.gaussians):,} Gaussians"]
            out.result({"dry_run": True, "makes": target.path, "replaces": target.replaces, **whole.facts}, lines)
        else:
            target.write(whole, metadata, parts[0].checkpoint, out)
    return 0


@dataclass(frozen=True)
class _Target:
    """The output: a file of a format or stdout, a streamed SOG, or a checkpoint, which has no format.

    path: None where nothing is written. replaces: whether something is there. folder: of a streamed SOG.
    """

    path: Path | None
    format: Format | None
    replaces: bool
    folder: Path | None = None

    @classmethod
    def of(cls, args: EditArguments, operations: list[Operation]) -> _Target:
        """operations: all of the first model. Raises UsageError, OutputError."""
        from splatcli.cli.console import stdout_or
        from splatcli.edit.run_state import check_droppable
        from splatcli.formats import streamed_sog
        from splatcli.formats.registry import format_to_write

        for file in (args.output, args.picture):
            if file is not None and file.is_file() and not args.overwrite:
                raise OutputError("the file is already there", where=file, remedy="-w replaces it")
        if args.output is None:
            return cls(None, None, replaces=False)
        path = stdout_or(args.output)
        if args.writes_checkpoint:
            check_droppable(operations)
            return cls(path, None, path.is_file())
        folder = streamed_sog.folder_to_write(path, None)
        if folder is not None:
            streamed_sog.check_folder(folder, overwrite=args.overwrite)
            return cls(folder, streamed_sog.FORMAT, folder.exists(), folder)
        return cls(path, format_to_write(path, "ply" if str(path) == "-" else None), path.is_file())

    def write(self, whole: _Whole, metadata: ExportMetadata, checkpoint: Checkpoint | None, out: Output) -> None:
        """checkpoint: the one that was edited, where a checkpoint is written."""
        from splatcli.checkpoint.file import save_checkpoint
        from splatcli.edit.run_state import only_rows
        from splatcli.edit.simplify import contributions
        from splatcli.render.images import make_parent_folder, write_bytes

        assert self.path is not None, "checked with the arguments"
        if self.format is None:
            assert checkpoint is not None
            assert whole.rows is not None, "Gaussians were dropped, and nothing else"
            make_parent_folder(self.path)
            save_checkpoint(self.path, only_rows(checkpoint, whole.rows))
        elif self.folder is not None:
            gaussians = _as_held(whole.gaussians, self.format, out)
            masses = contributions(gaussians, whole.cameras) if whole.cameras else None
            if masses is None:
                out.note("note: without cameras of one run, none tell which Gaussians count")
            facts = write_stream(gaussians, metadata, self.folder, LOD_LEVELS, masses, out)
            out.result({**whole.facts, **facts}, [facts["path"]])
            return
        elif self.format.name == "ply" and str(self.path) != "-":
            _write_ply(whole.gaussians, metadata, self.path, out)
        else:
            payload = _encoded(whole.gaussians, self.format, metadata, out)
            if str(self.path) == "-":
                out.data(payload)
                return
            write_bytes(self.path, payload)
        out.result({"path": self.path, **whole.facts}, [self.path])


@dataclass
class _Part:
    """A model after its own operations.

    effects: of these, as facts. dropped, cameras, up: in the coordinates of the result; cameras of training, None for
    up where it is not known. moves: whether an operation of all of them moves it. rows: see Edited.
    to_refine: what --refine needs. checkpoint: what a checkpoint as output needs.
    antialiased, offset, notes: of its training; offset is None where it has none, notes say where it lies.
    """

    path: Path
    gaussians: Gaussians
    similarity: Similarity
    effects: list[dict[str, Any]]
    dropped: list[Gaussians]
    cameras: list[Camera]
    photos: Photos | None
    up: NDArray[np.float64] | None
    metadata: ExportMetadata
    rows: Tensor | None
    moves: bool
    placed: bool
    offset: tuple[float, ...] | None
    notes: list[str]
    to_refine: tuple[Checkpoint, Scene] | None
    checkpoint: Checkpoint | None


def _part(
    path: Path | None, operations: list[Operation], together: list[Operation], args: EditArguments, out: Output
) -> _Part:
    """Read a model, apply its own operations, and print their effects. together: the operations of all models."""
    from splatcli.edit.operations import AlignTo, Clean, Level, Move, apply_operations
    from splatcli.edit.transform import move_camera
    from splatcli.formats.format import ExportMetadata

    alone = len(args.models or []) < 2
    following = [*operations, *(together if alone else [])]
    model = _load(path, operations, args, out)
    checkpoint = model.checkpoint
    if checkpoint is None and args.writes_checkpoint:
        raise UsageError(
            f"{model.path} is no checkpoint of splat, and holds no state of a run",
            where="-o",
            remedy="-o edited.ply; to train on: splat train SCENE --init edited.ply",
        )
    to_refine = None if args.refine is None else _run_to_refine(model, following, args.data)
    cameras, up = _training_cameras(model), _known_up(model)
    photos = _photos(model, args.data, out) if any(isinstance(one, Clean) for one in following) else None
    dropped: list[Gaussians] = []
    edited = apply_operations(
        model.gaussians,
        operations,
        nonfinite=model.dropped,
        cameras=cameras,
        photos=photos,
        up=up,
        dropped=None if args.picture is None else dropped,
    )
    notes: list[str] = []
    if checkpoint is not None:
        offset, place = checkpoint.dataset.offset, place_note(checkpoint)
        notes = [*([offset_note(offset)] if any(offset) else []), *([place] if place else [])]
    return _Part(
        path=model.path,
        gaussians=edited.gaussians,
        similarity=edited.similarity,
        effects=_report(edited.effects, model.path, out, dry_run=args.dry_run),
        dropped=dropped,
        cameras=[move_camera(camera, edited.similarity) for camera in cameras] if alone else [],
        photos=photos if alone else None,
        up=edited.similarity.rotation @ up if alone and up is not None else None,
        metadata=_moved_metadata(ExportMetadata.of(checkpoint, []), edited.similarity),
        rows=edited.rows,
        moves=any(isinstance(one, Move | Level | AlignTo) for one in [*operations, *together]),
        placed=any(isinstance(one, Move | AlignTo) for one in operations),
        offset=None if checkpoint is None else tuple(checkpoint.dataset.offset),
        notes=notes,
        to_refine=to_refine,
        checkpoint=checkpoint if args.writes_checkpoint else None,
    )


def _warn_of_differences(parts: list[_Part], out: Output) -> None:
    """Warn of models that do not belong together as they are."""
    first = parts[0]
    known: list[_Part] = []
    for part in parts:
        if part.offset is None:
            continue
        if part is not first and part.metadata.antialiased != first.metadata.antialiased:
            out.warn(f"{part.path}: it and {first.path} were not both trained with --antialiased")
        other = next((one for one in known if one.offset != part.offset), None)
        if other is not None and other.offset is not None and not part.placed:
            shift = ",".join(f"{a - b:.9g}" for a, b in zip(part.offset, other.offset, strict=True))
            out.warn(
                f"{part.path}: it is stored at another offset from the input than {other.path}; if the two belong "
                f"together, name --translate {shift} after it"
            )
        known.append(part)


@dataclass
class _Whole:
    """All models together. facts: for --json. The others: as those of a part."""

    gaussians: Gaussians
    similarity: Similarity
    dropped: list[Gaussians]
    cameras: list[Camera]
    up: NDArray[np.float64] | None
    rows: Tensor | None
    facts: dict[str, Any]


def _together(parts: list[_Part], operations: list[Operation], args: EditArguments, out: Output) -> _Whole:
    """Put the models together, apply the operations of all, and print their effects."""
    from splatcli.edit.operations import apply_operations, merged
    from splatcli.edit.overlap import resolve_overlap
    from splatcli.edit.transform import move_camera

    first = parts[0]
    effects = [effect for part in parts for effect in part.effects]
    dropped = None if args.picture is None else [gone for part in parts for gone in part.dropped]
    left = [part.gaussians for part in parts]
    if args.overlap == _DENSEST:
        left, overlap = resolve_overlap(left, dropped)
        for part, one in zip(parts, overlap, strict=True):
            effects += _report([one], part.path, out, dry_run=args.dry_run)
    edited = apply_operations(
        merged(left), operations, cameras=first.cameras, photos=first.photos, up=first.up, dropped=dropped
    )
    effects += _report(edited.effects, None, out, dry_run=args.dry_run)
    rows = None if first.rows is None or edited.rows is None or len(parts) > 1 else first.rows[edited.rows]
    return _Whole(
        gaussians=edited.gaussians,
        similarity=edited.similarity,
        dropped=dropped or [],
        cameras=[move_camera(camera, edited.similarity) for camera in first.cameras],
        up=None if first.up is None else edited.similarity.rotation @ first.up,
        rows=rows,
        facts={
            "reads": [part.path for part in parts],
            "operations": effects,
            "num_gaussians": len(edited.gaussians),
        },
    )


def _with_others(operations: list[Operation], out: Output) -> list[Operation]:
    """Return the operations; those that align with another model or scene know its cameras and Gaussians."""
    from splatcli.cli.model import find_model, is_run_folder, load_model
    from splatcli.config import DataConfig
    from splatcli.edit.operations import AlignTo
    from splatcli.scene.read import read_scene

    done: list[Operation] = []
    for one in operations:
        if isinstance(one, AlignTo):
            cameras, gaussians = [], None
            if one.path.is_dir() and not is_run_folder(one.path):
                cameras = read_scene(one.path, DataConfig()).cameras
            else:
                other = load_model(find_model(one.path, out=out), echo=out.note)
                cameras = [] if other.checkpoint is None else other.checkpoint.refined_cameras()
                gaussians = replace(other.gaussians, shN=other.gaussians.shN[:, :0].clone())
            places = {camera.name: camera.center for camera in cameras}
            one = replace(one, places=places, gaussians=gaussians)
        done.append(one)
    return done


def _load(path: Path | None, operations: list[Operation], args: EditArguments, out: Output) -> Model:
    from splatcli.cli.model import find_model, load_model
    from splatcli.edit.operations import KeepFinite

    found = find_model(path, out=out, allow_older=args.allow_older)
    import_options = args.foreign.import_options()
    if any(isinstance(one, KeepFinite) for one in operations):
        import_options = replace(import_options, drop_nonfinite=True)
    model = load_model(found, import_options=import_options, echo=out.note)
    if not len(model.gaussians):
        raise UsageError("the model has no Gaussians to edit", where=found, remedy="name another model")
    return model


def _training_cameras(model: Model) -> list[Camera]:
    """Return the cameras that a checkpoint was trained on, in its coordinates."""
    if model.checkpoint is None:
        return []
    cameras = model.checkpoint.refined_cameras()
    return [cameras[index] for index in model.checkpoint.train]


def _photos(model: Model, data: Path | None, out: Output) -> Photos | None:
    """Return the photos of a checkpoint's training views; None, and a note, where they are gone.

    data: the scene, where it has moved. Raises SceneError where that is named and has no such photos.
    """
    from splatcli.edit.clean import Photos
    from splatcli.scene.read import read_scene
    from splatcli.train.evaluate import BACKGROUNDS, evaluation_background, image_background

    checkpoint = model.checkpoint
    if checkpoint is None:
        return None
    config = checkpoint.config
    root = data or Path(checkpoint.dataset.root)
    try:
        scene = read_scene(root, config.data.without_depths(), background=image_background(config))
        index = {camera.name: row for row, camera in enumerate(scene.cameras) if scene.images.has(row)}
        missing = next((one.name for one in _training_cameras(model) if one.name not in index), None)
        if missing is not None:
            raise SceneError(f"the scene has no image {missing}", where=root, remedy="name its scene: --data DIR")
    except SceneError as error:
        if data is not None:
            raise
        out.note(f"note: --clean goes without photos: {error.what} ({error.where}); --data DIR names where they are")
        return None

    def load(name: str) -> tuple[NDArray[np.uint8], NDArray[np.bool_] | None]:
        image = scene.images.image(index[name])
        return image.pixels, image.masked

    background = BACKGROUNDS[evaluation_background(config)]
    coloured = any(not name.startswith("pose") for name in checkpoint.views)
    return Photos(load, background, config.train.antialiased, coloured)


def _known_up(model: Model) -> NDArray[np.float64] | None:
    """Return up, [3] unit, where the model has a place on the Earth: z then."""
    import numpy as np

    placed = model.checkpoint is not None and model.checkpoint.dataset.place is not None
    return np.array([0.0, 0.0, 1.0]) if placed else None


def _report(effects: list[Effect], path: Path | None, out: Output, *, dry_run: bool) -> list[dict[str, Any]]:
    """Print the effect of each operation, and return the facts."""
    facts = []
    for one in effects:
        line = f"{path if path is not None else 'all'}: {one.line()}"
        if not dry_run:
            out.note(line)
        facts.append(
            {
                "model": path,
                "operation": one.label,
                one.verb: one.touched,
                "left": one.left,
                "line": line,
            }
        )
    return facts


def _run_to_refine(model: Model, operations: list[Operation], data: Path | None) -> tuple[Checkpoint, Scene]:
    """Return what --refine needs of a model beside its Gaussians. Raises UsageError, SceneError."""
    from splatcli.edit.refine import check_refinable, scene_of

    if model.checkpoint is None:
        raise UsageError(
            f"{model.path} is a file of splats, which has no photos to train on",
            where="--refine",
            remedy="name the run or its checkpoint; or splat train SCENE --init FILE",
        )
    check_refinable(operations)
    return model.checkpoint, scene_of(model.checkpoint, data)


def _refined(
    gaussians: Gaussians, checkpoint: Checkpoint, scene: Scene, steps: int, out: Output, dry_run: bool
) -> tuple[Gaussians, str]:
    """Return the Gaussians after ``steps`` steps on the scene's photos, and the line that says so, which is printed."""
    from splatcli.edit.refine import refine
    from splatcli.native.backend import resolve_device

    what = f"{len(gaussians):,} Gaussians, {steps:,} steps on the photos of {len(scene.train):,} training views"
    if dry_run:
        return gaussians, f"all: --refine {steps}: not run; {what}"
    gaussians = refine(gaussians, checkpoint, scene, steps, resolve_device("auto"))
    line = f"all: --refine {steps}: {what}"
    out.note(line)
    return gaussians, line


def _draw(
    gaussians: Gaussians,
    dropped: list[Gaussians],
    cameras: list[Camera],
    up: NDArray[np.float64] | None,
    antialiased: bool,
    path: Path,
) -> None:
    from splatcli.edit.level import up_of_cameras
    from splatcli.edit.operations import merged
    from splatcli.edit.picture import draw
    from splatcli.render.images import png_bytes, write_bytes

    gone = merged(dropped) if dropped else gaussians.map(lambda tensor: tensor[:0])
    known = up_of_cameras(cameras) if up is None and cameras else up
    write_bytes(path, png_bytes(draw(gaussians, gone, cameras, known, antialiased=antialiased)))


def _metadata(part: _Part, target: _Target, out: Output) -> ExportMetadata:
    """Return the facts of a model beside its Gaussians, and print which of them get lost.

    What maps coordinates to those of the input or to the Earth holds only where no operation moves the model.
    """
    if part.moves and part.notes:
        out.note("note: the model is moved, so that its place and its offset from the input are left out")
    if part.moves:
        return part.metadata
    if target.format is not None and target.format.name not in COMMENTED:
        for text in part.notes:
            out.note(f"note: {text}; {target.format.title} has no place for that")
    return replace(part.metadata, comments=tuple(f"splatcli: {text}" for text in part.notes))


def _moved_metadata(metadata: ExportMetadata, similarity: Similarity) -> ExportMetadata:
    from splatcli.edit.transform import move_camera

    if similarity.is_identity:
        return metadata
    camera = None if metadata.camera is None else move_camera(metadata.camera, similarity)
    up = None if metadata.up is None else similarity.rotation @ metadata.up
    z_up = metadata.z_up and up is not None and bool(abs(up - [0.0, 0.0, 1.0]).max() < _SAME)
    return replace(metadata, camera=camera, up=up, z_up=z_up)


#: Directions that differ by less are the same.
_SAME = 1e-9


def _write_ply(gaussians: Gaussians, metadata: ExportMetadata, output: Path, out: Output) -> None:
    """Write a PLY in parts: large models are edited into this format, and its content is as large as the model."""
    from splatcli.formats.ply import ply_comments, write_ply_file
    from splatcli.render.images import make_parent_folder

    comments, notes = ply_comments(metadata)
    make_parent_folder(output)
    write_ply_file(gaussians, output, comments)
    for note in notes:
        out.note(f"note: {note}")


def _encoded(gaussians: Gaussians, chosen: Format, metadata: ExportMetadata, out: Output) -> bytes:
    """Return the content of a file, and print what its format could not hold."""
    assert chosen.write is not None, "format_to_write() gives formats that are written"
    encoded = chosen.write(_as_held(gaussians, chosen, out), metadata)
    for note in encoded.notes:
        out.note(f"note: {note}")
    return encoded.payload


def _as_held(gaussians: Gaussians, chosen: Format, out: Output) -> Gaussians:
    """Return the Gaussians with the SH degree that a format holds, and print that it is lower."""
    from splatcli.formats.selection import select

    if gaussians.sh_degree <= chosen.sh_degree:
        return gaussians
    out.note(f"note: SH degree {gaussians.sh_degree} -> {chosen.sh_degree}, the most that {chosen.title} holds")
    return select(gaussians, sh_degree=chosen.sh_degree)[0]
