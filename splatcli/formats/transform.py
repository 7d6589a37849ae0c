"""Gaussians turned and moved as a whole.

Half a turn about z leads from the frame of a PLY (y down, z forward) to that of glTF and USD (y up), and back. For
this rotation, positions, quaternions and harmonics only change signs and places; the turn is its own inverse, but for
the sign of the quaternion, which means nothing. Any other rotation mixes the harmonics of a band.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import scipy
import torch
from numpy.typing import NDArray

from splatcli.checkpoint.foreign.imported import Columns, Floats
from splatcli.errors import ModelFileError
from splatcli.formats.quantisation import Doubles
from splatcli.gaussians import SHN_COUNTS
from splatcli.sh import sh_basis

#: Up in the world of a PLY of which nothing is known.
PLY_UP = np.array([0.0, -1.0, 0.0])
#: How far a matrix may be from a rotation and one scale for all axes.
_EVEN = 1e-5
#: Directions in which harmonics are compared to find how they mix; far more than a band has.
_DIRECTIONS = 200


def half_turn(columns: Columns[Floats]) -> Columns[Floats]:
    """Return the same Gaussians with x and y reversed, and everything that depends on direction turned along."""
    w, x, y, z = columns.quats.T
    return columns._replace(
        means=columns.means * np.array([-1, -1, 1], np.float32),
        quats=np.stack([-z, -y, x, w], axis=1),  # (0, 0, 0, 1) from the left
        shN=columns.shN * sh_signs(columns.shN.shape[1])[None, :, None],
    )


#: From a frame with z up to one with y up.
Z_TO_Y_UP = np.array([[1.0, 0, 0, 0], [0, 0, 1, 0], [0, -1, 0, 0], [0, 0, 0, 1]])


def with_y_up(columns: Columns[Floats], *, z_up: bool) -> Columns[Floats]:
    """Return the Gaussians of a model in the frame of glTF and USD: z_up says so of the model, else y is down."""
    return transformed(columns, Z_TO_Y_UP) if z_up else half_turn(columns)


def sh_signs(coefficients: int) -> Floats:
    """Return [K] of the coefficients beside the constant one: those of odd order m change their sign."""
    degree = SHN_COUNTS.index(coefficients)
    orders = [m for band in range(1, degree + 1) for m in range(-band, band + 1)]
    return np.array([-1.0 if m % 2 else 1.0 for m in orders], np.float32)


def transformed(columns: Columns[Floats], matrix: NDArray[np.float64]) -> Columns[Floats]:
    """Return the Gaussians moved by a 4x4 ``matrix`` for column vectors: rotation, one scale for all axes, shift.

    Raises ValueError, whose text goes on after "the transform", for any other.
    """
    linear, shift = matrix[:3, :3], matrix[:3, 3]
    determinant = float(np.linalg.det(linear)) if np.isfinite(matrix).all() else math.nan
    if not abs(determinant) > 0 or not np.array_equal(matrix[3], [0, 0, 0, 1]):
        raise ValueError("is not one of rotation, scale and shift")
    if determinant < 0:
        raise ValueError("mirrors")
    scale = determinant ** (1 / 3)
    rotation = linear / scale
    if not np.allclose(rotation @ rotation.T, np.eye(3), rtol=0, atol=_EVEN):
        raise ValueError("shears, or scales its axes differently")
    x, y, z, w = scipy.spatial.transform.Rotation.from_matrix(rotation).as_quat()
    old = columns.quats.astype(np.float64)
    old[(old == 0).all(axis=1), 0] = 1.0  # zero is the identity, and has to turn as that
    a, b, c, d = old.T
    quats = [w * a - x * b - y * c - z * d, w * b + x * a + y * d - z * c]
    quats += [w * c - x * d + y * a + z * b, w * d + x * c - y * b + z * a]
    mixed = np.einsum("ij,njc->nic", sh_rotation(rotation, columns.shN.shape[1]), columns.shN.astype(np.float64))
    return columns._replace(
        means=(columns.means.astype(np.float64) @ linear.T + shift).astype(np.float32),
        quats=np.stack(quats, axis=1).astype(np.float32),
        scales=(columns.scales + math.log(scale)).astype(np.float32),
        shN=mixed.astype(np.float32),
    )


def reframed(columns: Columns[Floats], axes: NDArray[np.float64]) -> Columns[Floats]:
    """Return the Gaussians in a frame with other axes. axes: [3, 3] orthogonal, for column vectors; it may mirror."""
    sign = 1.0 if np.linalg.det(axes) > 0 else -1.0
    matrix = np.eye(4)
    matrix[:3, :3] = sign * axes
    turned = transformed(columns, matrix)
    if sign > 0:
        return turned
    # The rest of a mirror is the reflection at the origin: ellipsoids stay alike, and bands of odd degree change sign.
    odd = np.array([-1.0 if int((place + 1) ** 0.5) % 2 else 1.0 for place in range(columns.shN.shape[1])], np.float32)
    return turned._replace(means=-turned.means, shN=turned.shN * odd[None, :, None])


def placed(columns: Columns[Floats], matrix: NDArray[np.float64], path: Path) -> Columns[Floats]:
    """Return ``transformed`` Gaussians of a file. Raises ModelFileError for a transform that it refuses."""
    if np.array_equal(matrix, np.eye(4)):
        return columns
    try:
        return transformed(columns, matrix)
    except ValueError as error:
        raise ModelFileError(
            f"it moves the Gaussians by a transform that {error}",
            where=path,
            remedy="apply the transform in the program that made the file",
        ) from None


def sh_rotation(rotation: NDArray[np.float64], coefficients: int) -> Doubles:
    """Return [K, K], the matrix that rotates the coefficients beside the constant one.

    The turned colour in a direction is the old one in the direction turned back; each band is solved for by itself.
    """
    degree = SHN_COUNTS.index(coefficients)
    directions = np.random.default_rng(0).normal(size=(_DIRECTIONS, 3))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    new, old = (sh_basis(torch.from_numpy(d), degree).numpy() for d in (directions, directions @ rotation))
    mixing = np.zeros((coefficients, coefficients))
    for band in range(1, degree + 1):
        place = slice(SHN_COUNTS[band - 1], SHN_COUNTS[band])
        there = slice(SHN_COUNTS[band - 1] + 1, SHN_COUNTS[band] + 1)
        mixing[place, place] = np.linalg.lstsq(new[:, there], old[:, there], rcond=None)[0]
    return mixing
