"""The report that ``splat sfm`` leaves beside its model, as far as readers of scenes ask for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

#: Its name in the folder of the result.
REPORT = "sfm.json"


def read_report(folder: Path) -> dict[str, Any]:
    """Return the report in a folder; empty where there is none that can be read."""
    try:
        facts = json.loads((folder / REPORT).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def are_cameras_held(folder: Path) -> bool:
    """Return whether the report says that the cameras are those of another scene, to which points were triangulated."""
    return read_report(folder).get("cameras_held") is True
