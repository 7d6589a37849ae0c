"""From views as described to a Scene: photos, masks and points found and fitted to one another, split made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from splatcli.config import DataConfig
from splatcli.errors import SceneError
from splatcli.scene.camera import Camera
from splatcli.scene.depth_maps import find_depth_maps
from splatcli.scene.find_images import find_photos, photos_below
from splatcli.scene.frame import extent_of, moved, offset_for, on_one_line
from splatcli.scene.images import ImageStore
from splatcli.scene.masks import find_masks, hides_alpha
from splatcli.scene.memory import cache_bytes
from splatcli.scene.photos import check_resolution, decodable, fit_photos
from splatcli.scene.pixels import Rgb
from splatcli.scene.points import PointCloud, settle_points
from splatcli.scene.problems import Problems
from splatcli.scene.scene import Scene
from splatcli.scene.source import SceneSource, View
from splatcli.scene.split import split_views

#: A model that registers fewer views than this, of more photos, has failed.
MIN_VIEWS = 3


def assemble(source: SceneSource, data: DataConfig, background: Rgb | None, problems: Problems) -> Scene:
    """The Scene of a described source. background: as in read_scene().

    Raises SceneError for photos and cameras that do not fit together, with all that ``problems`` holds already.
    """
    check_resolution(data.resolution)
    notes = list(source.notes)
    views = sorted(source.views, key=lambda view: view.name)
    views = _distinct(views, source.file, problems)
    found, divided = find_photos(source, views, data, notes, problems)
    _check_registered(source, len(views), found.folder, notes, problems)
    views = [view for view in views if view.name in found.paths]
    offset = _offset(views, data, notes)
    points: PointCloud | None = None
    if source.points is not None:
        with problems.collect():
            points = settle_points(source.points, offset, drop_bad=data.drop_bad_points, notes=notes)
    masks = find_masks(source, views, found, data, int(data.resolution or 1) if divided else None, notes, problems)
    depths = find_depth_maps(source, views, found, data, notes, problems)
    shifted = [moved(view, offset) for view in views]
    sources = fit_photos(shifted, found.paths, masks, depths, data, divided, notes, problems)
    store = ImageStore(
        sources,
        background,
        cache_bytes(data.cache_bytes),
        alpha_hides=hides_alpha(data),
        masks_cut=data.mask_mode == "transparent",
    )
    if data.strict or data.skip_bad_images:
        store = decodable(store, data, notes, problems)
    cameras = [item.camera for item in store.sources]
    train, test = split_views(source, [camera.name for camera in cameras], data.test_every, notes)
    _check_places([cameras[i] for i in train], data.scene_extent, source.file, notes)
    if points is None:
        notes.append("the scene has no points: training makes its own")
    return Scene(
        source.root,
        source.kind,
        cameras,
        store,
        points,
        train,
        test,
        notes,
        offset,
        data.scene_extent,
        _seen(points, views, cameras),
        source.file,
    )


def _seen(points: PointCloud | None, views: list[View], cameras: list[Camera]) -> list[NDArray[np.int64]] | None:
    """The points that each camera's photo sees, where tracks were read."""
    if points is None or points.tracks is None:
        return None
    numbers = {view.name: -1 if view.number is None else view.number for view in views}
    return points.tracks.by_photo([numbers[camera.name] for camera in cameras])


def _distinct(views: list[View], file: Path, problems: Problems) -> list[View]:
    """``views``, which are in name order, without those that repeat the name of another."""
    if not views:
        problems.settle()
        raise SceneError("describes no views", where=file, remedy="run structure from motion again")
    kept = views[:1]
    for view in views[1:]:
        if view.name != kept[-1].name:
            kept.append(view)
            continue
        problems.add(
            SceneError(
                f"{kept[-1].label} and {view.label} name the same photo {view.name}",
                where=file,
                remedy="remove one of them",
            )
        )
    return kept


def _check_registered(source: SceneSource, registered: int, folder: Path, notes: list[str], problems: Problems) -> None:
    """COLMAP leaves out photos that it cannot place; when that is nearly all of them, the model is of no use."""
    if source.kind != "colmap" or problems.total or folder == source.root or not folder.is_dir():
        return
    photos = sum(1 for _ in photos_below(folder))
    if photos <= registered:
        return
    what = f"the COLMAP model registers {registered} of the {photos} photos in {folder.name}/"
    if registered >= MIN_VIEWS:
        notes.append(what)
        return
    remedy = "run COLMAP's mapper again, with more overlap between photos or exhaustive matching"
    problems.add(
        SceneError(f"{what}, too few to train on", where=source.file.parent, remedy=source.alternatives or remedy)
    )


def _offset(views: list[View], data: DataConfig, notes: list[str]) -> NDArray[np.float64]:
    """How far the scene is moved, and a note when it is."""
    if not views:
        return np.zeros(3)
    centers = np.stack([view.center for view in views])
    offset = offset_for(centers, data.scene_extent or extent_of(centers))
    if offset.any():
        place = ", ".join(f"{value:.15g}" for value in offset)
        notes.append(
            f"the scene lies {np.linalg.norm(offset):.2g} units from its origin, too far for float32; ({place}) is "
            "subtracted from its coordinates and stored with the run"
        )
    return offset


def _check_places(cameras: list[Camera], given_extent: float | None, file: Path, notes: list[str]) -> None:
    centers = np.stack([camera.center for camera in cameras])
    if extent_of(centers) > 0:
        if on_one_line(centers):
            notes.append("all training cameras stand on one line: what is seen from one side only may come out wrong")
        return
    what = (
        "there is one training view" if len(cameras) == 1 else f"all {len(cameras)} training views are from one point"
    )
    if given_extent is None:
        raise SceneError(
            f"{what}, so that nothing can be triangulated and the scene has no size (extent 0)",
            where=file,
            remedy="use photos from different places; or say how large the scene is: splat train --scene-extent SIZE",
        )
    notes.append(f"{what}: there is no depth to be learnt")
