"""Malformed models of other programs: spoiled bytes and members, and odd values and tensors where theirs should be."""

from __future__ import annotations

import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from splatcli.checkpoint.activation_check import Space
from splatcli.checkpoint.foreign.imported import ImportOptions, to_gaussians
from splatcli.formats.registry import import_model
from tests.checkpoint.foreign.made import WRITERS, tables_of
from tests.torture.fuzz_checkpoint import ODD, spoil_members, with_odd_number
from tests.torture.harness import Case, Figure, fuzz, main, refused, rng_of
from tests.torture.mutate import any_value, spoil_bytes

#: Those that torch writes; the PLY reader has a harness of its own.
KINDS = {kind: writer for kind, writer in WRITERS.items() if kind != "ply"}


def figures(count: int, seed: int) -> dict[str, Figure]:
    what = (
        "a malformed checkpoint of INRIA's program, gsplat or nerfstudio is read as Gaussians; it is refused with a "
        "message, or what is read is sound"
    )
    return fuzz("fuzz_foreign", what, case_of, count, seed)


def case_of(seed: int, folder: Path) -> Case:
    sound = {kind: writer(tables_of(12), folder / name).read_bytes() for kind, (writer, name) in KINDS.items()}
    members = {}
    for kind, (_, name) in KINDS.items():
        with zipfile.ZipFile(folder / name) as archive:
            members[kind] = {member: archive.read(member) for member in archive.namelist()}

    def case(index: int) -> str:
        rng = rng_of(seed, index)
        kind = rng.choice(list(KINDS))
        writer, name = KINDS[kind]
        place = folder / "case"  # one file in it, so that no case sees shards of another
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        path = place / name
        way = rng.random()
        if way < 0.5:
            writer(tables_of(rng.choice([0, 1, 12, 200]), rng.choice([0, 1, 3])), path, lambda kept: _spoil(rng, kept))
        elif way < 0.8:
            path.write_bytes(spoil_members(rng, members[kind]))
        else:
            path.write_bytes(spoil_bytes(rng, sound[kind]))
        reading = ImportOptions(space=rng.choice([None, None, *Space]), drop_nonfinite=rng.random() < 0.3)
        return "refused" if refused(lambda: _read(path, reading)) else "read"

    return case


def _read(path: Path, reading: ImportOptions) -> None:
    """Everything that a command does with such a file before it draws or trains."""
    model, notes = to_gaussians(import_model(path), reading, path)
    assert all(note.strip() for note in notes)
    for name, tensor in model.items():
        assert len(tensor) == len(model), name
        assert tensor.dtype == torch.float32, name
        assert tensor.is_contiguous(), name
        assert tensor.isfinite().all(), name


def _spoil(rng: random.Random, stored: Any) -> None:
    """One or two faults anywhere in what a program is about to store."""
    for _ in range(rng.choice([1, 1, 2])):
        places = _places(stored)
        if not places:
            return
        holder, key = rng.choice(places)
        value = holder[key]
        odd = isinstance(value, Tensor) and (value.is_sparse or value.is_meta or value.is_complex())
        if odd or (isinstance(value, Tensor) and value.numel() > 100_000):
            continue  # the fault before has made terabytes of it, or what has no numbers
        if isinstance(value, Tensor) and rng.random() < 0.7:
            number = value.is_floating_point() and value.numel() > 0 and rng.random() < 0.4
            holder[key] = with_odd_number(rng, value) if number else rng.choice(_ODD)(value.detach())
        else:
            match rng.randrange(4):
                case 0:
                    del holder[key]
                case 1 if isinstance(holder, dict):
                    holder[rng.choice(["", "x", "splats", "_model.means", 3, None])] = holder.pop(key)
                case _:
                    holder[key] = any_value(rng)


def _places(node: Any) -> list[tuple[Any, Any]]:
    """(container, key) of all that can be replaced, the outermost first."""
    items = list(node.items()) if isinstance(node, dict) else list(enumerate(node)) if isinstance(node, list) else []
    return [(node, key) for key, _ in items] + [place for _, child in items for place in _places(child)]


_ODD: list[Callable[[Tensor], object]] = [
    *ODD,
    lambda tensor: tensor if tensor.dtype == torch.bool else tensor.abs(),
    lambda tensor: tensor.exp() if tensor.is_floating_point() else tensor,
    lambda tensor: tensor[:, :-1].clone() if tensor.dim() > 1 else tensor,
    lambda tensor: tensor[..., None].clone(),
    lambda tensor: list(tensor.reshape(-1)[:3]),
]


if __name__ == "__main__":
    main(figures, 100_000)
