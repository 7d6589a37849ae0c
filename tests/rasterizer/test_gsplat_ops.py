"""gsplat's building blocks: against the reference, against rasterization()'s meta, and by finite differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from splatcli import fully_fused_projection, rasterization, spherical_harmonics
from splatcli.gaussians import SH_C0, Gaussians
from splatcli.rasterizer.gsplat_ops import (
    depth_to_normal,
    depth_to_points,
    proj,
    quat_scale_to_covar_preci,
    world_to_cam,
)
from splatcli.rasterizer.reference import rotation_matrices
from splatcli.scene.camera import MODELS, Camera, CameraModel
from tests.native.cases import NEEDS_COMPILER
from tests.rasterizer.reference_projection import project_reference
from tests.rasterizer.scenes import of_model, random_camera, random_gaussians, random_scene
from tests.rasterizer.test_rasterization import activated, seen_by

F64 = torch.float64


@pytest.fixture
def scene() -> tuple[Gaussians, list[Camera]]:
    gaussians = random_gaussians(5, 40, sh_degree=3, dtype=F64)
    return gaussians, [random_camera(seed, 37, 29) for seed in range(2)]


@pytest.mark.parametrize("degree", [0, 1, 2, 3])
def test_harmonics_are_the_colours_of_the_reference(scene: tuple[Gaussians, list[Camera]], degree: int) -> None:
    gaussians, cameras = scene
    coeffs = torch.cat([gaussians.sh0[:, None], gaussians.shN], dim=1)
    viewmats = seen_by(*cameras)["viewmats"]
    got = (spherical_harmonics(degree, gaussians.means, viewmats, coeffs) + 0.5).clamp(min=0.0)
    assert got.shape == (2, 40, 3)
    for c, camera in enumerate(cameras):
        expected = project_reference(gaussians, camera, sh_degree=degree)
        assert int(expected.valid.sum()) > 10
        assert_close(got[c][expected.valid], expected.colors[expected.valid], rtol=1e-10, atol=1e-12)
    for c, viewmat in enumerate(viewmats):
        directions = 3.0 * (gaussians.means + viewmat[:3, :3].T @ viewmat[:3, 3])
        classic = spherical_harmonics(degree, directions, coeffs)
        assert_close((classic + 0.5).clamp(min=0.0), got[c], rtol=1e-10, atol=1e-12)


def test_harmonics_take_masks_coefficients_of_each_camera_and_batches(scene: tuple[Gaussians, list[Camera]]) -> None:
    gaussians, cameras = scene
    coeffs = torch.cat([gaussians.sh0[:, None], gaussians.shN], dim=1)
    viewmats = seen_by(*cameras)["viewmats"]
    whole = spherical_harmonics(2, gaussians.means, viewmats, coeffs)
    masks = torch.rand(2, 40, generator=torch.Generator().manual_seed(1)) < 0.5
    masked = spherical_harmonics(2, gaussians.means, viewmats, coeffs, masks)
    assert_close(masked, whole * masks[..., None])
    classic = spherical_harmonics(2, gaussians.means, coeffs, masks[0])
    assert_close(classic, spherical_harmonics(2, gaussians.means, coeffs) * masks[0][:, None])
    each = spherical_harmonics(2, gaussians.means, viewmats, torch.stack([coeffs, 2 * coeffs]))
    assert_close(each[1], 2 * whole[1])
    batch = spherical_harmonics(2, *(torch.stack([t, t]) for t in (gaussians.means, viewmats, coeffs)))
    assert_close(batch, torch.stack([whole, whole]))


def test_the_constant_harmonic_and_the_gradients() -> None:
    generator = torch.Generator().manual_seed(3)
    directions, coeffs = (torch.randn(*shape, generator=generator, dtype=F64) for shape in ((5, 3), (5, 25, 3)))
    assert_close(spherical_harmonics(0, directions, coeffs), SH_C0 * coeffs[:, 0])
    leaves = [directions.requires_grad_(), coeffs.requires_grad_()]
    assert torch.autograd.gradcheck(lambda d, c: spherical_harmonics(4, d, c), leaves)


@pytest.mark.parametrize("name", ["batch_ids", "camera_ids", "gaussian_ids", "viewmats_rs"])
def test_harmonics_name_what_they_do_not_take(name: str) -> None:
    with pytest.raises(NotImplementedError, match=name):
        spherical_harmonics(0, torch.ones(2, 3), torch.eye(4)[None], torch.ones(2, 1, 3), **{name: torch.zeros(2)})


def test_harmonics_need_the_coefficients_of_their_degree() -> None:
    with pytest.raises(ValueError, match="degree 2 needs"):
        spherical_harmonics(2, torch.ones(2, 3), torch.ones(2, 4, 3))
    with pytest.raises(ValueError, match="not 0 to 4"):
        spherical_harmonics(5, torch.ones(2, 3), torch.ones(2, 36, 3))


def test_projection_is_that_of_the_reference(scene: tuple[Gaussians, list[Camera]]) -> None:
    gaussians, cameras = scene
    given = activated(gaussians)
    shapes = (given["means"], None, given["quats"], given["scales"])
    radii, means2d, depths, conics, factors = fully_fused_projection(
        *shapes, **seen_by(*cameras), calc_compensations=True
    )
    assert factors is not None
    for c, camera in enumerate(cameras):
        plain, smooth = (project_reference(gaussians, camera, antialiased=flag) for flag in (False, True))
        seen = plain.valid & smooth.valid & (radii[c] > 0).all(dim=-1)
        assert int(seen.sum()) > 10
        for got, expected in ((means2d, plain.means2d), (depths, plain.depths), (conics, plain.conics)):
            assert_close(got[c][seen], expected[seen], rtol=1e-9, atol=1e-12)
        assert_close(factors[c][seen], (smooth.opacities / plain.opacities)[seen], rtol=1e-7, atol=1e-9)
        sigmas = 3.33 * plain.cov2d[:, ::2].sqrt()
        assert torch.equal(radii[c][seen], sigmas[seen].ceil().int())
        # What it leaves out does not reach the image.
        left_out = plain.valid & (radii[c] == 0).all(dim=-1)
        size = torch.tensor([37.0, 29.0], dtype=F64)
        outside = (plain.means2d + sigmas.ceil() <= 0) | (plain.means2d - sigmas.ceil() >= size)
        assert bool(outside.any(dim=1)[left_out].all())
        assert float(means2d[c][radii[c].sum(dim=-1) == 0].abs().sum()) == 0.0


@NEEDS_COMPILER
@pytest.mark.parametrize("mode", ["classic", "antialiased"])
@pytest.mark.parametrize("model", MODELS)
def test_projection_is_that_of_the_renderer(mode: str, model: CameraModel) -> None:
    gaussians, camera = random_scene(41, 60, sh_degree=2)
    gaussians = gaussians.map(Tensor.double)
    given, views = activated(gaussians), seen_by(of_model(camera, model)) | {"camera_model": model}
    meta = rasterization(**given, **views, sh_degree=2, packed=False, rasterize_mode=mode)[2]  # type: ignore[arg-type]
    shapes = (given["means"], None, given["quats"], given["scales"])
    got = fully_fused_projection(
        *shapes, **views, opacities=given["opacities"], calc_compensations=mode == "antialiased"
    )
    seen = (meta["radii"] > 0).all(dim=-1) & (got[0] > 0).all(dim=-1)
    assert int(seen.sum()) > 10
    for mine, name in zip(got[1:4], ("means2d", "depths", "conics"), strict=True):
        assert_close(mine[seen], meta[name][seen], rtol=1e-7, atol=1e-9)
    assert torch.equal(got[0][seen], meta["radii"][seen])


def test_projection_takes_covariances_and_batches(scene: tuple[Gaussians, list[Camera]]) -> None:
    gaussians, cameras = scene
    given, views = activated(gaussians), seen_by(*cameras)
    whole = fully_fused_projection(given["means"], None, given["quats"], given["scales"], **views)
    axes = rotation_matrices(given["quats"]) * given["scales"][:, None, :]
    covars = axes @ axes.mT
    row, column = torch.triu_indices(3, 3)
    for form in (covars, covars[:, row, column]):
        other = fully_fused_projection(given["means"], form, None, None, **views)
        assert torch.equal(other[0], whole[0])
        assert_close(other[1:4], whole[1:4], rtol=1e-6, atol=1e-9)
    twice: dict[str, Any] = {
        name: torch.stack([value, value]) if isinstance(value, Tensor) else value for name, value in views.items()
    }
    batch = fully_fused_projection(
        *(None if t is None else torch.stack([t, t]) for t in (given["means"], None, given["quats"], given["scales"])),  # type: ignore[arg-type]
        **twice,
    )
    assert batch[0].shape == (2, 2, 40, 2)
    assert torch.equal(batch[3][1], whole[3])


@pytest.mark.parametrize("model", MODELS)
def test_gradients_of_the_projection_are_finite_differences(model: CameraModel) -> None:
    gaussians = random_gaussians(5, 6, dtype=F64)
    views = seen_by(of_model(random_camera(1, 37, 29), model)) | {"camera_model": model}
    poses = views.pop("viewmats")
    shapes = [t.detach().clone() for t in (gaussians.means, gaussians.quats, gaussians.log_scales.exp(), poses)]

    def project(means: Tensor, quats: Tensor, scales: Tensor, viewmats: Tensor) -> tuple[Tensor, ...]:
        got = fully_fused_projection(means, None, quats, scales, viewmats, **views, calc_compensations=True)
        assert got[4] is not None
        return (*got[1:4], got[4])

    assert int((fully_fused_projection(shapes[0], None, *shapes[1:], **views)[0] > 0).sum()) > 0
    assert torch.autograd.gradcheck(project, [t.requires_grad_() for t in shapes], atol=1e-5)


def test_thresholds_leave_gaussians_out(scene: tuple[Gaussians, list[Camera]]) -> None:
    gaussians, cameras = scene
    given, views = activated(gaussians), seen_by(cameras[0])
    shapes = (given["means"], None, given["quats"], given["scales"])
    radii, _, depths, *_ = fully_fused_projection(*shapes, **views)
    middle = float(depths[depths > 0].median())
    assert bool((fully_fused_projection(*shapes, **views, near_plane=middle)[0][depths < middle] == 0).all())
    assert bool((fully_fused_projection(*shapes, **views, far_plane=middle)[0][depths > middle] == 0).all())
    largest = radii.amax(dim=-1)
    clip = float(largest[largest > 0].median())
    clipped = fully_fused_projection(*shapes, **views, radius_clip=clip)[0].amax(dim=-1)
    assert torch.equal(clipped, torch.where(largest > clip, largest, 0))
    faint = fully_fused_projection(*shapes, **views, opacities=torch.full((40,), 1e-3, dtype=F64))[0]
    assert int(faint.sum()) == 0
    wider = fully_fused_projection(*shapes, **views, eps2d=9.0)[0]
    assert bool((wider[radii > 0] > radii[radii > 0]).all())


def test_projection_names_the_cameras_that_it_does_not_have() -> None:
    with pytest.raises(NotImplementedError, match="camera_model"):
        fully_fused_projection(
            torch.ones(2, 3), None, torch.ones(2, 4), torch.ones(2, 3), torch.eye(4)[None], torch.eye(3)[None], 8, 8,
            camera_model="ftheta",
        )  # fmt: skip
    with pytest.raises(NotImplementedError, match="camera_model"):
        proj(torch.ones(1, 2, 3), torch.ones(1, 2, 3, 3), torch.eye(3)[None], 8, 8, "ftheta")


@pytest.mark.parametrize("antialiased", [False, True])
def test_packed_projections_are_the_rows_of_the_visible_ones(
    scene: tuple[Gaussians, list[Camera]], antialiased: bool
) -> None:
    gaussians, cameras = scene
    given, views = activated(gaussians), seen_by(*cameras)
    shapes: Any = (given["means"], None, given["quats"], given["scales"])
    options: Any = {"calc_compensations": antialiased, "sparse_grad": True}
    dense = fully_fused_projection(*shapes, **views, **options)
    batch_ids, camera_ids, gaussian_ids, *packed = fully_fused_projection(*shapes, **views, **options, packed=True)
    seen = (dense[0] > 0).all(dim=-1)
    assert 10 < len(gaussian_ids) < 80
    assert torch.equal(torch.stack([camera_ids, gaussian_ids], dim=1), seen.nonzero())
    assert not bool(batch_ids.any())
    for rows, values in zip(packed, dense, strict=True):
        assert rows is None if values is None else torch.equal(rows, values[seen])
    twice = {name: torch.stack([t, t]) if isinstance(t, Tensor) else t for name, t in views.items()}
    pairs: Any = (None if t is None else torch.stack([t, t]) for t in shapes)
    batch = fully_fused_projection(*pairs, **twice, packed=True)
    assert torch.equal(batch[0], torch.arange(2).repeat_interleave(len(gaussian_ids)))
    assert torch.equal(batch[1], camera_ids.repeat(2))
    assert torch.equal(batch[4], packed[1].repeat(2, 1))


def test_covariances_and_precisions_are_those_of_the_axes(scene: tuple[Gaussians, list[Camera]]) -> None:
    given = activated(scene[0])
    covars, precis = quat_scale_to_covar_preci(3.0 * given["quats"], given["scales"])
    assert covars is not None
    assert precis is not None
    values, _ = torch.linalg.eigh(covars)
    assert_close(values, given["scales"].square().sort(dim=-1).values, rtol=1e-9, atol=1e-15)
    assert_close(covars @ precis, torch.eye(3, dtype=F64).expand(40, 3, 3), rtol=0.0, atol=1e-8)
    row, column = torch.triu_indices(3, 3)
    flat, nothing = quat_scale_to_covar_preci(given["quats"], given["scales"], compute_preci=False, triu=True)
    assert nothing is None
    assert flat is not None
    assert_close(flat, covars[:, row, column])
    quats, scales = given["quats"][:3].clone().requires_grad_(), given["scales"][:3].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda q, s: quat_scale_to_covar_preci(q, s), (quats, scales), atol=1e-4)


@pytest.mark.parametrize("model", MODELS)
def test_two_steps_of_a_projection_are_the_fused_one(scene: tuple[Gaussians, list[Camera]], model: CameraModel) -> None:
    gaussians, cameras = scene
    given, views = activated(gaussians), seen_by(*(of_model(camera, model) for camera in cameras))
    covars = quat_scale_to_covar_preci(given["quats"], given["scales"])[0]
    assert covars is not None
    seen, turned = world_to_cam(given["means"], covars, views["viewmats"])
    means2d, covars2d = proj(seen, turned, views["Ks"], views["width"], views["height"], model)
    shapes = (given["means"], None, given["quats"], given["scales"])
    radii, expected, _, conics, _ = fully_fused_projection(*shapes, **views, camera_model=model)
    kept = (radii > 0).all(dim=-1)
    assert int(kept.sum()) > 10
    assert_close(means2d[kept], expected[kept])
    blurred = torch.linalg.inv(covars2d[kept] + 0.3 * torch.eye(2, dtype=F64)).flatten(1)[:, [0, 1, 3]]
    assert_close(blurred, conics[kept], rtol=1e-6, atol=1e-9)


def test_depths_become_points_and_normals() -> None:
    """A plane across the view: its points lie on it, and its normals are its own."""
    camera = random_camera(1, 37, 29)
    views = seen_by(camera)
    pose = torch.linalg.inv(views["viewmats"])
    normal = torch.tensor([0.2, -0.3, -1.0], dtype=F64)
    y, x = torch.meshgrid(torch.arange(29, dtype=F64) + 0.5, torch.arange(37, dtype=F64) + 0.5, indexing="ij")
    rays = torch.stack([(x - camera.cx) / camera.fx, (y - camera.cy) / camera.fy, torch.ones_like(x)], dim=-1)
    z = (normal[2] * 4.0 / (rays @ normal))[None, ..., None]
    points = depth_to_points(z, pose, views["Ks"])
    local = (points[0] - pose[0, :3, 3]) @ pose[0, :3, :3]
    assert_close(local @ normal, torch.full((29, 37), -4.0, dtype=F64))
    assert_close(depth_to_points(z * rays.norm(dim=-1)[None, ..., None], pose, views["Ks"], z_depth=False), points)
    normals = depth_to_normal(z, pose, views["Ks"])[0]
    expected = pose[0, :3, :3] @ (normal / normal.norm())
    assert_close(normals[1:-1, 1:-1].abs(), expected.abs().expand(27, 35, 3), rtol=1e-7, atol=1e-9)
    assert float((normals[1:-1, 1:-1] @ expected).min()) > 0.999
    assert float(normals[0].abs().max()) == float(normals[:, -1].abs().max()) == 0.0


def test_directions_may_be_given_by_name() -> None:
    generator = torch.Generator().manual_seed(3)
    directions, coeffs = (torch.randn(*shape, generator=generator, dtype=F64) for shape in ((5, 3), (5, 9, 3)))
    masks = torch.tensor([True, False, True, True, False])
    expected = spherical_harmonics(2, directions, coeffs, masks)
    assert torch.equal(spherical_harmonics(2, dirs=directions, coeffs=coeffs, masks=masks), expected)
    assert torch.equal(spherical_harmonics(degrees_to_use=2, dirs=directions, coeffs=coeffs, masks=masks), expected)
    assert torch.equal(spherical_harmonics(2, directions, coeffs=coeffs, masks=masks), expected)
    with pytest.raises(ValueError, match="give means, viewmats and coeffs; or dirs and coeffs"):
        spherical_harmonics(2, dirs=directions)
