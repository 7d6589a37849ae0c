"""What a page that watches a run asks for: a camera in, a picture out, and the run's own cameras to show."""

from __future__ import annotations

import io
import math
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from splatcli.render.images import LAYERS, NEAR_FAR, Picture, RenderSettings, Viewer, median_distance, pictures
from splatcli.render.server import Request
from splatcli.scene.camera import Camera, common_up
from splatcli.train.evaluate import BACKGROUNDS, evaluation_background
from splatcli.train.state import TrainState

#: Sides of a picture that may be asked for, pixels, and angles of view, degrees.
_SIDES, _FIELDS = (16, 2048), (2.0, 150.0)
#: A camera that is farther away sees nothing of any scene; squares of such numbers are finite.
_FARTHEST = 1e12
#: Cameras of the run that are shown, evenly spaced: more make a page slow, and hide the scene.
_MOST_CAMERAS = 200
#: Depths are coloured by those of pixels that are more covered than not.
_COVERED = 0.5


@dataclass(slots=True, eq=False)
class RenderRequest:
    """A picture somebody waits for, and what becomes of it.

    who: the browser. kind: one of LAYERS. urgent: wanted at once, for what is on the screen is of another view.
    seen: the step that is on the screen; of an urgent wish it does not matter.
    picture: [H, W, 3] uint8; None when it was not drawn. problem: why not, if something went wrong.
    facts: how far the run was. seconds: that it took.
    """

    who: str
    camera: Camera
    kind: str
    urgent: bool
    seen: int
    picture: Picture | None = None
    problem: str | None = None
    facts: dict[str, Any] | None = None
    seconds: float | None = None
    done: threading.Event = field(default_factory=threading.Event)


class Painter:
    """Draws a state that stands still; made anew for each moment, it holds no tensor longer than that."""

    def __init__(self, state: TrainState) -> None:
        self.state = state
        self._viewers: dict[bool, Viewer] = {}

    def paint(self, wish: RenderRequest) -> Picture:
        """[H, W, 3] uint8."""
        with_normals = wish.kind == "normals"
        if with_normals not in self._viewers:
            config = self.state.config
            background = BACKGROUNDS[evaluation_background(config)]
            look = RenderSettings(self.state.sh_degree(), background, config.train.antialiased)
            self._viewers[with_normals] = Viewer(self.state.flushed(), look, with_normals=with_normals)
        sight = self._viewers[with_normals].see(wish.camera)
        known = sight.depth[sight.alpha >= _COVERED] if wish.kind == "depth" else np.empty(0)
        near, far = np.percentile(known, NEAR_FAR) if known.size else (1.0, 1.0)
        return pictures(sight, [wish.kind], (float(near), float(far)))[wish.kind]


def parse_wish(request: Request) -> RenderRequest:
    """The picture that a query asks for. Raises KeyError and ValueError."""
    query = request.query
    width, height = int(query["width"]), int(query["height"])
    degrees = float(query["fov"])
    if not (_SIDES[0] <= min(width, height) and max(width, height) <= _SIDES[1]):
        raise ValueError(f"{width}x{height} is not from {_SIDES[0]} to {_SIDES[1]} pixels")
    if not _FIELDS[0] <= degrees <= _FIELDS[1]:
        raise ValueError(f"{degrees} is not from {_FIELDS[0]:g} to {_FIELDS[1]:g} degrees")
    rows = np.array([float(number) for number in query["pose"].split(",")])
    if rows.shape != (12,) or not (np.abs(rows) < _FARTHEST).all():
        raise ValueError("a pose is 12 finite numbers")
    if query["kind"] not in LAYERS:
        raise ValueError(f"{query['kind']!r} is none of {', '.join(LAYERS)}")
    viewmat = np.vstack([rows.reshape(3, 4), [0.0, 0.0, 0.0, 1.0]])
    rotation = viewmat[:3, :3]
    if not np.abs(rotation @ rotation.T - np.eye(3)).max() < 1e-3:
        raise ValueError("the first three columns of the pose are no rotation")
    focal = height / (2.0 * math.tan(math.radians(degrees) / 2.0))
    camera = Camera("viewer", width, height, focal, focal, width / 2, height / 2, viewmat)
    return RenderRequest(query["me"], camera, query["kind"], urgent=query["urgent"] == "1", seen=int(query["seen"]))


def stage_of(state: TrainState) -> dict[str, Any]:
    """What the page knows of the scene: cameras to show, those of the held-out views marked, and where to begin."""
    views = sorted([*state.train, *state.test])
    count = min(len(views), _MOST_CAMERAS)
    chosen = [views[i * len(views) // count] for i in range(count)]
    first = state.cameras[state.train[0]]
    up = common_up([state.cameras[view] for view in chosen])
    held_out = set(state.test)
    return {
        "kinds": LAYERS,
        "up": [0.0, -1.0, 0.0] if up is None else up.tolist(),
        "distance": median_distance(state.gaussians, first) or 1.0,
        "extent": state.dataset.extent,
        "first": _shown(first),
        "cameras": [{**_shown(state.cameras[view]), "held_out": view in held_out} for view in chosen],
    }


def _shown(camera: Camera) -> dict[str, Any]:
    """A camera of the run for the page: its name, world to camera [3, 4], and half its sides at depth 1."""
    return {
        "name": camera.name,
        "pose": camera.viewmat[:3].ravel().tolist(),
        "half": [camera.width / camera.fx / 2, camera.height / camera.fy / 2],
    }


def jpeg(picture: Picture, quality: int) -> bytes:
    """The file of a picture."""
    buffer = io.BytesIO()
    # Without subsampling, which smears coloured edges.
    Image.fromarray(picture).save(buffer, "JPEG", quality=quality, subsampling=0)
    return buffer.getvalue()
