"""Which Gaussians of a model go into a file, and how much of their colour."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from splatcli.errors import UsageError
from splatcli.formats.crop import Crop
from splatcli.formats.format import Format
from splatcli.gaussians import SHN_COUNTS, Gaussians


def logit_of(opacity: float) -> float:
    """Return the logit of an opacity; that of 1 and more is above every value, that of 0 and less below."""
    if opacity >= 1:
        return math.inf
    return math.log(opacity) - math.log1p(-opacity) if opacity > 0 else -math.inf


def select(
    gaussians: Gaussians, *, crop: Crop | None = None, min_opacity: float | None = None, sh_degree: int | None = None
) -> tuple[Gaussians, list[str]]:
    """Return the Gaussians inside ``crop`` of at least ``min_opacity``, with SH up to ``sh_degree``, and notes.

    Raises UsageError when none is left.
    """
    notes = []
    kept = torch.ones(len(gaussians), dtype=torch.bool, device=gaussians.device)
    if crop is not None:
        kept &= crop.holds(gaussians.means)
    if min_opacity is not None and min_opacity > 0:
        # Compared as logits, so that nothing is activated.
        kept &= gaussians.logit_opacities.double() >= logit_of(min_opacity)
    count = int(kept.sum())
    if count < len(gaussians):
        if not count:
            raise UsageError(
                f"none of the {len(gaussians):,} Gaussians is left",
                where="--crop" if crop is not None else "--min-opacity",
                remedy="`splat info MODEL` tells the bounds of the positions; choose a larger region or less opacity",
            )
        notes.append(f"kept {count:,} of {len(gaussians):,} Gaussians")
        gaussians = gaussians.map(lambda tensor: tensor[kept])
    if sh_degree is not None and sh_degree < gaussians.sh_degree:
        gaussians = replace(gaussians, shN=gaussians.shN[:, : SHN_COUNTS[sh_degree]])
    return gaussians, notes


def select_for_format(
    gaussians: Gaussians,
    chosen: Format,
    *,
    crop: Crop | None = None,
    min_opacity: float | None = None,
    sh_degree: int | None = None,
) -> tuple[Gaussians, list[str]]:
    """Return what select() does, with the SH degree that a file format holds at most, and notes. Raises as select()."""
    asked = gaussians.sh_degree if sh_degree is None else min(sh_degree, gaussians.sh_degree)
    degree = min(asked, chosen.sh_degree)
    kept, notes = select(gaussians, crop=crop, min_opacity=min_opacity, sh_degree=degree)
    if degree < asked:
        notes.insert(0, f"SH degree {asked} -> {degree}, the most that {chosen.title} holds")
    return kept, notes
