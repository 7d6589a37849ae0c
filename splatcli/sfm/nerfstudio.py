"""The cameras of a finished folder for nerfstudio: transforms.json and sparse_pc.ply beside sparse/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from plyfile import PlyData, PlyElement

from splatcli.errors import OutputError, SceneError, UsageError
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.decode import read_header
from splatcli.scene.masks import masks_in
from splatcli.scene.source import Problems
from splatcli.sfm.images import orientation_of
from splatcli.sfm.options import AUTO
from splatcli.sfm.upright import write_upright, write_upright_mask

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

    Poses are camera to world, OpenGL axes, in the model's frame. nerfstudio does not heed EXIF: images that it turns,
    and their masks, become upright copies. Raises SceneError for a lens that nerfstudio lacks, and for perspective and
    fisheye cameras together, since it has one kind for all.
    """
    model = pycolmap.Reconstruction(folder / "sparse/0")
    images = sorted((model.image(image_id) for image_id in model.reg_image_ids()), key=lambda image: image.name)
    frames = [
        {"file_path": f"images/{image.name}", **_intrinsics(image.camera, folder), "transform_matrix": _pose(image)}
        for image in images
    ]
    kinds = sorted({frame["camera_model"] for frame in frames})
    if len(kinds) > 1:
        raise SceneError(
            f"the images have cameras of {' and '.join(kinds)}, and nerfstudio takes one kind, so there is no "
            f"{TRANSFORMS}",
            where=folder,
            remedy="--camera-model OPENCV or OPENCV_FISHEYE with --overwrite estimates one for all",
        )
    masks = _masks(folder, [image.name for image in images])
    for image, frame in zip(images, frames, strict=True):
        _make_upright(folder / "images" / image.name, masks.get(image.name))
        if image.name in masks:
            frame["mask_path"] = masks[image.name].relative_to(folder).as_posix()
    points = list(model.points3D.values())
    vertices = np.zeros(len(points), dtype=[*((axis, "f4") for axis in "xyz"), *((c, "u1") for c in _COLOURS)])
    if points:
        xyz, rgb = np.stack([point.xyz for point in points]), np.stack([point.color for point in points])
        for i, (axis, colour) in enumerate(zip("xyz", _COLOURS, strict=True)):
            vertices[axis], vertices[colour] = xyz[:, i], rgb[:, i]
    file = folder / TRANSFORMS
    try:
        PlyData([PlyElement.describe(vertices, "vertex")]).write(str(folder / POINTS))
        # The kind of camera is read here, and intrinsics and distortion in each frame.
        document = {"camera_model": kinds[0], "ply_file_path": POINTS, "frames": frames}
        file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror}", where=error.filename or folder) from None
    return file


_COLOURS = ("red", "green", "blue")


def _masks(folder: Path, names: list[str]) -> dict[str, Path]:
    if not (folder / "masks").is_dir():
        return {}
    problems = Problems(folder)
    masks = masks_in(folder / "masks", names, problems, wanted=False)
    problems.raise_any()
    return masks


def _make_upright(image: Path, mask: Path | None) -> None:
    """Replace an image that EXIF turns by an upright copy, and its mask by one of one channel that fits.

    They are links, whose originals stay as they are.
    """
    header = read_header(image)
    orientation = orientation_of(header)
    if mask is not None:
        found = read_header(mask)
        stored = (found.width, found.height) == (header.width, header.height)
        turn = orientation if stored else 1
        if turn > 1 or found.mode not in ("1", "L"):
            write_upright_mask(mask, turn, mask)
    if orientation > 1:
        write_upright(image, orientation, image)


def _pose(image: pycolmap.Image) -> list[list[float]]:
    world_from_camera = np.vstack([image.cam_from_world().inverse().matrix(), [0.0, 0.0, 0.0, 1.0]])
    return [[float(value) for value in row] for row in world_from_camera @ _FLIP]


def check_lens_known(model: str) -> None:
    """Raise UsageError for a lens model of COLMAP that nerfstudio lacks."""
    if model != AUTO and model not in _LENSES:
        raise UsageError(
            f"nerfstudio has no lens model {model}",
            where="--nerfstudio",
            remedy="--camera-model OPENCV, or leave it out",
        )


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
