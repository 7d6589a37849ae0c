"""Fewer Gaussians that look alike: neighbours are merged in pairs, the pair first whose loss is least.

A Gaussian has a mass m. Without cameras that is a = opacity x (s1 s2 + s1 s3 + s2 s3), about what it covers from a
direction at random. With cameras it is sqrt(b (b + a)), where b is the sum of its blend weights over the pixels of
their images, and a is scaled to the same mean: what other views may show counts as well, and what no view shows is 0.
Two become the one with their mean and covariance by mass (equal moments) and the mean of their colours. Its opacity is
a weighted geometric mean of two: their mean, and what keeps opacity x area. The first one alone makes the model larger
than it was, the second one makes it transparent.

The loss of a pair is Runnalls' bound of the Kullback-Leibler divergence between the two and the one, by the root of
their mass, with colour as three more dimensions of a fixed standard deviation:

    sqrt(m1 + m2) (log|S| + 3 log(1 + w1 w2 |c1 - c2|^2 / (3 sd^2)) - w1 log|S1| - w2 log|S2|) / 2,  w = m / (m1 + m2)

The root leaves more to Gaussians of little mass than their part of the images. Held-out views of models that fit the
training views better than others are closer so.

A. R. Runnalls, "Kullback-Leibler approach to Gaussian mixture reduction", IEEE Transactions on Aerospace and Electronic
Systems 43(3), 2007.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.spatial import cKDTree
from scipy.spatial.transform import Rotation

from splatcli import machine
from splatcli.formats.quantisation import LOG_SCALE_RANGE
from splatcli.gaussians import SH_C0, Gaussians
from splatcli.progress import report, track
from splatcli.rasterizer.rendering import blend_weights
from splatcli.rotation import rotation_matrices
from splatcli.scene.camera import Camera
from splatcli.sizes import evenly

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

#: Neighbours that a Gaussian may be merged with.
NEIGHBOURS = 12
#: The share of the Gaussians that one round merges at most, with and without cameras. Later rounds know what the merged
#: ones look like; but it is better to merge most once before any is merged again.
ROUND_SHARE, BLIND_ROUND_SHARE = 0.47, 0.5
#: Mass of a Gaussian that no view shows, at most, times the mean; these are merged first.
UNSEEN = 1e-5
#: Weight of the mean opacity of two, beside the opacity that keeps opacity x area, in the one that they become.
KEPT_OPACITY = 0.6
#: Standard deviation of colours, RGB of 0 to 1.
COLOUR_DEVIATION = 0.08
#: Shortest standard deviation in a loss, times the longest: discs are thinner than what pixels tell.
THINNEST = 0.12
#: Views whose blend weights are summed, and pixels of their longer side.
VIEWS, VIEW_SIDE = 100, 640
#: Pairs whose losses are computed at once; bounds the memory.
_PAIRS = 1 << 18


def contributions(gaussians: Gaussians, cameras: Sequence[Camera], *, antialiased: bool = False) -> Floats:
    """Return the sum of each Gaussian's blend weights over the pixels of some of the cameras, [N].

    antialiased: the model was trained so; its small Gaussians cover less than without.
    """
    total = torch.zeros(len(gaussians), dtype=torch.float64)
    for camera in track(evenly(cameras, VIEWS), "blend weights"):
        small = camera.scaled(min(1.0, VIEW_SIDE / max(camera.width, camera.height)))
        total += blend_weights(gaussians, small, antialiased=antialiased).double()
    return np.asarray(total.numpy())


def simplify(
    gaussians: Gaussians, count: int, cameras: Sequence[Camera] = (), *, antialiased: bool = False
) -> Gaussians:
    """Return ``count`` Gaussians for the given ones, [N]; merged ones take the place of the first of their group.

    Gaussians that are not merged keep their bits. Deterministic. gaussians: finite, on the CPU, float32. count: 1 to N.
    cameras: of the images that the model was trained on, in its coordinates; they tell what each Gaussian contributes.
    antialiased: as of contributions().
    """
    if not 1 <= count <= len(gaussians):
        raise ValueError(f"{count} of {len(gaussians)} Gaussians")
    masses = contributions(gaussians, cameras, antialiased=antialiased) if cameras else None
    (fewer,) = simplify_in_steps(gaussians, [count], masses)
    return fewer


def simplify_in_steps(gaussians: Gaussians, counts: Iterable[int], masses: Floats | None) -> Iterator[Gaussians]:
    """Yield as many Gaussians as each of the descending ``counts``, each time made of those before.

    gaussians: as of simplify(). masses: [N], what contributions() tells of them; None where no camera is known.
    """
    model = _Mixture.of(gaussians, masses)
    share = BLIND_ROUND_SHARE if masses is None else ROUND_SHARE
    for count in counts:
        task, before = "merging", len(model)
        report(task, 0, before - count)
        while len(model) > count:
            most = min(len(model) - count, max(1, int(share * len(model))))
            model = model.merged(*_cheapest_pairs(model, most))
            report(task, before - len(model), before - count)
        yield model.gaussians(gaussians)


@dataclass(slots=True, eq=False)
class _Mixture:
    """Gaussians as masses in space.

    means: [N, 3]. axes: [N, 3, 3], the columns are the principal axes. scales: [N, 3], standard deviations along them.
    opacities, masses: [N]. colours: [N, K, 3], all SH coefficients, float32.
    origins: [N], the row of a Gaussian that was never merged among the given ones; -1 for others.
    """

    means: Floats
    axes: Floats
    scales: Floats
    opacities: Floats
    masses: Floats
    colours: NDArray[np.float32]
    origins: Indices

    @classmethod
    def of(cls, gaussians: Gaussians, masses: Floats | None) -> _Mixture:
        """Return the mixture of all Gaussians. masses: of contributions(); without them opacity x area."""
        scales = gaussians.log_scales.double().clamp(*LOG_SCALE_RANGE).exp().numpy()
        opacities = gaussians.logit_opacities.double().sigmoid().numpy()
        known = opacities * _areas(scales)
        if masses is not None:
            known *= masses.mean() / max(float(known.mean()), np.finfo(np.float64).tiny)
            known = np.sqrt(masses * (masses + known))
        return cls(
            gaussians.means.double().numpy(),
            rotation_matrices(gaussians.quats.double()).numpy(),
            scales,
            opacities,
            # What no camera sees has a mass, too, by which it is merged.
            np.maximum(known, max(1e-9 * float(known.mean()), np.finfo(np.float64).tiny)),
            torch.cat([gaussians.sh0[:, None], gaussians.shN], dim=1).numpy(),
            np.arange(len(gaussians)),
        )

    def __len__(self) -> int:
        return len(self.means)

    def covariances(self, rows: Indices, thinnest: float = 0.0) -> Floats:
        """Return [M, 3, 3] of some rows. thinnest: the least standard deviation, times the Gaussian's largest."""
        scales = np.maximum(self.scales[rows], thinnest * self.scales[rows].max(axis=1, keepdims=True))
        root = self.axes[rows] * scales[:, None, :]
        return np.asarray(root @ root.transpose(0, 2, 1))

    def merged(self, first: Indices, second: Indices) -> _Mixture:
        """Return the mixture in which each ``first`` has become one with its ``second``; no row is in two pairs."""
        total = self.masses[first] + self.masses[second]
        share = self.masses[first] / total
        gap = self.means[first] - self.means[second]
        covariance = share[:, None, None] * self.covariances(first)
        covariance += (1 - share)[:, None, None] * self.covariances(second)
        covariance += (share * (1 - share))[:, None, None] * (gap[:, :, None] * gap[:, None, :])
        variances, axes = np.linalg.eigh(covariance)
        axes[np.linalg.det(axes) < 0, :, 0] *= -1  # a rotation, and no reflection
        scales = np.sqrt(np.maximum(variances, np.finfo(np.float32).tiny))
        area = _areas(scales)
        covering = sum(self.opacities[rows] * _areas(self.scales[rows]) for rows in (first, second)) / area
        opacity = share * self.opacities[first] + (1 - share) * self.opacities[second]
        # Two that are quite transparent cover nothing, and the one covers nothing, too.
        more = np.maximum(1.0, opacity / np.maximum(covering, np.finfo(np.float64).tiny))
        kept = more**KEPT_OPACITY * covering
        weight = share[:, None, None].astype(np.float32)
        changed = {
            "means": self.means[second] + share[:, None] * gap,
            "axes": axes,
            "scales": scales,
            "opacities": np.minimum(kept, np.maximum(opacity, _MOST_OPAQUE)),
            "masses": total,
            "colours": weight * self.colours[first] + (1 - weight) * self.colours[second],
            "origins": np.full(len(first), -1),
        }
        left = np.ones(len(self), dtype=bool)
        left[second] = False
        columns = {}
        for name, values in changed.items():
            column = getattr(self, name).copy()
            column[first] = values
            columns[name] = column[left]
        return _Mixture(**columns)

    def gaussians(self, given: Gaussians) -> Gaussians:
        """Return raw parameters. given: the Gaussians before the first was merged."""
        opacities = np.clip(self.opacities, 1e-12, 1 - 1e-7)
        made = {
            "means": self.means,
            "quats": Rotation.from_matrix(self.axes).as_quat(scalar_first=True),
            "log_scales": np.log(self.scales),
            "logit_opacities": np.log(opacities) - np.log1p(-opacities),
            "sh0": self.colours[:, 0],
            "shN": self.colours[:, 1:],
        }
        alone = torch.from_numpy(self.origins >= 0)
        rows = torch.from_numpy(self.origins[self.origins >= 0])
        columns = {}
        for name, tensor in given.items():
            columns[name] = torch.from_numpy(np.ascontiguousarray(made[name], dtype=np.float32))
            columns[name][alone] = tensor[rows]
        return Gaussians(**columns)


#: The highest opacity of a merged Gaussian, unless those that it is made of are more opaque.
_MOST_OPAQUE = 0.99


def _areas(scales: Floats) -> Floats:
    """Return [N], the area that an ellipsoid covers from a direction at random, but for a constant."""
    return scales[:, 0] * scales[:, 1] + scales[:, 0] * scales[:, 2] + scales[:, 1] * scales[:, 2]


def _cheapest_pairs(model: _Mixture, most: int) -> tuple[Indices, Indices]:
    """Return at most ``most`` disjoint pairs of small loss, and at least one; if no view shows many, those alone."""
    neighbours = min(NEIGHBOURS, len(model) - 1)
    workers = machine.cores()
    _, found = cKDTree(model.means).query(model.means, neighbours + 1, workers=workers)
    one = np.repeat(np.arange(len(model)), neighbours + 1)
    other = found.ravel()
    keys = np.sort(np.minimum(one, other) * len(model) + np.maximum(one, other))
    keys = keys[np.diff(keys, prepend=-1) > 0]  # np.unique() hashes them, which takes longer
    first, second = np.divmod(keys, len(model))
    first, second = first[first < second], second[first < second]
    covariances = model.covariances(np.arange(len(model)), THINNEST)
    pieces = [slice(start, start + _PAIRS) for start in range(0, len(first), _PAIRS)]
    losses = np.concatenate([_losses(model, covariances, first[piece], second[piece]) for piece in pieces])
    order = np.argsort(losses, kind="stable")
    first, second = first[order], second[order]
    chosen = _disjoint(first, second, len(model))[:most]
    # A round of a large share would go on to what views show before all is merged that they do not.
    unseen = np.maximum(model.masses[first[chosen]], model.masses[second[chosen]]) < UNSEEN * model.masses.mean()
    if 100 * int(unseen.sum()) > most:  # for a few, a round takes as long
        chosen = chosen[unseen]
    return first[chosen], second[chosen]


def _losses(model: _Mixture, covariances: Floats, first: Indices, second: Indices) -> Floats:
    """Return [M], the loss of merging each pair. covariances: [N, 3, 3] of all, the thinnest made thicker."""
    one, other = model.masses[first], model.masses[second]
    share = one / (one + other)
    mixed = share * (1 - share)
    gap = model.means[first] - model.means[second]
    whole = share[:, None, None] * covariances[first] + (1 - share)[:, None, None] * covariances[second]
    whole += mixed[:, None, None] * (gap[:, :, None] * gap[:, None, :])
    colours = SH_C0 * (model.colours[first, 0] - model.colours[second, 0]).astype(np.float64)
    apart = 3 * np.log1p(mixed * (colours**2).sum(axis=1) / (3 * COLOUR_DEVIATION**2))
    volumes = [_log_determinants(matrix) for matrix in (whole, covariances[first], covariances[second])]
    divergence = 0.5 * (volumes[0] + apart - share * volumes[1] - (1 - share) * volumes[2])
    return np.asarray(np.sqrt(one + other) * divergence)


def _log_determinants(matrices: Floats) -> Floats:
    """Return [M], log determinants of symmetric [M, 3, 3]; numpy's take ten times as long for matrices so small."""
    (a, b, c), (_, d, e), (_, _, f) = np.moveaxis(matrices, 0, -1)
    found = a * (d * f - e * e) - b * (b * f - c * e) + c * (b * e - c * d)
    return np.asarray(np.log(np.maximum(found, np.finfo(np.float64).tiny)))


def _disjoint(first: Indices, second: Indices, count: int) -> Indices:
    """Return the pairs that a walk through all, the best one first, takes when no row may be in two; in that order."""
    taken = np.zeros(count, dtype=bool)
    left = np.arange(len(first))
    chosen = []
    while len(left):
        # The best pair of each row; a pair that is the best of both its rows is taken whatever comes before it.
        best = np.full(count, len(first))
        np.minimum.at(best, first[left], left)
        np.minimum.at(best, second[left], left)
        sure = left[(best[first[left]] == left) & (best[second[left]] == left)]
        chosen.append(sure)
        taken[first[sure]] = taken[second[sure]] = True
        left = left[~(taken[first[left]] | taken[second[left]])]
    return np.sort(np.concatenate(chosen))
