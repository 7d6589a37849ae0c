"""Positions of a drone along a video: the subtitles that DJI's drones write beside it (``DJI_0001.SRT``).

An entry has the time of a frame, or of each second, and a text such as ``[latitude: 47.1] [longitude: 8.5]
[rel_alt: 12.3 abs_alt: 512.3]``; some have ``[altitude: 512.3]``, spaces before the colons, or ``longtitude``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from splatcli.errors import SceneError

Place = tuple[float, float, float]

_TIME = re.compile(r"(\d+):(\d\d):(\d\d)[,.](\d{1,3})\s*-->")
_VALUE = re.compile(r"\b(latitude|longtitude|longitude|abs_alt|altitude|rel_alt)\s*:\s*([-+]?\d+(?:\.\d+)?)")
#: Entries for the height, the best first.
_HEIGHTS = ("abs_alt", "altitude", "rel_alt")
#: Seconds before the first position and after the last for which these are taken.
_BEYOND = 1.0
#: Bytes of a file that is read: hours of a video at 60 frames a second.
_LARGEST = 512 << 20


@dataclass(frozen=True, slots=True, eq=False)
class FlightLog:
    """seconds: [N] ascending, from the start of the video. places: [N, 3] latitude, longitude, height."""

    seconds: NDArray[np.float64]
    places: NDArray[np.float64]

    def at(self, seconds: float) -> Place | None:
        """Return the position at a time, between recorded ones linearly; None before and after the recording."""
        if not self.seconds[0] - _BEYOND <= seconds <= self.seconds[-1] + _BEYOND:
            return None
        # Longitudes jump by 360 degrees where the flight crosses the 180th meridian.
        lats, lons, heights = self.places.T
        columns = lats, np.unwrap(lons, period=360.0), heights
        lat, lon, height = (float(np.interp(seconds, self.seconds, column)) for column in columns)
        return lat, lon if abs(lon) <= 180.0 else (lon + 180.0) % 360.0 - 180.0, height


def flight_log_beside(video: Path) -> Path | None:
    """Return the file of subtitles that has the name of a video, or None."""
    for suffix in (".SRT", ".srt"):
        if (path := video.with_suffix(suffix)).is_file():
            return path
    return None


def read_flight_log(path: Path) -> FlightLog | None:
    """Return the positions in a file of subtitles; None where it has none. Raises SceneError."""
    try:
        if path.stat().st_size > _LARGEST:
            raise SceneError("is too large for subtitles", where=path, remedy="move it away from beside its video")
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise SceneError(f"cannot be read: {error.strerror}", where=path, remedy="check its permissions") from None
    entries = list(_TIME.finditer(text))
    ends = [*(entry.start() for entry in entries[1:]), len(text)][: len(entries)]
    seconds: list[float] = []
    places: list[Place] = []
    for entry, end in zip(entries, ends, strict=True):
        place = _place_in(text[entry.end() : end])
        hours, minutes, whole, thousandths = entry.groups()
        time = int(hours) * 3600 + int(minutes) * 60 + int(whole) + int(thousandths.ljust(3, "0")) / 1000
        # A position stays the same until the receiver has the next one, a few times a second: the first counts.
        if place is not None and (not places or place != places[-1]) and (not seconds or time > seconds[-1]):
            seconds.append(time)
            places.append(place)
    return FlightLog(np.array(seconds), np.array(places)) if places else None


def _place_in(text: str) -> Place | None:
    values = {name.replace("longt", "long"): float(value) for name, value in _VALUE.findall(text)}
    height = next((values[name] for name in _HEIGHTS if name in values), None)
    lat, lon = values.get("latitude"), values.get("longitude")
    if lat is None or lon is None or height is None:
        return None
    return (lat, lon, height) if abs(lat) <= 90 and abs(lon) <= 180 and (lat, lon) != (0.0, 0.0) else None
