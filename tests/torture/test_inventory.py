"""Everything that a trainer holds is in its checkpoint, or declared here as something that does not matter.

The whole object graph is walked, so that state which is added later cannot be forgotten: an output comparison would not
notice statistics that are lost, for one, until they decide something. The engine is a made-up one without state; that
the real one keeps none shows in runs that are killed and end with the same bits (kill_runs.py).
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import pytest
import torch

from splatcli.checkpoint.file import load_checkpoint
from splatcli.checkpoint.run_dir import RunDir
from splatcli.config import with_settings
from splatcli.train.events import Stopped
from splatcli.train.state import TrainState
from splatcli.train.trainer import Trainer
from tests.train.worlds import PlainEngine, made_scene, plain_renderer, random_gaussians, short_config

#: What a resumed trainer does not have from the one before it: path -> why the bits to come do not depend on it.
ANEW = {
    "checkpointer.saved": "which file this process wrote last: a resumed run has its own file already",
    "checkpointer._saved_at": "the clock: decides when to save, and a save changes nothing",
    "metrics_logger._started_at": "the clock: written into the metrics only",
    "quality_monitor.best": "an alarm is words; it changes nothing (long-runs.md: starts anew with each process)",
    "quality_monitor.low_since": "the same",
    "quality_monitor._reset_at": "the same",
    "_engine.calls": "what this test's engine was asked",
    "stepper.engine.calls": "what this test's engine was asked",
    "density._free_space": "measured anew, of the cameras and clearances that the checkpoint holds, when it is needed",
    "density._free_space_known": "whether it was",
    "notes": "words for the user",
    "run_dir._lock": "a descriptor of this process",
    "run_dir._undo": "how a new folder is taken back",
    "run_dir.path": "two folders in this test",
    "checkpointer.run_dir": "the same, and run_dir",
    "metrics_logger._run_dir": "the same",
    "recovery.run_dir": "the same",
    "stepper.images._divisor": "which images are kept at a smaller size: made anew, in the same bits",
    "stepper.images._reduced_bytes_left": "the same",
    "stepper.most_gaussians": "what has fitted the memory of this process's machine",
    "stepper.view_losses": "for a remark at the end, on the views that this process has trained on",
    "stepper.images.scene.images.loaded": "what this test's images were asked",
    "scene.images.loaded": "the same",
    "scorer.scene.images.loaded": "the same",
    "metrics_logger._scene.images.loaded": "the same",
}


def leaves(node: object, path: str = "", above: tuple[int, ...] = ()) -> Iterator[tuple[str, str]]:
    """(path, value as text) of every number, text and tensor below ``node``; fails where it cannot look."""
    if id(node) in above:
        yield path, "back reference"
    elif isinstance(node, torch.Tensor):
        yield path, f"{node.dtype} {tuple(node.shape)} {_sha(node.detach().cpu().contiguous().numpy())}"
    elif isinstance(node, np.ndarray):
        yield path, f"{node.dtype} {node.shape} {_sha(node)}"
    elif isinstance(node, torch.Generator):
        yield path, f"generator {_sha(node.get_state().numpy())}"
    elif isinstance(node, pydantic.BaseModel):
        yield path, node.model_dump_json()
    elif node is None or isinstance(node, bool | int | float | complex | str | bytes | Path):
        yield path, repr(node)
    elif isinstance(node, torch.device | torch.dtype | type):
        yield path, str(node)
    elif isinstance(node, dict):
        yield f"{path}#", repr(list(node))
        for key, child in node.items():
            yield from leaves(child, f"{path}.{key}", (*above, id(node)))
    elif isinstance(node, list | tuple | deque | set | frozenset):
        yield f"{path}#", str(len(node))
        for index, child in enumerate(node):
            yield from leaves(child, f"{path}.{index}", (*above, id(node)))
    elif type(node).__module__.partition(".")[0] in ("splatcli", "tests"):
        for name in _attributes(node):
            yield from leaves(getattr(node, name), f"{path}.{name}".lstrip("."), (*above, id(node)))
    elif isinstance(node, Executor | type(threading.Lock())) or callable(node):
        yield path, type(node).__name__  # code and threads hold no state of a run
    else:
        raise TypeError(f"cannot look into the {type(node)} at {path}: say here how it is compared")


def _attributes(node: object) -> list[str]:
    slots = [name for kind in type(node).__mro__ for name in getattr(kind, "__slots__", ())]
    return [name for name in dict.fromkeys([*slots, *getattr(node, "__dict__", {})]) if hasattr(node, name)]


def _sha(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def differing(first: object, second: object) -> list[str]:
    """Paths whose values differ or that only one has."""
    a, b = dict(leaves(first)), dict(leaves(second))
    return sorted(path for path in a.keys() | b.keys() if a.get(path) != b.get(path))


def declared(path: str) -> bool:
    return any(path == known or path.startswith((f"{known}.", f"{known}#")) for known in ANEW)


@pytest.fixture(scope="module", params=[("default", False), ("mcmc", False), ("default", True)], ids=str)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    """A trainer in the middle of everything: after a refinement, a reset, and steps that left statistics."""
    with RunDir.create(tmp_path_factory.mktemp("first") / "run") as run_dir:
        trainer = Trainer.start(
            short_config(
                guard={"probe_every": 7},
                strategy={"name": request.param[0]},
                views={"pose_opt": request.param[1], "exposure": request.param[1]},
            ),
            made_scene(),
            run_dir=run_dir,
            engine=PlainEngine(),
            renderer=plain_renderer,
            init_model=random_gaussians(30, degree=2),
        )
        *_, stopped = trainer.run(stop_at=23)
        assert isinstance(stopped, Stopped)
        # Some coefficients are behind, as the native engines leave them.
        trainer.state.adam.sh_last_step[::3] -= 2
        trainer.quality_monitor.reset(21)
        trainer.quality_monitor.low_since = 22
        trainer.checkpointer.save(trainer.state)
        yield trainer


def test_a_resumed_trainer_holds_all_that_the_first_one_held(trained: Trainer, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(trained.run_dir.checkpoint_path(23))
    with RunDir.create(tmp_path / "second") as run_dir:
        resumed = Trainer.resume(
            checkpoint, made_scene(), run_dir=run_dir, engine=PlainEngine(), renderer=plain_renderer
        )
        different = differing(trained, resumed)
    assert [path for path in different if not declared(path)] == []
    # Nothing is excused that would not have to be.
    stale = [
        known
        for known in ANEW
        if not any(path == known or path.startswith((f"{known}.", f"{known}#")) for path in different)
    ]
    assert stale == []


def test_the_state_survives_a_file_in_every_bit(trained: Trainer) -> None:
    state = TrainState.from_checkpoint(load_checkpoint(trained.run_dir.checkpoint_path(23)))
    assert differing(trained.state, state) == []
    paths = [path for path, _ in leaves(state)]
    for needed in ("adam.sh_last_step", "stats.count", "generators.splits", "sampler.position", "adam.exp_avg.shN"):
        assert needed in paths


@pytest.mark.parametrize(
    ("path", "damage"),
    [
        ("adam.sh_last_step", lambda state: state.adam.sh_last_step.add_(1)),
        ("adam.exp_avg_sq.quats", lambda state: state.adam.exp_avg_sq.quats[0].mul_(1.0000002)),
        ("stats.grad2d", lambda state: state.stats.grad2d.add_(1e-3)),
        ("generators.background", lambda state: torch.rand(1, generator=state.generators["background"])),
        ("sampler.position", lambda state: state.sampler.next()),
        ("cameras.1.fx", lambda state: state.cameras.__setitem__(1, replace(state.cameras[1], fx=19.200000000000003))),
        ("config", lambda state: setattr(state, "config", with_settings(state.config, {"optim.eps": 1e-14}))),
    ],
)
def test_any_part_that_is_lost_would_be_noticed(
    path: str, damage: Callable[[TrainState], object], trained: Trainer
) -> None:
    state = TrainState.from_checkpoint(load_checkpoint(trained.run_dir.checkpoint_path(23)))
    damage(state)
    assert path in differing(trained.state, state)


def test_a_new_kind_of_state_cannot_go_unseen(trained: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained.state.sampler, "extra", np.random.default_rng(0), raising=False)
    with pytest.raises(TypeError, match=r"Generator'> at state\.sampler\.extra"):
        list(leaves(trained))


def test_training_draws_from_none_of_the_global_generators(tmp_path: Path) -> None:
    """They are in no checkpoint."""

    def states() -> list[Any]:
        return [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()]

    before = states()
    with RunDir.create(tmp_path / "run") as run_dir:
        trainer = Trainer.start(
            short_config(), made_scene(), run_dir=run_dir, engine=PlainEngine(), renderer=plain_renderer
        )
        list(trainer.run())
    assert states() == before
