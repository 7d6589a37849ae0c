"""Sparse points of images whose cameras are known: matches are triangulated with lenses and poses held."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.spatial.distance import cdist

from splatcli import machine
from splatcli.errors import SceneError, UsageError
from splatcli.progress import Listener
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.panorama import PanoramaFace
from splatcli.sfm.execution import Execution
from splatcli.sfm.features import Stored
from splatcli.sfm.images import SfmInput
from splatcli.sfm.matching import NEIGHBOURS, Pair
from splatcli.sfm.options import MIN_IMAGES, SfmOptions

if TYPE_CHECKING:
    from splatcli.config import DataConfig
    from splatcli.scene.camera import Camera
    from splatcli.scene.scene import Scene

#: Degrees between the axes of two cameras that count as much as a usual distance between neighbours, and degrees from
#: which two cameras see no side of a thing alike.
_TURN, _FACING = 30.0, 90.0

#: With fewer triangulated points than this, training begins with random ones.
LEAST_POINTS = 100

#: Pixels of the longer side that features need at least where training waits for points, and how many times the longer
#: side of its images they have: more gain a run nothing (docs/quality.md).
_LEAST_SIDE, _FINER = 480, 3

#: The same where time is short: points of 240 pixels are better than none. The first size is taken that is likely to
#: need this part of the time at most: other machines are slower, or have other work.
_SHORT_OF_TIME, _EASY = (640, 480, 320, 240), 0.5

#: Seconds to start, and of a processor's time for a million pixels that features are found on, matches included. On a
#: Zen 5 the fox takes 1.6 to 2.2; slower machines take twice as long.
_START_SECONDS, _PIXEL_SECONDS = 4.0, 3.0


def points_request(scene: Scene, data: DataConfig, seconds: float | None = None) -> tuple[SfmInput, SfmOptions, bool]:
    """Return the images of a scene, the options that triangulate points to train on them, and whether time suffices.

    data: the settings that the scene was read with. seconds: that it may take at most; features are fewer then, and at
    last the time does not suffice. Raises SceneError for too few images.
    """
    from splatcli.scene.read import read_scene

    full = read_scene(scene.root, data.model_copy(update={"resolution": 1}).images_only())
    inputs = images_of(full)
    size = _feature_size(scene.cameras, full.cameras)
    suffices = True
    if seconds is not None:
        sizes = [size, *(side for side in _SHORT_OF_TIME if side < size)]
        size = next((side for side in sizes if _seconds_for(full.cameras, side) <= _EASY * seconds), sizes[-1])
        suffices = _seconds_for(full.cameras, size) <= seconds
    return inputs, SfmOptions(cameras=known_cameras(full, inputs), max_image_size=size), suffices


def _feature_size(trained: Sequence[Camera], full: Sequence[Camera]) -> int:
    """Return the pixels of the longer side at which features are found for a run on images of the size ``trained``.

    full: the cameras at full size. The default of ``splat sfm`` where that is no more, so that its results are alike.
    """
    side, whole = (max(max(one.width, one.height) for one in cameras) for cameras in (trained, full))
    size, most = max(_LEAST_SIDE, _FINER * side), SfmOptions().max_image_size
    return size if size < min(whole, most) else most


def _seconds_for(full: Sequence[Camera], side: int) -> float:
    """Return about how long it takes to triangulate points from features on images of ``side`` pixels."""
    scales = [min(1.0, side / max(one.width, one.height)) for one in full]
    pixels = sum(one.width * one.height * scale**2 for one, scale in zip(full, scales, strict=True))
    return _START_SECONDS + _PIXEL_SECONDS * 1e-6 * pixels / machine.cores()


class TooSlowError(SceneError):
    """Structure from motion takes longer than it may. needed: seconds that it takes at its speed; 0 where unknown."""

    def __init__(self, seconds: float, needed: float = 0.0) -> None:
        super().__init__(f"that takes more than {seconds:.0f} s here, which --max-time does not leave for it")
        self.needed = needed


class Deadline:
    """Ends structure from motion for a run that has no time to wait for it. progress: hears of the rest."""

    #: Images and seconds after which the time of all images is known, and what the rest takes in units of that.
    _KNOWN_IMAGES, _KNOWN_SECONDS, _REST = 4, 2.0, 1.7

    def __init__(self, seconds: float, progress: Listener) -> None:
        self._progress = progress
        self._seconds = seconds
        self._began = time.monotonic()
        self._first: tuple[float, int] | None = None

    def __call__(self, phase: str, done: int, total: int) -> None:
        """Pass a report on. Raises TooSlowError when the time is over, or will not suffice at this speed."""
        now = time.monotonic()
        if now - self._began > self._seconds:
            raise TooSlowError(self._seconds)
        if phase == "features":
            since, first = self._first = self._first or (now, done)
            if done - first >= self._KNOWN_IMAGES and now - since >= self._KNOWN_SECONDS:
                features = total * (now - since) / (done - first)
                needed = since - self._began + features * (1.0 + self._REST)
                if needed > self._seconds:
                    raise TooSlowError(self._seconds, needed)
        self._progress(phase, done, total)


def with_fewer_features(options: SfmOptions, slow: TooSlowError, seconds: float) -> SfmOptions | None:
    """Return the options with which ``seconds`` are likely to suffice, after others were too slow; None without any."""
    for side in _SHORT_OF_TIME:
        needed = slow.needed * (side / options.max_image_size) ** 2
        if side < options.max_image_size and 0.0 < needed <= seconds:
            return replace(options, max_image_size=side)
    return None


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
