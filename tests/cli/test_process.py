"""What a command sets for its process before anything heavy is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("given", "kept"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_idle_threads_of_torch_sleep_unless_the_user_says_otherwise(given: str | None, kept: str) -> None:
    code = "import os, sys, splatcli; print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    if given is not None:
        environment["OMP_WAIT_POLICY"] = given
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"{kept} False"


def test_a_program_that_has_loaded_torch_keeps_its_environment() -> None:
    code = "import os, torch, splatcli; print('OMP_WAIT_POLICY' in os.environ)"
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_objects_that_stay_are_hardly_ever_looked_through() -> None:
    code = (
        "import gc, sys; from splatcli.cli import main; sys.argv = ['splat', 'doctor', '--json']; main(); "
        "runs = [generation['collections'] for generation in gc.get_stats()]; "
        "print('torch' in sys.modules, sum(runs) < 100, runs[2], gc.get_freeze_count() > 100_000)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True True 0 True"
