"""Layers of a view: colour, depth, opacity and normals as numbers, and as 8-bit pictures.

Depth is the mean camera z of what is blended into a pixel, in scene units: along the optical axis, not along the ray.

Normals are the Gaussians' shortest axes, turned towards the camera and blended like colours. Training flattens
Gaussians along surfaces, so that these are the surfaces as the model has them. Differences of depths were the other
choice: a blended depth jumps where Gaussians begin and end, and at every silhouette, and differences make that louder.
Axes are those of the camera in OpenGL's way, x right, y up, z towards the viewer: what faces the camera is
(128, 128, 255).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from splatcli.gaussians import Gaussians
from splatcli.rasterizer import render
from splatcli.rasterizer.reference_projection import rotation_matrices
from splatcli.render.images import RenderSettings, to_uint8
from splatcli.scene.camera import Camera

#: What can be shown of a model, and what a photo is needed for.
LAYERS = ("rgb", "depth", "alpha", "normals")
COMPARED = ("photo", "error")

#: The constant SH basis function.
_SH_C0 = 0.28209479177387814
#: Depth and normals are shown where a pixel is more covered than not.
_COVERED = 0.5
#: Shares of the depths that are nearer than red and than violet.
NEAR_FAR = (2.0, 98.0)
#: Views that the range of depths is taken from, and how much smaller than they are shown.
_RANGE_VIEWS, _RANGE_SHRINK = 12, 4
#: Gaussians whose shortest axes are found at once.
_CHUNK = 1 << 18

#: Turbo, A. Mikhailov's colour map: R, G, B as polynomials in the position, lowest power first, as published with it.
_TURBO = np.array(
    [
        [0.13572138, 0.09140261, 0.10667330],
        [4.61539260, 2.19418839, 12.64194608],
        [-42.66032258, 4.84296658, -60.58204836],
        [132.13108234, -14.18503333, 110.36276771],
        [-152.94239396, 4.27729857, -89.90310912],
        [59.28637943, 2.82956604, 27.34824973],
    ]
)

Floats = NDArray[np.float32]
Picture = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class RenderedMaps:
    """What a camera sees, on the CPU.

    rgb      [H, W, 3]  colour over the background, display space, not clamped
    alpha    [H, W]     coverage, 0...1
    depth    [H, W]     mean camera z, scene units; infinite where nothing is
    normals  [H, W, 3]  unit, or 0 where nothing is; None when they were not asked for
    """

    rgb: Tensor
    alpha: Floats
    depth: Floats
    normals: Floats | None


class Viewer:
    """Renders views of one model. look: how it is shown. with_normals: a second render a view."""

    def __init__(self, gaussians: Gaussians, look: RenderSettings, *, with_normals: bool = False) -> None:
        self._gaussians = gaussians
        self._look = look
        self._axes = shortest_axes(gaussians) if with_normals else None

    def see(self, camera: Camera) -> RenderedMaps:
        """One view. Raises ResourceError as ``render``."""
        look = self._look
        background = torch.tensor(look.background, dtype=torch.float32, device=self._gaussians.device)
        with torch.no_grad():
            shown = render(
                self._gaussians, camera, sh_degree=look.sh_degree, background=background, antialiased=look.antialiased
            )
        alpha, depth = shown.alpha.cpu().numpy(), shown.depth.cpu().numpy()
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = np.where(alpha > 0, depth / alpha, np.float32(np.inf))
        return RenderedMaps(shown.image, alpha, mean, None if self._axes is None else self._normals(camera, self._axes))

    def depth_range(self, cameras: Sequence[Camera]) -> tuple[float, float]:
        """(near, far) between which NEAR_FAR of the depths of covered pixels lie, over a few of the views, shrunk."""
        chosen = np.unique(np.linspace(0, len(cameras) - 1, min(len(cameras), _RANGE_VIEWS)).round().astype(int))
        depths = []
        for index in chosen:
            camera = cameras[index]
            small = (max(1, camera.width // _RANGE_SHRINK), max(1, camera.height // _RANGE_SHRINK))
            sight = self.see(camera.resized(*small))
            depths.append(sight.depth[sight.alpha >= _COVERED])
        known = np.concatenate(depths)
        if known.size == 0:
            return 1.0, 1.0
        near, far = np.percentile(known, NEAR_FAR)
        return float(near), float(far)

    def _normals(self, camera: Camera, axes: Tensor) -> Floats:
        """[H, W, 3]: the axes as colours 0.5 + n / 2 over the grey that stands for none."""
        gaussians = self._gaussians
        rotation = torch.from_numpy(camera.viewmat[:3, :3]).to(axes)
        center = torch.from_numpy(camera.center).to(axes)
        away = (axes * (gaussians.means - center)).sum(-1, keepdim=True) > 0
        flip = torch.tensor([1.0, -1.0, -1.0]).to(axes)
        normals = torch.where(away, -axes, axes) @ rotation.T * flip
        coloured = replace(gaussians, sh0=normals / (2 * _SH_C0), shN=gaussians.sh0[:, None][:, :0])
        with torch.no_grad():
            grey = torch.full((3,), 0.5).to(axes)
            image = render(coloured, camera, background=grey, antialiased=self._look.antialiased).image
        summed = 2 * image.cpu().numpy() - 1
        length = np.linalg.norm(summed, axis=-1, keepdims=True)
        # Of opposite normals nothing but rounding may be left.
        return np.where(length > 1e-4, summed / np.maximum(length, 1e-4), np.float32(0.0))


def shortest_axes(gaussians: Gaussians) -> Tensor:
    """[N, 3] unit, world: the axis of each Gaussian along which it is thinnest; which way it points is arbitrary."""
    axes = torch.empty_like(gaussians.means)
    with torch.no_grad():
        for begin in range(0, len(gaussians), _CHUNK):
            part = slice(begin, begin + _CHUNK)
            rotations = rotation_matrices(gaussians.quats[part])
            thinnest = gaussians.log_scales[part].argmin(-1)
            axes[part] = rotations.gather(2, thinnest[:, None, None].expand(-1, 3, 1))[..., 0]
    return axes


def median_distance(gaussians: Gaussians, camera: Camera) -> float:
    """The median camera z of the Gaussians before a camera, those that are more opaque than not where there are any."""
    row = torch.from_numpy(camera.viewmat[2]).to(gaussians.means)
    z = gaussians.means @ row[:3] + row[3]
    before = z > 0
    chosen = before & (gaussians.logit_opacities > 0)
    z = z[chosen if bool(chosen.any()) else before]
    return float(z.median()) if z.numel() else 0.0


def pictures(sight: RenderedMaps, kinds: Iterable[str], near_far: tuple[float, float]) -> dict[str, Picture]:
    """[H, W, 3] uint8 of each kind among LAYERS. near_far: depths of red and of violet, as of ``depth_range``."""
    made: dict[str, Picture] = {}
    for kind in kinds:
        if kind == "rgb":
            made[kind] = to_uint8(sight.rgb)
        elif kind == "alpha":
            made[kind] = _grey(sight.alpha)
        elif kind == "depth":
            made[kind] = depth_picture(sight.depth, near_far) * (sight.alpha >= _COVERED)[..., None]
        elif kind == "normals" and sight.normals is not None:
            made[kind] = _bytes(0.5 + 0.5 * sight.normals) * (sight.alpha >= _COVERED)[..., None]
    return made


def depth_picture(depth: Floats, near_far: tuple[float, float]) -> Picture:
    """[..., 3] uint8: Turbo over 1 / depth, red at ``near`` and before, violet at ``far`` and behind."""
    near, far = near_far
    if not far > near:
        return turbo(np.full(depth.shape, 0.5))
    with np.errstate(divide="ignore"):
        return turbo((1 / np.maximum(depth, 1e-12) - 1 / far) / (1 / near - 1 / far))


def turbo(position: NDArray[np.floating]) -> Picture:
    """[..., 3] uint8 sRGB of values 0 (violet) ... 1 (red); what lies outside is clamped."""
    x = np.clip(np.asarray(position, np.float64), 0.0, 1.0)[..., None]
    value = np.zeros((*x.shape[:-1], 3))
    for coefficients in _TURBO[::-1]:
        value = value * x + coefficients
    return _bytes(value)


def side_by_side(parts: Sequence[Picture]) -> Picture:
    """[H, sum of W, 3] pictures of one height, from left to right."""
    joined: Picture = np.concatenate(list(parts), axis=1)
    return joined


def _grey(values: Floats) -> Picture:
    return np.repeat(_bytes(values)[..., None], 3, axis=-1)


def _bytes(values: NDArray[np.floating]) -> Picture:
    """0...1 to the nearest of 256 levels."""
    levels: Picture = np.round(np.clip(values, 0.0, 1.0) * 255.0).astype(np.uint8)
    return levels
