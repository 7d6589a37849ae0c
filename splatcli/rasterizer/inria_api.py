"""The interface of INRIA's diff_gaussian_rasterization, computed by splat's kernels.

Programs that are written for it import GaussianRasterizationSettings and GaussianRasterizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from splatcli.errors import UsageError
from splatcli.gaussians import SHN_COUNTS, Gaussians
from splatcli.rasterizer.context import Z_FAR
from splatcli.rasterizer.gsplat_api import rasterization, raw_geometry
from splatcli.rasterizer.opaque import graph_break
from splatcli.rasterizer.rendering import ViewRender, backend_for
from splatcli.scene.camera import Camera

#: The near plane, world units.
NEAR = 0.2
#: A principal point counts as the middle of the image where it is as near, in pixels: matrices are rounded.
_CENTRED = 0.01
#: The largest difference of the focal lengths that projmatrix and tanfov have, a part of them.
_OTHER_LENS = 0.01


class GaussianRasterizationSettings(NamedTuple):
    """A camera, and how it is rendered; field by field that of diff_gaussian_rasterization.

    tanfovx, tanfovy: tangents of half the fields of view. bg: [3].
    viewmatrix, projmatrix: [4, 4] or [1, 4, 4], world to camera and world to clip space, transposed: for row vectors.
    sh_degree: in use. campos: not read; it follows from viewmatrix. prefiltered, debug: without effect.
    antialiasing: scales opacities by the area that the blur adds. None, as of programs that do not know of it, is
        False, and rasterizers return no inverse depth.
    """

    image_height: int
    image_width: int
    tanfovx: float
    tanfovy: float
    bg: Tensor
    scale_modifier: float
    viewmatrix: Tensor
    projmatrix: Tensor
    sh_degree: int
    campos: Tensor
    prefiltered: bool
    debug: bool = False
    antialiasing: bool | None = None


class GaussianRasterizer(torch.nn.Module):
    """Renders activated Gaussians through one camera, differentiably."""

    def __init__(self, raster_settings: GaussianRasterizationSettings) -> None:
        super().__init__()
        self.raster_settings = raster_settings

    @torch.no_grad()
    def markVisible(self, positions: Tensor) -> Tensor:
        """Return [N] bool, which of ``positions`` [N, 3] lie beyond the near plane."""
        return _camera_z(self.raster_settings, positions) > NEAR

    @graph_break
    def forward(
        self,
        means3D: Tensor,
        means2D: Tensor | None,
        opacities: Tensor,
        shs: Tensor | None = None,
        colors_precomp: Tensor | None = None,
        scales: Tensor | None = None,
        rotations: Tensor | None = None,
        cov3D_precomp: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the image [3, H, W] and the radii [N] int32; with ``antialiasing`` set also inverse depth [1, H, W].

        means3D: [N, 3] world units. means2D: [N, 2] or more columns, whose values are not read. The first two get the
            gradient of the projected means, in units of half the image. None: nothing does.
        opacities: [N, 1] in 0..1.
        shs: [N, K, 3] SH coefficients; or colors_precomp: [N, 3].
        scales: [N, 3] standard deviations, world units, and rotations: [N, 4] w x y z; or cov3D_precomp: [N, 6], xx,
            xy, xz, yy, yz, zz, to which scale_modifier does not apply.

        Half-precision tensors are computed in float32. A radius is three standard deviations, in pixels, rounded up; 0
        of a Gaussian that does not show. Inverse depth is the sum of blending weight divided by camera z. Poses get no
        gradient.
        Raises UsageError without colours or shapes, and with both kinds; ValueError for shapes that do not fit, and for
        matrices of no perspective camera; ResourceError where there are no kernels.
        """
        settings, n = self.raster_settings, len(means3D)
        if (shs is None) == (colors_precomp is None):
            raise UsageError("there are no colours, or two kinds", remedy="give shs or colors_precomp")
        if (scales is None or rotations is None) == (cov3D_precomp is None):
            raise UsageError("there are no shapes, or two kinds", remedy="give scales and rotations, or cov3D_precomp")
        dtype = torch.float64 if means3D.dtype == torch.float64 else torch.float32
        means = means3D.to(dtype)
        screen = means.new_zeros(n, 2) if means2D is None else means2D[:, :2].to(dtype)
        for name, tensor, columns in (
            ("means3D", means, 3), ("means2D", screen, 2), ("scales", scales, 3), ("rotations", rotations, 4),
            ("cov3D_precomp", cov3D_precomp, 6),
        ):  # fmt: skip
            if tensor is not None and tensor.shape != (n, columns):
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not {(n, columns)}")
        screen = screen * _half_image(settings, means)
        opacities = opacities.to(dtype).reshape(n)
        view: _ByShapes | _ByCovariances
        if cov3D_precomp is not None:
            view = _ByCovariances(settings, means, opacities, cov3D_precomp.to(dtype), means2D)
        else:
            assert scales is not None
            assert rotations is not None
            sizes = scales.to(dtype) * settings.scale_modifier
            view = _ByShapes(settings, raw_geometry(means, rotations.to(dtype), sizes, opacities), screen)
        background = settings.bg.to(means)
        if colors_precomp is None:
            assert shs is not None
            if shs.dim() != 3 or shs.shape[1] < 1:
                raise ValueError(f"shs has shape {tuple(shs.shape)}, not ({n}, K, 3)")
            image, radii = view.draw(shs.to(dtype), background, is_sh=True)
        else:
            image, radii = view.draw(colors_precomp.to(dtype), background)
        if settings.antialiasing is None:
            return image, radii
        z = _camera_z(settings, means)
        inverse = torch.where(z > NEAR, 1.0 / z, 0.0)[:, None]
        return image, radii, view.draw(inverse, z.new_zeros(1), reports=False)[0]


@dataclass(frozen=True, slots=True, eq=False)
class _ByShapes:
    """Gaussians of scales and rotations, which the kernels of training render.

    raw: means, quaternions, log-scales and logits of opacities. screen: [N, 2], gets the gradient of the projected
        means in pixels.
    """

    settings: GaussianRasterizationSettings
    raw: tuple[Tensor, Tensor, Tensor, Tensor]
    screen: Tensor

    def draw(
        self, colours: Tensor, background: Tensor, *, is_sh: bool = False, reports: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return the image [D, H, W] and the radii.

        colours: [N, D]; or SH coefficients [N, K, 3]. background: [D]. reports: the gradient of the projected means.
        """
        settings, means = self.settings, self.raw[0]
        sh0, shN = means.new_zeros(len(means), 3), means.new_zeros(len(means), 0, 3)
        if is_sh:
            sh0, shN = colours[:, 0], colours[:, 1 : 1 + _coefficients(colours)]
        gaussians = Gaussians(*self.raw, sh0, shN)
        view = ViewRender(
            gaussians,
            camera_of(settings),
            sh_degree=min(int(settings.sh_degree), gaussians.sh_degree),
            background=background,
            antialiased=bool(settings.antialiasing),
            backend=backend_for(means.device, means.dtype),
            z_range=(NEAR, Z_FAR),
            colors=None if is_sh else colours,
        )
        projected = view.project()
        image = view.blend(self.screen if reports else None).image
        return image.permute(2, 0, 1).contiguous(), _radii(projected.conics, projected.radii)


@dataclass(frozen=True, slots=True, eq=False)
class _ByCovariances:
    """Gaussians of covariances [N, 6], which gsplat's stages render.

    means2d: the caller's, whose ``grad`` is filled; it is no part of the graph.
    """

    settings: GaussianRasterizationSettings
    means: Tensor
    opacities: Tensor
    covariances: Tensor
    means2d: Tensor | None

    def draw(
        self, colours: Tensor, background: Tensor, *, is_sh: bool = False, reports: bool = True
    ) -> tuple[Tensor, Tensor]:
        """As of _ByShapes."""
        settings, camera = self.settings, camera_of(self.settings)
        images, _, meta = rasterization(
            self.means,
            None,
            None,
            self.opacities,
            colours[:, : 1 + _coefficients(colours)] if is_sh else colours,
            torch.from_numpy(camera.viewmat)[None].to(self.means),
            torch.from_numpy(camera.K)[None].to(self.means),
            camera.width,
            camera.height,
            near_plane=NEAR,
            sh_degree=min(int(settings.sh_degree), SHN_COUNTS.index(_coefficients(colours))) if is_sh else None,
            backgrounds=background[None],
            rasterize_mode="antialiased" if settings.antialiasing else "classic",
            covars=self.covariances[:, [0, 1, 2, 1, 3, 4, 2, 4, 5]].reshape(-1, 3, 3),
            packed=False,
        )
        projected, own = meta["means2d"], self.means2d
        if reports and projected.requires_grad and own is not None and (own.is_leaf or own.retains_grad):
            projected.register_hook(self._report)
        return images[0].permute(2, 0, 1).contiguous(), _radii(meta["conics"][0], meta["radii"][0])

    def _report(self, v_means2d: Tensor) -> None:
        """Add a gradient [1, N, 2] to that of the caller's means2d."""
        assert self.means2d is not None
        gradient = torch.zeros_like(self.means2d)
        gradient[:, :2] = v_means2d[0] * _half_image(self.settings, v_means2d)
        self.means2d.grad = gradient if self.means2d.grad is None else self.means2d.grad + gradient


def camera_of(settings: GaussianRasterizationSettings) -> Camera:
    """Return the camera of ``settings``. Raises ValueError for matrices of no perspective camera."""
    width, height = int(settings.image_width), int(settings.image_height)
    matrix, projection = (given.detach().double().cpu() for given in (settings.viewmatrix, settings.projmatrix))
    for name, given in (("viewmatrix", matrix), ("projmatrix", projection)):
        if given.shape not in ((4, 4), (1, 4, 4)):
            raise ValueError(f"{name} has shape {tuple(given.shape)}, not (4, 4)")
    matrix, projection = matrix.reshape(4, 4), projection.reshape(4, 4)
    if not torch.allclose(matrix[:, 3], matrix.new_tensor([0.0, 0.0, 0.0, 1.0])):
        raise ValueError("viewmatrix is no transposed matrix from world to camera: the last column of one is 0 0 0 1")
    lens = torch.linalg.solve(matrix, projection)  # from the camera frame to clip space
    fx, fy = 0.5 * width / settings.tanfovx, 0.5 * height / settings.tanfovy
    w = float(lens[2, 3])
    if not abs(float(lens[3, 3])) < 1e-4 * w:
        raise ValueError("projmatrix is that of no perspective camera")
    seen = (0.5 * width * float(lens[0, 0]) / w, 0.5 * height * float(lens[1, 1]) / w)
    if any(abs(one - other) > _OTHER_LENS * other for one, other in zip(seen, (fx, fy), strict=True)):
        raise ValueError(
            f"projmatrix has focal lengths of {seen[0]:.6g} and {seen[1]:.6g} pixels, "
            f"tanfovx and tanfovy have {fx:.6g} and {fy:.6g}"
        )
    cx, cy = 0.5 * width * (1.0 + float(lens[2, 0]) / w), 0.5 * height * (1.0 + float(lens[2, 1]) / w)
    cx = 0.5 * width if abs(cx - 0.5 * width) < _CENTRED else cx
    cy = 0.5 * height if abs(cy - 0.5 * height) < _CENTRED else cy
    return Camera("", width, height, fx, fy, cx, cy, matrix.T.contiguous().numpy(), NEAR)


def _half_image(settings: GaussianRasterizationSettings, like: Tensor) -> Tensor:
    """Return [2] half the width and the height in pixels."""
    return like.new_tensor([0.5 * settings.image_width, 0.5 * settings.image_height])


def _coefficients(shs: Tensor) -> int:
    """Return how many of SH coefficients [N, K, 3] beside the constant one are used: those of whole degrees."""
    return max(count for count in SHN_COUNTS if count < shs.shape[1])


def _camera_z(settings: GaussianRasterizationSettings, points: Tensor) -> Tensor:
    """Return [N] camera z of points [N, 3]."""
    matrix = settings.viewmatrix.reshape(4, 4).to(points)
    return points @ matrix[:3, 2] + matrix[3, 2]


def _radii(conics: Tensor, boxes: Tensor) -> Tensor:
    """Return [N] int32, three standard deviations along the longest axis, rounded up; 0 where a box is empty.

    conics: [N, 3] inverse covariances xx, xy, yy. boxes: [N, 2] half their sides.
    """
    a, b, c = conics.detach().double().unbind(dim=1)
    determinant = (a * c - b * b).clamp(min=1e-300)
    middle = 0.5 * (a + c) / determinant
    largest = middle + (middle * middle - 1.0 / determinant).clamp(min=0.0).sqrt()
    visible = (boxes > 0).all(dim=1)
    return torch.where(visible, (3.0 * largest.sqrt()).ceil(), 0.0).int()
