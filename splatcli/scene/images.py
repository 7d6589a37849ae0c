"""ImageStore: the photos of a scene as uint8 arrays, decoded when asked for and kept under a budget of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from splatcli.errors import SceneError
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.camera import Camera
from splatcli.scene.decode import decode_rgb
from splatcli.scene.undistort import lens_key, resample, sampling_grid

#: Bytes that sampling grids of distorted lenses may take beside the images; one 1600x1200 grid is 15 MB.
GRID_BYTES = 256 << 20

#: The filter of every reduction: Pillow widens it with the factor, so that it averages over the area it covers.
REDUCE = Image.Resampling.LANCZOS

_V = TypeVar("_V")


@dataclass(frozen=True, slots=True, eq=False)
class ImageSource:
    """One photo on disk, and how it becomes the picture of its camera.

    stored: width and height in the file, after ``orientation`` has been applied.
    reduced: width and height to which the photo is resized before the lens is undone (if there is one).
    lens: the distorted camera of the photo, or None when the photo is a pinhole's.
    """

    path: Path
    camera: Camera
    stored: tuple[int, int]
    reduced: tuple[int, int]
    lens: pycolmap.Camera | None = None
    orientation: int = 1


class ByteCache:
    """Least-recently-used values under a budget of bytes. Thread-safe."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used = 0
        self._entries: OrderedDict[Hashable, tuple[object, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], _V], size: Callable[[_V], int]) -> _V:
        """The value under ``key``, made (outside the lock) when absent; kept if it fits the budget at all."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key][0]  # type: ignore[return-value]
        value = make()
        nbytes = size(value)
        with self._lock:
            if key not in self._entries and nbytes <= self.budget:
                self._entries[key] = (value, nbytes)
                self.used += nbytes
                while self.used > self.budget:
                    _, (_, freed) = self._entries.popitem(last=False)
                    self.used -= freed
        return value

    def __contains__(self, key: Hashable) -> bool:
        with self._lock:
            return key in self._entries


class ImageStore:
    """The photos of a scene, by the index of their camera. Thread-safe; arrays are shared and must not be written.

    background: R G B, under transparent photos.
    budget: bytes of decoded photos that may stay in memory.
    """

    def __init__(self, sources: list[ImageSource], background: tuple[int, int, int], budget: int) -> None:
        self.sources = sources
        self.background = background
        self._images = ByteCache(budget)
        self._grids = ByteCache(GRID_BYTES)
        self._worker: ThreadPoolExecutor | None = None
        self._pending: dict[int, Future[NDArray[np.uint8]]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.sources)

    def has(self, i: int) -> bool:
        """Whether the file is (still) there."""
        return self.sources[i].path.is_file()

    def load(self, i: int) -> NDArray[np.uint8]:
        """Photo ``i`` at its camera's size: [H, W, 3] uint8, C-contiguous. Raises SceneError when it is damaged."""
        with self._lock:
            pending = self._pending.pop(i, None)
        if pending is not None:
            return pending.result()
        return self._cached(i)

    def prefetch(self, i: int) -> None:
        """Starts decoding photo ``i`` in the background; an error surfaces when it is loaded."""
        with self._lock:
            if i in self._pending or i in self._images:
                return
            if self._worker is None:
                self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="splat-images")
            self._pending[i] = self._worker.submit(self._cached, i)

    def close(self) -> None:
        """Lets the background worker finish and ends it; the next ``prefetch`` starts another."""
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown(wait=True)

    def _cached(self, i: int) -> NDArray[np.uint8]:
        return self._images.get(i, lambda: self._decode(self.sources[i]), lambda image: image.nbytes)

    def _decode(self, source: ImageSource) -> NDArray[np.uint8]:
        rgb = decode_rgb(source.path, self.background, source.orientation)
        if (rgb.shape[1], rgb.shape[0]) != source.stored:
            raise SceneError(
                f"is {rgb.shape[1]}x{rgb.shape[0]} pixels now, it was {source.stored[0]}x{source.stored[1]} "
                "when the scene was read",
                where=source.path,
                remedy="start again; do not change photos during a run",
            )
        if source.reduced != source.stored:
            rgb = np.array(Image.fromarray(rgb).resize(source.reduced, REDUCE))
        if source.lens is not None:
            rgb = resample(rgb, self._grid(source.lens, source.camera))
        return np.ascontiguousarray(rgb)

    def _grid(self, lens: pycolmap.Camera, camera: Camera) -> Tensor:
        key = (lens_key(lens), camera.width, camera.height)
        return self._grids.get(key, lambda: sampling_grid(lens, camera), lambda grid: grid.nbytes)
