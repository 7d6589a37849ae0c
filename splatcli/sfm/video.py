"""Frames of a video, as PNG files: read through imageio, with its ffmpeg plugin or pyav, whichever is there."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import imageio.v3 as imageio
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import laplace

from splatcli.errors import ResourceError, SceneError
from splatcli.sfm.gaps import frame_name

#: Packages that read videos -> imageio's name of the plugin; the first turns frames as the phone was held.
_PLUGINS = {"imageio_ffmpeg": "FFMPEG", "av": "pyav"}


def write_frames(video: Path, folder: Path, count: int, progress: Callable[[int, int], None]) -> list[str]:
    """Write the sharpest frame of each of ``count`` equal stretches, as frame_000123.png; numbers are the video's.

    progress: hears frames read, and how many the video says it has. Raises SceneError for what is no video,
    ResourceError without a package that reads any.
    """
    with _opened(video) as plugin:
        total = _num_frames(imageio.immeta(video, plugin=plugin), count)
        scored = _scored(imageio.imiter(video, plugin=plugin), total, progress)
        return _written(sharpest(scored, total, count), folder)


def write_more_frames(
    video: Path, folder: Path, stretches: Sequence[range], progress: Callable[[int, int], None]
) -> list[str]:
    """Write the sharpest frame of each range of frame indices, as write_frames(); return the names.

    stretches: disjoint, ascending. The video is read up to the end of the last one.
    """
    numbers = {index: number for number, stretch in enumerate(stretches) for index in stretch}
    total = max(numbers, default=-1) + 1
    with _opened(video) as plugin, ExitStack() as stack:
        frames: Any = imageio.imiter(video, plugin=plugin)
        stack.callback(frames.close)
        scored = _scored(islice(frames, total), total, progress, only=numbers)
        return _written(_best_of_each(((numbers[item[0]], item, score) for item, score in scored)), folder)


@contextmanager
def _opened(video: Path) -> Iterator[str]:
    """Give imageio's name of the plugin to read a video with. Raises what write_frames() does for errors within."""
    plugin = next((name for package, name in _PLUGINS.items() if importlib.util.find_spec(package)), None)
    if plugin is None:
        raise ResourceError(
            "no package that reads videos is installed",
            where=video,
            remedy="pip install 'splatcli[video]'; or make images of it: ffmpeg -i VIDEO -vf fps=2 photos/%06d.png",
        )
    try:
        yield plugin
    except (OSError, ValueError, RuntimeError, IndexError, KeyError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise SceneError(
            f"cannot be read as a video: {reason}", where=video, remedy="try it in a player; copy it again"
        ) from None


Frame = tuple[int, NDArray[np.uint8]]


def _written(frames: Iterable[Frame], folder: Path) -> list[str]:
    names = []
    for index, frame in frames:
        names.append(frame_name(index))
        # Level 1: a frame is read twice more and then stays; a third of the time for a tenth of the room.
        Image.fromarray(frame).save(folder / names[-1], compress_level=1)
    return names


def _num_frames(meta: dict[str, Any], count: int) -> int:
    """Return how many frames a video says it has; ``count`` where it does not say, which keeps all up to that."""
    said = meta.get("nframes", math.inf)
    if math.isfinite(said) and said >= 1:
        return int(said)
    length = float(meta.get("duration") or 0) * float(meta.get("fps") or 0)
    return max(1, round(length)) if math.isfinite(length) and length >= 1 else count


def _scored(
    frames: Iterable[NDArray[np.uint8]],
    total: int,
    progress: Callable[[int, int], None],
    only: Container[int] | None = None,
) -> Iterator[tuple[Frame, float]]:
    """Give the frames, all or those whose index is in ``only``, with their sharpness."""
    for index, frame in enumerate(frames):
        progress(index + 1, max(total, index + 1))
        if only is None or index in only:
            yield (index, frame), sharpness(frame)


#: The longer side, in pixels, at which sharpness is judged: noise of single pixels does not count as detail.
_JUDGED_AT = 512

Item = TypeVar("Item")


def sharpness(rgb: NDArray[np.uint8]) -> float:
    """Return the variance of the Laplacian of the luminance, [H, W, 3] or [H, W]; larger is sharper, 0 is flat."""
    picture = Image.fromarray(rgb).convert("L")
    picture.thumbnail((_JUDGED_AT, _JUDGED_AT), Image.Resampling.BOX)
    return float(laplace(np.asarray(picture, dtype=np.float32)).var())


def sharpest(scored: Iterable[tuple[Item, float]], total: int, count: int) -> Iterator[Item]:
    """Return the item with the highest score of each of ``count`` equal stretches of ``total`` items, in order.

    The first among equals. Only one item is held at a time. Where there are more items than ``total`` the last
    stretch is longer, where there are fewer some stretches stay empty.
    """
    count = min(count, total)
    return _best_of_each(
        (min(index * count // total, count - 1), item, score) for index, (item, score) in enumerate(scored)
    )


def _best_of_each(scored: Iterable[tuple[int, Item, float]]) -> Iterator[Item]:
    """Yield the item with the highest score of each stretch, the first among equals; numbers of stretches ascend."""
    for _, stretch in groupby(scored, key=itemgetter(0)):
        yield max(stretch, key=itemgetter(2))[1]
