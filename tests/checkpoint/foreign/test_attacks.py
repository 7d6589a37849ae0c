"""Damaged and hostile files of other programs: refused, nothing run, nothing large allocated."""

from __future__ import annotations

import io
import os
import pickle
import random
import resource
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from splatcli.checkpoint.foreign.read import read_foreign
from splatcli.errors import ModelFileError
from tests.checkpoint.foreign.made import tables_of, write_gsplat, write_inria, write_nerfstudio

WRITERS = {"a.pth": write_inria, "a.pt": write_gsplat, "a.ckpt": write_nerfstudio}


def refusal(path: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        read_foreign(path)
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == 5
    return caught.value.what


@pytest.fixture(params=WRITERS)
def good(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return WRITERS[request.param](tables_of(20), tmp_path / request.param)


@pytest.fixture
def splats(tmp_path: Path) -> Path:
    return write_gsplat(tables_of(20), tmp_path / "a.pt")


def rewrite(path: Path, change: Callable[[str, bytes], dict[str, bytes]], **options: Any) -> None:
    """The archive again with each member replaced by those that ``change`` makes of it."""
    with zipfile.ZipFile(path) as archive:
        members = [pair for name in archive.namelist() for pair in change(name, archive.read(name)).items()]
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, content in members:
            archive.writestr(name, content)


def keep(name: str, content: bytes) -> dict[str, bytes]:
    return {name: content}


class Evil:
    """Unpickled by Python, it runs a command."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("place", ["step", "splats"])
def test_a_command_in_a_pickle_is_named_and_not_run(protocol: int, place: str, tmp_path: Path) -> None:
    path, marker = tmp_path / "a.pt", tmp_path / "was_here"
    torch.save({"step": 1, "splats": {}, place: Evil(marker)}, path, pickle_protocol=protocol)
    said = refusal(path)
    assert "nothing was run" in said
    if protocol == 2:
        assert "system" in said
    assert not marker.exists()


@pytest.mark.parametrize(
    "value",
    [bytearray(3), {1, 2}, 1j, torch.zeros(3).to_sparse(), torch.nn.Linear(1, 1), Path("x"), slice(3), b"x" * 9000],
    ids=["bytearray", "set", "complex", "sparse", "module", "path", "slice", "text"],
)
def test_what_no_model_needs_is_not_rebuilt(value: object, tmp_path: Path) -> None:
    torch.save({"step": 1, "splats": {}, "extra": value}, tmp_path / "a.pt")
    assert "nothing was run" in refusal(tmp_path / "a.pt")


def test_a_call_for_memory_is_not_made(splats: Path) -> None:
    """weights_only=True would make this bytearray of a terabyte."""
    bomb = b"\x80\x02cbuiltins\nbytearray\n\x8a\x06\0\0\0\0\0\x01\x85R."
    rewrite(splats, lambda name, content: {name: bomb if name.endswith("/data.pkl") else content})
    assert "'builtins.bytearray'" in refusal(splats)


def test_a_pickle_of_millions_of_objects_is_refused_before_it_is_read(splats: Path) -> None:
    rewrite(splats, lambda name, content: {name: b"\x80\x02" + b"]" * 2_000_000 if name.endswith(".pkl") else content})
    assert "2,000,002 bytes; 1,048,576 are allowed" in refusal(splats)


def test_a_second_pickle_under_another_spelling_is_refused(splats: Path) -> None:
    """torch finds members without regard to case and would read the second one."""
    rewrite(splats, lambda name, content: {name: content} | ({"a/DATA.PKL": b"\x80\x02N."} if "pkl" in name else {}))
    assert "a member is there twice" in refusal(splats)


def test_compressed_members_are_refused(good: Path) -> None:
    rewrite(good, keep, compression=zipfile.ZIP_DEFLATED)
    assert "compressed" in refusal(good)


def test_a_zip_bomb_is_refused_before_it_unfolds(splats: Path) -> None:
    with (
        zipfile.ZipFile(splats, "a", compression=zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("a/data/99", "w") as member,
    ):
        for _ in range(256):
            member.write(bytes(1 << 20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "compressed" in refusal(splats)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # kilobytes


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda name, content: {name: content, name.replace("a/", "b/", 1): content}, "2 roots"),
        (lambda name, content: {"a/../../x": content} if name.endswith("data/0") else {name: content}, "roots"),
        (lambda name, content: {} if "pkl" in name else {name: content}, "no data.pkl"),
        (lambda name, content: {f"{name[:-8]}x/data.pkl" if "pkl" in name else name: content}, "no data.pkl"),
        (lambda name, content: {name: content, f"{name}/constants.pkl": b""}, "TorchScript"),
        (lambda name, content: {name: content, **{f"{name}{i}": b"" for i in range(1_500)}}, "more than 10000"),
        (lambda name, content: {} if name.endswith("data/3") else {name: content}, "torch cannot read it"),
        (lambda name, content: {name: content[:-8] if name.endswith("data/3") else content}, "torch cannot read it"),
    ],
    ids=["roots", "outside", "no pickle", "pickle elsewhere", "script", "many", "missing", "short"],
)
def test_archives_of_another_shape_are_refused(
    change: Callable[[str, bytes], dict[str, bytes]], said: str, splats: Path
) -> None:
    rewrite(splats, change)
    assert said in refusal(splats)


def test_other_containers_are_distinguished(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"splats": {}}, path, _use_new_zipfile_serialization=False)
    assert "old format" in refusal(path)
    path.write_bytes(pickle.dumps({"splats": 1}))
    assert "old format" in refusal(path)
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("storages"), io.BytesIO())
    assert "not a checkpoint" in refusal(path)
    path.write_bytes(b"")
    assert "empty" in refusal(path)
    assert "no such file" in refusal(tmp_path / "nothing.pt")
    assert "folder" in refusal(tmp_path)


@pytest.mark.parametrize("count", [10**6, 10**12])
def test_a_tensor_expanded_to_terabytes_costs_nothing(count: int, tmp_path: Path) -> None:
    def expand(stored: dict[str, Any]) -> None:
        widths = {"means": (3,), "quats": (4,), "scales": (3,), "opacities": (), "sh0": (3,), "shN": (0, 3)}
        stored["splats"] = {name: torch.zeros(1, *width).expand(count, *width) for name, width in widths.items()}

    path = write_gsplat(tables_of(20), tmp_path / "a.pt", expand)
    assert path.stat().st_size < 10_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert f"splats.means shows {12 * count:,} bytes of a storage of 12" in refusal(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10  # kilobytes


def test_two_tensors_over_one_memory_are_refused(tmp_path: Path) -> None:
    def alias(stored: dict[str, Any]) -> None:
        stored["splats"]["scales"] = stored["splats"]["means"]

    said = refusal(write_gsplat(tables_of(20), tmp_path / "a.pt", alias))
    assert "splats.means and splats.scales show 480 bytes of a storage of 240" in said


def test_a_window_that_slides_over_itself_is_refused(tmp_path: Path) -> None:
    def slide(stored: dict[str, Any]) -> None:
        stored["splats"]["means"] = torch.zeros(62).as_strided((20, 3), (1, 1))
        stored["splats"]["scales"] = torch.zeros(22).as_strided((20, 3), (1, 1))

    assert "splats.scales shows 240 bytes of a storage of 88" in refusal(
        write_gsplat(tables_of(20), tmp_path / "a.pt", slide)
    )


def test_truncation_anywhere_is_refused(good: Path) -> None:
    whole = good.read_bytes()
    rng = random.Random(0)
    for length in [*range(30), *rng.sample(range(30, len(whole)), 60), *range(len(whole) - 30, len(whole))]:
        good.write_bytes(whole[:length])
        refusal(good)
    good.write_bytes(whole + b"\0")
    assert "truncated or extended" in refusal(good)


def test_a_flipped_bit_is_refused_or_changes_nothing(good: Path) -> None:
    """Every bit of every member is under a checksum; those that go unnoticed lie in alignment, dates and the like."""
    whole = good.read_bytes()
    original = read_foreign(good)
    places = random.Random(1).sample(range(8 * len(whole)), 250)
    with zipfile.ZipFile(good) as archive:
        inside = set()
        for member in archive.infolist():
            start = len(whole) if not member.file_size else whole.index(archive.read(member), member.header_offset)
            inside |= set(range(start, start + member.file_size))
    for place in places:
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        good.write_bytes(flipped)
        try:
            found = read_foreign(good)
        except ModelFileError:
            continue
        assert place // 8 not in inside, f"bit {place} of a member"
        for ours, theirs in zip(found.columns, original.columns, strict=True):
            assert torch.equal(ours, theirs), f"bit {place}"


def test_random_words_in_the_pickle_never_escape_as_another_error(good: Path) -> None:
    with zipfile.ZipFile(good) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in members if name.endswith("/data.pkl"))
    rng = random.Random(0)
    for _ in range(150):
        changed = bytearray(members[name])
        for _ in range(rng.randint(1, 3)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        with zipfile.ZipFile(good, "w") as archive:
            for other, content in members.items():
                archive.writestr(other, bytes(changed) if other == name else content)
        try:
            read_foreign(good)
        except ModelFileError:
            continue
