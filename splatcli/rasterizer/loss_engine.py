"""LossEngine: a training step whose loss is a function of the caller's; autograd takes it through the renderer."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from splatcli.errors import UsageError
from splatcli.gaussians import Gaussians
from splatcli.native.backend import Backend
from splatcli.rasterizer.adam import AdamState
from splatcli.rasterizer.reference_engine import recolour_reference, with_terms
from splatcli.rasterizer.rendering import ViewRender, backend_for
from splatcli.rasterizer.step_inputs import DensifyStats, StepInputs, SyncEngine
from splatcli.rasterizer.train_step import TrainStepPipeline

#: Takes image [H, W, 3] and target [H, W, 3], floats, and a mask [H, W] bool, True where a pixel counts, or None where
#: all do; returns a scalar. Pixels that do not count are black in image and target. It may ask for ASKED as well.
Loss = Callable[..., Tensor]

#: Keyword-only parameters without a default by which a loss asks for more of its step: the raw Gaussians, alpha [H, W]
#: and depth [H, W] of the render, all of which have gradients, and the Camera.
ASKED = ("gaussians", "alpha", "depth", "camera")


def asked_of(loss: Loss) -> tuple[str, ...]:
    """Return the ASKED names that a loss takes. Raises TypeError and ValueError for functions without a signature."""
    # A module of torch takes whatever its forward() takes.
    parameters = inspect.signature(getattr(loss, "forward", loss)).parameters
    return tuple(
        name
        for name in ASKED
        if name in parameters
        and parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        and parameters[name].default is inspect.Parameter.empty
    )


class LossEngine(SyncEngine):
    """A StepEngine: the native renderer as a node of autograd, the caller's loss, and the native Adam.

    Parameters of the loss, as of a torch.nn.Module, get gradients; the caller's optimizer takes them between two steps.
    What else a step has (regularisation, noise, terms of depth and alpha, per-view parameters, statistics) is as in the
    fused engines.
    Raises ResourceError where there are no kernels for the device.
    """

    def __init__(self, loss: Loss, device: torch.device | str = "cpu", *, backend: Backend | None = None) -> None:
        """backend: by default the library of the device, in float32."""
        self._loss = loss
        try:
            self._asked = asked_of(loss)
        except (TypeError, ValueError):  # of a function of C
            self._asked = ()
        #: The function's name, or the class of an object that is called.
        self.loss_name = str(getattr(loss, "__name__", type(loss).__name__))
        self._backend = backend or backend_for(torch.device(device))
        self._pipeline = TrainStepPipeline(self._backend, None)

    def step(self, gaussians: Gaussians, adam: AdamState, inputs: StepInputs) -> float:
        self._pipeline.follow_stream()
        adam.flush(gaussians, inputs.lrs["shN"])
        view_params, stats = inputs.view_params, inputs.stats
        with torch.enable_grad():
            leaves = gaussians.map(lambda tensor: tensor.detach().requires_grad_())
            pose = None
            if view_params is not None and view_params.pose:
                pose = torch.from_numpy(inputs.camera.viewmat).clone().requires_grad_()
            rendered = ViewRender(
                leaves,
                inputs.camera,
                sh_degree=inputs.sh_degree,
                background=inputs.background,
                viewmat=pose,
                antialiased=inputs.antialiased,
                filter_3d=inputs.filter_3d,
                backend=self._backend,
            )
            # Its gradient is that of the projected means.
            probe = None if stats is None else inputs.background.new_zeros(len(gaussians), 2, requires_grad=True)
            drawn = rendered.blend(probe)
            image = drawn.image
            colours = None if view_params is None or view_params.colours is None else view_params.colours
            if colours is not None:
                colours = colours.detach().to(image.device).requires_grad_()
                image = recolour_reference(image, colours)
            counts = None if inputs.mask is None else ~inputs.mask
            if inputs.mask is not None:
                image = image.masked_fill(inputs.mask[..., None], 0.0)
            there = {"gaussians": leaves, "alpha": drawn.alpha, "depth": drawn.depth, "camera": inputs.camera}
            more = {name: there[name] for name in self._asked}
            loss = self._loss(image, inputs.target.to(image.dtype) / 255.0, counts, **more)
            _check_scalar(loss)
            loss, minimised = with_terms(loss, drawn.alpha, drawn.depth, inputs)
            # Not autograd.grad(): parameters of the caller's loss get their gradients too.
            minimised.backward()  # type: ignore[no-untyped-call]
        gradients = leaves.map(lambda leaf: _grad(leaf).contiguous())
        if probe is not None and stats is not None:
            _add_stats(stats, rendered, _grad(probe), inputs)
        v_pose = None if pose is None else _grad(pose).to(self._backend.dtype).cpu()
        v_colours = None if colours is None else _grad(colours).cpu()
        self._pipeline.apply_gradients(gaussians, gradients, adam, inputs)
        if view_params is not None:
            view_params.apply_grad(v_pose, v_colours)
        self.isects = int(rendered.context.native.max_isects)
        return float(loss.detach())


def _grad(leaf: Tensor) -> Tensor:
    """Return the gradient of a leaf; zeros where the loss does not depend on it."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _check_scalar(loss: Tensor) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        without = " without a gradient" if isinstance(loss, Tensor) and not loss.requires_grad else ""
        raise UsageError(
            f"the loss is {what}{without}",
            where="loss(image, target, counts)",
            remedy="return a scalar made of image, gaussians, alpha or depth",
        )


def _add_stats(stats: DensifyStats, rendered: ViewRender, v_means2d: Tensor, inputs: StepInputs) -> None:
    """Add this view to the densification statistics."""
    projected, camera = rendered.project(), inputs.camera
    seen = (projected.radii > 0).all(dim=1)
    half = v_means2d.new_tensor([0.5 * camera.width, 0.5 * camera.height])
    gradient = projected.absgrad if inputs.absgrad else v_means2d
    stats.grad2d += (gradient * half).norm(dim=1) * seen
    stats.count += seen
