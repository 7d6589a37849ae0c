"""Points that training triangulates by itself: options that suit its images and its time, and an end to slow work."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from splatcli import machine
from splatcli.errors import SceneError
from splatcli.progress import Listener
from splatcli.sfm.images import SfmInput
from splatcli.sfm.options import SfmOptions
from splatcli.sfm.triangulate import images_of, known_cameras

if TYPE_CHECKING:
    from splatcli.config import DataConfig
    from splatcli.scene.camera import Camera
    from splatcli.scene.scene import Scene

#: With fewer triangulated points than this, training begins with random ones.
LEAST_POINTS = 100

#: Pixels of the longer side that features need at least where training waits for points, and how many times the longer
#: side of its images they have: more gain a run nothing (docs/quality.md).
_LEAST_SIDE, _FINER = 480, 3

#: The same where time is short: points of 240 pixels are better than none. The first size is taken that is likely to
#: need this part of the time at most: other machines are slower, or have other work.
_SHORT_OF_TIME, _EASY = (640, 480, 320, 240), 0.5

#: Seconds to start, and of a processor's time for a million pixels that features are found on, matches included. On a
#: Zen 5 the fox takes 1.6 to 2.2; slower machines take twice as long.
_START_SECONDS, _PIXEL_SECONDS = 4.0, 3.0


def points_request(scene: Scene, data: DataConfig, seconds: float | None = None) -> tuple[SfmInput, SfmOptions, bool]:
    """Return the images of a scene, the options that triangulate points to train on them, and whether time suffices.

    data: the settings that the scene was read with. seconds: that it may take at most; features are fewer then, and at
    last the time does not suffice. Raises SceneError for too few images.
    """
    from splatcli.scene.read import read_scene

    full = read_scene(scene.root, data.model_copy(update={"resolution": 1}).images_only())
    inputs = images_of(full)
    size = _feature_size(scene.cameras, full.cameras)
    suffices = True
    if seconds is not None:
        sizes = [size, *(side for side in _SHORT_OF_TIME if side < size)]
        size = next((side for side in sizes if _seconds_for(full.cameras, side) <= _EASY * seconds), sizes[-1])
        suffices = _seconds_for(full.cameras, size) <= seconds
    return inputs, SfmOptions(cameras=known_cameras(full, inputs), max_image_size=size), suffices


def _feature_size(trained: Sequence[Camera], full: Sequence[Camera]) -> int:
    """Return the pixels of the longer side at which features are found for a run on images of the size ``trained``.

    full: the cameras at full size. The default of ``splat sfm`` where that is no more, so that its results are alike.
    """
    side, whole = (max(max(one.width, one.height) for one in cameras) for cameras in (trained, full))
    size, most = max(_LEAST_SIDE, _FINER * side), SfmOptions().max_image_size
    return size if size < min(whole, most) else most


def _seconds_for(full: Sequence[Camera], side: int) -> float:
    """Return about how long it takes to triangulate points from features on images of ``side`` pixels."""
    scales = [min(1.0, side / max(one.width, one.height)) for one in full]
    pixels = sum(one.width * one.height * scale**2 for one, scale in zip(full, scales, strict=True))
    return _START_SECONDS + _PIXEL_SECONDS * 1e-6 * pixels / machine.cores()


class TooSlowError(SceneError):
    """Structure from motion takes longer than it may. needed: seconds that it takes at its speed; 0 where unknown."""

    def __init__(self, seconds: float, needed: float = 0.0) -> None:
        super().__init__(f"that takes more than {seconds:.0f} s here, which --max-time does not leave for it")
        self.needed = needed


class Deadline:
    """Ends structure from motion for a run that has no time to wait for it. progress: hears of the rest."""

    #: Images and seconds after which the time of all images is known, and what the rest takes in units of that.
    _KNOWN_IMAGES, _KNOWN_SECONDS, _REST = 4, 2.0, 1.7

    def __init__(self, seconds: float, progress: Listener) -> None:
        self._progress = progress
        self._seconds = seconds
        self._began = time.monotonic()
        self._first: tuple[float, int] | None = None

    def __call__(self, phase: str, done: int, total: int) -> None:
        """Pass a report on. Raises TooSlowError when the time is over, or will not suffice at this speed."""
        now = time.monotonic()
        if now - self._began > self._seconds:
            raise TooSlowError(self._seconds)
        if phase == "features":
            since, first = self._first = self._first or (now, done)
            if done - first >= self._KNOWN_IMAGES and now - since >= self._KNOWN_SECONDS:
                features = total * (now - since) / (done - first)
                needed = since - self._began + features * (1.0 + self._REST)
                if needed > self._seconds:
                    raise TooSlowError(self._seconds, needed)
        self._progress(phase, done, total)


def with_fewer_features(options: SfmOptions, slow: TooSlowError, seconds: float) -> SfmOptions | None:
    """Return the options with which ``seconds`` are likely to suffice, after others were too slow; None without any."""
    for side in _SHORT_OF_TIME:
        needed = slow.needed * (side / options.max_image_size) ** 2
        if side < options.max_image_size and 0.0 < needed <= seconds:
            return replace(options, max_image_size=side)
    return None
