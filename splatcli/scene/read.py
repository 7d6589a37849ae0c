"""read_scene: finds out which layout a folder has, and reads it."""

from __future__ import annotations

import logging
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splatcli import plugins
from splatcli.config import DataConfig, parse_blocks
from splatcli.errors import SceneError, UsageError, from_os_error
from splatcli.scene import blender, colmap, metashape, nerfstudio, openmvg, opensfm, opf, phone_scans, realitycapture
from splatcli.scene.camera import MAX_ANGLE, NEAR, Camera
from splatcli.scene.decode import Rgb
from splatcli.scene.depth_maps import AUTO, depths_of_points, find_depth_maps, wants_relative
from splatcli.scene.find_images import (
    SUFFIXES,
    VIDEO_SUFFIXES,
    file_remedy,
    find_images,
    images_below,
    listed,
    unread_below,
    unread_error,
    unread_note,
    walk,
)
from splatcli.scene.fit_images import check_resolution, fit_images, keep_decodable
from splatcli.scene.georeference import FILE as GEOREFERENCE
from splatcli.scene.georeference import place_of, read_sidecar
from splatcli.scene.images import ImageStore, cache_bytes
from splatcli.scene.masks import alpha_is_mask, find_masks
from splatcli.scene.partition import restrict_to_block
from splatcli.scene.points import PointCloud, RawPoints, clean_points, nearest_points, read_points_ply
from splatcli.scene.relative_depths import fit_relative_depths
from splatcli.scene.scene import Scene, collinear, extent_of, move_origin, origin_offset, split_views, spread_of
from splatcli.scene.sfm_report import REPORT, are_cameras_held
from splatcli.scene.source import Problems, Reader, SceneSource, View

_log = logging.getLogger(__name__)

#: The layouts that are read, the more telling first; plug-ins come after them.
READERS = (
    colmap.READER,
    blender.READER,
    nerfstudio.READER,
    opf.READER,
    metashape.READER,
    realitycapture.READER,
    opensfm.READER,
    openmvg.READER,
    phone_scans.POLYCAM,
    phone_scans.RECORD3D,
)
#: Those of other programs, whose files have no fixed names.
_IMPORTS = READERS[3:]
#: Stems of files that describe cameras or are a part of what does.
_CAMERA_FILES = frozenset(
    (Path(blender.FILE).stem, Path(nerfstudio.FILE).stem, "cameras", "images", "points3D", "database")
)
#: Folders below the one that is named in which transforms files are looked for: archives often unpack into one or two.
MAX_NESTED = 2


def read_scene(path: Path, data: DataConfig, *, background: Rgb | None = (0, 0, 0)) -> Scene:
    """Read the scene in a folder: COLMAP, Blender, nerfstudio / instant-ngp, or the cameras of another program.

    path: the scene's folder.
    background: R G B, 0 to 255, under what is transparent; None for one that is new each step, see ImageStore.
    Only headers of the images are read. Cameras come at the training resolution and undistorted, as pinholes and
    fisheyes (``data.projection``).
    COLMAP wins where a transforms file describes the same views, since it brings points; a note says so.
    Raises SceneError for anything missing, damaged or contradictory, all of it at once where one fault does not hide
    another (SceneProblems); UsageError for an impossible resolution, and for two layouts that disagree.
    """
    check_resolution(data.resolution)
    root = Path(path).absolute()
    try:
        if not root.exists():
            raise SceneError("no such folder", where=path, remedy="name the folder that holds the images and cameras")
        if not root.is_dir():
            remedy = file_remedy(root) or f"try its folder, {root.parent}"
            raise SceneError("is a file, not a scene's folder", where=path, remedy=remedy)
        problems = Problems(root)
        reader, source = _describe(root, data, problems)
        scene = build_scene(source, reader, data, background, problems)
        if data.blocks is None or data.block is None:
            return scene
        return restrict_to_block(scene, parse_blocks(data.blocks), data.block)
    except OSError as error:
        raise from_os_error(error, SceneError, path) from None


class NoCamerasError(SceneError):
    """A folder holds nothing that any reader of cameras knows."""


def has_images_only(path: Path) -> bool:
    """Return whether a folder holds images or videos, and nothing in it or below looks like cameras."""
    root = Path(path).absolute()
    found = False
    for base, folders, files in walk(root, private=True):
        if len(Path(base).relative_to(root).parts) <= MAX_NESTED and _imported(Path(base)):
            return False
        folders[:] = [name for name in folders if not name.startswith(".")]
        if "sparse" in folders or any(Path(name).stem in _CAMERA_FILES for name in files):
            return False
        found = found or any(name.lower().endswith((*SUFFIXES, *VIDEO_SUFFIXES)) for name in files)
    return found and not _matching_plugins(root)


def _describe(root: Path, data: DataConfig, problems: Problems) -> tuple[Reader, SceneSource]:
    """Return the reader of a folder, and the scene as its files describe it."""
    if data.model and data.format not in (None, colmap.READER.name):
        raise UsageError(
            f"a COLMAP model is named for a {data.format} scene", where="--model", remedy="leave one of them out"
        )
    wanted = colmap.READER if data.model else _reader_named(data.format)
    there = [reader for reader in ([*READERS] if wanted in (None, *READERS) else [wanted]) if reader.matches(root)]
    if not there and wanted is None:
        there = _matching_plugins(root)
    if colmap.READER not in there and (wanted is colmap.READER or not there):
        found = data.model or colmap.search_models(root, triangulated=wanted is colmap.READER)
        there = [colmap.READER] * bool(found) + there
    if not there and wanted is not colmap.READER:
        if (inside := _nested(root)) is not None:
            reader, source = _describe(inside, data, problems)
            source.notes.insert(0, f"the scene in {inside.relative_to(root).as_posix()}/ is used")
            return reader, source
        there = [colmap.READER] * bool(wanted is None and colmap.search_models(root))
    if not there or wanted not in (None, *there):
        raise _nothing(wanted, root, there)
    reader, *others = there if wanted is None else [wanted]
    source = reader.read(root, data, problems)
    if reader is colmap.READER and others:
        _compare(source, others[0], root, data)
    else:
        source.notes += [f"{reader.files} is used, not {other.files}" for other in others]
    return reader, source


def _reader_named(name: str | None) -> Reader | None:
    """Return the reader that ``--format`` names; None for None. Raises UsageError for an unknown name."""
    if name is None:
        return None
    known = {reader.name: reader for reader in READERS}
    if name in known:
        return known[name]
    found = plugins.plugins(plugins.READERS)
    if name not in found:
        raise UsageError(
            f"there is no format {name!r} of scenes",
            where="--format",
            remedy=f"one of {', '.join([*known, *found])}; a package that brings another has to be installed",
        )
    return _plugin_reader(found[name])


def _plugin_reader(plugin: plugins.Plugin) -> Reader:
    """Return a plug-in's reader, whose errors name the plug-in. Raises UsageError for one that does not work."""
    reader = plugin.load()
    if not isinstance(reader, Reader):
        raise plugin.fault(f"{reader!r} is no splatcli.scene.source.Reader")

    def matches(root: Path) -> bool:
        with plugin.running():
            return bool(reader.matches(root))

    def read(root: Path, data: DataConfig, problems: Problems) -> SceneSource:
        with plugin.running():
            source = reader.read(root, data, problems)
        if not isinstance(source, SceneSource):
            raise plugin.fault(f"it read {type(source).__name__}, not SceneSource")
        return source

    return Reader(plugin.name, reader.files, matches, read)


def _matching_plugins(root: Path) -> list[Reader]:
    """Return the readers of other packages that match a folder. A plug-in that does not work is logged."""
    there = []
    for plugin in plugins.plugins(plugins.READERS).values():
        try:
            reader = _plugin_reader(plugin)
            if reader.matches(root):
                there.append(reader)
        except UsageError as error:
            _log.warning("%s: %s", error.where, error.what)
    return there


def _nested(root: Path) -> Path | None:
    """Return the one folder below, at most MAX_NESTED deep, with cameras. Raises SceneError for several."""
    found = []
    for base, folders, files in walk(root, private=True):
        path = Path(base)
        deep = len(path.relative_to(root).parts) >= MAX_NESTED
        folders[:] = [] if deep else sorted(name for name in folders if not name.startswith("."))
        imported = path != root and _imported(path)
        if blender.FILE in files or nerfstudio.FILE in files or imported:
            found.append(path)
        if imported:  # a project may keep the same cameras a second time below
            folders.clear()
    if len(found) > 1:
        raise SceneError(
            "has several scenes: " + ", ".join(path.relative_to(root).as_posix() for path in found),
            where=root,
            remedy=f"name one of them, as {found[0]}",
        )
    return found[0] if found else None


def _imported(folder: Path) -> bool:
    """Return whether a folder holds the cameras of another program. False for one that cannot be read."""
    try:
        return any(reader.matches(folder) for reader in _IMPORTS)
    except PermissionError:
        return False


def _compare(source: SceneSource, other: Reader, root: Path, data: DataConfig) -> None:
    """Note that COLMAP is used and the other file is not. Raises UsageError when the two disagree."""
    problems = Problems(root)
    try:
        found = other.read(root, data, problems)
        difference = disagreement(source, found)
        problems.raise_any()
    except SceneError:
        source.notes.append(f"the COLMAP model is used; {other.files} cannot be read and is not used")
        return
    if difference is not None and found.incidental:
        source.notes.append(f"the COLMAP model is used, not {other.files}: {difference}")
        return
    if difference is not None:
        raise UsageError(
            f"has both a COLMAP model and {other.files}, and they disagree: {difference}",
            where=root,
            remedy=f"choose one: move the other away, or splat train --format {colmap.READER.name} or {other.name}",
        )
    source.notes.append(f"the COLMAP model is used, not {other.files}, which tells the same views")


def _nothing(wanted: Reader | None, root: Path, there: list[Reader]) -> SceneError:
    if wanted is None and not there and next(images_below(root), None) is None and (unread := unread_below(root)):
        return unread_error(root, unread)
    if next(root.iterdir(), None) is None:
        return SceneError(
            "the folder is empty", where=root, remedy="name the folder that holds the images or the scene"
        )
    looked = "; for ".join(f"{reader.files} ({reader.name})" for reader in dict.fromkeys((*READERS, wanted)) if reader)
    return (SceneError if wanted else NoCamerasError)(
        f"no {wanted.name if wanted else 'cameras'} here: looked for {looked}",
        where=root,
        remedy=f"what is there is read with --format {there[0].name}"
        if there
        else "name the scene's folder; of images without cameras, splat sfm FOLDER finds them",
    )


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
    check_resolution(data.resolution)
    notes = list(source.notes)
    views = sorted(source.views, key=lambda view: view.name)
    views = _distinct(views, source.file, problems)
    found = find_images(source, views, data, notes, problems)
    if reader is colmap.READER:
        _check_registered(source, len(views), found.folder, notes, problems)
    if found.folder.is_dir() and (unread := unread_below(found.folder)):
        notes.append(unread_note(unread))
    sidecar = read_sidecar(source.root, data.model) if source.place is None else None
    notes += _place_notes(sidecar)
    views = [view for view in views if view.name in found.paths]
    offset = _offset(views, data, notes)
    points: PointCloud | None = None
    relative = wants_relative(source.file.parent, data)
    raw, numbers = source.points, {view.name: view.number for view in views if view.number is not None}
    if data.points is not None:
        raw, numbers = _given_points(Path(data.points), data, notes, views, with_tracks=relative or data.depths == AUTO)
    if raw is not None:
        with problems.collect():
            points = clean_points(
                raw,
                offset,
                drop_bad=data.drop_bad_points,
                max_doubt=data.max_point_error,
                notes=notes,
            )
    masks = find_masks(
        source, views, found, data, int(data.resolution or 1) if found.originals else None, notes, problems
    )
    depths = find_depth_maps(source, views, found, data, notes, problems, relative=relative)
    shifted = [move_origin(view, offset) for view in views]
    sources = fit_images(shifted, found.paths, found.originals, masks, depths, data, notes, problems)
    store = ImageStore(
        sources,
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
    seen = _seen(points, numbers, cameras)
    if relative and store.has_depths:
        known = None
        if points is not None and seen is not None:
            known = [depths_of_points(camera, points.xyz[rows]) for camera, rows in zip(cameras, seen, strict=True)]
        store = fit_relative_depths(store, known, source.file, notes)
    train, test = split_views(source, [camera.name for camera in cameras], data.test_every, notes)
    _check_places([cameras[i] for i in train], offset, data.scene_extent, source.file, notes)
    return Scene(
        source.root,
        reader.name,
        cameras,
        store,
        points,
        train,
        test,
        notes,
        offset,
        data.scene_extent,
        seen,
        source.file,
        place_of(sidecar) if source.place is None else source.place,
        source.observations,
        data.points is not None or are_cameras_held(source.root / REPORT),
    )


def _given_points(
    path: Path, data: DataConfig, notes: list[str], views: list[View], *, with_tracks: bool
) -> tuple[RawPoints, dict[str, int]]:
    """Return the points of a PLY or a COLMAP model that take the place of the scene's own.

    with_tracks: those of a COLMAP model have tracks, which call the views by the numbers that are returned with them.
    Raises SceneError where there are none.
    """
    if not path.exists():
        raise SceneError(
            "there are no points here",
            where=path,
            remedy="--points names a PLY, or the folder of a COLMAP model or of what splat sfm made",
        )
    if path.is_dir():
        points, images = colmap.read_points(path, data, notes, with_tracks=with_tracks)
        return points, _numbers_of(views, images)
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
    whole = {_path_of(name): number for name, number in images.items()}
    found = {}
    for view in views:
        numbers = ends.get(_path_of(view.name), set()) or {whole[end] for end in _ends(view.name) if end in whole}
        if view.name in images or len(numbers) == 1:
            found[view.name] = images[view.name] if view.name in images else numbers.pop()
    counts = Counter(found.values())
    return {name: number for name, number in found.items() if counts[number] == 1}


def _ends(name: str) -> list[str]:
    """Return a name without its ending, and all that is left of it without its first folders."""
    parts = PurePosixPath(_path_of(name)).parts
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
    if sidecar.get("origin") is None:
        return ["the scene is in metres"]
    origin = sidecar["origin"]
    return [
        f"the scene is in metres east, north and up of {origin['latitude']:.7f}, {origin['longitude']:.7f}, "
        f"{origin['height']:.2f} m ({GEOREFERENCE})"
    ]


def _seen(points: PointCloud | None, numbers: dict[str, int], cameras: list[Camera]) -> list[NDArray[np.int64]] | None:
    """Return the points that each camera's image sees; None where no tracks were read.

    numbers: what the tracks call the images, by the cameras' names.
    """
    if points is None or points.tracks is None:
        return None
    return points.tracks.by_image([numbers.get(camera.name, -1) for camera in cameras])


def _distinct(views: list[View], file: Path, problems: Problems) -> list[View]:
    """Return ``views``, which are in name order, without those that repeat the name of another."""
    if not views:
        problems.raise_any()
        raise SceneError("describes no views", where=file, remedy="run structure from motion again")
    kept = views[:1]
    for view in views[1:]:
        if view.name != kept[-1].name:
            kept.append(view)
            continue
        problems.add(
            SceneError(
                f"{kept[-1].label} and {view.label} name the same image {view.name}",
                where=file,
                remedy="remove one of them",
            )
        )
    return kept


def _check_registered(source: SceneSource, registered: int, folder: Path, notes: list[str], problems: Problems) -> None:
    """Note images that COLMAP does not register; a model with too few registered ones to train on is a problem."""
    if problems.total or folder == source.root or not folder.is_dir():
        return
    names = list(images_below(folder))
    if len(names) <= registered:
        return
    what = f"the COLMAP model registers {registered} of the {len(names)} images in {folder.name}/"
    if registered >= MIN_VIEWS:
        views = {view.name for view in source.views}
        missing = sorted(set(names) - views)
        notes.append(f"{what}; left out: {listed(missing, _MAX_LISTED)}" if len(missing) < len(names) else what)
        return
    remedy = "run COLMAP's mapper again, with more overlap between images or exhaustive matching"
    problems.add(
        SceneError(f"{what}, too few to train on", where=source.file.parent, remedy=source.alternatives or remedy)
    )


def _offset(views: list[View], data: DataConfig, notes: list[str]) -> NDArray[np.float64]:
    """Return how far the scene is moved, and add a note when it is."""
    if not views:
        return np.zeros(3)
    centers = np.stack([view.center for view in views])
    offset = origin_offset(centers, data.scene_extent)
    if offset.any():
        place = ", ".join(f"{value:.15g}" for value in offset)
        notes.append(
            f"the scene lies {np.linalg.norm(offset):.2g} units from its origin, too far for float32; ({place}) is "
            "subtracted from its coordinates and stored with the run"
        )
    return offset


def _check_places(
    cameras: list[Camera], offset: NDArray[np.float64], given_extent: float | None, file: Path, notes: list[str]
) -> None:
    centers = np.stack([camera.center for camera in cameras])
    if extent_of(centers, offset) > 0:
        if collinear(centers):
            notes.append("all training cameras stand on one line: what is seen from one side only may come out wrong")
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
            where=file,
            remedy="use images from different places; or say how large the scene is: splat train --scene-extent SIZE",
        )
    notes.append(f"{what}: there is no depth to be learnt")


#: Degrees by which a view may be turned, relative to the first. Two solves of one scene differ by a tenth of that.
TURN = 2.0
#: Part of the cameras' mean distance from their middle by which that of one may differ; two solves: 0.01.
SHIFT = 0.1


def disagreement(one: SceneSource, other: SceneSource) -> str | None:
    """Return the disagreement of the two in words; None when they describe the same views."""
    if len(one.views) != len(other.views):
        return f"{one.file.name} has {len(one.views)} views, {other.file.name} {len(other.views)}"
    pairs = _paired(one.views, other.views)
    if pairs is None:
        return f"{one.file.name} and {other.file.name} name different images"
    first, second = ([pair[side] for pair in pairs] for side in (0, 1))
    turned = _turns(first, second)
    moved = np.abs(_distances(first) - _distances(second))
    worst = int(np.argmax(turned)) if turned.max() > TURN else int(np.argmax(moved))
    if turned[worst] > TURN:
        return f"they turn {first[worst].name} by {turned[worst]:.0f} degrees against each other"
    return f"they have {first[worst].name} at different places" if moved[worst] > SHIFT else None


def _paired(one: list[View], other: list[View]) -> list[tuple[View, View]] | None:
    """Pair the views of both by name, without endings, and without folders if only those differ; else return None."""
    for key in (_path, _stem):
        first, second = ({key(view): view for view in views} for views in (one, other))
        if first.keys() == second.keys() and len(first) == len(one):
            return [(first[name], second[name]) for name in sorted(first)]
    return None


def _path(view: View) -> str:
    return _path_of(view.name)


def _path_of(name: str) -> str:
    return str(PurePosixPath(name).with_suffix("")).casefold()


def _stem(view: View) -> str:
    return PurePosixPath(view.name).stem.casefold()


def _turns(one: list[View], other: list[View]) -> NDArray[np.float64]:
    """Return [V], degrees between the rotations relative to the first view that both give each; frames cancel out."""
    first, second = (np.stack([view.viewmat[:3, :3] for view in views]) for views in (one, other))
    between = (first @ first[0].T) @ (second @ second[0].T).transpose(0, 2, 1)
    cosines = (np.trace(between, axis1=1, axis2=2) - 1) / 2
    return np.asarray(np.degrees(np.arccos(np.clip(cosines, -1, 1))))


def _distances(views: list[View]) -> NDArray[np.float64]:
    """Return [V], distances of the cameras from their middle, in units of the mean distance."""
    centers = np.stack([view.center for view in views])
    distances = np.linalg.norm(centers - centers.mean(axis=0), axis=1)
    return np.asarray(distances / max(float(distances.mean()), np.finfo(np.float64).tiny))
