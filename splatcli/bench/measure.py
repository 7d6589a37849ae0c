"""Measuring a cell: ``splat train`` as a process of its own, its time, memory and quality; each cell once."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from splatcli.bench.plan import Cell
from splatcli.errors import ResourceError, SceneError, SplatError


@dataclass(frozen=True, slots=True)
class Record:
    """What a run came to.

    seconds: wall time of the process: start, reading, training, saving, evaluation.
    cpu_seconds: of all its threads; what compares on a machine that does other things beside.
    peak_mb: its largest resident set.
    views: name, psnr and ssim of each held-out view.
    """

    scene: str
    setting: str
    seed: int
    command: str
    seconds: float
    cpu_seconds: float
    peak_mb: float
    step: int
    psnr: float
    ssim: float
    num_gaussians: int
    views: list[dict[str, Any]]
    protocol: dict[str, Any]


def measure(cell: Cell, folder: Path, *, keep: bool, sheet: bool) -> tuple[Record, bool]:
    """The record of a cell, and whether it was there already.

    folder: takes ``<cell>.json``, ``<cell>.log``, with ``keep`` the run itself, with ``sheet`` ``<cell>.png``.
    Raises SplatError: the run's own kind, where it failed.
    """
    path = folder / f"{cell.name}.json"
    command = ["train", *cell.arguments, "--seed", str(cell.seed)]
    with contextlib.suppress(OSError, ValueError, TypeError):
        record = Record(**json.loads(path.read_text(encoding="utf-8")))
        if record.command == _shown(command):
            return record, True
    run = folder / cell.name
    shutil.rmtree(run, ignore_errors=True)
    log = folder / f"{cell.name}.log"
    started = time.perf_counter()
    usage = _run([*command, "-o", str(run), "--quiet"], log)
    seconds = time.perf_counter() - started
    figures = _evaluation(run, log)
    record = Record(
        cell.scene,
        cell.setting,
        cell.seed,
        _shown(command),
        round(seconds, 2),
        round(usage.ru_utime + usage.ru_stime, 2),
        round(usage.ru_maxrss / (1024.0 if sys.platform != "darwin" else 1024.0**2), 1),
        *(figures[name] for name in ("step", "psnr", "ssim", "num_gaussians", "views", "protocol")),
    )
    if sheet:
        _run(["eval", str(run), "--sheet", str(folder / f"{cell.name}.png"), "--quiet"], log)
    if not keep:
        shutil.rmtree(run, ignore_errors=True)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps({name: getattr(record, name) for name in Record.__slots__}, indent=1) + "\n")
    partial.replace(path)
    return record, False


def _shown(command: list[str]) -> str:
    return " ".join(["splat", *command])


def _run(arguments: list[str], log: Path) -> resource.struct_rusage:
    """Runs ``splat`` and waits; what it used. A signal that ends this process ends that one first."""
    with log.open("w", encoding="utf-8") as words:
        process = subprocess.Popen(
            [sys.executable, "-m", "splatcli", *arguments], stdout=subprocess.DEVNULL, stderr=words
        )
        before = signal.signal(signal.SIGTERM, _leave)
        try:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        except BaseException:
            process.send_signal(signal.SIGTERM)
            process.wait()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
    if process.returncode != 0:
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
        kinds = {kind.exit_code: kind for kind in SplatError.__subclasses__()}
        raise kinds.get(process.returncode, ResourceError)(
            f"splat {arguments[0]} ended with {process.returncode}: {' '.join(last)}",
            where=log,
            remedy="correct the plan and run it again: what is measured already is kept",
        )
    return usage


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _evaluation(run: Path, log: Path) -> dict[str, Any]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    for line in reversed(lines):
        record: dict[str, Any] = json.loads(line)
        if record.get("event") == "eval":
            return record
    raise SceneError(
        "the run has no held-out views to be measured on", where=log, remedy="hold some out: --test-every 8"
    )
