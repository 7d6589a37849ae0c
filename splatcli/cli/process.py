"""The process: its age, signals, pipes and memory limits, handled before anything heavy is imported."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import stat
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Self

from splatcli.errors import ResourceError

#: New objects, less freed ones, before Python looks for reference cycles; looks before one at older objects, twice.
_GC_THRESHOLD = (50_000, 20, 100)


def collect_garbage_rarely() -> None:
    """Make Python look for reference cycles seldom: the libraries' hundreds of thousands of objects all stay.

    With the default, loading torch looks through them 500 times, 0.3 s.
    """
    gc.set_threshold(*_GC_THRESHOLD)


def freeze_garbage() -> None:
    """Exempt all objects from the collection at the interpreter's end, which takes 0.6 s with torch loaded."""
    gc.freeze()


_LOADED = time.monotonic()


def process_age() -> float:
    """Return seconds since the process started, or since this module was loaded where the system has no start time."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name of the program, in parentheses, may hold anything; field 22 is the start in clock ticks.
            fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
            return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    return time.monotonic() - _LOADED


class PipeError(OSError):
    """An input is a named pipe."""


def refuse_pipes() -> None:
    """Make opening a named pipe for reading raise PipeError from now on, instead of waiting for a writer.

    Inputs are read at any position and more than once, which a pipe does not allow. File descriptors such as stdin are
    not affected. The hook stays for the life of the process.
    """
    sys.addaudithook(_audit_open)


def _audit_open(event: str, arguments: tuple[object, ...]) -> None:
    if event != "open":
        return
    path, mode, flags = arguments[:3]
    if isinstance(path, int) or (isinstance(mode, str) and mode[:1] in "wax"):
        return
    if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_NONBLOCK):
        return
    try:
        found = os.stat(path)  # type: ignore[arg-type]  # a path of some kind
    except (OSError, TypeError, ValueError):
        return
    if stat.S_ISFIFO(found.st_mode):
        text = "this is a pipe, and inputs are read more than once; write its content to a file first"
        raise PipeError(errno.ESPIPE, text, path)


#: Bytes of address space that loading torch takes on Linux with one thread; measured with ulimit -v.
_ADDRESS_SPACE = 1 << 30
#: Further bytes for each thread (its stack and heap), and the largest number of threads counted.
_BYTES_PER_THREAD, _MOST_THREADS = 128 << 20, 64

#: Options that print information and do nothing else.
_INFORMATION = {"--help", "-h", "--help-all", "--version", "-V", "--install-completion", "--show-completion"}


def require_address_space(argv: Sequence[str]) -> None:
    """Raise ResourceError if ``ulimit -v`` is too small for torch, whose libraries would end the process."""
    if not argv or _INFORMATION.intersection(argv):
        return
    try:
        import resource
    except ImportError:  # no such limits on this system
        return
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    needed = _ADDRESS_SPACE + _BYTES_PER_THREAD * min(os.cpu_count() or 1, _MOST_THREADS)
    if limit not in (resource.RLIM_INFINITY, -1) and limit < needed:
        raise ResourceError(
            f"the address space is limited to {limit >> 20:,} MiB; torch and its threads need {needed >> 20:,} MiB",
            where="ulimit -v",
            remedy="raise the limit, or limit the memory in use instead (systemd-run -p MemoryMax=..., --mem of a job)",
        )


#: Signals that end a run at the next step, after a complete save. A lost terminal sends SIGHUP.
STOPS = ("SIGINT", "SIGTERM", "SIGHUP")

#: The signal that saves at the next step without a stop; schedulers send it before their time limit.
SAVE = "SIGUSR1"

#: Seconds in which a rank ignores a second SIGINT: torchrun forwards the signal that its ranks already got.
ECHO = 0.5


class SignalRequests:
    """Requests by signals while open; the previous handlers are restored at the end.

    Handlers only set flags, so a signal during a save lets it finish. SIGUSR1 is handled from the start, so it never
    ends the process. The other signals are handled from ``listen_for_stops`` on; before, there is nothing to save.
    """

    def __init__(self, echo: float = 0.0) -> None:
        """echo: seconds in which a second SIGINT is ignored."""
        self._echo = echo
        self._stop: str | None = None
        self._stopped_at = 0.0
        self._save = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        self._listen(SAVE)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()

    def listen_for_stops(self) -> None:
        """Handle stop signals from now on: they request a stop instead of ending the process."""
        for name in STOPS:
            self._listen(name)

    def stop(self) -> str | None:
        """Return the name of the first stop signal, or None."""
        return self._stop

    def save(self) -> bool:
        """Return whether a save was requested since the last call."""
        asked, self._save = self._save, False
        return asked

    def pending(self) -> bool:
        """Return whether a request is pending."""
        return self._save or self._stop is not None

    def _listen(self, name: str) -> None:
        number = signal.Signals[name]
        if name == "SIGHUP" and signal.getsignal(number) == signal.SIG_IGN:
            return  # nohup
        self._before[number] = signal.signal(number, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if name == SAVE:
            self._save = True
        elif name == "SIGINT" and self._stop == "SIGINT":
            if time.monotonic() - self._stopped_at < self._echo:
                return
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        else:
            self._stop, self._stopped_at = self._stop or name, time.monotonic()


def exit_on_sigint_in_imports() -> None:
    """Make SIGINT during an import end the process without an exception.

    Some libraries swallow KeyboardInterrupt while they load, and continue half loaded.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def interrupts() -> int:
    """Return how many SIGINTs became a KeyboardInterrupt since ``exit_on_sigint_in_imports``.

    An error after one may be it in another form: pydantic's core raises SchemaError where one comes while it builds a
    schema.
    """
    return _interrupts


_interrupts = 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _interrupts
    _interrupts += 1
    at = frame
    while at is not None:
        if at.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(128 + number)
        at = at.f_back
    signal.default_int_handler(number, frame)


def exit_code(reason: str) -> int:
    """Return the exit code of a run that stopped for ``reason``: 128 plus the number of a signal, or 0."""
    try:
        return 128 + signal.Signals[reason].value
    except KeyError:
        return 0
