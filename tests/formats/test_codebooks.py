"""Codebooks and palettes: every value near one of theirs, and as many as were asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from splatcli.formats.sog import codebook, nearest, palette


@pytest.mark.parametrize("spread", ["normal", "heavy tails", "two far away", "constant", "few"])
def test_a_codebook_leaves_no_value_far_from_it(spread: str) -> None:
    rng = np.random.default_rng(0)
    values = {
        "normal": rng.normal(size=10_000),
        "heavy tails": rng.standard_t(2, size=10_000),
        "two far away": np.concatenate([rng.normal(size=10_000), [-50.0, 70.0]]),
        "constant": np.full(50, 3.25),
        "few": np.arange(100.0),
    }[spread]
    found = codebook(values, 256)
    assert len(found) == 256
    assert (np.diff(found) >= 0).all()
    off = np.abs(found[nearest(values, found)] - values)
    # Half of it starts as an even one of 128; what the rounds move must not leave more than twice its gaps.
    even = (values.max() - values.min()) / 128 / 2
    assert off.max() <= 2 * even
    assert np.median(off) <= even / 2


@pytest.mark.parametrize(("count", "size"), [(10, 10), (300, 200), (1500, 1024)])
def test_a_palette_has_its_size_and_each_vector_its_nearby_centroid(count: int, size: int) -> None:
    rng = torch.Generator().manual_seed(0)
    vectors = torch.randn(count, 9, generator=rng)
    centroids, labels = palette(vectors, size)
    assert centroids.shape == (size, 9)
    assert labels.shape == (count,)
    assert int(labels.max()) < size
    assert (vectors - centroids[labels]).pow(2).mean() < 0.75 * vectors.pow(2).mean()
    again = palette(vectors, size)
    assert torch.equal(again[0], centroids)
    assert torch.equal(again[1], labels)


def test_vectors_that_are_mostly_alike_are_no_obstacle() -> None:
    rng = torch.Generator().manual_seed(0)
    vectors = torch.zeros(1500, 9)
    vectors[:100] = torch.randn(100, 9, generator=rng)
    centroids, labels = palette(vectors, 1024)
    assert centroids.shape == (1024, 9)
    assert (centroids[labels] - vectors)[100:].abs().max() < 0.5


def test_groups_that_are_there_are_found() -> None:
    rng = torch.Generator().manual_seed(0)
    kinds = torch.randn(50, 24, generator=rng)
    vectors = kinds[torch.randint(50, (3000,), generator=rng)] + 1e-3 * torch.randn(3000, 24, generator=rng)
    centroids, labels = palette(vectors, 600)
    assert (centroids[labels] - vectors).pow(2).mean().sqrt() < 2e-3
