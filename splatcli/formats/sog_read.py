"""Reads SOG version 2, bundled in a zip or as a folder of images beside its meta.json; sog tells what they are."""

from __future__ import annotations

import io
import math
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from splatcli.checkpoint.foreign.stored import ImportedModel
from splatcli.errors import ModelFileError, VersionError
from splatcli.formats.bounds import check_expansion, file_size
from splatcli.formats.quantisation import logits_of, stored_of
from splatcli.formats.rotations import with_largest
from splatcli.formats.sog import CODES, LARGEST, PALETTE_ROW, VERSION, Texels
from splatcli.gaussians import SH_REST

#: Codebooks take some twenty kilobytes.
_MAX_META = 4 << 20
_MAX_MEMBERS = 1000

Finite = Annotated[float, Field(allow_inf_nan=False)]
Vector = Annotated[list[Finite], Field(min_length=3, max_length=3)]
Codebook = Annotated[list[Finite], Field(min_length=CODES, max_length=CODES)]
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
    means: _Means
    quats: _Part
    scales: _Coded
    sh0: _Coded
    shN: _Harmonics | None = None


class _Version(BaseModel):
    version: int = 1


#: Gives the bytes of a file of the model.
_Open = Callable[[str], bytes]


def read_stored_sog(path: Path, *, lenient: bool = False) -> ImportedModel:
    """What a ``.sog`` file, or the meta.json of an unbundled one, holds.

    Raises ModelFileError: damaged, impossible sizes, or not SOG; VersionError for version 1 and those to come.
    """
    size = file_size(path)
    if path.name == "meta.json":
        return _read(_meta(path.read_bytes()[: _MAX_META + 1], path), _from_folder(path), _folder_size(path), path)
    return read_bundle(path, size, path)


def read_bundle(file: Path | BinaryIO, size: int, path: Path) -> ImportedModel:
    """What a zip of ``size`` bytes holds, which ``path`` names in messages. Raises as read_stored_sog()."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if len(members) > _MAX_MEMBERS:
                raise ModelFileError(f"{len(members):,} members; a SOG has some ten", where=path)
            check_expansion(sum(member.file_size for member in members), size, path, "members")
            place = next((name for name in archive.namelist() if name.rpartition("/")[2] == "meta.json"), None)
            if place is None:
                raise ModelFileError("a zip without meta.json: this is no SOG", where=path)
            folder = place.removesuffix("meta.json")
            meta = _meta(archive.read(place) if archive.getinfo(place).file_size <= _MAX_META else b"", path)
            return _read(meta, lambda name: archive.read(folder + name), size, path)
    except (ModelFileError, VersionError):
        raise
    except Exception as error:  # zipfile lets struct.error, zlib.error, NotImplementedError and others through
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise ModelFileError(f"not a readable SOG ({reason})", where=path) from None


def _from_folder(path: Path) -> _Open:
    def open_file(name: str) -> bytes:
        file_size(path.with_name(name))
        return path.with_name(name).read_bytes()

    return open_file


def _folder_size(path: Path) -> int:
    """Bytes of the images beside a meta.json."""
    return sum(image.stat().st_size for image in path.parent.glob("*.webp"))


def _meta(content: bytes, path: Path) -> _Meta:
    try:
        version = _Version.model_validate_json(content).version
        if version != VERSION:
            raise VersionError(
                f"SOG version {version}; {VERSION} is read", where=path, remedy="export it again with a newer program"
            )
        return _Meta.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the text"
        raise ModelFileError(f"meta.json is not that of a SOG: {place}: {first['msg']}", where=path) from None


def _read(meta: _Meta, open_file: _Open, size: int, path: Path) -> ImportedModel:
    """The model that ``meta`` describes. size: bytes of all files."""
    count = meta.count

    def texels(name: str) -> Texels:
        """[count, 4] of an image with a texel for each Gaussian."""
        return _pixels(open_file(name), name, count, size, path).reshape(-1, 4)[:count]

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
    colours = texels(meta.sh0.files[0])
    notes = []
    if meta.model == "antialiased":
        notes.append("it was trained antialiased, as the file says; it is taken as if it was not")
    with np.errstate(over="ignore"):
        means = np.sign(stretched) * np.expm1(np.abs(stretched))
    return stored_of(
        "SOG version 2",
        means=means,
        quats=with_largest(largest, (rotations[:, :3] / 255.0 - 0.5) * math.sqrt(2.0)),
        log_scales=np.array(meta.scales.codebook)[texels(meta.scales.files[0])[:, :3]],
        logit_opacities=logits_of(colours[:, 3] / 255.0, 1 / 255),
        sh0=np.array(meta.sh0.codebook)[colours[:, :3]],
        shN=np.zeros((count, 0, 3)) if meta.shN is None else _harmonics(meta.shN, texels, open_file, size, path),
        notes=notes,
    )


def _harmonics(
    found: _Harmonics, texels: Callable[[str], Texels], open_file: _Open, size: int, path: Path
) -> NDArray[np.float32]:
    """[N, K, 3]."""
    if len(found.files) != 2:
        raise ModelFileError("shN has one file; centroids and labels are two", where=path)
    coefficients = SH_REST[found.bands]
    rows = -(-found.count // PALETTE_ROW)
    name = found.files[0]
    image = _pixels(open_file(name), name, rows * PALETTE_ROW * coefficients, size, path)
    if image.shape[:2] != (rows, PALETTE_ROW * coefficients):
        raise ModelFileError(
            f"{name} has {image.shape[1]} x {image.shape[0]} pixels; {found.count:,} centroids of {found.bands} bands "
            f"take {PALETTE_ROW * coefficients} x {rows}",
            where=path,
        )
    codes = np.array(found.codebook, dtype=np.float32)
    centroids = codes[image.reshape(rows * PALETTE_ROW, coefficients, 4)[:, :, :3]]
    labels = texels(found.files[1]).astype(np.int64)
    places = labels[:, 0] | labels[:, 1] << 8
    if int(places.max()) >= found.count:
        raise ModelFileError(f"a label of {int(places.max()):,}; there are {found.count:,} centroids", where=path)
    chosen: NDArray[np.float32] = centroids[places]
    return chosen


def _pixels(content: bytes, name: str, needed: int, size: int, path: Path) -> Texels:
    """[H, W, 4] of a WebP with at least ``needed`` pixels, and not many more."""
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
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise ModelFileError(f"{name} is no WebP image that can be read ({reason})", where=path) from None
