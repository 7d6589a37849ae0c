"""A run on images that would take 36 GB decoded stays within a gigabyte or two, and decodes what its steps ask for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.native.cases import NEEDS_COMPILER
from tests.torture import many_photos


@NEEDS_COMPILER
@pytest.mark.skipif(sys.platform != "linux", reason="peaks of memory are in kilobytes there only")
def test_a_thousand_images_of_twelve_megapixels_take_no_more_than_a_few(tmp_path: Path) -> None:
    count = 1000
    ran = many_photos.train(many_photos.write_scene(tmp_path, count), tmp_path / "run", 4)
    assert ran.steps == 4
    assert ran.peak < many_photos.allowed(count) < 2.5 * 2**30, f"{ran.peak >> 20} MiB"
    assert 3 * count * many_photos.WIDTH * many_photos.HEIGHT > 12 * many_photos.allowed(count)
