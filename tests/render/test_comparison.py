"""Which views a comparison shows, the cameras of two frames, and the page with its slider."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from splatcli.formats.transform import PLY_UP
from splatcli.gaussians import Gaussians
from splatcli.rasterizer.rendering import render
from splatcli.render.comparison import FIGURES, ViewFigures, ViewImages, choose, mean_figures, own_cameras, score
from splatcli.render.comparison_page import PageView, comparison_page
from splatcli.render.outside import views_from_all_sides, views_from_outside
from splatcli.scene.camera import Camera
from tests.browser import look_at
from tests.native.cases import NEEDS_COMPILER

SIZE = (80, 60)


def camera(name: str, center: tuple[float, float, float] = (0.0, 0.0, 0.0)) -> Camera:
    viewmat = np.eye(4)
    viewmat[:3, 3] = np.negative(center)
    return Camera(name, *SIZE, 70.0, 70.0, 40.0, 30.0, viewmat)


def view(name: str, alike: float, a: float, b: float) -> ViewFigures:
    return ViewFigures(camera(name), {"psnr_a": a, "psnr_b": b, "psnr_ab": alike})


#: Ten views; v0 is the least alike, v9 the worst against the photos.
VIEWS = [view(f"v{i}", 20.0 + i, 40.0 - i, 41.0) for i in range(10)]


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, {"v0": "largest difference"}),
        (2, {"v0": "largest difference", "v4": "median"}),
        (3, {"v0": "largest difference", "v4": "median", "v9": "worst"}),
        (
            6,
            {
                **dict.fromkeys(("v0", "v1", "v2"), "largest difference"),
                "v4": "median",
                **dict.fromkeys(("v8", "v9"), "worst"),
            },
        ),
        (10, dict.fromkeys((f"v{i}" for i in range(10)), "")),
        (99, dict.fromkeys((f"v{i}" for i in range(10)), "")),
    ],
)
def test_the_views_shown_are_the_least_alike_the_worst_and_the_median(most: int, expected: dict[str, str]) -> None:
    shuffled = [VIEWS[i] for i in (3, 9, 0, 7, 1, 5, 8, 2, 6, 4)]
    found = [(one.camera.name, reason) for one, reason in choose(shuffled, most)]
    assert found == list(expected.items())


def test_means_are_over_the_views_that_have_the_figure() -> None:
    without = ViewFigures(camera("x"), {"psnr_ab": 40.0})
    assert mean_figures([VIEWS[0], without]) == {"psnr_a": 40.0, "psnr_b": 41.0, "psnr_ab": 30.0}


def test_masked_pixels_count_between_the_models_only() -> None:
    generator = np.random.default_rng(0)
    a, b, photo = (generator.integers(0, 256, (20, 30, 3), dtype=np.uint8) for _ in range(3))
    hidden = np.zeros((20, 30), bool)
    hidden[:, :10] = True
    before = score(camera("x"), ViewImages({"a": a, "b": b, "photo": photo}, hidden)).figures
    assert tuple(before) == FIGURES
    a = a.copy()
    a[hidden] = b[hidden]
    after = score(camera("x"), ViewImages({"a": a, "b": b, "photo": photo}, hidden)).figures
    assert [name for name in FIGURES if after[name] != before[name]] == ["psnr_ab", "ssim_ab"]
    assert after["psnr_ab"] > before["psnr_ab"]


def test_a_view_has_the_camera_of_the_other_run_or_is_moved_by_the_offset() -> None:
    own = camera("shared", (5.0, 0.0, 0.0)).resized(160, 120)
    camera_of = own_cameras([own], np.array([2.0, 3.0, -1.0]))
    shared = camera_of(camera("shared"))
    assert (shared.width, shared.height, shared.fx) == (*SIZE, 70.0)
    np.testing.assert_array_equal(shared.viewmat, own.viewmat)
    np.testing.assert_allclose(camera_of(camera("other", (1.0, 1.0, 1.0))).center, [3.0, 4.0, 0.0])


def cloud(count: int, spread: float, size: float) -> Gaussians:
    """Round Gaussians of standard deviation ``size`` around (9, 0, 0) times ``spread``."""
    means = torch.randn(count, 3, generator=torch.Generator().manual_seed(0)) + torch.tensor([9.0, 0.0, 0.0])
    return Gaussians(
        means=spread * means,
        quats=torch.tensor([1.0, 0.0, 0.0, 0.0]).repeat(count, 1),
        log_scales=torch.full((count, 3), math.log(size)),
        logit_opacities=torch.full((count,), 4.0),
        sh0=torch.ones(count, 3),
        shN=torch.zeros(count, 0, 3),
    )


def test_cameras_from_outside_see_the_model_from_all_sides() -> None:
    model = cloud(500, 1.0, 0.01)
    means = model.means
    cameras = views_from_outside(model, PLY_UP, 4)
    centers = np.array([one.center for one in cameras])
    np.testing.assert_allclose(centers.mean(axis=0)[[0, 2]], means.median(dim=0).values.numpy()[[0, 2]], atol=1e-5)
    assert len({tuple(np.round(center, 3)) for center in centers}) == 4
    for one in cameras:
        seen = means.numpy() @ one.viewmat[:3, :3].T + one.viewmat[:3, 3]
        across = seen[:, :2] / seen[:, 2:] * one.fx + [one.cx, one.cy]
        inside = ((across > 0) & (across < [one.width, one.height])).all(axis=1) & (seen[:, 2] > 0)
        assert inside.mean() > 0.85
        assert one.viewmat[1, 1] > 0.5, "up in the image is -y"


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("count", "spread", "size"),
    [(300, 1.0, 0.1), (300, 1e-3, 1e-4), (300, 1e-7, 1e-8), (1, 1.0, 0.2), (1, 1.0, 1e-5), (1, 0.0, 50.0)],
)
def test_models_of_every_size_fill_views_from_outside(count: int, spread: float, size: float) -> None:
    """Also one Gaussian alone, which has no extent but its own."""
    model = cloud(count, spread, size)
    for camera in (*views_from_outside(model, PLY_UP, 2), *views_from_all_sides(model, 2)):
        alpha = render(model, camera.resized(60, 60)).alpha
        assert 0.02 < float((alpha > 0.5).float().mean()) < 0.9


def page(name: str = "v", title: str = "title", remark: str = "remark") -> bytes:
    """One view: A is red, B blue, the photo green."""
    images = {
        kind: np.full((SIZE[1], SIZE[0], 3), colour, np.uint8)
        for kind, colour in (("a", (250, 0, 0)), ("b", (0, 0, 250)), ("photo", (0, 200, 0)))
    }
    one = PageView.of(ViewFigures(camera(name), {}), ViewImages(images), [remark])
    return comparison_page(title, [["", "A"], ["model", title]], remark, [one], ("a", "b"))


def test_names_from_files_cannot_write_into_the_page() -> None:
    text = page("<script>alert('1')</script>\"", "<!-- views --><b>", "</figcaption>").decode()
    assert text.count("<script>") == 1
    assert "<!-- views -->" not in text
    assert "<b>" not in text.partition("<main>")[0]
    assert text.count("</figcaption>") == 1


@pytest.mark.parametrize(
    ("size", "expected"),
    [((4000, 2000), (960, 480)), ((300, 1200), (240, 960)), ((64, 48), (64, 48))],
)
def test_images_on_a_page_are_bounded(size: tuple[int, int], expected: tuple[int, int]) -> None:
    images = ViewImages({"a": np.zeros((size[1], size[0], 3), np.uint8)})
    assert PageView.of(VIEWS[0], images, []).size == expected


#: Moves the slider, and chooses the photo for the right side.
MOVE = """(() => {
    const slider = document.querySelector('.pair input');
    slider.value = 25;
    slider.dispatchEvent(new Event('input'));
    const right = document.getElementById('right');
    right.value = '%s';
    right.dispatchEvent(new Event('change'));
    return [...document.images].every((image) => image.complete);
})()"""


@pytest.mark.slow
@pytest.mark.parametrize(("right", "colour"), [("b", (0, 0, 250)), ("photo", (0, 200, 0))])
def test_the_slider_moves_in_a_browser(tmp_path: Path, right: str, colour: tuple[int, int, int]) -> None:
    (tmp_path / "x.html").write_bytes(page())
    seen = look_at((tmp_path / "x.html").as_uri(), tmp_path / "x.png", (700, 700), ready=MOVE % right)
    assert (seen.requests, seen.errors) == ([], [])
    row = seen.pixels[400].astype(int)  # through the picture, below the head of the page
    left_edge = (700 - 640) // 2 if _close(row[40], (250, 0, 0)) else 16
    at = left_edge + 640 // 4
    assert _close(row[at - 30], (250, 0, 0))
    assert _close(row[at + 30], colour)


def _close(found: np.ndarray, colour: tuple[int, int, int]) -> bool:
    return bool(np.abs(found - colour).max() < 12)
