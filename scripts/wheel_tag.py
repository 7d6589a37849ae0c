"""Build hook of wheels: one that carries native libraries is for their machine alone, any other for all.

The manual's pages travel along, without pictures, for ``splat docs``.
"""

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
        docs = Path(self.root) / "docs"
        for page in docs.rglob("*.md"):
            build_data["force_include"][str(page)] = f"splatcli/_docs/{page.relative_to(docs)}"
