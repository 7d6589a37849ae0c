"""Relative depth maps: brought to scene units by the points of each image, or refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import scipy
import torch
from numpy.typing import NDArray
from PIL import Image

from splatcli.checkpoint.file import load_checkpoint
from splatcli.cli.commands import run
from splatcli.config import DataConfig
from splatcli.errors import SceneError
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.read import read_scene
from splatcli.scene.relative_depths import MIN_POINTS
from tests.scene import made

RELATIVE = DataConfig(depths="depths", depth_type="relative")
#: Depth of the scene's surface, a slope that each camera sees: z at pixel (x, y).
SEEN = 80


def surface(i: int) -> NDArray[np.float64]:
    """[H, W] the depths that image i sees, between 2 and 7 units."""
    y, x = np.mgrid[0 : made.HEIGHT, 0 : made.WIDTH]
    return 2.0 + 5.0 * (x / made.WIDTH + 0.3 * np.sin(i) * y / made.HEIGHT) / 1.3


def scene_with_surface(root: Path, *, seen: int = SEEN, wrong: float = 0.0, camera=None) -> Path:
    """A COLMAP scene in which each image has points of its own on its surface; some of them are much too near."""
    model = made.reconstruction(camera, points=0)
    rng = np.random.default_rng(3)
    lens = next(iter(model.cameras.values()))
    for number, image in model.images.items():
        depths = surface(number - 1)
        pixels = rng.choice(made.WIDTH * made.HEIGHT, seen, replace=False)
        x, y = pixels % made.WIDTH + 0.5, pixels // made.WIDTH + 0.5
        z = depths.reshape(-1)[pixels]
        z[: int(wrong * seen)] *= 0.3
        rays = lens.cam_from_img(np.stack((x, y), axis=1))
        inside = np.concatenate((rays * z[:, None], z[:, None]), axis=1)
        image.points2D = [pycolmap.Point2D(at) for at in np.stack((x, y), axis=1)]
        pose = image.cam_from_world().inverse()
        for k, point in enumerate(inside):
            track = pycolmap.Track()
            track.add_element(number, k)
            model.add_point3D(pose * point, track, np.zeros(3, np.uint8))
    made.write_model(root / "sparse/0", model)
    made.write_images(root / "images")
    (root / "depths").mkdir()
    return root


def write_inverse(path: Path, i: int) -> None:
    """As Depth Anything: inverse depth, 8 bits, gray as RGB, from 0 at the farthest to 255."""
    inverse = 1.0 / surface(i)
    gray = np.round(255 * (inverse - inverse.min()) / np.ptp(inverse)).astype(np.uint8)
    Image.fromarray(np.repeat(gray[..., None], 3, axis=2)).save(path.with_suffix(".png"))


def write_gray(path: Path, i: int) -> None:
    inverse = 1.0 / surface(i)
    Image.fromarray(np.round(60_000 * inverse / inverse.max() + 5000 * np.cos(i)).astype(np.uint16)).save(
        path.with_suffix(".png")
    )


def write_depth(path: Path, i: int) -> None:
    """As Marigold: depth between 0 and 1."""
    np.save(path.with_suffix(".npy"), ((surface(i) - 2.0) / (5.0 + i)).astype(np.float32))


def write_minus_inverse(path: Path, i: int) -> None:
    """Numbers may be negative."""
    np.save(path.with_suffix(".npy"), 7.0 / surface(i) - 10.0 * i)


WRITERS = [(write_inverse, 0.03, "inverse depth"), (write_gray, 0.001, "inverse depth"), (write_depth, 1e-5, "depth")]


@pytest.mark.parametrize(
    ("write", "tolerance", "kind"), [*WRITERS, (write_minus_inverse, 1e-4, "inverse depth")], ids=lambda x: str(x)[:24]
)
def test_maps_get_the_units_of_the_points_and_wrong_points_do_not_matter(tmp_path, write, tolerance, kind) -> None:
    scene_with_surface(tmp_path, wrong=0.2)
    for i, name in enumerate(made.names()):
        write(tmp_path / "depths" / name, i)
    scene = read_scene(tmp_path, RELATIVE)
    assert any(f"8 of 8 relative depth maps hold {kind}, and are fitted" in note for note in scene.notes), scene.notes
    for i in range(made.COUNT):
        depths = scene.images.image(i).depth
        assert depths is not None
        np.testing.assert_allclose(depths, surface(i), rtol=tolerance)


def test_depth_is_fitted_by_the_errors_of_inverse_depth(tmp_path: Path) -> None:
    """What networks get wrong is inverse depth: errors of depth are larger far away, where they must not decide."""
    scene_with_surface(tmp_path, seen=made.WIDTH * made.HEIGHT)
    rng = np.random.default_rng(5)
    maps = [1.0 / (1.0 / surface(i) + 0.06 * rng.uniform(-1, 1, surface(i).shape)) for i in range(made.COUNT)]
    for name, values in zip(made.names(), maps, strict=True):
        np.save(tmp_path / "depths" / f"{name}.npy", values)
    scene = read_scene(tmp_path, RELATIVE)
    assert any("relative depth maps hold depth" in note for note in scene.notes), scene.notes
    for i, values in enumerate(maps):
        fitted = scene.images.image(i).depth
        assert fitted is not None
        known = fitted > 0.0
        scale, shift = np.polyfit(values[known], fitted[known].astype(np.float64), 1)

        def error(fit, i: int = i, values: NDArray[np.float64] = values) -> float:
            return float(np.abs(1.0 / (fit[0] * values + fit[1]) - 1.0 / surface(i)).sum())

        least = scipy.optimize.minimize(error, (scale, shift), method="Nelder-Mead").fun
        assert error((scale, shift)) <= 1.001 * least


def test_a_map_is_fitted_through_the_lens(tmp_path: Path) -> None:
    camera = made.lens("OPENCV", [60.0, 61.0, 32.0, 24.0, -0.1, 0.02, 0.001, 0.002])
    scene_with_surface(tmp_path, camera=camera)
    for i, name in enumerate(made.names()):
        np.save(tmp_path / "depths" / f"{name}.npy", 3.0 / surface(i) - 1.0)
    scene = read_scene(tmp_path, RELATIVE)
    fitted = [scene.images.image(i).depth for i in range(made.COUNT)]
    for i, name in enumerate(made.names()):
        np.save(tmp_path / "depths" / f"{name}.npy", surface(i))
    metric = read_scene(tmp_path, DataConfig(depths="depths", depth_type="metric"))
    for i in range(made.COUNT):
        np.testing.assert_allclose(fitted[i], metric.images.image(i).depth, rtol=0.02)


def test_what_is_far_beyond_the_points_is_not_known(tmp_path: Path) -> None:
    scene_with_surface(tmp_path)
    for i, name in enumerate(made.names()):
        inverse = 1.0 / surface(i)
        inverse[:4] = 0.0  # sky
        inverse[4, :3] = np.nan
        np.save(tmp_path / "depths" / f"{name}.npy", 2.0 * inverse + 1.0)
    depths = read_scene(tmp_path, RELATIVE).images.image(3).depth
    assert depths is not None
    assert not depths[:4].any()
    assert not depths[4, :3].any()
    np.testing.assert_allclose(depths[5:], surface(3)[5:], rtol=0.01)


def test_maps_that_do_not_fit_are_left_out_by_name(tmp_path: Path) -> None:
    scene_with_surface(tmp_path)
    for i, name in enumerate(made.names()):
        write_gray(tmp_path / "depths" / name, i)
    np.save(tmp_path / "depths/0003.npy", np.ones((made.HEIGHT, made.WIDTH)))
    (tmp_path / "depths/0003.png").unlink()
    np.save(tmp_path / "depths/0005.npy", np.random.default_rng(0).uniform(size=(made.HEIGHT, made.WIDTH)) ** 8)
    (tmp_path / "depths/0005.png").unlink()
    scene = read_scene(tmp_path, RELATIVE)
    assert "2 depth maps do not fit the points of their images and are not used: 0003.png, 0005.png" in scene.notes
    assert [scene.images.has_depth(i) for i in range(made.COUNT)] == [i not in (3, 5) for i in range(made.COUNT)]


def test_too_few_points_and_pictures_of_depth_are_refused(tmp_path: Path) -> None:
    few = scene_with_surface(tmp_path / "few", seen=MIN_POINTS - 1)
    for i, name in enumerate(made.names()):
        write_gray(few / "depths" / name, i)
    with pytest.raises(SceneError, match="none of 8 relative depth maps fits") as caught:
        read_scene(few, RELATIVE)
    assert f"(the fewest here: {MIN_POINTS - 1})" in str(caught.value.remedy)
    Image.fromarray(made.picture(0)).save(few / "depths/0000.png")
    with pytest.raises(SceneError, match="coloured picture") as caught:
        read_scene(few, RELATIVE)
    assert caught.value.where == str(few / "depths/0000.png")


def test_points_without_tracks_are_refused(tmp_path: Path) -> None:
    made.nerfstudio_scene(tmp_path)
    (tmp_path / "depths").mkdir()
    for i, name in enumerate(made.names()):
        write_gray(tmp_path / "depths" / name, i)
    with pytest.raises(SceneError, match="no points with tracks"):
        read_scene(tmp_path, RELATIVE)


def test_a_scene_with_inrias_file_has_relative_maps(tmp_path: Path) -> None:
    scene_with_surface(tmp_path)
    for i, name in enumerate(made.names()):
        write_inverse(tmp_path / "depths" / name, i)
    with pytest.raises(SceneError, match="8 problems") as caught:
        read_scene(tmp_path, DataConfig(depths="depths"))
    assert "--depth-type relative" in "\n".join(caught.value.lines())
    (tmp_path / "sparse/0/depth_params.json").write_text("{}")
    assert any("inverse depth" in note for note in read_scene(tmp_path, DataConfig(depths="depths")).notes)


def test_training_takes_the_output_of_a_network_and_resumes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    scene_with_surface(tmp_path / "scene")
    for i, name in enumerate(made.names()):
        write_inverse(tmp_path / "scene/depths" / name, i)
    flags = ["--depths", "depths", "--depth-type", "relative"]
    assert run(["train", str(tmp_path / "scene"), "-n", "4", "-o", str(tmp_path / "run"), *flags]) == 0
    assert "8 of 8 relative depth maps hold inverse depth" in " ".join(capfd.readouterr().err.split())
    assert run(["resume", str(tmp_path / "run"), "-n", "6"]) == 0


def test_a_run_keeps_the_type_of_its_maps_without_inrias_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Relative maps read in scene units would pull the resumed run elsewhere."""
    scene_with_surface(tmp_path / "scene")
    for i, name in enumerate(made.names()):
        write_gray(tmp_path / "scene/depths" / name, i)
    marker = tmp_path / "scene/sparse/0/depth_params.json"
    marker.write_text("{}")
    train = ["train", str(tmp_path / "scene"), "-n", "6", "--depths", "depths", "-o"]
    assert run([*train, str(tmp_path / "whole")]) == 0
    assert run([*train, str(tmp_path / "cut"), "--stop-at", "3"]) == 0
    marker.unlink()
    capfd.readouterr()
    assert run([*train, str(tmp_path / "cut")]) == 0
    assert "8 of 8 relative depth maps hold inverse depth" in " ".join(capfd.readouterr().err.split())
    whole, cut = (load_checkpoint(tmp_path / name / "ckpts/ckpt_000006.pt") for name in ("whole", "cut"))
    assert whole.config.data.depth_type == "relative"
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(whole.gaussians.items(), cut.gaussians.items(), strict=True))


def test_pictures_with_transparency_are_refused_with_what_to_save(tmp_path: Path) -> None:
    """The remedy must not be the flag that was given."""
    scene_with_surface(tmp_path)
    for i, name in enumerate(made.names()):
        write_gray(tmp_path / "depths" / name, i)
    made_with_alpha = Image.new("RGBA", (made.WIDTH, made.HEIGHT))
    made_with_alpha.save(next(iter(sorted((tmp_path / "depths").iterdir()))))
    with pytest.raises(SceneError, match=r"holds a picture \(RGBA\)") as caught:
        read_scene(tmp_path, RELATIVE)
    assert "without transparency" in str(caught.value.remedy)
    assert "--depth-type" not in str(caught.value.remedy)
