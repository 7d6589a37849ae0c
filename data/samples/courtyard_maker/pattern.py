"""Band-limited building blocks of the procedural textures: soft edges, smooth noise, per-cell tints, letters."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Floats = NDArray[np.floating]  # Python floats in a formula widen the type on paper, not in fact

_LATTICE = 64
_GLYPHS = {
    "3": ("11110", "00001", "00001", "01110", "00001", "00001", "11110"),
    "A": ("01110", "10001", "10001", "11111", "10001", "10001", "10001"),
    "D": ("11110", "10001", "10001", "10001", "10001", "10001", "11110"),
    "G": ("01110", "10001", "10000", "10111", "10001", "10001", "01110"),
    "L": ("10000", "10000", "10000", "10000", "10000", "10000", "11111"),
    "P": ("11110", "10001", "10001", "11110", "10000", "10000", "10000"),
    "S": ("01111", "10000", "10000", "01110", "00001", "00001", "11110"),
    "T": ("11111", "00100", "00100", "00100", "00100", "00100", "00100"),
}
_GLYPH_SCALE = 6


def color(code: str) -> Array:
    """[3] linear RGB of an sRGB colour written `rrggbb`."""
    srgb = np.array([int(code[i : i + 2], 16) for i in (0, 2, 4)], np.float64) / 255.0
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4).astype(np.float32)


def palette(*codes: str) -> Array:
    """[n, 3] linear RGB, one row a colour."""
    return np.stack([color(code) for code in codes])


def above(x: Floats, width: float) -> Array:
    """0 where x is below -width, 1 above +width, a smooth step between."""
    t = np.clip(x / (2.0 * width) + 0.5, 0.0, 1.0)
    return np.asarray(t * t * (3.0 - 2.0 * t), np.float32)


def band(x: Array, low: float, high: float, width: float) -> Array:
    """1 for x inside [low, high], 0 outside, soft over `width` at both ends."""
    return above(x - low, width) * above(high - x, width)


def triangle(x: Floats) -> Array:
    """The triangle wave of period 1 between 0 (at whole numbers) and 1 (half way)."""
    return np.asarray(1.0 - np.abs(2.0 * (x - np.floor(x)) - 1.0), np.float32)


def mix(first: Array, second: Array, weight: Array) -> Array:
    """[N, 3] colours: `first` where weight is 0, `second` where it is 1; first, second: [3] or [N, 3]; weight: [N]."""
    return np.asarray(first + (second - first) * weight[:, None], np.float32)


@cache
def _lattice() -> Array:
    return np.random.default_rng(20).random((_LATTICE,) * 3, np.float32).ravel()


def noise(p: Array, frequency: float, octaves: int = 1) -> Array:
    """[N] smooth value noise in 0..1 at points p [N, 3]; each octave doubles the frequency and halves the weight."""
    total = np.zeros(len(p), np.float32)
    weights = 0.0
    for octave in range(octaves):
        scale = frequency * 2.0**octave
        total += _value_noise(np.asarray(p * scale + 11.3 * octave, np.float32)) * 0.5**octave
        weights += 0.5**octave
    return total / np.float32(weights)


def _value_noise(p: Array) -> Array:
    floor = np.floor(p)
    t = p - floor
    t = t * t * (3.0 - 2.0 * t)
    low = floor.astype(np.int32) % _LATTICE
    high = (low + 1) % _LATTICE
    x = (low[:, 0] * _LATTICE**2, high[:, 0] * _LATTICE**2)
    y = (low[:, 1] * _LATTICE, high[:, 1] * _LATTICE)
    z = (low[:, 2], high[:, 2])
    table = _lattice()
    along_x = []
    for i in (0, 1):
        along_y = []
        for j in (0, 1):
            near, far = table[x[i] + y[j] + z[0]], table[x[i] + y[j] + z[1]]
            along_y.append(near + (far - near) * t[:, 2])
        along_x.append(along_y[0] + (along_y[1] - along_y[0]) * t[:, 1])
    return np.asarray(along_x[0] + (along_x[1] - along_x[0]) * t[:, 0], np.float32)


def cell_random(i: Array, j: Array, salt: int) -> Array:
    """[N] a number in 0..1 for each integer cell (i, j), the same in every run."""
    a = i.astype(np.int64) * 73856093 ^ j.astype(np.int64) * 19349663 ^ salt * 83492791
    a = (a ^ (a >> 13)) * 1274126177
    return ((a ^ (a >> 16)) & 0xFFFF).astype(np.float32) / np.float32(65535.0)


@cache
def _glyph(letter: str) -> Array:
    """A letter's coverage on a fine grid with one empty cell around it, blurred: [9 * scale, 7 * scale]."""
    bits = np.array([[float(c) for c in row] for row in _GLYPHS[letter]], np.float32)
    fine = np.kron(np.pad(bits, 1), np.ones((_GLYPH_SCALE, _GLYPH_SCALE), np.float32))
    offsets = np.arange(-_GLYPH_SCALE, _GLYPH_SCALE + 1)
    kernel = np.exp(-0.5 * (offsets / (0.3 * _GLYPH_SCALE)) ** 2)
    kernel /= kernel.sum()
    for axis in (0, 1):
        fine = np.apply_along_axis(np.convolve, axis, fine, kernel, "same")
    return np.asarray(fine, np.float32)


def letter_mask(letter: str, x: Array, y: Array) -> Array:
    """[N] a letter's soft coverage; x runs right and y up, both 0..1 over the 5 by 7 letter body."""
    grid = _glyph(letter)
    column = (x * 5.0 + 1.0) * _GLYPH_SCALE - 0.5
    row = ((1.0 - y) * 7.0 + 1.0) * _GLYPH_SCALE - 0.5
    height, width = grid.shape
    inside = (column >= 0) & (column <= width - 1) & (row >= 0) & (row <= height - 1)
    column, row = np.clip(column, 0, width - 1.001), np.clip(row, 0, height - 1.001)
    i, j = row.astype(np.int32), column.astype(np.int32)
    v, u = row - i, column - j
    top = grid[i, j] * (1 - u) + grid[i, j + 1] * u
    low = grid[i + 1, j] * (1 - u) + grid[i + 1, j + 1] * u
    return np.asarray(above((top * (1 - v) + low * v) - np.float32(0.42), 0.3) * inside, np.float32)
