"""Problems: everything that is wrong with a scene, collected and told at once instead of one run after another."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from splatcli.errors import SceneError

#: Problems that a message lists; more are counted.
LISTED = 20


class SceneProblems(SceneError):
    """Several things are wrong with one scene.

    root: the scene's folder.
    problems: the first LISTED of them, in the order found.
    total: how many there are.
    """

    def __init__(self, root: Path, problems: list[SceneError], total: int) -> None:
        self.root = root
        self.problems = tuple(problems)
        self.total = total
        super().__init__(f"{total:,} problems", where=root)

    def as_dict(self) -> dict[str, object]:
        listed = [{"what": p.what, "where": p.where, "help": p.remedy} for p in self.problems]
        return {**super().as_dict(), "problems": listed, "num_problems": self.total}

    def lines(self) -> list[str]:
        """A heading, then each problem with its place; a remedy that several in a row share comes once, after them."""
        cut = f", the first {len(self.problems)}" if self.total > len(self.problems) else ""
        lines = [f"error[{self.code}]: {self.total:,} problems in {self.root}{cut}:"]
        for i, problem in enumerate(self.problems):
            place = "" if problem.where is None else f"{_below(problem.where, self.root)}: "
            lines.append(f"  {i + 1}. {place}{problem.what}")
            following = self.problems[i + 1].remedy if i + 1 < len(self.problems) else None
            if problem.remedy is not None and problem.remedy != following:
                lines.append(f"     help: {problem.remedy}")
        if cut:
            lines.append(f"  ... and {self.total - len(self.problems):,} more")
        return lines


class Problems:
    """Collects SceneErrors while a scene is examined.

    What is found to be wrong is left out of what is examined next, so that each problem is its own and not the
    consequence of another. ``settle`` ends the examination.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.total = 0
        self._first: list[SceneError] = []
        self._seen: set[str] = set()

    def add(self, problem: SceneError) -> None:
        """One more problem; the very same one, met again at the next view, is no new one."""
        if str(problem) in self._seen:
            return
        self._seen.add(str(problem))
        self.total += 1
        if len(self._first) < LISTED:
            self._first.append(problem)

    @contextmanager
    def collect(self) -> Iterator[None]:
        """A SceneError raised inside is added, and what follows the block goes on."""
        try:
            yield
        except SceneError as problem:
            self.add(problem)

    def settle(self) -> None:
        """Raises the one problem as it is, several as SceneProblems; returns when there is none."""
        if self.total == 1:
            raise self._first[0]
        if self.total:
            raise SceneProblems(self.root, self._first, self.total)


def _below(where: str, root: Path) -> str:
    """A place inside the scene, told from its folder."""
    return where.removeprefix(f"{root}{os.sep}")
