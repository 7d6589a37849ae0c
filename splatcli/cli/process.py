"""The process: signals, pipes and memory limits, handled before anything heavy is imported."""

from __future__ import annotations

import errno
import os
import signal
import stat
import sys
import time
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Self

from splatcli.errors import ResourceError

#: Bytes of address space without which torch does not even load, on Linux with one thread; measured with ulimit -v.
_ADDRESS_SPACE = 1 << 30
#: Of them, for each further thread: its stack, and its heap.
_OF_A_THREAD, _MOST_THREADS = 128 << 20, 64

#: Options that print about a command and do nothing else.
_WORDS = {"--help", "-h", "--version"}


class PipeError(OSError):
    """A pipe stands where a file is to be read."""


def refuse_pipes() -> None:
    """From here on, opening a named pipe for reading raises PipeError, instead of waiting for a writer for ever.

    Inputs are read from any place and more than once, which no pipe allows. Descriptors, stdin among them, are not
    concerned. It holds for this process until its end.
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
        said = "this is a pipe, and files are read more than once; write its content into a file first"
        raise PipeError(errno.ESPIPE, said, path)


def require_address_space(argv: Sequence[str]) -> None:
    """Raises ResourceError where ``ulimit -v`` leaves too little for torch, whose libraries end the process then."""
    if not argv or _WORDS.intersection(argv):
        return
    try:
        import resource
    except ImportError:  # no such limits on this system
        return
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    needed = _ADDRESS_SPACE + _OF_A_THREAD * min(os.cpu_count() or 1, _MOST_THREADS)
    if limit not in (resource.RLIM_INFINITY, -1) and limit < needed:
        raise ResourceError(
            f"the limit of address space is {limit >> 20:,} MiB; torch and its threads take {needed >> 20:,} MiB",
            where="ulimit -v",
            remedy="raise the limit, or limit the memory in use instead (systemd-run -p MemoryMax=..., --mem of a job)",
        )


#: They end a run at the next step, after a complete save. SIGHUP is what a lost terminal sends.
STOPS = ("SIGINT", "SIGTERM", "SIGHUP")

#: It saves at the next step, and training goes on; schedulers send it ahead of their time limit.
SAVE = "SIGUSR1"

#: Seconds in which a second SIGINT is, to a rank, the first one again: torchrun passes on what its ranks have had.
ECHO = 0.5


class Requests:
    """What signals have asked for, while open; the handlers that were there are put back at the end.

    SIGUSR1 is heeded at once, so that it never kills; the others only from ``heed_stops`` on: before there is
    anything to save, they end the program in their usual way.
    """

    def __init__(self, echo: float = 0.0) -> None:
        """echo: seconds in which a second SIGINT counts as the first one."""
        self._echo = echo
        self._stop: str | None = None
        self._stopped_at = 0.0
        self._save = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        self._listen(SAVE)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()

    def listen_for_stops(self) -> None:
        """From here on, signals that ask for a stop are remembered instead of obeyed."""
        for name in STOPS:
            self._listen(name)

    def stop(self) -> str | None:
        """The name of the first signal that asked for a stop, or None."""
        return self._stop

    def save(self) -> bool:
        """Whether a save was asked for since the last call."""
        asked, self._save = self._save, False
        return asked

    def pending(self) -> bool:
        """Whether a signal waits to be heeded."""
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


def end_imports_at_once() -> None:
    """From here on SIGINT ends the program without an exception when it comes in the middle of an import.

    Libraries swallow KeyboardInterrupt while they load, and go on half loaded.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    at = frame
    while at is not None:
        if at.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(128 + number)
        at = at.f_back
    signal.default_int_handler(number, frame)


def exit_code(reason: str) -> int:
    """What a run that stopped for ``reason`` returns: 128 plus the signal's number, or 0."""
    try:
        return 128 + signal.Signals[reason].value
    except KeyError:
        return 0
