"""The result of a command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Done:
    """Exit code, stdout and stderr."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def objects(self) -> list[dict[str, Any]]:
        """stdout of a command that ran with --json."""
        return [json.loads(line) for line in self.lines]


#: Runs a command line: the type of the fixtures ``splat`` and ``splat_once``.
Splat = Callable[..., Done]
