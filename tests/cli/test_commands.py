"""Each command on a real, if tiny, run: what it makes, what it prints, and how it fails."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

import splatcli.scene.read
from splatcli.checkpoint.file import load_checkpoint
from splatcli.checkpoint.run_dir import RunDir
from splatcli.cli import run_training
from splatcli.scene.camera import NEAR
from splatcli.train.state import gaussians_to_render
from tests.cli.tiny import HEIGHT, QUICK, VIEWS, WIDTH, add_points, write_scene
from tests.formats.made import read_ply
from tests.running import Splat

HELD_OUT = ["view_00.png", "view_08.png"]


def assert_equal_state(left: Path, right: Path) -> None:
    """The same bits in parameters and moments."""
    a, b = load_checkpoint(left), load_checkpoint(right)
    assert (a.step, a.adam_step, a.sampler) == (b.step, b.adam_step, b.sampler)
    for (name, x), (_, y) in zip(a.gaussians.items(), b.gaussians.items(), strict=True):
        assert torch.equal(x, y), name
    assert a.moments is not None
    assert b.moments is not None
    for name, (x, y) in a.moments.items():
        assert torch.equal(x, b.moments[name][0]), name
        assert torch.equal(y, b.moments[name][1]), name


class TestTrain:
    def test_figures_are_those_before_an_opacity_reset_of_the_same_step(
        self, splat: Splat, tiny_scene: Path, tmp_path: Path
    ) -> None:
        figures = []
        for resets in ("20", "1000"):
            values = ("schedule.refine_start=0", "schedule.refine_stop=40", f"schedule.reset_every={resets}")
            every = ("train.eval_every=10", "guard.probe_every=10")
            settings = [word for value in (*values, *every) for word in ("--set", value)]
            done = splat("train", tiny_scene, "-o", tmp_path / resets, "-n", "45", "--json", *QUICK, *settings)
            assert done.code == 0
            assert ("opacity-reset" in {facts["event"] for facts in done.objects}) == (resets == "20")
            lines = [json.loads(line) for line in (tmp_path / resets / "metrics.jsonl").read_text().splitlines()]
            figures.append({(f["event"], f["step"]): f["psnr"] for f in lines if f["event"] in ("eval", "probe")})
        for kind in ("eval", "probe"):
            assert figures[0][kind, 20] == figures[1][kind, 20]
            assert figures[0][kind, 30] != figures[1][kind, 30]

    def test_prints_the_checkpoint_and_nothing_else(
        self, splat: Splat, tiny_scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        done = splat("train", tiny_scene, "-o", tmp_path / "run", "-n", 20, *QUICK)
        assert done.code == 0
        assert done.lines == [str(tmp_path / "run" / "ckpts" / "ckpt_000020.pt")]
        assert load_checkpoint(Path(done.lines[0])).step == 20
        run, size = tmp_path / "run", Path(done.lines[0]).stat().st_size
        *_, last, _, view, render, export = done.err.splitlines()
        found = re.fullmatch(r"done in [\d:]+: test PSNR ([\d.]+) dB, ([\d,]+) Gaussians, ([\d.]+) MB", last)
        assert found is not None, last
        assert int(found[2].replace(",", "")) == len(load_checkpoint(Path(done.lines[0])).gaussians)
        assert float(found[3]) == round(size / 1e6, 1)
        assert f"step 20: test PSNR {found[1]} dB" in done.err
        assert view == f"next: splat view {run}"
        for line in (render, export):
            _, command, *words = shlex.split(line)
            assert splat(command, *words).code == 0, line
        assert (tmp_path / "scene.ply").is_file()

    def test_the_end_says_that_images_were_held_out_unasked(
        self, splat: Splat, tiny_scene: Path, tmp_path: Path
    ) -> None:
        remark = "\n2 of 10 images were held out for evaluation; --test-every 0 trains on all of them\n"
        words = ("train", tiny_scene, "-n", 3, *QUICK)
        assert remark in splat(*words, "-o", tmp_path / "run").err
        assert splat(*words, "-o", tmp_path / "stopped", "--stop-at", 2).code == 0
        assert remark in splat(*words, "-o", tmp_path / "stopped").err, "the same command continues the run"
        for name, more in (("given", ("--test-every", 8)), ("none", ("--test-every", 0)), ("json", ("--json",))):
            done = splat(*words, "-o", tmp_path / name, *more)
            assert done.code == 0
            assert "held out for evaluation" not in done.err

    def test_a_run_that_is_stopped_names_no_next_command(self, splat: Splat, tiny_scene: Path, tmp_path: Path) -> None:
        done = splat("train", tiny_scene, "-o", tmp_path / "run", "-n", 20, "--stop-at", 3, *QUICK)
        assert "continue with: splat resume" in done.err
        assert "next: " not in done.err

    def test_quiet_is_silent(self, splat: Splat, tiny_scene: Path, tmp_path: Path) -> None:
        done = splat("train", tiny_scene, "-o", tmp_path / "run", "-n", 5, "-q", *QUICK)
        assert (done.code, done.err) == (0, "")

    def test_json_ends_in_a_result(self, splat: Splat, tiny_scene: Path, tmp_path: Path) -> None:
        done = splat("train", tiny_scene, "-o", tmp_path / "run", "-n", 20, "--json", *QUICK)
        objects = done.objects
        assert objects[0]["event"] == "started"
        assert objects[-1]["event"] == "result"
        assert objects[-1]["reason"] == "finished"
        assert Path(objects[-1]["path"]).is_file()
        assert objects[-1]["psnr"] > 0

    def test_the_same_seed_gives_the_same_bits(self, splat: Splat, tiny_scene: Path, tmp_path: Path) -> None:
        paths = [
            Path(splat("train", tiny_scene, "-o", tmp_path / name, "-n", 15, "-q", *QUICK).lines[0]) for name in "ab"
        ]
        assert_equal_state(*paths)

    def test_settings_of_file_flags_and_set(self, splat: Splat, tiny_scene: Path, tmp_path: Path) -> None:
        (tmp_path / "run.toml").write_text("[train]\niterations = 9\nseed = 1\n[optim]\nsh0_lr = 0.01\n")
        words = ["--config", tmp_path / "run.toml", "--seed", 2, "--set", "optim.sh0_lr=0.02", "--white-background"]
        done = splat("train", tiny_scene, "-o", tmp_path / "run", "-q", *words, *QUICK)
        config = load_checkpoint(Path(done.lines[0])).config
        assert (config.train.iterations, config.train.seed, config.train.background) == (9, 2, "white")
        assert config.optim.sh0_lr == 0.02
        stored = json.loads((tmp_path / "run" / "config.json").read_text())
        assert stored["train"]["seed"] == 2

    def test_a_setting_without_effect_is_noted(
        self, splat: Splat, tiny_scene: Path, finished_run: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "a.toml").write_text("[strategy]\ngrow_factor = 2.0\nname = 'adc'\n")
        words = ("--config", tmp_path / "a.toml", "--depth-scale", 2, "--set", "strategy.opacity_reg=0.1", "--dry-run")
        done = splat("train", tiny_scene, "-o", tmp_path / "x", *QUICK, *words)
        assert done.code == 0, done.err
        assert [line for line in done.err.splitlines() if "no effect" in line] == [
            "note: strategy.grow_factor has no effect with --strategy adc",
            "note: --depth-scale has no effect without --depth-loss",
        ]
        run_folder = shutil.copytree(finished_run, tmp_path / "run")
        resumed = splat("resume", run_folder, "-n", 41, "--set", "views.pose_lr=0.1")
        assert resumed.code == 0, resumed.err
        assert "note: views.pose_lr has no effect without --pose-opt" in resumed.err

    def test_a_depth_term_that_begins_in_a_resumed_run_needs_depths(self, splat: Splat, tmp_path: Path) -> None:
        scene, run = add_points(write_scene(tmp_path / "scene")), tmp_path / "run"
        words = ("train", scene, "-n", 4, "-o", run, *QUICK, "--depth-loss", "--set", "train.depth_lambda=0")
        assert splat(*words).code == 0, "without the term no depth is missed"
        with_term = splat("resume", run, "-n", 6, "--set", "train.depth_lambda=0.1")
        assert with_term.code == 3
        assert "no depth is known of any training view" in with_term.err
        assert splat("resume", run, "-n", 6).code == 0

    def test_runs_without_a_name_are_numbered(
        self, splat: Splat, tiny_scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        made = [splat("train", tiny_scene, "-n", 1, "-q", *QUICK).lines[0] for _ in range(3)]
        assert [Path(path).parts[:2] for path in made] == [
            ("output", "ball"),
            ("output", "ball-2"),
            ("output", "ball-3"),
        ]

    def test_a_run_in_the_way_is_kept(self, splat: Splat, tiny_scene: Path, finished_run: Path) -> None:
        done = splat("train", tiny_scene, "-o", finished_run, "-n", 1, *QUICK)
        assert done.code == 8
        assert "--overwrite" in done.err
        assert (finished_run / "ckpts" / "ckpt_000040.pt").is_file()

    def test_overwrite_moves_aside(self, splat: Splat, tiny_scene: Path, finished_run: Path, tmp_path: Path) -> None:
        run = shutil.copytree(finished_run, tmp_path / "run")
        for number, step in ((1, 40), (2, 1)):
            done = splat("train", tiny_scene, "-o", run, "-n", 1, "--overwrite", *QUICK)
            assert done.lines == [str(run / "ckpts" / "ckpt_000001.pt")], done.err
            aside = tmp_path / f"run.old-{number}"
            assert (aside / f"ckpts/ckpt_{step:06d}.pt").is_file()
            assert f"the run that was in {run} is now {aside}" in done.err
        new = splat("train", tiny_scene, "-o", tmp_path / "new", "-n", 1, "--overwrite", *QUICK)
        assert (new.code, "is now" in new.err) == (0, False)

    def test_overwrite_never_carries_off_the_scene(self, splat: Splat, tmp_path: Path) -> None:
        scene = write_scene(tmp_path / "all" / "scene")
        for output in (scene, scene.parent):
            done = splat("train", scene, "-o", output, "-n", 1, "--overwrite", *QUICK)
            assert done.code == 8
        assert (scene / "transforms.json").is_file()

    def test_a_model_can_be_the_start(
        self, splat: Splat, tiny_scene: Path, finished_run: Path, exported_ply: Path, tmp_path: Path
    ) -> None:
        for name, start in (("a", finished_run), ("b", exported_ply)):
            words = ["--init", start, "--sh-degree", 1, "--stop-at", 1, "-n", 1000]
            done = splat("train", tiny_scene, "-o", tmp_path / name, "-q", *words)
            assert done.code == 0, done.err
            assert len(load_checkpoint(Path(done.lines[0])).gaussians) == len(read_ply(exported_ply))

    @pytest.mark.parametrize("start", [(), ("--set", "schedule.sh_degree_start=0")], ids=["its own", "0"])
    def test_the_model_of_a_run_begun_from_a_model_looks_as_its_export(
        self, splat: Splat, tiny_scene: Path, exported_ply: Path, cameras: Path, tmp_path: Path, start: tuple[str, ...]
    ) -> None:
        assert read_ply(exported_ply).shN.abs().amax() > 0
        run, ply = tmp_path / "run", tmp_path / "run.ply"
        words = ["--init", exported_ply, "--sh-degree", 1, "--stop-at", 1, "-n", 1000, *start]
        assert splat("train", tiny_scene, "-o", run, "-q", *words).code == 0
        assert json.loads(splat("info", run, "--json").out)["active_sh_degree"] == (0 if start else 1)
        assert splat("export", run, "-o", ply, "-q").code == 0
        scores = [json.loads(splat("eval", one, "--data", tiny_scene, "--json", "-q").out) for one in (run, ply)]
        assert scores[0]["views"] == scores[1]["views"]
        images = []
        for name, model in (("a", run), ("b", ply)):
            done = splat("render", model, "--views", cameras, "--size", "20x15", "-o", tmp_path / name, "-q")
            assert done.code == 0, done.err
            images.append([path.read_bytes() for path in sorted((tmp_path / name).rglob("*.png"))])
        assert images[0] == images[1]

    def test_an_empty_folder_is_not_a_scene(self, splat: Splat, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        done = splat("train", tmp_path / "empty", "-o", tmp_path / "run")
        assert done.code == 3
        assert f"reading {tmp_path / 'empty'}\nerror[E003]" in done.err
        assert not (tmp_path / "run").exists()

    def test_a_file_in_the_way_of_the_run_is_an_error(self, splat: Splat, tiny_scene: Path, tmp_path: Path) -> None:
        (tmp_path / "run").write_text("mine")
        done = splat("train", tiny_scene, "-o", tmp_path / "run", "-n", 1, *QUICK)
        assert done.code == 8
        assert (tmp_path / "run").read_text() == "mine"

    def test_a_folder_in_the_way_names_what_can_be_done_with_it(
        self, splat: Splat, tiny_scene: Path, finished_run: Path, tmp_path: Path
    ) -> None:
        run = shutil.copytree(finished_run, tmp_path / "run")
        (run / "request.json").unlink()
        words = ("train", tiny_scene, "-o", run, "-n", 1, *QUICK)
        aside = "--overwrite moves the run aside, "
        assert f"help: {aside}splat resume continues it, or choose another -o\n" in splat(*words).err
        for path in (run / "ckpts").iterdir():
            path.unlink()
        assert f"help: {aside}or choose another -o\n" in splat(*words).err
        (run / "ckpts").rmdir()
        assert "help: choose another -o\n" in splat(*words).err
        (run / "ckpts").mkdir()
        assert splat(*words, "--overwrite", "-q").code == 0

    def test_runs_that_start_at_once_get_a_folder_each(
        self, splat: Splat, tiny_scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        first = Path("output/ball")
        folders = [first, first, Path("output/ball-2")]
        monkeypatch.setattr(run_training, "default_folder", lambda scene: folders.pop(0))
        with RunDir.create(first):
            done = splat("train", tiny_scene, "-n", 5, "-q", *QUICK)
            assert (done.code, done.lines) == (0, ["output/ball-2/ckpts/ckpt_000005.pt"]), done.err
            assert (first / "ckpts").is_dir()

    @pytest.mark.parametrize(("steps", "go_on"), [(20, ""), (60, " --iterations 60")])
    def test_another_length_in_the_folder_of_a_run_is_named_alone(
        self, splat: Splat, tiny_scene: Path, finished_run: Path, steps: int, go_on: str
    ) -> None:
        """Without the schedule, which follows it; and a run is not resumed for fewer steps than it has."""
        done = splat("train", tiny_scene, "-o", finished_run, "-n", steps, *QUICK)
        assert done.code == 8
        assert f"with other settings: train.iterations was 40, is now {steps}\n" in done.err
        assert f"continue it with splat resume {finished_run}{go_on}, move it aside" in done.err

    @pytest.mark.parametrize(
        ("before", "now", "differences"),
        [
            (("-n", 2000), ("-n", 500), "train.iterations was 2000, is now 500"),
            (("-n", 2000), ("--set", "train.iterations=500"), "train.iterations was 2000, is now 500"),
            (
                ("-n", 2000),
                ("-n", 500, "--seed", 7),
                "train.iterations was 2000, is now 500; train.seed was 42, is now 7",
            ),
            (("-n", 2000), ("-n", 2000, "--batch-size", 2), "train.batch_size was 1, is now 2"),
            (
                ("-n", 2000),
                ("-n", 500, "--set", "optim.beta1=0.8"),
                "train.iterations was 2000, is now 500; optim.beta1 was 0.9, is now 0.8",
            ),
            (
                ("-n", 2000, "--strategy", "adc"),
                ("-n", 2000, "--strategy", "mcmc"),
                "strategy.name was adc, is now mcmc",
            ),
        ],
    )
    def test_what_follows_another_setting_is_no_difference(
        self,
        splat: Splat,
        tiny_scene: Path,
        tmp_path: Path,
        before: tuple[object],
        now: tuple[object],
        differences: str,
    ) -> None:
        """Learning rates and schedule follow the length and the batch size, and more follows the strategy."""
        words = ("train", tiny_scene, "-o", tmp_path / "run", "-q", "--init", "random", "--sh-degree", 0)
        stopped = splat(*words, *before, "--stop-at", 1)
        assert stopped.code == 0, stopped.err
        done = splat(*words, *now)
        assert done.code == 8
        assert f"with other settings: {differences}\n" in done.err

    def test_a_point_cloud_of_init_is_taken_as_points(self, splat: Splat, tmp_path: Path) -> None:
        scene = add_points(write_scene(tmp_path / "ball"))
        cloud = tmp_path / "cloud.ply"
        lines = (scene / "points.ply").read_text().splitlines()[:-100]
        cloud.write_text("\n".join(["element vertex 300" if "vertex" in line else line for line in lines]) + "\n")
        words = ("train", scene, "-n", 1, "--sh-degree", 0)
        done = splat(*words, "--init", cloud, "-o", tmp_path / "init")
        assert done.code == 0, done.err
        assert f"note: {cloud} holds points, no Gaussians: --init is taken as --points {cloud}\n" in done.err
        assert splat(*words, "--points", cloud, "-o", tmp_path / "points").code == 0
        files = [tmp_path / name / "ckpts/ckpt_000001.pt" for name in ("init", "points")]
        one, other = (load_checkpoint(file).gaussians for file in files)
        assert one.means.equal(other.means)
        assert splat(*words, "--init", cloud, "-o", tmp_path / "init").code == 0, "the same command continues the run"

    def test_a_stop_after_the_end_is_reported(self, splat: Splat, tiny_scene: Path, tmp_path: Path) -> None:
        words = ("train", tiny_scene, "-o", tmp_path / "run", "-n", 6, *QUICK)
        refused = splat(*words, "--stop-at", 100)
        assert refused.code == 2
        assert "the run ends at step 6, before step 100" in refused.err
        assert "-n 100" in refused.err
        assert not (tmp_path / "run").exists()
        assert splat(*words, "--stop-at", 6, "-q").code == 0
        late = splat("resume", tmp_path / "run", "--iterations", 7, "--stop-at", 100)
        assert late.code == 0
        assert "note: the run ends at step 7, before --stop-at 100; --iterations N makes it longer" in late.err
        early = splat("resume", tmp_path / "run", "--iterations", 9, "--stop-at", 5)
        assert early.code == 0
        assert "no step is done: the run is at step 7" in early.err


class TestResume:
    def test_a_resumed_run_is_bit_identical_to_an_uninterrupted_one(
        self, splat: Splat, tiny_scene: Path, finished_run: Path, tmp_path: Path
    ) -> None:
        first = splat("train", tiny_scene, "-o", tmp_path / "run", "-n", 40, "--stop-at", 17, "-q", *QUICK)
        assert first.lines == [str(tmp_path / "run" / "ckpts" / "ckpt_000017.pt")]
        second = splat("resume", tmp_path / "run", "-q")
        assert second.code == 0
        assert second.lines == [str(tmp_path / "run" / "ckpts" / "ckpt_000040.pt")]
        assert_equal_state(Path(second.lines[0]), finished_run / "ckpts" / "ckpt_000040.pt")

    def test_goes_on_without_the_points_that_it_began_with(self, splat: Splat, tmp_path: Path) -> None:
        """Near planes, free space before cameras and the rate of dropout come from them, and are in the checkpoint."""
        points = add_points(write_scene(tmp_path / "pointed")) / "points.ply"
        scene = write_scene(tmp_path / "scene")
        moved = points.rename(tmp_path / "cloud.ply")
        words = ("-n", 40, "-q", *QUICK, "--init", "sfm", "--points", moved)
        assert splat("train", scene, "-o", tmp_path / "whole", *words).code == 0
        assert splat("train", scene, "-o", tmp_path / "parts", *words, "--stop-at", 17).code == 0
        moved.unlink()
        done = splat("resume", tmp_path / "parts")
        assert done.code == 0, done.err
        assert f"not needed any more: {moved}" in done.err
        assert "training makes its own" not in done.err
        whole, parts = (tmp_path / name / "ckpts/ckpt_000040.pt" for name in ("whole", "parts"))
        assert all(camera.near > 10 * NEAR for camera in load_checkpoint(parts).cameras)
        assert_equal_state(parts, whole)

    def test_extends_a_finished_run(self, splat: Splat, finished_run: Path, tmp_path: Path) -> None:
        run = shutil.copytree(finished_run, tmp_path / "run")
        done = splat("resume", run / "ckpts" / "ckpt_000040.pt", "--iterations", 45, "--json")
        assert done.objects[-1]["step"] == 45
        assert load_checkpoint(run / "ckpts" / "ckpt_000045.pt").config.train.iterations == 45

    def test_a_cap_below_what_the_run_has_is_noted(self, splat: Splat, finished_run: Path, tmp_path: Path) -> None:
        copy = tmp_path / "copy"
        shutil.copytree(finished_run, copy)
        done = splat("resume", copy, "-n", 42, "--set", "strategy.cap_max=10")
        assert done.code == 0
        assert "Gaussians, more than the cap of 10: it adds none" in done.err

    def test_an_assignment_decides_before_the_flag(self, splat: Splat, finished_run: Path, tmp_path: Path) -> None:
        """As in train."""
        shutil.copytree(finished_run, tmp_path / "copy")
        done = splat("resume", tmp_path / "copy", "-n", 42, "--set", "train.iterations=41", "-q")
        assert done.lines == [str(tmp_path / "copy" / "ckpts" / "ckpt_000041.pt")]

    def test_a_checkpoint_alone_starts_a_run_of_its_own(
        self, splat: Splat, finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        lone = Path(shutil.copy(finished_run / "ckpts" / "ckpt_000040.pt", tmp_path / "mine.pt"))
        done = splat("resume", lone, "--iterations", 41, "-q")
        assert done.lines == [str(Path("output") / "ball" / "ckpts" / "ckpt_000041.pt")]

    def test_a_moved_scene_is_named(self, splat: Splat, tmp_path: Path) -> None:
        scene = write_scene(tmp_path / "before")
        splat("train", scene, "-o", tmp_path / "run", "-n", 6, "--stop-at", 3, "-q", *QUICK)
        scene = scene.rename(tmp_path / "after")
        for words in (("resume",), ("eval",), ("compare",), ("render", "--views", "--what", "error")):
            gone = splat(words[0], tmp_path / "run", *words[1:])
            assert gone.code == 3
            assert "the scene of this run does not exist" in gone.err
            assert "--data DIR" in gone.err
        done = splat("resume", tmp_path / "run", "--data", scene, "-q")
        assert done.code == 0, done.err
        for words in (("resume", "-n", 7), ("eval",)):
            again = splat(words[0], tmp_path / "run", *words[1:], "-q")
            assert again.code == 0, f"its new place is known: {again.err}"

    def test_a_scene_that_changed_is_refused(self, splat: Splat, tmp_path: Path) -> None:
        scene = write_scene(tmp_path / "scene")
        splat("train", scene, "-o", tmp_path / "run", "-n", 6, "--stop-at", 3, "-q", *QUICK)
        imageio.imwrite(scene / "images" / "view_03.png", np.zeros((HEIGHT, WIDTH, 3), np.uint8))
        done = splat("resume", tmp_path / "run")
        assert done.code == 3
        assert "changed" in done.err

    def test_a_run_in_use_is_refused(self, splat: Splat, finished_run: Path, tmp_path: Path) -> None:
        from splatcli.checkpoint.run_dir import RunDir

        run = shutil.copytree(finished_run, tmp_path / "run")
        (tmp_path / "empty").mkdir()
        with RunDir.open(run):
            done = splat("resume", run, "--iterations", 50)
            at_once = splat("resume", run, "--iterations", 50, "--data", tmp_path / "empty")
        assert (done.code, at_once.code) == (9, 9), "before the scene is read"

    @pytest.mark.parametrize(
        ("command", "reader"), [("check", "check.load_checkpoint"), ("info", "run_dir.read_container")]
    )
    def test_a_checkpoint_that_training_replaces_meanwhile_is_not_missed(
        self,
        splat: Splat,
        finished_run: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        command: str,
        reader: str,
    ) -> None:
        run = shutil.copytree(finished_run, tmp_path / "run")
        for path in (run / "ckpts").iterdir():
            if path.name != "ckpt_000040.pt":
                path.unlink()
        module, name = reader.split(".")
        place = importlib.import_module(f"splatcli.checkpoint.{module}")
        read, seen = getattr(place, name), []

        def read_late(path: Path, **options: Any) -> Any:
            seen.append(path.name)
            if len(seen) == 1:
                path.rename(path.with_name("ckpt_000041.pt"))
            return read(path, **options)

        monkeypatch.setattr(place, name, read_late)
        done = splat(command, run)
        assert done.code == 0, done.err
        assert seen[:2] == ["ckpt_000040.pt", "ckpt_000041.pt"]
        assert "ckpt_000041.pt" in done.out
        assert "ckpt_000040.pt: " not in done.out

    def test_a_run_that_another_process_has_begun_meanwhile_is_in_use(
        self, splat: Splat, tiny_scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from splatcli.checkpoint.run_dir import RunDir

        run, others = tmp_path / "run", []
        read = splatcli.scene.read.read_scene

        def read_slowly(*args: Any, **options: Any) -> Any:
            others.append(RunDir.create(run))
            others[0].write_report("request.json", {})
            (run / "metrics.jsonl").touch()
            return read(*args, **options)

        monkeypatch.setattr(splatcli.scene.read, "read_scene", read_slowly)
        done = splat("train", tiny_scene, "-o", run, "-n", 5, *QUICK)
        assert done.code == 9
        assert f"process {os.getpid()} on " in done.err
        others[0].close()
        assert sorted(path.name for path in run.iterdir()) == ["ckpts", "lock", "metrics.jsonl", "request.json"]

    @pytest.mark.parametrize("words", [("resume",), ("train", "{scene}", "-n", 40, *QUICK, "-o")])
    def test_a_run_that_another_process_has_ended_meanwhile_is_not_repeated(
        self,
        splat: Splat,
        tiny_scene: Path,
        finished_run: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        words: tuple[str, ...],
    ) -> None:
        """Its later checkpoints would be put aside, and the same steps made once more."""
        run, last = tmp_path / "run", "ckpts/ckpt_000040.pt"
        splat("train", tiny_scene, "-o", run, "-n", 40, "--stop-at", 17, "-q", *QUICK)
        read = splatcli.scene.read.read_scene

        def read_slowly(*args: Any, **options: Any) -> Any:
            shutil.copy(finished_run / last, run / last)
            return read(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(splatcli.scene.read, "read_scene", read_slowly)
            words = tuple(str(word).format(scene=tiny_scene) for word in words)
            done = splat(*words, run)
        assert done.code == 9
        assert "has taken this run further, to ckpt_000040.pt, while this one read it" in done.err
        assert sorted(path.name for path in (run / "ckpts").iterdir())[-1] == "ckpt_000040.pt"
        assert splat(*words, run, "-q").lines == [str(run / last)]


class TestRender:
    def test_bare_views_are_the_held_out_ones(self, splat: Splat, finished_run: Path, tmp_path: Path) -> None:
        done = splat("render", finished_run, "-o", tmp_path, "--views")
        assert done.code == 0
        assert [Path(line).name for line in done.lines] == HELD_OUT
        for line in done.lines:
            assert imageio.imread(line).shape == (HEIGHT, WIDTH, 3)
        assert done.err.count("PSNR") == len(HELD_OUT) + 1

    @pytest.mark.parametrize(("views", "count"), [("test", 2), ("train", VIEWS - 2), ("all", VIEWS)])
    def test_views_by_name(self, splat: Splat, finished_run: Path, tmp_path: Path, views: str, count: int) -> None:
        done = splat("render", finished_run, "--views", views, "-o", tmp_path, "-q")
        assert len(done.lines) == count
        assert done.err == ""

    def test_the_default_folder_is_in_the_run(self, splat: Splat, finished_run: Path, tmp_path: Path) -> None:
        run = shutil.copytree(finished_run, tmp_path / "run")
        done = splat("render", run, "-q")
        assert all(Path(line).is_relative_to(run / "renders" / "000040_test") for line in done.lines)

    def test_json_has_the_figures(self, splat: Splat, finished_run: Path, tmp_path: Path) -> None:
        objects = splat("render", finished_run, "-o", tmp_path, "--json").objects
        assert [one["event"] for one in objects] == ["rendered", "rendered", "result"]
        assert_allclose(objects[-1]["psnr"], np.mean([one["psnr"] for one in objects[:-1]]), rtol=1e-12)

    def test_images_are_not_needed(self, splat: Splat, tmp_path: Path) -> None:
        scene = write_scene(tmp_path / "scene")
        splat("train", scene, "-o", tmp_path / "run", "-n", 3, "-q", *QUICK)
        shutil.rmtree(scene)
        done = splat("render", tmp_path / "run")
        assert done.code == 0
        assert len(done.lines) == 2
        assert "renders are not compared with images" in done.err

    def test_a_ply_needs_cameras_and_renders_the_same_images(
        self, splat: Splat, finished_run: Path, exported_ply: Path, cameras: Path, tmp_path: Path
    ) -> None:
        refused = splat("render", exported_ply, "--views")
        assert refused.code == 2
        assert "cameras.json" in refused.err
        from_ply = splat("render", exported_ply, "--views", cameras, "-o", tmp_path / "a", "-q")
        from_run = splat("render", finished_run, "--views", "all", "-o", tmp_path / "b", "-q")
        assert len(from_ply.lines) == len(from_run.lines) == VIEWS
        for left, right in zip(from_ply.lines, from_run.lines, strict=True):
            assert Path(left).read_bytes() == Path(right).read_bytes()

    def test_background_shows_where_nothing_is(self, splat: Splat, finished_run: Path, tmp_path: Path) -> None:
        done = splat("render", finished_run, "--background", "black", "-o", tmp_path / "black", "-q")
        black = imageio.imread(done.lines[0]).astype(int)
        white: list[np.ndarray] = []
        for colour in ("white", "#ffffff", "1,1,1"):
            done = splat("render", finished_run, "--background", colour, "-o", tmp_path / colour, "-q")
            white.append(imageio.imread(done.lines[0]).astype(int))
        # Through every pixel as much background shows as it is not covered; somewhere that is a lot.
        assert (white[0] >= black).all()
        assert (white[0] - black).max() > 100
        assert (white[0] == white[1]).all()
        assert (white[0] == white[2]).all()
        done = splat("render", finished_run, "--background", "whitish")
        assert done.code == 2


class TestExport:
    def test_a_ply_holds_the_raw_parameters(self, splat: Splat, finished_run: Path, tmp_path: Path) -> None:
        done = splat("export", finished_run, "-o", tmp_path / "x.ply")
        assert done.lines == [str(tmp_path / "x.ply")]
        before = gaussians_to_render(load_checkpoint(finished_run / "ckpts" / "ckpt_000040.pt"))
        for (name, x), (_, y) in zip(before.items(), read_ply(tmp_path / "x.ply").items(), strict=True):
            assert torch.equal(x, y), name

    def test_an_existing_file_survives_a_failure(self, splat: Splat, finished_run: Path, tmp_path: Path) -> None:
        (tmp_path / "folder.ply").mkdir()
        done = splat("export", finished_run, "-o", tmp_path / "folder.ply")
        assert done.code == 8
        assert list(tmp_path.iterdir()) == [tmp_path / "folder.ply"]

    def test_json_and_a_file_do_not_share_stdout(self, splat: Splat, exported_ply: Path) -> None:
        done = splat("export", exported_ply, "-o", "-", "--json")
        assert done.code == 2, done.err
        assert "both want stdout" in done.objects[-1]["what"]
        planned = splat("export", exported_ply, "-o", "-", "--json", "--dry-run")
        assert (planned.code, planned.objects[-1]["makes"]) == (0, "-"), planned.err

    def test_a_ply_has_no_cameras_to_export(self, splat: Splat, exported_ply: Path, tmp_path: Path) -> None:
        assert splat("export", exported_ply, "-o", tmp_path / "cameras.json").code == 2

    @pytest.mark.parametrize("words", [("--crop", "sphere:0,0,0,1"), ("--min-opacity", 0), ("--sh-degree", 0)])
    def test_cameras_are_not_chosen_like_gaussians(
        self, splat: Splat, finished_run: Path, tmp_path: Path, words: tuple[object, ...]
    ) -> None:
        done = splat("export", finished_run, "-o", tmp_path / "cameras.json", *words)
        assert (done.code, list(tmp_path.iterdir())) == (2, [])
        assert f"where: {words[0]}" in done.err


class TestEval:
    def test_lines_for_people(self, splat: Splat, finished_run: Path, tmp_path: Path) -> None:
        done = splat("eval", finished_run, "--sheet", tmp_path / "sheet.png")
        assert [line.split()[0] for line in done.lines] == ["psnr", "ssim", "num_gaussians", "sheet"]
        height, width, _ = imageio.imread(tmp_path / "sheet.png").shape
        assert width > 3 * WIDTH
        assert height > HEIGHT

    def test_a_sheet_of_fewer_views_is_smaller(self, splat: Splat, finished_run: Path, tmp_path: Path) -> None:
        sizes = []
        for count in (1, 3, 12):
            done = splat("eval", finished_run, "--views", "all", "--sheet", tmp_path / "x.png", "--sheet-views", count)
            assert done.code == 0
            height, width, _ = imageio.imread(tmp_path / "x.png").shape
            sizes.append(height * width)
        assert sizes[0] < sizes[1] < sizes[2]

    @pytest.mark.parametrize(
        ("words", "where"),
        [(("--sheet-views", "3"), "--sheet-views"), (("--lpips", "squeeze"), "--lpips")],
    )
    def test_flags_that_make_no_sense(
        self, splat: Splat, finished_run: Path, words: tuple[str, ...], where: str
    ) -> None:
        done = splat("eval", finished_run, *words)
        assert done.code == 2
        assert where in done.err

    def test_colour_corrected_figures(self, splat: Splat, finished_run: Path) -> None:
        (facts,) = splat("eval", finished_run, "--color-corrected", "--json").objects
        for name in ("cc_psnr", "cc_ssim"):
            assert_allclose(facts[name], np.mean([view[name] for view in facts["views"]]), rtol=1e-12)
        assert all(view["cc_psnr"] >= view["psnr"] for view in facts["views"])
        assert "least squares" in facts["protocol"]["color_correction"]
        lines = splat("eval", finished_run, "--color-corrected").lines
        assert [line.split()[0] for line in lines] == ["psnr", "ssim", "cc_psnr", "cc_ssim", "num_gaussians"]

    def test_views_are_named_by_their_images(self, splat: Splat, finished_run: Path) -> None:
        (facts,) = splat("eval", finished_run, "--views", "view_03.png,view_08", "--json").objects
        assert [view["name"] for view in facts["views"]] == ["view_03.png", "view_08.png"]
        assert facts["protocol"]["views_of"] == "view_03.png,view_08"
        refused = splat("eval", finished_run, "--views", "orbit")
        assert refused.code == 2
        assert "'orbit' names no views with images" in refused.err

    @pytest.mark.parametrize("name", ["nowhere", "orbt"])
    def test_it_advises_no_views_without_images(self, splat: Splat, finished_run: Path, name: str) -> None:
        refused = splat("eval", finished_run, "--views", name, "--device", "cpu")
        assert refused.code == 2
        assert f"'{name}' names no views, and no image" in refused.err
        assert "orbit" not in refused.err
        assert ".json" not in refused.err

    def test_lpips_without_a_package_names_what_to_install(
        self, splat: Splat, finished_run: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for package in ("lpips", "torchmetrics"):
            monkeypatch.setitem(sys.modules, package, None)
        done = splat("eval", finished_run, "--lpips", "vgg", "--json")
        assert done.code == 4
        assert "pip install 'splatcli[lpips]'" in done.err
        assert not [facts for facts in done.objects if "lpips" in facts]

    def test_one_object_with_json(self, splat: Splat, finished_run: Path) -> None:
        (facts,) = splat("eval", finished_run, "--json").objects
        assert {"psnr", "ssim", "num_gaussians", "views", "protocol"} <= facts.keys()
        assert [Path(view["name"]).name for view in facts["views"]] == HELD_OUT
        assert_allclose(facts["psnr"], np.mean([view["psnr"] for view in facts["views"]]), rtol=1e-12)

    def test_agrees_with_the_run_s_own_figures(self, splat: Splat, finished_run: Path) -> None:
        (facts,) = splat("eval", finished_run, "--json").objects
        logged = [json.loads(line) for line in (finished_run / "metrics.jsonl").read_text().splitlines()]
        (last,) = [one for one in logged if one["event"] == "eval"]
        # uint8 / 255 and round(x * 255) / 255 differ in the last bit of float32.
        assert_allclose([facts["psnr"], facts["ssim"]], [last["psnr"], last["ssim"]], rtol=1e-5)

    def test_a_ply_cannot_be_evaluated(self, splat: Splat, exported_ply: Path) -> None:
        assert splat("eval", exported_ply).code == 2


class TestInfo:
    def test_a_checkpoint(self, splat: Splat, finished_run: Path) -> None:
        (facts,) = splat("info", finished_run / "ckpts" / "ckpt_000040.pt", "--json").objects
        assert (facts["kind"], facts["step"], facts["sh_degree"]) == ("checkpoint", 40, 1)
        assert facts["num_gaussians"] > 0

    def test_a_run_folder(self, splat: Splat, finished_run: Path) -> None:
        (facts,) = splat("info", finished_run, "--json").objects
        assert (facts["kind"], facts["step"], facts["num_test"]) == ("run", 40, 2)

    def test_a_ply(self, splat: Splat, exported_ply: Path) -> None:
        (facts,) = splat("info", exported_ply, "--json").objects
        assert (facts["kind"], facts["sh_degree"]) == ("ply", 1)

    def test_a_scene(self, splat: Splat, tiny_scene: Path) -> None:
        (facts,) = splat("info", tiny_scene, "--json").objects
        assert (facts["kind"], facts["scene_kind"]) == ("scene", "nerfstudio")
        assert (facts["num_cameras"], facts["num_test"], facts["missing_photos"]) == (VIEWS, 2, [])

    def test_lines_for_people(self, splat: Splat, finished_run: Path) -> None:
        done = splat("info", finished_run)
        rows = {line[:11].strip(): line[11:].strip() for line in done.lines}
        (facts,) = splat("info", finished_run, "--json").objects
        assert [*rows][:6] == ["kind", "path", "Gaussians", "SH degree", "size", "bounds"]
        assert (rows["Gaussians"], rows["step"]) == (f"{facts['num_gaussians']:,}", "40 of 40")
        assert (rows["views"], rows["state"]) == ("8 to train on, 2 held out", "sound; the run is finished")

    def test_of_a_file_of_splats_the_reasons_are_printed_on_demand(self, splat: Splat, exported_ply: Path) -> None:
        short, long = splat("info", exported_ply), splat("info", exported_ply, "--verbose")
        assert "state      sound; the other commands take it\n" in short.out
        for word in ("logarithms", "quaternions", "raw", "none"):
            assert word not in short.out.replace(str(exported_ply), "")
            assert word in long.out
        assert [line.split() for line in long.lines[: len(short.lines)]] == [line.split() for line in short.lines]


def test_a_run_is_trained_shown_and_scored_over_its_colour(tmp_path: Path, splat: Splat) -> None:
    """Images that are transparent outside a circle train as opaque ones with that colour there, to the same bits."""
    scene, opaque, run = write_scene(tmp_path / "scene"), write_scene(tmp_path / "opaque"), tmp_path / "run"
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    outside = np.hypot(x - WIDTH / 2, y - HEIGHT / 2) >= 12
    for path in (scene / "images").iterdir():
        rgb = imageio.imread(path)
        imageio.imwrite(path, np.dstack([rgb, np.where(outside, 0, 255).astype(np.uint8)]))
        rgb[outside] = (0, 128, 128)
        imageio.imwrite(opaque / "images" / path.name, rgb)
    settings = ("-n", 30, *QUICK, "--json", "--set")
    words = ("train", scene, "-o", run, *settings, "train.background=teal")
    assert splat(*words, "--stop-at", 20).code == 0
    done = splat(*words[:-1], "train.background=#008080")
    assert done.code == 0, done.err
    assert splat("train", opaque, "-o", tmp_path / "other", *settings, "train.background=[0, 0.5, 0.5]").code == 0
    assert_equal_state(run / "ckpts" / "ckpt_000030.pt", tmp_path / "other" / "ckpts" / "ckpt_000030.pt")
    (score,) = splat("eval", run, "--json").objects
    assert score["protocol"]["background"] == "#008080"
    assert score["psnr"] == pytest.approx(done.objects[-1]["psnr"])
    shown = {}
    for name, more in (("own", ()), ("teal", ("--background", "teal")), ("black", ("--background", "black"))):
        rendered = splat("render", run, "--views", "test", "-o", tmp_path / name, *more)
        shown[name] = Path(rendered.lines[0]).read_bytes()
    assert shown["own"] == shown["teal"] != shown["black"]
    refused = splat("train", scene, "-o", tmp_path / "refused", "--set", "train.background=gren")
    assert (refused.code, "did you mean green?" in refused.err) == (2, True), refused.err
