"""SOG version 2, PlayCanvas' splats as lossless WebP images with codebooks, in a zip: ten to twenty times smaller.

One texel a Gaussian, row by row, in Morton order: positions of 16 bits an axis on a logarithmic measure, rotations as
the three smallest components in bytes, log-scales and colours through codebooks of 256, harmonics through a palette.
Coordinates are those of a PLY. Read by sog_read.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from splatcli import __version__
from splatcli.errors import UsageError
from splatcli.formats.kmeans import codebook, nearest, palette
from splatcli.formats.quantisation import (
    Columns,
    Encoded,
    ExportMetadata,
    Floats,
    columns_of,
    opacities_of,
    quantised,
    unit_quats,
)
from splatcli.formats.rotations import largest_and_rest
from splatcli.gaussians import Gaussians
from splatcli.scene.points import morton_order

VERSION = 2
CODES = 256
#: The alpha of a rotation is this plus the place of the largest component.
LARGEST = 252
#: Palette entries in a row of the image of centroids.
PALETTE_ROW = 64
#: The side that WebP ends at.
_MAX_SIDE = 16383

Texels = NDArray[np.uint8]


def encode_sog(gaussians: Gaussians, told: ExportMetadata) -> Encoded:
    """The Gaussians as a bundled SOG. Raises DivergedError for values that are not finite.

    The palette of harmonics is found where the Gaussians are: on a GPU in seconds.
    """
    columns = columns_of(gaussians)
    order = morton_order(columns.means)
    columns = Columns(*(column[order] for column in columns))
    count = len(gaussians)
    width = math.ceil(math.sqrt(count) / 4) * 4
    height = math.ceil(count / width / 4) * 4
    if width > _MAX_SIDE:
        raise UsageError(
            f"{count:,} Gaussians do not fit into images of {_MAX_SIDE} pixels", remedy="use another format"
        )
    meta: dict[str, Any] = {"version": VERSION, "asset": {"generator": f"splatcli {__version__}"}, "count": count}
    if told.antialiased:
        meta["model"] = "antialiased"
    images: dict[str, Texels] = {}

    def put(name: str, texels: Texels) -> str:
        """[N, 3 or 4] as an image; opaque where nothing else is said."""
        whole = np.zeros((height * width, 4), np.uint8)
        whole[:, 3] = 255
        whole[:count, : texels.shape[1]] = texels
        images[f"{name}.webp"] = whole.reshape(height, width, 4)
        return f"{name}.webp"

    stretched = np.sign(columns.means) * np.log1p(np.abs(columns.means.astype(np.float64)))
    low, high = stretched.min(axis=0), stretched.max(axis=0)
    whole = quantised((stretched - low) / np.where(high > low, high - low, 1.0) * 65535.0, 65535)
    files = [put("means_l", (whole & 255).astype(np.uint8)), put("means_u", (whole >> 8).astype(np.uint8))]
    meta["means"] = {"mins": low.tolist(), "maxs": high.tolist(), "files": files}
    place, rest = largest_and_rest(unit_quats(columns.quats))
    bytes_ = quantised((rest * math.sqrt(2.0) * 0.5 + 0.5) * 255.0, 255)
    meta["quats"] = {"files": [put("quats", np.column_stack([bytes_, place + LARGEST]).astype(np.uint8))]}
    scales = codebook(columns.log_scales.astype(np.float64), CODES)
    meta["scales"] = {"codebook": scales.tolist(), "files": [put("scales", nearest(columns.log_scales, scales))]}
    colours = codebook(columns.sh0.astype(np.float64), CODES)
    alpha = quantised(opacities_of(columns.logit_opacities) * 255.0, 255)
    texels = np.column_stack([nearest(columns.sh0, colours), alpha]).astype(np.uint8)
    meta["sh0"] = {"codebook": colours.tolist(), "files": [put("sh0", texels)]}
    if gaussians.sh_degree:
        labels, centroids, meta["shN"] = _harmonics(columns.shN, gaussians.sh_degree, gaussians.device)
        meta["shN"]["files"] = ["shN_centroids.webp", put("shN_labels", labels)]
        images["shN_centroids.webp"] = centroids
    return Encoded(_bundle(meta, images))


def _harmonics(shN: Floats, degree: int, device: torch.device) -> tuple[Texels, Texels, dict[str, Any]]:
    """([N, 3] labels, image of the palette, entry of the meta file)."""
    count, coefficients = shN.shape[:2]
    # As large as the program that the format comes from makes it.
    size = min(count, 1024 * min(64, 2 ** max(0, int(math.log2(max(count, 1024) / 1024)))))
    vectors = torch.from_numpy(shN.reshape(count, 3 * coefficients)).to(device)
    found, labels = (tensor.cpu().numpy() for tensor in palette(vectors, size))
    values = codebook(found.astype(np.float64), CODES)
    rows = -(-size // PALETTE_ROW)
    image = np.full((rows * PALETTE_ROW, coefficients, 4), 255, np.uint8)
    image[:size, :, :3] = nearest(found, values).reshape(size, coefficients, 3)
    image = image.reshape(rows, PALETTE_ROW * coefficients, 4)
    split = np.column_stack([labels & 255, labels >> 8, np.zeros_like(labels)]).astype(np.uint8)
    return split, image, {"count": size, "bands": degree, "codebook": values.tolist()}


def _bundle(meta: dict[str, Any], images: dict[str, Texels]) -> bytes:
    """A zip whose members are stored as they are, and whose bytes depend on the content alone."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(zipfile.ZipInfo("meta.json"), json.dumps(meta, allow_nan=False))
        for name, texels in images.items():
            packed = io.BytesIO()
            # exact: colours are data also where alpha is 0.
            Image.fromarray(texels, "RGBA").save(packed, "WEBP", lossless=True, exact=True)
            archive.writestr(zipfile.ZipInfo(name), packed.getvalue())
    return buffer.getvalue()
