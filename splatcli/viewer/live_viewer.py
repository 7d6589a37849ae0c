"""The live viewer: browsers send cameras and get renders of the run while it trains.

The training thread renders between two steps, and only what a browser requests; without requests it does nothing.
Rendering reads the state and draws no random number, so a run with viewers is bit-identical to one without. The threads
of the server only queue requests and wait; nothing that a browser does can end or hang the training.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from splatcli.errors import first_line
from splatcli.formats.html import ICON
from splatcli.render.colour_maps import ByteImage
from splatcli.render.images import (
    LAYERS,
    NEAR_FAR,
    ModelRenderer,
    RenderSettings,
    jpeg_bytes,
    layer_images,
    median_distance,
)
from splatcli.scene.camera import Camera, common_up
from splatcli.sizes import evenly
from splatcli.train.events import Evaluated, Event, Probed, Started, Stepped
from splatcli.train.state import TrainState
from splatcli.viewer.http_server import READ_ONLY, Request, Response
from splatcli.viewer.path_editor import LIVE_VIEW, editor_documents, editor_settings

#: Limits of a request: image sides in pixels, and fields of view in degrees.
_SIDES, _FIELDS = (16, 2048), (0.1, 175.0)
#: Limit of the numbers of a pose; their squares are finite.
_FARTHEST = 1e12
#: Number of cameras of the run that the page shows, evenly spaced; more are slow and hide the scene.
_MAX_CAMERAS = 200
#: The depth range is that of pixels with at least this alpha.
_COVERED = 0.5


@dataclass(slots=True, eq=False)
class RenderRequest:
    """An image that a browser waits for, and its result.

    client: the browser. kind: one of LAYERS. urgent: the camera has moved, so the image on the screen is outdated.
    seen_step: the step of the image on the screen; ignored if urgent.
    image: [H, W, 3] uint8; None if it was not rendered. problem: the error, if there was one.
    facts: the progress of the run. seconds: the time of the render.
    """

    client: str
    camera: Camera
    kind: str
    urgent: bool
    seen_step: int
    image: ByteImage | None = None
    problem: str | None = None
    facts: dict[str, Any] | None = None
    seconds: float | None = None
    done: threading.Event = field(default_factory=threading.Event)


class StateRenderer:
    """Renders a state between two steps. Each has its own renderer, so no tensor is held longer."""

    def __init__(self, state: TrainState) -> None:
        self.state = state
        self._near = min(camera.near for camera in state.cameras)
        self._renderers: dict[bool, ModelRenderer] = {}

    def render(self, wanted: RenderRequest) -> ByteImage:
        """Render the image [H, W, 3] uint8 of a request."""
        with_normals = wanted.kind == "normals"
        if with_normals not in self._renderers:
            settings = RenderSettings.of_run(self.state.config, self.state.per_view_params)
            self._renderers[with_normals] = ModelRenderer(
                self.state.gaussians_to_render(), settings, with_normals=with_normals
            )
        maps = self._renderers[with_normals].render_maps(replace(wanted.camera, near=self._near))
        known = maps.depth[maps.alpha >= _COVERED] if wanted.kind == "depth" else np.empty(0)
        near, far = np.percentile(known, NEAR_FAR) if known.size else (1.0, 1.0)
        return layer_images(maps, [wanted.kind], (float(near), float(far)))[wanted.kind]


def parse_render_request(request: Request) -> RenderRequest:
    """Return the render request of a query. Raise KeyError or ValueError."""
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
    return RenderRequest(
        query["me"], camera, query["kind"], urgent=query["urgent"] == "1", seen_step=int(query["seen"])
    )


def scene_summary(state: TrainState) -> dict[str, Any]:
    """Return the scene as the page shows it: cameras, those of held-out views marked, and the first view."""
    views = sorted([*state.train, *state.test])
    chosen = evenly(views, _MAX_CAMERAS)
    first = state.cameras[state.train[0]]
    up = common_up([state.cameras[view] for view in chosen])
    held_out = set(state.test)
    return {
        "kinds": LAYERS,
        "up": [0.0, -1.0, 0.0] if up is None else up.tolist(),
        "distance": median_distance(state.gaussians, first) or 1.0,
        "extent": state.dataset.extent,
        "first": _camera_json(first),
        "cameras": [{**_camera_json(state.cameras[view]), "held_out": view in held_out} for view in chosen],
    }


def _camera_json(camera: Camera) -> dict[str, Any]:
    """Return a camera of the run for the page: its name, world to camera [3, 4], and half its sides at depth 1."""
    return {
        "name": camera.name,
        "pose": camera.viewmat[:3].ravel().tolist(),
        "half": [camera.width / camera.fx / 2, camera.height / camera.fy / 2],
    }


_log = logging.getLogger(__name__)

#: The share of time for renders while a camera moves, and while none does; and the least seconds between two renders
#: of a camera that does not move.
_MOVING_SHARE, _STILL_SHARE, _STILL_EVERY = 0.5, 0.05, 0.5
#: Seconds that rendering may take between two steps, and that the next request of a moving camera is waited for.
_LONGEST, _NEXT_REQUEST = 0.25, 0.03
#: Seconds until a request is answered without an image, and seconds without a request after which a browser is gone.
_PATIENCE, _GONE = 1.0, 15.0
#: JPEG quality of urgent and of other images.
_QUALITIES = {True: 80, False: 92}
#: Maximum number of pending requests; a browser has one.
_MAX_PENDING = 64
#: Seconds between two measurements of the number of steps, and the number that the rate is measured over.
_MARK_EVERY, _MARKS = 1.0, 30
#: The response header with the progress of the run.
_FACTS = "X-Splat-Facts"


class LiveRun:
    """A run for browsers: answers requests (``__call__``, from any thread) and renders for them (``report``).

    must_continue: returns whether training has to continue although it is paused, for a signal or a deadline.
    steps_left: how many steps like the present one the rest of the run is worth; without it, those that are left.
    folder: of the run, as a command names it.
    """

    steps_left: Callable[[], float] | None = None
    folder = Path()

    def __init__(
        self, must_continue: Callable[[], bool] = lambda: False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.must_continue = must_continue
        self._clock = clock
        # A browser imports modules without a header of its own.
        page = Response("text/html; charset=utf-8", _page())
        self._documents = {"/": page, **editor_documents(LIVE_VIEW)}
        self._lock = threading.Condition()  # guards the attributes up to the empty line
        self._pending: list[RenderRequest] = []
        self._paused = False
        self._last_request = -math.inf
        self._scene_json: bytes | None = None
        self._facts: dict[str, Any] = {}

        self._run = secrets.randbelow(1 << 52)  # another process that serves here later has other numbers
        self._loss: float | None = None
        self._scores: dict[str, float | None] = {}
        self._marks: deque[tuple[float, int]] = deque(maxlen=_MARKS)  # when each of these steps was done
        self._problem: str | None = None
        self._returned_at = clock()
        self._credit = 0.0
        self._next_still = -math.inf

    # For the training thread.

    def report(self, event: Event, state: TrainState) -> None:
        """Render pending requests after an event. Training waits, so ``state`` does not change meanwhile."""
        if isinstance(event, Started):
            self._run += 1
            self._loss, self._scores = None, {}
            self._marks.clear()
            stage = {**scene_summary(state), "path_editor": editor_settings(self.folder)}
            self._scene_json = json.dumps(stage).encode()
        elif isinstance(event, Stepped):
            self._loss = event.loss if math.isfinite(event.loss) else None
            self._mark(event.step)
        elif isinstance(event, Evaluated | Probed):
            psnr = event.psnr if math.isfinite(event.psnr) else None  # masks may hide all views
            self._scores["test_psnr" if isinstance(event, Evaluated) else "train_psnr"] = psnr
        if not self._pending and not self._paused:
            return
        self._facts = {
            "step": state.step,
            "iterations": state.config.train.iterations,  # may change during the run
            "gaussians": len(state.gaussians),
            "loss": self._loss,
            **self._scores,
            **self._pace(state),
            "run": self._run,  # tells a page when its cameras are those of another run
        }
        renderer = StateRenderer(state)
        began = self._clock()
        # The time of training earns time for renders.
        earned = (began - self._returned_at) * _MOVING_SHARE / (1.0 - _MOVING_SHARE)
        self._credit = min(_LONGEST, self._credit + earned)
        self._render_due(renderer, began + self._credit)
        self._credit -= self._clock() - began
        while self._is_paused():
            self._render_due(renderer, self._clock() + _LONGEST)
            with self._lock:
                self._lock.wait(_STILL_EVERY / 5)
            self._marks.clear()
        self._returned_at = self._clock()

    def _mark(self, step: int) -> None:
        """Note when a step was done, about once a second."""
        now = self._clock()
        if self._marks and step < self._marks[-1][1]:  # a rollback
            self._marks.clear()
        if not self._marks or now - self._marks[-1][0] >= _MARK_EVERY:
            self._marks.append((now, step))

    def _pace(self, state: TrainState) -> dict[str, float]:
        """Return the steps a second and the seconds left; nothing before they are known."""
        if not self._marks:
            return {}
        began, first = self._marks[0]
        seconds, steps = self._clock() - began, state.step - first
        if seconds < _MARK_EVERY or steps <= 0:
            return {}
        left = state.config.train.iterations - state.step if self.steps_left is None else self.steps_left()
        return {"rate": steps / seconds, "seconds_left": left * seconds / steps}

    def _is_paused(self) -> bool:
        """Return whether a present browser has paused training and nothing requires it to continue."""
        with self._lock:
            if self._paused and self._clock() - self._last_request > _GONE:
                self._paused = False
            return self._paused and not self.must_continue()

    def _render_due(self, renderer: StateRenderer, until: float) -> None:
        """Render the requests that are due, and those that follow from moving cameras, until the given time."""
        while due := self._due(renderer.state.step, hurry=self._clock() < until):
            for wanted in due:
                self._render_one(wanted, renderer)
            if not any(wanted.urgent for wanted in due):
                return
            with self._lock:
                self._lock.wait_for(lambda: any(wanted.urgent for wanted in self._pending), timeout=_NEXT_REQUEST)

    def _due(self, step: int, *, hurry: bool) -> list[RenderRequest]:
        """Take the requests to render now. hurry: there is time for urgent ones."""
        still = self._clock() >= self._next_still
        with self._lock:
            due = [
                wanted for wanted in self._pending if (hurry if wanted.urgent else still and wanted.seen_step != step)
            ]
            self._pending = [wanted for wanted in self._pending if wanted not in due]
        return due

    def _render_one(self, wanted: RenderRequest, renderer: StateRenderer) -> None:
        began = self._clock()
        try:
            wanted.image = renderer.render(wanted)
        except Exception as error:  # mostly a lack of memory; a request must not end the run
            wanted.problem = first_line(error)
            if wanted.problem != self._problem:  # warn once, since the page repeats its request
                _log.warning("the viewer's image could not be rendered: %s", wanted.problem)
            self._problem = wanted.problem
        took = self._clock() - began
        self._next_still = self._clock() + max(_STILL_EVERY, took * (1.0 / _STILL_SHARE - 1.0))
        wanted.facts, wanted.seconds = self._facts, took
        wanted.done.set()

    # For the threads of a server.

    def __call__(self, request: Request) -> Response | None:
        """Answer a request. All but the page and its modules, which know no run, is for the page's own script only."""
        if request.path in self._documents:
            return self._documents[request.path] if request.method == "GET" else READ_ONLY
        if not request.own:
            return None
        match request.method, request.path:
            case "GET", "/stage":
                return _NOTHING if self._scene_json is None else Response("application/json", self._scene_json)
            case "GET", "/picture":
                return self._image(request)
            case "POST", "/pause" | "/resume":
                with self._lock:
                    self._last_request = self._clock()
                    self._paused = request.path == "/pause"
                    self._lock.notify_all()
                return _NOTHING
        return None

    def _image(self, request: Request) -> Response:
        try:
            wanted = parse_render_request(request)
        except (KeyError, ValueError) as error:
            return _refusal(400, f"invalid view: {error}")
        with self._lock:
            self._last_request = self._clock()
            self._discard([other for other in self._pending if other.client == wanted.client])
            if len(self._pending) >= _MAX_PENDING:
                return _refusal(503, "too many browsers are connected")
            self._pending.append(wanted)
            self._lock.notify_all()
        if not wanted.done.wait(_PATIENCE):
            with self._lock:
                self._discard([wanted])
        if wanted.problem is not None:
            return _refusal(503, wanted.problem)
        facts = {**(wanted.facts or self._facts), "paused": self._paused, "seconds": wanted.seconds}
        headers = {_FACTS: json.dumps(facts, allow_nan=False)}
        if wanted.image is None:
            return Response("text/plain", b"", status=204, headers=headers)
        return Response("image/jpeg", jpeg_bytes(wanted.image, _QUALITIES[wanted.urgent]), headers=headers)

    def _discard(self, pending: Sequence[RenderRequest]) -> None:
        """Drop these requests."""
        self._pending = [wanted for wanted in self._pending if wanted not in pending]
        for wanted in pending:
            wanted.done.set()


#: A response without content.
_NOTHING = Response("text/plain", b"", status=204)


def _refusal(status: int, text: str) -> Response:
    return Response("text/plain; charset=utf-8", text.encode(), status=status)


def _page() -> bytes:
    page = (files("splatcli.viewer") / "live.html").read_text(encoding="utf-8")
    return page.replace('<link rel="icon" href="data:,">', ICON).encode()
