"""The CPU roofline's counts, against images, and its table in the documentation."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from benchmarks import cpu_roofline
from splatcli.rasterizer.context import RasterContext, view_of
from splatcli.rasterizer.rendering import render
from tests.native.cases import NEEDS_COMPILER, float32
from tests.rasterizer.scenes import random_camera, random_gaussians

ROOT = Path(__file__).resolve().parents[2]


@NEEDS_COMPILER
def test_pixels_that_one_gaussian_touches_are_those_where_it_shows() -> None:
    camera, backend, black = random_camera(4, 70, 50), float32(), torch.zeros(3)
    touched = 0
    for seed in range(8):
        one = random_gaussians(seed, 1, dtype=torch.float32)
        view = view_of(camera, sh_degree=0, antialiased=False, with_depth=False)
        frame = RasterContext(backend)
        frame.bin(view, frame.project(view, one))
        image, alpha = torch.empty(50, 70, 3), torch.empty(50, 70)
        frame.blend(view, black, image, alpha, None)
        counts = cpu_roofline.Counts(1, 0, 1, 1, frame.native.isects, 70 * 50)
        cpu_roofline.count(frame, counts, view)
        assert counts.touched == int((render(one, camera, sh_degree=0).alpha > 0).sum())
        assert counts.touched <= counts.lanes <= 256 * counts.isects
        touched += counts.touched
    assert touched > 100


def test_what_lies_behind_opaque_gaussians_is_not_counted() -> None:
    opaque = torch.zeros(40, 16)
    opaque[:, 0:2], opaque[:, 5] = 8.0, 0.0  # alpha 0.999 everywhere: two let less than 1e-4 through
    lanes = torch.arange(256)
    x, y = lanes % 16, lanes // 16
    masks = torch.full((40,), -1, dtype=torch.int16)
    touched, evaluated = cpu_roofline._count_tile(opaque, masks, x, y, torch.ones(256, dtype=torch.bool))
    assert (touched, evaluated) == (256, 512)


def test_the_documentation_shows_the_stored_result() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "cpu_roofline.json").read_text(encoding="utf-8"))
    text = (ROOT / "docs" / "cpu.md").read_text(encoding="utf-8")
    for result in results:
        assert cpu_roofline.table(result) in text
        assert result["size"] in text
        assert set(result["stages"]) == set(cpu_roofline.STAGES)
