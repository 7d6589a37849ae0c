"""scripts/gpu_check without a GPU: its arguments, what becomes of sections that fail, the report, the scenes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.native.cases import NEEDS_COMPILER

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", list(sys.path))  # it puts the checkout in front
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPTS / "gpu_check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)
    spec.loader.exec_module(module)
    return module


def fake_runner(results: dict[str, Any]) -> Any:
    def run(name: str, out: Path, seconds: float) -> dict[str, Any]:
        result = results.get(name, {"status": "ok"})
        if isinstance(result, Exception):
            raise result
        return dict(result)

    return run


SPEED = {"status": "ok", "1M 2MP": {"steps_per_second": 400.0, "ms": 2.5, "peak_mib": 1500, "pairs_per_visible": 4.2}}
PEER = {"status": "ok", "1M 2MP": {"steps_per_second": 100.0, "ms": 10.0, "peak_mib": 2500}}


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(SCRIPTS / "gpu_check"), "--out", str(tmp_path / "out")],
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
        ([], "--out"),
        (["--out", "x", "--only", "speed,sped"], "there is no section sped"),
        (["--out", "x", "--seconds", "soon"], "--seconds"),
        (["--out", "x", "--seconds", "0"], "more than 0"),
        (["--out", "x", "--section", "none"], "--section"),
    ],
)
def test_wrong_arguments(
    gpu_check: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        gpu_check.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_the_report_and_the_table(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "no_gpu", lambda: None)
    monkeypatch.setattr(gpu_check, "gsplat_building", lambda out: gpu_check.contextlib.nullcontext())
    results = {"speed": SPEED, "gsplat": PEER, "sanitizer": {"status": "skipped", "skipped": "not installed"}}
    out = tmp_path / "deep" / "out"
    assert gpu_check.main(["--out", str(out)], fake_runner(results)) == 0
    report = json.loads((out / "gpu_check.json").read_text())
    assert report["format"] == 1
    assert list(report["sections"]) == list(gpu_check.SECTIONS)
    assert all({"status", "seconds"} <= section.keys() for section in report["sections"].values())
    printed = capsys.readouterr().out
    assert "1M 2MP" in printed
    assert "4.00" in printed, "gsplat takes four times as long"
    assert "not installed" in printed


def test_a_section_that_fails_is_told_and_loses_no_other(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "no_gpu", lambda: None)
    results = {"build": {"status": "failed", "error": "nvcc\nis gone"}, "tests": RuntimeError("no pytest")}
    names = ["--only", "environment,build,tests,speed"]
    assert gpu_check.main(["--out", str(tmp_path), *names], fake_runner(results | {"speed": SPEED})) == 1
    sections = json.loads((tmp_path / "gpu_check.json").read_text())["sections"]
    assert {name: section["status"] for name, section in sections.items()} == {
        "environment": "ok",
        "build": "failed",
        "tests": "failed",
        "speed": "ok",
    }
    assert sections["tests"]["error"] == "RuntimeError: no pytest"
    printed = capsys.readouterr().out
    assert "is gone" in printed
    assert "no pytest" in printed


def test_the_report_is_written_after_every_section(gpu_check: ModuleType, tmp_path: Path) -> None:
    seen = []

    def run(name: str, out: Path, seconds: float) -> dict[str, Any]:
        path = out / "gpu_check.json"
        seen.append(list(json.loads(path.read_text())["sections"]) if path.exists() else [])
        return {"status": "ok"}

    gpu_check.check(tmp_path, 100, ["environment", "build", "speed"], run)
    assert seen == [[], ["environment"], ["environment", "build"]]


def test_what_no_time_is_left_for_is_skipped(gpu_check: ModuleType, tmp_path: Path) -> None:
    shares = []

    def run(name: str, out: Path, seconds: float) -> dict[str, Any]:
        shares.append(seconds)
        return {"status": "ok"}

    report = gpu_check.check(tmp_path, 1.0, ["environment", "build"], run)
    assert shares == []
    assert report["sections"]["build"]["skipped"] == "no time was left"
    gpu_check.check(tmp_path, 500.0, ["environment"], run)
    assert shares == [gpu_check.SECTIONS["environment"].seconds], "no more than its share"


def test_a_child_that_hangs_is_killed_with_its_children(gpu_check: ModuleType, tmp_path: Path) -> None:
    log = tmp_path / "log"
    started = time.monotonic()
    assert gpu_check.run_child(["sh", "-c", "echo begun; sleep 60 & sleep 60"], log, 1.0) is None
    assert time.monotonic() - started < 20
    assert log.read_text() == "begun\n"
    assert gpu_check.run_child(["sh", "-c", "exit 3"], log, 20.0) == 3
    assert gpu_check.run_child(["sh", "-c", "echo $MARK"], log, 20.0, MARK="here") == 0
    assert log.read_text() == "here\n"


def test_a_section_in_a_process_of_its_own(gpu_check: ModuleType, tmp_path: Path) -> None:
    """Without a GPU it ends with a message, which becomes the section's error."""
    if torch.cuda.device_count():
        pytest.skip("this machine has a GPU")
    result = gpu_check.run_section("environment", tmp_path, 120.0)
    assert result["status"] == "failed"
    assert "torch sees none" in result["error"]


def test_what_a_failing_section_found_is_kept(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(report: Any) -> None:
        report["first"] = 1
        raise ValueError("second is missing")

    def skips(report: Any) -> None:
        raise gpu_check.Skipped("not here")

    monkeypatch.setitem(gpu_check.SECTIONS, "speed", gpu_check.Section(breaks, 1))
    monkeypatch.setitem(gpu_check.SECTIONS, "gsplat", gpu_check.Section(skips, 1))
    assert gpu_check.child("speed", tmp_path, 5.0) == 1
    assert json.loads((tmp_path / ".speed.json").read_text()) == {"first": 1}
    assert "second is missing" in capsys.readouterr().err
    assert gpu_check.child("gsplat", tmp_path, 5.0) == 0
    assert json.loads((tmp_path / ".gsplat.json").read_text()) == {"skipped": "not here"}


def test_nothing_but_the_rasterizers_parts_is_imported() -> None:
    """On the machines with a GPU the command line's packages are missing."""
    program = """
        import sys
        for name in ("typer", "rich", "pydantic", "plyfile", "pycolmap", "PIL", "imageio", "scipy"):
            sys.modules[name] = None  # an import of it fails
        sys.path.insert(0, "scripts")
        import gpu_check
        import splatcli.native.call, splatcli.raster, splatcli.gaussians, splatcli.scene.camera
        gpu_check.make_scene(100, 64, 48, "cpu")
    """
    lines = "\n".join(line.strip() if not line.startswith(" " * 12) else line[8:] for line in program.splitlines())
    subprocess.run([sys.executable, "-c", lines], cwd=SCRIPTS.parent, check=True)


@NEEDS_COMPILER
def test_the_scene_has_the_statistics_that_are_promised(gpu_check: ModuleType) -> None:
    from splatcli.native.call import Backend
    from splatcli.raster.frame import Frame
    from splatcli.raster.view import view_of

    # The density of 1 M at 2 megapixels.
    gaussians, cameras = gpu_check.make_scene(24_000, 288, 173, "cpu")
    assert len(cameras) == 8
    for camera in cameras:
        frame = Frame(Backend.cpu())
        view = view_of(camera, sh_degree=3, antialiased=False, with_depth=False)
        frame.bin(view, frame.project(view, gaussians))
        assert 0.5 < frame.native.visible / 24_000 < 0.6
        assert 3.5 < frame.native.pairs / frame.native.visible < 5.0
    again, _ = gpu_check.make_scene(24_000, 288, 173, "cpu")
    assert torch.equal(again.means, gaussians.means)
    targets = gpu_check.make_targets(cameras[:2], "cpu")
    assert [(t.shape, t.dtype) for t in targets] == [((173, 288, 3), torch.uint8)] * 2


def test_the_floor_of_a_step_is_near_the_roofline_that_was_estimated(gpu_check: ModuleType) -> None:
    floor = gpu_check.least_bytes(1_000_000, 600_000, 2_500_000, 1920 * 1080)
    assert 1.8e9 < sum(floor.values()) < 3.0e9
    assert floor["loss"] == pytest.approx(236e6, rel=0.01)


def test_rates_are_medians_of_rounds(gpu_check: ModuleType) -> None:
    calls = []
    result = gpu_check.rate_of(lambda: calls.append(time.sleep(0.001)), lambda: None, 0.1)
    assert 0.9 < result["ms"] < 20
    assert result["steps_per_second"] == pytest.approx(1e3 / result["ms"], rel=0.05)
    assert len(calls) == 20 + 3 * result["steps"]


def test_the_peers_loss_is_the_training_loss(gpu_check: ModuleType) -> None:
    from splatcli.raster.reference import loss_reference
    from tests.raster.scenes import random_image

    image, target = random_image(1, 40, 30), random_image(2, 40, 30)
    planar = [t.permute(2, 0, 1)[None] for t in (image, target)]
    torch.testing.assert_close(
        gpu_check.peer_loss(*planar), loss_reference(image, target, gpu_check.SSIM_LAMBDA), rtol=0, atol=2e-6
    )
