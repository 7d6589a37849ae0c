"""``splat view`` and ``--viewer``: a page is there while the command runs, and ends with it."""

from __future__ import annotations

import http.client
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from splatcli.checkpoint.file import load_checkpoint
from splatcli.cli import view as module
from splatcli.formats import html
from splatcli.formats.format import ExportMetadata
from splatcli.formats.ply import encode_ply
from splatcli.train.state import gaussians_to_render
from splatcli.viewer.http_server import listen
from splatcli.viewer.path_editor import editor_module
from tests.cli.tiny import QUICK
from tests.forked import splat_command
from tests.formats.made import read_ply, scene
from tests.running import Splat


def fetch(url: str, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content


def look(url: str, view: str) -> bytes:
    """A picture; asked for again, as the page does, when the machine is too busy for one."""
    for _ in range(100):
        status, content = fetch(url, view, **{"X-Splat": "1"})
        if status != 204:
            break
    return content


@contextmanager
def running(*words: object, command: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """``splat`` with these words; command: begins it, when that is not the usual."""
    process = subprocess.Popen(
        [*(command or splat_command()), *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_the_page_of_a_run_is_served_until_ctrl_c_and_follows_the_newest_checkpoint(
    finished_run: Path, tiny_scene: Path, tmp_path: Path, splat: Splat
) -> None:
    run = tmp_path / "run"
    words = ["-n", 40, "-q", *QUICK, "--set", "save.steps=[]"]
    assert splat("train", tiny_scene, "-o", run, "--stop-at", 5, *words).code == 0
    with running("view", run, "--port", 0, "--no-open") as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:")
        status, page = fetch(url)
        assert (status, b'"contentUrl": "scene.ply"' in page) == (200, True)
        assert [fetch(url, path, "POST")[0] for path in ("/", "/scene.ply", "/other")] == [405, 405, 404]
        (tmp_path / "first.ply").write_bytes(fetch(url, "/scene.ply")[1])
        assert splat("resume", run, "-q").code == 0
        assert fetch(url)[0] == 200
        (tmp_path / "second.ply").write_bytes(fetch(url, "/scene.ply")[1])
        (newest,) = (run / "ckpts").glob("*000040.pt")
        anew = tmp_path / "anew.pt"  # a run trained again, to the same step
        shutil.copy(run / "ckpts" / "ckpt_000005.pt", anew)
        kept = newest.replace(tmp_path / "kept.pt")
        anew.replace(newest)
        assert fetch(url)[0] == 200
        (tmp_path / "anew.ply").write_bytes(fetch(url, "/scene.ply")[1])
        kept.replace(newest)
        assert fetch(url)[0] == 200
        newest.write_bytes(b"PK broken")
        assert fetch(url)[0] == 200, "the page shows what it had"
        assert f'"command": "splat render {run}"'.encode() in page
        assert "<title>run · splat view</title>".encode() in page
        for name in ("supersplat_view.js", "path_editor.js"):
            assert b"./camera_path.js" in fetch(url, f"/{name}")[1]
        assert fetch(url, "/camera_path.js")[0] == fetch(url, "/path_editor.css")[0] == 200
        for path in ("/config.json", "/../config.json", f"/{run}/config.json", "/ckpts/ckpt_000040.pt"):
            assert fetch(url, path)[0] == 404
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, ""), err
    assert "Traceback" not in err
    assert "Ctrl-C" in err
    expected = gaussians_to_render(load_checkpoint(finished_run / "ckpts" / "ckpt_000040.pt"))
    first, second = read_ply(tmp_path / "first.ply"), read_ply(tmp_path / "second.ply")
    assert second.means.equal(expected.means)
    assert second.shN.equal(expected.shN)
    assert not first.means.equal(second.means)
    assert (tmp_path / "anew.ply").read_bytes() == (tmp_path / "first.ply").read_bytes()


def test_json_has_the_address_in_an_object(finished_run: Path) -> None:
    with running("view", finished_run, "--port", 0, "--json", "-q") as process:
        assert process.stdout is not None
        result = json.loads(process.stdout.readline())
        assert (result["event"], result["path"]) == ("result", str(finished_run / "ckpts" / "ckpt_000040.pt"))
        assert fetch(result["url"])[0] == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The user closes the viewer at once; the URLs that a browser was sent to."""
    opened: list[str] = []

    monkeypatch.setattr(module, "wait", lambda: None)
    monkeypatch.setattr(module, "open_page", opened.append)
    return opened


@pytest.mark.parametrize(
    ("display", "flags", "opens"),
    [("", [], False), (":0", [], True), (":0", ["--no-open"], False), ("", ["--open"], True)],
)
def test_a_browser_is_opened_where_it_can_be_seen(
    display: str,
    flags: list[str],
    opens: bool,
    splat: Splat,
    finished_run: Path,
    at_once: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DISPLAY", display)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    done = splat("view", finished_run, "--port", 0, *flags)
    assert done.code == 0
    assert at_once == ([done.lines[0]] if opens else [])


def test_limits_of_the_viewer_are_reported(
    splat: Splat, finished_run: Path, tmp_path: Path, at_once: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_EXACT", 10)
    done = splat("view", finished_run, "--port", 0, "--no-open")
    assert (done.code, "Gaussians, shown as a compressed PLY" in done.err) == (0, True)
    assert "SH degree" not in done.err
    (tmp_path / "a.ply").write_bytes(encode_ply(scene(5, 4), ExportMetadata()).payload)
    done = splat("view", tmp_path / "a.ply", "--port", 0, "--no-open")
    assert (done.code, "note: shown up to SH degree 3" in done.err) == (0, True)
    assert "compressed" not in done.err


@pytest.mark.parametrize("antialiased", [False, True])
def test_a_file_of_an_antialiased_model_is_shown_so(
    antialiased: bool, splat: Splat, tmp_path: Path, at_once: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[ExportMetadata] = []
    page = html.viewer_page
    monkeypatch.setattr(html, "viewer_page", lambda *given, **more: seen.append(given[-1]) or page(*given, **more))
    (tmp_path / "a.ply").write_bytes(encode_ply(scene(5, 1), ExportMetadata(antialiased=antialiased)).payload)
    assert splat("view", tmp_path / "a.ply", "--port", 0, "--no-open").code == 0
    assert [metadata.antialiased for metadata in seen] == [antialiased]


def test_the_command_of_the_camera_path_editor_reads_the_model_as_the_page(
    splat: Splat, tmp_path: Path, at_once: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, object]] = []
    page = html.viewer_page
    monkeypatch.setattr(html, "viewer_page", lambda *given, **more: seen.append(more) or page(*given, **more))
    model = tmp_path / "a model.ply"
    model.write_bytes(encode_ply(scene(5, 1), ExportMetadata()).payload)
    flags = ["--param-space", "raw", "--lenient"]
    assert splat("view", model, "--port", 0, "--no-open", *flags).code == 0
    (given,) = seen
    module = given["module"]
    assert isinstance(module, html.PageModule)
    assert module.settings["command"] == f"splat render '{model}' --param-space raw --lenient"
    monkeypatch.chdir(tmp_path)
    assert editor_module(Path("a model.ply")).settings == {
        "model": module.settings["model"],
        "command": "splat render 'a model.ply'",
    }
    assert editor_module(Path("other.ply")).settings["model"] != module.settings["model"]
    words = [*shlex.split(str(module.settings["command"]))[1:], "--views", "path.json", "-o", tmp_path / "x.png"]
    key = {"matrix": np.eye(4).ravel().tolist(), "fov": 40}
    path = {"keyframes": [key], "render_width": 32, "render_height": 24}
    (tmp_path / "path.json").write_text(json.dumps(path))
    words[words.index("path.json")] = str(tmp_path / "path.json")
    assert splat(*words).code == 0
    assert (tmp_path / "x.png").is_file()


def test_served_to_others_there_is_a_warning(splat: Splat, finished_run: Path, at_once: list[str]) -> None:
    done = splat("view", finished_run, "--port", 0, "--host", "0.0.0.0", "--no-open")
    assert done.code == 0
    assert "warning: anyone who reaches this machine at 0.0.0.0 can view and copy this model" in done.err
    assert "warning" not in splat("view", finished_run, "--port", 0, "--no-open").err


@pytest.mark.parametrize(
    ("words", "code", "found"),
    [
        (["nosuch.ply"], 2, "no such model"),
        (["{run}", "--port", "70000"], 2, "--port"),
        (["{run}", "--host", "no.such.host.invalid"], 2, "--host"),
        (["{run}", "--port", "{taken}"], 4, "is taken by another program"),
        (["{bad}"], 5, "neither a checkpoint nor a file of splats"),
        (["{run}", "--param-space", "raw"], 2, "--param-space"),
    ],
)
def test_what_cannot_be_viewed_is_refused(
    words: list[str], code: int, found: str, splat: Splat, finished_run: Path, tmp_path: Path
) -> None:
    (tmp_path / "bad.ply").write_bytes(b"hello")
    with listen("127.0.0.1", 0, lambda request: None) as server:
        places = {"run": finished_run, "bad": tmp_path / "bad.ply", "taken": server.server_address[1]}
        done = splat("view", "--no-open", *(word.format(**places) for word in words))
    assert (done.code, done.out) == (code, "")
    assert found in done.err
    assert "Traceback" not in done.err


def test_a_run_is_shown_while_it_trains_and_paused_and_stopped(tiny_scene: Path, tmp_path: Path) -> None:
    words = ["-o", tmp_path / "run", "-n", 100_000, "--json", "--viewer-port", 0, "--set", "save.steps=[]", *QUICK]
    with running("train", tiny_scene, *words) as process:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        assert first["event"] == "viewer", "before anything is read"
        url = first["url"]
        for line in process.stdout:
            if json.loads(line)["event"] == "saved":
                break
        assert b"<canvas" in fetch(url)[1]
        assert fetch(url, method="POST")[0] == 405
        assert fetch(url, "/stage")[0] == 404
        stage = json.loads(fetch(url, "/stage", **{"X-Splat": "1"})[1])
        pose = "%2C".join(map(str, stage["first"]["pose"]))
        view = f"/picture?me=a&pose={pose}&kind=rgb&urgent=1&seen=-1&width=40&height=30&fov=40"
        assert look(url, view).startswith(b"\xff\xd8")
        assert fetch(url, "/pause", "POST", **{"X-Splat": "1"})[0] == 204
        assert look(url, view).startswith(b"\xff\xd8")
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert json.loads(out.splitlines()[-1])["reason"] == "SIGTERM"


def test_a_viewer_that_cannot_be_had_is_refused_before_any_work(
    splat: Splat, tiny_scene: Path, finished_run: Path, tmp_path: Path
) -> None:
    with listen("127.0.0.1", 0, lambda request: None) as server:
        port = server.server_address[1]
        done = splat("train", tiny_scene, "-o", tmp_path / "run", "--viewer", "--viewer-port", port)
        assert (done.code, done.out, (tmp_path / "run").exists()) == (4, "", False)
        assert f"port {port} is taken" in done.err
        assert "where: --viewer-port" in done.err
        assert "leave --viewer-port out" in done.err
        assert splat("resume", finished_run, "--viewer-port", port).code == 4
    done = splat("resume", finished_run, "--viewer-host", "no.such.host.invalid")
    assert (done.code, "where: --viewer-host" in done.err) == (2, True)


def test_a_resumed_run_has_a_viewer_too(splat: Splat, finished_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    done = splat("resume", run, "--viewer", "--viewer-port", 0)
    assert done.code == 0
    assert "viewer: http://127.0.0.1:" in done.err


def test_a_run_outlives_more_idle_connections_than_it_may_have_descriptors(tiny_scene: Path, tmp_path: Path) -> None:
    saves = "save.steps=[50,100,150,200,250]"
    words = ["-o", tmp_path / "run", "-n", 300, "--json", "--viewer-port", 0, "--set", saves, *QUICK]
    limited = f'ulimit -n 256; exec "{sys.executable}" -m splatcli train "$@"'
    with running("train", tiny_scene, *words, command=("bash", "-c", limited)) as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        place = (urlsplit(url).hostname, urlsplit(url).port)
        assert fetch(url, "/pause", "POST", **{"X-Splat": "1"})[0] == 204
        idle = [socket.create_connection(place, timeout=60) for _ in range(300)]
        answers = [
            fetch(url)[0],
            fetch(url, "/stage", Origin="http://evil.example", **{"X-Splat": "1"})[0],
            fetch(url, "/pause", "POST", Origin="http://evil.example", **{"X-Splat": "1"})[0],
            fetch(url, Host="evil.example")[0],
            fetch(url, "/resume", "POST", **{"X-Splat": "1"})[0],
        ]
        out, err = process.communicate(timeout=300)
        for connection in idle:
            connection.close()
    assert (process.returncode, answers) == (0, [200, 403, 403, 403, 204]), err
    assert json.loads(out.splitlines()[-1])["step"] == 300
    assert load_checkpoint(tmp_path / "run" / "ckpts" / "ckpt_000300.pt").step == 300
