"""Seven images whose cameras only the tests know, and what structure from motion makes of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from splatcli.sfm.images import find_input
from splatcli.sfm.options import SfmOptions
from splatcli.sfm.run import SfmResult, run_sfm
from tests.sfm import corner

NUM_IMAGES = 7
#: The image that is stored turned by a quarter, as phones do, with EXIF saying so.
TURNED = 3


def name_of(index: int) -> str:
    """With a space: COLMAP's own lists know no such names."""
    return f"view {index:03d}.jpg"


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images; not to be changed."""
    folder = tmp_path_factory.mktemp("walk") / "photos"
    folder.mkdir()
    for index in range(NUM_IMAGES):
        image = Image.fromarray(corner.image(index))
        exif = Image.Exif()
        if index == TURNED:
            image = image.transpose(Image.Transpose.ROTATE_90)
            exif[0x0112] = 6  # to be turned clockwise
        image.save(folder / name_of(index), quality=95, exif=exif)
    return folder


@pytest.fixture(scope="session")
def solved(images: Path) -> SfmResult:
    """The scene that was made of them, beside their folder; not to be changed."""
    return find_cameras_of(images)


def find_cameras_of(images: Path, options: SfmOptions | None = None, **changes) -> SfmResult:
    options_of_run = {
        "place": None,
        "beside": images.parent,
        "overwrite": False,
        "gpu": False,
        "progress": lambda *_: None,
    }
    return run_sfm(find_input(images), options or SfmOptions(), **{**options_of_run, **changes})


def write_noise(folder: Path, count: int, *, size: tuple[int, int] = (96, 64)) -> Path:
    """Images that have nothing to do with one another."""
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        generator = np.random.default_rng(index)
        rough = generator.integers(0, 256, (size[1] // 4, size[0] // 4, 3), dtype=np.uint8)
        Image.fromarray(rough).resize(size, Image.Resampling.BICUBIC).save(folder / f"{index}.png")
    return folder
