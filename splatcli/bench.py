"""Repeated measurements for ``splat bench``: scenes times settings times seeds, and their table.

Each run is a process of its own.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import logging
import os
import platform
import re
import resource
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from splatcli import __version__, machine
from splatcli.checkpoint.atomic import ended_by_signals
from splatcli.config import UNREADABLE_TOML, first_fault
from splatcli.errors import ResourceError, SceneError, SplatError, UsageError
from splatcli.scene.find_images import SUFFIXES, VIDEO_SUFFIXES, files_below
from splatcli.scene.scene import add_sample

_log = logging.getLogger(__name__)

#: Endings of the files of a scene that decide what is trained.
_SCENE_FILES = (*SUFFIXES, *VIDEO_SUFFIXES, ".bin", ".csv", ".json", ".npy", ".npz", ".ply", ".txt", ".xml")


def describe_machine() -> dict[str, Any]:
    """Return the facts of this machine for a report, as JSON."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "date": datetime.date.today().isoformat(),
        "version": __version__,
        "torch": torch.__version__,
        "processor": _processor(),
        "threads": machine.cores(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(count)],
        "matmul_gflops": matmul_gflops(),
    }


def matmul_gflops() -> float:
    """Return the present speed of a matrix product on the CPU, a scale for times of different machines."""
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


#: Valid names of scenes and settings, which become file names.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,60}")


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: names, and the arguments of ``splat train`` but for the seed and the output."""

    scene: str
    setting: str
    seed: int
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of its files."""
        return f"{self.scene}--{self.setting}--{self.seed}"


class _Scene(BaseModel):
    model_config = ConfigDict(extra="forbid")
    path: str
    args: list[str] = Field(default_factory=list)


class _Setting(BaseModel):
    model_config = ConfigDict(extra="forbid")
    args: list[str] = Field(default_factory=list)
    #: Names of the only scenes that it is for; None: all.
    scenes: list[str] | None = None


class _Plan(BaseModel):
    model_config = ConfigDict(extra="forbid")
    #: Arguments of every run.
    args: list[str] = Field(default_factory=list)
    seeds: list[int] = Field(default_factory=lambda: [42, 43, 44], min_length=1)
    scenes: dict[str, _Scene] = Field(min_length=1)
    settings: dict[str, _Setting] = Field(default_factory=lambda: {"default": _Setting()}, min_length=1)


def read_plan(path: Path, *, data: Path | None = None, seeds: list[int] | None = None) -> list[Cell]:
    """Read the runs of a TOML file: ``seeds``, ``args``, ``[scenes.NAME]`` with ``path`` and ``args``, and
    ``[settings.NAME]`` with ``args`` and, where it is not for all of them, ``scenes``.

    data: where relative paths of scenes begin; the file's own folder unless given.
    seeds: instead of the file's.
    Raises UsageError.
    """
    try:
        plan = _Plan.model_validate(tomllib.loads(path.read_text(encoding="utf-8-sig")))
    except OSError as error:
        raise UsageError(
            f"cannot read the plan: {error.strerror}", where=path, remedy="see splat bench --help"
        ) from None
    except ValidationError as error:
        what = first_fault(error, "the plan")
        raise UsageError(what, where=path, remedy="benchmarks/plans/ has examples") from None
    except UNREADABLE_TOML as error:
        raise UsageError(f"not valid TOML: {error}", where=path, remedy="benchmarks/plans/ has examples") from None
    for name, setting in plan.settings.items():
        if unknown := set(setting.scenes or ()) - plan.scenes.keys():
            raise UsageError(
                f"settings.{name}.scenes: no scene has the name {min(unknown)}",
                where=path,
                remedy="use names of the [scenes] of the plan",
            )
    root = path.parent if data is None else data
    scenes = {name: [str(root / scene.path), *scene.args] for name, scene in plan.scenes.items()}
    settings = {name: [*plan.args, *setting.args] for name, setting in plan.settings.items()}
    only = {name: setting.scenes for name, setting in plan.settings.items()}
    cells = _cells(scenes, settings, seeds or plan.seeds)
    return [cell for cell in cells if only[cell.setting] is None or cell.scene in (only[cell.setting] or ())]


def plan_of(scenes: list[Path], settings: list[str], seeds: list[int]) -> list[Cell]:
    """Return the runs of a command line. settings: ``NAME=FLAGS of splat train``. Raise UsageError."""
    named: dict[str, Any] = {}
    for scene in scenes:
        name = re.sub(r"[^A-Za-z0-9._+-]", "_", scene.resolve().name) or "scene"
        if name in named:
            raise UsageError(f"two scenes have the name {name}", remedy="use a plan: splat bench --plan FILE")
        named[name] = [str(scene)]
    flags: dict[str, list[str]] = {}
    for text in settings:
        name, equals, words = text.partition("=")
        if not equals:
            raise UsageError(
                f"--setting needs NAME=FLAGS, found {text!r}", remedy='e.g. --setting "small=--cap-max 50000"'
            )
        if name.strip() in flags:
            raise UsageError(f"two settings have the name {name.strip()}", where="--setting", remedy="rename one")
        try:
            flags[name.strip()] = shlex.split(words)
        except ValueError as error:
            raise UsageError(f"--setting {name}: {error}", remedy="close the quotes") from None
    return _cells(named, flags or {"default": []}, seeds)


def _cells(scenes: dict[str, list[str]], settings: dict[str, list[str]], seeds: list[int]) -> list[Cell]:
    for name in (*scenes, *settings):
        if not _NAME.fullmatch(name):
            raise UsageError(f"{name!r} is not a valid name", remedy="use letters, digits and . _ + -")
    return [
        Cell(scene, setting, seed, (*where, *flags))
        for scene, where in scenes.items()
        for setting, flags in settings.items()
        for seed in dict.fromkeys(seeds)
    ]


@dataclass(frozen=True, slots=True)
class Record:
    """The figures of a run.

    seconds: wall time of the process: start, reading, training, saving, evaluation.
    cpu_seconds: of all its threads, which other load on the machine affects less.
    peak_mb: its peak resident memory.
    views: name, psnr and ssim of each held-out view.
    scene_id: a digest of the scene's absolute path: one command in two folders trains two scenes.
    content_id: that of the scene's files, see _content_id(); empty where nobody knows.
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
    scene_id: str = ""
    content_id: str = ""


#: Figures of a run's last evaluation.
_FIGURES = ("step", "psnr", "ssim", "num_gaussians", "views", "protocol")


def check_scenes(cells: Sequence[Cell], folder: Path) -> None:
    """Raise SceneError for a scene that is not there, before the runs of others. folder: as of ``measure``."""
    for cell in cells:
        scene = Path(cell.arguments[0])
        if not scene.exists() and not (folder / f"{cell.name}.json").is_file():
            raise SceneError("there is no such scene", where=scene, remedy="correct the name, or --data of a plan")


def command_of(cell: Cell) -> list[str]:
    """Return the arguments of ``splat`` of a run, but for where it goes."""
    return ["train", *cell.arguments, "--seed", str(cell.seed)]


def measure(cell: Cell, folder: Path, *, keep: bool, sheet: bool) -> tuple[Record, bool]:
    """Return the record of a cell, and whether all that is asked for already existed.

    folder: takes ``<cell>.json``, ``<cell>.log``, with ``keep`` the run itself, with ``sheet`` ``<cell>.png``.
    Raises SplatError of the run's own kind if it fails.
    """
    path, log, picture = (folder / f"{cell.name}{ending}" for ending in (".json", ".log", ".png"))
    run = folder / cell.name
    command, content = command_of(cell), _content_id(Path(cell.arguments[0]), folder)
    with contextlib.suppress(OSError, ValueError, TypeError):
        record = Record(**json.loads(path.read_text(encoding="utf-8")))
        same = record.command == _shown(command) and record.scene_id in ("", _scene_id(cell))
        if same and content and record.content_id not in ("", content):
            same = False
            _log.warning(
                "%s: the scene has changed since %s was measured; it is trained again", cell.arguments[0], path
            )
        known = same and (run.is_dir() or not keep)
        if known and sheet and not picture.is_file() and run.is_dir():
            _draw_sheet(run, picture, log)
        if known and (picture.is_file() or not sheet):
            return record, True
    shutil.rmtree(run, ignore_errors=True)
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
        **{name: figures[name] for name in _FIGURES},
        scene_id=_scene_id(cell),
        content_id=content,
    )
    if sheet:
        _draw_sheet(run, picture, log)
    if not keep:
        shutil.rmtree(run, ignore_errors=True)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps({name: getattr(record, name) for name in Record.__slots__}, indent=1) + "\n")
    partial.replace(path)
    return record, False


def _scene_id(cell: Cell) -> str:
    return hashlib.sha256(os.fsencode(os.path.abspath(cell.arguments[0]))).hexdigest()[:16]


def _content_id(scene: Path, besides: Path) -> str:
    """Return a digest of the images, videos and described cameras of a scene: names, sizes and both ends of the files.

    besides: a folder that does not count where it lies in the scene. Empty for one that is not there or cannot be read.
    """
    digest = hashlib.sha256()
    try:
        within = besides.resolve().is_relative_to(scene.resolve())
        names = [""] if scene.is_file() else list(files_below(scene, _SCENE_FILES))
        for name in names:
            if not (within and (scene / name).resolve().is_relative_to(besides.resolve())):
                add_sample("file", scene / name, name, digest)
    except (OSError, SceneError):
        return ""
    return digest.hexdigest()[:16] if names else ""


def _draw_sheet(run: Path, picture: Path, log: Path) -> None:
    _run(["eval", str(run), "--sheet", str(picture), "--quiet"], log, "a")


def _shown(command: list[str]) -> str:
    return " ".join(["splat", *command])


def _run(arguments: list[str], log: Path, mode: str = "w") -> resource.struct_rusage:
    """Run ``splat`` and return its resource usage. A signal that ends this process ends the run first.

    log: of its stderr; mode "a" adds to it.
    """
    with log.open(mode, encoding="utf-8") as words:
        process = subprocess.Popen(
            [sys.executable, "-m", "splatcli", *arguments], stdout=subprocess.DEVNULL, stderr=words
        )
        try:
            with ended_by_signals():
                _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        except BaseException:
            process.send_signal(signal.SIGTERM)
            process.wait()
            raise
    if process.returncode != 0:
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
        kinds = {kind.exit_code: kind for kind in SplatError.__subclasses__()}
        raise kinds.get(process.returncode, ResourceError)(
            f"splat {arguments[0]} exited with {process.returncode}: {' '.join(last)}",
            where=log,
            remedy="correct the plan and run it again; finished measurements are kept",
        )
    return usage


def _evaluation(run: Path, log: Path) -> dict[str, Any]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    for line in reversed(lines):
        record: dict[str, Any] = json.loads(line)
        if record.get("event") == "eval":
            return record
    raise SceneError("the run has no held-out views", where=log, remedy="hold out views: --test-every 8")


#: Columns: heading, value, decimals.
_COLUMNS: tuple[tuple[str, Callable[[Record], float], int], ...] = (
    ("PSNR", lambda r: r.psnr, 2),
    ("SSIM", lambda r: r.ssim, 4),
    ("Gaussians", lambda r: r.num_gaussians, 0),
    ("seconds", lambda r: r.seconds, 1),
    ("MB", lambda r: r.peak_mb, 0),
)


def markdown(records: Sequence[Record]) -> list[str]:
    """Return the lines of a Markdown table: each scene and setting, then the mean of each setting over all scenes.

    Several seeds give mean ± standard deviation (n - 1); several scenes the mean of means.
    """
    scenes = list(dict.fromkeys(r.scene for r in records))
    settings = list(dict.fromkeys(r.setting for r in records))
    heads = ["scene", "setting", "seeds", *(head for head, _, _ in _COLUMNS)]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for scene in scenes:
        for setting in settings:
            runs = [r for r in records if (r.scene, r.setting) == (scene, setting)]
            if runs:
                cells = [_spread([of(r) for r in runs], digits) for _, of, digits in _COLUMNS]
                lines.append(_row(scene, setting, str(len(runs)), *cells))
    if len(scenes) > 1:
        for setting in settings:
            groups = [[r for r in records if (r.scene, r.setting) == (scene, setting)] for scene in scenes]
            if all(groups):
                means = [
                    f"{statistics.fmean(statistics.fmean(map(of, runs)) for runs in groups):,.{digits}f}"
                    for _, of, digits in _COLUMNS
                ]
                lines.append(_row("mean", setting, "", *means))
    return lines


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _spread(values: list[float], digits: int) -> str:
    mean = f"{statistics.fmean(values):,.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):,.{digits}f}"
