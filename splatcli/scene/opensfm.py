"""Reconstructions of OpenSfM and OpenDroneMap: cameras and points of a reconstruction.json."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from splatcli.config import DataConfig
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.foreign_lenses import Brown, angles_of, colmap_camera, nearest_fisheye
from splatcli.scene.observations import Observations, with_doubt
from splatcli.scene.panorama import EQUIRECTANGULAR
from splatcli.scene.parsing import MAX_BYTES_WITH_POINTS, lines_of, load_json, path_in_scene, viewmat_of
from splatcli.scene.points import OFF, RawPoints, stride
from splatcli.scene.source import Entry, FixedLens, Problems, Reader, SceneSource, View

FILE = "reconstruction.json"
#: Where OpenDroneMap has it, beside its images/.
_PLACES = (FILE, f"opensfm/{FILE}")
#: Beside it, where images see the points; and the reprojection error, in longer sides, over which OpenSfM drops one.
_TRACKS, _OUTLIER = "tracks.csv", 0.006
#: The reconstruction in metres east, north and up, once OpenDroneMap has put a projected one in its place.
_TOPOCENTRIC = "reconstruction.topocentric.json"
#: Metres by which GPS is off, or the part of the extent of the positions, and the error that stands for no position.
_GPS_ERROR, _GPS_SHARE, _NO_GPS = 10.0, 0.25, 999_999.0
#: Metres from the reference, along an axis, that no position is at.
_OFF_EARTH = 1e8
_REDO = "reconstruct again, or export a COLMAP model (opensfm export_colmap)"
#: Lenses by their names: those with one focal length and no principal point, and those with two and one.
_PLAIN = ("perspective", "fisheye", "dual")
_SPHERICAL = ("spherical", "equirectangular")
_CENTERED = ("brown", "simple_radial", "radial", "fisheye_opencv", "fisheye62", "fisheye624")


def read_opensfm(root: Path, data: DataConfig, problems: Problems) -> SceneSource:
    """Read the reconstruction with most shots, in its frame: metres east, north and up if there was GPS."""
    file = next(root / place for place in _PLACES if (root / place).is_file())
    whole = Entry(file, remedy=_REDO)
    document, notes = _largest(load_json(file, list, _REDO, MAX_BYTES_WITH_POINTS), whole)
    shots, cameras = _table(document, "shots", whole), _table(document, "cameras", whole)
    lenses: dict[str, FixedLens] = {}
    views: list[View] = []
    numbers: dict[str, int] = {}
    for name, shot in shots.items():
        with problems.collect():
            entry = whole.named(f"shot {name!r}")
            key = shot.get("camera")
            if not isinstance(key, str) or key not in cameras:
                raise entry.error(f"its camera {key!r} is not in the file")
            if key not in lenses:
                label = f"camera {key!r}"
                lenses[key] = FixedLens(file, label, _lens(cameras[key], whole.named(label)))
            image, outside = path_in_scene(name, root, entry, allow_outside=data.allow_outside)
            viewmat = _viewmat(shot, entry)
            numbers[name] = len(views)
            views.append(View(image, lenses[key], viewmat, entry.label, outside))
    source = SceneSource(root, file, views, [root / "images", root], notes=notes)
    with problems.collect():
        source.place = _place(document, shots, source)
    with problems.collect():
        points, names = _points(document, whole, data.max_points)
        tracks = file.with_name(_TRACKS)
        if points is not None and tracks.is_file():
            outlier = _OUTLIER * max((max(lens(0, 0).width, lens(0, 0).height) for lens in lenses.values()), default=1)
            seen = _observations(tracks, names, numbers, views)
            source.points, source.reprojections = with_doubt(
                points, views, seen, outlier=outlier, off=max(OFF, outlier / 2)
            )
        else:
            source.points = points
    return source


def _largest(reconstructions: list[Any], whole: Entry) -> tuple[dict[str, Any], list[str]]:
    """Return the reconstruction with most shots, and a note on the others."""
    if not reconstructions or not all(isinstance(one, dict) for one in reconstructions):
        raise whole.error("has no reconstruction")
    counts = [len(_table(one, "shots", whole)) for one in reconstructions]
    best = counts.index(max(counts))
    others = [str(count) for number, count in enumerate(counts) if number != best]
    notes = [f"the largest reconstruction is used, with {counts[best]} shots; others have {', '.join(others)}"]
    return reconstructions[best], notes if others else []


def _table(document: dict[str, Any], key: str, whole: Entry) -> dict[str, dict[str, Any]]:
    found = document.get(key)
    if not isinstance(found, dict) or not all(isinstance(one, dict) for one in found.values()):
        raise whole.error(f"has no table {key!r}")
    return found


def _lens(camera: dict[str, Any], entry: Entry) -> pycolmap.Camera:
    """Return the lens in pixels: lengths of the file are in units of the longer side, from the middle of the image."""
    kind = camera.get("projection_type", "perspective")
    if kind not in (*_PLAIN, *_CENTERED, *_SPHERICAL):
        raise entry.error(
            f"cameras of the type {kind!r} are not read, only {', '.join((*_PLAIN, *_CENTERED, *_SPHERICAL))}",
            "undistort the images (opensfm undistort) and name the folder undistorted/",
        )

    def number(key: str, default: float | None = None) -> float:
        return entry.number(camera.get(key, default), key)

    width, height = (round(number(key)) for key in ("width", "height"))
    if kind in _SPHERICAL:
        return colmap_camera(EQUIRECTANGULAR, width, height, [width, height], entry)
    side = max(width, height)
    focal = [number(key) for key in (("focal", "focal") if kind in _PLAIN else ("focal_x", "focal_y"))]
    if not all(length > 0 for length in focal) or side < 1:
        raise entry.error("its focal length or its size is not positive")
    middle = [0.0, 0.0] if kind in _PLAIN else [number("c_x", 0.0), number("c_y", 0.0)]
    fx, fy = (length * side for length in focal)
    cx, cy = width / 2 + middle[0] * side, height / 2 + middle[1] * side
    head = [fx, fy, cx, cy]
    k = [number(f"k{i}", 0.0) for i in range(1, 7)]
    p = [number(f"p{i}", 0.0) for i in (1, 2)]
    if kind == "dual":
        mix = number("transition", 0.5)
        return nearest_fisheye(lambda rays: _dual(rays, head, k, mix), head, width, height, entry)
    if kind in ("fisheye62", "fisheye624"):
        s = [number(f"s{i}", 0.0) for i in range(4)]
        if not any((k[4], k[5], s[1], s[3])):
            params = [*head, k[0], k[1], *p, k[2], k[3], s[0], s[2]]
            return colmap_camera("THIN_PRISM_FISHEYE", width, height, params, entry)
        return nearest_fisheye(lambda rays: _fisheye624(rays, head, k, p, s), head, width, height, entry)
    if kind in ("fisheye", "fisheye_opencv"):
        return colmap_camera("OPENCV_FISHEYE", width, height, [*head, *k[:4]], entry)
    return Brown(fx, fy, cx, cy, k[:3], (p[0], p[1])).camera(width, height, entry)


def _dual(rays: NDArray[np.float64], head: list[float], k: list[float], mix: float) -> NDArray[np.float64]:
    """Return [N, 2] pixels of rays [N, 3]: a mixture of a perspective and a fisheye lens, then radial distortion."""
    x = mix * rays[:, :2] / rays[:, 2:] + (1 - mix) * angles_of(rays)
    r2 = (x * x).sum(axis=1, keepdims=True)
    return np.asarray(x * (1 + k[0] * r2 + k[1] * r2**2) * head[:2] + head[2:])


def _fisheye624(
    rays: NDArray[np.float64], head: list[float], k: list[float], p: list[float], s: list[float]
) -> NDArray[np.float64]:
    """Return [N, 2] pixels of rays [N, 3]. Unlike COLMAP's model all its terms have undistorted angles."""
    x = angles_of(rays)
    r2 = (x * x).sum(axis=1, keepdims=True)
    radial = 1 + (r2 ** np.arange(1, 7)) @ np.array(k)[:, None]
    tangential = 2 * x * (x @ np.array([[p[1]], [p[0]]])) + r2 * [p[1], p[0]]
    prism = r2 * [s[0], s[2]] + r2**2 * [s[1], s[3]]
    return np.asarray((x * radial + tangential + prism) * head[:2] + head[2:])


def _viewmat(shot: dict[str, Any], entry: Entry) -> NDArray[np.float64]:
    """Return [4, 4], world to camera, of a rotation as axis times angle and a translation."""
    turn, shift = (np.array(entry.numbers(shot.get(key), 3, key)) for key in ("rotation", "translation"))
    rotation = scipy.spatial.transform.Rotation.from_rotvec(turn).as_matrix()
    return viewmat_of(rotation.T, -rotation.T @ shift, entry, opengl=False)


def _place(
    document: dict[str, Any], shots: dict[str, dict[str, Any]], source: SceneSource
) -> tuple[float, float, float] | None:
    """Return the latitude, longitude and height of the origin; None where that is not known, which a note says."""
    reference, file = document.get("reference_lla"), source.file
    if reference is None and (beside := file.with_name("reference_lla.json")).is_file():
        reference, file = load_json(beside, dict, _REDO), beside
    if not isinstance(reference, dict):
        return None
    entry = Entry(file, "reference_lla", _REDO)
    lat, lon, height = (entry.number(reference.get(key), key) for key in ("latitude", "longitude", "altitude"))
    if (lat, lon) == (0.0, 0.0):
        return None  # what is written where no image has a position
    if not (abs(lat) <= 90 and abs(lon) <= 180):
        raise entry.error(f"{lat:g}, {lon:g} is no place")
    if (why := _astray(shots, source)) is not None:
        source.notes.append(f"{file.name} names the place {lat:.7f}, {lon:.7f}, which is not used: {why}")
        return None
    where = f"{lat:.7f}, {lon:.7f}, {height:.2f} m ({file.name})"
    source.notes.append(f"the scene is in metres east, north and up of {where}")
    return lat, lon, height


def _astray(shots: dict[str, dict[str, Any]], source: SceneSource) -> str | None:
    """Return why cameras are not in metres east and north of the reference; None where they are."""
    if source.file.with_name(_TOPOCENTRIC).is_file():
        return f"OpenDroneMap projected the reconstruction to map coordinates, and keeps the other in {_TOPOCENTRIC}"
    if len(source.views) != len(shots):
        return None  # a problem already
    pairs = [
        (view.center, position)
        for view, shot in zip(source.views, shots.values(), strict=True)
        if (position := _gps(shot)) is not None
    ]
    if not pairs:
        return "no image has a GPS position"
    centers, positions = np.array(pairs)[:, :, :2].transpose(1, 0, 2)
    off = float(np.median(np.linalg.norm(centers - positions, axis=1)))
    spread = float(np.median(np.linalg.norm(positions - np.median(positions, axis=0), axis=1)))
    far = off > max(_GPS_ERROR, _GPS_SHARE * spread)
    return f"cameras lie {off:.0f} m away from the GPS positions in the median" if far else None


def _gps(shot: dict[str, Any]) -> list[float] | None:
    """Return metres east, north and up of the reference by GPS; None for a shot without, which has zeros."""
    position, error = shot.get("gps_position"), shot.get("gps_dop", 0.0)
    if not (isinstance(position, list) and len(position) == 3 and any(position)):
        return None
    good = all(type(one) in (int, float) and abs(one) < _OFF_EARTH for one in [*position, error])
    return position if good and error < _NO_GPS else None


def _observations(tracks: Path, points: dict[str, int], numbers: dict[str, int], views: list[View]) -> Observations:
    """Return the observations of points. points, numbers: rows of points and indices of views by their names."""
    seen = Observations.of(_rows(tracks, points, numbers))
    lenses = [view.lens(0, 0) for view in views]
    here = np.array([(lens.width, lens.height) for lens in lenses], dtype=np.float64).reshape(-1, 2)[seen.views]
    return replace(seen, pixels=seen.pixels * here.max(axis=1, keepdims=True) + here / 2)


def _rows(tracks: Path, points: dict[str, int], numbers: dict[str, int]) -> Iterator[tuple[int, int, float, float]]:
    """Yield the view, the point and the place of each observation, in longer sides from the middle of the image.

    Lines have the image, the track, the feature, x, y, and more. Points have the names of their tracks.
    """
    for line in lines_of(tracks):
        fields = line.split("\t", 5)
        if len(fields) > 4 and fields[0] in numbers and (row := points.get(fields[1])) is not None:
            try:
                yield numbers[fields[0]], row, float(fields[3]), float(fields[4])
            except ValueError:
                continue  # no line of OpenSfM's


def _points(document: dict[str, Any], whole: Entry, limit: int) -> tuple[RawPoints | None, dict[str, int]]:
    """Return points, and their rows by their names."""
    if not document.get("points"):
        return None, {}
    table = _table(document, "points", whole)
    total, points = len(table), list(table)[:: stride(len(table), limit)]
    rows = [table[key] for key in points]
    try:
        xyz = np.array([row["coordinates"] for row in rows], dtype=np.float64)
        rgb = np.array([row["color"] for row in rows], dtype=np.float64)
        if xyz.shape != (len(rows), 3) or rgb.shape != xyz.shape:
            raise ValueError("not three numbers")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise whole.error(f"a point has no coordinates or no color of three numbers ({error!r})") from None
    found = RawPoints(xyz, np.clip(np.nan_to_num(rgb), 0, 255).astype(np.uint8), whole.file, total)
    return found, {name: row for row, name in enumerate(points)}


def _matches(root: Path) -> bool:
    return any((root / place).is_file() for place in _PLACES)


READER = Reader("opensfm", f"a reconstruction of OpenSfM or OpenDroneMap ({FILE})", _matches, read_opensfm)
