"""The output of ``splat edit``: a file of splats, a streamed SOG, a checkpoint, a picture; or what would be written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from splatcli.cli.export import LOD_LEVELS, write_stream
from splatcli.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from splatcli.checkpoint.state import Checkpoint
    from splatcli.cli.console import Output
    from splatcli.cli.edit import EditArguments
    from splatcli.cli.edit_models import EditedPart, EditResult
    from splatcli.edit.operations import Operation
    from splatcli.formats.format import ExportMetadata, Format
    from splatcli.gaussians import Gaussians


@dataclass(frozen=True)
class EditTarget:
    """The output: a file of a format or stdout, a streamed SOG, or a checkpoint, which has no format.

    path: None where nothing is written. replaces: whether something is there. folder: of a streamed SOG.
    """

    path: Path | None
    format: Format | None
    replaces: bool
    folder: Path | None = None

    @classmethod
    def of(cls, args: EditArguments, operations: Sequence[Operation]) -> EditTarget:
        """Return the target of an edit. operations: all of the first model. Raises UsageError, OutputError."""
        from splatcli.cli.console import stdout_or
        from splatcli.formats import streamed_sog
        from splatcli.formats.registry import format_to_write
        from splatcli.output_files import check_file_place, check_place, refuse_existing

        path = None if args.output is None else stdout_or(args.output, json=args.json and not args.dry_run)
        for file in (path, args.picture):
            if file is not None and str(file) != "-":
                refuse_existing(file, overwrite=args.overwrite)
        if args.picture is not None:
            check_file_place(args.picture)
        if path is None:
            return cls(None, None, replaces=False)
        folder = streamed_sog.folder_to_write(path, None)
        if not args.dry_run and str(path) != "-":
            check_file_place(path) if folder is None else check_place(folder)
        if args.writes_checkpoint:
            _check_droppable(operations)
            return cls(path, None, path.is_file())
        if folder is not None:
            streamed_sog.check_folder(folder, overwrite=args.overwrite)
            return cls(folder, streamed_sog.FORMAT, folder.exists(), folder)
        name = "ply" if str(path) == "-" else None
        return cls(path, format_to_write(path, name, others=(".lod", ".pt")), path.is_file())


def place_comments(part: EditedPart, result: EditResult, chosen: Format | None, out: Output) -> tuple[str, ...]:
    """Return the comments that say where the model lies, and print which of them get lost.

    They map coordinates to those of the input or to the Earth, which holds only where no operation moves the model, or
    where it was aligned with another one last, whose coordinates it then has.
    part: the first model. chosen: the format of the file, where it has one.
    """
    if result.is_moved and part.place and not result.place:
        out.note("the model is moved, so that its place and its offset from the input are left out")
    for text in result.place:
        if chosen is not None and not chosen.has_comments:
            out.note(f"{text}; {chosen.title} has no place for that")
        elif result.is_moved:
            out.note(f"the model now lies as the one that it was aligned with: {text}")
    return tuple(f"splatcli: {text}" for text in result.place)


def write_picture(result: EditResult, path: Path, out: Output) -> None:
    """Write a PNG of what is dropped, and print that."""
    from splatcli.edit.picture import draw
    from splatcli.output_files import write_bytes
    from splatcli.render.images import png_bytes

    write_bytes(path, png_bytes(draw(result.model)))
    result.facts["picture"] = path
    out.message(f"{path}: what is dropped, in red over what stays")


def show_plan(result: EditResult, target: EditTarget, out: Output) -> None:
    """Print what ``--dry-run`` found, as the result."""
    lines = [f"reads  {path}" for path in result.facts["reads"]]
    lines += [one["line"] for one in result.facts["operations"]]
    lines += [result.facts["refine"]["line"]] if "refine" in result.facts else []
    lines += [f"makes  {target.path or 'a file'}: {len(result.model.gaussians):,} Gaussians"]
    out.result({"dry_run": True, "makes": target.path, "replaces": target.replaces, **result.facts}, lines)


def write_result(
    result: EditResult, target: EditTarget, comments: Sequence[str], checkpoint: Checkpoint | None, out: Output
) -> None:
    """Write the output and print its path. checkpoint: the one that was edited, where a checkpoint is written."""
    from splatcli.output_files import write_bytes

    assert target.path is not None, "checked with the arguments"
    gaussians, metadata = result.model.gaussians, replace(result.model.metadata, comments=comments)
    if target.path.stem != "-":
        metadata = replace(metadata, title=target.path.stem)
    if target.format is None:
        _write_checkpoint(result, target.path, checkpoint)
    elif target.folder is not None:
        _write_stream(result, target.format, target.folder, metadata, out)
        return
    elif target.format.name == "ply" and str(target.path) != "-":
        _write_ply(gaussians, metadata, target.path, out)
    else:
        payload = _encoded(gaussians, target.format, metadata, out)
        if str(target.path) == "-":
            out.data(payload)
            return
        write_bytes(target.path, payload)
    out.result({"path": target.path, **result.facts}, [target.path])


#: Statistics of a strategy that have a row for each Gaussian.
_STATISTICS = ("grad2d", "count")
_TRAIN_ON = "-o edited.ply; to train on: splat train SCENE --init edited.ply"


def _check_droppable(operations: Sequence[Operation]) -> None:
    """Raise UsageError for an operation after which Adam's moments would not belong to the Gaussians."""
    from splatcli.edit.operations import Clean, Keep

    for one in operations:
        if not isinstance(one, Keep | Clean):
            raise UsageError(
                "a checkpoint holds Adam's moments, which stay true only where Gaussians are dropped: by --crop, "
                "--crop-out, --filter and --clean",
                where=one.label,
                remedy=_TRAIN_ON,
            )


def _only_rows(checkpoint: Checkpoint, rows: Tensor) -> Checkpoint:
    """Return the checkpoint with these of its Gaussians, as stored. rows: [M] int64, ascending.

    Raises ModelFileError for a checkpoint that cannot be resumed, UsageError for one with statistics of unknown rows.
    """
    from torch import Tensor

    from splatcli.train.state import check_resumable

    check_resumable(checkpoint)
    tensors = {name for name, value in checkpoint.strategy.items() if isinstance(value, Tensor)}
    if unknown := sorted(tensors.difference(_STATISTICS)):
        raise UsageError(
            f"its strategy keeps {', '.join(unknown)}, of which nobody knows what belongs to a Gaussian",
            where="-o",
            remedy=_TRAIN_ON,
        )
    return checkpoint.select_rows(rows)


def _write_checkpoint(result: EditResult, path: Path, checkpoint: Checkpoint | None) -> None:
    from splatcli.checkpoint.file import save_checkpoint
    from splatcli.output_files import make_parent_folder

    assert checkpoint is not None, "checked when the model was read"
    assert result.model.rows is not None, "Gaussians were dropped, and nothing else"
    make_parent_folder(path)
    save_checkpoint(path, _only_rows(checkpoint, result.model.rows))


def _write_stream(result: EditResult, chosen: Format, folder: Path, metadata: ExportMetadata, out: Output) -> None:
    """Write a streamed SOG and print the path of its index."""
    from splatcli.edit.simplify import contributions

    gaussians, cameras = _as_held(result.model.gaussians, chosen, out), result.model.cameras
    masses = contributions(gaussians, cameras, antialiased=metadata.antialiased) if cameras else None
    if masses is None:
        out.note("without cameras of one run, none tell which Gaussians count")
    facts = write_stream(gaussians, metadata, folder, LOD_LEVELS, masses, out)
    out.result({**result.facts, **facts}, [facts["path"]])


def _write_ply(gaussians: Gaussians, metadata: ExportMetadata, output: Path, out: Output) -> None:
    """Write a PLY in parts: large models are edited into this format, and its content is as large as the model."""
    from splatcli.formats.ply import ply_comments, write_ply_file
    from splatcli.output_files import make_parent_folder

    comments, notes = ply_comments(metadata)
    make_parent_folder(output)
    write_ply_file(gaussians, output, comments)
    out.note(*notes)


def _encoded(gaussians: Gaussians, chosen: Format, metadata: ExportMetadata, out: Output) -> bytes:
    """Return the content of a file, and print what its format could not hold."""
    assert chosen.write is not None, "format_to_write() gives formats that are written"
    encoded = chosen.write(_as_held(gaussians, chosen, out), metadata)
    out.note(*encoded.notes)
    return encoded.payload


def _as_held(gaussians: Gaussians, chosen: Format, out: Output) -> Gaussians:
    """Return the Gaussians with the SH degree that a format holds, and print that it is lower."""
    from splatcli.formats.selection import select_for_format

    held, notes = select_for_format(gaussians, chosen)
    out.note(*notes)
    return held
