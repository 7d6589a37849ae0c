"""Binary glTF with KHR_gaussian_splatting, the Khronos extension: uncompressed, in a scene graph others can add to.

Gaussians are points with attributes for rotation (x y z w, of length 1), standard deviations, opacity and harmonics.
glTF has y up, so they are turned by half a turn about z; those of a georeferenced scene, with z up, by a quarter turn
about x.

SPZ inside a GLB is read too, by the draft of its extension and by earlier ones.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import scipy
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from splatcli import __version__
from splatcli.checkpoint.foreign.imported import (
    Columns,
    Floats,
    ImportedModel,
)
from splatcli.config import first_fault
from splatcli.errors import ModelFileError, UsageError
from splatcli.formats.format import COLOUR_SPACE, Encoded, ExportMetadata, Format, file_size
from splatcli.formats.quantisation import (
    FLOAT_STEP,
    Doubles,
    beyond_row,
    colours_of,
    log_scales_of,
    logits_of,
    negative_row,
    opacities_of,
    quantised,
    scales_of,
    unit_quats,
)
from splatcli.formats.spz import ANTIALIASED, decode_spz
from splatcli.formats.transform import half_turn, placed, with_y_up
from splatcli.gaussians import SHN_COUNTS, Gaussians
from splatcli.scene.hdr import srgb_decoded

# --- nodes: the transform of a mesh is that of its node and of all its parents

Index = Annotated[int, Field(ge=0, lt=1 << 40)]
Real = Annotated[float, Field(allow_inf_nan=False)]
Three = Annotated[list[Real], Field(min_length=3, max_length=3)]
Four = Annotated[list[Real], Field(min_length=4, max_length=4)]
Sixteen = Annotated[list[Real], Field(min_length=16, max_length=16)]


class Node(BaseModel):
    """A node, with the names of glTF."""

    model_config = ConfigDict(extra="ignore")

    mesh: Index | None = None
    children: list[Index] = []
    matrix: Sixteen | None = None
    translation: Three = [0.0, 0.0, 0.0]
    rotation: Four = [0.0, 0.0, 0.0, 1.0]
    scale: Three = [1.0, 1.0, 1.0]

    def local(self) -> Doubles:
        """Return [4, 4] for column vectors, from the node's frame to its parent's. Raises ValueError."""
        if self.matrix is not None:
            return np.array(self.matrix).reshape(4, 4).T  # glTF goes column by column
        placed = np.eye(4)
        placed[:3, :3] = scipy.spatial.transform.Rotation.from_quat(self.rotation).as_matrix() * np.array(self.scale)
        placed[:3, 3] = self.translation
        return placed


def placement(nodes: Sequence[Node], mesh: int) -> Doubles:
    """Return [4, 4] for column vectors, from the frame of ``mesh`` to the scene's; the identity where no node has it.

    Raises ValueError, whose text names the fault, for nodes that are no tree and for a mesh in several places.
    """
    holders = [place for place, node in enumerate(nodes) if node.mesh == mesh]
    if len(holders) > 1:
        raise ValueError(f"{len(holders)} nodes show the Gaussians, {holders[0]} and {holders[1]} among them")
    parents: dict[int, int] = {}
    for place, node in enumerate(nodes):
        for child in node.children:
            if child >= len(nodes) or parents.setdefault(child, place) != place:
                raise ValueError(f"node {place} has the child {child}, which there is not or which is another's")
    matrix: Doubles = np.eye(4)
    passed: set[int] = set()
    above = holders[0] if holders else None
    while above is not None:
        if above in passed:
            raise ValueError(f"node {above} hangs under itself")
        passed.add(above)
        try:
            matrix = nodes[above].local() @ matrix
        except ValueError as error:
            raise ValueError(f"node {above}: {error}") from None
        above = parents.get(above)
    return matrix


EXTENSION = "KHR_gaussian_splatting"
MAGIC = b"glTF"
HEADER = struct.Struct("<4sII")
CHUNK = struct.Struct("<I4s")
JSON, BINARY = b"JSON", b"BIN\0"
POINTS = 0
FLOAT, BYTE = 5126, 5121
ARRAY_BUFFER = 34962
#: Lengths in a GLB are 32 bits wide.
_MAX_BYTES = (1 << 32) - 1


def encode_gltf(gaussians: Gaussians, metadata: ExportMetadata) -> Encoded:
    """Return the Gaussians as a GLB. Raises DivergedError for values that are not finite, UsageError beyond 4 GiB."""
    columns = with_y_up(Columns.of(gaussians), z_up=metadata.z_up)
    opacities = opacities_of(columns.opacities)
    attributes: dict[str, NDArray[Any]] = {
        "POSITION": columns.means,
        "COLOR_0": _fallback(colours_of(columns.sh0), opacities),
        f"{EXTENSION}:ROTATION": unit_quats(columns.quats)[:, [1, 2, 3, 0]].astype("<f4"),
        f"{EXTENSION}:SCALE": scales_of(columns.scales).astype("<f4"),
        f"{EXTENSION}:OPACITY": opacities.astype("<f4"),
        f"{EXTENSION}:SH_DEGREE_0_COEF_0": columns.sh0,
    }
    for place in range(columns.shN.shape[1]):
        degree, coefficient = band_of(place + 1)
        attributes[f"{EXTENSION}:SH_DEGREE_{degree}_COEF_{coefficient}"] = columns.shN[:, place]
    payload = glb_bytes(*_document(attributes, metadata), remedy="--sh-degree 0, --crop, or another format")
    return Encoded(payload, metadata.antialiased_notes("glTF"))


def glb_bytes(document: dict[str, Any], binary: bytes, *, remedy: str) -> bytes:
    """Return a GLB of its JSON part and its binary part, a multiple of 4 bytes. Raises UsageError beyond 4 GiB."""
    text = json.dumps(document, allow_nan=False).encode()
    text += b" " * (-len(text) % 4)
    total = HEADER.size + 2 * CHUNK.size + len(text) + len(binary)
    if total > _MAX_BYTES:
        raise UsageError(f"{total:,} bytes; a GLB ends at 4 GiB", remedy=remedy)
    parts = [HEADER.pack(MAGIC, 2, total), CHUNK.pack(len(text), JSON), text, CHUNK.pack(len(binary), BINARY), binary]
    return b"".join(parts)


def asset_of(comments: Sequence[str]) -> dict[str, Any]:
    """Return the asset of a document, with the comments in its extras."""
    asset: dict[str, Any] = {"version": "2.0", "generator": f"splatcli {__version__}"}
    return {**asset, "extras": {"comments": list(comments)}} if comments else asset


def band_of(place: int) -> tuple[int, int]:
    """Return (degree, place in its band) of an SH coefficient, the constant one being 0."""
    degree = int(place**0.5)
    return degree, place - degree**2


def _fallback(colours: NDArray[np.floating], opacities: NDArray[np.floating]) -> NDArray[np.uint8]:
    """Return [N, 4] what programs without the extension draw: linear colour and opacity in bytes."""
    return quantised(np.column_stack([linear_light(colours), opacities]) * 255.0, 255).astype(np.uint8)


def linear_light(colours: NDArray[np.floating]) -> NDArray[np.floating]:
    """Return display colours (sRGB), clamped to 0...1, as linear light, which glTF's COLOR_0 holds."""
    return srgb_decoded(np.clip(colours, 0.0, 1.0))


def _document(attributes: dict[str, NDArray[Any]], metadata: ExportMetadata) -> tuple[dict[str, Any], bytes]:
    """Return (the JSON part, the binary part): a view and an accessor for each attribute, one after the other."""
    views: list[dict[str, Any]] = []
    accessors: list[dict[str, Any]] = []
    offset = 0
    for name, table in attributes.items():
        floating = table.dtype.kind == "f"
        width = 1 if table.ndim == 1 else table.shape[1]
        views.append({"buffer": 0, "byteOffset": offset, "byteLength": table.nbytes, "target": ARRAY_BUFFER})
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
    document = {
        "asset": asset_of(metadata.comments),
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


# --- reading
#
# Every offset and count is compared with the binary chunk before anything is read through it.

#: glTF's numbers of types -> numpy's name, and the divisor of a normalised one.
_COMPONENTS = {5120: ("i1", 127), 5121: ("u1", 255), 5122: ("<i2", 32767), 5123: ("<u2", 65535), 5126: ("<f4", 0)}
_WIDTHS = {"SCALAR": 1, "VEC3": 3, "VEC4": 4}
#: Attributes whose integers may count as they are: POSITION by KHR_mesh_quantization.
_WHOLE = ("POSITION", f"{EXTENSION}:SCALE")
#: What drafts of the extension were like.
_DRAFTS = (
    "writers of the extension's drafts stored other values; export it again with a newer version of that program, or "
    "as PLY"
)
_COMPRESSED = "export it again without compression, or as PLY, SPZ or SOG"
#: splat-transform, whose versions 1 left the axes of a PLY, and up to 2.3 at least wrote logarithms of scales.
_TRANSFORM = re.compile(r"splat-transform (\d+)\.")
#: Names of the extension for SPZ. It is inside EXTENSION; the drafts with the last three had it in place of that.
_SPZ = (
    f"{EXTENSION}_compression_spz_2",
    f"{EXTENSION}_compression_spz",
    f"{EXTENSION}_spz_compression",
    "KHR_spz_gaussian_splats_compression",
    "KHR_spz_compression",
)
#: No scene of ours is described in more; it bounds what a bracket a byte can cost.
_MAX_JSON = 16 << 20


class _Named(BaseModel):
    """A part of the document, with the names of glTF."""

    model_config = ConfigDict(extra="ignore")


class _Accessor(_Named):
    bufferView: Index | None = None
    byteOffset: Index = 0
    componentType: int
    normalized: bool = False
    count: Index
    type: str
    sparse: Any = None


class _View(_Named):
    buffer: Index
    byteOffset: Index = 0
    byteLength: Index
    byteStride: Annotated[int, Field(ge=4, le=252)] | None = None
    extensions: dict[str, Any] = {}


class _Primitive(_Named):
    mode: int = 4
    attributes: dict[str, Index]
    extensions: dict[str, Any] = {}


class _Mesh(_Named):
    primitives: list[_Primitive]


class _Spz(_Named):
    """An extension for SPZ: the view that has the content of such a file."""

    bufferView: Index


class _Asset(_Named):
    """The part about the document itself."""

    generator: Any = None


class _Document(_Named):
    """The JSON part, as far as it is needed."""

    asset: _Asset = _Asset()
    accessors: list[_Accessor] = []
    bufferViews: list[_View] = []
    meshes: list[_Mesh] = []
    nodes: list[Node] = []


def import_gltf(path: Path, *, lenient: bool = False) -> ImportedModel:
    """Return the Gaussians of a GLB, in the frame of a PLY. Raises ModelFileError, and as decode_spz() for SPZ."""
    glb = _Glb.read(path)
    mesh, primitive, spz, notes = glb.primitive()
    origin, antialiased = "glTF", False
    if spz:
        header, columns, framed, more = decode_spz(glb.spz_content(*spz), path, lenient=lenient)
        glb.check_count(primitive, header.count)
        origin, antialiased = f"glTF with SPZ version {header.version}", bool(header.flags & ANTIALIASED)
        notes += more
        # Cesium's programs, which write and show most such files, take the stored numbers for those of the mesh.
        columns = half_turn(columns) if framed else columns
    else:
        columns = glb.uncompressed(primitive, notes)
    with np.errstate(all="ignore"):  # numbers that are not finite are refused later, with their place
        columns = half_turn(glb.in_scene(columns, mesh))
    return ImportedModel(
        origin,
        Columns.tensors(**columns._asdict()),
        declared=True,
        sealed=True,
        antialiased=antialiased,
        notes=notes,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Glb:
    """An opened GLB: its JSON part, its binary part, and its path, for messages."""

    document: _Document
    binary: memoryview
    path: Path

    @classmethod
    def read(cls, path: Path) -> _Glb:
        """Return the GLB at ``path``. Raises ModelFileError for a damaged one."""
        size = file_size(path)
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
            raise ModelFileError(f"its JSON part is not glTF's: {first_fault(error, 'the text')}", where=path) from None
        except (ValueError, RecursionError) as error:
            raise ModelFileError(f"its JSON part cannot be read: {str(error)[:200]}", where=path) from None
        return cls(document, parts.get(BINARY, memoryview(b"")), path)

    def primitive(self) -> tuple[int, _Primitive, tuple[str, object] | None, list[str]]:
        """Return the number of the mesh with Gaussians, their primitive, an extension for SPZ with its name, and notes.

        Raises ModelFileError where there is none, or more than one, and for a form of them that is not read.
        """
        found = [
            (place, primitive)
            for place, mesh in enumerate(self.document.meshes)
            for primitive in mesh.primitives
            if not primitive.extensions.keys().isdisjoint((EXTENSION, *_SPZ))
        ]
        if not found:
            raise ModelFileError(
                f"no Gaussians ({EXTENSION}) are in it",
                where=self.path,
                remedy="meshes and points are not read as models",
            )
        if len(found) > 1:
            raise ModelFileError(
                f"{len(found)} sets of Gaussians ({EXTENSION}); one is read",
                where=self.path,
                remedy="export the one that is wanted from the program that made it",
            )
        ((mesh, primitive),) = found
        if primitive.mode != POINTS:
            raise ModelFileError(
                f"the Gaussians have mode {primitive.mode}; points ({POINTS}) are expected", where=self.path
            )
        extension = primitive.extensions.get(EXTENSION)
        if not isinstance(extension, dict):
            extension = {}
        inner = extension.get("extensions")
        known = primitive.extensions | (inner if isinstance(inner, dict) else {})
        spz = next(((name, known[name]) for name in _SPZ if name in known), None)
        if inner and not spz:
            name = next(iter(inner)) if isinstance(inner, dict) else inner
            raise ModelFileError(
                f"the Gaussians are stored by {str(name)[:100]}, which is not read", where=self.path, remedy=_COMPRESSED
            )
        kernel = extension.get("kernel", "ellipse" if spz else None)  # the drafts with SPZ had no word for it
        if kernel != "ellipse":
            raise ModelFileError(f"kernel is {str(kernel)[:40]!r}; 'ellipse' is known", where=self.path, remedy=_DRAFTS)
        notes = []
        space = extension.get("colorSpace", COLOUR_SPACE if spz else None)
        if space != COLOUR_SPACE:
            notes.append(f"its colour space is {str(space)[:40]!r}; it is taken for {COLOUR_SPACE}")
        return mesh, primitive, spz, notes

    def uncompressed(self, primitive: _Primitive, notes: list[str]) -> Columns[Floats]:
        """Return the Gaussians of a primitive's attributes, in its mesh's frame; add notes on what was put right."""
        degree = max((d for d in (1, 2, 3) if f"{EXTENSION}:SH_DEGREE_{d}_COEF_0" in primitive.attributes), default=0)
        count = -1

        def table(name: str, width: int) -> Doubles:
            """Return [N, width] of an attribute; all have as many rows."""
            nonlocal count
            place = primitive.attributes.get(name)
            if place is None:
                raise ModelFileError(f"the Gaussians have no {name}", where=self.path, remedy=_DRAFTS)
            values = self._values(place, name, width)
            if count >= 0 and len(values) != count:
                raise ModelFileError(f"{name} has {len(values):,} rows; POSITION has {count:,}", where=self.path)
            count = len(values)
            return values

        means = table("POSITION", 3)
        rotations = table(f"{EXTENSION}:ROTATION", 4)
        scales, opacities = table(f"{EXTENSION}:SCALE", 3), table(f"{EXTENSION}:OPACITY", 1)[:, 0]
        found = _TRANSFORM.match(str(self.document.asset.generator))
        if logarithms := found is not None and bool((scales < 0).any()):
            notes.append(f"its scales are logarithms, as {found[0]}x wrote them")
        for name, row, what in (
            ("SCALE", None if logarithms else negative_row(scales), "a standard deviation below 0"),
            ("OPACITY", beyond_row(opacities), "an opacity outside 0 to 1"),
        ):
            if row is not None:
                raise ModelFileError(what, where=f"{self.path}: {EXTENSION}:{name}", remedy=_DRAFTS)
        sh0 = table(f"{EXTENSION}:SH_DEGREE_0_COEF_0", 3)
        shN = np.zeros((count, SHN_COUNTS[degree], 3), np.float32)
        with np.errstate(over="ignore"):
            for place in range(SHN_COUNTS[degree]):
                band, coefficient = band_of(place + 1)
                shN[:, place] = table(f"{EXTENSION}:SH_DEGREE_{band}_COEF_{coefficient}", 3)
            columns = Columns(
                means.astype(np.float32),
                rotations[:, [3, 0, 1, 2]].astype(np.float32),
                (scales if logarithms else log_scales_of(scales)).astype(np.float32),
                logits_of(opacities, FLOAT_STEP).astype(np.float32),
                sh0.astype(np.float32),
                shN,
            )
            if found is None or found[1] != "1":
                return columns
            notes.append(f"its axes are those of a PLY, as {found[0]}x wrote them; other programs show it upside down")
            return half_turn(columns)

    def spz_content(self, name: str, extension: object) -> bytes:
        """Return the content of an SPZ file that the extension ``name`` refers to."""
        where = f"{self.path}: {name}"
        try:
            view = self._view(_Spz.model_validate(extension).bufferView, where)
        except ValidationError as error:
            raise ModelFileError(first_fault(error, "the extension"), where=where) from None
        if view.byteOffset + view.byteLength > len(self.binary):
            raise ModelFileError(
                f"its {view.byteLength:,} bytes from byte {view.byteOffset:,} do not lie inside the "
                f"{len(self.binary):,} bytes that are there",
                where=where,
            )
        return bytes(self.binary[view.byteOffset : view.byteOffset + view.byteLength])

    def check_count(self, primitive: _Primitive, count: int) -> None:
        """Raise ModelFileError where POSITION names another number than the ``count`` Gaussians of the SPZ."""
        place, accessors = primitive.attributes.get("POSITION"), self.document.accessors
        named = count if place is None or place >= len(accessors) else accessors[place].count
        if named != count:
            raise ModelFileError(f"the SPZ in it has {count:,} Gaussians; POSITION has {named:,}", where=self.path)

    def in_scene(self, columns: Columns[Floats], mesh: int) -> Columns[Floats]:
        """Return the Gaussians where the nodes show them."""
        try:
            matrix = placement(self.document.nodes, mesh)
        except ValueError as error:
            raise ModelFileError(str(error), where=self.path) from None
        return placed(columns, matrix, self.path)

    def _values(self, place: int, name: str, width: int) -> Doubles:
        """Return [N, width] of an accessor, as real numbers."""
        where = f"{self.path}: {name}"
        if place >= len(self.document.accessors):
            raise ModelFileError(f"accessor {place} of {len(self.document.accessors)}", where=where)
        accessor = self.document.accessors[place]
        if accessor.bufferView is None or accessor.sparse is not None:
            how = "sparse" if accessor.sparse is not None else "not in a view of the file"
            raise ModelFileError(f"its values are {how}", where=where, remedy=_COMPRESSED)
        view = self._view(accessor.bufferView, where)
        kind, divisor = _COMPONENTS.get(accessor.componentType, ("", 0))
        if not accessor.normalized and name in _WHOLE:
            divisor = 0
        if not kind or (divisor and not accessor.normalized) or _WIDTHS.get(accessor.type) != width:
            raise ModelFileError(
                f"{accessor.type[:20]} of type {accessor.componentType}; {width} floats or normalised integers are "
                "wanted",
                where=where,
            )
        item = np.dtype(kind).itemsize * width
        stride = view.byteStride or item
        start = view.byteOffset + accessor.byteOffset
        inside = accessor.byteOffset + stride * max(0, accessor.count - 1) + item <= view.byteLength
        if not inside or stride < item or view.byteOffset + view.byteLength > len(self.binary):
            raise ModelFileError(
                f"{accessor.count:,} rows from byte {start:,} do not lie inside the {len(self.binary):,} bytes that "
                "are there",
                where=where,
            )
        if not accessor.count:
            return np.zeros((0, width))
        rows = np.ndarray((accessor.count, width), kind, self.binary, start, (stride, np.dtype(kind).itemsize))
        with np.errstate(invalid="ignore"):  # a signalling NaN; NaN are refused later, with their place
            wide = rows.astype(np.float64)
        return np.maximum(wide / divisor, -1.0) if divisor else wide

    def _view(self, place: int, where: str) -> _View:
        """Return a view of the file's own binary part. Raises ModelFileError for any other and a compressed one."""
        if place >= len(self.document.bufferViews):
            raise ModelFileError(f"view {place} of {len(self.document.bufferViews)}", where=where)
        view = self.document.bufferViews[place]
        if (packed := next((name for name in view.extensions if "compression" in name), None)) is not None:
            raise ModelFileError(
                f"its values are stored by {packed[:100]}, which is not read", where=where, remedy=_COMPRESSED
            )
        if view.buffer != 0:
            raise ModelFileError(
                f"its values are in buffer {view.buffer}, outside the file", where=where, remedy=_COMPRESSED
            )
        return view


def is_gltf(head: bytes) -> bool:
    """Return whether a file begins as binary glTF does."""
    return head.startswith(MAGIC)


FORMAT = Format("glb", ".glb", "a binary glTF", 3, encode_gltf, import_gltf, is_gltf, has_comments=True)
