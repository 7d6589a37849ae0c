"""Prediction: how many tile pairs a view has, from the raw parameters alone; no kernel, no memory of the rasterizer.

Written from docs/math.md 3 and 5, in float64, and always on the side of too many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from splatcli.gaussians import Gaussians
from splatcli.native import abi
from splatcli.rasterizer.view import Z_FAR, Z_NEAR
from splatcli.scene.camera import Camera

#: Gaussians, and lines of tiles of all of them together, that are looked at in one go: tens of megabytes.
_CHUNK = 1 << 16
_LINES = 1 << 19

#: With more lines than this among a chunk's Gaussians, which is no scene any more, their boxes have to do.
_MOST_LINES = 4 * _LINES

#: px^2, docs/math.md 3.4; and how far outside the image, in its sides, the Jacobian follows a mean (3.3).
_BLUR = 0.3
_CLAMP = 0.15

#: How far the kernel's float32 may move an edge: relative to the coordinates, and in pixels.
_RELATIVE, _PIXELS = 1e-5, 0.01


@dataclass(frozen=True, slots=True)
class PairCount:
    """What a view would list.

    pairs: at least as many as (Gaussian, tile) pairs. boxes: tiles in the boxes around the Gaussians, which the
    rasterizer makes room for. visible: Gaussians with any.
    """

    pairs: int
    boxes: int
    visible: int

    def __add__(self, other: PairCount) -> PairCount:
        return PairCount(self.pairs + other.pairs, self.boxes + other.boxes, self.visible + other.visible)

    def times(self, factor: float) -> PairCount:
        """The counts of ``factor`` times as many Gaussians of the same kind."""
        return PairCount(*(math.ceil(factor * count) for count in (self.pairs, self.boxes, self.visible)))


@torch.no_grad()
def predict_pairs(gaussians: Gaussians, camera: Camera) -> PairCount:
    """Upper bounds for the view; that of the pairs is about a tenth more than there are in usual scenes."""
    total = PairCount(0, 0, 0)
    for first in range(0, len(gaussians), _CHUNK):
        total += _count(gaussians.map(lambda t: t[first : first + _CHUNK]), camera)  # noqa: B023 (used at once)
    return total


@torch.no_grad()
def predict_boxes(gaussians: Gaussians, camera: Camera) -> int:
    """The boxes of predict_pairs() alone, in half the time."""
    chunks = range(0, len(gaussians), _CHUNK)
    return sum(
        int(tiles_of_each(gaussians.map(lambda t: t[first : first + _CHUNK]), camera).sum())  # noqa: B023 (used at once)
        for first in chunks
    )


@torch.no_grad()
def tiles_of_each(gaussians: Gaussians, camera: Camera) -> Tensor:
    """[N] int64: tiles in the box of each Gaussian; 0 for those that the view culls."""
    kept, ellipses = _ellipses(gaussians, camera)
    x0, x1, y0, y1 = _boxes(ellipses, camera)
    tiles = torch.zeros(len(gaussians), dtype=torch.int64, device=gaussians.device)
    tiles[kept] = (x1 - x0) * (y1 - y0)
    return tiles


def _count(gaussians: Gaussians, camera: Camera) -> PairCount:
    _, ellipses = _ellipses(gaussians, camera)
    x0, x1, y0, y1 = _boxes(ellipses, camera)
    boxes = (x1 - x0) * (y1 - y0)
    # Only boxes of two by two tiles and more have corners that the ellipse may leave out.
    cornered = (x1 - x0 > 1) & (y1 - y0 > 1)
    if int((y1 - y0)[cornered].sum()) > _MOST_LINES:
        cornered[:] = False
    pairs = int(boxes[~cornered].sum())
    rows = cornered.nonzero().squeeze(1)
    ends = (y1 - y0)[rows].cumsum(0)
    while len(rows):
        count = max(1, int((ends <= ends[0] + _LINES).sum()))
        part = rows[:count]
        pairs += _line_by_line(ellipses[part], y0[part], y1[part], x0[part], x1[part])
        rows, ends = rows[count:], ends[count:]
    return PairCount(pairs, int(boxes.sum()), int((boxes > 0).sum()))


def _boxes(ellipses: Tensor, camera: Camera) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """First column of tiles and the one after the last, and lines likewise; empty outside the image."""
    u, v, a, _, c, tau = ellipses.unbind(1)
    x0, x1 = _tiles(u, (2 * tau * a).sqrt(), camera.width)
    y0, y1 = _tiles(v, (2 * tau * c).sqrt(), camera.height)
    return x0, x1, y0, y1


def _ellipses(gaussians: Gaussians, camera: Camera) -> tuple[Tensor, Tensor]:
    """([K] int64, [K, 6] float64): the Gaussians that the view does not cull; mean u v, covariance a b c, and tau."""
    means = gaussians.means.double()
    view = torch.from_numpy(camera.viewmat).to(means)
    in_camera = means @ view[:3, :3].T + view[:3, 3]
    tau = math.log(255.0) + torch.nn.functional.logsigmoid(gaussians.logit_opacities.double())
    # Written so that NaN is culled.
    seen = (in_camera[:, 2] > Z_NEAR * (1 - 1e-6)) & (in_camera[:, 2] < Z_FAR) & (tau > -1e-5)
    x, y, z = in_camera[seen].unbind(1)
    root = _rotations(gaussians.quats[seen].double()) * gaussians.log_scales[seen].double().exp()[:, None, :]
    root = view[:3, :3] @ root
    tx = (x / z).clamp(*_clamp(camera.width, camera.cx, camera.fx))[:, None]
    ty = (y / z).clamp(*_clamp(camera.height, camera.cy, camera.fy))[:, None]
    u0 = (root[:, 0] - tx * root[:, 2]) * (camera.fx / z)[:, None]
    u1 = (root[:, 1] - ty * root[:, 2]) * (camera.fy / z)[:, None]
    a, b, c = (u0 * u0).sum(1) + _BLUR, (u0 * u1).sum(1), (u1 * u1).sum(1) + _BLUR
    # The exact test is generous by a ten-thousandth, and where terms cancel float32 decides: 5.3.
    cancelling = (a + c) * (a + c) / (a * c - b * b).clamp(min=_BLUR * _BLUR)
    tau = tau[seen].clamp(min=0) * (1 + 2e-4 + 1e-6 * cancelling) + 2e-4
    ellipses = torch.stack([camera.fx * x / z + camera.cx, camera.fy * y / z + camera.cy, a, b, c, tau], 1)
    finite = ellipses.isfinite().all(1)
    return seen.nonzero().squeeze(1)[finite], ellipses[finite]


def _clamp(size: int, center: float, focal: float) -> tuple[float, float]:
    return (-_CLAMP * size - center) / focal, ((1 + _CLAMP) * size - center) / focal


def _rotations(quats: Tensor) -> Tensor:
    """[K, 3, 3] of [K, 4] w x y z; NaN where there is no direction."""
    w, x, y, z = (quats / quats.norm(dim=1, keepdim=True)).unbind(1)
    return torch.stack(
        [
            *(1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)),
            *(2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)),
            *(2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)),
        ],
        1,
    ).view(-1, 3, 3)


def _tiles(center: Tensor, half: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """First tile and the one after the last that an interval of pixels reaches; empty outside the image."""
    margin = _PIXELS + _RELATIVE * (center.abs() + half)
    low, high = center - half - 0.5 - margin, center + half - 0.5 + margin
    inside = (high >= 0) & (low <= size - 1)
    first = (low.clamp(0, size - 1) / abi.TILE).long()
    last = (high.clamp(0, size - 1) / abi.TILE).long()
    return first, torch.where(inside, last + 1, first)


def _line_by_line(ellipses: Tensor, y0: Tensor, y1: Tensor, x0: Tensor, x1: Tensor) -> int:
    """Tiles of the ellipses in each line of tiles that they reach: the widest place among the line's pixels counts."""
    counts = y1 - y0
    owner = torch.repeat_interleave(counts)
    line = y0[owner] + torch.arange(len(owner), device=owner.device) - (counts.cumsum(0) - counts)[owner]
    u, v, a, b, c, tau = ellipses[owner].unbind(1)
    half_y = (2 * tau * c).sqrt()
    margin = _PIXELS + _RELATIVE * (v.abs() + half_y)
    top = torch.maximum(line * abi.TILE + 0.5 - margin - v, -half_y)
    bottom = torch.minimum((line + 1) * abi.TILE - 0.5 + margin - v, half_y).maximum(top)
    # The rightmost point lies this far below the centre, the leftmost as far above it.
    extreme = b / a * (2 * tau * a).sqrt()

    def chord(dy: Tensor) -> Tensor:
        return ((2 * tau - dy * dy / c).clamp(min=0) * (a - b * b / c)).clamp(min=0).sqrt()

    lowest, highest = extreme.clamp(top, bottom), (-extreme).clamp(top, bottom)
    right, left = b / c * lowest + chord(lowest), b / c * highest - chord(highest)
    slack = _PIXELS + _RELATIVE * (u.abs() + (2 * tau * a).sqrt())
    first = ((u + left - 0.5 - slack) / abi.TILE).floor().maximum(x0[owner].double())
    last = ((u + right - 0.5 + slack) / abi.TILE).floor().minimum(x1[owner].double() - 1)
    return int((last - first + 1).clamp(min=0).sum())
