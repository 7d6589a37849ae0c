"""Orthographic and fisheye cameras: the page against autograd, the kernels against the reference, rounding, bits."""

from __future__ import annotations

import ctypes
import math
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from splatcli.gaussians import GROUPS, Gaussians
from splatcli.native.build import COMMON_FLAGS, ISA_FLAGS, find_compiler, source_root
from splatcli.rasterizer.rendering import ViewRender, chunk_bounds, render
from splatcli.scene.camera import Camera, CameraModel
from tests.native.cases import ISAS, NEEDS_COMPILER, Weights, bits, float32, float64, native_outcome
from tests.rasterizer.reference_projection import project_reference
from tests.rasterizer.scenes import front_camera, of_model, random_gaussians, random_scene
from tests.rasterizer.test_native_gradients import check
from tests.rasterizer.test_native_reference import BACKENDS, BROKEN, backend_of, compare

pytestmark = NEEDS_COMPILER
F64 = torch.float64
OTHERS: tuple[CameraModel, ...] = ("ortho", "fisheye")


def around(camera: Camera, points: list[list[float]], scale: float = 0.2) -> Gaussians:
    """Return Gaussians whose means are ``points``, in camera coordinates."""
    gaussians = random_gaussians(5, len(points), sh_degree=1, scale=scale, dtype=F64)
    seen = torch.tensor(points, dtype=F64) - torch.from_numpy(camera.viewmat[:3, 3])
    gaussians.logit_opacities.clamp_(-1.0, 2.0)
    return replace(gaussians, means=seen @ torch.from_numpy(camera.viewmat[:3, :3]))


#: Camera coordinates: on the axis, beside it, at 45 degrees, almost at 90.
WIDE = [[0.0, 0.0, 2.0], [1e-9, -1e-7, 3.0], [1e-4, 3e-5, 1.0], [0.4, -0.3, 1.5], [1.2, 0.5, 1.3], [0.5, 1.0, 0.1]]


def test_models_of_the_page_are_what_autograd_gives() -> None:
    """docs/math.md 3.9 and 3.10: pixel, Jacobian, and the adjoint through both."""
    fx, fy, cx, cy = 3.0, 4.0, 0.5, 0.7
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(40, 3, generator=generator, dtype=F64)
    points[:, 2] = points[:, 2].abs() + 0.05

    def fisheye(p: Tensor) -> Tensor:
        r = torch.hypot(p[0], p[1])
        theta = torch.atan2(r, p[2])
        return torch.stack([fx * p[0] * theta / r + cx, fy * p[1] * theta / r + cy])

    def ortho(p: Tensor) -> Tensor:
        return torch.stack([fx * p[0] + cx, fy * p[1] + cy])

    for model, pixel in (("fisheye", fisheye), ("ortho", ortho)):
        camera = Camera("", 10, 10, fx, fy, cx, cy, np.eye(4), model=model)  # type: ignore[arg-type]
        for p in points:
            v_pixel, v_j = (torch.randn(*shape, generator=generator, dtype=F64) for shape in ((2,), (2, 3)))
            jacobian = torch.func.jacrev(pixel)(p)
            expected = torch.func.grad(
                lambda p, f=pixel, a=v_pixel, b=v_j: (f(p) * a).sum() + (torch.func.jacrev(f)(p) * b).sum()
            )(p)
            x, y, z = p.tolist()
            if model == "ortho":
                page, v_p = torch.tensor([[fx, 0, 0], [0, fy, 0]], dtype=F64), torch.zeros(3, dtype=F64)
            else:
                rho = x * x + y * y
                s, q = math.atan2(math.sqrt(rho), z) / math.sqrt(rho), 1.0 / (rho + z * z)
                a = (z * q - s) / rho
                d = -(z * q * q + 1.5 * a) / rho
                half = torch.tensor([[s + a * x * x, a * x * y, -x * q], [a * x * y, s + a * y * y, -y * q]], dtype=F64)
                page = torch.tensor([[fx], [fy]], dtype=F64) * half
                (g00, g01, g02), (g10, g11, g12) = (torch.tensor([[fx], [fy]], dtype=F64) * v_j).tolist()
                g = g01 + g10
                v_s, v_a, v_q = g00 + g11, g00 * x * x + g * x * y + g11 * y * y, -(g02 * x + g12 * y)
                w = a * v_s + 2 * d * v_a - 2 * q * q * v_q
                v_p = torch.tensor(
                    [
                        a * (2 * g00 * x + g * y) - q * g02 + w * x,
                        a * (2 * g11 * y + g * x) - q * g12 + w * y,
                        q * (2 * q * (v_a - z * v_q) - v_s),
                    ],
                    dtype=F64,
                )
            assert_close(page, jacobian)
            assert_close(page.T @ v_pixel + v_p, expected, rtol=1e-6, atol=1e-9)
            assert_close(torch.from_numpy(np.concatenate(camera.project(p[None].numpy())[:2])), pixel(p))


@pytest.mark.parametrize("antialiased", [False, True])
@pytest.mark.parametrize("model", OTHERS)
def test_random_scenes_are_those_of_the_reference(model: CameraModel, antialiased: bool) -> None:
    gaussians, camera = random_scene(3, 50, sh_degree=2, scale=0.3)
    compare(gaussians, of_model(camera, model), antialiased=antialiased)


def test_what_lies_anywhere_before_a_fisheye_is_that_of_the_reference() -> None:
    camera = Camera("", 40, 30, 12.0, 13.0, 19.0, 16.0, random_scene(2, 8)[1].viewmat, model="fisheye")
    compare(around(camera, WIDE), camera)


@pytest.mark.parametrize("antialiased", [False, True])
@pytest.mark.parametrize("model", OTHERS)
def test_gradcheck_of_other_models(model: CameraModel, antialiased: bool) -> None:
    _, camera = random_scene(27, 8, width=6, height=5)
    camera = of_model(replace(camera, fx=3.0, fy=3.5), model)
    check(around(camera, [WIDE[0], WIDE[2], WIDE[4]], scale=0.5), camera, antialiased=antialiased)


ARCTANGENT = """
#include "lanes.h"
using namespace splat;
extern "C" __attribute__((visibility("default"))) void rest(const float* w, float* lanes, float* one, int count) {
  for (int i = 0; i < count; i += 16) atan_rest(Lanes<float, 16>::load(w + i)).store(lanes + i);
  for (int i = 0; i < count; ++i) one[i] = atan_rest(w[i]);
}
extern "C" __attribute__((visibility("default"))) void rest_double(const double* w, double* out, int count) {
  for (int i = 0; i < count; ++i) out[i] = atan_rest(w[i]);
}
"""


def test_the_arctangent_is_exact_to_a_unit_in_the_last_place_on_every_instruction_set(tmp_path: Path) -> None:
    (tmp_path / "rest.cpp").write_text(ARCTANGENT)
    t = np.concatenate([np.linspace(0.0, 1.0, 4096 - 16), np.logspace(-12, -3, 16)])
    w = (t * t).astype(np.float32)
    found: dict[str, bytes] = {}
    # gcc's sanitizers keep some multiplications and additions apart, and the bits are then others.
    compiler = [word for word in shlex.split(find_compiler().command) if "sanitize" not in word]
    for isa in ISAS:
        library = tmp_path / f"{isa}.so"
        flags = [*COMMON_FLAGS, *ISA_FLAGS[isa], f"-I{source_root() / 'src' / 'cpu'}", "-shared"]
        subprocess.run([*compiler, *flags, "-o", library, tmp_path / "rest.cpp"], check=True)
        loaded, lanes, one = ctypes.CDLL(str(library)), np.empty_like(w), np.empty_like(w)
        loaded.rest(w.ctypes.data_as(ctypes.c_void_p), *(a.ctypes.data_as(ctypes.c_void_p) for a in (lanes, one)), 4096)
        assert lanes.tobytes() == one.tobytes()
        found[isa] = lanes.tobytes()
        exact = np.arctan(np.sqrt(w.astype(np.float64)))
        root = np.sqrt(w.astype(np.float64))
        got = root * (1.0 + w * (w * lanes.astype(np.float64) - 1.0 / 3.0))
        assert np.abs(got - exact).max() < 4e-8
        double, wide = np.empty_like(root), np.linspace(0.0, 1.0, len(root))
        loaded.rest_double(*(a.ctypes.data_as(ctypes.c_void_p) for a in (wide, double)), len(root))
        assert np.abs(np.sqrt(wide) * (1 + wide * (wide * double - 1 / 3)) - np.arctan(np.sqrt(wide))).max() < 1e-15
    assert found.get("avx2", b"") == found.get("avx512", found.get("avx2", b""))


def test_a_fisheye_in_float32_cancels_nowhere() -> None:
    """Pixels and conics, at each distance and each angle from the axis, keep the digits that their inputs have."""
    camera = replace(front_camera(400, 400, 120.0), model="fisheye", near=1e-4)
    angles = torch.cat([torch.logspace(-9, -0.3, 60, dtype=F64), torch.linspace(0.5, 1.55, 60, dtype=F64)])
    turn = torch.linspace(0.0, 40.0, len(angles), dtype=F64)
    unit = torch.stack([angles.sin() * turn.cos(), angles.sin() * turn.sin(), angles.cos()], 1)
    for distance in (1e-1, 1.0, 1e4, 1e8):
        gaussians = random_gaussians(1, len(angles), sh_degree=0, scale=0.1, dtype=F64)
        means = (distance * unit).float().double()
        gaussians = replace(gaussians, means=means, log_scales=(gaussians.log_scales + math.log(distance)))
        gaussians.logit_opacities[:] = 4.0
        gaussians = gaussians.map(lambda tensor: tensor.float())
        exact = project_reference(gaussians.map(Tensor.double), camera)
        for isa in ISAS:
            view = ViewRender(gaussians, camera, backend=float32(isa)).project()
            seen = (view.radii > 0).all(1)
            assert seen.sum() > 100
            assert_close(
                view.means2d.double()[seen], exact.means2d[seen], rtol=0, atol=6e-5
            )  # two units in the last place
            scale = exact.conics[seen].abs().amax(1, keepdim=True)
            assert ((view.conics.double()[seen] - exact.conics[seen]).abs() / scale).max() < 3e-5


@pytest.mark.parametrize("model", OTHERS)
def test_bits_are_those_of_any_threads_and_of_each_fused_instruction_set(model: CameraModel) -> None:
    gaussians, camera = random_scene(6, 600, width=120, height=90, sh_degree=2, scale=0.1)
    camera, found = of_model(camera, model), {}
    weights = Weights.random(1, camera)
    bounds = chunk_bounds(gaussians)
    for isa in ISAS:
        outcomes = [native_outcome(float32(isa, threads), gaussians, camera, weights) for threads in (1, 3)]
        one, three = (bits(*found.images.values(), *found.gradients.values()) for found in outcomes)
        assert one == three
        found[isa] = one
        skipping = render(gaussians, camera, backend=float32(isa), bounds=bounds).image
        assert torch.equal(skipping, render(gaussians, camera, backend=float32(isa)).image)
    if {"avx2", "avx512"} <= found.keys():
        assert found["avx2"][:3] == found["avx512"][:3]


def test_a_fisheye_sees_what_a_pinhole_cannot() -> None:
    """A Gaussian at 80 degrees from the axis lies where its angle says, and chunks there are not skipped."""
    angle, focal = math.radians(80.0), 50.0
    camera = replace(front_camera(160, 160, focal), model="fisheye")
    gaussians = random_gaussians(1, 300, sh_degree=0, scale=0.02, dtype=torch.float32)
    gaussians.means[:] = 3.0 * torch.tensor([math.sin(angle), 0.0, math.cos(angle)])
    gaussians.logit_opacities[:] = 3.0
    out = render(gaussians, camera, backend=float32(), bounds=chunk_bounds(gaussians))
    places = torch.arange(160) + 0.5
    middle = [float((out.alpha.sum(axis) * places).sum() / out.alpha.sum()) for axis in (0, 1)]
    assert_close(torch.tensor(middle), torch.tensor([80.0 + focal * angle, 80.0]), rtol=0, atol=0.1)
    assert not render(gaussians, replace(camera, model="pinhole"), backend=float32()).alpha.any()
    with pytest.raises(ValueError, match="near plane of the fisheye camera is -1"):
        render(gaussians, camera, z_range=(-1.0, 10.0), backend=float32())


def test_an_orthographic_camera_shows_sizes_without_distance() -> None:
    camera = replace(front_camera(60, 40, 10.0), model="ortho")
    near, far = (random_gaussians(1, 1, sh_degree=0, dtype=F64) for _ in range(2))
    for one, z in ((near, 1.0), (far, 500.0)):
        one.means[:] = torch.tensor([[1.0, -0.5, z]])
    a, b = (render(one, camera, backend=float64()) for one in (near, far))
    assert a.alpha.max() > 0.05
    assert_close(a.alpha, b.alpha)
    assert_close(b.depth, a.depth * 500.0)


@pytest.mark.parametrize("build", BACKENDS)
@pytest.mark.parametrize("model", OTHERS)
def test_broken_gaussians_poison_nothing(model: CameraModel, build: str) -> None:
    backend = backend_of(build)
    whole, camera = random_scene(8, 40)
    whole, camera = whole.map(lambda tensor: tensor.to(backend.dtype)), of_model(camera, model)
    kept = torch.tensor([i for i in range(40) if i not in (4, 5)])
    weights = Weights.random(2, camera)
    good = native_outcome(backend, whole.map(lambda tensor: tensor[kept]), camera, weights)
    for name, values in BROKEN.items():
        for value in values:
            broken = whole.detach_clone()
            getattr(broken, name)[4] = value
            getattr(broken, name).view(40, -1)[5, -1] = value
            if name == "quats":
                broken.quats[5] = 0.0
            got = native_outcome(backend, broken, camera, weights)
            for key, image in good.images.items():
                assert torch.equal(got.images[key], image), (name, value, key)
            for key, gradient in good.gradients.items():
                here = got.gradients[key]
                assert here.isfinite().all(), (name, value, key)
                if key in GROUPS:
                    assert torch.equal(here[kept], gradient), (name, value, key)
                    assert not here[[4, 5]].any(), (name, value, key)
