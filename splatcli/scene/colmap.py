"""COLMAP models, binary or text: found, chosen and read.

The files are read here and not by pycolmap, which knows lenses and nothing else in this module. pycolmap trusts what it
reads: cut off at any byte, cameras.bin gives a camera with other numbers and no error; a cut points3D.bin asks for
any amount of memory, a cut frames.bin may never return. A process of its own with limited memory contains that, at
0.25 s a start, but does not find it: sizes have to be checked record by record in any case, and then a record is read.
pycolmap also refuses models that only lack observations, which scripts often leave out, and is slow where points become
arrays: a million points with tracks on 1,000 images take 9.1 s and 740 MB in such a process and 1.9 s here; without
tracks 4.0 s and 0.9 s (pycolmap 4.2.1, two cores).

images.bin has the pose of each image, that of a rig's camera too, so rigs.bin and frames.bin are not needed.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splatcli.config import DataConfig
from splatcli.errors import SceneError
from splatcli.progress import report
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.depth_maps import AUTO, wants_relative
from splatcli.scene.find_images import walk
from splatcli.scene.observations import seen_through
from splatcli.scene.parsing import IMAGE_FOLDERS, ROTATION_TOLERANCE, leads_outside, lines_of, path_in_scene, rigid_pose
from splatcli.scene.points import RawPoints, Reprojections, Tracks, doubt_of, stride
from splatcli.scene.sfm_report import REPORT, are_cameras_held
from splatcli.scene.source import Entry, FixedLens, Problems, Reader, SceneSource, View
from splatcli.sizes import counted

#: Where tools put models, most wanted first; each may hold one model, or numbered sub-models.
PLACES = ("sparse", "colmap/sparse", "distorted/sparse", ".")
#: How deep a scene folder is searched for models when none is in the usual places.
MAX_DEPTH = 4
#: Parameters of each lens model, by COLMAP's number of the model.
MODEL_PARAMS = {
    int(model): len(pycolmap.Camera.create_from_model_id(pycolmap.INVALID_CAMERA_ID, model, 1.0, 1, 1).params)
    for model in pycolmap.CameraModelId.__members__.values()
    if model != pycolmap.CameraModelId.INVALID
}
#: Ids are below this, sizes too.
_UINT32 = 1 << 32
#: Longest name of an image in bytes; a longer one means that the file is not what it seems.
_MAX_NAME = 4096

_REMEDY = "copy the file again from where the model was made, or run COLMAP's mapper again"
_LINE_REMEDY = "correct the line, or copy the model again from where it was made"
_UNKNOWN_MODEL_REMEDY = "undistort the images with `colmap image_undistorter`, which writes PINHOLE cameras"


@dataclass(frozen=True, slots=True)
class Model:
    """A folder with a COLMAP model; suffix is ".bin" or ".txt" (binary wins where both are)."""

    folder: Path
    suffix: str

    def file(self, kind: str) -> Path:
        return self.folder / f"{kind}{self.suffix}"

    @property
    def num_images(self) -> int:
        return _count_images(self.file("images"))

    @property
    def is_binary(self) -> bool:
        return self.suffix == ".bin"

    def cameras(self) -> dict[int, pycolmap.Camera]:
        """Read the cameras, by their ids."""
        return (_cameras_binary if self.is_binary else _cameras_text)(self.file("cameras"))

    def images(self) -> list[_Image]:
        """Read the images."""
        return (_images_binary if self.is_binary else _images_text)(self.file("images"))


def find_models(root: Path) -> list[Model]:
    """Return the models in the first usual place that has any, those with most images first."""
    for place in PLACES:
        models = _models_in(root / place)
        if models:
            return models
    return []


def search_models(root: Path, *, triangulated: bool = True) -> list[Model]:
    """Return the models anywhere below ``root``. Raises SceneError when their folders do not belong together.

    triangulated: without others, those that ``splat sfm`` triangulated with the cameras of another scene.
    """
    groups: dict[Path, list[Model]] = {}
    held: list[Path] = []
    for base, folders, files in walk(root, private=True):
        path = Path(base)
        if REPORT in files and are_cameras_held(path):
            held.append(path)
        depth = len(path.relative_to(root).parts)
        folders[:] = sorted(name for name in folders if not name.startswith(".")) if depth < MAX_DEPTH else []
        model = _model_at(path)
        if model is not None:
            # Numbered folders are sub-models of one run of the mapper.
            groups.setdefault(path.parent if path.name.isdigit() else path, []).append(model)
    others = {path: models for path, models in groups.items() if not any(path.is_relative_to(one) for one in held)}
    if others or not triangulated:
        groups = others
    if len(groups) > 1:
        raise SceneError(
            "the folder has several COLMAP models: " + ", ".join(str(path.relative_to(root)) for path in groups),
            where=root,
            remedy=f"name one of them as the scene, such as {root / next(iter(groups))}",
        )
    return [model for models in groups.values() for model in _largest_first(models)]


def choose_model(root: Path, name: str, models: list[Model]) -> list[Model]:
    """Return ``models`` with the one in folder ``name`` first. Raises SceneError, which lists them, if it has none."""
    wanted = _model_at(root / name)
    if wanted is None:
        there = ", ".join(f"{_place(model, root)} ({counted(model.num_images, 'image')})" for model in models)
        raise SceneError(
            "there is no COLMAP model (cameras and images, .bin or .txt)",
            where=root / name,
            remedy=f"splat train --model takes one of: {there}" if there else "name a folder inside the scene",
        )
    return [wanted, *(model for model in models if model.folder != wanted.folder)]


def read_colmap(root: Path, data: DataConfig, problems: Problems) -> SceneSource:
    """Return the model that ``data.model`` names, else the largest; notes mention the others.

    Images that are wrong are added to ``problems`` and left out; a damaged file raises SceneError.
    """
    models = find_models(root) or search_models(root)
    if data.model:
        models = choose_model(root, data.model, models)
    model, others = models[0], models[1:]
    name = _place(model, root)
    notes = [] if name in ("sparse/0", "sparse") else [f"the COLMAP model in {name}/ is used"]
    alternatives = "; ".join(f"--model {_place(o, root)} has {counted(o.num_images, 'image')}" for o in others)
    if others:
        notes = [
            f"of {len(models)} COLMAP models {name} with {counted(model.num_images, 'image')} is used; "
            f"splat train {alternatives}"
        ]
    _compare_twin(model, notes)
    views = _views(model, root, data, problems)
    points = None
    with problems.collect():
        with_tracks = data.depths == AUTO or wants_relative(model.folder, data)
        points = _points(model, data, notes, with_tracks=with_tracks)
    return SceneSource(
        root=root,
        file=model.file("images"),
        views=views,
        image_folders=_image_folders(root, model.folder),
        points=points,
        alternatives=alternatives or None,
        notes=notes,
    )


def _place(model: Model, root: Path) -> str:
    """Return where a model is, from the scene's folder."""
    folder = model.folder
    return folder.relative_to(root).as_posix() if folder.is_relative_to(root) else str(folder)


def _model_at(folder: Path) -> Model | None:
    for suffix in (".bin", ".txt"):
        if all((folder / f"{kind}{suffix}").is_file() for kind in ("cameras", "images")):
            return Model(folder, suffix)
    return None


def _models_in(folder: Path) -> list[Model]:
    if not folder.is_dir():
        return []
    folders = [folder, *sorted(path for path in folder.iterdir() if path.is_dir() and path.name.isdigit())]
    return _largest_first([model for model in map(_model_at, folders) if model is not None])


def _largest_first(models: list[Model]) -> list[Model]:
    return sorted(models, key=lambda model: (-model.num_images, model.folder))


def _compare_twin(model: Model, notes: list[str]) -> None:
    """Add a note where binary and text files have different numbers of images, or a binary file has no counterpart."""
    if model.is_binary and (model.folder / "images.txt").is_file():
        others = _count_images(model.folder / "images.txt")
        if others != model.num_images:
            in_binary, in_text = counted(model.num_images, "image"), counted(others, "image")
            notes.append(f"images.bin ({in_binary}) is used, not images.txt ({in_text})")
    if not model.is_binary:
        halves = [f"{kind}.bin" for kind in ("cameras", "images") if (model.folder / f"{kind}.bin").is_file()]
        if halves:
            notes.append(f"the text files are used: {halves[0]} is there without its counterpart")


def _views(model: Model, root: Path, data: DataConfig, problems: Problems) -> list[View]:
    """Return the views that are right, in the order of their ids; the others are added to ``problems``."""
    file = model.file("images")
    cameras, images = model.cameras(), model.images()
    if model.is_binary:
        _check_rigs(model)
    views = []
    for image in sorted(images, key=lambda image: image.number):
        if image.camera not in cameras:
            raise SceneError(
                f"image {image.number} wants camera {image.camera}, which is not in {model.file('cameras').name}",
                where=file,
                remedy=_REMEDY,
            )
        with problems.collect():
            entry = Entry(file, f"image {image.number} {image.name!r}")
            name = _utf8(image, file)
            key, outside = path_in_scene(name, root, entry, allow_outside=data.allow_outside)
            lens = FixedLens(model.file("cameras"), f"camera {image.camera}", cameras[image.camera])
            moved = outside is None and leads_outside(name, root)
            if moved and key.partition("/")[0] in IMAGE_FOLDERS:  # names are relative to the folder of images
                key = key.partition("/")[2] or key
            viewmat = _viewmat(image, entry)
            views.append(View(key, lens, viewmat, entry.label, outside, number=image.number, moved=moved))
    return views


@dataclass(frozen=True, slots=True)
class _Image:
    """An image of the model: its pose is a quaternion w x y z and a translation, world to camera.

    name: bytes that are no UTF-8 are surrogates.
    observations: the first byte and the number of its observations, of a binary file.
    """

    number: int
    quat: tuple[float, ...]
    translation: tuple[float, ...]
    camera: int
    name: str
    observations: tuple[int, int] = (0, 0)


def _utf8(image: _Image, file: Path) -> str:
    """Return the image's name. Raises SceneError for one that is no text."""
    try:
        image.name.encode()
    except UnicodeEncodeError as error:
        raise SceneError(
            f"the name of image {image.number} is not UTF-8: {error}", where=file, remedy=_REMEDY
        ) from None
    return image.name


def _viewmat(image: _Image, entry: Entry) -> NDArray[np.float64]:
    length = math.hypot(*image.quat)
    if not abs(length - 1) <= ROTATION_TOLERANCE:
        what = f"its quaternion has length {length:.4g}, expected 1"
        raise entry.error(what, "correct the pose, or take the image out of the model")
    xyzw = np.roll(image.quat, -1) / length
    return rigid_pose(pycolmap.Rotation3d(xyzw).matrix(), np.array(image.translation), entry)


def _points(model: Model, data: DataConfig, notes: list[str], *, with_tracks: bool) -> RawPoints | None:
    path = model.file("points3D")
    if path.is_file():
        read = _points_binary if model.is_binary else _points_text
        return read(path, data.max_points, with_tracks)
    notes.append(f"{path.name} is missing")
    return None


def read_points(
    root: Path, data: DataConfig, notes: list[str], *, with_tracks: bool
) -> tuple[RawPoints, dict[str, int]]:
    """Return the points of a model in or below ``root``, the one with most images, and its images.

    with_tracks: the points have tracks, which call images by the numbers that their names are returned with.
    Raises SceneError where there is no model, or none with points.
    """
    here = _model_at(root)
    models = [here] if here is not None else find_models(root) or search_models(root)
    if not models:
        raise SceneError(
            "there is no COLMAP model (cameras and images, .bin or .txt)",
            where=root,
            remedy="--points names the folder of one, a scene that has one, or a PLY",
        )
    model = models[0]
    points = _points(model, data, notes, with_tracks=with_tracks)
    if points is None:
        raise SceneError("the model has no points", where=model.folder, remedy="triangulate some, or leave it out")
    if not with_tracks:
        return replace(points, tracks=None), {}
    return points, {image.name: image.number for image in model.images()}


def _image_folders(root: Path, model: Path) -> list[Path]:
    """Return where the images of a model may be, the nearest first.

    They are in `images` rather than in `input`, but for a model under `distorted`.
    """
    names = ("input", "images") if "distorted" in model.parts[len(root.parts) :] else ("images", "input")
    bases = [model if model.is_relative_to(root) else root]
    while bases[-1] != root:
        bases.append(bases[-1].parent)
    return [base / name for name in names for base in bases] + bases


def _count_images(path: Path) -> int:
    """Return the number of images in images.txt, or that images.bin claims."""
    if path.suffix == ".txt":
        return sum(1 for _ in _image_lines(path))
    with path.open("rb") as file:
        start = file.read(_COUNT.size)
    return int(_COUNT.unpack(start)[0]) if len(start) == _COUNT.size else 0


# --- Binary files ----------------------------------------------------------------------------------------------------

_COUNT = struct.Struct("<Q")
_CAMERA = struct.Struct("<IiQQ")
_IMAGE = struct.Struct("<I7dI")
_RIG = struct.Struct("<II")
_FRAME = struct.Struct("<II7dI")
#: A point without its track, which is a list of images with the number of an observation in each.
_POINT = struct.Struct("<Q3d3BdQ")
#: The beginning of a point, which is read.
_POINT_HEAD = np.dtype([("id", "<u8"), ("xyz", "<f8", 3), ("rgb", "u1", 3), ("error", "<f8")])
#: A line of points3D.txt without its track.
_TEXT_POINT = np.dtype([("id", "<f8"), ("xyz", "<f8", 3), ("rgb", "<f8", 3), ("error", "<f8")])
_OBSERVATION = np.dtype([("xy", "<f8", 2), ("point", "<u8")])
_TRACK_SIZE, _OBSERVATION_SIZE, _SENSOR_SIZE, _POSE_SIZE, _DATA_SIZE = 8, 24, 8, 56, 16


#: Records between two reports of progress.
_REPORT_RECORDS = 50_000


@dataclass(slots=True)
class _Records:
    """A position in a binary file that cannot leave it.

    kind, index, total: of the record that it is in, for messages.
    """

    path: Path
    data: mmap.mmap
    offset: int = 0
    kind: str = "header"
    index: int = 0
    total: int = 0

    @classmethod
    @contextlib.contextmanager
    def of(cls, path: Path) -> Iterator[_Records]:
        """Open a file at its start. Raises SceneError for one too short to hold a count."""
        with path.open("rb") as file:
            if path.stat().st_size < _COUNT.size:
                raise SceneError(f"the file is only {path.stat().st_size} bytes long", where=path, remedy=_REMEDY)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                yield cls(path, data)

    def each(self, kind: str, smallest: int) -> Iterator[int]:
        """Yield the index of each record, which the caller then reads. Raises SceneError for bytes after the last."""
        self.total = self.count(smallest, f"{kind}s")
        self.kind = kind
        for index in range(self.total):
            self.index = index
            if index and index % _REPORT_RECORDS == 0:
                report(f"reading {self.path.name}", index, self.total)
            yield index
        if self.total > _REPORT_RECORDS:
            report(f"reading {self.path.name}", self.total, self.total)
        self.check_end()

    def check_end(self) -> None:
        """Raise SceneError for bytes that are left."""
        if self.offset != len(self.data):
            raise self.fault(
                f"has {len(self.data) - self.offset:,} bytes after its last record, at byte {self.offset:,}"
            )

    def take(self, layout: struct.Struct) -> tuple[Any, ...]:
        """Return the numbers that come next."""
        start = self.offset
        self.skip(layout.size)
        return layout.unpack_from(self.data, start)

    def skip(self, size: int) -> None:
        """Skip ``size`` bytes. Raises SceneError at the end of the file."""
        if self.offset + size > len(self.data):
            raise self.fault(
                f"ends in the middle of {self.record}: byte {self.offset + size:,} is needed, "
                f"the file has {len(self.data):,}"
            )
        self.offset += size

    def count(self, smallest: int, kinds: str) -> int:
        """Return a count of things that take at least ``smallest`` bytes each. Raises SceneError for more than fit."""
        start = self.offset
        n = int(self.take(_COUNT)[0])
        if n * smallest > len(self.data) - self.offset:
            raise self.fault(
                f"claims {n:,} {kinds} at byte {start:,}, but only {len(self.data) - self.offset:,} bytes follow"
            )
        return n

    @property
    def record(self) -> str:
        """The name of the record for messages."""
        return f"{self.kind} {self.index + 1} of {self.total}" if self.total else self.kind

    def fault(self, what: str, remedy: str = _REMEDY) -> SceneError:
        """Return the error for this file."""
        return SceneError(what, where=self.path, remedy=remedy)


def check_written(folder: Path) -> None:
    """Raise SceneError for a binary model in ``folder`` of which a part is missing, as after a full disk."""
    model = Model(folder, ".bin")
    model.cameras()
    model.images()
    _check_rigs(model)
    with _Records.of(model.file("points3D")) as file:
        _point_places(file)


def _cameras_binary(path: Path) -> dict[int, pycolmap.Camera]:
    cameras: dict[int, pycolmap.Camera] = {}
    with _Records.of(path) as file:
        for _ in file.each("camera", _CAMERA.size):
            number, model, width, height = file.take(_CAMERA)
            if model not in MODEL_PARAMS:
                raise file.fault(f"camera {number} has the unknown model id {model}", _UNKNOWN_MODEL_REMEDY)
            if number in cameras:
                raise file.fault(f"camera {number} is there twice")
            params = file.take(struct.Struct(f"<{MODEL_PARAMS[model]}d"))
            cameras[number] = _camera(model, width, height, params)
    return cameras


def _camera(model: int, width: int, height: int, params: tuple[float, ...] | list[float]) -> pycolmap.Camera:
    return pycolmap.Camera(model=pycolmap.CameraModelId(model), width=width, height=height, params=params)


def _images_binary(path: Path) -> list[_Image]:
    images: dict[int, _Image] = {}
    with _Records.of(path) as file:
        for _ in file.each("image", _IMAGE.size + 1 + _COUNT.size):
            number, *pose, camera = file.take(_IMAGE)
            if number in images:
                raise file.fault(f"image {number} is there twice")
            end = file.data.find(b"\0", file.offset, file.offset + _MAX_NAME)
            if end < 0:
                raise file.fault(f"the name of {file.record} has no end")
            name = file.data[file.offset : end].decode(errors="surrogateescape")
            file.offset = end + 1
            count = file.count(_OBSERVATION_SIZE, "observations")
            place = (file.offset, count)
            images[number] = _Image(number, tuple(pose[:4]), tuple(pose[4:]), camera, name, place)
            file.skip(_OBSERVATION_SIZE * count)
    return list(images.values())


def _check_rigs(model: Model) -> None:
    """Raise SceneError for a damaged rigs.bin or frames.bin: neither is read, but the whole copy is doubtful then."""
    if model.file("rigs").is_file():
        with _Records.of(model.file("rigs")) as file:
            for _ in file.each("rig", _RIG.size):
                for sensor in range(file.take(_RIG)[1]):
                    file.skip(_SENSOR_SIZE)
                    if sensor > 0 and file.take(struct.Struct("<B"))[0]:
                        file.skip(_POSE_SIZE)
    if model.file("frames").is_file():
        with _Records.of(model.file("frames")) as file:
            for _ in file.each("frame", _FRAME.size):
                file.skip(_DATA_SIZE * file.take(_FRAME)[-1])


def _points_binary(path: Path, limit: int, with_tracks: bool) -> RawPoints | None:
    with _Records.of(path) as file:
        starts, lengths = _point_places(file)
        total = len(starts)
        step = stride(total, limit)
        starts, lengths = starts[::step], lengths[::step]
        heads = _gather(file.data, starts, _POINT_HEAD.itemsize)
        images = _tracks(file, starts, lengths)[:, 0] if with_tracks else np.zeros(0, np.int64)
    return _raw_points(heads.view(_POINT_HEAD)[:, 0], path, total, images, lengths)


def _tracks(file: _Records, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return [O, 2], the image and the number in it of each observation of the points at ``starts``."""
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    places = np.repeat(starts + _POINT.size, lengths) + _TRACK_SIZE * within
    return _gather(file.data, places, _TRACK_SIZE).view("<u4").astype(np.int64)


def _point_places(file: _Records, most: int | None = None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first byte of each point of a file and the length of its track; the lengths alone are read.

    most: of the first so many, without a look at the rest of the file.
    """
    file.total = total = file.count(_POINT.size, "points")
    file.kind = "point"
    if most is not None:
        total = min(total, most)
    starts, lengths = np.empty(total, np.int64), np.empty(total, np.int64)
    data, size, at, unpack = file.data, len(file.data), file.offset, _COUNT.unpack_from
    head, to_length = _POINT.size, _POINT.size - _COUNT.size
    for begin in range(0, total, _REPORT_RECORDS):
        if begin:
            report(f"reading {file.path.name}", begin, total)
        places: list[int] = []
        counts: list[int] = []
        for _ in range(min(_REPORT_RECORDS, total - begin)):
            after, count = at + head, 0
            if after <= size:
                count = unpack(data, at + to_length)[0]
                after += _TRACK_SIZE * count
            if after > size:  # again, with checks that say what is missing
                file.index, file.offset = begin + len(places), at
                file.skip(head)
                file.skip(_TRACK_SIZE * count)
            places.append(at)
            counts.append(count)
            at = after
        starts[begin : begin + len(places)], lengths[begin : begin + len(places)] = places, counts
    file.index, file.offset = max(0, total - 1), at
    if total > _REPORT_RECORDS:
        report(f"reading {file.path.name}", total, total)
    if most is None:
        file.check_end()
    return starts, lengths


def _gather(data: mmap.mmap, places: NDArray[np.int64], size: int) -> NDArray[np.uint8]:
    """Return [P, size], the bytes of ``data`` from each of ``places`` [P] on."""
    found = np.empty((len(places), size), np.uint8)
    with memoryview(data) as view:
        source = np.frombuffer(view, np.uint8)
        for begin in range(0, len(places), _REPORT_RECORDS):
            part = slice(begin, begin + _REPORT_RECORDS)
            found[part] = source[places[part, None] + np.arange(size)]
        del source  # the file cannot be closed before
    return found


# --- Text files ------------------------------------------------------------------------------------------------------


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Iterate over the lines of a file with their numbers, from 1, and without the space around them."""
    return ((number, line.strip()) for number, line in enumerate(lines_of(path), 1))


def _data_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Iterate over the lines that are neither empty nor a comment, with their numbers."""
    return ((number, line) for number, line in _lines(path) if line and not line.startswith("#"))


def _image_lines(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield (line number, pose line, observation line) of each image in images.txt."""
    lines = _lines(path)
    for number, line in lines:
        if line and not line.startswith("#"):
            yield number, line, next(lines, (0, ""))[1]


def _cameras_text(path: Path) -> dict[int, pycolmap.Camera]:
    cameras: dict[int, pycolmap.Camera] = {}
    lines: dict[int, int] = {}
    for line_number, line in _data_lines(path):
        fields = line.split()
        try:
            number, width, height = (_uint32(fields[column]) for column in (0, 2, 3))
            params = [float(text) for text in fields[4:]]
        except (ValueError, IndexError):
            raise _fault(path, line_number, "expected CAMERA_ID MODEL WIDTH HEIGHT PARAMS...") from None
        model = int(pycolmap.CameraModelId.__members__.get(fields[1], -1))
        if model not in MODEL_PARAMS:
            what = f"camera {number} has the unknown model {fields[1]}"
            raise _fault(path, line_number, what, _UNKNOWN_MODEL_REMEDY)
        if len(params) != MODEL_PARAMS[model]:
            raise _fault(
                path,
                line_number,
                f"camera {number} is {fields[1]}, which has {MODEL_PARAMS[model]} parameters, not {len(params)}",
                "name the model that has these parameters, e.g. OPENCV for fx fy cx cy k1 k2 p1 p2",
            )
        _check_new(path, line_number, "camera", number, lines)
        cameras[number] = _camera(model, width, height, params)
    return cameras


def _images_text(path: Path) -> list[_Image]:
    images = []
    lines: dict[int, int] = {}
    for line_number, line, observations in _image_lines(path):
        fields = line.split(maxsplit=9)
        try:
            pose = [float(text) for text in fields[1:8]]
            image = _Image(_uint32(fields[0]), tuple(pose[:4]), tuple(pose[4:]), _uint32(fields[8]), fields[9])
        except (ValueError, IndexError):
            what = "expected IMAGE_ID QW QX QY QZ TX TY TZ CAMERA_ID NAME"
            raise _fault(path, line_number, what) from None
        # They are not read, but without them this is the pose of another image.
        if not _is_observations(observations):
            what = "expected X Y POINT3D_ID for each observation of the image above, or an empty line"
            raise _fault(path, line_number + 1, what)
        _check_new(path, line_number, "image", image.number, lines)
        images.append(image)
    return images


def _is_observations(line: str) -> bool:
    """Return whether a line has X Y POINT3D_ID for each observation; a pose line with spaces in its name has not."""
    fields = line.split()
    try:
        # Of a pose line, these are all numbers and the beginning of the name.
        for first in range(0, min(len(fields), 12), 3):
            float(fields[first]), float(fields[first + 1]), int(fields[first + 2])
    except (ValueError, IndexError):
        return False
    return len(fields) % 3 == 0


def _points_text(path: Path, limit: int, with_tracks: bool) -> RawPoints | None:
    total = sum(1 for _ in _data_lines(path))
    kept = islice(_data_lines(path), 0, None, stride(total, limit))
    if total == 0:
        return None
    images: list[NDArray[np.int64]] = []
    lengths: list[int] = []

    def columns() -> Iterator[str]:
        for _, line in kept:  # POINT3D_ID X Y Z R G B ERROR, and the track
            fields = line.split()
            lengths.append((len(fields) - 8) // 2)
            if with_tracks:
                images.append(np.array(fields[8::2], dtype=np.int64))
            yield " ".join((fields if len(fields) != 7 else [*fields, "-1"])[:8])  # some programs leave out the error

    try:
        table = np.loadtxt(columns(), dtype=np.float64, ndmin=2)
        if table.shape[1] != 8:
            raise ValueError(f"{table.shape[1]} columns")
    except (ValueError, OverflowError) as error:
        raise _point_fault(path) or SceneError(f"cannot be read: {error}", where=path, remedy=_REMEDY) from None
    points = table.view(_TEXT_POINT)[:, 0]
    points["rgb"] = np.clip(np.nan_to_num(points["rgb"]), 0, 255)
    numbers = np.concatenate(images) if images else np.zeros(0, np.int64)
    return _raw_points(points, path, total, numbers, np.array(lengths, np.int64))


def _point_fault(path: Path) -> SceneError | None:
    """Return the error for the first line of points3D.txt that is wrong."""
    for line_number, line in _data_lines(path):
        fields = line.split()
        try:
            numbers = [float(text) for text in fields]
        except ValueError:
            numbers = []
        if len(numbers) < 8 or len(numbers) % 2:
            return _fault(path, line_number, "expected POINT3D_ID X Y Z R G B ERROR TRACK...")
    return None


def _uint32(text: str) -> int:
    """Return the number. Raises ValueError for one that COLMAP's ids and sizes cannot be."""
    number = int(text)
    if not 0 <= number < _UINT32:
        raise ValueError(f"{number} is no 32-bit number")
    return number


def _check_new(path: Path, line_number: int, kind: str, number: int, lines: dict[int, int]) -> None:
    """Raise SceneError for an id that another line has. lines: of the ids so far."""
    if number in lines:
        raise _fault(path, line_number, f"{kind} {number} is there already, in line {lines[number]}")
    lines[number] = line_number


def _fault(path: Path, line_number: int, why: str, remedy: str = _LINE_REMEDY) -> SceneError:
    return SceneError(f"this line is not as it should be: {why}", where=f"{path}:{line_number}", remedy=remedy)


def _raw_points(
    points: NDArray[Any], path: Path, total: int, images: NDArray[np.int64], lengths: NDArray[np.int64]
) -> RawPoints | None:
    """Return the points in the order of their ids; None for none.

    points: [P] of _POINT_HEAD or _TEXT_POINT; mean reprojection errors are not positive where they are not known.
    images: those of all tracks, one track after another; empty without tracks. lengths: [P] of the tracks.
    """
    if not total:
        return None
    order = np.argsort(points["id"], kind="stable")
    tracks = None
    if len(images):
        rows = np.repeat(np.arange(len(order)), lengths)
        tracks = Tracks(images, rows).moved(np.argsort(order, kind="stable"))
    doubt = doubt_of(points["error"], lengths)
    return RawPoints(points["xyz"][order], points["rgb"][order].astype(np.uint8), path, total, tracks, doubt[order])


# --- Reprojections ---------------------------------------------------------------------------------------------------

#: Points of which some are taken, evenly many: so the time has a bound, whatever the size of the model.
_MOST_POINTS, _SAMPLE = 200_000, 2_000


def read_reprojections(file: Path) -> Reprojections | None:
    """Return reprojections of points spread over a model; None without any. file: of the model's images.

    The model has been read before; in text files that part was not. Observations that do not name their point are left
    out.
    """
    model = Model(file.parent, file.suffix)
    if not model.file("points3D").is_file():
        return None
    try:
        images, table = (_observations_binary if model.is_binary else _observations_text)(model)
    except ValueError:  # no number in a text file
        return None
    if not len(table.number):
        return None
    cameras = model.cameras()
    projected, centers = np.full((2, *table.observed.shape), np.nan)
    for number in np.unique(table.number):
        here, image = table.number == number, images[int(number)]
        with contextlib.suppress(SceneError):
            camera, viewmat = cameras[image.camera], _viewmat(image, Entry(file))
            rays = table.xyz[here] @ viewmat[:3, :3].T + viewmat[:3, 3]
            projected[here], centers[here] = seen_through(camera, rays)
    stated = table.errors[table.errors > 0]
    return Reprojections(table.observed, projected, centers, stated, len(table.errors))


@dataclass(frozen=True, slots=True, eq=False)
class _Observed:
    """number: [O] of the image. xyz: [O, 3] of the point. observed: [O, 2] pixels. errors: [P] as the points state."""

    number: NDArray[np.int64]
    xyz: NDArray[np.float64]
    observed: NDArray[np.float64]
    errors: NDArray[np.float64]


def _observations_binary(model: Model) -> tuple[dict[int, _Image], _Observed]:
    with _Records.of(model.file("points3D")) as file:
        starts, lengths = _point_places(file, _MOST_POINTS)
        step = stride(len(starts), _SAMPLE)
        starts, lengths = starts[::step], lengths[::step]
        points = _gather(file.data, starts, _POINT_HEAD.itemsize).view(_POINT_HEAD)[:, 0]
        tracks = _tracks(file, starts, lengths)
    rows = np.repeat(np.arange(len(points)), lengths)
    images = {image.number: image for image in model.images()}
    places_of = [images[n].observations if n in images else (0, 0) for n in tracks[:, 0].tolist()]
    begins, counts = np.array(places_of, np.int64).reshape(-1, 2).T
    there = tracks[:, 1] < counts
    with _Records.of(model.file("images")) as file:
        places = begins[there] + _OBSERVATION_SIZE * tracks[there, 1]
        found = _gather(file.data, places, _OBSERVATION_SIZE).view(_OBSERVATION)[:, 0]
    numbers, rows = tracks[there, 0], rows[there]
    same = found["point"] == points["id"][rows]
    xyz, observed = points["xyz"][rows[same]], found["xy"][same]
    return images, _Observed(numbers[same], xyz, observed, points["error"])


def _observations_text(model: Model) -> tuple[dict[int, _Image], _Observed]:
    file = model.file("points3D")
    first = [line for _, line in islice(_data_lines(file), _MOST_POINTS)]
    lines = [line.split() for line in first[:: stride(len(first), _SAMPLE)]]
    wanted: dict[int, list[tuple[int, int]]] = {}  # image -> number in it and row of each of its observations
    for row, fields in enumerate(lines):
        for image, place in zip(fields[8::2], fields[9::2], strict=False):
            wanted.setdefault(int(image), []).append((int(place), row))
    pairs: list[tuple[int, int, float, float]] = []
    for _, line, observations in _image_lines(model.file("images")):
        number, seen = int(line.split(maxsplit=1)[0]), observations.split()
        for index, row in wanted.get(number, []):
            x, y, point = seen[3 * index : 3 * index + 3] or (0, 0, None)
            if point == lines[row][0]:
                pairs.append((number, row, float(x), float(y)))
    table = np.array(pairs, dtype=np.float64).reshape(-1, 4)
    rows = table[:, 1].astype(np.int64)
    columns = np.array([fields[1:8] for fields in lines], dtype=np.float64).reshape(-1, 7)
    images = {image.number: image for image in model.images()}
    return images, _Observed(table[:, 0].astype(np.int64), columns[rows, :3], table[:, 2:], columns[:, 6])


READER = Reader(
    name="colmap",
    files="a COLMAP model (cameras and images, .bin or .txt) in "
    + ", ".join(place if place != "." else "the folder itself" for place in PLACES)
    + ", and below",
    matches=lambda root: bool(find_models(root)),
    read=read_colmap,
)
