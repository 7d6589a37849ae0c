"""EXR files: float32 channels of a view for compositing, written by OpenEXR, an optional package.

R G B    linear light with sRGB's primaries (EXR's default), premultiplied by A, over nothing
A        coverage
Z        mean camera z in scene units, infinite where nothing is
N.X N.Y N.Z  normals as in render/images.py

A model's colours are display colours, as in the images. sRGB's curve makes them linear, applied to the colour divided
by A, so a compositor shows the same as the PNG. Negative colours become black; those above 1 continue along the curve.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from splatcli.checkpoint.atomic import write_atomically
from splatcli.errors import ResourceError
from splatcli.output_files import make_parent_folder
from splatcli.render.colour_maps import Floats
from splatcli.render.images import RenderedMaps
from splatcli.scene.hdr import srgb_decoded

#: Kinds in an EXR file by default.
DEFAULT = ("rgb", "alpha", "depth")


def check_installed() -> None:
    """Raise ResourceError if OpenEXR is not installed."""
    if importlib.util.find_spec("OpenEXR") is None:
        raise ResourceError(
            "EXR files need the package OpenEXR, which is not installed",
            where="--format exr",
            remedy="pip install 'splatcli[exr]'; or write PNG files",
        )


def channels(maps: RenderedMaps, kinds: Iterable[str]) -> dict[str, Floats]:
    """Return the channels of each kind, [H, W] each. ``maps`` are rendered over black."""
    made: dict[str, Floats] = {}
    for kind in kinds:
        if kind == "rgb":
            colour = linear(maps.rgb.detach().cpu().numpy(), maps.alpha)
            made |= {name: colour[..., i] for i, name in enumerate("RGB")}
        elif kind == "alpha":
            made["A"] = maps.alpha
        elif kind == "depth":
            made["Z"] = maps.depth
        elif kind == "normals" and maps.normals is not None:
            made |= {f"N.{name}": maps.normals[..., i] for i, name in enumerate("XYZ")}
    return {name: np.ascontiguousarray(values, dtype=np.float32) for name, values in made.items()}


def linear(colour: Floats, alpha: Floats) -> Floats:
    """Convert display colours times alpha to linear light times alpha, [H, W, 3]."""
    coverage = alpha[..., None].astype(np.float64)
    light = srgb_decoded(np.maximum(colour, 0.0) / np.maximum(coverage, 1e-12))
    return np.where(coverage > 0, light * coverage, 0.0).astype(np.float32)


def write_exr(path: Path, planes: dict[str, Floats]) -> None:
    """Write ``planes`` [H, W] as a lossless scan-line EXR file. Raise OutputError or ResourceError."""
    check_installed()
    openexr = importlib.import_module("OpenEXR")
    header = {"compression": openexr.ZIP_COMPRESSION, "type": openexr.scanlineimage}

    def write(file: BinaryIO) -> None:
        openexr.File(header, dict(planes)).write(file.name)
        file.seek(0, os.SEEK_END)

    make_parent_folder(path)
    write_atomically(path, write, what="the EXR file")
