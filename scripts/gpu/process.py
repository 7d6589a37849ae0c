"""Other programs: in the background, with a log and a time limit, killed with their children."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu import ROOT
from gpu.report import Skipped


class Command:
    """A program in the background, with its own log, killed with its children when its time is up."""

    def __init__(self, command: list[str], log: Path, *, nice: int = 0, **environment: str) -> None:
        self.log, self.started = log, time.monotonic()
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=(lambda: os.nice(nice)) if nice else None,  # type: ignore[arg-type,return-value]
            )

    def wait(self, seconds: float, every: Callable[[], None] | None = None) -> int | None:
        """The exit status, or None when the time was up; ``every`` is called once a second."""
        until = time.monotonic() + max(1.0, seconds)
        try:
            while (left := until - time.monotonic()) > 0:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return self.process.wait(timeout=min(1.0, left))
                if every is not None:
                    every()
            return None
        finally:
            self.kill()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def text(self) -> str:
        return self.log.read_text(errors="replace")


def run_child(
    command: list[str], log: Path, seconds: float, every: Callable[[], None] | None = None, **environment: str
) -> int | None:
    """The exit status of a command, or None when it ran out of time; then it and its children are killed."""
    return Command(command, log, **environment).wait(seconds, every)


def result_of(command: Command, seconds: float) -> dict[str, Any]:
    """The object that ``--json`` printed last. Raises AssertionError with the program's own words."""
    status = command.wait(seconds)
    if status != 0:
        ending = " / ".join(command.text().strip().splitlines()[-4:])
        raise AssertionError(f"{command.log.stem}: {'ran out of time' if status is None else status}: {ending[-600:]}")
    objects = [json.loads(line) for line in command.text().splitlines() if line.startswith("{")]
    return objects[-1] if objects else {}


def splat(*words: str) -> list[str]:
    return [sys.executable, "-m", "splatcli", *words]


def this_program(*words: str) -> list[str]:
    return [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), "--part", "check", "--out", os.devnull, *words]


def tool(name: str) -> str:
    """A program of the CUDA toolkit. Raises Skipped."""
    found = shutil.which(name) or shutil.which(f"/usr/local/cuda/bin/{name}")
    if found is None:
        raise Skipped(f"{name} is not installed")
    return found
