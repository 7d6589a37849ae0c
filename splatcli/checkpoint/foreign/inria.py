"""chkpntN.pth of INRIA's program: a pair of (a tuple of twelve values, iteration)."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from splatcli.checkpoint.foreign.imported import ImportedModel, Load, Program, columns_of_tensors
from splatcli.errors import ModelFileError

#: Place of each column in the tuple, and the program's name for it. 0 is the SH degree in use; 7 to 11 are
#: statistics, the optimizer's state and the scene's size.
_PLACES = {"means": 1, "sh0": 2, "shN": 3, "scales": 4, "quats": 5, "opacities": 6}
_NAMES = {
    "means": "_xyz",
    "sh0": "_features_dc",
    "shN": "_features_rest",
    "scales": "_scaling",
    "quats": "_rotation",
    "opacities": "_opacity",
}
_LENGTH = 12


def is_inria(stored: object) -> bool:
    """Return whether a file holds a pair of a tuple that begins as this program's does, and an iteration."""
    return (
        isinstance(stored, tuple)
        and len(stored) == 2
        and isinstance(stored[0], tuple)
        and len(stored[0]) > 1
        and isinstance(stored[0][0], int)
        and isinstance(stored[0][1], Tensor)
    )


def read_inria(stored: object, where: Path, load: Load) -> ImportedModel:
    """Return the Gaussians of a pair. Raises ModelFileError when they are not where the program puts them."""
    assert isinstance(stored, tuple)
    values, iteration = stored
    if len(values) != _LENGTH:
        raise ModelFileError(
            f"the checkpoint has {len(values)} values, the original program's has {_LENGTH}: a variant of it",
            where=where,
            remedy="export a PLY from that program; splat reads the PLY",
        )
    columns = columns_of_tensors({name: values[place] for name, place in _PLACES.items()}, _NAMES, where)
    step = f", iteration {iteration}" if isinstance(iteration, int) else ""
    return ImportedModel(f"checkpoint of the original program (INRIA){step}", columns, names=_NAMES)


PROGRAM = Program(
    is_inria,
    read_inria,
    (
        ("point_cloud/iteration_*/point_cloud.ply", r"point_cloud/iteration_(\d+)/"),
        ("chkpnt*.pth", r"chkpnt(\d+)\.pth"),
    ),
)
