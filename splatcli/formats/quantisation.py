"""From raw parameters to the units that file formats store, and back: activated values that leave the program.

They go straight into a file, or came straight out of one. Others (density control, simplification, estimates of
memory) are intermediate values of one function; nothing stores them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from splatcli.gaussians import SH_C0

#: exp() of more leaves float32; exp() of less is no normal float32.
LOG_SCALE_RANGE = (-87.0, 88.0)
#: A stored opacity of exactly 0 or 1 has no logit: it is moved this far, in steps of its quantisation; so little that
#: it is rounded to the same step again.
_INTO_STEP = 0.25
#: Opacities in float32 are as fine as this near 1.
FLOAT_STEP = 4 * 2.0**-23
#: How far rounding may bring an opacity out of 0 to 1.
_BEYOND = 1e-3
#: For each place of the largest component of a quaternion, the others in order.
_OTHERS = np.array([[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]])

Doubles = NDArray[np.float64]


def unit_quats(quats: NDArray[np.floating]) -> Doubles:
    """Return [N, 4] of length 1, in the order given; a zero quaternion becomes the identity of w x y z."""
    wide = quats.astype(np.float64)
    norm = np.linalg.norm(wide, axis=1, keepdims=True)
    return np.where(norm > 0, wide / np.where(norm > 0, norm, 1.0), [1.0, 0.0, 0.0, 0.0])


def scales_of(log_scales: NDArray[np.floating]) -> Doubles:
    """Return standard deviations, world units; all are normal float32 numbers."""
    return np.exp(np.clip(log_scales.astype(np.float64), *LOG_SCALE_RANGE))


def log_scales_of(scales: NDArray[np.floating]) -> Doubles:
    """Return natural logarithms; a scale of 0 or less counts as the smallest normal float32, and NaN stays NaN."""
    with np.errstate(invalid="ignore"):  # some NaN of a damaged file
        wide = scales.astype(np.float64)
    return np.log(np.where(wide < np.finfo(np.float32).tiny, np.finfo(np.float32).tiny, wide))


def negative_row(scales: NDArray[np.floating]) -> int | None:
    """Return the first row of standard deviations [N, 3] of which one is below 0; None without."""
    below = (scales < 0).any(axis=1)
    return int(below.argmax()) if bool(below.any()) else None


def opacities_of(logits: NDArray[np.floating]) -> Doubles:
    """Return opacities in 0...1."""
    wide = logits.astype(np.float64)
    return np.exp(-np.logaddexp(0.0, -wide))


def beyond_row(opacities: NDArray[np.floating]) -> int | None:
    """Return the first row of opacities [N] that lies outside 0...1 by more than rounding; None without."""
    beyond = (opacities < -_BEYOND) | (opacities > 1 + _BEYOND)
    return int(beyond.argmax()) if bool(beyond.any()) else None


def logits_of(opacities: NDArray[np.floating], step: float) -> Doubles:
    """Return logits of opacities in 0...1 that were stored in steps of ``step``."""
    edge = _INTO_STEP * step
    inside = np.clip(opacities.astype(np.float64), edge, 1.0 - edge)
    return np.log(inside) - np.log1p(-inside)


def colours_of(sh0: NDArray[np.floating]) -> Doubles:
    """Return the constant part of the colour, not clamped."""
    return 0.5 + SH_C0 * sh0.astype(np.float64)


def sh0_of(colours: NDArray[np.floating]) -> Doubles:
    """Return the constant SH coefficients of colours."""
    return (colours.astype(np.float64) - 0.5) / SH_C0


def quantised(values: NDArray[np.floating], most: int) -> NDArray[np.int64]:
    """Return values rounded to a whole number from 0 to ``most``."""
    whole: NDArray[np.int64] = np.clip(np.floor(values + 0.5), 0, most).astype(np.int64)
    return whole


# --- quaternions as their three smallest components: the largest follows from the length, made positive by a sign


def smallest_three(quats: Doubles) -> tuple[NDArray[np.int64], Doubles]:
    """Return ([N] index of the largest component, [N, 3] the others in order) of unit quaternions [N, 4].

    The others are those of q or -q, whichever has a positive largest component; each is within sqrt(1/2) of 0.
    """
    largest = np.abs(quats).argmax(axis=1)
    rows = np.arange(len(quats))
    positive = np.where(quats[rows, largest] < 0, -1.0, 1.0)[:, None] * quats
    return largest, positive[rows[:, None], _OTHERS[largest]]


def from_smallest_three(largest: NDArray[Any], others: NDArray[np.floating]) -> Doubles:
    """Return [N, 4] unit quaternions; the largest is 0 where the others alone are longer than 1, as in junk."""
    largest = largest.astype(np.int64)
    wide = others.astype(np.float64)
    quats = np.empty((len(wide), 4))
    rows = np.arange(len(wide))
    quats[rows[:, None], _OTHERS[largest]] = wide
    quats[rows, largest] = np.sqrt(np.maximum(0.0, 1.0 - (wide**2).sum(axis=1)))
    return quats
