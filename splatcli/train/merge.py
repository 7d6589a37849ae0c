"""Merge the models of blocks: the Gaussians of each block's own column become a run of the whole scene."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from splatcli.checkpoint.state import Checkpoint, RenderColumns, Scalar
from splatcli.config import Config, flat_settings, with_settings
from splatcli.errors import ModelFileError
from splatcli.gaussians import GROUPS, Gaussians
from splatcli.scene.partition import Grid
from splatcli.scene.scene import Scene
from splatcli.train.densify.free_space import clearances
from splatcli.train.sampler import ViewSampler
from splatcli.train.state import rendered_alike

Some = TypeVar("Some")

#: Settings in which the blocks of a scene may differ: those of the merged run are its own; dropout, the prior of
#: colours, rates by size and smaller first images follow from the views of a block, a rollback lowers learning rates,
#: and the scene may have moved. The merged run has those of the first block, and the least dropout of all.
_OWN = frozenset(
    {
        *("data.block", "data.scene", "data.points"),
        *("strategy.cap_max", "memory.cap", "memory.budget", "memory.offload"),
        *("train.dropout", "train.sh_prior", "optim.means_size_power"),
        *("optim.means_lr", "optim.means_lr_final"),
        *("schedule.sh_degree_start", "schedule.num_downscales"),
    }
)


def own_rows(checkpoint: Checkpoint, grid: Grid, block: int) -> Tensor:
    """Return [M] int64, ascending: the Gaussians whose centres lie in the column of ``block``."""
    where = torch.from_numpy(grid.block_of(checkpoint.gaussians.means.numpy()))
    return (where == block).nonzero().squeeze(1)


def merged(load: Callable[[int], tuple[Path, Checkpoint]], grid: Grid, scene: Scene) -> Checkpoint:
    """Return the state of a run over the whole ``scene``, merged from those of its blocks.

    load: returns the last checkpoint of a block. It is called for one block after the other, and only the column is
        kept, so that the peak of memory is twice the merged state. Adam's moments are kept, so that ``resume`` can
        smooth the seams.
    Raises ModelFileError when the blocks are not of one cut of one scene, or not trained for the same steps.
    """
    parts: list[Checkpoint] = []
    for block in range(len(grid)):
        path, checkpoint = load(block)
        if checkpoint.moments is None or checkpoint.sh_last_step is None:
            raise ModelFileError("this checkpoint holds no state of a training run", where=path)
        if parts:
            _check_alike(parts[0], checkpoint, path)
        # The strategy's tensors begin anew in a merged run.
        parts.append(replace(checkpoint, strategy={}).select_rows(own_rows(checkpoint, grid, block)))
    parts = rendered_alike(parts)
    first = parts[0]
    gaussians = Gaussians(**{name: _joined([getattr(part.gaussians, name) for part in parts]) for name in GROUPS})
    count = len(gaussians)
    strategy: dict[str, Tensor | Scalar] = {"grad2d": torch.zeros(count), "count": torch.zeros(count)}
    columns = {name: _joined([part.columns.present()[name] for part in parts]) for name in first.columns.present()}
    left_out = {part.train[row] for part in parts for row in part.skipped}
    return replace(
        first,
        gaussians=gaussians,
        moments={
            name: (
                _joined([_required(part.moments)[name][0] for part in parts]),
                _joined([_required(part.moments)[name][1] for part in parts]),
            )
            for name in GROUPS
        },
        sh_last_step=_joined([_required(part.sh_last_step) for part in parts]),
        strategy=strategy,
        sampler=ViewSampler(len(scene.train), first.config.train.seed).state(),
        config=_whole(first.config, count),
        skipped=tuple(row for row, view in enumerate(scene.train) if view in left_out),
        train=list(scene.train),
        test=list(scene.test),
        dataset=replace(first.dataset, root=str(scene.root), clearances=clearances(scene)),
        views={},
        columns=RenderColumns(**columns),
    )


def _whole(config: Config, count: int) -> Config:
    """Return the settings of the merged run: of the whole scene, with its count as the cap."""
    values = {"data.blocks": None, "data.block": None, "memory.cap": None, "strategy.cap_max": max(1, count)}
    return with_settings(config, values)


def _check_alike(first: Checkpoint, other: Checkpoint, path: Path) -> None:
    pairs: dict[str, tuple[object, object]] = {
        "steps": (first.step, other.step),
        "photos": (first.dataset.fingerprint, other.dataset.fingerprint),
        "scene extent": (first.dataset.extent, other.dataset.extent),
        "offset": (first.dataset.offset, other.dataset.offset),
    }
    before, now = flat_settings(first.config), flat_settings(other.config)
    pairs |= {key: (before[key], now[key]) for key in before if key not in _OWN}
    for name, (one, two) in pairs.items():
        if one != two:
            raise ModelFileError(
                f"this block was not trained as the first one was: {name} is {two}, not {one}",
                where=path,
                remedy="train all blocks with the same settings",
            )


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(tensors))


def _required(value: Some | None) -> Some:
    assert value is not None
    return value
