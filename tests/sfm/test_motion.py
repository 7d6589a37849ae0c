"""Frames of a video are chosen where the camera moves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from splatcli.sfm.motion import SAME, Motion, stretches
from splatcli.sfm.video import frame_index, read_video, write_frames
from tests.sfm import corner
from tests.sfm.test_videos import ffmpeg_writes, pipes_stay_open

Picture = NDArray[np.uint8]


@pytest.fixture(scope="module")
def walk() -> list[Picture]:
    """24 frames, each a degree and a half from the one before."""
    return [corner.image(index / 4) for index in range(24)]


def trembling(picture: Picture, count: int) -> list[Picture]:
    """The frames of a camera that stands in a hand, with noise."""
    generator = np.random.default_rng(0)
    found = []
    for _ in range(count):
        moved = np.roll(picture, generator.integers(-1, 2, 2), axis=(0, 1))
        found.append(np.clip(moved + generator.normal(0, 4, moved.shape), 0, 255).astype(np.uint8))
    return found


def way_of(pictures: list[Picture]) -> list[float]:
    motion = Motion()
    return [motion.add(picture) for picture in pictures]


@pipes_stay_open
def test_frames_are_taken_where_the_camera_moves(walk: list[Picture], tmp_path: Path) -> None:
    """It stands for 80 of 104 frames; equal times would give 5 of 20 frames where it moves."""
    frames = [*trembling(walk[0], 40), *walk, *trembling(walk[-1], 40)]
    film = ffmpeg_writes(tmp_path / "a.mkv", np.stack(frames).astype(np.uint16) * 257, "-pix_fmt", "yuv420p")
    clip = read_video(film)
    for most, moving in ((20, 14), (120, 20)):
        names = write_frames({"": (clip, most)}, tmp_path / str(most), lambda *_: None)
        chosen = [frame_index(name) for name in names]
        assert sum(40 <= index < 64 for index in chosen) >= moving
        assert moving <= len(chosen) <= min(most, 40)
        assert min(chosen) < 42
        assert max(chosen) > 61


def test_what_moves_before_a_still_background_counts(walk: list[Picture]) -> None:
    """An object on a turntable fills a quarter of the picture."""
    frames = []
    for picture in walk:
        frame = walk[0].copy()
        frame[45:135, 60:180] = picture[45:135, 60:180]
        frames.append(frame)
    way = way_of(frames)
    assert way[-1] > 6 * SAME
    assert len(set(stretches(way, 120))) >= 12


def test_light_blur_noise_and_darkness_are_no_motion(walk: list[Picture]) -> None:
    blurred = [np.asarray(Image.fromarray(walk[0]).filter(ImageFilter.GaussianBlur(r % 3))) for r in range(12)]
    generator = np.random.default_rng(1)
    brighter = [np.clip(walk[0] * factor * 0.7, 0, 255).astype(np.uint8) for factor in np.linspace(0.8, 1.3, 12)]
    dark = [generator.poisson(2, walk[0].shape).astype(np.uint8) for _ in range(12)]
    for frames in (brighter, blurred, dark, [np.zeros((90, 120, 3), np.uint8)] * 3):
        assert way_of(frames)[-1] < SAME


def test_a_hand_that_trembles_comes_back(walk: list[Picture]) -> None:
    """Nine places within 1.2 % of the longer side: after each was met once, nothing is new."""
    way = way_of(trembling(walk[0], 80))
    assert way[-1] == way[40] < 9 * SAME


@pytest.mark.parametrize("shape", [(8, 8, 3), (3, 200, 3), (1, 1, 3), (200, 90)])
def test_pictures_of_any_size_are_compared(shape: tuple[int, ...]) -> None:
    pictures = [np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8) for seed in range(3)]
    way = way_of(pictures)
    assert way[0] == 0
    assert np.isfinite(way).all()
    assert way == sorted(way)


def test_an_even_walk_is_cut_into_equal_times() -> None:
    numbers = stretches([0.002 * index for index in range(1200)], 120)
    assert np.bincount(numbers).tolist() == pytest.approx([10] * 120, abs=1)
    assert numbers == sorted(numbers)


def test_frames_far_apart_are_all_kept_and_a_cut_takes_none_of_them() -> None:
    far = [0.03 * index for index in range(50)]
    assert stretches(far, 120) == list(range(50))
    assert stretches([0.03 * (index // 2) for index in range(8)], 4) == [0, 0, 1, 1, 2, 2, 3, 3]
    slow = [0.0005 * index for index in range(400)]
    cut = slow + [slow[-1] + 0.08 + way for way in slow]
    counts = np.bincount(stretches(cut, 40))
    assert len(counts) == 40
    assert counts.min() >= 18


def test_little_motion_leaves_some_frames_at_equal_times() -> None:
    for way in ([0.0] * 200, [0.004] * 200):
        assert np.bincount(stretches(way, 120)).tolist() == pytest.approx([10] * 20, abs=1)
        assert len(set(stretches(way, 5))) == 5
    assert stretches([], 120) == []
    assert stretches([0.0], 120) == [0]
