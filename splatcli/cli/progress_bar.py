"""Counting: how far a command is with things of one kind, as a bar on a terminal or a line now and then in a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from splatcli.cli.output import Output

if TYPE_CHECKING:
    from rich.progress import Progress

#: Seconds between two plain lines.
_PLAIN_EVERY = 10.0


class Counting:
    """Tells on stderr how many of ``total`` are done, while it is open.

    noun: what is counted, in the plural. With --json or -q nothing is told.
    """

    def __init__(self, out: Output, total: int, noun: str) -> None:
        self._out = out
        self._total = total
        self._noun = noun
        self._done = 0
        self._last_line = time.monotonic()
        self._bar = _bar() if not (out.json or out.quiet) and sys.stderr is not None and sys.stderr.isatty() else None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._task = self._bar.add_task(self._noun, total=self._total)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def note(self, text: str) -> None:
        """Something worth knowing, above the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            self._out.note(text)
        self._last_line = time.monotonic()

    def advance(self) -> None:
        """One more is done."""
        self._done += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
        elif not self._out.json and time.monotonic() - self._last_line > _PLAIN_EVERY:
            self._out.note(f"{self._noun}: {self._done}/{self._total}")
            self._last_line = time.monotonic()


def _bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
