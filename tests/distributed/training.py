"""Runs over a made-up scene in which everything happens, for one process and for ranks of several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from splatcli.checkpoint.state import Checkpoint
from splatcli.config import Config
from splatcli.distributed.process_group import ProcessGroup
from splatcli.scene.scene import Scene
from splatcli.train.data_parallel import ReadOnlyRunDir, digests, joint_digest, state_digest
from splatcli.train.evaluate import Renderer
from splatcli.train.events import Evaluated, Probed, Refined, Stepped, Stopped
from splatcli.train.state import TrainState
from splatcli.train.trainer import Trainer
from tests.train.worlds import MemoryRun, copied, made_scene, plain_renderer, short_config

#: Refinements are after steps 10 and 15, a reset after 12.
STEPS = 16


def run_of(group: ProcessGroup | None) -> Any:
    """The run folder of this rank."""
    return MemoryRun() if group is None or group.rank == 0 else ReadOnlyRunDir(Path("run"))


def train(
    group: ProcessGroup | None,
    config: Config,
    *,
    stop_at: int | None = None,
    views: int = 12,
    sharded: bool = False,
    renderer: Renderer | None = plain_renderer,
    scene: Scene | None = None,
) -> dict[str, Any]:
    """A new run; see followed()."""
    trainer = Trainer.start(
        config,
        scene or made_scene(views),
        run_dir=run_of(group),
        renderer=renderer,
        group=group,
        sharded=sharded,
    )
    return followed(trainer, group, stop_at)


def go_on(
    group: ProcessGroup | None,
    checkpoint: Checkpoint,
    *,
    stop_at: int | None = None,
    views: int = 12,
    sharded: bool = False,
    renderer: Renderer | None = plain_renderer,
) -> dict[str, Any]:
    """The run of a checkpoint; see followed()."""
    trainer = Trainer.resume(
        copied(checkpoint), made_scene(views), run_dir=run_of(group), renderer=renderer, group=group, sharded=sharded
    )
    return followed(trainer, group, stop_at)


def followed(trainer: Trainer, group: ProcessGroup | None, stop_at: int | None) -> dict[str, Any]:
    """Losses and digests of the state step by step, what ended the run, and on the first rank its last checkpoint.

    scores: what was measured, in the order of the events. rows: how many this rank held at last.
    """
    losses: dict[int, float] = {}
    found: dict[int, int] = {}
    scores: list[Evaluated | Probed] = []
    refined, reason = 0, None
    before = {} if group is None else dict(group.sent)
    for event in trainer.run(stop_at):
        if isinstance(event, Stepped):
            losses[event.step], found[event.step] = event.loss, digest_of(trainer.state, group)
        elif isinstance(event, Refined):
            refined += event.cloned + event.split + event.pruned + event.relocated
        elif isinstance(event, Evaluated | Probed):
            scores.append(event)
        elif isinstance(event, Stopped):
            reason = event.reason
    run = trainer.run_dir
    return {
        "losses": losses,
        "digests": found,
        "refined": refined,
        "reason": reason,
        "scores": scores,
        "rows": len(trainer.state.gaussians),
        "checkpoint": run.newest() if isinstance(run, MemoryRun) else None,
        "sent": {} if group is None else {what: n - before.get(what, 0) for what, n in group.sent.items()},
    }


def digest_of(state: TrainState, group: ProcessGroup | None) -> int:
    """The digest of one process with all rows, also where they are sharded."""
    if state.shard is None or group is None:
        return state_digest(state)
    of_rows, of_rest = digests(state)
    return joint_digest([int(part) for (part,) in group.all_gather_scalars("the state", [of_rows])], of_rest)


def batch_config(batch_size: int, **sections: dict[str, object]) -> Config:
    """short_config with so many views a step."""
    train: dict[str, object] = {"batch_size": batch_size, **sections.pop("train", {})}
    return short_config(STEPS, train=train, **sections)
