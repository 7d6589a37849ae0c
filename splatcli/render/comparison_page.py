"""The page of a comparison: a slider between two images of each view. Images are inside; nothing is loaded."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

import numpy as np

from splatcli.formats.html import ICON
from splatcli.render.comparison import ViewFigures, ViewImages
from splatcli.render.images import jpeg_bytes, shrunk

#: Pixels of the longer side of an image, and its JPEG quality: 100 KB or so.
_SIDE, _QUALITY = 960, 85
#: Least width in pixels at which an image is shown.
_LEAST_WIDTH = 640

NAMES = {"a": "A", "b": "B", "photo": "photo", "difference": "difference"}


@dataclass(frozen=True, slots=True)
class PageView:
    """A view on the page: its name, remarks on it, and its images as JPEG by kind, all of one size (width, height)."""

    name: str
    remarks: list[str]
    size: tuple[int, int]
    images: dict[str, bytes]

    @classmethod
    def of(cls, view: ViewFigures, shown: ViewImages, remarks: list[str]) -> PageView:
        """Return the view with its images shrunk where they are large."""
        small = {kind: shrunk(shown.images[kind], _SIDE) for kind in NAMES if kind in shown.images}
        images = {kind: jpeg_bytes(np.asarray(image), _QUALITY) for kind, image in small.items()}
        return cls(view.camera.name, remarks, small["a"].size, images)


def comparison_page(
    title: str, models: Sequence[Sequence[str]], summary: str, views: Sequence[PageView], sides: tuple[str, str]
) -> bytes:
    """Return the page.

    models: a table, the first row being its heads. sides: the kinds of image left and right of the slider at first.
    """
    page = (files("splatcli.render") / "comparison.html").read_text(encoding="utf-8")
    kinds = [kind for kind in NAMES if any(kind in view.images for view in views)]
    fillings = {
        "icon": ICON,
        "title": escape(title),
        "models": _table(models),
        "summary": escape(summary),
        "left": _options(kinds, sides[0]),
        "right": _options(kinds, sides[1]),
        "views": "\n".join(_figure(view, sides) for view in views),
    }
    for place, filling in fillings.items():
        page = page.replace(f"<!-- {place} -->", filling)
    return page.encode(errors="backslashreplace")  # names of files may be no text


def _table(rows: Sequence[Sequence[str]]) -> str:
    heads, *others = rows
    lines = ["".join(f'<th scope="col">{escape(cell)}</th>' for cell in heads)]
    lines += [
        f'<th scope="row">{escape(name)}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        for name, *cells in others
    ]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _options(kinds: Sequence[str], chosen: str) -> str:
    return "".join(
        f'<option value="{kind}"{" selected" if kind == chosen else ""}>{NAMES[kind]}</option>' for kind in kinds
    )


def _figure(view: PageView, sides: tuple[str, str]) -> str:
    """Return the figure of a view, which fits into the window, a portrait too."""
    width, height = view.size
    name = escape(view.name)
    places = dict(zip(sides, ("left", "right"), strict=True))
    pictures = "".join(
        f'<img data-kind="{kind}" class="{places.get(kind, "")}" alt="{NAMES[kind]} of {name}" '
        f'src="data:image/jpeg;base64,{base64.b64encode(content).decode()}">'
        for kind, content in view.images.items()
    )
    labels = "".join(f'<span class="{place}">{NAMES[kind]}</span>' for kind, place in places.items())
    remarks = "".join(f"<span>{escape(remark)}</span>" for remark in view.remarks if remark)
    return (
        f'<figure style="max-width: max(280px, min({max(width, _LEAST_WIDTH)}px, {85 * width / height:.1f}vh))">'
        f'<div class="pair" style="aspect-ratio: {width} / {height}">{pictures}<i></i>{labels}'
        f'<input type="range" min="0" max="100" value="50" aria-label="between left and right, {name}"></div>'
        f"<figcaption><b>{name}</b>{remarks}</figcaption></figure>"
    )
