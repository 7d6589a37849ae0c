"""Each program in examples/ runs, on the sample scene and at a small size."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import imageio.v3 as imageio
import pytest

import splatcli
from tests.native.cases import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER
ROOT = Path(__file__).resolve().parents[1]
COURTYARD = ROOT / "data" / "samples" / "courtyard"


def ran(name: str, *arguments: object) -> str:
    """Run an example and return what it prints."""
    command = [sys.executable, "-W", "ignore", str(ROOT / "examples" / f"{name}.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def vertices(path: Path) -> int:
    """The number of Gaussians in a PLY, by its header."""
    found = re.search(rb"element vertex (\d+)", path.read_bytes()[:2000])
    assert found is not None
    return int(found[1])


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample scene; below it nothing is written."""
    place = tmp_path_factory.mktemp("examples") / "courtyard"
    shutil.copytree(COURTYARD, place)
    return place


@pytest.fixture(scope="module")
def trained(scene: Path) -> tuple[Path, str]:
    """The run of the first example, and what it printed."""
    output = scene.parent / "run"
    return output, ran("train", scene, output, 8)


def test_train(trained: tuple[Path, str]) -> None:
    output, text = trained
    assert "finished after step 8" in text
    assert "PSNR" in text
    count = len(splatcli.Model.load(output))
    assert f"{count:,} Gaussians" in text
    assert vertices(output / "scene.ply") == count


def test_render_path(trained: tuple[Path, str], tmp_path: Path) -> None:
    assert "2 images" in ran("render_path", trained[0], tmp_path / "frames", 2, 64)
    frames = [imageio.imread(path) for path in sorted((tmp_path / "frames").glob("*.png"))]
    assert [frame.shape[1] for frame in frames] == [64] * 2
    assert all(frame.std() > 1 for frame in frames)


def test_own_loss(scene: Path, tmp_path: Path) -> None:
    text = ran("own_loss", scene, tmp_path / "run", 6)
    assert "step 6: loss 0." in text
    assert splatcli.Model.load(tmp_path / "run").step == 6


def test_own_strategy(scene: Path, tmp_path: Path) -> None:
    text = ran("own_strategy", scene, tmp_path / "run", 6)
    exchanged = re.findall(r"step (\d+): (\d+) removed, (\d+) cloned", text)
    assert len(exchanged) == 5
    assert all(int(removed) == int(cloned) > 0 for _, removed, cloned in exchanged)
    start = splatcli.Model.load(tmp_path / "run/ckpts/ckpt_000000.pt")
    assert len(splatcli.Model.load(tmp_path / "run")) == len(start)


def test_fit_image(scene: Path, tmp_path: Path) -> None:
    image = sorted((scene / "images").iterdir())[0]
    scores = [float(score) for score in re.findall(r"PSNR ([\d.]+) dB", ran(
        "fit_image", image, tmp_path / "fit.png", 40, 200, 48
    ))]  # fmt: skip
    assert scores[-1] > scores[0] + 2.0
    assert imageio.imread(tmp_path / "fit.png").shape[1] == 96


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs Lightning: splatcli[lightning]")
def test_with_lightning(scene: Path, tmp_path: Path) -> None:
    text = ran("with_lightning", scene, tmp_path, 3)
    assert f"{vertices(tmp_path / 'scene.ply'):,} Gaussians" in text


def test_each_example_has_a_test_and_is_in_the_documents() -> None:
    names = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert names <= {name.removeprefix("test_") for name in globals()}
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert names == set(re.findall(r"\(\.\./examples/(\w+)\.py\)", page))
