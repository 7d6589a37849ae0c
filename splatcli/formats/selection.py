"""Which Gaussians of a model go into a file, and how much of their colour."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from splatcli.errors import UsageError
from splatcli.formats.format import Format
from splatcli.gaussians import SHN_COUNTS, Gaussians

_CROP_HELP = (
    "--crop box:X0,Y0,Z0,X1,Y1,Z1 with the two corners, --crop sphere:X,Y,Z,RADIUS, or "
    "--crop polygon:z:X0,Y0,X1,Y1,X2,Y2 with three corners or more, seen along z (y: X and Z, x: Y and Z), or --crop "
    "file:PATH with such a region on each line"
)

#: Bytes of a file of regions at most.
_MAX_FILE = 1 << 20


def parse_floats(text: str, flag: str, remedy: str) -> list[float]:
    """Return the numbers of a list with commas. Raises UsageError for ``flag``."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{text!r} is no list of numbers", where=flag, remedy=remedy) from None


@dataclass(frozen=True, slots=True)
class Crop:
    """A region in the coordinates of the file: a box from ``low`` to ``high``, a ball around ``low``, a prism, or more.

    radius: of the ball; None for others.
    corners: of the polygon that the prism has across; in the coordinates whose numbers are in ``across``.
    parts: the regions whose union this is; the other fields do not count then.
    """

    low: tuple[float, float, float]
    high: tuple[float, float, float]
    radius: float | None = None
    corners: tuple[tuple[float, float], ...] = ()
    across: tuple[int, int] = (0, 1)
    parts: tuple[Crop, ...] = ()

    @classmethod
    def parse(cls, text: str, flag: str = "--crop") -> Crop:
        """Return the region of ``box:x0,y0,z0,x1,y1,z1``, ``sphere:x,y,z,r`` or ``polygon:z:x0,y0,x1,y1,x2,y2``.

        ``file:path`` is the union of the regions on the lines of a text file; what follows # is a comment.
        Raises UsageError for ``flag``.
        """
        kind, _, rest = text.partition(":")
        if kind == "file":
            return cls._read(Path(rest), flag)
        return cls._one(text, flag, _CROP_HELP.replace("--crop", flag))

    @classmethod
    def _read(cls, path: Path, flag: str) -> Crop:
        remedy = "a text file with a region on each line, such as sphere:0,0,0,5"
        try:
            with path.open("rb") as file:
                content = file.read(_MAX_FILE + 1)
            if len(content) > _MAX_FILE:
                raise UsageError(f"more than {_MAX_FILE:,} bytes", where=path, remedy=remedy)
            lines = content.decode("utf-8").splitlines()
        except OSError as error:
            raise UsageError(f"cannot be read: {error.strerror or error}", where=f"{flag} {path}") from None
        except UnicodeDecodeError:
            raise UsageError("no text in UTF-8", where=path, remedy=remedy) from None
        parts = []
        for number, line in enumerate(lines, 1):
            if region := line.partition("#")[0].strip():
                parts.append(cls._one(region, f"{path}, line {number}", remedy))
        if not parts:
            raise UsageError("the file has no region", where=path, remedy=remedy)
        nowhere = (0.0, 0.0, 0.0)
        return cls(nowhere, nowhere, parts=tuple(parts))

    @classmethod
    def _one(cls, text: str, flag: str, remedy: str) -> Crop:
        kind, _, rest = text.partition(":")
        if kind == "polygon":
            return cls._polygon(rest, flag, remedy)
        wanted = {"box": 6, "sphere": 4}.get(kind)
        if wanted is None:
            raise UsageError(f"{text!r} is neither a box, a sphere nor a polygon", where=flag, remedy=remedy)
        values = parse_floats(rest, flag, remedy)
        if len(values) != wanted or not all(map(math.isfinite, values)):
            raise UsageError(
                f"a {kind} takes {wanted} finite numbers, {len(values)} are given", where=flag, remedy=remedy
            )
        first = (values[0], values[1], values[2])
        if kind == "sphere":
            if not values[3] > 0:
                raise UsageError(f"a radius of {values[3]:g} holds nothing", where=flag, remedy=remedy)
            return cls(first, first, values[3])
        second = (values[3], values[4], values[5])
        # Any two opposite corners name the same box.
        low, high = zip(*((min(pair), max(pair)) for pair in zip(first, second, strict=True)), strict=True)
        return cls((low[0], low[1], low[2]), (high[0], high[1], high[2]))

    @classmethod
    def _polygon(cls, text: str, flag: str, remedy: str) -> Crop:
        axis, _, rest = text.partition(":")
        if axis not in ("x", "y", "z"):
            raise UsageError(f"{axis!r} is no axis to see the polygon along", where=flag, remedy=remedy)
        values = parse_floats(rest, flag, remedy)
        if len(values) % 2 or not all(map(math.isfinite, values)):
            raise UsageError(
                f"a polygon takes pairs of finite numbers, {len(values)} are given", where=flag, remedy=remedy
            )
        corners = tuple(zip(values[::2], values[1::2], strict=True))
        if len(set(corners)) < 3:
            raise UsageError(f"a polygon of {len(set(corners))} corners holds nothing", where=flag, remedy=remedy)
        first, second = (index for index, name in enumerate("xyz") if name != axis)
        return cls((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), None, corners, (first, second))

    def holds(self, means: Tensor) -> Tensor:
        """Return [N] bool: whose centre, [N, 3], lies inside. The border belongs to boxes and balls.

        What a polygon that crosses itself goes around twice is outside, by the rule of even and odd.
        """
        if self.parts:
            return torch.stack([part.holds(means) for part in self.parts]).any(dim=0)
        wide = means.double()
        if self.corners:
            return self._surrounds(*(wide[:, index] for index in self.across))
        low = torch.tensor(self.low, dtype=torch.float64, device=means.device)
        if self.radius is not None:
            near: Tensor = (wide - low).norm(dim=1) <= self.radius
            return near
        return ((wide >= low) & (wide <= low.new_tensor(self.high))).all(dim=1)

    def _surrounds(self, u: Tensor, v: Tensor) -> Tensor:
        """Return [N], whether a ray from the point along u crosses an odd number of edges."""
        inside = torch.zeros(len(u), dtype=torch.bool, device=u.device)
        for (u0, v0), (u1, v1) in zip(self.corners, (*self.corners[1:], self.corners[0]), strict=True):
            if v0 != v1:
                inside ^= ((v0 > v) != (v1 > v)) & (u < u0 + (v - v0) * ((u1 - u0) / (v1 - v0)))
        return inside


def select(
    gaussians: Gaussians, *, crop: Crop | None = None, min_opacity: float | None = None, sh_degree: int | None = None
) -> tuple[Gaussians, list[str]]:
    """Return the Gaussians inside ``crop`` of at least ``min_opacity``, with SH up to ``sh_degree``, and notes.

    Raises UsageError when none is left.
    """
    notes = []
    kept = torch.ones(len(gaussians), dtype=torch.bool, device=gaussians.device)
    if crop is not None:
        kept &= crop.holds(gaussians.means)
    if min_opacity is not None and min_opacity > 0:
        # Compared as logits, so that nothing is activated; 1 asks for the opacity that no logit reaches.
        least = math.log(min_opacity) - math.log1p(-min_opacity) if min_opacity < 1 else math.inf
        kept &= gaussians.logit_opacities.double() >= least
    count = int(kept.sum())
    if count < len(gaussians):
        if not count:
            raise UsageError(
                f"none of the {len(gaussians):,} Gaussians is left",
                where="--crop" if crop is not None else "--min-opacity",
                remedy="`splat info MODEL` tells the bounds of the positions; choose a larger region or less opacity",
            )
        notes.append(f"kept {count:,} of {len(gaussians):,} Gaussians")
        gaussians = gaussians.map(lambda tensor: tensor[kept])
    if sh_degree is not None and sh_degree < gaussians.sh_degree:
        gaussians = Gaussians(**{**dict(gaussians.items()), "shN": gaussians.shN[:, : SHN_COUNTS[sh_degree]]})
    return gaussians, notes


def select_for_format(
    gaussians: Gaussians,
    chosen: Format,
    *,
    crop: Crop | None = None,
    min_opacity: float | None = None,
    sh_degree: int | None = None,
) -> tuple[Gaussians, list[str]]:
    """Return what select() does, with the SH degree that a file format holds at most, and notes. Raises as select()."""
    asked = gaussians.sh_degree if sh_degree is None else min(sh_degree, gaussians.sh_degree)
    degree = min(asked, chosen.sh_degree)
    kept, notes = select(gaussians, crop=crop, min_opacity=min_opacity, sh_degree=degree)
    if degree < asked:
        notes.insert(0, f"SH degree {asked} -> {degree}, the most that {chosen.title} holds")
    return kept, notes


def moved(gaussians: Gaussians, offset: tuple[float, ...]) -> tuple[Gaussians, float]:
    """Return the Gaussians with ``offset`` added to their positions, and the rounding error of the farthest one."""
    means = gaussians.means.double() + torch.tensor(offset, dtype=torch.float64, device=gaussians.device)
    farthest = float(means.abs().max()) if len(means) else 0.0
    step = 2.0 ** (math.floor(math.log2(farthest)) - 23) if farthest > 0 else 0.0
    return Gaussians(**{**dict(gaussians.items()), "means": means.float()}), step / 2
