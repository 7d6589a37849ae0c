"""``splat export --target-size``: at most the size, near it where the model is larger, by the documented means."""

from __future__ import annotations

from pathlib import Path

import pytest

from splatcli.formats.ply import write_ply_file
from tests.formats.made import scene
from tests.running import Splat


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "a.ply"
    write_ply_file(scene(2000, 2), path)
    return path


def facts(splat: Splat, path: Path) -> dict[str, object]:
    done = splat("info", path, "--json")
    assert done.code == 0, done.err
    return done.objects[-1]


@pytest.mark.parametrize(
    ("name", "target", "degree", "fewer"),
    [
        ("a.sog", 75_000, 2, False),  # a smaller palette is enough
        ("a.sog", 30_000, 2, True),
        ("a.spz", 58_000, 2, False),  # fewer bits for harmonics are enough
        ("a.spz", 30_000, 2, True),
        ("a.ply", 300_000, 2, True),
        ("a.ply", 120_000, 1, True),
        ("a.compressed.ply", 20_000, 0, True),
        ("a.glb", 300_000, 2, True),
    ],
)
def test_a_file_is_at_most_as_large_and_nearly(
    name: str, target: int, degree: int, fewer: bool, splat: Splat, model: Path, tmp_path: Path
) -> None:
    done = splat("export", model, "-o", tmp_path / name, "--target-size", target)
    assert done.code == 0, done.err
    size = (tmp_path / name).stat().st_size
    assert 0.9 * target <= size <= target
    found = facts(splat, tmp_path / name)
    assert found["sh_degree"] == degree
    assert (found["num_gaussians"] != 2000) == fewer
    assert f"target size: {found['num_gaussians']:,} of 2,000 Gaussians, SH degree {degree} of 2" in done.err
    assert f"{size:,} of {target:,} bytes" in done.err


def test_a_model_that_fits_is_that_of_a_plain_export(splat: Splat, model: Path, tmp_path: Path) -> None:
    for name, words in (("a.spz", ()), ("b.spz", ("--target-size", "1MB"))):
        assert splat("export", model, "-o", tmp_path / name, *words).code == 0
    assert (tmp_path / "a.spz").read_bytes() == (tmp_path / "b.spz").read_bytes()


def test_a_degree_that_is_named_stays(splat: Splat, model: Path, tmp_path: Path) -> None:
    words = ("--target-size", "20kB", "--sh-degree", "2")
    assert splat("export", model, "-o", tmp_path / "a.compressed.ply", *words).code == 0
    assert facts(splat, tmp_path / "a.compressed.ply")["sh_degree"] == 2


def test_the_cameras_of_a_run_tell_what_to_merge(
    splat: Splat, finished_run: Path, exported_ply: Path, tmp_path: Path
) -> None:
    size = round(0.6 * exported_ply.stat().st_size)
    for name, source in (("a.ply", finished_run), ("b.ply", exported_ply)):
        assert splat("export", source, "-o", tmp_path / name, "--target-size", size).code == 0
        assert (tmp_path / name).stat().st_size <= size
    assert (tmp_path / "a.ply").read_bytes() != (tmp_path / "b.ply").read_bytes()


def test_a_dry_run_tells_the_plan_and_writes_nothing(splat: Splat, model: Path, tmp_path: Path) -> None:
    words = ("export", model, "-o", tmp_path / "a.spz", "--target-size", "30kB")
    plan = splat(*words, "--dry-run", "--json")
    assert plan.code == 0
    assert list(tmp_path.iterdir()) == []
    assert "target size: " in plan.err
    assert splat(*words).code == 0
    assert plan.objects[-1]["bytes"] == (tmp_path / "a.spz").stat().st_size
    assert plan.objects[-1]["num_gaussians"] == facts(splat, tmp_path / "a.spz")["num_gaussians"]


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [
        ("a.html", "10kB", "with a single Gaussian"),
        ("a.sog", "2kB", "with a single Gaussian"),
        ("a.sog", "large", "a size is a number with a unit"),
        ("a.sog", "8", "less than 1,000 bytes"),
        ("a.json", "8MB", "only a file of splats"),
        ("a.lod", "8MB", "only a file of splats"),
    ],
)
def test_what_cannot_be_is_refused(name: str, size: str, said: str, splat: Splat, model: Path, tmp_path: Path) -> None:
    done = splat("export", model, "-o", tmp_path / name, "--target-size", size)
    assert (done.code, said in done.err) == (2, True), done.err
    assert "help: " in done.err
    assert list(tmp_path.iterdir()) == []
