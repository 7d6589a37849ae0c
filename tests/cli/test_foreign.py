"""Models of other programs in every command: the same pictures and figures, and the options that they need."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import imageio.v3 as imageio
import numpy as np
import pytest
import torch

from splatcli.checkpoint.file import load_checkpoint
from splatcli.checkpoint.foreign.imported import Columns
from splatcli.checkpoint.run_dir import find_latest_sound
from splatcli.train.state import gaussians_to_render
from tests.checkpoint.foreign.made import WRITERS, activated, tables_of, write, write_gsplat
from tests.cli.tiny import QUICK, WIDTH
from tests.formats.made import read_ply
from tests.native.cases import NEEDS_COMPILER
from tests.running import Splat
from tests.scene.made import blender_scene

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def trained(finished_run: Path) -> Columns:
    """The Gaussians of the finished run, whose scales are partly below zero."""
    latest = find_latest_sound(finished_run).path
    assert latest is not None
    gaussians = gaussians_to_render(load_checkpoint(latest))
    tables = Columns(
        means=gaussians.means,
        quats=gaussians.quats,
        scales=gaussians.log_scales,
        opacities=gaussians.logit_opacities,
        sh0=gaussians.sh0,
        shN=gaussians.shN,
    )
    assert bool((tables.scales < 0).any())
    return tables


@pytest.mark.parametrize("kind", WRITERS)
class TestEveryFormat:
    def test_is_shown_as_the_run_that_it_came_from(
        self, kind: str, splat: Splat, finished_run: Path, trained: Columns, cameras: Path, tmp_path: Path
    ) -> None:
        path = write(kind, trained, tmp_path)
        done = splat("render", path, "--views", cameras, "-o", tmp_path / "a")
        ours = splat("render", finished_run, "--views", cameras, "-o", tmp_path / "b", "-q")
        assert (done.code, len(done.lines)) == (0, len(ours.lines))
        for left, right in zip(done.lines, ours.lines, strict=True):
            assert np.array_equal(imageio.imread(left), imageio.imread(right))

    def test_is_measured_on_the_scene_that_is_named(
        self, kind: str, splat: Splat, finished_run: Path, tiny_scene: Path, trained: Columns, tmp_path: Path
    ) -> None:
        path = write(kind, trained, tmp_path)
        (facts,) = splat("eval", path, "--data", tiny_scene, "--json").objects
        (ours,) = splat("eval", finished_run, "--json").objects
        assert (facts["psnr"], facts["ssim"]) == (ours["psnr"], ours["ssim"])
        assert facts["step"] is None
        refused = splat("eval", path)
        assert refused.code == 2
        assert "--data DIR" in refused.err

    def test_is_rendered_from_the_scene_that_is_named(
        self, kind: str, splat: Splat, tiny_scene: Path, trained: Columns, tmp_path: Path
    ) -> None:
        done = splat("render", write(kind, trained, tmp_path), "--data", tiny_scene, "--views", "-o", tmp_path / "a")
        assert (done.code, len(done.lines)) == (0, 2)
        assert "mean over 2 views: PSNR" in done.err

    def test_is_exported_with_its_bits(self, kind: str, splat: Splat, trained: Columns, tmp_path: Path) -> None:
        done = splat("export", write(kind, trained, tmp_path), "-o", tmp_path / "out.ply")
        assert done.code == 0
        found = read_ply(tmp_path / "out.ply")
        assert torch.equal(found.log_scales, trained.scales)
        assert torch.equal(found.shN, trained.shN)
        refused = splat("export", write(kind, trained, tmp_path), "-o", tmp_path / "cameras.json")
        assert refused.code == 2
        assert "the model has no cameras" in refused.err

    def test_can_be_the_start_of_a_run(
        self, kind: str, splat: Splat, tiny_scene: Path, trained: Columns, tmp_path: Path
    ) -> None:
        words = ["--init", write(kind, trained, tmp_path), "--sh-degree", 0, "--stop-at", 1, "-n", 1000]
        done = splat("train", tiny_scene, "-o", tmp_path / "run", *words)
        assert done.code == 0
        assert len(load_checkpoint(Path(done.lines[0])).gaussians) == len(trained.means)
        assert "SH degree 1 -> 0: the difference is dropped" in done.err

    def test_cannot_be_resumed_and_the_way_round_works(
        self, kind: str, splat: Splat, trained: Columns, tmp_path: Path
    ) -> None:
        path = write(kind, trained, tmp_path)
        done = splat("resume", path)
        assert done.code == 5
        assert ("this is a PLY (no optimizer state)" if kind == "ply" else "not a checkpoint of splat") in done.err
        assert f"splat train SCENE --init {path}" in done.err

    def test_info_describes_it(self, kind: str, splat: Splat, trained: Columns, tmp_path: Path) -> None:
        (facts,) = splat("info", write(kind, trained, tmp_path), "--json").objects
        assert facts["kind"] == ("ply" if kind == "ply" else "foreign checkpoint")
        assert (facts["num_gaussians"], facts["sh_degree"]) == (len(trained.means), 1)
        assert (facts["space"], facts["usable"], facts["nonfinite"]) == ("raw", True, [])
        assert "scales are logarithms" in facts["evidence"][0]

    def test_info_describes_models_that_are_refused(self, kind: str, splat: Splat, tmp_path: Path) -> None:
        tables = activated(tables_of(300), scales=1, quats=1)
        tables.sh0[5, 1] = float("nan")
        path = write(kind, tables, tmp_path)
        (facts,) = splat("info", path, "--json").objects
        assert (facts["num_gaussians"], facts["space"], facts["usable"]) == (300, "activated", False)
        assert facts["unit_quaternions"] is True
        assert "1 NaN or infinite values" in facts["nonfinite"][0]
        assert "look already activated (all 897 values >= 0" in facts["evidence"][0]
        assert "--drop-nonfinite" in facts["help"]
        (facts,) = splat("info", path, "--json", "--drop-nonfinite", "--param-space", "activated").objects
        assert facts["usable"] is True
        assert any("took logarithms of the scales" in note for note in facts["notes"])

    @pytest.mark.parametrize("command", ["train", "render", "export", "eval"])
    def test_activated_is_refused_without_param_space(
        self, kind: str, command: str, splat: Splat, tiny_scene: Path, cameras: Path, tmp_path: Path
    ) -> None:
        path = write(kind, activated(tables_of(300), scales=1, opacities=1), tmp_path)
        words: dict[str, list[object]] = {
            "train": [tiny_scene, "--init", path, "-o", tmp_path / "run", "--stop-at", 1],
            "render": [path, "--views", cameras, "-o", tmp_path / "a"],
            "export": [path, "-o", tmp_path / "out.ply"],
            "eval": [path, "--data", tiny_scene],
        }
        refused = splat(command, *words[command])
        assert refused.code == 5
        assert "scales look already activated" in refused.err
        assert "--param-space activated" in refused.err
        assert "GiB for one training step" in refused.err
        # Where a command has cameras, they are those of the prediction.
        assert ("a nominal view" in refused.err) == (command == "export")
        taken = splat(command, *words[command], "--param-space", "activated")
        assert taken.code == 0, taken.err
        assert "took logarithms of the scales, took logits of the opacities" in taken.err
        assert "Traceback" not in refused.err + taken.err


def test_the_run_folders_of_other_programs_stand_for_their_newest_model(
    splat: Splat, trained: Columns, tmp_path: Path
) -> None:
    inria, gsplat, nerfstudio = (tmp_path / name for name in ("inria", "gsplat", "nerfstudio"))
    for folder in (inria / "point_cloud" / "iteration_7000", gsplat / "ckpts", nerfstudio / "nerfstudio_models"):
        folder.mkdir(parents=True)
    write("ply", trained, inria / "point_cloud" / "iteration_7000")
    write("inria", trained, inria)
    (inria / "chkpnt3000.pth").write_bytes(b"older")
    write("nerfstudio", trained, nerfstudio / "nerfstudio_models")
    (nerfstudio / "nerfstudio_models" / "step-000002000.ckpt").write_bytes(b"older")
    for rank in range(2):
        part = Columns(*(table[rank::2] for table in trained))
        write_gsplat(part, gsplat / "ckpts" / f"ckpt_6999_rank{rank}.pt")
    (gsplat / "ckpts" / "ckpt_99_rank0.pt").write_bytes(b"older")
    found = {folder.name: splat("info", folder, "--json").objects[0] for folder in (inria, gsplat, nerfstudio)}
    assert {name: Path(facts["path"]).name for name, facts in found.items()} == {
        "inria": "point_cloud.ply",
        "gsplat": "ckpt_6999_rank0.pt",
        "nerfstudio": "step-000029999.ckpt",
    }
    assert {facts["num_gaussians"] for facts in found.values()} == {len(trained.means)}
    assert {facts["kind"] for facts in found.values()} == {"foreign run"}
    assert f"--init {gsplat};" in found["gsplat"]["train_on"]
    shards = [path.stat().st_size for path in (gsplat / "ckpts").glob("ckpt_6999_rank*.pt")]
    assert len(shards) > 1
    assert found["gsplat"]["bytes"] == sum(shards)


def test_param_space_is_not_for_our_own_checkpoints(splat: Splat, finished_run: Path, tmp_path: Path) -> None:
    done = splat("export", finished_run, "-o", tmp_path / "x.ply", "--param-space", "raw")
    assert done.code == 2
    assert "says itself" in done.err


@pytest.mark.parametrize("flag", [["--param-space", "raw"], ["--lenient"], ["--drop-nonfinite"]])
def test_without_a_model_to_start_from_the_options_for_one_are_a_mistake(
    flag: list[str], splat: Splat, tiny_scene: Path, tmp_path: Path
) -> None:
    done = splat("train", tiny_scene, "-o", tmp_path / "run", *flag)
    assert done.code == 2
    assert flag[0] in done.err
    assert not (tmp_path / "run").exists()


def test_another_word_for_a_space_is_refused_with_the_known_ones(splat: Splat, tmp_path: Path) -> None:
    done = splat("info", write("ply", tables_of(), tmp_path), "--param-space", "linear")
    assert done.code == 2
    assert "'raw', 'activated'" in done.err


#: Run in a process of its own: each command line under the limit, its exit code and words, the peak of memory.
_CHILD = """
import contextlib, io, json, resource, sys, torch
# a GiB beyond what torch occupies, which differs from build to build
limit = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + (1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
from splatcli.cli.commands import run
ended = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        ended.append([run(words), said.getvalue()])
# what getrusage tells counts the process that started this one
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"ended": ended, "peak": peak}))
"""


def test_scales_and_rotations_saved_activated_are_refused_before_anything_large_is_asked_for(
    tiny_scene: Path, cameras: Path, tmp_path: Path
) -> None:
    """The case that this project began with: 52 GB wanted on a 24 GB card, because exp() was applied twice."""
    tables = activated(tables_of(100_000, 0), scales=1, quats=1)
    paths = {kind: str(write(kind, tables, tmp_path)) for kind in WRITERS}
    commands = [
        ["train", str(tiny_scene), "--init", paths["inria"], "-o", str(tmp_path / "run")],
        ["render", paths["ply"], "--views", str(cameras), "-o", str(tmp_path / "a")],
        ["export", paths["gsplat"], "-o", str(tmp_path / "out.ply")],
        ["eval", paths["nerfstudio"], "--data", str(tiny_scene)],
    ]
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, json.dumps(commands)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    reported = json.loads(done.stdout)
    for words, (code, said) in zip(commands, reported["ended"], strict=True):
        assert code == 5, (words, said)
        assert "scales look already activated (all 300,000 values >= 0" in said
        tiles = -(-WIDTH // 16) * 2  # of the tiny scene's views, of which each Gaussian covers each
        expected = f"{100_000 * tiles:,} tiles" if words[0] != "export" else "750,000,000 tiles"
        assert expected in said
        assert "GiB for one training step" in said
    assert "60.1 GiB" in reported["ended"][2][1]
    assert reported["peak"] < 900 << 10  # kilobytes, most of which is torch itself
    assert not (tmp_path / "run").exists()


def test_views_of_another_scene_are_doubted(splat: Splat, tiny_scene: Path, finished_run: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved.ply"
    assert splat("edit", finished_run, "--translate", "0.8,0,0", "-o", moved, "-q").code == 0
    rendered = splat("render", moved, "--data", tiny_scene, "--views", "-o", tmp_path / "a")
    scored = splat("eval", moved, "--data", tiny_scene)
    for done in (rendered, scored):
        assert done.code == 0, done.err
        assert "may be of another scene, or in another frame" in " ".join(done.err.split())
    own = splat("render", finished_run, "--data", tiny_scene, "--views", "-o", tmp_path / "b")
    assert "another scene" not in own.err


def test_info_of_a_folder_around_models_names_them(
    splat: Splat, trained: Columns, tiny_scene: Path, tmp_path: Path
) -> None:
    """A results folder of another program is neither a scene nor a run."""
    run = tmp_path / "results" / "garden"
    (run / "point_cloud" / "iteration_7").mkdir(parents=True)
    write("ply", trained, run / "point_cloud" / "iteration_7").rename(
        run / "point_cloud" / "iteration_7" / "point_cloud.ply"
    )
    done = splat("info", tmp_path / "results")
    assert (done.code, f"help: name {run}\n" in done.err) == (3, True), done.err
    assert "no cameras" not in done.err
    assert splat("info", run).code == 0
    asked = splat("info", tmp_path / "results", "--format", "colmap")
    assert "no colmap here" in asked.err
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing" / "notes.txt").write_text("notes")
    assert "no cameras here: looked for" in splat("info", tmp_path / "nothing").err


def test_views_of_an_inria_run_name_its_camera_file(
    splat: Splat, trained: Columns, cameras: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "point_cloud" / "iteration_7"
    folder.mkdir(parents=True)
    path = write("ply", trained, folder).rename(folder / "point_cloud.ply")
    unknown = splat("render", tmp_path, "--views")
    assert (unknown.code, "--views cameras.json" in unknown.err) == (2, True), unknown.err
    shutil.copy(cameras, tmp_path / "cameras.json")
    for words, code, advice in (
        (("render", tmp_path, "--views"), 2, f"--views {tmp_path / 'cameras.json'}"),
        (("render", path, "--views", "interpolate"), 2, f"--cameras {tmp_path / 'cameras.json'}"),
        (("render", path, "--views", "orbit", "--frames", 1), 0, f"of a file, such as {tmp_path / 'cameras.json'}"),
    ):
        done = splat(*words, "-o", tmp_path / "out")
        assert (done.code, advice in " ".join(done.err.split())) == (code, True), done.err
    views = ("--views", tmp_path / "cameras.json", "-o", tmp_path / "out")
    assert splat("render", tmp_path, *views).code == 0


@NEEDS_COMPILER
def test_an_export_has_the_figures_of_its_run_at_its_size_and_background(splat: Splat, tmp_path: Path) -> None:
    """Half of each image is transparent; the run is trained over white, at half the size, antialiased."""
    scene, run, file = blender_scene(tmp_path / "scene"), tmp_path / "run", tmp_path / "x.ply"
    flags = ("-r", 2, "--white-background", "--antialiased", "-n", 20, *QUICK, "-q")
    assert splat("train", scene, *flags, "-o", run).code == 0
    assert splat("export", run, "-o", file, "-q").code == 0
    (expected,) = splat("eval", run, "--json", "-q").objects
    (found,) = splat("eval", file, "--data", scene, "-r", 2, "--white-background", "--json", "-q").objects
    assert (found["psnr"], found["ssim"], found["protocol"]) == (
        expected["psnr"],
        expected["ssim"],
        {**expected["protocol"], "views_of": "test"},
    )
    over_black = splat("eval", file, "--data", scene, "-r", 2, "--json")
    assert over_black.objects[0]["psnr"] < found["psnr"]
    assert "compared over black" in over_black.err
    assert "--white-background for a model that was trained over white" in over_black.err
    assert "--ppisp" not in over_black.err
    refused = splat("eval", run, "--white-background")
    assert (refused.code, "it was trained with" in refused.err) == (2, True)
    # The photos that renders are compared with have the background that is asked for.
    for background in ("white", "black"):
        words = ("--data", scene, "--views", "--background", background, "-o", tmp_path / background)
        said = splat("render", file, *words).err
        assert "mean over 3 views: PSNR" in said
        whole = splat(
            "eval", file, "--data", scene, "--json", "-q", *(["--white-background"] if background == "white" else [])
        )
        assert f"PSNR {whole.objects[0]['psnr']:.2f} dB" in said
