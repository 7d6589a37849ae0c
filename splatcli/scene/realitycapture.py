"""RealityCapture's and RealityScan's cameras (Export, Registration, Internal/External camera parameters, CSV)."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from splatcli.config import DataConfig
from splatcli.errors import SceneError
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.brown import Brown
from splatcli.scene.imported import check_size, head, image_name, only_one, points_beside, viewmat_of, with_suffix
from splatcli.scene.source import Problems, Reader, SceneSource, View

FILES = "cameras of RealityCapture (CSV)"
_EXPORT = "export the registration again as Internal/External camera parameters"
#: Names of the columns in the newer files -> those in the older ones.
_NAMES = {"yaw": "heading", "f_35mm": "f", "px_norm": "px", "py_norm": "py"}
_NEEDED = {"name", "x", "y", "alt", "heading", "pitch", "roll", "f"}
_OPTIONAL = ("px", "py", "k1", "k2", "k3", "k4", "t1", "t2")
#: Lines before the header, such as the number of cameras.
_BEFORE = 3
#: Millimetres of the longer side of 35 mm film.
_FILM = 36.0


@dataclass(frozen=True, slots=True)
class CsvLens:
    """A lens in units of the image's longer side; the principal point is from the middle of the image."""

    file: Path
    label: str
    focal: float
    offset: tuple[float, float]
    radial: tuple[float, ...]
    tangential: tuple[float, float]

    def __call__(self, width: int, height: int) -> pycolmap.Camera:
        side = max(width, height)
        focal = self.focal * side
        center = (width / 2 + self.offset[0] * side, height / 2 + self.offset[1] * side)
        return Brown(focal, focal, *center, self.radial, self.tangential).camera(width, height, self.file, self.label)


def read_realitycapture(root: Path, data: DataConfig, problems: Problems) -> SceneSource:
    """Read the cameras of the table, in its coordinates: x east, y north, alt up where the project is georeferenced."""
    file = only_one(_files(root), "RealityCapture cameras")
    check_size(file)
    folders = [root / "images", root]
    views = []
    for line, row in _rows(file):
        with problems.collect():
            views.append(_view(row, file, line, folders))
    source = SceneSource(root, file, views, folders)
    with problems.collect():
        source.points = points_beside(file, data.max_points)
    return source


def _files(root: Path) -> list[Path]:
    return [
        path for path in with_suffix(root, ".csv") if _header(head(path).decode("utf-8-sig", "replace").split("\n"))
    ]


def _header(lines: list[str]) -> tuple[int, list[str]] | None:
    """Return the line of the header and the names of the columns; None where there is none."""
    for number, line in enumerate(lines[: _BEFORE + 1]):
        names = [name.strip().lstrip("#").strip().lower() for name in line.split(",")]
        names = [_NAMES.get(name, name) for name in names]
        if set(names) >= _NEEDED:
            return number, names
    return None


def _rows(file: Path) -> list[tuple[int, dict[str, str]]]:
    """Return the rows by the names of their columns, with the number of their line."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise SceneError(f"not UTF-8 text: {error}", where=file, remedy=_EXPORT) from None
    found = _header(lines)
    assert found is not None
    number, names = found
    rows = []
    try:
        for line, row in enumerate(csv.reader(lines[number + 1 :]), number + 2):
            if row and any(cell.strip() for cell in row):
                rows.append((line, dict(zip(names, (cell.strip() for cell in row), strict=False))))
    except csv.Error as error:
        raise SceneError(f"not a table of comma-separated values: {error}", where=file, remedy=_EXPORT) from None
    if not rows:
        raise SceneError("has no camera", where=file, remedy="align the images, and " + _EXPORT)
    return rows


def _view(row: dict[str, str], file: Path, line: int, folders: list[Path]) -> View:
    where = f"{file}:{line}"
    if not row.get("name"):
        raise SceneError("has no name of an image", where=where, remedy="correct or remove that line")
    label = f"camera {row['name']!r}"
    values = {name: _number(row, name, where, label) for name in (_NEEDED - {"name"})}
    values |= {name: _number(row, name, where, label) if name in row else 0.0 for name in _OPTIONAL}
    if not values["f"] > 0:
        raise SceneError(f"{label}: f is {values['f']:g}; a focal length is positive", where=where, remedy=_EXPORT)
    lens = CsvLens(
        file,
        label,
        values["f"] / _FILM,
        (values["px"], values["py"]),
        tuple(values[f"k{i}"] for i in (1, 2, 3, 4)),
        # t1 is the factor of r^2 + 2 x^2, OpenCV's p2.
        (values["t2"], values["t1"]),
    )
    rotation = _rotation(values["heading"], values["pitch"], values["roll"])
    center = np.array([values["x"], values["y"], values["alt"]])
    name = image_name(row["name"], folders)
    return View(name, lens, viewmat_of(rotation, center, where, label, opengl=True), label)


def _number(row: dict[str, str], name: str, where: str, label: str) -> float:
    try:
        value = float(row.get(name, ""))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise SceneError(
            f"{label}: {name} is {row.get(name, '')!r}, not a number", where=where, remedy="correct or remove that line"
        )
    return value


def _rotation(heading: float, pitch: float, roll: float) -> NDArray[np.float64]:
    """Return [3, 3], camera to world, OpenGL axes: zeros look down, the upper edge north; heading is clockwise."""
    h, p, r = np.radians([-heading, pitch, roll])
    about_z = np.array([[np.cos(h), -np.sin(h), 0.0], [np.sin(h), np.cos(h), 0.0], [0.0, 0.0, 1.0]])
    about_x = np.array([[1.0, 0.0, 0.0], [0.0, np.cos(p), -np.sin(p)], [0.0, np.sin(p), np.cos(p)]])
    about_y = np.array([[np.cos(r), 0.0, np.sin(r)], [0.0, 1.0, 0.0], [-np.sin(r), 0.0, np.cos(r)]])
    return np.asarray(about_z @ about_x @ about_y)


READER = Reader("realitycapture", FILES, lambda root: bool(_files(root)), read_realitycapture)
