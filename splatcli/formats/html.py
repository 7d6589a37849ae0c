"""One page with a scene and a viewer in it, which opens from a disk, without a server and without the internet.

The viewer is SuperSplat's (MIT, in viewer/), the scene a SOG inside the page, which is what is read of it; or beside it
where a server has it. Pages that SuperSplat and splat-transform export are read too: today's, which are like these, and
older ones, whose scene is a PLY, mostly a compressed one, or a SOG in the address of an asset or of a request.
"""

from __future__ import annotations

import base64
import io
import json
import math
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from splatcli.checkpoint.foreign.imported import (
    ImportedModel,
)
from splatcli.errors import ModelFileError
from splatcli.formats.compressed_ply import import_compressed_ply, is_compressed_ply
from splatcli.formats.format import HEAD_BYTES, Encoded, ExportMetadata, Format, file_size
from splatcli.formats.ply import import_ply, is_ply
from splatcli.formats.sog import encode_sog, read_bundle
from splatcli.formats.transform import PLY_UP
from splatcli.gaussians import Gaussians
from splatcli.scene.camera import Camera

#: The places in the viewer's page that are filled in, each there once: its settings, its style, its script, its name;
#: in the script, how the scene is turned; and whether small Gaussians are as bright as they were trained
#: ("antialiased"), which the viewer takes from the page's address alone. Two more for a page with a module of ours: the
#: viewer's handle, which lacks its camera, and the call that makes it.
_OPEN, _CLOSE = '<script type="application/json" id="sse-bootstrap">', "</script>"
_SETTINGS = f"{_OPEN}\n            null\n        {_CLOSE}"
_STYLE = '<link rel="stylesheet" href="./index.css" />'
_SCRIPT = "import { createViewer } from './index.js';"
_TITLE = "<title>SuperSplat Viewer</title>"
_TURN = "entity.setLocalEulerAngles(0, 0, 180);"
_ANTIALIASED = "aa: url.searchParams.has('aa'),"
_HANDLE = "seek: (time) => viewer.seek(time),"
_START = "createViewer({ container: document.body, settings, ...options });"
#: The icon of all pages, three splats, as a document of its own inside the page; nothing else is requested for it.
ICON = (
    '<link rel="icon" href="data:image/svg+xml,'
    "%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 32 32'%3E%3Crect width='32' height='32' rx='7' "
    "fill='%23161a22'/%3E%3Cellipse cx='12' cy='19' rx='9' ry='5.5' transform='rotate(-35 12 19)' fill='%234aa8ff'/%3E"
    "%3Cellipse cx='20' cy='13' rx='8' ry='5' transform='rotate(30 20 13)' fill='%23ffb454' fill-opacity='.88'/%3E"
    "%3Cellipse cx='20' cy='22' rx='5' ry='3.5' fill='%2364d98b' fill-opacity='.9'/%3E%3C/svg%3E\">"
)
_DATA = "data:application/octet-stream;base64,"
#: An address that holds a PLY or a zip: how older pages hold their scene.
_SCENE = re.compile(rb"data:application/(?:ply|octet-stream);base64,((?:cGx5|UEsDB)[A-Za-z0-9+/]+={0,2})")
_SOURCE_MAP = "//# sourceMappingURL=index.js.map"

#: A viewer's field of view without a camera, and the bounds of the viewer's; degrees.
_FIELD_OF_VIEW = 60.0
_LEAST_FIELD, _LARGEST_FIELD = 10.0, 120.0
#: Stray Gaussians far from all others are not what a first view is for.
_MOST = (0.02, 0.98)

Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PageModule:
    """A JavaScript module that the page starts with the viewer, unless the viewer is to have no controls (``?noui``).

    Its function ``start(viewer, settings)`` is given what createViewer() returns and also ``cameraManager()``, null
    until the scene is there, whose ``camera`` can be set; and ``settings``, with ``turn`` added: nine numbers, row by
    row, the rotation from the model to the viewer.
    """

    url: str
    settings: Mapping[str, Any]


def encode_html(gaussians: Gaussians, metadata: ExportMetadata, entries: int = 1 << 16) -> Encoded:
    """Return the page with the scene in it. entries, and what it raises: as of encode_sog()."""
    scene = encode_sog(gaussians, metadata, entries)
    content = _DATA + base64.b64encode(scene.payload).decode()
    return Encoded(viewer_page(content, "scene.sog", gaussians, metadata), scene.notes)


def viewer_page(
    content: str, name: str, gaussians: Gaussians, metadata: ExportMetadata, *, module: PageModule | None = None
) -> bytes:
    """Return the page that shows the scene found at the URL ``content``.

    name: a file's name, from whose suffix the viewer knows the format. gaussians: the scene, for where to look from.
    """
    turn = to_viewer(PLY_UP if metadata.up is None else metadata.up)
    rotation = ", ".join(map(repr, scipy.spatial.transform.Rotation.from_matrix(turn).as_quat().tolist()))  # x, y, z, w
    settings = {
        "contentUrl": content,
        "contentFilename": name,
        "settings": _settings(_first_view(gaussians, metadata.camera, turn)),
    }
    page = _asset("index.html")
    for place, filling in (
        (_TITLE, f"<title>{escape(metadata.title, quote=False)}</title>\n        {ICON}"),
        (_STYLE, f"<style>\n{_asset('index.css')}</style>"),
        (_SETTINGS, f"{_OPEN}{_json(settings)}{_CLOSE}"),
        (_ANTIALIASED, f"aa: {json.dumps(metadata.antialiased)},"),
        (_SCRIPT, _asset("index.js").replace(_SOURCE_MAP, "")),
        (_TURN, f"entity.setLocalRotation({rotation});"),
        *(() if module is None else _start(module, turn)),
    ):
        before, found, after = page.partition(place)
        if not found:
            raise AssertionError(f"the viewer's page has no {place!r}; it and this module belong together")
        page = before + filling + after
    return page.encode(errors="backslashreplace")  # names of files may be no text


def _start(module: PageModule, turn: Doubles) -> tuple[tuple[str, str], ...]:
    """Return the places of the page that start a module, and what they are filled with."""
    settings = _json({**module.settings, "turn": turn.ravel().tolist()})
    call = (
        f"const viewer = {_START}\n"
        f"            if (options.ui) (await import({_json(module.url)})).start(await viewer, {settings});"
    )
    return (_HANDLE, f"{_HANDLE} cameraManager: () => viewer.cameraManager ?? null,"), (_START, call)


def _json(value: Any) -> str:
    """Return JSON that a script of the page can hold."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")


def to_viewer(up: Doubles) -> Doubles:
    """Return [3, 3] rotation from a PLY's world to the viewer's, where y is up; half a turn about z where it was -y."""
    half = np.diag([-1.0, -1.0, 1.0])
    x, y, z = half @ up
    if y < -1 + 1e-9:
        return np.diag([1.0, -1.0, -1.0]) @ half
    # The shortest turn from (x, y, z) to (0, 1, 0).
    return (
        np.array(
            [
                [1 - x * x / (1 + y), -x, -x * z / (1 + y)],
                [x, y, z],
                [-x * z / (1 + y), -z, 1 - z * z / (1 + y)],
            ]
        )
        @ half
    )


def import_html(path: Path, *, lenient: bool = False) -> ImportedModel:
    """Return the model in a page. Raises ModelFileError for a page without one too, and as import_sog()."""
    file_size(path)
    content = path.read_bytes()
    start = content.find(_OPEN.encode()) + len(_OPEN)
    end = content.find(_CLOSE.encode(), start)
    if start < len(_OPEN) or end < 0:
        found = _SCENE.search(content)
        if found is None:
            raise ModelFileError(
                "a page that holds no scene",
                where=path,
                remedy="name a page with the scene in it, of splat export, SuperSplat or splat-transform, or a file of "
                "splats",
            )
        return _scene(found[1], path, f"{path}, byte {found.start(1)}", lenient=lenient)
    where = f"{path}, byte {start}"
    try:
        url = json.loads(content[start:end])["contentUrl"]
        if not url.startswith(_DATA):
            raise ModelFileError(
                f"the page's scene is not inside it: it is at {url[:80]!r}", where=where, remedy="name that file"
            )
        encoded = url[len(_DATA) :].encode()
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise _unreadable(error, where) from None
    return _scene(encoded, path, where, lenient=lenient)


def _scene(encoded: bytes, path: Path, where: str, *, lenient: bool) -> ImportedModel:
    """Return the model in base64, which is at ``where`` in the page ``path``."""
    try:
        scene = base64.b64decode(encoded, validate=True)
    except ValueError as error:
        raise _unreadable(error, where) from None
    head = scene[:HEAD_BYTES]
    read = import_compressed_ply if is_compressed_ply(head) else import_ply if is_ply(head) else None
    if read is None:
        return read_bundle(io.BytesIO(scene), len(scene), path)
    with tempfile.TemporaryDirectory(prefix="splat-html-") as folder:  # a PLY is mapped from its file
        inside = Path(folder) / "scene.ply"
        inside.write_bytes(scene)
        try:
            return read(inside, lenient=lenient)
        except ModelFileError as error:
            raise type(error)(error.what, where=where, remedy=error.remedy) from None


def _unreadable(error: Exception, where: str) -> ModelFileError:
    reason = f"{type(error).__name__}: {str(error)[:100]}"
    return ModelFileError(f"what the page tells of its scene cannot be read ({reason})", where=where)


def _asset(name: str) -> str:
    return (files("splatcli.formats") / "viewer" / name).read_text(encoding="utf-8")


def _settings(view: dict[str, Any]) -> dict[str, Any]:
    """Return the viewer's settings: nothing but the Gaussians on black."""
    return {
        "version": 2,
        "tonemapping": "none",
        "highPrecisionRendering": False,
        "background": {"color": [0, 0, 0]},
        "postEffectSettings": {
            "sharpness": {"enabled": False, "amount": 0},
            "bloom": {"enabled": False, "intensity": 1, "blurLevel": 2},
            "grading": {"enabled": False, "brightness": 0, "contrast": 1, "saturation": 1, "tint": [1, 1, 1]},
            "vignette": {"enabled": False, "intensity": 0.5, "inner": 0.3, "outer": 0.75, "curvature": 1},
            "fringing": {"enabled": False, "intensity": 0.5},
        },
        "animTracks": [],
        "cameras": [{"initial": view}],
        "annotations": [],
        "startMode": "default",
    }


def _first_view(gaussians: Gaussians, camera: Camera | None, turn: Doubles) -> dict[str, Any]:
    """Return where the viewer stands, what it looks at, and how wide: as ``camera``, else in front of the whole scene.

    The viewer's angle is along the longer side of its window, and so is that of a camera here.
    """
    means = gaussians.means.detach().cpu().double().numpy()
    if camera is None:
        low, high = np.quantile(means, _MOST, axis=0)
        middle, reach = (low + high) / 2, float(np.linalg.norm(high - low)) / 2 or 1.0
        distance = reach / math.tan(math.radians(_FIELD_OF_VIEW) / 2)
        # A little from above: in a PLY y points down, and z away.
        position = middle + distance * np.array([0.0, -0.3, -1.0])
        return _pose(turn @ position, turn @ middle, _FIELD_OF_VIEW)
    forward = camera.viewmat[2, :3]
    depths = (means - camera.center) @ forward
    ahead = depths[depths > 0]
    target = camera.center + forward * (float(np.median(ahead)) if len(ahead) else 1.0)
    wide, high = camera.width / camera.fx, camera.height / camera.fy
    # The viewer is a pinhole; fx of another model is no focal length of one.
    field = math.degrees(2 * math.atan(max(wide, high) / 2)) if camera.model == "pinhole" else _FIELD_OF_VIEW
    return _pose(turn @ camera.center, turn @ target, min(max(field, _LEAST_FIELD), _LARGEST_FIELD))


def _pose(position: Doubles, target: Doubles, field: float) -> dict[str, Any]:
    return {"position": position.tolist(), "target": target.tolist(), "fov": field}


def is_html(head: bytes) -> bool:
    """Return whether a file begins as a page does."""
    return head.lower().startswith(b"<!doctype html")


FORMAT = Format("html", ".html", "a page with a viewer", 3, encode_html, import_html, is_html, (), encode_html)
