"""The six tables of a model, out of tensors from a file: of the right shapes, and no larger than the file can hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from splatcli.checkpoint.schema import dtype_name, listed
from splatcli.errors import ModelFileError
from splatcli.gaussians import SH_REST

#: group -> shapes it may have, -1 standing for N; the first is ours.
_SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "means": ((-1, 3),),
    "quats": ((-1, 4),),
    "scales": ((-1, 3),),
    "opacities": ((-1,), (-1, 1)),
    "sh0": ((-1, 3), (-1, 1, 3)),
    **{"shN": tuple((-1, size, 3) for size in SH_REST)},
}


class RawTables(NamedTuple):
    """Numbers of N Gaussians as a file stores them, float32 on the CPU; which space they are in is not known.

    means, scales, sh0 [N, 3]; quats [N, 4], w x y z; opacities [N]; shN [N, K, 3].
    """

    means: Tensor
    quats: Tensor
    scales: Tensor
    opacities: Tensor
    sh0: Tensor
    shN: Tensor

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """(group, table) of each."""
        return zip(self._fields, self, strict=True)

    def parts(self, counts: list[int]) -> list[RawTables]:
        """The same numbers as consecutive blocks of ``counts`` Gaussians."""
        return [RawTables(*blocks) for blocks in zip(*(torch.split(table, counts) for table in self), strict=True)]


def take_tables(found: dict[str, object], names: dict[str, str], where: Path) -> RawTables:
    """The tables of a model, each in a storage of its own.

    found: group -> what the file has in its place; None where it has nothing. names: group -> the file's name for it.
    Raises ModelFileError for what is missing, is no tensor, has another shape, or shows more bytes than it stores.
    """
    missing = [names[group] for group in _SHAPES if found.get(group) is None]
    if missing:
        raise ModelFileError(f"it has no {', '.join(missing)}", where=where)
    tensors = {group: found[group] for group in _SHAPES}
    problems = [
        f"{names[group]} is {type(value).__name__}, not a tensor"
        for group, value in tensors.items()
        if not isinstance(value, Tensor)
    ]
    if problems:
        raise ModelFileError(listed("not the tensors of a model", problems), where=where)
    tables = {group: value.detach() for group, value in tensors.items() if isinstance(value, Tensor)}
    count = tables["means"].shape[0] if tables["means"].dim() else 0
    for group, table in tables.items():
        fits = [tuple(count if size < 0 else size for size in shape) for shape in _SHAPES[group]]
        if not table.is_floating_point() or table.layout != torch.strided:
            problems.append(f"{names[group]} is {dtype_name(table)} {table.layout}")
        elif tuple(table.shape) not in fits:
            problems.append(
                f"{names[group]} has shape {list(table.shape)}{_two_scales(group, table)}, not {list(fits[0])}"
            )
    problems = problems or _hollow(tables, names)
    if problems:
        raise ModelFileError(listed("not the tensors of a model", problems), where=where)
    return RawTables(**{group: _own(group, table) for group, table in tables.items()})


def _two_scales(group: str, table: Tensor) -> str:
    return " (a 2D Gaussian model, 2DGS?)" if group == "scales" and table.shape[1:] == (2,) else ""


def _hollow(tables: dict[str, Tensor], names: dict[str, str]) -> list[str]:
    """Tensors that together show more bytes of a storage than it has: expanded ones, and several over one storage.

    Slices are fine: sh0 and shN of an untrained model are often the two halves of one tensor.
    """
    held: dict[int, int] = {}
    shown: dict[int, int] = defaultdict(int)
    sharing: dict[int, list[str]] = defaultdict(list)
    for group, table in tables.items():
        storage = table.untyped_storage()
        place = storage.data_ptr()
        held[place] = storage.nbytes()
        shown[place] += table.numel() * table.itemsize
        sharing[place].append(names[group])
    return [
        f"{' and '.join(sharing[place])} {'show' if len(sharing[place]) > 1 else 'shows'} {shown[place]:,} bytes of a "
        f"storage of {held[place]:,}"
        for place in held
        if shown[place] > held[place]
    ]


def _own(group: str, table: Tensor) -> Tensor:
    """The same numbers as contiguous float32 without axes of 1, copied where they are not that already."""
    if group in ("opacities", "sh0"):
        table = table.reshape(len(table), *_SHAPES[group][0][1:])
    plain = table.to(torch.float32).contiguous()
    return plain if plain.untyped_storage().nbytes() == plain.nbytes else plain.clone()
