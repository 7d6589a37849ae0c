"""Binary glTF with KHR_gaussian_splatting, the Khronos extension: uncompressed, in a scene graph others can add to.

Gaussians are points with attributes for rotation (x y z w, of length 1), standard deviations, opacity and harmonics.
glTF has y up, so they are turned by half a turn about z. Read by gltf_read.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splatcli import __version__
from splatcli.errors import UsageError
from splatcli.formats.quantisation import (
    Encoded,
    ExportMetadata,
    colours_of,
    columns_of,
    opacities_of,
    quantised,
    scales_of,
    unit_quats,
)
from splatcli.formats.transform import half_turn
from splatcli.gaussians import Gaussians

EXTENSION = "KHR_gaussian_splatting"
MAGIC = b"glTF"
HEADER = struct.Struct("<4sII")
CHUNK = struct.Struct("<I4s")
JSON, BINARY = b"JSON", b"BIN\0"
POINTS = 0
FLOAT, BYTE = 5126, 5121
#: What photos are in, and Gaussians that were trained on them.
COLOUR_SPACE = "srgb_rec709_display"
_ARRAY_BUFFER = 34962
#: Lengths in a GLB are 32 bits wide.
_MAX_BYTES = (1 << 32) - 1


def encode_gltf(gaussians: Gaussians, told: ExportMetadata) -> Encoded:
    """The Gaussians as a GLB. Raises DivergedError for values that are not finite, UsageError beyond 4 GiB."""
    columns = half_turn(columns_of(gaussians))
    opacities = opacities_of(columns.logit_opacities)
    attributes: dict[str, NDArray[Any]] = {
        "POSITION": columns.means,
        "COLOR_0": _fallback(colours_of(columns.sh0), opacities),
        f"{EXTENSION}:ROTATION": unit_quats(columns.quats)[:, [1, 2, 3, 0]].astype("<f4"),
        f"{EXTENSION}:SCALE": scales_of(columns.log_scales).astype("<f4"),
        f"{EXTENSION}:OPACITY": opacities.astype("<f4"),
        f"{EXTENSION}:SH_DEGREE_0_COEF_0": columns.sh0,
    }
    for place in range(columns.shN.shape[1]):
        degree, coefficient = band_of(place + 1)
        attributes[f"{EXTENSION}:SH_DEGREE_{degree}_COEF_{coefficient}"] = columns.shN[:, place]
    document, binary = _document(attributes, told)
    text = json.dumps(document, allow_nan=False).encode()
    text += b" " * (-len(text) % 4)
    total = HEADER.size + 2 * CHUNK.size + len(text) + len(binary)
    if total > _MAX_BYTES:
        raise UsageError(f"{total:,} bytes; a GLB ends at 4 GiB", remedy="--sh-degree 0, --crop, or another format")
    parts = [HEADER.pack(MAGIC, 2, total), CHUNK.pack(len(text), JSON), text, CHUNK.pack(len(binary), BINARY), binary]
    note = "trained antialiased; glTF has no word for it, and viewers show it too thick"
    return Encoded(b"".join(parts), [note] if told.antialiased else [])


def band_of(place: int) -> tuple[int, int]:
    """(degree, place in its band) of an SH coefficient, the constant one being 0."""
    degree = int(place**0.5)
    return degree, place - degree**2


def _fallback(colours: NDArray[np.floating], opacities: NDArray[np.floating]) -> NDArray[np.uint8]:
    """[N, 4] what programs without the extension draw: linear colour and opacity in bytes."""
    shown = np.clip(colours, 0.0, 1.0)
    linear = np.where(shown <= 0.04045, shown / 12.92, ((shown + 0.055) / 1.055) ** 2.4)
    return quantised(np.column_stack([linear, opacities]) * 255.0, 255).astype(np.uint8)


def _document(attributes: dict[str, NDArray[Any]], told: ExportMetadata) -> tuple[dict[str, Any], bytes]:
    """(the JSON part, the binary part): a view and an accessor for each attribute, one after the other."""
    views: list[dict[str, Any]] = []
    accessors: list[dict[str, Any]] = []
    offset = 0
    for name, table in attributes.items():
        floating = table.dtype.kind == "f"
        width = 1 if table.ndim == 1 else table.shape[1]
        views.append({"buffer": 0, "byteOffset": offset, "byteLength": table.nbytes, "target": _ARRAY_BUFFER})
        accessor: dict[str, Any] = {
            "bufferView": len(accessors),
            "componentType": FLOAT if floating else BYTE,
            "count": len(table),
            "type": "SCALAR" if width == 1 else f"VEC{width}",
        }
        if not floating:
            accessor["normalized"] = True
        if name == "POSITION":
            accessor |= {"min": table.min(axis=0).tolist(), "max": table.max(axis=0).tolist()}
        accessors.append(accessor)
        offset += table.nbytes  # every row takes a multiple of four bytes, as glTF asks for
    primitive = {
        "mode": POINTS,
        "attributes": {name: place for place, name in enumerate(attributes)},
        "extensions": {
            EXTENSION: {
                "kernel": "ellipse",
                "colorSpace": COLOUR_SPACE,
                "projection": "perspective",
                "sortingMethod": "cameraDistance",
            }
        },
    }
    asset: dict[str, Any] = {"version": "2.0", "generator": f"splatcli {__version__}"}
    if told.comments:
        asset["extras"] = {"comments": list(told.comments)}
    document = {
        "asset": asset,
        "extensionsUsed": [EXTENSION],
        "scene": 0,
        "scenes": [{"nodes": [0]}],
        "nodes": [{"name": "gaussians", "mesh": 0}],
        "meshes": [{"primitives": [primitive]}],
        "accessors": accessors,
        "bufferViews": views,
        "buffers": [{"byteLength": offset}],
    }
    return document, b"".join(np.ascontiguousarray(table).tobytes() for table in attributes.values())
