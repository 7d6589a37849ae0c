"""export_splats(): gsplat's call, served by the writers of this package."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from splatcli.checkpoint.activation_check import check_space
from splatcli.errors import UsageError
from splatcli.formats.format import ExportMetadata
from splatcli.formats.registry import format_to_write
from splatcli.gaussians import Gaussians

#: gsplat's names of formats that have another one here.
_NAMES = {"ply_compressed": "compressed.ply"}


def export_splats(
    means: Tensor,
    scales: Tensor,
    quats: Tensor,
    opacities: Tensor,
    sh0: Tensor,
    shN: Tensor,
    format: str = "ply",
    save_to: str | Path | None = None,
) -> bytes:
    """Return a file of Gaussians, and write it to ``save_to`` if that is given.

    The tensors are raw, as gsplat trains them: scales are logarithms [N, 3], opacities logits [N], quats [N, 4] wxyz,
    sh0 [N, 1, 3] or [N, 3], shN [N, K, 3] with K = 0, 3, 8, 15 or 24. Rows that are not finite are left out.
    format: ply, splat, ply_compressed, or any that ``splat export`` writes.
    Raises NotImplementedError for another format, ValueError for shapes that do not fit, for values that are activated,
    and where no Gaussian is left.
    """
    name = _NAMES.get(format, format)
    try:
        chosen = format_to_write(Path(), name)
    except UsageError as error:
        raise NotImplementedError(f"export_splats(): format={format!r} is not supported; {error.remedy}") from None
    assert chosen.write is not None, "format_to_write() gives formats that are written"
    tensors = (means, quats, scales, opacities, sh0.reshape(len(means), 3), shN.reshape(len(means), -1, 3))
    gaussians = Gaussians(*(tensor.detach().float().cpu() for tensor in tensors))
    finite = torch.ones(len(gaussians), dtype=torch.bool)
    for _, column in gaussians.items():
        finite &= column.reshape(len(gaussians), -1).isfinite().all(dim=1)
    if name != "ply" and not bool(finite.any()):
        raise ValueError("no Gaussian is finite, and only a PLY can hold none")
    kept = gaussians.map(lambda column: column[finite])
    tables = (kept.means.numpy(), kept.log_scales.numpy(), kept.logit_opacities.numpy())
    problem = check_space(*tables, declared=True).problem
    if problem is not None:
        raise ValueError(f"export_splats() takes raw tensors: {problem}")
    payload = chosen.write(kept, ExportMetadata()).payload
    if save_to is not None:
        Path(save_to).write_bytes(payload)
    return payload
