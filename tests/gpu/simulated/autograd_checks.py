"""Autograd on simulated GPUs: gsplat's calls and steps with a loss of the caller's, on cuda:1 and beside the CPU.

torch starts a thread for each device when a process calls backward() first, and asks once for its accelerators. So this
runs in a process of its own by tests/e2e/test_simulated_gpus.py, and installs device_guard.cpp before it imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from splatcli import DefaultStrategy, MCMCStrategy, fused_ssim, rasterization
from splatcli.gaussians import GROUPS
from splatcli.rasterizer.adam import AdamState
from splatcli.rasterizer.depth_loss import DepthTarget
from splatcli.rasterizer.gsplat_ops import fully_fused_projection, spherical_harmonics
from splatcli.rasterizer.gsplat_tiles import (
    accumulate,
    isect_offset_encode,
    isect_tiles,
    rasterize_to_indices_in_range,
    rasterize_to_pixels,
)
from splatcli.rasterizer.loss_engine import LossEngine
from splatcli.rasterizer.step_inputs import DensifyStats, Regularisation, StepInputs, ViewParams
from tests.gpu.simulated.device_tensors import Gpus, simulated_gpus
from tests.rasterizer.scenes import leaves, random_camera, random_image, random_scene

WIDTH, HEIGHT = 37, 29
DEVICES = ("cpu", "cuda:0", "cuda:1")


def arguments(device: str) -> dict[str, Any]:
    """Of rasterization(), for two cameras; the tensors that are trained collect gradients."""
    scene, _ = random_scene(3, 80, sh_degree=1)
    gaussians = leaves(scene.to(device))
    cameras = [random_camera(seed, WIDTH, HEIGHT) for seed in (4, 5)]
    intrinsics = [[[c.fx, 0.0, c.cx], [0.0, c.fy, c.cy], [0.0, 0.0, 1.0]] for c in cameras]
    return {
        "means": gaussians.means,
        "quats": gaussians.quats,
        "scales": gaussians.log_scales,
        "opacities": gaussians.logit_opacities,
        "colors": torch.cat([gaussians.sh0[:, None], gaussians.shN], dim=1).detach().requires_grad_(),
        "viewmats": torch.stack([torch.from_numpy(c.viewmat).float() for c in cameras]).to(device).requires_grad_(),
        "Ks": torch.tensor(intrinsics, device=device),
        "backgrounds": torch.tensor([[0.1, 0.2, 0.3], [0.3, 0.2, 0.1]], device=device).requires_grad_(),
    }


def gsplat_calls(device: str, mode: str, **more: Any) -> dict[str, Tensor]:
    """Images of rasterization() and gradients of all that goes in, with a loss in images and projected means."""
    given = arguments(device)
    inputs = {**given, "scales": given["scales"].exp(), "opacities": given["opacities"].sigmoid()}
    images, alphas, meta = rasterization(**inputs, width=WIDTH, height=HEIGHT, sh_degree=1, render_mode=mode, **more)
    meta["means2d"].retain_grad()
    target = torch.stack([random_image(seed, WIDTH, HEIGHT) for seed in (6, 7)]).to(device)
    ssim = fused_ssim(images[..., :3].permute(0, 3, 1, 2), target.permute(0, 3, 1, 2))
    loss = (images[..., :3] - target).abs().mean() - ssim + 0.1 * (images[..., 3:] + alphas).mean()
    (loss + 1e-4 * meta["means2d"].square().mean()).backward()
    gradients = {name: tensor.grad for name, tensor in given.items() if tensor.requires_grad}
    found = {"images": images, "alphas": alphas, "means2d": meta["means2d"].grad, "radii": meta["radii"], **gradients}
    found |= {name: meta[name] for name in ("depths", "conics", "flatten_ids", "isect_offsets", "tiles_per_gauss")}
    return {name: tensor.detach().cpu() for name, tensor in found.items()}


def gsplat_training(device: str, strategy: Any) -> dict[str, Tensor]:
    """Parameters after eight steps of a loop as gsplat writes it."""
    given = arguments(device)
    names = ("means", "quats", "scales", "opacities", "colors")
    params = nn.ParameterDict({name: nn.Parameter(given[name].detach()) for name in names})
    optimizers = {name: torch.optim.SGD([params[name]], lr=1e-3) for name in names}
    strategy.check_sanity(params, optimizers)
    state = strategy.initialize_state()
    for step in range(1, 9):
        images, _, meta = rasterization(
            means=params["means"],
            quats=params["quats"],
            scales=params["scales"].exp(),
            opacities=params["opacities"].sigmoid(),
            colors=params["colors"],
            viewmats=given["viewmats"].detach(),
            Ks=given["Ks"],
            width=WIDTH,
            height=HEIGHT,
            sh_degree=1,
        )
        strategy.step_pre_backward(params, optimizers, state, step, meta)
        images.square().mean().backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        more = {"lr": 1e-3} if isinstance(strategy, MCMCStrategy) else {"packed": True}
        strategy.step_post_backward(params, optimizers, state, step, meta, **more)
    assert len(params["means"]) != len(given["means"]), "no refinement changed their number"
    return {name: tensor.detach().cpu() for name, tensor in params.items()}


def own_loss(device: str) -> dict[str, Tensor]:
    """Gaussians, statistics and heard gradients after two steps with a loss of the caller's, and all that they have."""
    gaussians = random_scene(3, 90, sh_degree=1)[0].to(device)
    adam, stats = AdamState.zeros_like(gaussians), DensifyStats.zeros(90, device)
    heard: list[Tensor] = []

    def apply_grad(v_viewmat: Tensor | None, v_colours: Tensor | None) -> None:
        assert v_viewmat is not None
        assert v_colours is not None
        heard.extend([v_viewmat.clone(), v_colours.clone()])

    engine = LossEngine(lambda image, target, counts: (image - target).square().mean(), device)
    mask = torch.zeros(HEIGHT, WIDTH, dtype=torch.bool)
    mask[:9, :15] = True
    losses = []
    for step in range(2):
        target = (random_image(50 + step, WIDTH, HEIGHT) * 255).round().to(torch.uint8).masked_fill(mask[..., None], 0)
        depth = DepthTarget(torch.arange(0, 900, 7).to(device), torch.full((129,), 0.25).to(device), 0.7)
        losses += engine.submit(
            gaussians,
            adam,
            StepInputs(
                random_camera(30 + step, WIDTH, HEIGHT),
                target.to(device),
                dict.fromkeys(GROUPS, 1e-3),
                1,
                torch.tensor([0.2, 0.4, 0.6], device=device),
                0.2,
                True,
                stats,
                mask=mask.to(device),
                regularisation=Regularisation(0.02, 0.03, noise=1e-3, seed=5),
                view_params=ViewParams(apply_grad, pose=True, colours=torch.eye(3, 4).to(device)),
                depth=depth,
                alpha_lambda=0.5,
                mask_lambda=0.5,
                filter_3d=torch.linspace(0.0, 0.1, 90).to(device),
            ),
        )
    found = {**dict(gaussians.items()), "grad2d": stats.grad2d, "count": stats.count, "losses": torch.tensor(losses)}
    return {name: tensor.cpu() for name, tensor in (found | {f"heard {i}": one for i, one in enumerate(heard)}).items()}


def projections(device: str) -> dict[str, Tensor]:
    """Results and gradients of gsplat's calls beside rasterization()."""
    given = arguments(device)
    viewmats = given["viewmats"]
    radii, means2d, depths, conics, factors = fully_fused_projection(
        given["means"],
        None,
        given["quats"],
        given["scales"].exp(),
        viewmats,
        given["Ks"],
        WIDTH,
        HEIGHT,
        calc_compensations=True,
        opacities=given["opacities"].sigmoid(),
    )
    assert factors is not None
    colours = spherical_harmonics(1, given["means"], viewmats, given["colors"], masks=(radii > 0).all(dim=-1))
    sum(part.square().mean() for part in (means2d, depths, conics, factors, colours)).backward()
    gradients = {name: tensor.grad for name, tensor in given.items() if tensor.grad is not None}
    assert len(gradients) == 5, "opacities choose radii only"
    return {name: tensor.detach().cpu() for name, tensor in (gradients | {"radii": radii, "colours": colours}).items()}


def lists_of_tiles(device: str) -> dict[str, Tensor]:
    """Lists, images and gradients of gsplat's calls behind the projection: by kernels and, pixel by pixel, by torch."""
    given = arguments(device)
    opacities = given["opacities"].sigmoid()
    radii, means2d, depths, conics, _ = fully_fused_projection(
        given["means"], None, given["quats"], given["scales"].exp(), given["viewmats"], given["Ks"], WIDTH, HEIGHT
    )
    _, ids, rows = isect_tiles(means2d, radii, depths, 16, 3, 2)
    offsets = isect_offset_encode(ids, 2, 3, 2)
    colours = given["colors"][:, 0].expand(2, -1, -1)
    shapes, size = (means2d, conics), (WIDTH, HEIGHT, 16)
    images, alphas = rasterize_to_pixels(
        *shapes, colours, opacities.expand(2, -1), *size, offsets, rows, given["backgrounds"], absgrad=True
    )
    light = torch.ones_like(alphas[..., 0])
    listed = rasterize_to_indices_in_range(0, 1 << 10, light, *shapes, opacities.expand(2, -1), *size, offsets, rows)
    again, _ = accumulate(*shapes, opacities.expand(2, -1), colours, *listed, WIDTH, HEIGHT)
    (images.square().mean() + alphas.mean() + again.square().mean()).backward()
    gradients = {name: tensor.grad for name, tensor in given.items() if tensor.grad is not None}
    assert len(gradients) == 7, "all that is trained"
    found = {"images": images, "alphas": alphas, "again": again, "absgrad": means2d.absgrad, **gradients}
    return {name: tensor.detach().cpu() for name, tensor in (found | {"ids": ids, "pixels": listed[1]}).items()}


CHECKS: dict[str, Callable[[str], dict[str, Tensor]]] = {
    "RGB+ED": lambda device: gsplat_calls(device, "RGB+ED", packed=False, absgrad=True),
    "RGB+D, packed": lambda device: gsplat_calls(device, "RGB+D", rasterize_mode="antialiased"),
    "projections": projections,
    "lists of tiles": lists_of_tiles,
    "DefaultStrategy": lambda device: gsplat_training(
        device, DefaultStrategy(refine_start_iter=2, refine_every=3, grow_grad2d=1e-7, prune_opa=1e-3, verbose=False)
    ),
    "MCMCStrategy": lambda device: gsplat_training(
        device, MCMCStrategy(refine_start_iter=2, refine_every=3, cap_max=120, verbose=False)
    ),
    "own loss": own_loss,
}


def compare(name: str, gpus: Gpus) -> None:
    """Run a check on every device. Raises AssertionError where numbers are not the CPU's, or another GPU is used."""
    expected = CHECKS[name]("cpu")
    assert not gpus.operations, f"{name}: the CPU's run used {gpus.operations}"
    for device in DEVICES[1:]:
        torch.manual_seed(0)
        gpus.operations.clear()
        gpus.calls.clear()
        found = CHECKS[name](device)
        assert set(gpus.operations) | set(gpus.calls) == {device}, f"{name}: {device} and {gpus.operations}"
        for key, tensor in expected.items():
            assert torch.allclose(found[key], tensor, rtol=1e-5, atol=1e-7), f"{name}: {key} on {device}"
    gpus.operations.clear()


def count_waits(gpus: Gpus) -> None:
    """Check the waits of rasterization(): two for all cameras, and for each its pose, what is visible, the bound of its
    tile intersections; and one in backward()."""
    given = arguments("cuda:1")
    inputs = {**given, "scales": given["scales"].exp(), "opacities": given["opacities"].sigmoid()}
    gpus.waits.clear()
    images, _, _ = rasterization(**inputs, width=WIDTH, height=HEIGHT, sh_degree=1, packed=False)
    assert len(gpus.waits) <= 2 + 2 * 3, [str(wait) for wait in gpus.waits]
    gpus.waits.clear()
    images.sum().backward()
    assert len(gpus.waits) <= 1, [str(wait) for wait in gpus.waits]


def main() -> None:
    with simulated_gpus() as gpus:
        for name in CHECKS:
            torch.manual_seed(0)
            compare(name, gpus)
        count_waits(gpus)
        assert gpus.faults == []


if __name__ == "__main__":
    main()
