"""A run has the same bits with any number of threads, and on AVX2 as on AVX-512: as processes, on the sample."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from splatcli.native.backend import best_isa
from tests.forked import splat_command

SAMPLE = Path(__file__).parents[2] / "data" / "samples" / "courtyard"

#: torch gives each thread at least so many elements.
GRAIN = 32_768

#: All that a run computes outside the rasterizer: growth past GRAIN, poses, exposures, the 3D filter, resets.
SETTINGS = (
    *(str(SAMPLE), "-r", "4", "-n", "32", "--cap-max", "none", "--test-every", "0", "-q"),
    *(
        "--pose-opt",
        "--exposure",
        "--filter-3d",
        "--set",
        "schedule.refine_start=4",
        "--set",
        "schedule.refine_every=5",
    ),
    *("--set", "schedule.refine_stop=30", "--set", "schedule.reset_every=15", "--set", "strategy.grow_grad2d=1e-9"),
)

#: What makes each library that takes part choose its AVX2 code.
AVX2 = {
    "SPLATCLI_CPU_ISA": "avx2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "OPENBLAS_CORETYPE": "Haswell",
    "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR",
}


def train(run: Path, *more: str, threads: int, environment: dict[str, str] | None = None) -> dict[str, torch.Tensor]:
    """The tensors of the run's last checkpoint."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    code = f"import os, runpy; os.sched_setaffinity(0, {cores}); runpy.run_module('splatcli', run_name='__main__')"
    begins = (sys.executable, "-c", code) if environment else splat_command()  # libraries read it as they load
    command = [*begins, "train", *SETTINGS, *more, "-o", str(run)]
    variables = {**os.environ, **(environment or {"OMP_NUM_THREADS": str(threads)})}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return {k: v for k, v in torch.load(done.stdout.strip(), weights_only=True).items() if isinstance(v, torch.Tensor)}


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads are limited by affinity, which is Linux's")
@pytest.mark.parametrize("strategy", ["absgrad", "adc", "mcmc"])
def test_neither_threads_nor_the_instruction_set_change_a_bit(strategy: str, tmp_path: Path) -> None:
    more = ("--strategy", strategy)
    if strategy == "mcmc":
        more += ("--set", "strategy.grow_factor=1.6")
    one = train(tmp_path / "one", *more, threads=1, environment=AVX2 if best_isa() != "portable" else {"LC_ALL": "C"})
    two = train(tmp_path / "two", *more, threads=2)
    assert len(one["_xyz"]) > GRAIN
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


def test_resume_says_when_the_library_rounds_differently(tmp_path: Path) -> None:
    def splat(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*splat_command(), *arguments],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    begun = splat(
        *("train", str(SAMPLE), "-r", "8", "-n", "4", "--stop-at", "2", "-o", str(tmp_path / "run"), "-q"),
        SPLATCLI_CPU_ISA="portable",
    )
    assert begun.returncode == 0, begun.stderr
    again = splat("resume", begun.stdout.strip(), "--json", SPLATCLI_CPU_ISA="portable")
    assert "portable" not in again.stdout + again.stderr
    refused = splat("resume", begun.stdout.strip(), SPLATCLI_CPU_ISA="sse9")
    assert refused.returncode == 2
    assert "SPLATCLI_CPU_ISA='sse9'" in refused.stderr
    if best_isa() == "portable":
        pytest.skip("this processor runs the portable build only")
    other = splat("resume", begun.stdout.strip(), "--json", SPLATCLI_CPU_ISA=best_isa())
    started = next(json.loads(line) for line in other.stdout.splitlines() if "notes" in line)
    assert any("portable" in note and "other bits" in note for note in started["notes"]), started
