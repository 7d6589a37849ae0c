"""Which Gaussians of a model go into a file, and how much of their colour."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from splatcli.errors import UsageError
from splatcli.gaussians import SH_REST, Gaussians

_CROP_HELP = "--crop box:X0,Y0,Z0,X1,Y1,Z1 with the two corners, or --crop sphere:X,Y,Z,RADIUS"


@dataclass(frozen=True, slots=True)
class Crop:
    """A region in the coordinates of the file: a box from ``low`` to ``high``, or a ball around ``low``.

    radius: of the ball; None for a box.
    """

    low: tuple[float, float, float]
    high: tuple[float, float, float]
    radius: float | None = None

    @classmethod
    def parse(cls, text: str, flag: str = "--crop") -> Crop:
        """Return the region of ``box:x0,y0,z0,x1,y1,z1`` or ``sphere:x,y,z,r``. Raises UsageError for ``flag``."""
        remedy = _CROP_HELP.replace("--crop", flag)
        kind, _, rest = text.partition(":")
        wanted = {"box": 6, "sphere": 4}.get(kind)
        if wanted is None:
            raise UsageError(f"{text!r} is neither a box nor a sphere", where=flag, remedy=remedy)
        try:
            values = [float(part) for part in rest.split(",")]
        except ValueError:
            raise UsageError(f"{rest!r} is no list of numbers", where=flag, remedy=remedy) from None
        if len(values) != wanted or not all(map(math.isfinite, values)):
            raise UsageError(
                f"a {kind} takes {wanted} finite numbers, {len(values)} are given", where=flag, remedy=remedy
            )
        first = (values[0], values[1], values[2])
        if kind == "sphere":
            if not values[3] > 0:
                raise UsageError(f"a radius of {values[3]:g} holds nothing", where=flag, remedy=remedy)
            return cls(first, first, values[3])
        second = (values[3], values[4], values[5])
        # Any two opposite corners name the same box.
        low, high = zip(*((min(pair), max(pair)) for pair in zip(first, second, strict=True)), strict=True)
        return cls((low[0], low[1], low[2]), (high[0], high[1], high[2]))

    def holds(self, means: Tensor) -> Tensor:
        """Return [N] bool: whose centre, [N, 3], lies inside or on the border."""
        wide = means.double()
        low = torch.tensor(self.low, dtype=torch.float64, device=means.device)
        if self.radius is not None:
            near: Tensor = (wide - low).norm(dim=1) <= self.radius
            return near
        return ((wide >= low) & (wide <= low.new_tensor(self.high))).all(dim=1)


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
        # Compared as logits, so that nothing is activated; 1 asks for the opacity that no logit reaches.
        least = math.log(min_opacity) - math.log1p(-min_opacity) if min_opacity < 1 else math.inf
        kept &= gaussians.logit_opacities.double() >= least
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
        gaussians = Gaussians(**{**dict(gaussians.items()), "shN": gaussians.shN[:, : SH_REST[sh_degree]]})
    return gaussians, notes


def moved(gaussians: Gaussians, offset: tuple[float, ...]) -> tuple[Gaussians, float]:
    """Return the Gaussians with ``offset`` added to their positions, and the rounding error of the farthest one."""
    means = gaussians.means.double() + torch.tensor(offset, dtype=torch.float64, device=gaussians.device)
    farthest = float(means.abs().max()) if len(means) else 0.0
    step = 2.0 ** (math.floor(math.log2(farthest)) - 23) if farthest > 0 else 0.0
    return Gaussians(**{**dict(gaussians.items()), "means": means.float()}), step / 2
