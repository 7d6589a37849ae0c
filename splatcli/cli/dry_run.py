"""--dry-run: what a command would read, make and need. Nothing is written but the native library's cache."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from splatcli.cli.console import Output, format_time

if TYPE_CHECKING:
    from splatcli.config import Config
    from splatcli.gaussians import Gaussians
    from splatcli.scene.scene import Scene


def show_sfm(images: Path, place: Path, out: Output) -> None:
    """Print what training on images without cameras begins with; the rest is known when it is done."""
    name = images.stem if images.is_file() else images.resolve().name
    lines = [
        f"reads  {images}: images or a video without cameras",
        f"makes  {place.parent / f'{name}-sfm'}: their cameras, by splat sfm; used again where they are there already",
        f"makes  {place}: the run",
        "takes  unknown before the cameras are; splat sfm finds them alone, and --dry-run tells the rest then",
    ]
    out.result({"dry_run": True, "reads": images, "makes": place, "sfm": True}, lines)


def show_earlier(checkpoint: Path, out: Output) -> None:
    """Print that a run would continue."""
    out.result({"dry_run": True, "continues": checkpoint}, [f"continues the run from {checkpoint}"])


def show_training(
    config: Config, scene: Scene, given: Gaussians | None, place: Path, device: str, limit: float | None, out: Output
) -> None:
    """Print the plan of a run. given: the model that it starts from. limit: seconds that the command may take.

    The time is that of a few steps, which are taken now and thrown away. Raises as new_state().
    """
    from splatcli.rasterizer.train_step import engine_for
    from splatcli.train.start import first_gaussians, new_state
    from splatcli.train.step_time import GAUSSIANS_PER_STEP, MEAN_SHARE, measure_step_time

    initial = first_gaussians(config, scene, given)
    state, notes = new_state(config, scene, device, given, initial=initial)
    final = state.config
    steps, cap = final.train.iterations, final.max_gaussians()
    seconds = limit
    if seconds is None:
        grown = max(len(initial[0]), GAUSSIANS_PER_STEP * steps)
        most = grown if cap is None else min(grown, cap)
        model = measure_step_time(final, scene, initial[0].to(device), engine_for(device))
        seconds = steps * model.mean_step(MEAN_SHARE * most)
    sizes = sorted({f"{camera.width}x{camera.height}" for camera in scene.cameras})
    shown = ", ".join(sizes[:3]) + (", ..." if len(sizes) > 3 else "")
    points = 0 if scene.points is None else len(scene.points)
    memory = [note.removeprefix("memory: ") for note in notes if note.startswith("memory: ")]
    facts: dict[str, Any] = {
        "dry_run": True,
        "reads": scene.root,
        "scene_kind": scene.kind,
        "num_train": len(scene.train),
        "num_test": len(scene.test),
        "num_points": points,
        "sizes": sizes,
        "makes": place,
        "iterations": steps,
        "num_gaussians": len(initial[0]),
        "max_gaussians": cap,
        "memory": memory[0] if memory else None,
        "seconds": seconds,
        "notes": [note for note in notes if not note.startswith("memory: ")],
    }
    views = f"{len(scene.train)} training views and {len(scene.test)} held out, {shown}"
    most_shown = "without a maximum" if cap is None else f"at most {cap:,}"
    measured = "" if limit else ", by a few steps; evaluation and saves come on top"
    lines = [
        f"reads  {scene.root}: {scene.kind}, {views}, {points:,} points",
        f"makes  {place}: {steps:,} steps from {len(initial[0]):,} Gaussians, {most_shown}",
        *(f"needs  memory: {text}" for text in memory),
        f"takes  about {format_time(seconds)} on {device}{measured}",
        *(f"note: {note}" for note in facts["notes"]),
    ]
    out.result(facts, lines)
