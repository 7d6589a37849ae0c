"""Which way is up in a model, and the rotation that levels it: from cameras, else from the dominant plane."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from splatcli.formats.quantisation import LOG_SCALE_RANGE
from splatcli.gaussians import Gaussians
from splatcli.rotation import rotation_matrices
from splatcli.scene.camera import Camera, common_up
from splatcli.similarity import Similarity

Floats = NDArray[np.float64]

#: Right axes tell what is level when they spread over the horizon: the middle eigenvalue of their scatter (1/3 when
#: they point everywhere) is more than this, and this many times the least.
_SPREAD, _FLATNESS = 0.15, 4.0
#: Up by the right axes and by the upper edges differ by less than this, as a cosine, unless photos are on their side.
_AGREE = 0.7
#: Discs whose normals are compared, the largest ones; candidates for the plane among them.
_DISCS, _CANDIDATES = 20_000, 400
#: A disc is at most this thick, times its middle axis. Normals of a plane scatter by about this angle, radians.
_THIN, _SCATTER = 0.5, 0.12
#: Heights that differ by less than this share of them are one.
_FLAT = 1e-12
#: The least share of the discs' area that a dominant plane has.
_SHARE = 0.1


def up_of_cameras(cameras: Sequence[Camera]) -> Floats | None:
    """Return up in the world, [3] unit: people hold cameras level, so that it is across to all right axes.

    Where these do not spread over the horizon it is the mean of where the upper edges are. None where that is nowhere.
    """
    mean = common_up(cameras)
    if mean is None:
        return None
    right = np.array([camera.viewmat[0, :3] for camera in cameras])
    values, vectors = np.linalg.eigh(right.T @ right / len(right))
    up = vectors[:, 0] * np.sign(vectors[:, 0] @ mean)
    spread = values[1] > max(_SPREAD, _FLATNESS * values[0])
    return np.asarray(up if spread and float(up @ mean) > _AGREE else mean)


def up_of_gaussians(gaussians: Gaussians) -> Floats | None:
    """Return the normal of the dominant plane, [3] unit, to the side where most of the rest is; None without a plane.

    Discs vote with their area times opacity for their normals, and for the one of parallel planes that holds most.
    """
    scales = gaussians.log_scales.double().clamp(*LOG_SCALE_RANGE).exp().numpy()
    order = np.argsort(scales, axis=1)
    thin, middle, long = np.take_along_axis(scales, order, axis=1).T
    weights = middle * long * gaussians.logit_opacities.double().sigmoid().numpy()
    rows = np.flatnonzero(thin < _THIN * middle)
    rows = rows[np.argsort(-weights[rows], kind="stable")[:_DISCS]]
    if not len(rows):
        return None
    axes = rotation_matrices(gaussians.quats.double()).numpy()[rows]
    normals = np.take_along_axis(axes, order[rows, 0][:, None, None], axis=2)[:, :, 0]
    means, weight = gaussians.means.double().numpy(), weights[rows]
    # No single disc of the sky's size may decide.
    weight = np.minimum(weight, np.quantile(weight, 0.99))
    candidates = normals[:: max(1, len(rows) // _CANDIDATES)]
    votes = _agreement(normals @ candidates.T).T @ weight
    normal = candidates[int(np.argmax(votes))]
    for _ in range(5):
        share = weight * _agreement(normals @ normal)
        _, vectors = np.linalg.eigh((share[:, None] * normals).T @ normals)
        normal = vectors[:, 2]
    if share.sum() < _SHARE * weight.sum():
        return None
    height = means[rows] @ normal
    low, high = np.quantile(height, [0.01, 0.99])
    if not high - low > _FLAT * max(abs(low), abs(high)):  # a plane, or so far away that float64 tells no heights
        low, high = low - max(1.0, abs(low)), low + max(1.0, abs(low))
    counts, edges = np.histogram(height, 100, (low, high), weights=share)
    ground = edges[int(np.argmax(counts))] + 0.5 * (edges[1] - edges[0])
    above = np.sign(np.median(means @ normal) - ground)
    return np.asarray(normal * (above or 1.0))


def _agreement(cosines: Floats) -> Floats:
    """Return how much normals with such cosines between them, of either sign, speak for each other: 0 to 1."""
    return np.asarray(np.exp(-(1 - np.minimum(np.abs(cosines), 1.0)) * 2 / _SCATTER**2))


def rotation_between(one: Floats, other: Floats) -> Similarity:
    """Return the smallest rotation about the origin that takes a unit vector to another."""
    cosine = float(np.clip(one @ other, -1.0, 1.0))
    axis = np.cross(one, other)
    sine = float(np.linalg.norm(axis))
    if cosine < 0 and sine < 1e-8:  # a half turn, about any axis across
        across = np.eye(3)[int(np.argmin(np.abs(one)))]
        across = across - (across @ one) * one
        across /= np.linalg.norm(across)
        return Similarity(rotation=2 * np.outer(across, across) - np.eye(3))
    # 1 / (1 + cosine) cancels near a half turn, where the sine does not.
    factor = 1 / (1 + cosine) if cosine > 0 else (1 - cosine) / sine**2
    x, y, z = axis
    skew = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return Similarity(rotation=np.eye(3) + skew + factor * (skew @ skew))
