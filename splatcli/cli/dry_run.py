"""--dry-run: what a command would read, make and need. Nothing is written but the native library's cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from splatcli.cli.console import Output, format_time
from splatcli.output_files import scene_name
from splatcli.sizes import listed

if TYPE_CHECKING:
    from splatcli.cli.run_training import NewRun, RunContext, RunStart
    from splatcli.config import Config


def show_sfm(images: Path, place: Path, out: Output) -> None:
    """Print the plan for images without cameras: structure from motion comes first, the rest is known after it."""
    name = scene_name(images)
    lines = [
        f"reads  {images}: images or videos without cameras",
        f"makes  {place.parent / f'{name}-sfm'}: their cameras, by splat sfm; used again where they are there already",
        f"makes  {place}: the run",
        "takes  unknown before the cameras are; splat sfm finds them alone, and --dry-run tells the rest then",
    ]
    out.result({"dry_run": True, "reads": images, "makes": place, "sfm": True}, lines)


def show_earlier(checkpoint: Path, out: Output) -> None:
    """Print that a run would continue."""
    out.result({"dry_run": True, "continues": checkpoint}, [f"continues the run from {checkpoint}"])


def show_training(start: RunStart, config: Config, place: Path, context: RunContext) -> None:
    """Print the plan of a run. config: its settings; those of ``start`` with what --max-time decides.

    The time is that of a few steps, which are taken now and thrown away; of several processes, of a batch and of
    offloaded tensors it is that of one view in one process, on the device. Raises as new_state().
    """
    from splatcli.config import with_settings
    from splatcli.rasterizer.train_step import engine_for
    from splatcli.train.start import first_gaussians, planned_config
    from splatcli.train.state import Placement
    from splatcli.train.step_time import GAUSSIANS_PER_STEP, MEAN_SHARE, measure_step_time

    run, scene = start.run, start.scene
    device, sharded = context.device, context.sharded
    gaussians, notes = first_gaussians(config, scene, start.init_model)
    placement = Placement.of(config, device, _nearest_folder(place))
    if sharded:
        placement = replace(placement, shards=run.ranks or 1)
    final, more = planned_config(config, scene, gaussians, placement)
    notes = [*scene.notes, *notes, *more]
    steps, cap, batch = final.train.iterations, final.max_gaussians(), final.train.batch_size
    seconds = run.limit
    if seconds is None:
        grown = max(len(gaussians), GAUSSIANS_PER_STEP * steps)
        most = grown if cap is None else min(grown, cap)
        alone = with_settings(final, {"train.batch_size": 1, "memory.offload": False})
        model = measure_step_time(alone, scene, gaussians.to(device), engine_for(device))
        seconds = steps * model.mean_step(MEAN_SHARE * most)
    other = batch > 1 or final.memory.offload
    sizes = sorted({f"{camera.width}x{camera.height}" for camera in scene.cameras})
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
        "num_gaussians": len(gaussians),
        "max_gaussians": cap,
        "memory": memory[0] if memory else None,
        "seconds": None if other else seconds,
        "notes": [note for note in notes if not note.startswith("memory: ")],
    }
    if other:
        facts |= {"seconds_one_view": seconds, "batch_size": batch, "offload": final.memory.offload}
    if run.ranks is not None:
        facts |= {"ranks": run.ranks, "sharded": sharded}
    views = f"{len(scene.train)} training views and {len(scene.test)} held out, {listed(sizes, 3)}"
    each = "" if run.ranks is None else f" in each of {run.ranks} processes"
    if each and sharded:
        each += f", with 1/{run.ranks} of the Gaussians"
    shared = " to all together" if each and device == "cpu" else ""
    lines = [
        f"reads  {scene.root}: {scene.kind}, {views}, {points:,} points",
        f"makes  {place}: {steps:,} steps from {len(gaussians):,} Gaussians, {_cap_text(cap)}",
        *(f"needs  memory{each}: {text}{shared}" for text in memory),
        _time_line(seconds, device, run, final),
        *(f"note: {note}" for note in facts["notes"]),
    ]
    context.out.result(facts, lines)


def show_blocks(scene: Path, place: Path, plans: list[dict[str, Any]], device: str, out: Output) -> None:
    """Print the plans of the blocks of a scene, each as show_training(), show_earlier() or a finished block gave it."""
    seconds = [plan["seconds"] for plan in plans if plan.get("seconds") is not None]
    lines = [f"reads  {scene}", f"makes  {place}: {len(plans)} blocks"]
    for plan in plans:
        if "continues" in plan:
            text = f"continues from {plan['continues']}"
        elif "num_gaussians" not in plan:
            text = f"is finished: {plan['path']}"
        else:
            views = f"{plan['num_train']} training views and {plan['num_test']} held out"
            text = f"{views}; {plan['iterations']:,} steps from {plan['num_gaussians']:,} Gaussians"
            text += f", {_cap_text(plan['max_gaussians'])}"
            text += "" if plan["memory"] is None else f"; memory: {plan['memory']}"
            text += "" if plan["seconds"] is None else f"; about {format_time(plan['seconds'])}"
        lines.append(f"block {plan['block']}  {text}")
    if seconds:
        lines.append(f"takes  about {format_time(sum(seconds))} on {device}, one block after another{_MEASURED}")
    elif any("seconds_one_view" in plan for plan in plans):
        lines.append("takes  unknown: only one view a step, on the device, is measured")
    noted = list(dict.fromkeys(note for plan in plans for note in plan.get("notes", [])))
    lines += [f"note: {note}" for note in noted]
    out.result({"dry_run": True, "reads": scene, "makes": place, "blocks": plans, "seconds": sum(seconds)}, lines)


#: What the time of a plan leaves out.
_MEASURED = ", by a few steps; evaluation and saves come on top"


def _time_line(seconds: float, device: str, run: NewRun, config: Config) -> str:
    """Return the line of the time."""
    about, batch = f"about {format_time(seconds)} on {device}", config.train.batch_size
    if run.limit is not None:
        return f"takes  {about}"
    if run.ranks is not None or batch > 1:
        by = f" by {run.ranks} processes" if run.ranks is not None else ""
        return f"takes  {about} with one view a step; not measured with {batch}{by}"
    if config.memory.offload:
        return f"takes  {about} without --offload, which makes steps longer"
    return f"takes  {about}{_MEASURED}"


def _cap_text(cap: int | None) -> str:
    return "without a maximum" if cap is None else f"at most {cap:,}"


def _nearest_folder(folder: Path) -> Path:
    """Return the nearest folder above that is there, which is on the disk that ``folder`` will be on."""
    folder = folder.absolute()
    while not folder.is_dir():
        folder = folder.parent
    return folder
