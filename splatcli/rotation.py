"""Rotation matrices of unnormalised quaternions, for all but the kernels and their reference.

The reference (rasterizer/reference.py) is the oracle of tests and has a definition of its own, which a test compares.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotation_matrices(quats: Tensor) -> Tensor:
    """Return [N, 3, 3] rotations of unnormalised quaternions [N, 4] w x y z (docs/math.md 2.3)."""
    unit = quats / quats.square().sum(1, keepdim=True).sqrt()
    w, axis = unit[:, 0, None, None], unit[:, 1:]
    zero = torch.zeros_like(axis[:, 0])
    ax, ay, az = axis.unbind(1)
    cross = torch.stack([zero, -az, ay, az, zero, -ax, -ay, ax, zero], 1).reshape(-1, 3, 3)
    # Rodrigues in quaternion form: R = I + 2 w [v]x + 2 [v]x [v]x.
    return torch.eye(3, dtype=quats.dtype, device=quats.device) + 2 * (w * cross + cross @ cross)
