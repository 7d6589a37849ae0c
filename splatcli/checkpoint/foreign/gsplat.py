"""ckpt_S_rankR.pt of gsplat's example trainer: a dictionary of splats, one file for each process that trained."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from splatcli.checkpoint.foreign.imported import Columns, ImportedModel, Load, Program, columns_of_tensors, has_line
from splatcli.checkpoint.schema import problem_list
from splatcli.errors import ModelFileError

_NAMES = {name: f"splats.{name}" for name in ("means", "quats", "scales", "opacities", "sh0", "shN")}
_SHARD = re.compile(r"ckpt_(\d+)_rank(\d+)\.pt")
_STATS = re.compile(r"train_step0*(\d+)_rank(\d+)\.json")

#: The trainer's settings, in the folder of its results, above ckpts/.
SETTINGS = "cfg.yml"

FRAME_NOTE = (
    "gsplat's trainer moves and scales scenes by default (normalize_world_space): the model's frame may "
    "not be that of the COLMAP model"
)


def is_gsplat(stored: object) -> bool:
    """Return whether a file holds a dictionary with splats, as gsplat's examples save it."""
    return isinstance(stored, dict) and isinstance(stored.get("splats"), dict)


def read_gsplat(stored: object, path: Path, load: Load) -> ImportedModel:
    """Return the Gaussians of all processes, in the order of their ranks.

    stored: the content of ``path``. load: opens the other shards.
    Raises ModelFileError when shards are missing, are of different steps or do not fit together.
    """
    shards = shards_of(path)
    contents = [stored if shard == path else load(shard) for shard in shards]
    steps = [_step(content, shard) for content, shard in zip(contents, shards, strict=True)]
    if len(set(steps)) > 1:
        said = [f"{shard.name} of step {step}" for shard, step in zip(shards, steps, strict=True)]
        raise ModelFileError(
            problem_list("the shards are of different steps", said),
            where=path.parent,
            remedy="put the shards of one step into one folder, and name any of them",
        )
    parts = [_columns(content, shard) for content, shard in zip(contents, shards, strict=True)]
    degrees = {part.shN.shape[1] for part in parts}
    if len(degrees) > 1:
        raise ModelFileError(f"the shards have {sorted(degrees)} SH coefficients, not one number", where=path.parent)
    notes = [FRAME_NOTE]
    if len(shards) > 1:
        notes.insert(0, f"read {len(shards)} shards as one model: {shards[0].name} to {shards[-1].name}")
    return ImportedModel(
        f"gsplat checkpoint, step {steps[0]}",
        Columns(*(torch.cat(some) for some in zip(*parts, strict=True))),
        parts=[len(part.means) for part in parts],
        names=_NAMES,
        antialiased=has_line(path.parent.parent / SETTINGS, "antialiased: true"),
        source=SETTINGS,
        notes=notes,
    )


def shards_of(path: Path) -> list[Path]:
    """Return all shards of the step of ``path``, by rank; ``path`` alone when its name names no rank.

    No file stores their number. But ranks have no gaps, other steps have as many, and each rank leaves a file of
    statistics. Raises ModelFileError with the missing shards when one of these says that there are more.
    """
    named = _SHARD.fullmatch(path.name)
    if named is None:
        return [path]
    step = int(named[1])
    ranks: dict[int, dict[int, Path]] = {}
    for shard in path.parent.iterdir():
        if found := _SHARD.fullmatch(shard.name):
            ranks.setdefault(int(found[1]), {})[int(found[2])] = shard
    stats = path.parent.parent / "stats"
    left = [_STATS.fullmatch(entry.name) for entry in stats.iterdir()] if stats.is_dir() else []
    said = {int(found[2]) for found in left if found and int(found[1]) == step}
    world = max({rank for of_step in ranks.values() for rank in of_step} | said) + 1
    missing = [f"ckpt_{named[1]}_rank{rank}.pt" for rank in range(world) if rank not in ranks[step]]
    if missing:
        raise ModelFileError(
            problem_list(
                f"a shard of a model that {world} processes trained, and {len(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} missing",
                missing,
            ),
            where=path,
            remedy="put the shards of one step into one folder, and name any of them",
        )
    return [ranks[step][rank] for rank in sorted(ranks[step])]


def _step(content: object, shard: Path) -> int:
    if not is_gsplat(content):
        raise ModelFileError("this shard is not a gsplat checkpoint", where=shard)
    assert isinstance(content, dict)
    step = content.get("step")
    return step if isinstance(step, int) else -1


def _columns(content: object, shard: Path) -> Columns[Tensor]:
    assert isinstance(content, dict)
    splats = content["splats"]
    if "features" in splats and "sh0" not in splats:
        raise ModelFileError(
            "its colours come from a network (gsplat's app_opt), not from SH coefficients",
            where=shard,
            remedy="train without app_opt, or let gsplat write a PLY, which has the colours in it",
        )
    return columns_of_tensors({name: splats.get(name) for name in _NAMES}, _NAMES, shard)


PROGRAM = Program(
    is_gsplat,
    read_gsplat,
    (
        ("ckpts/ckpt_*_rank*.pt", r"ckpts/ckpt_(\d+)_rank\d+\.pt"),
        ("ckpt_*_rank*.pt", r"ckpt_(\d+)_rank\d+\.pt"),
    ),
)
