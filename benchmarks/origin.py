"""Where and of what a measurement is, for the head of a file in benchmarks/results."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path

import splatcli


def origin() -> dict[str, str]:
    """Return the date, the version, the commit and the machine."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip()
    return {
        "date": datetime.date.today().isoformat(),
        "version": splatcli.__version__,
        "commit": commit or "unknown",
        "machine": f"{processor()}, {len(os.sched_getaffinity(0))} cores, shared",
    }


def processor() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
