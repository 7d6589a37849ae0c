"""Where runs go when no folder is named."""

from __future__ import annotations

import os
from pathlib import Path

from splatcli.errors import OutputError, os_errors

#: The folder of runs for which none is named.
OUTPUT = Path("output")


def scene_name(scene: Path) -> str:
    """Return the name of a scene's folder as it was given, also of a link; of a file that without its ending."""
    return scene.stem if scene.is_file() else os.path.basename(os.path.abspath(scene))


def free_folder(scene: Path) -> Path:
    """Return output/<scene>, with the first free number appended if that folder exists. Raises OutputError."""
    path = OUTPUT / (scene_name(scene) or "scene")
    candidate, number = path, 2
    with os_errors(OutputError, OUTPUT):
        while candidate.exists():
            candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate
