"""Verify a checkpoint or a run folder completely, and report all faults, not only the first one.

Nothing is changed and no lock is taken, so that a run in training can be checked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from splatcli.checkpoint.atomic import TEMPORARY
from splatcli.checkpoint.file import load_checkpoint
from splatcli.checkpoint.run_dir import CONFIG, LATEST, METRICS, checkpoints_of, is_gone, is_locked, step_of
from splatcli.config import first_fault, parse_config
from splatcli.errors import ModelFileError, ResourceError, SplatError, UnreadableError, VersionError, os_errors

#: The checks of load_checkpoint(), in its order.
CHECKED = "archive, manifest, schema, digest of every tensor, finite values, parameter space, settings and cameras"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of the check of one file.

    state: "sound"; "warning" for a harmless fault; "damaged"; "unreadable" where the system refused; "unknown" for a
        file of another version. what: what was verified, or the fault. help: what to do about the fault.
    code: the exit code of the fault; 0 for a sound file and for warnings.
    """

    path: Path
    state: str
    what: str
    help: str | None = None
    code: int = 0

    @classmethod
    def of_error(cls, path: Path, error: SplatError) -> Finding:
        refused = isinstance(error, UnreadableError | ResourceError)
        state = "unreadable" if refused else "unknown" if isinstance(error, VersionError) else "damaged"
        return cls(path, state, error.what, error.remedy, error.exit_code)

    @classmethod
    def damage(cls, path: Path, what: str, remedy: str) -> Finding:
        return cls(path, "damaged", what, remedy, ModelFileError.exit_code)


def check_checkpoint(path: Path) -> Finding:
    """Check every byte of a checkpoint of splatcli."""
    try:
        with os_errors(UnreadableError, path):
            checkpoint = load_checkpoint(path)
            size = path.stat().st_size
    except (ModelFileError, VersionError, ResourceError) as error:
        return Finding.of_error(path, error)
    count = f"step {checkpoint.step}, {len(checkpoint.gaussians):,} Gaussians, {size:,} bytes"
    named = path.name.partition(".pt")[0].removeprefix("ckpt_")
    if named.isdecimal() and int(named) != checkpoint.step:
        return Finding(
            path,
            "warning",
            f"{count}: {CHECKED}; its name is that of step {int(named)}, and a run's newest is found by name",
            f"give it the name of its step, ckpt_{checkpoint.step:06d}.pt",
        )
    return Finding(path, "sound", f"{count}: {CHECKED}")


def check_run(run: Path) -> Iterator[Finding]:
    """Check the checkpoints, the newest first, also those set aside by a resume; then the other files of the run.

    Checkpoints that a running training deletes meanwhile are left out.
    """
    try:
        with os_errors(UnreadableError, run / "ckpts"):
            files = checkpoints_of(run)
            aside = sorted((run / "ckpts").glob("ckpt_*.pt.old-*"), reverse=True)
            beside = [path for folder in (run, run / "ckpts") for path in sorted(folder.iterdir())]
    except UnreadableError as error:
        yield Finding.of_error(run / "ckpts", error)
        return
    if not files:
        yield Finding.damage(run / "ckpts", "there is no checkpoint in it", "start the run anew: splat train")
    checked = 0
    for path in [*reversed(files), *aside]:
        finding = check_checkpoint(path)
        if finding.state != "unreadable" or not is_gone(path):
            checked += 1
            yield finding
    if files and not checked:  # there are newer ones
        yield from check_run(run)
        return
    for name, check in ((LATEST, _pointer_fault), (CONFIG, _settings_fault), (METRICS, _metrics_fault)):
        yield _beside(run, name, check, files)
    for path in beside:
        if TEMPORARY.fullmatch(path.name):
            yield Finding(
                path, "warning", "a temporary file: being written now, or left by a crash", "splat resume removes it"
            )


#: (the fault, whether it is harmless, what to do); None without a fault.
_Fault = tuple[str, bool, str] | None


def _beside(run: Path, name: str, check: object, files: list[Path]) -> Finding:
    path = run / name
    try:
        with os_errors(UnreadableError, path):
            if not path.exists():
                return Finding(path, "warning", "not there", "splat resume writes it again")
            fault: _Fault = check(path, files)  # type: ignore[operator]
    except (ModelFileError, ResourceError) as error:
        return Finding.of_error(path, error)
    if fault is None:
        return Finding(path, "sound", _BESIDE[name])
    what, harmless, remedy = fault
    return Finding(path, "warning", what, remedy) if harmless else Finding.damage(path, what, remedy)


_BESIDE = {
    LATEST: "names the newest checkpoint",
    CONFIG: "valid settings",
    METRICS: "every line is an object, in order",
}


def _pointer_fault(path: Path, files: list[Path]) -> _Fault:
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    newest = f"ckpts/{files[-1].name}" if files else None
    if text == newest:
        return None
    return (
        f"it names {text[:80]!r}, the newest checkpoint is {newest}",
        True,
        "nothing relies on it; a save corrects it",
    )


def _settings_fault(path: Path, files: list[Path]) -> _Fault:
    remedy = "nothing relies on it, checkpoints hold the settings; splat resume writes it again"
    try:
        parse_config(json.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        return f"not valid: {first_fault(error, 'the file')}", False, remedy
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}", False, remedy
    return None


def _metrics_fault(path: Path, files: list[Path]) -> _Fault:
    newest = step_of(files[-1]) if files else 0
    before = 0
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict) or not line.endswith(b"\n"):
            torn = number == len(lines)
            remedy = "splat resume removes it" if torn else "splat resume goes on; correct or remove the line"
            return f"line {number} is {'torn, as by a crash' if torn else 'no JSON object'}", torn, remedy
        step = record.get("step", before)
        if not isinstance(step, int) or (step < before and record.get("event") != "rollback"):
            return (
                f"line {number} is of step {step}, after one of step {before}",
                True,
                "records only; nothing reads it",
            )
        before = step
    if before > newest and not is_locked(path.parent):
        return f"it goes to step {before}, the newest checkpoint to {newest}", True, "splat resume trims it"
    return None
