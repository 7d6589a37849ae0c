"""Places on the WGS 84 ellipsoid: latitude, longitude and height, geocentric metres, and metres east, north and up."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

#: WGS 84: semi-major axis in metres, and flattening.
_A, _F = 6378137.0, 1 / 298.257223563
_E2 = _F * (2 - _F)
#: Bowring's iteration for the latitude gains four digits a step near the ground.
_STEPS = 5


def to_geocentric(places: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return [N, 3], metres in the Earth's frame (EPSG:4978).

    places: [N, 3] latitude and longitude in degrees and height in metres.
    """
    lat, lon = np.radians(places[..., 0]), np.radians(places[..., 1])
    height = places[..., 2]
    normal = _A / np.sqrt(1 - _E2 * np.sin(lat) ** 2)
    return np.stack(
        [
            (normal + height) * np.cos(lat) * np.cos(lon),
            (normal + height) * np.cos(lat) * np.sin(lon),
            (normal * (1 - _E2) + height) * np.sin(lat),
        ],
        axis=-1,
    )


def from_geocentric(point: NDArray[np.float64]) -> tuple[float, float, float]:
    """Return latitude and longitude in degrees and height in metres of a point [3] in the Earth's frame."""
    x, y, z = map(float, point)
    across = math.hypot(x, y)
    lat = math.atan2(z, across * (1 - _E2))
    for _ in range(_STEPS):
        normal = _A / math.sqrt(1 - _E2 * math.sin(lat) ** 2)
        lat = math.atan2(z + _E2 * normal * math.sin(lat), across)
    normal = _A / math.sqrt(1 - _E2 * math.sin(lat) ** 2)
    height = across * math.cos(lat) + z * math.sin(lat) - _A * _A / normal
    return math.degrees(lat), math.degrees(math.atan2(y, x)), height


def median_place(places: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return [3], the medians of latitude, longitude and height [N, 3], also across the 180th meridian."""
    middle: NDArray[np.float64] = np.median(places, axis=0)
    if np.ptp(places[:, 1]) > 180.0:
        middle[1] = (np.median(places[:, 1] % 360.0) + 180.0) % 360.0 - 180.0
    return middle


def enu_axes(lat: float, lon: float) -> NDArray[np.float64]:
    """Return [3, 3], whose rows are the directions east, north and up at a place, in the Earth's frame."""
    sin_lat, cos_lat = math.sin(math.radians(lat)), math.cos(math.radians(lat))
    sin_lon, cos_lon = math.sin(math.radians(lon)), math.cos(math.radians(lon))
    return np.array(
        [
            [-sin_lon, cos_lon, 0.0],
            [-sin_lat * cos_lon, -sin_lat * sin_lon, cos_lat],
            [cos_lat * cos_lon, cos_lat * sin_lon, sin_lat],
        ]
    )


def to_enu(places: NDArray[np.float64], origin: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return [N, 3], metres east, north and up of ``origin`` [3]; places and origin are latitude, longitude, height."""
    away = to_geocentric(places) - to_geocentric(origin)
    return np.asarray(away @ enu_axes(float(origin[0]), float(origin[1])).T)
