"""``splat bench`` from the command line: runs, figures, and what is not run again."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import pytest

from splatcli.bench import Cell, Record, _run, markdown, measure, plan_of
from splatcli.checkpoint.run_dir import RunDir
from splatcli.cli.commands import run
from splatcli.errors import UsageError
from tests.forked import splat_command
from tests.native.cases import NEEDS_COMPILER
from tests.scene import made

SHORT = "--iterations 4 --sh-degree 0"


def record(scene: str, setting: str, seed: int, psnr: float, count: int) -> Record:
    return Record(scene, setting, seed, "splat train", 2.5, 4.5, 100.0, 10, psnr, 0.9, count, [], {})


def test_the_table_has_means_and_spreads() -> None:
    records = [record("a", "x", 1, 30.0, 1000), record("a", "x", 2, 32.0, 2000), record("b", "x", 1, 20.0, 500)]
    lines = markdown(records)
    assert lines[0] == "| scene | setting | seeds | PSNR | SSIM | Gaussians | seconds | MB |"
    assert lines[2] == "| a | x | 2 | 31.00 ± 1.41 | 0.9000 ± 0.0000 | 1,500 ± 707 | 2.5 ± 0.0 | 100 ± 0 |"
    assert lines[3] == "| b | x | 1 | 20.00 | 0.9000 | 500 | 2.5 | 100 |"
    assert lines[4].startswith("| mean | x |  | 25.50 |"), "the mean of the scenes' means"


def test_a_setting_that_a_scene_lacks_has_no_mean() -> None:
    lines = markdown([record("a", "x", 1, 30.0, 1), record("a", "y", 1, 31.0, 1), record("b", "x", 1, 20.0, 1)])
    assert [line for line in lines if line.startswith("| mean")] == ["| mean | x |  | 25.00 | 0.9000 | 1 | 2.5 | 100 |"]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bench") / "thing"
    made.colmap_scene(root)
    return root


def bench(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = run(["bench", *map(str, arguments)])
    said = capfd.readouterr()
    return code, said.out, said.err


def test_a_sheet_leaves_the_log_of_its_run(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    with pytest.raises(UsageError):
        _run(["trian"], log)
    said = log.read_text()
    assert "trian" in said
    _run(["--version"], log, "a")
    assert log.read_text() == said


def test_what_is_asked_for_beside_known_figures_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def fake(arguments: list[str], log: Path, mode: str = "w") -> Any:
        ran.append(arguments[0])
        if arguments[0] == "train":
            place = Path(arguments[arguments.index("-o") + 1])
            place.mkdir()
            figures = {"psnr": 20.0, "ssim": 0.5, "step": 3, "num_gaussians": 9, "views": [], "protocol": {}}
            (place / "metrics.jsonl").write_text(json.dumps({"event": "eval", **figures}))
        else:
            Path(arguments[arguments.index("--sheet") + 1]).write_bytes(b"png")
        return resource.getrusage(resource.RUSAGE_SELF)

    monkeypatch.setattr("splatcli.bench._run", fake)
    monkeypatch.chdir(tmp_path)
    (cell,) = plan_of([Path("scene")], [], [1])

    def measured(cell: Cell = cell, *, keep: bool = False, sheet: bool = False) -> tuple[bool, list[str]]:
        ran.clear()
        return measure(cell, tmp_path, keep=keep, sheet=sheet)[1], list(ran)

    assert measured() == (False, ["train"])
    assert measured() == (True, [])
    assert measured(keep=True) == (False, ["train"]), "the run was not kept"
    assert measured(keep=True, sheet=True) == (True, ["eval"])
    assert measured(keep=True, sheet=True) == (True, [])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (other,) = plan_of([Path("scene")], [], [1])
    assert measured(other) == (False, ["train"]), "a scene of this name in another folder is another one"


@NEEDS_COMPILER
def test_runs_are_measured_once(scene: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = [scene, "--setting", f"short={SHORT}", "--seeds", "1", "-o", tmp_path / "out", "--sheet"]
    code, out, err = bench(capfd, *arguments, "--json")
    assert code == 0, err
    events = [json.loads(line) for line in out.splitlines()]
    assert [event["event"] for event in events] == ["run", "result"]
    first: dict[str, Any] = events[0]
    assert first["command"].startswith(f"splat train {scene} --iterations 4")
    assert first["step"] == 4
    assert 0 < first["psnr"] < 60
    assert first["seconds"] > 0
    assert first["cpu_seconds"] > 0
    assert first["peak_mb"] > 50
    assert first["views"]
    report = json.loads((tmp_path / "out/bench.json").read_text())
    assert report["runs"][0]["psnr"] == first["psnr"]
    assert {"date", "version", "processor", "threads", "matmul_gflops"} <= report.keys()
    assert (tmp_path / "out/thing--short--1.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "out/thing--short--1").exists(), "the run itself is not kept"

    code, out, err = bench(capfd, *arguments, "--setting", f"other={SHORT} --cap-max 9")
    assert code == 0, err
    assert "1/2 thing--short--1" in err
    assert "(known)" in err.splitlines()[0]
    assert "(known)" not in err.splitlines()[1]
    assert out.splitlines() == (tmp_path / "out/table.md").read_text().splitlines()
    assert out.splitlines()[3].startswith("| thing | other | 1 |")


@NEEDS_COMPILER
def test_a_scene_that_has_changed_is_measured_again(
    scene: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "thing"
    shutil.copytree(scene, place)
    out = place / "bench"  # whose own files are no part of the scene
    arguments = [place, "--setting", f"short={SHORT}", "--seeds", "1", "-o", out]
    code, before, err = bench(capfd, *arguments)
    assert code == 0, err
    code, again, err = bench(capfd, *arguments)
    assert (code, again, "(known)" in err, "has changed" in err) == (0, before, True, False), err
    for photo in (place / "images").iterdir():
        imageio.imwrite(photo, imageio.imread(photo) // 4)
    code, after, err = bench(capfd, *arguments)
    assert (code, "(known)" in err, after == before) == (0, False, False), err
    said = f"warning: {place}: the scene has changed since {out}/thing--short--1.json was measured; it is trained again"
    assert said in err
    shutil.rmtree(place / "images")
    shutil.move(out, tmp_path / "out")
    shutil.rmtree(place)
    code, gone, err = bench(capfd, *arguments[:-1], tmp_path / "out")
    assert (code, gone) == (0, after), f"figures outlive their scene: {err}"


@NEEDS_COMPILER
def test_a_run_that_fails_ends_the_bench_with_its_words(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bare").mkdir()
    code, out, err = bench(capfd, tmp_path / "bare", "--setting", "bad=", "--seeds", "1", "-o", tmp_path)
    assert (code, out) == (3, "")
    assert "exited with 3" in err
    assert "the folder is empty" in err
    assert "bare--bad--1.log" in err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--sh-degree 9", "model.sh_degree = 9: expected a number of at most 4"),
        ("--sh-degre 1", "there is no option --sh-degre\n  help: did you mean --sh-degree?"),
        ("--max-time soon", "'soon' is not a length of time\n  where: --max-time"),
        ("--max-time 5m --ranks 2", "--max-time plans for one process"),
        ("--strategy none-such", "there is no such strategy"),
        ("--set model.colour=1", "colour"),
        ("--ranks 4 --batch-size 2", "4 ranks want as many views a step"),
        ("--device gpu", "'gpu' is no device\n  where: --device"),
    ],
)
def test_the_flags_of_every_setting_are_read_before_the_first_run(
    flags: str, words: str, scene: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = ["--setting", f"good={SHORT}", "--setting", f"bad={flags}"]
    code, out, err = bench(capfd, scene, *settings, "-o", tmp_path / "out")
    assert (code, out, (tmp_path / "out").exists()) == (2, "", False)
    assert "setting 'bad' for scene 'thing': " in err
    assert words in err


def test_every_scene_is_looked_for_before_the_first_run(
    scene: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, err = bench(capfd, scene, tmp_path / "nowhere", "-o", tmp_path / "out")
    assert (code, out, (tmp_path / "out").exists()) == (3, "", False)
    assert f"there is no such scene\n  where: {tmp_path / 'nowhere'}" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "name scenes or a plan"),
        (("a", "--plan", "b"), "name scenes or a plan"),
        (("--plan", "b", "--setting", "x="), "its own settings"),
        (("a", "--seeds", "1,x"), "not a list of seeds"),
    ],
)
def test_contradictions_are_refused(arguments: tuple[str, ...], words: str, capfd: pytest.CaptureFixture[str]) -> None:
    code, _, err = bench(capfd, *arguments)
    assert code == 2
    assert words in err


@NEEDS_COMPILER
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_run_too(number: signal.Signals, scene: Path, tmp_path: Path) -> None:
    command = [*splat_command(), "bench", str(scene), "--seeds", "1", "-o", str(tmp_path)]
    # A shell of the tests may ignore SIGHUP, and children inherit that.
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    folder = tmp_path / "thing--default--1"
    while not (folder / "ckpts").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    _, words = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "Traceback" not in words
    with RunDir.open(folder):  # refused while another process trains in it
        pass
