"""RealityCapture's and RealityScan's cameras: a table (Internal/External camera parameters), or an XMP file an image.

The table has angles, or, "OpenCV-compliant", matrices and pixels. The templates of the exports (calibration.xml) and
Epic's "RealityCapture XMP Camera Math" say what the numbers mean.
"""

from __future__ import annotations

import csv
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from splatcli.config import DataConfig
from splatcli.errors import SceneError
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.find_images import images_below
from splatcli.scene.foreign_lenses import MAX_SKEW, Brown
from splatcli.scene.parsing import (
    ImageNames,
    check_size,
    head,
    only_one,
    parse_xml,
    points_beside,
    read_text,
    turn_about,
    viewmat_of,
    with_suffix,
)
from splatcli.scene.source import Entry, Problems, Reader, SceneSource, View
from splatcli.sizes import counted

FILES = "cameras of RealityCapture (CSV or XMP)"
_EXPORT = "export the registration again as Internal/External camera parameters"
_EDIT_LINE = "correct or remove that line"
_EXPORT_XMP = "export the XMP files again: Alignment, Export, Metadata (XMP), with camera poses"
#: Names of the columns in the newer files -> those in the older ones.
_NAMES = {"yaw": "heading", "f_35mm": "f", "px_norm": "px", "py_norm": "py"}
_NEEDED = {"name", "x", "y", "alt", "heading", "pitch", "roll", "f"}
#: Those of the OpenCV-compliant table: world to camera, R row by row.
_TRANSLATION, _ROTATION = ("tx", "ty", "tz"), tuple(f"r{row}{column}" for row in range(3) for column in range(3))
_PIXELS = ("f_pix", "px_pix", "py_pix")
_NEEDED_OPENCV = {"name", *_TRANSLATION, *_ROTATION, *_PIXELS}
_COEFFICIENTS = ("k1", "k2", "k3", "k4", "t1", "t2")
_OPTIONAL = ("px", "py", *_COEFFICIENTS)
#: What separates the cells of a table; those after the first are what spreadsheets write where decimals have commas.
_DELIMITERS = ",;\t"
#: Lines before the header: the number of cameras, or remarks.
_BEFORE = 20
#: Millimetres of the longer side of 35 mm film.
_FILM = 36.0
#: Part of an image's side by which a principal point may lie off the middle. Images of half the size are farther off.
_OFF_MIDDLE = 0.25
#: Degrees that the cameras of a scene may be apart, and how many times further from zero they are then.
_DEGREES_APART, _DEGREES_AWAY = 0.2, 50.0

#: The start of RealityCapture's namespace in XMP files, whatever its version.
_XCR = "http://www.capturingreality.com/ns/xcr/"
#: Distortion models in XMP files that are Brown's; their six coefficients are in the order of _COEFFICIENTS.
_BROWN = ("perspective", "brown3", "brown4", "brown3t2", "brown4t2")
#: The part of the images that must have an XMP file: fewer are remains, and the folder holds images without cameras.
_LEAST_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class FilmLens:
    """A lens in units of the image's longer side; the principal point is from the middle of the image.

    skew: relative to the focal length. aspect: of the focal lengths.
    """

    file: Path
    label: str
    focal: float
    offset: tuple[float, float]
    radial: tuple[float, ...]
    tangential: tuple[float, float]
    skew: float = 0.0
    aspect: float = 1.0

    def __call__(self, width: int, height: int) -> pycolmap.Camera:
        side = max(width, height)
        shift = max(abs(self.skew) / self.focal, abs(self.aspect - 1.0)) * side / 2
        if shift > MAX_SKEW:
            raise Entry(self.file, self.label).error(
                f"its pixels are skewed or stretched (skew {self.skew:g}, aspect ratio {self.aspect:g}), by "
                f"{shift:.2g} pixels at the edge, which is not corrected",
                "align with a distortion model without K+, or export undistorted images",
            )
        focal = self.focal * side
        center = (width / 2 + self.offset[0] * side, height / 2 + self.offset[1] * side)
        lens = Brown(focal, focal, *center, self.radial, self.tangential)
        return lens.camera(width, height, Entry(self.file, self.label))


@dataclass(frozen=True, slots=True)
class PixelLens:
    """A lens in pixels of the image, whatever its size: the table does not have it.

    center: from the upper left corner. tangential: in OpenCV's order.
    """

    file: Path
    label: str
    focal: float
    center: tuple[float, float]
    radial: tuple[float, ...]
    tangential: tuple[float, float]

    def __call__(self, width: int, height: int) -> pycolmap.Camera:
        x, y = self.center
        if max(abs(x / width - 0.5), abs(y / height - 0.5)) > _OFF_MIDDLE:
            raise Entry(self.file, self.label).error(
                f"its principal point ({x:g}, {y:g}) is not near the middle of its {width}x{height} pixels: the table "
                f"is of images of about {2 * x:.0f}x{2 * y:.0f}",
                "use the images that were aligned, at their size; or export Internal/External camera parameters, which "
                "suit every size",
            )
        lens = Brown(self.focal, self.focal, *self.center, self.radial, self.tangential)
        return lens.camera(width, height, Entry(self.file, self.label))


def read_realitycapture(root: Path, data: DataConfig, problems: Problems) -> SceneSource:
    """Read the cameras of the table, else of the XMP files, in their coordinates: z up, x east, y north if placed."""
    files = _files(root)
    if not files:
        return _read_xmp(root, data, problems)
    names = ImageNames(root, data)
    file = only_one(files, "RealityCapture cameras")
    check_size(file)
    views = []
    rows = _rows(file)
    opencv = rows[0][1].keys() >= _NEEDED_OPENCV
    for line, row in rows:
        with problems.collect():
            entry = Entry(file, f"camera {row['name']!r}", _EDIT_LINE, line)
            if not row["name"]:
                raise entry.named("").error("has no name of an image")
            lens, viewmat = (_described_opencv if opencv else _described)(row, entry)
            views.append(View(names(row["name"]), lens, viewmat, entry.label))
    if not opencv:
        _check_metres(views, file)
    source = SceneSource(root, file, views, [root / "images", root])
    with problems.collect():
        source.points = points_beside(file, data.max_points)
    return source


# --- the table --------------------------------------------------------------------------------------------------------


def _files(root: Path) -> list[Path]:
    return [path for path in with_suffix(root, ".csv") if _header(head(path).split("\n"))]


def _header(lines: list[str]) -> tuple[int, list[str], str] | None:
    """Return the line of the header, the names of the columns and what separates them; None where there is none."""
    for number, line in enumerate(lines[: _BEFORE + 1]):
        for delimiter in _DELIMITERS:
            names = [name.strip().strip('"').lstrip("#").strip().lower() for name in line.split(delimiter)]
            names = [_NAMES.get(name, name) for name in names]
            if set(names) >= _NEEDED or set(names) >= _NEEDED_OPENCV:
                return number, names, delimiter
    return None


def _rows(file: Path) -> list[tuple[int, dict[str, str]]]:
    """Return the rows by the names of their columns, with the number of their line."""
    lines = read_text(file).splitlines()
    found = _header(lines)
    assert found is not None
    number, names, delimiter = found
    rows = []
    try:
        for line, row in enumerate(csv.reader(lines[number + 1 :], delimiter=delimiter), number + 2):
            cells = [cell.strip() for cell in row]
            while cells and not cells[-1] and len(cells) > len(names):  # a delimiter at the end of the line
                cells.pop()
            if not any(cells) or cells[0].startswith("#"):
                continue
            if len(cells) != len(names):
                raise SceneError(
                    f"has {len(cells)} cells, the header {len(names)}",
                    where=f"{file}:{line}",
                    remedy="names with commas go into quotation marks, and decimals have points; or " + _EXPORT,
                )
            if delimiter != ",":
                cells = [
                    cell if name == "name" else cell.replace(",", ".") for name, cell in zip(names, cells, strict=True)
                ]
            rows.append((line, dict(zip(names, cells, strict=True))))
    except csv.Error as error:
        raise SceneError(f"not a table of comma-separated values: {error}", where=file, remedy=_EXPORT) from None
    if not rows:
        raise SceneError("has no camera", where=file, remedy="align the images, and " + _EXPORT)
    return rows


def _described(row: dict[str, str], entry: Entry) -> tuple[FilmLens, NDArray[np.float64]]:
    """Return the lens and the pose, [4, 4] world to camera, of a row with angles."""
    used = _NEEDED.union(_OPTIONAL) - {"name"}
    values = dict.fromkeys(_OPTIONAL, 0.0) | {n: entry.text_number(text, n) for n, text in row.items() if n in used}
    coefficients = [values[name] for name in _COEFFICIENTS]
    lens = _lens(values["f"], (values["px"], values["py"]), coefficients, entry)
    # Camera to world, OpenGL axes: zeros look down, the upper edge north; heading is clockwise.
    heading, pitch, roll = np.radians([-values["heading"], values["pitch"], values["roll"]])
    rotation = turn_about(2, heading) @ turn_about(0, pitch) @ turn_about(1, roll)
    center = np.array([values["x"], values["y"], values["alt"]])
    return lens, viewmat_of(rotation, center, entry, opengl=True)


def _described_opencv(row: dict[str, str], entry: Entry) -> tuple[PixelLens, NDArray[np.float64]]:
    """Return the lens and the pose, [4, 4] world to camera, of a row with a matrix."""
    rotation = np.array([entry.text_number(row[name], name) for name in _ROTATION]).reshape(3, 3)
    shift = np.array([entry.text_number(row[name], name) for name in _TRANSLATION])
    focal, *center = (entry.text_number(row[name], name) for name in _PIXELS)
    *radial, t1, t2 = (entry.text_number(row.get(name, "0"), name) for name in _COEFFICIENTS)
    _check_focal(focal, "f_pix", entry)
    lens = PixelLens(entry.file, entry.label, focal, (center[0], center[1]), tuple(radial), (t2, t1))
    return lens, viewmat_of(rotation.T, -rotation.T @ shift, entry, opengl=False)


def _check_focal(focal: float, name: str, entry: Entry) -> None:
    if not focal > 0:
        raise entry.error(f"{name} is {focal:g}; a focal length is positive", _EXPORT)


def _lens(focal: float, offset: tuple[float, float], coefficients: Sequence[float], entry: Entry) -> FilmLens:
    """Return the lens of a focal length in millimetres of 35 mm film, and of coefficients as in _COEFFICIENTS."""
    _check_focal(focal, "f", entry)
    *radial, t1, t2 = coefficients
    # t1 is the factor of r^2 + 2 x^2, OpenCV's p2: the export in OpenCV's order has k1, k2, t2, t1, k3.
    return FilmLens(entry.file, entry.label, focal / _FILM, offset, tuple(radial), (t2, t1))


def _check_metres(views: list[View], file: Path) -> None:
    """Raise SceneError for positions that are degrees of longitude and latitude beside metres of height."""
    if len(views) < 2:
        return
    places = np.array([view.center[:2] for view in views])
    apart = float(np.ptp(places, axis=0).max())
    inside = (np.abs(places) <= [180.0, 90.0]).all()
    if inside and apart < _DEGREES_APART and np.abs(places).max() > _DEGREES_AWAY * apart:
        x, y = places[0]
        raise SceneError(
            f"its positions, such as {x:.6f}, {y:.6f}, are degrees of longitude and latitude",
            where=file,
            remedy="export again in a metric coordinate system: the grid plane, local Euclidean, or a UTM zone",
        )


# --- XMP files --------------------------------------------------------------------------------------------------------


def _xmp_files(root: Path) -> list[Path]:
    """Return the XMP files with poses of RealityCapture, beside the images or in the scene's folder."""
    images = root / "images"
    below = sorted(path for path in images.rglob("*") if path.suffix.lower() == ".xmp" and path.is_file())
    for folder, files in ((images, below), (root, with_suffix(root, ".xmp"))):
        found = [file for file in files if _has_pose(file)]
        if found and len(found) >= _LEAST_SHARE * sum(1 for _ in images_below(folder)):
            return found
    return []


def _has_pose(file: Path) -> bool:
    start = head(file)
    return _XCR in start and "Rotation" in start and "Position" in start


def _read_xmp(root: Path, data: DataConfig, problems: Problems) -> SceneSource:
    files, folders, names = _xmp_files(root), [root / "images", root], ImageNames(root, data)
    views: dict[str, list[View]] = {}
    skewed = 0
    for file in files:
        with problems.collect():
            component, view = _xmp_view(file, root, names)
            views.setdefault(component, []).append(view)
            assert isinstance(view.lens, FilmLens)
            skewed += bool(view.lens.skew or view.lens.aspect != 1)
    counts = Counter({component: len(some) for component, some in views.items()})
    best = counts.most_common(1)[0][0] if counts else ""
    source = SceneSource(root, files[0], views.get(best, []), folders, incidental=True)
    if len(counts) > 1:
        source.notes.append(
            f"the largest component of RealityCapture is used, with {counted(counts[best], 'image')}; others have "
            + ", ".join(str(count) for component, count in counts.items() if component != best)
        )
    if skewed:
        of = f"of {counted(skewed, 'camera')}"
        source.notes.append(f"the skew and the aspect ratio {of} are left out: less than half a pixel")
    folder = next((folder for folder in folders if files[0].is_relative_to(folder)), root)
    without = sum(1 for _ in images_below(folder)) - len(files)
    if without > 0:
        what = "without a pose of RealityCapture"
        source.notes.append(counted(without, f"image {what} is left out", f"images {what} are left out"))
    with problems.collect():
        source.points = points_beside(root / "points.ply", data.max_points)
    return source


def _xmp_view(file: Path, root: Path, names: ImageNames) -> tuple[str, View]:
    """Return the component that a camera belongs to, and its view."""
    check_size(file)
    values = _xmp_values(parse_xml(file, _EXPORT_XMP))
    entry = Entry(file, f"camera {file.stem!r}", _EXPORT_XMP)

    def numbers(name: str, counts: tuple[int, ...], default: str = "") -> list[float]:
        text = values.get(name, default)
        count = len(text.split())
        return entry.text_numbers(text, count if count in counts else counts[0], name)

    model = values.get("DistortionModel", "perspective")
    if model not in _BROWN:
        raise entry.error(
            f"the distortion model {model!r} is not read, only {', '.join(_BROWN)}",
            "choose Brown3 or Brown4 (Alignment, Settings, Distortion model), align and export again; or export "
            "undistorted images",
        )
    projection = values.get("ProjectionModel", "perspective")
    if projection != "perspective":
        raise entry.error(f"images in {projection} projection are not read", "export perspective images")
    rotation = np.array(numbers("Rotation", (9,))).reshape(3, 3)  # world to camera, row by row
    center = np.array(numbers("Position", (3,)))
    coefficients = (numbers("DistortionCoeficients", (6, 3, 4), "0 0 0 0 0 0") + [0.0] * 3)[:6]
    (focal,) = numbers("FocalLength35mm", (1,))
    (u,), (v,) = numbers("PrincipalPointU", (1,), "0"), numbers("PrincipalPointV", (1,), "0")
    (skew,), (aspect,) = numbers("Skew", (1,), "0"), numbers("AspectRatio", (1,), "1")
    lens = replace(_lens(focal, (u, v), coefficients, entry), skew=skew, aspect=aspect)
    name = names(file.relative_to(root).with_suffix("").as_posix())
    view = View(name, lens, viewmat_of(rotation.T, center, entry, opengl=False), entry.label)
    return values.get("ComponentId", ""), view


def _xmp_values(document: ET.Element) -> dict[str, str]:
    """Return RealityCapture's properties by their names, whether they are attributes or elements."""
    values: dict[str, str] = {}
    for element in document.iter():
        pairs = [*element.attrib.items(), (element.tag, element.text or "")]
        for name, value in pairs:
            if name.startswith(f"{{{_XCR}"):
                values.setdefault(name.rpartition("}")[2], value.strip())
    return values


def _matches(root: Path) -> bool:
    return bool(_files(root)) or bool(_xmp_files(root))


READER = Reader("realitycapture", FILES, _matches, read_realitycapture)
