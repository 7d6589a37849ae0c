"""metrics.jsonl: one JSON object a line, added whole or not at all."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import BinaryIO

from splatcli.checkpoint.atomic import write_atomically
from splatcli.errors import OutputError

#: The file's name in a run folder.
METRICS = "metrics.jsonl"


def append_line(path: Path, record: dict[str, object]) -> None:
    """Add a line; NaN and infinity become null. Raises OutputError, and leaves no torn line, when there is no room."""
    line = (json.dumps(_finite(record), allow_nan=False) + "\n").encode()
    try:
        with path.open("ab", buffering=0) as file:
            end = file.tell()
            if file.write(line) != len(line):
                file.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise OutputError(f"could not add to the metrics (disk full?): {error.strerror}", where=path) from None


def trim_lines(path: Path, step: int) -> None:
    """Remove the lines of steps after ``step``, and one that a crash has torn. Raises OutputError, OSError."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = b"".join(line for line in lines if _step_of(line) <= step)
    if kept != b"".join(lines):
        write_atomically(path, lambda file: _put(file, kept), what="metrics")


def _put(file: BinaryIO, content: bytes) -> None:
    file.write(content)


def _step_of(line: bytes) -> float:
    """The step of a line; 0 when it has none, infinity when it is torn."""
    try:
        record = json.loads(line)
    except ValueError:
        return math.inf
    step = record.get("step", 0) if isinstance(record, dict) else math.inf
    return step if isinstance(step, int) else 0


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
