"""``splat check``: whether the files of a run, or an exported one, are sound in every byte."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from splatcli.cli import options
from splatcli.cli.typer_command import Exists
from splatcli.errors import (
    ModelFileError,
    OlderModelError,
    ResourceError,
    SplatError,
    UnreadableError,
    UsageError,
    VersionError,
    os_errors,
)

if TYPE_CHECKING:
    from splatcli.checkpoint.check import Finding

#: The word for each state; the longest is the width of the column.
_STATES = {
    "sound": "sound",
    "warning": "warning",
    "damaged": "DAMAGED",
    "unreadable": "UNREADABLE",
    "unknown": "UNKNOWN",
}


_EXISTS = Exists("this path does not exist", "name a run folder, a checkpoint or a PLY")


@dataclass(frozen=True)
class CheckArguments:
    """The arguments and options of ``splat check``."""

    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="[PATH]",
            help="Run folder, checkpoint or file of splats (.ply, .spz, .sog, ...), also of other programs. Without "
            "it: the path from a pipe, else the newest run under output/.",
            show_default=False,
        ),
        _EXISTS,
    ] = None
    lenient: options.Lenient = False
    json: options.Json = False
    quiet: options.Quiet = False


def check(args: CheckArguments) -> int:
    """Verify a run or a file, and report what was verified and what is wrong.

    For a checkpoint: the archive, the manifest, the schema, the digest of every tensor, finite values, raw parameters,
    settings and cameras. For a run folder: every checkpoint, also those that were moved aside, the pointer to the
    newest, the settings and the lines of metrics.jsonl; for blocks those of every block, and blocks.json. For a file of
    splats or a checkpoint of another program: that it can be read completely, finite values, and raw parameters.
    Prints one line per file. Nothing is changed, and a run in progress can be checked.
    Ends with 0 when everything is sound, 11 when the newest checkpoint is damaged and an older one is sound, 5 for any
    other damaged or unreadable file, 6 for a file of another version. `splat info` checks a scene.

    \b
    Examples:
      splat check output/scene
      splat check output/scene/ckpts/ckpt_007000.pt
      splat check scene.ply
      splat check output/scene --json | tail -1
      splat check output/scene -q > /dev/null && splat export output/scene -o scene.ply
    """
    from splatcli.cli.console import open_output

    with open_output(json=args.json, quiet=args.quiet) as out:
        checked, findings = _check(args.path, args.lenient)
        for finding in findings:
            out.event("checked", asdict(finding))
        problem = _problem(findings)
        facts = {"path": checked, "sound": problem is None, "findings": [asdict(finding) for finding in findings]}
        out.result(facts, [line for finding in findings for line in _lines(finding)])
        if problem is not None:
            raise problem
    return 0


def _check(given: Path | None, lenient: bool) -> tuple[Path, list[Finding]]:
    """Return (the checked path, the findings). Raise UsageError if there is nothing to check."""
    from splatcli.checkpoint.check import check_checkpoint, check_run
    from splatcli.checkpoint.foreign.read import newest_foreign
    from splatcli.cli.blocks import RECORD, block_folder
    from splatcli.cli.model import named_path
    from splatcli.formats.registry import is_own_checkpoint, newest_import

    path = named_path(given)
    with os_errors(UnreadableError, path):
        _EXISTS.check(path)
        if path.is_dir():
            blocks = sorted(block_folder(path, 0).parent.glob("*/ckpts")) if (path / RECORD).is_file() else []
            foreign = newest_foreign(path)
            is_run = (path / "ckpts").is_dir() and (foreign is None or foreign.parent != path / "ckpts")
            if is_run or blocks:
                runs = [*([path] if is_run else []), *(folder.parent for folder in blocks)]
                record = [_check_record(path)] if blocks else []
                return path, [*(finding for run in runs for finding in check_run(run)), *record]
            model = newest_import(path)
            if model is None:
                raise UsageError("this folder holds no run", where=path, remedy=f"to check a scene: splat info {path}")
            return path, [_check_file(model, lenient)]
    try:
        own = is_own_checkpoint(path)
    except (ModelFileError, ResourceError) as error:
        from splatcli.checkpoint.check import Finding

        return path, [Finding.of_error(path, error)]
    return path, [check_checkpoint(path) if own else _check_file(path, lenient)]


def _check_record(place: Path) -> Finding:
    """Check the file that says how a scene was cut into the blocks of a folder."""
    from splatcli.checkpoint.check import Finding
    from splatcli.cli.blocks import RECORD, read_record, shape_of

    try:
        shape_of(place, read_record(place))
    except (ModelFileError, UnreadableError) as error:
        return Finding.of_error(place / RECORD, error)
    return Finding(place / RECORD, "sound", "the cut of the scene into blocks")


def _check_file(path: Path, lenient: bool) -> Finding:
    """Check a model of another format or program."""
    from splatcli.checkpoint.check import Finding
    from splatcli.checkpoint.foreign.imported import ImportOptions, to_gaussians
    from splatcli.formats.registry import import_model

    try:
        with os_errors(UnreadableError, path):
            model = import_model(path, lenient=lenient)
            gaussians, notes = to_gaussians(model, ImportOptions(lenient=lenient), path)
            size = path.stat().st_size
    except (ModelFileError, VersionError, ResourceError) as error:
        return Finding.of_error(path, error)
    text = f"{model.origin}, {len(gaussians):,} Gaussians, {size:,} bytes: format, finite values, parameter space"
    return Finding(path, "sound", "; ".join([text, *notes]))


def _problem(findings: list[Finding]) -> SplatError | None:
    """Return the error that ends the command; None when all files are sound."""
    bad = [finding for finding in findings if finding.code]
    if not bad:
        return None
    first = bad[0]
    rest = f"; and {len(bad) - 1} more of {len(findings)} files" if len(bad) > 1 else ""
    # The newest checkpoint comes first.
    folder = first.path.parent
    older = [f for f in findings[1:] if f.state == "sound" and f.path.suffix == ".pt" and f.path.parent == folder]
    if first is findings[0] and first.state == "damaged" and older:
        return OlderModelError(
            f"the newest checkpoint is damaged ({first.what}){rest}",
            where=first.path,
            remedy=f"restore it from a copy, or use the newest sound checkpoint: {older[0].path}",
        )
    kinds = {kind.exit_code: kind for kind in (ResourceError, VersionError, ModelFileError)}
    return kinds[first.code](f"{first.what}{rest}", where=first.path, remedy=first.help)


def _lines(finding: Finding) -> list[str]:
    width = max(map(len, _STATES.values()))
    lines = [f"{_STATES[finding.state]:<{width}}  {finding.path}: {finding.what}"]
    return lines + ([f"{'':<{width}}  help: {finding.help}"] if finding.help and finding.state != "sound" else [])
