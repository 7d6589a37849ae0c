"""Training on several ranks: the same bits as one process with the same batch, whatever the number of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from splatcli.checkpoint.run_dir import RunDir
from splatcli.checkpoint.state import Checkpoint
from splatcli.distributed.process_group import ProcessGroup
from splatcli.errors import ResourceError
from splatcli.rasterizer.batch import FlatSums
from splatcli.scene.images import AHEAD, LoadedImage
from splatcli.scene.scene import Scene
from splatcli.train.data_parallel import ReadOnlyRunDir, check_same_run, state_digest
from splatcli.train.events import Alarmed, RolledBack, Stepped
from splatcli.train.outlier_views import ViewError
from splatcli.train.state import TrainState
from splatcli.train.trainer import Trainer
from tests.distributed.ranks import results
from tests.distributed.training import STEPS, batch_config, go_on, run_of, train
from tests.native.cases import NEEDS_COMPILER
from tests.train.worlds import MadeImages, MemoryRun, PlainEngine, made_scene, plain_renderer, random_gaussians

pytestmark = NEEDS_COMPILER

#: Beside plain ADC with random backgrounds: everything that a step may carry along.
RUNS = {
    "default": batch_config(4),
    "mcmc": batch_config(4, strategy={"name": "mcmc", "opacity_reg": 0.01, "scale_reg": 0.01, "cap_max": 60}),
    "still": batch_config(4, schedule={"refine_start": 1000}, train={"dropout": 0.4}),
    "views": batch_config(4, views={"pose_opt": True, "exposure": True}, train={"filter_3d": True}),
}
Runs = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def alone() -> Runs:
    return {name: train(None, config) for name, config in RUNS.items()}


def several(group: ProcessGroup | None, names: list[str]) -> Runs:
    return {name: train(group, RUNS[name]) for name in names}


def assert_equal(got: dict[str, Any], expected: dict[str, Any], first: int = 1) -> None:
    """From step ``first`` on."""
    for what in ("digests", "losses"):
        assert got[what] == {step: value for step, value in expected[what].items() if step >= first}
    assert got["reason"] == expected["reason"] == "finished"


@pytest.mark.parametrize(("size", "names"), [(2, ["default", "views"]), (3, ["mcmc"])])
def test_any_number_of_ranks_has_the_bits_of_one(size: int, names: list[str], alone: Runs) -> None:
    for rank in results(several, size, names):
        for name in names:
            assert alone[name]["refined"] > 0
            assert len(set(alone[name]["digests"].values())) == STEPS  # every step changes something
            assert_equal(rank[name], alone[name])


def test_ranks_send_what_the_formula_says() -> None:
    """A round of views brings L (W - 1) / W numbers from each rank to the others, and the end of a step as many."""
    size, count = 2, 20
    first, second = results(several, size, ["still"])
    length = len(FlatSums(random_gaussians(count, degree=2), size).flat)
    assert length == pytest.approx((11 + 3 + 24 + 2) * count, abs=8 * 16)
    rounds = 4 // size
    for rank in (first, second):
        assert rank["still"]["sent"]["sum"] == STEPS * (rounds + 1) * 4 * length * (size - 1) // size


def part(group: ProcessGroup | None, checkpoint: Checkpoint | None, stop_at: int | None) -> dict[str, Any]:
    """A run on its way: it begins without a checkpoint."""
    if checkpoint is None:
        return train(group, RUNS["default"], stop_at=stop_at)
    return go_on(group, checkpoint, stop_at=stop_at)


def test_a_run_goes_from_four_ranks_to_three_two_and_one_without_losing_a_bit(alone: Runs) -> None:
    checkpoint, digests = None, {}
    for size, stop_at in [(4, 4), (3, 9), (2, 13)]:
        first, *others = results(part, size, checkpoint, stop_at)
        assert all(other["digests"] == first["digests"] and other["checkpoint"] is None for other in others)
        checkpoint = first["checkpoint"]
        assert checkpoint.step == stop_at
        digests |= first["digests"]
    last = part(None, checkpoint, None)
    assert {**digests, **last["digests"]} == alone["default"]["digests"]


class AskedImages(MadeImages):
    """Tells how many images were waiting at once: asked for ahead and not loaded yet."""

    def __init__(self, pixels: list[NDArray[np.uint8]]) -> None:
        super().__init__(pixels)
        self.waiting: set[int] = set()
        self.asked: set[int] = set()
        self.most = 0

    def prefetch(self, i: int) -> None:
        self.asked.add(i)
        self.waiting.add(i)
        self.most = max(self.most, len(self.waiting))

    def image(self, i: int) -> LoadedImage:
        self.waiting.discard(i)
        return super().image(i)


def asked_ahead(group: ProcessGroup) -> tuple[int, int, set[int], set[int]]:
    """(images waiting at most, at the end, asked for, loaded) in a run with three views a step."""
    scene = made_scene(30)
    images = AskedImages(scene.images.pixels)  # type: ignore[attr-defined]
    scene.images = images  # type: ignore[assignment]
    train(group, batch_config(3, guard={"probe_every": 0}), scene=scene, stop_at=STEPS - 1)
    return images.most, len(images.waiting), images.asked, set(images.loaded)


def test_ranks_ask_ahead_for_the_views_that_they_render() -> None:
    """Also where ranks have different numbers of views in a step."""
    for rank, (most, left, asked, loaded) in enumerate(results(asked_ahead, 2)):
        share = 2 - rank
        assert most <= AHEAD + share
        assert left <= AHEAD
        assert len(asked & loaded) >= len(asked) - AHEAD


def troubled(group: ProcessGroup, folder: str, trouble: str) -> tuple[list[str], int, int]:
    """(causes of going back, the last step, its digest) of a run in which something goes wrong after step 6."""
    path = Path(folder) / trouble
    if group.rank == 0:
        path.mkdir()
        run_dir: RunDir = RunDir.create(path / "run")
    group.all_reduce_max(0.0)  # all ranks wait for the folder
    if group.rank:
        run_dir = ReadOnlyRunDir(path / "run")
    config = batch_config(4, guard={"finite_every": 1}, save={"steps": (4,)})
    trainer = Trainer.start(config, made_scene(12), run_dir=run_dir, renderer=plain_renderer, group=group)
    causes = []
    for event in trainer.run():
        if isinstance(event, RolledBack):
            causes.append(event.cause)
            assert event.step == 4
        if isinstance(event, Stepped) and event.step == 6 and not causes:
            if trouble == "diverged":
                trainer.state.adam.exp_avg.means[0, 0] = float("nan")  # in all ranks alike
            elif group.rank == 1:
                run_out_once(trainer)
    return causes, trainer.state.step, state_digest(trainer.state)


def run_out_once(trainer: Trainer) -> None:
    """The next view of this rank finds no memory."""
    assert trainer.stepper.batch_engine is not None
    stages = trainer.stepper.batch_engine._pipeline

    def fail(*_: Any, **__: Any) -> None:
        raise ResourceError("no memory for this view")

    stages.run = fail  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("trouble", ["diverged", "memory"])
def test_ranks_go_back_together(trouble: str, tmp_path: Path) -> None:
    """Also when a single one of them has no memory."""
    first, second = results(troubled, 2, str(tmp_path), trouble)
    assert first == second
    assert first[:2] == ([trouble], STEPS)


def disagreeing(group: ProcessGroup) -> tuple[set[int], int]:
    """(rows that are left out, the last digest) where a rank cannot read an image, and others find other outliers."""
    sound, spoiled = ViewError(0.1, 0.5, 1.0), ViewError(0.9, 0.5, 1.0)
    config = batch_config(4, schedule={"lr_steps": STEPS})
    trainer = Trainer.start(config, made_scene(12), run_dir=run_of(group), renderer=plain_renderer, group=group)

    def view_errors(state: TrainState) -> dict[int, ViewError] | Alarmed:
        if group.rank == 1:
            return Alarmed(0, "evaluation", "an image cannot be read")
        return dict.fromkeys(range(len(state.train)), sound) | {3 + group.rank: spoiled}

    trainer.scorer.view_errors = view_errors  # type: ignore[method-assign]
    for _ in trainer.run():
        pass
    return set(trainer.state.sampler.skipped), state_digest(trainer.state)


def test_ranks_leave_out_what_rank_0_finds() -> None:
    first, *others = results(disagreeing, 3)
    assert first[0] == {3}
    assert others == [first, first]


class FactsRecorder:
    """In the place of a group of one rank: keeps the numbers that ranks would compare."""

    facts: dict[str, int]

    def all_gather_scalars(self, what: str, numbers: list[float]) -> list[list[float]]:
        return [numbers]

    def check_agreement(self, what: str, **facts: int) -> None:
        self.facts = facts


def facts_of(state: TrainState, scene: Scene) -> dict[str, int]:
    group = FactsRecorder()
    check_same_run(group, state, scene)  # type: ignore[arg-type]
    return group.facts


@pytest.mark.parametrize(
    ("fact", "value"),
    [(name, 1.5) for name in ("fx", "fy", "cx", "cy", "near")]
    + [("name", "other.png"), ("width", 7), ("height", 7), ("viewmat", np.eye(4))],
)
def test_ranks_compare_all_of_their_cameras(fact: str, value: object) -> None:
    scene = made_scene()
    state = Trainer.start(RUNS["default"], scene, run_dir=MemoryRun(), engine=PlainEngine()).state  # type: ignore[arg-type]
    last = replace(state.cameras[-1], **{fact: value})
    other = replace(state, cameras=[*state.cameras[:-1], last])
    before, after = facts_of(state, scene), facts_of(other, scene)
    assert {name for name in before if before[name] != after[name]} == {"cameras"}
