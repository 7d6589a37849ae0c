"""Activated parameters back to raw ones, when the user says that they are activated; never otherwise."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from splatcli.checkpoint.foreign.tensors import RawTables
from splatcli.checkpoint.space import Space, judge, judge_opacities, judge_scales
from splatcli.errors import ModelFileError

#: Opacities are moved this far from 0 and 1, whose logits are infinite: the step of float32 above 1.
_EDGE = 2.0**-23
#: A standard deviation of 0 is where exp() has underflown; it becomes the smallest normal float32.
_SMALLEST = float(torch.finfo(torch.float32).tiny)


def to_raw(tables: RawTables, where: Path) -> tuple[Tensor, Tensor, str]:
    """(log-scales [N, 3], logit opacities [N], what was done) from finite stored values, of which some are activated.

    What is certainly raw is left as it is, for programs that mix the two up do so in one table and not in another.
    Raises ModelFileError when all is raw, when only some of one table is activated, or when what comes out looks
    activated still.
    """
    means, scales, opacities = tables.means, tables.scales, tables.opacities
    found = judge(means.numpy(), scales.numpy(), opacities.numpy(), declared=False)
    if found.partly:
        raise ModelFileError(
            f"{found.problem}; what is activated there and what is not cannot be told apart",
            where=where,
            remedy="export the model again from the program that made it",
        )
    linear = judge_scales(means.numpy(), scales.numpy()).space is not Space.RAW
    alphas = judge_opacities(opacities.numpy()) is not Space.RAW
    if not linear and not alphas and len(means):
        raise ModelFileError(
            "nothing here is activated: scales are logarithms and opacities are logits",
            where=where,
            remedy="leave --param-space out",
        )
    done = []
    if linear:
        tiny = int((scales < _SMALLEST).sum())
        scales = scales.clamp_min(_SMALLEST).double().log().float()
        done.append("took logarithms of the scales" + (f" ({tiny:,} were 0)" if tiny else ""))
    else:
        done.append("left the scales, which are logarithms")
    if alphas:
        edge = int(((opacities < _EDGE) | (opacities > 1 - _EDGE)).sum())
        opacities = torch.logit(opacities.double(), eps=_EDGE).float()
        done.append("took logits of the opacities" + (f" ({edge:,} were 0 or 1)" if edge else ""))
    else:
        done.append("left the opacities, which are logits")
    _check_once(means, scales if linear else None, opacities if alphas else None, where)
    return scales, opacities, f"{done[0]}, {done[1]} (--param-space activated)"


def _check_once(means: Tensor, logs: Tensor | None, logits: Tensor | None, where: Path) -> None:
    """Raises when what is raw now is better explained as activated."""
    twice = []
    if logs is not None:
        verdict = judge_scales(means.numpy(), logs.numpy())
        if verdict.space is Space.ACTIVATED or verdict.activated_error < verdict.raw_error:
            twice.append("scales")
    if logits is not None and judge_opacities(logits.numpy()) is Space.ACTIVATED:
        twice.append("opacities")
    if twice:
        raise ModelFileError(
            f"after one inversion the {' and '.join(twice)} still look activated: they were activated twice",
            where=where,
            remedy="export the model again from the program that made it",
        )
