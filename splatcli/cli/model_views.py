"""Views of a model for the commands that render it: those that ``--views`` names, and the images of these views."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from splatcli.errors import SceneError, UsageError

if TYPE_CHECKING:
    from splatcli.checkpoint.state import Checkpoint
    from splatcli.cli.console import Output
    from splatcli.cli.model import Model
    from splatcli.render.scoring import GroundTruth
    from splatcli.render.selection import PathOptions, Views
    from splatcli.scene.camera import Camera
    from splatcli.scene.scene import Scene


#: Cameras on a circle around a model without cameras, from which its paths are made.
_AROUND = 24


def refuse_for_views(flag: str, views: str, concerned: Collection[str]) -> None:
    """Raise UsageError for a flag that only concerns other ``--views`` than these."""
    if views not in concerned:
        raise UsageError(
            f"it does not apply to --views {views}", where=flag, remedy=f"with --views {' or '.join(concerned)}"
        )


def views_of(
    model: Model | None,
    views: str,
    data: Path | None,
    cameras: Path | None,
    path_options: PathOptions,
    size: tuple[int, int] | None = None,
) -> tuple[Views, Scene | None]:
    """Return the views to render, and their scene if it is not that of the model's run.

    model: None before it is loaded; only a checkpoint of splat has cameras. orbit and ellipse go around one without.
    size: of the images, for a camera file that has none.
    """
    from splatcli.cli.model import refuse_empty
    from splatcli.config import DataConfig
    from splatcli.render.camera_files import read_cameras
    from splatcli.render.images import median_distance
    from splatcli.render.selection import AROUND, PATHS, KnownCameras, select_views
    from splatcli.scene.read import read_scene

    if model is not None:
        gaussians = model.gaussians
        path_options = replace(path_options, distance=lambda camera: median_distance(gaussians, camera))
    if cameras is not None:
        given = read_cameras(cameras, size)
        return select_views(views, KnownCameras(given, range(len(given))), path_options), None
    if model is not None and model.checkpoint is not None:
        own = model.checkpoint
        path_options = replace(path_options, georeferenced=own.dataset.place is not None)
        refined = _for_path(own.refined_cameras()) if views in PATHS else own.refined_cameras()
        return select_views(views, KnownCameras(refined, own.train, own.test), path_options, size=size), None
    if data is None or views.lower().endswith(".json"):
        beside = None if model is None else camera_file_beside(model.path)
        known = KnownCameras() if beside is None else KnownCameras(camera_file=beside)
        if model is not None and views in AROUND:
            refuse_empty(model, " to go around")
            return _path_around(model, views, path_options, known.camera_file), None
        return select_views(views, known, path_options, size=size), None
    scene = read_scene(data, DataConfig())
    path_options = replace(path_options, georeferenced=scene.place is not None)
    chosen = _for_path(scene.cameras) if views in PATHS else scene.cameras
    return select_views(views, KnownCameras(chosen, scene.train, scene.test), path_options), scene


def _path_around(model: Model, name: str, path_options: PathOptions, camera_file: Path) -> Views:
    """Return a path around a model without cameras. camera_file: where there may be some, for the note."""
    from splatcli.formats.transform import PLY_UP
    from splatcli.render.outside import ABOVE, views_from_outside
    from splatcli.render.selection import KnownCameras, select_views

    around = views_from_outside(model.gaussians, PLY_UP, _AROUND)
    chosen = select_views(name, KnownCameras(around, range(_AROUND)), path_options)
    note = (
        f"the model has no cameras: the {name} goes around its middle, {ABOVE:g} degrees above it, with -y as up; "
        f"--data SCENE or the cameras of a file, such as {camera_file}, make a better one"
    )
    return replace(chosen, note=note)


def _for_path(cameras: list[Camera]) -> list[Camera]:
    """Return the cameras as pinholes: a video of images from a fisheye lens is expected to have straight lines."""
    return [camera.as_pinhole() for camera in cameras]


def camera_file_beside(model: Path) -> Path | None:
    """Return the cameras.json beside a file of splats, or of the run of the original program that it lies in."""
    folders = [model.parent]
    if model.parent.parent.name == "point_cloud":  # point_cloud/iteration_N/point_cloud.ply
        folders.append(model.parent.parent.parent)
    return next((folder / "cameras.json" for folder in folders if (folder / "cameras.json").is_file()), None)


def _reads_alike(one: Checkpoint, other: Checkpoint) -> bool:
    """Return whether two runs read the images of one scene in the same way."""
    settings = [run.config.data.images_only().model_copy(update={"scene": run.dataset.root}) for run in (one, other)]
    return settings[0] == settings[1]


def ground_truth_of(
    checkpoint: Checkpoint | None,
    scene: Scene | None,
    data: Path | None,
    background: tuple[float, float, float] | None,
    *,
    needed: bool,
    out: Output,
    other: Model | None = None,
) -> GroundTruth | None:
    """Return the images of a scene that was read, else of the scene of a run; None, with a note, when it is missing.

    A logged error says what has changed in the scene of the run since.
    data: where the scene of the run is now. background: under what is transparent; None: that of the run, else black.
    needed: raise SceneError instead. other: a second model, whose run may have had other images of the same scene.
    """
    from splatcli.render.scoring import GroundTruth
    from splatcli.train.backgrounds import image_background
    from splatcli.train.run_scene import log_changes, run_scene

    if scene is None:
        assert checkpoint is not None, "views with images belong to a run or a scene"
        try:
            scene = run_scene(checkpoint, data, image_background(checkpoint.config), alike=False)
        except SceneError as error:
            if data is not None or needed:
                raise
            out.note(f"renders are not compared with images: {error.what} ({error.where})")
            return None
        theirs = None if other is None else other.checkpoint
        if other is not None and theirs is not None and _reads_alike(checkpoint, theirs):
            log_changes(theirs, scene, of=other.path)
    if background is not None:
        r, g, b = (round(255 * value) for value in background)
        scene = replace(scene, images=scene.images.over((r, g, b)))
    return GroundTruth(scene)
