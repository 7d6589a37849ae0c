"""Reads the Gaussians of a binary glTF with KHR_gaussian_splatting; gltf tells what they are.

Every offset and count is compared with the binary chunk before anything is read through it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from splatcli.checkpoint.foreign.stored import ImportedModel
from splatcli.errors import ModelFileError
from splatcli.formats.bounds import file_size
from splatcli.formats.gltf import BINARY, CHUNK, COLOUR_SPACE, EXTENSION, HEADER, JSON, MAGIC, POINTS, band_of
from splatcli.formats.gltf_nodes import Index, Node, placement
from splatcli.formats.quantisation import Columns, Doubles, log_scales_of, logits_of, stored_of
from splatcli.formats.transform import half_turn, placed
from splatcli.gaussians import SH_REST

#: glTF's numbers of types -> numpy's name, and the divisor of a normalised one.
_COMPONENTS = {5120: ("i1", 127), 5121: ("u1", 255), 5122: ("<i2", 32767), 5123: ("<u2", 65535), 5126: ("<f4", 0)}
_WIDTHS = {"SCALAR": 1, "VEC3": 3, "VEC4": 4}
#: No scene of ours is described in more; it bounds what a bracket a byte can cost.
_MAX_JSON = 16 << 20
#: A float opacity is as fine as this near 1.
_FLOAT_STEP = 4 * 2.0**-23


class _Named(BaseModel):
    """With the names of glTF."""

    model_config = ConfigDict(extra="ignore")


class _Accessor(_Named):
    bufferView: Index
    byteOffset: Index = 0
    componentType: int
    normalized: bool = False
    count: Index
    type: str
    sparse: None = None


class _View(_Named):
    buffer: Literal[0]
    byteOffset: Index = 0
    byteLength: Index
    byteStride: Annotated[int, Field(ge=4, le=252)] | None = None


class _Primitive(_Named):
    mode: int = 4
    attributes: dict[str, Index]
    extensions: dict[str, Any] = {}


class _Mesh(_Named):
    primitives: list[_Primitive]


class _Document(_Named):
    """The JSON part, as far as it is needed."""

    accessors: list[_Accessor] = []
    bufferViews: list[_View] = []
    meshes: list[_Mesh] = []
    nodes: list[Node] = []


def read_stored_gltf(path: Path, *, lenient: bool = False) -> ImportedModel:
    """What the first Gaussians of a GLB are, in the frame of a PLY. Raises ModelFileError."""
    size = file_size(path)
    document, binary = _chunks(path, size)
    found = [
        (place, primitive)
        for place, mesh in enumerate(document.meshes)
        for primitive in mesh.primitives
        if EXTENSION in primitive.extensions
    ]
    if len(found) != 1:
        raise ModelFileError(
            f"{len(found)} sets of Gaussians ({EXTENSION}); one is read",
            where=path,
            remedy="export the one that is wanted from the program that made it",
        )
    ((mesh, primitive),) = found
    if primitive.mode != POINTS:
        raise ModelFileError(f"the Gaussians have mode {primitive.mode}; points ({POINTS}) are expected", where=path)
    told = primitive.extensions[EXTENSION]
    kernel = told.get("kernel") if isinstance(told, dict) else None
    if kernel != "ellipse":
        raise ModelFileError(f"kernel is {kernel!r}; 'ellipse' is known", where=path)
    notes = []
    if told.get("colorSpace") != COLOUR_SPACE:
        notes.append(f"its colour space is {str(told.get('colorSpace'))[:40]!r}; it is taken for {COLOUR_SPACE}")
    degree = max((d for d in (1, 2, 3) if f"{EXTENSION}:SH_DEGREE_{d}_COEF_0" in primitive.attributes), default=0)
    count = -1

    def table(name: str, width: int) -> Doubles:
        """[N, width] of an attribute; all have as many rows."""
        nonlocal count
        place = primitive.attributes.get(name)
        if place is None:
            raise ModelFileError(f"the Gaussians have no {name}", where=path)
        values = _values(document, place, name, width, binary, path)
        if count >= 0 and len(values) != count:
            raise ModelFileError(f"{name} has {len(values):,} rows; POSITION has {count:,}", where=path)
        count = len(values)
        return values

    means = table("POSITION", 3)
    rotations = table(f"{EXTENSION}:ROTATION", 4)
    scales, opacities = table(f"{EXTENSION}:SCALE", 3), table(f"{EXTENSION}:OPACITY", 1)[:, 0]
    if bool((scales < 0).any()):
        raise ModelFileError("a standard deviation below 0", where=f"{path}: {EXTENSION}:SCALE")
    sh0 = table(f"{EXTENSION}:SH_DEGREE_0_COEF_0", 3)
    shN = np.zeros((count, SH_REST[degree], 3), np.float32)
    with np.errstate(over="ignore"):
        for place in range(SH_REST[degree]):
            band, coefficient = band_of(place + 1)
            shN[:, place] = table(f"{EXTENSION}:SH_DEGREE_{band}_COEF_{coefficient}", 3)
        columns = Columns(
            means.astype(np.float32),
            rotations[:, [3, 0, 1, 2]].astype(np.float32),
            log_scales_of(scales).astype(np.float32),
            logits_of(opacities, _FLOAT_STEP).astype(np.float32),
            sh0.astype(np.float32),
            shN,
        )
        columns = half_turn(_placed(columns, document, mesh, path))
    return stored_of("glTF", **columns._asdict(), notes=notes)


def _chunks(path: Path, size: int) -> tuple[_Document, memoryview]:
    """(the JSON part, the binary part)."""
    content = memoryview(path.read_bytes())
    if size < HEADER.size + CHUNK.size or content[:4] != MAGIC:
        raise ModelFileError(f"not a GLB: it starts with {bytes(content[:4])!r}", where=path)
    _, version, length = HEADER.unpack_from(content)
    if version != 2:
        raise ModelFileError(f"glTF version {version}; 2 is known", where=path)
    if length > size:
        raise ModelFileError(f"{length:,} bytes are promised, {size:,} are there: truncated", where=path)
    parts: dict[bytes, memoryview] = {}
    place = HEADER.size
    while place + CHUNK.size <= length:
        chunk, kind = CHUNK.unpack_from(content, place)
        place += CHUNK.size
        if chunk > length - place:
            raise ModelFileError(f"a chunk of {chunk:,} bytes where {length - place:,} are left", where=path)
        parts.setdefault(kind, content[place : place + chunk])
        place += chunk
    text = parts.get(JSON, memoryview(b""))
    if len(text) > _MAX_JSON:
        raise ModelFileError(f"{len(text):,} bytes of JSON; {_MAX_JSON:,} are allowed", where=path)
    try:
        document = _Document.model_validate(json.loads(bytes(text)))
    except ValidationError as error:
        first = error.errors()[0]
        place_ = ".".join(map(str, first["loc"]))
        raise ModelFileError(f"its JSON part is not glTF's: {place_[:100]}: {first['msg'][:200]}", where=path) from None
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"its JSON part cannot be read: {str(error)[:200]}", where=path) from None
    return document, parts.get(BINARY, memoryview(b""))


def _placed(columns: Columns, document: _Document, mesh: int, path: Path) -> Columns:
    """The Gaussians where the nodes show them."""
    try:
        matrix = placement(document.nodes, mesh)
    except ValueError as error:
        raise ModelFileError(str(error), where=path) from None
    return placed(columns, matrix, path)


def _values(document: _Document, place: int, name: str, width: int, binary: memoryview, path: Path) -> Doubles:
    """[N, width] of an accessor, as real numbers."""
    where = f"{path}: {name}"
    if place >= len(document.accessors):
        raise ModelFileError(f"accessor {place} of {len(document.accessors)}", where=where)
    accessor = document.accessors[place]
    if accessor.bufferView >= len(document.bufferViews):
        raise ModelFileError(f"view {accessor.bufferView} of {len(document.bufferViews)}", where=where)
    view = document.bufferViews[accessor.bufferView]
    kind, divisor = _COMPONENTS.get(accessor.componentType, ("", 0))
    if not kind or (divisor and not accessor.normalized) or _WIDTHS.get(accessor.type) != width:
        raise ModelFileError(
            f"{accessor.type[:20]} of type {accessor.componentType}; {width} floats or normalised integers are wanted",
            where=where,
        )
    item = np.dtype(kind).itemsize * width
    stride = view.byteStride or item
    start = view.byteOffset + accessor.byteOffset
    inside = accessor.byteOffset + stride * max(0, accessor.count - 1) + item <= view.byteLength
    if not inside or stride < item or view.byteOffset + view.byteLength > len(binary):
        raise ModelFileError(
            f"{accessor.count:,} rows from byte {start:,} do not lie inside the {len(binary):,} bytes that are there",
            where=where,
        )
    if not accessor.count:
        return np.zeros((0, width))
    rows = np.ndarray((accessor.count, width), kind, binary, start, (stride, np.dtype(kind).itemsize))
    with np.errstate(invalid="ignore"):  # a signalling NaN; NaN are refused later, with their place
        wide = rows.astype(np.float64)
    return np.maximum(wide / divisor, -1.0) if divisor else wide
