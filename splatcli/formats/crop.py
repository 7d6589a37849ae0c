"""Regions of a scene, as ``--crop`` and ``--crop-out`` name them: boxes, spheres, prisms, and files of several.

Coordinates are those of the file of splats. A region holds a Gaussian whose mean lies in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from splatcli.errors import UsageError

_Point = tuple[float, float, float]

_HELP = (
    "--crop box:X0,Y0,Z0,X1,Y1,Z1 with the two corners, --crop sphere:X,Y,Z,RADIUS, or "
    "--crop polygon:z:X0,Y0,X1,Y1,X2,Y2 with three corners or more, seen along z (y: X and Z, x: Y and Z), or --crop "
    "file:PATH with such a region on each line"
)
_FILE_HELP = "a text file with a region on each line, such as sphere:0,0,0,5"

#: Bytes of a file of regions at most.
_MAX_FILE = 1 << 20


@dataclass(frozen=True, slots=True)
class Box:
    """A box along the axes, with its border. low, high: its corners."""

    low: _Point
    high: _Point

    def holds(self, means: Tensor) -> Tensor:
        """Return [N] bool: which of ``means`` [N, 3], float64, lie inside."""
        return ((means >= means.new_tensor(self.low)) & (means <= means.new_tensor(self.high))).all(dim=1)


@dataclass(frozen=True, slots=True)
class Sphere:
    """A ball with its border."""

    center: _Point
    radius: float

    def holds(self, means: Tensor) -> Tensor:
        """Return [N] bool: which of ``means`` [N, 3], float64, lie inside."""
        near: Tensor = (means - means.new_tensor(self.center)).norm(dim=1) <= self.radius
        return near


@dataclass(frozen=True, slots=True)
class Prism:
    """A polygon that reaches endlessly along the third axis.

    corners: in the coordinates whose numbers are in ``across``, at least three. What a polygon that crosses itself goes
    around twice is outside, by the rule of even and odd.
    """

    corners: tuple[tuple[float, float], ...]
    across: tuple[int, int]

    def holds(self, means: Tensor) -> Tensor:
        """Return [N] bool: from which of ``means`` [N, 3], float64, a ray along u crosses an odd number of edges."""
        u, v = (means[:, axis] for axis in self.across)
        inside = torch.zeros(len(u), dtype=torch.bool, device=u.device)
        for (u0, v0), (u1, v1) in zip(self.corners, (*self.corners[1:], self.corners[0]), strict=True):
            if v0 != v1:
                inside ^= ((v0 > v) != (v1 > v)) & (u < u0 + (v - v0) * ((u1 - u0) / (v1 - v0)))
        return inside


@dataclass(frozen=True, slots=True)
class Crop:
    """The union of some regions, at least one."""

    regions: tuple[Box | Sphere | Prism, ...]

    @classmethod
    def parse(cls, text: str, flag: str = "--crop") -> Crop:
        """Return the region of ``box:x0,y0,z0,x1,y1,z1``, ``sphere:x,y,z,r`` or ``polygon:z:x0,y0,x1,y1,x2,y2``.

        ``file:path`` is the union of the regions on the lines of a text file; what follows # is a comment.
        Raises UsageError for ``flag``.
        """
        kind, _, rest = text.partition(":")
        if kind == "file":
            return cls(_read(Path(rest), flag))
        return cls((_region(text, flag, _HELP.replace("--crop", flag)),))

    def holds(self, means: Tensor) -> Tensor:
        """Return [N] bool: which of ``means`` [N, 3] lie in one of the regions."""
        wide = means.double()
        return torch.stack([region.holds(wide) for region in self.regions]).any(dim=0)


def parse_floats(text: str, flag: str, remedy: str) -> list[float]:
    """Return the numbers of a list with commas. Raises UsageError for ``flag``."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{text!r} is no list of numbers", where=flag, remedy=remedy) from None


def _read(path: Path, flag: str) -> tuple[Box | Sphere | Prism, ...]:
    """Return the regions of a text file. Raises UsageError."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE + 1)
        if len(content) > _MAX_FILE:
            raise UsageError(f"more than {_MAX_FILE:,} bytes", where=path, remedy=_FILE_HELP)
        lines = content.decode("utf-8-sig").splitlines()
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror or error}", where=f"{flag} {path}") from None
    except UnicodeDecodeError:
        raise UsageError("no text in UTF-8", where=path, remedy=_FILE_HELP) from None
    regions = tuple(
        _region(text, f"{path}, line {number}", _FILE_HELP)
        for number, line in enumerate(lines, 1)
        if (text := line.partition("#")[0].strip())
    )
    if not regions:
        raise UsageError("the file has no region", where=path, remedy=_FILE_HELP)
    return regions


def _region(text: str, flag: str, remedy: str) -> Box | Sphere | Prism:
    kind, _, rest = text.partition(":")
    if kind == "polygon":
        return _prism(rest, flag, remedy)
    wanted = {"box": 6, "sphere": 4}.get(kind)
    if wanted is None:
        raise UsageError(f"{text!r} is neither a box, a sphere nor a polygon", where=flag, remedy=remedy)
    x, y, z, *others = _finite(rest, f"a {kind} takes {wanted} finite numbers", wanted, flag, remedy)
    if kind == "sphere":
        (radius,) = others
        if not radius > 0:
            raise UsageError(f"a radius of {radius:g} holds nothing", where=flag, remedy=remedy)
        return Sphere((x, y, z), radius)
    # Any two opposite corners name the same box.
    pairs = [sorted(pair) for pair in zip((x, y, z), others, strict=True)]
    (x0, x1), (y0, y1), (z0, z1) = pairs
    return Box((x0, y0, z0), (x1, y1, z1))


def _prism(text: str, flag: str, remedy: str) -> Prism:
    axis, _, rest = text.partition(":")
    if axis not in ("x", "y", "z"):
        raise UsageError(f"{axis!r} is no axis to see the polygon along", where=flag, remedy=remedy)
    values = _finite(rest, "a polygon takes pairs of finite numbers", None, flag, remedy)
    corners = tuple(zip(values[::2], values[1::2], strict=True))
    if len(set(corners)) < 3:
        raise UsageError(f"a polygon of {len(set(corners))} corners holds nothing", where=flag, remedy=remedy)
    first, second = (index for index, name in enumerate("xyz") if name != axis)
    return Prism(corners, (first, second))


def _finite(text: str, what: str, wanted: int | None, flag: str, remedy: str) -> list[float]:
    """Return ``wanted`` finite numbers; None: an even count. what: says that, for the error."""
    values = parse_floats(text, flag, remedy)
    if len(values) % 2 if wanted is None else len(values) != wanted:
        raise UsageError(f"{what}, {len(values)} are given", where=flag, remedy=remedy)
    if not all(map(math.isfinite, values)):
        raise UsageError(f"{what}, not {text!r}", where=flag, remedy=remedy)
    return values
