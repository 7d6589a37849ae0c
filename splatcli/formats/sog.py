"""SOG version 2, PlayCanvas' splats as lossless WebP images with codebooks, in a zip: ten to twenty times smaller.

One texel a Gaussian, row by row, in Morton order: positions of 16 bits an axis on a logarithmic measure, rotations as
the three smallest components in bytes, log-scales and colours through codebooks of 256, harmonics through a palette.
Coordinates are those of a PLY.

Version 1 is read as well. It has ranges where version 2 has codebooks, and stores the opacity's logit by one too.
"""

from __future__ import annotations

import io
import json
import math
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from torch import Tensor

from splatcli import __version__
from splatcli.checkpoint.foreign.imported import (
    Columns,
    Floats,
    ImportedModel,
)
from splatcli.config import first_fault
from splatcli.errors import ModelFileError, UsageError, VersionError, first_line
from splatcli.formats.format import (
    Encoded,
    ExportMetadata,
    Format,
    check_expansion,
    file_size,
    first_member,
    refused_discs,
)
from splatcli.formats.quantisation import (
    Doubles,
    from_smallest_three,
    logits_of,
    opacities_of,
    quantised,
    smallest_three,
    unit_quats,
)
from splatcli.gaussians import SHN_COUNTS, Gaussians
from splatcli.progress import track
from splatcli.scene.points import morton_order

# --- k-means: codebooks of numbers and palettes of vectors

_CODEBOOK_ROUNDS = 20
_PALETTE_ROUNDS = 6
#: Up to so many centroids are found at once; more of them in two levels, which takes a fraction of the time: with k
#: centroids in k**0.5 groups every vector is compared with 2 k**0.5 of them instead of k.
_FLAT = 256
#: Entries of a table of distances at a time.
_BLOCK = 1 << 22


def codebook(values: Doubles, size: int) -> Doubles:
    """Return [size] ascending numbers, such that each value has one close to it: Lloyd's rounds from a mixed start.

    Half of the start follows the values and half spans their range evenly, so that rare extremes are not forgotten.
    """
    ordered = np.sort(values, axis=None)
    different = np.unique(ordered)
    if len(different) <= size:
        return np.concatenate([different, np.repeat(different[-1:], size - len(different))])
    by_rank = ordered[np.linspace(0, len(ordered) - 1, size - size // 2).astype(np.int64)]
    evenly = np.linspace(ordered[0], ordered[-1], size // 2 + 2)[1:-1]
    centres = np.sort(np.concatenate([by_rank, evenly]))
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    for _ in range(_CODEBOOK_ROUNDS):
        borders = np.searchsorted(ordered, (centres[1:] + centres[:-1]) / 2)
        ends = np.concatenate([[0], borders, [len(ordered)]])
        counts = np.diff(ends)
        centres = np.where(counts > 0, np.diff(sums[ends]) / np.maximum(counts, 1), centres)
    return np.sort(centres)


def nearest(values: NDArray[np.floating], centres: Doubles) -> NDArray[np.uint8]:
    """Return the place of the closest of up to 256 ascending ``centres`` for each value."""
    return np.searchsorted((centres[1:] + centres[:-1]) / 2, values).astype(np.uint8)


def palette(vectors: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return ([size, D] centroids, [N] the place of each vector's centroid) of ``vectors`` [N, D], N >= size.

    Deterministic on one device. Runs where the vectors are.
    """
    generator = torch.Generator().manual_seed(0)
    if size <= _FLAT:
        return _lloyd(vectors, size, generator)
    groups, members = _lloyd(vectors, math.isqrt(size), generator)
    counts = torch.bincount(members, minlength=len(groups))
    shares = _shares(counts, size)
    order = members.argsort(stable=True)
    centroids, labels = [], torch.empty_like(members)
    first = 0
    parts = zip(torch.split(order, counts.tolist()), shares, strict=True)
    for rows, share in track(parts, "SH palette", len(shares)):
        if share:
            found, places = _lloyd(vectors[rows], share, generator)
            centroids.append(found)
            labels[rows] = places + first
            first += share
    return torch.cat(centroids), labels


def _shares(counts: Tensor, size: int) -> list[int]:
    """Return each group's number of the ``size`` centroids: in proportion, at least one, at most one a vector."""
    total = int(counts.sum())
    shares = [min(count, max(1, count * size // total)) for count in counts.tolist()]
    largest = counts.argsort(descending=True).tolist()
    while (missing := size - sum(shares)) != 0:
        step = 1 if missing > 0 else -1
        for group in largest:
            if missing and 1 <= shares[group] + step <= int(counts[group]):
                shares[group] += step
                missing -= step
    return shares


def _lloyd(vectors: Tensor, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return (centroids, labels) by k-means from randomly chosen vectors; a centroid without vectors stays."""
    start = torch.randperm(len(vectors), generator=generator)[:size].sort().values.to(vectors.device)
    centroids = vectors[start].clone()
    if size == len(vectors):
        return centroids, torch.arange(size, device=vectors.device)
    for _ in range(_PALETTE_ROUNDS):
        sums, counts = torch.zeros_like(centroids), centroids.new_zeros(size)
        for block in _blocks(vectors, size):
            # A product instead of a scatter: the same bits each time, also on a GPU, and faster for so few centroids.
            chosen = torch.nn.functional.one_hot(_assigned(block, centroids), size).to(vectors.dtype)
            sums += chosen.T @ block
            counts += chosen.sum(dim=0)
        centroids = torch.where(counts[:, None] > 0, sums / counts.clamp_min(1)[:, None], centroids)
    return centroids, torch.cat([_assigned(block, centroids) for block in _blocks(vectors, size)])


def _blocks(vectors: Tensor, size: int) -> tuple[Tensor, ...]:
    """Return the vectors in parts whose tables of distances to ``size`` centroids are of bounded size."""
    return torch.split(vectors, max(1, _BLOCK // size))


def _assigned(vectors: Tensor, centroids: Tensor) -> Tensor:
    """Return [N] the place of the nearest centroid; distances are compared without the part that all share."""
    return (0.5 * (centroids**2).sum(dim=1) - vectors @ centroids.T).argmin(dim=1)


VERSION = 2
#: The index of a streamed SOG, and both kinds of indices.
STREAMED = "lod-meta.json"
INDICES = ("meta.json", STREAMED)
CODES = 256
#: The alpha of a rotation is this plus the place of the largest component.
LARGEST = 252
#: Palette entries in a row of the image of centroids.
PALETTE_ROW = 64
#: The side that WebP ends at.
_MAX_SIDE = 16383

Texels = NDArray[np.uint8]


def encode_sog(gaussians: Gaussians, metadata: ExportMetadata, entries: int = 1 << 16) -> Encoded:
    """Return the Gaussians as a bundled SOG. Raises DivergedError for values that are not finite.

    The palette of harmonics is found where the Gaussians are: on a GPU in seconds.
    entries: of the palette at most.
    """
    order = torch.from_numpy(morton_order(Columns.of(gaussians).means))
    ordered = gaussians.map(lambda tensor: tensor[order.to(tensor.device)])
    return Encoded(_bundle(sog_files(ordered, antialiased=metadata.antialiased, entries=entries)))


def sog_files(gaussians: Gaussians, *, antialiased: bool = False, entries: int = 1 << 16) -> dict[str, bytes]:
    """Return the files of an unbundled SOG by name, meta.json first; the Gaussians keep their order.

    entries: as of encode_sog(). Raises DivergedError for values that are not finite.
    """
    columns = Columns.of(gaussians)
    count = len(gaussians)
    width = math.ceil(math.sqrt(count) / 4) * 4
    height = math.ceil(count / width / 4) * 4
    if width > _MAX_SIDE:
        raise UsageError(
            f"{count:,} Gaussians do not fit into images of {_MAX_SIDE} pixels", remedy="use another format"
        )
    meta: dict[str, Any] = {"version": VERSION, "asset": {"generator": f"splatcli {__version__}"}, "count": count}
    if antialiased:
        meta |= {"model": "antialiased", "antialias": True}  # as splat-transform names it, and the format's description
    images: dict[str, Texels] = {}

    def put(name: str, texels: Texels) -> str:
        """Keep [N, 3 or 4] as an image, opaque where nothing else is said, and return the name of its file."""
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
    largest, others = smallest_three(unit_quats(columns.quats))
    bytes_ = quantised((others * math.sqrt(2.0) * 0.5 + 0.5) * 255.0, 255)
    meta["quats"] = {"files": [put("quats", np.column_stack([bytes_, largest + LARGEST]).astype(np.uint8))]}
    scales = codebook(columns.scales.astype(np.float64), CODES)
    meta["scales"] = {"codebook": scales.tolist(), "files": [put("scales", nearest(columns.scales, scales))]}
    colours = codebook(columns.sh0.astype(np.float64), CODES)
    alpha = quantised(opacities_of(columns.opacities) * 255.0, 255)
    texels = np.column_stack([nearest(columns.sh0, colours), alpha]).astype(np.uint8)
    meta["sh0"] = {"codebook": colours.tolist(), "files": [put("sh0", texels)]}
    if gaussians.sh_degree:
        labels, centroids, meta["shN"] = _harmonics(columns.shN, gaussians.sh_degree, gaussians.device, entries)
        meta["shN"]["files"] = ["shN_centroids.webp", put("shN_labels", labels)]
        images["shN_centroids.webp"] = centroids
    described = {"meta.json": json.dumps(meta, allow_nan=False).encode()}
    return described | {name: _webp(texels) for name, texels in images.items()}


def _harmonics(shN: Floats, degree: int, device: torch.device, entries: int) -> tuple[Texels, Texels, dict[str, Any]]:
    """Return ([N, 3] labels, image of the palette, entry of the meta file). entries: of the palette at most."""
    count, coefficients = shN.shape[:2]
    # As large as the program that the format comes from makes it.
    size = min(count, entries, 1024 * min(64, 2 ** max(0, int(math.log2(max(count, 1024) / 1024)))))
    vectors = torch.from_numpy(shN.reshape(count, 3 * coefficients)).to(device)
    found, labels = (tensor.cpu().numpy() for tensor in palette(vectors, size))
    values = codebook(found.astype(np.float64), CODES)
    rows = -(-size // PALETTE_ROW)
    image = np.full((rows * PALETTE_ROW, coefficients, 4), 255, np.uint8)
    image[:size, :, :3] = nearest(found, values).reshape(size, coefficients, 3)
    image = image.reshape(rows, PALETTE_ROW * coefficients, 4)
    split = np.column_stack([labels & 255, labels >> 8, np.zeros_like(labels)]).astype(np.uint8)
    return split, image, {"count": size, "bands": degree, "codebook": values.tolist()}


def _webp(texels: Texels) -> bytes:
    """Return [H, W, 4] as a lossless image."""
    packed = io.BytesIO()
    # exact: colours are data also where alpha is 0.
    Image.fromarray(texels, "RGBA").save(packed, "WEBP", lossless=True, exact=True)
    return packed.getvalue()


def _bundle(members: dict[str, bytes]) -> bytes:
    """Return a zip whose members are stored as they are, and whose bytes depend on the content alone."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return buffer.getvalue()


# --- reading: a zip, or a folder of images beside its meta.json

#: Codebooks take some twenty kilobytes.
_MAX_META = 4 << 20
_MAX_MEMBERS = 1000

Finite = Annotated[float, Field(allow_inf_nan=False)]
Vector = Annotated[list[Finite], Field(min_length=3, max_length=3)]


def _filled(codebook: object) -> object:
    """Return a codebook with a number in place of a first entry that is null: the one that PlayCanvas' engine takes.

    SuperSplat wrote null where no value belonged to that entry.
    """
    if not (isinstance(codebook, list) and len(codebook) == CODES and codebook[0] is None):
        return codebook
    try:
        return [codebook[1] + (codebook[1] - codebook[-1]) / (CODES - 1), *codebook[1:]]
    except (TypeError, OverflowError):  # more that is no number, which is an error below
        return codebook


Codebook = Annotated[list[Finite], BeforeValidator(_filled), Field(min_length=CODES, max_length=CODES)]
Name = Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[^/\\\x00]+$")]
Files = Annotated[list[Name], Field(min_length=1, max_length=2)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore")
    files: Files


class _Means(_Part):
    mins: Vector
    maxs: Vector


class _Coded(_Part):
    codebook: Codebook


class _Harmonics(_Coded):
    count: Annotated[int, Field(ge=1, le=1 << 16)]
    bands: Annotated[int, Field(ge=1, le=3)]


class _Meta(BaseModel):
    """meta.json, as far as it is needed."""

    model_config = ConfigDict(extra="ignore")
    count: Annotated[int, Field(ge=1, le=1 << 28)]
    model: str | None = None
    antialias: bool | None = None
    means: _Means
    quats: _Part
    scales: _Coded
    sh0: _Coded
    shN: _Harmonics | None = None


class _Range(BaseModel):
    """The values of the bytes 0 and 255 in each channel, of version 1."""

    model_config = ConfigDict(extra="ignore")
    mins: list[Finite]
    maxs: list[Finite]

    def of(self, texels: Texels) -> Doubles:
        """Return the values of [..., channels]."""
        low, high = np.array(self.mins), np.array(self.maxs)
        values: Doubles = low + texels / 255.0 * (high - low)
        return values


_Shape = Annotated[list[Annotated[int, Field(ge=1, le=1 << 28)]], Field(min_length=2, max_length=3)]


class _Means1(_Means):
    shape: _Shape


class _Quats1(_Part):
    encoding: Literal["quaternion_packed"] = "quaternion_packed"


class _Scales1(_Range, _Part):
    mins: Vector
    maxs: Vector


class _Colours1(_Range, _Part):
    """Colours, and logits of opacities as the fourth channel."""

    mins: Annotated[list[Finite], Field(min_length=4, max_length=4)]
    maxs: Annotated[list[Finite], Field(min_length=4, max_length=4)]


class _Harmonics1(_Part):
    mins: Finite
    maxs: Finite
    quantization: Literal[8] = 8


class _Meta1(BaseModel):
    """meta.json of version 1."""

    model_config = ConfigDict(extra="ignore")
    means: _Means1
    quats: _Quats1
    scales: _Scales1
    sh0: _Colours1
    shN: _Harmonics1 | None = None

    @property
    def count(self) -> int:
        return self.means.shape[0]


class _Version(BaseModel):
    version: int = 1


#: Gives the bytes of a file of the model.
_Open = Callable[[str], bytes]


def import_sog(path: Path, *, lenient: bool = False) -> ImportedModel:
    """Return the model in a ``.sog`` file, or in an unbundled one by its meta.json.

    Raises ModelFileError: damaged, impossible sizes, or not SOG; VersionError for versions to come.
    """
    size = file_size(path)
    if path.name == "meta.json":
        return _read(_meta(path.read_bytes()[: _MAX_META + 1], path), _from_folder(path), _folder_size(path), path)
    return read_bundle(path, size, path)


def read_bundle(file: Path | BinaryIO, size: int, path: Path) -> ImportedModel:
    """Return the model in a zip of ``size`` bytes, which ``path`` names in messages. Raises as import_sog()."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if len(members) > _MAX_MEMBERS:
                raise ModelFileError(f"{len(members):,} members; a SOG has some ten", where=path)
            check_expansion(sum(member.file_size for member in members), size, path, "members")
            place = _index_of(archive.namelist(), path)
            folder = place.removesuffix("meta.json")
            meta = _meta(archive.read(place) if archive.getinfo(place).file_size <= _MAX_META else b"", path)
            return _read(meta, lambda name: archive.read(folder + name), size, path)
    except (ModelFileError, VersionError):
        raise
    except Exception as error:  # zipfile lets struct.error, zlib.error, NotImplementedError and others through
        reason = first_line(error)[:200]
        raise ModelFileError(f"not a readable SOG ({reason})", where=path) from None


def _index_of(names: list[str], path: Path) -> str:
    """Return the member that is the index of the SOG. Raises ModelFileError without one, and for several."""
    places = [name for name in names if name.rpartition("/")[2] in INDICES and not name.startswith("__MACOSX/")]
    if any(name.endswith(STREAMED) for name in places):
        raise ModelFileError(
            "a zip of a streamed SOG", where=path, remedy=f"unpack it, and name the {STREAMED} or its folder"
        )
    if not places:
        raise ModelFileError("a zip without meta.json: this is no SOG", where=path)
    if len(places) > 1:
        raise ModelFileError(
            f"a zip of {len(places)} SOGs", where=path, remedy="unpack it, and name one meta.json of them"
        )
    return places[0]


def _from_folder(path: Path) -> _Open:
    def open_file(name: str) -> bytes:
        file_size(path.with_name(name))
        return path.with_name(name).read_bytes()

    return open_file


def _folder_size(path: Path) -> int:
    """Return bytes of the images beside a meta.json."""
    return sum(image.stat().st_size for image in path.parent.glob("*.webp"))


def _meta(content: bytes, path: Path) -> _Meta | _Meta1:
    try:
        version = _Version.model_validate_json(content).version
        if version == 1:
            return _Meta1.model_validate_json(content)
        if version != VERSION:
            raise VersionError(
                f"SOG version {version}; 1 and {VERSION} are read",
                where=path,
                remedy="export it again as version 2, or as a PLY",
            )
        return _Meta.model_validate_json(content)
    except ValidationError as error:
        raise ModelFileError(f"meta.json is not that of a SOG: {first_fault(error, 'the text')}", where=path) from None


def _read(meta: _Meta | _Meta1, open_file: _Open, size: int, path: Path) -> ImportedModel:
    """Return the model that ``meta`` describes. size: bytes of all files."""
    count = meta.count

    def texels(name: str) -> Texels:
        """Return [count, 4] of an image with a texel for each Gaussian."""
        return _pixels(open_file(name), name, count, size, path).reshape(-1, 4)[:count]

    if isinstance(meta, _Meta) and meta.model == "2dgs":
        raise refused_discs(path, '"model": "2dgs"')
    if len(meta.means.files) != 2:
        raise ModelFileError("means has one file; the lower and the upper bytes are two", where=path)
    low, high = np.array(meta.means.mins), np.array(meta.means.maxs)
    lower, upper = (texels(name)[:, :3].astype(np.float64) for name in meta.means.files)
    stretched = low + (upper * 256 + lower) / 65535.0 * (high - low)
    rotations = texels(meta.quats.files[0])
    largest = rotations[:, 3].astype(np.int64) - LARGEST
    if bool((largest < 0).any()):
        row = int((largest < 0).argmax())
        raise ModelFileError(
            f"the rotation of Gaussian {row} has {rotations[row, 3]} for the place of its largest component; {LARGEST} "
            f"to {LARGEST + 3} are known",
            where=path,
        )
    sizes, colours = texels(meta.scales.files[0])[:, :3], texels(meta.sh0.files[0])
    if isinstance(meta, _Meta1):
        scales, decoded = meta.scales.of(sizes), meta.sh0.of(colours)
        sh0, opacities = decoded[:, :3], decoded[:, 3]
    else:
        scales, sh0 = np.array(meta.scales.codebook)[sizes], np.array(meta.sh0.codebook)[colours[:, :3]]
        opacities = logits_of(colours[:, 3] / 255.0, 1 / 255)
    shN = np.zeros((count, 0, 3), np.float32)
    if meta.shN is not None:
        if len(meta.shN.files) != 2:
            raise ModelFileError("shN has one file; centroids and labels are two", where=path)
        name, labels = meta.shN.files
        shN = _chosen(_centroids(meta.shN, open_file(name), name, size, path), texels(labels), path)
    with np.errstate(over="ignore"):
        means = np.sign(stretched) * np.expm1(np.abs(stretched))
    return ImportedModel(
        "SOG version 1" if isinstance(meta, _Meta1) else "SOG version 2",
        Columns.tensors(
            means=means,
            quats=from_smallest_three(largest, (rotations[:, :3] / 255.0 - 0.5) * math.sqrt(2.0)),
            scales=scales,
            opacities=opacities,
            sh0=sh0,
            shN=shN,
        ),
        declared=True,
        sealed=True,
        antialiased=isinstance(meta, _Meta) and (meta.model == "antialiased" or bool(meta.antialias)),
    )


def _centroids(found: _Harmonics | _Harmonics1, content: bytes, name: str, size: int, path: Path) -> Floats:
    """Return [centroids, K, 3], the palette of harmonics."""
    if isinstance(found, _Harmonics1):
        # Version 1 says neither how many there are nor of how many bands; the image's width has the latter.
        image = _pixels(content, name, PALETTE_ROW * SHN_COUNTS[1], size, path)
        rows, width = image.shape[:2]
        count, coefficients = rows * PALETTE_ROW, width // PALETTE_ROW
        if width % PALETTE_ROW or coefficients not in SHN_COUNTS[1:4]:
            widths = ", ".join(str(PALETTE_ROW * known) for known in SHN_COUNTS[1:4])
            raise ModelFileError(f"{name} is {width} pixels wide; {widths} are known", where=path)
        codes = np.linspace(found.mins, found.maxs, CODES, dtype=np.float32)
    else:
        count, coefficients = found.count, SHN_COUNTS[found.bands]
        rows = -(-count // PALETTE_ROW)
        image = _pixels(content, name, rows * PALETTE_ROW * coefficients, size, path)
        if image.shape[:2] != (rows, PALETTE_ROW * coefficients):
            raise ModelFileError(
                f"{name} has {image.shape[1]} x {image.shape[0]} pixels; {count:,} centroids of {found.bands} bands "
                f"take {PALETTE_ROW * coefficients} x {rows}",
                where=path,
            )
        codes = np.array(found.codebook, dtype=np.float32)
    entries: Floats = codes[image.reshape(rows * PALETTE_ROW, coefficients, 4)[:count, :, :3]]
    return entries


def _chosen(centroids: Floats, texels: Texels, path: Path) -> Floats:
    """Return [N, K, 3], the centroid of each Gaussian by its label in ``texels`` [N, 4]."""
    labels = texels[:, 0].astype(np.int64) | texels[:, 1].astype(np.int64) << 8
    if int(labels.max()) >= len(centroids):
        raise ModelFileError(f"a label of {int(labels.max()):,}; there are {len(centroids):,} centroids", where=path)
    chosen: Floats = centroids[labels]
    return chosen


def _pixels(content: bytes, name: str, needed: int, size: int, path: Path) -> Texels:
    """Return [H, W, 4] of a WebP with at least ``needed`` pixels, and not many more."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow, about images as large as ours are allowed to be
            with Image.open(io.BytesIO(content), formats=["WEBP"]) as image:
                width, height = image.size
                if width * height < needed:
                    raise ModelFileError(f"{name} has {width} x {height} pixels; {needed:,} are needed", where=path)
                check_expansion(4 * width * height, size, path, f"{name} with {width} x {height} pixels")
                return np.asarray(image.convert("RGBA"))
    except ModelFileError:
        raise
    except Exception as error:  # Pillow's plugins raise what they like
        reason = first_line(error)[:200]
        raise ModelFileError(f"{name} is no WebP image that can be read ({reason})", where=path) from None


def is_sog(head: bytes) -> bool:
    """Return whether a file begins as the zip of a SOG does."""
    return first_member(head).endswith((".webp", "meta.json"))


FORMAT = Format("sog", ".sog", "a SOG", 3, encode_sog, import_sog, is_sog, ("*.sog", "meta.json"), encode_sog)
