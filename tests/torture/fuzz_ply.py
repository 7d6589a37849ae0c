"""Malformed PLY files for both of their readers: Gaussians, and the points that a scene may start from."""

from __future__ import annotations

import io
import random
from pathlib import Path

import numpy as np
import plyfile

from splatcli.formats.ply import RAW_COMMENT
from splatcli.gaussians import SHN_COUNTS
from splatcli.scene.points import read_points_ply
from tests.formats.made import read_ply
from tests.torture.harness import Case, Figure, fuzz, main, refused, rng_of
from tests.torture.mutate import FLOATS, INTEGERS, STRINGS, spoil_bytes, spoil_text

#: Most points that are read; some files have more.
_LIMIT = 100
_TYPES = ["f4", "f4", "f4", "f8", "i4", "u1", "i2"]
_WORDS = ["float", "double", "uchar", "int", "list uchar int", "list float float", "float32", "half", "uint64", "list"]


def figures(count: int, seed: int) -> dict[str, Figure]:
    what = (
        "a malformed PLY is read as Gaussians or as points; it must be refused with a message, or what is read be sound"
    )
    return fuzz("fuzz_ply", what, case_of, count, seed)


def case_of(seed: int, folder: Path) -> Case:
    path = folder / "fuzz.ply"

    def case(index: int) -> str:
        rng = rng_of(seed, index)
        gaussians = rng.random() < 0.7
        path.write_bytes(malformed(rng, gaussians))
        return "refused" if refused(lambda: _read(path, gaussians)) else "read"

    return case


def _read(path: Path, gaussians: bool) -> None:
    if not gaussians:
        points = read_points_ply(path, _LIMIT)
        count = len(points.xyz)
        assert points.xyz.shape == points.rgb.shape == (count, 3)
        assert count == min(points.total, _LIMIT) or count <= points.total < 2 * _LIMIT
        return
    model = read_ply(path)
    count, rest = len(model), model.shN.shape[1]
    assert rest in SHN_COUNTS
    shapes = {"means": (count, 3), "quats": (count, 4), "log_scales": (count, 3), "logit_opacities": (count,)}
    shapes |= {"sh0": (count, 3), "shN": (count, rest, 3)}
    for name, tensor in model.items():
        assert tensor.shape == shapes[name], name
        assert tensor.isfinite().all(), name


def malformed(rng: random.Random, gaussians: bool) -> bytes:
    """A sound PLY with faults in its header, in its bytes, or in both."""
    whole = _sound(rng, gaussians)
    end = whole.index(b"end_header\n") + len(b"end_header\n")
    header, data = whole[:end], whole[end:]
    way = rng.random()
    if way < 0.45:
        header = _spoil_header(rng, header.decode()).encode("utf-8", "surrogatepass")
    elif way < 0.6:
        header = spoil_bytes(rng, header)
    if way >= 0.5:
        if b"format ascii" in header and rng.random() < 0.7:
            data = spoil_text(rng, data.decode("ascii", "replace")).encode("utf-8", "surrogatepass")
        else:
            data = spoil_bytes(rng, data)
    return header + data


def _sound(rng: random.Random, gaussians: bool) -> bytes:
    names = ["x", "y", "z"]
    if gaussians:
        rest = 3 * rng.choice(SHN_COUNTS)
        names += ["nx", "ny", "nz", *(f"f_dc_{i}" for i in range(3)), *(f"f_rest_{i}" for i in range(rest))]
        names += ["opacity", *(f"scale_{i}" for i in range(3)), *(f"rot_{i}" for i in range(4))]
    elif rng.random() < 0.8:
        names += ["red", "green", "blue"]
    if rng.random() < 0.2:
        rng.shuffle(names)
    count = rng.choice([0, 1, 2, 3, 10, 200])
    plain = rng.random() < 0.5
    types = [(name, "f4" if plain else rng.choice(_TYPES)) for name in names]
    noise = np.random.default_rng(rng.getrandbits(64)).normal(
        -1.0 if rng.random() < 0.8 else 2.0, 2.0, (len(names), count)
    )
    if rng.random() < 0.2 and count:
        noise[rng.randrange(len(names)), rng.randrange(count)] = rng.choice(FLOATS)
    rows = np.empty(count, dtype=types)
    with np.errstate(all="ignore"):
        for (name, _), column in zip(types, noise, strict=True):
            rows[name] = column
    elements = [plyfile.PlyElement.describe(rows, "vertex", comments=[RAW_COMMENT] if rng.random() < 0.3 else [])]
    if rng.random() < 0.2:
        faces = np.array([([0, 1, 2], i) for i in range(rng.randrange(3))], dtype=[("vertex_index", "O"), ("k", "u1")])
        elements.insert(rng.randrange(2), plyfile.PlyElement.describe(faces, "face", val_types={"vertex_index": "i4"}))
    buffer = io.BytesIO()
    plyfile.PlyData(elements, text=rng.random() < 0.25, byte_order=rng.choice("<<<>")).write(buffer)
    return buffer.getvalue()


def _spoil_header(rng: random.Random, header: str) -> str:
    """Faults that keep to the grammar of a header, for the most part."""
    lines = header.split("\n")
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(lines))
        match rng.randrange(9):
            case 0:
                lines.insert(
                    at, f"property {rng.choice(_WORDS)} {rng.choice(['x', 'y', 'w', 'opacity', 'f_rest_0', ''])}"
                )
            case 1:
                lines.insert(at, f"element {rng.choice(['vertex', 'face', 'chunk', ''])} {rng.choice(INTEGERS)}")
            case 2:
                lines.insert(
                    at, rng.choice(["comment", "obj_info x", "end_header", "ply", "", " ", "format ascii 1.0"])
                )
            case 3:
                lines[at] = lines[at].replace("float", rng.choice(_WORDS))
            case 4:
                lines = [_new_count(rng, line) for line in lines]
            case 5:
                kind = rng.choice(["ascii", "binary_little_endian", "binary_big_endian", "binary", "ASCII"])
                lines = [f"format {kind} 1.0" if line.startswith("format") else line for line in lines]
            case 6:
                del lines[at]
                lines = lines or [""]
            case 7:
                lines[at] = lines[at].replace("f_rest_", "f_rest_1").replace("scale_2", rng.choice(STRINGS))
            case _:
                return spoil_text(rng, "\n".join(lines))
    return "\n".join(lines)


def _new_count(rng: random.Random, line: str) -> str:
    if not line.startswith("element"):
        return line
    return f"{line.rpartition(' ')[0]} {rng.choice(INTEGERS)}"


if __name__ == "__main__":
    main(figures, 100_000)
