"""One of several ranks on simulated GPUs: runs a command line of splat as a launcher's process.

    python -m tests.gpu.simulated.rank train SCENE --distributed sharded --device cuda ...

Gloo exchanges tensors in NCCL's place. What NCCL would refuse is an error: tensors of the host, of another GPU than the
rank's, of types that it does not know. The environment's SIMULATED_RANKS names a folder, which gets a JSON file.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from splatcli.cli.commands import run
from tests.gpu.simulated.device_tensors import simulated_gpus

#: Of those that splatcli has, the types that NCCL adds up and sends.
NCCL_TYPES = {torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool}

_nccl: list[dist.ProcessGroup] = []
_new_group, _get_backend = dist.new_group, dist.get_backend


def new_group(*arguments: Any, backend: str | None = None, **more: Any) -> Any:
    group = _new_group(*arguments, backend="gloo" if backend == "nccl" else backend, **more)
    if backend == "nccl":
        _nccl.append(group)
    return group


def get_backend(group: Any = None) -> str:
    return "nccl" if any(group is one for one in _nccl) else str(_get_backend(group))


def checked(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective that raises AssertionError for tensors which its group does not take."""

    def call(*arguments: Any, **more: Any) -> Any:
        given = [*arguments, *more.values()]
        on_gpus = any(one is group for one in given for group in _nccl)
        wanted = torch.device("cuda", torch.cuda.current_device()) if on_gpus else torch.device("cpu")
        for tensor in [part for one in given for part in (one if isinstance(one, list) else [one])]:
            if isinstance(tensor, Tensor):
                assert tensor.device == wanted, f"{collective.__name__} on {tensor.device}, the group's is {wanted}"
                assert not on_gpus or tensor.dtype in NCCL_TYPES, f"NCCL knows no {tensor.dtype}"
        return collective(*arguments, **more)

    return call


def main() -> None:
    dist.new_group, dist.get_backend = new_group, get_backend
    for name in ("all_gather", "all_to_all_single"):
        setattr(dist, name, checked(getattr(dist, name)))
    with simulated_gpus() as gpus:
        code = run(sys.argv[1:])
    seen = {"faults": gpus.faults, "devices": sorted(gpus.operations | gpus.calls), "groups": len(_nccl)}
    Path(os.environ["SIMULATED_RANKS"], f"{os.environ['RANK']}.json").write_text(json.dumps(seen))
    sys.exit(code)


if __name__ == "__main__":
    main()
