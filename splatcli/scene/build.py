"""Build the Scene of a reader's SceneSource: images, masks, depths, points and cameras put together."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splatcli.config import DataConfig
from splatcli.disk import is_there
from splatcli.errors import SceneError
from splatcli.scene import colmap
from splatcli.scene.camera import MAX_ANGLE, NEAR, Camera
from splatcli.scene.decode import Rgb
from splatcli.scene.depth_maps import AUTO, depths_of_points, find_depth_maps, wants_relative
from splatcli.scene.find_images import find_images, images_below, unread_below, unread_note
from splatcli.scene.fit_images import fit_images, keep_decodable
from splatcli.scene.georeference import FILE as GEOREFERENCE
from splatcli.scene.georeference import place_of, read_sidecar
from splatcli.scene.images import ImageStore, cache_bytes
from splatcli.scene.masks import alpha_is_mask, find_masks
from splatcli.scene.points import PointCloud, RawPoints, clean_points, nearest_points, read_points_ply
from splatcli.scene.relative_depths import fit_relative_depths
from splatcli.scene.scene import Scene, collinear, extent_of, move_origin, origin_offset, split_views, spread_of
from splatcli.scene.sfm_report import are_cameras_held
from splatcli.scene.source import Problems, Reader, SceneSource, View, path_key
from splatcli.sizes import listed

#: A model that registers fewer views than this, of more images, has failed.
MIN_VIEWS = 3

#: Images left out of a model that a note names.
_MAX_LISTED = 8


def build_scene(
    source: SceneSource, reader: Reader, data: DataConfig, background: Rgb | None, problems: Problems
) -> Scene:
    """Build the Scene of a described source. background: as in read_scene().

    Raises SceneError for images and cameras that do not fit together, with all that ``problems`` holds already.
    """
    source = replace(source, views=_distinct(source, problems), notes=list(source.notes))
    notes = source.notes
    found = find_images(source, data, problems)
    if reader is colmap.READER:
        _check_registered(source, found.folder, problems)
    if found.folder.is_dir() and (unread := unread_below(found.folder)):
        notes.append(unread_note(unread))
    sidecar = read_sidecar(source.root, data.model) if source.place is None else None
    notes += _place_notes(sidecar)
    source = replace(source, views=[view for view in source.views if view.name in found.paths])
    offset = _offset(source, data)
    points: PointCloud | None = None
    relative = wants_relative(source.file.parent, data)
    raw, numbers = source.points, {view.name: view.number for view in source.views if view.number is not None}
    if data.points is not None:
        raw, numbers = _given_points(Path(data.points), source, data, with_tracks=relative or data.depths == AUTO)
    if raw is not None:
        with problems.collect():
            drop_bad, max_doubt = data.drop_bad_points, data.max_point_error
            points = clean_points(raw, offset, drop_bad=drop_bad, max_doubt=max_doubt, notes=notes)
    masks = find_masks(source, found, data, problems)
    depths = find_depth_maps(source, data, problems, relative=relative)
    source = replace(source, views=[move_origin(view, offset) for view in source.views])
    store = ImageStore(
        fit_images(source, found, masks, depths, data, problems),
        background,
        cache_bytes(data.cache_bytes),
        alpha_is_mask=alpha_is_mask(data),
        mask_is_alpha=data.mask_mode == "transparent",
    )
    if data.strict or data.skip_bad_images:
        store = keep_decodable(store, data, notes, problems)
    cameras = [item.camera for item in store.sources]
    if data.near_share:
        if points is not None and len(points) >= _NEAREST:
            cameras = _with_near_planes(cameras, points, data.near_share)
        else:
            cameras = _with_small_near_plane(cameras, data.scene_extent)
    seen = _seen(points, numbers, store)
    if relative and store.has_depths:
        known = None
        if points is not None and seen is not None:
            known = [depths_of_points(camera, points.xyz[rows]) for camera, rows in zip(cameras, seen, strict=True)]
        store = fit_relative_depths(store, known, source.file, notes)
    train, test = split_views(source, [item.view for item in store.sources], data.test_every, notes)
    _check_places([cameras[i] for i in train], offset, data.scene_extent, source)
    return Scene(
        root=source.root,
        kind=reader.name,
        cameras=cameras,
        images=store,
        points=points,
        train=train,
        test=test,
        notes=notes,
        offset=offset,
        given_extent=data.scene_extent,
        seen=seen,
        file=source.file,
        place=place_of(sidecar) if source.place is None else source.place,
        reprojections=source.reprojections,
        cameras_held=data.points is not None or are_cameras_held(source.root),
    )


def _given_points(
    path: Path, source: SceneSource, data: DataConfig, *, with_tracks: bool
) -> tuple[RawPoints, dict[str, int]]:
    """Return the points of a PLY or a COLMAP model that take the place of the scene's own.

    with_tracks: those of a COLMAP model have tracks, which call the views by the numbers that are returned with them.
    Raises SceneError where there are none.
    """
    if not is_there(path):
        raise SceneError(
            "there are no points here",
            where=path,
            remedy="--points names a PLY, or the folder of a COLMAP model or of what splat sfm made",
        )
    if path.is_dir():
        points, images = colmap.read_points(path, data, source.notes, with_tracks=with_tracks)
        return points, _numbers_of(source.views, images)
    try:
        return read_points_ply(path, data.max_points), {}
    except SceneError as error:
        remedy = "--points names a PLY with x y z red green blue, or the folder of a COLMAP model"
        raise SceneError(error.what, where=error.where, remedy=remedy) from None


def _numbers_of(views: list[View], images: dict[str, int]) -> dict[str, int]:
    """Return the number that another model gives the image of each view, by the view's name.

    Names agree without their endings where one is the end of the other: both may leave out folders. A view that
    several images may be, or several views one image, has none.
    """
    ends: dict[str, set[int]] = {}
    for name, number in images.items():
        for end in _ends(name):
            ends.setdefault(end, set()).add(number)
    whole = {path_key(name): number for name, number in images.items()}
    found = {}
    for view in views:
        numbers = ends.get(path_key(view.name), set()) or {whole[end] for end in _ends(view.name) if end in whole}
        if view.name in images or len(numbers) == 1:
            found[view.name] = images[view.name] if view.name in images else numbers.pop()
    counts = Counter(found.values())
    return {name: number for name, number in found.items() if counts[number] == 1}


def _ends(name: str) -> list[str]:
    """Return a name without its ending, and all that is left of it without its first folders."""
    parts = PurePosixPath(path_key(name)).parts
    return ["/".join(parts[start:]) for start in range(len(parts))]


#: The sparse point, counted from the camera, that its near plane goes by: some nearer ones may be stray. Of more points
#: than these, evenly many are left out.
_NEAREST, _MOST_POINTS = 5, 200_000

#: The least near plane, as a share of the median distance; without points, the near plane of a small scene, as a share
#: of its extent.
_LEAST_NEAR = 0.01


def _with_near_planes(cameras: list[Camera], points: PointCloud, share: float) -> list[Camera]:
    """Return the cameras with near planes at ``share`` of their distances to the nearest points.

    Those of fisheyes are nearer, so that they cut no more off at MAX_ANGLE than at the axis of a pinhole.
    """
    some = points.xyz[:: -(-len(points) // _MOST_POINTS)]
    distances = nearest_points(np.stack([camera.center for camera in cameras]), some, _NEAREST)
    planes = np.maximum(share * distances, _LEAST_NEAR * float(np.median(distances)))
    planes[[camera.model == "fisheye" for camera in cameras]] *= math.cos(MAX_ANGLE)
    return [replace(camera, near=near or NEAR) for camera, near in zip(cameras, planes.tolist(), strict=True)]


def _with_small_near_plane(cameras: list[Camera], extent: float | None) -> list[Camera]:
    """Return the cameras with a near plane that leaves a small scene, of which no points are known, in view."""
    if not cameras:
        return cameras
    plane = _LEAST_NEAR * (extent or extent_of(np.stack([camera.center for camera in cameras])))
    return [replace(camera, near=plane) for camera in cameras] if 0 < plane < NEAR else cameras


def _place_notes(sidecar: dict[str, Any] | None) -> list[str]:
    """Return a note on the sidecar of a georeferenced scene."""
    if sidecar is None:
        return []
    place = place_of(sidecar)
    if place is None:
        return ["the scene is in metres"]
    lat, lon, height = place
    return [f"the scene is in metres east, north and up of {lat:.7f}, {lon:.7f}, {height:.2f} m ({GEOREFERENCE})"]


def _seen(points: PointCloud | None, numbers: dict[str, int], images: ImageStore) -> list[NDArray[np.int64]] | None:
    """Return the points that each image sees, all faces those of their panorama; None where no tracks were read.

    numbers: what the tracks call the images, by the names of their views.
    """
    if points is None or points.tracks is None:
        return None
    return points.tracks.by_image([numbers.get(image.view, -1) for image in images.sources])


def _distinct(source: SceneSource, problems: Problems) -> list[View]:
    """Return the views in the order of their names, without those that repeat the name of another."""
    if not source.views:
        problems.raise_any()
        raise SceneError("the file describes no views", where=source.file, remedy="run structure from motion again")
    kept: dict[str, View] = {}
    for view in sorted(source.views, key=lambda view: view.name):
        if view.name in kept:
            what = f"{kept[view.name].label} and {view.label} name the same image {view.name}"
            problems.add(SceneError(what, where=source.file, remedy="remove one of them"))
        kept.setdefault(view.name, view)
    return list(kept.values())


def _check_registered(source: SceneSource, folder: Path, problems: Problems) -> None:
    """Note images that COLMAP does not register; a model with too few registered ones to train on is a problem."""
    if problems.total or folder == source.root or not folder.is_dir():
        return
    names, registered = list(images_below(folder)), len(source.views)
    if len(names) <= registered:
        return
    what = f"the COLMAP model registers {registered} of the {len(names)} images in {folder.name}/"
    if registered >= MIN_VIEWS:
        missing = sorted(set(names) - {view.name for view in source.views})
        source.notes.append(f"{what}; left out: {listed(missing, _MAX_LISTED)}" if len(missing) < len(names) else what)
        return
    remedy = "run COLMAP's mapper again, with more overlap between images or exhaustive matching"
    problems.add(
        SceneError(f"{what}, too few to train on", where=source.file.parent, remedy=source.alternatives or remedy)
    )


def _offset(source: SceneSource, data: DataConfig) -> NDArray[np.float64]:
    """Return how far the scene is moved, and add a note when it is."""
    if not source.views:
        return np.zeros(3)
    centers = np.stack([view.center for view in source.views])
    offset = origin_offset(centers, data.scene_extent)
    if offset.any():
        place = ", ".join(f"{value:.15g}" for value in offset)
        source.notes.append(
            f"the scene lies {np.linalg.norm(offset):.2g} units from its origin, too far for float32; ({place}) is "
            "subtracted from its coordinates and stored with the run"
        )
    return offset


def _check_places(
    cameras: list[Camera], offset: NDArray[np.float64], given_extent: float | None, source: SceneSource
) -> None:
    """Raise SceneError where all training cameras stand at one point, and the extent is not given."""
    centers = np.stack([camera.center for camera in cameras])
    if extent_of(centers, offset) > 0:
        if collinear(centers):
            line = "all training cameras stand on one line: what is seen from one side only may come out wrong"
            source.notes.append(line)
        return
    what = (
        "there is one training view" if len(cameras) == 1 else f"all {len(cameras)} training views are from one point"
    )
    if len(cameras) > 1 and offset.any():
        largest = np.abs(centers + offset).max()
        what += f" up to {spread_of(centers):.1g} units, which may be rounding of coordinates up to {largest:.1g}"
    if given_extent is None:
        raise SceneError(
            f"{what}, so that nothing can be triangulated and the scene has no size (extent 0)",
            where=source.file,
            remedy="use images from different places; or say how large the scene is: splat train --scene-extent SIZE",
        )
    source.notes.append(f"{what}: there is no depth to be learnt")
