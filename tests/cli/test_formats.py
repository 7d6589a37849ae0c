"""Every format out and in again through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import imageio.v3 as imageio
import numpy as np
import pytest

import splatcli
from splatcli.checkpoint.file import load_checkpoint
from splatcli.formats.format import ExportMetadata
from splatcli.formats.ply import encode_ply
from splatcli.formats.registry import FORMATS, import_model
from tests.cli.tiny import QUICK
from tests.formats.made import scene
from tests.formats.made_ksplat import ksplat
from tests.running import Splat

#: What is both written and read.
BOTH = [known for known in FORMATS if known.write and known.read]
#: Decibels between a render of the run and one of the file: what bytes for colours leave, and SPZ's coarser harmonics.
#: A .splat has no harmonics, and is compared with the model without them.
LEAST = {
    "ply": 90.0,
    "compressed.ply": 45.0,
    "splat": 40.0,
    "spz": 34.0,
    "sog": 38.0,
    "glb": 90.0,
    "html": 38.0,
    "usdz": 90.0,
}


@pytest.fixture(scope="module")
def two_cameras(cameras: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cameras") / "cameras.json"
    path.write_text(json.dumps({"cameras": json.loads(cameras.read_text())["cameras"][:2]}))
    return path


def pictures(splat: Splat, model: Path, cameras: Path, folder: Path) -> np.ndarray:
    done = splat("render", model, "--views", cameras, "-o", folder, "-q")
    assert done.code == 0, done.err
    return np.stack([imageio.imread(line).astype(float) for line in done.lines])


@pytest.mark.parametrize("known", BOTH, ids=lambda known: known.name)
def test_a_format_is_exported_described_and_rendered(
    known: object, splat: Splat, finished_run: Path, two_cameras: Path, tmp_path: Path
) -> None:
    from splatcli.formats.registry import Format

    assert isinstance(known, Format)
    if known.name == "usdz":
        pytest.importorskip("pxr", reason="usd-core is not installed (splatcli[usd])")
    path = tmp_path / f"x{known.suffix}"
    done = splat("export", finished_run, "-o", path)
    assert (done.code, done.lines) == (0, [str(path)]), done.err
    info = splat("info", path, "--json").objects[-1]
    assert (info["kind"], info["usable"], info["space"]) == (known.name, True, "raw")
    assert info["sh_degree"] == min(1, known.sh_degree)
    plain = tmp_path / "plain.ply"
    assert splat("export", finished_run, "-o", plain, "--sh-degree", known.sh_degree).code == 0
    expected = pictures(splat, plain, two_cameras, tmp_path / "a")
    found = pictures(splat, path, two_cameras, tmp_path / "b")
    error = float(((expected - found) ** 2).mean())
    decibels = 10 * np.log10(255**2 / max(error, 1e-9))
    assert decibels >= LEAST[known.name], decibels
    assert expected.std() > 10


@pytest.mark.parametrize("suffix", [".spz", ".sog"])
def test_training_starts_from_a_compressed_file(
    suffix: str, splat: Splat, finished_run: Path, tiny_scene: Path, tmp_path: Path
) -> None:
    path = tmp_path / f"x{suffix}"
    assert splat("export", finished_run, "-o", path, "-q").code == 0
    done = splat("train", tiny_scene, "-o", tmp_path / "run", "-n", "2", "-q", *QUICK, "--init", path)
    assert done.code == 0, done.err


def test_an_unknown_name_lists_those_that_are_known(splat: Splat, finished_run: Path, tmp_path: Path) -> None:
    done = splat("export", finished_run, "-o", tmp_path / "x.obj")
    assert done.code == 2
    for known in FORMATS:
        assert known.suffix in done.err or known.write is None
    done = splat("export", finished_run, "-o", tmp_path / "x.ply", "--format", "obj")
    assert done.code == 2
    assert ", ".join(known.name for known in FORMATS if known.write is not None) in done.err


def test_the_longer_ending_wins_and_format_wins_over_both(splat: Splat, finished_run: Path, tmp_path: Path) -> None:
    splat("export", finished_run, "-o", tmp_path / "a.compressed.ply")
    splat("export", finished_run, "-o", tmp_path / "b.PLY")
    splat("export", finished_run, "-o", tmp_path / "c.ply", "--format", "spz")
    assert b"packed_position" in (tmp_path / "a.compressed.ply").read_bytes()
    assert b"f_dc_0" in (tmp_path / "b.PLY").read_bytes()
    assert (tmp_path / "c.ply").read_bytes().startswith(b"\x1f\x8b")
    assert splat("info", tmp_path / "c.ply", "--json").objects[-1]["kind"] == "spz"  # reported by content


def test_dropped_data_is_reported(splat: Splat, finished_run: Path, tmp_path: Path) -> None:
    bounds = splat("info", finished_run, "--json").objects[-1]
    whole = bounds["num_gaussians"]
    means = load_checkpoint(sorted((finished_run / "ckpts").glob("*.pt"))[-1]).gaussians.means
    region = f"sphere:0,0,0,{float(means.norm(dim=1).median()):.6f}"
    done = splat("export", finished_run, "-o", tmp_path / "x.splat", "--crop", region, "--json")
    kept = done.objects[-1]["num_gaussians"]
    assert 0 < kept < whole
    assert f"note: kept {kept:,} of {whole:,} Gaussians" in done.err
    assert "SH degree 1 -> 0" in done.err
    assert splat("info", tmp_path / "x.splat", "--json").objects[-1]["num_gaussians"] == kept
    nothing = splat("export", finished_run, "-o", tmp_path / "y.ply", "--crop", "sphere:99,99,99,1")
    assert nothing.code == 2
    assert "none of the" in nothing.err
    assert not (tmp_path / "y.ply").exists()


def test_a_page_is_read_back(splat: Splat, finished_run: Path, tmp_path: Path) -> None:
    done = splat("export", finished_run, "-o", tmp_path / "x.html")
    assert (done.code, done.lines) == (0, [str(tmp_path / "x.html")])
    assert "<title>x</title>" in (tmp_path / "x.html").read_text()
    named = tmp_path / "Gnome & <i>friends.html"
    for words in (("export", finished_run), ("edit", finished_run, "--scale", 2, "-w")):
        assert splat(*words, "-o", named).code == 0
        assert "<title>Gnome &amp; &lt;i&gt;friends</title>" in named.read_text()
    assert "<title>Gaussian splats</title>" in splat("export", finished_run, "--format", "html", "-o", "-").out
    facts = splat("info", tmp_path / "x.html", "--json").objects[-1]
    whole = splat("info", finished_run, "--json").objects[-1]
    assert (facts["kind"], facts["num_gaussians"]) == ("html", whole["num_gaussians"])
    assert facts["usable"]


def test_a_ksplat_is_a_model_to_all_commands(splat: Splat, tmp_path: Path) -> None:
    path = tmp_path / "x.ksplat"
    path.write_bytes(ksplat([scene(20, 1)], 2)[0])
    facts = splat("info", path, "--json").objects[-1]
    assert (facts["kind"], facts["format"]) == ("ksplat", "ksplat, compression level 2")
    assert (facts["num_gaussians"], facts["sh_degree"], facts["usable"]) == (20, 1, True)
    assert splat("export", path, "-o", tmp_path / "x.ply").code == 0
    refused = splat("export", path, "-o", tmp_path / "y.ksplat")
    assert refused.code == 2


def test_a_failed_write_leaves_the_old_file(splat: Splat, finished_run: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.spz"
    path.write_bytes(b"old")
    assert splat("export", finished_run, "-o", path, "--crop", "sphere:99,99,99,1").code == 2
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.spz"]


def test_an_sh_degree_that_the_format_does_not_hold_is_named(splat: Splat, tmp_path: Path) -> None:
    (tmp_path / "x.ply").write_bytes(encode_ply(scene(20, 4), ExportMetadata()).payload)
    said = "note: SH degree 4 -> 3, the most that"
    for flags in ((), ("--sh-degree", 4)):
        done = splat("export", tmp_path / "x.ply", "-o", tmp_path / "x.sog", *flags)
        assert done.code == 0, done.err
        assert said in done.err, flags
        assert splat("info", tmp_path / "x.sog", "--json").objects[-1]["sh_degree"] == 3
    assert "SH degree" not in splat("export", tmp_path / "x.ply", "-o", tmp_path / "x.sog", "--sh-degree", 3).err


@pytest.fixture
def antialiased_ply(tmp_path: Path) -> Path:
    """Gaussians smaller than a pixel, trained antialiased as the file says."""
    gaussians = scene(300, 1)
    gaussians.log_scales -= 2
    path = tmp_path / "mip.ply"
    path.write_bytes(encode_ply(gaussians, ExportMetadata(antialiased=True)).payload)
    return path


def test_every_conversion_of_an_antialiased_model_says_so(splat: Splat, antialiased_ply: Path, tmp_path: Path) -> None:
    path = antialiased_ply
    for command, name in (
        ("export", "a.spz"),
        ("export", "b.sog"),
        ("export", "c.lod"),
        ("edit", "d.lod"),
        ("export", "e.compressed.ply"),
        ("edit", "f.spz"),
        ("edit", "g.ply"),
    ):
        done = splat(command, path, "-o", tmp_path / name)
        assert done.code == 0, done.err
        assert "note: it was trained antialiased, as the file says, and is rendered so" in done.err
        path = Path(done.lines[-1])
        assert import_model(path).antialiased, name
    merged = splat("edit", path, antialiased_ply, "-o", tmp_path / "h.ply")
    assert "were not both trained" not in merged.err
    (tmp_path / "plain.ply").write_bytes(encode_ply(scene(30, 1), ExportMetadata()).payload)
    mixed = splat("edit", path, tmp_path / "plain.ply", "-o", tmp_path / "i.ply")
    assert "were not both trained with --antialiased" in mixed.err
    assert "trained antialiased; a .splat file" in splat("export", path, "-o", tmp_path / "j.splat").err


def test_an_antialiased_file_is_rendered_so(
    splat: Splat, antialiased_ply: Path, two_cameras: Path, tmp_path: Path
) -> None:
    plain = tmp_path / "plain.ply"
    plain.write_bytes(encode_ply(splatcli.Model.load(antialiased_ply).gaussians, ExportMetadata()).payload)
    found = pictures(splat, antialiased_ply, two_cameras, tmp_path / "a")
    without = pictures(splat, plain, two_cameras, tmp_path / "b")
    assert 0 < found.mean() < 0.9 * without.mean()  # opacities of small Gaussians are lower


def test_training_from_an_antialiased_file_names_the_option(
    splat: Splat, antialiased_ply: Path, tiny_scene: Path, tmp_path: Path
) -> None:
    words = ["train", tiny_scene, "-n", "1", *QUICK, "--init", antialiased_ply]
    said = "was trained antialiased; --antialiased trains it on so"
    assert said in splat(*words, "-o", tmp_path / "a").err
    assert said not in splat(*words, "-o", tmp_path / "b", "--antialiased").err
