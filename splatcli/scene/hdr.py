"""HDR and wide gamut to sRGB, for frames of videos and images that name their colours without an ICC profile.

Phones record HDR by default, in HLG or PQ with the primaries of BT.2020; ffmpeg writes frames of it as PNG files that
say so, and cameras HEIF images. Decoders give the samples as they are, which look pale on a display of sRGB, and
training would learn that. For videos also the matrix of HD ones that do not name theirs. Sources: ITU-R BT.2100 (HLG,
PQ), BT.2408 (reference white), BT.2087 (primaries), H.273 (codes), IEC 61966-2-1 (sRGB), Adobe RGB (1998).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Transfer functions of HDR, by ffmpeg's names, as people know them.
HDR = {"arib-std-b67": "HLG", "smpte2084": "PQ"}
#: Primaries, by ffmpeg's names, and Adobe RGB's -> linear RGB of them to linear RGB of sRGB.
_TO_SRGB = {
    "adobe": ((1.398356, -0.398356, 0.0), (0.0, 1.0, 0.0), (0.0, -0.042929, 1.042929)),
    "bt2020": ((1.660491, -0.587641, -0.072850), (-0.124550, 1.132900, -0.008349), (-0.018151, -0.100579, 1.118730)),
    "smpte432": ((1.224940, -0.224940, 0.0), (-0.042057, 1.042057, 0.0), (-0.019638, -0.078636, 1.098274)),
}
#: Primaries -> their name for people.
_NAMES = {"adobe": "Adobe RGB", "bt2020": "BT.2020", "smpte432": "Display P3"}
#: H.273's codes -> ffmpeg's names: primaries, transfer functions.
_PRIMARIES = {9: "bt2020", 12: "smpte432"}
_TRANSFERS = {16: "smpte2084", 18: "arib-std-b67"}
#: The exponent of Adobe RGB.
_ADOBE_GAMMA = 563 / 256
#: Luminance of the primaries of BT.2020.
_LUMINANCE = (0.2627, 0.6780, 0.0593)
#: cd/m^2: of white in a scene, which becomes white of sRGB up to the tone curve, and of the brightest pixel.
_WHITE, _PEAK = 203.0, 1000.0
#: Up to this part of white the tone curve changes nothing.
_KNEE = 0.5
#: Pixels that are converted at once: they stay in the cache.
_STRIP = 1 << 16
#: Above either, longer side and shorter, a video that names no matrix has that of BT.709, else of BT.601.
_HD = (1279, 576)


@dataclass(frozen=True, slots=True)
class Colour:
    """Matrix, primaries and transfer function that a file names, by ffmpeg's names; empty where it names none."""

    matrix: str = ""
    primaries: str = ""
    transfer: str = ""

    @property
    def hdr(self) -> str | None:
        """ "HLG" or "PQ", or None without HDR."""
        return HDR.get(self.transfer)

    @property
    def converts(self) -> bool:
        """Whether its samples are other than sRGB, so that to_srgb() has something to do."""
        return self.hdr is not None or self.primaries in _TO_SRGB

    @property
    def name(self) -> str:
        """Name for messages of colours that are converted."""
        return " ".join(filter(None, (_NAMES.get(self.primaries), self.hdr)))

    def assumed_matrix(self, width: int, height: int) -> str | None:
        """Return the matrix to convert by where ffmpeg would assume another one, else None."""
        hd = max(width, height) > _HD[0] or min(width, height) > _HD[1]
        return "bt709" if hd and not self.matrix else None


#: Colours that cameras name in EXIF alone.
ADOBE_RGB = Colour(primaries="adobe", transfer="adobe")


def coded(primaries: int, transfer: int, matrix: str = "") -> Colour:
    """Return the colours of H.273's codes, as videos, HEIF images and PNG's cICP chunk have them."""
    return Colour(matrix, _PRIMARIES.get(primaries, ""), _TRANSFERS.get(transfer, ""))


#: ``yuv420p10le(tv, bt2020nc/bt2020/arib-std-b67, progressive)``; one word where the three are the same.
_WORDS = re.compile(r"\((?P<words>[^)]*)\)")
_UNKNOWN = ("unknown", "unspecified", "reserved")
_ONE_FOR_ALL = ("bt709", "smpte170m", "bt470bg", "smpte240m", "gbr")


def colour_of(pixel_format: str) -> Colour:
    """Return the colours that ffmpeg's description of a pixel format names."""
    found = _WORDS.search(pixel_format)
    for word in (found["words"] if found else "").split(","):
        parts = [("" if part in _UNKNOWN else part) for part in word.strip().split("/")]
        if len(parts) == 3:
            return Colour(*parts)
        if parts[0] in _ONE_FOR_ALL:
            return Colour(*parts * 3)
    return Colour(matrix="" if pixel_format.startswith("yuv") else "gbr")


def to_srgb(frame: NDArray[np.uint16], colour: Colour) -> NDArray[np.uint8]:
    """Return an image [H, W, 3] of 16 bits in sRGB. Light brighter than white is compressed up to 1,000 cd/m^2."""
    result = np.empty(frame.shape, np.uint8)
    rows = max(1, _STRIP // max(1, frame.shape[1]))
    for start in range(0, len(frame), rows):
        strip = slice(start, start + rows)
        result[strip] = _strip_to_srgb(frame[strip], colour)
    return result


def _strip_to_srgb(frame: NDArray[np.uint16], colour: Colour) -> NDArray[np.uint8]:
    planes = np.ascontiguousarray(frame.transpose(2, 0, 1))  # [3, H, W]
    if colour.transfer == "smpte2084":
        light = _pq_light()[planes]
    elif colour.transfer == "arib-std-b67":
        light = _hlg_light()[planes]
        # The system's gamma, from the light of the scene to that of a display of 1,000 cd/m^2, acts on luminance.
        luminance = _weighted(_LUMINANCE, light)
        light *= np.float32(_PEAK / _WHITE) * np.power(luminance, np.float32(0.2))
    else:
        light = (_adobe_light if colour.transfer == "adobe" else _srgb_light)()[planes]
    if colour.primaries in _TO_SRGB:
        light = np.stack([_weighted(weights, light) for weights in _TO_SRGB[colour.primaries]])
    np.maximum(light, 0.0, out=light)
    if colour.hdr is not None:
        brightest = light.max(axis=0)
        bright = brightest > _KNEE
        light[:, bright] *= _tone(brightest[bright]) / brightest[bright]
    np.minimum(light, 1.0, out=light)
    light *= np.float32(65535.0)
    light += np.float32(0.5)
    return _srgb_code()[light.astype(np.uint16).transpose(1, 2, 0)]


def _weighted(weights: Sequence[float], planes: NDArray[np.float32]) -> NDArray[np.float32]:
    first, *others = (np.float32(weight) * plane for weight, plane in zip(weights, planes, strict=True))
    for other in others:
        first += other
    return np.asarray(first, np.float32)


def _tone(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a Moebius map of x above the knee, that begins there as x does, that takes the peak to 1."""
    peak, j = _PEAK / _WHITE, _KNEE
    # f(x) = 1 - (1 - j) (peak - x) / ((peak - j) + c (x - j)): f(j) = j, f(peak) = 1, and f'(j) = 1 gives c.
    c = (peak - j) / (1 - j) - 1
    x = np.minimum(x, np.float32(peak))
    return (1 - (1 - j) * (peak - x) / ((peak - j) + c * (x - j))).astype(np.float32)


def srgb_encoded(light: NDArray[np.floating[Any]]) -> NDArray[Any]:
    """Return linear light, 0 to 1, as sRGB codes it."""
    return np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)


def srgb_decoded(code: NDArray[np.floating[Any]]) -> NDArray[Any]:
    """Return the linear light of values of sRGB, 0 to 1."""
    return np.where(code <= 0.04045, code / 12.92, ((code + 0.055) / 1.055) ** 2.4)


def _codes() -> NDArray[np.float64]:
    return np.arange(65536) / 65535.0


@cache
def _hlg_light() -> NDArray[np.float32]:
    """Light of the scene, 1 at the peak, of each code: the inverse of HLG's OETF."""
    a, b, c = 0.17883277, 0.28466892, 0.55991073
    code = _codes()
    return np.where(code <= 0.5, code**2 / 3, (np.exp((code - c) / a) + b) / 12).astype(np.float32)


@cache
def _pq_light() -> NDArray[np.float32]:
    """Light of a display, 1 at white, of each code: PQ's EOTF."""
    m1, m2, c1, c2, c3 = 2610 / 16384, 2523 / 32, 3424 / 4096, 2413 / 128, 2392 / 128
    root = _codes() ** (1 / m2)
    return ((10_000.0 / _WHITE) * (np.maximum(root - c1, 0) / (c2 - c3 * root)) ** (1 / m1)).astype(np.float32)


@cache
def _srgb_light() -> NDArray[np.float32]:
    return srgb_decoded(_codes()).astype(np.float32)


@cache
def _adobe_light() -> NDArray[np.float32]:
    return (_codes() ** _ADOBE_GAMMA).astype(np.float32)


@cache
def _srgb_code() -> NDArray[np.uint8]:
    return np.round(255 * srgb_encoded(_codes())).astype(np.uint8)
