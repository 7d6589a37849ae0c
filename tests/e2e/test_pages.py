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

import numpy as np
import pytest

from splatcli.checkpoint.file import load_checkpoint
from splatcli.formats.format import ExportMetadata
from splatcli.formats.ply import encode_ply
from splatcli.gaussians import Gaussians
from splatcli.render.images import RenderSettings, render_pixels
from splatcli.scene.camera import Camera
from splatcli.train.state import flushed
from tests.browser import look_at
from tests.cli.tiny import write_scene
from tests.forked import splat_command
from tests.formats.made import scene

pytestmark = pytest.mark.slow

SIZE = (480, 360)

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
    expected = render_pixels(gaussians, camera.resized(*SIZE), look).astype(float)
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
    assert psnr(seen.pixels, flushed(checkpoint), checkpoint.cameras[0], RenderSettings()) > 33


def test_the_viewer_of_a_run_shows_the_state_in_the_making(run: Path, tmp_path: Path) -> None:
    """43.4 dB were measured: JPEG is all that lies between."""
    words = ["-o", tmp_path / "run", "--json", "--viewer-port", 0, *INIT, run.parent / "model.ply"]
    with running("train", run.parent / "scene", *words) as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        next(line for line in process.stdout if json.loads(line)["event"] == "saved")
        with paused(url):
            seen = look_at(url, tmp_path / "live.png", SIZE, ready="document.body.dataset.step", element="#picture")
            hands = look_at(url, tmp_path / "hands.png", SIZE, ready=HANDS_WORK)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert seen.errors == hands.errors == []
    assert {request.split("?")[0] for request in seen.requests} == {url, f"{url}stage", f"{url}picture"}
    checkpoint = load_checkpoint(Path(json.loads(out.splitlines()[-1])["path"]))
    camera = checkpoint.cameras[checkpoint.train[0]]
    assert psnr(seen.pixels, flushed(checkpoint), camera, RenderSettings.trained(checkpoint)) > 41
