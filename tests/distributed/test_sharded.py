"""Sharded rendering: image and gradients are those of all Gaussians in one process, and misuse is refused."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from splatcli.distributed.process_group import ProcessGroup, default_group
from splatcli.errors import DistributedError, UsageError
from splatcli.gaussians import GROUPS, Gaussians
from splatcli.native import abi
from splatcli.rasterizer.gsplat_api import rasterization
from splatcli.rasterizer.rendering import Render, render
from splatcli.rasterizer.sharded import render_sharded
from splatcli.scene.camera import CameraModel
from tests.distributed.ranks import results, run_ranks
from tests.native.cases import NEEDS_COMPILER
from tests.rasterizer.scenes import random_camera, random_gaussians

pytestmark = NEEDS_COMPILER

#: Of four ranks, of which the first so many are taken: one has none, one has only some that no camera sees, all but
#: the last have whole chunks.
COUNTS = {
    "uneven": (37, 14, 61, 7),
    "one without": (30, 0, 41, 5),
    "one unseen": (30, 20, 9, 3),
    "none": (0, 0, 0, 0),
    "chunks": (abi.CHUNK, 0, 2 * abi.CHUNK, 61),
}
BACKGROUNDS = torch.tensor([[0.2, 0.4, 0.6], [0.0, 0.0, 0.0], [1.0, 0.5, 0.1], [0.3, 0.3, 0.3]])


def shard(case: str, rank: int) -> Gaussians:
    gaussians = random_gaussians(7 + rank, COUNTS[case][rank])
    if case == "one unseen" and rank == 1:
        gaussians.means[:, 2] -= 50.0
    return gaussians


def joined(case: str, size: int) -> Gaussians:
    shards = [shard(case, rank) for rank in range(size)]
    return Gaussians(**{name: torch.cat([getattr(one, name) for one in shards]) for name in GROUPS})


def leaves(gaussians: Gaussians) -> Gaussians:
    return gaussians.map(lambda tensor: tensor.detach().clone().requires_grad_())


def total_loss(seen: Render, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    weights = [torch.rand(part.shape, generator=generator) for part in (seen.image, seen.alpha, seen.depth)]
    parts = (seen.image, seen.alpha, seen.depth)
    return torch.stack([(weight * part).sum() for weight, part in zip(weights, parts, strict=True)]).sum()


def camera_of(rank: int) -> Any:
    """Near planes differ, and cut into the Gaussians; every second camera is a fisheye."""
    model: CameraModel = "fisheye" if rank % 2 else "pinhole"
    return replace(random_camera(40 + rank, 37 + 5 * rank, 29), near=3.0 + rank, model=model)


def together(group: ProcessGroup, cases: list[str], antialiased: bool) -> dict[str, Any]:
    """By case, images and gradients of this rank."""
    made = {}
    for case in cases:
        own = leaves(shard(case, group.rank))
        background = BACKGROUNDS[group.rank].clone().requires_grad_()
        camera, pose = posed(group.rank)
        if group.rank == 1:
            pose.requires_grad_(False)  # ranks may differ in it
        seen = render_sharded(group, own, camera, background=background, viewmat=pose, antialiased=antialiased)
        total_loss(seen, group.rank).backward()
        gradients = {name: tensor.grad for name, tensor in own.items()}
        images = (seen.image.detach(), seen.alpha.detach(), seen.depth.detach())
        made[case] = (*images, gradients, background.grad, pose.grad)
    return made


def posed(rank: int) -> tuple[Any, Tensor]:
    """A camera at another place, and its pose [4, 4]."""
    camera = camera_of(rank)
    return replace(camera, viewmat=np.eye(4)), torch.from_numpy(camera.viewmat).requires_grad_()


def alone(
    case: str, size: int, antialiased: bool
) -> tuple[list[Render], Gaussians, list[Tensor | None], list[Tensor | None]]:
    """What ``size`` cameras see of all, the sum of the gradients by camera, those of backgrounds and poses."""
    whole = joined(case, size)
    total = whole.map(torch.zeros_like)
    seen, behind, poses = [], [], []
    for rank in range(size):
        own, background, (camera, pose) = leaves(whole), BACKGROUNDS[rank].clone().requires_grad_(), posed(rank)
        seen.append(render(own, camera, background=background, viewmat=pose, antialiased=antialiased))
        total_loss(seen[-1], rank).backward()
        behind.append(background.grad)
        poses.append(pose.grad)
        for name, tensor in own.items():
            assert tensor.grad is not None
            getattr(total, name).add_(tensor.grad)
    return seen, total, behind, poses


@pytest.mark.parametrize(("size", "antialiased"), [(1, False), (2, True), (3, False), (4, False)])
def test_sharded_is_single(size: int, antialiased: bool) -> None:
    found = results(together, size, list(COUNTS), antialiased)
    for case, counts in COUNTS.items():
        seen, total, behind, poses = alone(case, size, antialiased)
        assert sum(counts) == 0 or float(total.means.abs().max()) > 0
        starts = [sum(counts[:rank]) for rank in range(size + 1)]
        for rank in range(size):
            image, alpha, depth, gradients, v_background, v_pose = found[rank][case]
            assert torch.equal(image, seen[rank].image), case
            assert torch.equal(alpha, seen[rank].alpha), case
            assert torch.equal(depth, seen[rank].depth), case
            assert torch.equal(v_background, behind[rank]), case
            if rank == 1:
                assert v_pose is None
            elif case in ("chunks", "none"):
                assert torch.equal(v_pose, poses[rank]), case
            else:
                assert_close(v_pose, poses[rank], rtol=1e-4, atol=1e-5 * float(poses[rank].abs().max()))
            for name in GROUPS:
                expected = getattr(total, name)[starts[rank] : starts[rank + 1]]
                assert torch.equal(gradients[name], expected), (case, name)


def descend(group: ProcessGroup, case: str) -> Gaussians:
    """What this rank holds after five steps of Adam."""
    own = leaves(shard(case, group.rank))
    optimizer = torch.optim.Adam([tensor for _, tensor in own.items()], lr=0.01)
    for _ in range(5):
        optimizer.zero_grad()
        total_loss(render_sharded(group, own, camera_of(group.rank)), group.rank).backward()
        optimizer.step()
    return own.map(torch.Tensor.detach)


def test_five_steps_on_shards_are_five_steps_on_all() -> None:
    case, size = "one without", 3
    found = results(descend, size, case)
    whole = leaves(joined(case, size))
    optimizer = torch.optim.Adam([tensor for _, tensor in whole.items()], lr=0.01)
    for _ in range(5):
        optimizer.zero_grad()
        for rank in range(size):  # gradients add up camera by camera
            total_loss(render(whole, camera_of(rank)), rank).backward()
        optimizer.step()
    first = joined(case, size)
    for name in GROUPS:
        got, expected = torch.cat([getattr(one, name) for one in found]), getattr(whole, name).detach()
        assert_close(got, expected, rtol=0.0, atol=1e-6)
        assert not torch.equal(expected, getattr(first, name))


def misuse(group: ProcessGroup, kind: str) -> str:
    """The refusal that this rank meets, and how long it took."""
    odd = group.rank == 1
    gaussians = random_gaussians(7, 20, sh_degree=1 if kind == "degree" and odd else 2)
    if kind == "absent" and odd:
        return "nothing"
    with pytest.raises(DistributedError) as caught:
        render_sharded(group, gaussians, camera_of(0), antialiased=kind == "antialiased" and odd)
    return caught.value.what


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("degree", "ranks disagree on a rendering: SH degree is rank 0: 2, rank 1: 1, rank 2: 2"),
        ("antialiased", "ranks disagree on a rendering: antialiased is rank 0: 0, rank 1: 1, rank 2: 0"),
        ("absent", "rank 1 has come to the end"),
    ],
)
def test_misuse_is_refused_within_seconds_and_names_the_rank(kind: str, said: str) -> None:
    for rank, ended in enumerate(run_ranks(misuse, 3, kind, patience=3.0)):
        words = ended.value or ended.error
        assert words is not None
        if not (kind == "absent" and rank == 1 and words == "nothing"):
            assert said in words, (rank, words)


def arguments_of(case: str, rank: int, cameras: int, kind: str) -> dict[str, Any]:
    """rasterization()'s, of one rank; seeds differ, so that colours below 0 are lifted by different amounts."""
    count = COUNTS[case][rank]
    generator = torch.Generator().manual_seed(rank)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    colors = random(count, 4, 3) if kind == "SH" else random(count, 5)
    shown = [camera_of(8 + rank * cameras + i) for i in range(cameras)]
    return {
        "means": random(count, 3),
        "quats": random(count, 4),
        "scales": random(count, 3).exp() * 0.1,
        "opacities": torch.rand(count, generator=generator),
        "colors": colors,
        "viewmats": torch.stack([torch.from_numpy(camera.viewmat).float() for camera in shown]),
        "Ks": torch.tensor([[[40.0, 0.0, 20.0], [0.0, 42.0, 15.0], [0.0, 0.0, 1.0]]] * cameras),
        "width": 41,
        "height": 31,
        "sh_degree": 1 if kind == "SH" else None,
        "render_mode": "RGB+ED",
    }


def gsplats_call(group: ProcessGroup, case: str) -> dict[str, Any]:
    made = {}
    for kind in ("SH", "channels"):
        arguments = arguments_of(case, group.rank, 2, kind)
        trained = {name: arguments[name].requires_grad_() for name in TRAINED}
        images, alphas, meta = rasterization(**arguments, distributed=True, group=group)
        images.square().sum().backward()
        assert meta["n_cameras"] == 2
        made[kind] = (images.detach(), alphas.detach(), {name: tensor.grad for name, tensor in trained.items()})
    with pytest.raises(DistributedError, match="cameras is rank 0: 2, rank 1: 3"):
        rasterization(**arguments_of(case, group.rank, 2 + group.rank, "SH"), distributed=True, group=group)
    return made


#: The last one is of each rank's own cameras.
TRAINED = ("means", "quats", "scales", "opacities", "colors", "viewmats")


def test_gsplats_call_renders_what_all_ranks_hold() -> None:
    case, size = "uneven", 2
    # A disagreement is final, so that the ranks cannot end in good order.
    found = [ended.value or pytest.fail(ended.error or "no answer") for ended in run_ranks(gsplats_call, size, case)]
    for kind in ("SH", "channels"):
        each = [arguments_of(case, rank, 2, kind) for rank in range(size)]
        whole = {**each[0], **{name: torch.cat([one[name] for one in each]).requires_grad_() for name in TRAINED}}
        whole["Ks"] = torch.cat([one["Ks"] for one in each])
        if kind == "SH":
            images, alphas, _ = rasterization(**whole)
        else:
            # With a group each three channels are a render.
            parts = [{"colors": whole["colors"][:, :3], "render_mode": "RGB"}, {"colors": whole["colors"][:, 3:]}]
            rendered = [rasterization(**{**whole, **part}) for part in parts]
            images, alphas = torch.cat([image for image, _, _ in rendered], dim=-1), rendered[0][1]
        images.square().sum().backward()
        for rank in range(size):
            got_images, got_alphas, gradients = found[rank][kind]
            own = slice(2 * rank, 2 * rank + 2)
            assert_close(got_images, images[own].detach(), rtol=0.0, atol=1e-6)
            assert_close(got_alphas, alphas[own].detach(), rtol=0.0, atol=0.0)
            first = sum(COUNTS[case][:rank])
            for name in TRAINED:
                rows = own if name == "viewmats" else slice(first, first + COUNTS[case][rank])
                expected = whole[name].grad[rows]
                assert_close(gradients[name], expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def by_the_default_group(group: ProcessGroup, case: str) -> dict[str, Any]:
    """The same by the call alone; then one that the ranks disagree on, and tensors elsewhere."""
    made = {}
    for again in range(2):
        arguments = arguments_of(case, group.rank, 2, "SH")
        trained = {name: arguments[name].requires_grad_() for name in TRAINED}
        images, alphas, _ = rasterization(**arguments, distributed=True)
        images.square().sum().backward()
        made[again] = (images.detach(), alphas.detach(), {name: tensor.grad for name, tensor in trained.items()})
    found = default_group(torch.device("cpu"))
    assert found is not group
    with pytest.raises(UsageError, match="these tensors are on meta"):
        default_group(torch.device("meta"))
    with pytest.raises(DistributedError, match="cameras is rank 0: 2, rank 1: 3"):
        rasterization(**arguments_of(case, group.rank, 2 + group.rank, "SH"), distributed=True)
    return made


def on_a_nameless_machine(group: ProcessGroup, case: str) -> Tensor:
    os.environ.pop("MASTER_ADDR", None)
    socket.gethostname = lambda: "nobody.invalid"
    images, _, _ = rasterization(**arguments_of(case, group.rank, 2, "SH"), distributed=True)
    return images.detach()


def test_a_machine_whose_name_has_no_address_renders_with_the_default_group() -> None:
    found = results(on_a_nameless_machine, 2, "uneven", limit=60.0)
    expected = [ended.value for ended in run_ranks(gsplats_call, 2, "uneven")]
    for rank in range(2):
        assert torch.equal(found[rank], expected[rank]["SH"][0])


def test_without_a_group_the_ranks_are_those_of_the_default_group() -> None:
    case = "uneven"
    found = results(by_the_default_group, 2, case)
    expected = [ended.value for ended in run_ranks(gsplats_call, 2, case)]
    for rank in range(2):
        images, alphas, gradients = expected[rank]["SH"]
        for again in range(2):
            assert torch.equal(found[rank][again][0], images)
            assert torch.equal(found[rank][again][1], alphas)
            for name in TRAINED:
                assert torch.equal(found[rank][again][2][name], gradients[name]), name


def absent_from_the_default_group(group: ProcessGroup) -> str:
    if group.rank == 1:
        time.sleep(6.0)
        return "nothing"
    with pytest.raises(DistributedError) as caught:
        default_group(torch.device("cpu"), meeting=2.0)
    return caught.value.what


def test_a_rank_that_does_not_call_is_named() -> None:
    assert results(absent_from_the_default_group, 2)[0] == "of 2 ranks 1 did not come within 2 s"


def test_without_a_group_the_remedy_is_named() -> None:
    with pytest.raises(UsageError, match="there is none") as caught:
        rasterization(**arguments_of("uneven", 0, 1, "SH"), distributed=True)
    assert "init_process_group()" in str(caught.value)
    with pytest.raises(UsageError, match="group is given without distributed=True"):
        rasterization(**arguments_of("uneven", 0, 1, "SH"), world="a group")  # type: ignore[arg-type]
