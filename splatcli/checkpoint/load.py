"""Read a checkpoint, or say what is wrong with it; nothing is handed out before everything is checked."""

from __future__ import annotations

from pathlib import Path

from splatcli.checkpoint.activation_check import checkpoint_space_problem, cost_sentence
from splatcli.checkpoint.container import read_container
from splatcli.checkpoint.pack import unpack
from splatcli.checkpoint.schema import nonfinite
from splatcli.checkpoint.state import Checkpoint
from splatcli.errors import ModelFileError


def load_checkpoint(path: Path, *, mapped: bool = False) -> Checkpoint:
    """The state stored in a checkpoint file, tensors on the CPU.

    mapped: tensors are pages of the file instead of memory; only while nobody truncates it.

    Order: the zip, the pickle's imports, the manifest and its digest, the version, names, dtypes, shapes, storage,
    the sha256 of every tensor, finite values, the parameters' space, settings and cameras.
    Raises ModelFileError (damaged, changed, hostile, or another kind of file) or VersionError.
    """
    container = read_container(path, mmap=mapped)
    for name, tensor in container.tensors.items():
        if (found := nonfinite(tensor)) is not None:
            count, index = found
            raise ModelFileError(f"{name} has {count} NaN or infinite values, the first at {list(index)}", where=path)
    checkpoint = unpack(container.manifest, container.tensors, path)
    if (fault := checkpoint_space_problem(checkpoint.gaussians, checkpoint.config)) is not None:
        if fault.startswith("scales"):
            gaussians = checkpoint.gaussians
            fault += f"; {cost_sentence(gaussians.means.numpy(), gaussians.log_scales.numpy(), checkpoint.cameras)}"
        raise ModelFileError(
            fault, where=path, remedy="write the file again from the raw parameters; splatcli's own files hold those"
        )
    return checkpoint
