"""read_scene: finds out which layout a folder has, and reads it."""

from __future__ import annotations

from pathlib import Path

from splatcli.config import DataConfig
from splatcli.errors import SceneError
from splatcli.scene.assemble import assemble, check_resolution
from splatcli.scene.colmap import PLACES, find_models, read_colmap, search_models
from splatcli.scene.problems import Problems
from splatcli.scene.scene import Scene
from splatcli.scene.source import SceneSource
from splatcli.scene.transforms import read_blender, read_nerfstudio

BLENDER_FILE = "transforms_train.json"
NERFSTUDIO_FILE = "transforms.json"


def read_scene(path: Path, data: DataConfig, *, background: tuple[int, int, int] = (0, 0, 0)) -> Scene:
    """The scene in a folder: COLMAP, Blender, or nerfstudio / instant-ngp.

    path: the scene's folder.
    background: R G B, 0 to 255, under transparent photos.
    Only headers of the photos are read. Cameras come at the training resolution and undistorted.
    COLMAP wins where a transforms file lies beside it, since it brings points; a note says so.
    Raises SceneError for anything missing, damaged or contradictory, all of it at once where one fault does not hide
    another (SceneProblems); UsageError for an impossible resolution.
    """
    check_resolution(data.resolution)
    root = Path(path).absolute()
    if not root.exists():
        raise SceneError("no such folder", where=path, remedy="name the folder that holds the photos and cameras")
    if not root.is_dir():
        raise SceneError("is a file, not a scene's folder", where=path, remedy=f"try its folder, {root.parent}")
    problems = Problems(root)
    return assemble(_describe(root, problems), data, background, problems)


def _describe(root: Path, problems: Problems) -> SceneSource:
    models = find_models(root)
    transforms = [name for name in (BLENDER_FILE, NERFSTUDIO_FILE) if (root / name).is_file()]
    if models:
        source = read_colmap(root, models, problems)
        if transforms:
            source.notes.append(f"the COLMAP model is used, not {' or '.join(transforms)}")
        return source
    if BLENDER_FILE in transforms:
        return read_blender(root, problems)
    if transforms:
        return read_nerfstudio(root, problems)
    models = search_models(root)
    if models:
        return read_colmap(root, models, problems)
    places = ", ".join(place if place != "." else "the folder itself" for place in PLACES)
    raise SceneError(
        "no cameras here: found neither a COLMAP model (cameras and images, .bin or .txt; looked in "
        f"{places}, and below), nor {BLENDER_FILE}, nor {NERFSTUDIO_FILE}",
        where=root,
        remedy="name the scene's folder, or compute cameras with COLMAP first",
    )
