"""Looking on changes no bit of a run, takes no more of its time than it may, and can neither end nor hang it."""

from __future__ import annotations

import io
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from importlib.resources import files
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

import imageio.v3 as imageio
import numpy as np
import pytest
import torch

from splatcli.config import with_settings
from splatcli.formats.html import ICON
from splatcli.rasterizer import render
from splatcli.rasterizer.ppisp import RESPONSE_NUMBERS
from splatcli.rasterizer.step_inputs import StepEngine
from splatcli.render.images import LAYERS
from splatcli.train.events import Evaluated, Probed, Started, Stepped
from splatcli.train.per_view_params import PerViewParams
from splatcli.train.state import TrainState
from splatcli.train.trainer import Trainer
from splatcli.viewer import live_viewer as module
from splatcli.viewer.http_server import Request, Response
from splatcli.viewer.live_viewer import LiveRun, RenderRequest, StateRenderer, parse_render_request, scene_summary
from splatcli.viewer.path_editor import editor_settings
from tests.native.cases import NEEDS_COMPILER
from tests.train.test_async_engines import AsyncPlainEngine
from tests.train.test_trainer import digest
from tests.train.worlds import MemoryRun, PlainEngine, made_scene, plain_renderer, ring_cameras, short_config


def new_trainer(steps: int = 12, **parts: Any) -> Trainer:
    config = short_config(steps, schedule={"refine_start": 3, "refine_every": 3, "reset_every": 8})
    return Trainer.start(config, made_scene(), run_dir=MemoryRun(), **parts)  # type: ignore[arg-type]


@pytest.fixture
def state() -> TrainState:
    return new_trainer(engine=PlainEngine(), renderer=plain_renderer).state


def query(**changes: object) -> dict[str, str]:
    """What the page asks for, of the first training view of made_scene()."""
    camera = ring_cameras(6)[1]
    values: dict[str, object] = {
        "me": "a",
        "pose": ",".join(map(repr, camera.viewmat[:3].ravel().tolist())),
        "kind": "rgb",
        "urgent": 1,
        "seen": -1,
        "width": 48,
        "height": 48,
        "fov": math.degrees(2 * math.atan(1 / 2.4)),
    }
    return {name: str(value) for name, value in (values | changes).items()}


def image_request(**changes: object) -> Request:
    return Request("GET", "/picture", query(**changes), own=True)


def post(path: str) -> Request:
    return Request("POST", path, {}, own=True)


def stepped(step: int) -> Stepped:
    return Stepped(step, 0.5, 20, 1)


class Clock:
    """Seconds that pass when advanced."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Browser:
    """Asks a run as a server's threads do."""

    def __init__(self, run: LiveRun) -> None:
        self.run = run
        self.threads = ThreadPoolExecutor()

    def ask(self, request: Request) -> Future[Response | None]:
        """The answer to come; the request has arrived when this returns."""
        before = len(self.run._pending)
        answer = self.threads.submit(self.run, request)
        until(lambda: len(self.run._pending) > before or answer.done())
        return answer


def until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def run(clock: Clock) -> LiveRun:
    return LiveRun(clock=clock)


@pytest.fixture
def browser(run: LiveRun) -> Iterator[Browser]:
    made = Browser(run)
    yield made
    run._discard(run._pending)
    made.threads.shutdown(cancel_futures=True)


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> list[RenderRequest]:
    """Requests that were rendered; rendering takes 0.1 s of the clock."""
    requests: list[RenderRequest] = []

    def render(self: StateRenderer, wanted: RenderRequest) -> Any:
        requests.append(wanted)
        clock.now += 0.1
        return np.full((wanted.camera.height, wanted.camera.width, 3), 200, np.uint8)

    monkeypatch.setattr(StateRenderer, "render", render)
    return requests


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Browsers get an answer at once when there is nothing new."""
    monkeypatch.setattr(module, "_PATIENCE", 0.05)


def facts(answer: Response | None) -> dict[str, Any]:
    assert answer is not None
    reported: dict[str, Any] = json.loads(answer.headers["X-Splat-Facts"])
    return reported


def test_without_requests_nothing_is_rendered(run: LiveRun, state: TrainState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "StateRenderer", lambda *_: pytest.fail("a renderer was made"))
    for step in range(3):
        run.report(stepped(step), state)


def test_an_image_comes_with_the_progress_of_its_step(
    run: LiveRun, browser: Browser, state: TrainState, rendered: list[RenderRequest], clock: Clock
) -> None:
    run.report(Started(0, 12, 20, 5, 1, "cpu"), state)
    clock.now += 1
    answer = browser.ask(image_request())
    run.report(stepped(7), state)
    got = answer.result()
    assert got is not None
    assert (got.kind, got.status) == ("image/jpeg", 200)
    assert imageio.imread(io.BytesIO(got.content)).shape == (48, 48, 3)
    assert facts(got) == {
        "iterations": state.config.train.iterations,
        "loss": 0.5,
        "step": 0,
        "gaussians": len(state.gaussians),
        "run": run._run,
        "paused": False,
        "seconds": pytest.approx(0.1),
    }


def test_the_rate_and_the_time_left_are_those_of_the_last_seconds(
    run: LiveRun, browser: Browser, state: TrainState, rendered: list[RenderRequest], clock: Clock
) -> None:
    run.report(Started(0, 12, 20, 5, 1, "cpu"), state)
    state.config = with_settings(state.config, {"train.iterations": 1000})
    for step in range(1, 101):  # ten a second
        clock.now += 0.1
        state.step = step
        run.report(stepped(step), state)
    answer = browser.ask(image_request())
    run.report(stepped(101), state)
    got = facts(answer.result())
    assert got["rate"] == pytest.approx(10, rel=0.02)
    assert got["seconds_left"] == pytest.approx(90, rel=0.02)
    assert {"test_psnr", "train_psnr"}.isdisjoint(got)
    # Twice as fast: the rate of the beginning is forgotten.
    for step in range(101, 901):
        clock.now += 0.05
        state.step = step
        run.report(stepped(step), state)
    answer = browser.ask(image_request())
    run.report(stepped(901), state)
    assert facts(answer.result())["seconds_left"] == pytest.approx(5, rel=0.02)
    # Steps that get longer: as many as the run says.
    run.steps_left = lambda: 300.0
    answer = browser.ask(image_request())
    run.report(stepped(902), state)
    assert facts(answer.result())["seconds_left"] == pytest.approx(15, rel=0.02)


def test_an_older_state_and_a_new_run_measure_anew(
    run: LiveRun, browser: Browser, state: TrainState, rendered: list[RenderRequest], clock: Clock
) -> None:
    run.report(Evaluated(5, 21.5, 0.7, 20, []), state)
    for step in (10, 20, 5):
        clock.now += 2
        state.step = step
        run.report(stepped(step), state)
    answer = browser.ask(image_request())
    run.report(Probed(5, 23.5, 20), state)
    got = facts(answer.result())
    assert (got["test_psnr"], got["train_psnr"]) == (21.5, 23.5)
    assert "seconds_left" not in got
    run.report(Probed(5, math.nan, 20), state)  # masks hide all of the views
    answer = browser.ask(image_request())
    run.report(Evaluated(5, 21.5, 0.7, 20, []), state)
    assert facts(answer.result())["train_psnr"] is None
    run.report(Started(0, 12, 20, 5, 1, "cpu"), state)
    clock.now += 2
    answer = browser.ask(image_request())
    run.report(stepped(1), state)
    assert {"test_psnr", "train_psnr", "seconds_left"}.isdisjoint(facts(answer.result()))


def test_the_page_has_an_icon_of_its_own_and_names_its_keys(run: LiveRun) -> None:
    answer = run(Request("GET", "/", {}, own=False))
    assert answer is not None
    page = answer.content.decode()
    assert page.count('rel="icon"') == 1
    assert ICON in page
    ElementTree.fromstring(unquote(ICON.partition("data:image/svg+xml,")[2].removesuffix('">')))
    for key in "WASDQEFCPHKV?":
        assert f"<kbd>{key}</kbd>" in page, key


def test_who_moves_gets_half_of_the_time_and_no_more(
    run: LiveRun, browser: Browser, state: TrainState, rendered: list[RenderRequest], clock: Clock
) -> None:
    clock.now += 1000  # credit does not pile up while nobody looks
    training = 0.0
    for step in range(60):
        if not run._pending:
            browser.ask(image_request())
        run.report(stepped(step), state)
        clock.now += 0.02
        training += 0.02
    assert 0.1 * len(rendered) == pytest.approx(training, abs=0.3)


def test_a_still_view_gets_a_new_image_of_a_new_step_after_a_while(
    run: LiveRun, browser: Browser, state: TrainState, rendered: list[RenderRequest], clock: Clock
) -> None:
    clock.now += 1
    browser.ask(image_request())
    run.report(stepped(1), state)
    answer = browser.ask(image_request(urgent=0, seen=0))
    run.report(stepped(2), state)
    clock.now += 1.2
    run.report(stepped(3), state)
    assert len(rendered) == 1, "too early: an image that takes 0.1 s may come every other second"
    clock.now += 1.2
    run.report(stepped(4), state)
    assert len(rendered) == 1, "the step on the screen is still the state's"
    state.step = 5
    run.report(stepped(5), state)
    assert len(rendered) == 2
    assert facts(answer.result())["step"] == 5


@pytest.mark.usefixtures("impatient")
def test_a_request_times_out_and_is_dropped(run: LiveRun, browser: Browser) -> None:
    answer = browser.ask(image_request(urgent=0)).result()
    assert answer is not None
    assert (answer.status, answer.content) == (204, b"")
    assert not run._pending


def test_a_browser_has_one_request_at_a_time(
    run: LiveRun, browser: Browser, state: TrainState, rendered: list[RenderRequest], clock: Clock
) -> None:
    first, second = browser.ask(image_request(urgent=0)), run.__call__
    other = browser.ask(image_request(me="b"))
    newer = browser.threads.submit(second, image_request(width=64))
    assert getattr(first.result(), "status", None) == 204
    clock.now += 1
    until(lambda: {wanted.client for wanted in run._pending} == {"a", "b"})
    run.report(stepped(1), state)
    assert {getattr(answer.result(), "status", None) for answer in (other, newer)} == {200}
    assert sorted(wanted.camera.width for wanted in rendered) == [48, 64]


def test_more_browsers_than_anyone_needs_are_sent_away(
    run: LiveRun, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_PENDING", 1)
    browser.ask(image_request())
    refused = run(image_request(me="b"))
    run(image_request(me="a", pose=""))  # is no view, and takes nobody's place
    assert refused is not None
    assert (refused.status, len(run._pending)) == (503, 1)
    run._discard(run._pending)


def test_a_failed_render_is_reported_and_training_continues(
    run: LiveRun,
    browser: Browser,
    state: TrainState,
    monkeypatch: pytest.MonkeyPatch,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(self: StateRenderer, wanted: RenderRequest) -> None:
        raise MemoryError("no room\nfor it")

    monkeypatch.setattr(StateRenderer, "render", fail)
    clock.now += 1
    for _ in range(3):
        answer = browser.ask(image_request())
        run.report(stepped(1), state)
        got = answer.result()
    assert got is not None
    assert (got.status, got.content) == (503, b"no room")
    assert [record.getMessage() for record in caplog.records] == [
        "the viewer's image could not be rendered: no room"
    ], "once"


@pytest.mark.parametrize("ends", ["resume", "signal", "page closed"])
def test_a_pause_stops_training_but_not_renders(
    ends: str, run: LiveRun, browser: Browser, state: TrainState, rendered: list[RenderRequest], clock: Clock
) -> None:
    run(post("/pause"))
    training = threading.Thread(target=run.report, args=(stepped(1), state), daemon=True)
    training.start()
    for kind in LAYERS:
        assert facts(run(image_request(kind=kind)))["paused"] is True
    assert training.is_alive()
    if ends == "resume":
        run(post("/resume"))
    elif ends == "signal":
        run.must_continue = lambda: True
    else:
        clock.now += 1000
    training.join(20)
    assert not training.is_alive()
    assert [wanted.kind for wanted in rendered] == [*LAYERS]


def test_a_pause_ends_for_a_signal_also_while_somebody_flies(
    run: LiveRun, state: TrainState, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    flown: list[RenderRequest] = []

    def render(self: StateRenderer, wanted: RenderRequest) -> Any:
        clock.now += 0.02
        flown.append(wanted)
        run._pending.append(parse_render_request(image_request()))
        assert len(flown) < 1000
        return np.zeros((48, 48, 3), np.uint8)

    monkeypatch.setattr(StateRenderer, "render", render)
    run(post("/pause"))
    run._pending.append(parse_render_request(image_request()))
    run.must_continue = lambda: len(flown) > 100
    run.report(stepped(1), state)
    assert 100 < len(flown) < 200


def test_a_pause_resumes_after_a_save(run: LiveRun, state: TrainState) -> None:
    run(post("/pause"))
    run.must_continue = lambda: True
    run.report(stepped(1), state)
    run.must_continue = lambda: False
    training = threading.Thread(target=run.report, args=(stepped(2), state), daemon=True)
    training.start()
    training.join(0.2)
    assert training.is_alive()
    run(post("/resume"))
    training.join(20)


@pytest.mark.usefixtures("impatient")
def test_a_pause_renders_nothing_twice(
    run: LiveRun, browser: Browser, state: TrainState, rendered: list[RenderRequest], clock: Clock
) -> None:
    run(post("/pause"))
    training = threading.Thread(target=run.report, args=(stepped(1), state), daemon=True)
    training.start()
    run(image_request())
    clock.now += 10
    answer = run(image_request(urgent=0, seen=state.step))
    assert answer is not None
    assert (answer.status, len(rendered)) == (204, 1)
    run(post("/resume"))
    training.join(20)


def test_other_pages_and_other_paths_get_nothing(run: LiveRun) -> None:
    for method, path in (("GET", "/stage"), ("GET", "/picture"), ("POST", "/pause"), ("POST", "/resume")):
        assert run(Request(method, path, query(), own=False)) is None
    assert run(Request("GET", "/pause", {}, own=True)) is None
    assert run(Request("GET", "/etc/passwd", {}, own=True)) is None
    assert not run._paused


def test_the_modules_of_the_page_are_read_without_a_header_which_imports_do_not_send(run: LiveRun) -> None:
    """They are of no run: the folder is in the stage, which other pages do not get."""
    for name in ("live_view.js", "path_editor.js", "camera_path.js", "path_editor.css"):
        answer = run(Request("GET", f"/{name}", {}, own=False))
        assert answer is not None
        assert answer.content == (files("splatcli.viewer") / name).read_bytes()
        assert answer.kind.startswith("text/css" if name.endswith("css") else "text/javascript")
        assert getattr(run(Request("POST", f"/{name}", {}, own=True)), "status", None) == 405
    for name in ("supersplat_view.js", "live_viewer.py", "path_editor.py"):
        assert run(Request("GET", f"/{name}", {}, own=True)) is None


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"width": 4000}, "4000x48 is not from 16 to 2048"),
        ({"height": 0}, "48x0"),
        ({"height": "9" * 5000}, "digits"),
        ({"width": "1.5"}, "1.5"),
        ({"fov": 0}, "0.0 is not from 0.1 to 175"),
        ({"fov": "nan"}, "nan is not"),
        ({"pose": "1,2"}, "12 finite numbers"),
        ({"pose": ",".join(["nan"] * 12)}, "12 finite numbers"),
        ({"pose": ",".join(["2"] * 12)}, "no rotation"),
        ({"pose": ",".join(["1e200"] * 12)}, "12 finite numbers"),
        ({"kind": "secrets"}, "none of rgb, depth"),
        ({"seen": "x"}, "x"),
    ],
)
def test_invalid_views_are_refused(run: LiveRun, changes: dict[str, object], found: str) -> None:
    answer = run(image_request(**changes))
    assert answer is not None
    assert (answer.status, run._pending) == (400, [])
    assert found in answer.content.decode()


def test_a_wide_image_fills_a_narrow_window() -> None:
    """A camera path of 16:9 and 100 degrees, in the window of a phone."""
    height = 390 * 9 / 16
    fov = math.degrees(2 * math.atan(math.tan(math.radians(50)) * 844 / height))
    assert fov > 150
    camera = parse_render_request(image_request(width=390, height=844, fov=fov)).camera
    assert camera.fy == camera.fx == pytest.approx(height / 2 / math.tan(math.radians(50)))


def test_a_missing_parameter_is_named(run: LiveRun) -> None:
    answer = run(Request("GET", "/picture", {}, own=True))
    assert answer is not None
    assert (answer.status, answer.content) == (400, b"invalid view: 'width'")


def test_the_stage_has_the_cameras_and_what_is_up(run: LiveRun, state: TrainState) -> None:
    before = run(Request("GET", "/stage", {}, own=True))
    assert getattr(before, "status", None) == 204
    run.folder = Path("some folder/run")
    run.report(Started(0, 12, 20, 5, 1, "cpu"), state)
    answer = run(Request("GET", "/stage", {}, own=True))
    assert answer is not None
    stage = json.loads(answer.content)
    assert stage["path_editor"] == editor_settings(run.folder)
    assert stage["path_editor"]["command"] == "splat render 'some folder/run'"
    assert stage["up"] == pytest.approx([0, -1, 0])
    assert stage["distance"] == pytest.approx(3, abs=0.5)
    assert [camera["name"] for camera in stage["cameras"] if camera["held_out"]] == ["view_00.png", "view_05.png"]
    assert stage["first"]["name"] == "view_01.png"
    assert stage["first"]["half"] == pytest.approx([1 / 2.4, 1 / 2.4])


def test_each_of_several_runs_has_a_stage_of_its_own(
    run: LiveRun, browser: Browser, state: TrainState, rendered: list[RenderRequest], clock: Clock
) -> None:
    numbers = []
    for name in ("a", "b"):
        state.cameras[1] = replace(state.cameras[1], name=name)
        run.report(Started(0, 12, 20, 5, 1, "cpu"), state)
        stage = run(Request("GET", "/stage", {}, own=True))
        assert stage is not None
        assert json.loads(stage.content)["first"]["name"] == name
        clock.now += 10
        answer = browser.ask(image_request())
        run.report(stepped(1), state)
        numbers.append(facts(answer.result())["run"])
    assert numbers == [run._run - 1, run._run]
    later = LiveRun()  # of another process, at the same port
    later.report(Started(0, 12, 20, 5, 1, "cpu"), state)
    assert later._run not in numbers


def test_of_very_many_cameras_some_are_shown(state: TrainState) -> None:
    state.cameras = ring_cameras(1000)
    state.train, state.test = list(range(1, 1000)), [0]
    names = [camera["name"] for camera in scene_summary(state)["cameras"]]
    assert len(names) == len(set(names)) == 200
    assert (names[0], names[-1]) == ("view_00.png", "view_995.png")


@NEEDS_COMPILER
def test_an_image_equals_the_render_of_the_state(state: TrainState) -> None:
    state.gaussians.shN += 0.3
    wanted = parse_render_request(image_request())
    shown = StateRenderer(state).render(wanted)
    camera = ring_cameras(6, 48)[1]
    expected = render(state.gaussians, camera).image.clamp(0, 1) * 255
    assert np.abs(shown - expected.numpy()).max() <= 0.51
    assert shown.max() > 50
    state.cameras = [replace(camera, near=100.0 + i) for i, camera in enumerate(state.cameras)]
    assert StateRenderer(state).render(wanted).max() == 0, "the nearest plane of the run's cameras counts"


@NEEDS_COMPILER
def test_an_image_shows_the_response_of_the_camera_as_evaluation_does(state: TrainState) -> None:
    """Of a run with --ppisp; the page's camera has intrinsics of its own, so that its vignetting is not known."""
    state.config = with_settings(state.config, {"views.ppisp": True})
    params = PerViewParams.new(state.config.views, [state.cameras[view] for view in state.train])
    assert params.ppisp_camera is not None
    params.ppisp_camera.values[0, -RESPONSE_NUMBERS:] = torch.linspace(-0.8, 0.9, RESPONSE_NUMBERS)
    state.per_view_params = params
    wanted = parse_render_request(image_request())
    shown = StateRenderer(state).render(wanted)
    plain = render(state.gaussians, wanted.camera).image
    expected = params.recolour_unseen(wanted.camera, plain)
    assert (expected - plain).abs().max() > 0.05
    assert np.abs(shown - 255 * expected.clamp(0, 1).numpy()).max() <= 0.51


@NEEDS_COMPILER
@pytest.mark.parametrize("kind", LAYERS)
def test_every_kind_of_image_has_content(state: TrainState, kind: str) -> None:
    state.gaussians.logit_opacities += 5
    shown = StateRenderer(state).render(parse_render_request(image_request(kind=kind)))
    assert (shown.shape, shown.dtype) == ((48, 48, 3), np.uint8)
    assert shown.std() > 5


@NEEDS_COMPILER
@pytest.mark.parametrize("make_engine", [lambda: None, AsyncPlainEngine], ids=["native", "steps that are done later"])
def test_a_run_with_viewers_is_bit_identical(
    make_engine: Callable[[], StepEngine | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every step, through refinements and a reset; with images of every kind after every event, and a pause."""
    monkeypatch.setattr(module, "_NEXT_REQUEST", 0.0)
    alone, watched = new_trainer(engine=make_engine()), new_trainer(engine=make_engine())
    expected = [digest(alone.state.to_checkpoint()) for _ in alone.run()]
    clock = Clock()
    live = LiveRun(clock=clock)
    browser = Browser(live)
    found, answers = [], []
    for number, event in enumerate(watched.run()):
        clock.now += 10
        answers += [browser.ask(image_request(me=kind, kind=kind, urgent=number % 2)) for kind in LAYERS]
        if number == 5:
            live(post("/pause"))
            live.must_continue = chain([False, False], repeat(True)).__next__
        live.report(event, watched.state)
        found.append(digest(watched.state.to_checkpoint()))
    live._discard(live._pending)
    browser.threads.shutdown()
    drawn = [answer for answer in answers if getattr(answer.result(), "status", None) == 200]
    assert len(drawn) > 2 * len(LAYERS)
    assert found == expected
