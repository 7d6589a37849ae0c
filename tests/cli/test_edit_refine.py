"""``splat edit --refine`` from outside: what it gains, what it leaves as it is, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import splatcli
from splatcli.checkpoint.file import load_checkpoint, save_checkpoint
from splatcli.formats.ply import write_ply_file
from splatcli.gaussians import Gaussians
from splatcli.train.state import TrainState
from splatcli.train.step import Stepper
from tests.cli.tiny import QUICK
from tests.formats.made import read_ply
from tests.formats.made import scene as made_gaussians
from tests.native.cases import NEEDS_COMPILER
from tests.running import Splat

pytestmark = NEEDS_COMPILER


def training_psnr(gaussians: Gaussians, run: Path, scene: Path) -> float:
    """The mean over the training views of a run, in dB."""
    model, views = splatcli.Model.load(run), splatcli.Scene.open(scene)
    found = []
    for view in views.train:
        image = splatcli.Model(gaussians, settings=model.settings).render(model.cameras[view]).image
        wanted = torch.as_tensor(views.images.image(view).pixels) / 255
        found.append(-10 * float((image - wanted).square().mean().log10()))
    return sum(found) / len(found)


def files_below(*folders: Path) -> set[Path]:
    return {path for folder in folders for path in folder.rglob("*")}


def test_photos_bring_back_what_a_merger_lost(
    splat: Splat, good_run: Path, tiny_scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = files_below(good_run, tiny_scene)
    merged = splat("edit", good_run, "-o", "merged.ply", "--simplify", "30%", "--json").objects[-1]
    words = ("edit", good_run, "--simplify", "30%", "--refine", "200", "--json")
    done = splat(*words, "-o", "refined.ply")
    assert done.code == 0, done.err
    facts = done.objects[-1]
    assert facts["num_gaussians"] == merged["num_gaussians"]
    assert (facts["refine"]["steps"], facts["refine"]["photos"]) == (200, 8)
    assert "200 steps on the photos of 8 training views" in done.err
    assert splat(*words, "-o", "again.ply").code == 0
    assert Path("again.ply").read_bytes() == Path("refined.ply").read_bytes()
    assert files_below(tmp_path) == {tmp_path / f"{name}.ply" for name in ("merged", "refined", "again")}
    assert files_below(good_run, tiny_scene) == before
    simple, refined = read_ply(Path("merged.ply")), read_ply(Path("refined.ply"))
    assert len(simple) == len(refined)
    scores = [training_psnr(gaussians, good_run, tiny_scene) for gaussians in (simple, refined)]
    assert scores[1] > scores[0] + 1.0, scores


def test_it_runs_last_and_at_the_degree_that_is_left(splat: Splat, finished_run: Path, tmp_path: Path) -> None:
    words = ("edit", "--refine", "3", finished_run, "--sh-degree", "0", "-o", tmp_path / "x.ply", "--simplify", "50%")
    done = splat(*words)
    assert done.code == 0, done.err
    assert done.err.index("--simplify 50%:") < done.err.index("--refine 3:")
    assert read_ply(tmp_path / "x.ply").sh_degree == 0


def test_a_dry_run_says_that_it_is_not_run(splat: Splat, finished_run: Path, tmp_path: Path) -> None:
    done = splat("edit", finished_run, "--simplify", "20", "--refine", "1000000", "--dry-run")
    assert done.code == 0, done.err
    assert "--refine 1000000: not run; 20 Gaussians" in done.out


def test_views_keep_their_trained_poses_and_colours(
    splat: Splat, tiny_scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("-o", tmp_path / "run", "-n", "20", "-q", *QUICK, "--pose-opt", "--exposure", "--white-background")
    assert splat("train", tiny_scene, *words).code == 0
    path = splatcli.Model.load(tmp_path / "run").path
    assert path is not None
    before, states, step = path.read_bytes(), [], Stepper.step

    def watched(stepper: Stepper, state: TrainState, *others: Any) -> Any:
        states.append(state)
        return step(stepper, state, *others)

    monkeypatch.setattr(Stepper, "step", watched)
    done = splat("edit", tmp_path / "run", "-o", tmp_path / "x.ply", "--simplify", "50%", "--refine", "20")
    assert done.code == 0, done.err
    assert len(states) == 20
    stored, used = load_checkpoint(path).views, states[-1].per_view_params.stored()
    assert any(name.startswith("pose") for name in stored)
    assert any(name.startswith("exposure") for name in stored)
    assert stored.keys() == used.keys()
    assert all(torch.equal(stored[name], used[name]) for name in stored)
    assert path.read_bytes() == before


def test_an_interrupt_leaves_nothing_behind(
    splat: Splat, finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Stepper, "step", interrupted)
    assert splat("edit", finished_run, "-o", "x.ply", "--refine", "5").code == 130
    assert not files_below(tmp_path)


def test_what_has_no_photos_to_train_on_is_refused(splat: Splat, finished_run: Path, tmp_path: Path) -> None:
    write_ply_file(made_gaussians(50, 1), tmp_path / "model.ply")
    cases = [
        ((tmp_path / "model.ply",), "has no photos"),
        ((finished_run, finished_run), "several models"),
        *(
            ((finished_run, *words), "moves the model")
            for words in (("-t", "1,0,0"), ("--level", "z"), ("--align-to", finished_run))
        ),
        *(
            ((finished_run, *words), "removes what the photos show")
            for words in (("--crop", "sphere:0,0,0,1"), ("--crop-out", "sphere:0,0,0,1"), ("--filter", " x>0"))
        ),
    ]
    for words, message in cases:
        refused = splat("edit", *words, "-o", tmp_path / "x.ply", "--refine", "5")
        assert refused.code == 2, refused.err
        assert message in refused.err
        assert "help:" in refused.err
    assert splat("edit", finished_run, "-o", tmp_path / "x.ply", "--refine", "0").code == 2
    assert not (tmp_path / "x.ply").exists()


def test_a_scene_that_moved_is_named(splat: Splat, finished_run: Path, tiny_scene: Path, tmp_path: Path) -> None:
    path = splatcli.Model.load(finished_run).path
    assert path is not None
    checkpoint = load_checkpoint(path)
    checkpoint.dataset = replace(checkpoint.dataset, root=str(tmp_path / "gone"))
    save_checkpoint(tmp_path / "moved.pt", checkpoint)
    words = ("edit", tmp_path / "moved.pt", "-o", tmp_path / "x.ply", "--refine", "2")
    refused = splat(*words)
    assert refused.code == 3
    assert "--data DIR" in refused.err
    assert splat(*words, "--data", tiny_scene).code == 0
