"""Pictures: a view of a model as 8-bit pixels and as a PNG."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import imageio.v3 as imageio
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from splatcli.checkpoint.atomic import write_atomically
from splatcli.checkpoint.state import Checkpoint
from splatcli.errors import OutputError, UsageError
from splatcli.gaussians import Gaussians
from splatcli.rasterizer import render
from splatcli.scene.camera import Camera
from splatcli.train.metrics import evaluation_background

_PICTURE_SUFFIXES = {".jpg", ".jpeg", ".png", ".tif", ".tiff", ".bmp", ".webp", ".exr"}

_NAMED = {"black": (0.0, 0.0, 0.0), "white": (1.0, 1.0, 1.0)}


def parse_background(text: str) -> tuple[float, float, float]:
    """R, G, B in 0...1 from ``black``, ``white``, ``#rrggbb`` or ``r,g,b``. Raises UsageError."""
    if text in _NAMED:
        return _NAMED[text]
    if re.fullmatch(r"#[0-9a-fA-F]{6}", text):
        r, g, b = (int(text[i : i + 2], 16) / 255 for i in (1, 3, 5))
        return r, g, b
    try:
        r, g, b = (float(part) for part in text.split(","))
    except ValueError:
        r = g = b = -1.0
    if not all(0.0 <= value <= 1.0 for value in (r, g, b)):
        raise UsageError(
            f"{text!r} is no colour", where="--background", remedy="black, white, #rrggbb, or r,g,b each from 0 to 1"
        )
    return r, g, b


@dataclass(frozen=True, slots=True)
class RenderSettings:
    """How a model is shown: SH degree (None: all it has), R G B behind it in 0...1, opacity compensation."""

    sh_degree: int | None = None
    background: tuple[float, float, float] = (0.0, 0.0, 0.0)
    antialiased: bool = False

    @classmethod
    def trained(cls, checkpoint: Checkpoint) -> RenderSettings:
        """As the run of this checkpoint evaluates itself; a random background stands for black."""
        config = checkpoint.config
        return cls(checkpoint.active_sh_degree, _NAMED[evaluation_background(config)], config.train.antialiased)


def render_pixels(gaussians: Gaussians, camera: Camera, look: RenderSettings) -> NDArray[np.uint8]:
    """The view as [H, W, 3] uint8."""
    colour = torch.tensor(look.background, dtype=torch.float32, device=gaussians.device)
    with torch.no_grad():
        shown = render(gaussians, camera, sh_degree=look.sh_degree, background=colour, antialiased=look.antialiased)
    return to_uint8(shown.image)


def to_uint8(image: Tensor) -> NDArray[np.uint8]:
    """[H, W, 3] float in 0...1 to the nearest of 256 levels."""
    return (image.detach().clamp(0.0, 1.0) * 255.0).round().to(torch.uint8).cpu().numpy()


def png_bytes(pixels: NDArray[np.uint8]) -> bytes:
    """The file that holds these pixels, [H, W, 3]. Raises MemoryError."""
    buffer = io.BytesIO()
    try:
        imageio.imwrite(buffer, pixels, extension=".png", plugin="pillow")
    except OSError as error:  # nothing else fails here; Pillow calls it a codec that is configured badly
        raise MemoryError(str(error)) from None
    return buffer.getvalue()


def write_bytes(path: Path, payload: bytes) -> None:
    """Write a file whole or not at all, making its folders. Raises OutputError."""
    make_room(path)
    write_atomically(path, lambda file: file.write(payload), what="file", stream=True)


def make_room(path: Path) -> None:
    """Make the folders that a file is going to be in. Raises OutputError, also where a folder is in its place."""
    try:
        if path.is_dir():  # also the empty name
            raise OutputError("this is a folder, not a file", where=path, remedy="name a file")
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        remedy = "write to another place, or make room in this one"
        raise OutputError(f"cannot make the folder: {error.strerror}", where=path.parent, remedy=remedy) from None


def picture_paths(names: Iterable[str], folder: Path, suffix: str = ".png") -> list[Path]:
    """Where the picture of each view goes: the view's name with ``suffix``, always inside ``folder``, no two alike.

    Names come from files of others: drives, roots and ``..`` in them lead nowhere.
    """
    taken: set[str] = set()
    paths = []
    for name in names:
        parts = [part for part in PurePosixPath(name.replace("\\", "/")).parts if part not in ("/", "..", ".")]
        parts = [part.replace("\0", "").replace(":", "_") for part in parts] or ["view"]
        named = PurePosixPath(*parts)
        stem = str(named.with_suffix("") if named.suffix.lower() in _PICTURE_SUFFIXES else named)
        candidate, count = stem, 2
        while candidate.casefold() in taken:
            candidate, count = f"{stem}_{count}", count + 1
        taken.add(candidate.casefold())
        paths.append(folder / f"{candidate}{suffix}")
    return paths
