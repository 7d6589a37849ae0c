"""The reference renderer against results from elsewhere, values worked out by hand, and what must always hold."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from splatcli.gaussians import GROUPS, SHN_COUNTS, Gaussians
from splatcli.rasterizer import reference
from splatcli.rasterizer.reference import render_reference
from splatcli.scene.camera import Camera
from tests.rasterizer.reference_projection import project_reference
from tests.rasterizer.scenes import CONFORMANCE, front_camera, leaves, random_gaussians, random_scene

C0, C1 = 0.28209479177387814, 0.4886025119029199
F64 = torch.float64


def logit(opacity: float) -> float:
    return math.log(opacity / (1.0 - opacity))


def splat(
    mean: tuple[float, float, float],
    opacity: float,
    color: tuple[float, float, float] = (0.5, 0.5, 0.5),
    scale: tuple[float, float, float] = (0.1, 0.1, 0.1),
    quat: tuple[float, float, float, float] = (1.0, 0.0, 0.0, 0.0),
    sh_degree: int = 0,
) -> Gaussians:
    """One Gaussian in float64 by its activated values."""
    return Gaussians(
        means=torch.tensor([mean], dtype=F64),
        quats=torch.tensor([quat], dtype=F64),
        log_scales=torch.tensor([scale], dtype=F64).log(),
        logit_opacities=torch.tensor([logit(opacity)], dtype=F64),
        sh0=(torch.tensor([color], dtype=F64) - 0.5) / C0,
        shN=torch.zeros(1, SHN_COUNTS[sh_degree], 3, dtype=F64),
    )


def together(*parts: Gaussians) -> Gaussians:
    return Gaussians(**{name: torch.cat([getattr(part, name) for part in parts]) for name in GROUPS})


def select(gaussians: Gaussians, index: Tensor) -> Gaussians:
    return gaussians.map(lambda rows: rows[index])


def vec(value: float | list[float] | list[list[float]]) -> Tensor:
    return torch.tensor(value, dtype=F64)


# --- against gsplat on CUDA -------------------------------------------------------------------------------------------


def test_conformance_case_image_alpha_and_all_gradients() -> None:
    with np.load(CONFORMANCE) as archive:
        data = {name: torch.from_numpy(archive[name]).double() for name in archive}
    gaussians = leaves(
        Gaussians(
            means=data["means"],
            quats=data["quats"],
            log_scales=data["scales"],
            logit_opacities=data["opacities"],
            sh0=data["coeffs"][:, 0],
            shN=data["coeffs"][:, 1:],
        )
    )
    viewmat = np.eye(4)
    viewmat[:3, 3] = [-0.123, -0.456, 8.0]
    camera = Camera("conformance", 123, 82, 61.5, 61.5, 61.5, 41.0, viewmat)
    # These gradients were made with the view directions of the SH held fixed.
    image, alpha, _ = render_reference(gaussians, camera, detach_directions=True)
    # The other side computed in float32: its own rounding sets these bounds.
    assert_close(image, data["out_img"][..., :3], rtol=0, atol=1.3e-6)
    assert_close(alpha, data["out_img"][..., 3], rtol=0, atol=1.3e-6)

    torch.autograd.backward([image, alpha], [data["v_out_img"][..., :3], data["v_out_img"][..., 3]])
    assert_close(gaussians.means.grad, data["v_means"], rtol=0, atol=3e-8)
    assert_close(gaussians.quats.grad, data["v_quats"], rtol=0, atol=3e-8)
    assert_close(gaussians.log_scales.grad, data["v_scales"], rtol=0, atol=3e-8)
    assert_close(gaussians.logit_opacities.grad, data["v_opacities"], rtol=0, atol=3e-8)
    assert_close(gaussians.sh0.grad, data["v_coeffs"][:, 0], rtol=0, atol=3e-8)
    assert_close(gaussians.shN.grad, data["v_coeffs"][:, 1:], rtol=0, atol=3e-8)

    projection = project_reference(gaussians, camera)
    assert bool(projection.valid.all())
    assert_close(projection.means2d.detach(), data["xys"], rtol=0, atol=2e-5)
    assert_close(projection.conics.detach(), data["conics"], rtol=0, atol=1e-6)
    assert_close(projection.depths.detach(), data["depths"], rtol=0, atol=1e-6)


# --- worked out by hand ----------------------------------------------------------------------------------------------

#: 5 x 5 pixels, focal length 10: the axis goes through the centre of pixel (2, 2).
SMALL = front_camera(5, 5, 10.0)


def test_a_gaussian_centred_on_a_pixel_has_its_opacity_there() -> None:
    image, alpha, depth = render_reference(splat((0, 0, 5.0), 0.7, (0.9, 0.5, 0.1)), SMALL)
    assert_close(alpha[2, 2], vec(0.7))
    assert_close(image[2, 2], vec([0.63, 0.35, 0.07]))
    assert_close(depth[2, 2], vec(3.5))


def test_the_neighbouring_pixel_sees_the_blurred_variance() -> None:
    # sigma 0.1 at depth 5 and focal length 10: (10 * 0.1 / 5)^2 + 0.3 = 0.34 square pixels.
    _, alpha, _ = render_reference(splat((0, 0, 5.0), 0.7), SMALL)
    expected = 0.7 * math.exp(-0.5 / 0.34)
    for row, column in [(2, 3), (2, 1), (1, 2), (3, 2)]:
        assert_close(alpha[row, column].item(), expected)
    assert_close(alpha[3, 3].item(), 0.7 * math.exp(-1.0 / 0.34))


def test_two_overlapping_gaussians_blend_nearest_first_whatever_their_order() -> None:
    near = splat((0, 0, 4.0), 0.5, (1.0, 0.0, 0.0))
    far = splat((0, 0, 6.0), 0.5, (0.0, 1.0, 0.0))
    background = vec([0.2, 0.4, 0.8])
    for pair in [together(near, far), together(far, near)]:
        image, alpha, depth = render_reference(pair, SMALL, background=background)
        assert_close(image[2, 2], vec([0.5 + 0.05, 0.25 + 0.1, 0.2]))
        assert_close(alpha[2, 2].item(), 0.75)
        assert_close(depth[2, 2].item(), 0.5 * 4 + 0.25 * 6)


def test_equal_depths_blend_in_index_order() -> None:
    first = splat((0, 0, 4.0), 0.5, (1.0, 0.0, 0.0))
    second = splat((0, 0, 4.0), 0.5, (0.0, 1.0, 0.0))
    image, _, _ = render_reference(together(first, second), SMALL)
    assert_close(image[2, 2], vec([0.5, 0.25, 0.0]))
    image, _, _ = render_reference(together(second, first), SMALL)
    assert_close(image[2, 2], vec([0.25, 0.5, 0.0]))


def test_the_pixel_stops_before_the_gaussian_that_would_hide_the_rest() -> None:
    # After the first, T = 0.001. The second would leave 0.001 * 0.05 <= 1e-4: it ends the pixel and is not blended.
    # The third alone would leave 0.00095, but the pixel has ended.
    first = splat((0, 0, 2.0), 0.9999, (1.0, 0.0, 0.0))
    second = splat((0, 0, 3.0), 0.95, (0.0, 1.0, 0.0))
    third = splat((0, 0, 4.0), 0.05, (0.0, 0.0, 1.0))
    gaussians = leaves(together(first, second, third))
    image, alpha, _ = render_reference(gaussians, SMALL, background=vec([0.0, 0.0, 1.0]))
    assert_close(image[2, 2], vec([0.999, 0.0, 0.001]))
    assert_close(alpha[2, 2].item(), 0.999)
    torch.autograd.backward(image[2, 2].sum())
    for name, leaf in gaussians.items():
        assert leaf.grad is not None, name
        assert not leaf.grad[1:].any(), name


def test_a_clamped_alpha_has_no_gradient_but_its_colour_has() -> None:
    gaussians = leaves(splat((0, 0, 2.0), 0.9999, (1.0, 0.6, 0.2)))
    image, _, _ = render_reference(gaussians, SMALL)
    torch.autograd.backward(image[2, 2].sum())
    assert gaussians.logit_opacities.grad is not None
    assert gaussians.logit_opacities.grad.item() == 0.0
    assert gaussians.means.grad is not None
    assert not gaussians.means.grad.any()
    assert_close(gaussians.sh0.grad, torch.full((1, 3), 0.999 * C0, dtype=F64))


def test_contributions_under_one_255th_are_skipped() -> None:
    # 1/254 at the centre is blended; a pixel away it is 1/254 * exp(-0.5 / 0.34) and is not.
    _, alpha, _ = render_reference(splat((0, 0, 5.0), 1 / 254), SMALL)
    assert_close(alpha[2, 2].item(), 1 / 254)
    assert alpha.count_nonzero() == 1
    _, alpha, _ = render_reference(splat((0, 0, 5.0), 1 / 256), SMALL)
    assert alpha.count_nonzero() == 0


def test_sh_degree_1_colour_follows_the_direction() -> None:
    gaussians = splat((0.6, 0, 0.8), 0.5, sh_degree=1)
    gaussians.shN[0, :, 0] = vec([0.3, 0.1, -0.2])
    color = project_reference(gaussians, front_camera(50, 50, 10.0)).colors
    # Y = (-C1 y, C1 z, -C1 x) along (0.6, 0, 0.8).
    assert_close(color[0], vec([0.5 + C1 * 0.8 * 0.1 + C1 * 0.6 * 0.2, 0.5, 0.5]))
    only_constant = project_reference(gaussians, front_camera(50, 50, 10.0), sh_degree=0).colors
    assert_close(only_constant[0], vec([0.5, 0.5, 0.5]))


def test_a_quarter_turn_about_the_axis_swaps_the_variances() -> None:
    half = math.sqrt(0.5)
    # The quaternion's length must not matter: three times the unit one.
    gaussians = splat((0, 0, 5.0), 0.5, scale=(0.2, 0.1, 0.1), quat=(3 * half, 0.0, 0.0, 3 * half))
    projection = project_reference(gaussians, SMALL)
    assert_close(projection.cov2d[0], vec([0.04 + 0.3, 0.0, 0.16 + 0.3]))
    assert_close(projection.conics[0], vec([1 / 0.34, 0.0, 1 / 0.46]))


def test_the_jacobian_is_clamped_and_the_mean_is_not() -> None:
    # Image 5 wide, focal length 10: x/z is held at (1.15 * 5 - 2.5) / 10 = 0.325, here for x/z = 2.
    projection = project_reference(splat((10.0, 0, 5.0), 0.5), SMALL)
    assert_close(projection.means2d[0], vec([10 * 2 + 2.5, 2.5]))
    assert_close(projection.cov2d[0], vec([0.04 * (1 + 0.325**2) + 0.3, 0.0, 0.04 + 0.3]))


def test_antialiasing_keeps_the_integral_of_a_small_gaussian() -> None:
    # Isotropic: rho = sqrt(0.04^2 / 0.34^2).
    projection = project_reference(splat((0, 0, 5.0), 0.7), SMALL, antialiased=True)
    assert_close(projection.opacities[0].item(), 0.7 * 0.04 / 0.34)
    # The compensation comes before the cull by opacity.
    assert not project_reference(splat((0, 0, 5.0), 0.03), SMALL, antialiased=True).valid.any()
    assert project_reference(splat((0, 0, 5.0), 0.03), SMALL).valid.all()


def test_negative_colours_are_black_without_gradient_and_zero_passes_it() -> None:
    gaussians = splat((0, 0, 5.0), 0.5)
    gaussians.sh0[:] = vec([-3.0, -0.5 / C0, 0.0])
    assert 0.5 + C0 * gaussians.sh0[0, 1].item() == 0.0, "the middle channel has to be exactly zero"
    gaussians = leaves(gaussians)
    image, _, _ = render_reference(gaussians, SMALL)
    assert_close(image[2, 2].detach(), vec([0.0, 0.0, 0.25]))
    torch.autograd.backward(image[2, 2].sum())
    assert_close(gaussians.sh0.grad, vec([[0.0, 0.5 * C0, 0.5 * C0]]))


# --- what must always hold -------------------------------------------------------------------------------------------


def sequential_render(gaussians: Gaussians, camera: Camera, background: list[float]) -> np.ndarray:
    """[H, W, 5] colour, alpha and depth, one pixel and one Gaussian at a time, as the rules say."""
    view = project_reference(gaussians, camera)
    keep = [i for i in range(len(gaussians)) if view.valid[i]]
    keep.sort(key=lambda i: float(view.depths[i]))
    table = {name: getattr(view, name).tolist() for name in ("means2d", "conics", "opacities", "colors", "depths")}
    out = np.zeros((camera.height, camera.width, 5))
    for row in range(camera.height):
        for column in range(camera.width):
            transmittance, total = 1.0, np.zeros(4)
            for i in keep:
                dx, dy = table["means2d"][i][0] - column - 0.5, table["means2d"][i][1] - row - 0.5
                a, b, c = table["conics"][i]
                alpha = min(0.999, table["opacities"][i] * math.exp(-0.5 * (a * dx * dx + c * dy * dy) - b * dx * dy))
                if alpha < 1 / 255:
                    continue
                if transmittance * (1 - alpha) <= 1e-4:
                    break
                total += alpha * transmittance * np.array([*table["colors"][i], table["depths"][i]])
                transmittance *= 1 - alpha
            out[row, column, :3] = total[:3] + transmittance * np.array(background)
            out[row, column, 3], out[row, column, 4] = 1 - transmittance, total[3]
    return out


@pytest.mark.parametrize(("block", "slab"), [(32, 1024), (8, 5), (7, 1)])
def test_blocks_and_slabs_change_nothing(monkeypatch: pytest.MonkeyPatch, block: int, slab: int) -> None:
    gaussians, camera = random_scene(3, 80, width=19, height=13, scale=0.4, dtype=F64)
    gaussians.logit_opacities += 3.0
    expected = sequential_render(gaussians, camera, [0.1, 0.2, 0.3])
    assert expected[..., 3].max() > 0.999, "some pixels have to stop early"
    monkeypatch.setattr(reference, "BLOCK", block)
    monkeypatch.setattr(reference, "SLAB", slab)
    image, alpha, depth = render_reference(gaussians, camera, background=vec([0.1, 0.2, 0.3]))
    got = torch.cat([image, alpha[..., None], depth[..., None]], 2).numpy()
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)


def test_gradients_do_not_depend_on_blocks_and_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    gaussians, camera = random_scene(4, 50, scale=0.4, dtype=F64)

    def gradients() -> list[Tensor | None]:
        parameters = leaves(gaussians)
        image, alpha, depth = render_reference(parameters, camera)
        torch.autograd.backward(image.square().sum() + alpha.square().sum() + depth.square().sum())
        return [leaf.grad for _, leaf in parameters.items()]

    whole = gradients()
    monkeypatch.setattr(reference, "BLOCK", 8)
    monkeypatch.setattr(reference, "SLAB", 7)
    for got, expected in zip(gradients(), whole, strict=True):
        assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_the_order_of_the_gaussians_does_not_matter() -> None:
    gaussians, camera = random_scene(5, dtype=F64)
    order = torch.randperm(len(gaussians), generator=torch.Generator().manual_seed(0))
    for got, expected in zip(
        render_reference(select(gaussians, order), camera), render_reference(gaussians, camera), strict=True
    ):
        assert_close(got, expected, rtol=0, atol=1e-12)


def test_moving_camera_and_scene_together_changes_nothing() -> None:
    gaussians, camera = random_scene(6, dtype=F64)
    shift = vec([3.0, -7.0, 11.0])
    moved = gaussians.detach_clone()
    moved.means += shift
    viewmat = torch.from_numpy(camera.viewmat).clone()
    viewmat[:3, 3] -= viewmat[:3, :3] @ shift
    for got, expected in zip(
        render_reference(moved, camera, viewmat=viewmat), render_reference(gaussians, camera), strict=True
    ):
        assert_close(got, expected, rtol=0, atol=1e-11)


def test_float32_follows_float64() -> None:
    gaussians, camera = random_scene(7, dtype=F64)
    for got, expected in zip(
        render_reference(gaussians.map(Tensor.float), camera), render_reference(gaussians, camera), strict=True
    ):
        assert got.dtype == torch.float32
        assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


BROKEN = {
    "means": [math.nan, math.inf, -math.inf, 1e38],
    "quats": [math.nan, math.inf, 0.0],
    "log_scales": [math.nan, math.inf, 500.0],
    "logit_opacities": [math.nan, -math.inf, -20.0],
    "sh0": [math.nan, math.inf],
    "shN": [math.nan, math.inf],
}


@pytest.mark.parametrize("antialiased", [False, True])
@pytest.mark.parametrize(("name", "value"), [(name, value) for name in GROUPS for value in BROKEN[name]])
def test_a_broken_gaussian_is_culled_and_poisons_nothing(name: str, value: float, antialiased: bool) -> None:
    whole, camera = random_scene(8, 12)
    broken = whole.detach_clone()
    getattr(broken, name)[4] = value
    without = torch.tensor([i for i in range(12) if i != 4])
    parameters = leaves(broken)
    view = project_reference(parameters, camera, antialiased=antialiased)
    assert not view.valid[4]
    image, alpha, depth = render_reference(parameters, camera, antialiased=antialiased)
    expected = render_reference(select(whole, without), camera, antialiased=antialiased)
    for got, reached in zip((image, alpha, depth), expected, strict=True):
        assert_close(got.detach(), reached, rtol=0, atol=1e-6)
    torch.autograd.backward(image.sum() + alpha.sum() + depth.sum())
    for group, leaf in parameters.items():
        assert leaf.grad is not None
        assert bool(leaf.grad.isfinite().all()), group
        assert not leaf.grad[4].any(), group


def test_gaussians_out_of_depth_range_are_culled() -> None:
    gaussians = together(*(splat((0, 0, z), 0.5) for z in (-1.0, 0.0, 0.01, 0.0101, 9e9, 1e10, 2e10)))
    view = project_reference(gaussians, SMALL)
    assert view.valid.tolist() == [False, False, False, True, True, False, False]
    assert not view.means2d[~view.valid].any()
    assert project_reference(gaussians, replace(SMALL, near=1e9)).valid.tolist() == [False] * 4 + [True, False, False]


def test_no_gaussians_is_background_with_alpha_zero_and_a_gradient_path() -> None:
    gaussians = leaves(select(random_gaussians(0, 4, dtype=F64), torch.arange(0)))
    background = vec([0.1, 0.5, 0.9]).requires_grad_()
    image, alpha, depth = render_reference(gaussians, SMALL, background=background)
    assert_close(image, background.expand(5, 5, 3))
    assert not alpha.any()
    assert not depth.any()
    torch.autograd.backward(image.sum() + alpha.sum() + depth.sum())
    assert_close(background.grad, torch.full((3,), 25.0, dtype=F64))
    assert gaussians.means.grad is not None
    assert gaussians.means.grad.shape == (0, 3)


def test_a_view_of_nothing_still_has_gradients_of_zero() -> None:
    gaussians = leaves(splat((0, 0, -5.0), 0.5))
    image, _, _ = render_reference(gaussians, SMALL)
    torch.autograd.backward(image.sum())
    assert_close(gaussians.means.grad, torch.zeros(1, 3, dtype=F64))


def test_the_viewmat_argument_replaces_the_cameras_own() -> None:
    gaussians, camera = random_scene(9, dtype=F64)
    viewmat = torch.from_numpy(camera.viewmat)
    plain = Camera("x", camera.width, camera.height, camera.fx, camera.fy, camera.cx, camera.cy, np.eye(4))
    for got, expected in zip(
        render_reference(gaussians, plain, viewmat=viewmat), render_reference(gaussians, camera), strict=True
    ):
        assert torch.equal(got, expected)


def test_wrong_arguments_are_refused() -> None:
    gaussians = splat((0, 0, 5.0), 0.5, sh_degree=1)
    with pytest.raises(ValueError, match="sh_degree is 2"):
        render_reference(gaussians, SMALL, sh_degree=2)
    with pytest.raises(ValueError, match=r"background has shape \(4,\)"):
        render_reference(gaussians, SMALL, background=torch.zeros(4))
    with pytest.raises(ValueError, match=r"viewmat has shape \(3, 4\)"):
        render_reference(gaussians, SMALL, viewmat=torch.zeros(3, 4))
