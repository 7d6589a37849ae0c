"""Real spherical harmonics, degree 0 to 4, for all but the kernels and their reference: docs/math.md 4.1.

The reference (rasterizer/reference.py), which tests compare with, makes them by recurrence instead.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: The distinct factors of each degree, by the polynomials below from the left.
_SH0 = math.sqrt(1 / (4 * math.pi))
_SH1 = math.sqrt(3 / (4 * math.pi))
_SH2 = [math.sqrt(f / math.pi) for f in (15 / 4, 5 / 16, 15 / 16)]
_SH3 = [math.sqrt(f / math.pi) for f in (35 / 32, 105 / 4, 21 / 32, 7 / 16, 105 / 16)]
_SH4 = [math.sqrt(f / math.pi) for f in (315 / 16, 315 / 32, 45 / 16, 45 / 32, 9 / 256, 45 / 64, 315 / 256)]


def sh_basis(directions: Tensor, degree: int) -> Tensor:
    """Return [N, (degree + 1)^2] real spherical harmonics of unit vectors [N, 3], in INRIA's order and signs.

    degree: 0 to 4. Within each l the order is m = -l ... l; the sign (-1)^m is part of each function.
    """
    x, y, z = directions.unbind(1)
    xx, yy, zz = x * x, y * y, z * z
    basis = [torch.full_like(z, _SH0)]
    if degree >= 1:
        basis += [-_SH1 * y, _SH1 * z, -_SH1 * x]
    if degree >= 2:
        a, b, c = _SH2
        basis += [a * x * y, -a * y * z, b * (3 * zz - 1), -a * x * z, c * (xx - yy)]
    if degree >= 3:
        a, b, c, d, e = _SH3
        basis += [-a * y * (3 * xx - yy), b * x * y * z, -c * y * (5 * zz - 1), d * z * (5 * zz - 3)]
        basis += [-c * x * (5 * zz - 1), e * z * (xx - yy), -a * x * (xx - 3 * yy)]
    if degree >= 4:
        a, b, c, d, e, f, g = _SH4
        basis += [a * x * y * (xx - yy), -b * y * z * (3 * xx - yy), c * x * y * (7 * zz - 1)]
        basis += [-d * y * z * (7 * zz - 3), e * (zz * (35 * zz - 30) + 3), -d * x * z * (7 * zz - 3)]
        basis += [
            f * (xx - yy) * (7 * zz - 1),
            -b * x * z * (xx - 3 * yy),
            g * (xx * (xx - 3 * yy) - yy * (3 * xx - yy)),
        ]
    return torch.stack(basis, 1)
