"""``train.sh_views`` from outside: what a finished run prints, scores and exports, and that a longer run stays raw."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import plyfile
import pytest
import torch

from splatcli.checkpoint.file import load_checkpoint
from splatcli.train.state import gaussians_to_render
from tests.cli.tiny import QUICK
from tests.native.cases import NEEDS_COMPILER
from tests.running import Splat

pytestmark = NEEDS_COMPILER

WORDS = (*QUICK, "--sh-degree", "3", "--set", "schedule.sh_degree_interval=10", "-n", "60", "--json")


@pytest.fixture(scope="module")
def runs(splat_once: Splat, tiny_scene: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same run with damping, with a prior, and without."""
    folders = {}
    given = {"damped": (), "drawn": ("--set", "train.sh_prior=1"), "raw": ("--set", "train.sh_views=0")}
    for name, words in given.items():
        folders[name] = tmp_path_factory.mktemp("runs") / name
        done = splat_once("train", tiny_scene, "-o", folders[name], *WORDS, *words)
        assert done.code == 0, done.err
        (folders[name].parent / "printed.json").write_text(json.dumps(done.objects[-1]))
    return folders


def rest_of(splat: Splat, model: Path, folder: Path) -> np.ndarray:
    """[N, 15, 3] of the PLY that ``splat export`` writes."""
    done = splat("export", model, "-o", folder / "model.ply", "--overwrite")
    assert done.code == 0, done.err
    rows = plyfile.PlyData.read(str(folder / "model.ply"))["vertex"].data
    rest = np.stack([rows[f"f_rest_{i}"] for i in range(45)], axis=1)
    return rest.reshape(len(rest), 3, 15).transpose(0, 2, 1)


def test_an_export_of_a_finished_run_is_damped_by_what_the_checkpoint_tells(
    splat: Splat, runs: dict[str, Path], tmp_path: Path
) -> None:
    damped, raw = (rest_of(splat, runs[name], tmp_path) for name in ("damped", "raw"))
    views = load_checkpoint(runs["damped"] / "ckpts" / "ckpt_000060.pt").columns.effective_views
    assert views is not None
    n = views.double().numpy()
    assert 1.0 < float(np.median(n)) < 10.0
    assert np.array_equal(damped[:, :8], raw[:, :8])
    # Factors are rounded to float32 once, products again: 2^-23 of the value.
    np.testing.assert_allclose(damped[:, 8:], raw[:, 8:] * (n**2 / (n**2 + 9.0))[:, None, None], rtol=1e-6, atol=1e-12)
    assert np.abs(raw[:, 8:]).max() > 1e-3


def test_checkpoints_hold_the_same_raw_parameters(runs: dict[str, Path]) -> None:
    damped, drawn, raw = (load_checkpoint(folder / "ckpts" / "ckpt_000060.pt") for folder in runs.values())
    assert [sorted(each.columns.present()) for each in (damped, drawn, raw)] == [["effective_views"], ["sh_change"], []]
    for name, column in raw.gaussians.items():
        assert torch.equal(getattr(damped.gaussians, name), column), name
        assert torch.equal(getattr(drawn.gaussians, name), column), name


def test_an_export_of_a_run_with_a_prior_has_the_change_that_the_checkpoint_stores(
    splat: Splat, runs: dict[str, Path], tmp_path: Path
) -> None:
    drawn, raw = (rest_of(splat, runs[name], tmp_path) for name in ("drawn", "raw"))
    change = load_checkpoint(runs["drawn"] / "ckpts" / "ckpt_000060.pt").columns.sh_change
    assert change is not None
    assert np.array_equal(drawn, raw + change.numpy()[:, 1:])
    assert float(change[:, 1:9].abs().max()) > 1e-3, "below degree three, too"


def test_the_end_of_a_run_and_eval_print_the_figure_of_the_damped_model(splat: Splat, runs: dict[str, Path]) -> None:
    figures = {}
    for name, folder in runs.items():
        printed = json.loads((folder.parent / "printed.json").read_text())
        done = splat("eval", folder, "--json")
        assert done.code == 0, done.err
        assert done.objects[-1]["psnr"] == pytest.approx(printed["psnr"], abs=1e-9)
        figures[name] = printed["psnr"]
    assert len(set(figures.values())) == 3


def test_a_longer_run_goes_on_raw_and_ends_damped(
    splat: Splat, runs: dict[str, Path], tiny_scene: Path, tmp_path: Path
) -> None:
    ends = []
    for name in ("damped", "raw"):
        folder = tmp_path / name
        words = () if name == "damped" else ("--set", "train.sh_views=0")
        assert splat("train", tiny_scene, "-o", folder, *WORDS, *words).code == 0
        done = splat("resume", folder, "-n", "70", "--stop-at", "65", "--json")
        assert done.code == 0, done.err
        stopped = load_checkpoint(folder / "ckpts" / "ckpt_000065.pt")
        assert stopped.columns.effective_views is None
        assert splat("resume", folder, "--json").code == 0
        ends.append(load_checkpoint(folder / "ckpts" / "ckpt_000070.pt"))
    for (name, one), (_, other) in zip(ends[0].gaussians.items(), ends[1].gaussians.items(), strict=True):
        assert torch.equal(one, other), name
    assert ends[0].columns.effective_views is not None
    assert not torch.equal(gaussians_to_render(ends[0]).shN, gaussians_to_render(ends[1]).shN)
