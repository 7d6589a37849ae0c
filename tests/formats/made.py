"""Gaussians for round trips, PLY files read whole and stored, and how far two models are apart."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import plyfile
import torch
from numpy.typing import NDArray
from torch import Tensor

from splatcli.checkpoint.foreign.imported import ImportOptions, to_gaussians
from splatcli.formats.ply import import_ply
from splatcli.gaussians import SHN_COUNTS, Gaussians
from splatcli.rasterizer.reference import rotation_matrices


def scene(count: int, degree: int = 3, seed: int = 0) -> Gaussians:
    """Gaussians of ordinary sizes in a ball of radius 1 or so; quaternions of any length and sign."""
    rng = torch.Generator().manual_seed(1000 * seed + 10 * count + degree)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng)

    return Gaussians(
        means=normal(count, 3) * 0.5,
        quats=normal(count, 4) * 3,
        log_scales=0.7 * normal(count, 3) - 4,
        logit_opacities=2 * normal(count),
        sh0=normal(count, 3) * 0.6,
        shN=0.15 * normal(count, SHN_COUNTS[degree], 3),
    )


def read_ply(path: Path, options: ImportOptions | None = None) -> Gaussians:
    """The Gaussians of a PLY, its space checked."""
    options = options or ImportOptions()
    return to_gaussians(import_ply(path, lenient=options.lenient), options, Path(path))[0]


def store_ply(rows: NDArray[np.void], path: Path, **options: Any) -> None:
    """Store rows as another program would: no comment of ours. options: of PlyData."""
    plyfile.PlyData([plyfile.PlyElement.describe(rows, "vertex")], **options).write(str(path))


def by_position(gaussians: Gaussians, reference: Gaussians) -> Gaussians:
    """The same Gaussians in the order of ``reference``, matched by the nearest position."""
    nearest = torch.cdist(reference.means.double(), gaussians.means.double()).argmin(dim=1)
    assert len(nearest.unique()) == len(reference) == len(gaussians)
    return gaussians.map(lambda tensor: tensor[nearest])


def covariances(gaussians: Gaussians) -> Tensor:
    """[N, 3, 3] of the Gaussians, which quaternions and scales give in several ways."""
    axes = rotation_matrices(gaussians.quats.double()) * gaussians.log_scales.double().exp()[:, None, :]
    return axes @ axes.transpose(1, 2)


def rotation_errors(a: Tensor, b: Tensor) -> Tensor:
    """[N] degrees between two sets of quaternions of any length and sign."""
    a, b = (torch.nn.functional.normalize(q.double(), dim=1) for q in (a, b))
    return 2 * (a * b).sum(dim=1).abs().clamp(max=1).acos() * 180 / math.pi


def errors(before: Gaussians, after: Gaussians) -> dict[str, float]:
    """The largest differences by attribute: units, degrees, nats, opacity, and SH coefficients.

    A NaN stays one, and fails every comparison.
    """

    def largest(values: Tensor) -> float:
        return float(values.double().abs().max()) if values.numel() else 0.0

    # A rotation does not show where all scales are alike, and here they never are.
    return {
        "means": largest(after.means - before.means),
        "quats": largest(rotation_errors(before.quats, after.quats)),
        "log_scales": largest(after.log_scales - before.log_scales),
        "opacities": largest(after.logit_opacities.double().sigmoid() - before.logit_opacities.double().sigmoid()),
        "sh0": largest(after.sh0 - before.sh0),
        "shN": largest(after.shN - before.shN),
    }
