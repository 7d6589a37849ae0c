"""Meshes as files: glTF (GLB), PLY and OBJ, each with the colours of its vertices."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splatcli import __version__
from splatcli.errors import UsageError
from splatcli.formats.gltf import ARRAY_BUFFER, FLOAT, asset_of, glb_bytes, linear_light
from splatcli.formats.quantisation import quantised
from splatcli.formats.transform import Z_TO_Y_UP
from splatcli.mesh.surface import Mesh

#: glTF's numbers of component types and buffer targets.
_USHORT, _UINT, _ELEMENTS = 5123, 5125, 34963
#: From the frame of a PLY, y down, to that of glTF: half a turn about z.
_HALF_TURN = np.diag([-1.0, -1.0, 1.0])

Write = Callable[[Mesh, Sequence[str], bool], bytes]


def format_of(path: Path) -> Write:
    """Return the function that encodes a mesh for a file of this name. Raises UsageError.

    It takes the mesh, comments, and whether z is up in the mesh, which only glTF asks for.
    """
    write = {".glb": encode_glb, ".ply": encode_ply, ".obj": encode_obj}.get(path.suffix.lower())
    if write is None:
        raise UsageError("a mesh is a .glb, a .ply or an .obj", where=path, remedy="-o mesh.glb")
    return write


def encode_glb(mesh: Mesh, comments: Sequence[str], z_up: bool) -> bytes:
    """Return a GLB with y up: positions, normals, linear colours; unlit, for the colours have the light in them."""
    turn = Z_TO_Y_UP[:3, :3] if z_up else _HALF_TURN
    positions, normals = ((rows @ turn.T).astype("<f4") for rows in (mesh.vertices, mesh.normals()))
    opaque = np.column_stack([linear_light(_colours(mesh)), np.ones(len(mesh.vertices))])
    colours = quantised(opaque * 65535.0, 65535).astype("<u2")
    indices = mesh.faces.astype("<u4").reshape(-1)
    tables: list[tuple[NDArray[Any], dict[str, Any], int]] = [
        (
            positions,
            {
                "componentType": FLOAT,
                "type": "VEC3",
                "min": positions.min(axis=0).tolist(),
                "max": positions.max(axis=0).tolist(),
            },
            ARRAY_BUFFER,
        ),
        (normals, {"componentType": FLOAT, "type": "VEC3"}, ARRAY_BUFFER),
        (colours, {"componentType": _USHORT, "type": "VEC4", "normalized": True}, ARRAY_BUFFER),
        (indices, {"componentType": _UINT, "type": "SCALAR"}, _ELEMENTS),
    ]
    views, accessors, offset = [], [], 0
    for number, (table, facts, target) in enumerate(tables):
        views.append({"buffer": 0, "byteOffset": offset, "byteLength": table.nbytes, "target": target})
        accessors.append({"bufferView": number, "count": len(table), **facts})
        offset += table.nbytes
    primitive = {"attributes": {"POSITION": 0, "NORMAL": 1, "COLOR_0": 2}, "indices": 3, "material": 0}
    material = {
        "pbrMetallicRoughness": {"metallicFactor": 0.0, "roughnessFactor": 1.0},
        "extensions": {"KHR_materials_unlit": {}},
    }
    document = {
        "asset": asset_of(comments),
        "extensionsUsed": ["KHR_materials_unlit"],
        "scene": 0,
        "scenes": [{"nodes": [0]}],
        "nodes": [{"name": "mesh", "mesh": 0}],
        "meshes": [{"primitives": [primitive]}],
        "materials": [material],
        "accessors": accessors,
        "bufferViews": views,
        "buffers": [{"byteLength": offset}],
    }
    binary = b"".join(np.ascontiguousarray(table).tobytes() for table, _, _ in tables)
    return glb_bytes(document, binary, remedy="larger voxels: --voxel, or --crop")


def encode_ply(mesh: Mesh, comments: Sequence[str], z_up: bool) -> bytes:
    """Return a binary PLY with the colours of the vertices."""
    vertices = np.empty(len(mesh.vertices), [("at", "<f4", 3), ("colour", "u1", 3)])
    vertices["at"], vertices["colour"] = mesh.vertices, _bytes(mesh)
    faces = np.empty(len(mesh.faces), [("count", "u1"), ("corners", "<i4", 3)])
    faces["count"], faces["corners"] = 3, mesh.faces
    header = [
        *("ply", "format binary_little_endian 1.0", f"comment splatcli {__version__}"),
        *(f"comment {line}" for line in comments),
        f"element vertex {len(vertices)}",
        *(f"property float {name}" for name in "xyz"),
        *(f"property uchar {name}" for name in ("red", "green", "blue")),
        f"element face {len(faces)}",
        *("property list uchar int vertex_indices", "end_header", ""),
    ]
    return "\n".join(header).encode() + vertices.tobytes() + faces.tobytes()


def encode_obj(mesh: Mesh, comments: Sequence[str], z_up: bool) -> bytes:
    """Return an OBJ whose vertices have red, green and blue in 0...1 behind their position, as most programs read."""
    file = io.StringIO()
    for line in (f"splatcli {__version__}", *comments):
        file.write(f"# {line}\n")
    np.savetxt(file, np.column_stack([mesh.vertices, _bytes(mesh) / 255.0]), fmt="v %.7g %.7g %.7g %.4f %.4f %.4f")
    np.savetxt(file, mesh.faces + 1, fmt="f %d %d %d")
    return file.getvalue().encode()


def _colours(mesh: Mesh) -> NDArray[np.float64]:
    assert mesh.colours is not None, "build_mesh() colours meshes"
    return mesh.colours


def _bytes(mesh: Mesh) -> NDArray[np.uint8]:
    return quantised(_colours(mesh) * 255.0, 255).astype(np.uint8)
