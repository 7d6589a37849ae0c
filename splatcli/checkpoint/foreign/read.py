"""Which program a torch file comes from, and its Gaussians as stored."""

from __future__ import annotations

from pathlib import Path

from splatcli.checkpoint.foreign.gsplat import is_gsplat, read_gsplat
from splatcli.checkpoint.foreign.inria import is_inria, read_inria
from splatcli.checkpoint.foreign.nerfstudio import is_nerfstudio, read_nerfstudio
from splatcli.checkpoint.foreign.preflight import load_foreign
from splatcli.checkpoint.foreign.stored import ImportedModel
from splatcli.errors import ModelFileError


def read_foreign(path: Path) -> ImportedModel:
    """The model in a torch file of INRIA's program, gsplat or nerfstudio, its space not judged yet.

    Raises ModelFileError for a damaged or hostile file, and for one that holds no model that is known here.
    """
    stored = load_foreign(path)
    if is_inria(stored):
        return read_inria(stored, path)
    if is_gsplat(stored):
        return read_gsplat(stored, path, load_foreign)
    if is_nerfstudio(stored):
        return read_nerfstudio(stored, path)
    raise ModelFileError(
        f"no model that is known here: {_outline(stored)}",
        where=path,
        remedy="known are checkpoints of splat, of the original program (chkpnt*.pth), of gsplat and of nerfstudio, "
        "and PLY files",
    )


def _outline(stored: object) -> str:
    """What is there instead, in a few words."""
    if isinstance(stored, dict):
        keys = [str(key)[:40] for key in stored]
        return f"a dictionary of {', '.join(keys[:8])}{', ...' if len(keys) > 8 else ''}" if keys else "nothing"
    if isinstance(stored, tuple | list):
        return f"a {type(stored).__name__} of {len(stored)} values"
    return f"a {type(stored).__name__}"
