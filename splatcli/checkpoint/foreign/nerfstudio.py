"""step-*.ckpt of nerfstudio's splatfacto: the model's tensors under their module path, today's and older names."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from splatcli.checkpoint.foreign.imported import ImportedModel, Load, Program, columns_of_tensors, has_line
from splatcli.errors import ModelFileError
from splatcli.gaussians import SH_C0

_NAMES = {
    "means": "means",
    "sh0": "features_dc",
    "shN": "features_rest",
    "scales": "scales",
    "quats": "quats",
    "opacities": "opacities",
}
#: Today's place first; the second is that of versions before 1.0.3. "module." comes from training on several GPUs.
_PREFIXES = ("_model.gauss_params.", "_model.", "_model.module.gauss_params.", "_model.module.")
#: The very first version kept all SH coefficients in one tensor.
_ALL_COLOURS = "colors_all"

#: The run's settings, above nerfstudio_models/.
SETTINGS = "config.yml"

FRAME_NOTE = (
    "nerfstudio turns and scales scenes as it trains: the model's frame is that of its own run, not that of the "
    "COLMAP model (dataparser_transforms.json beside its config has the difference)"
)


def is_nerfstudio(stored: object) -> bool:
    """Return whether a file holds a dictionary with a pipeline's state, as nerfstudio's trainer saves it."""
    return isinstance(stored, dict) and isinstance(stored.get("pipeline"), dict)


def read_nerfstudio(stored: object, where: Path, load: Load) -> ImportedModel:
    """Return the Gaussians of a state. Raises ModelFileError when it holds no splatfacto model."""
    assert isinstance(stored, dict)
    state: dict[object, object] = stored["pipeline"]
    state = {key.removeprefix("module.") if isinstance(key, str) else key: value for key, value in state.items()}
    prefix = next((prefix for prefix in _PREFIXES if prefix + "means" in state), None)
    if prefix is None:
        raise ModelFileError(
            "a nerfstudio checkpoint without Gaussians: it has no _model.gauss_params.means",
            where=where,
            remedy="models of splatfacto can be read, those of other methods hold no splats",
        )
    found = {column: state.get(prefix + name) for column, name in _NAMES.items()}
    colours = state.get(prefix + _ALL_COLOURS)
    if isinstance(colours, Tensor) and colours.dim() == 3:
        found |= {"sh0": colours[:, :1], "shN": colours[:, 1:]}
    names = {column: prefix + name for column, name in _NAMES.items()}
    columns = columns_of_tensors(found, names, where)
    step = stored.get("step")
    model = ImportedModel(
        "nerfstudio checkpoint" + (f", step {step}" if isinstance(step, int) else ""),
        columns,
        names=names,
        antialiased=has_line(where.parent.parent / SETTINGS, "rasterize_mode: antialiased"),
        source=SETTINGS,
        notes=[FRAME_NOTE],
    )
    if model.sh_degree == 0 and colours is None:
        # Without harmonics splatfacto trains colours through a sigmoid instead: its own definition, not a guess.
        sh0 = (torch.sigmoid(columns.sh0) - 0.5) / SH_C0
        model.columns = columns._replace(sh0=sh0)
        model.notes.append(
            "SH degree 0: splatfacto keeps such colours as logits, which were turned into SH coefficients"
        )
    return model


PROGRAM = Program(
    is_nerfstudio,
    read_nerfstudio,
    (
        ("nerfstudio_models/step-*.ckpt", r"nerfstudio_models/step-(\d+)\.ckpt"),
        ("step-*.ckpt", r"step-(\d+)\.ckpt"),
    ),
)
