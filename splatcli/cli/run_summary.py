"""The message at the end of ``splat train`` and ``splat resume``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from splatcli.cli.console import format_time, named_views
from splatcli.cli.process import process_age

if TYPE_CHECKING:
    from splatcli.train.events import Evaluated, Probed
    from splatcli.train.trainer import Trainer

#: Steps that suffice for images that do not agree in their details (docs/quality.md, "Number of steps").
_FEWER_STEPS = 7000


def summary(
    trainer: Trainer,
    checkpoint: Path,
    score: Evaluated | None,
    probed: Probed | None,
    *,
    explain_split: bool,
    exported: bool,
) -> str:
    """Return the message at the end of a run: time, quality, sizes, what is suspicious, what comes next.

    score, probed: the last figures of the held-out views and of the probe views. explain_split: whether to say how to
    train on the held-out views, too. exported: whether a file of the model is written already.
    """
    from splatcli.scene.borders import border_note
    from splatcli.train.outlier_views import MIN_PASSES, score_note

    state = trainer.state
    took = f"done in {format_time(process_age())}"
    quality = [] if score is None else [f"test PSNR {score.psnr:.2f} dB"]
    try:
        size = [f"{checkpoint.stat().st_size / 1e6:,.1f} MB"]
    except OSError:
        size = []
    facts = ", ".join([*quality, f"{state.count:,} Gaussians", *size])
    name = shlex.quote(str(trainer.run_dir.path))
    note = None if score is None else score_note(score.views)
    remark = _split_remark(trainer) if explain_split else ""
    remark += f"\n{note}\n  help: splat eval {name} --sheet sheet.png" if note else ""
    skipped = [state.cameras[state.train[row]].name for row in sorted(state.sampler.skipped)]
    remark += _skipped_remark(skipped, len(state.train), name)
    if state.step >= MIN_PASSES * len(state.train):
        losses = {view: loss for view, loss in trainer.stepper.view_losses.items() if view not in skipped}
        remark += _misfit_remark(losses, len(state.train), name)
    if not state.config.views.trained:  # or they have colours that held-out views lack
        remark += _overfit_remark(probed, score, state.config.train.iterations)
    borders = None if score is None else border_note(trainer.scene, state.test)
    remark += f"\n{borders}" if borders else ""
    following = [f"splat view {name}", f"splat render {name} --views"]
    following += [] if exported else [f"splat export {name} -o scene.ply"]
    return f"{took}: {facts}{remark}\nnext: " + "\n      ".join(following)


def _split_remark(trainer: Trainer) -> str:
    """Return the line about images that were held out by the default rule; nothing where none were."""
    from splatcli.train.evaluate import follows_test_every

    scene = trainer.scene
    if not scene.test or not follows_test_every(trainer.state.config, scene):
        return ""
    were = "image was" if len(scene.test) == 1 else "images were"
    return (
        f"\n{len(scene.test)} of {len(scene.cameras)} {were} held out for evaluation; --test-every 0 trains on all of "
        "them"
    )


def _overfit_remark(probed: Probed | None, score: Evaluated | None, iterations: int) -> str:
    """Return the lines about a model that fits its training views far better than others; nothing where it does not."""
    from splatcli.train.evaluate import overfit_note

    note = overfit_note(probed, score)
    if note is None:
        return ""
    fewer = f"; -n {_FEWER_STEPS} may be as good" if iterations > _FEWER_STEPS else ""
    return f"\n{note}\n  help: take more images between the others{fewer}; splat docs guides/better-results"


def _misfit_remark(losses: Mapping[str, float], views: int, run: str) -> str:
    """Return the lines about training views that are fitted far worse than the others; nothing without one.

    run: the folder, as a shell takes it.
    """
    from splatcli.train.outlier_views import misfits

    found = misfits(losses)
    if not found:
        return ""
    named = named_views([f"{name} ({factor:.0f} times the median loss)" for name, factor in found.items()])
    verb = "is" if len(found) == 1 else "are"
    return (
        f"\n{len(found)} of {views} training views {verb} fitted far worse than the others: {named}\n"
        f"  help: {_show_views([*found], run)}; remove images of something else, or refine wrong poses with --pose-opt"
    )


def _skipped_remark(names: Sequence[str], views: int, run: str) -> str:
    """Return the lines about training views that were left out; nothing without one. run: as for _misfit_remark()."""
    if not names:
        return ""
    verb = "was" if len(names) == 1 else "were"
    return (
        f"\n{len(names)} of {views} training views {verb} left out, since the others do not show the same: "
        f"{named_views(names)}\n"
        f"  help: {_show_views(names, run)}; remove images of something else, refine wrong poses with --pose-opt, "
        "learn other exposures with --exposure, or keep all with --set train.max_view_error=0"
    )


def _show_views(names: Sequence[str], run: str) -> str:
    """Return the command that shows views of a run beside their images."""
    from splatcli.train.outlier_views import LISTED

    # Commas part the names of --views.
    shown = shlex.quote(",".join([view for view in names if "," not in view][:LISTED]) or "train")
    return f"splat eval {run} --views {shown} --sheet sheet.png"
