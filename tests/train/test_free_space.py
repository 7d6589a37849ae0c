"""The space around the cameras: where it is, and that no Gaussian stays in it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import splatcli
from splatcli.config import build_config
from splatcli.gaussians import Gaussians
from splatcli.scene.points import PointCloud
from splatcli.scene.scene import Scene
from splatcli.train.densify import Refinement
from splatcli.train.densify.free_space import FreeSpace, clearances, free_balls
from splatcli.train.init import gaussians_from_points
from tests.train.worlds import made_scene

SAMPLE = Path(__file__).parents[2] / "data" / "samples" / "courtyard"

CPU = torch.device("cpu")


def with_points(scene: Scene, xyz: np.ndarray) -> Scene:
    points = PointCloud(xyz.astype(np.float32), np.zeros((len(xyz), 3), np.uint8))
    return dataclasses.replace(scene, points=points)


def test_clearance_is_the_distance_to_the_nearest_point() -> None:
    scene = made_scene()
    centers = np.stack([scene.cameras[i].center for i in scene.train])
    points = np.random.default_rng(1).normal(size=(50, 3)) * 3
    expected = np.sqrt(((centers[:, None] - points.astype(np.float32)) ** 2).sum(2)).min(1)
    np.testing.assert_allclose(clearances(with_points(scene, points)), expected, rtol=1e-6)
    assert clearances(dataclasses.replace(scene, points=None)) == ()


@pytest.mark.parametrize("share", [0.3, 0.7, 1.0])
def test_no_ball_holds_a_point(share: float) -> None:
    random = np.random.default_rng(2)
    centers, points = random.normal(size=(40, 3)), random.normal(size=(300, 3)) * 2
    distances = np.sqrt(((centers[:, None] - points) ** 2).sum(2)).min(1)
    balls, radii = free_balls(centers, distances, share)
    assert len(balls) > len(centers), "ways between neighbours count"
    gaps = np.sqrt(((balls[:, None] - points) ** 2).sum(2)).min(1)
    assert (radii <= gaps + 1e-9).all()
    np.testing.assert_allclose(radii[: len(centers)], share * distances)


def test_the_grid_is_the_balls_but_for_half_a_cell() -> None:
    random = np.random.default_rng(3)
    centers = random.normal(size=(6, 3)) * [3, 1, 0.2]
    distances = random.uniform(0.5, 1.5, 6)
    space = FreeSpace.of(centers, distances, 0.7, CPU)
    assert space is not None
    balls, radii = free_balls(centers, distances, 0.7)
    means = random.normal(size=(20_000, 3)) * [4, 2, 1]
    depth = (radii - np.sqrt(((means[:, None] - balls) ** 2).sum(2))).max(1)
    found = space.contains(torch.tensor(means, dtype=torch.float32)).numpy()
    margin = np.sqrt(3) / 2 * space.cell * 1.001
    assert found[depth > margin].all()
    assert not found[depth < -margin].any()
    assert 100 < found.sum() < 19_000


def test_what_is_not_finite_or_far_is_not_in_the_space() -> None:
    space = FreeSpace.of(np.zeros((1, 3)), (2.0,), 0.5, CPU)
    assert space is not None
    nan, inf = float("nan"), float("inf")
    means = torch.tensor(
        [[0.0, 0.0, 0.0], [nan, 0, 0], [inf, 0, 0], [0, -inf, 0], [1e30, 0, 0], [0.9, 0, 0], [1.1, 0, 0]]
    )
    assert space.contains(means).tolist() == [True, False, False, False, False, True, False]


@pytest.mark.parametrize(("distances", "share"), [((), 0.7), ((1.0, 1.0), 0.0), ((0.0, 0.0), 0.7)])
def test_without_points_or_share_there_is_no_space(distances: tuple[float, ...], share: float) -> None:
    assert FreeSpace.of(np.array([[0.0, 0, 0], [5, 0, 0]]), distances, share, CPU) is None


def test_a_refinement_without_rows_prunes_them() -> None:
    refinement = Refinement(
        torch.tensor([0, 1, 2, 2]),
        torch.tensor([False, False, True, True]),
        {"means": torch.arange(12.0).reshape(4, 3)},
        cloned=1,
        pruned=5,
    )
    rows = torch.tensor([False, True, False, True])
    fewer = refinement.without(rows)
    assert fewer.source.tolist() == [0, 2]
    assert fewer.reset_moments.tolist() == [False, True]
    assert fewer.values["means"].tolist() == [[0, 1, 2], [6, 7, 8]]
    assert (fewer.cloned, fewer.pruned) == (1, 7)
    assert refinement.without(torch.zeros(4, dtype=torch.bool)) is refinement


def test_fog_before_a_camera_is_gone_after_a_run(tmp_path: Path) -> None:
    """Opaque Gaussians before a training camera survive a run only where they are asked to."""
    scene = splatcli.Scene.open(SAMPLE, resolution=8)
    camera, points = scene.cameras[scene.train[3]], scene.points
    assert points is not None
    forward = np.asarray(camera.viewmat)[2, :3]
    clearance = np.linalg.norm(points.xyz - camera.center, axis=1).min()
    settings = build_config({"model.sh_degree": 1})
    start = gaussians_from_points(points.xyz[::20], points.rgb[::20].astype(np.float32) / 255, settings)
    planted = camera.center + np.linspace(0.1, 0.5, 5)[:, None] * clearance * forward
    fog = gaussians_from_points(planted.astype(np.float32), np.full((5, 3), 0.5, np.float32), settings)
    fog.logit_opacities += 3.0
    both = {name: torch.cat([column, getattr(fog, name)]) for name, column in start.items()}
    splatcli.Model(Gaussians(**both)).export(tmp_path / "start.ply")

    def nearest(*more: str) -> float:
        """Smallest distance from the camera after a run with two refinements, as a part of the clearance."""
        run = tmp_path / f"run{len(more)}"
        window = ("refine_every=10", "refine_start=5", "refine_stop=25")
        command = [sys.executable, "-m", "splatcli", "train", str(SAMPLE), "-r", "8", "-n", "30", "--test-every", "8"]
        command += ["--init", str(tmp_path / "start.ply"), "--sh-degree", "1", "-q", "-o", str(run)]
        command += [word for key in window for word in ("--set", f"schedule.{key}")]
        subprocess.run([*command, *more], check=True, capture_output=True, timeout=300)
        means = splatcli.Model.load(run).gaussians.means.numpy()
        return float(np.linalg.norm(means - camera.center, axis=1).min() / clearance)

    assert nearest("--set", "strategy.prune_near=0") < 0.2
    assert nearest() > 0.6
