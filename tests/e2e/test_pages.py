"""Pages in a real browser show what the model renders to, make no request elsewhere and have no errors.

Where a headless Chromium is at hand (tests/browser.py).
"""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import imageio.v3 as imageio
import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from splatcli.checkpoint.file import load_checkpoint
from splatcli.formats.format import ExportMetadata
from splatcli.formats.ply import encode_ply
from splatcli.gaussians import Gaussians
from splatcli.render.camera_files import FLIP, read_cameras
from splatcli.render.images import RenderSettings, render_pixels
from splatcli.scene.camera import Camera
from splatcli.train.state import gaussians_to_render
from tests.browser import Look, look_at
from tests.cli.tiny import write_scene
from tests.forked import splat_command
from tests.formats.made import scene

pytestmark = pytest.mark.slow

SIZE = (480, 360)

#: The page of a run has an image, and its editor of camera paths has come last.
LIVE_IS_WHOLE = """document.body.dataset.step
    && [...document.styleSheets].some(({ href }) => href?.endsWith('/path_editor.css'))"""

#: Presses keys in the page of a run until both have had their effect, and drags, which the browser ends once.
HANDS_WORK = """(() => {
    const event = (key, code) => new KeyboardEvent('keydown', { key, code, bubbles: true });
    const press = (key, code) => document.body.dispatchEvent(event(key, code));
    const [keys, kind] = ['keys', 'kind'].map((id) => document.getElementById(id));
    if (!document.body.dataset.step) return false;
    const poses = [['pointerdown', 100], ['pointermove', 110], ['pointercancel', 110], ['pointermove', 200]].map(
        ([type, clientX]) => {
            const where = { pointerId: 1, clientX, clientY: 100, bubbles: true };
            document.getElementById('lines').dispatchEvent(new PointerEvent(type, where));
            return JSON.stringify(pose());
        });
    if (poses[0] === poses[1] || poses[1] !== poses[3]) throw new Error(`a drag that sticks: ${poses}`);
    if (kind.value !== 'depth') press('2', 'Digit2');
    else if (!keys.open) press('?', 'Slash');
    return kind.value === 'depth' && keys.open && /PSNR|Gaussians/.test(document.getElementById('facts').textContent);
})()"""

#: A hand at the camera-path editor: what the steps below call. One run a page; then the steps' value, without controls.
EDITOR = """(async () => {
    if (!(READY) || !document.querySelector('.splat-path')) return false;
    const part = (name) => document.querySelector(`[data-id=${name}]`);
    const rows = () => [...document.querySelectorAll('.splat-path li')];
    const press = (key, target = document.body, more = {}) => {
        const code = `Key${key.toUpperCase()}`;
        target.dispatchEvent(new KeyboardEvent('keydown', { key, code, bubbles: true, ...more }));
    };
    const enter = (name, value) => {
        part(name).value = value;
        part(name).dispatchEvent(new Event('change'));
    };
    const frames = async (count) => {
        for (let i = 0; i < count; i++) await new Promise(requestAnimationFrame);
    };
    const until = async (condition) => {
        for (let i = 0; !condition(); i++) {
            if (i > 2000) throw new Error(`not so after 2000 frames: ${condition}; ${part('status').textContent}`);
            await frames(1);
        }
    };
    const scroll = async (by) => {
        const turn = { deltaY: by, bubbles: true, cancelable: true };
        document.querySelector('canvas').dispatchEvent(new WheelEvent('wheel', turn));
        await frames(90);
    };
    const choose = (text, name) => {
        const given = new DataTransfer();
        given.items.add(new File([text], name));
        part('file').files = given.files;
        part('file').dispatchEvent(new Event('change'));
    };
    const saved = async () => {
        let blob;
        const { createObjectURL } = URL;
        URL.createObjectURL = (given) => createObjectURL.call(URL, blob = given);
        part('save').click();
        URL.createObjectURL = createObjectURL;
        return blob.text();
    };
    const check = (holds, what) => {
        if (!holds) throw new Error(`${what}; ${part('status').textContent}`);
    };
    let value;
    try {
        value = await (async () => { STEPS })();
    } catch (error) {
        return { error: String(error) }; // else the browser is asked again until the time is up
    }
    const style = document.createElement('style');
    style.textContent = '.sse-ui, .splat-path, .splat-path-lines { display: none !important }';
    document.head.append(style);
    await frames(10);
    return value;
})()"""

#: What both pages load for the editor.
EDITOR_FILES = ("path_editor.js", "camera_path.js", "path_editor.css")

#: Two key frames, by the key and by the button, with a movement between them.
ADD_TWO = """
    check(part('panel').hidden, 'folded away');
    enter('width', 480);
    enter('height', 360);
    press('k');
    check(!part('panel').hidden && rows().length === 1, 'the key adds one');
    check(part('command').textContent.endsWith('view.png'), 'one key frame is an image');
    press('k', part('seconds'));
    check(rows().length === 1, 'a letter in a field adds none');
    const mode = () => document.querySelector('.sse-controlsHintTitle').textContent;
    press('2');
    const flying = mode();
    press('1', part('seconds'));
    check(mode() === flying, 'a digit in a field is not for the viewer');
    press('1');
    check(mode() !== flying, 'the keys of the viewer work');
    enter('seconds', 0.4);
    enter('fps', 5);
    enter('seconds', -1);
    check(part('seconds').value === '0.4' && /Seconds/.test(part('status').textContent), 'a wrong number');
    await scroll(-300);
    part('add').click();
    check(rows().length === 2, 'the button adds one');
    check(rows()[1].textContent.includes('0.4 s'), 'at the end');
    const time = () => rows()[1].querySelector('.step input');
    const take = (text) => {
        time().value = text;
        time().dispatchEvent(new Event('change'));
    };
    check(time().value === '' && time().placeholder === '0.4', 'constant speed');
    take('-2');
    check(time().value === '' && /Seconds of a transition/.test(part('status').textContent), 'a wrong time');
    take('1e8');
    check(time().value === '' && /frames, not 1 to/.test(part('status').textContent), 'too many frames');
    take('0.6');
    check(part('seconds').value === '0.6' && rows()[1].textContent.includes('0.6 s'), 'a time is in the seconds');
    enter('seconds', 0.4);
    check(time().value === '0.4', 'and follows them');
    return { file: await saved(), command: part('command').textContent };
"""

#: A path that is loaded, edited, played, and there again after a reload. GOOD: its file.
LOAD_AND_EDIT = """
    if (!sessionStorage.reloaded) {
        part('open').click();
        for (const [text, said] of [['{', 'not JSON'], ['[]', 'no "keyframes"'], ['{"keyframes": []}', 'no key frames'],
                                    ['{"keyframes": [{"matrix": [1, 2]}]}', 'key frame 1 has no 4x4 matrix']]) {
            choose(text, 'bad.json');
            await until(() => part('status').textContent.includes(said));
            check(part('status').textContent.startsWith('bad.json is not loaded'), 'which file');
            check(rows().length === 0, 'nothing is loaded');
        }
        const dropped = new DataTransfer();
        dropped.items.add(new File([GOOD], 'good.json'));
        part('close').click();
        window.dispatchEvent(new DragEvent('drop', { dataTransfer: dropped, cancelable: true }));
        await until(() => rows().length === 3 && !part('panel').hidden);
        check(part('loop').checked && part('fps').value === '5', 'the settings of the file');
        const act = (row, title) => rows()[row].querySelector(`[title="${title}"]`).click();
        const name = Object.keys(localStorage).find((key) => key.includes('camera path'));
        const stored = () => JSON.parse(localStorage.getItem(name));
        const fovs = () => stored().keyframes.map(({ fov }) => fov).join();
        act(2, 'Move up');
        check(fovs() === '30,50,40', 'moved up');
        act(0, 'Move down');
        check(fovs() === '50,30,40', 'moved down');
        act(2, 'Delete');
        check(fovs() === '50,30', 'deleted');
        act(0, 'Go to this view');
        await frames(3);
        act(1, 'Replace by the present view');
        check(fovs() === '50,50', 'replaced');
        const [one, other] = stored().keyframes.map((key) => JSON.stringify(key));
        check(one === other, 'exactly');
        check(/All key frames are equal/.test(part('status').textContent) && part('save').disabled, 'no path');
        const undo = (target) => press('z', target, { ctrlKey: true });
        const redo = (target) => press('Z', target, { ctrlKey: true, shiftKey: true });
        for (const [before, what] of [['50,30', 'replace key frame 2'], ['50,30,40', 'delete key frame 3'],
                                      ['30,50,40', 'move key frame 1 down'], ['30,40,50', 'move key frame 3 up']]) {
            check(part('undo').title.includes(what), `next is to undo: ${what}`);
            undo();
            check(fovs() === before && part('status').textContent === `Undone: ${what}.`, `undone: ${what}`);
        }
        undo();
        check(rows().length === 0 && part('undo').disabled && !part('redo').disabled, 'also what was loaded');
        undo();
        for (let i = 0; i < 5; i++) redo();
        check(fovs() === '50,50' && part('redo').disabled, 'redone');
        part('undo').click();
        check(fovs() === '50,30', 'by the button');
        part('redo').click();
        check(fovs() === '50,50', 'and back');
        part('undo').click();
        const time = () => rows()[1].querySelector('.step input');
        const settings = () =>
            [part('seconds').value, time().value, part('fps').value, part('loop').checked, fovs()].join();
        const [first, ...others] = [settings()];
        for (const edit of [
            () => { time().value = 3; time().dispatchEvent(new Event('change')); },
            () => enter('seconds', 9),
            () => enter('fps', 7),
            () => part('loop').click(),
            () => press('k')
        ]) {
            others.push(settings());
            edit();
            check(settings() !== others[others.length - 1], `another setting: ${edit}`);
            check(part('redo').disabled, 'nothing is left to redo');
        }
        part('seconds').dispatchEvent(new Event('input', { bubbles: true }));
        undo(part('seconds'));
        check(rows().length === 3, 'a number that is typed is undone by its field');
        part('seconds').dispatchEvent(new Event('change', { bubbles: true }));
        const last = settings();
        while (others.length) {
            undo(part('seconds'));
            check(settings() === others.pop(), 'each by itself');
        }
        check(settings() === first, 'all of them');
        for (let i = 0; i < 6; i++) press('y', document.body, { metaKey: true });
        check(settings() === last, 'and again');
        const angle = part('degrees').textContent;
        for (const degrees of [70, 75]) {
            part('fov').value = degrees;
            part('fov').dispatchEvent(new Event('input', { bubbles: true }));
            await frames(2);
        }
        part('fov').dispatchEvent(new Event('change', { bubbles: true }));
        check(part('degrees').textContent === '75.0°', 'the slider');
        undo();
        await frames(2);
        check(part('degrees').textContent === angle, 'a movement of the slider is one step');
        part('close').click();
        const kept = fovs();
        undo();
        check(fovs() === kept, 'nothing while the panel is folded away');
        part('open').click();
        choose(GOOD, 'good.json');
        await until(() => part('status').textContent === '3 key frames of good.json');
        press('p');
        await until(() => Number(part('frame').value) > 2);
        press('p');
        const stopped = part('frame').value;
        await frames(30);
        check(part('frame').value === stopped, 'the preview stops');
        sessionStorage.reloaded = 'yes';
        location.reload();
        await new Promise(() => {});
    }
    check(rows().length === 3, 'there again');
    press('k');
    press('p');
    await until(() => part('frame').value !== '0');
    await scroll(-100);
    check(!part('play').title.includes('Stop'), 'a hand ends the preview');
    Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); };
    rows()[3].querySelector('[title="Delete"]').click();
    check(rows().length === 3, 'without storage');
    rows()[2].querySelector('.go').click();
    await frames(30);
    check(rows()[2].classList.contains('selected'), 'the view stays');
    return { file: await saved() };
"""

#: The editor on the page of a paused run, which it would resume if a key of the editor were a key of the page. At last
#: the picture is that of the second key frame. GOOD: a file.
LIVE_EDITOR = """
    const posts = [];
    const ask = window.fetch;
    window.fetch = (path, more) => {
        if (more?.method !== 'POST') return ask(path, more);
        posts.push(path);
        return Promise.resolve(new Response());
    };
    const kind = document.getElementById('kind');
    const name = () => Object.keys(localStorage).find((key) => key.includes('camera path'));
    const stored = () => JSON.parse(localStorage.getItem(name())).keyframes.map((key) => JSON.stringify(key));
    const isPlaying = () => part('play').title.startsWith('Stop');
    const press = (key, target = document.body, more = {}) => {
        const code = /\\d/.test(key) ? `Digit${key}` : `Key${key.toUpperCase()}`;
        target.dispatchEvent(new KeyboardEvent('keydown', { key, code, bubbles: true, ...more }));
        target.dispatchEvent(new KeyboardEvent('keyup', { key, code, bubbles: true, ...more }));
    };
    const drawn = () => shown.full && shown.camera.eye === camera.eye && shown.camera.axes === camera.axes
        && shown.camera.half === half();
    check(part('panel').hidden, 'folded away');
    const own = half();
    choose(GOOD, 'good.json');
    await until(() => rows().length === 2);
    part('open').click();
    press('k');
    check(rows().length === 3 && kind.value === 'rgb', 'the key adds one');
    press('z', document.body, { ctrlKey: true });
    check(rows().length === 2 && posts.length === 0, 'undone');
    press('Z', document.body, { ctrlKey: true, shiftKey: true });
    check(rows().length === 3, 'redone');
    rows()[2].querySelector('[title="Delete"]').click();
    check(rows().length === 2 && part('status').textContent === 'Key frame 3 deleted.', 'deleted');
    press('p');
    check(posts.length === 1 && !isPlaying(), 'P is of the page');
    check(part('play').title === 'Preview (V; P pauses training)', 'and the button says so');
    press('p', part('frame'));
    check(posts.length === 2 && !isPlaying(), 'also from a slider');
    for (const key of ['2', 'c', 'k', 'v', 'p']) press(key, part('seconds'));
    check(kind.value === 'rgb' && document.getElementById('cameras').checked, 'what is typed is not for the page');
    check(rows().length === 2 && !isPlaying(), 'nor for the editor');
    press('2');
    check(kind.value === 'depth', 'a key of the page');
    press('1');
    press('?');
    press('k', document.getElementById('keys'));
    check(document.getElementById('keys').open && rows().length === 2, 'no keys behind a dialog');
    document.getElementById('keys').close();
    for (let i = 0; i < 98; i++) press('k');
    const [number, time] = rows()[99].querySelector('.go').children;
    const ends = document.createRange();
    ends.selectNodeContents(number);
    check(ends.getBoundingClientRect().right + 2 < time.getBoundingClientRect().left, 'numbers have room');
    for (let i = 0; i < 98; i++) press('z', document.body, { ctrlKey: true });
    check(rows().length === 2, 'as before');
    press('h');
    check(part('open').classList.contains('faded'), 'the button hides with the panel of the page');
    press('h');
    check(!part('open').classList.contains('faded'), 'and appears with it');
    const poses = new Set();
    press('v');
    check(isPlaying() && posts.length === 2, 'the preview');
    await until(() => poses.add(shown.view).size > 3);
    const at = Number(part('frame').value);
    await until(() => Number(part('frame').value) > at);
    const turn = { deltaY: -100, bubbles: true, cancelable: true };
    document.getElementById('lines').dispatchEvent(new WheelEvent('wheel', turn));
    check(!isPlaying(), 'a hand ends it');
    const other = { model: 'other', command: 'splat render other' };
    editor.goOver(other);
    check(rows().length === 0 && part('undo').disabled, 'another run has key frames of its own');
    press('k');
    check(part('command').textContent.startsWith('splat render other --views'), 'and its command');
    editor.goOver(stage.path_editor);
    check(rows().length === 2, 'each has its own');
    localStorage.removeItem('splat camera path of other');
    part('close').click();
    check(Math.abs(half() - own) < 1e-12, 'the field of view of the page again');
    part('open').click();
    rows()[1].querySelector('.go').click();
    check(rows()[1].classList.contains('selected'), 'it is shown');
    press('k');
    check(stored()[2] === stored()[1], 'to the last digit');
    press('z', document.body, { ctrlKey: true });
    rows()[1].querySelector('.go').click();
    await until(drawn);
    await frames(3);
    return { file: await saved(), command: part('command').textContent };
"""

#: Whether no panel of the page of a run covers another, or leaves the window.
PANELS_ARE_APART = """
    part('open').click();
    press('k');
    press('k');
    document.getElementById('options').open = true;
    await frames(5);
    const boxes = [document.getElementById('panel'), part('panel')].map((element) => element.getBoundingClientRect());
    for (const { left, right, top, bottom } of boxes) {
        check(left >= 0 && top >= 0 && right <= innerWidth && bottom <= innerHeight, 'inside the window');
        check(right - left > 200 && bottom - top > 60, 'large enough');
    }
    const [one, other] = boxes;
    check(one.right <= other.left || one.bottom <= other.top, `apart: ${JSON.stringify(boxes)}`);
    part('close').click();
    const open = part('open').getBoundingClientRect();
    const own = document.getElementById('panel').getBoundingClientRect();
    check(own.right <= open.left || own.bottom <= open.top, `apart: ${JSON.stringify([own, open])}`);
    return {};
"""

#: Nothing is learnt and nothing is pruned.
INIT = ("--sh-degree", "3", "--set", "schedule.refine_start=100000", "--init")


@contextmanager
def running(*words: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*splat_command(), *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def paused(url: str) -> Iterator[None]:
    """A run waits, also for a browser that takes longer to start than a pause lasts without one."""
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            urlopen(Request(f"{url}pause", method="POST", headers={"X-Splat": "1"})).close()
            done.wait(1)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield
    finally:
        done.set()
        asking.join()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many small Gaussians with harmonics, seen from a ring of cameras, up being z."""
    folder = tmp_path_factory.mktemp("pages")
    gaussians = scene(3000)
    gaussians.log_scales += 0.3
    gaussians.logit_opacities += 2.0
    (folder / "model.ply").write_bytes(encode_ply(gaussians, ExportMetadata()).payload)
    words = [
        "train",
        write_scene(folder / "scene"),
        "-o",
        folder / "run",
        "--stop-at",
        1,
        "-q",
        *INIT,
        folder / "model.ply",
    ]
    done = subprocess.run([*splat_command(), *map(str, words)], check=False, capture_output=True)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def psnr(found: np.ndarray, gaussians: Gaussians, camera: Camera, look: RenderSettings) -> float:
    return decibels(found, render_pixels(gaussians, camera.resized(*SIZE), look))


def decibels(found: np.ndarray, expected: np.ndarray) -> float:
    assert expected.std() > 30, "there is something to see"
    return float(10 * np.log10(255.0**2 / ((found.astype(float) - expected) ** 2).mean()))


def test_splat_view_shows_the_first_camera_upright(run: Path, tmp_path: Path) -> None:
    """34.3 dB were measured: SuperSplat's falloff is not quite a Gaussian's, and it sorts by distance, not by depth."""
    checkpoint = load_checkpoint(run / "ckpts" / "ckpt_000001.pt")
    with running("view", run, "--port", 0, "--no-open") as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        seen = look_at(f"{url}?noanim&noui&webgl", tmp_path / "view.png", SIZE)
    assert (seen.requests, seen.errors) == ([f"{url}?noanim&noui&webgl", f"{url}scene.ply"], [])
    assert psnr(seen.pixels, gaussians_to_render(checkpoint), checkpoint.cameras[0], RenderSettings()) > 33


def editor_steps(steps: str, ready: str) -> str:
    """The expression that takes the steps once the page is ready."""
    return EDITOR.replace("STEPS", steps).replace("READY", ready)


def hand_at_editor(run: Path, steps: str, picture: Path, *, flags: str = "webgl") -> Look:
    """Take the steps in the page of a run; the page's picture afterwards, and the value of the steps.

    flags: of the page. Without noanim the viewer moves its camera until a hand does.
    """
    with running("view", run, "--port", 0, "--no-open") as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        seen = look_at(f"{url}?{flags}", picture, SIZE, ready=editor_steps(steps, "window.isDrawn"))
    names = ["", "scene.ply", "supersplat_view.js", *EDITOR_FILES]
    assert {request.split("?")[0] for request in seen.requests} == {f"{url}{name}" for name in names}
    assert seen.errors == [], "also of the content security policy"
    assert "error" not in seen.value, seen.value["error"]
    return seen


def rendered(model: Path, views: Path) -> list[NDArray[np.uint8]]:
    """The frames that ``splat render`` makes of a camera path."""
    words = [
        "render",
        model,
        "--views",
        views,
        "-o",
        views.with_suffix(""),
        "--size",
        "{}x{}".format(*SIZE),
        "-q",
    ]
    subprocess.run([*splat_command(), *map(str, words)], check=True, capture_output=True)
    return [imageio.imread(path)[..., :3] for path in sorted(views.with_suffix("").glob("*.png"))]


def test_key_frames_of_the_page_render_as_they_are_seen(run: Path, tmp_path: Path) -> None:
    """35.4 dB were measured."""
    seen = hand_at_editor(run, ADD_TWO, tmp_path / "view.png", flags="noanim&webgl")
    path = tmp_path / "camera_path.json"
    path.write_text(seen.value["file"])
    assert json.loads(seen.value["file"])["keyframes"][1]["override_transition_sec"] == 0.4
    assert seen.value["command"] == f"splat render {run} --views camera_path.json -o path.mp4"
    document = json.loads(seen.value["file"])
    first, last = read_cameras(path)
    begin = load_checkpoint(run / "ckpts" / "ckpt_000001.pt").cameras[0].resized(*SIZE)
    assert np.allclose(first.viewmat, begin.viewmat, atol=1e-5), "the page opens at the first camera"
    assert first.fy == pytest.approx(begin.fy, rel=1e-5)
    assert np.linalg.norm(last.center - first.center) > 0.1
    for camera, key in zip((first, last), document["keyframes"], strict=True):
        assert np.allclose(np.linalg.inv(camera.viewmat) @ FLIP, np.reshape(key["matrix"], (4, 4)), atol=1e-9)
    frames = rendered(run.parent / "model.ply", path)  # the run has learnt no SH yet
    assert len(frames) == 2
    assert decibels(seen.pixels, frames[1]) > 33
    assert decibels(seen.pixels, frames[0]) < 25, "the view has moved"


def test_a_camera_path_is_loaded_edited_and_played(run: Path, tmp_path: Path) -> None:
    """34.4 dB were measured at the last key frame: which has a roll, as the controls of the viewer lack."""
    cameras = load_checkpoint(run / "ckpts" / "ckpt_000001.pt").cameras[:3]
    poses = [np.linalg.inv(camera.viewmat) @ FLIP for camera in cameras]
    poses[2][:3, :3] @= Rotation.from_euler("z", 35, degrees=True).as_matrix()
    keys = [{"matrix": pose.ravel().tolist(), "fov": fov} for pose, fov in zip(poses, (30, 40, 50), strict=True)]
    size = {"render_width": SIZE[0], "render_height": SIZE[1]}
    good = json.dumps({"keyframes": keys, "seconds": 2, "fps": 5, "is_cycle": True, **size})
    seen = hand_at_editor(run, LOAD_AND_EDIT.replace("GOOD", json.dumps(good)), tmp_path / "view.png")
    document = json.loads(seen.value["file"])
    assert [key["matrix"] for key in document["keyframes"]] == [key["matrix"] for key in keys]
    path = tmp_path / "camera_path.json"
    path.write_text(json.dumps({**document, "keyframes": document["keyframes"][2:]}))
    (frame,) = rendered(run.parent / "model.ply", path)
    assert decibels(seen.pixels, frame) > 33


def test_the_viewer_of_a_run_shows_the_state_in_the_making(run: Path, tmp_path: Path) -> None:
    """43.4 dB were measured: JPEG is all that lies between."""
    words = ["-o", tmp_path / "run", "--json", "--viewer-port", 0, *INIT, run.parent / "model.ply"]
    with running("train", run.parent / "scene", *words) as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        next(line for line in process.stdout if json.loads(line)["event"] == "saved")
        with paused(url):
            seen = look_at(url, tmp_path / "live.png", SIZE, ready=LIVE_IS_WHOLE, element="#picture")
            hands = look_at(url, tmp_path / "hands.png", SIZE, ready=HANDS_WORK)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert seen.errors == hands.errors == []
    names = ["", "stage", "picture", "live_view.js", *EDITOR_FILES]
    assert {request.split("?")[0] for request in seen.requests} == {f"{url}{name}" for name in names}
    checkpoint = load_checkpoint(Path(json.loads(out.splitlines()[-1])["path"]))
    camera = checkpoint.cameras[checkpoint.train[0]]
    assert psnr(seen.pixels, gaussians_to_render(checkpoint), camera, RenderSettings.trained(checkpoint)) > 41


def test_key_frames_of_a_run_render_as_they_are_seen_while_it_trains(run: Path, tmp_path: Path) -> None:
    """42.3 dB were measured at the second key frame, which has a roll and a field of view of its own."""
    cameras = load_checkpoint(run / "ckpts" / "ckpt_000001.pt").cameras[:2]
    poses = [np.linalg.inv(camera.viewmat) @ FLIP for camera in cameras]
    poses[1][:3, :3] @= Rotation.from_euler("z", 35, degrees=True).as_matrix()
    keys = [{"matrix": pose.ravel().tolist(), "fov": fov} for pose, fov in zip(poses, (40, 50), strict=True)]
    size = {"render_width": SIZE[0], "render_height": SIZE[1]}
    good = json.dumps({"keyframes": keys, "seconds": 60, "fps": 10, **size})
    steps = LIVE_EDITOR.replace("GOOD", json.dumps(good))
    drawn = "document.body.dataset.step"
    folder = tmp_path / "run"
    words = ["-o", folder, "--json", "--viewer-port", 0, *INIT, run.parent / "model.ply"]
    with running("train", run.parent / "scene", *words) as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]

        def wait_for_save() -> None:
            assert process.stdout is not None
            next(line for line in process.stdout if json.loads(line)["event"] == "saved")

        wait_for_save()
        with paused(url):
            process.send_signal(signal.SIGUSR1)
            wait_for_save()
            picture = {"ready": editor_steps(steps, drawn), "element": "#picture"}
            seen = look_at(url, tmp_path / "live.png", SIZE, **picture)
            others = [
                look_at(url, tmp_path / "panels.png", window, ready=editor_steps(PANELS_ARE_APART, drawn))
                for window in ((1280, 800), (390, 844))
            ]
            for look in (seen, *others):
                assert look.errors == []
                assert "error" not in look.value, look.value["error"]
            document = json.loads(seen.value["file"])
            path = tmp_path / "camera_path.json"
            path.write_text(json.dumps({**document, "keyframes": document["keyframes"][1:]}))
            (frame,) = rendered(folder, path)
            assert process.poll() is None, "the run goes on"
    assert seen.value["command"] == f"splat render {folder} --views camera_path.json -o path.mp4"
    assert [key["matrix"] for key in document["keyframes"]] == [key["matrix"] for key in keys]
    assert decibels(seen.pixels, frame) > 41
