"""``splat edit --align-to`` by Gaussians, from outside: models without cameras, moved, cropped and with noise."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from splatcli.checkpoint.file import load_checkpoint, save_checkpoint
from splatcli.formats.ply import write_ply_file
from splatcli.gaussians import Gaussians
from tests.formats.made import errors, read_ply
from tests.running import Splat

Points = NDArray[np.float64]
MOVES = ("--rotate", "70,-110,35", "--scale", "3", "--translate", "5,-2,7")
NEAR = ("--rotate", "8,-5,12", "--scale", "1.1", "--translate", "0.1,0.05,0")


def box(count: int, seed: int, size: tuple[float, ...] = (1, 1, 1), place: tuple[float, ...] = (0, 0, 0)) -> Points:
    """Points on the surface of a box."""
    rng = np.random.default_rng(seed)
    points = rng.uniform(-1, 1, (count, 3))
    axes = rng.integers(0, 3, count)
    points[np.arange(count), axes] = np.sign(points[np.arange(count), axes])
    return points * size + place


def chair(count: int, seed: int) -> Points:
    """Points on a thing that no rotation brings onto itself."""
    parts = (box(count, seed, (1, 0.6, 0.3)), box(count // 2, seed + 1, (0.3, 0.3, 0.8), (0.8, 0.2, 1)))
    return np.concatenate([*parts, box(count // 4, seed + 2, (0.2, 0.2, 0.2), (-0.7, -0.4, 0.5))])


def ball(count: int, seed: int) -> Points:
    points = np.random.default_rng(seed).normal(size=(count, 3))
    return np.asarray(points / np.linalg.norm(points, axis=1, keepdims=True))


def written(path: Path, points: Points, colours: Points | None = None) -> Path:
    """A PLY of small grey Gaussians, or of Gaussians of given SH coefficients."""
    rows = np.random.default_rng(len(points)).permutation(len(points))
    given = points, np.zeros((len(points), 3)) if colours is None else colours
    means, sh0 = (torch.from_numpy(values[rows].astype(np.float32)) for values in given)
    count = len(means)
    gaussians = Gaussians(
        means=means,
        quats=torch.tensor([[1.0, 0, 0, 0]]).repeat(count, 1),
        log_scales=torch.full((count, 3), -4.0),
        logit_opacities=torch.full((count,), 2.0),
        sh0=sh0,
        shN=torch.zeros(count, 0, 3),
    )
    write_ply_file(gaussians, path)
    return path


def distance(splat: Splat, model: Path, words: tuple[object, ...], other: Path, tmp_path: Path) -> tuple[float, str]:
    """How far each Gaussian is after ``words`` and an alignment from where it was, at most, and the line about it."""
    done = splat("edit", model, "-o", tmp_path / "aligned.ply", "-w", *words, "--align-to", other, "--json")
    assert done.code == 0, done.err
    before, after = read_ply(model).means, read_ply(tmp_path / "aligned.ply").means
    return float((after - before).norm(dim=1).max()), done.objects[-1]["operations"][-1]["line"]


def test_two_models_of_one_thing_are_aligned_wherever_one_lies(splat: Splat, tmp_path: Path) -> None:
    one, other = (written(tmp_path / f"{seed}.ply", chair(3000, seed)) for seed in (10, 20))
    words = ("--rotate", "70,-110,35", "--scale", "0.01", "--translate", "9,0,0")
    off, line = distance(splat, one, words, other, tmp_path)
    assert off < 0.01  # neighbours are 0.035 apart
    found = re.search(r"; (\d+)% of the Gaussians agree, (\S+) apart in the median", line)
    assert found is not None, line
    assert int(found[1]) > 40
    assert float(found[2]) < 0.035
    first = (tmp_path / "aligned.ply").read_bytes()
    distance(splat, one, words, other, tmp_path)
    assert (tmp_path / "aligned.ply").read_bytes() == first


def test_copies_of_a_model_are_aligned(splat: Splat, tmp_path: Path) -> None:
    """Each is cropped in another way, and one of them went through a format that rounds."""
    whole = written(tmp_path / "whole.ply", chair(400, 10))
    kept = ("--crop-out", "box:0.9,-9,-9,9,9,9")
    assert splat("edit", whole, *kept, *MOVES, "-o", tmp_path / "part.ply").code == 0
    assert splat("edit", whole, "--filter", "z<1.5", "-o", tmp_path / "other.spz").code == 0
    words = (tmp_path / "part.ply", "--align-to", tmp_path / "other.spz", "-o", tmp_path / "back.ply")
    done = splat("edit", *words)
    assert done.code == 0, done.err
    assert splat("edit", whole, *kept, "-o", tmp_path / "wanted.ply").code == 0
    differences = errors(read_ply(tmp_path / "wanted.ply"), read_ply(tmp_path / "back.ply"))
    assert differences.pop("quats") < 0.1
    assert max(differences.values()) < 1e-3, differences


def test_noise_and_strays_do_not_decide(splat: Splat, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    one = written(tmp_path / "one.ply", np.concatenate([chair(3000, 10), rng.normal(size=(300, 3)) * 20]))
    points = chair(3000, 20)
    points = points[points[:, 0] > -0.9]
    strays = rng.normal(size=(200, 3)) * 9 + [30, 0, 0]
    other = written(tmp_path / "other.ply", np.concatenate([points + 0.01 * rng.normal(size=points.shape), strays]))
    done = splat("edit", one, "-o", tmp_path / "aligned.ply", *MOVES, "--align-to", other)
    assert done.code == 0, done.err
    before, after = read_ply(one).means, read_ply(tmp_path / "aligned.ply").means
    near = before.norm(dim=1) < 3
    assert float((after - before)[near].norm(dim=1).max()) < 0.03


def test_colours_tell_what_the_shape_does_not(splat: Splat, tmp_path: Path) -> None:
    def painted(seed: int) -> Path:
        points = box(1500, seed)
        return written(tmp_path / f"{seed}.ply", points, 1.5 * np.sign(points + 0.3 * np.roll(points, 1, axis=1)))

    off, _ = distance(splat, painted(1), MOVES, painted(2), tmp_path)
    assert off < 0.02


def test_a_run_and_a_file_are_aligned_with_each_other(splat: Splat, finished_run: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.ply"
    assert splat("export", finished_run, "-o", plain).code == 0
    for number, (model, other) in enumerate(((finished_run, plain), (plain, finished_run))):
        target = tmp_path / f"{number}.ply"
        done = splat("edit", model, *MOVES, "--align-to", other, "-o", target)
        assert done.code == 0, done.err
        assert "100% of the Gaussians agree" in done.err
        assert (read_ply(target).means - read_ply(plain).means).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (box(600, 1), box(600, 2), "it is ambiguous"),
        (box(600, 1, (1, 1.5, 0)), box(600, 2, (1, 1.5, 0)), "it is ambiguous"),
        (np.linspace(-1, 1, 500)[:, None] * [[1, 2, 3]], chair(3000, 1), "of the model lie on one line"),
        (chair(3000, 1), np.ones((500, 3)), "of the other one are all at one place"),
        (chair(40, 1), chair(3000, 1), "the model has 70 Gaussians, and at least 100 are needed"),
    ],
    ids=["cube", "sheet", "line", "place", "few"],
)
def test_what_does_not_tell_a_position_is_refused(
    one: Points, other: Points, said: str, splat: Splat, tmp_path: Path
) -> None:
    paths = written(tmp_path / "one.ply", one), written(tmp_path / "other.ply", other)
    done = splat("edit", paths[0], *MOVES, "--align-to", paths[1], "-o", tmp_path / "x.ply")
    assert done.code == 2, done.err
    assert said in done.err
    assert "roughly into place" in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "x.ply").exists()


def test_models_of_different_things_are_refused(splat: Splat, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    one = written(tmp_path / "one.ply", chair(800, 1), rng.normal(size=(chair(800, 1).shape)))
    cloud = rng.normal(size=(1400, 3))
    other = written(tmp_path / "other.ply", cloud, rng.normal(size=cloud.shape))
    done = splat("edit", one, "--align-to", other, "-o", tmp_path / "x.ply")
    assert done.code == 2
    assert "too few of their Gaussians agree" in done.err


def test_a_model_that_is_roughly_in_place_goes_to_the_nearest_of_equal_positions(splat: Splat, tmp_path: Path) -> None:
    one, other = (written(tmp_path / f"{seed}.ply", box(3000, seed)) for seed in (1, 2))
    off, _ = distance(splat, one, NEAR, other, tmp_path)
    assert off < 0.02
    balls = [written(tmp_path / f"ball{seed}.ply", ball(600, seed)) for seed in (1, 2)]
    done = splat("edit", balls[0], *NEAR, "--align-to", balls[1], "-o", tmp_path / "x.ply")
    assert done.code == 2  # a ball stays turned, however it lies
    assert "it is ambiguous" in done.err


def test_cameras_go_first_where_both_have_them(splat: Splat, finished_run: Path, tmp_path: Path) -> None:
    """The other run's Gaussians are turned against its cameras."""
    checkpoint = load_checkpoint(next((finished_run / "ckpts").glob("*.pt")))
    assert splat("edit", finished_run, "--rotate", "0,0,90", "-o", tmp_path / "turned.ply").code == 0
    checkpoint.gaussians = read_ply(tmp_path / "turned.ply")
    checkpoint.moments = checkpoint.sh_last_step = None
    save_checkpoint(tmp_path / "turned.pt", checkpoint)
    done = splat("edit", finished_run, "--align-to", tmp_path / "turned.pt", "--dry-run")
    assert done.code == 0
    assert "shared cameras agree" in done.out
    assert math.isclose(0.0, float(re.findall(r"off by (\S+)", done.out)[0]), abs_tol=1e-6)
