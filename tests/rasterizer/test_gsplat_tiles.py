"""gsplat's stages behind the projection: against plain torch, against rasterization(), and by finite differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from splatcli import fully_fused_projection, rasterization, spherical_harmonics
from splatcli.gaussians import Gaussians
from splatcli.rasterizer.gsplat_ops import quat_scale_to_covar_preci
from splatcli.rasterizer.gsplat_tiles import (
    accumulate,
    isect_offset_encode,
    isect_tiles,
    rasterize_to_indices_in_range,
    rasterize_to_pixels,
)
from splatcli.scene.camera import MODELS, Camera, CameraModel
from tests.native.cases import NEEDS_COMPILER
from tests.rasterizer.scenes import of_model, random_camera, random_gaussians
from tests.rasterizer.test_rasterization import activated, seen_by

pytestmark = NEEDS_COMPILER
F64 = torch.float64
WIDTH, HEIGHT = 37, 29  # three by two tiles, neither side a multiple of 16
GRID = (3, 2)


@pytest.fixture
def scene() -> tuple[Gaussians, list[Camera]]:
    return random_gaussians(5, 40, sh_degree=1, dtype=F64), [random_camera(seed, WIDTH, HEIGHT) for seed in range(2)]


#: The kernels' exponential has the accuracy of float32, whatever the type.
CLOSE: dict[str, float] = {"rtol": 1e-5, "atol": 5e-6}


def blended(
    means2d: Tensor, conics: Tensor, colors: Tensor, opacities: Tensor, depths: Tensor
) -> tuple[Tensor, Tensor]:
    """One image in plain torch: the equations of docs/math.md 6, every Gaussian in every pixel."""
    y, x = torch.meshgrid(torch.arange(HEIGHT) + 0.5, torch.arange(WIDTH) + 0.5, indexing="ij")
    left, done = torch.ones(HEIGHT, WIDTH, dtype=F64), torch.zeros(HEIGHT, WIDTH, dtype=torch.bool)
    image = torch.zeros(HEIGHT, WIDTH, colors.shape[1], dtype=F64)
    for k in torch.argsort(depths, stable=True).tolist():
        dx, dy = x - means2d[k, 0], y - means2d[k, 1]
        a, b, c = conics[k]
        alpha = (opacities[k] * (-0.5 * (a * dx * dx + c * dy * dy) - b * dx * dy).exp()).clamp(max=0.999)
        alpha = torch.where((alpha >= 1 / 255) & (depths[k] > 0), alpha, 0.0)
        done = done | (left * (1 - alpha) <= 1e-4)
        alpha = torch.where(done, 0.0, alpha)
        image = image + (left * alpha)[..., None] * colors[k]
        left = left * (1 - alpha)
    return image, 1 - left


def stages(gaussians: Gaussians, cameras: list[Camera], **options: Any) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Project and list: (means2d, conics, opacities, depths, radii; where tiles begin, what they list)."""
    given = activated(gaussians)
    shapes = (given["means"], None, given["quats"], given["scales"])
    radii, means2d, depths, conics, _ = fully_fused_projection(
        *shapes, **seen_by(*cameras), opacities=given["opacities"], **options
    )
    _, ids, rows = isect_tiles(means2d, radii, depths, 16, *GRID)
    opacities = given["opacities"].expand(depths.shape)
    values = {"means2d": means2d, "conics": conics, "opacities": opacities, "depths": depths, "radii": radii}
    return values, isect_offset_encode(ids, len(cameras), *GRID), rows


@pytest.mark.parametrize("channels", [1, 3, 7])
def test_pixels_and_gradients_are_those_of_plain_torch(scene: tuple[Gaussians, list[Camera]], channels: int) -> None:
    values, offsets, rows = stages(*scene, eps2d=0.7)
    generator = torch.Generator().manual_seed(2)
    names = ("means2d", "conics", "opacities")
    inputs = {name: values[name].detach().clone() for name in names}
    inputs["colors"] = torch.randn(2, 40, channels, generator=generator, dtype=F64)
    inputs["backgrounds"] = torch.rand(2, channels, generator=generator, dtype=F64)
    weights = torch.randn(2, HEIGHT, WIDTH, channels, generator=generator, dtype=F64)
    results = []
    for native in (True, False):
        leaves = {name: value.clone().requires_grad_() for name, value in inputs.items()}
        if native:
            images, alphas = rasterize_to_pixels(
                leaves["means2d"], leaves["conics"], leaves["colors"], leaves["opacities"], WIDTH, HEIGHT, 16, offsets,
                rows, leaves["backgrounds"],
            )  # fmt: skip
        else:
            parts = [
                blended(
                    *(leaves[name][c] for name in ("means2d", "conics", "colors", "opacities")), values["depths"][c]
                )
                for c in range(2)
            ]
            alphas = torch.stack([alpha for _, alpha in parts])[..., None]
            images = torch.stack([image for image, _ in parts])
            images = images + (1 - alphas) * leaves["backgrounds"][:, None, None]
        ((images * weights).sum() + (alphas[..., 0] * weights[..., 0]).sum()).backward()  # type: ignore[no-untyped-call]
        results.append([images.detach(), alphas.detach(), *(leaf.grad for leaf in leaves.values())])
    assert float(results[0][1].max()) > 0.9
    for got, expected in zip(*results, strict=True):
        assert got is not None
        assert float(got.abs().max()) > 0.0
        assert_close(got, expected, rtol=1e-5, atol=5e-6 * max(1.0, float(expected.abs().max())))


def test_packed_rows_and_other_layouts_give_the_same_bits(scene: tuple[Gaussians, list[Camera]]) -> None:
    values, offsets, rows = stages(*scene)
    colors = torch.rand(2, 40, 4, generator=torch.Generator().manual_seed(1), dtype=F64)
    dense = [values["means2d"], values["conics"], colors, values["opacities"]]
    size = (WIDTH, HEIGHT, 16)
    whole = rasterize_to_pixels(*dense, *size, offsets, rows)
    seen = (values["radii"] > 0).all(dim=-1)
    image_ids, gaussian_ids = seen.nonzero().unbind(dim=1)
    assert 20 < len(image_ids) < 80
    per, ids, packed_rows = isect_tiles(
        values["means2d"][seen], values["radii"][seen], values["depths"][seen], 16, *GRID,
        packed=True, n_images=2, image_ids=image_ids, gaussian_ids=gaussian_ids,
    )  # fmt: skip
    assert per.shape == image_ids.shape
    assert torch.equal(isect_offset_encode(ids, 2, *GRID), offsets)
    packed = rasterize_to_pixels(*(t[seen] for t in dense), *size, offsets, packed_rows, packed=True)
    batch = rasterize_to_pixels(
        *(t[:, None] for t in dense), *size, offsets[:, None], rows, masks=torch.ones_like(offsets[:, None]) > 0
    )
    for image, alpha in (packed, (batch[0][:, 0], batch[1][:, 0])):
        assert torch.equal(image, whole[0])
        assert torch.equal(alpha, whole[1])
    single = rasterize_to_pixels(*(t.float() for t in dense), *size, offsets, rows)[0]
    assert single.dtype == torch.float32
    assert_close(single.double(), whole[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [4, 8])
def test_lists_of_smaller_tiles_give_the_same_pixels_and_gradients(
    scene: tuple[Gaussians, list[Camera]], size: int
) -> None:
    values, offsets, rows = stages(*scene)
    inputs = [values["means2d"], values["conics"], torch.rand(2, 40, 3, dtype=F64), values["opacities"]]
    weights = torch.randn(2, HEIGHT, WIDTH, 3, generator=torch.Generator().manual_seed(5), dtype=F64)
    grid = (-(-WIDTH // size), -(-HEIGHT // size))
    _, ids, small_rows = isect_tiles(values["means2d"], values["radii"], values["depths"], size, *grid)
    small = isect_offset_encode(ids, 2, *grid)
    masks = torch.ones_like(small, dtype=torch.bool)
    masks[:, 0, 1] = False
    results, masked = [], torch.empty(0)
    for tile_size, starts, listed in ((16, offsets, rows), (size, small, small_rows)):
        leaves = [t.detach().clone().requires_grad_() for t in inputs]
        image, alpha = rasterize_to_pixels(*leaves, WIDTH, HEIGHT, tile_size, starts, listed)
        (image * weights).sum().backward()  # type: ignore[no-untyped-call]
        results.append([image.detach(), alpha.detach(), *(leaf.grad for leaf in leaves)])
        if tile_size == size:
            masked = rasterize_to_pixels(*inputs, WIDTH, HEIGHT, tile_size, starts, listed, masks=masks)[0]
    assert torch.equal(results[1][0], results[0][0])
    assert torch.equal(results[1][1], results[0][1])
    for got, expected in zip(results[1][2:], results[0][2:], strict=True):
        assert got is not None
        assert_close(got, expected, rtol=1e-9, atol=1e-10)
    assert float(masked[:, :size, size : 2 * size].abs().max()) == 0.0
    kept = torch.ones(HEIGHT, WIDTH, dtype=torch.bool)
    kept[:size, size : 2 * size] = False
    assert torch.equal(masked[:, kept], results[0][0][:, kept])


@pytest.mark.parametrize("size", [8, 16])
def test_lists_of_pixels_blend_to_the_same_images_and_gradients(
    scene: tuple[Gaussians, list[Camera]], size: int
) -> None:
    values, offsets, rows = stages(*scene)
    inputs = [values["means2d"], values["conics"], values["opacities"], torch.rand(2, 40, 4, dtype=F64)]
    weights = torch.randn(2, HEIGHT, WIDTH, 4, generator=torch.Generator().manual_seed(5), dtype=F64)
    grid = (-(-WIDTH // size), -(-HEIGHT // size))
    _, ids, listed = isect_tiles(values["means2d"], values["radii"], values["depths"], size, *grid)
    tiles = isect_offset_encode(ids, 2, *grid)
    whole, results = torch.ones(2, HEIGHT, WIDTH, dtype=F64), []
    found = rasterize_to_indices_in_range(0, 10**9, whole, *inputs[:3], WIDTH, HEIGHT, size, tiles, listed)
    key = found[2] * HEIGHT * WIDTH + found[1]
    assert bool((key[1:] >= key[:-1]).all())
    for native in (True, False):
        leaves = [t.detach().clone().requires_grad_() for t in inputs]
        means2d, conics, opacities, colors = leaves
        if native:
            image, alpha = rasterize_to_pixels(means2d, conics, colors, opacities, WIDTH, HEIGHT, 16, offsets, rows)
        else:
            image, alpha = accumulate(means2d, conics, opacities, colors, *found, WIDTH, HEIGHT)
        ((image * weights).sum() + alpha.square().sum()).backward()  # type: ignore[no-untyped-call]
        results.append([image.detach(), alpha.detach(), *(leaf.grad for leaf in leaves)])
    for got, expected in zip(*results, strict=True):
        assert got is not None
        assert_close(got, expected, rtol=1e-5, atol=5e-6 * max(1.0, float(got.abs().max())))


def test_ranges_of_lists_go_on_where_the_last_one_ended() -> None:
    """300 faint Gaussians over one tile of 4 pixels a side: 16 at a step."""
    n = 300
    means2d, conics = torch.full((1, n, 2), 2.0), torch.tensor([0.01, 0.0, 0.01]).expand(1, n, 3)
    opacities = torch.full((1, n), 0.02)
    offsets, rows = torch.zeros(1, 1, 1, dtype=torch.int32), torch.arange(n, dtype=torch.int32)
    whole = torch.ones(1, 4, 4)
    at_once = rasterize_to_indices_in_range(0, 100, whole, means2d, conics, opacities, 4, 4, 4, offsets, rows)
    left, parts = whole, []
    for step in range(0, 20, 5):
        part = rasterize_to_indices_in_range(step, step + 5, left, means2d, conics, opacities, 4, 4, 4, offsets, rows)
        left = left * (1 - accumulate(means2d, conics, opacities, means2d, *part, 4, 4)[1][..., 0])
        parts.append(part)
    assert [int(part[0].max()) for part in parts] == [79, 159, 239, 299]
    for pixel in range(16):
        together = torch.cat([part[0][part[1] == pixel] for part in parts])
        assert torch.equal(together, at_once[0][at_once[1] == pixel])
    half = rasterize_to_indices_in_range(0, 100, 2e-4 * whole, means2d, conics, opacities, 4, 4, 4, offsets, rows)
    assert 0 < len(half[0]) < len(at_once[0])
    none = rasterize_to_indices_in_range(100, 200, whole, means2d, conics, opacities, 4, 4, 4, offsets, rows)
    assert [len(ids) for ids in none] == [0, 0, 0]
    assert float(accumulate(means2d, conics, opacities, means2d, *none, 4, 4)[0].abs().max()) == 0.0


def test_masked_tiles_show_the_background(scene: tuple[Gaussians, list[Camera]]) -> None:
    values, offsets, rows = stages(*scene)
    given = [values["means2d"], values["conics"], torch.rand(2, 40, 3, dtype=F64), values["opacities"]]
    behind = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]], dtype=F64)
    masks = torch.ones_like(offsets, dtype=torch.bool)
    masks[0, 0, 1] = masks[1, 1, 2] = False
    whole, masked = (
        rasterize_to_pixels(*given, WIDTH, HEIGHT, 16, offsets, rows, behind, mask) for mask in (None, masks)
    )
    pixels = masks.repeat_interleave(16, dim=1).repeat_interleave(16, dim=2)[:, :HEIGHT, :WIDTH]
    assert torch.equal(masked[0][pixels], whole[0][pixels])
    assert torch.equal(masked[0][~pixels], behind[:, None, None].expand_as(whole[0])[~pixels])
    assert float(masked[1][~pixels].abs().max()) == 0.0
    assert float(whole[1][~pixels].max()) > 0.0


def test_nothing_to_blend_is_the_background() -> None:
    none = torch.zeros(1, 0, 2, dtype=F64, requires_grad=True)
    behind = torch.tensor([[0.5, 0.25, 1.0]], dtype=F64, requires_grad=True)
    tiles, ids, rows = isect_tiles(none, torch.zeros(1, 0, 2, dtype=torch.int32), none[..., 0], 16, *GRID)
    assert (tiles.shape, len(ids), len(rows)) == ((1, 0), 0, 0)
    image, alpha = rasterize_to_pixels(
        none, torch.zeros(1, 0, 3, dtype=F64), torch.zeros(1, 0, 3, dtype=F64), none[..., 0], WIDTH, HEIGHT, 16,
        isect_offset_encode(ids, 1, *GRID), rows, behind,
    )  # fmt: skip
    assert torch.equal(image, behind[:, None, None].expand_as(image))
    assert float(alpha.detach().abs().max()) == 0.0
    image.sum().backward()  # type: ignore[no-untyped-call]
    assert behind.grad is not None
    assert_close(behind.grad, torch.full_like(behind, WIDTH * HEIGHT))


def test_what_the_pixels_do_not_take_is_named(scene: tuple[Gaussians, list[Camera]]) -> None:
    values, offsets, rows = stages(*scene)
    given = [values["means2d"], values["conics"], torch.rand(2, 40, 3, dtype=F64), values["opacities"]]
    with pytest.raises(NotImplementedError, match="tile_size=12 is not supported; give isect_tiles"):
        rasterize_to_pixels(*given, WIDTH, HEIGHT, 12, offsets, rows)
    with pytest.raises(ValueError, match=r"isect_offsets has shape \(2, 2, 3\), not \(2, 3, 3\)"):
        rasterize_to_pixels(*given, WIDTH, 40, 16, offsets, rows)
    with pytest.raises(ValueError, match="colors has no channels"):
        rasterize_to_pixels(*given[:2], given[2][..., :0], given[3], WIDTH, HEIGHT, 16, offsets, rows)
    with pytest.raises(ValueError, match="packed rows need n_images and image_ids"):
        isect_tiles(values["means2d"][0], values["radii"][0], values["depths"][0], 16, *GRID, packed=True)


def staged(gaussians: Gaussians, cameras: list[Camera], model: CameraModel = "pinhole", **options: Any) -> Any:
    """rasterization() with covariances in place of quaternions and scales; (its outputs, its leaves)."""
    given = {name: value.clone().requires_grad_() for name, value in activated(gaussians).items()}
    covars = quat_scale_to_covar_preci(given["quats"], given["scales"], compute_preci=False)[0]
    views = seen_by(*(of_model(camera, model) for camera in cameras)) | {"camera_model": model}
    arguments = {**given, **views, **options, "quats": None, "scales": None, "covars": covars}
    return rasterization(**arguments), given


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("mode", ["RGB", "RGB+ED", "D", "ED", "RGB+D"])
def test_covariances_render_as_their_quaternions_and_scales(
    scene: tuple[Gaussians, list[Camera]], mode: str, packed: bool
) -> None:
    gaussians, cameras = scene
    options: dict[str, Any] = {
        "sh_degree": 1, "render_mode": mode, "packed": packed, "absgrad": True, "rasterize_mode": "antialiased",
        "tile_size": 8,
    }  # fmt: skip
    if "RGB" in mode:
        options["backgrounds"] = torch.tensor([[0.2, 0.4, 0.6], [0.9, 0.1, 0.5]], dtype=F64)
    leaves = {name: value.clone().requires_grad_() for name, value in activated(gaussians).items()}
    plain = rasterization(**leaves, **seen_by(*cameras), **options)
    other, given = staged(gaussians, cameras, **options)
    weights = torch.randn(plain[0].shape, generator=torch.Generator().manual_seed(3), dtype=F64)
    for images, alphas, _ in (plain, other):
        ((images * weights).sum() + alphas.square().sum()).backward()  # type: ignore[no-untyped-call]
    assert_close(other[0], plain[0], rtol=1e-6, atol=1e-8)
    assert_close(other[1], plain[1], rtol=1e-6, atol=1e-8)
    for name, leaf in leaves.items():
        if name != "colors" or "RGB" in mode:
            assert leaf.grad is not None
            assert_close(given[name].grad, leaf.grad, rtol=1e-5, atol=1e-6)
    mine, theirs = other[2], plain[2]
    assert set(mine) == set(theirs)
    if packed:  # the one pass leaves out some that its image does not show
        wide = gaussians.means.shape[0]
        rows = [(meta["camera_ids"] * wide + meta["gaussian_ids"]) for meta in (mine, theirs)]
        seen = torch.isin(rows[0], rows[1])
        assert torch.equal(rows[0][seen], rows[1])
        both = [seen, torch.ones_like(rows[1], dtype=torch.bool)]
    else:
        visible = [(meta["radii"] > 0).all(dim=-1) for meta in (mine, theirs)]
        assert not bool((visible[1] & ~visible[0]).any())
        both = [visible[1], visible[1]]
    for name in ("radii", "depths", "conics", "opacities", "means2d"):
        assert_close(mine[name][both[0]], theirs[name][both[1]], rtol=1e-5, atol=1e-7)
    for name in ("grad", "absgrad"):
        values = (getattr(meta["means2d"], name)[keep] for meta, keep in zip((mine, theirs), both, strict=True))
        assert_close(*values, rtol=1e-5, atol=1e-6)
    assert mine["isect_offsets"].shape == theirs["isect_offsets"].shape
    assert mine["tiles_per_gauss"].shape == mine["depths"].shape


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("eps2d", [0.0, 0.1, 1.5])
def test_another_blur_renders_what_plain_torch_does(
    scene: tuple[Gaussians, list[Camera]], eps2d: float, model: CameraModel
) -> None:
    gaussians, cameras = scene
    given, views = activated(gaussians), seen_by(*(of_model(camera, model) for camera in cameras))
    options: dict[str, Any] = {"eps2d": eps2d, "camera_model": model}
    image, alpha, _ = rasterization(**given, **views, **options, sh_degree=1, packed=False)
    shapes = (given["means"], None, given["quats"], given["scales"])
    radii, means2d, depths, conics, _ = fully_fused_projection(*shapes, **views, **options)
    colors = (spherical_harmonics(1, given["means"], views["viewmats"], given["colors"]) + 0.5).clamp(min=0.0)
    shown = torch.where((radii > 0).all(dim=-1), given["opacities"], 0.0)
    for c in range(2):
        expected = blended(means2d[c], conics[c], colors[c], shown[c], depths[c])
        assert_close(image[c], expected[0], **CLOSE)
        assert_close(alpha[c, ..., 0], expected[1], **CLOSE)
    usual = rasterization(**given, **views, camera_model=model, sh_degree=1)[0]
    assert float((image - usual).abs().max()) > 1e-3


def test_poses_of_the_stages_have_the_gradients_of_the_one_pass(scene: tuple[Gaussians, list[Camera]]) -> None:
    gaussians, cameras = scene
    views = seen_by(*cameras)
    gradients = []
    for eps2d in (0.3, 0.3 + 1e-9):
        poses = views["viewmats"].clone().requires_grad_()
        image = rasterization(**{**activated(gaussians), **views, "viewmats": poses}, eps2d=eps2d, sh_degree=1)[0]
        image.square().sum().backward()  # type: ignore[no-untyped-call]
        assert poses.grad is not None
        gradients.append(poses.grad[:, :3])
    assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("eps2d", [0.3, 0.4])
def test_a_radius_leaves_out_what_is_no_larger(scene: tuple[Gaussians, list[Camera]], eps2d: float) -> None:
    gaussians, cameras = scene
    given, views = activated(gaussians), seen_by(*cameras)
    shared: dict[str, Any] = {"sh_degree": 1, "packed": False, "eps2d": eps2d}
    whole = rasterization(**given, **views, **shared)
    clip = float(whole[2]["radii"].amax(dim=-1).float().median())
    means = given["means"].clone().requires_grad_()
    clipped = rasterization(**{**given, "means": means}, **views, **shared, radius_clip=clip)
    small = (whole[2]["radii"] <= clip).all(dim=-1)
    assert torch.equal((clipped[2]["radii"] > 0).all(dim=-1), (whole[2]["radii"] > 0).all(dim=-1) & ~small)
    for c, camera in enumerate(cameras):
        large = {name: value[~small[c]] for name, value in given.items()}
        alone = rasterization(**large, **seen_by(camera), **shared)
        assert_close(clipped[0][c], alone[0][0], rtol=1e-9, atol=1e-12)
    clipped[0].sum().backward()  # type: ignore[no-untyped-call]
    assert means.grad is not None
    assert float(means.grad[small.all(dim=0)].abs().max()) == 0.0
    assert float(means.grad[~small.all(dim=0)].abs().max()) > 0.0


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("cameras", [0, 1])
@pytest.mark.parametrize("packed", [True, False])
def test_the_stages_take_no_gaussians_and_no_cameras(count: int, cameras: int, packed: bool) -> None:
    gaussians = random_gaussians(5, 3, sh_degree=0, dtype=F64)
    given = {name: value[:count].clone().requires_grad_() for name, value in activated(gaussians).items()}
    views = seen_by(random_camera(0, WIDTH, HEIGHT))
    views = {name: value[:cameras] if isinstance(value, Tensor) else value for name, value in views.items()}
    image, alpha, meta = rasterization(**given, **views, sh_degree=0, eps2d=0.5, render_mode="RGB+D", packed=packed)
    assert image.shape == (cameras, HEIGHT, WIDTH, 4)
    assert alpha.shape == (cameras, HEIGHT, WIDTH, 1)
    assert meta["isect_offsets"].shape == (cameras, 2, 3)
    (image.sum() + alpha.sum()).backward()  # type: ignore[no-untyped-call]
