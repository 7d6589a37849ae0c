"""Curves of a run for TensorBoard: figures of metrics.jsonl as scalars, in ``tensorboard`` in the run folder.

``SummaryWriter`` writes from a thread of its own, which prints a traceback where the disk is full; here each record is
in the file when add() returns, and an error is raised.
"""

from __future__ import annotations

import importlib
import io
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from splatcli.checkpoint.run_dir import append
from splatcli.config import Config
from splatcli.errors import OutputError, ResourceError, os_errors

#: The folder within a run folder.
FOLDER = "tensorboard"

#: TensorBoard's tags by the event of a record and its key.
_TAGS = {
    "step": {"loss": "train/loss", "num_gaussians": "train/num_gaussians"},
    "probe": {"psnr": "train/psnr"},
    "eval": {"psnr": "val/psnr", "ssim": "val/ssim"},
}


def check_tensorboard(config: Config) -> None:
    """Raise ResourceError where the settings want curves and the package is not there."""
    if not config.train.tensorboard:
        return
    try:
        importlib.import_module("tensorboard.summary.writer.record_writer")
        importlib.import_module("tensorboard.compat.proto.event_pb2")
    except ImportError as error:
        raise ResourceError(
            f"TensorBoard cannot be loaded: {error}",
            where="--tensorboard",
            remedy="pip install 'splatcli[tensorboard]'; or --set train.tensorboard=false, which leaves metrics.jsonl",
        ) from None


class TensorBoardWriter:
    """Appends to an event file of its own. Raises OutputError."""

    def __init__(self, run: Path, step: int) -> None:
        """run: its folder. step: the last of the run so far; curves of later ones are of an earlier try."""
        with os_errors(OutputError, run / FOLDER):
            (run / FOLDER).mkdir(exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        name = f"events.out.tfevents.{time.time_ns():020d}.{socket.gethostname()}.{os.getpid()}"
        self._path = run / FOLDER / name
        self._append(file_version="brain.Event:2")
        self._end_at(step)

    def add(self, record: Mapping[str, Any]) -> None:
        """Add the figures of a line of metrics.jsonl that are curves; those after a rollback replace the later ones."""
        tags = _TAGS.get(record["event"], {})
        if tags:
            values = [{"tag": tag, "simple_value": record[key]} for key, tag in tags.items()]
            self._append(step=record["step"], summary={"value": values})
        elif record["event"] == "rollback":
            self._end_at(record["step"])

    def _end_at(self, step: int) -> None:
        self._append(step=step + 1, session_log={"status": "START"})

    def _append(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        data = io.BytesIO()
        RecordWriter(data).write(Event(wall_time=time.time(), **fields).SerializeToString())
        append(self._path, data.getvalue(), what="curves")
