"""Drives a trainer for ``train`` and ``resume``: signals in, progress out, the exit code at the end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from splatcli.cli.model import OUTPUT, file_kind, find_model, is_own_checkpoint, load_model, run_folder
from splatcli.cli.output import Output
from splatcli.cli.progress import reporter_for
from splatcli.cli.signals import exit_code, stop_requests
from splatcli.errors import ModelFileError, OutputError, UsageError

if TYPE_CHECKING:
    from splatcli.checkpoint.foreign.stored import Reading
    from splatcli.config import Config
    from splatcli.gaussians import Gaussians
    from splatcli.train.loop import Trainer


def start_training(
    config: Config,
    *,
    reading: Reading,
    output: Path | None,
    overwrite: bool,
    stop_at: int | None,
    device: str,
    out: Output,
) -> int:
    """Train a new run to its end or until it is stopped; returns the exit code."""
    from splatcli.checkpoint.rundir import RunDir
    from splatcli.scene.read import read_scene
    from splatcli.train.loop import Trainer

    given = _initial_model(config, reading, out)
    scene = read_scene(Path(config.data.scene), config.data, background=photo_background(config))
    if overwrite and output is not None:
        _check_movable(output, scene.root)
    with RunDir.create(output or default_folder(scene.root), overwrite=overwrite) as run_dir:
        run_dir.write_config(config)
        trainer = Trainer.start(config, scene, run_dir=run_dir, device=device, given=given)
        return _drive(trainer, stop_at, out)


def resume_training(
    path: Path, *, iterations: int | None, stop_at: int | None, data: Path | None, device: str, out: Output
) -> int:
    """Go on with the run of a checkpoint; returns the exit code."""
    from splatcli.checkpoint.rundir import RunDir
    from splatcli.scene.read import read_scene
    from splatcli.train.loop import Trainer

    if not is_own_checkpoint(path):
        what = "a PLY (no optimizer state)" if file_kind(path) == "ply" else "not a checkpoint of splat"
        raise ModelFileError(
            f"this is {what}: it may hold Gaussians, but no training run that could be gone on with",
            where=path,
            remedy=f"start a new run from it: splat train SCENE --init {path}",
        )
    checkpoint = load_model(path).checkpoint
    assert checkpoint is not None
    config = checkpoint.config
    scene = read_scene(data or Path(checkpoint.dataset.root), config.data, background=photo_background(config))
    run = run_folder(path)
    with RunDir.open(run) if run else RunDir.create(default_folder(scene.root)) as run_dir:
        trainer = Trainer.resume(checkpoint, scene, run_dir=run_dir, device=device, iterations=iterations)
        # Only now is it sure that the run goes on from here, and what lies ahead of it can be put aside.
        run_dir.rewind(checkpoint.step)
        run_dir.write_config(trainer.state.config)
        return _drive(trainer, stop_at, out)


def photo_background(config: Config) -> tuple[int, int, int]:
    """R, G, B of what shows through transparent photos: white for a white run, else black."""
    return (255, 255, 255) if config.train.background == "white" else (0, 0, 0)


def default_folder(scene: Path) -> Path:
    """output/<scene>, with the first free number behind it if a run is there already."""
    path = OUTPUT / (scene.resolve().name or "scene")
    candidate, number = path, 2
    while candidate.exists():
        candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate


def _check_movable(folder: Path, scene: Path) -> None:
    """--overwrite moves a folder aside; it must not carry off the photos or the folder we stand in."""
    place = folder.resolve()
    for inside in (Path.cwd(), scene.resolve()):
        if inside.is_relative_to(place):
            raise OutputError(
                f"{inside} lies in it, so it cannot be moved aside", where=folder, remedy="choose another -o"
            )


def _initial_model(config: Config, reading: Reading, out: Output) -> Gaussians | None:
    """The Gaussians that ``--init`` names by a path; None for ``sfm`` and ``random``."""
    from splatcli.scene.read import read_scene

    if config.model.init in ("sfm", "random"):
        return None
    path = Path(config.model.init)
    if not path.exists():
        raise UsageError(
            f"there is no {path}", where="--init", remedy="sfm, random, or the path of a checkpoint or PLY"
        )
    model = load_model(
        find_model(path),
        reading=reading,
        cameras=lambda: read_scene(Path(config.data.scene), config.data).cameras,
        say=out.note,
    )
    return model.gaussians


def _drive(trainer: Trainer, stop_at: int | None, out: Output) -> int:
    from splatcli.train.events import Evaluated, Stopped

    stopped: Stopped | None = None
    score: Evaluated | None = None
    with stop_requests() as requested, reporter_for(out) as reporter:
        for event in trainer.run(stop_at, requested):
            reporter.tell(event)
            if isinstance(event, Evaluated):
                score = event
            elif isinstance(event, Stopped):
                stopped = event
    assert stopped is not None, "a trainer's last event is Stopped"
    facts = {
        "path": stopped.path,
        "step": stopped.step,
        "reason": stopped.reason,
        "psnr": score.psnr if score else None,
        "ssim": score.ssim if score else None,
    }
    out.result(facts, [stopped.path])
    return exit_code(stopped.reason)
