"""Build hook of wheels: one that carries native libraries is for their machine alone, any other for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class WheelTag(BuildHookInterface):  # type: ignore[type-arg]
    """Found by hatchling, which looks for the one subclass in this file."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        # The tag that scripts/build_wheels.py found to fit.
        tag = Path(self.root) / "splatcli" / "_native_bin" / "tag"
        if tag.is_file():
            build_data["pure_python"] = False
            build_data["tag"] = tag.read_text(encoding="utf-8").strip()
