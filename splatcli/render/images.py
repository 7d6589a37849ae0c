"""Images of a view: colour, depth, opacity and normals as numbers, as 8-bit images and as PNG.

Depth is the mean camera z of what is blended into a pixel, in scene units: along the optical axis, not along the ray.
That of a panorama is the distance.

Normals are the Gaussians' shortest axes, turned towards the camera and blended like colours. Training flattens
Gaussians along surfaces, so these are the surfaces as the model has them. Differences of depths were the other choice:
a blended depth jumps where Gaussians begin and end, and at every silhouette, and differences amplify that.
Axes are those of the camera in OpenGL's convention, x right, y up, z towards the viewer: a surface that faces the
camera is (128, 128, 255).
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import imageio.v3 as imageio
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from splatcli.checkpoint.state import Checkpoint
from splatcli.config import Config
from splatcli.gaussians import SH_C0, Gaussians
from splatcli.rasterizer import render
from splatcli.rasterizer.rendering import Render, chunk_bounds
from splatcli.render.colour_maps import ByteImage, Floats, by_rows, depth_image, to_bytes
from splatcli.render.panorama import Panorama, render_panorama
from splatcli.rotation import rotation_matrices
from splatcli.scene.camera import Camera
from splatcli.sizes import evenly
from splatcli.train.backgrounds import evaluation_colour
from splatcli.train.per_view_params import PerViewParams

#: Kinds of image: of the model alone, and compared with the view's image.
LAYERS = ("rgb", "depth", "alpha", "normals")
COMPARED = ("photo", "error")

#: Depth and normals are shown where alpha is at least this.
_COVERED = 0.5
#: Percentiles of depth that are shown red and violet.
NEAR_FAR = (2.0, 98.0)
#: Number of views that the depth range is measured on, and the factor by which they are shrunk.
_RANGE_VIEWS, _RANGE_SHRINK = 12, 4
#: Bounds of chunks are made for this view of a renderer: one view alone takes longer with them.
_BOUNDED_FROM = 2
#: Gaussians per chunk in shortest_axes().
_CHUNK = 1 << 18


@dataclass(frozen=True, slots=True, eq=False)
class RenderedMaps:
    """The maps of one rendered view, on the CPU.

    rgb      [H, W, 3]  colour over the background, display space, not clamped
    alpha    [H, W]     coverage, 0...1
    depth    [H, W]     mean camera z, scene units; infinite where alpha is 0
    normals  [H, W, 3]  unit, or 0 where alpha is 0; None when not requested
    """

    rgb: Tensor
    alpha: Floats
    depth: Floats
    normals: Floats | None


class ModelRenderer:
    """Renders views of one model, whose Gaussians stay as they are meanwhile.

    with_normals: also render normals, which takes a second render a view.
    """

    def __init__(self, gaussians: Gaussians, settings: RenderSettings, *, with_normals: bool = False) -> None:
        self._gaussians = gaussians
        self._settings = settings
        self._axes = shortest_axes(gaussians) if with_normals else None
        self._rendered = 0
        self._bounds: Tensor | None = None

    def render_maps(self, camera: Camera) -> RenderedMaps:
        """Render one view. Raise ResourceError as ``render``."""
        if isinstance(camera, Panorama):
            maps = render_panorama(camera, lambda face: self._maps(face, replace(self._settings, recolour=None)))
            recolour = self._settings.recolour
            return maps if recolour is None else replace(maps, rgb=recolour(camera, maps.rgb))
        return self._maps(camera, self._settings)

    def _maps(self, camera: Camera, settings: RenderSettings) -> RenderedMaps:
        self._rendered += 1
        if self._rendered == _BOUNDED_FROM and self._gaussians.device.type == "cpu":
            self._bounds = chunk_bounds(self._gaussians)
        shown = _render(self._gaussians, camera, settings, self._bounds)
        rgb, alpha = shown.image, shown.alpha.cpu().numpy()
        mean = by_rows(_mean_depth, shown.depth.cpu().numpy(), alpha)
        del shown  # and with it the sums of depths, before there are normals
        return RenderedMaps(rgb, alpha, mean, None if self._axes is None else self._normals(camera, self._axes))

    def depth_range(self, cameras: Sequence[Camera]) -> tuple[float, float]:
        """Return (near, far): the percentiles NEAR_FAR of covered pixels' depths, over a few of the views, shrunk."""
        depths = []
        for camera in evenly(cameras, _RANGE_VIEWS, ends=True):
            width, height = (max(1, side // _RANGE_SHRINK) for side in (camera.width, camera.height))
            maps = self.render_maps(camera.resized(width, height))
            depths.append(maps.depth[maps.alpha >= _COVERED])
        known = np.concatenate(depths)
        if known.size == 0:
            return 1.0, 1.0
        near, far = np.percentile(known, NEAR_FAR)
        return float(near), float(far)

    def _normals(self, camera: Camera, axes: Tensor) -> Floats:
        """Return [H, W, 3]: the axes rendered as colours 0.5 + n / 2 over grey, which means no normal."""
        gaussians = self._gaussians
        rotation = torch.from_numpy(camera.viewmat[:3, :3]).to(axes)
        rays = gaussians.means - torch.from_numpy(camera.center).to(axes)
        if camera.model == "ortho":
            rays = rotation[2]
        away = (axes * rays).sum(-1, keepdim=True) > 0
        flip = torch.tensor([1.0, -1.0, -1.0]).to(axes)
        normals = torch.where(away, -axes, axes) @ rotation.T * flip
        coloured = replace(gaussians, sh0=normals / (2 * SH_C0), shN=gaussians.sh0[:, None][:, :0])
        with torch.no_grad():
            grey = torch.full((3,), 0.5).to(axes)
            antialiased = self._settings.antialiased
            image = render(coloured, camera, background=grey, antialiased=antialiased, bounds=self._bounds).image
        return by_rows(_unit_normals, image.cpu().numpy())


def _mean_depth(depth: Floats, alpha: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(alpha > 0, depth / alpha, np.float32(np.inf))


def _unit_normals(image: Floats) -> Floats:
    summed = 2 * image - 1
    length = np.linalg.norm(summed, axis=-1, keepdims=True)
    # Opposite normals cancel out, and only rounding errors are left.
    return np.where(length > 1e-4, summed / np.maximum(length, 1e-4), np.float32(0.0))


def shortest_axes(gaussians: Gaussians) -> Tensor:
    """Return [N, 3] unit vectors in the world: the shortest axis of each Gaussian, of arbitrary sign."""
    axes = torch.empty_like(gaussians.means)
    with torch.no_grad():
        for begin in range(0, len(gaussians), _CHUNK):
            part = slice(begin, begin + _CHUNK)
            rotations = rotation_matrices(gaussians.quats[part])
            thinnest = gaussians.log_scales[part].argmin(-1)
            axes[part] = rotations.gather(2, thinnest[:, None, None].expand(-1, 3, 1))[..., 0]
    return axes


def median_distance(gaussians: Gaussians, camera: Camera) -> float:
    """Return the median camera z of the Gaussians in front of a camera; of those with opacity above 0.5, if any."""
    row = torch.from_numpy(camera.viewmat[2]).to(gaussians.means)
    z = gaussians.means @ row[:3] + row[3]
    before = z > 0
    chosen = before & (gaussians.logit_opacities > 0)
    z = z[chosen if bool(chosen.any()) else before]
    return float(z.median()) if z.numel() else 0.0


def layer_images(maps: RenderedMaps, kinds: Iterable[str], near_far: tuple[float, float]) -> dict[str, ByteImage]:
    """Return [H, W, 3] uint8 of each kind in LAYERS. near_far: depths of red and of violet, as of ``depth_range``."""
    made: dict[str, ByteImage] = {}
    for kind in kinds:
        if kind == "rgb":
            made[kind] = to_uint8(maps.rgb)
        elif kind == "alpha":
            made[kind] = by_rows(_grey, maps.alpha)
        elif kind == "depth":
            made[kind] = by_rows(
                lambda depth, alpha: _where(depth_image(depth, near_far), alpha), maps.depth, maps.alpha
            )
        elif kind == "normals" and maps.normals is not None:
            made[kind] = by_rows(lambda n, alpha: _where(to_bytes(0.5 + 0.5 * n), alpha), maps.normals, maps.alpha)
    return made


def side_by_side(parts: Sequence[ByteImage]) -> ByteImage:
    """Return [H, sum of W, 3]: images of one height, from left to right."""
    joined: ByteImage = np.concatenate(list(parts), axis=1)
    return joined


def _where(image: ByteImage, alpha: Floats) -> ByteImage:
    """Return the image where pixels are covered, else black."""
    return image * (alpha >= _COVERED)[..., None]


def _grey(values: Floats) -> ByteImage:
    return np.repeat(to_bytes(values)[..., None], 3, axis=-1)


@dataclass(frozen=True, slots=True)
class RenderSettings:
    """Settings of a render: background R G B in 0...1, opacity compensation. All SH coefficients count.

    recolour: returns an image [H, W, 3] as the camera shows it, where a run trained that (PPISP).
    """

    background: tuple[float, float, float] = (0.0, 0.0, 0.0)
    antialiased: bool = False
    recolour: Callable[[Camera, Tensor], Tensor] | None = None

    @classmethod
    def trained(cls, checkpoint: Checkpoint) -> RenderSettings:
        """Return the settings with which the run of this checkpoint is evaluated; random backgrounds become black."""
        config = checkpoint.config
        return cls.of_run(config, PerViewParams.from_checkpoint(checkpoint) if config.views.ppisp else PerViewParams())

    @classmethod
    def of_run(cls, config: Config, per_view_params: PerViewParams) -> RenderSettings:
        """Return the settings with which a run is evaluated, as trained()."""
        recolour = per_view_params.recolour_unseen if config.views.ppisp else None
        return cls(evaluation_colour(config), config.train.antialiased, recolour)


def render_pixels(gaussians: Gaussians, camera: Camera, settings: RenderSettings) -> NDArray[np.uint8]:
    """Render a view to [H, W, 3] uint8."""
    return to_uint8(_render(gaussians, camera, settings).image)


def _render(gaussians: Gaussians, camera: Camera, settings: RenderSettings, bounds: Tensor | None = None) -> Render:
    background = torch.tensor(settings.background, dtype=torch.float32, device=gaussians.device)
    with torch.no_grad():
        shown = render(
            gaussians,
            camera,
            background=background,
            antialiased=settings.antialiased,
            bounds=bounds,
        )
        return shown if settings.recolour is None else replace(shown, image=settings.recolour(camera, shown.image))


def to_uint8(image: Tensor) -> NDArray[np.uint8]:
    """Convert [H, W, 3] float in 0...1 to uint8, rounded to nearest."""
    return image.detach().clamp(0.0, 1.0).mul_(255.0).round_().to(torch.uint8).cpu().numpy()


def png_bytes(pixels: NDArray[np.uint8]) -> bytes:
    """Encode [H, W, 3] pixels as PNG. Raise MemoryError.

    Runs and Huffman codes alone, without a search for repeats: a fifth of the time for files of about the same size.
    """
    buffer = io.BytesIO()
    try:
        imageio.imwrite(buffer, pixels, extension=".png", plugin="pillow", compress_level=1, compress_type=zlib.Z_RLE)
    except OSError as error:  # Pillow reports a lack of memory as a misconfigured codec
        raise MemoryError(str(error)) from None
    return buffer.getvalue()


def jpeg_bytes(pixels: NDArray[np.uint8], quality: int) -> bytes:
    """Encode [H, W, 3] pixels as JPEG, without subsampling, which smears coloured edges."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=quality, subsampling=0)
    return buffer.getvalue()


def shrunk(pixels: NDArray[np.uint8], side: int) -> Image.Image:
    """Return [H, W, 3] pixels with a longer side of at most ``side`` pixels."""
    height, width = pixels.shape[:2]
    factor = min(1.0, side / max(width, height))
    size = max(1, round(width * factor)), max(1, round(height * factor))
    return Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS)
