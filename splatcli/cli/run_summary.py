"""The message at the end of ``splat train`` and ``splat resume``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from splatcli.cli.console import format_time
from splatcli.cli.time_budget import process_age

if TYPE_CHECKING:
    from splatcli.train.events import Evaluated
    from splatcli.train.trainer import Trainer


def summary(trainer: Trainer, checkpoint: Path, score: Evaluated | None) -> str:
    """Return the message at the end of a run: time, quality, sizes, what is suspicious, what comes next."""
    from splatcli.scene.borders import border_note
    from splatcli.train.evaluate import PASSES, outlier_note

    state = trainer.state
    took = f"done in {format_time(process_age())}"
    quality = [] if score is None else [f"test PSNR {score.psnr:.2f} dB"]
    try:
        size = [f"{checkpoint.stat().st_size / 1e6:,.1f} MB"]
    except OSError:
        size = []
    facts = ", ".join([*quality, f"{state.count:,} Gaussians", *size])
    name = shlex.quote(str(trainer.run_dir.path))
    note = None if score is None else outlier_note(score.views)
    remark = f"\n{note}\n  help: splat eval {name} --sheet sheet.png" if note else ""
    if state.step >= PASSES * len(state.train):
        remark += _misfit_remark(trainer.stepper.view_losses, len(state.train), name)
    borders = None if score is None else border_note(trainer.scene, state.test)
    remark += f"\n{borders}" if borders else ""
    following = [f"splat view {name}", f"splat render {name} --views", f"splat export {name} -o scene.ply"]
    return f"{took}: {facts}{remark}\nnext: " + "\n      ".join(following)


def _misfit_remark(losses: Mapping[str, float], views: int, run: str) -> str:
    """Return the lines about training views that are fitted far worse than the others; nothing without one.

    run: the folder, as a shell takes it.
    """
    from splatcli.train.evaluate import LISTED, misfits

    found = misfits(losses)
    if not found:
        return ""
    named = [f"{name} ({factor:.0f} times the median loss)" for name, factor in [*found.items()][:LISTED]]
    if len(found) > LISTED:
        named.append(f"and {len(found) - LISTED} more")
    verb = "is" if len(found) == 1 else "are"
    # Commas part the names of --views.
    shown = shlex.quote(",".join([view for view in found if "," not in view][:LISTED]) or "train")
    return (
        f"\n{len(found)} of {views} training views {verb} fitted far worse than the others: {', '.join(named)}\n"
        f"  help: splat eval {run} --views {shown} --sheet sheet.png; remove images of something else, or refine wrong "
        "poses with --pose-opt"
    )
