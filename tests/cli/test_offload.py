"""``--offload`` on the command line: reported, kept, switched, refused where it saves nothing; nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from splatcli.checkpoint.file import load_checkpoint
from splatcli.checkpoint.state import Checkpoint
from splatcli.cli.run_training import check_batch
from splatcli.config import Config
from splatcli.errors import UsageError
from tests.cli.tiny import QUICK
from tests.native.cases import NEEDS_COMPILER
from tests.running import Splat

ROOT = Path(__file__).resolve().parents[2]


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("words", "mapped"),
    [([], False), (["--offload"], True), (["--set", "memory.offload=True"], True), (["--config"], True)],
)
def test_a_run_that_is_resumed_offloaded_maps_its_checkpoint(
    words: list[str], mapped: bool, splat: Splat, tiny_scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state larger than memory is never read as a whole, whichever way --offload is given."""
    run, file = tmp_path / "run", tmp_path / "settings.toml"
    file.write_text("[memory]\noffload = true\n")
    first = splat("train", tiny_scene, "-o", run, "-n", "20", *QUICK, "--stop-at", "6")
    assert first.code == 0, first.err
    loaded: list[bool] = []

    def load(path: Path, *, mapped: bool = False) -> Checkpoint:
        loaded.append(mapped)
        return load_checkpoint(path, mapped=mapped)

    monkeypatch.setattr("splatcli.checkpoint.file.load_checkpoint", load)
    done = splat("resume", run, "--stop-at", "8", *words, *([file] if words == ["--config"] else []))
    assert done.code == 0, done.err
    assert ("note: offloaded" in done.err) == mapped
    assert loaded == [mapped]


@NEEDS_COMPILER
def test_a_run_offloads_resumes_offloaded_and_stops_on_request(splat: Splat, tiny_scene: Path, tmp_path: Path) -> None:
    plain = splat("train", tiny_scene, "-o", tmp_path / "plain", "-n", "20", *QUICK)
    assert plain.code == 0, plain.err
    run = tmp_path / "run"
    first = splat("train", tiny_scene, "-o", run, "-n", "20", *QUICK, "--offload", "--stop-at", "6")
    assert first.code == 0, first.err
    assert f"note: offloaded in a file in {run}:" in first.err
    second = splat("resume", run, "--stop-at", "12")
    assert f"note: offloaded in a file in {run}:" in second.err
    third = splat("resume", run, "--no-offload")
    assert third.code == 0, third.err
    assert "changed: memory.offload was True, is False" in third.err
    assert "offloaded" not in third.err
    one, other = (load_checkpoint(Path(done.lines[-1])).gaussians for done in (plain, third))
    for name, tensor in one.items():
        assert torch.equal(tensor, getattr(other, name)), name
    again = splat("resume", run, "-n", "22", "--offload")
    assert again.code == 0, again.err
    assert "note: offloaded" in again.err
    assert sorted(path.name for path in run.iterdir()) == [
        "ckpts",
        "config.json",
        "latest",
        "lock",
        "metrics.jsonl",
        "request.json",
    ]


@pytest.mark.parametrize("other", [("--ranks", "2"), ("--batch-size", "2"), ("--max-time", "60s")])
def test_what_would_take_the_memory_again_is_refused(
    other: tuple[str, str], splat: Splat, tiny_scene: Path, tmp_path: Path
) -> None:
    done = splat("train", tiny_scene, "-o", tmp_path / "run", "--offload", *other)
    assert done.code == 2
    assert "where: --offload" in done.err
    assert other[0] in done.err
    assert not (tmp_path / "run").exists()


def test_ranks_that_resume_a_run_with_it_are_refused_too() -> None:
    config = Config.model_validate({"memory": {"offload": True}})
    check_batch(config, None)
    with pytest.raises(UsageError, match="the memory that --offload saves"):
        check_batch(config, 2)


@NEEDS_COMPILER
def test_a_disk_without_room_is_refused_before_the_first_step(
    splat: Splat, tiny_scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("splatcli.rasterizer.offload.MemoryMapped.free", lambda self: 9_000)
    done = splat("train", tiny_scene, "-o", tmp_path / "run", "-n", "20", *QUICK, "--offload")
    assert done.code == 4
    assert "the SH coefficients of 200 Gaussians and their moments take" in done.err
    assert "--sh-degree 0, or --cap-max 41" in done.err
    assert not (tmp_path / "run").exists()


@NEEDS_COMPILER
def test_a_process_that_is_killed_leaves_nothing_that_takes_room(tiny_scene: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["train", str(tiny_scene), "-o", str(run), "-n", "100000", *QUICK, "--offload", "--device", "cpu"]
    child = subprocess.Popen(
        [sys.executable, "-m", "splatcli", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    try:
        maps = Path(f"/proc/{child.pid}/maps")
        deadline = time.monotonic() + 60.0
        while not (run / "latest").exists():
            assert time.monotonic() < deadline
            assert child.poll() is None
            time.sleep(0.05)
        assert maps.read_text().count("/offload.tmp.") >= 3
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert not [path.name for path in run.rglob("*") if "offload" in path.name]
