"""The cameras of a finished folder for nerfstudio: transforms.json and sparse_pc.ply beside sparse/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from plyfile import PlyData, PlyElement

from splatcli.errors import OutputError, SceneError
from splatcli.scene._pycolmap import pycolmap

TRANSFORMS, POINTS = "transforms.json", "sparse_pc.ply"
#: COLMAP's camera model -> nerfstudio's, and the coefficients after focal length and principal point, in order.
_LENSES: dict[str, tuple[str, tuple[str, ...]]] = {
    "SIMPLE_PINHOLE": ("OPENCV", ()),
    "PINHOLE": ("OPENCV", ()),
    "SIMPLE_RADIAL": ("OPENCV", ("k1",)),
    "RADIAL": ("OPENCV", ("k1", "k2")),
    "OPENCV": ("OPENCV", ("k1", "k2", "p1", "p2")),
    "OPENCV_FISHEYE": ("OPENCV_FISHEYE", ("k1", "k2", "k3", "k4")),
}
_COEFFICIENTS = {"OPENCV": ("k1", "k2", "p1", "p2"), "OPENCV_FISHEYE": ("k1", "k2", "k3", "k4")}
#: OpenCV camera axes to OpenGL's.
_FLIP = np.diag([1.0, -1.0, -1.0, 1.0])


def write_transforms(folder: Path) -> Path:
    """Write transforms.json and sparse_pc.ply of the model ``folder``/sparse/0; return the path of the first.

    Poses are camera to world, OpenGL axes, in the model's frame. Raises SceneError for a lens that nerfstudio lacks.
    """
    model = pycolmap.Reconstruction(folder / "sparse/0")
    images = sorted((model.image(number) for number in model.reg_image_ids()), key=lambda image: image.name)
    frames = [
        {"file_path": f"images/{image.name}", **_intrinsics(image.camera, folder), "transform_matrix": _pose(image)}
        for image in images
    ]
    points = list(model.points3D.values())
    vertices = np.zeros(len(points), dtype=[*((axis, "f4") for axis in "xyz"), *((c, "u1") for c in _COLOURS)])
    if points:
        xyz, rgb = np.stack([point.xyz for point in points]), np.stack([point.color for point in points])
        for i, (axis, colour) in enumerate(zip("xyz", _COLOURS, strict=True)):
            vertices[axis], vertices[colour] = xyz[:, i], rgb[:, i]
    file = folder / TRANSFORMS
    try:
        PlyData([PlyElement.describe(vertices, "vertex")]).write(str(folder / POINTS))
        file.write_text(json.dumps({"ply_file_path": POINTS, "frames": frames}, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror}", where=error.filename or folder) from None
    return file


_COLOURS = ("red", "green", "blue")


def _pose(image: pycolmap.Image) -> list[list[float]]:
    world_from_camera = np.vstack([image.cam_from_world().inverse().matrix(), [0.0, 0.0, 0.0, 1.0]])
    return [[float(value) for value in row] for row in world_from_camera @ _FLIP]


def _intrinsics(camera: pycolmap.Camera | None, folder: Path) -> dict[str, Any]:
    assert camera is not None
    if camera.model_name not in _LENSES:
        raise SceneError(
            f"nerfstudio has no lens model {camera.model_name}, so there is no {TRANSFORMS}",
            where=folder,
            remedy="--camera-model OPENCV with --overwrite estimates one that it has",
        )
    model, names = _LENSES[camera.model_name]
    extra = [float(camera.params[index]) for index in camera.extra_params_idxs()]
    given = dict(zip(names, extra, strict=True))
    return {
        "camera_model": model,
        "w": int(camera.width),
        "h": int(camera.height),
        "fl_x": float(camera.focal_length_x),
        "fl_y": float(camera.focal_length_y),
        "cx": float(camera.principal_point_x),
        "cy": float(camera.principal_point_y),
        **{name: given.get(name, 0.0) for name in _COEFFICIENTS[model]},
    }
