"""shN in pinned memory of the host: the same bits as a GPU that holds all, with less of its memory."""

from __future__ import annotations

import pytest
import torch

from splatcli.gaussians import GROUPS, Gaussians
from splatcli.native.backend import Backend
from splatcli.rasterizer import AsyncEngine, DensifyStats, StepInputs, render
from splatcli.rasterizer.adam import AdamState
from splatcli.rasterizer.memory_estimate import shN_bytes, state_bytes
from splatcli.rasterizer.offload import DEVICE_STORAGE, Pinned, TensorStorage
from tests.rasterizer.scenes import random_camera, random_scene

pytestmark = pytest.mark.gpu
DEVICE = "cuda:0"
COUNT = 50_000


def trained(store: TensorStorage) -> tuple[Gaussians, AdamState, torch.Tensor]:
    """Steps, an edit, more steps, and a view with coefficients brought up to date."""
    from splatcli.train.densify import (  # here: it needs packages that a machine with a GPU may lack
        Refinement,
        apply_refinement,
    )

    gaussians, _ = random_scene(5, COUNT, sh_degree=3, scale=0.02)
    gaussians = gaussians.map(lambda t: t.to(DEVICE), shN=lambda t: store.copy(t, DEVICE))
    adam, stats = AdamState.zeros_like(gaussians, storage=store), DensifyStats.zeros(COUNT, gaussians.device)
    engine = AsyncEngine(Backend.cuda(DEVICE))
    rows = torch.cat([torch.arange(COUNT), torch.arange(0, COUNT, 7)]).sort().values.to(DEVICE)
    for part in range(2):
        for k in range(6):
            camera = random_camera(k, 160, 120)
            target = torch.full((120, 160, 3), 90 + 10 * k, dtype=torch.uint8, device=DEVICE)
            background = torch.zeros(3, device=DEVICE)
            lrs = dict.fromkeys(GROUPS, 1e-3)
            engine.submit(gaussians, adam, StepInputs(camera, target, lrs, 3, background, 0.2, False, stats))
        engine.drain()
        if part == 0:
            adam.flush(gaussians, 1e-3)
            refinement = Refinement(rows, torch.arange(len(rows), device=DEVICE) % 8 == 1)
            gaussians, adam, stats = apply_refinement(refinement, gaussians, adam, stats)
    with torch.no_grad():
        image = render(adam.flushed(gaussians, 1e-3), random_camera(9, 160, 120)).image
    return gaussians, adam, image.cpu()


def test_it_has_the_same_bits() -> None:
    (plain, adam, image), (away, moments, same) = trained(DEVICE_STORAGE), trained(Pinned())
    assert away.shN.is_pinned()
    assert moments.exp_avg.shN.is_pinned()
    assert torch.equal(image, same)
    for mine, theirs in ((away, plain), (moments.exp_avg, adam.exp_avg), (moments.exp_avg_sq, adam.exp_avg_sq)):
        for name, tensor in mine.items():
            assert torch.equal(tensor.cpu(), getattr(theirs, name).cpu()), name
    assert torch.equal(moments.sh_last_step, adam.sh_last_step)


def test_it_takes_as_much_less_of_the_device_as_is_planned() -> None:
    held = []
    for store in (DEVICE_STORAGE, Pinned()):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(DEVICE)
        gaussians, _ = random_scene(5, COUNT, sh_degree=3)
        gaussians = gaussians.map(lambda t: t.to(DEVICE), shN=lambda t, store=store: store.copy(t, DEVICE))
        adam = AdamState.zeros_like(gaussians, storage=store)
        held.append(torch.cuda.memory_allocated(DEVICE) - before)
        del gaussians, adam
    assert held[0] - held[1] == pytest.approx(3 * shN_bytes(COUNT, 3), rel=0.01)
    assert held[1] <= state_bytes(COUNT, 3, offloads=True) * 1.01


def test_a_number_that_is_none_is_found_there_too() -> None:
    from splatcli.train.monitor import FiniteMonitor, StepDivergedError

    gaussians, _ = random_scene(5, 1000, sh_degree=3)
    store = Pinned()
    gaussians = gaussians.map(lambda t: t.to(DEVICE), shN=lambda t: store.copy(t, DEVICE))
    adam = AdamState.zeros_like(gaussians, storage=store)
    adam.exp_avg.shN[700, 3, 1] = float("nan")
    watch = FiniteMonitor()
    watch.check(3, gaussians, adam)
    with pytest.raises(StepDivergedError):
        watch.finish()
