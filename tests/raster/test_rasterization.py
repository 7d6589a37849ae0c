"""rasterization(): gsplat's call, against gsplat's own results, against render(), and against its documented shapes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import splatcli
from splatcli import rasterization
from splatcli.errors import UsageError
from splatcli.gaussians import Gaussians
from splatcli.raster.reference import blend_reference
from splatcli.raster.reference_projection import project_visible
from splatcli.raster.rendering import render
from splatcli.scene.camera import Camera
from tests.native.cases import NEEDS_COMPILER
from tests.raster.scenes import random_camera, random_scene

pytestmark = NEEDS_COMPILER
CONFORMANCE = Path(__file__).parents[2] / "../shared/data/conformance/tiny_case_with_grads.npz"
F64 = torch.float64


def activated(gaussians: Gaussians) -> dict[str, Tensor]:
    """What gsplat's call takes."""
    return {
        "means": gaussians.means,
        "quats": gaussians.quats,
        "scales": gaussians.log_scales.exp(),
        "opacities": gaussians.logit_opacities.sigmoid(),
        "colors": torch.cat([gaussians.sh0[:, None], gaussians.shN], dim=1),
    }


def seen_by(*cameras: Camera, dtype: torch.dtype = F64) -> dict[str, Any]:
    ks = torch.zeros(len(cameras), 3, 3, dtype=dtype)
    for k, camera in zip(ks, cameras, strict=True):
        k[0, 0], k[1, 1], k[0, 2], k[1, 2], k[2, 2] = camera.fx, camera.fy, camera.cx, camera.cy, 1.0
    viewmats = torch.stack([torch.from_numpy(camera.viewmat) for camera in cameras]).to(dtype)
    return {"viewmats": viewmats, "Ks": ks, "width": cameras[0].width, "height": cameras[0].height}


@pytest.fixture
def scene() -> tuple[Gaussians, Camera]:
    gaussians, camera = random_scene(41, 60, sh_degree=2)
    return gaussians.map(Tensor.double), camera


@pytest.mark.skipif(not CONFORMANCE.exists(), reason="gsplat's own results are not at hand")
def test_images_and_gradients_are_those_of_gsplat_on_a_gpu() -> None:
    case = {name: torch.from_numpy(array) for name, array in np.load(CONFORMANCE).items()}
    names = ("means", "quats", "scales", "coeffs", "opacities")
    means, quats, log_scales, coeffs, logits = (case[name].double().requires_grad_() for name in names)
    viewmat = torch.eye(4, dtype=F64)
    viewmat[:3, 3] = -torch.tensor([0.123, 0.456, -8.0], dtype=F64)
    k = torch.tensor([[61.5, 0.0, 61.5], [0.0, 61.5, 41.0], [0.0, 0.0, 1.0]], dtype=F64)
    gaussians = (means, quats, log_scales.exp(), logits.sigmoid(), coeffs)
    image, alpha, meta = rasterization(*gaussians, viewmat[None], k[None], 123, 82, sh_degree=3, packed=False)
    meta["means2d"].retain_grad()
    got = torch.cat([image[0], alpha[0]], dim=-1)
    assert_close(got.float(), case["out_img"], rtol=0, atol=2e-6)
    (got * case["v_out_img"].double()).sum().backward()
    gradients = {"v_quats": quats, "v_scales": log_scales, "v_coeffs": coeffs, "v_opacities": logits}
    for name, leaf in gradients.items():
        assert leaf.grad is not None
        assert_close(leaf.grad.float(), case[name], rtol=1e-3, atol=1e-7, msg=name)
    seen = meta["radii"][0, :, 0] > 0
    assert int(seen.sum()) > 0
    assert_close(meta["means2d"].grad[0][seen].float(), case["v_xy"][seen], rtol=1e-3, atol=1e-8)
    assert_close(meta["means2d"].detach()[0][seen].float(), case["xys"][seen], rtol=1e-5, atol=1e-4)
    assert_close(meta["conics"][0][seen].float(), case["conics"][seen], rtol=1e-3, atol=1e-5)
    assert_close(meta["depths"][0][seen].float(), case["depths"][seen], rtol=1e-5, atol=1e-5)


def test_activated_and_raw_parameters_give_the_same_image_and_gradients(scene: tuple[Gaussians, Camera]) -> None:
    gaussians, camera = scene
    raw = gaussians.map(lambda t: t.detach().clone().requires_grad_())
    shown = render(raw, camera, background=torch.tensor([0.1, 0.5, 0.9], dtype=F64), antialiased=True)
    weights = torch.randn(shown.image.shape, generator=torch.Generator().manual_seed(1), dtype=F64)
    ((shown.image * weights).sum() + shown.alpha.square().sum()).backward()
    other = gaussians.map(lambda t: t.detach().clone().requires_grad_())
    images, alphas, _ = rasterization(
        **activated(other),
        **seen_by(camera),
        sh_degree=2,
        backgrounds=torch.tensor([[0.1, 0.5, 0.9]], dtype=F64),
        rasterize_mode="antialiased",
    )
    assert images.shape == (1, camera.height, camera.width, 3)
    assert_close(images[0], shown.image, rtol=1e-9, atol=1e-12)
    assert_close(alphas[0, ..., 0], shown.alpha, rtol=1e-9, atol=1e-12)
    ((images[0] * weights).sum() + alphas.square().sum()).backward()
    for (name, mine), (_, theirs) in zip(raw.items(), other.items(), strict=True):
        assert_close(theirs.grad, mine.grad, rtol=1e-7, atol=1e-12, msg=name)


@pytest.mark.parametrize("mode", ["RGB", "D", "ED", "RGB+D", "RGB+ED"])
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_channels_and_depth_are_what_the_mode_says(scene: tuple[Gaussians, Camera], mode: str, channels: int) -> None:
    gaussians, camera = scene
    camera = camera.resized(40, 24)
    generator = torch.Generator().manual_seed(7)
    features = torch.randn(len(gaussians), channels, generator=generator, dtype=F64)  # negative ones too
    background = torch.randn(1, channels, generator=generator, dtype=F64)
    arguments = {**activated(gaussians), "colors": features}
    images, alphas, _ = rasterization(**arguments, **seen_by(camera), backgrounds=background, render_mode=mode)
    _, splats = project_visible(gaussians, camera)
    index, _ = project_visible(gaussians, camera)
    expected = []
    for first in range(0, channels, 3):
        part = torch.zeros(len(gaussians), 3, dtype=F64)
        part[:, : features[:, first : first + 3].shape[1]] = features[:, first : first + 3]
        behind = torch.zeros(3, dtype=F64)
        behind[: background[0, first : first + 3].shape[0]] = background[0, first : first + 3]
        image, alpha, depth = blend_reference(
            dataclasses.replace(splats, colors=part[index]), camera.width, camera.height, behind
        )
        expected.append(image)
    colour = torch.cat(expected, dim=-1)[..., :channels]
    z = depth if mode in ("D", "RGB+D") else depth / alpha.clamp(min=1e-10)
    want = {"RGB": colour, "D": z[..., None], "ED": z[..., None]}.get(mode, torch.cat([colour, z[..., None]], dim=-1))
    assert_close(images[0], want, rtol=1e-7, atol=1e-9)
    assert_close(alphas[0, ..., 0], alpha, rtol=1e-9, atol=1e-12)


def test_cameras_and_batches_are_as_many_calls(scene: tuple[Gaussians, Camera]) -> None:
    gaussians, _ = scene
    cameras = [random_camera(seed, 37, 29) for seed in range(3)]
    views = seen_by(*cameras)
    one = activated(gaussians)
    images, _, meta = rasterization(**one, **views, sh_degree=1, packed=False)
    assert images.shape == (3, 29, 37, 3)
    assert meta["means2d"].shape == (3, len(gaussians), 2)
    for c, camera in enumerate(cameras):
        alone, _, _ = rasterization(**one, **seen_by(camera), sh_degree=1)
        assert torch.equal(images[c], alone[0])
    twice = {name: torch.stack([tensor, tensor]) for name, tensor in one.items()}
    matrices = {name: torch.stack([views[name], views[name]]) for name in ("viewmats", "Ks")}
    batch, alphas, _ = rasterization(**twice, **{**views, **matrices}, sh_degree=1)
    assert batch.shape == (2, 3, 29, 37, 3)
    assert alphas.shape == (2, 3, 29, 37, 1)
    assert torch.equal(batch[1], images)
    per_camera = one["colors"].repeat(3, 1, 1, 1)
    assert torch.equal(rasterization(**{**one, "colors": per_camera}, **views, sh_degree=1)[0], images)


@pytest.mark.parametrize("packed", [False, True])
def test_projected_means_have_gradients_and_magnitudes(scene: tuple[Gaussians, Camera], packed: bool) -> None:
    gaussians, _ = scene
    cameras = [random_camera(seed, 40, 24) for seed in range(2)]
    arguments = {name: tensor.requires_grad_() for name, tensor in activated(gaussians).items()}
    images, _, meta = rasterization(**arguments, **seen_by(*cameras), sh_degree=2, packed=packed, absgrad=True)
    meta["means2d"].retain_grad()
    weights = torch.randn(images.shape, generator=torch.Generator().manual_seed(2), dtype=F64)
    (images * weights).sum().backward()
    for c, camera in enumerate(cameras):
        index, splats = project_visible(gaussians, camera)
        leaf = splats.means2d.detach().requires_grad_()
        magnitudes = torch.zeros_like(leaf, requires_grad=True)
        image, _, _ = blend_reference(
            dataclasses.replace(splats, means2d=leaf), camera.width, camera.height, None, magnitudes
        )
        plain, absolute = torch.autograd.grad((image * weights[c]).sum(), [leaf, magnitudes])
        if packed:
            mine = meta["camera_ids"] == c
            rows = meta["gaussian_ids"][mine]
            got = {name: getattr(meta["means2d"], name)[mine] for name in ("grad", "absgrad")}
        else:
            rows = (meta["radii"][c] > 0).all(dim=-1).nonzero().squeeze(1)
            got = {name: getattr(meta["means2d"], name)[c][rows] for name in ("grad", "absgrad")}
        place = torch.full((len(gaussians),), -1)
        place[index] = torch.arange(len(index))
        assert bool((place[rows] >= 0).all())
        assert len(rows) > 10
        assert_close(got["grad"], plain[place[rows]], rtol=1e-6, atol=1e-10)
        assert_close(got["absgrad"], absolute[place[rows]], rtol=1e-6, atol=1e-10)
        hidden = torch.ones(len(index), dtype=torch.bool)
        hidden[place[rows]] = False
        assert not plain[hidden].any(), "who is not listed has no gradient"


def test_poses_have_gradients(scene: tuple[Gaussians, Camera]) -> None:
    gaussians, camera = scene
    views = seen_by(camera.resized(32, 20))

    def image(viewmats: Tensor) -> Tensor:
        return rasterization(**activated(gaussians), **{**views, "viewmats": viewmats}, sh_degree=1)[0].square().sum()

    pose = views["viewmats"].clone().requires_grad_()
    image(pose).backward()
    assert pose.grad is not None
    for row, column in ((0, 3), (2, 3), (1, 0)):
        step = torch.zeros_like(views["viewmats"])
        step[0, row, column] = 1e-6
        numeric = (image(views["viewmats"] + step) - image(views["viewmats"] - step)).detach() / 2e-6
        assert float(pose.grad[0, row, column]) == pytest.approx(float(numeric), rel=2e-3, abs=1e-4)


def test_planes_cut_the_scene(scene: tuple[Gaussians, Camera]) -> None:
    gaussians, camera = scene
    _, _, meta = rasterization(**activated(gaussians), **seen_by(camera), sh_degree=0)
    middle = float(meta["depths"].median())
    near = rasterization(**activated(gaussians), **seen_by(camera), sh_degree=0, near_plane=middle)[2]
    far = rasterization(**activated(gaussians), **seen_by(camera), sh_degree=0, far_plane=middle)[2]
    assert float(near["depths"].min()) >= middle
    assert float(far["depths"].max()) <= middle
    # The one in the middle lies on both planes.
    assert len(near["depths"]) + len(far["depths"]) >= len(meta["depths"]) - 1


@pytest.mark.parametrize(
    "changes",
    [{"distributed": True}, {"camera_model": "fisheye"}, {"eps2d": 0.1}, {"sparse_grad": True}, {"radius_clip": 3.0},
     {"covars": torch.zeros(60, 3, 3)}, {"render_mode": "XYZ"}, {"rasterize_mode": "blurred"}],
)  # fmt: skip
def test_what_is_not_supported_is_refused_with_a_remedy(
    scene: tuple[Gaussians, Camera], changes: dict[str, Any]
) -> None:
    gaussians, camera = scene
    with pytest.raises(UsageError) as caught:
        rasterization(**activated(gaussians), **seen_by(camera), sh_degree=0, **changes)
    assert caught.value.remedy


@pytest.mark.parametrize("name", ["means", "quats", "scales", "opacities", "colors", "Ks"])
def test_a_shape_that_does_not_fit_is_named(scene: tuple[Gaussians, Camera], name: str) -> None:
    gaussians, camera = scene
    arguments = {**activated(gaussians), **seen_by(camera)}
    arguments[name] = arguments[name][..., :-1]
    with pytest.raises(ValueError, match=r"shape|coefficients"):
        rasterization(**arguments, sh_degree=2)


def test_it_is_found_at_the_top_and_nothing_else_is() -> None:
    assert splatcli.rasterization is rasterization
    with pytest.raises(AttributeError, match="no attribute 'rasterisation'"):
        _ = splatcli.rasterisation  # type: ignore[attr-defined]


def test_opaque_and_flat_gaussians_have_finite_gradients() -> None:
    gaussians, camera = random_scene(5, 12, sh_degree=0)
    arguments = activated(gaussians.map(Tensor.double))
    arguments["opacities"] = torch.ones(12, dtype=F64)
    arguments["scales"][:, 2] = 0.0
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in arguments.items()}
    image, _, _ = rasterization(**leaves, **seen_by(camera), sh_degree=0)
    image.sum().backward()
    assert image.isfinite().all()
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all(), name


class Emitter(torch.nn.Module):
    """A network whose last layer emits all parameters of ``count`` Gaussians, as feed-forward models do."""

    def __init__(self, count: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.codes = torch.nn.Parameter(torch.randn(count, 16, generator=generator))
        self.head = torch.nn.Linear(16, 14)
        with torch.no_grad():
            self.head.weight.copy_(0.3 * torch.randn(14, 16, generator=generator))
            self.head.bias.zero_()

    def forward(self) -> dict[str, Tensor]:
        out = self.head(self.codes)
        return {
            "means": out[:, :3],
            "quats": out[:, 3:7] + torch.tensor([1, 0, 0, 0], dtype=out.dtype),
            "scales": (out[:, 7:10] - 2).exp().to(out.dtype),
            "opacities": out[:, 10].sigmoid(),
            "colors": out[:, 11:14].sigmoid(),
        }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_gaussians_are_computed_in_float32(dtype: torch.dtype, autocast: bool) -> None:
    cameras = seen_by(random_camera(1, 40, 30), dtype=torch.float32)
    background = torch.tensor([[0.2, 0.4, 0.6]])
    weights = torch.randn(1, 30, 40, 3, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        emitted = {name: tensor.to(dtype) for name, tensor in Emitter(50)().items()}
    emitted["scales"][0, 0], emitted["opacities"][0], emitted["opacities"][1] = 0.0, 1.0, 0.0
    emitted["viewmats"], emitted["backgrounds"] = cameras["viewmats"].to(dtype), background.to(dtype)

    def outcome(inputs: dict[str, Tensor], enabled: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
        leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in inputs.items()}
        with torch.autocast("cpu", dtype=dtype, enabled=enabled):
            images, alphas, meta = rasterization(**{**cameras, **leaves}, render_mode="RGB+ED", packed=False)
        ((images[..., :3] * weights).sum() + images[..., 3].mean() + alphas.square().sum()).backward()
        found = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        assert found.keys() == leaves.keys()
        return [images.detach(), alphas.detach(), meta["means2d"].grad], found

    half, gradients = outcome(emitted, autocast)
    full, expected = outcome({name: tensor.float() for name, tensor in emitted.items()}, False)
    for got, want in zip(half, full, strict=True):
        assert got.dtype == torch.float32
        assert got.isfinite().all()
        assert torch.equal(got, want)
    for name, gradient in gradients.items():
        assert gradient.dtype == dtype, name
        assert gradient.isfinite().all(), name
        assert torch.equal(gradient, expected[name].to(dtype)), name
    assert all(bool(gradients[name].any()) for name in emitted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_network_under_autocast_trains_with_a_grad_scaler_and_clipping(dtype: torch.dtype) -> None:
    cameras = seen_by(random_camera(1, 40, 30), dtype=torch.float32)
    with torch.no_grad():
        target = rasterization(**Emitter(50)(), **cameras)[0].flip(2)
    torch.manual_seed(5)
    network = Emitter(50)
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
    # So large a first scale that gradients are not finite in half precision: those steps have to be skipped.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, backoff_factor=2.0**-10, growth_interval=1000)
    losses, skipped = [], 0
    for _ in range(40):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            emitted = network()
            assert emitted["means"].dtype == dtype, "the network has to emit half precision"
            images, _, _ = rasterization(**emitted, **cameras)
            loss = torch.nn.functional.mse_loss(images, target, reduction="sum")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 0.1)
        before, scale = [p.detach().clone() for p in network.parameters()], scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        moved = [not torch.equal(p, b) for p, b in zip(network.parameters(), before, strict=True)]
        if scaler.get_scale() < scale:
            skipped += 1
            assert not norm.isfinite()
            assert not any(moved), "a step with gradients that are not finite is skipped"
            continue
        assert norm.isfinite()
        assert all(moved)
        losses.append(float(loss.detach()))
    assert skipped >= 1
    assert len(losses) >= 20
    assert losses[-1] < 0.7 * losses[0]
    assert all(p.isfinite().all() for p in network.parameters())
