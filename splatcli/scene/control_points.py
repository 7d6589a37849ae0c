"""Ground control points: surveyed places and the pixels at which images show them, as OpenDroneMap's gcp_list.txt.

    EPSG:32632
    500123.40 5240456.10 412.35 1042.5 788.0 DJI_0012.JPG corner
    ...

The first line is the coordinate reference system: EPSG:CODE, WGS84 UTM 32N, a PROJ string, or LOCAL for metres of a
frame of one's own. Each further line has x, y and height (for EPSG:4326 longitude, latitude and height), the pixel
from the upper left corner of the image as it is shown, the name of the image, and, if wanted, of the point. Without
names, lines with the same place are one point. Systems other than EPSG:4326, 4979, 4978 and LOCAL need pyproj.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splatcli.errors import SceneError, first_line
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.geodesy import from_geocentric, median_place, to_enu
from splatcli.scene.georeference import AXES, Fit, PositionsError, check_spread, frame_facts, model_facts

LOCAL = "LOCAL"
INSTALL = "pip install 'splatcli[geo]'"
#: A similarity has 7 unknowns and a point 3 numbers; images that show a point, at least, to place it.
MIN_POINTS, MIN_IMAGES = 3, 2
#: Rays closer to parallel than this, in degrees, do not place a point.
_MIN_ANGLE = 1.0
#: Points that remain when others are left out, and standard deviations from which a point contradicts the others.
_CHECKED, _BLUNDER = 5, 12.0
#: The least standard deviation for that, as a part of the extent of the points: points that fit exactly are made up.
_LEAST_SIGMA = 1e-5
_UTM = re.compile(r"WGS ?84 +UTM +(?:zone +)?(\d{1,2}) ?([NS])", re.IGNORECASE)
_REMEDY = (
    "a first line with the coordinate system (EPSG:32632, or LOCAL), then lines of x y z pixel_x pixel_y image [point]"
)
#: Systems whose coordinates are read without pyproj.
_GEODETIC, _GEOCENTRIC = ("EPSG:4326", "EPSG:4979"), "EPSG:4978"


@dataclass(frozen=True, slots=True)
class ControlPoint:
    """A surveyed place and where images show it.

    place: latitude, longitude in degrees and height in metres; in a LOCAL file x, y, z in metres.
    pixels: name of the image, as the file has it, -> x, y from the upper left corner.
    """

    name: str
    place: tuple[float, float, float]
    pixels: Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class ControlPoints:
    """The points of a file, in its order. local: they are in metres of a frame of their own, not on the Earth."""

    file: str
    local: bool
    points: tuple[ControlPoint, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        points = [
            {"name": p.name, "place": list(p.place), "pixels": {k: list(v) for k, v in p.pixels.items()}}
            for p in self.points
        ]
        return {"file": self.file, "local": self.local, "points": points}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> ControlPoints:
        points = tuple(
            ControlPoint(p["name"], tuple(p["place"]), {k: tuple(v) for k, v in p["pixels"].items()})
            for p in facts["points"]
        )
        return cls(facts["file"], facts["local"], points)


def read_control_points(path: Path) -> ControlPoints:
    """Read a gcp_list.txt. Raises SceneError, which names the line, for what it cannot use."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise SceneError(f"cannot read the control points: {error.strerror}", where=path, remedy=_REMEDY) from None
    except ValueError:
        raise SceneError("is not a text file of control points", where=path, remedy=_REMEDY) from None
    numbered = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    numbered = [(number, line) for number, line in numbered if line and not line.startswith("#")]
    if not numbered:
        raise SceneError("there are no control points", where=path, remedy=_REMEDY)
    system, rows = numbered[0][1], numbered[1:]
    seen: dict[str, tuple[tuple[float, float, float], dict[str, tuple[float, float]], int]] = {}
    for number, line in rows:
        x, y, z, column, row, image, name = _row(line, f"{path}:{number}")
        place = (x, y, z)
        name = name or f"{x:.12g} {y:.12g} {z:.12g}"
        known = seen.setdefault(name, (place, {}, number))
        if known[0] != place:
            raise SceneError(
                f"point {name!r} has another place in line {known[2]}", where=f"{path}:{number}", remedy=_REMEDY
            )
        if image in known[1]:
            raise SceneError(f"{image} shows point {name!r} twice", where=f"{path}:{number}", remedy="remove one")
        known[1][image] = (column, row)
    if not seen:
        raise SceneError("there are no control points", where=path, remedy=_REMEDY)
    local = system.upper() == LOCAL
    places = np.array([place for place, _, _ in seen.values()])
    if not local:
        places = _geodetic(system, places, path)
    points = tuple(
        ControlPoint(name, (float(place[0]), float(place[1]), float(place[2])), pixels)
        for (name, (_, pixels, _)), place in zip(seen.items(), places, strict=True)
    )
    return ControlPoints(str(path), local, points)


def _row(line: str, where: str) -> tuple[float, float, float, float, float, str, str]:
    # ODM separates by spaces or tabs; names of images with spaces need tabs.
    parts = [part.strip() for part in (line.split("\t") if "\t" in line else line.split())]
    try:
        x, y, z, column, row = (float(part) for part in parts[:5])
    except ValueError:
        raise SceneError(f"is not a control point: {line[:60]!r}", where=where, remedy=_REMEDY) from None
    if len(parts) < 6 or not all(map(math.isfinite, (x, y, z, column, row))):
        raise SceneError(f"is not a control point: {line[:60]!r}", where=where, remedy=_REMEDY)
    return x, y, z, column, row, parts[5], parts[6] if len(parts) > 6 else ""


def _geodetic(system: str, places: NDArray[np.float64], path: Path) -> NDArray[np.float64]:
    """Return [N, 3], the latitude, longitude and height of coordinates in a system. Raises SceneError."""
    name = system.upper().replace(" ", "")
    if name == _GEOCENTRIC:
        return np.array([from_geocentric(place) for place in places])
    if name in _GEODETIC:
        found = places[:, [1, 0, 2]]
    else:
        utm = _UTM.fullmatch(system)
        wanted = f"EPSG:{326 if utm[2].upper() == 'N' else 327}{int(utm[1]):02d}" if utm else system
        try:
            import pyproj
        except ImportError:
            raise SceneError(
                f"the coordinates are in {system}, which pyproj converts", where=path, remedy=INSTALL
            ) from None
        try:
            crs = pyproj.CRS.from_user_input(wanted)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the grid that is asked for here
                lacking = crs.is_compound and not pyproj.transformer.TransformerGroup(crs, "EPSG:4979").best_available
            if lacking:
                raise SceneError(
                    f"pyproj lacks the grid for the heights of {crs.name}",
                    where=path,
                    remedy="set PROJ_NETWORK=ON, so that pyproj fetches it, or give heights above the ellipsoid",
                )
            convert = pyproj.Transformer.from_crs(crs, "EPSG:4979", always_xy=True)
            # Without heights of its own, a system in feet is taken to have heights in feet.
            unit = crs.axis_info[0].unit_conversion_factor if crs.is_projected and len(crs.axis_info) == 2 else 1.0
            lon, lat, height = convert.transform(places[:, 0], places[:, 1], unit * places[:, 2])
        except pyproj.exceptions.ProjError as error:
            reason = first_line(error)
            raise SceneError(f"{system!r} is no coordinate system: {reason}", where=path, remedy=_REMEDY) from None
        found = np.stack([lat, lon, height], axis=1)
    inside = np.isfinite(found).all(axis=1) & (np.abs(found[:, 0]) <= 90) & (np.abs(found[:, 1]) <= 180)
    if not inside.all():
        bad = places[int(np.flatnonzero(~inside)[0])]
        raise SceneError(f"{bad.tolist()} is no place on the Earth in {system}", where=path, remedy=_REMEDY)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class ControlFit:
    """A fit of a model to control points. origin: latitude, longitude, height; None for local metres.

    names: of the points that were placed. missing: of those that were not, and why.
    """

    origin: tuple[float, float, float] | None
    fit: Fit
    names: tuple[str, ...]
    missing: Mapping[str, str]

    def facts(self) -> dict[str, Any]:
        """Return figures for a report: residuals of each point in metres, known minus found."""
        fit = self.fit
        return {
            "control_points": {
                name: {"residual_m": [float(value) for value in residual], "used": bool(used)}
                for name, residual, used in zip(self.names, fit.residuals, fit.used, strict=True)
            },
            "control_points_not_placed": dict(self.missing),
            **fit.facts(self.names, AXES if self.origin else ("x", "y", "z")),
        }

    def document(self) -> dict[str, Any]:
        """Return the content of the sidecar of a scene that the similarity was applied to."""
        frame = frame_facts(self.origin) if self.origin else {"frame": "metres, axes of the control points"}
        return {"version": 1, **frame, **model_facts(self.fit), **self.facts()}


def _same_image(name: str, images: Iterable[str]) -> str | None:
    """Return the one of ``images`` that a file of control points means, which may leave out folders or name more."""
    names = list(images)
    if name in names:
        return name
    found = [each for each in names if f"/{each}".endswith(f"/{name}") or f"/{name}".endswith(f"/{each}")]
    return found[0] if len(found) == 1 else None


def fit_control_points(model: pycolmap.Reconstruction, control: ControlPoints) -> ControlFit:
    """Return the similarity from a model to control points by least squares, without those that contradict the others.

    Each point is placed in the model by the rays through its pixels. Raises SceneError when fewer than three points
    are placed, when they lie on one line, and for a pixel outside of its image.
    """
    images = {model.image(number).name: number for number in model.reg_image_ids()}
    named = {pixel for point in control.points for pixel in point.pixels}
    found: dict[str, NDArray[np.float64]] = {}
    missing: dict[str, str] = {}
    for point in control.points:
        rays = []
        for name, pixel in point.pixels.items():
            full = _same_image(name, images)
            if full is not None:
                image = model.image(images[full])
                _check_inside(image, pixel, point.name, control.file)
                rays.append(_ray(image, pixel))
        if len(rays) < MIN_IMAGES:
            missing[point.name] = f"{len(rays)} of its {len(point.pixels)} images are registered, {MIN_IMAGES} needed"
            continue
        centers, directions = (np.stack(part) for part in zip(*rays, strict=True))
        if _widest(directions) < _MIN_ANGLE:
            missing[point.name] = f"its rays are within {_MIN_ANGLE:.0f} degree of each other"
            continue
        found[point.name] = nearest_to_rays(centers, directions)
    if len(found) < MIN_POINTS:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(missing.items())[:3])
        raise SceneError(
            f"{len(found)} control points can be placed, at least {MIN_POINTS} are needed"
            + (f" ({reasons})" if reasons else ""),
            where=control.file,
            remedy=f"mark {MIN_POINTS} points or more in two registered images each; {len(named)} images are named",
        )
    old = np.stack(list(found.values()))
    places = np.array([point.place for point in control.points if point.name in found])
    origin = None if control.local else median_place(places)
    new = places if origin is None else to_enu(places, origin)
    try:
        fit = _fit(old, new)
    except PositionsError as reason:
        raise SceneError(
            f"the model cannot be aligned with the control points: {reason}",
            where=control.file,
            remedy="check coordinates and pixels; points must not lie on one line",
        ) from None
    place = None if origin is None else (float(origin[0]), float(origin[1]), float(origin[2]))
    return ControlFit(place, fit, tuple(found), missing)


def _fit(old: NDArray[np.float64], new: NDArray[np.float64]) -> Fit:
    """Return the similarity from ``old`` to ``new`` [N, 3] by least squares, without points that contradict the others.

    A point is left out if it is further off from the fit of the others than _BLUNDER standard deviations of these;
    five points remain at least, since fewer do not contradict one another clearly.
    """
    check_spread(new, "control points")
    check_spread(old, "control points in the model")
    least = _LEAST_SIGMA * float(np.ptp(new, axis=0).max())
    used = np.ones(len(old), dtype=np.bool_)
    while used.sum() > _CHECKED:
        worst, without = 0.0, used
        for index in np.flatnonzero(used):
            others = used.copy()
            others[index] = False
            fit = Fit.of(old, new, others)
            off = float(np.linalg.norm(fit.residuals[index])) / max(fit.sigma, least)
            if off > worst:
                worst, without = off, others
        if worst <= _BLUNDER:
            break
        used = without
    check_spread(new[used], "control points that agree")
    return Fit.of(old, new, used)


def _check_inside(image: pycolmap.Image, pixel: tuple[float, float], point: str, file: str) -> None:
    """Raise SceneError for a pixel outside of its image, as of the larger original of a reduced image."""
    assert image.camera is not None
    width, height = image.camera.width, image.camera.height
    if not (0 <= pixel[0] <= width and 0 <= pixel[1] <= height):
        raise SceneError(
            f"point {point!r} is at pixel {pixel[0]:g}, {pixel[1]:g} of {image.name}, which is {width}x{height}",
            where=file,
            remedy="pixels are those of the image that is read, as it is shown: those of a larger original are scaled",
        )


def _ray(image: pycolmap.Image, pixel: tuple[float, float]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the centre of the camera and the unit direction of a pixel, in the model."""
    assert image.camera is not None
    on_plane = image.camera.cam_from_img(np.array([pixel]))[0]
    direction = image.cam_from_world().rotation.matrix().T @ np.append(on_plane, 1.0)
    return np.asarray(image.projection_center()), np.asarray(direction / np.linalg.norm(direction))


def _widest(directions: NDArray[np.float64]) -> float:
    """Return the widest angle between directions [N, 3], in degrees."""
    return math.degrees(math.acos(float(np.clip((directions @ directions.T).min(), -1.0, 1.0))))


def nearest_to_rays(centers: NDArray[np.float64], directions: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return [3], the point with the least sum of squared distances to rays: centers [N, 3], unit directions [N, 3]."""
    across = np.eye(3) - directions[:, :, None] * directions[:, None, :]
    return np.linalg.solve(across.sum(axis=0), (across @ centers[:, :, None]).sum(axis=0)[:, 0])
