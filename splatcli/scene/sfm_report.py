"""The report that ``splat sfm`` leaves beside its model, as far as readers of scenes ask for it."""

from __future__ import annotations

import json
from pathlib import Path

#: Its name in the folder of the result.
REPORT = "sfm.json"


def are_cameras_held(report: Path) -> bool:
    """Return whether a report says that the cameras are those of another scene, to which points were triangulated."""
    try:
        facts = json.loads(report.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(facts, dict) and facts.get("cameras_held") is True
