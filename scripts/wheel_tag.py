"""Build hook of wheels: one that carries a ready-made CUDA library is for Linux on x86-64, any other for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class WheelTag(BuildHookInterface):  # type: ignore[type-arg]
    """Found by hatchling, which looks for the one subclass in this file."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if (Path(self.root) / "splatcli" / "_native_bin" / "libsplat_cuda.so").is_file():
            build_data["pure_python"] = False
            build_data["tag"] = "py3-none-linux_x86_64"
