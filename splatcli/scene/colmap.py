"""COLMAP models, binary or text, read through pycolmap; several sub-models and the usual nestings are found."""

from __future__ import annotations

import errno
import math
import mmap
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splatcli.config import DataConfig
from splatcli.errors import SceneError
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.depth_maps import AUTO
from splatcli.scene.find_images import walk
from splatcli.scene.points import RawPoints, Tracks, stride
from splatcli.scene.source import ROTATION_TOLERANCE, Problems, SceneSource, View, placed, rigid

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


_LINE_REMEDY = "correct the line, or copy the model again from where it was made"


def count_text_images(path: Path) -> int:
    """The number of images in images.txt."""
    return sum(1 for _ in _image_lines(path))


def text_names(path: Path) -> dict[int, str]:
    """Image id -> name in images.txt; pycolmap cuts names at the first space."""
    rows = (line.split(maxsplit=9) for _, line, _ in _image_lines(path))
    return {int(row[0]): row[9] for row in rows if len(row) == 10 and row[0].isdecimal()}


def data_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number from 1, line without the space around it) of each line that is neither empty nor a comment."""
    return ((number, line) for number, line in _lines(path) if line and not line.startswith("#"))


def text_fault(folder: Path) -> SceneError | None:
    """What is wrong with the first line of cameras.txt or images.txt that is not as it should be; None if all are."""
    return _camera_fault(folder / "cameras.txt") or _image_fault(folder / "images.txt")


def point_fault(path: Path) -> SceneError | None:
    """The same for points3D.txt."""
    for number, line in data_lines(path):
        fields = line.split()
        if len(fields) < 8 or len(fields) % 2 or not _all(float, fields):
            return _fault(path, number, "expected POINT3D_ID X Y Z R G B ERROR TRACK...")
    return None


def _camera_fault(path: Path) -> SceneError | None:
    seen: dict[int, int] = {}
    for number, line in data_lines(path):
        fields = line.split()
        if len(fields) < 5 or not _all(int, fields[0:1] + fields[2:4]) or not _all(float, fields[4:]):
            return _fault(path, number, "expected CAMERA_ID MODEL WIDTH HEIGHT PARAMS...")
        camera_id, model = int(fields[0]), pycolmap.CameraModelId.__members__.get(fields[1])
        if model is None or int(model) not in MODEL_PARAMS:
            return _fault(path, number, f"camera {camera_id} has the unknown model {fields[1]}", UNKNOWN_MODEL_REMEDY)
        if len(fields) - 4 != MODEL_PARAMS[int(model)]:
            wanted = MODEL_PARAMS[int(model)]
            return _fault(
                path,
                number,
                f"camera {camera_id} is {fields[1]}, which has {wanted} parameters, not {len(fields) - 4}",
                "name the model that has these parameters, e.g. OPENCV for fx fy cx cy k1 k2 p1 p2",
            )
        if int(fields[2]) < 1 or int(fields[3]) < 1:
            return _fault(path, number, f"camera {camera_id} is {fields[2]}x{fields[3]} pixels large")
        if camera_id in seen:
            return _fault(path, number, f"camera {camera_id} is there already, in line {seen[camera_id]}")
        seen[camera_id] = number
    return None


def _image_fault(path: Path) -> SceneError | None:
    seen: dict[int, int] = {}
    for number, line, observations in _image_lines(path):
        fields = line.split(maxsplit=9)
        if len(fields) < 10 or not _all(int, [fields[0], fields[8]]) or not _all(float, fields[1:8]):
            return _fault(path, number, "expected IMAGE_ID QW QX QY QZ TX TY TZ CAMERA_ID NAME")
        triples = observations.split()
        if len(triples) % 3 or not _all(float, triples):
            return _fault(
                path, number + 1, "expected X Y POINT3D_ID for each observation of the image above, or an empty line"
            )
        if int(fields[0]) in seen:
            return _fault(path, number, f"image {fields[0]} is there already, in line {seen[int(fields[0])]}")
        seen[int(fields[0])] = number
    return None


def _fault(path: Path, number: int, why: str, remedy: str = _LINE_REMEDY) -> SceneError:
    return SceneError(f"this line is not as it should be: {why}", where=f"{path}:{number}", remedy=remedy)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    # Bytes that are no UTF-8 must not end the search for the faulty line; a byte order mark is no part of the text.
    with path.open(encoding="utf-8-sig", errors="replace", newline="\n") as file:
        for number, line in enumerate(file, 1):
            yield number, line.strip()


def _image_lines(path: Path) -> Iterator[tuple[int, str, str]]:
    """(line number, pose line, observation line) of each image in images.txt."""
    lines = _lines(path)
    for number, line in lines:
        if line and not line.startswith("#"):
            yield number, line, next(lines, (0, ""))[1]


def _all(kind: type[int] | type[float], fields: list[str]) -> bool:
    try:
        for text in fields:
            kind(text)
    except ValueError:
        return False
    return True


#: Parameters of each camera model by COLMAP's model id.
MODEL_PARAMS = {
    **{0: 3, 1: 4, 2: 4, 3: 5, 4: 8, 5: 8, 6: 12, 7: 5, 8: 4, 9: 5},
    **{10: 12, 11: 16, 12: 4, 13: 5, 14: 3, 15: 4, 16: 6, 17: 2},
}
#: What to do about a camera model that nobody knows.
UNKNOWN_MODEL_REMEDY = "undistort the photos with `colmap image_undistorter`, which writes PINHOLE cameras"
#: Longest image name in bytes; longer ones mean that the file is not what it seems.
MAX_NAME = 4096

REMEDY = "copy the file again from where the model was made, or run COLMAP's mapper again"


@dataclass(slots=True)
class Cursor:
    """A position in a file that cannot leave it; ``record`` is where it stands, for messages."""

    path: Path
    data: mmap.mmap
    offset: int = 0
    record: str = field(default="header")

    @classmethod
    @contextmanager
    def over(cls, path: Path) -> Iterator[Cursor]:
        """A cursor at the start of a file. Raises SceneError for one too short to hold a count."""
        with path.open("rb") as file:
            if path.stat().st_size < _U64.size:
                raise SceneError(f"is only {path.stat().st_size} bytes long", where=path, remedy=REMEDY)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                yield cls(path, data)

    def take(self, layout: struct.Struct) -> tuple[int | float, ...]:
        start = self.offset
        self.skip(layout.size)
        return layout.unpack_from(self.data, start)

    def skip(self, size: int) -> None:
        if self.offset + size > len(self.data):
            raise SceneError(
                f"ends in the middle of {self.record}: byte {self.offset + size:,} is needed, "
                f"the file has {len(self.data):,}",
                where=self.path,
                remedy=REMEDY,
            )
        self.offset += size

    def count(self, smallest: int, what: str) -> int:
        """A 64-bit count of records that take at least ``smallest`` bytes each."""
        start = self.offset
        n = int(self.take(_U64)[0])
        if n * smallest > len(self.data) - self.offset:
            raise SceneError(
                f"claims {n:,} {what} at byte {start:,}, but only {len(self.data) - self.offset:,} bytes follow",
                where=self.path,
                remedy=REMEDY,
            )
        return n

    def end(self) -> None:
        if self.offset != len(self.data):
            raise SceneError(
                f"has {len(self.data) - self.offset:,} bytes after its last record, at byte {self.offset:,}",
                where=self.path,
                remedy=REMEDY,
            )


_U64 = struct.Struct("<Q")
_CAMERA = struct.Struct("<IiQQ")
_IMAGE = struct.Struct("<I7dI")
POINT = struct.Struct("<Q3d3BdQ")
TRACK_LENGTH = _U64
_RIG = struct.Struct("<II")
_SENSOR = struct.Struct("<iI")
_FLAG = struct.Struct("<B")
_FRAME = struct.Struct("<II7dI")
_POSE_SIZE = 56
_OBSERVATION_SIZE = 24
_DATA_SIZE = 16


@dataclass(slots=True)
class _Ids:
    """The ids met so far, by kind of record."""

    cameras: set[int] = field(default_factory=set)
    images: set[int] = field(default_factory=set)


def _walk_cameras(cursor: Cursor, ids: _Ids) -> None:
    n = cursor.count(_CAMERA.size, "cameras")
    for i in range(n):
        cursor.record = f"camera {i + 1} of {n}"
        camera_id, model, _, _ = (int(value) for value in cursor.take(_CAMERA))
        if model not in MODEL_PARAMS:
            raise SceneError(
                f"camera {camera_id} has the unknown model id {model}", where=cursor.path, remedy=UNKNOWN_MODEL_REMEDY
            )
        if camera_id in ids.cameras:
            raise SceneError(f"camera {camera_id} is there twice", where=cursor.path, remedy=REMEDY)
        ids.cameras.add(camera_id)
        cursor.skip(8 * MODEL_PARAMS[model])


def _walk_images(cursor: Cursor, ids: _Ids) -> None:
    n = cursor.count(_IMAGE.size + 1 + _U64.size, "images")
    for i in range(n):
        cursor.record = f"image {i + 1} of {n}"
        values = cursor.take(_IMAGE)
        image_id, camera_id = int(values[0]), int(values[-1])
        if image_id in ids.images:
            raise SceneError(f"image {image_id} is there twice", where=cursor.path, remedy=REMEDY)
        ids.images.add(image_id)
        if camera_id not in ids.cameras:
            raise SceneError(
                f"image {image_id} wants camera {camera_id}, which is not in {cursor.path.with_stem('cameras').name}",
                where=cursor.path,
                remedy=REMEDY,
            )
        stop = cursor.data.find(b"\0", cursor.offset, cursor.offset + MAX_NAME)
        if stop < 0:
            raise SceneError(f"the name of {cursor.record} has no end", where=cursor.path, remedy=REMEDY)
        cursor.offset = stop + 1
        cursor.skip(_OBSERVATION_SIZE * cursor.count(_OBSERVATION_SIZE, "observations"))


def _walk_rigs(cursor: Cursor, _ids: _Ids) -> None:
    n = cursor.count(_RIG.size, "rigs")
    for i in range(n):
        cursor.record = f"rig {i + 1} of {n}"
        sensors = int(cursor.take(_RIG)[1])
        for j in range(sensors):
            cursor.skip(_SENSOR.size)
            if j > 0 and cursor.take(_FLAG)[0]:
                cursor.skip(_POSE_SIZE)


def _walk_frames(cursor: Cursor, _ids: _Ids) -> None:
    n = cursor.count(_FRAME.size, "frames")
    for i in range(n):
        cursor.record = f"frame {i + 1} of {n}"
        cursor.skip(_DATA_SIZE * int(cursor.take(_FRAME)[-1]))


_WALKS: dict[str, Callable[[Cursor, _Ids], None]] = {
    "cameras": _walk_cameras,
    "images": _walk_images,
    "rigs": _walk_rigs,
    "frames": _walk_frames,
}


def audit_binary(folder: Path) -> None:
    """Walks every .bin file of the model that pycolmap is to read.

    Raises SceneError with file, record and byte when a file is shorter or longer than its counts say, and with the id
    of a camera that is unknown, missing or there twice.
    """
    ids = _Ids()
    for kind, walk_records in _WALKS.items():
        path = folder / f"{kind}.bin"
        if path.is_file():
            with Cursor.over(path) as cursor:
                walk_records(cursor, ids)
                cursor.end()


def count_binary_images(path: Path) -> int:
    """The number of images that the header of images.bin claims."""
    with path.open("rb") as file:
        head = file.read(_U64.size)
    return int(_U64.unpack(head)[0]) if len(head) == _U64.size else 0


#: The beginning of a point's record: what is read of it.
_HEAD = np.dtype([("id", "<u8"), ("xyz", "<f8", 3), ("rgb", "u1", 3)])
#: A track is a list of photos, each with the number of an observation in it.
_TRACK_SIZE = 8
#: Columns of points3D.txt that are read: the same.
_COLUMNS = 7
#: Where the track begins, after the point's error.
_TRACK_COLUMN = 8


def read_points(path: Path, limit: int, *, with_tracks: bool = False) -> RawPoints | None:
    """The points of points3D.bin or .txt in the order of their ids; None when there are none.

    limit: at most so many, spread evenly over the file.
    with_tracks: also which photos see them.
    Raises SceneError, with the byte or the line, for a damaged file.
    """
    read = _read_binary if path.suffix == ".bin" else _read_text
    return read(path, limit, with_tracks)


def _read_binary(path: Path, limit: int, with_tracks: bool) -> RawPoints | None:
    heads, tracks = bytearray(), bytearray()
    lengths: list[int] = []
    with Cursor.over(path) as cursor:
        total = cursor.count(POINT.size, "points")
        step = stride(total, limit)
        length_of, before_length = TRACK_LENGTH.unpack_from, POINT.size - TRACK_LENGTH.size
        data, size, offset = cursor.data, len(cursor.data), cursor.offset
        for i in range(total):
            following = offset + POINT.size
            if following <= size:
                following += _TRACK_SIZE * length_of(data, offset + before_length)[0]
            if following > size:
                cursor.offset, cursor.record = offset, f"point {i + 1} of {total}"
                cursor.skip(following - offset)
            if i % step == 0:
                heads += data[offset : offset + _HEAD.itemsize]
                if with_tracks:
                    tracks += data[offset + POINT.size : following]
                    lengths.append((following - offset - POINT.size) // _TRACK_SIZE)
            offset = following
        cursor.offset = offset
        cursor.end()
    table = np.frombuffer(heads, dtype=_HEAD)
    photos = np.frombuffer(tracks, dtype="<u4")[::2].astype(np.int64)
    return _in_order(table["id"], table["xyz"], table["rgb"], path, total, photos, lengths)


def _read_text(path: Path, limit: int, with_tracks: bool) -> RawPoints | None:
    total = sum(1 for _ in data_lines(path))
    kept = islice(data_lines(path), 0, None, stride(total, limit))
    if total == 0:
        return None
    photos: list[NDArray[np.int64]] = []

    def columns() -> Iterator[str]:
        # Tracks can be much longer than the rest of a line.
        for _, line in kept:
            if with_tracks:
                photos.append(np.array(line.split()[_TRACK_COLUMN::2], dtype=np.int64))
            yield " ".join(line.split(maxsplit=_COLUMNS)[:_COLUMNS])

    try:
        table = np.loadtxt(columns(), dtype=np.float64, ndmin=2)
        if table.shape[1] != _COLUMNS:
            raise ValueError(f"{table.shape[1]} columns")
    except (ValueError, OverflowError) as error:
        raise point_fault(path) or SceneError(f"cannot be read: {error}", where=path, remedy=REMEDY) from None
    rgb = np.clip(np.nan_to_num(table[:, 4:]), 0, 255)
    numbers = np.concatenate(photos) if photos else np.zeros(0, np.int64)
    return _in_order(table[:, 0], table[:, 1:4], rgb, path, total, numbers, list(map(len, photos)))


def _in_order(
    ids: NDArray[Any],
    xyz: NDArray[np.float64],
    rgb: NDArray[Any],
    path: Path,
    total: int,
    photos: NDArray[np.int64],
    lengths: list[int],
) -> RawPoints | None:
    """photos: those of all tracks, one track after another, so long each as ``lengths`` says; empty without any."""
    if not total:
        return None
    order = np.argsort(ids, kind="stable")
    tracks = None
    if len(photos):
        rows = np.repeat(np.arange(len(order)), lengths)
        tracks = Tracks(photos, rows).moved(np.argsort(order, kind="stable"))
    return RawPoints(xyz[order], rgb[order].astype(np.uint8), path, total, tracks)
