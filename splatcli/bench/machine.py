"""What a figure was measured on: date, version, processor, GPU, and how fast the machine is at that moment."""

from __future__ import annotations

import datetime
import platform
import time
from pathlib import Path
from typing import Any

import torch

from splatcli import __version__
from splatcli.native.call import default_threads


def describe_machine() -> dict[str, Any]:
    """Facts for a report, in JSON's types."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "date": datetime.date.today().isoformat(),
        "version": __version__,
        "torch": torch.__version__,
        "processor": _processor(),
        "threads": default_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(count)],
        "matmul_gflops": matmul_gflops(),
    }


def matmul_gflops() -> float:
    """What a matrix product on the CPU reaches now; times of different machines compare in proportion to it."""
    a = torch.rand(1024, 1024)
    best = float("inf")
    for _ in range(10):
        started = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - started)
    return round(2 * 1024**3 / best / 1e9, 1)


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
