"""Camera paths: frames look at the focus and stand upright, closed paths close, and speeds are even."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.testing import assert_allclose
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from splatcli.errors import UsageError
from splatcli.render.camera_paths import (
    Rig,
    ellipse,
    focus_point,
    look_at,
    mean_up,
    nearest_order,
    orbit,
    spiral,
    through,
)

FOCUS = np.array([3.0, -2.0, 7.0])
#: No axis of the world, so that nothing is right by accident.
UP = np.array([0.2, -0.9, 0.3]) / np.linalg.norm([0.2, -0.9, 0.3])


def ring(count: int = 12, radius: tuple[float, float] = (4.0, 4.0), height: float = 1.5) -> NDArray[np.float64]:
    """Cameras on an ellipse around FOCUS, all looking at it."""
    x = np.cross(UP, [1.0, 0.0, 0.0])
    x /= np.linalg.norm(x)
    y = np.cross(UP, x)
    angle = 2 * np.pi * np.arange(count)[:, None] / count
    centers = FOCUS + height * UP + radius[0] * np.cos(angle) * x + radius[1] * np.sin(angle) * y
    return look_at(centers, FOCUS, UP)


def wall(count: int = 15) -> NDArray[np.float64]:
    """Cameras beside each other on one side of FOCUS, 5 away from it, looking nearly at it."""
    rng = np.random.default_rng(7)
    back = ring()[0, :3, 3] - FOCUS
    centers = FOCUS + 5 * back / np.linalg.norm(back) + 0.4 * rng.normal(size=(count, 3))
    return look_at(centers, FOCUS, UP)


PATHS: dict[str, Callable[[int], NDArray[np.float64]]] = {
    "orbit": lambda frames: orbit(Rig.of(ring()), frames),
    "ellipse": lambda frames: ellipse(Rig.of(ring(radius=(6.0, 3.0))), frames),
    "spiral": lambda frames: spiral(Rig.of(wall()), frames),
    "loop": lambda frames: through(ring(7), frames, loop=True)[0],
    "interpolate": lambda frames: through(ring(7), frames)[0],
}
CLOSED = ("orbit", "ellipse", "spiral", "loop")


@pytest.mark.parametrize("name", PATHS)
def test_poses_are_right_handed_rotations(name: str) -> None:
    poses = PATHS[name](50)
    assert poses.shape == (50, 4, 4)
    assert_allclose(poses[:, :3, :3] @ poses[:, :3, :3].transpose(0, 2, 1), np.tile(np.eye(3), (50, 1, 1)), atol=1e-12)
    assert_allclose(np.linalg.det(poses[:, :3, :3]), 1.0, atol=1e-12)
    assert_allclose(poses[:, 3], np.tile([0.0, 0.0, 0.0, 1.0], (50, 1)))


@pytest.mark.parametrize("name", ["orbit", "ellipse"])
def test_every_frame_looks_at_the_focus_upright(name: str) -> None:
    poses = PATHS[name](50)
    along = np.einsum("fji,fj->fi", poses[:, :3, :3], FOCUS - poses[:, :3, 3])
    assert_allclose(along[:, :2], 0.0, atol=1e-9)
    assert (along[:, 2] > 0).all()
    assert_allclose(poses[:, :3, 0] @ UP, 0.0, atol=1e-9)
    # y is down.
    assert (poses[:, :3, 1] @ UP < 0).all()


def test_a_spiral_looks_at_one_point_near_the_focus() -> None:
    poses = PATHS["spiral"](50)
    assert_allclose(focus_point(poses), FOCUS, atol=0.3)
    across = np.linalg.norm(np.cross(poses[:, :3, 2], focus_point(poses) - poses[:, :3, 3]), axis=1)
    assert_allclose(across, 0.0, atol=1e-9)


@pytest.mark.parametrize("name", CLOSED)
def test_speeds_are_even_also_where_a_closed_path_closes(name: str) -> None:
    centers = PATHS[name](400)[:, :3, 3]
    steps = np.linalg.norm(np.diff(np.concatenate([centers, centers[:1]]), axis=0), axis=1)
    # On ``loop`` moving and turning together are even; around a circle that is nearly each alone.
    assert_allclose(steps, steps.mean(), rtol=0.1 if name == "loop" else 2e-3)


def test_speeds_are_even_between_cameras_at_uneven_distances() -> None:
    poses = np.tile(np.eye(4), (4, 1, 1))
    poses[:, 0, 3] = [0.0, 1.0, 1.1, 9.0]
    centers = through(poses, 50)[0][:, 0, 3]
    assert_allclose(np.diff(centers), 9.0 / 49, rtol=1e-3)


def test_an_orbit_keeps_height_distance_and_sense() -> None:
    poses = orbit(Rig.of(ring()), 36)
    offsets = poses[:, :3, 3] - FOCUS
    assert_allclose(offsets @ UP, 1.5, atol=1e-9)
    assert_allclose(np.linalg.norm(offsets - 1.5 * UP, axis=1), 4.0, atol=1e-9)
    assert_allclose(poses[0], ring()[0], atol=1e-9)
    assert (np.cross(offsets[0], offsets[1]) @ UP) > 0


@pytest.mark.parametrize("first", [0, 3, 6])
def test_an_orbit_swings_in_the_arc_that_the_cameras_cover(first: int) -> None:
    """Seven cameras of a ring of twelve: 180 degrees. The path begins at the first, wherever it stands in the arc."""
    cameras = np.roll(ring()[:7], -first, axis=0)
    poses = orbit(Rig.of(cameras), 360)
    assert_allclose(poses[0, :3, 3], cameras[0, :3, 3], atol=1e-9)
    offsets = poses[:, :3, 3] - FOCUS - 1.5 * UP
    assert_allclose(np.linalg.norm(offsets, axis=1), 4.0, atol=1e-9)
    inside = offsets @ (ring()[3, :3, 3] - FOCUS - 1.5 * UP) / 16.0
    assert inside.min() > -1e-9
    for end in (ring()[0], ring()[6]):
        assert np.linalg.norm(poses[:, :3, 3] - end[:3, 3], axis=1).min() < 0.01
    steps = np.linalg.norm(np.diff(poses[:, :3, 3], axis=0, append=poses[:1, :3, 3]), axis=1)
    assert steps.max() < 4.0 * np.pi / 2 * 2 * np.pi / 360 * 1.01


def test_up_does_not_lean_with_the_pitch_of_cameras_in_an_arc() -> None:
    assert_allclose(Rig.of(ring(height=4.0)[:4]).up, UP, atol=1e-12)
    assert np.degrees(np.arccos(mean_up(ring(height=4.0)[:4]) @ UP)) > 20.0


def test_a_georeferenced_flight_has_an_orbit_at_one_height() -> None:
    z = np.array([0.0, 0.0, 1.0])
    places = np.stack(np.meshgrid(np.linspace(-2.0, 2.0, 4), np.linspace(-1.0, 3.0, 4)), axis=-1).reshape(-1, 2)
    centers = np.column_stack([places, np.full(16, 10.0)])
    down = look_at(centers, np.array([0.0, 1.0, -60.0]), np.array([0.0, 1.0, 0.0]))
    assert abs(Rig.of(down).up @ z) < 0.1  # the images' up, north
    path = orbit(Rig.of(down, up=z), 8)
    assert_allclose(path[:, 2, 3], 10.0, atol=1e-9)
    assert_allclose(path[:, 2, 0], 0.0, atol=1e-12)  # level


def test_rolled_cameras_have_the_mean_up() -> None:
    cameras = ring()[:7]
    cameras[::2, :3, :3] = cameras[::2, :3, :3] @ Rotation.from_euler("z", 50, degrees=True).as_matrix()
    cameras[1::2, :3, :3] = cameras[1::2, :3, :3] @ Rotation.from_euler("z", -50, degrees=True).as_matrix()
    assert_allclose(Rig.of(cameras).up, mean_up(cameras))


def test_cameras_in_one_direction_have_a_narrow_orbit() -> None:
    offsets = orbit(Rig.of(ring()[:1], FOCUS), 90)[:, :3, 3] - FOCUS - 1.5 * UP
    cosines = offsets @ offsets[0] / 16.0
    assert_allclose(np.degrees(np.arccos(cosines.min())), 5.0, atol=0.01)


def test_an_ellipse_has_the_shape_of_the_cameras() -> None:
    offsets = ellipse(Rig.of(ring(200, radius=(6.0, 3.0))), 200)[:, :3, 3] - FOCUS
    level = np.linalg.norm(offsets - 1.5 * UP, axis=1)
    assert_allclose(level.max(), 6.0, rtol=0.02)
    assert_allclose(level.min(), 3.0, rtol=0.02)


def test_a_path_meets_its_cameras() -> None:
    keys = ring(5)
    poses, at = through(keys, 401)
    assert_allclose(poses[0], keys[0], atol=1e-12)
    assert_allclose(poses[-1], keys[-1], atol=1e-9)
    assert_allclose(at[[0, -1]], [0.0, 4.0], atol=1e-12)
    for index, key in enumerate(keys):
        near = poses[np.argmin(np.abs(at - index))]
        assert np.linalg.norm(near[:3, 3] - key[:3, 3]) < 0.05
        assert Rotation.from_matrix(near[:3, :3].T @ key[:3, :3]).magnitude() < 0.02


def test_repeated_cameras_count_once() -> None:
    keys = ring(5)
    expected = through(keys, 40, loop=True)[0]
    assert_allclose(through(keys[[0, 0, 1, 2, 2, 2, 3, 4, 0]], 40, loop=True)[0], expected, atol=1e-9)


def test_turning_on_the_spot_is_a_path() -> None:
    poses = np.tile(np.eye(4), (3, 1, 1))
    poses[:, :3, :3] = Rotation.from_euler("y", [[0], [30], [90]], degrees=True).as_matrix()
    turned = Rotation.from_matrix(through(poses, 10)[0][:, :3, :3]).magnitude()
    assert_allclose(turned, np.radians(np.linspace(0, 90, 10)), atol=1e-3)


@pytest.mark.parametrize("angle", [1e-4, 0.01, 1.0])
def test_a_turn_takes_as_long_as_a_move_however_small(angle: float) -> None:
    """The first half goes straight on, the second turns on the spot."""
    poses = np.tile(np.eye(4), (3, 1, 1))
    poses[1:, 2, 3] = 5.0
    poses[2, :3, :3] = Rotation.from_euler("y", angle).as_matrix()
    found, places = through(poses, 41)
    assert_allclose(places[[10, 20, 30]], [0.5, 1.0, 1.5], atol=0.1)
    assert Rotation.from_matrix(found[30, :3, :3]).magnitude() == pytest.approx(angle / 2, rel=0.2)


def test_the_focus_is_the_nearest_point_to_skew_axes() -> None:
    """Two axes that pass each other: the middle of their common perpendicular."""
    poses = look_at(np.array([[0.0, 0.0, -5.0], [-5.0, 2.0, 0.0]]), np.zeros(3), np.array([0.0, -1.0, 0.0]))
    poses[1, :3, :3] = look_at(np.array([[-5.0, 0.0, 0.0]]), np.zeros(3), np.array([0.0, -1.0, 0.0]))[0, :3, :3]
    assert_allclose(focus_point(poses), [0.0, 1.0, 0.0], atol=1e-12)


def test_up_is_the_mean_of_the_cameras() -> None:
    assert_allclose(mean_up(ring()), UP, atol=1e-9)


def test_the_nearest_order_undoes_a_shuffle() -> None:
    line = np.tile(np.eye(4), (6, 1, 1))
    line[:, 0, 3] = [0, 3, 1, 5, 2, 4]
    assert nearest_order(line).tolist() == [0, 2, 4, 1, 5, 3]


def parallel() -> NDArray[np.float64]:
    poses = np.tile(np.eye(4), (4, 1, 1))
    poses[:, 0, 3] = range(4)
    return poses


def upside_down() -> NDArray[np.float64]:
    poses = ring(2)
    poses[1, :3, :3] = poses[0, :3, :3] @ np.diag([-1.0, -1.0, 1.0])
    return poses


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: orbit(Rig.of(parallel()), 9), "parallel"),
        (lambda: ellipse(Rig.of(parallel()[:1]), 9), "parallel"),
        (lambda: spiral(Rig.of(parallel()), 9), "parallel"),
        (lambda: spiral(Rig.of(ring()), 9), "all directions"),
        (lambda: orbit(Rig.of(ring(2), focus=ring(2)[:, :3, 3].mean(0) + 1e9 * UP), 9), "above"),
        (lambda: spiral(Rig.of(parallel(), focus=np.array([0.0, 0.0, -9.0])), 9), "behind"),
        (lambda: spiral(Rig.of(ring()[[0, 0]], focus=FOCUS), 9), "one position"),
        (lambda: Rig.of(upside_down()), "no common up"),
        (lambda: through(ring()[[0, 0, 0]], 9), "two different cameras"),
        (lambda: through(ring()[:1], 9, loop=True), "two different cameras"),
    ],
)
def test_impossible_paths_are_errors_with_a_remedy(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        make()
    assert caught.value.remedy


def test_parallel_cameras_have_a_spiral_when_the_distance_is_known() -> None:
    poses = spiral(Rig.of(parallel()), 30, distance=10.0)
    assert_allclose(focus_point(poses), [1.5, 0.0, 10.0], atol=1e-6)


@pytest.mark.parametrize("frames", [1, 2])
@pytest.mark.parametrize("name", PATHS)
def test_short_paths_are_paths(name: str, frames: int) -> None:
    assert np.isfinite(PATHS[name](frames)).all()


@pytest.mark.parametrize("loop", [False, True])
def test_rounded_rotations_do_not_change_the_speed_of_a_straight_path(loop: bool) -> None:
    """Matrices in float32 differ by 1e-7 where the camera does not turn."""
    poses = np.tile(np.eye(4), (4, 1, 1))
    poses[:, :3, 3] = [[0, 0, 1], [0, 0, 1.1], [0, 0, 3], [0, 0, 7]]
    poses[1, :3, :3] = Rotation.from_rotvec([1e-7, 0, 0]).as_matrix()
    steps = np.linalg.norm(np.diff(through(poses, 40, loop=loop)[0][:, :3, 3], axis=0), axis=1)
    assert np.median(steps) == pytest.approx(steps[5], rel=1e-3)
    assert steps[:35].max() < 1.01 * np.median(steps)
