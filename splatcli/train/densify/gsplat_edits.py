"""gsplat's edits of parameters and their optimizers, gsplat.strategy.ops there, for strategies written for gsplat.

They change a dictionary of raw parameters, the moments of each optimizer and a strategy's statistics together, in
place. Random numbers follow torch.manual_seed().
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from splatcli.gaussians import Gaussians
from splatcli.rasterizer.step_inputs import NOISE_STEEPNESS, NOISE_THRESHOLD
from splatcli.reproducible import logit_of, rotate
from splatcli.train.densify import mcmc
from splatcli.train.densify.base import Refinement
from splatcli.train.densify.default import revised_opacities, sample_split

#: A dict or nn.ParameterDict; optimizers under the same names; what a strategy keeps from step to step.
Params = MutableMapping[str, Any] | torch.nn.ParameterDict
Optimizers = Mapping[str, torch.optim.Optimizer]
State = dict[str, Any]

#: The parameters that a strategy reads; others are kept, copied and removed along with them.
NEEDED = ("means", "scales", "quats", "opacities")


@torch.no_grad()
def duplicate(params: Params, optimizers: Optimizers, state: State, mask: Tensor) -> None:
    """Append a copy of each Gaussian of ``mask`` [N], with zero moments."""
    stay = torch.arange(len(mask), device=mask.device)
    source = torch.cat([stay, mask.nonzero()[:, 0]])
    copied = torch.arange(len(source), device=mask.device) >= len(stay)
    apply_rows(params, optimizers, state, Refinement(source, copied))


@torch.no_grad()
def split(params: Params, optimizers: Optimizers, state: State, mask: Tensor, revised_opacity: bool = False) -> None:
    """Replace each Gaussian of ``mask`` [N] by two smaller ones that are sampled from it; they come last.

    revised_opacity: the two together are as opaque as it was.
    """
    stay, chosen = (rows.nonzero()[:, 0] for rows in (~mask, mask))
    source = torch.cat([stay, chosen, chosen])
    reset_moments = torch.arange(len(source), device=source.device) >= len(stay)
    values = {}
    for name, made in zip(("means", "scales"), sample_split(raw_of(params), chosen, generator_of_torch()), strict=True):
        values[name] = torch.cat([params[name][stay], made])
    if revised_opacity:
        values["opacities"] = params["opacities"][source]
        values["opacities"][reset_moments] = revised_opacities(values["opacities"][reset_moments], 1.0)
    apply_rows(params, optimizers, state, Refinement(source, reset_moments, values))


@torch.no_grad()
def remove(params: Params, optimizers: Optimizers, state: State, mask: Tensor) -> None:
    """Remove the Gaussians of ``mask`` [N]."""
    rows = (~mask).nonzero()[:, 0]
    apply_rows(params, optimizers, state, Refinement(rows, torch.zeros_like(rows, dtype=torch.bool)))


@torch.no_grad()
def reset_opa(params: Params, optimizers: Optimizers, state: State, value: float) -> None:
    """Lower all opacities to ``value`` in 0..1 at most; their moments begin anew."""
    lowered = params["opacities"].detach().clamp(max=logit_of(value))
    replace(params, optimizers, "opacities", lowered, lambda key, moment: torch.zeros_like(moment))


@torch.no_grad()
def relocate(
    params: Params,
    optimizers: Optimizers,
    state: State,
    mask: Tensor,
    binoms: Tensor | None = None,
    min_opacity: float = 0.005,
) -> None:
    """Turn the dead Gaussians of ``mask`` [N] into copies of others, sampled by opacity; docs/math.md 10.

    binoms: accepted, without effect.
    """
    rows = mcmc.CopiedRows.of(raw_of(params))
    chosen = mcmc.sample_rows(rows.weights().masked_fill(mask, 0.0), int(mask.sum()), generator_of_torch())
    if len(chosen):
        rows.share(chosen)
        rows.copy(mask.nonzero()[:, 0], chosen)
        _apply_copies(params, optimizers, state, rows, min_opacity)


@torch.no_grad()
def sample_add(
    params: Params,
    optimizers: Optimizers,
    state: State,
    n: int,
    binoms: Tensor | None = None,
    min_opacity: float = 0.005,
) -> None:
    """Append ``n`` copies of Gaussians, sampled by opacity; docs/math.md 10. binoms: accepted, without effect."""
    rows = mcmc.CopiedRows.of(raw_of(params))
    chosen = mcmc.sample_rows(rows.weights(), n, generator_of_torch())
    if len(chosen):
        rows.share(chosen)
        rows.append(chosen)
        _apply_copies(params, optimizers, state, rows, min_opacity)


@torch.no_grad()
def inject_noise_to_position(params: Params, optimizers: Optimizers, state: State, scaler: float) -> None:
    """Move the transparent Gaussians by noise with their covariance; docs/math.md 9."""
    add_noise(params, scaler, NOISE_THRESHOLD, NOISE_STEEPNESS)


@torch.no_grad()
def compute_relocation(
    opacities: Tensor, scales: Tensor, ratios: Tensor, binoms: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return opacities [N] and scales [N, 3] of Gaussians, ``ratios`` [N] of which look like the one in their place.

    opacities: [N] in 0..1. scales: [N, 3] standard deviations. binoms: [n_max, n_max]; its size alone is read.
    """
    most = mcmc.MAX_COPIES if binoms is None else min(mcmc.MAX_COPIES, len(binoms))
    copies = ratios.long().clamp(min=1, max=most)
    logits, log_factor = mcmc.compute_relocation(torch.logit(opacities.clamp(1e-12, mcmc.MAX_OPACITY)), copies)
    return logits.sigmoid(), scales * log_factor.exp()[:, None]


@torch.no_grad()
def update_param_with_optimizer(
    param_fn: Callable[[str, Tensor], Tensor],
    optimizer_fn: Callable[[str, Tensor], Tensor],
    params: Params,
    optimizers: Optimizers,
    names: Sequence[str] | None = None,
) -> None:
    """Replace parameters by param_fn(name, parameter), and their moments by optimizer_fn(key, moment).

    names: of the parameters; all by default.
    """
    for name in list(params) if names is None else names:
        column = param_fn(name, params[name])
        replace(params, optimizers, name, column, optimizer_fn)


@torch.no_grad()
def multinomial_sample(weights: Tensor, n: int, replacement: bool = True) -> Tensor:
    """Return [n] int64 rows, sampled in proportion to ``weights`` [N]; with replacement for any N."""
    if len(weights) <= 2**24 or not replacement:
        return torch.multinomial(weights, n, replacement=replacement)
    return mcmc.sample_rows(weights / weights.max(), n, generator_of_torch())


def add_noise(params: Params, scale: float, threshold: float, steepness: float) -> None:
    """Add noise with the covariance of each Gaussian to the means of those less opaque than ``threshold``."""
    means, quats, scales = (params[name].detach() for name in ("means", "quats", "scales"))
    opacities = params["opacities"].detach().reshape(-1, 1).sigmoid()
    fading = torch.sigmoid(steepness * (threshold - opacities))
    # The covariance times the noise: into the Gaussian's axes, by the variances, and back.
    inverse = quats * quats.new_tensor([1.0, -1.0, -1.0, -1.0])
    local = rotate(inverse, torch.randn_like(means) * fading * scale) * (2.0 * scales).exp()
    means += rotate(quats, local).to(means.dtype)


def raw_of(params: Params) -> Gaussians:
    """Return the parameters that strategies read, without colours."""
    means, scales, quats, opacities = (params[name].detach() for name in NEEDED)
    colours = means.new_zeros(len(means), 1, 3)
    return Gaussians(means, quats, scales, opacities.reshape(-1), colours[:, 0], colours[:, :0])


def generator_of_torch() -> torch.Generator:
    """Return a generator on the CPU, seeded by torch's own."""
    return torch.Generator().manual_seed(int(torch.randint(2**31, ())))


def apply_rows(params: Params, optimizers: Optimizers, state: State, refinement: Refinement) -> None:
    """Replace all rows of parameters, moments and statistics by those of ``refinement``, its values by gsplat's names.

    The statistics keep the rows of their sources.
    """
    count, source, values = len(params["means"]), refinement.source, refinement.values

    def moved(key: str, moment: Tensor) -> Tensor:
        rows = moment[source]
        rows[refinement.reset_moments] = 0.0
        return rows

    for name in list(params):
        replace(params, optimizers, name, values.get(name, params[name].detach()[source]), moved)
    for name, kept in state.items():
        if isinstance(kept, Tensor) and kept.dim() and len(kept) == count:
            state[name] = kept[source]


def replace(
    params: Params, optimizers: Optimizers, name: str, column: Tensor, moved: Callable[[str, Tensor], Tensor]
) -> None:
    """Put ``column`` in the place of a parameter, and moved(key, moment) of each of its moments in its optimizer."""
    old = params[name]
    new = column
    if isinstance(old, nn.Parameter) and not isinstance(column, nn.Parameter):
        new = nn.Parameter(column, old.requires_grad)
    new.requires_grad_(old.requires_grad)
    optimizer = optimizers.get(name)
    if optimizer is not None:
        for group in optimizer.param_groups:
            group["params"] = [new if tensor is old else tensor for tensor in group["params"]]
        entry = optimizer.state.pop(old, {})
        # Moments have the shape of the parameter; the number of the step has not.
        optimizer.state[new] = {
            key: moved(key, value) if isinstance(value, Tensor) and value.shape == old.shape else value
            for key, value in entry.items()
        }
    params[name] = new


def _apply_copies(
    params: Params, optimizers: Optimizers, state: State, rows: mcmc.CopiedRows, min_opacity: float
) -> None:
    changed = rows.reset_moments
    logits = torch.where(changed, rows.logits.clamp(min=logit_of(min_opacity)), rows.logits)
    values = {"scales": rows.log_scales, "opacities": logits.view(-1, *params["opacities"].shape[1:])}
    apply_rows(params, optimizers, state, Refinement(rows.source, changed, values))
