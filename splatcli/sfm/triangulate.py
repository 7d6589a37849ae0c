"""Sparse points of images whose cameras are known: matches are triangulated with lenses and poses held."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.spatial.distance import cdist

from splatcli.errors import SceneError, UsageError
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.panorama import PanoramaFace
from splatcli.sfm.execution import Execution
from splatcli.sfm.features import Stored
from splatcli.sfm.images import SfmInput
from splatcli.sfm.matching import NEIGHBOURS, Pair
from splatcli.sfm.options import MIN_IMAGES

if TYPE_CHECKING:
    from splatcli.scene.scene import Scene

#: Degrees between the axes of two cameras that count as much as a usual distance between neighbours, and degrees from
#: which two cameras see no side of a thing alike.
_TURN, _FACING = 30.0, 90.0


def known_cameras(scene: Scene, inputs: SfmInput) -> dict[str, dict[str, Any]]:
    """Return lens and pose of each image of ``inputs`` that is a view of ``scene``, by its name, for a JSON request.

    Each has the lens as COLMAP's ``model``, ``params`` (pixels), ``width`` and ``height``. Its
    ``viewmat`` is [3, 4], world to camera, OpenCV axes, in the units of the scene's files.

    scene: at full size. An image is a view of it if it is the same file, also where the scene has another link to it,
    as those that splat sfm makes. Raises SceneError where too few images are views or one is a panorama, UsageError for
    a video.
    """
    if inputs.is_video:
        raise UsageError("the frames of a video have no known cameras", where="--cameras", remedy="name their images")
    _check_flat(scene)
    views = {
        of: (source, camera)
        for source, camera in zip(scene.images.sources, scene.cameras, strict=True)
        for of in _identities(source.path)
    }
    found = {}
    for name in inputs.names:
        view = next((views[of] for of in _identities(inputs.path / name) if of in views), None)
        if view is None:
            continue
        source, camera = view
        lens = source.lens
        if lens is None:
            lens = pycolmap.Camera(
                model="PINHOLE",
                width=camera.width,
                height=camera.height,
                params=[camera.fx, camera.fy, camera.cx, camera.cy],
            )
        viewmat = camera.viewmat.copy()
        viewmat[:3, 3] -= viewmat[:3, :3] @ np.asarray(scene.offset)
        found[name] = {
            "model": lens.model_name,
            "width": int(lens.width),
            "height": int(lens.height),
            "params": [float(value) for value in lens.params],
            "viewmat": viewmat[:3].tolist(),
        }
    if len(found) < MIN_IMAGES:
        raise SceneError(
            f"only {len(found)} of the {len(inputs.names)} images are views of {scene.root}",
            where="--cameras",
            remedy="name the folder of the same images, with their cameras",
        )
    return found


def _identities(file: Path) -> Iterator[Path | tuple[int, int]]:
    """Yield by what a file is known: its path without links, and its numbers of device and inode."""
    yield file.resolve()
    with contextlib.suppress(OSError):
        stat = file.stat()
        yield stat.st_dev, stat.st_ino


def images_of(scene: Scene) -> SfmInput:
    """Return the images of a scene as the input of structure from motion, with their masks. scene: at full size.

    Names are relative to the folder that all images lie in or below. Raises SceneError for fewer than MIN_IMAGES, and
    for panoramas.
    """
    _check_flat(scene)
    files = [source.path.absolute() for source in scene.images.sources]
    if len(files) < MIN_IMAGES:
        raise SceneError(f"there are only {len(files)} images, at least {MIN_IMAGES} are needed", where=scene.root)
    folder = _common_folder(files)
    masked = [
        (file, source.mask.absolute()) for file, source in zip(files, scene.images.sources, strict=True) if source.mask
    ]
    mask_folder = _common_folder([mask for _, mask in masked]) if masked else None
    return SfmInput(
        folder,
        tuple(sorted(file.relative_to(folder).as_posix() for file in files)),
        {
            file.relative_to(folder).as_posix(): mask.relative_to(mask_folder).as_posix()
            for file, mask in masked
            if mask_folder is not None
        },
        mask_folder,
    )


def _check_flat(scene: Scene) -> None:
    """Raise SceneError for a scene with panoramas."""
    for source in scene.images.sources:
        if isinstance(source.lens, PanoramaFace):
            raise SceneError(
                "it is a panorama, and points are triangulated of perspective images and fisheyes only",
                where=source.path,
                remedy="give the scene points (--points FILE.ply), or find cameras and points: splat sfm PHOTOS",
            )


def _common_folder(files: list[Path]) -> Path:
    return Path(os.path.commonpath([file.parent for file in files]))


def pairs_by_pose(cameras: Sequence[Mapping[str, Any]], neighbours: int = NEIGHBOURS) -> list[Pair]:
    """Pair each image with the ``neighbours`` whose cameras are nearest; return ascending pairs (i, j), i < j.

    cameras: of N images, as known_cameras() gives them. The distance of two is that of their centres, in units of the
    median distance to the ``neighbours``-th nearest centre, and the angle between their axes in units of _TURN.
    Cameras that look further apart than _FACING are not paired.
    """
    viewmats = np.array([camera["viewmat"] for camera in cameras])
    axes = viewmats[:, 2, :3]
    centers = -np.einsum("nij,ni->nj", viewmats[:, :, :3], viewmats[:, :, 3])
    count = min(neighbours, len(centers) - 1)
    if count < 1:
        return []
    apart = cdist(centers, centers)
    usual = float(np.median(np.partition(apart, count, axis=1)[:, count]))
    angle = np.degrees(np.arccos(np.clip(axes @ axes.T, -1.0, 1.0)))
    distance = apart / (usual or 1.0) + angle / _TURN
    distance[angle > _FACING] = np.inf
    np.fill_diagonal(distance, np.inf)
    nearest = np.argsort(distance, axis=1, kind="stable")[:, :count]
    return sorted(
        {(min(i, int(j)), max(i, int(j))) for i, row in enumerate(nearest) for j in row if np.isfinite(distance[i, j])}
    )


def _lens(known: Mapping[str, Any]) -> pycolmap.Camera:
    camera = pycolmap.Camera(model=known["model"], width=known["width"], height=known["height"], params=known["params"])
    camera.has_prior_focal_length = True
    return camera


def hold_lenses(database: Path, stored: list[Stored], cameras: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the known lenses over the guesses in the database, where each image has a camera of its own.

    Raises SceneError for an image of another size than its camera.
    """
    with pycolmap.Database.open(database) as store, pycolmap.DatabaseTransaction(store):
        for item in stored:
            known = cameras[item.image.name]
            if item.image.size != (known["width"], known["height"]):
                raise SceneError(
                    f"{item.image.name} has {item.image.width}x{item.image.height} pixels, its camera "
                    f"{known['width']}x{known['height']}",
                    where="--cameras",
                    remedy="images that EXIF turns, or that are reduced, need cameras of the same shape",
                )
            camera = _lens(known)
            camera.camera_id = store.read_image(item.image_id).camera_id
            store.update_camera(camera)


def triangulate(
    database: Path,
    folder: Path,
    stored: list[Stored],
    cameras: Mapping[str, Mapping[str, Any]],
    execution: Execution,
) -> pycolmap.Reconstruction:
    """Return the model of all images with the known lenses and poses, and the points that their matches give.

    folder: where pycolmap may write, must not exist.
    Positions are in the frame and units of the poses. Features, lenses and matches have to be in the database.
    """
    model = pycolmap.Reconstruction()
    with pycolmap.Database.open(database) as store:
        for item in stored:
            camera = store.read_camera(store.read_image(item.image_id).camera_id)
            model.add_camera_with_trivial_rig(camera)
            pose = pycolmap.Rigid3d(np.array(cameras[item.image.name]["viewmat"]))
            image = pycolmap.Image(name=item.key, camera_id=camera.camera_id, image_id=item.image_id)
            model.add_image_with_trivial_frame(image, pose)
    options = pycolmap.IncrementalPipelineOptions()
    options.random_seed = execution.random_seed
    options.num_threads = execution.num_threads
    options.extract_colors = False
    progress = execution.start("triangulation")
    progress(0, 1)
    folder.mkdir()
    found = pycolmap.triangulate_points(model, database, folder, folder, clear_points=True, options=options)
    progress(1, 1)
    return found
