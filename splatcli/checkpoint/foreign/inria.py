"""chkpntN.pth of the original program: a pair of (twelve values without names, iteration)."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from splatcli.checkpoint.foreign.stored import ImportedModel, take_tables
from splatcli.errors import ModelFileError

#: Place of each table in the tuple, and the name that the program gives it. 0 is the SH degree in use; 7 to 11 are
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
    """Whether it is a pair of a tuple that begins as this program's does, and an iteration."""
    return (
        isinstance(stored, tuple)
        and len(stored) == 2
        and isinstance(stored[0], tuple)
        and len(stored[0]) > 1
        and isinstance(stored[0][0], int)
        and isinstance(stored[0][1], Tensor)
    )


def read_inria(stored: object, where: Path) -> ImportedModel:
    """The Gaussians of such a pair. Raises ModelFileError when they are not where the program puts them."""
    assert isinstance(stored, tuple)
    values, iteration = stored
    if len(values) != _LENGTH:
        raise ModelFileError(
            f"the checkpoint has {len(values)} values, the original program's has {_LENGTH}: a variant of it",
            where=where,
            remedy="export a PLY from that program; splat reads the PLY",
        )
    tables = take_tables({group: values[place] for group, place in _PLACES.items()}, _NAMES, where)
    step = f", iteration {iteration}" if isinstance(iteration, int) else ""
    return ImportedModel(f"checkpoint of the original program (INRIA){step}", tables, names=_NAMES)
