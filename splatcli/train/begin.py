"""A run's state before its first step here: a new run's, or the one that a checkpoint holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path

import torch

from splatcli.checkpoint.state import Checkpoint, DatasetInfo
from splatcli.config import Config, resolve, with_settings
from splatcli.errors import SceneError, UsageError
from splatcli.gaussians import Gaussians
from splatcli.native.library import ISA_VARIABLE, chosen_isa, same_rounding
from splatcli.rasterizer.adam import AdamState
from splatcli.rasterizer.filter_3d import filter_sizes
from splatcli.rasterizer.offload import TensorStorage, storage_for
from splatcli.rasterizer.shards import Shard
from splatcli.rasterizer.stats import DensifyStats
from splatcli.scene.inspect import coverage_notes
from splatcli.scene.scene import Scene, check_depths
from splatcli.train.capacity import resolve_cap
from splatcli.train.changes import apply_config
from splatcli.train.data_parallel import digest_of
from splatcli.train.forecast import plan_memory
from splatcli.train.init import initial_gaussians
from splatcli.train.per_view_params import PerViewParams
from splatcli.train.resume import check_same_scene
from splatcli.train.sampler import ViewSampler
from splatcli.train.sharding import shard_of
from splatcli.train.state import TRAINING_STREAMS, TrainState, stream_generator


def new_state(
    config: Config,
    scene: Scene,
    device: str,
    given: Gaussians | None,
    *,
    first: tuple[Gaussians, list[str]] | None = None,
    planned: bool = True,
    folder: Path | None = None,
    place: tuple[int, int] | None = None,
) -> tuple[TrainState, list[str]]:
    """The state of a new run on ``device``, and notes for the user.

    given: the model that ``config.model.init`` names.
    first: what first_gaussians() gives, where it has been asked before.
    planned: whether the memory of the device's own engine is looked at, see plan_memory().
    folder: where a run that offloads on the CPU has its file, see storage_for().
    place: (rank, size) of this process among those that share the Gaussians out; None: it holds all.
    Raises SceneError where there is no view or no scale, ResourceError where the memory cannot suffice.
    """
    if not scene.train:
        raise SceneError("no view is left to train on", where=scene.root, remedy="hold out fewer: --test-every 8")
    if not scene.extent > 0:
        raise SceneError(
            "all training cameras stand at one point, so that the scene has no scale",
            where=scene.root,
            remedy="add photos from other places; one place shows no depth",
        )
    if config.depth_lambda > 0.0:
        check_depths(scene)
    seed, store = config.train.seed, storage_for(config.memory.offload, device, folder)
    gaussians, found = first or first_gaussians(config, scene, given)
    config, notes = resolve_cap(config, scene, len(gaussians))
    notes = [*found, *notes]
    if planned:
        own = gaussian_bytes(gaussians) if torch.device(device).type == "cpu" else 0
        parts = 1 if place is None else place[1]
        cap, more = plan_memory(config, scene, gaussians, torch.device(device), own=own, parts=parts, store=store)
        config, notes = resolve(config, memory_cap=cap), notes + more
    shard = None if place is None else Shard(*place, len(gaussians))
    per_view_params, sizes = PerViewParams.new(config.views, len(scene.train)), None
    if config.train.filter_3d:
        cameras = [per_view_params.camera(row, scene.cameras[view]) for row, view in enumerate(scene.train)]
        sizes = filter_sizes(gaussians.means.to(device), cameras)
    origin = 0
    if shard is not None:
        origin = digest_of(column for _, column in gaussians.items())
        gaussians = gaussians.map(lambda column: column[shard.rows].clone())
        sizes = None if sizes is None else sizes[shard.rows].clone()
    gaussians = _placed(gaussians, device, store)
    state = TrainState(
        config=config,
        step=0,
        gaussians=gaussians,
        adam=AdamState.zeros_like(gaussians, config.optim.beta1, config.optim.beta2, config.optim.eps, store),
        stats=DensifyStats.zeros(len(gaussians), gaussians.device),
        sampler=ViewSampler(len(scene.train), seed),
        generators={name: stream_generator(seed, name) for name in TRAINING_STREAMS},
        cameras=list(scene.cameras),
        train=list(scene.train),
        test=list(scene.test),
        dataset=DatasetInfo(
            str(scene.root), scene.kind, scene.extent, scene.fingerprint(), tuple(scene.offset.tolist())
        ),
        per_view_params=per_view_params,
        smoothing=sizes,
        shard=shard,
        origin=origin,
    )
    return state, [*scene.notes, *coverage_notes(scene.images), *notes]


def first_gaussians(config: Config, scene: Scene, given: Gaussians | None) -> tuple[Gaussians, list[str]]:
    """The Gaussians before the first step, on the CPU, and notes for the user. given: see new_state()."""
    return initial_gaussians(config, scene, stream_generator(config.train.seed, "init"), given)


def resumed_state(
    checkpoint: Checkpoint,
    scene: Scene,
    device: str,
    *,
    config: Config | None = None,
    allowed: Collection[str] = (),
    planned: bool = True,
    folder: Path | None = None,
    place: tuple[int, int] | None = None,
) -> tuple[TrainState, Scene, list[str]]:
    """The state of ``checkpoint`` on ``device``, the scene with the stored cameras, and notes for the user.

    config: settings to go on with in place of the stored ones.
    allowed: what of the scene may have changed, see check_same_scene().
    planned, folder, place: as for a new run.
    Raises SceneError when the scene is not the one that was trained on, UsageError for a length already passed,
    ResourceError where the memory cannot suffice.
    """
    check_same_scene(checkpoint, scene, allowed)
    if checkpoint.config.depth_lambda > 0.0:
        check_depths(scene)
    notes = [*scene.notes, *_rounding_notes(checkpoint, device)]
    lengthened = config is not None
    config, more = resolve_cap(config or checkpoint.config, scene, len(checkpoint.gaussians))
    notes += more
    store = storage_for(config.memory.offload, device, folder)
    if planned:
        parts = 1 if place is None else place[1]
        config, more = _plan_again(checkpoint, scene, torch.device(device), config, parts, store)
        notes += more
    state = shard_of(checkpoint, place, device, store=store)
    if lengthened and config.train.iterations < state.step:
        raise UsageError(
            f"{config.train.iterations} iterations are asked for and {state.step} are done already",
            remedy=f"ask for more than {state.step}, or resume from an earlier checkpoint",
        )
    apply_config(state, config)
    if "photos" in allowed:
        state.dataset = dataclasses.replace(state.dataset, fingerprint=scene.fingerprint())
    # The stored cameras are the ones trained on, to the last bit, whatever read the scene this time.
    return state, dataclasses.replace(scene, cameras=state.cameras), notes


def _rounding_notes(checkpoint: Checkpoint, device: str) -> list[str]:
    """A note where the CPU library's instruction set rounds otherwise than the one that the run was saved with."""
    before, now = checkpoint.writer.get("cpu_isa"), chosen_isa()
    if before is None or torch.device(device).type != "cpu" or same_rounding(before, now):
        return []
    return [
        f"saved by the CPU library for {before}, resumed by that for {now}: they round differently, so the run goes on "
        f"with other bits than without the stop; {ISA_VARIABLE}={before} keeps them where the processor runs it"
    ]


def gaussian_bytes(gaussians: Gaussians) -> int:
    """What the six tensors hold."""
    return sum(tensor.nbytes for _, tensor in gaussians.items())


def _placed(gaussians: Gaussians, device: str, store: TensorStorage) -> Gaussians:
    """``gaussians`` where the run wants them; tensors that are there already are shared."""
    if not store.offloads:
        return gaussians.to(device)
    return gaussians.map(lambda tensor: tensor.to(device), rest=lambda tensor: store.copy(tensor, device))


def _plan_again(
    checkpoint: Checkpoint, scene: Scene, device: torch.device, config: Config, parts: int, store: TensorStorage
) -> tuple[Config, list[str]]:
    """Return the settings of a resumed run and notes: it keeps the memory cap, unless it is given another budget."""
    if config.memory.budget != checkpoint.config.memory.budget and config.memory.cap == checkpoint.config.memory.cap:
        config = with_settings(config, {"memory.cap": None})
    # A run that offloads maps its checkpoint, and so do processes with a part each: it counts as little as what they
    # offload.
    mapped = store.offloads or parts > 1
    own = 3 * gaussian_bytes(checkpoint.gaussians) if device.type == "cpu" and not mapped else 0
    cap, notes = plan_memory(config, scene, checkpoint.gaussians, device, own=own, parts=parts, store=store)
    return resolve(config, memory_cap=cap), notes
