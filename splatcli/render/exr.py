"""EXR files: a view as float32 channels for compositing, by OpenEXR, which is installed beside this package.

R G B    linear light with sRGB's primaries (EXR's default), associated with A, over nothing
A        coverage
Z        mean camera z in scene units, infinite where nothing is
N.X N.Y N.Z  normals as in render/image_kinds.py

A model's colours are for display, as the photos' were, so they become linear by sRGB's curve, of the colour without A:
what a compositor shows is what the PNG shows. Negative colours are black; those above 1 go on along the curve.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from splatcli.checkpoint.atomic import write_atomically
from splatcli.errors import ResourceError
from splatcli.render.image_kinds import RenderedMaps
from splatcli.render.images import make_room

#: What goes into a file unless told otherwise.
DEFAULT = ("rgb", "alpha", "depth")

Floats = NDArray[np.float32]


def check_installed() -> None:
    """Raises ResourceError where OpenEXR is not installed."""
    if importlib.util.find_spec("OpenEXR") is None:
        raise ResourceError(
            "EXR files need the package OpenEXR, which is not installed",
            where="--format exr",
            remedy="pip install 'splatcli[exr]'; or write PNG files",
        )


def channels(sight: RenderedMaps, kinds: Iterable[str]) -> dict[str, Floats]:
    """The channels of each kind, [H, W] each. ``sight`` was rendered over black."""
    made: dict[str, Floats] = {}
    for kind in kinds:
        if kind == "rgb":
            colour = linear(sight.rgb.detach().cpu().numpy(), sight.alpha)
            made |= {name: colour[..., i] for i, name in enumerate("RGB")}
        elif kind == "alpha":
            made["A"] = sight.alpha
        elif kind == "depth":
            made["Z"] = sight.depth
        elif kind == "normals" and sight.normals is not None:
            made |= {f"N.{name}": sight.normals[..., i] for i, name in enumerate("XYZ")}
    return {name: np.ascontiguousarray(values, dtype=np.float32) for name, values in made.items()}


def linear(colour: Floats, alpha: Floats) -> Floats:
    """[H, W, 3] linear light times alpha, of display colours times alpha."""
    coverage = alpha[..., None].astype(np.float64)
    shown = np.maximum(colour, 0.0) / np.maximum(coverage, 1e-12)
    light = np.where(shown <= 0.04045, shown / 12.92, ((shown + 0.055) / 1.055) ** 2.4)
    return np.where(coverage > 0, light * coverage, 0.0).astype(np.float32)


def write_exr(path: Path, planes: dict[str, Floats]) -> None:
    """Write ``planes`` [H, W] as a file with scan lines, compressed without loss. Raises OutputError, ResourceError."""
    check_installed()
    openexr = importlib.import_module("OpenEXR")
    header = {"compression": openexr.ZIP_COMPRESSION, "type": openexr.scanlineimage}

    def write(file: BinaryIO) -> None:
        openexr.File(header, dict(planes)).write(file.name)
        file.seek(0, os.SEEK_END)

    make_room(path)
    write_atomically(path, write, what="the EXR file")
