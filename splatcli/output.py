"""Where runs go when no folder is named."""

from __future__ import annotations

from pathlib import Path

from splatcli.errors import OutputError, os_errors

#: The folder of runs for which none is named.
OUTPUT = Path("output")


def free_folder(scene: str) -> Path:
    """Return output/<scene>, with the first free number appended if that folder exists. Raises OutputError."""
    path = OUTPUT / (scene or "scene")
    candidate, number = path, 2
    with os_errors(OutputError, OUTPUT):
        while candidate.exists():
            candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate
