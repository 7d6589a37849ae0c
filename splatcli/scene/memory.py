"""Memory of this machine, and the parts of it that photos may take."""

from __future__ import annotations

import os
from pathlib import Path

from splatcli.scene.decode import DECODE_BYTES

#: Decoded photos that stay in memory may take this part of it: the rest is for Gaussians, pairs and other programs.
CACHE_SHARE = 0.25
#: One photo that is being decoded may take this part.
PHOTO_SHARE = 0.25

#: Where a container's limit stands: cgroup v2, v1.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
#: Taken where the system does not tell.
_UNKNOWN = 8 << 30


def machine_memory() -> int:
    """Bytes of main memory, or of the container's limit where that is less."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        memory = _UNKNOWN
    for file in _LIMITS:
        try:
            memory = min(memory, int(file.read_text()))
        except (OSError, ValueError):
            continue  # not in a container, or "max"
    return memory


def cache_bytes(asked: int | None) -> int:
    """Bytes of decoded photos that may stay in memory: as asked, else this machine's share."""
    return int(CACHE_SHARE * machine_memory()) if asked is None else asked


def max_pixels(asked: int | None) -> int:
    """Pixels that one photo may have: as asked, else what can be decoded in this machine's share."""
    return int(PHOTO_SHARE * machine_memory()) // DECODE_BYTES if asked is None else asked
