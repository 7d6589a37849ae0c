"""``splat train --tensorboard``: TensorBoard reads the figures of metrics.jsonl, of a run that goes on, too."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from splatcli.train.tensorboard import TensorBoardWriter
from tests.cli.tiny import QUICK
from tests.running import Splat

#: The tags, and where metrics.jsonl has their figures.
TAGS = {
    "train/loss": ("step", "loss"),
    "train/num_gaussians": ("step", "num_gaussians"),
    "train/psnr": ("probe", "psnr"),
    "val/psnr": ("eval", "psnr"),
    "val/ssim": ("eval", "ssim"),
}
EVERY = ("--set", "train.eval_every=10", "--set", "guard.probe_every=20")


def curves(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Return steps and values of each curve, as TensorBoard shows them."""
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="pip install 'splatcli[tensorboard]'"
    )
    loaded: Any = reader.EventAccumulator(str(run / "tensorboard"))
    loaded.Reload()
    return {tag: [(one.step, one.value) for one in loaded.Scalars(tag)] for tag in loaded.Tags()["scalars"]}


def figures(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what the curves of ``run`` have to be."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        tag: [(line["step"], pytest.approx(line[key], rel=1e-6)) for line in lines if line["event"] == event]
        for tag, (event, key) in TAGS.items()
    }


def test_the_curves_are_those_of_the_metrics(splat: Splat, tiny_scene: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ("train", tiny_scene, "-o", run, "-n", 60, *QUICK, *EVERY, "--set", "save.steps=[20]")
    stopped = splat(*words, "--tensorboard", "--stop-at", 40)
    assert stopped.code == 0, stopped.err
    assert len(curves(run)["train/loss"]) == 4
    assert curves(run) == figures(run)
    assert splat("resume", run).code == 0
    assert [step for step, _ in curves(run)["train/loss"]] == [10, 20, 30, 40, 50, 60]
    assert curves(run) == figures(run)
    again = splat("resume", run / "ckpts/ckpt_000020.pt", "--stop-at", 30)
    assert again.code == 0, again.err
    assert [step for step, _ in curves(run)["train/loss"]] == [10, 20, 30], "later curves are those of an earlier try"
    assert curves(run) == figures(run)


def test_a_run_without_the_flag_has_no_curves(splat: Splat, tiny_scene: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install 'splatcli[tensorboard]'")
    run = tmp_path / "run"
    words = ("train", tiny_scene, "-o", run, "-n", 20, *QUICK)
    assert splat(*words, "--stop-at", 10).code == 0
    assert not (run / "tensorboard").exists()
    turned_on = splat("resume", run, "--set", "train.tensorboard=true")
    assert turned_on.code == 0, turned_on.err
    assert [step for step, _ in curves(run)["train/loss"]] == [20]


def test_a_folder_that_takes_no_curves_costs_no_step(splat: Splat, tiny_scene: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install 'splatcli[tensorboard]'")
    run = tmp_path / "run"
    words = ("train", tiny_scene, "-o", run, "-n", 40, *QUICK, "--tensorboard")
    assert splat(*words, "--stop-at", 10).code == 0
    for file in (run / "tensorboard").iterdir():
        file.unlink()
    (run / "tensorboard").rmdir()
    (run / "tensorboard").write_text("something else")
    done = splat("resume", run)
    assert done.code == 0, done.err
    assert done.err.count("lines of the metrics are lost") == 1
    assert str(run / "tensorboard") not in done.out
    assert len(figures(run)["train/loss"]) == 4, "metrics.jsonl is whole"


def test_a_rollback_replaces_the_curves_after_it(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install 'splatcli[tensorboard]'")
    writer = TensorBoardWriter(tmp_path, 0)
    steps = [{"event": "step", "step": step, "loss": 1.0, "num_gaussians": 5} for step in (10, 20, 30, 40)]
    for record in (*steps, {"event": "rollback", "step": 20, "from_step": 40}, {**steps[2], "loss": 2.0}):
        writer.add(record)
    assert curves(tmp_path)["train/loss"] == [(10, 1.0), (20, 1.0), (30, 2.0)]


def test_without_the_package_nothing_begins(
    splat: Splat, tiny_scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    run = tmp_path / "run"
    refused = splat("train", tiny_scene, "-o", run, "-n", 20, *QUICK, "--tensorboard")
    assert refused.code == 4, refused.err
    assert "pip install 'splatcli[tensorboard]'" in refused.err
    assert not run.exists()
