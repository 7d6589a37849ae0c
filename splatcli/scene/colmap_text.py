"""COLMAP's text files: whole names, counts, and the line that is not as it should be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from splatcli.errors import SceneError
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.colmap_audit import MODEL_PARAMS, UNKNOWN_MODEL_REMEDY

_REMEDY = "correct the line, or copy the model again from where it was made"


def count_text_images(path: Path) -> int:
    """The number of images in images.txt."""
    return sum(1 for _ in _image_lines(path))


def text_names(path: Path) -> dict[int, str]:
    """Image id -> name in images.txt; pycolmap cuts names at the first space."""
    rows = (line.split(maxsplit=9) for _, line, _ in _image_lines(path))
    return {int(row[0]): row[9] for row in rows if len(row) == 10 and row[0].isdecimal()}


def data_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number from 1, line without the space around it) of each line that is neither empty nor a comment."""
    return ((number, line) for number, line in _lines(path) if line and not line.startswith("#"))


def text_fault(folder: Path) -> SceneError | None:
    """What is wrong with the first line of cameras.txt or images.txt that is not as it should be; None if all are."""
    return _camera_fault(folder / "cameras.txt") or _image_fault(folder / "images.txt")


def point_fault(path: Path) -> SceneError | None:
    """The same for points3D.txt."""
    for number, line in data_lines(path):
        fields = line.split()
        if len(fields) < 8 or len(fields) % 2 or not _all(float, fields):
            return _fault(path, number, "expected POINT3D_ID X Y Z R G B ERROR TRACK...")
    return None


def _camera_fault(path: Path) -> SceneError | None:
    seen: dict[int, int] = {}
    for number, line in data_lines(path):
        fields = line.split()
        if len(fields) < 5 or not _all(int, fields[0:1] + fields[2:4]) or not _all(float, fields[4:]):
            return _fault(path, number, "expected CAMERA_ID MODEL WIDTH HEIGHT PARAMS...")
        camera_id, model = int(fields[0]), pycolmap.CameraModelId.__members__.get(fields[1])
        if model is None or int(model) not in MODEL_PARAMS:
            return _fault(path, number, f"camera {camera_id} has the unknown model {fields[1]}", UNKNOWN_MODEL_REMEDY)
        if len(fields) - 4 != MODEL_PARAMS[int(model)]:
            wanted = MODEL_PARAMS[int(model)]
            return _fault(
                path,
                number,
                f"camera {camera_id} is {fields[1]}, which has {wanted} parameters, not {len(fields) - 4}",
                "name the model that has these parameters, e.g. OPENCV for fx fy cx cy k1 k2 p1 p2",
            )
        if int(fields[2]) < 1 or int(fields[3]) < 1:
            return _fault(path, number, f"camera {camera_id} is {fields[2]}x{fields[3]} pixels large")
        if camera_id in seen:
            return _fault(path, number, f"camera {camera_id} is there already, in line {seen[camera_id]}")
        seen[camera_id] = number
    return None


def _image_fault(path: Path) -> SceneError | None:
    seen: dict[int, int] = {}
    for number, line, observations in _image_lines(path):
        fields = line.split(maxsplit=9)
        if len(fields) < 10 or not _all(int, [fields[0], fields[8]]) or not _all(float, fields[1:8]):
            return _fault(path, number, "expected IMAGE_ID QW QX QY QZ TX TY TZ CAMERA_ID NAME")
        triples = observations.split()
        if len(triples) % 3 or not _all(float, triples):
            return _fault(
                path, number + 1, "expected X Y POINT3D_ID for each observation of the image above, or an empty line"
            )
        if int(fields[0]) in seen:
            return _fault(path, number, f"image {fields[0]} is there already, in line {seen[int(fields[0])]}")
        seen[int(fields[0])] = number
    return None


def _fault(path: Path, number: int, why: str, remedy: str = _REMEDY) -> SceneError:
    return SceneError(f"this line is not as it should be: {why}", where=f"{path}:{number}", remedy=remedy)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    # Bytes that are no UTF-8 must not end the search for the faulty line; a byte order mark is no part of the text.
    with path.open(encoding="utf-8-sig", errors="replace", newline="\n") as file:
        for number, line in enumerate(file, 1):
            yield number, line.strip()


def _image_lines(path: Path) -> Iterator[tuple[int, str, str]]:
    """(line number, pose line, observation line) of each image in images.txt."""
    lines = _lines(path)
    for number, line in lines:
        if line and not line.startswith("#"):
            yield number, line, next(lines, (0, ""))[1]


def _all(kind: type[int] | type[float], fields: list[str]) -> bool:
    try:
        for text in fields:
            kind(text)
    except ValueError:
        return False
    return True
