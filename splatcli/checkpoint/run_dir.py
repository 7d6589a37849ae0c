"""RunDir: the folder of one run, its lock, its metrics.jsonl, and its checkpoints; one process owns it at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import re
import shlex
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from splatcli import disk
from splatcli.checkpoint.atomic import (
    TEMPORARY,
    check_name,
    other_process_lives,
    probe_folder,
    probe_room,
    sync_folder,
    write_atomically,
)
from splatcli.checkpoint.container import read_container
from splatcli.checkpoint.file import checkpoint_bytes, load_checkpoint, save_checkpoint
from splatcli.checkpoint.state import Checkpoint
from splatcli.config import Config
from splatcli.errors import (
    ALLOW_LARGER,
    LockedError,
    ModelFileError,
    OutputError,
    ResourceError,
    UnreadableError,
    from_os_error,
    os_errors,
)

_log = logging.getLogger(__name__)

#: Files of a run folder: the pointer to the newest checkpoint, the settings, the request that started it, the metrics.
LATEST = "latest"
CONFIG = "config.json"
REQUEST = "request.json"
METRICS = "metrics.jsonl"

#: The report of a run that diverged before its first step (train/recovery.py).
FIRST_REPORT = "diverged_000000.json"


class RunMovedError(OutputError):
    """The folder of an open run is no longer at its path.

    place: where it is now; None when it was removed, or nobody can tell.
    removed: it was removed for sure, and no later attempt can succeed.
    """

    def __init__(self, run: Path, place: Path | None, *, removed: bool = False) -> None:
        self.place = place
        self.removed = removed
        if removed:
            what, back = "the run folder was removed", "train again, or splat resume a copy of the run"
        elif place is None:
            what, back = "the run folder is gone: it was moved or removed", "put it back"
        else:
            what, back = f"the run folder was moved to {place}", f"mv {shlex.quote(str(place))} {shlex.quote(str(run))}"
        super().__init__(f"{what} while the run was writing to it", where=run, remedy=back)


def take_lock(run: Path) -> int:
    """Return the descriptor of the run's lock file, locked; closing it unlocks, also after a crash."""
    path = run / "lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 200).decode(errors="replace").split()
        os.close(descriptor)
        who = f"process {holder[0]} on {holder[1]}" if len(holder) == 2 else "another process"
        raise LockedError(f"{who} is working on this run", where=run, remedy="wait for it, or stop it first") from None
    except OSError as error:
        if error.errno not in disk.NO_LOCKS:
            os.close(descriptor)
            raise
        _log.warning("%s: this file system has no locks; take care to run one process only", run)
    with contextlib.suppress(OSError):  # the holder's name is not needed: a full disk must not block the run
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
    return descriptor


def is_locked(run: Path) -> bool:
    """Return whether a process works in a run folder. It writes nothing. Raises OSError where that cannot be known."""
    try:
        descriptor = os.open(run / "lock", os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def check_unlocked(run: Path) -> None:
    """Raise LockedError where a process works in a run folder. Where that cannot be known, nothing is raised."""
    with contextlib.suppress(OSError):
        if is_locked(run):
            os.close(take_lock(run))


#: What a run writes into its folder before its first step; a rollback of the folder deletes nothing else.
_OURS = (
    "ckpts/ckpt_*.pt",
    "ckpts/*.tmp.*",
    "*.tmp.*",
    "config.json",
    "request.json",
    "metrics.jsonl",
    "latest",
    "lock",
)


@dataclass(slots=True)
class Undo:
    """The changes that creating the run folder ``path`` made.

    made: folders that were created, the innermost first.
    moved_aside: the new place of a run that was there before.
    owned: its lock is held, so that the files in it are this run's.
    """

    path: Path
    made: list[Path] = field(default_factory=list)
    moved_aside: Path | None = None
    owned: bool = False

    def rollback(self) -> None:
        """Restore what was there before, as far as possible; never raises."""
        for pattern in _OURS if self.owned else ():
            for file in self.path.glob(pattern):
                with contextlib.suppress(OSError):
                    file.unlink()
        for folder in self.made:
            with contextlib.suppress(OSError):
                folder.rmdir()  # only if empty
        with contextlib.suppress(OSError):
            if self.moved_aside is not None and not self.path.exists():
                self.moved_aside.rename(self.path)


def append(path: Path, data: bytes, *, what: str) -> None:
    """Append all of ``data`` or nothing. Raises OutputError, which calls it ``what``."""
    try:
        with path.open("ab", buffering=0) as file:
            end = file.tell()
            if file.write(data) != len(data):
                file.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        large = error.errno == errno.EFBIG
        text = f"could not add to the {what}{'' if large else ' (disk full?)'}: {error.strerror}"
        raise OutputError(text, where=path, remedy=ALLOW_LARGER if large else None) from None


def trim_lines(path: Path, step: int) -> None:
    """Remove the lines of steps after ``step``, and a line that a crash has torn. Raises OutputError or OSError."""
    _keep_lines(path, lambda line: _step_of(line) <= step)


def drop_event(path: Path, event: object, step: object) -> None:
    """Remove the lines of an event of a step. Raises OutputError."""
    with os_errors(OutputError, path):
        _keep_lines(path, lambda line: (_field(line, "event"), _field(line, "step")) != (event, step))


def _keep_lines(path: Path, keeps: Callable[[bytes], bool]) -> None:
    """Remove all other lines. Raises OutputError or OSError."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = b"".join(line for line in lines if keeps(line))
    if kept != b"".join(lines):
        write_atomically(path, lambda file: file.write(kept), what="metrics")


def _step_of(line: bytes) -> float:
    """Return the step of a line; 0 when it has none, infinity when it is torn."""
    step = _field(line, "step", 0)
    return step if isinstance(step, int | float) else 0


def _field(line: bytes, key: str, default: object = None) -> object:
    """Return the value of a key of a line, ``default`` when it has none; infinity when the line is torn."""
    try:
        record = json.loads(line)
    except ValueError:
        return math.inf
    return record.get(key, default) if isinstance(record, dict) else math.inf


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


_CHECKPOINT = re.compile(r"ckpt_(\d{6,})\.pt")
_MOVED_ASIDE = re.compile(r".+\.old-\d+")


class RunDir:
    """An open run folder; holds the lock until ``close`` or the end of the ``with`` block.

    moved_aside: the new place of a run that was there before; None where none was.
    """

    def __init__(self, path: Path, lock: int, undo: Undo | None = None) -> None:
        """For create() and open() only. lock: descriptor of the locked lock file. undo: what create() changed."""
        self.path = path
        self._lock: int | None = lock
        self._undo = undo
        self.moved_aside = None if undo is None else undo.moved_aside

    @classmethod
    def create(cls, path: Path, *, overwrite: bool = False) -> RunDir:
        """Create a run folder and its missing parents, and check that it is writable.

        Until a state after the first step is saved, or keep() is called, a ``with`` block that ends in an error removes
        it again.
        overwrite: a folder with content is moved aside to ``<name>.old-<n>``; nothing is deleted.
        Raises OutputError as check_name(), and when the place has content (without overwrite), is a file or cannot be
        written, LockedError when another process works there; then nothing has changed.
        """
        path = Path(path)
        check_name(path)
        undo = Undo(path)
        try:
            if path.exists() and not path.is_dir():
                raise OutputError("this is a file; a run needs a folder", where=path, remedy="choose another -o")
            if path.is_dir() and has_content(path):
                if not overwrite:
                    check_unlocked(path)  # another process may have made its run since this one looked
                    ways = ["--overwrite moves the run aside"] if (path / "ckpts").is_dir() else []
                    ways += ["splat resume continues it"] if checkpoints_of(path) else []
                    raise OutputError(
                        "the output folder exists and is not empty",
                        where=path,
                        remedy=", or ".join([", ".join(ways), "choose another -o"] if ways else ["choose another -o"]),
                    )
                undo.moved_aside = _move_aside(path)
            undo.made = [place for place in (path / "ckpts", path, *path.parents) if not place.exists()]
            path.mkdir(parents=True, exist_ok=True)
            probe_folder(path, "choose another place with -o")
            (path / "ckpts").mkdir(exist_ok=True)
            lock = take_lock(path)
            undo.owned = True
            return cls(path, lock, undo)
        except BaseException as error:
            if isinstance(error, LockedError):
                undo.made = []  # they may be of this call, and another process works in them now
            undo.rollback()
            if isinstance(error, OSError):
                raise OutputError(
                    f"cannot make the output folder: {error.strerror}",
                    where=path,
                    remedy="choose another place with -o",
                ) from None
            raise

    @classmethod
    def create_free(cls, choose: Callable[[], Path]) -> RunDir:
        """Create the run folder that ``choose`` names, or the next that it names where another run has taken that.

        Raises as create().
        """
        while True:
            path = choose()
            try:
                return cls.create(path)
            except LockedError:
                continue
            except OutputError:
                if not (path.is_dir() and has_content(path)):
                    raise

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """Open an existing run folder to continue the run; temporary files of dead writers are removed.

        Raises OutputError when it does not exist or cannot be written, LockedError when another process works there.
        """
        path = Path(path)
        with os_errors(OutputError, path):
            is_run = (path / "ckpts").is_dir()
        if not is_run:
            raise OutputError(
                "not a run folder: there is no ckpts/ in it", where=path, remedy="name a folder that splat train made"
            )
        for place in (path, path / "ckpts"):
            probe_folder(place, "copy the run to a place where files can be written, and resume it there")
        try:
            lock = take_lock(path)
        except OSError as error:
            raise OutputError(f"cannot lock the run: {error.strerror}", where=path) from None
        for folder in (path, path / "ckpts"):
            _remove_stale(folder)
        return cls(path, lock)

    def close(self) -> None:
        """Release the run; a second call does nothing."""
        if self._lock is not None:
            lock, self._lock = self._lock, None
            with contextlib.suppress(OSError):  # the lock is released even when close() fails
                os.close(lock)

    def __enter__(self) -> RunDir:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._undo is not None:
            self._undo.rollback()
        self.close()

    def keep(self) -> None:
        """Keep a new folder, whatever happens later."""
        self._undo = None

    def write_config(self, config: Config) -> None:
        """Store the resolved settings as config.json."""
        text = config.model_dump_json(indent=2) + "\n"
        write_atomically(self.path / CONFIG, lambda file: file.write(text.encode()), what="settings")

    def write_report(self, name: str, record: dict[str, Any]) -> Path:
        """Store ``record`` as JSON in RUN/``name`` and return the path. Raises OutputError."""
        path = self.path / name
        text = json.dumps(record, indent=2, allow_nan=False) + "\n"
        write_atomically(path, lambda file: file.write(text.encode()), what="report")
        return path

    def append_metrics(self, record: dict[str, object], *, again: bool = False) -> None:
        """Append a line to metrics.jsonl; NaN and infinity become null. Raises OutputError.

        again: the line replaces that of the same event and step, if there is one.
        """
        self._require_place()
        if again:
            drop_event(self.path / METRICS, record["event"], record["step"])
        append(self.path / METRICS, (json.dumps(_finite(record), allow_nan=False) + "\n").encode(), what="metrics")

    def checkpoint_path(self, step: int) -> Path:
        return self.path / "ckpts" / f"ckpt_{step:06d}.pt"

    def has(self, step: int) -> bool:
        """Return whether there is a checkpoint of ``step``; it is not verified."""
        with os_errors(OutputError, self.path):
            return self.checkpoint_path(step).exists()

    def newest_path(self) -> Path | None:
        """Return the file of the newest checkpoint, which is not verified; None without one, or if nobody can look."""
        with contextlib.suppress(OSError):
            return next(reversed(self.checkpoints()), None)
        return None

    def newest(self) -> Checkpoint | None:
        """Return the newest checkpoint that is sound in every byte, memory-mapped; None when there is none.

        Raises UnreadableError or ResourceError when the system refuses one: an older one must not replace it.
        """
        with os_errors(UnreadableError, self.path):
            files = self.checkpoints()
        for path in reversed(files):
            try:
                return load_checkpoint(path, mapped=True)
            except UnreadableError:
                raise
            except ModelFileError as error:
                _log.error("the checkpoint is damaged and skipped: %s", error)
        return None

    def probe_room(self, checkpoint: Checkpoint) -> None:
        """Raise OutputError unless the disk has room for ``checkpoint`` now."""
        probe_room(self.path / "ckpts", checkpoint_bytes(checkpoint))

    def room_for(self, checkpoint: Checkpoint, count: int) -> int:
        """Return how many more files like ``checkpoint``, with ``count`` Gaussians, fit on the disk."""
        with os_errors(OutputError, self.path):
            free = disk.free_bytes(self.path)
        return free // checkpoint_bytes(checkpoint, count)

    def checkpoints(self) -> list[Path]:
        """Return the run's checkpoint files by step, oldest first; they are not verified."""
        return checkpoints_of(self.path)

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write the checkpoint, point ``latest`` at the newest one, delete those that ``config.save`` does not keep.

        Kept: this one, the ``keep_last`` newest, the steps named in ``steps``. Raises what ``save_checkpoint`` raises;
        nothing has been deleted then.
        """
        self._require_place()
        path = self.checkpoint_path(checkpoint.step)
        with os_errors(OutputError, path.parent):
            path.parent.mkdir(exist_ok=True)  # somebody may have removed it
        save_checkpoint(path, checkpoint)
        if checkpoint.step > 0:
            self.keep()
        self._point_latest(self.newest_path() or path)  # a later one may be there when blocks are merged again
        self._prune(path, checkpoint.config.save.keep_last, frozenset(checkpoint.config.save.steps))
        return path

    def rewind(self, step: int) -> None:
        """Make ``step`` the run's newest, before the run goes on from there.

        Later checkpoints are renamed to ``<name>.old-<n>``, lines of later steps (and one torn by a crash) leave
        metrics.jsonl.
        """
        try:
            for path in self.checkpoints():
                if step_of(path) > step:
                    path.rename(_free_name(path))
            sync_folder(self.path / "ckpts")
            trim_lines(self.path / METRICS, step)
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise from_os_error(error, OutputError, self.path) from None
            raise OutputError(f"cannot rewind the run: {error.strerror}", where=self.path) from None
        if self.has(step):
            self._point_latest(self.checkpoint_path(step))

    def _require_place(self) -> None:
        """Raise RunMovedError when the folder was moved or removed, or another run's is in its place now."""
        if self._lock is None:
            return
        try:
            own = os.fstat(self._lock)
        except OSError:  # a stale handle of a share; nothing says that the run was moved
            return
        try:
            if os.path.samestat(own, os.stat(self.path / "lock")):
                return
        except FileNotFoundError:
            if self.path.is_dir():  # only the lock was deleted
                return
        except OSError:  # nothing says that it was moved
            return
        place = None
        with contextlib.suppress(OSError):  # Linux tells the name of an open file
            name = os.readlink(f"/proc/self/fd/{self._lock}")
            if name == os.path.realpath(self.path / "lock"):  # a file system whose inode numbers change
                return
            lock = Path(name)
            place = lock.parent if os.path.samestat(own, os.stat(lock)) else None
        raise RunMovedError(self.path, place, removed=own.st_nlink == 0)

    def _point_latest(self, path: Path) -> None:
        """Write the pointer. No program relies on it, so that a failure only gives a warning."""
        text = f"{path.relative_to(self.path).as_posix()}\n"
        pointer = self.path / LATEST
        try:
            write_atomically(pointer, lambda file: file.write(text.encode()), what="pointer to the checkpoint")
        except (OutputError, ResourceError) as error:
            _log.warning("%s", error)

    def _prune(self, just_written: Path, keep_last: int, named: frozenset[int]) -> None:
        """Delete old checkpoints. The one just written is verified, so that a sound one always stays.

        A folder that cannot be listed only gives a warning.
        """
        try:
            files = self.checkpoints()
        except OSError as error:
            _log.warning("could not look for old checkpoints in %s: %s", self.path, error.strerror)
            return
        kept = {just_written, *files[-keep_last:]}
        for path in files:
            if path not in kept and step_of(path) not in named:
                try:
                    path.unlink()
                except OSError as error:
                    _log.warning("could not delete the old checkpoint %s: %s", path, error.strerror)


@dataclass(frozen=True, slots=True)
class Latest:
    """The newest sound checkpoint of a run, and the newer ones that are damaged.

    path: the checkpoint of the highest step whose structure and manifest are sound; None when there is none.
    damaged: the faults of those of higher steps, the newest first.
    """

    path: Path | None = None
    damaged: list[ModelFileError] = field(default_factory=list)


def find_latest_sound(run: Path) -> Latest:
    """Return the newest sound checkpoint, and the newer ones that are damaged.

    It takes milliseconds a file; the tensors are verified when the checkpoint is loaded. One that a running training
    has deleted meanwhile makes room for the newer ones.
    Raises UnreadableError, ResourceError or VersionError for one that cannot be checked here: it may be sound, and an
    older one must not replace it.
    """
    with os_errors(UnreadableError, run):
        files = checkpoints_of(Path(run))
    damaged = []
    for path in reversed(files):
        try:
            read_container(path, digests=False, mmap=True)
        except UnreadableError:
            if is_gone(path):
                return find_latest_sound(run)
            raise
        except ModelFileError as error:
            damaged.append(error)
        else:
            return Latest(path, damaged)
    return Latest(None, damaged)


def is_gone(path: Path) -> bool:
    """Return whether a file that was listed has been deleted since."""
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        pass
    return False


def newest_run(output: Path) -> Path | None:
    """Return the run folder directly under ``output`` that wrote a checkpoint last; None when there is none.

    Runs moved aside by --overwrite do not count. Raises UnreadableError.
    """
    runs: list[tuple[int, Path]] = []
    with os_errors(UnreadableError, output):
        for run in Path(output).iterdir() if Path(output).is_dir() else ():
            if not _MOVED_ASIDE.fullmatch(run.name):
                times = [_written_at(path) for path in checkpoints_of(run)]
                runs += [(max(times), run)] if times else []
    return max(runs)[1] if runs else None


def _written_at(path: Path) -> int:
    """Return nanoseconds; 0 for a file that a running training has deleted meanwhile."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def run_of(checkpoint: Path) -> Path | None:
    """Return the run folder of a checkpoint file; None when it is elsewhere."""
    path = Path(os.path.abspath(checkpoint))
    return path.parent.parent if path.parent.name == "ckpts" else None


def checkpoints_of(run: Path) -> list[Path]:
    """Return the checkpoint files of a run by step, oldest first; they are not verified. Raises OSError."""
    folder = run / "ckpts"
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _CHECKPOINT.fullmatch(path.name)), key=step_of)


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name."""
    match = _CHECKPOINT.fullmatch(path.name)
    assert match is not None
    return int(match.group(1))


def has_content(folder: Path) -> bool:
    """Return whether there is more than a start leaves that failed or was killed before its first checkpoint."""
    left = {"lock", REQUEST, "config.json"} if (folder / REQUEST).is_file() else {"lock"}
    for entry in folder.iterdir():
        if entry.name == "ckpts" and entry.is_dir() and not entry.is_symlink():
            if not all(TEMPORARY.fullmatch(file.name) for file in entry.iterdir()):
                return True
        elif entry.name not in {*left, FIRST_REPORT} and not TEMPORARY.fullmatch(entry.name):
            return True
    return False


def _move_aside(path: Path) -> Path:
    """Rename a run that no process works on, and return its new name. Raises OutputError for another folder."""
    if not (path / "ckpts").is_dir():
        raise OutputError(
            "the output folder has content, but is not a run", where=path, remedy="choose another place with -o"
        )
    lock = take_lock(path)
    try:
        return path.rename(_free_name(path))
    finally:
        os.close(lock)


def _free_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_name(f"{path.name}.old-{number}")).exists():
        number += 1
    return candidate


def _remove_stale(folder: Path) -> None:
    """Delete temporary files of dead writers. The lock is held, so that a living one is not of this run."""
    try:
        files = list(folder.iterdir())
    except OSError as error:
        _log.warning("could not look for temporary files in %s: %s", folder, error.strerror)
        return
    for path in files:
        match = TEMPORARY.fullmatch(path.name)
        if match is not None and not other_process_lives(int(match["pid"])):
            with contextlib.suppress(OSError):
                path.unlink()
