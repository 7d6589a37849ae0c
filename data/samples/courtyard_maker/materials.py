"""What each surface looks like: albedo functions from points in a surface's own frame to linear RGB."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from courtyard_maker.pattern import (
    Array,
    above,
    band,
    cell_random,
    color,
    letter_mask,
    mix,
    noise,
    palette,
    triangle,
)

Material = Callable[[Array, Array], Array]  # (points [N, 3], normals [N, 3]) -> albedo [N, 3]

CREAM, SAND, OCHRE = color("efe2c8"), color("d8bf95"), color("dba43c")
BRICK, TERRACOTTA, TEAL = color("b4533b"), color("c67a53"), color("2f8c88")
NAVY, SKY_BLUE, OLIVE, PLUM = color("28457a"), color("5f9cc9"), color("7f8f45"), color("7c4770")
DARK, WHITE = color("4a3a30"), color("f4f0e6")
PAINTS = palette("b4533b", "2f8c88", "dba43c", "28457a", "7f8f45", "7c4770", "d9805f", "5f9cc9")

WALL_NICHES = 20
_WORD = "SPLAT"


def _turn(p: Array) -> Array:
    return np.asarray(np.arctan2(p[:, 1], p[:, 0]) / (2 * np.pi) % 1.0, np.float32)


def _mottled(base: Array, p: Array, frequency: float, strength: float, octaves: int = 3) -> Array:
    """The base colour, made livelier by noise: lighter and darker by up to `strength`."""
    factor = 1.0 + strength * 2.0 * (noise(p, frequency, octaves) - np.float32(0.5))
    return np.asarray(base * factor[:, None], np.float32)


def floor(p: Array, normal: Array) -> Array:
    """Square terracotta tiles with corner inlays around a mosaic rosette, and a patterned kerb under the wall."""
    rho, turn = np.hypot(p[:, 0], p[:, 1]), _turn(p)
    x, y = p[:, 0] / 0.5, p[:, 1] / 0.5
    i, j = np.floor(x), np.floor(y)
    tint = cell_random(i, j, 1)
    tile = mix(color("b9694a"), color("dba07a"), tint)
    tile = mix(tile, color("a9876a"), above(cell_random(i, j, 2) - np.float32(0.82), 0.01))
    dx, dy = np.abs(x - i - 0.5), np.abs(y - j - 0.5)
    inlay = above(dx + dy - np.float32(0.76), 0.03)
    tile = mix(tile, SAND, above(np.maximum(dx, dy) - np.float32(0.455), 0.03))
    tile = mix(tile, NAVY, inlay)
    rosette = np.tile(CREAM, (len(p), 1))
    petal = above(triangle(turn * 16) - np.abs(rho - 1.0) / np.float32(0.32) - np.float32(0.12), 0.08)
    rosette = mix(rosette, BRICK, petal * band(rho, 0.7, 1.3, 0.02))
    core = above(triangle(turn * 16) - np.abs(rho - 1.0) / np.float32(0.2) - np.float32(0.45), 0.1)
    rosette = mix(rosette, OCHRE, core * band(rho, 0.7, 1.3, 0.02))
    zigzag = above(rho - np.float32(1.5) - 0.28 * triangle(turn * 24), 0.02)
    rosette = mix(rosette, mix(TEAL, NAVY, zigzag), band(rho, 1.42, 1.86, 0.015))
    rosette = mix(rosette, DARK, band(rho, 1.36, 1.42, 0.015) + band(rho, 1.86, 1.93, 0.015))
    base = mix(tile, rosette, above(np.float32(1.93) - rho, 0.015))
    kerb = mix(SAND, TEAL, above(triangle(turn * 60) - np.float32(0.5), 0.12))
    base = mix(base, kerb, above(rho - np.float32(6.3), 0.03))
    return _mottled(base, p, 2.3, 0.3)


def wall(p: Array, normal: Array) -> Array:
    """Twenty painted niches under two-coloured arches, each with a letter of the word SPLAT, between stone courses."""
    turn = _turn(p) * WALL_NICHES
    k = np.floor(turn)
    x, z = -(turn - k - np.float32(0.5)) * np.float32(2.2), p[:, 2]
    course = np.floor(z / np.float32(0.24))
    along = _turn(p) * 88 + 0.5 * (course % 2)
    block = np.floor(along)
    stone = mix(color("c9ae86"), color("eedcbb"), cell_random(block % 88, course, 3))
    edge = np.minimum(triangle(along) * 0.25, triangle(z / np.float32(0.24)) * 0.12)
    base = mix(color("a08a6c"), stone, above(edge - np.float32(0.02), 0.02))
    # An arch: half a disc on top of a rectangle; the distance to its axis serves for both.
    up = np.maximum(z - np.float32(1.12), 0.0)
    d = np.where(z < 0.3, FAR_FROM_ARCH, np.hypot(x, up))
    voussoir = above(triangle(np.arctan2(up, x) / np.pi * 6.5) - np.float32(0.5), 0.12)
    frame = mix(BRICK, CREAM, voussoir)
    base = mix(base, frame, band(d, 0.74, 0.96, 0.025))
    field, ink = PAINTS[(k * 3 % 8).astype(np.int32)], PAINTS[((k * 5 + 4) % 8).astype(np.int32)]
    light = mix(field, WHITE, np.full_like(x, 0.65))
    stripes = above(triangle(np.where(k % 3 == 0, x, np.where(k % 3 == 1, z, x + z)) / 0.36) - np.float32(0.5), 0.14)
    inside = mix(light, mix(light, field, np.full_like(x, 0.4)), stripes)
    letter = np.zeros_like(x)
    for n, glyph in enumerate(_WORD):
        here = (-k) % len(_WORD) == n
        letter[here] = letter_mask(glyph, (x[here] + 0.36) / 0.72, (z[here] - 0.5) / 1.0)
    inside = mix(inside, np.asarray(ink * np.float32(0.75), np.float32), letter)
    base = mix(base, inside, above(np.float32(0.74) - d, 0.025))
    frieze = mix(CREAM, TEAL, above(triangle(turn * 5) - triangle(z / np.float32(0.52) + 0.5), 0.15))
    base = mix(base, frieze, band(z, 2.12, 2.36, 0.02))
    base = mix(base, color("8a7358"), above(np.float32(0.16) - z, 0.03) + above(z - np.float32(2.36), 0.02))
    return _mottled(base, p, 1.4, 0.22, 2)


FAR_FROM_ARCH = np.float32(9.0)


def dome(p: Array) -> Array:
    """[N, 3] radiance (not albedo) of the dome at its points p: sky, clouds, and two ridges of wooded hills."""
    d = p / np.linalg.norm(p, axis=1, keepdims=True)
    a = np.arctan2(d[:, 1], d[:, 0])
    height = d[:, 2]
    sky = mix(color("d5dfe3"), color("6f9fcb"), above(height - np.float32(0.25), 0.33))
    cloud = above(noise(d * np.array([1, 1, 2.2], np.float32), 3.1, 3) - np.float32(0.53), 0.16)
    sky = mix(sky, color("f2ece2"), cloud * above(height - np.float32(0.1), 0.1) * np.float32(0.85))
    bumps = noise(np.stack([np.cos(a), np.sin(a), 0 * a], 1).astype(np.float32), 9.0, 2)
    far = 0.225 + 0.035 * np.sin(3 * a + 1) + 0.02 * np.sin(7 * a) + 0.012 * (bumps - 0.5)
    near = 0.165 + 0.03 * np.sin(2 * a + 4) + 0.018 * np.sin(5 * a + 2) + 0.045 * (bumps - 0.5)
    texture = noise(d, 16.0, 2)
    sky = mix(sky, mix(color("6f8ea6"), color("93a9b4"), texture), above(far - height, 0.006))
    wood = mix(color("3f5f3c"), color("8a9a55"), texture)
    return mix(sky, wood, above(near - height, 0.006))


def pillar(first: Array, second: Array, spirals: int) -> Material:
    """A column with a painted spiral between plain ends (z runs from -1.15 to 1.15)."""

    def albedo(p: Array, normal: Array) -> Array:
        z = p[:, 2]
        spiral = above(triangle(_turn(p) * spirals + z * np.float32(1.1)) - np.float32(0.5), 0.13)
        base = mix(first, second, spiral)
        ends = above(np.abs(z) - np.float32(0.82), 0.02)
        base = mix(base, mix(CREAM, SAND, above(triangle(z / 0.22) - np.float32(0.5), 0.2)), ends)
        return _mottled(base, p + first * 9, 3.0, 0.2, 2)

    return albedo


def pedestal(p: Array, normal: Array) -> Array:
    """Mosaic waves on the side, rings on the top."""
    turn, rho = _turn(p), np.hypot(p[:, 0], p[:, 1])
    wave = p[:, 2] - np.float32(0.07) * np.sin(turn * np.float32(24 * np.pi))
    side = mix(SKY_BLUE, NAVY, above(wave + np.float32(0.05), 0.015))
    side = mix(side, WHITE, band(wave, -0.06, -0.01, 0.012))
    side = mix(side, OCHRE, above(np.abs(p[:, 2]) - np.float32(0.17), 0.012))
    top = mix(CREAM, BRICK, above(triangle(turn * 18 + 0.25) - np.float32(0.5), 0.1) * band(rho, 0.5, 0.6, 0.012))
    return _mottled(np.where(normal[:, 2:] > 0.5, top, side), p, 4.0, 0.18, 2)


def globe(p: Array, normal: Array) -> Array:
    """Green lands in a blue sea, with a few meridians."""
    land = noise(normal, 2.6, 4)
    sea = mix(NAVY, SKY_BLUE, above(land - np.float32(0.4), 0.14))
    ground = mix(OLIVE, OCHRE, above(noise(normal, 3.7, 3) - np.float32(0.5), 0.12))
    base = mix(sea, mix(CREAM, ground, above(land - np.float32(0.525), 0.02)), above(land - np.float32(0.5), 0.015))
    return mix(base, WHITE, above(np.abs(normal[:, 2]) - np.float32(0.9) + 0.1 * (land - 0.5), 0.02))


def ring(sectors: int, first: int) -> Material:
    """A torus in sectors of changing colour with pale seams."""

    def albedo(p: Array, normal: Array) -> Array:
        turn = _turn(p) * sectors
        paint = PAINTS[((np.floor(turn) * 3 + first) % 8).astype(np.int32)]
        return _mottled(mix(WHITE, paint, above(triangle(turn) - np.float32(0.2), 0.07)), p, 6.0, 0.22, 2)

    return albedo


def ball(sectors: int, first: int, cap: Array) -> Material:
    """A beach ball: gores from pole to pole and a cap."""

    def albedo(p: Array, normal: Array) -> Array:
        turn = _turn(p) * sectors
        paint = PAINTS[((np.floor(turn) * 3 + first) % 8).astype(np.int32)]
        pale = np.floor(turn) % 2 == 1
        base = np.where(pale[:, None], WHITE, paint).astype(np.float32)
        base = mix(base, cap, above(np.abs(normal[:, 2]) - np.float32(0.86), 0.02))
        return _mottled(base, p, 5.0, 0.12, 2)

    return albedo


def banded_ball(first: Array, second: Array) -> Material:
    """A small ball of wavy bands."""

    def albedo(p: Array, normal: Array) -> Array:
        wave = normal[:, 2] * np.float32(1.6) + np.float32(0.18) * np.sin(_turn(p) * np.float32(10 * np.pi))
        return _mottled(mix(first, second, above(triangle(wave) - np.float32(0.5), 0.12)), p, 7.0, 0.15, 2)

    return albedo


def crate(p: Array, normal: Array) -> Array:
    """Planks in a frame; on the four upright faces the word 3DGS."""
    half = np.float32(0.36)
    upright = np.abs(normal[:, 2]) < 0.5
    right = np.where(np.abs(normal[:, 0]) > 0.5, p[:, 1] * np.sign(normal[:, 0]), -p[:, 0] * np.sign(normal[:, 1]))
    x, y = np.where(upright, right, p[:, 0]), np.where(upright, p[:, 2], p[:, 1])
    plank = np.floor((y / half + 1) * 2.5)
    grain = noise(np.stack([x * 2, plank * 3.7, y * 14], 1).astype(np.float32), 2.4, 2)
    wood = mix(color("9c6a3f"), color("d9ab73"), np.asarray(0.65 * grain + 0.35 * cell_random(plank, 0 * plank, 5)))
    wood = mix(color("6b4429"), wood, above(triangle((y / half + 1) * 2.5) - np.float32(0.09), 0.08))
    rim = np.maximum(np.abs(x), np.abs(y))
    frame = mix(color("7d5233"), color("a97a4b"), noise(p, 9.0, 2))
    wood = mix(wood, frame, above(rim - np.float32(0.3), 0.008))
    ink = np.zeros_like(x)
    for n, glyph in enumerate("3DGS"):
        ink += letter_mask(glyph, (x + np.float32(0.26 - n * 0.14)) / np.float32(0.1), (y + np.float32(0.1)) / 0.2)
    return mix(wood, NAVY, np.where(upright, np.minimum(ink, 1.0), 0.0).astype(np.float32))


def checker(p: Array, normal: Array) -> Array:
    """Four by four squares a face, in a different pair of colours on each pair of faces."""
    axis = np.abs(normal).argmax(1)
    waves = np.cos(p * np.float32(np.pi / 0.19 * 2) + np.float32(np.pi / 2))
    waves[np.arange(len(p)), axis] = 1.0
    paint = PAINTS[np.array([0, 1, 3])[axis]]
    return _mottled(mix(CREAM, paint, above(waves.prod(1), 0.25)), p, 6.0, 0.15, 2)


def vase(p: Array, normal: Array) -> Array:
    """Terracotta with a meander between dark lines; a dark mouth."""
    turn, z = _turn(p), p[:, 2]
    base = mix(TERRACOTTA, BRICK, noise(p, 5.0, 3))
    key = above(triangle(turn * 12 + np.where(z > -0.05, 0.0, 0.25)) - np.float32(0.45), 0.1)
    base = mix(base, mix(CREAM, DARK, key), band(z, -0.17, 0.07, 0.012))
    lines = band(z, 0.1, 0.14, 0.01) + band(z, -0.24, -0.2, 0.01) + band(z, 0.25, 0.3, 0.01) + above(-z - 0.42, 0.01)
    base = mix(base, DARK, lines)
    return np.where(normal[:, 2:] > 0.999, np.float32(0.3) * TERRACOTTA, base)


def urn(p: Array, normal: Array) -> Array:
    """White glaze with blue scales, bands and flowers."""
    turn, z = _turn(p), p[:, 2]
    shift = np.floor(z / np.float32(0.12)) % 2 * np.float32(0.5)
    u, v = turn * 14 + shift, z / np.float32(0.12)
    dot = np.hypot((u - np.floor(u) - 0.5) * 1.3, v - np.floor(v) - 0.5)
    base = mix(WHITE, NAVY, above(np.float32(0.38) - dot, 0.08))
    base = mix(base, SKY_BLUE, above(np.float32(0.16) - dot, 0.08))
    base = mix(base, TEAL, above(np.abs(z) - np.float32(0.26), 0.01))
    base = mix(base, OCHRE, band(np.abs(z), 0.23, 0.27, 0.01))
    return np.where(normal[:, 2:] > 0.999, np.float32(0.35) * NAVY, _mottled(base, p, 4.0, 0.1, 2))


def barrel(p: Array, normal: Array) -> Array:
    """Staves and iron hoops; boards and a ring on the two ends."""
    turn, rho = _turn(p) * 16, np.hypot(p[:, 0], p[:, 1])
    at_end = np.abs(normal[:, 2]) > 0.999
    stave = np.where(at_end, np.floor(p[:, 0] / 0.1), np.floor(turn))
    seam = np.where(at_end, triangle(p[:, 0] / 0.1), triangle(turn))
    stretched = p * np.array([1, 1, 0.25], np.float32)
    wood = mix(
        color("8a5633"),
        color("cf9a63"),
        np.asarray(0.5 * noise(stretched, 12.0, 2) + 0.5 * cell_random(stave, 0 * stave, 7)),
    )
    wood = mix(color("5d3a24"), wood, above(seam - np.float32(0.12), 0.1))
    hoops = band(np.abs(p[:, 2]), 0.16, 0.23, 0.01) + band(np.abs(p[:, 2]), 0.33, 0.4, 0.01)
    wood = mix(wood, color("59636b"), np.where(at_end, 0.0, hoops).astype(np.float32))
    disc = band(rho, 0.12, 0.16, 0.01) + above(np.float32(0.06) - rho, 0.01)
    return mix(wood, BRICK, np.where(at_end, disc, 0.0).astype(np.float32))


def cone(p: Array, normal: Array) -> Array:
    """A spiral of three colours that winds to the tip."""
    turn = _turn(p) * 2 + p[:, 2] * np.float32(2.4)
    base = mix(PLUM, OCHRE, above(triangle(turn) - np.float32(0.4), 0.08))
    base = mix(base, WHITE, above(triangle(turn) - np.float32(0.8), 0.08))
    return _mottled(base, p, 5.0, 0.15, 2)
