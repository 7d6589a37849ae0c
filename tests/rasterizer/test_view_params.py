"""Gradients of per-view parameters: those of autograd, once a step, on every engine."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from splatcli.gaussians import GROUPS
from splatcli.rasterizer import StepInputs
from splatcli.rasterizer.adam import AdamState
from splatcli.rasterizer.bilateral_grid import identity_grid
from splatcli.rasterizer.recolour import recolour, recolour_vjp
from splatcli.rasterizer.reference import clamped, loss_reference, render_reference
from splatcli.rasterizer.reference_engine import recolour_reference
from splatcli.rasterizer.step_inputs import ViewParams
from tests.native.cases import NEEDS_COMPILER
from tests.rasterizer.engines import ENGINES, F64, HEIGHT, LRS, WIDTH, assert_gradients, make_engine, masked_corner
from tests.rasterizer.scenes import leaves, random_camera, random_gaussians, random_image

pytestmark = NEEDS_COMPILER
EXPOSURE = torch.tensor([[1.1, 0.05, -0.1, 0.0213], [0.03, 0.8, 0.1, -0.0517], [-0.02, 0.04, 1.3, 0.1031]], dtype=F64)
GRID = identity_grid(8, 16, 16).double() + 0.1 * torch.randn(
    12, 8, 16, 16, dtype=F64, generator=torch.Generator().manual_seed(6)
)
PPISP = torch.cat(
    [
        torch.tensor([0.21, 0.02, -0.03, 0.05, 0.01, -0.02, 0.04, 0.011, -0.017], dtype=F64),
        torch.tensor([0.05, -0.03, -0.3, -0.1, -0.05, 0.0, 0.1, -0.2, 0.05, -0.1, 0.0, 0.0, 0.0, 0.0, 0.0], dtype=F64),
        torch.tensor([0.5, -0.4, 0.3, 0.2, -0.6, 0.3, -0.2, -0.4, 0.0, 0.0, 0.0, 0.0], dtype=F64),
    ]
)


def sampled(image: Tensor, grid: Tensor) -> Tensor:
    """[H, W, 3] after a bilateral grid, from the words of docs/math.md 8.5: all maps by what they count for a pixel."""
    height, width, _ = image.shape
    luma = clamped(0.299 * image[..., 0] + 0.587 * image[..., 1] + 0.114 * image[..., 2], 0.0, 1.0)

    def near(at: Tensor, count: int) -> Tensor:
        return (1.0 - (at[..., None] - torch.arange(count)).abs()).clamp(min=0.0)

    up, across = (torch.arange(n, dtype=F64) / (n - 1) for n in (height, width))
    maps = torch.einsum(
        "kzyx,hwz,hy,wx->hwk", grid, near(7.0 * luma, 8), near(15.0 * up, 16), near(15.0 * across, 16)
    ).view(height, width, 3, 4)
    return torch.einsum("hwij,hwj->hwi", maps[..., :3], image) + maps[..., 3]


def affine(image: Tensor, exposure: Tensor) -> Tensor:
    return torch.einsum("ij,hwj->hwi", exposure[:, :3], image) + exposure[:, 3]


def through_ppisp(image: Tensor, params: Tensor) -> Tensor:
    """[H, W, 3] after PPISP, from the words of docs/math.md 8.6, with a response that is its own table."""
    height, width, _ = image.shape
    vignetting, response = params[9:24].view(3, 5), params[24:].view(3, 4)
    up, across = ((torch.arange(n, dtype=F64) + 0.5 - n / 2) / max(height, width) for n in (height, width))
    lit = []
    for channel in range(3):
        x, y, *factors = vignetting[channel]
        r2 = (across[None] - x) ** 2 + (up[:, None] - y) ** 2
        falloff = clamped(1.0 + sum(factor * r2 ** (i + 1) for i, factor in enumerate(factors)), 0.0, 1.0)
        lit.append(image[..., channel] * 2.0 ** params[0] * falloff)
    red, green, blue = lit
    total = red + green + blue
    # The homography with H s_k ~ t_k of four points, by its eight unknowns.
    source = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1 / 3, 1 / 3]], dtype=F64)
    target = source + params[1:9].view(4, 2)
    rows, right = [], []
    for (sx, sy), (tx, ty) in zip(source, target, strict=True):
        zero, one = torch.zeros((), dtype=F64), torch.ones((), dtype=F64)
        rows += [torch.stack([sx, sy, one, zero, zero, zero, -tx * sx, -tx * sy])]
        rows += [torch.stack([zero, zero, zero, sx, sy, one, -ty * sx, -ty * sy])]
        right += [tx, ty]
    h = torch.linalg.solve(torch.stack(rows), torch.stack(right))
    r, g = red / total, green / total
    below = h[6] * r + h[7] * g + 1.0
    r, g = (h[0] * r + h[1] * g + h[2]) / below, (h[3] * r + h[4] * g + h[5]) / below
    corrected = (r * total, g * total, (1.0 - r - g) * total)
    nodes = torch.arange(257, dtype=F64) / 256
    shown = []
    for colour, numbers in zip(corrected, response, strict=True):
        toe, shoulder, gamma = (
            least + torch.log(1.0 + (math.exp(1.0 - least) - 1.0) * torch.exp(number))
            for least, number in zip((0.3, 0.3, 0.1), numbers[:3], strict=True)
        )
        centre = 1.0 / (1.0 + torch.exp(-numbers[3]))
        a = shoulder * centre / ((1.0 - centre) * toe + centre * shoulder)
        low = a * (nodes[1:] / centre) ** toe
        high = 1.0 - (1.0 - a) * ((1.0 - nodes[:-1]) / (1.0 - centre)).clamp(min=1e-300) ** shoulder
        is_low = nodes <= centre
        # The first node is black and the last is white for any numbers.
        inner = torch.where(is_low[1:-1], low[:-1], high[1:]) ** gamma
        curve = torch.cat([torch.zeros(1, dtype=F64), inner, torch.ones(1, dtype=F64)])
        inside = clamped(colour, 0.0, 1.0)
        near = (1.0 - (256 * inside[..., None] - torch.arange(257)).abs()).clamp(min=0.0)
        shown.append(near @ curve + colour - inside)
    return torch.stack(shown, dim=2)


#: Kinds of colours, and what they do to an image.
COLOURS = {"exposure": (EXPOSURE, affine), "grid": (GRID, sampled), "ppisp": (PPISP, through_ppisp)}


@pytest.mark.parametrize("shape", [(3,), (1, 3), (9,), (3, 3), (12, 8, 16)])
def test_parameters_of_no_map_are_refused(shape: tuple[int, ...]) -> None:
    image, colours = torch.rand(4, 5, 3, dtype=F64), torch.zeros(shape, dtype=F64)
    for call in (
        lambda: recolour(image, colours, torch.empty_like(image)),
        lambda: recolour_vjp(image, colours, image, torch.empty_like(image), torch.empty_like(colours)),
        lambda: recolour_reference(image, colours),
    ):
        with pytest.raises(ValueError, match="no map of colours has parameters of shape"):
            call()


class Steps:
    """Some steps of an engine, and what was learnt from them."""

    def __init__(
        self,
        kind: str,
        *,
        count: int = 1,
        capacity: int = 0,
        hidden: bool = True,
        corrected: bool = True,
        colours: Tensor = EXPOSURE,
    ) -> None:
        self.engine, dtype = make_engine(kind, capacity)
        self.gaussians = random_gaussians(1, 90, sh_degree=2, dtype=F64).map(lambda t: t.to(dtype)).detach_clone()
        self.adam = AdamState.zeros_like(self.gaussians)
        self.heard: list[tuple[int, Tensor, Tensor]] = []
        self.losses: list[float] = []
        for step in range(count):
            target = (random_image(50 + step, WIDTH, HEIGHT) * 255).round().to(torch.uint8)
            mask = masked_corner() if hidden else None
            if mask is not None:
                target[mask] = 0
            background = torch.tensor([0.2, 0.4, 0.6], dtype=dtype)
            camera = random_camera(30 + step, WIDTH, HEIGHT)
            inputs = StepInputs(camera, target, LRS, 2, background, 0.2, False, None, mask)
            if corrected:
                apply_grad = self._learner(step)
                inputs = replace(inputs, view_params=ViewParams(apply_grad, pose=True, colours=colours.to(dtype)))
            self.losses += self.engine.submit(self.gaussians, self.adam, inputs)
        self.losses += self.engine.drain()

    def _learner(self, step: int):  # type: ignore[no-untyped-def]
        def apply_grad(v_viewmat: Tensor | None, v_exposure: Tensor | None) -> None:
            assert v_viewmat is not None
            assert v_exposure is not None
            self.heard.append((step, v_viewmat.clone(), v_exposure.clone()))

        return apply_grad


@pytest.mark.parametrize("kind_of_colours", COLOURS)
@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("kind", ENGINES)
def test_the_gradients_of_pose_and_exposure_are_those_of_autograd(
    kind: str, hidden: bool, kind_of_colours: str
) -> None:
    given, reference = COLOURS[kind_of_colours]
    got = Steps(kind, hidden=hidden, colours=given)
    parameters = leaves(random_gaussians(1, 90, sh_degree=2, dtype=F64))
    camera = random_camera(30, WIDTH, HEIGHT)
    pose = torch.from_numpy(camera.viewmat.copy()).requires_grad_()
    exposure = given.clone().requires_grad_()
    background = torch.tensor([0.2, 0.4, 0.6], dtype=F64)
    image = render_reference(parameters, camera, sh_degree=2, background=background, viewmat=pose)[0]
    image = reference(image, exposure)
    target = (random_image(50, WIDTH, HEIGHT) * 255).round().to(F64) / 255.0
    if hidden:
        image, target = (t.masked_fill(masked_corner()[..., None], 0.0) for t in (image, target))
    loss = loss_reference(image, target, 0.2)
    torch.autograd.backward(loss)
    exact = kind in ("reference", "float64")
    assert_close(got.losses[0], float(loss.detach()), rtol=0, atol=1e-12 if exact else 1e-5)
    ((_, v_viewmat, v_exposure),) = got.heard
    assert_gradients(got.adam, parameters)
    for ours, theirs in ((v_viewmat, pose.grad), (v_exposure, exposure.grad)):
        assert theirs is not None
        scale = float(theirs.abs().max())
        assert scale > 0
        assert_close(ours.double(), theirs, rtol=0, atol=(1e-9 if exact else 1e-3) * scale)


@pytest.mark.parametrize("kind_of_colours", COLOURS)
def test_a_step_that_is_done_again_for_more_room_is_learnt_from_once(kind_of_colours: str) -> None:
    colours = COLOURS[kind_of_colours][0]
    free, tight = Steps("simt", count=5, colours=colours), Steps("simt", count=5, capacity=1, colours=colours)
    assert [step for step, _, _ in tight.heard] == [0, 1, 2, 3, 4]
    assert tight.losses == free.losses
    for (_, *ours), (_, *theirs) in zip(tight.heard, free.heard, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert all(torch.equal(getattr(tight.gaussians, name), getattr(free.gaussians, name)) for name in GROUPS)


def test_gradients_of_the_view_change_no_bit_of_the_gaussians() -> None:
    """An exposure that is the identity, and a pose that is listened to."""
    plain = Steps("float32", count=2, corrected=False)
    engine, dtype = make_engine("float32")
    gaussians = random_gaussians(1, 90, sh_degree=2, dtype=F64).map(lambda t: t.to(dtype)).detach_clone()
    adam = AdamState.zeros_like(gaussians)
    for step in range(2):
        target = (random_image(50 + step, WIDTH, HEIGHT) * 255).round().to(torch.uint8)
        target[masked_corner()] = 0
        view_params = ViewParams(lambda *_: None, pose=True, colours=torch.eye(3, 4))
        inputs = StepInputs(
            random_camera(30 + step, WIDTH, HEIGHT), target, LRS, 2, torch.tensor([0.2, 0.4, 0.6]), 0.2, False, None,
            masked_corner(), view_params=view_params,
        )  # fmt: skip
        engine.submit(gaussians, adam, inputs)
    assert all(torch.equal(getattr(gaussians, name), getattr(plain.gaussians, name)) for name in GROUPS)


@pytest.mark.parametrize("kind_of_colours", COLOURS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_colours_have_the_same_bits_for_any_number_of_threads_and_under_autocast(
    dtype: torch.dtype | None, kind_of_colours: str
) -> None:
    colours = COLOURS[kind_of_colours][0].float()
    random = np.random.default_rng(2)
    image, v_shown = (torch.from_numpy(random.random((411, 533, 3), np.float32)) for _ in range(2))

    def results() -> list[Tensor]:
        v_image, v_colours = torch.empty_like(image), torch.empty_like(colours)
        shown = recolour(image, colours, torch.empty_like(image))
        recolour_vjp(image, colours, v_shown, v_image, v_colours)
        return [shown, v_image, v_colours]

    torch.set_num_threads(1)
    expected = results()
    for count in (2, 3, 7):
        torch.set_num_threads(count)
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            assert all(torch.equal(a, b) for a, b in zip(results(), expected, strict=True))


def test_ppisp_of_zeros_changes_no_colour() -> None:
    image = 1.4 * torch.rand(7, 9, 3, dtype=F64, generator=torch.Generator().manual_seed(4)) - 0.2
    image[0, 0] = 0.0
    shown = recolour(image, torch.zeros(36, dtype=F64), torch.empty_like(image))
    bright = image.clamp(min=0.0) == image
    assert_close(shown[bright], image[bright], rtol=0, atol=1e-14)
    assert bool(torch.isfinite(shown).all())
