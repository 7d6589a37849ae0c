"""Agisoft Metashape's cameras (File, Export, Export Cameras, Agisoft XML)."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from splatcli.config import DataConfig
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.foreign_lenses import MAX_SKEW, Brown, colmap_camera
from splatcli.scene.geodesy import enu_axes, from_geocentric
from splatcli.scene.panorama import EQUIRECTANGULAR
from splatcli.scene.parsing import (
    ROTATION_TOLERANCE,
    ImageNames,
    check_size,
    head,
    only_one,
    parse_xml,
    points_beside,
    viewmat_of,
    with_suffix,
)
from splatcli.scene.source import Entry, FixedLens, Problems, Reader, SceneSource, View
from splatcli.similarity import Similarity
from splatcli.sizes import counted

FILES = "cameras of Metashape (XML)"
_EXPORT = "export the cameras again: File, Export, Export Cameras, Agisoft XML"
#: Distances from the Earth's centre, metres, at which coordinates are geocentric.
_EARTH = (6.3e6, 6.4e6)
_NO_OFFSET = "part of a multi-camera rig whose slave sensors have no offset from the master in the file"
_NUMBERS = ("f", "cx", "cy", "b1", "b2", "k1", "k2", "k3", "k4", "p1", "p2", "p3", "p4")


def read_metashape(root: Path, data: DataConfig, problems: Problems) -> SceneSource:
    """Read the aligned cameras of the one chunk that has any, in the coordinates of that chunk's world."""
    whole = Entry(only_one(_files(root), "Metashape cameras"), remedy=_EXPORT)
    check_size(whole.file)
    chunk = _chunk(parse_xml(whole.file, _EXPORT), whole)
    names = ImageNames(root, data)
    notes: list[str] = []
    sensors = {sensor.get("id", "") for sensor in chunk.iterfind("sensors/sensor")}
    lenses = _lenses(chunk, whole, problems, notes)
    placements, only = _placements(chunk, whole, notes)
    views: list[View] = []
    skipped: Counter[str] = Counter()
    elements = [*chunk.iterfind("cameras//camera")]
    masters = {element.get("id"): element for element in elements if element.find("transform") is not None}
    offsets = _offsets(chunk, whole, problems)
    for element in elements:
        master = element if element.find("transform") is not None else masters.get(element.get("master_id"))
        sensor = element.get("sensor_id", "")
        reason = _why_not(element, master, offsets.get(sensor), only)
        if reason is not None or master is None:
            skipped[reason or ""] += 1
            continue
        entry = _entry(element, whole)
        with problems.collect():
            lens = lenses.get(sensor)
            if lens is None:
                if sensor not in sensors:
                    raise entry.error("its sensor is not in the file")
                continue  # its lens is a problem already
            placement = placements.get(master.get("component_id"), placements[None])
            matrix = _numbers(master.find("transform"), 16, "its transform", entry).reshape(4, 4)
            matrix = matrix @ offsets.get(sensor, np.eye(4))
            rotation = placement.rotation @ matrix[:3, :3]
            center = placement.scale * placement.rotation @ matrix[:3, 3] + placement.shift
            name = names(element.get("label", ""))
            views.append(View(name, lens, viewmat_of(rotation, center, entry, opengl=False), entry.label))
    where = "of the Metashape chunk"
    notes += [
        f"{counted(count, f'camera {where} is', f'cameras {where} are')} {reason}" for reason, count in skipped.items()
    ]
    views, place = _locally(views, notes)
    source = SceneSource(root, whole.file, views, [root / "images", root], place=place, notes=notes)
    with problems.collect():
        points = points_beside(whole.file, data.max_points)
        if place is not None and points is not None:
            notes.append(f"{points.file.name} is not used: of a geocentric chunk, points have other coordinates")
        else:
            source.points = points
    return source


def _files(root: Path) -> list[Path]:
    return [path for path in with_suffix(root, ".xml") if "<chunk" in (start := head(path)) and "<document" in start]


def _entry(element: ET.Element, whole: Entry) -> Entry:
    """Return a camera or a sensor as errors name it."""
    return whole.named(f"{element.tag} {element.get('id', '?')} {element.get('label', '')!r}")


def _chunk(document: ET.Element, whole: Entry) -> ET.Element:
    chunks = [chunk for chunk in document.iter("chunk") if chunk.find("cameras//camera/transform") is not None]
    if len(chunks) > 1:
        names = ", ".join(chunk.get("label", "?") for chunk in chunks)
        what = f"has several chunks with aligned cameras: {names}"
        raise whole.error(what, "align and merge them in Metashape, or export one of them")
    if not chunks:
        raise whole.error("has no aligned camera", "align the photos in Metashape and export again")
    return chunks[0]


def _why_not(
    camera: ET.Element, master: ET.Element | None, offset: NDArray[np.float64] | None, only: str | None
) -> str | None:
    """Return why a camera is passed over, for a note; None for one that is a view.

    master: the camera with the pose, mostly this one itself.
    """
    if master is None:
        return "not aligned"
    if camera.get("enabled", "1").lower() in ("0", "false"):
        return "disabled"
    if master is not camera and offset is None:
        return _NO_OFFSET
    return "of another component" if only is not None and master.get("component_id") != only else None


def _offsets(chunk: ET.Element, whole: Entry, problems: Problems) -> dict[str, NDArray[np.float64]]:
    """Return [4, 4], slave to master, by the sensors of rigs, in the chunk's unit; none for one without an offset."""
    sensors = [*chunk.iterfind("sensors/sensor")]
    offsets = {master: np.eye(4) for sensor in sensors if (master := sensor.get("master_id")) is not None}
    for sensor in sensors:
        parts = [sensor.find("rotation"), sensor.find("location")]
        if "master_id" not in sensor.attrib or not any(part is not None and part.text for part in parts):
            continue
        with problems.collect():
            offset = np.eye(4)
            if parts[0] is not None and parts[0].text:
                offset[:3, :3] = _numbers(parts[0], 9, "its rotation", _entry(sensor, whole)).reshape(3, 3)
            if parts[1] is not None and parts[1].text:
                offset[:3, 3] = _numbers(parts[1], 3, "its location", _entry(sensor, whole))
            offsets[sensor.get("id", "")] = offset
    return offsets


def _lenses(chunk: ET.Element, whole: Entry, problems: Problems, notes: list[str]) -> dict[str, FixedLens]:
    elements = [*chunk.iterfind("cameras//camera")]
    posed = {camera.get("id") for camera in elements if camera.find("transform") is not None}
    used = {camera.get("sensor_id", "") for camera in elements if {camera.get("id"), camera.get("master_id")} & posed}
    lenses = {}
    for sensor in chunk.iterfind("sensors/sensor"):
        number = sensor.get("id", "")
        if number not in used:
            continue
        entry = _entry(sensor, whole)
        with problems.collect():
            lenses[number] = FixedLens(entry.file, entry.label, _lens(sensor, entry, notes))
    return lenses


def _lens(sensor: ET.Element, entry: Entry, notes: list[str]) -> pycolmap.Camera:
    found = sorted(sensor.findall("calibration"), key=lambda one: one.get("class") != "adjusted")
    if found:
        calibration = found[0]
    else:  # a panorama has nothing to be calibrated
        calibration = sensor if sensor.get("type") == "spherical" else _of_pixels(sensor, entry, notes)
    kind = calibration.get("type") or sensor.get("type") or "frame"
    resolution = calibration.find("resolution")
    resolution = sensor.find("resolution") if resolution is None else resolution
    if resolution is None:
        raise entry.error("no resolution")
    width, height = (round(entry.text_number(resolution.get(key), key)) for key in ("width", "height"))
    if kind == "spherical":
        return colmap_camera(EQUIRECTANGULAR, width, height, [width, height], entry)
    values = {name: entry.text_number(calibration.findtext(name, "0"), name) for name in _NUMBERS}
    # Metashape's p1 is the factor of r^2 + 2 x^2, OpenCV's p2. The offset is from the middle of the image, whose upper
    # left corner is (0, 0).
    focal, p1, p2, skew = [values["f"] + values["b1"], values["f"]], values["p2"], values["p1"], values["b2"]
    center = [width / 2 + values["cx"], height / 2 + values["cy"]]
    if calibration.find("f") is None:
        # PhotoScan before 1.2: two focal lengths, the principal point from the corner, and OpenCV's p1 and p2.
        focal = [entry.text_number(calibration.findtext(name), name) for name in ("fx", "fy")]
        defaults = {"cx": width / 2, "cy": height / 2, "skew": 0.0}
        *center, skew = (
            entry.text_number(calibration.findtext(name, str(default)), name) for name, default in defaults.items()
        )
        p1, p2 = values["p1"], values["p2"]
    shift = abs(skew) * max(center[1], height - center[1]) / focal[1] if focal[1] > 0 else 0.0
    if shift > MAX_SKEW:
        raise entry.error(
            f"its pixels are skewed (b2 = {skew:g}, {shift:.2g} pixels at the edge), which COLMAP's models lack",
            "optimise the cameras without b2, or export undistorted images",
        )
    if skew:
        notes.append(
            f"{entry.label}: its skew b2 is left out, which shifts the edge of the image by {shift:.2g} pixels"
        )
    if values["p3"] or values["p4"]:
        raise entry.error(
            "its tangential distortion has the terms p3 and p4, which no model of COLMAP has",
            "optimise the cameras without p3 and p4, or export undistorted images",
        )
    radial = [values[f"k{i}"] for i in (1, 2, 3, 4)]
    if kind == "frame":
        return Brown(focal[0], focal[1], center[0], center[1], radial, (p1, p2)).camera(width, height, entry)
    if kind in ("fisheye", "equidistant_fisheye"):
        params = [*focal, *center, radial[0], radial[1], p1, p2, radial[2], radial[3], 0.0, 0.0]
        return colmap_camera("THIN_PRISM_FISHEYE", width, height, params, entry)
    raise entry.error(
        f"cameras of the type {kind!r} are not read",
        "frame, fisheye and spherical cameras are; convert the others to perspective views in Metashape (File, Export, "
        "Convert Images)",
    )


def _of_pixels(sensor: ET.Element, entry: Entry, notes: list[str]) -> ET.Element:
    """Return the calibration of a sensor without one, as of cameras that were imported with their poses.

    Metashape takes the focal length of its lens and the size of its pixels, both in millimetres, and no distortion.
    """
    given = {one.get("name"): one.get("value") for one in sensor.iterfind("property")}
    names = ("focal_length", "pixel_width", "pixel_height")
    if not given.keys() >= {*names}:
        raise entry.error("it is not calibrated", "align the photos, and export again")
    focal, wide, high = (entry.text_number(given[name], name) for name in names)
    if not (focal > 0 and wide > 0 and high > 0):
        what = "its focal length or its pixels' size is not positive"
        raise entry.error(what, f"correct them (Tools, Camera Calibration), and {_EXPORT}")
    calibration = ET.Element("calibration")
    ET.SubElement(calibration, "f").text = repr(focal / high)
    ET.SubElement(calibration, "b1").text = repr(focal / wide - focal / high)
    notes.append(
        f"{entry.label}: it is not calibrated: its focal length, {focal / wide:.6g} pixels, is that of its lens and "
        "the size of its pixels, and it has no distortion"
    )
    return calibration


def _numbers(element: ET.Element | None, count: int, name: str, entry: Entry) -> NDArray[np.float64]:
    return np.array(entry.text_numbers(None if element is None else element.text, count, name))


def _placements(chunk: ET.Element, whole: Entry, notes: list[str]) -> tuple[dict[str | None, Similarity], str | None]:
    """Return placements by component, that of the chunk under None; and the largest one, if no frame is common."""
    placements: dict[str | None, Similarity] = {None: _placement(chunk.find("transform"), whole.named("the chunk"))}
    aligned = Counter(
        camera.get("component_id")
        for camera in chunk.iterfind("cameras//camera")
        if _why_not(camera, None if camera.find("transform") is None else camera, None, None) is None
    )
    placed = True
    for component in chunk.iterfind("components/component"):
        number = component.get("id")
        transform = component.find("transform")
        if transform is not None:
            placements[number] = _placement(transform, whole.named(f"component {number}"))
        elif number in aligned:
            placed = False
    if len(aligned) < 2 or placed:
        return placements, None
    largest = aligned.most_common(1)[0][0]
    notes.append("the chunk has several components without a common frame: the largest is used")
    return placements, largest


def _placement(transform: ET.Element | None, entry: Entry) -> Similarity:
    """Return the similarity from a chunk's or a component's own frame to the world."""
    if transform is None:
        return Similarity()
    rotation, translation, scale = np.eye(3), np.zeros(3), 1.0
    with np.errstate(all="ignore"):  # of numbers that are too large the comparison is false
        if not len(transform):
            matrix = _numbers(transform, 16, "its transform", entry).reshape(4, 4)
            scale = float(np.cbrt(np.linalg.det(matrix[:3, :3])))
            rotation, translation = matrix[:3, :3] / (scale or 1.0), matrix[:3, 3]
        if transform.find("rotation") is not None:
            rotation = _numbers(transform.find("rotation"), 9, "its rotation", entry).reshape(3, 3)
        if transform.find("translation") is not None:
            translation = _numbers(transform.find("translation"), 3, "its translation", entry)
        if transform.find("scale") is not None:
            scale = float(_numbers(transform.find("scale"), 1, "its scale", entry)[0])
        is_rotation = np.abs(rotation.T @ rotation - np.eye(3)).max() <= ROTATION_TOLERANCE
    if not (scale > 0 and is_rotation):
        raise entry.error("its transform is no rotation with a scale")
    return Similarity(scale, rotation, translation)


def _locally(views: list[View], notes: list[str]) -> tuple[list[View], tuple[float, float, float] | None]:
    """Return views, geocentric ones in metres east, north and up of their middle; and that place, None for others."""
    if not views:
        return views, None
    middle = np.mean([view.center for view in views], axis=0)
    if not _EARTH[0] < np.linalg.norm(middle) < _EARTH[1]:
        return views, None
    lat, lon, height = from_geocentric(middle)
    axes = enu_axes(lat, lon)
    moved = []
    for view in views:
        viewmat = np.eye(4)
        viewmat[:3, :3] = view.viewmat[:3, :3] @ axes.T
        viewmat[:3, 3] = -viewmat[:3, :3] @ axes @ (view.center - middle)
        moved.append(View(view.name, view.lens, viewmat, view.label))
    notes.append(
        f"the chunk is geocentric: the scene is in metres east, north and up of {lat:.7f}, {lon:.7f}, {height:.2f} m"
    )
    return moved, (lat, lon, height)


READER = Reader("metashape", FILES, lambda root: bool(_files(root)), read_metashape)
