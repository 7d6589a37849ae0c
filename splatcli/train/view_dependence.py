"""View-dependent colour of a trained model: less where few training views show a Gaussian, like the scene's elsewhere.

The coefficients of SH degree 3 are seven of the sixteen of a channel. Where training views are fewer, they fit what is
wrong with each image, and views in between show it. So the images of a trained model have them times

    n^2 / (n^2 + h^2)

with n, the effective number of training views that show the Gaussian, and h = ``train.sh_views``. With w_v, the sum of
its blend weights over the pixels of view v, n = (sum of w_v)^2 / (sum of w_v^2): Kish's effective sample size. It is 3
for one that three views show equally well, and 1 for one that fills a single view and is a point in all others.

Where views are far apart (``train.sh_prior``), a Gaussian's views say nothing of most directions, and what all surfaces
share is a better guess than no change of colour: a gloss over fields opposite the sun, haze, the fall of light to the
corners of images. The mean of all Gaussians' coefficients is the prior of each, and its own views are the evidence
(shrinkage(), docs/math.md 13).

The trained coefficients stay as they are: like the 3D filter, all of this is part of the Gaussians that are rendered,
scored and exported, and no step sees it. L. Kish, Survey Sampling, 1965.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from splatcli.config import TrainConfig
from splatcli.gaussians import SHN_COUNTS, Gaussians
from splatcli.reproducible import sqrt
from splatcli.scene.camera import Camera
from splatcli.sh import sh_basis
from splatcli.train.densify.contribution import BlendWeights, views_of

if TYPE_CHECKING:
    from splatcli.distributed.process_group import ProcessGroup

#: The first SH degree that is damped.
DEGREE = 3

#: Parts of a pixel that sums of blend weights are rounded to: sums of int64 are the same in any order. The squares of
#: 64 views of at most 640 x 640 pixels, 2^27.7 parts each, add up to 2^61.3.
_PARTS = 512.0

#: Gaussians whose moments of directions are in memory at a time, 2 kB each with degree 3: as the cache of a core holds.
_ROWS = {"cpu": 1024, "cuda": 1 << 16}

#: Gaussians at most, evenly spaced, that the mean of all is taken over.
_SAMPLE = 1 << 16

#: The ridge of the mean coefficients, as a part of the evidence, and the least colour that they are relative to.
_RIDGE, _LEAST = 0.1, 0.05

#: Units of a sum of evidence that sums are rounded to, and the largest coefficient relative to a colour that counts.
_UNITS, _LARGEST = 2.0**36, 100.0

#: Of the constant function of spherical harmonics, 1 / sqrt(4 pi).
_CONSTANT = 1.0 / math.sqrt(4.0 * math.pi)


@torch.no_grad()
def effective_views(weights: BlendWeights) -> Tensor:
    """Return [N] float32, the effective number of cameras that show each Gaussian; 0 where none does.

    Of many cameras some are rendered, and their number is scaled to all. All processes of a group get the same numbers.
    """
    gaussians, group = weights.gaussians, weights.group
    sums = torch.zeros(2, len(gaussians), dtype=torch.int64, device=gaussians.device)
    for parts in _in_parts(weights):
        sums[0] += parts
        sums[1] += parts**2
    if group is not None:
        sums = torch.stack(group.all_gather(sums)).sum(dim=0)
    first, second = sums[0].double(), sums[1].double()
    return (_of_all(weights.cameras) * first**2 / second.clamp(min=1.0)).float()


def _in_parts(weights: BlendWeights) -> Iterator[Tensor]:
    """Yield [N] int64 for each view that this process renders: the sums of blend weights in parts of a pixel."""
    for sums in weights.in_views():
        yield (sums.double() * _PARTS).round().long()


def _of_all(cameras: Sequence[Camera]) -> float:
    """Return how many of the cameras each one that is rendered stands for."""
    return len(cameras) / max(1, len(views_of(len(cameras), 0)))


@torch.no_grad()
def damp(shN: Tensor, views: Tensor, half: float) -> None:
    """Damp the coefficients [N, K, 3] in place.

    views: [N], of effective_views(). half: number of views, above 0, at which the coefficients are halved.
    """
    first = SHN_COUNTS[DEGREE - 1]
    ratio = half / views.to(shN.device).double()  # infinite where no view shows the Gaussian
    shN[:, first:] *= (1.0 / (1.0 + ratio**2)).float()[:, None, None]


@dataclass(frozen=True, slots=True, eq=False)
class ViewWeights:
    """The sums of the blend weights of all N Gaussians of a run in each of the V views that are rendered.

    sums: [V, N] int32 on the CPU, in parts of a pixel. centers: [V, 3] float64, of the cameras, world units.
    of_all: how many cameras each one stands for.
    """

    sums: Tensor
    centers: Tensor
    of_all: float

    @classmethod
    @torch.no_grad()
    def of(cls, weights: BlendWeights) -> ViewWeights:
        """Return the sums of ``weights``; all processes of a group get those of all views."""
        cameras, group = weights.cameras, weights.group
        chosen = views_of(len(cameras), 0)
        centers = torch.from_numpy(np.stack([cameras[index].center for index in chosen]).astype(np.float64))
        views = (parts.int() for parts in _in_parts(weights))
        if group is None:
            return cls(torch.stack([parts.cpu() for parts in views]), centers, _of_all(cameras))
        found, share = list(views), -(-len(chosen) // group.size)
        found += [torch.zeros_like(weights.gaussians.means[:, 0], dtype=torch.int32)] * (share - len(found))
        each = group.all_gather(torch.stack(found))  # of all processes, the first view of each, then the second, ...
        return cls(torch.stack(each, dim=1).flatten(0, 1)[: len(chosen)].cpu(), centers, _of_all(cameras))


@torch.no_grad()
def shrinkage(
    gaussians: Gaussians,
    weights: ViewWeights,
    config: TrainConfig,
    *,
    rows: slice | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Return [N, K + 1, 3] float32, what changes the coefficients of trained Gaussians: sh0, then shN.

    gaussians: with every step applied to shN. weights: of all Gaussians of the run.
    config: with ``sh_views`` and ``sh_prior``, the effective views that the prior counts as, both above 0.
    rows: which of the run's Gaussians these are; group: of the processes that hold the others. None: these are all.
    """
    half, prior = config.sh_views, config.sh_prior or 0.0
    total = max(1, int(weights.sums.sum(dtype=torch.int64)))
    own = replace(weights, centers=weights.centers.to(gaussians.device))
    if rows is not None:
        own = replace(own, sums=weights.sums[:, rows])
    size, step = gaussians.shN.shape[1], _ROWS[gaussians.device.type]
    every = max(1, -(-weights.sums.shape[1] // _SAMPLE))
    first = 0 if rows is None else -rows.start % every
    sample = torch.arange(first, len(gaussians), every, device=gaussians.device)
    sums = torch.zeros(size, size + 4, dtype=torch.int64, device=gaussians.device)
    for some in torch.split(sample, step):
        seen = _Evidence(gaussians, own, some)
        evidence = seen.views**2 / (seen.views + half) * (seen.total / total)
        relative = (seen.shN / seen.colour).clamp(-_LARGEST, _LARGEST)
        ones = torch.ones_like(seen.mean)[:, None]
        all_three = torch.cat([seen.spread, _times(seen.spread, relative), ones], dim=1) * evidence
        sums += (all_three * _UNITS).round().long().sum(dim=2)
    if group is not None:
        sums = torch.stack(group.all_gather(sums)).sum(dim=0)
    matrix, right, count = torch.split(sums.double(), [size, 3, 1], dim=1)
    ridge = _RIDGE * torch.diag(count[:, 0].clamp(min=1.0))
    mean = _solved((matrix + ridge)[..., None], right[..., None])
    change = gaussians.shN.new_empty(len(gaussians), size + 1, 3, device=gaussians.device)
    for start in range(0, len(gaussians), step):
        chunk = slice(start, start + step)
        seen = _Evidence(gaussians, own, chunk)
        guess, evidence = mean * seen.colour, seen.views**2 / half
        unit = prior * torch.eye(size, dtype=torch.float64, device=gaussians.device)[..., None]
        precision = seen.spread * evidence
        likely = _solved(precision + unit, _times(precision, seen.shN) + prior * guess)
        kept = _times(seen.mean[None], seen.shN - likely)[0]
        high = SHN_COUNTS[DEGREE - 1]
        damped = 1.0 / (1.0 + (half / seen.views) ** 2)
        likely[high:] = guess[high:] + damped * (likely[high:] - guess[high:])
        change[chunk] = torch.cat([kept[None], likely - seen.shN]).permute(2, 0, 1).float()
    return change


class _Evidence:
    """The evidence of the views that are rendered on the colours of C Gaussians; all float64, the Gaussians last.

    views: [C] effective numbers of all cameras. total: [C] sums of weights. shN: [K, 3, C]. colour: [3, C], their base
    colour. mean, spread: [K, C], [K, K, C], mean and covariance of the basis functions over the views.
    """

    def __init__(self, gaussians: Gaussians, weights: ViewWeights, rows: slice | Tensor) -> None:
        means = gaussians.means[rows].double()
        self.shN = gaussians.shN[rows].to(means.device).double().permute(1, 2, 0)
        self.colour = (0.5 + _CONSTANT * gaussians.sh0[rows].double().T).clamp(min=_LEAST)
        here = rows if isinstance(rows, slice) else rows.to(weights.sums.device)
        each, size = weights.sums[:, here].to(means.device).double(), self.shN.shape[0]
        self.total, squares = each.new_zeros(len(means)), each.new_zeros(len(means))
        first, second = each.new_zeros(size, len(means)), each.new_zeros(size, size, len(means))
        for center, weight in zip(weights.centers, each, strict=True):
            x, y, z = (means - center).unbind(1)
            length = sqrt(x * x + y * y + z * z).clamp(min=1e-30)
            directions = torch.stack([x / length, y / length, z / length], 1)
            basis = sh_basis(directions, gaussians.sh_degree)[:, 1:].T / _CONSTANT
            weighted = weight * basis
            self.total += weight
            squares += weight * weight
            first += weighted
            second += weighted[:, None] * basis[None]
        some = self.total.clamp(min=1.0)
        self.views = weights.of_all * self.total**2 / squares.clamp(min=1.0)
        self.mean = first / some
        self.spread = second / some - self.mean[:, None] * self.mean[None]


def _times(matrix: Tensor, columns: Tensor) -> Tensor:
    """Return the products [J, M, C] of C matrices [J, K, C] and columns [K, M, C], summed in the order of the index."""
    result = columns.new_zeros(len(matrix), *columns.shape[1:])
    for index, row in enumerate(columns):
        result += matrix[:, index, None] * row[None]
    return result


def _solved(matrix: Tensor, columns: Tensor) -> Tensor:
    """Return the solutions [K, M, C] of C systems with positive definite matrices [K, K, C] and right sides [K, M, C].

    By elimination, whose operations have one order on every processor.
    """
    matrix, columns = matrix.clone(), columns.clone()
    size = len(matrix)
    for index in range(size - 1):
        factors = matrix[index + 1 :, index] / matrix[index, index]
        matrix[index + 1 :, index + 1 :] -= factors[:, None] * matrix[None, index, index + 1 :]
        columns[index + 1 :] -= factors[:, None] * columns[None, index]
    for index in reversed(range(size)):
        columns[index] /= matrix[index, index]
        columns[:index] -= matrix[:index, index, None] * columns[None, index]
    return columns
