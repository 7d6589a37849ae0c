"""DefaultStrategy and MCMCStrategy: gsplat's interface to density control, for training loops written for gsplat.

They change a dictionary of parameters and the torch optimizers of each, in place, by what rasterization() reports of a
view. Parameters are raw, as there: scales are logarithms, opacities logits. gsplat_edits.py changes parameters, moments
and statistics together. Random numbers follow torch.manual_seed().
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from splatcli.config import Config, Schedule, StrategyConfig, TrainConfig
from splatcli.errors import UsageError
from splatcli.rasterizer.step_inputs import NOISE_STEEPNESS, NOISE_THRESHOLD, DensifyStats
from splatcli.reproducible import logit_of
from splatcli.train.densify.gsplat_edits import (
    NEEDED,
    Optimizers,
    Params,
    State,
    add_noise,
    apply_rows,
    duplicate,
    generator_of_torch,
    raw_of,
    remove,
    reset_opa,
    split,
)
from splatcli.train.densify.mcmc import McmcStrategy


@dataclass
class Strategy:
    """The interface of gsplat's strategies, for one's own too."""

    def check_sanity(self, params: Params, optimizers: Optimizers) -> None:
        """Raise UsageError unless each trained parameter has an optimizer of its own, and none is missing."""
        missing = [name for name in NEEDED if name not in params]
        if missing:
            raise UsageError(f"params has no {missing[0]!r}", where="check_sanity()", remedy=", ".join(NEEDED))
        trained = {name for name, value in params.items() if value.requires_grad}
        if trained != set(optimizers):
            named = ", ".join(sorted(trained ^ set(optimizers)))
            raise UsageError(
                f"parameters and optimizers differ: {named}", where="check_sanity()", remedy="one optimizer for each"
            )
        for name, optimizer in optimizers.items():
            held = [tensor for group in optimizer.param_groups for tensor in group["params"]]
            if len(held) != 1 or held[0] is not params[name]:
                raise UsageError(f"the optimizer {name!r} does not hold this parameter alone", where="check_sanity()")

    def step_pre_backward(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing; called before backward()."""

    def step_post_backward(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing; called after backward()."""


@dataclass
class DefaultStrategy(Strategy):
    """Adaptive density control with gsplat's fields and defaults; call step_pre_backward() and step_post_backward().

    Every ``refine_every`` steps after ``refine_start_iter``, Gaussians whose projected mean has a gradient above
    ``grow_grad2d`` (NDC) are duplicated, or split where they are larger than ``grow_scale3d`` times the scene scale;
    then faint and huge ones are removed. Every ``reset_every`` steps opacities are lowered to twice ``prune_opa``.
    Radii are as in meta of rasterization(); ``grow_scale2d`` and ``prune_scale2d`` are parts of the larger image side.
    """

    prune_opa: float = 0.005
    grow_grad2d: float = 0.0002
    grow_scale3d: float = 0.01
    grow_scale2d: float = 0.05
    prune_scale3d: float = 0.1
    prune_scale2d: float = 0.15
    refine_scale2d_stop_iter: int = 0
    refine_start_iter: int = 500
    refine_stop_iter: int = 15_000
    reset_every: int = 3000
    refine_every: int = 100
    pause_refine_after_reset: int = 0
    absgrad: bool = False
    revised_opacity: bool = False
    verbose: bool = False
    key_for_gradient: str = "means2d"

    def __post_init__(self) -> None:
        if self.key_for_gradient != "means2d":
            raise NotImplementedError(
                f"DefaultStrategy: key_for_gradient={self.key_for_gradient!r} is not supported; means2d is"
            )

    def initialize_state(self, scene_scale: float = 1.0) -> State:
        """Return the state before the first step. scene_scale: the size that the scales are compared with."""
        return {"grad2d": None, "count": None, "radii": None, "scene_scale": scene_scale}

    def step_pre_backward(
        self, params: Params, optimizers: Optimizers, state: State, step: int, info: Mapping[str, Any]
    ) -> None:
        """Keep the gradient of the projected means."""
        info[self.key_for_gradient].retain_grad()

    @torch.no_grad()
    def step_post_backward(
        self,
        params: Params,
        optimizers: Optimizers,
        state: State,
        step: int,
        info: Mapping[str, Any],
        packed: bool = False,
        scene: object = None,
    ) -> None:
        """Add this view to the statistics, and refine if it is time. packed: how ``info`` is laid out."""
        _refuse_scene("DefaultStrategy", scene)
        if step >= self.refine_stop_iter:
            return
        self._update_state(params, state, info, packed)
        due = step > self.refine_start_iter and step % self.refine_every == 0
        if due and step % self.reset_every >= self.pause_refine_after_reset:
            cloned, split = self._grow_gs(params, optimizers, state, step)
            pruned = self._prune_gs(params, optimizers, state, step)
            count = len(params["means"])
            _report(self, f"step {step}: {cloned} duplicated, {split} split, {pruned} pruned, {count} Gaussians")
            for name in ("grad2d", "count", "radii"):
                state[name] = None
        if step > 0 and step % self.reset_every == 0:
            reset_opa(params, optimizers, state, 2.0 * self.prune_opa)

    def _update_state(self, params: Params, state: State, info: Mapping[str, Any], packed: bool) -> None:
        means2d, radii = info[self.key_for_gradient], info["radii"]
        gradient = means2d.absgrad if self.absgrad else means2d.grad
        if gradient is None:
            raise UsageError("the projected means have no gradient", remedy="call step_pre_backward() and backward()")
        count = len(params["means"])
        if state["grad2d"] is None:
            state["grad2d"], state["count"], state["radii"] = (gradient.new_zeros(count) for _ in range(3))
        half = gradient.new_tensor([0.5 * info["width"], 0.5 * info["height"]]) * info["n_cameras"]
        norms = (gradient * half).norm(dim=-1)
        if packed:
            rows = info["gaussian_ids"]
        else:
            seen = (radii > 0).all(dim=-1)
            rows, norms, radii = seen.nonzero()[:, -1], norms[seen], radii[seen]
        state["grad2d"].index_add_(0, rows, norms)
        state["count"].index_add_(0, rows, torch.ones_like(norms))
        share = radii.amax(dim=-1).to(norms) / max(info["width"], info["height"])
        state["radii"].scatter_reduce_(0, rows, share, "amax")

    def _grow_gs(self, params: Params, optimizers: Optimizers, state: State, step: int) -> tuple[int, int]:
        """Duplicate and split; return the numbers of both."""
        high = state["grad2d"] / state["count"].clamp(min=1.0) > self.grow_grad2d
        small = params["scales"].amax(dim=-1) <= math.log(self.grow_scale3d * state["scene_scale"])
        becomes_two = high & ~small
        if step < self.refine_scale2d_stop_iter:
            becomes_two |= state["radii"] > self.grow_scale2d
        copied = high & small
        count, children = int(copied.sum()), int(becomes_two.sum())
        if count:
            duplicate(params, optimizers, state, copied)
        if children:
            becomes_two = torch.nn.functional.pad(becomes_two, (0, count))
            split(params, optimizers, state, becomes_two, self.revised_opacity)
        return count, children

    def _prune_gs(self, params: Params, optimizers: Optimizers, state: State, step: int) -> int:
        """Remove faint and huge Gaussians; return their number."""
        # Written so that a NaN is removed.
        kept = params["opacities"].reshape(-1) >= logit_of(self.prune_opa)
        if step > self.reset_every:
            kept &= params["scales"].amax(dim=-1) <= math.log(self.prune_scale3d * state["scene_scale"])
            if step < self.refine_scale2d_stop_iter:
                kept &= state["radii"] <= self.prune_scale2d
        count = int((~kept).sum())
        if count:
            remove(params, optimizers, state, ~kept)
        return count


@dataclass
class MCMCStrategy(Strategy):
    """Density control of 3DGS-MCMC with gsplat's fields and defaults; call step_post_backward() only.

    Every ``refine_every`` steps dead Gaussians are relocated onto others, and 5 % are added up to ``cap_max``
    (docs/math.md 10). After every step noise moves the transparent ones (docs/math.md 9).
    """

    cap_max: int = 1_000_000
    noise_lr: float = 5e5
    refine_start_iter: int = 500
    refine_stop_iter: int = 25_000
    noise_injection_stop_iter: int = -1
    refine_every: int = 100
    min_opacity: float = 0.005
    verbose: bool = False
    noise_opacity_t: float = NOISE_THRESHOLD
    noise_opacity_k: float = NOISE_STEEPNESS

    def initialize_state(self) -> State:
        """Return the state before the first step; it is empty."""
        return {}

    def step_pre_backward(
        self, params: Params, optimizers: Optimizers, state: State, step: int, info: Mapping[str, Any]
    ) -> None:
        """Do nothing: nothing is needed of the backward pass."""

    @torch.no_grad()
    def step_post_backward(
        self,
        params: Params,
        optimizers: Optimizers,
        state: State,
        step: int,
        info: Mapping[str, Any],
        lr: float,
        scene: object = None,
    ) -> None:
        """Relocate and add if it is time, and add noise. lr: the learning rate of the means in this step."""
        _refuse_scene("MCMCStrategy", scene)
        raw = raw_of(params)
        window = (self.refine_start_iter, self.refine_stop_iter, self.refine_every)
        strategy = _relocation(self.min_opacity, *window, self.cap_max)
        stats = DensifyStats.zeros(0)
        refinement = strategy.refine(step, raw, stats, generator_of_torch()) if strategy.refines_at(step) else None
        if refinement is not None:
            shape = params["opacities"].shape[1:]
            values = {
                "scales": refinement.values["log_scales"],
                "opacities": refinement.values["logit_opacities"].view(-1, *shape),
            }
            apply_rows(params, optimizers, state, replace(refinement, values=values))
            count = len(params["means"])
            moved, added = refinement.relocated, refinement.cloned
            _report(self, f"step {step}: {moved} relocated, {added} added, {count} Gaussians")
        if self.noise_injection_stop_iter < 0 or step < self.noise_injection_stop_iter:
            add_noise(params, lr * self.noise_lr, self.noise_opacity_t, self.noise_opacity_k)


@functools.lru_cache
def _relocation(min_opacity: float, start: int, stop: int, every: int, cap_max: int) -> McmcStrategy:
    """Return the strategy with the fields of an MCMCStrategy, which a loop may change between steps."""
    config = Config(
        strategy=StrategyConfig(name="mcmc", prune_opacity=min_opacity, cap_max=max(1, cap_max)),
        schedule=Schedule(refine_start=start, refine_stop=stop, refine_every=every),
        train=TrainConfig(iterations=max(1, stop)),
    )
    return McmcStrategy(config, 0.0)


def _report(strategy: DefaultStrategy | MCMCStrategy, text: str) -> None:
    if strategy.verbose:
        print(text)


def _refuse_scene(name: str, scene: object) -> None:
    if scene is not None:
        raise NotImplementedError(f"{name}.step_post_backward(): scene={scene!r} is not supported; leave it out")
