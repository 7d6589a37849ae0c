"""Files of the GaussianSplats3D viewer: what they hold comes back within the format's own rounding, or is refused."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from splatcli.checkpoint.foreign.imported import ImportOptions, to_gaussians
from splatcli.errors import SplatError, VersionError
from splatcli.formats.registry import format_of, import_model
from splatcli.gaussians import SHN_COUNTS, Gaussians
from tests.formats.made import errors, scene
from tests.formats.made_ksplat import QUANTA, SH_RANGE, SIDE, ksplat
from tests.formats.test_refusals import at, refusal


def load(path: Path) -> Gaussians:
    assert format_of(path).name == "ksplat"
    return to_gaussians(import_model(path), ImportOptions(), path)[0]


def displayable(gaussians: Gaussians) -> Gaussians:
    """With constant colours inside 0...1, which the format holds as bytes."""
    return Gaussians(**{name: t.clamp(-1.77, 1.77) if name == "sh0" else t for name, t in gaussians.items()})


#: A half has 11 bits. Bytes of harmonics are rounded down, so that they miss by a whole step. A quaternion of length 1
#: is off by at most 2^-12 in each component, of which the angle shows up to twice the length.
HALF = 2.0**-11
LIMITS = {
    0: {"means": 0.0, "quats": 1e-4, "log_scales": 2e-6, "shN": 0.0},
    1: {
        "means": SIDE / 2 / QUANTA / 2 + 1e-7,
        "quats": math.degrees(2 * 2 * HALF / 2) + 1e-3,
        "log_scales": HALF,
        "shN": 0.6 * HALF,
    },
}
LIMITS[2] = LIMITS[1] | {"shN": (SH_RANGE[1] - SH_RANGE[0]) / 255 + 1e-6}


@pytest.mark.parametrize("degree", range(3))
@pytest.mark.parametrize("level", range(3))
def test_every_level_and_degree_comes_back_within_its_rounding(level: int, degree: int, tmp_path: Path) -> None:
    before = displayable(scene(300, degree))
    assert before.shN.numel() == 0 or before.shN.abs().max() < 1.0  # where halves are as fine as LIMITS says
    path = tmp_path / "x.ksplat"
    content, (order,) = ksplat([before], level)
    path.write_bytes(content)
    after = load(path)
    assert after.sh_degree == degree
    found = errors(before.map(lambda tensor: tensor[order]), after)
    limits = {"opacities": 0.5 / 255 + 1e-6, "sh0": 0.5 / 255 / 0.282 + 1e-6, **LIMITS[level]}
    for attribute, error in found.items():
        assert error <= limits[attribute], (attribute, found)


def test_buckets_that_are_full_and_those_that_are_not_are_both_there() -> None:
    """The scene of these tests would not show a bucket that is taken for another otherwise."""
    content, _ = ksplat([scene(300, 0)], 1)
    full, partial = struct.unpack_from("<2I", content, 4096 + 32)
    assert full >= 2
    assert partial >= 2


def test_sections_follow_each_other_and_lesser_degrees_are_filled_up(tmp_path: Path) -> None:
    parts = [displayable(scene(count, degree)) for count, degree in ((40, 2), (3, 0), (70, 1))]
    path = tmp_path / "X.KSPLAT"
    content, orders = ksplat(parts, 1)
    path.write_bytes(content)
    after = load(path)
    assert after.sh_degree == 2
    start = 0
    for part, order in zip(parts, orders, strict=True):
        rows = slice(start, start + len(part))
        wanted = torch.zeros(len(part), SHN_COUNTS[2], 3)
        wanted[:, : part.shN.shape[1]] = part.shN
        assert (after.means[rows] - part.means[order]).abs().max() <= LIMITS[1]["means"]
        assert (after.shN[rows] - wanted[order]).abs().max() <= LIMITS[1]["shN"]
        start += len(part)
    assert start == len(after)


def test_room_for_more_than_there_is_yet_is_skipped(tmp_path: Path) -> None:
    """A section of a file that was written while it was loaded holds less than it has room for."""
    content, (order,) = ksplat([scene(20, 1)], 0)
    fewer = bytearray(content)
    struct.pack_into("<I", fewer, 16, 15)
    struct.pack_into("<I", fewer, 4096, 15)
    path = tmp_path / "x.ksplat"
    path.write_bytes(fewer)
    assert torch.equal(load(path).means, scene(20, 1).means[order[:15]])


def spoiled(level: int, *edits: Callable[[bytearray], object]) -> bytes:
    data = bytearray(ksplat([scene(60, 1), scene(7, 1)], level)[0])
    for edit in edits:
        edit(data)
    return bytes(data)


FIRST, SECOND = 4096, 4096 + 1024
DATA = 4096 + 2048


@pytest.mark.parametrize(
    ("content", "byte", "said"),
    [
        (lambda: spoiled(0)[:4000], 4000, "the header alone takes 4,096"),
        (lambda: spoiled(0)[:-1], None, "truncated: section 1 of 7 Gaussians"),
        (lambda: spoiled(1, lambda data: data.extend(b"abc")), None, "3 bytes follow the data"),
        (lambda: spoiled(0, at(4, "<I", 2**32 - 1)), 4, "4,294,967,295 sections are promised"),
        (lambda: spoiled(0, at(16, "<I", 68)), 16, "68 Gaussians are promised; the sections hold 67"),
        (lambda: spoiled(0, at(16, "<I", 0), at(FIRST, "<I", 0), at(SECOND, "<I", 0)), 16, "the sections hold 0"),
        (lambda: spoiled(0, at(20, "<H", 3)), 20, "compression level 3"),
        (lambda: spoiled(0, at(FIRST, "<I", 61)), FIRST, "61 Gaussians in room for 60"),
        (lambda: spoiled(0, at(FIRST + 4, "<I", 2**32 - 1)), DATA, "truncated: section 0 of 4,294,967,295"),
        (lambda: spoiled(1, at(FIRST + 12, "<I", 2**32 - 1)), DATA, "and 4,294,967,295 buckets"),
        (lambda: spoiled(1, at(FIRST + 16, "<f", float("nan"))), FIRST + 16, "sides of nan"),
        (lambda: spoiled(1, at(FIRST + 16, "<f", 0.0)), FIRST + 16, "sides of 0.0"),
        (lambda: spoiled(1, at(FIRST + 20, "<H", 16)), FIRST + 20, "buckets of 16 bytes"),
        (lambda: spoiled(1, at(FIRST + 8, "<I", 2**32 - 1)), FIRST + 32, "full buckets of 4,294,967,295"),
        (lambda: spoiled(1, at(FIRST + 32, "<I", 2**32 - 1)), FIRST + 32, "4,294,967,295 full buckets"),
        (lambda: spoiled(1, at(FIRST + 36, "<I", 2**32 - 1)), FIRST + 32, "4,294,967,295 others"),
        (lambda: spoiled(1, at(DATA, "<I", 0)), DATA, "and it has 60"),
        (lambda: spoiled(0, at(FIRST + 40, "<H", 3)), FIRST + 40, "SH degree 3"),
        (lambda: spoiled(2, at(36, "<f", float("inf"))), 36, "harmonics from inf"),
        (lambda: spoiled(0, at(DATA + 80 + 12, "<f", -1.0)), DATA + 80 + 12, "the scales of Gaussian 1 in section 0"),
        (lambda: spoiled(1)[: DATA + 8], DATA, "truncated: section 0"),
    ],
)
def test_a_file_that_is_none_is_refused_with_the_place(
    content: Callable[[], bytes], byte: int | None, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.ksplat"
    error: SplatError = refusal(content(), path)
    assert said in error.what
    if byte is not None:
        assert error.where == f"{path}, byte {byte}"


def test_other_versions_are_reported(tmp_path: Path) -> None:
    for head in (b"\0\0", b"\1\1"):
        error = refusal(head + spoiled(0)[2:], tmp_path / "x.ksplat")
        assert isinstance(error, VersionError)
        assert "0.1 is read" in error.what


def test_bytes_behind_the_data_are_ignored_when_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "x.ksplat"
    path.write_bytes(spoiled(1) + b"abc")
    stored = import_model(path, lenient=True)
    assert len(stored) == 67
    assert stored.notes == ["ignored 3 bytes behind the data"]


def test_what_is_no_number_is_left_to_the_one_who_asks(tmp_path: Path) -> None:
    path = tmp_path / "x.ksplat"
    path.write_bytes(spoiled(0, at(DATA, "<I", 0x7FA00000)))  # a signalling NaN
    assert import_model(path).nonfinite() == ["1 NaN or infinite values in means, the first at [0, 0]"]
