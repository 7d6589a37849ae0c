"""Colour: photos in other colour spaces than sRGB, and what turns them into it."""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms

#: A profile that moves no colour by more levels than this is sRGB under another name, and is left alone.
_SAME = 2
#: libpng's threshold: a gamma nearer to sRGB's 1/2.2 than this, relatively, is sRGB.
_GAMMA_STEP = 0.05
_SRGB_GAMMA = 1 / 2.2
#: Modes of Pillow's pixels -> the colour space that a profile for them has.
_SPACES = {"RGB": "RGB ", "L": "GRAY", "CMYK": "CMYK"}


@dataclass(frozen=True, slots=True)
class Colours:
    """How the colours of a file become sRGB.

    name: for messages.
    mode: Pillow's mode of the pixels that ``transform`` takes; "RGB" without one.
    transform: to sRGB by an ICC profile, or None.
    gamma: the file's exponent (PNG's gAMA), or None.
    """

    name: str
    mode: str = "RGB"
    transform: ImageCms.ImageCmsTransform | None = None
    gamma: float | None = None

    def to_rgb(self, image: Image.Image) -> Image.Image:
        """An sRGB image of mode RGB; ``image`` has mode ``self.mode``, or one that Pillow converts to it."""
        if self.transform is not None:
            return self.transform.apply(image if image.mode == self.mode else image.convert(self.mode))
        rgb = image if image.mode == "RGB" else image.convert("RGB")
        if self.gamma is None:
            return rgb
        levels = np.round(255 * self.encoded(np.arange(256) / 255)).astype(int).tolist()
        return rgb.point(levels * 3)

    def encoded(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Values in 0...1 as sRGB has them, by ``gamma`` alone."""
        if self.gamma is None:
            return values
        light = values ** (1 / self.gamma)
        return np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)


#: What needs no conversion.
SRGB = Colours("sRGB")


def colours_of(image: Image.Image) -> Colours:
    """The colours of an opened image; SRGB too where it does not say, or says something that cannot be used."""
    if image.mode == "LAB":
        return _lab()
    mode = _base_mode(image)
    profile = image.info.get("icc_profile")
    if isinstance(profile, bytes) and profile:
        found = _from_profile(profile, mode)
        if found is not None:
            return found
    elif "srgb" not in image.info:
        gamma = image.info.get("gamma")
        if isinstance(gamma, float) and gamma > 0 and abs(gamma / _SRGB_GAMMA - 1) > _GAMMA_STEP:
            return Colours(f"gamma {gamma:.3g}", gamma=gamma)
    return Colours("CMYK without a profile", "CMYK") if mode == "CMYK" else SRGB


def _base_mode(image: Image.Image) -> str:
    if image.mode == "CMYK":
        return "CMYK"
    return "L" if image.mode in ("L", "LA", "La", "1") or image.mode.startswith("I;16") else "RGB"


@lru_cache(maxsize=64)
def _from_profile(data: bytes, mode: str) -> Colours | None:
    """None for a profile that is broken or of another kind of pixels: no reason to refuse the photo."""
    try:
        profile = ImageCms.ImageCmsProfile(io.BytesIO(data))
        space = profile.profile.xcolor_space
        if mode == "L" and space == "RGB ":
            mode = "RGB"
        if space != _SPACES[mode]:
            return None
        # Print profiles are made for the perceptual intent; between screens it may only brighten or darken.
        intent = ImageCms.Intent.PERCEPTUAL if mode == "CMYK" else ImageCms.Intent.RELATIVE_COLORIMETRIC
        transform = ImageCms.buildTransform(profile, ImageCms.createProfile("sRGB"), mode, "RGB", intent)
        if mode != "CMYK" and _is_identity(transform, mode):
            return SRGB
        name = ImageCms.getProfileDescription(profile).strip()
    except Exception:
        # Little CMS and Pillow have many ways to refuse a profile.
        return None
    return Colours(name or "another colour profile", mode, transform)


def _is_identity(transform: ImageCms.ImageCmsTransform, mode: str) -> bool:
    steps = np.linspace(0, 255, 9).round().astype(np.uint8)
    if mode == "L":
        probe = np.arange(256, dtype=np.uint8)[None]
        wanted = np.broadcast_to(probe[..., None], (1, 256, 3))
    else:
        probe = np.stack(np.meshgrid(steps, steps, steps), axis=-1).reshape(1, -1, 3)
        wanted = probe
    found = np.asarray(transform.apply(Image.fromarray(probe)))
    return bool(np.abs(found.astype(int) - wanted.astype(int)).max() <= _SAME)


@lru_cache(maxsize=1)
def _lab() -> Colours:
    transform = ImageCms.buildTransform(ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB"), "LAB", "RGB")
    return Colours("CIE Lab", "LAB", transform)
