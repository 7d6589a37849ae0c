"""Signals: the first asks for a stop at the next step, after a complete save; a second SIGINT ends at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_requests() -> Iterator[Callable[[], str | None]]:
    """While open, SIGINT and SIGTERM are remembered instead of obeyed.

    Yields a function that returns the name of the first signal received, or None.
    The handlers that were there are put back at the end.
    """
    received: list[str] = []

    def remember(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if name == "SIGINT" and "SIGINT" in received:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        received.append(name)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, remember) for number in numbers}
    try:
        yield lambda: received[0] if received else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_code(reason: str) -> int:
    """What a run that stopped for ``reason`` returns: 128 plus the signal's number, or 0."""
    try:
        return 128 + signal.Signals[reason].value
    except KeyError:
        return 0
