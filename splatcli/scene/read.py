"""read_scene: finds out which layout a folder has, and reads it."""

from __future__ import annotations

import logging
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from splatcli import plugins
from splatcli.config import DataConfig, parse_blocks
from splatcli.disk import is_there
from splatcli.errors import SceneError, UsageError, from_os_error
from splatcli.scene import colmap, metashape, nerfstudio, openmvg, opensfm, opf, phone_scans, realitycapture
from splatcli.scene.decode import Rgb
from splatcli.scene.find_images import (
    SUFFIXES,
    VIDEO_SUFFIXES,
    file_remedy,
    file_with_remedy,
    images_below,
    unread_below,
    unread_error,
    walk,
)
from splatcli.scene.fit_images import check_resolution
from splatcli.scene.partition import restrict_to_block
from splatcli.scene.scene import Scene
from splatcli.scene.source import Problems, Reader, SceneSource, View, path_key

_log = logging.getLogger(__name__)

#: Layouts that are looked for in the folders below, too: those of programs whose files have no fixed names.
_IMPORTS = (
    opf.READER,
    metashape.READER,
    realitycapture.READER,
    opensfm.READER,
    openmvg.READER,
    phone_scans.POLYCAM,
    phone_scans.RECORD3D,
)

#: All layouts, those first that are chosen where a folder has several; plug-ins come after them.
READERS = (colmap.READER, nerfstudio.BLENDER_READER, nerfstudio.READER, *_IMPORTS)

#: Stems of files that describe cameras or are a part of what does.
_CAMERA_FILES = frozenset(
    (Path(nerfstudio.BLENDER_FILE).stem, Path(nerfstudio.FILE).stem, "cameras", "images", "points3D", "database")
)

#: Degrees by which a view may be turned, relative to the first. Two solves of one scene differ by a tenth of that.
TURN = 2.0

#: Part of the cameras' mean distance from their middle by which that of one may differ; two solves: 0.01.
SHIFT = 0.1

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
    from splatcli.scene.build import build_scene  # loads torch, without which splat sfm asks for camera_files()

    check_resolution(data.resolution)
    root = Path(path).absolute()
    try:
        if not is_there(root):
            raise SceneError("no such folder", where=path, remedy="name the folder that holds the images and cameras")
        if not root.is_dir():
            remedy = file_remedy(root) or f"try its folder, {root.parent}"
            raise SceneError("this is a file, not a scene's folder", where=path, remedy=remedy)
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
    for base, folders, files in walk(root, private=True, links=True):
        if len(Path(base).relative_to(root).parts) <= MAX_NESTED and _imported(Path(base)):
            return False
        folders[:] = [name for name in folders if not name.startswith(".")]
        if "sparse" in folders or any(Path(name).stem in _CAMERA_FILES for name in files):
            return False
        found = found or any(name.lower().endswith((*SUFFIXES, *VIDEO_SUFFIXES)) for name in files)
    return found and not _matching_plugins(root)


def camera_files(path: Path) -> str | None:
    """Return what in a folder describes cameras, as ``transforms.json``; None where no reader knows any of it."""
    root = Path(path).absolute()
    reader = next((reader for reader in READERS if reader.matches(root)), None)
    if reader is not colmap.READER:
        return None if reader is None else reader.files
    models = colmap.search_models(root)
    return f"a COLMAP model in {models[0].folder.relative_to(root).as_posix()}/" if models else None


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
        if nerfstudio.BLENDER_FILE in files or nerfstudio.FILE in files or imported:
            found.append(path)
        if imported:  # a project may keep the same cameras a second time below
            folders.clear()
    if len(found) > 1:
        raise SceneError(
            "the folder has several scenes: " + ", ".join(path.relative_to(root).as_posix() for path in found),
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
        difference = _disagreement(source, found)
        problems.raise_any()
    except SceneError:
        source.notes.append(f"the COLMAP model is used; {other.files} cannot be read and is not used")
        return
    if difference is not None and found.incidental:
        source.notes.append(f"the COLMAP model is used, not {other.files}: {difference}")
        return
    if difference is not None:
        raise UsageError(
            f"the folder has both a COLMAP model and {other.files}, and they disagree: {difference}",
            where=root,
            remedy=f"choose one: move the other away, or splat train --format {colmap.READER.name} or {other.name}",
        )
    source.notes.append(f"the COLMAP model is used, not {other.files}, which describes the same views")


def _disagreement(one: SceneSource, other: SceneSource) -> str | None:
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
    for key in (path_key, _stem):
        first, second = ({key(view.name): view for view in views} for views in (one, other))
        if first.keys() == second.keys() and len(first) == len(one):
            return [(first[name], second[name]) for name in sorted(first)]
    return None


def _stem(name: str) -> str:
    return PurePosixPath(name).stem.casefold()


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


def _nothing(wanted: Reader | None, root: Path, there: list[Reader]) -> SceneError:
    if wanted is None and not there and next(images_below(root), None) is None and (unread := unread_below(root)):
        return unread_error(root, unread)
    if next(root.iterdir(), None) is None:
        return SceneError(
            "the folder is empty", where=root, remedy="name the folder that holds the images or the scene"
        )
    if wanted is None and not there and next(images_below(root), None) is None:
        other = file_with_remedy(root)
        if other is not None:
            what = f"there are no images and no cameras here; {other[0].name} is no image and no video that is read"
            return SceneError(what, where=root, remedy=other[1])
    looked = "; for ".join(f"{reader.files} ({reader.name})" for reader in dict.fromkeys((*READERS, wanted)) if reader)
    return (SceneError if wanted else NoCamerasError)(
        f"no {wanted.name if wanted else 'cameras'} here: looked for {looked}",
        where=root,
        remedy=f"what is there is read with --format {there[0].name}"
        if there
        else "name the scene's folder; of images without cameras, splat sfm FOLDER finds them",
    )
