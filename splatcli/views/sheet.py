"""The contact sheet: ground truth beside render, view by view, with the figures under each pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

_MARGIN = 8
_LABEL = 22
_PAPER = (250, 250, 250)
_INK = (30, 30, 30)

#: Pixels across the widest picture of a sheet; larger ones are shown smaller.
_MAX_PICTURE = 480


@dataclass(frozen=True, slots=True)
class Pair:
    """One view: what the camera saw and what the model shows, [H, W, 3] uint8 each, and a line under them."""

    truth: NDArray[np.uint8]
    render: NDArray[np.uint8]
    label: str


def contact_sheet(pairs: Sequence[Pair], title: str, *, columns: int = 2) -> NDArray[np.uint8]:
    """[H, W, 3] uint8: ``columns`` pairs a row, ground truth on the left of each pair. At least one pair is needed."""
    sizes = [_shown_size(pair) for pair in pairs]
    cell_width = 2 * max(width for width, _ in sizes) + 3 * _MARGIN
    cell_height = max(height for _, height in sizes) + _LABEL + _MARGIN
    columns = min(columns, len(pairs))
    rows = -(-len(pairs) // columns)
    sheet = Image.new("RGB", (columns * cell_width, rows * cell_height + _LABEL + 2 * _MARGIN), _PAPER)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=13)
    draw.text((_MARGIN, _MARGIN), title, fill=_INK, font=font)
    for index, (pair, (width, height)) in enumerate(zip(pairs, sizes, strict=True)):
        row, column = divmod(index, columns)
        x, y = column * cell_width + _MARGIN, row * cell_height + _LABEL + 2 * _MARGIN
        for offset, pixels in ((0, pair.truth), (width + _MARGIN, pair.render)):
            picture = Image.fromarray(pixels).resize((width, height), Image.Resampling.LANCZOS)
            sheet.paste(picture, (x + offset, y))
        draw.text((x, y + height + 3), pair.label, fill=_INK, font=font)
    return np.asarray(sheet)


def _shown_size(pair: Pair) -> tuple[int, int]:
    height, width = pair.render.shape[:2]
    factor = min(1.0, _MAX_PICTURE / max(width, height))
    return max(1, round(width * factor)), max(1, round(height * factor))
