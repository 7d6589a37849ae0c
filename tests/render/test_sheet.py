"""The contact sheet: which views are on it, in which order, and what stands where."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from splatcli.render.colour_maps import error_map
from splatcli.render.scoring import Comparison
from splatcli.render.sheet import Extremes, contact_sheet
from splatcli.train.events import ViewScore

TRUTH, RENDER = 40, 90


def view(index: int, psnr: float, size: tuple[int, int] = (30, 40)) -> Comparison:
    """A grey photo and a lighter render, [H, W] of ``size``."""
    pictures = (np.full((*size, 3), value, np.uint8) for value in (TRUTH, RENDER))
    return Comparison(index, ViewScore(f"view_{index}.png", psnr, 0.5), *pictures)


@pytest.mark.parametrize(
    ("seen", "most", "ranks", "words"),
    [
        (1, 12, [1], "the view"),
        (5, 12, [1, 2, 3, 4, 5], "all 5 views, worst first"),
        (5, 5, [1, 2, 3, 4, 5], "all 5 views, worst first"),
        (7, 4, [1, 2, 6, 7], "the 2 worst and the 2 best of 7 views"),
        (7, 5, [1, 2, 3, 6, 7], "the 3 worst and the 2 best of 7 views"),
        (7, 3, [1, 2, 7], "the 2 worst and the best of 7 views"),
        (7, 1, [1], "the worst of 7 views"),
        (30, 12, [*range(1, 7), *range(25, 31)], "the 6 worst and the 6 best of 30 views"),
    ],
)
def test_the_worst_and_the_best_are_kept_with_their_ranks(seen: int, most: int, ranks: list[int], words: str) -> None:
    extremes = Extremes(most)
    for index in np.random.default_rng(0).permutation(seen):
        extremes.add(view(int(index), 20.0 + index))
    assert [(rank, one.index) for rank, one in extremes.ranked()] == [(rank, rank - 1) for rank in ranks]
    assert extremes.describe() == words


def test_no_order_of_arrival_changes_what_is_kept() -> None:
    for order in itertools.permutations(range(5)):
        extremes = Extremes(3)
        for index in order:
            extremes.add(view(index, [21.0, 20.0, 21.0, 22.0, 20.5][index]))
        assert [one.index for _, one in extremes.ranked()] == [1, 4, 3]


def test_each_view_is_an_image_a_render_and_an_error_map() -> None:
    sheet = contact_sheet([(1, view(0, 20.0))], "title", "subtitle")
    error = error_map(np.full((1, 1, 3), TRUTH, np.uint8), np.full((1, 1, 3), RENDER, np.uint8))[0, 0]
    left = []
    for colour in ((TRUTH,) * 3, (RENDER,) * 3, error):
        rows, columns = np.nonzero(whole_blocks(sheet, colour))
        assert len(rows) == 1
        left.append(int(columns[0]))
    assert left[1] - left[0] == left[2] - left[1] > 40


def whole_blocks(sheet: np.ndarray, colour: object) -> np.ndarray:
    """Where a block of 30x40 pixels of one colour has its upper left corner."""
    same = (sheet == np.asarray(colour)).all(-1)
    windows = np.lib.stride_tricks.sliding_window_view(same, (30, 40))
    return windows.all((-1, -2))


def test_large_images_are_shrunk_and_small_ones_side_by_side() -> None:
    one = contact_sheet([(1, view(0, 20.0, (600, 900)))], "title", "subtitle")
    assert one.shape[1] == pytest.approx(3 * 480, abs=60)
    many = contact_sheet([(i, view(i, 20.0)) for i in range(1, 5)], "title", "subtitle")
    few = contact_sheet([(1, view(1, 20.0))], "title", "subtitle")
    assert many.shape[0] == few.shape[0]
    assert many.shape[1] > 2 * few.shape[1]


def test_a_long_title_is_not_cut() -> None:
    narrow, wide = (contact_sheet([(1, view(0, 20.0))], "title " * n, "subtitle") for n in (1, 60))
    assert wide.shape[1] > 3 * narrow.shape[1]
    ink = np.nonzero((wide[:40] < 128).any((0, -1)))[0]
    assert ink.max() < wide.shape[1] - 8
