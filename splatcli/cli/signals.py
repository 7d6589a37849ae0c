"""Signals: some ask for a save, some for a stop after one; a second SIGINT ends at once.

Handlers only remember. So a signal that comes during a save lets it finish.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType, TracebackType
from typing import Self

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

    def heed_stops(self) -> None:
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
