"""``.splat``, the 32 bytes a Gaussian of the first web viewer: no header, no harmonics beyond the constant one.

float32 position, float32 standard deviations, R G B and opacity as bytes, w x y z as bytes around 128.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from splatcli.checkpoint.foreign.imported import (
    Columns,
    ImportedModel,
)
from splatcli.errors import ModelFileError
from splatcli.formats.format import Encoded, ExportMetadata, Format, file_size
from splatcli.formats.quantisation import (
    colours_of,
    log_scales_of,
    logits_of,
    negative_row,
    opacities_of,
    quantised,
    scales_of,
    sh0_of,
    unit_quats,
)
from splatcli.gaussians import Gaussians

_ROW = np.dtype([("means", "<f4", 3), ("scales", "<f4", 3), ("rgba", "u1", 4), ("quats", "u1", 4)])
#: What rounding to a byte changes at most.
_HALF_BYTE = 0.5 / 255


def encode_splat(gaussians: Gaussians, metadata: ExportMetadata) -> Encoded:
    """Return the Gaussians as rows, those that matter most first, for viewers draw while they load.

    Raises DivergedError when a value is not finite.
    """
    columns = Columns.of(gaussians)
    opacities = opacities_of(columns.opacities)
    rows = np.zeros(len(gaussians), _ROW)
    rows["means"] = columns.means
    rows["scales"] = scales_of(columns.scales)
    colours = colours_of(columns.sh0)
    rows["rgba"][:, :3] = quantised(colours * 255.0, 255)
    rows["rgba"][:, 3] = quantised(opacities * 255.0, 255)
    quats = unit_quats(columns.quats)
    # q and -q are one rotation; 1 cannot be stored and -1 can.
    rows["quats"] = quantised(np.where(quats[:, :1] > 0, -quats, quats) * 128.0 + 128.0, 255)
    weight = columns.scales.astype(np.float64).sum(axis=1) + np.log(np.maximum(opacities, 1e-30))
    notes = []
    if beyond := int((np.abs(colours - 0.5) > 0.5 + _HALF_BYTE).sum()):
        notes.append(f"clamped {beyond:,} colours outside 0 to 1, the range of a .splat file")
    notes += metadata.antialiased_notes("a .splat file")
    return Encoded(rows[np.argsort(-weight, kind="stable")].tobytes(), notes)


def import_splat(path: Path, *, lenient: bool = False) -> ImportedModel:
    """Return the model in a ``.splat`` file. Raises ModelFileError: its size is no multiple of 32."""
    size = file_size(path)
    surplus = size % _ROW.itemsize
    if surplus and not lenient:
        raise ModelFileError(
            f"{size:,} bytes are no multiple of the {_ROW.itemsize} that a Gaussian takes: truncated, or no .splat",
            where=path,
            remedy="get the file anew, or take the whole ones with --lenient",
        )
    rows = np.fromfile(path, _ROW, count=size // _ROW.itemsize)
    if (row := negative_row(rows["scales"])) is not None:
        raise ModelFileError(
            f"the scales of Gaussian {row} are {rows['scales'][row].tolist()}; a .splat holds standard deviations, "
            "which are above 0",
            where=f"{path}, byte {row * _ROW.itemsize + 12}",
        )
    rgba = rows["rgba"] / 255.0
    return ImportedModel(
        "splat",
        Columns.tensors(
            means=rows["means"],
            quats=(rows["quats"].astype(np.float64) - 128.0) / 128.0,
            scales=log_scales_of(rows["scales"]),
            opacities=logits_of(rgba[:, 3], 1 / 255),
            sh0=sh0_of(rgba[:, :3]),
            shN=np.zeros((len(rows), 0, 3)),
        ),
        declared=True,
        sealed=True,
        notes=[f"ignored {surplus} bytes behind the data"] if surplus else [],
    )


FORMAT = Format("splat", ".splat", "a .splat file", 0, encode_splat, import_splat, names=("*.splat",))
