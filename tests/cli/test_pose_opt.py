"""``--pose-opt`` and ``--exposure`` from the command line: what later commands make of a refined run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import numpy as np
import torch

from splatcli.checkpoint.file import load_checkpoint, save_checkpoint
from tests.cli.tiny import HEIGHT, QUICK, WIDTH
from tests.running import Splat


def test_later_commands_use_the_refined_poses_of_training_views(splat: Splat, tiny_scene: Path, tmp_path: Path) -> None:
    run, exported = tmp_path / "run", tmp_path / "cameras.json"
    done = splat("train", tiny_scene, "-o", run, "-n", 20, "-q", "--pose-opt", "--exposure", *QUICK)
    assert done.code == 0, done.err
    checkpoint = load_checkpoint(Path(done.lines[0]))
    assert checkpoint.views.keys() >= {"pose", "exposure"}
    assert splat("export", run, "-o", exported).code == 0
    stored: list[dict[str, Any]] = json.loads(exported.read_text(encoding="utf-8"))["cameras"]
    moved = [i for i, camera in enumerate(checkpoint.cameras) if stored[i]["viewmat"] != camera.viewmat.tolist()]
    assert moved == sorted(checkpoint.train)
    splat("export", run, "-o", tmp_path / "x.ply")
    ours = splat("render", run, "--views", "all", "-o", tmp_path / "a", "-q").lines
    theirs = splat("render", tmp_path / "x.ply", "--views", exported, "-o", tmp_path / "b", "-q").lines
    assert len(ours) == len(stored)
    assert [Path(a).read_bytes() for a in ours] == [Path(b).read_bytes() for b in theirs]

    resumed = splat("resume", run, "--iterations", 24, "-q")
    assert resumed.code == 0, resumed.err
    assert int(load_checkpoint(Path(resumed.lines[0])).views["pose.steps"].sum()) == 20  # none in the first fifth


def test_ppisp_resumes_to_the_bits_of_a_run_in_one_piece(splat: Splat, tiny_scene: Path, tmp_path: Path) -> None:
    arguments = (tiny_scene, "-n", 20, "-q", "--ppisp", *QUICK)
    whole = splat("train", *arguments, "-o", tmp_path / "whole")
    assert whole.code == 0, whole.err
    expected = load_checkpoint(Path(whole.lines[0]))
    assert expected.views["ppisp"].abs().max() > 0.0
    assert expected.views["ppisp_camera"].shape == (1, 27), "all views have one camera"

    assert splat("train", *arguments, "-o", tmp_path / "parts", "--stop-at", 11).code == 0
    resumed = splat("resume", tmp_path / "parts", "-q")
    assert resumed.code == 0, resumed.err
    found = load_checkpoint(Path(resumed.lines[0]))
    assert found.views.keys() == expected.views.keys()
    assert all(found.views[name].equal(value) for name, value in expected.views.items())
    assert found.gaussians.means.equal(expected.gaussians.means)

    scores = splat("eval", tmp_path / "whole", "--json", "-q")
    assert scores.code == 0, scores.err


def test_a_vignette_is_shown_at_every_size_of_a_view(splat: Splat, tiny_scene: Path, tmp_path: Path) -> None:
    done = splat("train", tiny_scene, "-o", tmp_path / "run", "-n", 4, "-q", "--ppisp", *QUICK)
    assert done.code == 0, done.err
    checkpoint = load_checkpoint(Path(done.lines[0]))
    vignetting = checkpoint.views["ppisp_camera"][0, :15].view(3, 5)
    vignetting[:] = torch.tensor([0.05, -0.02, -1.5, 0.4, -0.1], dtype=torch.float64)
    checkpoint.gaussians.logit_opacities.fill_(-20.0)  # the background alone, which shows the camera
    save_checkpoint(tmp_path / "x.pt", checkpoint)

    def shown(*size: object) -> np.ndarray:
        flags = ("--size", "x".join(map(str, size))) if size else ()
        words = ("--views", "view_00", "--background", "white", "-o", tmp_path / "x.png", "-q", *flags)
        done = splat("render", tmp_path / "x.pt", *words)
        assert done.code == 0, done.err
        return imageio.imread(done.lines[0]).astype(float)

    whole = shown()
    assert whole.shape == (HEIGHT, WIDTH, 3)
    assert whole[0, 0].max() < 0.7 * whole[HEIGHT // 2, WIDTH // 2].min()
    large = shown(4 * WIDTH, 4 * HEIGHT).reshape(HEIGHT, 4, WIDTH, 4, 3).mean(axis=(1, 3))
    assert np.abs(large - whole).max() < 1.0
    # --size keeps the vertical field of view: of a narrower image the middle is left.
    cut = (WIDTH - HEIGHT) // 2
    square = shown(2 * HEIGHT, 2 * HEIGHT).reshape(HEIGHT, 2, HEIGHT, 2, 3).mean(axis=(1, 3))
    assert np.abs(square - whole[:, cut:-cut]).max() < 1.0
    odd = shown(33, 25)  # the same shape but for whole pixels
    assert np.abs(odd[0, 0] - whole[0, 0]).max() < 6.0
    # What lies beside the images of training was not seen.
    assert shown(2 * WIDTH, HEIGHT).min() > 250.0
