"""A process without a group calls no collective, whatever group torch has: collectives are patched to raise."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives

import splatcli.distributed
from splatcli.distributed.process_group import ProcessGroup, wrap_default_group
from splatcli.rasterizer.gsplat_api import rasterization
from splatcli.rasterizer.rendering import render
from splatcli.rasterizer.sharded import render_sharded
from tests.distributed.ranks import results
from tests.distributed.training import batch_config, train
from tests.native.cases import NEEDS_COMPILER
from tests.rasterizer.scenes import random_camera, random_gaussians

pytestmark = NEEDS_COMPILER

FRAMES = 50
COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single"),
    *(
        "barrier",
        "broadcast",
        "broadcast_object_list",
        "gather",
        "gather_object",
        "irecv",
        "isend",
        "monitored_barrier",
    ),
    *("recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send"),
)
FUNCTIONAL = ("all_gather_tensor", "all_reduce", "all_to_all_single", "broadcast", "reduce_scatter_tensor")


@contextmanager
def collectives_forbidden() -> Iterator[None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a collective in local mode")

    patched = mock.patch.multiple(dist, **dict.fromkeys(COLLECTIVES, refuse))
    with patched, mock.patch.multiple(_functional_collectives, **dict.fromkeys(FUNCTIONAL, refuse)):
        yield


def frames() -> list[bytes]:
    """Images and gradients of a few views, over and over."""
    gaussians = random_gaussians(3, 60).map(lambda tensor: tensor.detach().float().requires_grad_())
    made = []
    for index in range(FRAMES):
        image = render(gaussians, random_camera(30 + index % 5, 24, 18)).image
        gradients = torch.autograd.grad(image.square().sum(), [tensor for _, tensor in gaussians.items()])
        made.append(b"".join(tensor.detach().numpy().tobytes() for tensor in (image, *gradients)))
    return made


def drawn(arguments: dict[str, Any]) -> bytes:
    return rasterization(**arguments)[0].detach().numpy().tobytes()


def work_alone(group: ProcessGroup | None) -> Any:
    """In rank 1 nothing; it waits at the end, until rank 0 is done."""
    if group is not None and group.rank == 1:
        return None
    generator = torch.Generator().manual_seed(0)
    arguments = {
        "means": torch.randn(20, 3, generator=generator) + torch.tensor([0.0, 0.0, 4.0]),
        "quats": torch.randn(20, 4, generator=generator),
        "scales": torch.full((20, 3), 0.2),
        "opacities": torch.full((20,), 0.5),
        "colors": torch.rand(20, 3, generator=generator),
        "viewmats": torch.eye(4)[None],
        "Ks": torch.tensor([[[20.0, 0.0, 12.0], [0.0, 20.0, 9.0], [0.0, 0.0, 1.0]]]),
        "width": 24,
        "height": 18,
    }
    with collectives_forbidden():
        if group is not None:
            assert dist.is_initialized()
            with pytest.raises(AssertionError, match="a collective"):
                dist.barrier()
        return frames(), drawn(arguments), train(None, batch_config(2))["digests"]


def test_former_names_stay() -> None:
    assert splatcli.distributed.World is ProcessGroup
    assert splatcli.distributed.world_of_group is wrap_default_group
    assert splatcli.distributed.render_sharded is render_sharded


def test_one_rank_works_while_the_other_sleeps() -> None:
    alone = work_alone(None)
    assert len(set(alone[0])) == 5
    together = results(work_alone, 2, patience=300.0)
    assert together[0] == alone
    assert together[1] is None


JOINED = """
import os, torch
from splatcli.distributed.process_group import Place, join
from tests.distributed.ranks import gloo_threads

group = join(Place.of(os.environ), torch.device("cpu"))
group.all_gather_scalars("a view", [1.0])
during = gloo_threads()
group.close()
group.destroy()
print(during > 0, gloo_threads())
"""

#: The default group is the script's own, which ends it, or leaves that to the end of Python; two are made of it.
DEFAULT = """
import atexit, sys, torch
import torch.distributed as dist
from splatcli.distributed.process_group import default_group
from tests.distributed.ranks import gloo_threads

dist.init_process_group("gloo")
atexit.register(lambda: print(during > 0, gloo_threads() - during // 3 * dist.is_initialized()))
group = default_group(torch.device("cpu"))
group.all_gather_scalars("a view", [1.0])
during = gloo_threads()
if "destroy" in sys.argv:
    dist.destroy_process_group()
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="lists its threads in /proc")
@pytest.mark.parametrize("script", [[JOINED], [DEFAULT], [DEFAULT, "destroy"]], ids=["joined", "left", "destroyed"])
def test_a_rank_that_has_ended_leaves_no_thread_of_gloo(script: list[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", *script],
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=120)[0].split() for rank in ranks] == [["True", "0"]] * 2
    assert [rank.returncode for rank in ranks] == [0, 0]
