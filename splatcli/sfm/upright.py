"""Upright copies of images in the place of links: of those whose EXIF orientation other programs do not apply."""

from __future__ import annotations

import io
import secrets
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.ExifTags import IFD

from splatcli.errors import OutputError
from splatcli.output_files import write_bytes
from splatcli.scene.decode import decode, decode_nonzero, open_image

#: Ending -> Pillow's format and options of an upright copy; of any other file it is a PNG under the same name.
_FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    **dict.fromkeys((".jpg", ".jpeg"), ("JPEG", {"quality": 95, "subsampling": 0})),
    **dict.fromkeys((".tif", ".tiff"), ("TIFF", {"compression": "tiff_deflate"})),
    ".webp": ("WEBP", {"lossless": True}),
}


def write_upright(image: Path, orientation: int, place: Path) -> None:
    """Write an image turned and mirrored by EXIF's ``orientation`` to ``place``, which may be a link to it.

    Of EXIF the copy has what the camera says of the shot. Raises SceneError for an image that cannot be decoded,
    OutputError.
    """
    kind, options = _FORMATS.get(place.suffix.lower(), ("PNG", {}))
    upright = decode(image, None, orientation)
    layers = upright.rgb if upright.alpha is None else np.dstack([upright.rgb, upright.alpha])
    if kind != "TIFF":  # Pillow writes no EXIF of its own making into one
        options = {**options, "exif": _shot(image)}
    _write(place, layers, kind, options)


def write_upright_mask(mask: Path, orientation: int, place: Path) -> None:
    """Write a mask, of one channel, as write_upright() does an image."""
    _write(place, decode_nonzero(mask, orientation).astype(np.uint8) * np.uint8(255), "PNG", {})


def _shot(image: Path) -> Image.Exif:
    exif = Image.Exif()
    try:
        with open_image(image) as file:
            exif[IFD.Exif] = dict(file.getexif().get_ifd(IFD.Exif))
            exif.tobytes()
    except Exception:
        return Image.Exif()  # the picture can be whole although its metadata is not
    return exif


def _write(place: Path, pixels: NDArray[np.uint8], kind: str, options: dict[str, Any]) -> None:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format=kind, **options)
    upright = place.with_name(f".upright.{secrets.token_hex(4)}")  # write_bytes() would follow a link
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(upright, file.getvalue())
        upright.replace(place)
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror}", where=place) from None
