"""Small scenes made on the spot: eight cameras on an arc, a smooth picture each, points in front of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from splatcli.scene._pycolmap import pycolmap

WIDTH, HEIGHT = 64, 48
COUNT = 8
NUM_POINTS = 20


def names(count: int = COUNT) -> list[str]:
    return [f"{i:04d}.png" for i in range(count)]


def picture(seed: int, width: int = WIDTH, height: int = HEIGHT) -> NDArray[np.uint8]:
    """[H, W, 3] of a few slow waves, so that resampling hardly changes it."""
    y, x = np.mgrid[0:height, 0:width] / max(width, height)
    waves = [np.sin(6 * x * (k + 1) + seed) * np.cos(5 * y + k) for k in range(3)]
    return np.round(127.5 + 120 * np.stack(waves, axis=-1)).astype(np.uint8)


def w2c(i: int, count: int = COUNT) -> NDArray[np.float64]:
    """[4, 4]: the i-th camera stands on an arc of radius 4 and looks at the origin."""
    angle = i / count * 2.0
    pose = np.eye(4)
    pose[:3, :3] = [[np.cos(angle), 0, np.sin(angle)], [0, 1, 0], [-np.sin(angle), 0, np.cos(angle)]]
    pose[2, 3] = 4.0
    return pose


def lens(
    model: str = "PINHOLE", params: list[float] | None = None, width: int = WIDTH, height: int = HEIGHT, number: int = 1
):
    if params is None:
        params = [60.0, 61.0, width / 2, height / 2]
    return pycolmap.Camera(model=model, width=width, height=height, params=params, camera_id=number)


def reconstruction(camera=None, image_names: list[str] | None = None, points: int = NUM_POINTS):
    """A pycolmap.Reconstruction with one camera and a pose for each image."""
    made = pycolmap.Reconstruction()
    made.add_camera_with_trivial_rig(camera if camera is not None else lens())
    image_names = names() if image_names is None else image_names
    for i, name in enumerate(image_names):
        image = pycolmap.Image(name=name, camera_id=1, image_id=i + 1)
        made.add_image_with_trivial_frame(image, pycolmap.Rigid3d(w2c(i, len(image_names))[:3]))
    rng = np.random.default_rng(1)
    for _ in range(points):
        color = rng.integers(0, 256, 3).astype(np.uint8)
        made.add_point3D(rng.uniform(-1, 1, 3), pycolmap.Track(), color)
    return made


def write_model(folder: Path, made, text: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (made.write_text if text else made.write_binary)(str(folder))
    return folder


def write_images(folder: Path, image_names: list[str] | None = None, size: tuple[int, int] = (WIDTH, HEIGHT)) -> None:
    for i, name in enumerate(names() if image_names is None else image_names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture(i, *size)).save(path)


def colmap_scene(root: Path, place: str = "sparse/0", text: bool = False, camera=None) -> Path:
    write_model(root / place, reconstruction(camera), text)
    write_images(root / "images")
    return root


def c2w_opengl(i: int, count: int = COUNT) -> list[list[float]]:
    return (np.linalg.inv(w2c(i, count)) @ np.diag([1.0, -1.0, -1.0, 1.0])).tolist()


def frames(image_names: list[str]) -> list[dict]:
    count = len(image_names)
    return [{"file_path": name, "transform_matrix": c2w_opengl(i, count)} for i, name in enumerate(image_names)]


def nerfstudio_scene(root: Path, **top) -> Path:
    """transforms.json beside images/; keywords replace or add keys at the top (None removes one)."""
    document = {"fl_x": 60.0, "fl_y": 61.0, "cx": 32.0, "cy": 24.0, "w": WIDTH, "h": HEIGHT}
    document["frames"] = frames([f"images/{name}" for name in names()])
    document.update(top)
    root.mkdir(parents=True, exist_ok=True)
    kept = {key: value for key, value in document.items() if value is not None}
    (root / "transforms.json").write_text(json.dumps(kept))
    write_images(root / "images")
    return root


def blender_scene(root: Path, train: int = 6, test: int = 3) -> Path:
    for split, count in (("train", train), ("test", test)):
        image_names = [f"{split}/r_{i}" for i in range(count)]
        listed = frames([f"./{name}" for name in image_names])
        (root / split).mkdir(parents=True, exist_ok=True)
        (root / f"transforms_{split}.json").write_text(json.dumps({"camera_angle_x": 0.7, "frames": listed}))
        for i, name in enumerate(image_names):
            rgba = np.dstack([picture(i), np.full((HEIGHT, WIDTH), 128, np.uint8)])
            Image.fromarray(rgba).save(root / f"{name}.png")
    return root
