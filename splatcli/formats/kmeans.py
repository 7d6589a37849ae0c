"""Few values that stand for many: codebooks of numbers, and palettes of vectors."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from splatcli.formats.quantisation import Doubles

_CODEBOOK_ROUNDS = 20
_PALETTE_ROUNDS = 6
#: Up to so many centroids are found at once; more of them in two levels, which takes a fraction of the time: with k
#: centroids in k**0.5 groups every vector is compared with 2 k**0.5 of them instead of k.
_FLAT = 256
#: Entries of a table of distances at a time.
_BLOCK = 1 << 22


def codebook(values: Doubles, size: int) -> Doubles:
    """[size] ascending numbers, such that each value has one close to it: Lloyd's rounds from a mixed start.

    Half of the start follows the values and half spans their range evenly, so that rare extremes are not forgotten.
    """
    ordered = np.sort(values, axis=None)
    different = np.unique(ordered)
    if len(different) <= size:
        return np.concatenate([different, np.repeat(different[-1:], size - len(different))])
    by_rank = ordered[np.linspace(0, len(ordered) - 1, size - size // 2).astype(np.int64)]
    evenly = np.linspace(ordered[0], ordered[-1], size // 2 + 2)[1:-1]
    centres = np.sort(np.concatenate([by_rank, evenly]))
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    for _ in range(_CODEBOOK_ROUNDS):
        borders = np.searchsorted(ordered, (centres[1:] + centres[:-1]) / 2)
        ends = np.concatenate([[0], borders, [len(ordered)]])
        counts = np.diff(ends)
        centres = np.where(counts > 0, np.diff(sums[ends]) / np.maximum(counts, 1), centres)
    return np.sort(centres)


def nearest(values: NDArray[np.floating], centres: Doubles) -> NDArray[np.uint8]:
    """The place of the closest of up to 256 ascending ``centres`` for each value."""
    return np.searchsorted((centres[1:] + centres[:-1]) / 2, values).astype(np.uint8)


def palette(vectors: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """([size, D] centroids, [N] the place of each vector's centroid) of ``vectors`` [N, D], N >= size.

    Deterministic on one device. Runs where the vectors are.
    """
    generator = torch.Generator().manual_seed(0)
    if size <= _FLAT:
        return _lloyd(vectors, size, generator)
    groups, members = _lloyd(vectors, math.isqrt(size), generator)
    counts = torch.bincount(members, minlength=len(groups))
    shares = _shares(counts, size)
    order = members.argsort(stable=True)
    centroids, labels = [], torch.empty_like(members)
    first = 0
    for rows, share in zip(torch.split(order, counts.tolist()), shares, strict=True):
        if share:
            found, places = _lloyd(vectors[rows], share, generator)
            centroids.append(found)
            labels[rows] = places + first
            first += share
    return torch.cat(centroids), labels


def _shares(counts: Tensor, size: int) -> list[int]:
    """How many of ``size`` centroids each group gets: in proportion, at least one, and no more than it has vectors."""
    total = int(counts.sum())
    shares = [min(count, max(1, count * size // total)) for count in counts.tolist()]
    largest = counts.argsort(descending=True).tolist()
    while (missing := size - sum(shares)) != 0:
        step = 1 if missing > 0 else -1
        for group in largest:
            if missing and 1 <= shares[group] + step <= int(counts[group]):
                shares[group] += step
                missing -= step
    return shares


def _lloyd(vectors: Tensor, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(centroids, labels) by k-means from randomly chosen vectors; a centroid without vectors stays where it was."""
    start = torch.randperm(len(vectors), generator=generator)[:size].sort().values.to(vectors.device)
    centroids = vectors[start].clone()
    if size == len(vectors):
        return centroids, torch.arange(size, device=vectors.device)
    for _ in range(_PALETTE_ROUNDS):
        sums, counts = torch.zeros_like(centroids), centroids.new_zeros(size)
        for block in _blocks(vectors, size):
            # A product instead of a scatter: the same bits each time, also on a GPU, and faster for so few centroids.
            chosen = torch.nn.functional.one_hot(_assigned(block, centroids), size).to(vectors.dtype)
            sums += chosen.T @ block
            counts += chosen.sum(dim=0)
        centroids = torch.where(counts[:, None] > 0, sums / counts.clamp_min(1)[:, None], centroids)
    return centroids, torch.cat([_assigned(block, centroids) for block in _blocks(vectors, size)])


def _blocks(vectors: Tensor, size: int) -> tuple[Tensor, ...]:
    """The vectors in parts whose tables of distances to ``size`` centroids are of bounded size."""
    return torch.split(vectors, max(1, _BLOCK // size))


def _assigned(vectors: Tensor, centroids: Tensor) -> Tensor:
    """[N] the place of the nearest centroid; distances are compared without the part that all share."""
    return (0.5 * (centroids**2).sum(dim=1) - vectors @ centroids.T).argmin(dim=1)
