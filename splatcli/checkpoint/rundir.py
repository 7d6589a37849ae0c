"""RunDir: the folder of one run, owned by one process at a time.

- RUN/config.json: the resolved settings
- RUN/metrics.jsonl: one JSON object a line
- RUN/ckpts/ckpt_000300.pt: the state after step 300
- RUN/latest: relative path of the newest checkpoint, for people and scripts; never relied upon
- RUN/lock: held (flock) while a process works here; content: pid and host
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import re
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from splatcli.checkpoint.atomic import TEMPORARY, probe_folder, sync_folder, write_atomically
from splatcli.checkpoint.container import read_container
from splatcli.checkpoint.lock import take_lock
from splatcli.checkpoint.save import save_checkpoint
from splatcli.checkpoint.state import Checkpoint
from splatcli.config import Config
from splatcli.errors import OutputError, SplatError

_log = logging.getLogger(__name__)
_CHECKPOINT = re.compile(r"ckpt_(\d{6,})\.pt")
_MOVED_ASIDE = re.compile(r".+\.old-\d+")


class RunDir:
    """An open run folder; holds the lock until ``close`` or the end of the ``with`` block."""

    def __init__(self, path: Path, lock: int) -> None:
        """For ``create`` and ``open`` only. lock: descriptor of the locked lock file."""
        self.path = path
        self._lock: int | None = lock

    @classmethod
    def create(cls, path: Path, *, overwrite: bool = False) -> RunDir:
        """A new run folder, missing parents made, proved writable.

        overwrite: a folder with content is moved aside to ``<name>.old-<n>``; nothing is deleted.
        Raises OutputError when the place has content (without overwrite), is a file or cannot be written,
        LockedError when another process works there.
        """
        path = Path(path)
        try:
            if path.exists() and not path.is_dir():
                raise OutputError("this is a file; a run needs a folder", where=path, remedy="choose another -o")
            if path.is_dir() and _has_content(path):
                if not overwrite:
                    raise OutputError(
                        "the output folder exists and is not empty",
                        where=path,
                        remedy="--overwrite moves a run aside, splat resume continues it, or choose another -o",
                    )
                _move_aside(path)
            path.mkdir(parents=True, exist_ok=True)
            probe_folder(path)
            (path / "ckpts").mkdir(exist_ok=True)
            lock = take_lock(path)
        except OSError as error:
            raise OutputError(f"cannot make the output folder: {error.strerror}", where=path) from None
        return cls(path, lock)

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """An existing run folder, to go on with it; temporary files of writers that died are removed.

        Raises OutputError when it is not there or cannot be written, LockedError when another process works there.
        """
        path = Path(path)
        if not (path / "ckpts").is_dir():
            raise OutputError("not a run folder: there is no ckpts/ in it", where=path)
        probe_folder(path)
        probe_folder(path / "ckpts")
        try:
            lock = take_lock(path)
        except OSError as error:
            raise OutputError(f"cannot lock the run: {error.strerror}", where=path) from None
        for folder in (path, path / "ckpts"):
            _remove_stale(folder)
        return cls(path, lock)

    def close(self) -> None:
        """Let go of the run; harmless when done twice."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> RunDir:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write_config(self, config: Config) -> None:
        """Store the resolved settings as config.json."""
        text = config.model_dump_json(indent=2) + "\n"
        write_atomically(self.path / "config.json", lambda file: _put(file, text.encode()), what="settings")

    def append_metrics(self, record: dict[str, object]) -> None:
        """Add one line to metrics.jsonl; NaN and infinity become null. A line is there whole or not at all."""
        path = self.path / "metrics.jsonl"
        line = (json.dumps(_finite(record), allow_nan=False) + "\n").encode()
        try:
            with path.open("ab", buffering=0) as file:
                end = file.tell()
                if file.write(line) != len(line):
                    file.truncate(end)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise OutputError(f"could not add to the metrics (disk full?): {error.strerror}", where=path) from None

    def checkpoint_path(self, step: int) -> Path:
        return self.path / "ckpts" / f"ckpt_{step:06d}.pt"

    def checkpoints(self) -> list[Path]:
        """The run's checkpoint files by step, oldest first; not verified."""
        return _checkpoints(self.path)

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write the checkpoint, point ``latest`` at it, delete those that ``config.save`` does not keep.

        Kept: this one, the ``keep_last`` newest, the steps named in ``steps``. Raises what ``save_checkpoint`` raises;
        nothing has been deleted then.
        """
        path = self.checkpoint_path(checkpoint.step)
        save_checkpoint(path, checkpoint)
        self._point_latest(path)
        self._prune(path, checkpoint.config.save.keep_last, frozenset(checkpoint.config.save.steps))
        return path

    def rewind(self, step: int) -> None:
        """Make ``step`` the run's newest, before the run goes on from there.

        Later checkpoints are renamed to ``<name>.old-<n>``, lines of later steps (and one torn by a crash) leave
        metrics.jsonl.
        """
        try:
            for path in self.checkpoints():
                if _step_of(path) > step:
                    path.rename(_free_name(path))
            sync_folder(self.path / "ckpts")
            self._trim_metrics(step)
        except OSError as error:
            raise OutputError(f"cannot rewind the run: {error.strerror}", where=self.path) from None
        if (path := self.checkpoint_path(step)).exists():
            self._point_latest(path)

    def _trim_metrics(self, step: int) -> None:
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return
        lines = path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if _line_step(line) <= step]
        if kept != lines:
            write_atomically(path, lambda file: _put(file, b"".join(kept)), what="metrics")

    def _point_latest(self, path: Path) -> None:
        text = f"{path.relative_to(self.path).as_posix()}\n"
        write_atomically(self.path / "latest", lambda file: _put(file, text.encode()), what="pointer to the checkpoint")

    def _prune(self, just_written: Path, keep_last: int, named: frozenset[int]) -> None:
        """The one just written has been verified, so that the newest sound one can never be deleted."""
        files = self.checkpoints()
        kept = {just_written, *files[-keep_last:]}
        for path in files:
            if path not in kept and _step_of(path) not in named:
                try:
                    path.unlink()
                except OSError as error:
                    _log.warning("could not delete the old checkpoint %s: %s", path, error.strerror)


def find_latest(run: Path) -> Path | None:
    """The checkpoint of the highest step whose structure and manifest are sound; None when there is none.

    Takes milliseconds a file; the tensors themselves are verified when the checkpoint is loaded.
    """
    for path in reversed(_checkpoints(Path(run))):
        try:
            read_container(path, digests=False, mmap=True)
        except SplatError as error:
            _log.warning("passed over: %s", error)
        else:
            return path
    return None


def newest_run(output: Path) -> Path | None:
    """The run folder directly under ``output`` that wrote a sound checkpoint last; None when there is none.

    Runs moved aside by --overwrite do not count.
    """
    runs: list[tuple[int, Path]] = []
    if Path(output).is_dir():
        for run in Path(output).iterdir():
            if not _MOVED_ASIDE.fullmatch(run.name):
                times = [path.stat().st_mtime_ns for path in _checkpoints(run)]
                runs += [(max(times), run)] if times else []
    return next((run for _, run in sorted(runs, reverse=True) if find_latest(run) is not None), None)


def run_of(checkpoint: Path) -> Path | None:
    """The run folder that a checkpoint file belongs to, None when it lies elsewhere."""
    path = Path(os.path.abspath(checkpoint))
    return path.parent.parent if path.parent.name == "ckpts" else None


def _checkpoints(run: Path) -> list[Path]:
    folder = run / "ckpts"
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _CHECKPOINT.fullmatch(path.name)), key=_step_of)


def _step_of(path: Path) -> int:
    match = _CHECKPOINT.fullmatch(path.name)
    assert match is not None
    return int(match.group(1))


def _has_content(folder: Path) -> bool:
    return any(entry.name != "lock" for entry in folder.iterdir())


def _move_aside(path: Path) -> None:
    """Rename a run that nobody works on; a folder that is no run of ours stays where it is."""
    if not (path / "ckpts").is_dir():
        raise OutputError(
            "the output folder has content, but is not a run", where=path, remedy="choose another place with -o"
        )
    lock = take_lock(path)
    try:
        path.rename(_free_name(path))
    finally:
        os.close(lock)


def _free_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_name(f"{path.name}.old-{number}")).exists():
        number += 1
    return candidate


def _remove_stale(folder: Path) -> None:
    """Delete temporary files of dead writers; called with the lock held, so that a living one is not of this run."""
    for path in folder.iterdir():
        match = TEMPORARY.fullmatch(path.name)
        if match is not None and not _other_process_lives(int(match["pid"])):
            with contextlib.suppress(OSError):
                path.unlink()


def _other_process_lives(pid: int) -> bool:
    if pid == os.getpid():
        return False  # nothing of ours is being written while the run is being opened
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _put(file: BinaryIO, content: bytes) -> None:
    file.write(content)


def _line_step(line: bytes) -> float:
    """The step of a metrics line; 0 when it has none, infinity when it is torn."""
    try:
        record = json.loads(line)
    except ValueError:
        return math.inf
    step = record.get("step", 0) if isinstance(record, dict) else math.inf
    return step if isinstance(step, int) else 0


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
