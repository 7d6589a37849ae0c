"""Phases of a reconstruction: the progress of each, and the seconds that it takes."""

from __future__ import annotations

import time
from collections.abc import Callable

from splatcli.progress import Listener

#: Gets (done, total) of a phase.
Progress = Callable[[int, int], None]


class Phases:
    """The phases so far, one after the other. seconds: of each, from its start to its last report."""

    def __init__(self, listener: Listener) -> None:
        """Begin without a phase. listener: gets the name of each phase, and its progress."""
        self.seconds: dict[str, float] = {}
        self._listener = listener
        self._since = time.monotonic()

    def start(self, name: str) -> Progress:
        """Start a phase and return the callback that takes its progress."""
        self._since = time.monotonic()

        def progress(done: int, total: int) -> None:
            self.seconds[name] = time.monotonic() - self._since
            self._listener(name, done, total)

        return progress
