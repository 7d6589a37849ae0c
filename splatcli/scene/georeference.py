"""Where a scene lies on the Earth, and how large it is: positions from EXIF, the similarity to them, and the sidecar.

A scene with ``georeference.json`` beside its cameras is in metres, x east, y north, z up of an origin on WGS 84.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL.ExifTags import GPS, IFD

from splatcli.errors import SceneError
from splatcli.scene.decode import exif_of, open_image
from splatcli.scene.geodesy import enu_axes, median_place, to_enu, to_geocentric
from splatcli.similarity import Similarity

FILE = "georeference.json"
#: The axes of a georeferenced scene.
AXES = ("east", "north", "up")
#: Metres from the deepest to the highest place that a camera is at.
_HEIGHTS = (-12_000.0, 100_000.0)

#: A similarity has 7 unknowns, a position 3 numbers; below five of them the residuals say little.
MIN_POSITIONS = 5
#: Triples of cameras from which a first similarity is tried.
_TRIALS = 500
#: Positions further off than so many robust standard deviations are outliers.
_OUTLIER = 3.0
#: A standard deviation below this part of the positions' extent is as good as none: models are no more exact.
_EXACT = 1e-3
#: A median of the lengths of normal residuals in three axes is so many standard deviations of one axis.
_MEDIAN_LENGTH = 1.538
#: Part of the positions that has to agree.
_AGREEING = 0.5
#: Standard errors up to which a result is used unasked: of the scale, relative, and of the tilt, in degrees.
MAX_SCALE_ERROR, MAX_TILT_ERROR = 0.05, 3.0
#: Positions whose second extent is less than this part of their first lie on a line.
_LINE = 0.02


def position_of(path: Path) -> tuple[float, float, float] | None:
    """Return latitude and longitude in degrees and height in metres of an image by its EXIF; None where it has none.

    The height is EXIF's, above sea level or the ellipsoid as the camera has it.
    """
    try:
        with open_image(path) as image:
            tags = exif_of(image).get_ifd(IFD.GPSInfo)
        lat, lon = (_degrees(tags[key]) for key in (GPS.GPSLatitude, GPS.GPSLongitude))
        lat *= -1 if str(tags.get(GPS.GPSLatitudeRef, "N")).upper().startswith("S") else 1
        lon *= -1 if str(tags.get(GPS.GPSLongitudeRef, "E")).upper().startswith("W") else 1
        height = float(tags[GPS.GPSAltitude])
        below = tags.get(GPS.GPSAltitudeRef, b"\0")
        # 1 is below the sea or the ellipsoid, 3 below the sea.
        height *= -1 if below in (b"\x01", b"\x03", 1, 3) else 1
    except Exception:
        return None  # the picture can be whole although its metadata is not
    known = all(map(math.isfinite, (lat, lon, height))) and (lat, lon) != (0.0, 0.0)
    inside = abs(lat) <= 90 and abs(lon) <= 180 and _HEIGHTS[0] <= height <= _HEIGHTS[1]
    return (lat, lon, height) if known and inside else None


def _degrees(parts: Sequence[Any]) -> float:
    return float(parts[0]) + float(parts[1]) / 60 + float(parts[2]) / 3600


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """A similarity to known positions.

    used: [N] which of them agree. residuals: [N, 3] known minus found, metres. sigma: standard deviation of one axis.
    scale_error: relative standard error of the scale; tilt_error: of the worst axis, degrees.
    """

    similarity: Similarity
    used: NDArray[np.bool_]
    residuals: NDArray[np.float64]
    sigma: float
    scale_error: float
    tilt_error: float

    @classmethod
    def of(cls, old: NDArray[np.float64], new: NDArray[np.float64], used: NDArray[np.bool_]) -> Fit:
        """Return the least squares fit from ``old`` to ``new`` [N, 3] by the pairs ``used``."""
        similarity = Similarity.of_pairs(old[used], new[used])
        residuals = new - similarity(old)
        freedom = (3 * int(used.sum()) - 7) / 3
        sigma = _sigma(np.linalg.norm(residuals[used], axis=1), freedom / used.sum())
        placed = similarity(old[used])
        extents = np.linalg.svd(placed - placed.mean(axis=0), compute_uv=False)
        scale_error = sigma / float(np.linalg.norm(extents))
        # About the longest axis of the positions only their two other extents hold the model.
        tilt_error = math.degrees(sigma / float(np.linalg.norm(extents[1:])))
        return cls(similarity, used, residuals, sigma, scale_error, tilt_error)

    def facts(self, names: Sequence[str], axes: Sequence[str]) -> dict[str, Any]:
        """Return figures for a report. names: of the positions. axes: those of the residuals."""
        rms = np.sqrt((self.residuals[self.used] ** 2).mean(axis=0))
        return {
            "positions": len(names),
            "left_out": [name for name, used in zip(names, self.used, strict=True) if not used],
            "residual_m": {axis: float(value) for axis, value in zip(axes, rms, strict=True)},
            "metres_per_unit": self.similarity.scale,
            "scale_error": self.scale_error,
            "tilt_error_degrees": self.tilt_error,
        }

    @property
    def is_good(self) -> bool:
        """Whether the result is better than none."""
        return self.scale_error <= MAX_SCALE_ERROR and self.tilt_error <= MAX_TILT_ERROR


class PositionsError(ValueError):
    """Positions that do not suffice for a similarity; the message says why."""


def fit_similarity(old: NDArray[np.float64], new: NDArray[np.float64], what: str = "GPS positions") -> Fit:
    """Fit the similarity from ``old`` to ``new`` [N, 3] that most of the pairs agree on, by least squares of those.

    what: the new points, for messages; the old ones are cameras.
    Raises PositionsError for too few, for positions on one line or at one place, and where few agree.
    """
    count = len(old)
    if count < MIN_POSITIONS:
        raise PositionsError(f"{count} images with a position are in the model, at least {MIN_POSITIONS} are needed")
    check_spread(new, what)
    check_spread(old, "cameras")
    used = _agreeing(old, new)
    exact = _EXACT * math.sqrt(float(new[used].var(axis=0).sum()))
    for _ in range(10):
        similarity = Similarity.of_pairs(old[used], new[used])
        lengths = np.linalg.norm(new - similarity(old), axis=1)
        robust = float(np.median(lengths)) / _MEDIAN_LENGTH
        limit = _OUTLIER * math.sqrt(3) * max(_sigma(lengths[used], 1.0), robust, exact)
        again = lengths <= limit
        if (again == used).all():
            break
        used = again
        if used.sum() < MIN_POSITIONS:
            break
    if used.sum() < max(MIN_POSITIONS, _AGREEING * count):
        raise PositionsError(f"only {used.sum()} of {count} positions agree with the cameras")
    check_spread(new[used], f"{what} that agree with the cameras")
    return Fit.of(old, new, used)


def check_spread(points: NDArray[np.float64], what: str) -> None:
    """Raise PositionsError where points [P, 3] determine no rotation: they are at one place, or on one line."""
    extents = np.linalg.svd(points - points.mean(axis=0), compute_uv=False)
    if extents[0] <= 0 or extents[0] / math.sqrt(len(points)) < 1e-6:
        raise PositionsError(f"the {what} are all at one place")
    if extents[1] < _LINE * extents[0]:
        raise PositionsError(f"the {what} lie on one line, about which the scene could turn")


def _sigma(lengths: NDArray[np.float64], freedom: float) -> float:
    """Return the standard deviation of one axis from lengths of residuals.

    freedom: degrees of freedom for each position and axis.
    """
    return math.sqrt(float((lengths**2).mean()) / 3 / max(freedom, 1e-9))


def _agreeing(old: NDArray[np.float64], new: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return [N], the half nearest to the similarity of three pairs whose median residual is least."""
    generator = np.random.default_rng(len(old))
    best, half = math.inf, np.ones(len(old), dtype=np.bool_)
    for _ in range(_TRIALS):
        three = generator.choice(len(old), 3, replace=False)
        extents = np.linalg.svd(old[three] - old[three].mean(axis=0), compute_uv=False)
        if extents[1] <= 0.05 * extents[0]:
            continue
        lengths = np.linalg.norm(new - Similarity.of_pairs(old[three], new[three])(old), axis=1)
        median = float(np.median(lengths))
        if median < best:
            best, half = median, lengths <= median
    return half


@dataclass(frozen=True, slots=True, eq=False)
class Georeference:
    """A fit to positions on the Earth, and their origin: latitude, longitude, height."""

    origin: tuple[float, float, float]
    fit: Fit
    names: tuple[str, ...]

    def facts(self) -> dict[str, Any]:
        """Return figures for a report."""
        return self.fit.facts(self.names, AXES)

    def document(self) -> dict[str, Any]:
        """Return the content of the sidecar of a scene that the similarity was applied to."""
        return {"version": 1, **frame_facts(self.origin), **model_facts(self.fit), **self.facts()}


def frame_facts(origin: tuple[float, float, float]) -> dict[str, Any]:
    """Return what a sidecar says of the frame of a scene. origin: latitude, longitude, height."""
    lat, lon, height = origin
    geocentric = np.eye(4)
    geocentric[:3, :3] = enu_axes(lat, lon).T
    geocentric[:3, 3] = to_geocentric(np.array(origin))
    return {
        "frame": "metres, x east, y north, z up of the origin",
        "origin": {"latitude": lat, "longitude": lon, "height": height, "crs": "EPSG:4979"},
        "scene_to_geocentric": {"matrix": geocentric.tolist(), "crs": "EPSG:4978"},
    }


def model_facts(fit: Fit) -> dict[str, Any]:
    """Return what a sidecar says of the frame that the model had before."""
    return {"model_to_scene": fit.similarity.matrix()[:3].tolist()}


def georeference(
    centers: Mapping[str, NDArray[np.float64]], positions: Mapping[str, tuple[float, float, float]]
) -> Georeference:
    """Fit cameras to the positions of their images. Raises PositionsError.

    centers: name of the image -> [3] position of its camera in the model.
    positions: name -> latitude, longitude, height; of some images, see position_of().
    """
    known = {name: positions[name] for name in sorted(centers) if name in positions}
    if not known:
        raise PositionsError("no image has a GPS position with a height")
    places = np.array(list(known.values()))
    origin = median_place(places)
    fit = fit_similarity(np.stack([centers[name] for name in known]), to_enu(places, origin))
    lat, lon, height = map(float, origin)
    return Georeference((lat, lon, height), fit, tuple(known))


def write_sidecar(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the sidecar of a scene into its folder, where read_sidecar() finds it."""
    (folder / FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def place_of(sidecar: Mapping[str, Any] | None) -> tuple[float, float, float] | None:
    """Return latitude, longitude and height of the origin of a scene with this sidecar; None where it has none."""
    origin = None if sidecar is None else sidecar.get("origin")
    return None if origin is None else (float(origin["latitude"]), float(origin["longitude"]), float(origin["height"]))


def offset_text(offset: Sequence[float]) -> str:
    """Return how positions of a scene that was moved become those of its input, for comments in files and notes."""
    return f"add {' '.join(f'{value:.15g}' for value in offset)} to positions for the input's coordinates"


def place_text(place: Sequence[float]) -> str:
    """Return a text that says where a scene lies, for comments in files and notes."""
    numbers = " ".join(f"{value:.9g}" for value in place)
    return f"metres, x east, y north, z up (in a PLY's frame) of latitude, longitude, height {numbers} (EPSG:4979)"


def read_sidecar(folder: Path, model: str | None = None) -> dict[str, Any] | None:
    """Read the sidecar of a scene; None without one. Raises SceneError for one that is damaged.

    model: folder of the COLMAP model in use, where one was named. ``splat sfm`` aligns only the largest, ``sparse/0``:
    there is no sidecar of ``sparse/1`` and so on.
    """
    if model is not None and (number := Path(model).name).isdigit() and int(number) != 0:
        return None
    file = folder / FILE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        place = place_of(content)
        if place is not None and not (abs(place[0]) <= 90 and abs(place[1]) <= 180 and math.isfinite(place[2])):
            raise ValueError("its origin is no place on the Earth")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise SceneError(
            f"is no georeference of a scene: {error}", where=file, remedy="remove it, or run splat sfm --overwrite"
        ) from None
    return dict(content)
