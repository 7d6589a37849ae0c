"""HEIF images, as phones and cameras take them: recognised here, opened by pillow-heif where that is installed."""

from __future__ import annotations

import importlib
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SUFFIXES = (".heic", ".heif", ".hif")
#: The extra that brings the reader.
INSTALL = "pip install 'splatcli[heic]'"

#: Brands of the ISO media container. The last two only say that a file holds images, or a sequence of them.
_BRANDS = frozenset((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"))
_AV1 = frozenset((b"avif", b"avis"))


def is_heif(start: bytes) -> bool:
    """Return whether a file that begins with these bytes, 64 or more, is a HEIF image. AVIF files are none."""
    if start[4:8] != b"ftyp" or start[8:12] not in _BRANDS:
        return False
    end = min(int.from_bytes(start[:4], "big"), len(start))
    return _AV1.isdisjoint(start[at : at + 4] for at in range(16, end - 3, 4))


@lru_cache(maxsize=1)
def can_read() -> bool:
    """Return whether pillow-heif is installed; from then on Pillow opens such files as its format HEIF."""
    try:
        plugin = importlib.import_module("pillow_heif")
        # Depth maps and other auxiliary images of a file are not used.
        plugin.register_heif_opener(depth_images=False, aux_images=False)
    except Exception:  # one that is installed and broken is of no more use than none
        return False
    return "HEIF" in Image.OPEN


def decode_deep(path: Path) -> NDArray[np.uint16]:
    """Return [H, W, C] of the primary image of a file with more than 8 bits a channel, which Pillow reduces to 8."""
    plugin = importlib.import_module("pillow_heif")
    return np.asarray(plugin.open_heif(path, convert_hdr_to_8bit=False)).astype(np.uint16, copy=False)
