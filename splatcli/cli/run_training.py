"""Training for ``splat train`` and ``splat resume``: opens the run, runs the trainer, returns the exit code."""

from __future__ import annotations

import json
import math
import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from splatcli.cli.console import Output, make_reporter
from splatcli.cli.dry_run import show_earlier, show_sfm, show_training
from splatcli.cli.export import ExportAtEnd
from splatcli.cli.model import Model, find_model, load_model, run_folder
from splatcli.cli.process import ECHO, SignalRequests, exit_code, process_age
from splatcli.cli.ranks import check_sharded
from splatcli.cli.run_request import RunRequest, earlier_run
from splatcli.cli.run_summary import summary
from splatcli.cli.sfm import lacks_cameras, scene_with_cameras, scene_with_points
from splatcli.cli.time_budget import POINTS_SHARE, LongRunNote, TimeBudget
from splatcli.disk import is_there
from splatcli.errors import (
    LockedError,
    ModelFileError,
    OutputError,
    SceneError,
    SplatError,
    UnreadableError,
    UsageError,
    os_errors,
)
from splatcli.output_files import free_folder

if TYPE_CHECKING:
    from splatcli.checkpoint.foreign.imported import ImportOptions
    from splatcli.checkpoint.run_dir import RunDir
    from splatcli.config import Config, DataConfig
    from splatcli.distributed.process_group import ProcessGroup
    from splatcli.gaussians import Gaussians
    from splatcli.scene.relative_depths import NoTracksError
    from splatcli.scene.scene import Scene
    from splatcli.train.events import Evaluated
    from splatcli.train.trainer import Trainer
    from splatcli.viewer.live_viewer import LiveRun


@dataclass(frozen=True)
class ResumeOverrides:
    """Changes to a run that is resumed.

    data: the folder of the scene, where it has moved. file, settings, allowed: see changed_config().
    """

    data: Path | None = None
    file: Path | None = None
    settings: list[str] = field(default_factory=list)
    allowed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class RunContext:
    """The part of a command that holds for each run that it starts or continues.

    stop_at: the last step of this command. exports: files for the finished model. live: shows the run to browsers.
    group: the processes that share the run; the first finds cameras and makes the folder, and all read the scene.
    sharded: each of them holds a part of the Gaussians. explain_split: as for summary().
    """

    device: str
    out: Output
    live: LiveRun | None = None
    stop_at: int | None = None
    exports: ExportAtEnd = field(default_factory=ExportAtEnd)
    group: ProcessGroup | None = None
    sharded: bool = False
    explain_split: bool = False

    def slow_section(self, doing: str) -> AbstractContextManager[None]:
        """Let ranks wait without limit for one that takes longer than the others."""
        return nullcontext() if self.group is None else self.group.slow_section(doing)

    def on_rank0(self, doing: str, make: Callable[[], Path | None]) -> Path | None:
        """Return the path that ``make`` gives; of several processes the first makes it, and the others wait."""
        if self.group is None:
            return make()
        with self.group.rank0_section(doing):
            path = make() if self.group.rank == 0 else None
        return _of_rank0(self.group, path)

    def open_run_dir(self, make: Callable[[], RunDir]) -> RunDir:
        """Return the run folder that ``make`` opens; of several processes the first owns it, and the others read it."""
        from splatcli.train.data_parallel import ReadOnlyRunDir

        if self.group is None:
            return make()
        run_dir = None if self.group.rank else make()
        path = _of_rank0(self.group, None if run_dir is None else run_dir.path)
        assert path is not None, "rank 0 has opened one"
        return ReadOnlyRunDir(path) if run_dir is None else run_dir


def _of_rank0(group: ProcessGroup, path: Path | None) -> Path | None:
    """Return the path of rank 0. path: that of this process, which others than rank 0 do not have."""
    # Words of a group are UTF-8, which names need not be.
    found = group.broadcast("" if path is None else os.fsencode(path).hex())
    return Path(os.fsdecode(bytes.fromhex(found))) if found else None


@dataclass(frozen=True)
class NewRun:
    """A run that a command line asks for.

    config: its settings. build: makes them anew, see TrainArguments.build(), with ``found`` for what was found out.
    request: what identifies the run. import_options: for the model that ``--init`` names.
    output: the run folder; None chooses one. limit: seconds of this process that steps and Gaussians have to fit.
    dry: only say what would be done, by as many processes as ``ranks`` says.
    given: the keys of the settings that the command line and its file give.
    """

    config: Config
    build: Callable[[Mapping[str, Any], Mapping[str, Any]], Config]
    request: RunRequest
    import_options: ImportOptions
    output: Path | None = None
    overwrite: bool = False
    limit: float | None = None
    dry: bool = False
    ranks: int | None = None
    given: tuple[str, ...] = ()
    found: Mapping[str, Any] = field(default_factory=dict)

    def with_values(self, values: Mapping[str, Any]) -> NewRun:
        """Return the run with other settings under dotted keys, in place of all that are given."""
        found = {**self.found, **values}
        return replace(self, config=self.build({}, found), found=found)

    def rebuild_config(self, values: Mapping[str, Any]) -> Config:
        """Return the settings with others under dotted keys, schedules scaled to them; --set goes before them."""
        return self.build(values, self.found)


def note_unused(config: Config, given: Iterable[str], out: Output) -> None:
    """Print a note for each given setting that has no effect."""
    from splatcli.config import unused_settings

    out.note(*unused_settings(config, given))


@dataclass(frozen=True)
class RunStart:
    """The run, scene and model that training starts from.

    run: with the settings that are known only after reading the scene. init_model: the Gaussians that ``--init`` names.
    """

    run: NewRun
    scene: Scene
    init_model: Gaussians | None


def start_training(run: NewRun, context: RunContext) -> int:
    """Train a run to its end or until it is stopped, and return the exit code.

    The run is new, unless its folder holds the run of an equal request, which continues.
    """
    from splatcli.checkpoint.atomic import check_name
    from splatcli.checkpoint.run_dir import REQUEST
    from splatcli.config import RANDOM
    from splatcli.train.trainer import Trainer

    named, out, group = Path(run.config.data.scene), context.out, context.group
    place = run.output or default_folder(named)
    check_name(place)
    context = replace(context, explain_split="data.test_every" not in run.given and not out.json)
    earlier = None
    if not run.overwrite:
        earlier = context.on_rank0("inspecting the run folder", lambda: earlier_run(place, run.request, out))
    if run.dry and earlier is not None:
        show_earlier(earlier, out)
        return 0
    if run.dry and lacks_cameras(named, run.config.data):
        show_sfm(named, place, out)
        return 0
    if earlier is not None:
        out.message(f"continuing the run from {earlier}")
        return resume_training(earlier, ResumeOverrides(), context)
    with SignalRequests(ECHO if group else 0.0) as requests:
        start = _read_start(run, place, context)
        config, budget = start.run.config, None
        if run.limit is not None:
            build = start.run.rebuild_config
            budget = TimeBudget(run.limit, start.scene, start.init_model, context.device, build, out)
            config = budget.config
        note_unused(config, run.given, out)
        if run.dry:
            makes_points = start.run.config.model.init == RANDOM != run.config.model.init
            if makes_points and not start.scene.images.has_depths:
                # Depths would come with the points, which are not there yet.
                config = start.run.with_values({"data.depths": None}).config
            show_training(start, config, place, context)
            return 0
        requests.listen_for_stops()
        with context.open_run_dir(lambda: _new_run_dir(named, run.output, overwrite=run.overwrite)) as run_dir:
            if run_dir.moved_aside is not None:
                out.note(f"the run that was in {run_dir.path} is now {run_dir.moved_aside}")
            run_dir.write_report(REQUEST, run.request.as_json())
            with context.slow_section("building the model"):
                trainer = Trainer.start(
                    config,
                    start.scene,
                    run_dir=run_dir,
                    device=context.device,
                    init_model=start.init_model,
                    initial=None if budget is None else budget.take_first_gaussians(),
                    group=group,
                    sharded=context.sharded,
                )
            run_dir.write_config(trainer.state.config)
            del start  # the model that it was given takes memory
            is_chosen = budget is not None or "train.iterations" in run.given or context.stop_at is not None
            hint = None if is_chosen or trainer.state.gaussians.device.type != "cpu" else LongRunNote(trainer, out)
            return run_trainer(trainer, requests, context, budget=budget, hint=hint)


def _read_start(run: NewRun, place: Path, context: RunContext) -> RunStart:
    """Find cameras where the scene has none, read it and the model of ``--init``, and find points where it lacks them.

    place: the folder of the run. Raises what stands in the way of the run, unless it is only shown (run.dry).
    """
    from splatcli.config import RANDOM
    from splatcli.scene.inspect import compare_observations
    from splatcli.scene.masks import ALPHA, NONE
    from splatcli.scene.scene import check_depths
    from splatcli.train.init import resolve_init

    named, data, out = Path(run.config.data.scene), run.config.data, context.out

    def find_cameras() -> Path:
        if not lacks_cameras(named, data):
            return named
        _check_unused(place, overwrite=run.overwrite)
        return scene_with_cameras(named, data.masks, beside=place.parent, device=context.device, out=out)

    folder = context.on_rank0("finding cameras", find_cameras)
    assert folder is not None
    if folder != named:
        found = {"data.scene": str(folder)}
        if data.masks not in (None, NONE, ALPHA):
            found["data.masks"] = "masks"  # splat sfm writes the masks of any folder there
        run = run.with_values(found)
    out.message(f"reading {run.config.data.scene}")
    with context.slow_section("reading the scene"):
        model = _initial_model(run, out)
        scene, lacking = _scene_without_tracks(run)
    if not out.muted:
        for finding in compare_observations(scene):
            if finding.state == "warning":
                out.warn(f"{finding.text}; {finding.remedy}")
    init_model = None if model is None else model.gaussians
    if model is not None and model.checkpoint is not None:  # a file of splats has no offset
        init_model = model.gaussians.moved(
            [a - b for a, b in zip(model.checkpoint.dataset.offset, scene.offset, strict=True)]
        )
    del model
    if run.overwrite and run.output is not None:
        _check_movable(run.output, scene.root)
    init = resolve_init(run.config, scene)
    if init == RANDOM != run.config.model.init:
        points = _points_for(run, scene, place, context)
        if points is not None:
            run = run.with_values({"data.points": str(points)})
            with context.slow_section("reading the scene"):
                scene = _read_images(run.config, run.config.data)
            init = resolve_init(run.config, scene)
    if lacking is not None and run.config.data.points is None and not run.dry:
        raise lacking
    if run.config.depth_lambda > 0.0 and not run.dry:
        check_depths(scene)
    if init != run.config.model.init:  # known only after reading the scene; learning rates depend on it
        run = run.with_values({"model.init": init})
    return RunStart(run, scene, init_model)


def _read_images(config: Config, data: DataConfig) -> Scene:
    """Return the scene of a new run over the background that it trains with. data: how it is read."""
    from splatcli.scene.read import read_scene
    from splatcli.train.backgrounds import training_image_background

    return read_scene(Path(data.scene), data, background=training_image_background(config))


def _check_unused(run: Path, *, overwrite: bool) -> None:
    """Raise OutputError for the folder of a run that will be refused, before the work."""
    from splatcli.checkpoint.run_dir import has_content

    if run.is_dir() and has_content(run) and not overwrite:
        raise OutputError(
            "the output folder exists and is not empty",
            where=run,
            remedy="--overwrite moves a run aside, or choose another -o",
        )


def resume_training(path: Path, overrides: ResumeOverrides, context: RunContext) -> int:
    """Continue the run of a checkpoint; return the exit code."""
    from splatcli.checkpoint.file import load_checkpoint
    from splatcli.checkpoint.run_dir import check_unlocked
    from splatcli.config import read_settings
    from splatcli.scene.read import read_scene
    from splatcli.train.backgrounds import training_image_background
    from splatcli.train.changed_settings import changed_config, check_iterations
    from splatcli.train.densify import check_strategy
    from splatcli.train.run_scene import data_to_resume, scene_folder
    from splatcli.train.start import check_loss_given
    from splatcli.train.tensorboard import check_tensorboard
    from splatcli.train.trainer import Trainer

    out, group, sharded = context.out, context.group, context.sharded
    run = run_folder(path)
    named = run or path
    if run is not None and group is None:  # before anything is read; ranks find out together
        check_unlocked(run)
    _check_own_checkpoint(path)
    seen = [] if run is None else _checkpoint_names(run)
    with SignalRequests(ECHO if group else 0.0) as requests:
        out.message(f"reading {path}")
        with context.slow_section("reading the checkpoint"):
            # A state larger than memory is mapped, not read; with sharded Gaussians each process reads its part.
            checkpoint = load_checkpoint(path, mapped=sharded or _wants_offload(path, overrides))
        check_loss_given(checkpoint, named, given=False)
        check_strategy(checkpoint.config, named)
        config, notes = changed_config(
            checkpoint.config, file=overrides.file, assignments=overrides.settings, allowed=overrides.allowed
        )
        requested = read_settings(assignments=overrides.settings)
        note_unused(config, requested, out)
        check_iterations(config, checkpoint.step)
        check_tensorboard(config)
        _note_stop(context.stop_at, checkpoint.step, config.train.iterations, out)
        command = f"splat resume {shlex.quote(str(named))}"
        if checkpoint.step == config.train.iterations:
            out.message(f"the run is finished at step {checkpoint.step}; for more steps: {command} --iterations N")
            unchanged = config == checkpoint.config and overrides == ResumeOverrides() and context.live is None
            if unchanged and _report_last_result(path, context, held_out=bool(checkpoint.test)):
                return 0
        root = scene_folder(checkpoint, overrides.data, f"{command} --data DIR")
        check_batch(config, None if group is None else group.size)
        if sharded:
            check_sharded(viewer=context.live is not None)
        out.message(f"reading {root}")
        with context.slow_section("reading the scene"), _skipping_in_a_new_run(root, named):
            data, more = (config.data, []) if "data.points" in requested else data_to_resume(config.data)
            scene = read_scene(root, data, background=training_image_background(config))
        requests.listen_for_stops()
        make = partial(_unchanged_run_dir, run, seen) if run else partial(_new_run_dir, scene.root)
        with context.open_run_dir(make) as run_dir:
            with context.slow_section("building the model"):
                trainer = Trainer.resume(
                    checkpoint,
                    scene,
                    run_dir=run_dir,
                    device=context.device,
                    config=config,
                    allowed=overrides.allowed,
                    notes=[*notes, *more],
                    group=group,
                    sharded=sharded,
                )
            # The resume can no longer fail, so checkpoints of later steps are put aside now.
            run_dir.rewind(checkpoint.step)
            run_dir.write_config(trainer.state.config)
            del checkpoint  # takes as much memory as the state itself
            return run_trainer(trainer, requests, context)


def _check_own_checkpoint(path: Path) -> None:
    """Raise ModelFileError for a model that holds no run."""
    from splatcli.formats.registry import CHECKPOINT, format_of, is_own_checkpoint

    if not is_own_checkpoint(path):
        known = format_of(path)
        what = "not a checkpoint of splat" if known is CHECKPOINT else f"{known.title} (no optimizer state)"
        raise ModelFileError(
            f"this is {what}; it holds no training run to resume",
            where=path,
            remedy=f"start a new run from it: splat train SCENE --init {path}",
        )


def _note_stop(stop_at: int | None, step: int, last: int, out: Output) -> None:
    """Print a note where a run of so many steps, which continues at ``step``, cannot stop after step ``stop_at``."""
    if stop_at is not None and stop_at > last:
        out.note(f"the run ends at step {last:,}, before --stop-at {stop_at}; --iterations N makes it longer")
    elif stop_at is not None and stop_at <= step < last:
        out.note(f"no step is done: the run is at step {step:,}, and --stop-at {stop_at} is not after that")


def _report_last_result(path: Path, context: RunContext, *, held_out: bool) -> bool:
    """Print the result of the finished run whose newest checkpoint is ``path``; return False where it is not known."""

    def ended() -> Path | None:
        return path if _last_result(path, held_out=held_out) else None

    if context.on_rank0("inspecting the run folder", ended) is None:
        return False
    result = {**_last_result(path, held_out=held_out), "rollbacks": 0}
    written, problem = _export(path, context)
    context.out.result(result | written, [path])
    if problem is not None:
        raise problem
    return True


def _export(path: Path, context: RunContext) -> tuple[dict[str, Any], SplatError | None]:
    """Write the files for the model of a finished run; return them as a fact of its result, and what went wrong."""
    if context.group is not None and context.group.rank:
        return {}, None
    return context.exports.write(path, context.out)


def _last_result(path: Path, *, held_out: bool) -> dict[str, Any]:
    """Return the result of a finished run whose newest checkpoint is ``path``, for --json, with its last scores.

    held_out: whether the run has views to score. Empty where its last state was not scored, and while a process works
    on the run.
    """
    from splatcli.checkpoint.run_dir import METRICS, checkpoints_of, is_locked, step_of

    run = run_folder(path)
    if run is None:
        return {}
    record: Any = {"event": "eval", "step": step_of(path)}
    try:
        if checkpoints_of(run)[-1].name != path.name or is_locked(run):
            return {}
        if held_out:
            *_, last = (run / METRICS).read_bytes().splitlines()
            record = json.loads(last)
    except (OSError, ValueError, IndexError):
        return {}
    if not isinstance(record, dict) or record.get("event") != "eval" or record.get("step") != step_of(path):
        return {}
    score = {key: record.get(key) for key in ("psnr", "ssim")}
    return {"path": path, "step": record["step"], "reason": "finished", **score}


def _wants_offload(path: Path, overrides: ResumeOverrides) -> bool:
    """Return whether the run of a checkpoint is resumed with --offload.

    Raises UsageError for settings that are not valid, else as load_checkpoint().
    """
    from splatcli.checkpoint.container import read_container
    from splatcli.config import Config, read_settings, with_settings

    given = read_settings(file=overrides.file, assignments=overrides.settings).get("memory.offload")
    if given is not None:
        return with_settings(Config(), {"memory.offload": given}).memory.offload
    memory = read_container(path, digests=False, mmap=True).manifest.config.get("memory")
    return isinstance(memory, dict) and memory.get("offload") is True


def check_batch(config: Config, ranks: int | None) -> None:
    """Raise UsageError when ranks would have no view to work on, or each a place to offload to; None: no ranks."""
    if ranks is not None and config.memory.offload:
        raise UsageError(
            "ranks sum up the gradients of all Gaussians, which takes the memory that --offload saves",
            where="--offload",
            remedy="give --offload or ranks",
        )
    views = config.train.batch_size
    if ranks is not None and views < ranks:
        raise UsageError(
            f"{ranks} ranks want as many views a step, and the run has {views}",
            where="train.batch_size",
            remedy=f"fewer ranks; or a larger batch, which is another run: --set train.batch_size={ranks}",
        )


def _scene_without_tracks(run: NewRun) -> tuple[Scene, NoTracksError | None]:
    """Return the scene of a new run; where its relative depth maps wait for points, without them and with the error.

    Points with tracks are triangulated for a scene that has none, unless the run does not wait for them.
    """
    from splatcli.config import SFM
    from splatcli.scene.relative_depths import NoTracksError

    config = run.config
    try:
        return _read_images(config, config.data), None
    except NoTracksError as error:
        if config.model.init != SFM or config.data.points is not None or run.limit is not None:
            raise
        scene = _read_images(config, config.data.images_only())
        if scene.points is not None:
            raise
        return scene, error


def _points_for(run: NewRun, scene: Scene, place: Path, context: RunContext) -> Path | None:
    """Return the folder of points triangulated for a scene without any; None where training begins with random ones.

    --dry-run does not wait for them, and a run by the clock gives them a part of its time. place: the folder of the
    run.
    """
    if run.dry:
        time_too = "" if run.limit is None else ", if the time suffices"
        context.out.note(f"the scene has no points; splat train triangulates them first{time_too}")
        return None
    seconds = None if run.limit is None else POINTS_SHARE * (run.limit - process_age())

    def triangulate() -> Path | None:
        _check_unused(place, overwrite=run.overwrite)
        return scene_with_points(
            scene, run.config.data, beside=place.parent, device=context.device, out=context.out, seconds=seconds
        )

    return context.on_rank0("triangulating points", triangulate)


def _new_run_dir(scene: Path, place: Path | None = None, *, overwrite: bool = False) -> RunDir:
    """Create the run folder ``place``, by default default_folder(), or the next one where another run takes that."""
    from splatcli.checkpoint.run_dir import RunDir

    if place is None:
        return RunDir.create_free(lambda: default_folder(scene))
    return RunDir.create(place, overwrite=overwrite)


def _unchanged_run_dir(run: Path, seen: Sequence[str]) -> RunDir:
    """Open the folder of a run that no other process has taken further since it had the checkpoints ``seen``.

    Raises as RunDir.open(), and LockedError where one has: what was read is an earlier state, from which a run would
    repeat steps and put later checkpoints aside.
    """
    from splatcli.checkpoint.run_dir import RunDir

    run_dir = RunDir.open(run)
    newer = [name for name in _checkpoint_names(run) if name not in seen]
    if newer:
        run_dir.close()
        raise LockedError(
            f"another process has taken this run further, to {newer[-1]}, while this one read it",
            where=run,
            remedy="the same command goes on from there",
        )
    return run_dir


def _checkpoint_names(run: Path) -> list[str]:
    from splatcli.checkpoint.run_dir import checkpoints_of

    with os_errors(OutputError, run):
        return [path.name for path in checkpoints_of(run)]


def default_folder(scene: Path) -> Path:
    """Return output/<scene>, with the first free number appended if that folder exists."""
    with os_errors(SceneError, scene):
        if scene.is_symlink():
            scene.stat()  # raises where the link leads nowhere
        return free_folder(scene)


def _check_movable(folder: Path, scene: Path) -> None:
    """Raise OutputError if moving ``folder`` aside would move the scene or the working directory."""
    place = folder.resolve()
    for inside in (Path.cwd(), scene.resolve()):
        if inside.is_relative_to(place):
            raise OutputError(
                f"--overwrite cannot move this folder aside: it contains {inside}",
                where=folder,
                remedy="choose another -o",
            )


def _initial_model(run: NewRun, out: Output) -> Model | None:
    """Return the model that ``--init`` names; None for a named start."""
    from splatcli.config import NAMED_STARTS
    from splatcli.scene.read import read_scene

    config = run.config
    if config.model.init in NAMED_STARTS:
        return None
    path = Path(config.model.init)
    with os_errors(UnreadableError, path):
        found = is_there(path)
    if not found:
        raise UsageError(
            f"{path} does not exist", where="--init", remedy="sfm, hull, random, or the path of a checkpoint or PLY"
        )
    model = load_model(
        find_model(path, out=out),
        import_options=run.import_options,
        cameras=lambda: read_scene(Path(config.data.scene), config.data).cameras,
        out=out,
    )
    if model.antialiased and not config.train.antialiased:
        out.note(f"{path} was trained antialiased; --antialiased trains it on so")
    return model


@contextmanager
def _skipping_in_a_new_run(scene: Path, run: Path) -> Iterator[None]:
    """Let remedies that leave images out start a new run from the model of this one, whose images are fixed."""
    try:
        yield
    except SceneError as error:
        command = f"splat train {shlex.quote(str(scene))} --init {shlex.quote(str(run))} --skip"
        error.remedy = (error.remedy or "").replace("splat train --skip", command) or None
        error.args = (str(error),)
        raise


def run_trainer(
    trainer: Trainer,
    requests: SignalRequests,
    context: RunContext,
    *,
    budget: TimeBudget | None = None,
    hint: LongRunNote | None = None,
) -> int:
    """Run the trainer and report its events; return the exit code.

    The result is printed whenever the last state was saved, also before an error is raised.
    """
    from splatcli.train.events import Evaluated, Probed, RolledBack, Stepped, Stopped

    live, out = context.live, context.out
    stopped: Stopped | None = None
    score: Evaluated | None = None
    probed: Probed | None = None
    rollbacks = 0
    problem: SplatError | None = None
    deadline = budget.deadline if budget else math.inf
    if live is not None:
        live.folder = trainer.run_dir.path
        live.steps_left = trainer.steps_left
        live.must_continue = lambda: requests.pending() or time.monotonic() >= deadline
    skipping = _skipping_in_a_new_run(trainer.scene.root, trainer.run_dir.path)
    try:
        with make_reporter(out, trainer.steps_left) as reporter, skipping:
            for event in trainer.run(context.stop_at, requests.stop, requests.save, deadline):
                reporter.report(event)
                if isinstance(event, Stepped):
                    trainer.run_dir.keep()
                    if budget is not None:
                        budget.update(trainer)
                    if hint is not None:
                        hint.update(event.step)
                elif isinstance(event, RolledBack):
                    rollbacks += 1
                elif isinstance(event, Evaluated):
                    score = event
                elif isinstance(event, Probed):
                    probed = event
                elif isinstance(event, Stopped):
                    stopped = event
                if live is not None:
                    with context.slow_section("showing the run"):  # a user may pause the run
                        live.report(event, trainer.state)
    except SplatError as error:
        problem = error
    if stopped is None:
        assert problem is not None, "a trainer's last event is Stopped"
        raise problem
    facts = {
        "path": stopped.path,
        "step": stopped.step,
        "reason": stopped.reason,
        "psnr": score.psnr if score else None,
        "ssim": score.ssim if score else None,
        "rollbacks": rollbacks,
    }
    lost: SplatError | None = None
    if stopped.reason in ("finished", "max-time"):
        written, lost = _export(stopped.path, context)
        facts |= written
    else:
        context.exports.note_unwritten(trainer.run_dir.path, out)
    if problem is None and stopped.reason == "finished" and trainer.state.config.data.block is None:
        exported = bool(facts.get("exports"))
        out.message(
            summary(trainer, stopped.path, score, probed, explain_split=context.explain_split, exported=exported)
        )
    out.result(facts, [stopped.path])
    if (failed := problem or lost) is not None:
        raise failed
    missed = trainer.checkpointer.missed
    if missed and stopped.reason == "finished":
        raise OutputError(
            f"the run is finished and saved, but the checkpoints of save.steps {missed} could not be written",
            where=trainer.run_dir.path,
            remedy="free disk space, and train again if they are needed",
        )
    return exit_code(stopped.reason)
