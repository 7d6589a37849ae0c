"""Progress of long work: whatever reads, builds or writes reports it here, and a command line shows it.

Without a listener nothing happens. Reports come from the thread that the work was started in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

#: Gets (task, done, total).
Listener = Callable[[str, int, int], None]

_Item = TypeVar("_Item")

_listeners: list[Listener] = []


def report(task: str, done: int, total: int) -> None:
    """Report that ``done`` of ``total`` parts of a task are done. A task ends when all of them are."""
    if _listeners:
        _listeners[-1](task, done, total)


def track(items: Iterable[_Item], task: str, total: int | None = None) -> Iterator[_Item]:
    """Yield ``items``, and report each one that is done. total: their number, for items that have no length."""
    if total is None:
        assert isinstance(items, Collection)
        total = len(items)
    report(task, 0, total)
    for done, item in enumerate(items, 1):
        yield item
        report(task, done, total)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Let ``listener`` get the reports inside, and an earlier one those after."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.pop()
