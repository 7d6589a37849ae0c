"""Drawing rows in proportion to weights, with the same result on every device and for any number of rows."""

from __future__ import annotations

import torch
from torch import Tensor

#: Weights are counted in this unit. Sums of whole numbers have no order, so a GPU's have the bits of a CPU's; and 2^31
#: rows of the largest weight fit into 63 bits.
_UNITS = 2.0**31


def draw(weights: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """[count] int64 rows, drawn with replacement in proportion to ``weights``; none where all weights are 0.

    weights: [N] in 0..1, any device; NaN counts as 0. ``torch.multinomial`` ends at 2^24 of them.
    generator: on the CPU.
    """
    units = (weights.nan_to_num(0.0).clamp(0.0, 1.0).double() * _UNITS).round().long()
    through = units.cumsum(0)
    total = int(through[-1]) if len(through) else 0
    if total == 0 or count == 0:
        return torch.empty(0, dtype=torch.int64, device=weights.device)
    # 53 random bits, scaled: of 2^31 rows with the largest weight each 2^9 units share one of them, of a weight's 2^31.
    fractions = torch.rand(count, generator=generator, dtype=torch.float64)
    ticks = (fractions * total).long().clamp_(max=total - 1).to(weights.device)
    return torch.searchsorted(through, ticks, right=True)
