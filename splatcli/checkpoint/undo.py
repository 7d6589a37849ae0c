"""Undo: takes a run folder back that nothing has come of, so that a start that fails leaves no litter."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

#: What a run writes into its folder before its first step; anything else there is somebody else's, and stays.
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
    """How the run folder ``path`` came to be.

    made: folders that did not exist before, the innermost first.
    moved_aside: where a run that was there is now.
    owned: its lock is held, so that the files in it are this run's.
    """

    path: Path
    made: list[Path] = field(default_factory=list)
    moved_aside: Path | None = None
    owned: bool = False

    def rollback(self) -> None:
        """Everything as before, as far as possible; never raises."""
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
