"""Damaged, hostile and foreign files are refused with a reason, and nothing in them runs."""

from __future__ import annotations

import io
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

from splatcli.checkpoint.container import read_container
from splatcli.checkpoint.file import load_checkpoint
from splatcli.errors import ModelFileError, SplatError, VersionError

Tamper = Callable[..., None]


def content(path: Path) -> tuple[str, dict[str, tuple[str, tuple[int, ...], bytes]]]:
    container = read_container(path)
    tensors = {k: (str(t.dtype), tuple(t.shape), t.numpy().tobytes()) for k, t in container.tensors.items()}
    return container.manifest.to_text(), tensors


def refusal(path: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        load_checkpoint(path)
    assert str(path) in str(caught.value)
    return caught.value.what


def test_truncation_anywhere_is_refused(saved: Path) -> None:
    whole = saved.read_bytes()
    rng = random.Random(0)
    for length in [*range(40), *rng.sample(range(40, len(whole)), 150), *range(len(whole) - 40, len(whole))]:
        saved.write_bytes(whole[:length])
        refusal(saved)


def test_bytes_after_the_end_are_refused(saved: Path) -> None:
    saved.write_bytes(saved.read_bytes() + b"\0")
    assert "truncated or extended" in refusal(saved)


def test_a_flipped_bit_is_refused_or_changes_nothing(saved: Path) -> None:
    """Bits that may be flipped without notice are those that no one reads: alignment, dates, doubled sizes."""
    whole = saved.read_bytes()
    original = content(saved)
    places = random.Random(1).sample(range(8 * len(whole)), 300)
    with zipfile.ZipFile(saved) as archive:  # in every member: twice in its header, twice in its bytes
        for member in archive.infolist():
            start = 8 * member.header_offset
            places += [start + 8 * 20, start + 8 * 30, start + 8 * (100 + len(member.filename))]
            data = whole.index(archive.read(member), member.header_offset) if member.file_size else 0
            places += [8 * data, 8 * (data + max(0, member.file_size - 1)) + 7]
    detected = 0
    for place in places:
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        saved.write_bytes(flipped)
        try:
            load_checkpoint(saved)
        except SplatError:
            detected += 1
        else:
            assert content(saved) == original, f"bit {place}"
    assert detected > len(places) // 2


def test_every_bit_of_every_tensor_and_of_the_manifest_counts(saved: Path) -> None:
    whole = saved.read_bytes()
    rng = random.Random(2)
    with zipfile.ZipFile(saved) as archive:
        members = [m for m in archive.infolist() if m.filename.split("/")[1] in ("data", "data.pkl") and m.file_size]
        spans = [(whole.index(archive.read(m), m.header_offset), m.file_size) for m in members]
    for start, size in spans:
        for _ in range(12):
            flipped = bytearray(whole)
            flipped[start + rng.randrange(size)] ^= 1 << rng.randrange(8)
            saved.write_bytes(flipped)
            refusal(saved)


def test_a_compressed_member_is_refused_before_it_is_inflated(saved: Path) -> None:
    bomb = saved.with_name("bomb.pt")
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(bomb, "w") as new:
        for member in old.infolist():
            new.writestr(member.filename, old.read(member))
        new.writestr("archive/data/99", bytes(64 << 20), compress_type=zipfile.ZIP_DEFLATED)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "compressed" in refusal(bomb)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10  # kilobytes


def test_odd_zips_are_refused(saved: Path, tmp_path: Path) -> None:
    def zipped(*names: str) -> Path:
        path = tmp_path / "odd.pt"
        with zipfile.ZipFile(path, "w") as archive:
            for name in names:
                archive.writestr(name, b"x")
        return path

    assert "2 roots" in refusal(zipped("a/data.pkl", "b/data/0"))
    assert "no data.pkl" in refusal(zipped("a/other"))
    assert "TorchScript" in refusal(zipped("a/data.pkl", "a/constants.pkl"))
    assert "roots" in refusal(zipped("a/data.pkl", "a/../../x"))
    assert "more than 10000" in refusal(zipped(*[f"a/{i}" for i in range(10_001)]))


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_pickle_with_code_is_named_and_not_run(tmp_path: Path, protocol: int) -> None:
    path, marker = tmp_path / "evil.pt", tmp_path / "was_here"
    torch.save({"manifest": Evil(marker)}, path, pickle_protocol=protocol)
    assert "nothing was run" in refusal(path)
    assert not marker.exists()


def test_old_pickles_and_archives_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    torch.save({"a": torch.zeros(2)}, path, _use_new_zipfile_serialization=False)
    assert "old format" in refusal(path)
    path.write_bytes(pickle.dumps({"a": 1}))
    assert "old format" in refusal(path)
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("storages"), io.BytesIO())
    assert "not a checkpoint" in refusal(path)
    path.write_bytes(b"")
    assert "empty" in refusal(path)
    path.write_bytes(b"<!DOCTYPE html><html>")
    assert "<!DOCTYPE" in refusal(path)


def test_a_missing_file_a_folder_and_a_ply_are_distinguished(saved: Path, tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "nothing.pt")
    with pytest.raises(ModelFileError, match="folder") as caught:
        load_checkpoint(tmp_path)
    assert str(saved) in str(caught.value)
    (tmp_path / "x.ply").write_bytes(b"ply\nformat binary_little_endian 1.0\n")
    with pytest.raises(ModelFileError, match=r"no optimizer state") as caught:
        load_checkpoint(tmp_path / "x.ply")
    assert "--init" in str(caught.value)


@pytest.mark.parametrize(
    ("stored", "origin"),
    [
        ({"step": 1, "splats": {"means": torch.zeros(2, 3)}}, "gsplat"),
        ({"step": 1, "pipeline": {}}, "nerfstudio"),
        (((1, torch.zeros(2, 3)), 7000), "INRIA"),
        ([torch.zeros(1)], "no manifest"),
    ],
)
def test_checkpoints_of_other_programs_are_recognised(tmp_path: Path, stored: object, origin: str) -> None:
    torch.save(stored, tmp_path / "theirs.pt")
    assert origin in refusal(tmp_path / "theirs.pt")


def test_a_tensor_expanded_to_terabytes_costs_nothing(saved: Path, tamper: Tamper) -> None:
    tamper(saved, lambda d: d.update(_xyz=torch.zeros(1, 3).expand(10**12, 3)))
    assert saved.stat().st_size < 40_000
    assert "_xyz is not a plain contiguous tensor" in refusal(saved)


@pytest.mark.parametrize(
    "edit",
    [
        lambda d: d.update({"strategy.grad2d": torch.zeros(1).expand(20)}),
        lambda d: d.update({"strategy.grad2d": torch.zeros(99)[:20]}),
        lambda d: d.update({"strategy.grad2d": d["_opacity"].view(-1)}),
    ],
    ids=["expanded", "window", "alias"],
)
def test_tensors_that_do_not_own_their_bytes_are_refused(
    saved: Path, tamper: Tamper, edit: Callable[[dict[str, Any]], object]
) -> None:
    tamper(saved, edit, sign=True)
    assert "strategy.grad2d" in refusal(saved)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda d: d.pop("_rotation"), "_rotation is in the manifest, but not in the file"),
        (lambda d: d.update(extra=torch.zeros(1)), "extra is not a tensor of this format"),
        (lambda d: d.update({"strategy.new": torch.zeros(1)}), "strategy.new is in the file, but not in its manifest"),
        (lambda d: d.update(get_scaling=torch.zeros(1)), "get_scaling names an activated tensor"),
        (lambda d: d.update(opacities=torch.zeros(1)), "opacities names an activated tensor"),
        (lambda d: d.update({"strategy.scales": torch.zeros(1)}), "strategy.scales names an activated tensor"),
        (lambda d: d.update(_xyz=d["_xyz"].double()), "_xyz is float64, not float32"),
        (lambda d: d.update(_xyz=d["_xyz"][:5].clone()), "_rotation has shape [20, 4], not [5, 4]"),
        (lambda d: d.update(_opacity=d["_opacity"].view(-1).clone()), "_opacity has shape [20], not [20, 1]"),
        (lambda d: d.update(_features_rest=torch.zeros(20, 5, 3)), "5 coefficients"),
        (lambda d: d.update({"rng.sampler": torch.zeros(3)}), "not a uint8 vector"),
        (lambda d: d.update({7: torch.zeros(1)}), "7 is not a named tensor"),
        (lambda d: d.update(note="hello"), "'note' is not a named tensor"),
    ],
)
def test_names_types_and_shapes_are_exact(
    saved: Path, tamper: Tamper, edit: Callable[[dict[str, Any]], object], said: str
) -> None:
    tamper(saved, edit, sign=True)
    assert said in refusal(saved)


def test_an_activated_name_is_refused_with_the_reason(saved: Path, tamper: Tamper) -> None:
    tamper(saved, lambda d: d.update(get_scaling=d["_scaling"].exp()))
    assert "raw parameters only" in refusal(saved)


@pytest.mark.parametrize("name", ["_xyz", "_features_rest", "adam.exp_avg_sq._opacity", "strategy.grad2d"])
def test_a_value_that_is_not_finite_is_named_counted_and_placed(saved: Path, tamper: Tamper, name: str) -> None:
    def spoil(stored: dict[str, Any]) -> None:
        stored[name].view(-1)[7] = float("nan")
        stored[name].view(-1)[9] = float("-inf")

    tamper(saved, spoil, sign=True)
    said = refusal(saved)
    assert f"{name} has 2 NaN or infinite values" in said
    assert "first at [" in said


def test_finite_values_whose_sum_overflows_are_accepted(saved: Path, tamper: Tamper) -> None:
    tamper(saved, lambda d: d["_xyz"].fill_(3e38), sign=True)
    assert float(load_checkpoint(saved).gaussians.means.min()) == pytest.approx(3e38)


def test_exponentiated_scales_are_recognised_by_their_digest(saved: Path, tamper: Tamper) -> None:
    tamper(saved, lambda d: d.update(_scaling=d["_scaling"].exp()))
    assert "exp() had been applied: scales already activated; checkpoints hold log-scales" in refusal(saved)


def test_sigmoided_opacities_are_recognised_by_their_digest(saved: Path, tamper: Tamper) -> None:
    tamper(saved, lambda d: d.update(_opacity=d["_opacity"].sigmoid()))
    assert "sigmoid() had been applied" in refusal(saved)


def test_another_change_is_not_taken_for_an_activation(saved: Path, tamper: Tamper) -> None:
    tamper(saved, lambda d: d["_scaling"].add_(1e-3))
    said = refusal(saved)
    assert "_scaling does not match its digest" in said
    assert "activated" not in said


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"format_version": [2, 0], "min_reader": [2, 0]}, VersionError, "format 2.0; this is splatcli"),
        ({"format_version": [1, 9], "min_reader": [1, 4]}, VersionError, "reads format 1.1"),
        ({"format_version": [0, 3], "min_reader": [0, 1]}, VersionError, "format 0.3"),
        ({"requires": ["tilted-cameras"]}, VersionError, "tilted-cameras"),
        ({"format": "other"}, ModelFileError, "format"),
        ({"format_version": "1.0"}, ModelFileError, "format_version"),
        ({"train": {"step": -1}}, ModelFileError, "train.step"),
        ({"train_views": [0, 3]}, ModelFileError, "outside the 3 cameras"),
        ({"config": {"train": {"iterations": "many"}}}, ModelFileError, "train.iterations"),
        ({"config": {"no_such": 1}}, ModelFileError, "no_such"),
    ],
)
def test_the_manifest_is_checked_version_first(
    saved: Path, tamper: Tamper, changes: dict[str, Any], error: type[SplatError], said: str
) -> None:
    tamper(saved, manifest=lambda data: data.update(changes), sign=True)
    with pytest.raises(error) as caught:
        load_checkpoint(saved)
    assert said in str(caught.value)
    assert caught.value.exit_code == (6 if error is VersionError else 5)


def test_a_newer_minor_version_with_optional_keys_is_read(saved: Path, tamper: Tamper) -> None:
    tamper(saved, manifest=lambda data: data.update(format_version=[1, 7], novelty={"a": 1}), sign=True)
    assert load_checkpoint(saved).step == 300


def test_only_raw_spaces_are_legal(saved: Path, tamper: Tamper) -> None:
    def declare(data: dict[str, Any]) -> None:
        next(spec for spec in data["tensors"] if spec["name"] == "_scaling")["space"] = "linear"

    tamper(saved, manifest=declare, sign=True)
    assert "_scaling is declared in space 'linear'; only 'log' is legal" in refusal(saved)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda d: d["train"].update(adam_step=10**30), "train.adam_step"),
        (lambda d: d["train"].update(step=10**30), "train.step"),
        (lambda d: d["train"].update(sampler={"a": 10**30}), "train.sampler.a"),
        (lambda d: d["cameras"][0].update(fx=0.0), "cameras.0.fx"),
        (lambda d: d["cameras"][0].update(fy=-1.0), "cameras.0.fy"),
        (lambda d: d["cameras"][0].update(width=10**12), "cameras.0.width"),
        (lambda d: d["cameras"][0].update(viewmat=[[0.0] * 4] * 3 + [[0, 0, 0, 1]]), "cameras.0.viewmat: .*singular"),
        (
            lambda d: d["cameras"][0].update(viewmat=[[1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]),
            "cameras.0.viewmat: .*singular",
        ),
        (lambda d: d["cameras"][0]["viewmat"].__setitem__(3, [0.0] * 4), "cameras.0.viewmat: .*last row"),
        (lambda d: d["cameras"][0]["viewmat"].__setitem__(0, [0.0] * 3), "cameras.0.viewmat: .*4x4"),
        (lambda d: d.update(train_views=[0, 0, 0]), "train_views: .*twice"),
        (lambda d: d.update(test_views=[0, 0]), "test_views: .*twice"),
    ],
)
def test_numbers_that_make_no_sense_are_refused_by_name(
    saved: Path, tamper: Callable[..., None], edit: Callable[[dict[str, Any]], object], said: str
) -> None:
    tamper(saved, manifest=edit, sign=True)
    with pytest.raises(ModelFileError, match=rf"{saved.name}.*{said}") as caught:
        load_checkpoint(saved)
    assert caught.value.exit_code == 5
