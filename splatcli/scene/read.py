"""read_scene: finds out which layout a folder has, and reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from splatcli.config import DataConfig
from splatcli.errors import SceneError, UsageError, from_os_error
from splatcli.scene.blocks import parse_blocks, restricted
from splatcli.scene.build import assemble
from splatcli.scene.colmap import PLACES, choose_model, find_models, read_colmap, search_models
from splatcli.scene.compare import disagreement
from splatcli.scene.filetypes import SUFFIXES, walk
from splatcli.scene.photos import check_resolution
from splatcli.scene.pixels import Rgb
from splatcli.scene.problems import Problems
from splatcli.scene.scene import Scene
from splatcli.scene.source import Kind, SceneSource
from splatcli.scene.transforms import read_blender, read_nerfstudio

#: The file that makes a folder a scene of this layout, the more telling first.
FILES: dict[Kind, str] = {"blender": "transforms_train.json", "nerfstudio": "transforms.json"}
#: Stems of files that describe cameras or are a part of what does.
_CAMERA_FILES = frozenset((*(Path(name).stem for name in FILES.values()), "cameras", "images", "points3D", "database"))
#: Folders below the one that is named in which transforms files are looked for: archives often unpack into one or two.
MAX_NESTED = 2
_COLMAP: tuple[Kind] = ("colmap",)
_READERS: dict[Kind, Callable[[Path, DataConfig, Problems], SceneSource]] = {
    "blender": read_blender,
    "nerfstudio": read_nerfstudio,
}


def read_scene(path: Path, data: DataConfig, *, background: Rgb | None = (0, 0, 0)) -> Scene:
    """The scene in a folder: COLMAP, Blender, or nerfstudio / instant-ngp.

    path: the scene's folder.
    background: R G B, 0 to 255, under what is transparent; None for one that is new each step, see ImageStore.
    Only headers of the photos are read. Cameras come at the training resolution and undistorted.
    COLMAP wins where a transforms file tells the same views, since it brings points; a note says so.
    Raises SceneError for anything missing, damaged or contradictory, all of it at once where one fault does not hide
    another (SceneProblems); UsageError for an impossible resolution, and for two layouts that disagree.
    """
    check_resolution(data.resolution)
    root = Path(path).absolute()
    try:
        if not root.exists():
            raise SceneError("no such folder", where=path, remedy="name the folder that holds the photos and cameras")
        if not root.is_dir():
            raise SceneError("is a file, not a scene's folder", where=path, remedy=f"try its folder, {root.parent}")
        problems = Problems(root)
        scene = assemble(_describe(root, data, problems), data, background, problems)
        if data.blocks is None or data.block is None:
            return scene
        return restricted(scene, parse_blocks(data.blocks), data.block)
    except OSError as error:
        raise from_os_error(error, SceneError, path) from None


def has_photos_only(path: Path) -> bool:
    """Whether a folder holds photos, and nothing in it or below looks like a part of a description of cameras."""
    root = Path(path).absolute()
    found = False
    for _, folders, files in walk(root, private=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if "sparse" in folders or any(Path(name).stem in _CAMERA_FILES for name in files):
            return False
        found = found or any(name.lower().endswith(SUFFIXES) for name in files)
    return found


def _describe(root: Path, data: DataConfig, problems: Problems) -> SceneSource:
    wanted = data.format or ("colmap" if data.model else None)
    if data.model and wanted != "colmap":
        raise UsageError(
            f"a COLMAP model is named for a {wanted} scene", where="--model", remedy="leave one of them out"
        )
    transforms = [kind for kind, name in FILES.items() if (root / name).is_file()]
    models = find_models(root)
    if not models and (wanted == "colmap" or not transforms):
        models = search_models(root)
    if data.model:
        models = choose_model(root, data.model, models)
    there: list[Kind] = [*_COLMAP, *transforms] if models else transforms
    if not there and wanted != "colmap" and (inside := _nested(root)) is not None:
        source = _describe(inside, data, problems)
        source.notes.insert(0, f"the scene in {inside.relative_to(root).as_posix()}/ is used")
        return source
    if not there or wanted not in (None, *there):
        raise _nothing(wanted, root, there)
    kind = wanted or there[0]
    source = read_colmap(root, models, data, problems) if kind == "colmap" else _READERS[kind](root, data, problems)
    if wanted is None and kind == "colmap" and transforms:
        _compare(source, transforms[0], root, data)
    elif wanted is None:
        source.notes += [f"{FILES[kind]} is used, not {FILES[other]}" for other in there[1:]]
    return source


def _nested(root: Path) -> Path | None:
    """The one folder below, at most MAX_NESTED deep, that has a transforms file. Raises SceneError for several."""
    found = []
    for base, folders, files in walk(root, private=True):
        path = Path(base)
        deep = len(path.relative_to(root).parts) >= MAX_NESTED
        folders[:] = [] if deep else sorted(name for name in folders if not name.startswith("."))
        if any(name in files for name in FILES.values()):
            found.append(path)
    if len(found) > 1:
        raise SceneError(
            "has several scenes: " + ", ".join(path.relative_to(root).as_posix() for path in found),
            where=root,
            remedy=f"name one of them, as {found[0]}",
        )
    return found[0] if found else None


def _compare(source: SceneSource, kind: Kind, root: Path, data: DataConfig) -> None:
    """A note that COLMAP is used and the transforms file is not. Raises UsageError when the two disagree."""
    others = Problems(root)
    try:
        difference = disagreement(source, _READERS[kind](root, data, others))
        others.settle()
    except SceneError:
        source.notes.append(f"the COLMAP model is used; {FILES[kind]} cannot be read and is not used")
        return
    if difference is not None:
        raise UsageError(
            f"has both a COLMAP model and {FILES[kind]}, and they disagree: {difference}",
            where=root,
            remedy=f"choose one: --format colmap or --format {kind}",
        )
    source.notes.append(f"the COLMAP model is used, not {FILES[kind]}, which tells the same views")


def _nothing(wanted: Kind | None, root: Path, there: list[Kind]) -> SceneError:
    places = ", ".join(place if place != "." else "the folder itself" for place in PLACES)
    return SceneError(
        f"no {wanted or 'cameras'} here: looked for a COLMAP model (cameras and images, .bin or .txt) in {places}, and "
        f"below; for {FILES['blender']} (blender); and for {FILES['nerfstudio']} (nerfstudio)",
        where=root,
        remedy=f"what is there is read with --format {there[0]}"
        if there
        else "name the scene's folder; of photos without cameras, splat sfm FOLDER finds them",
    )
