"""COLMAP models, binary or text, read through pycolmap; several sub-models and the usual nestings are found."""

from __future__ import annotations

import errno
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from splatcli.config import DataConfig
from splatcli.errors import SceneError
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.colmap_audit import audit_binary, count_binary_images
from splatcli.scene.colmap_points import read_points
from splatcli.scene.colmap_text import count_text_images, text_fault, text_names
from splatcli.scene.depth_maps import AUTO
from splatcli.scene.filetypes import walk
from splatcli.scene.points import RawPoints
from splatcli.scene.problems import Problems
from splatcli.scene.source import ROTATION_TOLERANCE, SceneSource, View, placed, rigid

#: Where tools put models, most wanted first; each may hold one model, or numbered sub-models.
PLACES = ("sparse", "colmap/sparse", "distorted/sparse", ".")
#: How deep a scene folder is searched for models when none is in the usual places.
MAX_DEPTH = 4
_KINDS = ("cameras", "images", "rigs", "frames")
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
    for base, folders, _ in walk(root, private=True):
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


def choose_model(root: Path, name: str, models: list[Model]) -> list[Model]:
    """``models`` with the one in folder ``name`` first. Raises SceneError, with the names there are, if it has none."""
    wanted = _model_at(root / name)
    if wanted is None:
        there = ", ".join(f"{_place(model, root)} ({model.num_images} images)" for model in models)
        raise SceneError(
            "there is no COLMAP model (cameras and images, .bin or .txt)",
            where=root / name,
            remedy=f"splat train --model takes one of: {there}" if there else "name a folder inside the scene",
        )
    return [wanted, *(model for model in models if model.folder != wanted.folder)]


def read_colmap(root: Path, models: list[Model], data: DataConfig, problems: Problems) -> SceneSource:
    """The first of ``models`` as a SceneSource; the others are mentioned.

    Images that are wrong are added to ``problems`` and left out; a damaged file raises SceneError.
    """
    model, others = models[0], models[1:]
    name = _place(model, root)
    notes = [] if name in ("sparse/0", "sparse") else [f"the COLMAP model in {name}/ is used"]
    alternatives = "; ".join(f"--model {_place(o, root)} has {o.num_images} images" for o in others)
    if others:
        notes = [
            f"of {len(models)} COLMAP models {name} with {model.num_images} images is used; splat train {alternatives}"
        ]
    _compare_twin(model, notes)
    views, unregistered = _views(_read(model), root, model, data, problems)
    if unregistered:
        notes.append(f"{unregistered} images have no pose and are left out")
    points = None
    with problems.collect():
        points = _points(model, data, notes)
    return SceneSource(
        root=root,
        kind="colmap",
        file=model.file("images"),
        views=views,
        image_folders=_image_folders(root, model.folder),
        points=points,
        alternatives=alternatives or None,
        notes=notes,
    )


def _place(model: Model, root: Path) -> str:
    folder = model.folder
    return folder.relative_to(root).as_posix() if folder.is_relative_to(root) else str(folder)


def _model_at(folder: Path) -> Model | None:
    for suffix in (".bin", ".txt"):
        if all((folder / f"{kind}{suffix}").is_file() for kind in ("cameras", "images")):
            path = folder / f"images{suffix}"
            return Model(folder, suffix, count_binary_images(path) if suffix == ".bin" else count_text_images(path))
    return None


def _models_in(folder: Path) -> list[Model]:
    if not folder.is_dir():
        return []
    folders = [folder, *sorted(path for path in folder.iterdir() if path.is_dir() and path.name.isdigit())]
    return _largest_first([model for model in map(_model_at, folders) if model is not None])


def _largest_first(models: list[Model]) -> list[Model]:
    return sorted(models, key=lambda model: (-model.num_images, model.folder))


def _compare_twin(model: Model, notes: list[str]) -> None:
    """Says so when there are both binary and text files and they differ, or only half of the binary ones."""
    if model.suffix == ".bin" and (model.folder / "images.txt").is_file():
        others = count_text_images(model.folder / "images.txt")
        if others != model.num_images:
            notes.append(f"images.bin ({model.num_images} images) is used, not images.txt ({others} images)")
    if model.suffix == ".txt":
        halves = [f"{kind}.bin" for kind in ("cameras", "images") if (model.folder / f"{kind}.bin").is_file()]
        if halves:
            notes.append(f"the text files are used: {halves[0]} is there without its counterpart")


def _read(model: Model) -> pycolmap.Reconstruction:
    """The model without its points."""
    if model.suffix == ".bin":
        audit_binary(model.folder)
    reconstruction = pycolmap.Reconstruction()
    try:
        with _readable(model) as folder:
            if model.suffix == ".bin":
                reconstruction.read_binary(folder)
            else:
                reconstruction.read_text(folder)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise SceneError(
            f"cannot be read: {error.strerror}", where=error.filename or model.folder, remedy="check its permissions"
        ) from None
    except Exception as error:
        # C++ exceptions arrive under many names; whatever pycolmap dislikes is the model's fault.
        fault = text_fault(model.folder) if model.suffix == ".txt" else None
        reason = str(error).split("Check failed: ")[-1]
        raise fault or SceneError(
            f"the files of this COLMAP model contradict each other: {reason}", where=model.folder, remedy=_REMEDY
        ) from None
    return reconstruction


@contextmanager
def _readable(model: Model) -> Iterator[str]:
    """A passing folder of links to the model's files, without its points and the byte order mark of some editors."""
    with tempfile.TemporaryDirectory(prefix="splat-model-") as name:
        folder = Path(name)
        (folder / f"points3D{model.suffix}").write_bytes(bytes(8) if model.suffix == ".bin" else b"")
        for kind in _KINDS:
            path = model.file(kind)
            if not path.is_file():
                continue
            if model.suffix == ".txt" and _starts_with_bom(path):
                (folder / path.name).write_bytes(path.read_bytes().removeprefix(_BOM))
            else:
                (folder / path.name).symlink_to(path.resolve())
        yield name


def _starts_with_bom(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_BOM)) == _BOM


def _views(
    reconstruction: pycolmap.Reconstruction, root: Path, model: Model, data: DataConfig, problems: Problems
) -> tuple[list[View], int]:
    """The registered views, and the number of images without a pose."""
    whole_names = text_names(model.file("images")) if model.suffix == ".txt" else {}
    registered = [(key, image) for key, image in sorted(reconstruction.images.items()) if image.has_pose]
    cameras = dict(reconstruction.cameras)
    views = []
    for image_id, image in registered:
        with problems.collect():
            name, label = _name(image_id, image, whole_names.get(image_id), model)
            file = model.file("images")
            key, outside = placed(name, root, file, label, allow_outside=data.allow_outside)
            lens = _Fixed(model.file("cameras"), f"camera {image.camera_id}", cameras[image.camera_id])
            views.append(View(key, lens, _pose(image, file, label), label, outside, number=image_id))
    return views, len(reconstruction.images) - len(registered)


def _name(image_id: int, image: pycolmap.Image, whole: str | None, model: Model) -> tuple[str, str]:
    """The name of an image and what to call it; ``whole`` where pycolmap knows only the beginning of the name."""
    try:
        name = image.name if whole is None else whole
    except UnicodeDecodeError as error:
        raise SceneError(
            f"the name of image {image_id} is not UTF-8: {error}", where=model.file("images"), remedy=_REMEDY
        ) from None
    return name, f"image {image_id} {name!r}"


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


def _points(model: Model, data: DataConfig, notes: list[str]) -> RawPoints | None:
    path = model.file("points3D")
    if path.is_file():
        return read_points(path, data.max_points, with_tracks=data.depths == AUTO)
    notes.append(f"{path.name} is missing")
    return None


def _image_folders(root: Path, model: Path) -> list[Path]:
    """Where the photos of a model may be: `images` first, but `input` for a model under `distorted`."""
    names = ("input", "images") if "distorted" in model.parts[len(root.parts) :] else ("images", "input")
    bases = [root]
    folder = model if model.is_relative_to(root) else root
    while folder != root:
        bases.append(folder)
        folder = folder.parent
    return [base / name for name in names for base in bases] + bases
