"""ImageStore: the images of a scene as uint8 arrays, decoded when asked for and kept under a budget of bytes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from splatcli import machine
from splatcli.errors import SceneError
from splatcli.progress import track
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.camera import Camera
from splatcli.scene.decode import DECODE_BYTES, Rgb, composite, decode, read_header
from splatcli.scene.depth_maps import DepthFile, read_depth_map, reduce_depths, resample_depths
from splatcli.scene.masks import read_mask, read_mask_as_alpha, reduce_mask, resample_mask
from splatcli.scene.panorama import PanoramaFace
from splatcli.scene.undistort import blank, lens_key, panorama_part, resample, sampling_grid

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

#: Bytes that sampling grids of distorted lenses may take beside the images; one 1600x1200 grid is 15 MB.
GRID_BYTES = 256 << 20

#: The filter of every reduction: Pillow widens it with the factor, so that it averages over the area it covers.
REDUCE = Image.Resampling.LANCZOS

#: Images that may be decoded at a time in the background, and the number worth asking for ahead.
AHEAD = 4

#: Alpha below this hides a pixel where transparency is the mask.
OPAQUE = 128

_BLACK: Rgb = (0, 0, 0)

#: Images masked altogether that are reported by name.
_REPORTED = 5

#: Bytes a pixel of a known depth.
_DEPTH_BYTES = 4

_V = TypeVar("_V")


@dataclass(frozen=True, slots=True, eq=False)
class ImageSource:
    """One image on disk, and how it becomes the picture of its camera.

    stored: width and height in the file, after ``orientation`` has been applied.
    reduced: width and height to which the image is resized before the lens is undone (if there is one).
    lens: the distorted camera of the image, or the face of a panorama; None when the image is a pinhole's.
    view: the name of the image's view. The camera's is another one for a face of a panorama, which has several.
    mask: the file that says what is masked, or None; ``mask_orientation`` is applied to it.
    depth: the map of its depths, or None.
    """

    path: Path
    camera: Camera
    stored: tuple[int, int]
    reduced: tuple[int, int]
    view: str
    lens: pycolmap.Camera | PanoramaFace | None = None
    orientation: int = 1
    mask: Path | None = None
    mask_orientation: int = 1
    depth: DepthFile | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LoadedImage:
    """An image at its camera's size. The arrays are shared and must not be written.

    pixels: [H, W, 3] uint8, C-contiguous; masked ones are black.
    masked: [H, W] bool, True where a pixel takes no part in anything, or a fisheye's lens sees nothing; None where all
        of them count.
    alpha: [H, W] uint8, 255 where nothing shows through; pixels are over black then, and the background is to be added
        (train/training_images.py). None where pixels are the picture as it is.
    depth: [H, W] float32 camera-space z in world units, 0 where it is not known; None where there is no map.
    opaque: whether the picture has no transparency; pixels may be over a background.
    """

    pixels: NDArray[np.uint8]
    masked: NDArray[np.bool_] | None = None
    alpha: NDArray[np.uint8] | None = None
    depth: NDArray[np.float32] | None = None
    opaque: bool = True

    @property
    def nbytes(self) -> int:
        parts = (self.pixels, self.masked, self.alpha, self.depth)
        return sum(0 if part is None else part.nbytes for part in parts)


class ByteCache:
    """The first values that fit a budget of bytes. Thread-safe.

    What is kept stays: a pass over a scene asks for each image once, in an order that the next pass does not repeat, so
    that making room for the newest would throw out what is asked for next.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used = 0
        self._entries: dict[Hashable, object] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], _V], size: Callable[[_V], int]) -> _V:
        """Return the value under ``key``, made (outside the lock) when absent; keep it if there is room for it."""
        with self._lock:
            if key in self._entries:
                return self._entries[key]  # type: ignore[return-value]
        value = make()
        nbytes = size(value)
        with self._lock:
            if key not in self._entries and self.used + nbytes <= self.budget:
                self._entries[key] = value
                self.used += nbytes
        return value

    def __contains__(self, key: Hashable) -> bool:
        with self._lock:
            return key in self._entries

    def has_room(self, nbytes: int) -> bool:
        """Return whether a value of so many bytes would be kept."""
        with self._lock:
            return self.used + nbytes <= self.budget


@dataclass(frozen=True, slots=True, eq=False)
class Panorama:
    """The faces of one panorama, which share its file, as indices; and the lock under which the file is decoded."""

    faces: list[int] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class ImageStore:
    """The images of a scene, by the index of their camera. Thread-safe. A pickle or copy holds no decoded image.

    background: R G B, under what is transparent; None keeps its alpha, for who has a new background each time.
    budget: bytes of decoded images that may stay in memory.
    alpha_is_mask: what is transparent in an image is masked, instead of showing the background.
    mask_is_alpha: what a mask hides is transparent, instead of masked.
    """

    def __init__(
        self,
        sources: list[ImageSource],
        background: Rgb | None,
        budget: int,
        *,
        alpha_is_mask: bool = False,
        mask_is_alpha: bool = False,
    ) -> None:
        self.sources = sources
        self.background = background
        self.alpha_is_mask = alpha_is_mask
        self.mask_is_alpha = mask_is_alpha
        # Sources do not change, and scores ask for each view.
        self._has_masks = any(source.mask is not None for source in sources)
        self._has_depths = any(source.depth is not None for source in sources)
        self._has_blanks = any(source.camera.model == "fisheye" for source in sources)
        self._images = ByteCache(budget)
        self._grids = ByteCache(GRID_BYTES)
        self._workers: ThreadPoolExecutor | None = None
        self._pending: dict[int, Future[LoadedImage]] = {}
        self._all_masked: set[int] = set()
        self._lock = threading.Lock()
        self._panoramas: dict[str, Panorama] = {}
        for i, source in enumerate(sources):
            if isinstance(source.lens, PanoramaFace):
                self._panoramas.setdefault(source.view, Panorama()).faces.append(i)

    def __reduce__(self) -> tuple[Callable[..., ImageStore], tuple[object, ...]]:
        return partial(ImageStore, alpha_is_mask=self.alpha_is_mask, mask_is_alpha=self.mask_is_alpha), (
            self.sources,
            self.background,
            self._images.budget,
        )

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def masked(self) -> bool:
        """Whether pixels may be masked."""
        return self._has_blanks or self.alpha_is_mask or (self.has_masks and not self.mask_is_alpha)

    @property
    def has_masks(self) -> bool:
        """Whether there are files of masks."""
        return self._has_masks

    @property
    def has_depths(self) -> bool:
        """Whether there are maps of depths."""
        return self._has_depths

    def has_depth(self, i: int) -> bool:
        """Return whether image ``i`` has a depth map."""
        return self.sources[i].depth is not None

    def may_be_transparent(self, i: int) -> bool:
        """Return whether image ``i`` can have alpha, read from its header. Raises SceneError."""
        source = self.sources[i]
        if source.mask is not None and self.mask_is_alpha:
            return True
        return not self.alpha_is_mask and read_header(source.path).has_alpha

    def of(self, sources: list[ImageSource]) -> ImageStore:
        """Return a store of other images that is otherwise alike."""
        return self._alike(sources, self.background, self._images.budget)

    def over(self, background: Rgb | None) -> ImageStore:
        """Return a store of the same images with another background under what is transparent; None keeps its alpha."""
        return self._alike(self.sources, background, self._images.budget)

    def with_alpha(self) -> ImageStore:
        """Return a store of the same images that leaves transparency as it is, and keeps none of them in memory."""
        return self._alike(self.sources, None, 0)

    def _alike(self, sources: list[ImageSource], background: Rgb | None, budget: int) -> ImageStore:
        masks = {"alpha_is_mask": self.alpha_is_mask, "mask_is_alpha": self.mask_is_alpha}
        return ImageStore(sources, background, budget, **masks)

    def limit(self, nbytes: int) -> None:
        """Keep no more than ``nbytes`` bytes of images from now on."""
        self._images.budget = min(self._images.budget, nbytes)

    def max_bytes(self) -> int:
        """Return the most bytes of images: those that are kept and those being decoded."""
        sizes = [source.camera.width * source.camera.height for source in self.sources]
        depths = _DEPTH_BYTES * self.has_depths
        images = (3 + self.masked + (self.background is None) + depths) * sum(sizes)
        stored = max((source.stored[0] * source.stored[1] for source in self.sources), default=0)
        return min(images, self._images.budget) + self._parallel() * stored * (DECODE_BYTES + depths)

    def has(self, i: int) -> bool:
        """Return whether the file is (still) there."""
        return self.sources[i].path.is_file()

    def load(self, i: int) -> NDArray[np.uint8]:
        """Return the pixels of image ``i``, [H, W, 3]. Raises SceneError when it or its mask is damaged."""
        return self.image(i).pixels

    def image(self, i: int) -> LoadedImage:
        """Return image ``i`` with what is masked in it. Raises SceneError when it or its mask is damaged."""
        with self._lock:
            pending = self._pending.pop(i, None)
        if pending is not None:
            return pending.result()
        return self._cached(i)

    def prefetch(self, i: int) -> None:
        """Start decoding image ``i`` in the background; an error surfaces when it is loaded.

        At most 2 * AHEAD images wait for image(), those of a step and those after it; the oldest gives way to another.
        """
        with self._lock:
            if i in self._pending or i in self._images:
                return
            if len(self._pending) >= 2 * AHEAD:
                self._pending.pop(next(iter(self._pending))).cancel()
            if self._workers is None:
                self._workers = ThreadPoolExecutor(self._parallel(), thread_name_prefix="splat-images")
            self._pending[i] = self._workers.submit(self._cached, i)

    def close(self) -> None:
        """Let the background workers finish, and end them; the next ``prefetch`` starts others."""
        with self._lock:
            workers, self._workers = self._workers, None
        if workers is not None:
            workers.shutdown(wait=True)

    def relative_depth(self, i: int) -> NDArray[np.float32]:
        """Return the numbers of the relative map of image ``i``, [H, W] at its camera's size. Raises SceneError."""
        source = self.sources[i]
        assert source.depth is not None
        depths = self._depth(replace(source, depth=replace(source.depth, fit=None)))
        assert depths is not None
        return depths

    def damaged(self) -> dict[int, SceneError]:
        """Decode every image and mask in full, keeping none; return the errors of those that cannot be, by index.

        A panorama is decoded once, and its error is that of all its faces.
        """
        first: dict[str, int] = {}
        for i, source in enumerate(self.sources):
            first.setdefault(source.view, i)

        def problem(i: int) -> SceneError | None:
            try:
                self._decode(i)
            except SceneError as error:
                return error
            return None

        with ThreadPoolExecutor(self._parallel()) as workers:
            decoded = track(workers.map(problem, first.values()), "decoding images", len(first))
            errors = dict(zip(first, decoded, strict=True))
        found = ((i, errors[source.view]) for i, source in enumerate(self.sources))
        return {i: error for i, error in found if error is not None}

    def _parallel(self) -> int:
        """Return the number of images that are decoded at a time: as many as memory allows for the largest."""
        largest = max((source.stored[0] * source.stored[1] for source in self.sources), default=1)
        return max(1, min(AHEAD, machine.cores(), max_pixels(None) // largest))

    def _cached(self, i: int) -> LoadedImage:
        panorama = self._panoramas.get(self.sources[i].view)
        if panorama is None:
            return self._images.get(i, lambda: self._decode(i), _nbytes)
        with panorama.lock:
            return self._images.get(i, lambda: self._decode_faces(i, panorama.faces), _nbytes)

    def _decode_faces(self, i: int, faces: list[int]) -> LoadedImage:
        """Return face ``i`` of a panorama, and keep those of its other ``faces`` that there is room for."""
        decoded = self._reduced(self.sources[i])
        made = self._seen(i, *decoded)
        for j in faces:
            if j != i and self._images.has_room(2 * made.nbytes):  # ``i`` has to fit, too
                self._images.get(j, partial(self._seen, j, *decoded), _nbytes)
        return made

    def _decode(self, i: int) -> LoadedImage:
        return self._seen(i, *self._reduced(self.sources[i]))

    def _reduced(
        self, source: ImageSource
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8] | None, NDArray[np.bool_] | None, bool]:
        """Return pixels [H, W, 3], alpha and mask [H, W] at the size to which an image is reduced; whether all opaque.

        Alpha is None where the background is known or everything is opaque, the mask where all counts.
        """
        below = _BLACK if self.background is None else self.background
        decoded = decode(source.path, None if self.alpha_is_mask else below, source.orientation, source.stored)
        rgb, alpha, masked = decoded.rgb, decoded.alpha, None
        if self.alpha_is_mask and alpha is not None:
            masked, alpha = alpha < OPAQUE, None
        elif source.mask is not None and self.mask_is_alpha:
            opacity = read_mask_as_alpha(source.mask, source.mask_orientation, source.stored)
            rgb = composite(rgb, opacity, below)
            alpha = opacity if alpha is None else composite(alpha[..., None], opacity, _BLACK[:1])[..., 0]
        elif source.mask is not None:
            masked = read_mask(source.mask, source.mask_orientation)
        opaque = alpha is None or bool((alpha == 255).all())
        if self.background is not None:
            alpha = None  # it has done its work
        if source.reduced != source.stored:
            rgb = np.array(Image.fromarray(rgb).resize(source.reduced, REDUCE))
            alpha = None if alpha is None else np.array(Image.fromarray(alpha).resize(source.reduced, REDUCE))
        if masked is not None:
            masked = reduce_mask(masked, source.reduced)
        return rgb, alpha, masked, opaque

    def _seen(
        self,
        i: int,
        rgb: NDArray[np.uint8],
        alpha: NDArray[np.uint8] | None,
        masked: NDArray[np.bool_] | None,
        opaque: bool,
    ) -> LoadedImage:
        """Return image ``i`` as its camera sees it, from what _reduced() returned."""
        source = self.sources[i]
        if source.lens is not None:
            grid = self._grid(source.lens, source.camera)
            if isinstance(source.lens, PanoramaFace):
                part, grid = panorama_part(grid, *source.reduced)
                rgb = rgb[part]
                masked = None if masked is None else masked[part]
                alpha = None if alpha is None else alpha[part]
            rgb = resample(rgb, grid)
            masked = None if masked is None else resample_mask(masked, grid)
            alpha = None if alpha is None else resample(alpha[..., None], grid)[..., 0]
            if (unseen := blank(grid)) is not None:
                masked = unseen if masked is None else masked | unseen
        rgb = np.ascontiguousarray(rgb)
        if masked is not None:
            rgb[masked] = 0
            self._warn_if_all(masked, i)
        alpha = None if alpha is None else np.ascontiguousarray(alpha)
        return LoadedImage(rgb, masked, alpha, self._depth(source), opaque)

    def _depth(self, source: ImageSource) -> NDArray[np.float32] | None:
        if source.depth is None:
            return None
        depths = read_depth_map(source.depth)
        if source.lens is not None:  # z of the lens is z of its camera: both look the same way
            return resample_depths(depths, self._grid(source.lens, source.camera))
        return reduce_depths(depths, (source.camera.width, source.camera.height))

    def _warn_if_all(self, masked: NDArray[np.bool_], i: int) -> None:
        if not masked.all():
            return
        with self._lock:
            known, reported = i in self._all_masked, len(self._all_masked)
            self._all_masked.add(i)
        if not known and reported < _REPORTED:
            more = "; more images like it are not reported" if reported == _REPORTED - 1 else ""
            source = self.sources[i]
            _log.warning(
                "%s hides all of %s: none of its pixels counts%s", source.mask or "alpha", source.camera.name, more
            )

    def _grid(self, lens: pycolmap.Camera | PanoramaFace, camera: Camera) -> Tensor:
        key = (lens_key(lens), camera.width, camera.height)
        return self._grids.get(key, lambda: sampling_grid(lens, camera), lambda grid: grid.nbytes)


def _nbytes(image: LoadedImage) -> int:
    return image.nbytes


#: Decoded images that stay in memory may take this part of it: the rest is for Gaussians, pairs and other programs.
CACHE_SHARE = 0.25
#: One image that is being decoded may take this part.
IMAGE_SHARE = 0.25


def cache_bytes(asked: int | None) -> int:
    """Return the bytes of decoded images that may stay in memory: as asked, else this machine's share."""
    return int(CACHE_SHARE * machine.total_memory()) if asked is None else asked


def max_pixels(asked: int | None) -> int:
    """Return the number of pixels that one image may have: as asked, else what this machine's share can decode."""
    return int(IMAGE_SHARE * machine.total_memory()) // DECODE_BYTES if asked is None else asked
