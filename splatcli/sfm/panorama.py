"""Equirectangular panoramas: recognised, and cut into the perspective faces of a rig of cameras."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from splatcli.errors import SceneError
from splatcli.scene.decode import Header, decode_nonzero, decode_rgb, open_image, read_header
from splatcli.scene.panorama import FACES, face_camera, face_from_rig, places_of

#: JPEG quality of the faces that are written.
_QUALITY = 95
#: The name of the projection in GPano's XMP.
_GPANO = re.compile(rb"ProjectionType\W{1,3}\s*equirectangular", re.IGNORECASE)
#: Without XMP: the seam may differ this much more than neighbouring columns do, and a pole vary so many levels.
_SEAM, _POLE = 3.0, 12.0
#: Pixels of a row whose ends say something.
_LEAST_WIDTH = 64
#: Frames of a video by which it is recognised.
_SAMPLED = 9


def is_panorama(path: Path, header: Header) -> bool:
    """Return whether an image is a whole equirectangular panorama, by its XMP, or by its shape, seam and poles.

    Raises SceneError for a part of one, and for one that cannot be decoded.
    """
    whole = abs(header.width - 2 * header.height) <= 2
    try:
        with open_image(path) as image:
            xmp = image.info.get("xmp", b"")
    except (OSError, ValueError):
        xmp = b""
    if _GPANO.search(xmp if isinstance(xmp, bytes) else str(xmp).encode()):
        if not whole:
            raise SceneError(
                f"is a part of a panorama ({header.width}x{header.height}); only whole ones, of 2:1, are read",
                where=path,
                remedy="fill it up to 360 x 180 degrees, or leave it out",
            )
        return True
    return whole and header.width >= _LEAST_WIDTH and _closes(decode_rgb(path, (0, 0, 0)))


def are_panoramas(frames: Sequence[Path]) -> bool:
    """Return whether most of nine frames of a video, evenly spaced, are whole equirectangular panoramas."""
    some = [frames[i * len(frames) // _SAMPLED] for i in range(_SAMPLED)] if frames else []
    return sum(is_panorama(path, read_header(path)) for path in some) > _SAMPLED // 2


def _closes(rgb: NDArray[np.uint8]) -> bool:
    """Return whether the left edge goes on where the right one ends, and each pole is one point.

    A seam from sky to ground varies; that of an object on a plain background does not.
    """
    levels = rgb.astype(np.float64).mean(axis=2)
    if levels[:, 0].std() <= _POLE:
        return False
    seam = np.abs(levels[:, 0] - levels[:, -1]).mean()
    beside = np.abs(np.diff(levels[:, :: max(1, levels.shape[1] // 64)][:, :2], axis=1)).mean()
    beside = min(beside, np.abs(levels[:, 1] - levels[:, 0]).mean())
    return bool(seam <= _SEAM * beside + 1 and max(levels[0].std(), levels[-1].std()) <= _POLE)


def _places(width: int, height: int, face: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return columns and rows of a panorama that the pixels of a face show; the middle of the first one is 0."""
    camera = face_camera(width)
    focal = camera.focal_length_x
    x = (np.arange(camera.width) + 0.5 - camera.width / 2) / focal
    y = (np.arange(camera.height) + 0.5 - camera.height / 2) / focal
    rays = np.stack([*np.meshgrid(x, y), np.ones((camera.height, camera.width))], axis=-1) @ face_from_rig(face)
    column, row = np.moveaxis(places_of(rays, width, height) - 0.5, -1, 0)
    return column, row


def cut(rgb: NDArray[np.uint8], face: int) -> NDArray[np.uint8]:
    """Return [h, w, 3], a face of a panorama [H, W, 3], bilinear."""
    height, width = rgb.shape[:2]
    column, row = _places(width, height, face)
    left, top = np.floor(column).astype(np.int64), np.floor(row).astype(np.int64)
    right_part, low_part = (column - left)[..., None], (row - top)[..., None]
    rows = [np.clip(top + i, 0, height - 1) for i in (0, 1)]
    lines = [rgb[r, left % width] * (1 - right_part) + rgb[r, (left + 1) % width] * right_part for r in rows]
    return np.asarray(np.round(lines[0] * (1 - low_part) + lines[1] * low_part), dtype=np.uint8)


def write_faces(path: Path, folder: Path) -> list[Path]:
    """Write the faces of a panorama as JPEG files in ``folder``. Raises SceneError for one that cannot be decoded."""
    rgb = decode_rgb(path, (0, 0, 0))
    folder.mkdir(parents=True)
    written = []
    for face in range(FACES):
        written.append(folder / f"{face}.jpg")
        Image.fromarray(cut(rgb, face)).save(written[-1], quality=_QUALITY, subsampling=0)
    return written


def write_masks(mask: Path, width: int, height: int, folder: Path) -> list[Path]:
    """Write the mask of a panorama, cut as its faces are, as PNG files in ``folder``. Raises SceneError."""
    counts = decode_nonzero(mask)
    if counts.shape != (height, width):
        raise SceneError(
            f"is {counts.shape[1]}x{counts.shape[0]}, its panorama {width}x{height}",
            where=mask,
            remedy="save it at the panorama's size",
        )
    folder.mkdir(parents=True)
    written = []
    for face in range(FACES):
        column, row = _places(width, height, face)
        rows = np.clip(np.round(row).astype(np.int64), 0, height - 1)
        written.append(folder / f"{face}.png")
        Image.fromarray(counts[rows, np.round(column).astype(np.int64) % width]).save(written[-1])
    return written
