"""Sharded training: bit-identical to one process that holds all Gaussians, in every step, file and figure."""

from __future__ import annotations

import operator
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from splatcli.checkpoint.run_dir import RunDir
from splatcli.checkpoint.state import Checkpoint
from splatcli.config import Config
from splatcli.distributed.process_group import SCALARS, ProcessGroup
from splatcli.errors import ResourceError, SceneError
from splatcli.gaussians import Gaussians
from splatcli.native import abi
from splatcli.rasterizer.adam import AdamState
from splatcli.rasterizer.batch import BatchEngine
from splatcli.rasterizer.rendering import render
from splatcli.rasterizer.sharded import RETURNED, SENT, ShardedEngine
from splatcli.rasterizer.step_inputs import DensifyStats, Regularisation, Shard, StepInputs, ViewParams
from splatcli.scene.images import LoadedImage
from splatcli.scene.scene import Scene
from splatcli.train.data_parallel import ReadOnlyRunDir
from splatcli.train.events import RolledBack, Stepped
from splatcli.train.sharding import gather_state
from splatcli.train.trainer import LIMIT_SCALES_EVERY, Trainer
from tests.distributed.ranks import results, run_ranks
from tests.distributed.training import STEPS, batch_config, digest_of, go_on, run_of, train
from tests.kernels.simt import simulated
from tests.native.cases import NEEDS_COMPILER
from tests.rasterizer.scenes import random_camera, random_gaussians, random_image
from tests.train.worlds import MadeImages, made_scene, plain_renderer, short_config

pytestmark = NEEDS_COMPILER

#: What a step may carry along, in as few runs as possible; each refines, some reset opacities or look at probe views.
RUNS = {
    "default": batch_config(4, guard={"probe_every": 6, "probe_views": 3}),
    "mcmc": batch_config(4, strategy={"name": "mcmc", "opacity_reg": 0.01, "scale_reg": 0.01, "cap_max": 60}),
    "filtered": batch_config(
        4,
        views={"exposure": True},
        train={"filter_3d": True, "antialiased": True, "dropout": 0.4, "sh_prior": 0.0},
        model={"sh_degree": 3},
        schedule={"sh_degree_interval": 4},
    ),
    "absgrad": batch_config(
        5,
        strategy={"name": "absgrad"},
        train={"dropout": 0.4, "sh_prior": 1.0},
        views={"bilateral_grid": True},
        model={"sh_degree": 3},
        schedule={"sh_degree_interval": 4},
    ),
    "pictured": batch_config(4, data={"depths": "auto"}, schedule={"num_downscales": 1, "resolution_schedule": 5}),
    "posed": batch_config(5, views={"pose_opt": True, "pose_start": 0.25, "ppisp": True}, train={"filter_3d": True}),
}
#: Rows that stay together, of so many in the beginning.
UNITS, POINTS = {"posed": abi.CHUNK}, {"posed": 700}
Runs = dict[str, dict[str, Any]]


class Photos(MadeImages):
    """Photos with all that there may be beside their colours."""

    def image(self, i: int) -> LoadedImage:
        pixels = super().image(i).pixels
        random = np.random.default_rng(i)
        hidden, alpha = random.random(pixels.shape[:2]) < 0.2, random.integers(0, 256, pixels.shape[:2], np.uint8)
        depth = random.uniform(2.0, 4.0, pixels.shape[:2]).astype(np.float32)
        depth[random.random(depth.shape) < 0.5] = 0.0
        return LoadedImage(np.where(hidden[..., None], 0, pixels).astype(np.uint8), hidden, alpha, depth)

    def has_depth(self, i: int) -> bool:
        return True


def scene_with_cameras(name: str) -> Scene:
    scene = made_scene(12, points=POINTS.get(name, 20))
    if name == "pictured":
        scene.images = Photos(scene.images.pixels)  # type: ignore[attr-defined, assignment]
    return scene


@pytest.fixture(scope="module")
def alone() -> Runs:
    return {name: train(None, config, renderer=None, scene=scene_with_cameras(name)) for name, config in RUNS.items()}


def several(group: ProcessGroup, names: list[str]) -> Runs:
    return {name: train(group, RUNS[name], sharded=True, scene=scene_with_cameras(name)) for name in names}


def assert_same_file(got: Checkpoint, expected: Checkpoint) -> None:
    """All that is written."""
    for name, tensor in expected.gaussians.items():
        assert torch.equal(getattr(got.gaussians, name), tensor), name
    assert got.moments is not None
    assert expected.moments is not None
    for name, moments in expected.moments.items():
        assert all(torch.equal(a, b) for a, b in zip(got.moments[name], moments, strict=True)), name
    assert got.sh_last_step is not None
    assert expected.sh_last_step is not None
    assert torch.equal(got.sh_last_step, expected.sh_last_step)
    for values, wanted in [(got.strategy, expected.strategy), (got.rng, expected.rng), (got.views, expected.views)]:
        assert values.keys() == wanted.keys()
        for key, tensor in wanted.items():
            same = torch.equal if isinstance(tensor, Tensor) else operator.eq
            assert same(values[key], tensor), key
    assert got.columns.present().keys() == expected.columns.present().keys()
    for name, column in expected.columns.present().items():
        assert torch.equal(got.columns.present()[name], column), name
    for name in ("step", "adam_step", "active_sh_degree", "sampler", "config", "train", "test", "dataset"):
        assert getattr(got, name) == getattr(expected, name), name


@pytest.mark.parametrize(
    ("size", "names"),
    [(2, ["default", "filtered"]), (3, ["mcmc", "absgrad", "pictured", "posed"]), (4, ["default", "posed"])],
)
def test_shares_have_the_bits_of_the_whole(size: int, names: list[str], alone: Runs) -> None:
    found = results(several, size, names)
    for name in names:
        expected = alone[name]
        assert expected["refined"] > 0
        assert len(set(expected["digests"].values())) == STEPS  # every step changes something
        for rank in found:
            for what in ("losses", "digests", "reason", "scores"):
                assert rank[name][what] == expected[what], (name, what)
        rows = [rank[name]["rows"] for rank in found]
        assert sum(rows) == expected["rows"]
        assert max(rows) - min(rows) <= UNITS.get(name, 1)
        assert_same_file(found[0][name]["checkpoint"], expected["checkpoint"])
        columns = {"filtered": {"filter_3d", "effective_views"}, "absgrad": {"sh_change"}, "posed": {"filter_3d"}}
        assert expected["checkpoint"].columns.present().keys() == columns.get(name, set())
        assert name != "posed" or expected["checkpoint"].views["pose"].any()
    assert any(alone[name]["scores"] for name in names)


def limited(share: float) -> Config:
    """Settings of a run in which scales are limited once: every LIMIT_SCALES_EVERY steps."""
    return short_config(LIMIT_SCALES_EVERY + 3, train={"batch_size": 3}, strategy={"max_scale3d": share})


def test_shares_limit_scales_as_the_whole_does() -> None:
    """The steps before are those of one process."""
    before = train(None, limited(0.05), stop_at=LIMIT_SCALES_EVERY - 2)["checkpoint"]
    expected = go_on(None, before)
    for found in results(go_on_in_shares, 2, before):
        assert (found["losses"], found["digests"]) == (expected["losses"], expected["digests"])
    assert list(expected["digests"]) == [LIMIT_SCALES_EVERY + step for step in (-1, 0, 1, 2, 3)]
    before.config = limited(0.0)
    unlimited = go_on(None, before)["digests"]
    same = [unlimited[step] == digest for step, digest in expected["digests"].items()]
    assert same == [True, False, False, False, False], "the limit has an effect, after this step"


def go_on_in_shares(group: ProcessGroup, checkpoint: Checkpoint) -> dict[str, Any]:
    return go_on(group, checkpoint, sharded=True)


def part(
    group: ProcessGroup | None, checkpoint: Checkpoint | None, stop_at: int | None, sharded: bool
) -> dict[str, Any]:
    """A run on its way: it begins without a checkpoint."""
    if checkpoint is None:
        return train(group, RUNS["default"], stop_at=stop_at, sharded=sharded)
    return go_on(group, checkpoint, stop_at=stop_at, sharded=sharded)


def test_a_run_goes_from_shares_to_copies_to_one_and_back_without_losing_a_bit(alone: Runs) -> None:
    checkpoint, digests = None, {}
    for size, stop_at, sharded in [(4, 4, True), (3, 7, False), (3, 11, True), (2, 13, True)]:
        first, *others = results(part, size, checkpoint, stop_at, sharded)
        assert all(other["digests"] == first["digests"] and other["checkpoint"] is None for other in others)
        checkpoint = first["checkpoint"]
        assert checkpoint.step == stop_at
        digests |= first["digests"]
    last = part(None, checkpoint, None, False)
    assert {**digests, **last["digests"]} == alone["default"]["digests"]


STILL = batch_config(5, schedule={"refine_start": 1000}, model={"sh_degree": 1})


def bytes_of_steps(group: ProcessGroup) -> dict[str, int]:
    """What this rank sends in four steps."""
    trainer = Trainer.start(STILL, made_scene(12), run_dir=run_of(group), group=group, sharded=True)
    before = dict(group.sent)
    for _ in range(4):
        trainer.advance()
    return {what: sent - before.get(what, 0) for what, sent in group.sent.items()}


def seen_in_steps() -> list[Tensor]:
    """The Gaussians that each view of these steps sees."""
    trainer = Trainer.start(STILL, made_scene(12), run_dir=run_of(None))
    assert trainer.stepper.batch_engine is not None
    pipeline, seen = trainer.stepper.batch_engine._pipeline, []
    run = pipeline.run

    def watched(*arguments: Any, **options: Any) -> Any:
        job = run(*arguments, **options)
        seen.append(pipeline.context.visible_slots()[0].clone())
        return job

    pipeline.run = watched  # type: ignore[method-assign]
    for _ in range(4):
        trainer.advance()
    return seen


def test_ranks_send_what_the_formula_says() -> None:
    """68 bytes for each Gaussian that a view of another rank sees, and as many back; three scalar messages a round."""
    size, views, numbers = 3, 5, 4 * SENT
    assert numbers == 4 * RETURNED == 68
    expected = [0] * size
    seen = seen_in_steps()
    assert len(seen) == 4 * views
    for i, ids in enumerate(seen):
        has_view = i % views % size
        for rank in range(size):
            rows = Shard(rank, size, 20).rows
            foreign = int(((ids >= rows.start) & (ids < rows.stop)).sum()) if rank != has_view else 0
            expected[rank] += numbers * foreign
            expected[has_view] += numbers * foreign
    found = results(bytes_of_steps, size)
    assert [rank["rows"] for rank in found] == expected
    assert min(expected) > 0
    rounds = 2
    assert {rank["scalars"] for rank in found} == {4 * rounds * 3 * 8 * SCALARS * (size - 1)}
    assert not any(rank.get("whole") or rank.get("sum") for rank in found)


def bytes_of_a_step(group: ProcessGroup, pose_start: float) -> tuple[int, dict[str, int]]:
    """(rows of this rank, what it sends in the first step)."""
    config = batch_config(5, views={"pose_opt": True, "pose_start": pose_start}, model={"sh_degree": 1})
    trainer = Trainer.start(config, made_scene(12, points=700), run_dir=run_of(group), group=group, sharded=True)
    before = dict(group.sent)
    trainer.advance()
    return len(trainer.state.gaussians), {what: sent - before.get(what, 0) for what, sent in group.sent.items()}


def test_ranks_send_64_bytes_of_a_pose_for_each_chunk_and_view() -> None:
    size, views, rounds = 2, 5, 3
    still, moving = (results(bytes_of_a_step, size, start) for start in (0.9, 0.0))
    for rank, ((rows, before), (_, after)) in enumerate(zip(still, moving, strict=True)):
        others = sum(view % size != rank for view in range(views))
        assert rows >= abi.CHUNK
        assert after["rows"] - before["rows"] == 64 * -(-rows // abi.CHUNK) * others
        assert after["scalars"] - before["scalars"] == rounds * 8 * SCALARS * (size - 1)


def troubled(group: ProcessGroup, folder: str, trouble: str) -> tuple[list[str], int, int, int]:
    """(causes of going back, last step, Gaussians, digest) of a run in which one rank is in trouble after step 6."""
    path = Path(folder) / trouble
    if group.rank == 0:
        path.mkdir()
        run_dir: RunDir = RunDir.create(path / "run")
    group.all_reduce_max(0.0)  # all ranks wait for the folder
    if group.rank:
        run_dir = ReadOnlyRunDir(path / "run")
    config = batch_config(4, guard={"finite_every": 1}, save={"steps": (4,)}, train={"filter_3d": True})
    trainer = Trainer.start(config, made_scene(12), run_dir=run_dir, group=group, sharded=True)
    causes = []
    for event in trainer.run():
        if isinstance(event, RolledBack):
            causes.append(event.cause)
            assert event.step == 4
        if isinstance(event, Stepped) and event.step == 6 and not causes and group.rank == 1:
            if trouble == "diverged":
                trainer.state.adam.exp_avg.means[0, 0] = float("nan")
            else:
                run_out_once(trainer)
    return causes, trainer.state.step, trainer.state.count, digest_of(trainer.state, group)


def run_out_once(trainer: Trainer) -> None:
    """The next view of this rank finds no memory."""
    assert trainer.stepper.batch_engine is not None
    engine: Any = trainer.stepper.batch_engine

    def fail(*_: Any, **__: Any) -> None:
        raise ResourceError("no memory for this view")

    engine._pipeline.rasterize_with_loss = fail


@pytest.mark.parametrize("trouble", ["diverged", "memory"])
def test_ranks_go_back_together_when_one_has_to(trouble: str, tmp_path: Path) -> None:
    first, second = results(troubled, 2, str(tmp_path), trouble)
    assert first == second
    assert first[:2] == ([trouble], STEPS)


def without_a_photo(group: ProcessGroup) -> None:
    scene = made_scene(12)
    if group.rank == 1:
        scene.images.image = fail_to_read  # type: ignore[method-assign]
    Trainer.start(STILL, scene, run_dir=run_of(group), renderer=plain_renderer, group=group, sharded=True).advance()


def fail_to_read(view: int) -> Any:
    raise SceneError("a photo is damaged", where="view_07.png")


def test_a_photo_that_one_rank_cannot_read_ends_all_in_the_same_words() -> None:
    first, second = run_ranks(without_a_photo, 2)
    assert second.error == "a photo is damaged"
    assert first.error == "rank 1: a photo is damaged"
    assert first.code == second.code == SceneError.exit_code


def with_a_bug(group: ProcessGroup) -> tuple[str, bool]:
    """(The error in words, whether this rank reports the failure), where rank 1 has a bug."""

    def check() -> None:
        if group.rank == 1:
            raise ZeroDivisionError("a bug")

    try:
        group.raise_on_all(check)
    except Exception as error:
        time.sleep(0.5 * group.rank)  # the rank with the bug is not the first to end
        group.fail(error)
        return str(error).splitlines()[0], group.monitor.reports
    raise AssertionError("no error")


def test_the_rank_that_has_a_bug_reports_it() -> None:
    first, second = results(with_a_bug, 2)
    assert first == ("rank 0 of 2: rank 1 failed: ZeroDivisionError: a bug", False)
    assert second == ("a bug", True)


def whole_in(group: ProcessGroup, folder: str) -> tuple[bool, list[str]]:
    """(whether this rank has the whole state; what is in the folder)."""
    config = batch_config(4, model={"sh_degree": 0})
    trainer = Trainer.start(config, made_scene(12), run_dir=run_of(group), group=group, sharded=True)
    trainer.advance()
    whole = gather_state(trainer.state, group, Path(folder))
    if whole is None:
        return False, []
    assert len(whole.gaussians) == whole.count == 20
    with Path("/proc/self/maps").open() as maps:
        files = [line.split(maxsplit=5)[5].strip() for line in maps if folder in line]
    return True, files


def test_the_whole_of_a_state_lies_in_files_without_names(tmp_path: Path) -> None:
    first, second = results(whole_in, 2, str(tmp_path))
    assert first[0]
    assert not second[0]
    # Five columns of parameters, ten of moments, and three of what else is known of a Gaussian.
    assert len(first[1]) == 18
    assert all("(deleted)" in line for line in first[1])
    assert list(tmp_path.iterdir()) == []
    first, _ = results(whole_in, 2, str(tmp_path / "nowhere"))
    assert first == (True, [])


LRS = {"means": 2e-3, "quats": 1e-3, "log_scales": 5e-3, "logit_opacities": 5e-2, "sh0": 2.5e-3, "shN": 1.25e-4}


def steps_under_the_emulator(group: ProcessGroup | None) -> tuple[list[float], list[Tensor]]:
    """(losses, parameters and moments of this rank's rows and their statistics) after three steps on five views."""
    whole, views = random_gaussians(3, 300, sh_degree=1), [random_camera(30 + i, 37, 29) for i in range(5)]
    whole.logit_opacities -= 2.0  # not all of them opaque, so that noise moves some
    shard = None if group is None else Shard(group.rank, group.size, len(whole), abi.CHUNK)
    own = whole.map(lambda column: column if shard is None else column[shard.rows].clone())
    adam, stats = AdamState.zeros_like(own), DensifyStats.zeros(len(own))
    regularisation = Regularisation(opacity_reg=0.01, scale_reg=0.01, noise=30.0, seed=7)

    def inputs_of(i: int) -> StepInputs:
        picture = (random_image(50 + i, 37, 29) * 255).round().to(torch.uint8)
        behind, exposure = torch.tensor([0.2, 0.4, 0.6]), 0.9 * torch.eye(3, 4)
        return StepInputs(
            views[i], picture, LRS, 1, behind, 0.2, True, stats,
            regularisation=regularisation, absgrad=True, shard=shard,
            view_params=ViewParams(lambda *_: None, pose=True, colours=exposure),
        )  # fmt: skip

    losses: list[float] = []
    engine = BatchEngine(simulated()) if group is None else ShardedEngine(simulated(), group)
    for _ in range(3):
        outcome = engine.step(own, adam, views, inputs_of)
        assert outcome.v_params is not None
        losses += [*outcome.losses, *(float(slope.double().sum()) for slope in outcome.v_params)]
    bundles = (own, adam.exp_avg, adam.exp_avg_sq)
    if isinstance(engine, ShardedEngine):
        image, problem = engine.render(own, views[:2], background=torch.zeros(3), antialiased=True)
        assert image is not None, problem
        losses.append(float(image.double().sum()))
    return losses, [*(tensor for bundle in bundles for _, tensor in bundle.items()), stats.grad2d, stats.count]


def test_the_kernels_of_gpus_have_the_bits_of_the_whole_too() -> None:
    """Under the emulator, which is as good as the CPU can tell."""
    losses, columns = steps_under_the_emulator(None)
    found = results(steps_under_the_emulator, 2)
    for place, column in enumerate(columns):
        assert torch.equal(torch.cat([rank[1][place] for rank in found]), column), place
        assert column.unique().numel() > 1 or column.numel() == 0
    for rank, (numbers, _) in enumerate(found):
        assert numbers[:-1] == losses
        whole = Gaussians(*columns[:6])
        image = render(whole, random_camera(30 + rank, 37, 29), antialiased=True, backend=simulated()).image
        assert numbers[-1] == float(image.double().sum())
