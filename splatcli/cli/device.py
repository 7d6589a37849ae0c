"""Which device a command runs on."""

from __future__ import annotations

import re

from splatcli.errors import ResourceError, UsageError


def resolve_device(text: str) -> str:
    """``auto`` becomes the best device that this build can drive.

    Raises UsageError for a word that names no device and ResourceError for one that is not there.
    """
    if text in ("auto", "cpu"):
        return "cpu"
    if re.fullmatch(r"cuda(:\d+)?", text):
        raise ResourceError(
            "this version has no CUDA driver yet; it renders and trains on the CPU",
            where=f"--device {text}",
            remedy="use --device cpu, or leave --device out",
        )
    raise UsageError(f"{text!r} is no device", where="--device", remedy="auto, cpu, cuda or cuda:1")
