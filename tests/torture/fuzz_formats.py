"""Malformed files of every format but PLY, which has a harness of its own: faults in bytes, in headers, in documents.

A blind fault in a compressed file is caught by its checksum; so containers are opened, spoiled, and closed again.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import math
import random
import struct
import tempfile
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch

from splatcli.checkpoint.activation_check import Space
from splatcli.checkpoint.foreign.imported import ImportOptions, to_gaussians
from splatcli.formats.format import ExportMetadata
from splatcli.formats.registry import CHECKPOINT, FORMATS, format_of, import_model
from splatcli.formats.selection import select
from splatcli.gaussians import SHN_COUNTS, Gaussians
from tests.formats.made_gltf import spz_glb
from tests.formats.made_ksplat import ksplat
from tests.formats.made_sog import bundled, sog_1
from tests.torture.harness import Case, Figure, fuzz, main, refused, rng_of
from tests.torture.mutate import INTEGERS, dumps, spoil_bytes, spoil_json, spoil_text

Spoil = Callable[[random.Random, bytes], bytes]


def figures(count: int, seed: int) -> dict[str, Figure]:
    what = (
        "a malformed compressed PLY, .splat, .ksplat, .spz, .sog, .glb, page or USD stage is read; it must be refused "
        "with a message, or what is read be sound"
    )
    return fuzz("fuzz_formats", what, case_of, count, seed)


def case_of(seed: int, folder: Path) -> Case:
    sound = {name: [write(name, count, degree) for count, degree in _SIZES] for name in _FAULTS}
    names = [name for name in _FAULTS for _ in range(1 if name in _SELDOM else _OFTEN)]

    def case(index: int) -> str:
        rng = rng_of(seed, index)
        name = rng.choice(names)
        whole = rng.choice(sound[name])
        spoil = rng.choice(_FAULTS[name])
        path = folder / f"fuzz.{name}"  # of no weight but for .splat and .ksplat, which have no mark
        path.write_bytes(spoil(rng, whole))
        return "refused" if refused(lambda: _read(path, rng.random() < 0.2)) else "read"

    return case


#: (Gaussians, SH degree) of the sound files.
_SIZES = ((1, 0), (5, 1), (300, 2), (40, 3))


def write(name: str, count: int, degree: int) -> bytes:
    """A sound file of a format."""
    gaussians = _model(count, degree)
    if name == "ksplat":
        return ksplat([gaussians, _model(2, 0)], count % 3)[0]
    if name == "glb-spz":
        return spz_glb(write("spz", count, degree), count)
    if name == "sog-1":
        return bundled(sog_1(_model((math.isqrt(count) + 1) ** 2, degree)))
    known = next(known for known in FORMATS if known.name == name.partition("-")[0])
    assert known.write is not None
    written = known.write(select(gaussians, sh_degree=min(degree, known.sh_degree))[0], ExportMetadata()).payload
    match name:
        case "html":  # without the viewer, which is most of it
            head, mark, rest = written.partition(_SETTINGS)
            return head[:_DOCTYPE] + mark + rest.partition(b"</script>")[0] + b"</script>"
        case "usdz-binary":
            return _member(written)
        case "usdz-text":
            return _as_text(_member(written))
    return written


def _model(count: int, degree: int) -> Gaussians:
    rng = torch.Generator().manual_seed(count)
    tables = {"means": 3, "quats": 4, "log_scales": 3, "sh0": 3}
    values = {group: torch.randn(count, width, generator=rng) for group, width in tables.items()}
    return Gaussians(
        **values,
        logit_opacities=torch.randn(count, generator=rng),
        shN=0.2 * torch.randn(count, SHN_COUNTS[degree], 3, generator=rng),
    )


def _member(packed: bytes) -> bytes:
    """The stage in a .usdz."""
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        return archive.read(archive.namelist()[0])


def _as_text(stage: bytes) -> bytes:
    from pxr import Sdf

    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "stage.usdc"
        path.write_bytes(stage)
        text: str = Sdf.Layer.FindOrOpen(str(path)).ExportToString()
        return text.encode()


def _read(path: Path, lenient: bool) -> None:
    if format_of(path) is CHECKPOINT:  # the mark of the format was hit; its readers have harnesses of their own
        return
    stored = import_model(path, lenient=lenient)
    # Raw: whether the numbers look activated is not the question here.
    model, _ = to_gaussians(stored, ImportOptions(Space.RAW), path)
    count = len(model)
    assert model.shN.shape[1] in SHN_COUNTS
    for name, tensor in model.items():
        assert len(tensor) == count, name
        assert tensor.dtype == torch.float32, name
        assert tensor.isfinite().all(), name


# --- faults ----------------------------------------------------------------------------------------------------------


def _header_of(size: int) -> Spoil:
    """Faults in the first ``size`` bytes only, which are all claims."""

    def spoil(rng: random.Random, data: bytes) -> bytes:
        return spoil_bytes(rng, data[:size], 2)[:size].ljust(size, b"\0") + data[size:]

    return spoil


def _section_headers(rng: random.Random, data: bytes) -> bytes:
    """Faults in what a .ksplat claims of its two sections; most of their headers means nothing."""
    place = 4096 + 1024 * rng.randrange(2)
    return data[:place] + _header_of(48)(rng, data[place:])


def _text_header(rng: random.Random, data: bytes) -> bytes:
    head, end, body = data.partition(b"end_header\n")
    if rng.random() < 0.5:
        lines = [
            f"{line.rpartition(' ')[0]} {rng.choice(INTEGERS)}" if line.startswith("element") else line
            for line in head.decode().split("\n")
        ]
        return "\n".join(lines).encode() + end + body
    return spoil_text(rng, head.decode(), 2).encode("utf-8", "surrogatepass") + end + body


def _inside_gzip(spoil: Spoil) -> Spoil:
    return lambda rng, data: gzip.compress(spoil(rng, gzip.decompress(data)), mtime=0)


def _inside_zip(rng: random.Random, data: bytes) -> bytes:
    """Its document or one of its images."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = rng.choice(sorted(members))
    if name == "meta.json" or rng.random() < 0.5:
        members["meta.json"] = dumps(spoil_json(rng, json.loads(members["meta.json"])))
    elif rng.random() < 0.3:
        members[name] = members[rng.choice(sorted(members))]
    else:
        members[name] = spoil_bytes(rng, members[name])
    if rng.random() < 0.1:
        del members[rng.choice(sorted(members))]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    return buffer.getvalue()


def _inside_glb(rng: random.Random, data: bytes) -> bytes:
    """Its JSON part, or the numbers."""
    (length,) = struct.unpack_from("<I", data, 12)
    text, binary = data[20 : 20 + length], data[28 + length :]
    if rng.random() < 0.7:
        text = dumps(spoil_json(rng, json.loads(text)))
        text += b" " * (-len(text) % 4)
    else:
        binary = spoil_bytes(rng, binary)
    parts = struct.pack("<I4s", len(text), b"JSON") + text + struct.pack("<I4s", len(binary), b"BIN\0") + binary
    return struct.pack("<4sII", b"glTF", 2, 12 + len(parts)) + parts


def _inside_page(rng: random.Random, data: bytes) -> bytes:
    """Its settings, or the scene among them."""
    head, mark, rest = data.partition(_SETTINGS)
    settings = json.loads(rest.partition(b"</script>")[0])
    if rng.random() < 0.5:
        settings = spoil_json(rng, settings)
    else:
        kind, _, scene = settings["contentUrl"].partition(",")
        spoiled = _inside_zip(rng, base64.b64decode(scene))
        settings["contentUrl"] = f"{kind},{base64.b64encode(spoiled).decode()}"
    return head + mark + dumps(settings) + b"</script>"


def _text(rng: random.Random, data: bytes) -> bytes:
    return spoil_text(rng, data.decode()).encode("utf-8", "surrogatepass")


#: What comes before a page's settings; and of the page, its first line.
_SETTINGS, _DOCTYPE = b'<script type="application/json" id="sse-bootstrap">', len("<!doctype html>")

_FAULTS: dict[str, list[Spoil]] = {
    "splat": [spoil_bytes],
    "ksplat": [spoil_bytes, _header_of(48), _header_of(4096 + 2 * 1024 + 400), _section_headers],
    "html": [spoil_bytes, _inside_page],
    "spz": [spoil_bytes, _inside_gzip(_header_of(16)), _inside_gzip(spoil_bytes)],
    "compressed.ply": [spoil_bytes, _text_header],
    "sog": [spoil_bytes, _inside_zip, _inside_zip],
    "sog-1": [spoil_bytes, _inside_zip, _inside_zip],
    "glb": [spoil_bytes, _header_of(20), _inside_glb, _inside_glb],
    "glb-spz": [spoil_bytes, _header_of(20), _inside_glb, _inside_glb],
}

if find_spec("zstandard") is not None:
    _FAULTS["spz4"] = [spoil_bytes, _header_of(32), _header_of(128)]

#: A stage is opened by a process of its own, which takes as long as a hundred other cases.
_SELDOM, _OFTEN = ("usdz", "usdz-binary", "usdz-text"), 50
if find_spec("pxr") is not None:
    _FAULTS |= {"usdz": [spoil_bytes], "usdz-binary": [spoil_bytes, _header_of(88)], "usdz-text": [spoil_bytes, _text]}

if __name__ == "__main__":
    main(figures, 100_000)
