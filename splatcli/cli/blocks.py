"""``splat merge``, and training a scene block by block: each block is a run of its own, trained once and resumed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from splatcli.cli import options
from splatcli.cli.console import Output
from splatcli.cli.dry_run import show_blocks, show_earlier
from splatcli.cli.export import ExportAtEnd
from splatcli.cli.model import newest_checkpoint
from splatcli.cli.run_request import check_request
from splatcli.cli.run_training import (
    NewRun,
    ResumeOverrides,
    RunContext,
    default_folder,
    note_unused,
    resume_training,
    start_training,
)
from splatcli.cli.tables import Table
from splatcli.errors import (
    ModelFileError,
    OutputError,
    SceneError,
    UnreadableError,
    UsageError,
    from_os_error,
    os_errors,
)

if TYPE_CHECKING:
    from splatcli.checkpoint.state import Checkpoint
    from splatcli.config import Config
    from splatcli.gaussians import Gaussians
    from splatcli.scene.partition import Grid
    from splatcli.scene.scene import Scene


#: The file that records the blocks of a folder; written before training starts.
RECORD = "blocks.json"

#: Its content: --blocks, the cut (Grid.as_dict()), the extent and the fingerprint of the scene, and where the scene and
#: the points of --points were last.
_KINDS = {"blocks": str, "cut": dict, "extent": float, "photos": dict, "scene": str, "points": str | None}


#: Number of blocks whose contents are listed.
_LISTED = 16


class _PlanOutput(Output):
    """The output of a block's --dry-run, which keeps the plan."""

    plans: list[dict[str, Any]]

    def result(self, facts: dict[str, Any], lines: Iterable[object], tables: Sequence[Table] = ()) -> None:
        self.plans = [facts]


class _BlockOutput(Output):
    """The output of one block among others: its path is an event, not the result.

    facts: what the block ended with; None before.
    """

    facts: dict[str, Any] | None = None

    def result(self, facts: dict[str, Any], lines: Iterable[object], tables: Sequence[Table] = ()) -> None:
        self.facts = facts
        if self.json:
            self.event("block", facts)
        else:
            self.message("\n".join(map(str, lines)))


def block_folder(place: Path, block: int) -> Path:
    """Return the run folder of a block."""
    return place / "blocks" / f"{block:03d}"


def train_blocks(run: NewRun, context: RunContext) -> int:
    """Train one block, or all that are not finished and merge them, and return the exit code.

    The folder of the run takes the blocks and the merged model. A stopped block continues, a finished one stays. Raises
    OutputError for one of other settings.
    """
    from splatcli.checkpoint.atomic import check_name
    from splatcli.config import COLOUR_MAPS, parse_blocks
    from splatcli.scene.read import has_images_only

    config, block, out = run.config, run.config.data.block, context.out
    assert config.data.blocks is not None
    strips, columns = parse_blocks(config.data.blocks)
    if block is not None and block >= strips * columns:
        raise UsageError(
            f"--blocks {config.data.blocks} has no block {block}",
            where="--block",
            remedy=f"0 to {strips * columns - 1}",
        )
    if config.views.trained:
        per_view = [f"--{name.replace('_', '-')}" for name in ("pose_opt", *COLOUR_MAPS)]
        raise UsageError(
            "per-view parameters would differ from block to block",
            where="--blocks",
            remedy=f"leave out {', '.join(per_view)}; use them with splat train SCENE --init MERGED",
        )
    scene = Path(config.data.scene)
    if not scene.is_dir() or has_images_only(scene):
        raise SceneError(
            "blocks need a scene with cameras and points", where=scene, remedy=f"run splat sfm {scene} first"
        )
    place = run.output or default_folder(scene)
    check_name(place)
    note_unused(config, run.given, out)
    record = _survey(config, (strips, columns), out)
    if run.dry:
        if (place / RECORD).exists():
            _check_claim(place, read_record(place, damaged=record), record)
        _show_blocks(place, run, [*range(strips * columns)] if block is None else [block], context)
        return 0
    _claim(place, record)
    if block is not None:
        return _train_block(block, run, block_folder(place, block), context)
    outputs: list[_BlockOutput] = []
    code, merges = 0, False
    try:
        for number in range(strips * columns):
            outputs.append(_BlockOutput(json=out.json, quiet=out.quiet))
            code = _train_block(number, run, block_folder(place, number), replace(context, out=outputs[-1]))
            if code != 0:
                break
        merges = code == 0 and context.stop_at is None
    finally:
        if not merges and outputs[-1].facts is not None:  # the blocks are the result
            paths = [one.facts["path"] for one in outputs if one.facts is not None]
            out.result({**outputs[-1].facts, "paths": paths}, paths)
    if merges:
        merge_run(place, None, out, exports=context.exports)
    else:
        context.exports.note_unwritten(None, out)
    return code


def _show_blocks(place: Path, run: NewRun, blocks: list[int], context: RunContext) -> None:
    """Print the plan of each block, and how long all take, one after another."""
    plans = []
    for number in blocks:
        own = _PlanOutput(json=context.out.json, quiet=context.out.quiet)
        _train_block(number, run, block_folder(place, number), replace(context, out=own))
        plans += [{"block": number, **facts} for facts in own.plans]
    show_blocks(Path(run.config.data.scene), place, plans, context.device, context.out)


#: Mean share of the views that show a block from which on a note says that blocks save no time.
_LITTLE_SAVED = 0.9


def _survey(config: Config, shape: tuple[int, int], out: Output) -> dict[str, Any]:
    """Report the contents of each block, and return the record of the blocks.

    Raise UsageError if blocks hold almost all, SceneError if almost nothing.
    """
    from splatcli.scene.partition import block_contents, check_blocks, make_grid
    from splatcli.scene.read import read_scene
    from splatcli.train.backgrounds import training_image_background

    unread = {"strict": False, "skip_bad_images": False}  # images are checked when a block is trained
    whole = config.data.model_copy(update={"blocks": None, "block": None, **unread})
    scene = read_scene(Path(config.data.scene), whole, background=training_image_background(config))
    held = block_contents(scene, shape)
    for block, one in enumerate(held):
        views = {"train_views": one.views, "of": len(scene.train)}
        out.event("block-contents", {"block": block, **views, "inside": one.inside, "around": one.around})
    lines = [
        f"block {block}: {one.views} of {len(scene.train)} training views, {one.share:.0%} of the points "
        f"({one.inside:.0%} in it, {one.around:.0%} around it)"
        for block, one in enumerate(held)
    ]
    more = [] if len(lines) <= _LISTED else [f"... and {len(lines) - _LISTED} more blocks"]
    out.message("\n".join([*lines[:_LISTED], *more]))
    check_blocks(scene, shape, held, config.data.block_share)
    runs = sum(one.views for one in held) / len(scene.train)
    if runs > _LITTLE_SAVED * len(held):
        out.note(
            f"nearly all views show each block, as around an object: blocks bound memory, and take the time of "
            f"{runs:.1f} runs over the whole"
        )
    return {
        "blocks": config.data.blocks,
        "cut": make_grid(scene, shape).as_dict(),
        "extent": float(scene.extent),
        "photos": scene.fingerprint(),
        "scene": str(scene.root),
        "points": config.data.points,
    }


def merge_run(
    place: Path, target: Path | None, out: Output, data: Path | None = None, *, exports: ExportAtEnd | None = None
) -> None:
    """Merge the blocks of ``place`` into a checkpoint there, or into the PLY ``target``.

    exports: files for the merged model. data: the scene, where it has moved.
    Raises ModelFileError when blocks are missing or unfinished, SceneError where the scene is gone or has changed.
    """
    from splatcli.checkpoint.atomic import check_name
    from splatcli.scene.partition import make_grid, restrict_to_block, same_cut
    from splatcli.scene.read import read_scene
    from splatcli.train.backgrounds import training_image_background
    from splatcli.train.run_scene import CONSENT, check_same_scene, scene_folder

    if target is not None:
        check_name(target)
    record = read_record(place)
    shape = shape_of(place, record)
    last = [_last_checkpoint(place, block) for block in range(shape[0] * shape[1])]
    first = _load_finished(last[0])
    config = first.config
    whole = config.data.model_copy(update={"blocks": None, "block": None, "points": record["points"]})
    if record["points"] is not None and not Path(record["points"]).exists():
        raise SceneError(
            "the points that the blocks are cut by are gone",
            where=record["points"],
            remedy=f"put them back; or splat train SCENE --blocks {record['blocks']} --points PATH -o {place}, with "
            "the flags as before, takes them from where they are now, and merges",
        )
    if data is None and Path(record["scene"]).exists():
        data = Path(record["scene"])
    scene = read_scene(scene_folder(first, data), whole, background=training_image_background(config))
    grid = make_grid(scene, shape)
    if not same_cut(record["cut"], grid.as_dict(), record["extent"]):
        raise _changed_scene(scene.root, _POINTS_CHANGED)
    # A merge uses no photo, and has the cameras of the blocks.
    check_same_scene(first, restrict_to_block(scene, shape, 0), CONSENT)
    del first
    path, count = _merge_state(place, last, grid, scene, out) if target is None else _merge_ply(last, grid, target)
    out.message(f"{len(last)} blocks merged: {count:,} Gaussians")
    written, problem = ({}, None) if exports is None else exports.write(path, out)
    out.result({"path": path, "num_gaussians": count, "blocks": len(last), **written}, [path])
    if problem is not None:
        raise problem


def _merge_state(place: Path, last: list[Path], grid: Grid, scene: Scene, out: Output) -> tuple[Path, int]:
    """Write a checkpoint into ``place``; return its path and the number of Gaussians."""
    from splatcli.checkpoint.run_dir import RunDir, step_of
    from splatcli.train.merge import merged

    checkpoint = merged(lambda block: (last[block], _load_finished(last[block])), grid, scene)
    (place / "ckpts").mkdir(exist_ok=True)
    with RunDir.open(place) as run:
        run.write_config(checkpoint.config)
        path = run.save(checkpoint)
        newest = run.newest_path() or path
    if step_of(newest) > checkpoint.step:
        out.warn(
            f"{newest}: this later checkpoint was there before, and {place} stands for it; {path} is the merged one"
        )
    return path, len(checkpoint.gaussians)


def _merge_ply(last: list[Path], grid: Grid, target: Path) -> tuple[Path, int]:
    """Write a PLY with one block in memory at a time; return its path and the number of Gaussians.

    Each block is read twice: a PLY begins with its row count and the digest of its opacities and scales.
    """
    from splatcli.checkpoint.atomic import write_atomically
    from splatcli.formats.ply import Seal, write_ply_parts
    from splatcli.output_files import make_parent_folder
    from splatcli.train.merge import own_rows
    from splatcli.train.state import gaussians_to_render

    if target.suffix.lower() != ".ply":
        raise UsageError(
            "blocks are merged into a PLY or a checkpoint",
            where="-o",
            remedy="for other formats: splat merge RUN | splat export -o FILE",
        )
    make_parent_folder(target)

    def parts() -> Iterator[Gaussians]:
        for block, path in enumerate(last):
            checkpoint = _load_finished(path)
            rows = own_rows(checkpoint, grid, block)
            yield gaussians_to_render(checkpoint).map(lambda tensor, rows=rows: tensor[rows])  # type: ignore[misc]

    counts, degrees, seal = [], set(), Seal()
    for part in parts():
        counts.append(len(part))
        degrees.add(part.shN.shape[1])
        seal.add_gaussians(part)
    if len(degrees) > 1:
        raise ModelFileError(
            "the blocks have different SH degrees", where=last[0], remedy="train all with one --sh-degree"
        )

    shN_count = degrees.pop()
    write_atomically(
        target,
        lambda file: write_ply_parts(parts(), sum(counts), shN_count, file, [seal.comment]),
        what="PLY",
        stream=True,
    )
    return target, sum(counts)


def _train_block(number: int, run: NewRun, folder: Path, context: RunContext) -> int:
    from splatcli.checkpoint.run_dir import step_of

    values, out = {"data.block": number}, context.out
    context = replace(context, exports=ExportAtEnd())  # those that are asked for are of the merged model
    with os_errors(OutputError, folder):
        found = newest_checkpoint(folder, out=out, allow_older=True) if folder.is_dir() else None
    if found is None:
        # Settings without effect are reported for all blocks together.
        block = replace(run.with_values(values), request=run.request.with_values(values), output=folder, given=())
        return start_training(block, context)
    # _check_claim() has compared the scene and its points.
    places = ("data.scene", "data.points")
    check_request(folder, run.request.with_values(values), otherwise="or choose another -o", alike=places)
    if step_of(found) >= run.config.train.iterations:
        out.message(f"block {number} is finished: {found}")
        out.result({"path": found, "step": step_of(found), "reason": "finished"}, [found])
        return 0
    if run.dry:
        show_earlier(found, out)
        return 0
    data = run.config.data
    points = [] if data.points is None else [f"data.points={data.points}"]
    return resume_training(found, ResumeOverrides(Path(data.scene), settings=points), context)


#: What makes another cut of the same scene.
_POINTS_CHANGED = "its points cut it in other places"


def _changed_scene(scene: Path, what: str) -> SceneError:
    return SceneError(
        f"the scene has changed since its blocks began: {what}",
        where=scene,
        remedy="put back what it was, or train all blocks anew: choose another -o",
    )


def _check_claim(place: Path, there: dict[str, Any], record: dict[str, Any]) -> None:
    """Raise an error unless the record that is in ``place`` is of the same blocks of the same scene, wherever it lies.

    There are OutputError for another cut or scene, SceneError for the same scene that has changed.
    """
    from splatcli.scene.partition import same_cut
    from splatcli.train.run_scene import fingerprint_differences

    if there["blocks"] == record["blocks"]:
        changes = [text for _, text in fingerprint_differences(there["photos"], record["photos"])]
        if not math.isclose(there["extent"], record["extent"], rel_tol=1e-6):
            changes.append(f"its extent was {there['extent']:g}, is {record['extent']:g}")
        if not same_cut(there["cut"], record["cut"], record["extent"]):
            changes.append(_POINTS_CHANGED)
        if not changes:
            return
        if os.path.realpath(there["scene"]) == os.path.realpath(record["scene"]):
            raise _changed_scene(Path(record["scene"]), "; ".join(changes))
    raise OutputError(
        f"the folder belongs to blocks {there['blocks']} of {there['scene']}", where=place, remedy="choose another -o"
    )


def _claim(place: Path, record: dict[str, Any]) -> None:
    """Record that ``place`` belongs to these blocks of this scene. Several jobs may write the record at once."""
    from splatcli.checkpoint.atomic import write_atomically

    path = place / RECORD
    with os_errors(OutputError, place):
        if place.exists() and not place.is_dir():
            raise OutputError("this is a file; blocks need a folder", where=place, remedy="choose another -o")
        place.mkdir(parents=True, exist_ok=True)
        others = [one.name for one in place.iterdir() if not one.name.startswith(f"{RECORD}.")]  # a job writes it now
        if path.exists():
            there = read_record(place, damaged=record)
            _check_claim(place, there, record)
            moved = there | {key: record[key] for key in ("scene", "points")}
            if there is not record and moved == there:
                return
            record = moved
        elif others:
            raise OutputError("the output folder exists and is not empty", where=place, remedy="choose another -o")
    text = json.dumps(record, indent=2) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()), what="record of blocks")


def read_record(place: Path, *, damaged: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the record of a folder of blocks. damaged: returned in place of a damaged one.

    Raise ModelFileError where it is damaged or missing, UnreadableError where it cannot be read.
    """
    try:
        record = json.loads((place / RECORD).read_text())
    except OSError as error:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise from_os_error(error, UnreadableError, place / RECORD) from None
        raise ModelFileError(
            f"the folder has no {RECORD}", where=place, remedy="name the -o folder of splat train --blocks"
        ) from None
    except ValueError:
        record = None
    if not isinstance(record, dict) or not all(
        key in record and isinstance(record[key], kind) for key, kind in _KINDS.items()
    ):
        if damaged is not None:
            return damaged
        raise ModelFileError(
            f"{RECORD} is damaged", where=place, remedy="run splat train --blocks again; it rewrites the file"
        )
    return record


def shape_of(place: Path, record: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers of strips and of columns in each. Raise ModelFileError for a damaged record."""
    from splatcli.config import parse_blocks

    text = record["blocks"]
    try:
        return parse_blocks(text)
    except ValueError as error:
        raise ModelFileError(
            f"{RECORD}: blocks {text!r}: {error}", where=place, remedy="run splat train --blocks again"
        ) from None


def _last_checkpoint(place: Path, block: int) -> Path:
    """Return the last checkpoint of a block. Raise ModelFileError without one, OlderModelError for a damaged one."""
    folder = block_folder(place, block)
    with os_errors(UnreadableError, folder):
        found = newest_checkpoint(folder) if folder.is_dir() else None
    if found is None:
        raise ModelFileError(
            f"block {block} is not trained", where=folder, remedy=f"splat train ... --block {block}, then splat merge"
        )
    return found


def _load_finished(path: Path) -> Checkpoint:
    """Return the state of a finished block. Raise ModelFileError for an unfinished one."""
    from splatcli.checkpoint.file import load_checkpoint

    checkpoint = load_checkpoint(path)
    steps = checkpoint.config.train.iterations
    if checkpoint.config.data.block is None or checkpoint.step < steps:
        raise ModelFileError(
            f"the block is at step {checkpoint.step} of {steps}",
            where=path,
            remedy=f"splat resume {path.parent.parent}, then splat merge",
        )
    return checkpoint


@dataclass(frozen=True)
class MergeArguments:
    """The arguments and options of ``splat merge``."""

    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="Folder given to splat train --blocks as -o.", show_default=False),
    ]
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE.ply",
            help="Write a PLY instead, holding one block in memory at a time.  [default: a checkpoint in RUN]",
            show_default=False,
        ),
    ] = None
    data: options.Data = None
    json: options.Json = False
    quiet: options.Quiet = False


def merge(args: MergeArguments) -> int:
    """Merge blocks that were trained separately.

    `splat train --blocks` merges the blocks that it has trained; this command is for blocks that were separate jobs.
    Prints the path of the checkpoint, which resume, render, eval and export accept like any other.

    \b
    Examples:
      splat merge output/city
      splat merge output/city -o city.ply
      splat merge output/city | splat render --views
    """
    from splatcli.cli.console import open_output

    with open_output(json=args.json, quiet=args.quiet) as out:
        merge_run(args.run, args.output, out, args.data)
    return 0
