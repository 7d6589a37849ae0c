"""export_splats(): gsplat's call, served by the writers of this package."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from splatcli.checkpoint.activation_check import check_space
from splatcli.checkpoint.foreign.imported import finite_rows
from splatcli.errors import UsageError
from splatcli.formats.format import ExportMetadata
from splatcli.formats.registry import format_to_write
from splatcli.formats.selection import select_for_format
from splatcli.gaussians import Gaussians
from splatcli.output_files import write_bytes

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
    sh0 [N, 1, 3] or [N, 3], shN [N, K, 3] with K = 0, 3, 8, 15 or 24. Rows that are not finite are left out, and so are
    coefficients above the SH degree that the format holds.
    format: ply, splat, ply_compressed, or any that ``splat export`` writes.
    Raises NotImplementedError for another format, ValueError for shapes that do not fit, for values that are activated,
    and where no Gaussian is left, OutputError where ``save_to`` cannot be written.
    """
    name = _NAMES.get(format, format)
    try:
        chosen = format_to_write(Path(), name)
    except UsageError as error:
        raise NotImplementedError(f"export_splats(): format={format!r} is not supported; {error.remedy}") from None
    assert chosen.write is not None, "format_to_write() gives formats that are written"
    tensors = (means, quats, scales, opacities, sh0.reshape(len(means), 3), shN)
    gaussians = Gaussians(*(tensor.detach().float().cpu() for tensor in tensors))
    finite = finite_rows([column for _, column in gaussians.items()])
    if name != "ply" and not bool(finite.any()):
        raise ValueError("no Gaussian is finite, and only a PLY can hold none")
    kept = gaussians.map(lambda column: column[finite])
    tables = (kept.means.numpy(), kept.log_scales.numpy(), kept.logit_opacities.numpy())
    problem = check_space(*tables, declared=True).problem
    if problem is not None:
        raise ValueError(f"export_splats() takes raw tensors: {problem}")
    held, _ = select_for_format(kept, chosen)
    payload = chosen.write(held, ExportMetadata()).payload
    if save_to is not None:
        write_bytes(Path(save_to), payload)
    return payload
