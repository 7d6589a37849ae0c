"""The map of cameras: cameras, points and up are where they belong, in the colours that the legend tells."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from splatcli.cli.commands import run
from splatcli.config import DataConfig
from splatcli.render import camera_map
from splatcli.render.camera_map import draw_camera_map
from splatcli.scene.read import read_scene
from splatcli.scene.scene import Scene
from tests.scene import made


def made_scene(root: Path) -> Scene:
    return read_scene(made.colmap_scene(root), DataConfig())


def of_colour(picture: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    """[H, W] pixels near a colour."""
    return np.abs(picture.astype(int) - colour).max(axis=-1) < 60


def panels(picture: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    side, gap, head = camera_map._SIDE, camera_map._GAP, camera_map._HEAD
    rows = picture[head : head + side]
    return rows[:, gap : gap + side], rows[:, 2 * gap + side : 2 * gap + 2 * side]


def test_both_panels_show_cameras_of_both_kinds(tmp_path: Path) -> None:
    picture = draw_camera_map(made_scene(tmp_path), "a scene")
    above, side = panels(picture)
    for panel in (above, side):
        assert of_colour(panel, camera_map._TRAIN).sum() > 300
        assert of_colour(panel, camera_map._TEST).sum() > 20
    # Up is drawn upwards from the middle of the axes, and only where it lies in the panel.
    assert of_colour(side[-160:, :120], camera_map._UP).sum() > 60 > of_colour(above[-160:, :120], camera_map._UP).sum()


def test_from_above_an_arc_is_an_arc_and_from_the_side_it_is_level(tmp_path: Path) -> None:
    """Cameras of the made scene stand on an arc at one height; the tips of their pyramids tell."""
    scene = made_scene(tmp_path)
    poses = np.stack([np.linalg.inv(camera.viewmat) for camera in scene.cameras])
    (above, side), up = camera_map._windows(poses, np.zeros((0, 3)))
    np.testing.assert_allclose(up, [0, -1, 0], atol=1e-12)
    tips = above.pixels(poses[:, :3, 3]), side.pixels(poses[:, :3, 3])
    assert np.ptp(tips[1][:, 1]) < 1e-6
    scale = above.half / (0.5 * camera_map._FINER * camera_map._SIDE)
    lengths = [np.linalg.norm(tip[:, None] - tip[None], axis=2) * scale for tip in tips]
    true = np.linalg.norm(poses[:, None, :3, 3] - poses[None, :, :3, 3], axis=2)
    np.testing.assert_allclose(lengths[0], true, atol=1e-9, err_msg="one scale, nothing mirrored away")
    # Seen from above, right of a camera that looks away from the viewer's side is right: no mirror.
    turn = np.cross(above.across, above.down) @ up
    assert turn == pytest.approx(-1.0)
    for window in (above, side):
        pixels = window.pixels(poses[:, :3, 3])
        assert (pixels > 0).all()
        assert (pixels < camera_map._FINER * camera_map._SIDE).all()


@pytest.mark.parametrize("kind", ["one place", "no common up", "no points", "many"])
def test_unusual_scenes_are_plotted(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = made_scene(tmp_path)
    if kind == "one place":
        for camera in scene.cameras:
            camera.viewmat[:3, 3] = 0.0
    elif kind == "no common up":
        for camera in scene.cameras[::2]:
            camera.viewmat[:3] = np.diag([-1.0, -1.0, 1.0]) @ camera.viewmat[:3]
    elif kind == "many":
        monkeypatch.setattr(camera_map, "_MOST_FRUSTUMS", 3)
    if kind != "many":
        scene.points = None
    picture = draw_camera_map(scene, kind)
    assert all(of_colour(panel, camera_map._TRAIN).any() for panel in panels(picture))


def test_info_writes_the_plot_and_its_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made.colmap_scene(tmp_path / "scene")
    assert run(["info", str(tmp_path / "scene"), "--plot", str(tmp_path / "maps/a.png")]) == 0
    said = capsys.readouterr().out
    with Image.open(tmp_path / "maps/a.png") as picture:
        assert picture.width == 2 * camera_map._SIDE + 3 * camera_map._GAP
    assert "\nfound     cameras     sparse/0/images.bin: 8 views" in said
    assert "\n-         masks       looked for" in said
    assert f"plot            {tmp_path / 'maps/a.png'}" in said


@pytest.mark.parametrize(("what", "says"), [("photos", "splat sfm"), ("file.ply", "only the cameras of a scene")])
def test_what_has_no_cameras_has_no_map(tmp_path: Path, what: str, says: str, capsys) -> None:
    made.write_images(tmp_path / "photos")
    (tmp_path / "file.ply").write_text("ply\n")
    assert run(["info", str(tmp_path / what), "--plot", str(tmp_path / "a.png")]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "a.png").exists()
