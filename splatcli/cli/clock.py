"""How long this process has been running, start of the interpreter and of the libraries included."""

from __future__ import annotations

import os
import time
from pathlib import Path

_LOADED = time.monotonic()


def process_age() -> float:
    """Seconds; where the system does not tell, since this module was loaded."""
    try:
        # The name of the program, in parentheses, may hold anything; field 22 of the line is the start in clock ticks.
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic() - _LOADED
