"""A simulated GPU for programs that ask torch for one: Python imports this first when its folder is in PYTHONPATH.

SIMULATED_GPU names a CUDA library of ours that runs without a GPU (tests/gpu/rehearse.py makes it). Torch then reports
one GPU whose tensors lie in the memory of the host, `Backend.cuda` gives that library, streams are one after the other,
events tell the host's clock, and a graph records the rasterizer's calls. So scripts/gpu_check and tests/gpu run line by
line before they meet a GPU; what they measure means nothing.
"""

from __future__ import annotations

import os

if os.environ.get("COVERAGE_PROCESS_START"):
    import coverage

    coverage.process_startup()

if os.environ.get("SIMULATED_GPU"):
    import simulated_gpu

    simulated_gpu.install(os.environ["SIMULATED_GPU"])
