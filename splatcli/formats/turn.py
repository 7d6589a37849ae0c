"""Half a turn about z, from the frame of a PLY (y down, z forward) to that of glTF and USD (y up), and back.

For this rotation, positions, quaternions and harmonics only change signs and places; the turn is its own inverse, but
for the sign of the quaternion, which means nothing.
"""

from __future__ import annotations

import numpy as np

from splatcli.formats.units import Columns, Floats
from splatcli.gaussians import SH_REST


def half_turn(columns: Columns) -> Columns:
    """The same Gaussians with x and y reversed, and everything that depends on direction turned along."""
    w, x, y, z = columns.quats.T
    return columns._replace(
        means=columns.means * np.array([-1, -1, 1], np.float32),
        quats=np.stack([-z, -y, x, w], axis=1),  # (0, 0, 0, 1) from the left
        shN=columns.shN * sh_signs(columns.shN.shape[1])[None, :, None],
    )


def sh_signs(coefficients: int) -> Floats:
    """[K] of the coefficients beside the constant one: those of odd order m change their sign."""
    degree = SH_REST.index(coefficients)
    orders = [m for band in range(1, degree + 1) for m in range(-band, band + 1)]
    return np.array([-1.0 if m % 2 else 1.0 for m in orders], np.float32)
