"""A checkpoint without some of its Gaussians, which `splat resume` continues from.

What is dropped is dropped from everything that a run knows of each Gaussian: raw parameters, Adam's moments, the step
of the last update of its SH coefficients, densification statistics and the 3D filter. What stays keeps its bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from splatcli.checkpoint.state import Checkpoint
from splatcli.edit.operations import Clean, Keep, Operation
from splatcli.errors import UsageError
from splatcli.train.state import check_resumable

#: Statistics of a strategy that have a row for each Gaussian.
_STATISTICS = ("grad2d", "count")


def check_droppable(operations: Sequence[Operation]) -> None:
    """Raise UsageError for an operation after which Adam's moments would not belong to the Gaussians."""
    for one in operations:
        if not isinstance(one, Keep | Clean):
            raise UsageError(
                "a checkpoint holds Adam's moments, which stay true only where Gaussians are dropped: by --crop, "
                "--crop-out, --filter and --clean",
                where=one.label,
                remedy="-o edited.ply; to train on: splat train SCENE --init edited.ply",
            )


def only_rows(checkpoint: Checkpoint, rows: Tensor) -> Checkpoint:
    """Return the checkpoint with these of its Gaussians, as stored. rows: [M] int64, ascending.

    Raises ModelFileError for a checkpoint that cannot be resumed, UsageError for one with statistics of unknown rows.
    """
    check_resumable(checkpoint)
    tensors = {name for name, value in checkpoint.strategy.items() if isinstance(value, Tensor)}
    if unknown := sorted(tensors.difference(_STATISTICS)):
        raise UsageError(
            f"its strategy keeps {', '.join(unknown)}, of which nobody knows what belongs to a Gaussian",
            where="-o",
            remedy="-o edited.ply; to train on: splat train SCENE --init edited.ply",
        )
    return checkpoint.select_rows(rows)
