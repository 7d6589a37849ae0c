"""Small random scenes that the tests of every renderer share; the same seed gives the same scene."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from splatcli.gaussians import SHN_COUNTS, Gaussians
from splatcli.scene.camera import Camera, CameraModel

#: A scene with image and gradients that gsplat made on a GPU; see the README beside it.
CONFORMANCE = Path(__file__).parents[1] / "data" / "conformance" / "tiny_case_with_grads.npz"


def look_from(center: list[float], target: list[float], roll: float = 0.0) -> np.ndarray:
    """[4, 4] float64 world-to-camera matrix of a camera at ``center`` that looks at ``target``, world y down."""
    forward = np.asarray(target, np.float64) - np.asarray(center, np.float64)
    forward /= np.linalg.norm(forward)
    right = np.cross([0.0, 1.0, 0.0], forward)
    right /= np.linalg.norm(right)
    down = np.cross(forward, right)
    c, s = math.cos(roll), math.sin(roll)
    rotation = np.stack([c * right + s * down, -s * right + c * down, forward])
    viewmat = np.eye(4)
    viewmat[:3, :3] = rotation
    viewmat[:3, 3] = -rotation @ np.asarray(center, np.float64)
    return viewmat


def front_camera(width: int, height: int, focal: float) -> Camera:
    """A camera at the origin without rotation, its principal point in the middle of the image."""
    return Camera("front.png", width, height, focal, focal, width / 2, height / 2, np.eye(4))


def random_camera(seed: int, width: int = 37, height: int = 29) -> Camera:
    """A camera some 4 units from the origin: any attitude near upright, fx != fy, principal point off the centre."""
    rng = np.random.default_rng(seed)
    center = rng.normal(size=3) * 0.5 + np.array([0.3, -0.2, -4.0])
    viewmat = look_from(center.tolist(), (rng.normal(size=3) * 0.1).tolist(), roll=float(rng.normal() * 0.3))
    focal = width * float(rng.uniform(0.8, 1.2))
    return Camera(
        name=f"random_{seed}.png",
        width=width,
        height=height,
        fx=focal,
        fy=focal * float(rng.uniform(0.9, 1.1)),
        cx=width * float(rng.uniform(0.4, 0.6)),
        cy=height * float(rng.uniform(0.4, 0.6)),
        viewmat=viewmat,
    )


def of_model(camera: Camera, model: CameraModel) -> Camera:
    """Return a camera of ``model`` that shows about the same at a distance of four units."""
    scale = 0.25 if model == "ortho" else 1.0
    return replace(camera, model=model, fx=scale * camera.fx, fy=scale * camera.fy)


def random_gaussians(
    seed: int,
    n: int,
    *,
    sh_degree: int = 3,
    spread: float = 1.0,
    scale: float = 0.15,
    dtype: torch.dtype = torch.float32,
) -> Gaussians:
    """N Gaussians around the origin: anisotropic, any attitude, opacities from nearly nothing to nearly one.

    spread: standard deviation of the means. scale: median standard deviation of a Gaussian's axes. World units both.
    The numbers are drawn in float64, so that both dtypes describe the same scene.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    gaussians = Gaussians(
        means=normal(n, 3) * spread,
        quats=normal(n, 4),
        log_scales=math.log(scale) + 0.6 * normal(n, 3),
        logit_opacities=2.0 * normal(n),
        sh0=0.8 * normal(n, 3),
        shN=0.2 * normal(n, SHN_COUNTS[sh_degree], 3),
    )
    return gaussians.map(lambda t: t.to(dtype))


def normal_gaussians(count: int, degree: int, generator: torch.Generator) -> Gaussians:
    """Gaussians whose every number is drawn from the normal distribution, scales around exp(-4)."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return Gaussians(
        means=normal(count, 3),
        quats=normal(count, 4),
        log_scales=normal(count, 3) - 4,
        logit_opacities=normal(count),
        sh0=normal(count, 3),
        shN=normal(count, SHN_COUNTS[degree], 3),
    )


def random_scene(
    seed: int,
    n: int = 60,
    *,
    width: int = 37,
    height: int = 29,
    sh_degree: int = 3,
    scale: float = 0.15,
    dtype: torch.dtype = torch.float32,
) -> tuple[Gaussians, Camera]:
    """(Gaussians, Camera): most are in view, some outside; every eighth lies behind the camera."""
    camera = random_camera(seed, width, height)
    gaussians = random_gaussians(seed, n, sh_degree=sh_degree, scale=scale, dtype=dtype)
    behind = torch.from_numpy(2.0 * camera.center).to(dtype)
    gaussians.means[7::8] += behind
    return gaussians, camera


def random_image(seed: int, width: int, height: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[H, W, 3] in 0...1: smooth waves with noise on them, so that SSIM has structure to see."""
    generator = torch.Generator().manual_seed(seed)
    phase = torch.rand(3, generator=generator, dtype=torch.float64)
    noise = torch.rand(height, width, 3, generator=generator, dtype=torch.float64)
    ys = torch.arange(height, dtype=torch.float64)[:, None, None] / 7.0
    xs = torch.arange(width, dtype=torch.float64)[None, :, None] / 5.0
    waves = 0.5 + 0.35 * torch.sin(xs + 6.0 * phase) * torch.cos(ys - 4.0 * phase)
    return (waves + 0.2 * (noise - 0.5)).clamp(0.0, 1.0).to(dtype)


def leaves(gaussians: Gaussians) -> Gaussians:
    """A copy whose tensors collect gradients."""
    return gaussians.map(lambda t: t.detach().clone().requires_grad_())
