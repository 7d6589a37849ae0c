"""The order of views: shuffled passes without replacement, determined by three numbers."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from splatcli.train.sampler import ViewSampler, epoch_order

#: Of 8 views with seed 42 in epochs 0 and 1.
PINNED = [[7, 1, 6, 4, 3, 5, 0, 2], [4, 5, 3, 0, 2, 7, 1, 6]]


@pytest.mark.parametrize("views", [1, 2, 7, 100])
@pytest.mark.parametrize("seed", [0, 42, -1, 2**64 - 1])
def test_each_epoch_is_a_permutation(views: int, seed: int) -> None:
    sampler = ViewSampler(views, seed)
    for epoch in range(5):
        assert sampler.state() == {"epoch": epoch, "position": 0}
        assert sorted(sampler.next() for _ in range(views)) == list(range(views))


def test_epochs_and_seeds_differ_in_order() -> None:
    orders = {tuple(epoch_order(50, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_all_views_come_first_about_equally_often() -> None:
    first = np.bincount([epoch_order(5, 7, epoch)[0] for epoch in range(5_000)], minlength=5)
    # Six standard deviations of a binomial count with n = 5000, p = 1/5.
    assert np.abs(first - 1_000).max() < 6 * np.sqrt(5_000 * 0.2 * 0.8)


def test_the_order_is_pinned() -> None:
    """A run saved by one version goes on with the same views in the next."""
    assert epoch_order(8, 42, 0).tolist() == PINNED[0]
    assert epoch_order(8, 42, 1).tolist() == PINNED[1]


@pytest.mark.parametrize("after", [0, 1, 6, 7, 8, 20])
def test_a_restart_goes_on_with_the_same_views(after: int) -> None:
    whole = ViewSampler(7, 3)
    for _ in range(after):
        whole.next()
    restarted = ViewSampler(7, 3, **whole.state())
    assert [whole.next() for _ in range(20)] == [restarted.next() for _ in range(20)]


@pytest.mark.parametrize("after", [0, 3, 6, 7, 9, 20])
def test_skipped_views_never_come_and_the_others_keep_their_order(after: int) -> None:
    whole, some = ViewSampler(7, 3), ViewSampler(7, 3)
    some.skip([4, 0])
    expected = [view for view in (whole.next() for _ in range(70)) if view not in (0, 4)]
    ahead = some.upcoming(3)
    assert ahead == expected[: len(ahead)]
    assert [some.next() for _ in range(after)] == expected[:after]
    restarted = ViewSampler(7, 3, **some.state(), skipped=some.skipped)
    assert [restarted.next() for _ in range(20)] == expected[after : after + 20]
    assert set(restarted.upcoming(7)) <= {1, 2, 3, 5, 6}
    some.skip([])
    assert len({some.next() for _ in range(14)}) == 7


@pytest.mark.parametrize("skipped", [range(7), [7], [-1]])
def test_views_that_cannot_be_skipped_are_refused(skipped: Iterable[int]) -> None:
    with pytest.raises(ValueError, match="views to leave out of 7"):
        ViewSampler(7, 3).skip(skipped)


@pytest.mark.parametrize(("views", "epoch", "position"), [(0, 0, 0), (3, 0, 3), (3, -1, 0), (3, 0, -1)])
def test_a_place_that_is_none_is_refused(views: int, epoch: int, position: int) -> None:
    with pytest.raises(ValueError, match="view"):
        ViewSampler(views, 0, epoch=epoch, position=position)
