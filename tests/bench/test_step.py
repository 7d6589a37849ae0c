"""``benchmarks.step``: a run or its checkpoint is measured, and what is neither is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.step import main
from splatcli.cli.commands import run as splat
from tests.cli.tiny import QUICK, write_scene
from tests.native.cases import NEEDS_COMPILER


def step(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr("sys.argv", ["step", *map(str, arguments)])
    main()


@NEEDS_COMPILER
def test_it_measures_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    scene, run = write_scene(tmp_path / "scene"), tmp_path / "run"
    assert splat(["train", str(scene), "-n", "2", *QUICK, "-o", str(run), "--device", "cpu", "-q"]) == 0
    capsys.readouterr()
    threads = torch.get_num_threads()  # which it sets
    step(monkeypatch, run, "--steps", 2, "--threads", threads)
    result = json.loads(capsys.readouterr().out)
    assert (result["gaussians"], result["size"], result["threads"]) == (200, "40x30", threads)
    assert set(result["stages_ms"]) >= {"project", "bin", "blend", "blend_vjp"}


@pytest.mark.parametrize("name", ["nowhere", "notes.txt"])
def test_it_names_what_is_no_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    with pytest.raises(SystemExit) as ended:
        step(monkeypatch, tmp_path / name)
    assert ended.value.code in (2, 5)
    assert capsys.readouterr().err.startswith("error[")
