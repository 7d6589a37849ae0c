"""LossGuard: stops a run at the first loss that is no number, with the facts a person needs to find out why."""

from __future__ import annotations

import math

from splatcli.errors import DivergedError
from splatcli.gaussians import Gaussians


class LossGuard:
    """Checks each step before anything of it is saved, so that the newest checkpoint stays good."""

    def check(self, step: int, view: str, loss: float, gaussians: Gaussians) -> None:
        """Raises DivergedError when ``loss`` is NaN or infinite; its message dumps step, view and broken groups."""
        if math.isfinite(loss):
            return
        broken = nonfinite_rows(gaussians)
        found = ", ".join(f"{name} of {count} Gaussians (first: {first})" for name, (count, first) in broken.items())
        raise DivergedError(
            f"the loss is {loss} at step {step} on view {view!r}; "
            + (f"not finite: {found}" if found else f"all {len(gaussians)} Gaussians are finite"),
            where=f"step {step}",
            remedy="resume from the last checkpoint with lower learning rates, e.g. --set optim.means_lr=8e-5",
        )

    def check_count(self, step: int, gaussians: Gaussians) -> None:
        """Raises DivergedError when density control has left nothing to train."""
        if len(gaussians) == 0:
            raise DivergedError(
                "no Gaussian is left: all became transparent or huge",
                where=f"step {step}",
                remedy="check the cameras' poses and the scene's scale; lower strategy.prune_opacity",
            )


def nonfinite_rows(gaussians: Gaussians) -> dict[str, tuple[int, int]]:
    """Group -> (number of Gaussians with a NaN or infinity, index of the first), only for groups that have any."""
    found = {}
    for name, tensor in gaussians.items():
        bad = ~tensor.detach().reshape(len(gaussians), -1).isfinite().all(dim=1)
        if tensor.numel() and bool(bad.any()):
            found[name] = (int(bad.sum()), int(bad.nonzero()[0]))
    return found
