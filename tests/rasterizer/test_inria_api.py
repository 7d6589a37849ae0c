"""diff_gaussian_rasterization's class gives what rasterization() gives, in its own conventions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from splatcli.errors import UsageError
from splatcli.gaussians import Gaussians
from splatcli.rasterizer.gsplat_api import rasterization
from splatcli.rasterizer.gsplat_ops import fully_fused_projection, quat_scale_to_covar_preci
from splatcli.rasterizer.inria_api import NEAR, GaussianRasterizationSettings, GaussianRasterizer
from splatcli.scene.camera import Camera
from tests.native.cases import NEEDS_COMPILER
from tests.rasterizer.scenes import random_scene

pytestmark = NEEDS_COMPILER

WIDTH, HEIGHT = 61, 45


def scene() -> tuple[dict[str, Tensor], Camera]:
    """Activated parameters by their names in the interface, with gradients, and a camera off its image's middle."""
    raw, camera = random_scene(11, 90, width=WIDTH, height=HEIGHT, sh_degree=2, scale=0.15)
    given = {
        "means3D": raw.means,
        "scales": raw.log_scales.exp(),
        "rotations": torch.nn.functional.normalize(raw.quats),
        "opacities": raw.logit_opacities.sigmoid()[:, None],
        "shs": torch.cat([raw.sh0[:, None], raw.shN], dim=1),
    }
    given = {name: tensor.detach().clone().requires_grad_() for name, tensor in given.items()}
    return given, replace(camera, cx=27.0, cy=25.5)


def settings_of(camera: Camera, **changes: Any) -> GaussianRasterizationSettings:
    """As the original program makes them, with a projection matrix for row vectors."""
    world_to_camera = torch.from_numpy(camera.viewmat).float().T.contiguous()
    near, far = 0.01, 100.0
    projection = torch.zeros(4, 4)
    projection[0, 0], projection[1, 1] = 2 * camera.fx / camera.width, 2 * camera.fy / camera.height
    projection[0, 2], projection[1, 2] = 2 * camera.cx / camera.width - 1, 2 * camera.cy / camera.height - 1
    projection[2, 2], projection[2, 3], projection[3, 2] = far / (far - near), -far * near / (far - near), 1.0
    made = {
        "image_height": camera.height,
        "image_width": camera.width,
        "tanfovx": 0.5 * camera.width / camera.fx,
        "tanfovy": 0.5 * camera.height / camera.fy,
        "bg": torch.tensor([0.3, 0.1, 0.8]),
        "scale_modifier": 1.0,
        "viewmatrix": world_to_camera,
        "projmatrix": world_to_camera @ projection.T,
        "sh_degree": 2,
        "campos": torch.from_numpy(camera.center).float(),
        "prefiltered": False,
        "debug": False,
    }
    return GaussianRasterizationSettings(**{**made, **changes})


def gsplats(given: dict[str, Tensor], camera: Camera, **changes: Any) -> tuple[Tensor, dict[str, Any]]:
    """The image [3, H, W] and meta of rasterization()."""
    arguments = {
        "means": given["means3D"],
        "quats": given["rotations"],
        "scales": given["scales"],
        "opacities": given["opacities"][:, 0],
        "colors": given.get("shs"),
        "viewmats": torch.from_numpy(camera.viewmat).float()[None],
        "Ks": torch.from_numpy(camera.K).float()[None],
        "width": camera.width,
        "height": camera.height,
        "near_plane": NEAR,
        "sh_degree": 2,
        "backgrounds": torch.tensor([[0.3, 0.1, 0.8]]),
        "packed": False,
    }
    images, _, meta = rasterization(**{**arguments, **changes})
    return images[0].permute(2, 0, 1), meta


def weights(image: Tensor) -> Tensor:
    return torch.rand(image.shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("antialiasing", [False, True])
def test_image_and_gradients_are_those_of_rasterization(antialiasing: bool) -> None:
    given, camera = scene()
    screen = torch.zeros_like(given["means3D"], requires_grad=True) + 0
    screen.retain_grad()
    image, radii, inverse = GaussianRasterizer(settings_of(camera, antialiasing=antialiasing))(means2D=screen, **given)
    (image * weights(image)).sum().backward()
    got = {name: tensor.grad for name, tensor in given.items()}
    given, _ = scene()
    mode = "antialiased" if antialiasing else "classic"
    expected, meta = gsplats(given, camera, rasterize_mode=mode)
    (expected * weights(expected)).sum().backward()
    assert_close(image, expected, rtol=0, atol=2e-6)
    for name, tensor in given.items():
        assert tensor.grad is not None
        assert_close(got[name], tensor.grad, rtol=1e-4, atol=1e-5 * float(tensor.grad.abs().max()))
    half = torch.tensor([0.5 * WIDTH, 0.5 * HEIGHT])
    assert screen.grad is not None
    v_means2d = meta["means2d"].grad[0] * half
    assert_close(screen.grad[:, :2], v_means2d, rtol=1e-4, atol=1e-5 * float(v_means2d.abs().max()))
    assert not screen.grad[:, 2].any()
    assert (radii.dtype, radii.shape) == (torch.int32, (90,))
    assert (radii > 0).equal((meta["radii"][0] > 0).all(dim=1))
    assert 0 < int((radii > 0).sum()) < 90
    assert inverse.shape == (1, HEIGHT, WIDTH)


def test_radii_are_three_standard_deviations() -> None:
    given, camera = scene()
    with torch.no_grad():
        _, radii = GaussianRasterizer(settings_of(camera))(means2D=torch.zeros(90, 3), **given)
        _, _, _, conics, _ = fully_fused_projection(
            given["means3D"], None, given["rotations"], given["scales"],
            torch.from_numpy(camera.viewmat).float()[None], torch.from_numpy(camera.K).float()[None], WIDTH, HEIGHT,
            near_plane=NEAR,
        )  # fmt: skip
    shown = radii > 0
    matrices = torch.stack([conics[0][:, :2], conics[0][:, 1:]], dim=1)[shown].double()
    sigma = torch.linalg.eigvalsh(torch.linalg.inv(matrices))[:, 1].sqrt()
    assert (radii[shown] - 3 * sigma).min() > -1e-3
    assert (radii[shown] - 3 * sigma).max() < 1 + 1e-3


def test_inverse_depth_is_a_channel_with_a_gradient() -> None:
    given, camera = scene()
    settings = settings_of(camera, antialiasing=False)
    _, _, inverse = GaussianRasterizer(settings)(means2D=torch.zeros(90, 3), **given)
    (inverse * weights(inverse)).sum().backward()
    got = {name: tensor.grad for name, tensor in given.items()}
    given, _ = scene()
    rotation, move = torch.from_numpy(camera.viewmat).float().split([3, 1], dim=1)
    z = (given["means3D"] @ rotation[2] + move[2])[:, None]
    expected, _ = gsplats(
        given, camera, colors=torch.where(z > NEAR, 1 / z, 0.0), sh_degree=None, backgrounds=torch.zeros(1, 1)
    )
    (expected * weights(expected)).sum().backward()
    assert_close(inverse, expected, rtol=0, atol=2e-6)
    for name, tensor in given.items():
        if name == "shs":
            assert got[name] is None or not got[name].any()
            continue
        assert tensor.grad is not None
        assert_close(got[name], tensor.grad, rtol=1e-4, atol=1e-5 * float(tensor.grad.abs().max()))


def test_colours_and_a_scale_modifier_are_taken() -> None:
    given, camera = scene()
    colours = torch.rand(90, 3, generator=torch.Generator().manual_seed(2)) - 0.2
    del given["shs"]
    with torch.no_grad():
        image, _ = GaussianRasterizer(settings_of(camera, scale_modifier=0.5))(
            means2D=torch.zeros(90, 3), colors_precomp=colours, **given
        )
        smaller = {**given, "scales": 0.5 * given["scales"]}
        expected, _ = gsplats(smaller, camera, colors=colours, sh_degree=None)
    assert_close(image, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("antialiasing", [None, True])
def test_covariances_give_what_scales_and_rotations_give(antialiasing: bool | None) -> None:
    found = []
    for by_covariances in (False, True):
        given, camera = scene()
        screen = torch.zeros(90, 3, requires_grad=True)
        shapes = dict(given)
        if by_covariances:
            scales, quats = shapes.pop("scales"), shapes.pop("rotations")
            covariances, _ = quat_scale_to_covar_preci(quats, scales, compute_preci=False)
            rows, columns = torch.triu_indices(3, 3)
            shapes["cov3D_precomp"] = covariances[:, rows, columns]
        result = GaussianRasterizer(settings_of(camera, antialiasing=antialiasing))(means2D=screen, **shapes)
        sum((part * weights(part)).sum() for part in result if part.is_floating_point()).backward()
        image, radii, *inverse = result
        found.append([radii, image, *inverse, screen.grad, *(tensor.grad for tensor in given.values())])
    # The kernels leave out more of those whose boxes touch the image, and that reach no block of its pixels.
    one, other = (radii for radii, *_ in found)
    shown = (one > 0) & (other > 0)
    assert one[shown].equal(other[shown])
    assert int(shown.sum()) > 30
    assert int(((one > 0) & ~shown).sum()) == 0
    for ours, theirs in zip(found[0][1:], found[1][1:], strict=True):
        scale = float(theirs.detach().abs().max())
        assert scale > 0
        assert_close(ours, theirs, rtol=1e-3, atol=2e-5 * scale)


def test_batched_matrices_half_precision_and_no_means2d_are_taken() -> None:
    """As SplaTAM's programs and networks under autocast have them."""
    given, camera = scene()
    settings = settings_of(camera)
    batched = settings._replace(viewmatrix=settings.viewmatrix[None], projmatrix=settings.projmatrix[None])
    with torch.no_grad():
        image, _ = GaussianRasterizer(settings)(means2D=torch.zeros(90, 3), **given)
        assert GaussianRasterizer(batched)(means2D=None, **given)[0].equal(image)
        half = {name: tensor.half() for name, tensor in given.items()}
        assert_close(GaussianRasterizer(settings)(means2D=None, **half)[0], image, rtol=0, atol=0.02)


def test_a_lower_degree_is_rendered_and_an_image_without_gaussians_is_the_background() -> None:
    given, camera = scene()
    with torch.no_grad():
        image, _ = GaussianRasterizer(settings_of(camera, sh_degree=1))(means2D=torch.zeros(90, 3), **given)
        assert_close(image, gsplats(given, camera, sh_degree=1)[0], rtol=0, atol=2e-6)
        nothing = {name: tensor[:0] for name, tensor in given.items()}
        image, radii = GaussianRasterizer(settings_of(camera))(means2D=torch.zeros(0, 3), **nothing)
    assert image.equal(settings_of(camera).bg[:, None, None].expand(3, HEIGHT, WIDTH))
    assert radii.shape == (0,)


def test_points_beyond_the_near_plane_are_marked() -> None:
    _, camera = scene()
    points = torch.from_numpy(camera.center + np.outer([-1.0, 0.19, 0.21, 50.0], camera.viewmat[2, :3])).float()
    assert GaussianRasterizer(settings_of(camera)).markVisible(points).tolist() == [False, False, True, True]


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"shs": None}, UsageError, "give shs or colors_precomp"),
        ({"colors_precomp": torch.zeros(90, 3)}, UsageError, "give shs or colors_precomp"),
        ({"scales": None}, UsageError, "give scales and rotations"),
        ({"cov3D_precomp": torch.zeros(90, 6)}, UsageError, "give scales and rotations, or cov3D_precomp"),
        ({"rotations": torch.zeros(90, 3)}, ValueError, r"rotations has shape \(90, 3\), not \(90, 4\)"),
        ({"shs": torch.zeros(90, 3)}, ValueError, r"shs has shape \(90, 3\), not \(90, K, 3\)"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    given, camera = scene()
    with pytest.raises(error, match=text):
        GaussianRasterizer(settings_of(camera))(**{"means2D": torch.zeros(90, 3), **given, **changes})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"viewmatrix": torch.from_numpy(np.arange(16.0).reshape(4, 4))}, "viewmatrix is no transposed matrix"),
        ({"projmatrix": torch.eye(4)}, "no perspective camera"),
        ({"projmatrix": torch.zeros(2, 4, 4)}, r"projmatrix has shape \(2, 4, 4\), not \(4, 4\)"),
        ({"tanfovx": 2.0}, "projmatrix has focal lengths of"),
    ],
)
def test_matrices_of_no_such_camera_are_refused(changes: dict[str, Any], text: str) -> None:
    given, camera = scene()
    with pytest.raises(ValueError, match=text):
        GaussianRasterizer(settings_of(camera, **changes))(means2D=torch.zeros(90, 3), **given)


def test_float64_is_computed_in_float64() -> None:
    raw, camera = random_scene(11, 12, width=20, height=16, sh_degree=1, scale=0.3)
    raw = Gaussians(*(tensor.double() for _, tensor in raw.items()))
    settings = settings_of(camera, sh_degree=1, bg=torch.zeros(3, dtype=torch.float64), antialiasing=True)

    def images(means: Tensor, scales: Tensor, opacities: Tensor) -> tuple[Tensor, Tensor]:
        image, _, inverse = GaussianRasterizer(settings)(
            means, torch.zeros(12, 3, dtype=torch.float64), opacities, torch.cat([raw.sh0[:, None], raw.shN], dim=1),
            scales=scales, rotations=raw.quats,
        )  # fmt: skip
        return image[:, ::5, ::5], inverse[:, ::5, ::5]

    inputs = (raw.means, raw.log_scales.exp(), 0.8 * raw.logit_opacities.sigmoid()[:, None])
    assert torch.autograd.gradcheck(images, tuple(tensor.requires_grad_() for tensor in inputs), atol=1e-5)
