"""Masks of what is not of the scene: what stands still, as the background of a turntable or parts of the vehicle; what
is drawn on all images, as a date or a logo; and borders, such as letterbox bars.

Features that do not move (stationary.py) say that the images have regions that stand still. In a pixel of one, the same
colour comes back in many images: the colour that most of them share, within a tolerance, is that of the region, and an
image that has it there shows the region, not the scene. Regions without any of these features, such as a sky that is
white everywhere, are not hidden.

An overlay is in front of the scene in every image, so at its edges nearly all images have the same gradient, while the
gradients of a scene that moves have a median near zero (Dekel et al. 2017, "On the Effectiveness of Visible
Watermarks"). It is closed: its gradients point to all sides and cancel, where those of a horizon do not.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

from splatcli.errors import SceneError
from splatcli.scene.borders import black_borders, may_have_borders, sure_borders
from splatcli.scene.decode import decode_rgb
from splatcli.sfm.execution import Execution
from splatcli.sfm.features import Border, SfmImage
from splatcli.sfm.stationary import FEWEST_PLACES, Places, Size, boxes_of
from splatcli.sizes import evenly

Bools = NDArray[np.bool_]
Overlays = Mapping[Size, Bools]


@dataclass(frozen=True, slots=True, eq=False)
class StaticParts:
    """Parts of the images of a size that stay at one place while the camera moves.

    regions: places of features behind or beside the scene. overlays: what is drawn on the images. dropped: places
    around which features are dropped, those of both.
    """

    regions: Places
    overlays: Overlays
    dropped: Places

    @classmethod
    def of(cls, images: Sequence[SfmImage], places: Places, num_threads: int, *, drawn: bool) -> StaticParts:
        """Return the parts of images. places: of the features that do not move. drawn: whether overlays are sought."""
        overlays = find_overlays(images, places, num_threads) if drawn else {}
        points = {size: points_of(overlay, size) for size, overlay in overlays.items()}
        dropped = {
            size: np.concatenate([at for at in (places.get(size), points.get(size)) if at is not None])
            for size in {**places, **points}
        }
        return cls(outside(places, overlays), overlays, dropped)

    def facts(self, images: Sequence[SfmImage]) -> dict[str, list[dict[str, Any]]]:
        """Return the facts of the report. images: those that the parts are of."""
        count = Counter(image.size for image in images)

        def boxes(places: Places) -> list[dict[str, Any]]:
            return [
                {"width": size[0], "height": size[1], "images": count[size], "boxes": boxes_of(at, size)}
                for size, at in places.items()
            ]

        regions = zip(boxes(self.regions), self.regions.values(), strict=True)
        points = {size: points_of(overlay, size) for size, overlay in self.overlays.items()}
        return {"stationary": [{**fact, "places": len(at)} for fact, at in regions], "overlays": boxes(points)}


# --- what stands still ------------------------------------------------------------------------------------------------

#: Pixels of the longer side at which images are compared.
_STILL_SIDE = 320
#: Levels of 255 by which a colour may differ from that of the region.
_SAME_COLOUR = 12.0
#: Share of the images that have the colour of the region, at least.
_STILL_SHARE = 0.4
#: Features that a region has, at least.
_MIN_FEATURES = 4
#: Share of the pixels below which spots of either kind are taken for the other.
_SPOT_SHARE = 0.002


def write_static_masks(
    images: Sequence[SfmImage],
    places: Places,
    folder: Path,
    execution: Execution,
    overlays: Overlays = MappingProxyType({}),
) -> int:
    """Write a mask of each image as ``folder``/NAME.png, where what stands still is black; return how many.

    places: of the features that do not move, for each size of images. overlays: see find_overlays(). They and the
    borders of images are black too. Masks are upright, as the images are worked on.
    Where nothing would be hidden, none are written, and the result is 0. Raises SceneError as decode_rgb() does.
    """
    progress = execution.start("masks")

    def write(image: SfmImage) -> None:
        size = image.size
        shown = np.ones((1, 1), np.bool_)
        if size in regions:
            shown = _without_spots(~_still(_reduced(image), *regions[size]))
        mask = Image.fromarray(shown.astype(np.uint8) * np.uint8(255)).resize(size, Image.Resampling.NEAREST)
        if size in overlays:
            overlay = Image.fromarray(overlays[size].astype(np.uint8) * np.uint8(255))
            mask.paste(0, mask=overlay.resize(size, Image.Resampling.NEAREST))
        if any(image.border):
            top, bottom, left, right = image.border
            picture = (left, top, size[0] - right, size[1] - bottom)
            framed = Image.new("L", size)
            framed.paste(mask.crop(picture), picture[:2])
            mask = framed
        path = folder / f"{image.name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        mask.save(path)

    with ThreadPoolExecutor(execution.num_threads) as pool:
        each = {size: _region(images, size, where, pool) for size, where in places.items()}
        regions = {size: region for size, region in each.items() if region is not None}
        if not regions and not overlays and not any(any(image.border) for image in images):
            return 0
        for done, _ in enumerate(pool.map(write, images)):
            progress(done + 1, len(images))
    return len(images)


def _region(
    images: Sequence[SfmImage], size: Size, places: NDArray[np.float32], pool: Executor
) -> tuple[NDArray[np.float32], Bools] | None:
    """Return the colours [h, w, 3] of what stands still, and where that is, [h, w]; None where nothing does."""
    alike = [image for image in images if image.size == size]
    pixels = np.stack([*pool.map(_reduced, _compared(alike))])
    most, colours = np.zeros(pixels.shape[1:3], np.int64), np.zeros(pixels.shape[1:], np.float32)
    for one in pixels:
        near = (np.abs(pixels - one) < _SAME_COLOUR).all(axis=-1)
        count = near.sum(axis=0)
        better = count > most
        most[better] = count[better]
        mean = (pixels * near[..., None]).sum(axis=0) / count[..., None]
        colours[better] = mean[better]
    still = most >= max(3.0, _STILL_SHARE * len(pixels))
    parts, number = ndimage.label(still, np.ones((3, 3)))
    counts = np.bincount(parts[_on_grid(places, size, parts.shape)], minlength=number + 1)
    counts[0] = 0
    still &= (counts >= _MIN_FEATURES)[parts]
    return (colours, still) if still.any() else None


def _still(pixels: NDArray[np.float32], colours: NDArray[np.float32], region: Bools) -> Bools:
    """Return [h, w], where an image shows what stands still."""
    return np.asarray(region & (np.abs(pixels - colours) < _SAME_COLOUR).all(axis=-1))


def _without_spots(shown: Bools) -> Bools:
    """Return a mask without small spots, neither shown nor hidden: noise, or colours that are alike by chance."""
    shown = ndimage.binary_opening(shown, np.ones((3, 3)))
    for value in (True, False):
        parts, _ = ndimage.label(shown == value)
        sizes = np.bincount(parts.ravel())
        small = sizes < _SPOT_SHARE * shown.size
        small[0] = False
        shown = np.where(small[parts], not value, shown)
    return shown


def _reduced(image: SfmImage) -> NDArray[np.float32]:
    return _at_most(_STILL_SIDE, image).astype(np.float32)


# --- overlays: dates, logos, watermarks, borders of one colour --------------------------------------------------------

#: Images of a size in which overlays are looked for, at least. Eight that are near each other have as much in common.
_MIN_OVERLAID = 12
#: Pixels of the longer side at which overlays are looked for.
_OVERLAY_SIDE = 960
#: Pixel rows that are compared at once.
_ROWS_AT_ONCE = 64

#: Length of the median gradient at an overlay's edge, in levels over two pixels and all channels.
_EDGE_GRADIENT = 12.0
#: Share of the images whose gradient along it is at least half as long, or that have the same colour.
_AGREED_SHARE = 0.8
#: Neighbouring pixels that are an edge. Of seven real captures, no three such pixels are neighbours; of 12 images of
#: them in a row, up to 220 are, along one edge.
_MIN_EDGE = 4
#: Pixels of edges that an overlay has, at least.
_MIN_DRAWING = 60
#: Share that overlays have of the edges at the sides of the images, at least. Where others have more, the camera
#: stands, or they are the background of a turntable.
_OVERLAY_EDGES = 0.7
#: Sum of an overlay's gradients over that of their lengths, at most: 0.15 in dates and logos, 0.9 along one edge.
_MAX_NET_GRADIENT = 0.3

#: Part of an image at its sides in which an overlay may lie that no feature shows.
_MARGIN = 0.15
#: Part of an image that an overlay may fill, and a border of one colour at a side.
_MAX_AREA = 0.2
#: Gap between letters, in parts of the longer side.
_GAP = 0.012
#: What is hidden around letters, in parts of the longer side.
_HIDDEN_AROUND = 0.002
#: Height of a line of text at most, in parts of the longer side.
_TEXT_HEIGHT = 0.06
#: What is hidden beside a line of text, where the last digits of a time change: in its heights, and at most in parts of
#: the longer side.
_HIDDEN_BESIDE, _MAX_BESIDE = 1.5, 0.05
#: Levels by which the colour of letters differs.
_SAME_INK = 30.0
#: Share of the images that have a letter at a pixel, at least.
_INK_SHARE = 0.12

#: Share of the pixels of a line that have the border's colour in as many images as agree.
_PLAIN_SHARE = 0.9
#: Share of the line that ends a border.
_END_SHARE = 0.5
#: Lines that mix a border of one colour with the picture.
_PLAIN_MIXED = 3
#: Pixels between the points that stand for an overlay.
_POINT_SPACING = 4


def find_overlays(images: Sequence[SfmImage], places: Places, num_threads: int = 1) -> dict[Size, Bools]:
    """Return where all images of a size show the same before the scene, [h, w], for each size that has such pixels.

    That are dates, logos and watermarks, and borders of one colour. h, w: smaller than the size, of its shape.
    places: of the features that do not move; an overlay with some of them may lie anywhere.
    """
    found = {}
    with ThreadPoolExecutor(num_threads) as pool:
        for size, alike in _by_size(image for image in images if image.panorama is None).items():
            overlay = _overlay(alike, places.get(size), pool) if len(alike) >= _MIN_OVERLAID else None
            if overlay is not None:
                found[size] = overlay
    return found


def points_of(overlay: Bools, size: Size) -> NDArray[np.float32]:
    """Return points [P, 2] in pixels of images of a size that lie all over an overlay."""
    scale = np.array([size[0] / overlay.shape[1], size[1] / overlay.shape[0]])
    thin = np.zeros_like(overlay)
    thin[::_POINT_SPACING, ::_POINT_SPACING] = True
    row, column = np.nonzero(overlay & thin)
    return np.asarray((np.stack([column, row], axis=1) + 0.5) * scale, dtype=np.float32)


def outside(places: Places, overlays: Overlays) -> dict[Size, NDArray[np.float32]]:
    """Return the places that are not on overlays, for each size of which enough are left."""
    found = {}
    for size, at in places.items():
        if size in overlays:
            at = at[~overlays[size][_on_grid(at, size, overlays[size].shape)]]
        if len(at) >= FEWEST_PLACES:
            found[size] = at
    return found


def _overlay(images: Sequence[SfmImage], places: NDArray[np.float32] | None, pool: Executor) -> Bools | None:
    """Return where images of one size show the same before the scene, [h, w]; None where they do not.

    places: of the features that do not move.
    """
    size = images[0].size
    pixels = np.stack([*pool.map(partial(_at_most, _OVERLAY_SIDE), _compared(images))])
    height, width = pixels.shape[1:3]
    parts = list(pool.map(partial(_agreed, pixels), range(0, height, _ROWS_AT_ONCE)))
    gradient = np.concatenate([part[0] for part in parts])
    edges = np.concatenate([part[1] for part in parts])
    plain = np.concatenate([part[2] for part in parts])
    border = [-(-count * max(height, width) // max(size)) for count in np.max([one.border for one in images], axis=0)]
    top, bottom, left, right = border
    inside = np.zeros_like(edges)
    inside[top : height - bottom, left : width - right] = True
    edges &= inside
    numbers, _ = ndimage.label(edges, np.ones((3, 3)))
    edges &= np.bincount(numbers.ravel())[numbers] >= _MIN_EDGE
    around = max(1, round(_HIDDEN_AROUND * max(height, width)))
    at = _on_grid(np.zeros((0, 2), np.float32) if places is None else places, size, edges.shape)
    hidden = _drawings(pixels, gradient, edges, plain, at, around)
    _hide_plain_borders(hidden, plain | hidden, edges, border, around + _PLAIN_MIXED)
    return hidden if hidden.any() and _has_most_edges(hidden, edges) else None


def _agreed(pixels: NDArray[np.uint8], start: int) -> tuple[NDArray[np.float32], Bools, Bools]:
    """Return what rows from ``start`` of images [N, H, W, 3] have in common.

    That are the median gradient over the images [h, W, 2], where nearly all images have it [h, W], and where nearly all
    have the same colour [h, W].
    """
    rows = min(_ROWS_AT_ONCE, pixels.shape[1] - start)
    above, below = min(start, 1), min(pixels.shape[1] - start - rows, 1)
    part = pixels[:, start - above : start + rows + below].astype(np.float32)
    gradient = np.zeros((*part.shape[:3], 2, 3), np.float32)
    gradient[:, :, 1:-1, 0] = part[:, :, 2:] - part[:, :, :-2]
    gradient[:, 1:-1, :, 1] = part[:, 2:] - part[:, :-2]
    gradient = gradient[:, above : above + rows].reshape(len(part), rows, -1, 6)
    part = part[:, above : above + rows]
    median = np.median(gradient, axis=0)
    squared = (median**2).sum(axis=-1)
    along = ((gradient * median).sum(axis=-1) >= 0.5 * squared).mean(axis=0)
    edges = (squared >= _EDGE_GRADIENT**2) & (along >= _AGREED_SHARE)
    plain = (np.abs(part - np.median(part, axis=0)) < _SAME_COLOUR).all(axis=-1).mean(axis=0) >= _AGREED_SHARE
    return median.reshape(rows, -1, 2, 3).sum(axis=-1), edges, plain


def _drawings(
    pixels: NDArray[np.uint8],
    gradient: NDArray[np.float32],
    edges: Bools,
    plain: Bools,
    places: tuple[NDArray[Any], NDArray[Any]],
    around: int,
) -> Bools:
    """Return what dates, logos and watermarks hide, [h, w].

    gradient, edges, plain: see _agreed(). places: rows and columns of the features that do not move. around: pixels
    that are hidden around what is drawn.
    """
    longer = max(edges.shape)
    gap = max(2, round(_GAP * longer))
    # Letters of a line are one drawing.
    numbers, count = ndimage.label(ndimage.binary_dilation(edges, np.ones((2 * gap + 1, 2 * gap + 1))))
    features = np.bincount(numbers[places], minlength=count + 1)
    hidden = np.zeros_like(edges)
    for number, box in enumerate(ndimage.find_objects(numbers), 1):
        own = edges & (numbers == number)
        if not _is_drawing(own, gradient[own], anywhere=features[number] >= _MIN_FEATURES):
            continue
        hidden[box] |= _drawn(own[box], plain[box], gap, around)
        y0, y1, x0, x1 = _extent(own)
        if y1 - y0 <= _TEXT_HEIGHT * longer:
            beside = round(min(_HIDDEN_BESIDE * (y1 - y0), _MAX_BESIDE * longer))
            line = slice(max(0, y0 - around), y1 + around), slice(max(0, x0 - beside), x1 + beside)
            hidden[line] |= _in_its_colour(pixels[:, *line], plain[line] & hidden[line], around)
    return hidden


def _is_drawing(edges: Bools, gradient: NDArray[np.float32], *, anywhere: bool) -> bool:
    """Return whether edges [h, w] that are near each other are those of something drawn on the images.

    gradient: [E, 2] at the edges. anywhere: it may lie in the middle of the images too.
    """
    if (
        len(gradient) < _MIN_DRAWING
        or np.hypot(*gradient.sum(axis=0)) > _MAX_NET_GRADIENT * np.hypot(*gradient.T).sum()
    ):
        return False
    height, width = edges.shape
    y0, y1, x0, x1 = _extent(edges)
    at_side = (
        y1 <= _MARGIN * height or y0 >= (1 - _MARGIN) * height or x1 <= _MARGIN * width or x0 >= (1 - _MARGIN) * width
    )
    return (at_side or anywhere) and (y1 - y0) * (x1 - x0) <= _MAX_AREA * edges.size


def _extent(pixels: Bools) -> tuple[int, int, int, int]:
    """Return the first row of pixels that are set and the row behind the last one, and the same of columns."""
    rows, columns = np.nonzero(pixels)
    return int(rows.min()), int(rows.max()) + 1, int(columns.min()), int(columns.max()) + 1


def _drawn(edges: Bools, plain: Bools, gap: int, around: int) -> Bools:
    """Return what an overlay hides: its strokes, and what is of one colour between them, with a margin.

    gap: pixels between strokes that belong together. The scene between letters stays.
    """
    padded = np.pad(edges, gap)
    between = ndimage.binary_fill_holes(ndimage.binary_closing(padded, np.ones((2 * gap + 1, 2 * gap + 1))))
    strokes = ndimage.binary_closing(padded, np.ones((2 * around + 1, 2 * around + 1)))
    drawn = ndimage.binary_dilation(strokes | (between & np.pad(plain, gap)), np.ones((3, 3)), around)
    return np.asarray(ndimage.binary_fill_holes(drawn)[gap:-gap, gap:-gap])


def _in_its_colour(pixels: NDArray[np.uint8], plain: Bools, around: int) -> Bools:
    """Return where some images [N, h, w, 3] have the colour of a line of text, as in digits that change.

    plain: pixels of the text that have it in nearly all images; few say nothing, and the whole line is hidden.
    """
    if plain.sum() < _MIN_EDGE:
        return np.ones_like(plain)
    colour = np.median(pixels[:, plain], axis=(0, 1))
    share = (np.abs(pixels - colour) < _SAME_INK).all(axis=-1).mean(axis=0)
    return np.asarray(ndimage.binary_dilation(share >= _INK_SHARE, np.ones((3, 3)), around))


def _hide_plain_borders(hidden: Bools, plain: Bools, edges: Bools, border: Sequence[int], slack: int) -> None:
    """Add to ``hidden`` the borders of one colour at the sides, but where ``border`` says that there is a black one."""
    for lines, ends, to_hide, known in (
        (plain, edges, hidden, border[0]),
        (plain[::-1], edges[::-1], hidden[::-1], border[1]),
        (plain.T, edges.T, hidden.T, border[2]),
        (plain.T[::-1], edges.T[::-1], hidden.T[::-1], border[3]),
    ):
        to_hide[: 0 if known else _plain_border(lines, ends, slack)] = True


def _plain_border(plain: Bools, edges: Bools, slack: int) -> int:
    """Return how many of the first lines are of one colour in nearly all images, if an edge ends them; else 0.

    slack: lines behind the edge that may be ``plain`` too.
    """
    count = int(np.argmax([*(plain.mean(axis=1) < _PLAIN_SHARE), True]))
    end = int(np.argmax([*(edges.mean(axis=1) >= _END_SHARE), True]))
    is_end = count - slack <= end <= count + _PLAIN_MIXED
    return end + _PLAIN_MIXED if is_end and 2 <= end <= _MAX_AREA * len(edges) else 0


def _has_most_edges(hidden: Bools, edges: Bools) -> bool:
    """Return whether what is hidden has most of the edges that the images have in common.

    Those in the middle do not count, which hardly moves in all images of an orbit: what is at the sides does.
    """
    height, width = edges.shape
    tall, wide = round(_MARGIN * height), round(_MARGIN * width)
    counted = hidden.copy()
    counted[:tall] = counted[height - tall :] = counted[:, :wide] = counted[:, width - wide :] = True
    return bool(edges[hidden].sum() >= _OVERLAY_EDGES * edges[counted].sum())


# --- black borders ----------------------------------------------------------------------------------------------------

#: Images of a size in which borders are looked for, at least.
_MIN_BORDERED = 8
#: Lines beside a border that mix it with the picture, at least: in pixels, and in parts of the longer side.
_MIXED_LINES, _MIXED_SHARE = 2, 0.003
#: Pixels by which borders of one group differ.
_GROUP_WITHIN = 2
_NONE: Border = (0, 0, 0, 0)


def find_borders(images: Sequence[SfmImage], num_threads: int = 1) -> dict[str, Border]:
    """Return the black borders of the images that have some, with the lines beside that mix both, by their names.

    Borders are those that all images of a size have, or else a group of several, as of portraits among landscapes of
    one canvas. Images that cannot be decoded say nothing.
    """
    found: dict[str, Border] = {}
    with ThreadPoolExecutor(num_threads) as pool:
        for size, alike in _by_size(images).items():
            if len(alike) < _MIN_BORDERED:
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


def border_facts(images: Sequence[SfmImage]) -> list[dict[str, Any]]:
    """Return the borders of images of each size, in pixels, and how many images have them."""
    found = Counter((*image.size, image.border) for image in images)
    return [
        {"width": width, "height": height, "images": count, "pixels": list(border)}
        for (width, height, border), count in sorted(found.items())
        if any(border)
    ]


def _sure(images: Sequence[SfmImage], size: Size) -> Border:
    """Return the border that images of a size have in common, with the lines that mix it with the picture."""
    mixed = max(_MIXED_LINES, round(_MIXED_SHARE * max(size)))
    pixels = _pixels(_compared(images))
    top, bottom, left, right = (count + mixed if count else 0 for count in sure_borders(pixels)) if pixels else _NONE
    return top, bottom, left, right


def _groups(images: Sequence[SfmImage], pool: Executor) -> list[list[SfmImage]]:
    """Return groups of images whose own borders are alike; all are read only if some of 24 have one."""
    if not any(map(any, pool.map(_own_border, _compared(images)))):
        return []
    groups: dict[Border, list[SfmImage]] = {}
    for image, border in zip(images, pool.map(_own_border, images), strict=True):
        same = next(
            (one for one in groups if max(abs(i - j) for i, j in zip(one, border, strict=True)) <= _GROUP_WITHIN),
            border,
        )
        if any(border):
            groups.setdefault(same, []).append(image)
    return [group for group in groups.values() if len(group) >= _MIN_BORDERED]


def _own_border(image: SfmImage) -> Border:
    return next(iter(black_borders([pixels]) for pixels in _pixels([image])), _NONE)


# --- pixels of images -------------------------------------------------------------------------------------------------

#: Images of a size that are compared, at most.
_MAX_COMPARED = 24


def _by_size(images: Iterable[SfmImage]) -> dict[Size, list[SfmImage]]:
    found: dict[Size, list[SfmImage]] = {}
    for image in images:
        found.setdefault(image.size, []).append(image)
    return found


def _compared(images: Sequence[SfmImage]) -> list[SfmImage]:
    return evenly(images, _MAX_COMPARED, ends=True)


def _pixels(images: Sequence[SfmImage]) -> list[NDArray[np.uint8]]:
    found = []
    for image in images:
        with contextlib.suppress(SceneError):
            found.append(decode_rgb(image.path, (0, 0, 0), image.orientation))
    return found


def _at_most(side: int, image: SfmImage) -> NDArray[np.uint8]:
    """Return an image reduced to ``side`` pixels of its longer side, if it is larger."""
    picture = Image.fromarray(decode_rgb(image.path, (0, 0, 0), image.orientation))
    scale = min(1.0, side / max(picture.size))
    size = max(1, round(scale * picture.width)), max(1, round(scale * picture.height))
    return np.asarray(picture.resize(size, Image.Resampling.BOX))


def _on_grid(places: NDArray[np.float32], size: Size, shape: tuple[int, ...]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return rows and columns of places in a picture of ``shape`` that is reduced from ``size``."""
    scale = np.array([shape[1] / size[0], shape[0] / size[1]])
    column, row = np.minimum((places * scale).astype(np.int64), [shape[1] - 1, shape[0] - 1]).T
    return row, column
