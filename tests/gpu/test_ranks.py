"""Ranks on GPUs, whose gradients go over NCCL: the same bits as one process on one GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cli.tiny import QUICK, write_scene


def trained(folder: Path, name: str, *flags: str) -> dict[str, torch.Tensor]:
    """The parameters after a short run."""
    from splatcli.checkpoint.file import load_checkpoint  # here: it needs packages that a machine with a GPU may lack
    from splatcli.checkpoint.run_dir import find_latest_sound

    scene = folder / "scene" if (folder / "scene").exists() else write_scene(folder / "scene")
    command = [sys.executable, "-m", "splatcli", "train", str(scene), *QUICK, "--iterations", "60", "--device", "cuda"]
    subprocess.run([*command, "-o", str(folder / name), "-q", *flags], check=True, timeout=300)
    path = find_latest_sound(folder / name).path
    assert path is not None
    return dict(load_checkpoint(path).gaussians.items())


@pytest.mark.gpu
def test_one_rank_is_one_process(tmp_path: Path) -> None:
    expected = trained(tmp_path, "alone", "--batch-size", "2")
    found = trained(tmp_path, "rank", "--batch-size", "2", "--ranks", "1")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.multigpu
@pytest.mark.parametrize("mode", ["replicated", "sharded"])
def test_two_ranks_are_one_process(mode: str, tmp_path: Path) -> None:
    expected = trained(tmp_path, "alone", "--batch-size", "4")
    found = trained(tmp_path, "ranks", "--batch-size", "4", "--ranks", "2", "--distributed", mode)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
