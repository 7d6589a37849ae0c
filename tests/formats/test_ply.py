"""INRIA's PLY: bit-equal round trips, every lawful variant, and a reason for each refusal."""

from __future__ import annotations

import io
import os
import random
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import plyfile
import pytest
import torch
from numpy.typing import NDArray

from splatcli.errors import DivergedError, ModelFileError, OutputError
from splatcli.formats.ply import RAW_COMMENT, import_ply, write_ply, write_ply_file
from splatcli.gaussians import Gaussians
from tests.formats.made import read_ply, scene, store_ply
from tests.rasterizer.scenes import normal_gaussians

DATA = Path(__file__).parents[2] / "../shared/data"
SIZES = [(n, degree) for n in (0, 1, 2) for degree in range(5)] + [(100_000, 3)]


def random_gaussians(count: int, degree: int = 3) -> Gaussians:
    return normal_gaussians(count, degree, torch.Generator().manual_seed(count + degree))


def encoded(gaussians: Gaussians) -> bytes:
    file = io.BytesIO()
    write_ply(gaussians, file)
    return file.getvalue()


def assert_same(a: Gaussians, b: Gaussians) -> None:
    for (name, x), (_, y) in zip(a.items(), b.items(), strict=True):
        assert x.dtype == y.dtype
        assert x.shape == y.shape, name
        assert x.numpy().tobytes() == y.numpy().tobytes(), name


def refusal(path: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        read_ply(path)
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == 5
    return caught.value.what


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "model.ply"
    write_ply_file(random_gaussians(30, 1), path)
    return path


def rows_of(path: Path) -> NDArray[np.void]:
    return np.array(plyfile.PlyData.read(str(path))["vertex"].data)


@pytest.mark.parametrize(("count", "degree"), SIZES)
def test_round_trips_are_bit_equal(tmp_path: Path, count: int, degree: int) -> None:
    before = random_gaussians(count, degree)
    write_ply_file(before, tmp_path / "a.ply")
    after = read_ply(tmp_path / "a.ply")
    assert_same(before, after)
    assert encoded(after) == (tmp_path / "a.ply").read_bytes()


def test_the_layout_is_inrias(good: Path) -> None:
    names = plyfile.PlyData.read(str(good))["vertex"].data.dtype.names
    rest = [f"f_rest_{i}" for i in range(9)]
    assert list(names) == [
        *("x", "y", "z", "nx", "ny", "nz", "f_dc_0", "f_dc_1", "f_dc_2", *rest),
        *("opacity", "scale_0", "scale_1", "scale_2", "rot_0", "rot_1", "rot_2", "rot_3"),
    ]
    assert good.read_bytes().startswith(b"ply\nformat binary_little_endian 1.0\nelement vertex 30\n")
    gaussians, rows = random_gaussians(30, 1), rows_of(good)
    assert (rows["nx"] == 0).all()
    for coefficient in range(3):  # channel-major: all of red, then green, then blue
        for channel in range(3):
            column = rows[f"f_rest_{3 * channel + coefficient}"]
            np.testing.assert_array_equal(column, gaussians.shN[:, coefficient, channel].numpy())
    np.testing.assert_array_equal(rows["rot_0"], gaussians.quats[:, 0].numpy())


@pytest.mark.skipif(not DATA.is_dir(), reason="no sample files of other programs beside the project")
def test_a_file_of_inrias_trainer_keeps_its_bits() -> None:
    path = DATA / "import_samples/inria_ply/point_cloud_iter7000_9080.ply"
    gaussians, original = read_ply(path), path.read_bytes()
    assert len(gaussians) == 9080
    assert gaussians.sh_degree == 3
    body = original[original.index(b"end_header\n") + 11 :]
    ours = encoded(gaussians)
    assert ours[ours.index(b"end_header\n") + 11 :] == body


@pytest.mark.skipif(not DATA.is_dir(), reason="no sample files of other programs beside the project")
def test_look_alikes_of_other_programs_are_distinguished() -> None:
    samples = DATA / "import_samples"
    assert "looks like a point cloud" in refusal(samples / "tiny/brush_init_points.ply")
    assert "no x, y, z" in refusal(samples / "biker/biker.compressed.ply")  # it has a reader of its own
    assert "not a PLY" in refusal(samples / "biker/biker.spz")


def with_header(path: Path, old: str, new: str) -> None:
    path.write_bytes(path.read_bytes().replace(old.encode(), new.encode(), 1))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("vertex 30", "vertex 31", "truncated"),
        ("vertex 30", "vertex 29", "follow the 29 x vertex"),
        ("vertex 30", "vertex 3e1", "count of 0 or more"),
        ("vertex 30", "vertex 99999999999999999999999", "count of 0 or more"),
        ("vertex 30", "points 30", "no vertex element"),
        ("vertex 30\n", "vertex 30\nelement vertex 30\n", "there twice"),
        ("vertex 30\n", "extra 5\nelement vertex 30\n", "has rows, but no properties"),
        ("float nx", "half nx", "unknown type"),
        ("float nx", "list uchar float nx", "lists"),
        ("float nx", "float", "not 'property TYPE NAME'"),
        ("little_endian 1.0", "little_endian 2.0", "unknown format"),
        ("format binary_little_endian 1.0\n", "", "names no format"),
        ("comment", "remark", "unknown keyword"),
        ("end_header", "end_heater", "line "),
        ("scale_2", "scale_9", "2DGS"),
        ("f_rest_8", "f_rest_9", "f_rest columns"),
        ("property float nz", "property float trbf_center", "this is a 4D model"),
        ("property float nz", "property float scale_t", "this is a 4D model"),
        ("property float nz", "property float f_anchor_feat_0", "anchors of Scaffold-GS"),
        ("float opacity", "int opacity", "whole numbers in opacity: another program compressed it"),
        ("float f_rest_3", "uint f_rest_3", "whole numbers in f_rest_3"),
        ("end_header", "element codebook_centers 0\nproperty short opacity\nend_header", "(Reduced-3DGS)"),
        ("vertex 30", "codebook_centers 30", "(Reduced-3DGS)"),
        ("ply\n", "pli\n", "not a PLY"),
        ("ply\n", "plyx", "not a PLY"),
    ],
)
def test_a_broken_header_is_refused_with_the_reason(good: Path, old: str, new: str, said: str) -> None:
    with_header(good, old, new)
    assert said in refusal(good)


def test_what_is_read_beside_a_model_is_noted(good: Path) -> None:
    """Brush stores a moving model as its first frame and the changes of the others."""
    moves = "".join(f"element delta_vertex_{frame} 30\nproperty uchar x\n" for frame in range(2))
    with_header(good, "end_header", f"{moves}end_header")
    with_header(good, "float nz", "float label")
    with_header(good, "float nx", "float red")
    good.write_bytes(good.read_bytes() + bytes(60))
    assert import_ply(good).notes == [
        "ignored the properties label of its vertices",
        "its Gaussians move: the first of 3 frames is read",
    ]


def test_a_huge_count_allocates_nothing(good: Path) -> None:
    with_header(good, "vertex 30", "vertex 900000000")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refusal(good)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10  # kilobytes


def test_truncation_anywhere_is_refused(good: Path) -> None:
    whole = good.read_bytes()
    for length in random.Random(0).sample(range(len(whole)), 150):
        good.write_bytes(whole[:length])
        refusal(good)


def test_random_bytes_in_the_header_never_escape_as_another_error(good: Path) -> None:
    whole = good.read_bytes()
    end = whole.index(b"end_header\n") + 11
    rng = random.Random(0)
    for _ in range(300):
        changed = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            changed[rng.randrange(end)] = rng.randrange(256)
        good.write_bytes(changed)
        try:
            read_ply(good)
        except ModelFileError:
            continue


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_counted_and_placed(good: Path, text: bool, value: float) -> None:
    rows = rows_of(good)
    rows["scale_1"][[7, 9]] = value
    store_ply(rows, good, text=text)
    said = refusal(good)
    assert "2 NaN or infinite values" in said
    assert "the first in scale_1 of vertex 7" in said


@pytest.mark.parametrize("text", [False, True])
def test_positions_that_float32_rounds_coarsely_are_noted(good: Path, *, text: bool) -> None:
    rows = rows_of(good)
    wide = rows.astype([(name, "f8" if name in "xyz" else kind) for name, kind in rows.dtype.descr])
    store_ply(wide, good)
    assert import_ply(good).notes == []
    wide["y"] = np.linspace(-3e38, 3e38, 30)  # of which the extent is no float32
    store_ply(wide, good, text=text)
    assert import_ply(good).notes == []
    wide["y"] = 5_000_000 + np.arange(30) * 0.3
    store_ply(wide, good, text=text)
    assert import_ply(good).notes == [
        "positions are rounded by up to 0.2 units to float32: subtract an offset from them in the program that wrote "
        "the file"
    ]


def test_a_double_beyond_float32_is_not_finite(good: Path) -> None:
    rows = rows_of(good)
    wide = rows.astype([(name, "f8") for name in rows.dtype.names or ()])
    wide["x"][3] = 1e200
    store_ply(wide, good)
    assert "the first in x of vertex 3" in refusal(good)


@pytest.mark.parametrize("change", [lambda lines: lines[:-1], lambda lines: [*lines, lines[-1]]], ids=["short", "long"])
def test_ascii_with_too_few_or_too_many_lines_is_refused(
    good: Path, change: Callable[[list[bytes]], list[bytes]]
) -> None:
    store_ply(rows_of(good), good, text=True)
    good.write_bytes(b"\n".join(change(good.read_bytes().splitlines())) + b"\n")
    refusal(good)


def activate(rows: NDArray[np.void], *, scales: bool = False, opacities: bool = False, quats: bool = False) -> None:
    if scales:
        for name in ("scale_0", "scale_1", "scale_2"):
            rows[name] = np.exp(rows[name])
    if opacities:
        rows["opacity"] = 1 / (1 + np.exp(-rows["opacity"]))
    if quats:
        names = ["rot_0", "rot_1", "rot_2", "rot_3"]
        norm = np.sqrt(sum(rows[name] ** 2 for name in names))
        for name in names:
            rows[name] /= norm


@pytest.mark.parametrize("chosen", range(1, 8))
@pytest.mark.parametrize("declared", [False, True])
def test_activated_scales_and_opacities_are_refused_normalised_quaternions_are_not(
    tmp_path: Path, chosen: int, declared: bool
) -> None:
    path = tmp_path / "a.ply"
    gaussians = random_gaussians(2000, 0)
    gaussians.means *= 0.1  # neighbours about as far apart as the Gaussians are large
    write_ply_file(gaussians, path)
    rows = rows_of(path)
    activate(rows, scales=bool(chosen & 1), opacities=bool(chosen & 2), quats=bool(chosen & 4))
    comments = [RAW_COMMENT] if declared else []
    plyfile.PlyData([plyfile.PlyElement.describe(rows, "vertex", comments=comments)]).write(str(path))
    if chosen == 4:
        assert len(read_ply(path)) == 2000
    else:
        said = refusal(path)
        assert ("scales look already activated" if chosen & 1 else "opacities look already activated") in said


def test_our_own_word_settles_a_doubt(tmp_path: Path) -> None:
    """A scene in millimetres has positive log-scales; without the comment they look like standard deviations."""
    path = tmp_path / "a.ply"
    gaussians = random_gaussians(500, 0)
    gaussians.log_scales = gaussians.log_scales.abs() + 1
    gaussians.means *= 100
    write_ply_file(gaussians, path)
    assert_same(read_ply(path), gaussians)
    store_ply(rows_of(path), path)
    assert "scales look already activated" in refusal(path)


def test_missing_empty_and_unreadable_files_are_distinguished(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "a.ply")
    (tmp_path / "a.ply").write_bytes(b"")
    assert "empty" in refusal(tmp_path / "a.ply")
    assert "cannot be read" in refusal(tmp_path)


def test_a_pipe_takes_a_ply(tmp_path: Path) -> None:
    """More than a pipe's buffer, through a file object that cannot seek."""
    gaussians = random_gaussians(5_000, 3)
    with (tmp_path / "a.ply").open("wb") as sink:
        command = [sys.executable, "-c", "import shutil, sys; shutil.copyfileobj(sys.stdin.buffer, sys.stdout.buffer)"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sink) as copy:
            assert copy.stdin is not None
            write_ply(gaussians, copy.stdin)
    assert_same(read_ply(tmp_path / "a.ply"), gaussians)


def test_a_failed_write_keeps_the_old_file(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    before = good.read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match=r"could not write PLY .*the old one is kept"):
        write_ply_file(random_gaussians(3), good)
    assert good.read_bytes() == before
    assert list(good.parent.iterdir()) == [good]


def test_a_full_device_is_an_output_error() -> None:
    with pytest.raises(OutputError, match="No space left"):
        write_ply_file(random_gaussians(1000), Path("/dev/full"))


def test_a_link_is_followed_and_a_folder_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "link.ply"
    link.symlink_to(tmp_path / "real" / "a.ply")
    write_ply_file(random_gaussians(3), link)
    assert link.is_symlink()
    assert len(read_ply(tmp_path / "real" / "a.ply")) == 3
    with pytest.raises(OutputError, match="folder"):
        write_ply_file(random_gaussians(3), tmp_path)


def test_only_finite_float32_parameters_are_written(tmp_path: Path) -> None:
    gaussians = random_gaussians(5)
    gaussians.sh0[2, 1] = float("nan")
    with pytest.raises(DivergedError, match=r"sh0 has 1 NaN or infinite values, the first at \[2, 1\]"):
        write_ply_file(gaussians, tmp_path / "a.ply")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="float32"):
        write_ply(random_gaussians(5).map(lambda t: t.double()), io.BytesIO())


def test_a_file_written_in_parts_has_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    from splatcli.formats import ply

    whole, parts = io.BytesIO(), io.BytesIO()
    ply.write_ply(scene(100, 2), whole, ["a comment"])
    monkeypatch.setattr(ply, "_ROWS", 33)
    ply.write_ply(scene(100, 2), parts, ["a comment"])
    assert parts.getvalue() == whole.getvalue()
    assert len(whole.getvalue()) > 100 * 4 * len(ply.property_names(8))


def two_sizes(count: int = 4000) -> Gaussians:
    """A model of small Gaussians in front and a shell of others around, the least of them just above one unit.

    Its log-scales have a step at 0, as partly activated ones would.
    """
    gaussians, rng = scene(count, 0), torch.Generator().manual_seed(1)
    far = torch.arange(count) % 2 == 0
    directions = torch.nn.functional.normalize(torch.randn(count, 3, generator=rng), dim=1)
    log_scales = 0.02 + 0.4 * torch.rand(count, 3, generator=rng)
    return replace(
        gaussians,
        means=torch.where(far[:, None], 30 * directions, gaussians.means),
        log_scales=torch.where(far[:, None], log_scales, gaussians.log_scales),
    )


def test_a_file_of_ours_is_never_taken_for_a_partly_activated_one(tmp_path: Path) -> None:
    gaussians, path = two_sizes(), tmp_path / "a.ply"
    content = encoded(gaussians)
    path.write_bytes(content)
    assert_same(read_ply(path), gaussians)
    # Without the digest the values alone count.
    path.write_bytes(re.sub(rb"comment splatcli: sha256[^\n]*\n", b"", content))
    assert "partly activated" in refusal(path)


@pytest.mark.parametrize("axes", [(0, 1, 2), (1,)])
def test_scales_that_another_program_activated_since_are_found(tmp_path: Path, axes: tuple[int, ...]) -> None:
    path = tmp_path / "a.ply"
    write_ply_file(scene(3000, 1), path)
    data = plyfile.PlyData.read(path)
    assert any("sha256" in text for text in data["vertex"].comments)
    for axis in axes:
        values = data["vertex"].data[f"scale_{axis}"]
        values[::2] = np.exp(values[::2])
    data.write(tmp_path / "activated.ply")
    assert "activated" in refusal(tmp_path / "activated.ply")
