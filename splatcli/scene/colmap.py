"""COLMAP models, binary or text, read through pycolmap; several sub-models and the usual nestings are found."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from splatcli.errors import SceneError
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.colmap_audit import audit_binary, count_images, faulty_text_line, text_names
from splatcli.scene.points import PointCloud, make_points
from splatcli.scene.problems import Problems
from splatcli.scene.source import ROTATION_TOLERANCE, SceneSource, View, inside, rigid

#: Where tools put models, most wanted first; each may hold one model, or numbered sub-models.
PLACES = ("sparse", "colmap/sparse", "distorted/sparse", ".")
#: How deep a scene folder is searched for models when none is in the usual places.
MAX_DEPTH = 4
_KINDS = ("cameras", "images", "points3D", "rigs", "frames")
_REMEDY = "copy the model again from where it was made, or convert it with `colmap model_converter`"
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Model:
    """A folder with a COLMAP model; suffix is ".bin" or ".txt" (binary wins where both are)."""

    folder: Path
    suffix: str
    num_images: int

    def file(self, kind: str) -> Path:
        return self.folder / f"{kind}{self.suffix}"


def find_models(root: Path) -> list[Model]:
    """The models in the first usual place that has any, those with most images first."""
    for place in PLACES:
        models = _models_in(root / place)
        if models:
            return models
    return []


def search_models(root: Path) -> list[Model]:
    """Models anywhere below ``root``; raises SceneError when they lie in folders that do not belong together."""
    groups: dict[Path, list[Model]] = {}
    for base, folders, _ in os.walk(root):
        path = Path(base)
        depth = len(path.relative_to(root).parts)
        folders[:] = sorted(name for name in folders if not name.startswith(".")) if depth < MAX_DEPTH else []
        model = _model_at(path)
        if model is not None:
            # Numbered folders are sub-models of one run of the mapper.
            groups.setdefault(path.parent if path.name.isdigit() else path, []).append(model)
    if len(groups) > 1:
        raise SceneError(
            "has several COLMAP models: " + ", ".join(str(path.relative_to(root)) for path in groups),
            where=root,
            remedy="name the folder of one of them as the scene",
        )
    return [model for models in groups.values() for model in _largest_first(models)]


def read_colmap(root: Path, models: list[Model], problems: Problems) -> SceneSource:
    """The largest of ``models`` (the first) as a SceneSource.

    Images that are wrong are added to ``problems`` and left out; a damaged file raises SceneError.
    """
    model = models[0]
    name = model.folder.relative_to(root).as_posix()
    notes = [] if name in ("sparse/0", "sparse") else [f"the COLMAP model in {name}/ is used"]
    if len(models) > 1:
        others = ", ".join(f"{other.folder.name} ({other.num_images})" for other in models[1:])
        notes = [
            f"of {len(models)} sub-models the largest is used: {name} with {model.num_images} images; not {others}"
        ]
    _compare_twin(model, notes)
    reconstruction = _read(model, notes)
    views, unregistered = _views(reconstruction, root, model, problems)
    if unregistered:
        notes.append(f"{unregistered} images have no pose and are left out")
    return SceneSource(
        root=root,
        kind="colmap",
        file=model.file("images"),
        views=views,
        image_folders=_image_folders(root, model.folder),
        points=_points(reconstruction, model),
        notes=notes,
    )


def _model_at(folder: Path) -> Model | None:
    for suffix in (".bin", ".txt"):
        if all((folder / f"{kind}{suffix}").is_file() for kind in ("cameras", "images")):
            return Model(folder, suffix, count_images(folder, suffix))
    return None


def _models_in(folder: Path) -> list[Model]:
    if not folder.is_dir():
        return []
    folders = [folder, *sorted(path for path in folder.iterdir() if path.is_dir() and path.name.isdigit())]
    return _largest_first([model for model in map(_model_at, folders) if model is not None])


def _largest_first(models: list[Model]) -> list[Model]:
    return sorted(models, key=lambda model: (-model.num_images, model.folder))


def _compare_twin(model: Model, notes: list[str]) -> None:
    """Says so when a text model beside the binary one has another number of images."""
    if model.suffix == ".bin" and (model.folder / "images.txt").is_file():
        others = count_images(model.folder, ".txt")
        if others != model.num_images:
            notes.append(f"images.bin ({model.num_images} images) is used, not images.txt ({others} images)")


def _read(model: Model, notes: list[str]) -> pycolmap.Reconstruction:
    if model.suffix == ".bin":
        audit_binary(model.folder)
    if not model.file("points3D").is_file():
        notes.append(f"{model.file('points3D').name} is missing")
    reconstruction = pycolmap.Reconstruction()
    try:
        with _readable(model) as folder:
            if model.suffix == ".bin":
                reconstruction.read_binary(folder)
            else:
                reconstruction.read_text(folder)
    except OSError as error:
        raise SceneError(
            f"cannot be read: {error.strerror}", where=error.filename or model.folder, remedy="check its permissions"
        ) from None
    except Exception as error:
        # C++ exceptions arrive under many names; whatever pycolmap dislikes is the model's fault.
        raise _refusal(model, error) from None
    return reconstruction


def _refusal(model: Model, error: Exception) -> SceneError:
    fault = faulty_text_line(model.folder) if model.suffix == ".txt" else None
    if fault is not None:
        path, line, why = fault
        return SceneError(f"this line is not as it should be: {why}", where=f"{path}:{line}", remedy=_REMEDY)
    reason = str(error).split("Check failed: ")[-1]
    return SceneError(
        f"the files of this COLMAP model contradict each other: {reason}", where=model.folder, remedy=_REMEDY
    )


@contextmanager
def _readable(model: Model) -> Iterator[str]:
    """The model's folder, or a passing copy in which what pycolmap stumbles over is mended.

    That is a missing points file (a scene may have none), and the byte order mark of some editors.
    """
    paths = [model.file(kind) for kind in _KINDS if model.file(kind).is_file()]
    marked = model.suffix == ".txt" and any(_starts_with_bom(path) for path in paths)
    if model.file("points3D").is_file() and not marked:
        yield str(model.folder)
        return
    with tempfile.TemporaryDirectory(prefix="splat-model-") as name:
        folder = Path(name)
        (folder / f"points3D{model.suffix}").write_bytes(bytes(8) if model.suffix == ".bin" else b"")
        for path in paths:
            if marked:
                (folder / path.name).write_bytes(path.read_bytes().removeprefix(_BOM))
            else:
                shutil.copyfile(path, folder / path.name)
        yield name


def _starts_with_bom(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_BOM)) == _BOM


def _views(
    reconstruction: pycolmap.Reconstruction, root: Path, model: Model, problems: Problems
) -> tuple[list[View], int]:
    """The registered views, and the number of images without a pose."""
    whole_names = text_names(model.folder) if model.suffix == ".txt" else {}
    registered = [(key, image) for key, image in sorted(reconstruction.images.items()) if image.has_pose]
    cameras = dict(reconstruction.cameras)
    views = []
    for image_id, image in registered:
        with problems.collect():
            views.append(_view(image_id, image, whole_names.get(image_id), cameras, root, model))
    return views, len(reconstruction.images) - len(registered)


def _view(
    image_id: int,
    image: pycolmap.Image,
    name: str | None,
    cameras: dict[int, pycolmap.Camera],
    root: Path,
    model: Model,
) -> View:
    """One image as a View; ``name`` is the whole one, where pycolmap knows only its beginning."""
    file = model.file("images")
    try:
        name = image.name if name is None else name
    except UnicodeDecodeError as error:
        raise SceneError(f"the name of image {image_id} is not UTF-8: {error}", where=file, remedy=_REMEDY) from None
    label = f"image {image_id} {name!r}"
    if image.camera_id not in cameras:
        raise SceneError(f"{label} wants camera {image.camera_id}, which is not there", where=file, remedy=_REMEDY)
    return View(
        name=inside(name, root, file, label),
        lens=_Fixed(model.file("cameras"), f"camera {image.camera_id}", cameras[image.camera_id]),
        viewmat=_pose(image, file, label),
        label=label,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Fixed:
    """A lens that knows its own size."""

    file: Path
    label: str
    camera: pycolmap.Camera

    def __call__(self, width: int, height: int) -> pycolmap.Camera:
        return self.camera


def _pose(image: pycolmap.Image, file: Path, label: str) -> NDArray[np.float64]:
    pose = image.cam_from_world()
    length = math.hypot(*pose.rotation.quat)
    if not abs(length - 1) <= ROTATION_TOLERANCE:
        raise SceneError(
            f"{label}: its quaternion has length {length:.4g}, expected 1",
            where=file,
            remedy="correct the pose, or take the image out of the model",
        )
    rotation = pycolmap.Rotation3d(pose.rotation.quat / length).matrix()
    return rigid(rotation, np.asarray(pose.translation, dtype=np.float64), file, label)


def _points(reconstruction: pycolmap.Reconstruction, model: Model) -> PointCloud | None:
    """The sparse points in the order of their ids; None when there are none."""
    points = [point for _, point in sorted(reconstruction.points3D.items())]
    if not points:
        return None
    xyz = np.array([point.xyz for point in points], dtype=np.float64)
    rgb = np.array([point.color for point in points], dtype=np.uint8)
    return make_points(xyz, rgb, model.file("points3D"))


def _image_folders(root: Path, model: Path) -> list[Path]:
    """Where the photos of a model may be: `images` first, but `input` for a model under `distorted`."""
    names = ("input", "images") if "distorted" in model.relative_to(root).parts else ("images", "input")
    bases = [root]
    folder = model
    while folder != root:
        bases.append(folder)
        folder = folder.parent
    return [base / name for name in names for base in bases] + bases
