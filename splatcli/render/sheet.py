"""The contact sheet: a row of images for each view with a label below; that of ``splat eval`` has the worst first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from splatcli.render.colour_maps import TICKS, error_map, heat, position
from splatcli.render.images import shrunk
from splatcli.render.scoring import Comparison

#: Views on a sheet by default.
MOST_VIEWS = 12

#: Width in pixels of the widest image of a sheet; larger ones are shrunk.
_MAX_PICTURE = 480
#: Width in pixels of a sheet: what a common screen shows.
_MAX_WIDTH = 2000

_MARGIN = 16
_GAP = 4
_LINE = 22
#: Width and height of the legend's bar.
_BAR = (220, 12)
#: Height of what stands above the first row: title, subtitle, legend with its ticks.
_HEAD = 16 + 28 + 22 + 4 + _BAR[1] + 20 + 12
_PAPER = (250, 250, 250)
_INK = (30, 30, 30)
_FAINT = (120, 120, 120)
_HEADINGS = ("photo", "render", "error")

_Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
#: Fonts of the title and of all other words.
_LARGE, _SMALL = ImageFont.load_default(size=18), ImageFont.load_default(size=13)


class Extremes:
    """The worst and the best views by PSNR of those added; the images of the others are dropped.

    most: the number of views to keep; of an odd number, one more of the worst.
    """

    def __init__(self, most: int = MOST_VIEWS) -> None:
        self.most = most
        self.seen = 0
        self._kept: list[Comparison] = []

    def add(self, one: Comparison) -> None:
        self.seen += 1
        self._kept = sorted([*self._kept, one], key=lambda c: (c.score.psnr, c.index))
        if len(self._kept) > self.most:
            # The view in the middle is neither among the worst nor among the best.
            del self._kept[self.worst]

    @property
    def worst(self) -> int:
        """Return how many of the kept views are the worst."""
        return -(-self.most // 2)

    def ranked(self) -> list[tuple[int, Comparison]]:
        """Return the kept views, worst first, with their ranks among all views; 1 is the worst."""
        left_out = self.seen - len(self._kept)
        return [(i + 1 if i < self.worst else left_out + i + 1, one) for i, one in enumerate(self._kept)]

    def describe(self) -> str:
        """Return which views these are, for a title."""
        if self.seen <= self.most:
            return "the view" if self.seen == 1 else f"all {self.seen} views, worst first"
        ends = ((self.worst, "worst"), (self.most - self.worst, "best"))
        return (
            " and ".join(f"the {n} {end}" if n > 1 else f"the {end}" for n, end in ends if n) + f" of {self.seen} views"
        )


@dataclass(frozen=True, slots=True)
class Cell:
    """One view: images of one size side by side, and a label below."""

    pictures: tuple[Image.Image, ...]
    label: str

    @classmethod
    def of(cls, arrays: Sequence[NDArray[np.uint8]], label: str) -> Cell:
        """Return the cell of images [H, W, 3] of one size, which are shrunk where they are large."""
        return cls(tuple(shrunk(one, _MAX_PICTURE) for one in arrays), label)

    @property
    def size(self) -> tuple[int, int]:
        """Return width and height of the images together."""
        width, height = self.pictures[0].size
        return len(self.pictures) * width + (len(self.pictures) - 1) * _GAP, height


def contact_sheet(views: Sequence[tuple[int, Comparison]], title: str, subtitle: str) -> NDArray[np.uint8]:
    """Return [H, W, 3] uint8: image, render and error map of each of ``views`` (rank, comparison), at least one."""
    masked = any(view.masked is not None for _, view in views)
    return draw_sheet([_cell(rank, view) for rank, view in views], _HEADINGS, title, subtitle, masked=masked)


def draw_sheet(
    cells: Sequence[Cell], headings: Sequence[str], title: str, subtitle: str, *, masked: bool
) -> NDArray[np.uint8]:
    """Return [H, W, 3] uint8: the cells, at least one, below the title and the scale of the error maps.

    headings: of the images of a cell. masked: whether an error map has masked pixels.
    """
    legend = "mean |error| of R, G, B, 1 = full range" + ("; grey: masked" if masked else "")
    cell_width = _MARGIN + max(max(cell.size[0], round(_SMALL.getlength(cell.label))) for cell in cells)
    columns = max(1, min(len(cells), (_MAX_WIDTH - _MARGIN) // cell_width))
    rows = [cells[i : i + columns] for i in range(0, len(cells), columns)]
    heights = [max(cell.size[1] for cell in row) + _LINE + _MARGIN for row in rows]
    words = max(_LARGE.getlength(title), _SMALL.getlength(subtitle), _BAR[0] + _MARGIN + _SMALL.getlength(legend))
    width = _MARGIN + max(columns * cell_width, round(words) + _MARGIN)
    sheet = _Sheet(width, _HEAD + _LINE + sum(heights))
    sheet.text((_MARGIN, _MARGIN), title, fill=_INK, font=_LARGE)
    sheet.text((_MARGIN, _MARGIN + 28), subtitle, fill=_FAINT)
    sheet.legend(_MARGIN, _MARGIN + 28 + _LINE + 4, legend)
    lefts = [_MARGIN + column * cell_width for column in range(columns)]
    y = _HEAD
    for left, cell in zip(lefts, rows[0], strict=True):
        sheet.headings(left, y, headings, cell.pictures[0].width)
    y += _LINE
    for row, height in zip(rows, heights, strict=True):
        for left, cell in zip(lefts, row, strict=False):  # the last row may be shorter
            sheet.cell(left, y, cell)
        y += height
    return np.asarray(sheet.image)


class _Sheet:
    """The image that a sheet is drawn on; x and y are pixels from its upper left corner."""

    def __init__(self, width: int, height: int) -> None:
        self.image = Image.new("RGB", (width, height), _PAPER)
        self._draw = ImageDraw.Draw(self.image)

    def text(self, place: tuple[float, float], words: str, fill: tuple[int, int, int], font: _Font = _SMALL) -> None:
        """Draw words with their upper left corner at ``place``."""
        self._draw.text(place, words, fill=fill, font=font)

    def headings(self, x: int, y: int, headings: Sequence[str], width: int) -> None:
        """Draw the headings above the images of a cell at (x, y), each ``width`` wide, if they fit."""
        for index, heading in enumerate(headings):
            if _SMALL.getlength(heading) <= width:
                self.text((x + index * (width + _GAP), y), heading, fill=_FAINT)

    def cell(self, x: int, y: int, cell: Cell) -> None:
        """Draw a cell with its upper left corner at (x, y)."""
        width, height = cell.pictures[0].size
        for index, picture in enumerate(cell.pictures):
            self.image.paste(picture, (x + index * (width + _GAP), y))
        self.text((x, y + height + 4), cell.label, fill=_INK)

    def legend(self, x: int, y: int, words: str) -> None:
        """Draw the colour bar of the error maps at (x, y), with ticks below and ``words`` to the right."""
        width, height = _BAR
        bar = np.broadcast_to(heat(np.linspace(0.0, 1.0, width)), (height, width, 3))
        self.image.paste(Image.fromarray(np.ascontiguousarray(bar)), (x, y))
        for tick, at in zip(TICKS, position(np.array(TICKS)), strict=True):
            label = f"{tick:g}" + ("+" if tick == TICKS[-1] else "")
            left = x + round(float(at) * (width - 1))
            self._draw.line((left, y + height, left, y + height + 3), fill=_FAINT)
            self.text((left - _SMALL.getlength(label) / 2, y + height + 3), label, fill=_FAINT)
        self.text((x + width + _MARGIN, y - 3), words, fill=_FAINT)


def _cell(rank: int, view: Comparison) -> Cell:
    arrays = (view.truth, view.pixels, error_map(view.truth, view.pixels, view.masked))
    figures = [f"{view.score.psnr:.2f} dB", f"SSIM {view.score.ssim:.4f}"]
    figures += [
        f"{name} {value:.2f} dB" if "psnr" in name else f"{name} {value:.4f}" for name, value in view.extra.items()
    ]
    return Cell.of(arrays, "   ".join([f"{rank}", view.score.name, *figures]))
