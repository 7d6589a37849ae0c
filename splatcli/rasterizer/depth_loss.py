"""DepthTarget: known depths of a view's pixels, their term of the loss, and its gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from splatcli.reproducible import tree_sum


@dataclass(frozen=True, slots=True, eq=False)
class DepthTarget:
    """Known depths of S pixels, on the Gaussians' device.

    pixels: [S] int64, y * width + x, each at most once.
    inverse: [S] float, 1 / depth, where depth is camera-space z in world units.
    weight: times the mean of |1 / rendered - 1 / known| is added to the loss; world units.
    """

    pixels: Tensor
    inverse: Tensor
    weight: float

    @property
    def nbytes(self) -> int:
        return self.pixels.nbytes + self.inverse.nbytes

    def reduced(self, size: tuple[int, int], step: tuple[int, int]) -> DepthTarget:
        """Return the target of an image of ``size`` in which ``step`` pixels become one, each (height, width).

        Of several depths in a pixel the nearest is kept. Pixels that are left over at the end are cut off.
        """
        smaller = size[0] // step[0], size[1] // step[1]
        y, x = self.pixels // size[1] // step[0], self.pixels % size[1] // step[1]
        inside = (y < smaller[0]) & (x < smaller[1])
        y, x, inverse = y[inside], x[inside], self.inverse[inside]
        order = torch.argsort(inverse, descending=True, stable=True)
        pixels = (y * smaller[1] + x)[order]
        pixels, places = torch.sort(pixels, stable=True)
        first = torch.ones_like(pixels, dtype=torch.bool)
        first[1:] = pixels[1:] != pixels[:-1]
        return DepthTarget(pixels[first], inverse[order[places[first]]], self.weight)


def depth_loss(alpha: Tensor, depth: Tensor, target: DepthTarget, v_alpha: Tensor, v_depth: Tensor) -> Tensor:
    """Return the depth term of the loss, a scalar tensor in double precision; fill its gradients.

    alpha, v_alpha: [H, W]. depth, v_depth: [H, W], sum of blending weight times z, so that the rendered depth is
    depth / alpha. A pixel in which nothing is drawn counts as infinitely far, and has no gradient.
    """
    v_alpha.zero_()
    v_depth.zero_()
    count = len(target.pixels)
    if count == 0:
        return torch.zeros((), dtype=torch.float64, device=alpha.device)
    a, d = (plane.view(-1)[target.pixels] for plane in (alpha, depth))
    drawn = d > 0.0
    inverse = torch.where(drawn, a / d, 0.0)
    error = inverse - target.inverse
    slope = error.sign() * (target.weight / count)
    by_alpha = torch.where(drawn, slope / d, 0.0)
    # Each pixel occurs once: nothing is summed here, so no order matters.
    v_alpha.view(-1)[target.pixels] = by_alpha
    v_depth.view(-1)[target.pixels] = -by_alpha * inverse
    return tree_sum(error.abs().double()) * (target.weight / count)


def depth_loss_reference(alpha: Tensor, depth: Tensor, target: DepthTarget) -> Tensor:
    """Return depth_loss() by autograd, a scalar tensor of the images' dtype (docs/math.md 7.4)."""
    if len(target.pixels) == 0:
        return alpha.new_zeros(())
    a, d = (plane.reshape(-1).index_select(0, target.pixels) for plane in (alpha, depth))
    drawn = d > 0.0
    inverse = torch.where(drawn, a / torch.where(drawn, d, 1.0), 0.0)
    return target.weight * (inverse - target.inverse.to(inverse)).abs().mean()
