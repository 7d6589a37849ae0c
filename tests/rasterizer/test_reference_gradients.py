"""Gradients of the reference: against finite differences, and against the adjoints as docs/math.md writes them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from splatcli.gaussians import GROUPS, Gaussians
from splatcli.rasterizer.reference import (
    BLUR,
    blend_reference,
    project_visible,
    render_reference,
    rotation_matrices,
    sh_basis,
)
from splatcli.scene.camera import Camera
from tests.rasterizer.reference_projection import project_reference
from tests.rasterizer.scenes import leaves, random_scene

F64 = torch.float64


def grad_of(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def small_scene(seed: int, sh_degree: int) -> tuple[Gaussians, Tensor, Tensor, Camera]:
    gaussians, camera = random_scene(seed, 3, width=6, height=5, sh_degree=sh_degree, scale=0.5, dtype=F64)
    # No Gaussian near the 0.999 clamp, where the one-sided derivatives differ.
    gaussians.logit_opacities.clamp_(-2.0, 3.0)
    background = torch.tensor([0.2, 0.5, 0.7], dtype=F64)
    return gaussians, background, torch.from_numpy(camera.viewmat).clone(), camera


@pytest.mark.parametrize("antialiased", [False, True])
@pytest.mark.parametrize(("seed", "sh_degree"), [(21, 1), (32, 4)])
def test_render_passes_gradcheck_in_everything(seed: int, sh_degree: int, antialiased: bool) -> None:
    gaussians, background, viewmat, camera = small_scene(seed, sh_degree)

    def run(background: Tensor, viewmat: Tensor, *groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        bundle = Gaussians(**dict(zip(GROUPS, groups, strict=True)))
        return render_reference(bundle, camera, background=background, viewmat=viewmat, antialiased=antialiased)

    inputs = [background, viewmat, *(tensor for _, tensor in gaussians.items())]
    inputs = [tensor.requires_grad_() for tensor in inputs]
    image, alpha, _ = run(*inputs)
    assert alpha.max() > 0.3, "the scene has to be in view"
    assert image.requires_grad
    assert torch.autograd.gradcheck(run, inputs, eps=1e-6, atol=1e-6, rtol=1e-4)


def test_the_gradient_includes_the_path_through_view_directions() -> None:
    gaussians, camera = random_scene(23, 10, dtype=F64)
    grads = []
    for detach in (False, True):
        parameters = leaves(gaussians)
        viewmat = torch.from_numpy(camera.viewmat).clone().requires_grad_()
        image, _, _ = render_reference(parameters, camera, viewmat=viewmat, detach_directions=detach)
        torch.autograd.backward(image.square().sum())
        assert parameters.means.grad is not None
        assert viewmat.grad is not None
        grads.append((parameters.means.grad, viewmat.grad))
    assert (grads[0][0] - grads[1][0]).abs().max() > 1e-3
    assert (grads[0][1] - grads[1][1]).abs().max() > 1e-3
    assert not grads[0][1][3].any(), "the last row is not read"


def test_blend_adjoint_front_to_back_scalar_form() -> None:
    """docs/math.md 6.2 for one pixel, with all three outputs and the background in the loss."""
    rng = np.random.default_rng(0)
    n = 9
    q = torch.tensor(rng.uniform(0.0, 2.0, n), requires_grad=True)
    opacity = torch.tensor(rng.uniform(0.1, 0.9, n), requires_grad=True)
    color = torch.tensor(rng.uniform(0, 1, (n, 3)), requires_grad=True)
    depth = torch.tensor(rng.uniform(1, 5, n), requires_grad=True)
    background = torch.tensor(rng.uniform(0, 1, 3), requires_grad=True)
    g, h, k = torch.tensor(rng.normal(size=3)), float(rng.normal()), float(rng.normal())
    gauss = torch.exp(-q)
    alphas = opacity * gauss
    through = torch.cumprod(torch.cat([torch.ones(1, dtype=F64), 1 - alphas]), 0)
    weights = alphas * through[:-1]
    out_color = weights @ color + through[-1] * background
    out_depth = weights @ depth
    torch.autograd.backward((out_color * g).sum() + h * (1 - through[-1]) + k * out_depth)

    with torch.no_grad():
        remaining = float(out_color @ g + k * out_depth - through[-1] * h)
        transmittance = 1.0
        for i in range(n):
            alpha, weight = float(alphas[i]), float(alphas[i]) * transmittance
            value = float(color[i] @ g + depth[i] * k)
            remaining -= weight * value
            by_alpha = transmittance * value - remaining / (1 - alpha)
            assert_close(grad_of(color)[i], weight * g)
            assert_close(grad_of(depth)[i].item(), weight * k)
            assert_close(grad_of(opacity)[i].item(), float(gauss[i]) * by_alpha)
            assert_close(grad_of(q)[i].item(), -alpha * by_alpha)
            transmittance *= 1 - alpha
        assert_close(background.grad, transmittance * g)


@pytest.mark.parametrize("antialiased", [False, True])
def test_projection_adjoint_as_written(antialiased: bool) -> None:
    """docs/math.md 2 to 4, in reverse and by hand, for a batch of Gaussians of which some are clamped."""
    gaussians, camera = random_scene(24, 40, scale=0.3, sh_degree=4, dtype=F64)
    gaussians.means[:, 0] *= 3.0
    parameters = leaves(gaussians)
    viewmat = torch.from_numpy(camera.viewmat).clone().requires_grad_()
    view = project_reference(parameters, camera, viewmat=viewmat, antialiased=antialiased)
    rng = torch.Generator().manual_seed(1)
    v = {
        name: torch.randn(getattr(view, name).shape, generator=rng, dtype=F64)
        for name in ("means2d", "conics", "depths", "colors", "opacities")
    }
    torch.autograd.backward([getattr(view, name) for name in v], list(v.values()))

    rotation, translation = viewmat.detach()[:3, :3], viewmat.detach()[:3, 3]
    v_rotation, v_translation = torch.zeros(3, 3, dtype=F64), torch.zeros(3, dtype=F64)
    clamped = 0
    for i in range(len(gaussians)):
        if not view.valid[i]:
            continue
        p, quat = gaussians.means[i], gaussians.quats[i]
        x, y, z = (rotation @ p + translation).tolist()
        # 4.3, 3.7: colour.
        center = -rotation.T @ translation
        offset = p - center
        length = offset.norm()
        direction = (offset / length).requires_grad_()
        sh = torch.cat([gaussians.sh0[i, None], gaussians.shN[i]])
        basis = sh_basis(direction[None], 4)[0]
        g = v["colors"][i] * (0.5 + basis.detach() @ sh >= 0)
        torch.autograd.backward(basis @ (sh @ g))
        unit = direction.detach()
        v_offset = (grad_of(direction) - unit * (unit @ grad_of(direction))) / length
        v_center = -v_offset
        v_translation -= rotation @ v_center
        v_rotation -= torch.outer(translation, v_center)
        # 3.5: conic to covariance.
        (a, b, c), (qa, qb, qc) = view.cov2d[i].detach().tolist(), view.conics[i].detach().tolist()
        conic = torch.tensor([[qa, qb], [qb, qc]], dtype=F64)
        v_conic = torch.tensor(
            [[v["conics"][i, 0], v["conics"][i, 1] / 2], [v["conics"][i, 1] / 2, v["conics"][i, 2]]], dtype=F64
        )
        v_cov = -conic @ v_conic @ conic
        # 2.2, 3.4: opacity and its compensation.
        opacity, v_opacity = float(torch.sigmoid(gaussians.logit_opacities[i])), float(v["opacities"][i])
        if antialiased:
            ratio = ((a - BLUR) * (c - BLUR) - b * b) / (a * c - b * b)
            det_conic = qa * qc - qb * qb
            v_ratio = v_opacity * opacity / (2 * ratio**0.5)
            v_cov[0, 0] += v_ratio * ((1 - ratio) * qa - BLUR * det_conic)
            v_cov[1, 1] += v_ratio * ((1 - ratio) * qc - BLUR * det_conic)
            v_cov[0, 1] += v_ratio * (1 - ratio) * qb
            v_cov[1, 0] += v_ratio * (1 - ratio) * qb
            v_opacity *= ratio**0.5
        assert_close(grad_of(parameters.logit_opacities)[i].item(), v_opacity * opacity * (1 - opacity))
        # 3.3: slopes and their clamp.
        low_x, high_x = (-0.15 * camera.width - camera.cx) / camera.fx, (1.15 * camera.width - camera.cx) / camera.fx
        low_y, high_y = (-0.15 * camera.height - camera.cy) / camera.fy, (1.15 * camera.height - camera.cy) / camera.fy
        sx, sy = min(max(x / z, low_x), high_x), min(max(y / z, low_y), high_y)
        inside_x, inside_y = low_x <= x / z <= high_x, low_y <= y / z <= high_y
        clamped += not inside_x
        jacobian = torch.tensor(
            [[camera.fx / z, 0, -camera.fx * sx / z], [0, camera.fy / z, -camera.fy * sy / z]], dtype=F64
        )
        # 3.4: image covariance.
        rot, scales = rotation_matrices(quat[None])[0], gaussians.log_scales[i].exp()
        axes = rot * scales
        cov3d, to_image = axes @ axes.T, jacobian @ rotation
        v_cov3d = to_image.T @ v_cov @ to_image
        v_to_image = 2 * v_cov @ to_image @ cov3d
        v_jacobian = v_to_image @ rotation.T
        v_rotation += jacobian.T @ v_to_image
        # 3.3, 3.1: camera-space point.
        vu, vv = v["means2d"][i].tolist()
        (j00, _, j02), (_, j11, j12) = v_jacobian.tolist()
        fx, fy = camera.fx, camera.fy
        v_x = vu * fx / z - inside_x * j02 * fx / z**2
        v_y = vv * fy / z - inside_y * j12 * fy / z**2
        v_z = float(v["depths"][i]) - vu * fx * x / z**2 - vv * fy * y / z**2
        v_z += -j00 * fx / z**2 - j11 * fy / z**2
        v_z += (1 + inside_x) * j02 * fx * sx / z**2 + (1 + inside_y) * j12 * fy * sy / z**2
        v_camera = torch.tensor([v_x, v_y, v_z], dtype=F64)
        v_rotation += torch.outer(v_camera, p)
        v_translation += v_camera
        assert_close(grad_of(parameters.means)[i], rotation.T @ v_camera + v_offset)
        # 3.2, 2.1, 2.3: scales and quaternion.
        v_axes = 2 * v_cov3d @ axes
        assert_close(grad_of(parameters.log_scales)[i], scales * (rot * v_axes).sum(0))
        m = v_axes * scales
        norm = quat.norm()
        w, qx, qy, qz = (quat / norm).tolist()
        v_unit = 2 * torch.tensor(
            [
                qx * (m[2, 1] - m[1, 2]) + qy * (m[0, 2] - m[2, 0]) + qz * (m[1, 0] - m[0, 1]),
                -2 * qx * (m[1, 1] + m[2, 2])
                + qy * (m[1, 0] + m[0, 1])
                + qz * (m[2, 0] + m[0, 2])
                + w * (m[2, 1] - m[1, 2]),
                qx * (m[1, 0] + m[0, 1])
                - 2 * qy * (m[0, 0] + m[2, 2])
                + qz * (m[2, 1] + m[1, 2])
                + w * (m[0, 2] - m[2, 0]),
                qx * (m[2, 0] + m[0, 2])
                + qy * (m[2, 1] + m[1, 2])
                - 2 * qz * (m[0, 0] + m[1, 1])
                + w * (m[1, 0] - m[0, 1]),
            ],
            dtype=F64,
        )
        unit_quat = quat / norm
        assert_close(grad_of(parameters.quats)[i], (v_unit - unit_quat * (unit_quat @ v_unit)) / norm)
    assert clamped > 0, "some slopes have to be clamped"
    assert viewmat.grad is not None
    assert_close(viewmat.grad[:3, :3], v_rotation)
    assert_close(viewmat.grad[:3, 3], v_translation)


def test_magnitudes_are_each_pixels_share_by_itself() -> None:
    gaussians, camera = random_scene(29, 6, dtype=F64)
    camera = camera.resized(9, 7)
    _, splats = project_visible(gaussians, camera)
    means2d = splats.means2d.detach().requires_grad_()
    splats = dataclasses.replace(splats, means2d=means2d)
    magnitudes = torch.zeros_like(means2d, requires_grad=True)
    image, _, _ = blend_reference(splats, camera.width, camera.height, None, magnitudes)
    weights = torch.randn(image.shape, generator=torch.Generator().manual_seed(3), dtype=F64)
    pixels = (image * weights).sum(2).flatten()
    expected = torch.zeros_like(means2d)
    for pixel in pixels:
        expected += torch.autograd.grad(pixel, means2d, retain_graph=True)[0].abs()
    (got,) = torch.autograd.grad(pixels.sum(), magnitudes)
    assert expected.abs().max() > 0.1
    assert_close(got, expected, rtol=1e-10, atol=1e-14)
