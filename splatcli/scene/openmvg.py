"""Reconstructions of OpenMVG: cameras and points of an sfm_data.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splatcli.config import DataConfig
from splatcli.errors import SceneError
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.foreign_lenses import Brown, colmap_camera
from splatcli.scene.observations import Observations, with_doubt
from splatcli.scene.parsing import (
    MAX_BYTES_WITH_POINTS,
    head,
    load_json,
    only_one,
    path_in_scene,
    viewmat_of,
    with_suffix,
)
from splatcli.scene.points import RawPoints, stride
from splatcli.scene.source import Entry, FixedLens, Problems, Reader, SceneSource, View
from splatcli.sizes import counted

FILES = "a reconstruction of OpenMVG (sfm_data.json)"
_EXPORT = "write it again: openMVG_main_ConvertSfM_DataFormat -i sfm_data.bin -o sfm_data.json -V -I -E -S"
#: Where the coefficients of a lens are, and how many: radial ones, then two tangential ones.
_COEFFICIENTS = {
    "pinhole": ("", 0),
    "pinhole_radial_k1": ("disto_k1", 1),
    "pinhole_radial_k3": ("disto_k3", 3),
    "pinhole_brown_t2": ("disto_t2", 5),
    "fisheye": ("fisheye", 4),
}
#: Set in the number of a type where its name comes with it, which is the first time.
_FIRST = 1 << 31
#: Points of the file have no colours.
_GRAY = 128
#: Pixels of the file are counted from the centre of the first one, as its detectors and its undistortion do; a Camera's
#: from the upper left corner of the image.
_FIRST_CENTER = 0.5


def read_openmvg(root: Path, data: DataConfig, problems: Problems) -> SceneSource:
    """Read the views that have a pose, in the reconstruction's frame."""
    whole, document = _load(root)
    lenses = _lenses(document, whole, problems)
    poses = dict(_items(document, "extrinsics", whole))
    views: list[View] = []
    numbers: dict[int, int] = {}
    unposed = 0
    for key, wrapped in _items(document, "views", whole):
        with problems.collect():
            view = _object(wrapped, whole.named(f"view {key}"))
            pose, intrinsic = (view.get(name) for name in ("id_pose", "id_intrinsic"))
            if not (isinstance(pose, int) and pose in poses and isinstance(intrinsic, int) and intrinsic in lenses):
                unposed += 1
                continue
            name = "/".join(str(view.get(part) or "") for part in ("local_path", "filename")).strip("/")
            entry = whole.named(f"view {key} {name!r}")
            lens = lenses[intrinsic]
            if lens is None:
                continue  # it is a problem already
            image, outside = path_in_scene(name, root, entry, allow_outside=data.allow_outside)
            viewmat = _viewmat(poses[pose], entry)
            numbers[key] = len(views)
            views.append(View(image, lens, viewmat, entry.label, outside))
    of = counted(unposed, "view of the OpenMVG file has", "views of the OpenMVG file have")
    notes = [f"{of} no pose or no intrinsics"] if unposed else []
    source = SceneSource(root, whole.file, views, [root / "images", root], notes=notes)
    with problems.collect():
        points, seen = _points(document, whole, data.max_points, numbers)
        if points is not None:
            source.points, source.reprojections = with_doubt(points, views, seen)
    return source


def _files(root: Path) -> list[Path]:
    return [path for path in with_suffix(root, ".json") if '"sfm_data_version"' in head(path)]


def _load(root: Path) -> tuple[Entry, dict[str, Any]]:
    """Load the file with poses, of those that OpenMVG's stages write. Raises SceneError for none and for several."""
    files = _files(root)
    documents = {
        file: load_json(file, dict, _EXPORT, MAX_BYTES_WITH_POINTS)
        for file in files
        if len(files) == 1 or b'"rotation"' in file.read_bytes()
    }
    posed = [file for file, document in documents.items() if document.get("extrinsics")]
    if not posed:
        raise SceneError("has no poses ('extrinsics')", where=files[0], remedy=f"name the reconstruction's; {_EXPORT}")
    file = only_one(posed, "OpenMVG cameras with poses")
    return Entry(file, remedy=_EXPORT), documents[file]


def _items(document: dict[str, Any], key: str, whole: Entry) -> list[tuple[Any, Any]]:
    """Return the pairs of a map as cereal writes one: a list of objects with key and value."""
    found = document.get(key, [])
    if not isinstance(found, list) or not all(
        isinstance(one, dict) and {"key", "value"} <= one.keys() and isinstance(one["key"], int) for one in found
    ):
        raise whole.error(f"{key!r} is not a list of keys and values")
    return [(one["key"], one["value"]) for one in found]


def _object(wrapped: Any, entry: Entry) -> dict[str, Any]:
    """Return the members of an object behind a pointer of cereal, those of its base classes among them."""
    wrapper = wrapped.get("ptr_wrapper") if isinstance(wrapped, dict) else None
    found = wrapper.get("data") if isinstance(wrapper, dict) else None
    if not isinstance(found, dict):
        raise entry.error("has no data")
    members: dict[str, Any] = {}
    while isinstance(found, dict):
        members = {**found, **members}
        found = found.get("value0")
    return members


def _lenses(document: dict[str, Any], whole: Entry, problems: Problems) -> dict[Any, FixedLens | None]:
    """Return the lenses by their keys; None for one that is a problem."""
    lenses: dict[Any, FixedLens | None] = {}
    names: dict[int, str] = {}
    for key, wrapped in _items(document, "intrinsics", whole):
        lenses[key] = None
        with problems.collect():
            entry = whole.named(f"intrinsics {key}")
            members = _object(wrapped, entry)
            number = entry.number(wrapped.get("polymorphic_id"), "polymorphic_id")
            kind = names.setdefault(int(number) & ~_FIRST, str(wrapped.get("polymorphic_name", "")))
            lenses[key] = FixedLens(entry.file, entry.label, _lens(members, kind, entry))
    return lenses


def _lens(members: dict[str, Any], kind: str, entry: Entry) -> pycolmap.Camera:
    if kind not in _COEFFICIENTS:
        raise entry.error(
            f"cameras of the type {kind!r} are not read, only {', '.join(_COEFFICIENTS)}",
            "undistort the images, or export a COLMAP model (openMVG_main_openMVG2Colmap); of panoramas, splat sfm "
            "PHOTOS finds the cameras",
        )

    def numbers(key: str, count: int) -> list[float]:
        values = members.get(key)
        return entry.numbers(values if isinstance(values, list) else [values], count, key)

    width, height = (round(numbers(key, 1)[0]) for key in ("width", "height"))
    focal = numbers("focal_length", 1)[0]
    center = [value + _FIRST_CENTER for value in numbers("principal_point", 2)]
    if not focal > 0:
        raise entry.error(f"its focal length is {focal:g}, not positive")
    key, count = _COEFFICIENTS[kind]
    found = numbers(key, count) if count else []
    if kind == "fisheye":
        return colmap_camera("OPENCV_FISHEYE", width, height, [focal, focal, *center, *found], entry)
    tangential = (found[3], found[4]) if count == 5 else (0.0, 0.0)
    return Brown(focal, focal, center[0], center[1], found[:3], tangential).camera(width, height, entry)


def _viewmat(pose: Any, entry: Entry) -> NDArray[np.float64]:
    """Return [4, 4], world to camera, of a pose's rotation and centre of projection."""
    pose = pose if isinstance(pose, dict) else {}
    rows = pose.get("rotation")
    rows = rows if isinstance(rows, list) and len(rows) == 3 else [None] * 3
    rotation = np.array([entry.numbers(row, 3, "rotation") for row in rows])
    center = np.array(entry.numbers(pose.get("center"), 3, "center"))
    return viewmat_of(rotation.T, center, entry, opengl=False)


def _points(
    document: dict[str, Any], whole: Entry, limit: int, numbers: dict[int, int]
) -> tuple[RawPoints | None, Observations]:
    """Return points and their observations. numbers: the indices of views by their keys."""
    items = _items(document, "structure", whole)
    kept = items[:: stride(len(items), limit)]
    try:
        xyz = np.array([value["X"] for _, value in kept], dtype=np.float64)
        if items and xyz.shape[1:] != (3,):
            raise ValueError("not three numbers")
        seen = Observations.of(
            (numbers[one["key"]], row, *(value + _FIRST_CENTER for value in one["value"]["x"]))
            for row, (_, value) in enumerate(kept)
            for one in value.get("observations", ())
            if one["key"] in numbers
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        what = f"a point of the structure has no X of three numbers, or an observation no x of two ({error!r})"
        raise whole.error(what) from None
    return RawPoints(xyz, np.full(xyz.shape, _GRAY, np.uint8), whole.file, len(items)) if items else None, seen


READER = Reader("openmvg", FILES, lambda root: bool(_files(root)), read_openmvg)
