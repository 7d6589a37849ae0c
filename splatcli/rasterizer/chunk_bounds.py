"""chunk_bounds(): where the Gaussians of each chunk lie and how large they are, so that views skip whole chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from splatcli.gaussians import Gaussians
from splatcli.native import abi

#: Gaussians that are taken at once: some megabytes.
_AT_ONCE = 1 << 18


@torch.no_grad()
def chunk_bounds(gaussians: Gaussians, filter_3d: Tensor | None = None) -> Tensor:
    """Return [ceil(N / 256), 8]: least and largest mean x y z (world units), largest log-scale and 3D filter of each.

    They hold as long as means and log-scales stay as they are. filter_3d: [N], as of StepInputs; None: zeros.
    A Gaussian that is not finite makes the bounds of its chunk NaN, and the chunk is never skipped.
    """
    means, scales = gaussians.means, gaussians.log_scales
    bounds = means.new_zeros(-(-len(means) // abi.CHUNK), abi.BOUNDS)
    for first in range(0, len(means), _AT_ONCE):
        rows = slice(first, first + _AT_ONCE)
        parts = [_chunks(means[rows]), _chunks(scales[rows].amax(1, keepdim=True))]
        out = bounds[first // abi.CHUNK : first // abi.CHUNK + len(parts[0])]
        torch.amin(parts[0], 1, out=out[:, :3])
        out[:, 3:6] = parts[0].amax(1)
        out[:, 6:7] = parts[1].amax(1)
        if filter_3d is not None:
            out[:, 7:8] = _chunks(filter_3d[rows, None].abs()).amax(1)
    return bounds


def _chunks(rows: Tensor) -> Tensor:
    """Return [chunks, 256, C] of rows [N, C]; the last chunk is filled up with the last row."""
    missing = -len(rows) % abi.CHUNK
    if missing:
        rows = torch.cat([rows, rows[-1:].expand(missing, -1)])
    return rows.view(-1, abi.CHUNK, rows.shape[1])
