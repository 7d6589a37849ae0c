"""rasterization(distributed=True) on a GPU, by the default process group of NCCL."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist

from splatcli import rasterization

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not dist.is_nccl_available(), reason="torch has no NCCL")]


def arguments(device: torch.device) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    count = 500
    made = {
        "means": torch.randn(count, 3, generator=generator) + torch.tensor([0.0, 0.0, 4.0]),
        "quats": torch.randn(count, 4, generator=generator),
        "scales": torch.full((count, 3), 0.1),
        "opacities": torch.rand(count, generator=generator),
        "colors": torch.randn(count, 4, 3, generator=generator),
    }
    leaves = {name: tensor.to(device).requires_grad_() for name, tensor in made.items()}
    K = torch.tensor([[[60.0, 0.0, 32.0], [0.0, 60.0, 24.0], [0.0, 0.0, 1.0]]], device=device)
    shape = {"viewmats": torch.eye(4, device=device)[None], "Ks": K, "width": 64, "height": 48, "sh_degree": 1}
    return {**leaves, **shape}


def test_a_group_of_one_rank_renders_what_it_renders_alone() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        found = []
        for changes in ({"distributed": True}, {}):
            given = arguments(device)
            images, alphas, _ = rasterization(**given, **changes)
            images.square().sum().backward()
            assert images.device == device
            found.append([images, alphas, *(given[name].grad for name in ("means", "quats", "scales", "colors"))])
        for name, one, other in zip(("image", "alpha", "means", "quats", "scales", "colors"), *found, strict=True):
            assert float(other.abs().max()) > 0, name
            assert torch.equal(one, other), name
    finally:
        dist.destroy_process_group()
