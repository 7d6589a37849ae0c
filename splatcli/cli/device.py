"""Which device a command runs on."""

from __future__ import annotations

import logging
import re

from splatcli.errors import ResourceError, UsageError

_log = logging.getLogger(__name__)


def resolve_device(text: str) -> str:
    """``auto`` becomes the best device that this machine can drive; ``cuda`` becomes ``cuda:0``.

    With ``auto``, a GPU whose library cannot be built or loaded is passed over with a warning.
    Raises UsageError for a word that names no device and ResourceError for one that is not there.
    """
    import torch

    from splatcli.native.backend import Backend

    if text == "cpu":
        return "cpu"
    if text == "auto":
        if not torch.cuda.is_available():
            return "cpu"
        try:
            return str(Backend.cuda("cuda").device)
        except ResourceError as error:
            _log.warning("%s\nThere is a GPU, but it cannot be used; going on with the CPU.", error)
            return "cpu"
    if re.fullmatch(r"cuda(:\d+)?", text):
        return str(Backend.cuda(text).device)
    raise UsageError(f"{text!r} is no device", where="--device", remedy="auto, cpu, cuda or cuda:1")
