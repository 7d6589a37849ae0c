"""Real spherical harmonics, for all but the kernels and their reference.

The reference (rasterizer/reference.py) is the oracle of tests and has a definition of its own, which a test compares.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sh_basis(directions: Tensor, degree: int) -> Tensor:
    """Return [N, (degree + 1)^2] real spherical harmonics of unit vectors [N, 3], in INRIA's order and signs.

    By recurrence over associated Legendre functions for any degree (docs/math.md 4.1): the order is
    m = -l ... l within each l, and the sign (-1)^m is part of each function.
    """
    x, y, z = directions.unbind(1)
    columns: dict[tuple[int, int], Tensor] = {}
    # (x + iy)^m, which carries the azimuth together with sin^m of the polar angle.
    real, imag = torch.ones_like(x), torch.zeros_like(x)
    diagonal = 1.0
    for m in range(degree + 1):
        before, legendre = torch.zeros_like(z), torch.full_like(z, diagonal)
        for level in range(m, degree + 1):
            norm = math.sqrt((2 * level + 1) / (4 * math.pi) * math.factorial(level - m) / math.factorial(level + m))
            if m == 0:
                columns[level, 0] = norm * legendre
            else:
                sign_norm = (-1) ** m * math.sqrt(2.0) * norm
                columns[level, m] = sign_norm * legendre * real
                columns[level, -m] = sign_norm * legendre * imag
            after = ((2 * level + 1) * z * legendre - (level + m) * before) / (level + 1 - m)
            before, legendre = legendre, after
        real, imag = real * x - imag * y, real * y + imag * x
        diagonal *= 2 * m + 1
    return torch.stack([columns[level, m] for level in range(degree + 1) for m in range(-level, level + 1)], 1)
