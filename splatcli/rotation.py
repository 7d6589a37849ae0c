"""Rotation matrices of unnormalised quaternions, for all but the kernels and their reference: docs/math.md 2.3.

The reference (rasterizer/reference.py), which tests compare with, makes them by Rodrigues' formula instead.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotation_matrices(quats: Tensor) -> Tensor:
    """Return [N, 3, 3] rotations of unnormalised quaternions [N, 4] w x y z; of a zero quaternion the identity."""
    length = quats.norm(dim=1, keepdim=True)
    unit = quats / torch.where(length == 0, 1.0, length)
    w, x, y, z = torch.where(length == 0, quats.new_tensor([1.0, 0.0, 0.0, 0.0]), unit).unbind(1)
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    return torch.stack([torch.stack(row, 1) for row in rows], 1)
