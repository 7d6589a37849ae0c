"""cuda/src/cpu/pool.cpp: loops whose jobs throw, and loops where the system starts no thread."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

from splatcli.native.build import COMMON_FLAGS, find_compiler, source_root


def test_exceptions_reach_the_caller_and_loops_run_on_the_threads_that_start(tmp_path: Path) -> None:
    compiler = shlex.split(find_compiler().command)
    folder, program = source_root() / "src" / "cpu", tmp_path / "pool-check"
    sources = [Path(__file__).with_name("pool_check.cpp"), folder / "pool.cpp"]
    subprocess.run([*compiler, *COMMON_FLAGS, f"-I{folder}", "-pthread", "-o", program, *sources, "-ldl"], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
