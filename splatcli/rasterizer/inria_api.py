"""The interface of INRIA's diff_gaussian_rasterization, computed by splat's kernels.

Programs that are written for it import GaussianRasterizationSettings and GaussianRasterizer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from splatcli.errors import UsageError
from splatcli.gaussians import SHN_COUNTS, Gaussians
from splatcli.rasterizer.context import Z_FAR
from splatcli.rasterizer.gsplat_api import raw_geometry
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
    viewmatrix, projmatrix: [4, 4] world to camera and world to clip space, transposed: for row vectors.
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
    debug: bool
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
        means2D: Tensor,
        opacities: Tensor,
        shs: Tensor | None = None,
        colors_precomp: Tensor | None = None,
        scales: Tensor | None = None,
        rotations: Tensor | None = None,
        cov3D_precomp: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the image [3, H, W] and the radii [N] int32; with ``antialiasing`` set also inverse depth [1, H, W].

        means3D: [N, 3] world units. means2D: [N, 2] or more columns, whose values are not read. The first two get the
            gradient of the projected means, in units of half the image.
        opacities: [N, 1] in 0..1.
        shs: [N, K, 3] SH coefficients; or colors_precomp: [N, 3].
        scales: [N, 3] standard deviations, world units. rotations: [N, 4] w x y z.
        cov3D_precomp: not supported.

        A radius is three standard deviations, in pixels, rounded up; 0 of a Gaussian that does not show. Inverse depth
        is the sum of blending weight divided by camera z. Poses get no gradient.
        Raises UsageError without colours or shapes, with both kinds of colours, and for covariances; ValueError for
        shapes that do not fit, and for matrices of no perspective camera; ResourceError where there are no kernels.
        """
        settings, n = self.raster_settings, len(means3D)
        if cov3D_precomp is not None:
            raise UsageError("cov3D_precomp is not supported", remedy="give scales and rotations")
        if scales is None or rotations is None:
            raise UsageError("there are no shapes", remedy="give scales and rotations")
        if (shs is None) == (colors_precomp is None):
            raise UsageError("there are no colours, or two kinds", remedy="give shs or colors_precomp")
        for name, tensor, shape in (
            ("means3D", means3D, (n, 3)),
            ("means2D", means2D[:, :2], (n, 2)),
            ("scales", scales, (n, 3)),
            ("rotations", rotations, (n, 4)),
        ):
            if tensor.shape != shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not {shape}")
        raw = raw_geometry(means3D, rotations, scales * settings.scale_modifier, opacities.reshape(n))
        view = _view(settings, raw, shs, colors_precomp, settings.bg)
        projected = view.project()
        half = means2D.new_tensor([0.5 * settings.image_width, 0.5 * settings.image_height])
        image = _channels_first(view.blend(means2D[:, :2] * half).image)
        radii = _radii(projected.conics, projected.radii)
        if settings.antialiasing is None:
            return image, radii
        z = _camera_z(settings, means3D)
        inverse = torch.where(z > NEAR, 1.0 / z, 0.0)[:, None]
        return image, radii, _channels_first(_view(settings, raw, None, inverse, z.new_zeros(1)).blend().image)


def camera_of(settings: GaussianRasterizationSettings) -> Camera:
    """Return the camera of ``settings``. Raises ValueError for matrices of no perspective camera."""
    width, height = int(settings.image_width), int(settings.image_height)
    matrix, projection = settings.viewmatrix.detach().double().cpu(), settings.projmatrix.detach().double().cpu()
    if matrix.shape != (4, 4) or not torch.allclose(matrix[:, 3], matrix.new_tensor([0.0, 0.0, 0.0, 1.0])):
        raise ValueError("viewmatrix is no transposed matrix [4, 4] from world to camera: its last column is 0 0 0 1")
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


def _view(
    settings: GaussianRasterizationSettings,
    raw: tuple[Tensor, Tensor, Tensor, Tensor],
    shs: Tensor | None,
    colors: Tensor | None,
    background: Tensor,
) -> ViewRender:
    """Return the view of Gaussians with these raw means, quaternions, log-scales and logits, projected.

    shs: [N, K, 3]; None: colors [N, D]. background: [D].
    """
    means = raw[0]
    if shs is not None:
        if shs.dim() != 3 or shs.shape[1] < 1:
            raise ValueError(f"shs has shape {tuple(shs.shape)}, not ({len(means)}, K, 3)")
        count = max(count for count in SHN_COUNTS if count < shs.shape[1])
        sh0, shN = shs[:, 0], shs[:, 1 : 1 + count]
    else:
        sh0, shN = means.new_zeros(len(means), 3), means.new_zeros(len(means), 0, 3)
    gaussians = Gaussians(*raw, sh0, shN)
    return ViewRender(
        gaussians,
        camera_of(settings),
        sh_degree=min(int(settings.sh_degree), gaussians.sh_degree),
        background=background.to(means),
        antialiased=bool(settings.antialiasing),
        backend=backend_for(means.device, torch.float64 if means.dtype == torch.float64 else torch.float32),
        z_range=(NEAR, Z_FAR),
        colors=colors,
    )


def _camera_z(settings: GaussianRasterizationSettings, points: Tensor) -> Tensor:
    """Return [N] camera z of points [N, 3]."""
    matrix = settings.viewmatrix.to(points)
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


def _channels_first(image: Tensor) -> Tensor:
    """Return [D, H, W] of an image [H, W, D]."""
    return image.permute(2, 0, 1).contiguous()
