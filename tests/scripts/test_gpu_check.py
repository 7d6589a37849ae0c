"""scripts/gpu_check without a GPU: its arguments, sections that fail, the report, the scenes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import gpu_check
import pytest
import torch
from gpu import check, peer, prepare, scenes, speed
from gpu.process import run_child
from gpu.report import CARRIED, REHEARSE, Report, Section, Skipped, speed_lines, summary

from tests.gpu.rehearse import PROGRAMS
from tests.kernels.simt import simulated
from tests.native.cases import NEEDS_COMPILER

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def fake_runner(results: dict[str, Any]) -> Any:
    def run(name: str, work: Path, seconds: float, publish: Any) -> dict[str, Any]:
        result = results.get(name, {"status": "ok"})
        if isinstance(result, Exception):
            raise result
        return dict(result)

    return run


OURS = {
    "steps_per_second": 400.0,
    "ms": 2.5,
    "spread": 0.01,
    "peak_mib": 1500,
    "visible_share": 0.6,
    "isects_per_visible": 4.2,
}
PEER = {"steps_per_second": 100.0, "ms": 10.0, "peak_mib": 2500, "l1_only": {"ms": 8.0}}
SPEED = {"status": "ok", "1M 2MP front": OURS}
BESIDE = {"status": "ok", "version": "1.5.3", "1M 2MP front": {"ours": OURS, "gsplat": PEER}}


def test_reports_of_older_versions_are_read() -> None:
    older = {("pairs_per_visible" if key == "isects_per_visible" else key): value for key, value in OURS.items()}
    assert speed_lines({"1M": older}, {}) == speed_lines({"1M": OURS}, {})
    assert " 4.20 " in speed_lines({"1M": OURS}, {})[1]


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(SCRIPTS / "gpu_check"), "--part", "check", "--out", str(tmp_path / "out")],
        env={"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "gpu_check: an NVIDIA GPU is needed, and torch sees none\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--part", "check"], "--out"),
        (["--out", "x"], "--part is needed"),
        (["--part", "all", "--out", "x"], "--part"),
        (["--part", "speed", "--out", "x", "--only", "speed,sped"], "there is no section sped"),
        (["--part", "check", "--out", "x", "--only", "speed"], "there is no section speed"),
        (["--part", "check", "--out", "x", "--seconds", "soon"], "--seconds"),
        (["--part", "check", "--out", "x", "--seconds", "0"], "more than 0"),
        (["--out", "x", "--section", "none"], "--section"),
    ],
)
def test_wrong_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        gpu_check.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def _with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were a GPU, for runners that need none."""
    monkeypatch.setattr(gpu_check, "no_gpu", lambda: None)
    monkeypatch.setattr(gpu_check, "gsplat_building", lambda work: contextlib.nullcontext())
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for name in ("PATH", "PYTHONPATH", CARRIED):
        monkeypatch.setenv(name, os.environ.get(name, ""))


@pytest.mark.usefixtures("_with_gpu")
def test_the_report_and_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = {"speed": SPEED, "gsplat": BESIDE, "counters": {"status": "skipped", "skipped": "not installed"}}
    out = tmp_path / "deep" / "out"
    assert gpu_check.main(["--part", "speed", "--out", str(out)], fake_runner(results)) == 0
    report = json.loads((out / "speed.json").read_text())
    assert report["format"] == 2
    assert list(report["sections"]) == list(gpu_check.PARTS["speed"])
    assert all({"status", "seconds"} <= section.keys() for section in report["sections"].values())
    printed = capsys.readouterr().out
    assert printed == (out / "speed.txt").read_text()
    assert "1M 2MP front" in printed
    assert "4.00" in printed, "gsplat takes four times as long"
    assert "not installed" in printed
    assert {path.name for path in out.iterdir()} == {"speed.json", "speed.txt", "speed.log"}


@pytest.mark.usefixtures("_with_gpu")
def test_a_failed_section_is_reported_and_loses_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = {"build": {"status": "failed", "error": "nvcc\nis gone"}, "tests": RuntimeError("no pytest")}
    names = ["--part", "check", "--only", "environment,build,tests,sanitizer"]
    assert gpu_check.main(["--out", str(tmp_path), *names], fake_runner(results)) == 1
    sections = json.loads((tmp_path / "check.json").read_text())["sections"]
    assert {name: section["status"] for name, section in sections.items()} == {
        "environment": "ok",
        "build": "failed",
        "tests": "failed",
        "sanitizer": "ok",
    }
    assert sections["tests"]["error"] == "RuntimeError: no pytest"
    printed = capsys.readouterr().out
    assert "is gone" in printed
    assert "no pytest" in printed


def test_the_summary_fits_what_is_kept_of_the_output_and_ends_with_the_errors() -> None:
    failed = {f"tests/gpu/test_gpu.py::test_{i}": "AssertionError: " + "x" * 500 for i in range(200)}
    row = {"kernels": {f"splat::kernel_{i}": {"us": 1.0, "launches": 1} for i in range(50)}}
    row |= {"sum": {"ms": 1.0, "floor_ms": 1.0}, "project": {"ms": 1.0, "floor_ms": 1.0, "times_floor": 1.0}}
    state = {"seconds": 1.0, "status": "failed", "error": "\n".join(["y" * 300] * 40)}
    sections = {
        "environment": {**state, "gpu": "z" * 3000},
        "tests": {**state, "test_gpu": {"status": 1, "summary": "200 failed", "failed": failed}, "alone": {}},
        "training": {**state, "fox": "w" * 5000},
        "stages": {**state, **{f"case {i}": row for i in range(20)}},
        "gsplat": {**state, **{f"case {i}": {"ours": OURS, "gsplat": PEER} for i in range(40)}},
        "sanitizer": {**state, "error": "the last words"},
    }
    text = summary({"part": "check", "sections": sections, "seconds": 3.0})
    assert len(text) < 12_000
    assert "200 failed" in text
    assert "test_3" in text
    assert text.endswith("the last words")


def test_the_report_is_written_after_every_section_and_number(tmp_path: Path) -> None:
    seen = []
    path = tmp_path / "check.json"

    def run(name: str, work: Path, seconds: float, publish: Any) -> dict[str, Any]:
        seen.append(list(json.loads(path.read_text())["sections"]) if path.exists() else [])
        publish({"first": 1})
        section = json.loads(path.read_text())["sections"][name]
        assert (section["status"], section["first"]) == ("running", 1)
        (work / f"{name}-more.log").write_text(f"words of {name}")
        return {"status": "ok"}

    work = tmp_path / "work"
    work.mkdir()
    gpu_check.check("check", tmp_path, work, 100, ["environment", "build", "tests"], run)
    assert seen == [[], ["environment"], ["environment", "build"]]
    merged = (tmp_path / "check.log").read_text()
    assert all(f"words of {name}" in merged for name in ("environment", "build", "tests"))


def test_every_section_gets_its_share_and_what_others_left(tmp_path: Path) -> None:
    shares = []

    def run(name: str, work: Path, seconds: float, publish: Any) -> dict[str, Any]:
        shares.append(seconds)
        return {"status": "ok"}

    report = gpu_check.check("check", tmp_path, tmp_path, 1.0, ["environment", "build"], run)
    assert shares == []
    assert report["sections"]["build"]["skipped"] == "no time left"
    for part, sections in gpu_check.PARTS.items():
        shares.clear()
        gpu_check.check(part, tmp_path, tmp_path, 540.0, list(sections), run)
        reserved = [section.seconds for section in sections.values()]
        assert sum(reserved) <= 540
        assert all(share >= least - 1 for share, least in zip(shares, reserved, strict=True))
        # Those before it took no time: the last has all.
        assert shares[-1] == pytest.approx(540, abs=5)
    shares.clear()
    gpu_check.check("check", tmp_path, tmp_path, 62.5, ["environment", "build"], run)
    assert shares[0] == pytest.approx(12.5, abs=1), "with half the time, half of it"


def test_a_child_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    log = tmp_path / "log"
    started = time.monotonic()
    assert run_child(["sh", "-c", "echo begun; sleep 60 & sleep 60"], log, 1.0) is None
    assert time.monotonic() - started < 20
    assert log.read_text() == "begun\n"
    assert run_child(["sh", "-c", "exit 3"], log, 20.0) == 3
    assert run_child(["sh", "-c", "echo $MARK"], log, 20.0, MARK="here") == 0
    assert log.read_text() == "here\n"


def test_a_stopped_part_still_reports_what_it_found(tmp_path: Path) -> None:
    """As where a time limit ends it: in the middle of a section, which has found something."""
    program = """
import sys, time, pathlib
sys.path.insert(0, sys.argv[1])
import gpu_check
gpu_check.no_gpu = lambda: None
def run(name, work, seconds, publish):
    if name == "build":
        publish({"seconds_to_build_and_load": 12.5})
        print("now", flush=True)
        time.sleep(60)
    return {"status": "ok"}
gpu_check.main(["--part", "check", "--out", sys.argv[2]], run)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(SCRIPTS), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "now\n"
    process.terminate()
    printed, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + 15
    assert '"seconds_to_build_and_load":12.5' in printed
    assert json.loads((tmp_path / "check.json").read_text())["sections"]["build"]["status"] == "running"


def test_a_section_in_a_process_of_its_own(tmp_path: Path) -> None:
    """Without a GPU it ends with a message, which becomes the section's error."""
    if torch.cuda.device_count():
        pytest.skip("this machine has a GPU")
    result = gpu_check.run_section("environment", tmp_path, 120.0, lambda found: None)
    assert result["status"] == "failed"
    assert "torch sees none" in result["error"]


def test_what_a_failing_section_found_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(report: Any) -> None:
        report["first"] = 1
        raise ValueError("second is missing")

    def skips(report: Any) -> None:
        raise Skipped("not here")

    def finds_no_gpu(report: Any) -> None:
        raise RuntimeError("No CUDA GPUs are available")

    monkeypatch.setitem(gpu_check.SECTIONS, "speed", Section(breaks, 1))
    monkeypatch.setitem(gpu_check.SECTIONS, "gsplat", Section(skips, 1))
    monkeypatch.setitem(gpu_check.SECTIONS, "build", Section(finds_no_gpu, 1))
    assert gpu_check.child("speed", tmp_path, 5.0) == 1
    assert json.loads((tmp_path / "speed.json").read_text()) == {"first": 1}
    assert "second is missing" in capsys.readouterr().err
    assert gpu_check.child("gsplat", tmp_path, 5.0) == 0
    assert json.loads((tmp_path / "gsplat.json").read_text()) == {"skipped": "not here"}
    assert gpu_check.child("build", tmp_path, 5.0) == 1, "a GPU that is not there is a failure"
    monkeypatch.setenv(REHEARSE, "1")
    assert gpu_check.child("build", tmp_path, 5.0) == 0
    assert json.loads((tmp_path / "build.json").read_text()) == {"no_gpu": "No CUDA GPUs are available"}


#: What a machine with a GPU was seen to lack.
LACKING = ("pydantic", "pydantic_core", "annotated_types", "typing_inspection", "plyfile", "pycolmap", "gsplat")
BLOCK = """
import sys
class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Lacking())
"""


def test_the_tests_for_a_gpu_are_collected_without_packages_that_it_may_lack(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCK.format(names=LACKING))
    command = [sys.executable, "-m", "pytest", "tests/gpu", "--collect-only", "-q", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        command, cwd=SCRIPTS.parent, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("test_gpu", "test_offload", "test_ranks"):
        assert f"tests/gpu/{name}.py::" in done.stdout
    assert not [line for line in done.stdout.splitlines() if "error" in line.lower() and "::" not in line]


def test_without_a_gpu_every_section_comes_to_its_end(tmp_path: Path) -> None:
    """The rehearsal, with the packages that a machine with a GPU may lack blocked; only what takes long is left out."""
    if torch.cuda.device_count():
        pytest.skip("this machine has a GPU")
    (tmp_path / "sitecustomize.py").write_text(BLOCK.format(names=LACKING))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    parts = {"check": "environment,build,determinism,sanitizer", "speed": "stages,speed,counters,gsplat,beside"}
    for part, names in parts.items():
        command = [sys.executable, str(SCRIPTS / "gpu_check.py"), "--part", part, "--only", names, "--rehearse"]
        command += ["--tiny", "--out", str(tmp_path / "out"), "--carried", str(tmp_path / "nothing")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        sections = json.loads((tmp_path / "out" / f"{part}.json").read_text())["sections"]
        assert list(sections) == names.split(",")
        for name, section in sections.items():
            assert section["status"] in ("no GPU", "skipped"), (name, section)
        assert "no GPU" in done.stdout


def test_the_sections_but_training_need_the_rasterizers_parts_only() -> None:
    """On the machines with a GPU the command line's packages are missing."""
    program = """
        import sys
        for name in ("typer", "rich", "pydantic", "plyfile", "pycolmap", "imageio", "scipy"):
            sys.modules[name] = None  # an import of it fails
        sys.path.insert(0, "scripts")
        import gpu_check
        from gpu import scenes
        import splatcli.native.backend, splatcli.rasterizer, splatcli.gaussians, splatcli.scene.camera
        scenes.make_scene(100, 64, 48, "cpu")
    """
    lines = "\n".join(line.strip() if not line.startswith(" " * 12) else line[8:] for line in program.splitlines())
    subprocess.run([sys.executable, "-c", lines], cwd=SCRIPTS.parent, check=True)


@NEEDS_COMPILER
def test_the_scene_has_the_statistics_that_are_promised() -> None:
    from splatcli.native.backend import Backend
    from splatcli.rasterizer.context import RasterContext, view_of

    # The density of 1 M at 2 megapixels.
    n, width, height = 24_000, 288, 173
    gaussians, cameras = scenes.make_scene(n, width, height, "cpu")
    assert len(cameras) == 8
    around, outward = scenes.make_scene(n, width, height, "cpu", "orbit")
    assert len(outward) == 12
    seen = torch.zeros(n, dtype=torch.bool)
    for camera in outward:
        context = RasterContext(Backend.cpu())
        view = view_of(camera, sh_degree=3, antialiased=False, with_depth=False)
        context.bin(view, context.project(view, around))
        assert 0.2 < context.native.visible / n < 0.3
        assert 6.0 < context.native.isects / context.native.visible < 11.0
        seen[context.visible_slots()[0]] = True
    assert float(seen.float().mean()) > 0.9, "all are seen by some camera"
    for camera in cameras:
        context = RasterContext(Backend.cpu())
        view = view_of(camera, sh_degree=3, antialiased=False, with_depth=False)
        context.bin(view, context.project(view, gaussians))
        assert 0.5 < context.native.visible / 24_000 < 0.6
        assert 3.5 < context.native.isects / context.native.visible < 5.0
    again, _ = scenes.make_scene(24_000, 288, 173, "cpu")
    assert torch.equal(again.means, gaussians.means)
    targets = scenes.make_targets(cameras[:2], "cpu")
    assert [(t.shape, t.dtype) for t in targets] == [((173, 288, 3), torch.uint8)] * 2


def test_the_floor_of_a_step_is_near_the_roofline_that_was_estimated() -> None:
    floor = speed.least_bytes(1_000_000, 600_000, 2_500_000, 1920 * 1080)
    assert 1.8e9 < sum(floor.values()) < 3.0e9
    assert floor["loss"] == pytest.approx(236e6, rel=0.01)


def test_rates_are_medians_of_rounds() -> None:
    calls = []
    result = scenes.rate_of(lambda: calls.append(time.sleep(0.001)), lambda: None, 0.1)
    assert 0.9 < result["ms"] < 20
    assert result["steps_per_second"] == pytest.approx(1e3 / result["ms"], rel=0.05)
    assert len(calls) == 24 + 3 * result["steps"]


@NEEDS_COMPILER
def test_the_peers_loss_is_the_training_loss() -> None:
    from splatcli.rasterizer.reference import loss_reference
    from tests.rasterizer.scenes import random_image

    image, target = random_image(1, 40, 30), (random_image(2, 40, 30) * 255).round().to(torch.uint8)
    ours, theirs = image.clone().requires_grad_(), image.clone().requires_grad_()
    loss = peer.FusedLoss(simulated())(ours, target)
    expected = loss_reference(theirs, target.float() / 255, scenes.SSIM_LAMBDA)
    torch.testing.assert_close(loss, expected, rtol=0, atol=2e-6)
    torch.autograd.backward([3 * loss, 3 * expected])
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-7)


def test_the_time_to_a_psnr_is_read_off_the_series() -> None:
    series = [(1.0, 20.0), (2.0, 22.0), (3.0, 23.0)]
    assert peer.seconds_to(21.0, series) == 1.5
    assert peer.seconds_to(23.0, series) == 3.0
    assert peer.seconds_to(19.0, series) == 1.0
    assert peer.seconds_to(23.1, series) is None


def test_counters_are_read_from_what_ncu_prints() -> None:
    text = """tiny words before it
==PROF== Connected to process 7
"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"
"0","7","void splat::gpu::blend_fast<3>(splat::Job, int)","GPU Speed Of Light","Duration","us","71.20"
"0","7","void splat::gpu::blend_fast<3>(splat::Job, int)","GPU Speed Of Light","Elapsed Cycles","cycle","9"
"1","7","splat::gpu::(anonymous namespace)::project_chunks(splat::Job)","Occupancy","Achieved Occupancy","%","48.8"
"""
    assert speed.parse_counters(text) == {
        "0 blend_fast<3>": {"duration": "71.20 us"},
        "1 project_chunks": {"occupancy": "48.8 %"},
    }
    assert speed.parse_counters("==ERROR== ERR_NVGPUCTRPERM") == {}
    kernels = {"void splat::gpu::blend_fast<3>(splat::Job)": {}, "void at::native::fill(int)": {}}
    assert speed.largest_kernels({"gpu": "x", "1M": {"kernels": kernels}}) == ["blend_fast"]
    assert speed.largest_kernels({}) == list(speed.LARGEST)


def test_a_scene_that_is_carried_is_the_scene(tmp_path: Path) -> None:
    from splatcli.config import DataConfig
    from splatcli.scene.read import read_scene

    prepare.write_scenes(tmp_path)
    courtyard = json.loads((tmp_path / "courtyard" / "views.json").read_text())
    scene = read_scene(SCRIPTS.parent / "data" / "samples" / "courtyard", DataConfig())
    assert [view["name"] for view in courtyard["views"]] == [camera.name for camera in scene.cameras]
    assert courtyard["test"] == scene.test
    assert all((SCRIPTS.parent / courtyard["images"] / view["name"]).is_file() for view in courtyard["views"])
    real = SCRIPTS.parents[1] / "shared" / "data" / "fox"
    if not real.is_dir():
        pytest.skip(f"{real} is not there")
    whole, half = read_scene(real, DataConfig()), read_scene(tmp_path / "fox", DataConfig())
    assert [camera.name for camera in half.cameras] == [camera.name for camera in whole.cameras]
    assert len(half.points.xyz) == len(whole.points.xyz)
    for small, large in zip(half.cameras, whole.cameras, strict=True):
        assert small.width == large.width // 2
        assert small.fx == pytest.approx(large.fx / 2, rel=1e-2)
        torch.testing.assert_close(torch.from_numpy(small.viewmat), torch.from_numpy(large.viewmat), rtol=0, atol=1e-6)


def test_the_sanitizer_is_asked_with_options_that_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The stand-in refuses others, as the real one of CUDA 13."""
    program = tmp_path / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\n{PROGRAMS['compute-sanitizer']}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(check, "this_program", lambda *_: ["echo", "tiny step done"])
    report = Report(tmp_path / "sanitizer.json", 60.0)
    check.sanitizer(report)
    clean = {"status": 0, "summary": "ERROR SUMMARY: 0 errors"}
    assert report.found == dict.fromkeys(("memcheck", "racecheck", "synccheck"), clean)
    monkeypatch.setattr(check, "this_program", lambda *_: ["false"])
    with pytest.raises(AssertionError, match="memcheck and racecheck and synccheck did not come out clean"):
        check.sanitizer(report)


def make_wheel(path: Path, name: str, requires: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/__init__.py", "")
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Name: {name}\nVersion: 1.0\n{requires}")


def test_what_is_prepared_is_unpacked_where_python_finds_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def fetch(requirements: list[str], folder: Path) -> None:
        asked.extend(requirements)
        for one in requirements:
            name = one.split("==")[0].replace("-", "_")
            core = "Requires-Dist: pydantic-core==2.50.4\n" if name == "pydantic" else ""
            make_wheel(folder / f"{name}-1.0-py3-none-any.whl", name, core)

    monkeypatch.setattr(prepare, "fetch", fetch)
    monkeypatch.setattr(prepare, "tracked_mib", lambda: 10.0)
    monkeypatch.setattr(prepare, "write_scenes", lambda folder: folder.mkdir(parents=True))
    assert gpu_check.main(["--prepare", str(tmp_path / "carried")]) == 0
    assert "pydantic-core==2.50.4" in asked
    assert "gsplat==1.5.3" in asked
    assert f"typer=={prepare.version_of('typer')}" in asked, "that of the machine may be too old for splatcli.cli"
    printed = capsys.readouterr().out
    for part in gpu_check.PARTS:
        call = next(line for line in printed.splitlines() if f"--part {part}" in line)
        assert len(call) < 2000
        assert '--out "$OUT"' in call
    names = prepare.unpack("check", tmp_path / "carried", tmp_path / "site")
    assert len(names) == 8
    assert (tmp_path / "site" / "pydantic_core" / "__init__.py").is_file()
    assert prepare.unpack("speed", tmp_path / "nothing", tmp_path / "site") == []
    make_wheel(tmp_path / "old" / "speed" / "ancient-1.0-cp27-cp27m-linux_x86_64.whl", "ancient", "")
    assert prepare.unpack("speed", tmp_path / "old", tmp_path / "site") == []
    assert not (tmp_path / "site" / "ancient").exists()
    monkeypatch.setattr(prepare, "tracked_mib", lambda: 62.0)
    capsys.readouterr()
    assert gpu_check.main(["--prepare", str(tmp_path / "carried")]) == 1
    said = capsys.readouterr()
    assert said.err == "".join(f"gpu_check: for {part} this is more than 62 MiB\n" for part in gpu_check.PARTS)
    assert all(f"--part {part}" in said.out for part in gpu_check.PARTS), "one part may be sent all the same"


def test_gsplat_is_not_asked_for_before_its_build_has_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its loader removes the folder of a build that is under way."""
    ending = tmp_path / "ended"
    monkeypatch.setenv(peer.GSPLAT_ENDED, str(ending))
    monkeypatch.setitem(sys.modules, "gsplat", None)
    late = Report(tmp_path / "late.json", 45.2)
    assert "had not ended" in peer.await_gsplat(late)
    report = Report(tmp_path / "gsplat.json", 100.0)
    threading.Timer(0.7, lambda: ending.write_text("0 200 s")).start()
    assert "cannot be imported" in peer.await_gsplat(report)
    assert report.found["waited"] >= 0.5
    ending.write_text("1 3 s")
    assert "cannot be built" in peer.await_gsplat(report)


def test_the_toolkit_is_found_behind_a_script_on_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Torch takes the folder above nvcc's for the toolkit, where the headers are not."""
    home, folder = tmp_path / "cuda", tmp_path / "bin"
    (home / "include").mkdir(parents=True)
    (home / "lib").mkdir()
    (home / "include" / "cuda_runtime.h").write_text("")
    folder.mkdir()
    (folder / "nvcc").write_text(f"#!/bin/sh\necho '#$ TOP={home}/bin/..' >&2\n")
    (folder / "nvcc").chmod(0o755)
    (home / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    for name in ("CPLUS_INCLUDE_PATH", "LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    found = peer.toolkit_environment(tmp_path)
    assert found["CUDA_HOME"] == str(home)
    assert found["CPLUS_INCLUDE_PATH"].split(os.pathsep)[0] == str(home / "include")
    assert found["LIBRARY_PATH"].split(os.pathsep) == [str(home / "lib")]
    (folder / "nvcc").write_text("#!/bin/sh\nexit 1\n")
    assert peer.toolkit_environment(tmp_path) == {}


@pytest.mark.slow
def test_every_section_runs_on_a_simulated_gpu(tmp_path: Path) -> None:
    """Minutes: the kernels' PTX on the CPU."""
    from tests.gpu import rehearse

    if (reason := rehearse.missing()) is not None:
        pytest.skip(reason)
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.rehearse", "--out", str(tmp_path)],
        cwd=SCRIPTS.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=3000,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert "every section came to its end" in done.stdout
