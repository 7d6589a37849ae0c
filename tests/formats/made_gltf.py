"""Puts GLB files together from their parts."""

from __future__ import annotations

import json
import struct
from typing import Any

SPZ = "KHR_gaussian_splatting_compression_spz_2"


def parts_of(content: bytes) -> tuple[dict[str, Any], bytes]:
    """(the document, the binary part)."""
    (length,) = struct.unpack_from("<I", content, 12)
    return json.loads(content[20 : 20 + length]), content[28 + length :]


def glb(document: dict[str, Any], binary: bytes) -> bytes:
    text = json.dumps(document).encode()
    text += b" " * (-len(text) % 4)
    head = struct.pack("<4sII", b"glTF", 2, 28 + len(text) + len(binary))
    return head + struct.pack("<I4s", len(text), b"JSON") + text + struct.pack("<I4s", len(binary), b"BIN\0") + binary


def spz_glb(content: bytes, count: int, *, name: str = SPZ, inside: bool = True, **node: Any) -> bytes:
    """A GLB with the content of an SPZ file, as the draft of the extension describes it.

    inside: KHR_gaussian_splatting, in place of which earlier drafts stood. node: more of the node.
    """
    prefix = "KHR_gaussian_splatting:" if inside else "_"
    extensions: dict[str, Any] = {name: {"bufferView": 0}}
    if inside:
        extensions = {"KHR_gaussian_splatting": {"extensions": extensions}}
    placeholders = {"POSITION": "VEC3", "COLOR_0": "VEC4", f"{prefix}SCALE": "VEC3", f"{prefix}ROTATION": "VEC4"}
    document = {
        "asset": {"version": "2.0"},
        "extensionsUsed": ["KHR_gaussian_splatting", name],
        "extensionsRequired": ["KHR_gaussian_splatting", name],
        "nodes": [{"mesh": 0, **node}],
        "meshes": [
            {
                "primitives": [
                    {
                        "mode": 0,
                        "attributes": {attribute: place for place, attribute in enumerate(placeholders)},
                        "extensions": extensions,
                    }
                ]
            }
        ],
        "accessors": [
            {"componentType": 5121 if attribute == "COLOR_0" else 5126, "type": kind, "count": count}
            for attribute, kind in placeholders.items()
        ],
        "bufferViews": [{"buffer": 0, "byteOffset": 0, "byteLength": len(content)}],
        "buffers": [{"byteLength": len(content)}],
    }
    return glb(document, content + bytes(-len(content) % 4))
