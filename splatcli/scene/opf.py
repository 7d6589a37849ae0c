"""Open Photogrammetry Format projects (PIX4Dmatic and others): calibrated cameras, and tie points if there are any."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
from numpy.typing import NDArray

from splatcli.config import DataConfig
from splatcli.errors import SceneError
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.find_images import is_file
from splatcli.scene.foreign_lenses import MAX_SKEW, Brown, angles_of, nearest_fisheye
from splatcli.scene.observations import Observations, with_doubt
from splatcli.scene.parsing import ImageNames, load_json, only_one, path_in_scene, turn_about, viewmat_of, with_suffix
from splatcli.scene.points import RawPoints, stride
from splatcli.scene.source import Entry, FixedLens, Problems, Reader, SceneSource, View
from splatcli.sizes import counted

FILES = "a project in the Open Photogrammetry Format (.opf)"
_EXPORT = "export the project again"
#: Formats of the resources of a project that are read.
_CAMERAS = "application/opf-calibrated-cameras+json"
_INPUT = "application/opf-input-cameras+json"
_LIST = "application/opf-camera-list+json"
_GLTF = "model/gltf+json"
_FRAME = "application/opf-scene-reference-frame+json"
_READ = (_CAMERAS, _INPUT, _LIST, _GLTF, _FRAME)
#: Systems of WKT that are nowhere on the Earth.
_LOCAL = ("ENGCRS", "ENGINEERINGCRS", "LOCAL_CS")
#: glTF's component types of positions and colours, and elements of its vectors.
_FLOAT, _UBYTE, _UINT = 5126, 5121, 5125
_WIDTHS = {"SCALAR": 1, "VEC2": 2, "VEC3": 3, "VEC4": 4}
#: A range of matches is its first one in 40 bits and its length in the 24 above.
_FIRST_OF_RANGE, _RANGE_SHIFT = np.uint64((1 << 40) - 1), np.uint64(40)


@dataclass(frozen=True, slots=True)
class _Project:
    """A project's file, and the files of its items by format."""

    file: Path
    resources: dict[str, list[Path]]

    def load(self, kind: str, what: str) -> list[tuple[Entry, dict[str, Any]]]:
        """Return the JSON resources of a format. Raises SceneError when there is none."""
        files = self.resources.get(kind, [])
        if not files:
            raise SceneError(f"has no {what}", where=self.file, remedy=f"calibrate the project, and {_EXPORT}")
        return [(Entry(file, remedy=_EXPORT), load_json(file, dict, _EXPORT)) for file in files]


def read_opf(root: Path, data: DataConfig, problems: Problems) -> SceneSource:
    """Read the calibrated cameras, in the project's processing frame (a right-handed local one, z up)."""
    project = _project(root)
    images = _images(project)
    sizes, known = _inputs(project)
    (whole, calibrated), *others = project.load(_CAMERAS, "calibrated cameras")
    sensors = {_id(sensor, whole, "a sensor"): sensor for sensor in _list(calibrated, "sensors", whole)}
    names = ImageNames(root, data)
    lenses: dict[int, FixedLens] = {}
    views: list[View] = []
    notes: list[str] = []
    numbers: dict[int, int] = {}
    rolling = 0
    for camera in _list(calibrated, "cameras", whole):
        with problems.collect():
            number = _id(camera, whole, "a camera")
            entry = whole.named(f"camera {number}")
            shift = camera.get("rolling_shutter")  # of the camera while it reads an image
            rolling += any(shift) if isinstance(shift, list) else bool(shift)
            uri, listed = images.get(number, ("", whole))
            if not uri:
                raise entry.error("it is not in the project's list of cameras")
            sensor = _id(camera, whole, entry.label, "sensor_id")
            if sensor not in lenses:
                lens = _lens(sensors.get(sensor), sizes.get(sensor), whole.named(f"sensor {sensor}"), notes)
                lenses[sensor] = FixedLens(whole.file, f"sensor {sensor}", lens)
            image, outside = _image(uri, root, listed.named(entry.label), data, names)
            numbers[number] = len(views)
            views.append(View(image, lenses[sensor], _viewmat(camera, entry), f"{entry.label} {image!r}", outside))
    source = SceneSource(root, whole.file, views, [root, root / "images"], notes=notes)
    if (count := len(known & images.keys()) - len(views)) > 0:
        uncalibrated = counted(count, "image of the project is", "images of the project are")
        source.notes.append(f"{uncalibrated} not calibrated")
    if rolling:
        shutter = f"the rolling shutter of {counted(rolling, 'image')}"
        source.notes.append(f"{shutter} is known to the project, and is not corrected")
    if others:
        source.notes.append(f"the project has {1 + len(others)} calibrations; {whole.file.name} is used")
    with problems.collect():
        source.notes += _frame_notes(project)
    with problems.collect():
        points, seen = _points(project, data.max_points, numbers)
        source.points = points
        if points is not None and not rolling:  # what a rolling shutter shifts, cameras do not explain
            source.points, source.reprojections = with_doubt(points, views, seen)
    return source


def _frame_notes(project: _Project) -> list[str]:
    """Return a note on the map coordinates that the processing frame is a part of; none for a local frame.

    Coordinates of cameras and points are in the processing frame; ``base_to_canonical`` leads there from the map's.

    A base system is projected or local, never geographic: its axes are the map's grid, which converges to east and
    north at the central meridian only, so that the frame is none of metres east, north and up of a place.
    """
    notes = []
    for file in project.resources.get(_FRAME, [])[:1]:
        document = load_json(file, dict, _EXPORT)
        system, moved = document.get("crs"), document.get("base_to_canonical")
        definition = str(system.get("definition", "")) if isinstance(system, dict) else ""
        quoted = re.match(r'\s*(\w+)\s*\[\s*"([^"]*)"', definition)
        if not definition or (quoted and quoted[1].upper() in _LOCAL):
            continue
        name = quoted[2] if quoted else definition
        if moved is None:  # OPF demands it, but cameras and points are in the processing frame with and without it
            notes.append(
                f"the frame is the project's own: {file.name} does not say where in {name} it lies "
                "(base_to_canonical), so that the scene has no place on the Earth"
            )
            continue
        entry = Entry(file, "base_to_canonical", _EXPORT)
        shift = _numbers(moved if isinstance(moved, dict) else {}, "shift", 3, entry)
        origin = ", ".join(f"{-value:.3f}" for value in shift)
        notes.append(
            f"the origin is ({origin}) of {name}, whose axes are the map's, not east "
            "and north: exports do not say where on the Earth the scene lies"
        )
    return notes


def _project(root: Path) -> _Project:
    whole = Entry(only_one(with_suffix(root, ".opf"), "OPF projects"), remedy=_EXPORT)
    document = load_json(whole.file, dict, _EXPORT)
    resources: dict[str, list[Path]] = {}
    for item in _list(document, "items", whole):
        for resource in _list(item, "resources", whole):
            kind, uri = resource.get("format"), resource.get("uri")
            if kind not in _READ or not isinstance(uri, str):
                continue
            name, _ = path_in_scene(unquote(uri), root, whole.named("a resource"), allow_outside=False)
            # Of point clouds those of the calibration come first, its tie points.
            resources.setdefault(kind, []).insert(0 if item.get("type") == "calibration" else 1 << 30, root / name)
    return _Project(whole.file, resources)


def _list(document: dict[str, Any], key: str, entry: Entry) -> list[dict[str, Any]]:
    found = document.get(key)
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise entry.error(f"has no list {key!r}")
    return found


def _id(document: dict[str, Any], entry: Entry, what: str, key: str = "id") -> int:
    """Return an identifier, a whole number of 64 bits, which a float would round."""
    number = document.get(key)
    if not isinstance(number, int):
        raise entry.error(f"{what} has no number ({key!r})")
    return number


def _images(project: _Project) -> dict[int, tuple[str, Entry]]:
    """Return where the image of each camera is, and the file that says so."""
    found = {}
    for whole, document in project.load(_LIST, "list of cameras"):
        for camera in _list(document, "cameras", whole):
            found[_id(camera, whole, "a camera")] = (str(camera.get("uri", "")), whole)
    return found


def _inputs(project: _Project) -> tuple[dict[int, tuple[int, int]], set[int]]:
    """Return the width and height of the images of each sensor, and the numbers of the cameras, depth maps left out."""
    sizes, cameras = {}, set()
    for whole, document in project.load(_INPUT, "input cameras"):
        for sensor in _list(document, "sensors", whole):
            width, height = _numbers(sensor, "image_size_px", 2, whole.named("a sensor"))
            sizes[_id(sensor, whole, "a sensor")] = (round(width), round(height))
        for capture in _list(document, "captures", whole):
            cameras |= {_id(camera, whole, "a camera") for camera in _list(capture, "cameras", whole)}
    return sizes, cameras


def _image(uri: str, root: Path, entry: Entry, data: DataConfig, names: ImageNames) -> tuple[str, str | None]:
    """Return the name of the image of a URI, relative to the scene where it is below that.

    entry: of the file that has the URI.
    """
    parts = urlsplit(uri)
    path = unquote(parts.path)
    if parts.fragment.startswith("page=") and parts.fragment not in ("page=0", "page="):
        what = f"its image is not the first one of {path!r} ({parts.fragment}), and only that is read"
        raise entry.error(what, "export the images as separate files")
    if parts.scheme or path.startswith("/"):
        # The place on the machine that wrote the project; here the image lies in the folder, or in its images/.
        return names(path), None
    inside = os.path.relpath(entry.file.parent / path.replace("\\", "/"), root)
    if inside.startswith(os.pardir) and not data.allow_outside and is_file(names.folder / (found := names(path))):
        return found, None  # the project was moved without the folders around it
    return path_in_scene(Path(inside).as_posix(), root, entry, allow_outside=data.allow_outside)


def _lens(
    sensor: dict[str, Any] | None, size: tuple[int, int] | None, entry: Entry, notes: list[str]
) -> pycolmap.Camera:
    internals = (sensor or {}).get("internals")
    if not isinstance(internals, dict) or size is None:
        raise entry.error("its calibration or its size is not in the project")
    kind = internals.get("type")
    if kind == "fisheye":
        return _fisheye(internals, size, entry, notes)
    if kind != "perspective":
        raise entry.error(
            f"cameras of the type {kind!r} are not read, only 'perspective' and 'fisheye'",
            "export undistorted images with their cameras, for example as a COLMAP model",
        )
    focal = entry.number(internals.get("focal_length_px"), "focal_length_px")
    center = _numbers(internals, "principal_point_px", 2, entry)
    radial = _numbers(internals, "radial_distortion", 3, entry)
    tangential = _numbers(internals, "tangential_distortion", 2, entry)
    return Brown(focal, focal, center[0], center[1], radial, tangential).camera(*size, entry)


def _fisheye(internals: dict[str, Any], size: tuple[int, int], entry: Entry, notes: list[str]) -> pycolmap.Camera:
    """Return the lens of Pix4D's fisheye model: a polynomial in the angle, 1 at a right angle, then an affine map."""
    center = np.array(_numbers(internals, "principal_point_px", 2, entry))
    affine = np.array(_numbers(internals, "affine", 4, entry)).reshape(2, 2)
    listed = internals.get("polynomial")
    count = len(listed) if isinstance(listed, list) else 0
    polynomial = np.array(entry.numbers(listed, max(2, count), "polynomial"))
    scale = np.diag(affine)
    focal = scale * polynomial[1] * 2 / np.pi
    if not (focal > 0).all():
        raise entry.error("its focal length is not positive")
    reach = np.maximum(center, size - center)
    shift = float(max(abs(affine[0, 1]) * reach[1] / scale[1], abs(affine[1, 0]) * reach[0] / scale[0]))
    if shift > MAX_SKEW:
        raise entry.error(
            f"its affine map skews the image by {shift:.2g} pixels at the edge, which COLMAP's models lack",
            "calibrate with a symmetric affine map, or export undistorted images",
        )
    if shift:
        notes.append(
            f"{entry.label}: the skew of its affine map is left out, which shifts the edge by {shift:.2g} pixels"
        )

    def project(rays: NDArray[np.float64]) -> NDArray[np.float64]:
        angles = angles_of(rays)
        angle = np.linalg.norm(angles, axis=1, keepdims=True)
        radius = np.polynomial.polynomial.polyval(angle * 2 / np.pi, polynomial)
        return np.asarray(angles / angle * radius * scale + center)

    return nearest_fisheye(project, [*focal, *center], *size, entry)


def _numbers(document: dict[str, Any], key: str, count: int, entry: Entry) -> list[float]:
    return entry.numbers(document.get(key), count, key)


def _viewmat(camera: dict[str, Any], entry: Entry) -> NDArray[np.float64]:
    """Return [4, 4], world to camera. Angles lead from an image frame with x to the right, y up and z back."""
    center = np.array(_numbers(camera, "position", 3, entry))
    omega, phi, kappa = np.radians(_numbers(camera, "orientation_deg", 3, entry))
    return viewmat_of(turn_about(0, omega) @ turn_about(1, phi) @ turn_about(2, kappa), center, entry, opengl=True)


def _points(project: _Project, limit: int, numbers: dict[int, int]) -> tuple[RawPoints | None, Observations]:
    """Return the tie points of the calibration, else the first point cloud, and their observations.

    They are None where the project has none. numbers: indices of views by the numbers of their cameras.
    """
    files = project.resources.get(_GLTF, [])
    seen = Observations.of([])
    if not files:
        return None, seen
    file = files[0]
    document = load_json(file, dict, _EXPORT)
    clouds: list[tuple[NDArray[np.float64], NDArray[Any]]] = []
    try:
        nodes = [node for node in document["nodes"] if "mesh" in node]
        primitives = [document["meshes"][node["mesh"]]["primitives"][0] for node in nodes]
        total = sum(int(document["accessors"][one["attributes"]["POSITION"]]["count"]) for one in primitives)
        step = stride(total, limit)
        for node, whole in zip(nodes, primitives, strict=True):
            matches = whole.get("extensions", {}).get("OPF_mesh_primitive_matches")
            if matches is not None and "imagePoints" in matches:
                before = sum(len(cloud) for cloud, _ in clouds)
                seen = seen.joined(_matches(document, matches, file, step, numbers), before)
            primitive = whole["attributes"]
            xyz = _accessor(document, primitive["POSITION"], file, step).astype(np.float64)
            matrix = np.array(node.get("matrix", np.eye(4).ravel()), dtype=np.float64).reshape(4, 4).T
            rgb = np.full((len(xyz), 3), 128, np.uint8)
            if "COLOR_0" in primitive:
                rgb = _accessor(document, primitive["COLOR_0"], file, step)[:, :3]
            x, y, z = (xyz @ matrix[:3, :3].T + matrix[:3, 3]).T
            clouds.append((np.stack([x, -z, y], axis=1), rgb))  # glTF's y is up, OPF's z
        points = np.concatenate([xyz for xyz, _ in clouds])
        colours = np.concatenate([rgb for _, rgb in clouds])
        if len(points) != len(colours):
            raise ValueError("positions and colours differ in number")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise SceneError(f"is no OPF point cloud: {error!r}", where=file, remedy=_EXPORT) from None
    return RawPoints(points, colours, file, total) if len(points) else None, seen


def _matches(
    document: dict[str, Any], matches: dict[str, Any], file: Path, step: int, numbers: dict[int, int]
) -> Observations:
    """Return the observations of each ``step``-th point of a cloud, which are a range of the matches."""
    cameras = _accessor(document, matches["cameraIds"], file, 1)[:, 0].astype(np.int64)
    pixels = _accessor(document, matches["imagePoints"]["pixelCoordinates"], file, 1).astype(np.float64)
    packed = _accessor(document, matches["pointIndexRanges"], file, step).astype("<u4").view("<u8")[:, 0]
    firsts, counts = (packed & _FIRST_OF_RANGE).astype(np.int64), (packed >> _RANGE_SHIFT).astype(np.int64)
    if counts.sum() > len(cameras):
        raise ValueError(f"ranges of {counts.sum()} matches, of which there are {len(cameras)}")
    rows = np.repeat(np.arange(len(packed)), counts)
    places = np.repeat(firsts, counts) + np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    views = np.array([numbers.get(uid, -1) for uid in matches["cameraUids"]], dtype=np.int64)[cameras[places]]
    known = views >= 0
    return Observations(views[known], rows[known], pixels[places][known])


def _accessor(document: dict[str, Any], index: int, file: Path, step: int) -> NDArray[Any]:
    """Return [N, 1 to 4], the numbers of a glTF accessor: floats, bytes or integers; each ``step``-th element."""
    accessor = document["accessors"][index]
    view = document["bufferViews"][accessor["bufferView"]]
    uri = document["buffers"][view["buffer"]]["uri"]
    name, _ = path_in_scene(unquote(uri), file.parent, Entry(file, "a buffer"), allow_outside=False)
    kinds: dict[int, np.dtype[Any]] = {_FLOAT: np.dtype("<f4"), _UBYTE: np.dtype("u1"), _UINT: np.dtype("<u4")}
    kind = kinds[accessor["componentType"]]
    width, count = _WIDTHS[accessor["type"]], accessor["count"]
    offset = view.get("byteOffset", 0) + accessor.get("byteOffset", 0)
    path = file.parent / name
    if not path.is_file() or offset + count * width * kind.itemsize > path.stat().st_size:
        raise SceneError("is not there, or shorter than its glTF says", where=path, remedy=_EXPORT)
    if view.get("byteStride", width * kind.itemsize) != width * kind.itemsize:
        raise SceneError("has buffers of several kinds of numbers, which OPF has not", where=file, remedy=_EXPORT)
    if not count:
        return np.zeros((0, width), kind)
    # A dense cloud can be larger than the memory.
    values: NDArray[Any] = np.memmap(path, kind, mode="r", offset=offset, shape=(count, width))
    return np.array(values[::step])


READER = Reader("opf", FILES, lambda root: bool(with_suffix(root, ".opf")), read_opf)
