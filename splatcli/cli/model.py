"""Which model a command works on: the one named, the one that comes through a pipe, or the newest run."""

from __future__ import annotations

import json
import os
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from splatcli.errors import ModelFileError, UsageError

if TYPE_CHECKING:
    from splatcli.checkpoint.state import Checkpoint
    from splatcli.gaussians import Gaussians

#: Where runs go when nobody says otherwise.
OUTPUT = Path("output")

_HINT = "name a checkpoint, a PLY or a run folder"


@dataclass(frozen=True)
class Model:
    """A model that was read; ``checkpoint`` is None when the file holds nothing but Gaussians.

    gaussians: on the device that was asked for, as of the checkpoint's step; those of ``checkpoint`` are on the CPU and
        as stored.
    """

    path: Path
    gaussians: Gaussians
    checkpoint: Checkpoint | None


def find_model(given: Path | None) -> Path:
    """The file of the model to work on: a checkpoint or a PLY; it exists.

    given: what the command line names; a run folder stands for its newest checkpoint.
    Raises UsageError when there is no such thing.
    """
    path = given or _piped_path() or _newest_run()
    if path.is_dir():
        return _newest_in(path)
    if not path.exists():
        raise UsageError("there is no such model", where=path, remedy=_HINT)
    return path


def run_folder(checkpoint: Path) -> Path | None:
    """The run that a checkpoint lies in, told as the checkpoint was; None for one that was copied elsewhere."""
    from splatcli.checkpoint.rundir import run_of

    run = run_of(checkpoint)
    return run if run is None or checkpoint.is_absolute() else Path(os.path.relpath(run))


def load_model(path: Path, device: str = "cpu") -> Model:
    """Read a checkpoint or a PLY, told apart by their first bytes, not by their names. Raises ModelFileError."""
    from splatcli.checkpoint.load import load_checkpoint
    from splatcli.formats.ply import read_ply
    from splatcli.train.state import settled

    kind = file_kind(path)
    if kind == "checkpoint":
        checkpoint = load_checkpoint(path)
        return Model(path, settled(checkpoint).to(device), checkpoint)
    if kind == "ply":
        return Model(path, read_ply(path).to(device), None)
    raise ModelFileError("this is neither a checkpoint nor a PLY", where=path, remedy=_HINT)


def file_kind(path: Path) -> str | None:
    """``checkpoint``, ``ply`` or None, from the first bytes. Raises ModelFileError when they cannot be read."""
    try:
        with path.open("rb") as file:
            head = file.read(4)
    except OSError as error:
        raise ModelFileError(f"cannot read: {error.strerror}", where=path) from None
    if head.startswith(b"PK"):
        return "checkpoint"
    if head.startswith(b"ply"):
        return "ply"
    return None


def _piped_path() -> Path | None:
    """The path on the last line of a piped stdin; with --json upstream, that of the last object.

    Only a pipe or a redirected file is read: a terminal, /dev/null or a closed stdin has no path to give.
    An empty pipe is an error, for the command before it failed, and another run's model must not stand in.
    """
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return None
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return None
    lines = [line.strip() for line in sys.stdin if line.strip()]
    if not lines:
        raise UsageError("no path came through the pipe", where="stdin", remedy=f"{_HINT}, or see why nothing was sent")
    text = lines[-1]
    if text.startswith("{"):
        try:
            text = str(json.loads(text)["path"])
        except (ValueError, KeyError):
            raise UsageError("the last line is JSON without a path", where="stdin", remedy=_HINT) from None
    return Path(text)


def _newest_run() -> Path:
    from splatcli.checkpoint.rundir import newest_run

    run = newest_run(OUTPUT)
    if run is None:
        raise UsageError(f"no model is named and there is no run under {OUTPUT}/", remedy=_HINT)
    return run


def _newest_in(folder: Path) -> Path:
    """The newest checkpoint of our run, or the last PLY of a run of INRIA's program."""
    from splatcli.checkpoint.rundir import find_latest

    found = find_latest(folder)
    if found is not None:
        return found
    clouds = [
        (int(number), path)
        for path in folder.glob("point_cloud/iteration_*/point_cloud.ply")
        if (number := path.parent.name.removeprefix("iteration_")).isdecimal()
    ]
    if clouds:
        return max(clouds)[1]
    raise UsageError("this folder holds no run", where=folder, remedy=_HINT)
