"""The frame of a scene: far from its origin, where float32 has no digits left, it is moved; and how large it is."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from splatcli.scene.camera import product
from splatcli.scene.source import View

#: Sizes of the scene that its middle may be away from the origin. There a float32 coordinate moves in steps of 1e-6 of
#: the size, which is what the last steps of training move a Gaussian by (means_lr_final).
FAR = 10.0

#: INRIA's margin: the extent is this times the largest distance of a training camera from their mean.
EXTENT_MARGIN = 1.1

#: Smaller spreads than this, in units of the coordinates themselves, are rounding: the cameras stand at one point.
ROUNDING = 1e-9


def extent_of(centers: NDArray[np.float64]) -> float:
    """The size of a scene by its cameras [N, 3]: INRIA's, and 0 when they stand at one point."""
    spread = float(np.linalg.norm(centers - centers.mean(axis=0), axis=1).max())
    return 0.0 if spread <= ROUNDING * max(1.0, float(np.abs(centers).max())) else spread * EXTENT_MARGIN


def offset_for(centers: NDArray[np.float64], extent: float) -> NDArray[np.float64]:
    """[3] float64: what to subtract from the input's coordinates; zeros unless the scene lies far from the origin.

    centers: [N, 3] of the cameras. extent: of the scene, in the same units.
    The offset is a round number in decimal, so that people can add it back.
    """
    middle = centers.mean(axis=0)
    if not extent > 0 or np.abs(middle).max() <= FAR * extent:
        return np.zeros(3)
    unit = 10.0 ** math.floor(math.log10(extent))
    return np.asarray(np.round(middle / unit) * unit)


def moved(view: View, offset: NDArray[np.float64]) -> View:
    """The same view in the frame whose origin is ``offset`` in the input's."""
    viewmat = view.viewmat.copy()
    viewmat[:3, 3] += product(viewmat[:3, :3], offset[:, None])[:, 0]
    return replace(view, viewmat=viewmat)


def on_one_line(centers: NDArray[np.float64]) -> bool:
    """Whether three or more cameras [N, 3] stand on a straight line."""
    spreads = np.linalg.svd(centers - centers.mean(axis=0), compute_uv=False)
    return len(centers) > 2 and bool(spreads[1] <= 1e-6 * spreads[0])
