"""Set-up of all tests: which of them run on this machine, and ``splat`` as a command of a shell."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Two workers share the machine: torch's idle threads sleep instead of spinning. Commands that tests start set it
# themselves.
_WAITS = "OMP_WAIT_POLICY"
_given = os.environ.get(_WAITS)
os.environ.setdefault(_WAITS, "PASSIVE")
import torch  # noqa: E402  # reads it

if _given is None:
    del os.environ[_WAITS]

from splatcli.cli.process import collect_garbage_rarely, freeze_garbage  # noqa: E402
from tests.forked import splat_command  # noqa: E402
from tests.running import Done  # noqa: E402

# Torch's objects all stay: looking through them again and again takes a tenth of the tests' time.
collect_garbage_rarely()
freeze_garbage()

REQUIRE_GPU = "SPLATCLI_REQUIRE_GPU"

# A shell starts what it puts into the background with SIGINT ignored, and every child inherits that: then a program
# that is sent a Ctrl-C never hears of it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# nohup ignores SIGHUP, which programs heed; a handler that does nothing is not inherited.
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what cannot run here.

    With SPLATCLI_REQUIRE_GPU=1 a missing GPU is a failure instead, so that no job is green by skipping.
    """
    gpus = torch.cuda.device_count()
    insist = os.environ.get(REQUIRE_GPU) == "1"
    for item in items:
        needed = 2 if item.get_closest_marker("multigpu") else 1 if item.get_closest_marker("gpu") else 0
        if gpus < needed and not insist:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} NVIDIA GPU(s), found {gpus}"))
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow; run with --slow"))


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    """A test that changes torch's thread count changes it for itself only."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def shell(tmp_path: Path) -> Callable[..., Done]:
    """Run a shell command in another process, where ``splat`` is a command; in ``tmp_path`` by default."""
    return _shell(tmp_path, splat_command())


@pytest.fixture
def fresh_shell(tmp_path: Path) -> Callable[..., Done]:
    """The same where ``splat`` starts an interpreter, for what is up to it: closed streams, imports, exits."""
    return _shell(tmp_path, (sys.executable, "-m", "splatcli"))


def _shell(place: Path, splat: tuple[str, ...]) -> Callable[..., Done]:
    folder = place / ".bin"
    folder.mkdir()
    command = folder / "splat"
    command.write_text(f'#!/bin/sh\nexec {shlex.join(splat)} "$@"\n')
    command.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}

    def call(text: str, *, cwd: Path = place, stdin: Any = subprocess.DEVNULL) -> Done:
        done = subprocess.run(
            ["bash", "-c", text], cwd=cwd, env=environment, stdin=stdin, capture_output=True, text=True, check=False
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return call
