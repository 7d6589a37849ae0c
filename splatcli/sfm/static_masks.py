"""Masks of what is not of the scene: what stands still, as the background of a turntable, watermarks, parts of the
vehicle; and black borders, such as letterbox bars.

Features that do not move (stationary.py) say that the images have such regions. In a pixel of one, the same colour
comes back in many images: the colour that most of them share, within a tolerance, is that of the region, and an image
that has it there shows the region, not the scene. Regions without any of these features, such as a sky that is white
everywhere, are not hidden.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

from splatcli.errors import SceneError
from splatcli.scene.borders import black_borders, may_have_borders, sure_borders
from splatcli.scene.decode import decode_rgb
from splatcli.sfm.features import Border, SfmImage
from splatcli.sfm.stationary import Places, Size

#: Images that are compared, at most, and pixels of the longer side at which they are.
_MOST, _SIDE = 24, 320
#: Levels of 255 by which a colour may differ from that of the region; share of the images that have it, at least.
_OFF, _SHARE = 12.0, 0.4
#: Features that a region has, at least; share of the pixels below which spots of either kind are taken for the other.
_PLACES, _SPOT = 4, 0.002

#: Images of a size in which borders are looked for, at least; lines beside one that mix it with the picture, at least,
#: and in parts of the longer side.
_FEWEST, _MIXED, _MIXED_SHARE = 8, 2, 0.003
#: Pixels by which borders of one group differ.
_ALIKE = 2
_NONE: Border = (0, 0, 0, 0)

Bools = NDArray[np.bool_]


def write_static_masks(
    images: Sequence[SfmImage], places: Places, folder: Path, progress: Callable[[int, int], None], threads: int = 1
) -> int:
    """Write a mask of each image as ``folder``/NAME.png, where what stands still is black; return how many.

    places: of the features that do not move, for each size of images. Borders of images are black too. Masks are
    upright, as the images are worked on.
    Where nothing would be hidden, none are written, and the result is 0. Raises SceneError as decode_rgb() does.
    """

    def write(image: SfmImage) -> None:
        size = image.width, image.height
        shown = np.ones((1, 1), np.bool_)
        if size in regions:
            shown = _without_spots(~_still(_reduced(image), *regions[size]))
        mask = Image.fromarray(shown.astype(np.uint8) * np.uint8(255)).resize(size, Image.Resampling.NEAREST)
        if any(image.border):
            top, bottom, left, right = image.border
            picture = (left, top, size[0] - right, size[1] - bottom)
            framed = Image.new("L", size)
            framed.paste(mask.crop(picture), picture[:2])
            mask = framed
        path = folder / f"{image.name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        mask.save(path)

    with ThreadPoolExecutor(threads) as pool:
        each = {size: _region(images, size, where, pool) for size, where in places.items()}
        regions = {size: region for size, region in each.items() if region is not None}
        if not regions and not any(any(image.border) for image in images):
            return 0
        for done, _ in enumerate(pool.map(write, images)):
            progress(done + 1, len(images))
    return len(images)


def find_borders(images: Sequence[SfmImage], threads: int = 1) -> dict[str, Border]:
    """Return the black borders of the images that have some, with the lines beside that mix both, by their names.

    Borders are those that all images of a size have, or else a group of several, as of portraits among landscapes of
    one canvas. Images that cannot be decoded say nothing.
    """
    found: dict[str, Border] = {}
    with ThreadPoolExecutor(threads) as pool:
        for size in {(image.width, image.height): None for image in images}:
            alike = [image for image in images if (image.width, image.height) == size]
            if len(alike) < _FEWEST:
                continue
            few = _pixels([alike[0], alike[len(alike) // 2], alike[-1]])
            groups = [alike] if few and may_have_borders(few) else []
            border = _sure(alike, size) if groups else _NONE
            if any(border):
                found |= dict.fromkeys((image.name for image in alike), border)
                continue
            for group in _groups(alike, pool):
                border = _sure(group, size)
                if any(border):
                    found |= dict.fromkeys((image.name for image in group), border)
    return found


def _sure(images: Sequence[SfmImage], size: Size) -> Border:
    """Return the border that images of a size have in common, with the lines that mix it with the picture."""
    mixed = max(_MIXED, round(_MIXED_SHARE * max(size)))
    pixels = _pixels(_evenly(images))
    top, bottom, left, right = (count + mixed if count else 0 for count in sure_borders(pixels)) if pixels else _NONE
    return top, bottom, left, right


def _groups(images: Sequence[SfmImage], pool: Executor) -> list[list[SfmImage]]:
    """Return groups of images whose own borders are alike; all are read only if some of 24 have one."""
    if not any(map(any, pool.map(_own_border, _evenly(images)))):
        return []
    groups: dict[Border, list[SfmImage]] = {}
    for image, border in zip(images, pool.map(_own_border, images), strict=True):
        same = next(
            (one for one in groups if max(abs(i - j) for i, j in zip(one, border, strict=True)) <= _ALIKE), border
        )
        if any(border):
            groups.setdefault(same, []).append(image)
    return [group for group in groups.values() if len(group) >= _FEWEST]


def _own_border(image: SfmImage) -> Border:
    return next(iter(black_borders([pixels]) for pixels in _pixels([image])), _NONE)


def _evenly(images: Sequence[SfmImage]) -> list[SfmImage]:
    chosen = np.unique(np.linspace(0, len(images) - 1, min(len(images), _MOST)).round().astype(int))
    return [images[i] for i in chosen]


def _pixels(images: Sequence[SfmImage]) -> list[NDArray[np.uint8]]:
    found = []
    for image in images:
        with contextlib.suppress(SceneError):
            found.append(decode_rgb(image.path, (0, 0, 0), image.orientation))
    return found


def _region(
    images: Sequence[SfmImage], size: Size, places: NDArray[np.float32], pool: Executor
) -> tuple[NDArray[np.float32], Bools] | None:
    """Return the colours [h, w, 3] of what stands still, and where that is, [h, w]; None where nothing does."""
    alike = [image for image in images if (image.width, image.height) == size]
    pixels = np.stack([*pool.map(_reduced, _evenly(alike))])
    most, colours = np.zeros(pixels.shape[1:3], np.int64), np.zeros(pixels.shape[1:], np.float32)
    for one in pixels:
        near = (np.abs(pixels - one) < _OFF).all(axis=-1)
        count = near.sum(axis=0)
        better = count > most
        most[better] = count[better]
        mean = (pixels * near[..., None]).sum(axis=0) / count[..., None]
        colours[better] = mean[better]
    still = most >= max(3.0, _SHARE * len(pixels))
    parts, number = ndimage.label(still, np.ones((3, 3)))
    scale = np.array([pixels.shape[2] / size[0], pixels.shape[1] / size[1]])
    column, row = np.minimum((places * scale).astype(np.int64), [pixels.shape[2] - 1, pixels.shape[1] - 1]).T
    counts = np.bincount(parts[row, column], minlength=number + 1)
    counts[0] = 0
    still &= (counts >= _PLACES)[parts]
    return (colours, still) if still.any() else None


def _still(pixels: NDArray[np.float32], colours: NDArray[np.float32], region: Bools) -> Bools:
    """Return [h, w], where an image shows what stands still."""
    return np.asarray(region & (np.abs(pixels - colours) < _OFF).all(axis=-1))


def _without_spots(shown: Bools) -> Bools:
    """Return a mask without small spots, neither shown nor hidden: noise, or colours that are alike by chance."""
    shown = ndimage.binary_opening(shown, np.ones((3, 3)))
    for value in (True, False):
        parts, _ = ndimage.label(shown == value)
        sizes = np.bincount(parts.ravel())
        small = sizes < _SPOT * shown.size
        small[0] = False
        shown = np.where(small[parts], not value, shown)
    return shown


def _reduced(image: SfmImage) -> NDArray[np.float32]:
    picture = Image.fromarray(decode_rgb(image.path, (0, 0, 0), image.orientation))
    scale = min(1.0, _SIDE / max(picture.size))
    size = max(1, round(scale * picture.width)), max(1, round(scale * picture.height))
    return np.asarray(picture.resize(size, Image.Resampling.BOX), dtype=np.float32)
