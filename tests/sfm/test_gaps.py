"""More frames of a video around gaps: those that a fast pan leaves between frames that were chosen evenly."""

from __future__ import annotations

import json
from pathlib import Path

import imageio.v3 as imageio
import numpy as np
import pytest
from PIL import Image, ImageFilter

from splatcli.cli.commands import run
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.georeference import similarity_of
from splatcli.sfm.gaps import find_gaps, stretches_in
from splatcli.sfm.images import find_input
from splatcli.sfm.options import SfmOptions
from splatcli.sfm.worker import Job, centers_of
from tests.sfm import corner

#: The pose of each frame: slow, a pan of 30 degrees within six frames, slow. Of any three one is chosen.
POSES = (*np.repeat([0, 0.5, 1], 3), 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, *np.repeat([7, 7.5, 8], 3))
CHOSEN = 8
#: Frames that the pan blurs, so that neighbours are chosen instead.
PAN = range(10, 14)


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("imageio_ffmpeg")
    path = tmp_path_factory.mktemp("walk") / "walk.mp4"
    frames = []
    for index, pose in enumerate(POSES):
        frame = Image.fromarray(corner.image(pose))
        frames.append(np.asarray(frame.filter(ImageFilter.GaussianBlur(0.6)) if index in PAN else frame))
    imageio.imwrite(path, np.stack(frames), plugin="FFMPEG", fps=10, codec="libx264", quality=10, macro_block_size=2)
    return path


def test_frames_of_a_fast_pan_join_what_they_lie_between(walk: Path, tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["sfm", str(walk), "--frames", str(CHOSEN), "--camera-model", "SIMPLE_RADIAL", "-o", "made", "--json"]) == 0
    said = capfd.readouterr()
    facts = json.loads(said.out.splitlines()[-1])
    print(facts["added_frames"], facts["retried"], facts["registered"])
    assert 0
