"""Regularisers and exploration noise in plain torch, from docs/math.md 8.2 and 9; the oracle of the native ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from splatcli.gaussians import Gaussians
from splatcli.rasterizer.reference_projection import rotation_matrices
from splatcli.rasterizer.step_inputs import NOISE_STEEPNESS, NOISE_THRESHOLD, Regularisation

_WORD = 0xFFFFFFFF


def regularise(gaussians: Gaussians, grads: Gaussians, regularisation: Regularisation) -> None:
    """Adds the gradients of the regularisers to ``grads``, shaped as the Gaussians."""
    if regularisation.opacity_reg == 0.0 and regularisation.scale_reg == 0.0:
        return
    with torch.enable_grad():
        logits = gaussians.logit_opacities.detach().requires_grad_()
        log_scales = gaussians.log_scales.detach().requires_grad_()
        loss = regularisation.opacity_reg * logits.sigmoid().mean() + regularisation.scale_reg * log_scales.exp().mean()
        v_logits, v_log_scales = torch.autograd.grad(loss, [logits, log_scales])
    grads.logit_opacities += v_logits
    grads.log_scales += v_log_scales


@torch.no_grad()
def push_means_reference(gaussians: Gaussians, step: int, regularisation: Regularisation) -> None:
    """Moves the means in place by noise of the Gaussians' own shapes; the least opaque ones go farthest."""
    rotation = rotation_matrices(gaussians.quats)
    root = rotation * gaussians.log_scales.exp()[:, None, :]
    gate = torch.sigmoid(NOISE_STEEPNESS * (NOISE_THRESHOLD - gaussians.logit_opacities.sigmoid()))
    normal = normals(regularisation.seed, step, len(gaussians)).to(gaussians.means)
    push = regularisation.noise * gate[:, None] * (root @ root.mT @ normal[:, :, None]).squeeze(2)
    gaussians.means += push.where(push.abs() < 1e30, torch.zeros_like(push))


def normals(seed: int, step: int, n: int) -> Tensor:
    """[n, 3] float64 standard normal numbers, row i a function of (seed, step, i) alone."""
    index = torch.arange(n, dtype=torch.int64)
    words = philox([index & _WORD, torch.full_like(index, step & _WORD), torch.full_like(index, step >> 32),
                    torch.zeros_like(index)], seed & _WORD, seed >> 32 & _WORD)  # fmt: skip
    u, v, u2, v2 = (((word >> 8).double() + 0.5) / 2.0**24 for word in words)
    first, second = (-2.0 * u.log()).sqrt(), (-2.0 * u2.log()).sqrt()
    tau = 2.0 * math.pi
    return torch.stack([first * (tau * v).cos(), first * (tau * v).sin(), second * (tau * v2).cos()], dim=1)


def philox(counter: list[Tensor], key0: int, key1: int) -> list[Tensor]:
    """Philox4x32-10 (Salmon et al., 2011) of four int64 tensors that hold 32-bit words."""
    c0, c1, c2, c3 = counter
    for _ in range(10):
        low_a, high_a = _product(c0, 0xD2511F53)
        low_b, high_b = _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high_b ^ c1 ^ key0, low_b, high_a ^ c3 ^ key1, low_a
        key0, key1 = (key0 + 0x9E3779B9) & _WORD, (key1 + 0xBB67AE85) & _WORD
    return [c0, c1, c2, c3]


def _product(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Lower and upper 32 bits of a 32-bit product, by halves, as int64 has no room for all of it."""
    low, high = word * (factor & 0xFFFF), word * (factor >> 16)
    middle = (low >> 16) + high
    return ((middle & 0xFFFF) << 16) | (low & 0xFFFF), middle >> 16
