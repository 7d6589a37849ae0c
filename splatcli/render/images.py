"""Images of a view: colour, depth, opacity, normals and error as numbers, as 8-bit images and as PNG.

Depth is the mean camera z of what is blended into a pixel, in scene units: along the optical axis, not along the ray.

Normals are the Gaussians' shortest axes, turned towards the camera and blended like colours. Training flattens
Gaussians along surfaces, so these are the surfaces as the model has them. Differences of depths were the other choice:
a blended depth jumps where Gaussians begin and end, and at every silhouette, and differences amplify that.
Axes are those of the camera in OpenGL's convention, x right, y up, z towards the viewer: a surface that faces the
camera is (128, 128, 255).

Error maps show the difference of render and training image, pixel by pixel, in colours whose lightness grows with it.
"""

from __future__ import annotations

import errno
import io
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import imageio.v3 as imageio
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from splatcli.checkpoint.atomic import write_atomically
from splatcli.checkpoint.state import Checkpoint
from splatcli.errors import OutputError
from splatcli.gaussians import SH_C0, Gaussians
from splatcli.rasterizer import render
from splatcli.rasterizer.chunk_bounds import chunk_bounds
from splatcli.rasterizer.reference import rotation_matrices
from splatcli.rasterizer.rendering import Render
from splatcli.scene.camera import Camera
from splatcli.train.backgrounds import BACKGROUNDS, evaluation_background
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
ByteImage = NDArray[np.uint8]


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
        self._rendered += 1
        if self._rendered == _BOUNDED_FROM and self._gaussians.device.type == "cpu":
            self._bounds = chunk_bounds(self._gaussians)
        shown = _render(self._gaussians, camera, self._settings, self._bounds)
        alpha, depth = shown.alpha.cpu().numpy(), shown.depth.cpu().numpy()
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = np.where(alpha > 0, depth / alpha, np.float32(np.inf))
        return RenderedMaps(shown.image, alpha, mean, None if self._axes is None else self._normals(camera, self._axes))

    def depth_range(self, cameras: Sequence[Camera]) -> tuple[float, float]:
        """Return (near, far): the percentiles NEAR_FAR of covered pixels' depths, over a few of the views, shrunk."""
        chosen = np.unique(np.linspace(0, len(cameras) - 1, min(len(cameras), _RANGE_VIEWS)).round().astype(int))
        depths = []
        for index in chosen:
            camera = cameras[index]
            small = (max(1, camera.width // _RANGE_SHRINK), max(1, camera.height // _RANGE_SHRINK))
            maps = self.render_maps(camera.resized(*small))
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
        center = torch.from_numpy(camera.center).to(axes)
        away = (axes * (gaussians.means - center)).sum(-1, keepdim=True) > 0
        flip = torch.tensor([1.0, -1.0, -1.0]).to(axes)
        normals = torch.where(away, -axes, axes) @ rotation.T * flip
        coloured = replace(gaussians, sh0=normals / (2 * SH_C0), shN=gaussians.sh0[:, None][:, :0])
        with torch.no_grad():
            grey = torch.full((3,), 0.5).to(axes)
            antialiased = self._settings.antialiased
            image = render(coloured, camera, background=grey, antialiased=antialiased, bounds=self._bounds).image
        summed = 2 * image.cpu().numpy() - 1
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
    """[H, W, 3] uint8 of each kind among LAYERS. near_far: depths of red and of violet, as of ``depth_range``."""
    made: dict[str, ByteImage] = {}
    for kind in kinds:
        if kind == "rgb":
            made[kind] = to_uint8(maps.rgb)
        elif kind == "alpha":
            made[kind] = _grey(maps.alpha)
        elif kind == "depth":
            made[kind] = depth_image(maps.depth, near_far) * (maps.alpha >= _COVERED)[..., None]
        elif kind == "normals" and maps.normals is not None:
            made[kind] = _bytes(0.5 + 0.5 * maps.normals) * (maps.alpha >= _COVERED)[..., None]
    return made


def depth_image(depth: Floats, near_far: tuple[float, float]) -> ByteImage:
    """Return [..., 3] uint8: Turbo over 1 / depth, red at ``near`` and nearer, violet at ``far`` and farther."""
    near, far = near_far
    if not far > near:
        return turbo(np.full(depth.shape, 0.5))
    with np.errstate(divide="ignore"):
        return turbo((1 / np.maximum(depth, 1e-12) - 1 / far) / (1 / near - 1 / far))


def turbo(position: NDArray[np.floating]) -> ByteImage:
    """Return [..., 3] uint8 sRGB of values 0 (violet) ... 1 (red), clamped."""
    x = np.clip(np.asarray(position, np.float64), 0.0, 1.0)[..., None]
    value = np.zeros((*x.shape[:-1], 3))
    for coefficients in _TURBO[::-1]:
        value = value * x + coefficients
    return _bytes(value)


def side_by_side(parts: Sequence[ByteImage]) -> ByteImage:
    """Return [H, sum of W, 3]: images of one height, from left to right."""
    joined: ByteImage = np.concatenate(list(parts), axis=1)
    return joined


def _grey(values: Floats) -> ByteImage:
    return np.repeat(_bytes(values)[..., None], 3, axis=-1)


def _bytes(values: NDArray[np.floating]) -> ByteImage:
    """Round 0...1 to the nearest of 256 levels."""
    levels: ByteImage = np.round(np.clip(values, 0.0, 1.0) * 255.0).astype(np.uint8)
    return levels


#: Ticks of the error scale (mean of |R|, |G|, |B| differences, 1 = full range). All sheets have one scale, so that they
#: can be compared; values above the last tick are clamped.
TICKS = (0.0, 0.01, 0.05, 0.1, 0.2, 0.4)

#: The colour of masked pixels, which have no error; the map has no grey.
MASKED_COLOUR = (128, 128, 128)

#: CIELAB lightness, chroma and hue in degrees along the map: black, violet, red, orange, pale yellow. Lightness grows
#: evenly, so that equal steps look equal, also to the colour-blind and on paper.
_PATH = (
    (0.0, 0.0, 300.0),
    (24.0, 45.0, 310.0),
    (48.0, 66.0, 378.0),
    (72.0, 66.0, 425.0),
    (96.0, 30.0, 465.0),
)

#: White of sRGB (D65) in XYZ, and XYZ to linear sRGB (IEC 61966-2-1).
_WHITE = np.array([0.9505, 1.0, 1.089])
_TO_RGB = np.array([[3.2406, -1.5372, -0.4986], [-0.9689, 1.8758, 0.0415], [0.0557, -0.2040, 1.0570]])


def heat(fraction: NDArray[np.floating]) -> NDArray[np.uint8]:
    """Return [..., 3] uint8 sRGB of values 0...1, clamped."""
    levels = np.nan_to_num(np.clip(fraction, 0.0, 1.0), nan=1.0) * 255.0
    image: NDArray[np.uint8] = _TABLE[np.round(levels).astype(np.int64)]
    return image


def position(error: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the position of an error on the map, 0...1: its square root, which spreads the small errors."""
    return np.sqrt(np.clip(np.asarray(error, np.float64) / TICKS[-1], 0.0, 1.0))


def error_map(
    truth: NDArray[np.uint8], render: NDArray[np.uint8], hidden: NDArray[np.bool_] | None = None
) -> NDArray[np.uint8]:
    """Return [H, W, 3] uint8: the absolute error of ``render`` against ``truth``, both [H, W, 3] uint8.

    hidden: [H, W] bool, pixels that take no part; they are grey.
    """
    error = np.abs(truth.astype(np.int16) - render.astype(np.int16)).mean(-1) / 255.0
    image = heat(position(error))
    if hidden is not None:
        image[hidden] = MASKED_COLOUR
    return image


def _table() -> NDArray[np.uint8]:
    """[256, 3]: ``_PATH`` in sRGB."""
    at, knots = np.linspace(0.0, 1.0, 256), np.linspace(0.0, 1.0, len(_PATH))
    lightness, chroma, hue = (np.interp(at, knots, column) for column in zip(*_PATH, strict=True))
    y = (lightness + 16.0) / 116.0
    x = y + chroma * np.cos(np.radians(hue)) / 500.0
    z = y - chroma * np.sin(np.radians(hue)) / 200.0
    compressed = np.stack([x, y, z], axis=-1)
    xyz = _WHITE * np.where(compressed > 6 / 29, compressed**3, 3 * (6 / 29) ** 2 * (compressed - 4 / 29))
    linear = (xyz @ _TO_RGB.T).clip(0.0, 1.0)
    curved = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    table: NDArray[np.uint8] = np.round(curved * 255.0).astype(np.uint8)
    return table


_TABLE = _table()


_PICTURE_SUFFIXES = {".jpg", ".jpeg", ".png", ".tif", ".tiff", ".bmp", ".webp", ".exr"}


@dataclass(frozen=True, slots=True)
class RenderSettings:
    """Settings of a render: SH degree (None: the model's), background R G B in 0...1, opacity compensation.

    recolour: returns an image [H, W, 3] as the camera shows it, where a run trained that (PPISP).
    """

    sh_degree: int | None = None
    background: tuple[float, float, float] = (0.0, 0.0, 0.0)
    antialiased: bool = False
    recolour: Callable[[Camera, Tensor], Tensor] | None = None

    @classmethod
    def trained(cls, checkpoint: Checkpoint) -> RenderSettings:
        """Return the settings with which the run of this checkpoint is evaluated; random backgrounds become black."""
        config = checkpoint.config
        recolour = PerViewParams.from_checkpoint(checkpoint).recolour_unseen if config.views.ppisp else None
        background = BACKGROUNDS[evaluation_background(config)]
        return cls(checkpoint.active_sh_degree, background, config.train.antialiased, recolour)


def render_pixels(gaussians: Gaussians, camera: Camera, settings: RenderSettings) -> NDArray[np.uint8]:
    """Render a view to [H, W, 3] uint8."""
    return to_uint8(_render(gaussians, camera, settings).image)


def _render(gaussians: Gaussians, camera: Camera, settings: RenderSettings, bounds: Tensor | None = None) -> Render:
    background = torch.tensor(settings.background, dtype=torch.float32, device=gaussians.device)
    with torch.no_grad():
        shown = render(
            gaussians,
            camera,
            sh_degree=settings.sh_degree,
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


def write_bytes(path: Path, payload: bytes) -> None:
    """Write a file atomically, and create its folders. Raise OutputError."""
    make_parent_folder(path)
    write_atomically(path, lambda file: file.write(payload), what="file", stream=True)


def make_parent_folder(path: Path) -> None:
    """Create the folders of a file. Raise OutputError, also if the path is a folder."""
    try:
        if path.is_dir():  # also the empty name
            raise OutputError("this is a folder, not a file", where=path, remedy="name a file")
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        remedy = "write elsewhere, or free disk space"
        raise OutputError(f"cannot create the folder: {error.strerror}", where=path.parent, remedy=remedy) from None


def check_place(path: Path) -> None:
    """Raise OutputError where a file or a folder can surely not be written, before hours of work; change nothing."""
    if os.path.exists(path):  # also a pipe, or a name of an open file
        return
    place = Path(os.path.realpath(path))
    while not os.path.lexists(folder := place.parent):
        place = folder
    fault = errno.ENOTDIR if not folder.is_dir() else 0 if os.access(folder, os.W_OK | os.X_OK) else errno.EACCES
    if fault:
        raise OutputError(f"cannot write here: {os.strerror(fault)}", where=path, remedy="choose another place with -o")


def image_paths(names: Iterable[str], folder: Path, suffix: str = ".png") -> list[Path]:
    """Return the image file of each view: its name with ``suffix``, always inside ``folder``, all distinct.

    Names come from untrusted files: drives, roots and ``..`` in them are dropped.
    """
    taken: set[str] = set()
    paths = []
    for name in names:
        parts = [part for part in PurePosixPath(name.replace("\\", "/")).parts if part not in ("/", "..", ".")]
        parts = [part.replace("\0", "").replace(":", "_") for part in parts] or ["view"]
        named = PurePosixPath(*parts)
        stem = str(named.with_suffix("") if named.suffix.lower() in _PICTURE_SUFFIXES else named)
        candidate, count = stem, 2
        while candidate.casefold() in taken:
            candidate, count = f"{stem}_{count}", count + 1
        taken.add(candidate.casefold())
        paths.append(folder / f"{candidate}{suffix}")
    return paths
