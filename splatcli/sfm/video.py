"""Frames of a video, as PNG files: read through imageio, with its ffmpeg plugin or pyav, whichever is there."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from splatcli.errors import ResourceError, SceneError
from splatcli.sfm.sharpness import sharpest, sharpness

#: Packages that read videos -> imageio's name of the plugin; the first turns frames as the phone was held.
_PLUGINS = {"imageio_ffmpeg": "FFMPEG", "av": "pyav"}


def write_frames(video: Path, folder: Path, count: int, progress: Callable[[int, int], None]) -> list[str]:
    """The sharpest frame of each of ``count`` equal stretches, as frame_000123.png; the number is that in the video.

    progress: hears frames read, and how many the video says it has. Raises SceneError for what is no video,
    ResourceError without a package that reads any.
    """
    plugin = next((name for package, name in _PLUGINS.items() if importlib.util.find_spec(package)), None)
    if plugin is None:
        raise ResourceError(
            "no package that reads videos is installed",
            where=video,
            remedy="pip install 'splatcli[video]'; or make photos of it: ffmpeg -i VIDEO -vf fps=2 photos/%06d.png",
        )
    try:
        total = _num_frames(imageio.immeta(video, plugin=plugin), count)
        scored = _scored(imageio.imiter(video, plugin=plugin), total, progress)
        names = []
        for index, frame in sharpest(scored, total, count):
            names.append(f"frame_{index:06d}.png")
            # Level 1: a frame is read twice more and then stays; a third of the time for a tenth of the room.
            Image.fromarray(frame).save(folder / names[-1], compress_level=1)
    except (OSError, ValueError, RuntimeError, IndexError, KeyError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise SceneError(
            f"cannot be read as a video: {reason}", where=video, remedy="try it in a player; copy it again"
        ) from None
    return names


def _num_frames(meta: dict[str, Any], count: int) -> int:
    """Frames that a video says it has; ``count`` where it does not say, which keeps all up to that number."""
    said = meta.get("nframes", math.inf)
    if math.isfinite(said) and said >= 1:
        return int(said)
    length = float(meta.get("duration") or 0) * float(meta.get("fps") or 0)
    return max(1, round(length)) if math.isfinite(length) and length >= 1 else count


def _scored(
    frames: Iterator[NDArray[np.uint8]], total: int, progress: Callable[[int, int], None]
) -> Iterator[tuple[tuple[int, NDArray[np.uint8]], float]]:
    for index, frame in enumerate(frames):
        progress(index + 1, max(total, index + 1))
        yield (index, frame), sharpness(frame)
