"""A run that goes through a real run folder and real files, with the plain torch engine."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from splatcli.checkpoint.file import load_checkpoint
from splatcli.checkpoint.run_dir import RunDir
from splatcli.gaussians import Gaussians
from splatcli.rasterizer.reference import render_reference
from splatcli.rasterizer.reference_engine import ReferenceEngine
from splatcli.scene.camera import Camera
from splatcli.train.events import Evaluated, Stopped
from splatcli.train.trainer import Trainer
from tests.train.worlds import made_scene, short_config


def draw(gaussians: Gaussians, camera: Camera, *, background: Tensor, antialiased: bool) -> Tensor:
    return render_reference(gaussians, camera, background=background, antialiased=antialiased)[0]


def new_trainer(run_dir: RunDir) -> Trainer:
    # Ten steps with a refinement at 4 and 8 and a reset at 5.
    schedule = {"refine_start": 2, "refine_stop": 10, "refine_every": 4, "reset_every": 5, "sh_degree_interval": 3}
    config = short_config(10, schedule={**schedule, "lr_steps": 10}, save={"steps": (3,), "keep_last": 1})
    return Trainer.start(config, made_scene(), run_dir=run_dir, engine=ReferenceEngine(), renderer=draw)


def test_a_run_stopped_and_resumed_from_its_files_ends_with_the_same_bits(tmp_path: Path) -> None:
    with RunDir.create(tmp_path / "whole") as run_dir:
        whole = new_trainer(run_dir)
        *_, score, last = whole.run()
    assert isinstance(score, Evaluated)
    assert isinstance(last, Stopped)

    with RunDir.create(tmp_path / "parts") as run_dir:
        *_, stopped = new_trainer(run_dir).run(stop_at=6)
        assert isinstance(stopped, Stopped)
    with RunDir.open(tmp_path / "parts") as run_dir:
        checkpoint = load_checkpoint(stopped.path)
        second = Trainer.resume(checkpoint, made_scene(), run_dir=run_dir, engine=ReferenceEngine(), renderer=draw)
        run_dir.rewind(checkpoint.step)
        *_, second_score, end = second.run()
        names = [path.name for path in run_dir.checkpoints()]
    assert isinstance(end, Stopped)
    assert names == ["ckpt_000003.pt", "ckpt_000010.pt"]
    assert second_score == score

    ends = [load_checkpoint(event.path) for event in (last, end)]
    for name, tensor in ends[0].gaussians.items():
        assert torch.equal(tensor, getattr(ends[1].gaussians, name))
        assert ends[0].moments is not None
        assert ends[1].moments is not None
        assert all(torch.equal(a, b) for a, b in zip(ends[0].moments[name], ends[1].moments[name], strict=True))
    assert ends[0].sampler == ends[1].sampler
    assert ends[0].adam_step == ends[1].adam_step == 10
    assert all(torch.equal(ends[0].rng[name], ends[1].rng[name]) for name in ("splits", "background"))

    lines = [json.loads(line) for line in (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["event"], line["step"]) for line in lines] == [("step", 10), ("eval", 10)]
