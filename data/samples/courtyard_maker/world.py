"""The scene as one list of placed things, and the rays cast into it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from courtyard_maker import materials
from courtyard_maker.materials import Material
from courtyard_maker.pattern import Array, color
from courtyard_maker.room import Floor, Wall, dome_distance
from courtyard_maker.shapes import FAR, Box, Lathe, Shape, Sphere, Torus

DOME = -1
DOME_SIZE = 30.0
WALL_SIZE = 7.0


@dataclass(frozen=True, slots=True, eq=False)
class Thing:
    """A shape put into the world: x_world = rotation @ x_own + centre.

    centre: [3] metres; rotation: [3, 3]; gloss: the strength of the broad highlight of the sun.
    """

    name: str
    shape: Shape
    centre: Array
    rotation: Array
    albedo: Material
    gloss: float = 0.0

    def own(self, points: Array) -> Array:
        """World points [N, 3] in the thing's frame."""
        return np.asarray((points - self.centre) @ self.rotation, np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Hits:
    """Where rays ended: t [N] metres, thing [N] its index or DOME, points [N, 3] in the world."""

    t: Array
    thing: np.ndarray[tuple[int], np.dtype[np.int16]]
    points: Array


def _thing(
    name: str,
    shape: Shape,
    at: tuple[float, float, float],
    albedo: Material,
    *,
    yaw: float = 0.0,
    tilt: float = 0.0,
    gloss: float = 0.0,
) -> Thing:
    """yaw, tilt: degrees; the thing is first tilted about x, then turned about z."""
    a, b = np.radians(yaw), np.radians(tilt)
    turn = np.array([[np.cos(a), -np.sin(a), 0], [np.sin(a), np.cos(a), 0], [0, 0, 1]])
    lean = np.array([[1, 0, 0], [0, np.cos(b), -np.sin(b)], [0, np.sin(b), np.cos(b)]])
    return Thing(name, shape, np.array(at, np.float32), (turn @ lean).astype(np.float32), albedo, gloss)


@cache
def things() -> tuple[Thing, ...]:
    """Everything but the dome: the room, the pillars, and the still life in the middle."""
    m = materials
    placed = [
        _thing("floor", Floor(WALL_SIZE), (0, 0, 0), m.floor),
        _thing("wall", Wall(WALL_SIZE, 2.4), (0, 0, 0), m.wall),
        _thing("pedestal", Lathe((0.64, 0.64), 0.22), (0, 0, 0.22), m.pedestal),
        _thing("wreath", Torus(0.34, 0.12), (0, 0, 0.56), m.ring(12, 0), gloss=0.05),
        _thing("globe", Sphere(0.34), (0, 0, 0.87), m.globe, yaw=40, tilt=23, gloss=0.1),
        _thing("crate", Box((0.36, 0.36, 0.36)), (1.4, 0.2, 0.36), m.crate, yaw=25),
        _thing("cube", Box((0.19, 0.19, 0.19)), (1.36, 0.22, 0.91), m.checker, yaw=-18),
        _thing("vase", Lathe((0.16, 0.29, 0.35, 0.3, 0.17, 0.12, 0.2), 0.52), (0.5, 1.42, 0.52), m.vase, gloss=0.04),
        _thing("ball", Sphere(0.34), (-0.72, 1.3, 0.34), m.ball(10, 0, m.OCHRE), yaw=15, tilt=38, gloss=0.1),
        _thing("urn", Lathe((0.2, 0.36, 0.42, 0.36, 0.23, 0.26), 0.36), (-1.5, 0.2, 0.36), m.urn, gloss=0.14),
        _thing("barrel", Lathe((0.26, 0.32, 0.34, 0.32, 0.26), 0.42), (-1.05, -1.1, 0.34), m.barrel, yaw=50, tilt=90),
        _thing("hoop", Torus(0.42, 0.13), (0.12, -1.5, 0.55), m.ring(10, 3), yaw=28, tilt=90, gloss=0.06),
        _thing("cone", Lathe((0.36, 0.29, 0.21, 0.13, 0.04), 0.5), (1.2, -1.05, 0.5), m.cone, gloss=0.04),
    ]
    marbles = [(0.98, 0.95, 0.15), (-0.12, 1.02, 0.12), (-1.05, -0.42, 0.14), (0.66, -0.82, 0.13), (1.85, -0.35, 0.16)]
    for k, (x, y, r) in enumerate(marbles):
        skin = m.banded_ball(m.PAINTS[(3 * k + 2) % 8], m.WHITE)
        placed.append(_thing(f"marble{k}", Sphere(r), (x, y, r), skin, yaw=70 * k, tilt=25 + 30 * k, gloss=0.1))
    for k in range(10):
        a = np.radians(36 * k + 9)
        pale = color("eadcc0") if k % 2 else color("c9d3cf")
        skin = m.pillar(m.PAINTS[(k * 3 + 1) % 8], pale, 2 + k % 2)
        at = (float(6.0 * np.cos(a)), float(6.0 * np.sin(a)), 1.15)
        placed.append(_thing(f"pillar{k}", Lathe((0.23, 0.23), 1.15), at, skin))
    return tuple(placed)


def cast(origins: Array, directions: Array, *, block: int = 60_000) -> Hits:
    """The first surface along each ray; origins, directions: [N, 3] float32, directions of length one."""
    parts = [_cast_block(origins[k : k + block], directions[k : k + block]) for k in range(0, len(origins), block)]
    t, thing = np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
    return Hits(t, thing, origins + directions * t[:, None])


def _cast_block(o: Array, d: Array) -> tuple[Array, np.ndarray[tuple[int], np.dtype[np.int16]]]:
    placed = things()
    best = dome_distance(o, d, DOME_SIZE)
    thing = np.full(len(o), DOME, np.int16)
    centres = np.stack([x.centre for x in placed])
    # Closest approach of every ray to every centre, to test only the rays that pass through a bounding sphere.
    ahead = centres @ d.T - np.einsum("ij,ij->i", o, d)
    gap = np.einsum("ij,ij->i", o, o) - 2 * (centres @ o.T) + (centres**2).sum(1)[:, None]
    miss = gap - ahead**2
    for k, item in enumerate(placed):
        reach = item.shape.radius
        if np.isfinite(reach):
            limit = np.float32(reach**2 * 1.02)
            rays = np.flatnonzero((miss[k] < limit) & ((ahead[k] > 0) | (gap[k] < limit)))
        else:
            rays = np.arange(len(o))
        if not len(rays):
            continue
        t = item.shape.hit(item.own(o[rays]), np.asarray(d[rays] @ item.rotation, np.float32))
        closer = t < best[rays]
        best[rays[closer]] = t[closer]
        thing[rays[closer]] = k
    return np.where(best < FAR, best, 0).astype(np.float32), thing
