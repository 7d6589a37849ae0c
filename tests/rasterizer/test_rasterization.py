"""rasterization(): gsplat's call, against gsplat's own results, against render(), and against its documented shapes."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import itertools
import re
import weakref
from types import SimpleNamespace
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
from splatcli.rasterizer.reference import blend_reference, project_visible
from splatcli.rasterizer.rendering import render
from splatcli.scene.camera import Camera, CameraModel
from tests.native.cases import NEEDS_COMPILER
from tests.rasterizer.scenes import CONFORMANCE, of_model, random_camera, random_scene

pytestmark = NEEDS_COMPILER
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
    [{"distributed": True}, {"camera_model": "ftheta"}, {"scales": None}, {"quats": None}, {"render_mode": "XYZ"},
     {"rasterize_mode": "blurred"}, {"with_ut": True},
     {"with_eval3d": True}, {"return_normals": True}, {"global_z_order": False}, {"rays": torch.zeros(1, 6)},
     {"radial_coeffs": torch.zeros(1, 6)}, {"tangential_coeffs": torch.zeros(1, 2)}, {"ftheta_coeffs": object()},
     {"thin_prism_coeffs": torch.zeros(1, 4)}, {"lidar_coeffs": object()}, {"external_distortion_coeffs": object()},
     {"rolling_shutter": SimpleNamespace(name="ROLLING_TOP_TO_BOTTOM")}, {"viewmats_rs": torch.zeros(1, 4, 4)},
     {"extra_signals": torch.zeros(60, 2)}, {"extra_signals_sh_degree": 0}, {"renderer_config": object()},
     {"colors": None}, {"tile_size": 0}],
)  # fmt: skip
def test_what_is_not_supported_is_refused_with_a_remedy(
    scene: tuple[Gaussians, Camera], changes: dict[str, Any]
) -> None:
    gaussians, camera = scene
    with pytest.raises(UsageError) as caught:
        rasterization(**{**activated(gaussians), **seen_by(camera), "sh_degree": 0, **changes})
    assert caught.value.remedy


@pytest.mark.parametrize("changes", [{"eps2d": 0.1}, {"radius_clip": 3.0}, {"covars": torch.eye(3).expand(60, 3, 3)}])
def test_what_several_processes_do_not_render_is_refused(
    scene: tuple[Gaussians, Camera], changes: dict[str, Any]
) -> None:
    gaussians, camera = scene
    group: Any = object()  # it is not asked
    with pytest.raises(UsageError, match=f"{next(iter(changes))}=.* is not supported with distributed=True"):
        rasterization(
            **{**activated(gaussians), **seen_by(camera), "sh_degree": 0, **changes}, distributed=True, group=group
        )


@pytest.mark.parametrize(
    ("changes", "error"),
    [({"eps2d": -0.1}, ValueError), ({"radius_clip": float("nan")}, ValueError), ({"eps2d": "0.3"}, TypeError),
     ({"covars": torch.zeros(60, 6)}, ValueError), ({"covars": [0.0]}, TypeError)],
)  # fmt: skip
def test_a_blur_a_radius_and_covariances_are_checked(
    scene: tuple[Gaussians, Camera], changes: dict[str, Any], error: type[Exception]
) -> None:
    gaussians, camera = scene
    with pytest.raises(error, match=next(iter(changes))):
        rasterization(**{**activated(gaussians), **seen_by(camera), "sh_degree": 0, **changes})


@pytest.mark.parametrize("name", ["means", "quats", "scales", "opacities", "colors", "Ks"])
def test_a_shape_that_does_not_fit_is_named(scene: tuple[Gaussians, Camera], name: str) -> None:
    gaussians, camera = scene
    arguments = {**activated(gaussians), **seen_by(camera)}
    arguments[name] = arguments[name][..., :-1]
    with pytest.raises(ValueError, match=r"shape|coefficients"):
        rasterization(**arguments, sh_degree=2)


def test_colours_in_place_of_coefficients_are_named_with_the_shape_that_fits(scene: tuple[Gaussians, Camera]) -> None:
    arguments: dict[str, Any] = {**activated(scene[0]), **seen_by(scene[1])}
    n = len(scene[0])
    with pytest.raises(ValueError, match=re.escape(f"colors has shape {(n, 3)}, not {(n, 16, 3)} or")):
        rasterization(**{**arguments, "colors": torch.rand(n, 3), "sh_degree": 3})


@pytest.mark.parametrize("with_gradient", [False, True])
def test_a_transposed_pose_is_refused(scene: tuple[Gaussians, Camera], with_gradient: bool) -> None:
    """INRIA's world_view_transform is one; the image would be empty or wrong."""
    arguments: dict[str, Any] = {**activated(scene[0]), **seen_by(scene[1])}
    turned = arguments["viewmats"].detach().clone()
    turned[..., :3, 3] = torch.tensor([0.1, 0.2, 3.0])
    rasterization(**{**arguments, "viewmats": turned.half().float()}, sh_degree=2)
    for wrong in (turned.mT.clone(), 2.0 * turned, torch.zeros_like(turned)):
        with pytest.raises(ValueError, match=r"last row of the camera's viewmat is .*, not \[0, 0, 0, 1\]"):
            rasterization(**{**arguments, "viewmats": wrong.requires_grad_(with_gradient)}, sh_degree=2)


def test_what_is_no_number_is_named(scene: tuple[Gaussians, Camera]) -> None:
    arguments: dict[str, Any] = {**activated(scene[0]), **seen_by(scene[1])}
    wrong = {"width": "64", "height": 64.5, "sh_degree": "3", "near_plane": None, "far_plane": "9"}
    for name, value in wrong.items():
        kind = "integer" if name in ("width", "height", "sh_degree") else "number"
        with pytest.raises(TypeError, match=f"{name} is {value!r}, not an? {kind}"):
            rasterization(**{**arguments, name: value})
    numbers = {
        "width": np.int64(arguments["width"]),
        "sh_degree": np.int32(2),
        "near_plane": np.float32(0.01),
        "far_plane": torch.tensor(1e5),
    }
    rasterization(**{**arguments, **numbers})


@pytest.mark.parametrize(
    "others", [{}, {"eps2d": 0.1}, {"without_cameras": True}], ids=["plain", "in stages", "no camera"]
)
def test_an_image_without_pixels_is_refused(scene: tuple[Gaussians, Camera], others: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {**activated(scene[0]), **seen_by(scene[1]), **others}
    if arguments.pop("without_cameras", False):
        arguments |= {name: arguments[name][:0] for name in ("viewmats", "Ks")}
    for name, size in (("width", 0), ("height", -1)):
        with pytest.raises(ValueError, match=f"^{name} is {size}; an image has at least one pixel"):
            rasterization(**{**arguments, name: size})


def test_what_is_no_tensor_with_numbers_is_named(scene: tuple[Gaussians, Camera]) -> None:
    arguments: dict[str, Any] = {**activated(scene[0]), **seen_by(scene[1])}
    for name in ("means", "quats", "scales", "opacities", "colors", "viewmats", "Ks"):
        tensor = arguments[name].detach()
        others = [(tensor.numpy(), "is a ndarray"), (tensor.to("meta"), "is on meta")]
        others += [(tensor.to_sparse(), "is a sparse tensor"), (tensor.to(torch.complex64), "is torch.complex64")]
        for other, message in others:
            with pytest.raises(TypeError, match=f"{name} {message}"):
                rasterization(**{**arguments, name: other})
    with pytest.raises(ValueError, match=r"viewmats has shape \(4, 4\), not \(\.\.\., C, 4, 4\)"):
        rasterization(**{**arguments, "viewmats": arguments["viewmats"][0]})
    with pytest.raises(ValueError, match=r"means has shape \(3,\)"):
        rasterization(**{**arguments, "means": arguments["means"][0]})


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


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("opacity", [1.0, 1.0 - 2.0**-24, 0.99999])
def test_opacities_at_and_near_1_have_the_gradient_of_those_below(opacity: float, dtype: torch.dtype) -> None:
    """A program that clamps opacities to 0..1 has to be able to lower them again."""
    gaussians, camera = random_scene(5, 12, sh_degree=0)

    def gradient(opacity: float, dtype: torch.dtype) -> Tensor:
        arguments = activated(gaussians.map(lambda tensor: tensor.to(dtype)))
        arguments["opacities"] = torch.full((12,), opacity, dtype=dtype, requires_grad=True)
        image, _, _ = rasterization(**arguments, **seen_by(camera, dtype=dtype), sh_degree=0)
        image.square().sum().backward()
        assert arguments["opacities"].grad is not None
        return arguments["opacities"].grad.double()

    wanted = gradient(0.9999, F64)  # a logit of 9 is exact enough
    assert int((wanted != 0).sum()) == 11  # one is hidden by others
    torch.testing.assert_close(gradient(opacity, dtype), wanted, rtol=0.0, atol=float(0.01 * wanted.abs().max()))


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


# ---- gsplat's call as programs written for it make it ----------------------------------------------------------------

#: gsplat's arguments in their order, and the defaults of those that have one.
REQUIRED = ["means", "quats", "scales", "opacities", "colors", "viewmats", "Ks", "width", "height"]
DEFAULTS = {
    "near_plane": 0.01, "far_plane": 1e10, "radius_clip": 0.0, "eps2d": 0.3, "sh_degree": None, "packed": True,
    "tile_size": None, "backgrounds": None, "render_mode": "RGB", "sparse_grad": False, "absgrad": False,
    "rasterize_mode": "classic", "channel_chunk": 32, "distributed": False, "camera_model": "pinhole",
    "segmented": False, "covars": None, "with_ut": False, "with_eval3d": False, "return_normals": False,
    "global_z_order": True, "rays": None, "radial_coeffs": None, "tangential_coeffs": None, "thin_prism_coeffs": None,
    "ftheta_coeffs": None, "lidar_coeffs": None, "external_distortion_coeffs": None,
    "rolling_shutter": SimpleNamespace(name="GLOBAL"), "viewmats_rs": None, "ut_params": None, "extra_signals": None,
    "extra_signals_sh_degree": None, "renderer_config": None,
}  # fmt: skip


class RendererConfig_MixedBatch:
    """Named as gsplat's class is, of which programs pass an object."""


def test_all_arguments_of_gsplat_have_their_places(scene: tuple[Gaussians, Camera]) -> None:
    parameters = inspect.signature(rasterization).parameters
    positional = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [*REQUIRED, *DEFAULTS]
    assert len(positional) == 43
    defaults = {name: parameters[name].default for name in DEFAULTS}
    assert defaults == DEFAULTS | {"rolling_shutter": "GLOBAL"}
    gaussians, camera = scene
    given = {**activated(gaussians), **seen_by(camera), "colors": torch.rand(len(gaussians), 3, dtype=F64)}
    plain = rasterization(**given)[0]
    assert torch.equal(rasterization(*(given[name] for name in REQUIRED), *DEFAULTS.values())[0], plain)  # type: ignore[arg-type]
    harmless = {"segmented": True, "channel_chunk": 1, "tile_size": 8, "ut_params": object(), "rolling_shutter": None}
    assert torch.equal(rasterization(**given, **harmless, renderer_config=RendererConfig_MixedBatch())[0], plain)


@pytest.mark.parametrize("batch", [(), (2,), (1, 2)])
@pytest.mark.parametrize(
    ("per_view_color", "sh_degree", "mode"),
    [(True, None, "RGB"), (True, None, "RGB+D"), (False, None, "RGB"), (False, None, "RGB+D"), (False, None, "D"),
     (False, 3, "RGB"), (False, 3, "RGB+D")],
)  # fmt: skip
def test_every_combination_that_gsplat_turns_over(
    per_view_color: bool, sh_degree: int | None, mode: str, batch: tuple[int, ...]
) -> None:
    """42 of them with ``packed``: every image is that of its own call, and all inputs get gradients when they ask."""
    n, cameras, generator = 80, 3, torch.Generator().manual_seed(6)

    def random(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=F64)

    inputs: dict[str, Any] = {
        "means": random(*batch, n, 3) + torch.tensor([-0.5, -0.5, 1.0], dtype=F64),
        "quats": random(*batch, n, 4) - 0.5,
        "scales": 0.2 * random(*batch, n, 3),
        "opacities": random(*batch, n),
    }
    if mode == "D":
        inputs["colors"] = None
    elif sh_degree is not None:
        inputs["colors"] = random(n, (sh_degree + 1) ** 2, 3)
    else:
        inputs["colors"] = random(*batch, *([cameras] if per_view_color else []), n, 3)
    views = seen_by(*(random_camera(seed, 30, 20) for seed in range(cameras)))
    views["viewmats"] = torch.eye(4, dtype=F64).expand(*batch, cameras, 4, 4)
    views["Ks"] = views["Ks"].expand(*batch, cameras, 3, 3)
    shared: dict[str, Any] = {
        "sh_degree": sh_degree,
        "render_mode": mode,
        "renderer_config": RendererConfig_MixedBatch(),
    }
    channels = {"RGB": 3, "RGB+D": 4, "D": 1}[mode]
    results = []
    for packed in (True, False):
        with torch.no_grad():
            images, alphas, meta = rasterization(**inputs, **views, **shared, packed=packed)
        assert not images.requires_grad
        assert images.shape == (*batch, cameras, 20, 30, channels)
        assert alphas.shape == (*batch, cameras, 20, 30, 1)
        assert float(alphas.max()) > 0.3
        leaves = {name: t if t is None else t.clone().requires_grad_() for name, t in inputs.items()}
        trained, opaque, meta = rasterization(**leaves, **views, **shared, packed=packed)
        assert trained.requires_grad
        assert torch.equal(trained, images)
        (trained.sum() + opaque.sum()).backward()
        gradients = [leaf.grad for leaf in leaves.values() if leaf is not None]
        for gradient in gradients:
            assert gradient is not None
            assert gradient.isfinite().all()
        assert meta["n_batches"] == len(list(itertools.product(*map(range, batch))))
        results.append([images, alphas, *(g for g in gradients if g is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), "packed is a layout of meta"
    # Each image from a call of its own: reference enough, whose own image the other tests check.
    for at in itertools.product(*map(range, batch)):
        own = {name: None if t is None else t[at] if name != "colors" or sh_degree is None else t
               for name, t in inputs.items()}  # fmt: skip
        for c in range(cameras):
            alone = {"viewmats": views["viewmats"][at][c][None], "Ks": views["Ks"][at][c][None]}
            if per_view_color:
                alone["colors"] = own["colors"][c]
            image, alpha, _ = rasterization(**{**own, **views, **alone, **shared})
            assert torch.equal(results[0][0][at][c], image[0])
            assert torch.equal(results[0][1][at][c], alpha[0])


def test_shared_sh_coefficients_get_the_sum_of_the_gradients() -> None:
    gaussians, _ = random_scene(7, 30, sh_degree=1)
    one = activated(gaussians.map(Tensor.double))
    twice = {name: torch.stack([t, t.flip(0)]) for name, t in one.items() if name != "colors"}
    views = seen_by(random_camera(1, 30, 20))
    matrices = {name: views[name].expand(2, *views[name].shape) for name in ("viewmats", "Ks")}
    shared = one["colors"].clone().requires_grad_()
    repeated = one["colors"].expand(2, -1, -1, -1).clone().requires_grad_()
    images = [rasterization(**twice, **{**views, **matrices}, colors=c, sh_degree=1)[0] for c in (shared, repeated)]
    assert torch.equal(*images)
    for image in images:
        image.square().sum().backward()
    assert shared.grad is not None
    assert repeated.grad is not None
    assert_close(shared.grad, repeated.grad.sum(0), rtol=1e-12, atol=0)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mode", ["RGB", "RGB+ED", "D"])
@pytest.mark.parametrize(("n", "cameras"), [(0, 2), (5, 0), (0, 0)])
def test_no_gaussians_and_no_cameras(n: int, cameras: int, mode: str, packed: bool) -> None:
    gaussians, _ = random_scene(7, 8, sh_degree=0)
    inputs = {name: t[:n].detach().requires_grad_() for name, t in activated(gaussians.map(Tensor.double)).items()}
    views = seen_by(*(random_camera(seed, 30, 20) for seed in range(2)))
    views |= {name: views[name][:cameras] for name in ("viewmats", "Ks")}
    background = torch.rand(cameras, 3, dtype=F64)
    images, alphas, meta = rasterization(
        **inputs, **views, sh_degree=0, backgrounds=background, render_mode=mode, packed=packed, absgrad=True
    )
    channels = {"RGB": 3, "RGB+ED": 4, "D": 1}[mode]
    assert images.shape == (cameras, 20, 30, channels)
    assert alphas.shape == (cameras, 20, 30, 1)
    assert not alphas.any()
    if mode != "D":
        assert torch.equal(images[..., :3], background[:, None, None].expand(-1, 20, 30, -1))
    assert meta["means2d"].shape == ((0, 2) if packed else (cameras, n, 2))
    assert meta["isect_offsets"].shape == (cameras, 2, 2)
    assert len(meta["isect_ids"]) == 0
    (images.sum() + alphas.sum()).backward()
    for name, leaf in inputs.items():
        if mode != "D" or name != "colors":
            assert leaf.grad is not None, name
            assert leaf.grad.shape == leaf.shape
            assert not leaf.grad.any()


def test_the_sign_of_a_scale_changes_nothing_but_the_sign_of_its_gradient(scene: tuple[Gaussians, Camera]) -> None:
    gaussians, camera = scene
    results = []
    signs = torch.where(torch.arange(len(gaussians))[:, None] % 2 == 0, -1.0, 1.0).double()
    for sign in (torch.ones_like(signs), signs):
        arguments = activated(gaussians)
        scales = (arguments.pop("scales") * sign).requires_grad_()
        image, _, _ = rasterization(**arguments, scales=scales, **seen_by(camera), sh_degree=1)
        image.square().sum().backward()
        assert scales.grad is not None
        results.append((image.detach(), scales.grad * sign))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert bool(results[0][1].any())


def test_outputs_need_no_gradient_when_no_input_does(scene: tuple[Gaussians, Camera]) -> None:
    gaussians, camera = scene
    for packed in (False, True):
        images, alphas, meta = rasterization(**activated(gaussians), **seen_by(camera), sh_degree=1, packed=packed)
        assert not images.requires_grad
        assert not alphas.requires_grad
        assert not any(value.requires_grad for value in meta.values() if isinstance(value, Tensor))
    arguments = activated(gaussians)
    arguments["colors"].requires_grad_()
    images, _, meta = rasterization(**arguments, **seen_by(camera), sh_degree=1)
    assert images.requires_grad
    assert not meta["means2d"].requires_grad, "colours do not move them"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("channels", [3, 5])
def test_projected_means_are_part_of_the_graph(scene: tuple[Gaussians, Camera], packed: bool, channels: int) -> None:
    gaussians, _ = scene
    views = seen_by(*(random_camera(seed, 40, 24) for seed in range(2)))
    generator = torch.Generator().manual_seed(8)
    inputs = activated(gaussians) | {"colors": torch.rand(len(gaussians), channels, generator=generator, dtype=F64)}

    def outcome(weight: float, pull: float) -> tuple[list[Tensor], Tensor]:
        """Gradients of means and poses, and of meta's means2d, of a loss in the images and in the projected means."""
        means, poses = inputs["means"].clone().requires_grad_(), views["viewmats"].clone().requires_grad_()
        images, _, meta = rasterization(
            **{**inputs, **views, "means": means, "viewmats": poses}, packed=packed, absgrad=True
        )
        means2d = meta["means2d"]
        assert not means2d.is_leaf
        loss = weight * images.square().sum() + pull * 0.5 * (means2d - 7.0).square().sum()
        (alone,) = torch.autograd.grad(loss, means2d, retain_graph=True)
        means2d.retain_grad()
        means2d.grad = None  # which any pass leaves there
        loss.backward()
        assert torch.equal(alone, means2d.grad)
        assert means.grad is not None
        assert poses.grad is not None
        assert means2d.absgrad.shape == means2d.shape
        return [means.grad, poses.grad], means2d.grad

    images, images2d = outcome(1.0, 0.0)
    pulled, pulled2d = outcome(0.0, 1.0)
    both, both2d = outcome(1.0, 1.0)
    assert bool(images2d.any())
    # Through plain torch: where the points lie that are seen.
    means, poses = inputs["means"].clone().requires_grad_(), views["viewmats"].clone().requires_grad_()
    seen = rasterization(**{**inputs, **views}, packed=False)[2]
    points = means @ poses[:, :3, :3].mT + poses[:, None, :3, 3]
    uvw = points @ views["Ks"].mT
    at = (uvw[..., :2] / uvw[..., 2:])[(seen["radii"] > 0).all(-1)]
    assert_close(at, seen["means2d"][(seen["radii"] > 0).all(-1)], rtol=1e-9, atol=1e-9)
    expected = torch.autograd.grad(0.5 * (at - 7.0).square().sum(), [means, poses])
    for got, want in zip(pulled, expected, strict=True):
        assert_close(got[..., :3, :], want[..., :3, :], rtol=1e-9, atol=1e-9)
    # Twice the same backward passes may not count anything twice.
    for a, b, c in zip(images, pulled, both, strict=True):
        assert_close(c, a + b, rtol=1e-9, atol=1e-9)
    assert_close(both2d, images2d + pulled2d, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("model", ["ortho", "fisheye"])
def test_other_camera_models_are_rendered_with_gradients(scene: tuple[Gaussians, Camera], model: CameraModel) -> None:
    gaussians, camera = scene
    camera = of_model(camera, model)
    raw = gaussians.map(lambda t: t.detach().clone().requires_grad_())
    shown = render(raw, camera)
    other = gaussians.map(lambda t: t.detach().clone().requires_grad_())
    views = seen_by(camera)
    pose = views.pop("viewmats").requires_grad_()
    images, _, meta = rasterization(
        **activated(other), **views, viewmats=pose, sh_degree=2, camera_model=model, packed=False, render_mode="RGB+D"
    )
    assert_close(images[0], torch.cat([shown.image, shown.depth[..., None]], dim=-1), rtol=1e-9, atol=1e-12)
    visible = (meta["radii"][0] > 0).all(dim=-1)
    assert int(visible.sum()) > 10
    u, v, z = camera.project(gaussians.means.numpy())
    at = torch.from_numpy(np.stack([u, v], axis=1))
    assert_close(meta["means2d"][0][visible].detach(), at[visible], rtol=1e-9, atol=1e-9)
    assert_close(meta["depths"][0][visible], torch.from_numpy(z)[visible])
    (images[..., :3].square().sum() + images[..., 3].sum()).backward()
    (shown.image.square().sum() + shown.depth.sum()).backward()
    for (name, mine), (_, theirs) in zip(raw.items(), other.items(), strict=True):
        assert_close(theirs.grad, mine.grad, rtol=1e-7, atol=1e-12, msg=name)

    def projected(means: Tensor, pose: Tensor) -> Tensor:
        """A loss in the projected means alone."""
        parts = activated(gaussians) | {"means": means}
        seen = rasterization(**parts, **views, viewmats=pose, sh_degree=2, camera_model=model, packed=False)[2]
        return seen["means2d"].square().sum()

    inputs = [gaussians.means[:6].clone().requires_grad_(), pose.detach().clone().requires_grad_()]
    rest = gaussians.means[6:]
    check = torch.autograd.gradcheck(
        lambda means, rows: projected(torch.cat([means, rest]), torch.cat([rows[:, :3], pose.detach()[:, 3:]], dim=1)),
        inputs, eps=1e-6, atol=1e-4,
    )  # fmt: skip
    assert check


@pytest.mark.parametrize("packed", [False, True])
def test_meta_lists_the_tiles_that_gaussians_meet(scene: tuple[Gaussians, Camera], packed: bool) -> None:
    gaussians, _ = scene
    n, size = len(gaussians), 8
    views = seen_by(*(random_camera(seed, 41, 27) for seed in range(2)))
    _, _, meta = rasterization(**activated(gaussians), **views, sh_degree=0, packed=packed, tile_size=size)
    across, down = 6, 4
    assert (meta["tile_width"], meta["tile_height"], meta["tile_size"]) == (across, down, size)
    expected, per = [], []
    rows = [(c, g) for c in range(2) for g in range(n)]
    if packed:
        rows = list(zip(meta["camera_ids"].tolist(), meta["gaussian_ids"].tolist(), strict=True))
    flat = {name: meta[name].reshape(len(rows), -1) for name in ("means2d", "radii", "depths")}
    for row, (camera, _) in enumerate(rows):
        (x, y), (rx, ry) = flat["means2d"][row].tolist(), flat["radii"][row].tolist()
        found = [
            (camera, ty * across + tx, np.float32(flat["depths"][row, 0]).item(), row)
            for ty in range(down)
            for tx in range(across)
            if rx > 0 and ry > 0
            and x - rx < (tx + 1) * size and x + rx > tx * size
            and y - ry < (ty + 1) * size and y + ry > ty * size
        ]  # fmt: skip
        per.append(len(found))
        expected += found
    expected.sort()
    assert len(expected) > 50
    assert meta["tiles_per_gauss"].shape == meta["radii"].shape[:-1]
    assert meta["tiles_per_gauss"].flatten().tolist() == per
    bits = (across * down).bit_length()
    ids = meta["isect_ids"]
    assert ids.dtype == torch.int64
    assert [(i >> (32 + bits), (i >> 32) % (1 << bits)) for i in ids.tolist()] == [e[:2] for e in expected]
    depths = (ids & 0xFFFFFFFF).int().view(torch.float32)
    assert depths.tolist() == [e[2] for e in expected]
    assert meta["flatten_ids"].tolist() == [e[3] for e in expected]
    assert meta["flatten_ids"].dtype == meta["isect_offsets"].dtype == torch.int32
    begins = [sum(e[:2] < (c, t) for e in expected) for c in range(2) for t in range(across * down)]
    assert meta["isect_offsets"].shape == (2, down, across)
    assert meta["isect_offsets"].flatten().tolist() == begins


KEYS = {
    "batch_ids", "camera_ids", "gaussian_ids", "radii", "means2d", "depths", "conics", "opacities", "tile_width",
    "tile_height", "tiles_per_gauss", "isect_ids", "flatten_ids", "isect_offsets", "width", "height", "tile_size",
    "n_batches", "n_cameras",
}  # fmt: skip


def test_meta_has_the_keys_of_gsplat_however_it_is_read(scene: tuple[Gaussians, Camera]) -> None:
    gaussians, camera = scene

    def fresh() -> dict[str, Any]:
        return rasterization(**activated(gaussians), **seen_by(camera), sh_degree=0, packed=False)[2]

    listed = fresh()["isect_ids"]
    assert len(listed) > 0
    ways = [lambda m: dict(m), lambda m: {**m}, lambda m: m.copy(), lambda m: dict(m.items()), lambda m: m | {},
            lambda m: dict(zip(m.keys(), m.values(), strict=True)), lambda m: {k: m[k] for k in m},
            lambda m: {k: m.get(k) for k in KEYS}, lambda m: {**m, "isect_ids": m.pop("isect_ids")}]  # fmt: skip
    for number, way in enumerate(ways):
        got = way(fresh())
        assert got.keys() == KEYS, number
        assert torch.equal(got["isect_ids"], listed), number
    assert isinstance(fresh(), dict)
    antialiased = rasterization(
        **activated(gaussians), **seen_by(camera), sh_degree=0, packed=False, rasterize_mode="antialiased"
    )[2]
    seen = (fresh()["radii"] > 0).all(-1) & (antialiased["radii"] > 0).all(-1)
    ratio = (antialiased["opacities"] / fresh()["opacities"])[seen]
    assert bool((ratio < 1.0).all()), "the blur's area is taken off"
    cov = torch.linalg.inv(fresh()["conics"][..., [0, 1, 1, 2]].reshape(*seen.shape, 2, 2)[seen])
    without = cov - 0.3 * torch.eye(2, dtype=F64)
    expected = (torch.linalg.det(without) / torch.linalg.det(cov)).clamp(min=0.0).sqrt()
    assert_close(ratio, expected, rtol=1e-4, atol=1e-6)


def test_a_step_leaves_nothing_behind(scene: tuple[Gaussians, Camera]) -> None:
    gaussians, camera = scene
    arguments = {name: tensor.requires_grad_() for name, tensor in activated(gaussians).items()}
    images, _, meta = rasterization(**arguments, **seen_by(camera), sh_degree=1, absgrad=True, packed=True)
    images.sum().backward()
    watched = weakref.ref(meta["means2d"])
    del images, meta
    gc.collect()
    assert watched() is None
