"""The state that a run starts from: a new one, or a checkpoint's with its scene and settings."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from splatcli.checkpoint.state import Checkpoint, DatasetInfo, RenderColumns
from splatcli.config import Config, with_settings
from splatcli.errors import SceneError, UsageError
from splatcli.gaussians import Gaussians
from splatcli.native.backend import ISA_VARIABLE, chosen_isa, same_rounding
from splatcli.rasterizer.adam import AdamState, sum_of_log_sizes
from splatcli.rasterizer.filter_3d import filter_sizes
from splatcli.rasterizer.step_inputs import DensifyStats
from splatcli.scene.inspect import mask_notes, masked_share, scene_notes
from splatcli.scene.scene import Scene, check_depths
from splatcli.train.changed_settings import apply_config
from splatcli.train.data_parallel import digest_of
from splatcli.train.densify.free_space import clearances
from splatcli.train.init import initial_gaussians
from splatcli.train.memory_plan import plan_memory
from splatcli.train.per_view_params import PerViewParams
from splatcli.train.resolve import resolve_cap, resolve_settings
from splatcli.train.sampler import ViewSampler
from splatcli.train.sharding import shard_of
from splatcli.train.state import TRAINING_STREAMS, Placement, TrainState, adam_settings, stream_generator


def first_gaussians(config: Config, scene: Scene, init_model: Gaussians | None) -> tuple[Gaussians, list[str]]:
    """Return the Gaussians before the first step, on the CPU, and notes for the user.

    init_model: the model that ``config.model.init`` names.
    Raises SceneError where there is no view, no pixel, no depth that the settings want, or no scale.
    """
    check_trainable(config, scene)
    return initial_gaussians(config, scene, stream_generator(config.train.seed, "init"), init_model)


def check_trainable(config: Config, scene: Scene) -> None:
    """Raise SceneError for a scene without views, pixels that masks leave, scale, or the depth maps of the settings."""
    masked = masked_share(scene.images)
    if masked is not None and masked[0] == 1.0:
        raise SceneError(
            f"masks hide every pixel of the {masked[1]} images inspected, and nothing is left to train on",
            where=scene.root,
            remedy="black or transparent hides, white counts: invert the masks, or --masks none",
        )
    if not scene.train:
        raise SceneError("no view is left to train on", where=scene.root, remedy="hold out fewer: --test-every 8")
    if not scene.extent > 0:
        raise SceneError(
            "all training cameras stand at one point, so that the scene has no scale",
            where=scene.root,
            remedy="add images from other places; one place shows no depth",
        )
    if config.depth_lambda > 0.0:
        check_depths(scene)


def new_state(
    config: Config, scene: Scene, first: tuple[Gaussians, list[str]], placement: Placement, *, planned: bool = True
) -> tuple[TrainState, list[str]]:
    """Return the state of a new run, and notes for the user.

    first: of first_gaussians().
    planned: whether to plan the memory of the device's own engine, see plan_memory().
    Raises ResourceError where the memory cannot suffice.
    """
    seed, device, storage = config.train.seed, placement.device, placement.storage
    gaussians, notes = first
    del first  # and with it the first Gaussians, once they are in their place
    config, more = planned_config(config, scene, gaussians, placement, planned=planned)
    notes = notes + more
    shard = placement.shard(len(gaussians))
    log_size = sum_of_log_sizes(gaussians.log_scales) / max(1, len(gaussians))
    cameras = [scene.cameras[view] for view in scene.train]
    sizes = filter_sizes(gaussians.means.to(device), cameras) if config.train.filter_3d else None
    origin = 0
    if shard is not None:
        origin = digest_of(column for _, column in gaussians.items())
        gaussians = gaussians.map(lambda column: column[shard.rows].clone())
        sizes = None if sizes is None else sizes[shard.rows].clone()
    gaussians = _placed(gaussians, placement)
    state = TrainState(
        config=config,
        step=0,
        gaussians=gaussians,
        adam=AdamState.zeros_like(gaussians, storage=storage, log_size=log_size, **adam_settings(config.optim)),
        stats=DensifyStats.zeros(len(gaussians), gaussians.device),
        sampler=ViewSampler(len(scene.train), seed),
        generators={name: stream_generator(seed, name) for name in TRAINING_STREAMS},
        cameras=list(scene.cameras),
        train=list(scene.train),
        test=list(scene.test),
        dataset=DatasetInfo(
            str(scene.root),
            scene.kind,
            scene.extent,
            scene.fingerprint(),
            tuple(scene.offset.tolist()),
            clearances(scene),
            scene.place,
        ),
        per_view_params=PerViewParams.new(config.views, cameras),
        columns=RenderColumns(filter_3d=sizes),
        shard=shard,
        origin=origin,
    )
    return state, [*scene.notes, *mask_notes(scene.images), *scene_notes(scene), *notes]


def _placed(gaussians: Gaussians, placement: Placement) -> Gaussians:
    """Return ``gaussians`` on the run's device and in its storage; tensors that are there already are shared."""
    device, storage = placement.device, placement.storage
    if not storage.offloads:
        return gaussians.to(device)
    return gaussians.map(lambda tensor: tensor.to(device), shN=lambda tensor: storage.copy(tensor, device))


def planned_config(
    config: Config, scene: Scene, gaussians: Gaussians, placement: Placement, *, planned: bool = True
) -> tuple[Config, list[str]]:
    """Return the settings of a new run with the caps of its scene and of the memory, and notes for the user.

    gaussians: the first ones, on the CPU. planned: as for new_state().
    Raises ResourceError where the memory cannot suffice.
    """
    config, notes = resolve_settings(config, scene, gaussians)
    if not planned:
        return config, notes
    own = gaussian_bytes(gaussians) if placement.device.type == "cpu" else 0
    cap, more = plan_memory(config, scene, gaussians, placement, own=own)
    return with_settings(config, {"memory.cap": cap}), [*notes, *more]


def check_loss_given(checkpoint: Checkpoint, run: Path, *, given: bool) -> None:
    """Raise UsageError for a run with the caller's loss where none is ``given``: a checkpoint holds only its name."""
    if checkpoint.loss is not None and not given:
        raise UsageError(
            f"this run was trained with a loss function of its own, {checkpoint.loss!r}; a checkpoint does not hold it",
            where=run,
            remedy=f"continue in Python: splatcli.Trainer.resume({str(run)!r}, loss=...).run(); or start a new run "
            "from its model with the standard loss: splat train SCENE --init CKPT",
        )


def resumed_state(
    checkpoint: Checkpoint, scene: Scene, placement: Placement, config: Config, *, planned: bool = True
) -> tuple[TrainState, Scene, list[str]]:
    """Return the state of ``checkpoint``, the scene with the stored cameras, and notes for the user.

    scene: that of the run, see check_same_scene(). config: the settings to continue with. planned: as for new_state().
    Raises SceneError where the scene lacks depths that the settings want, ResourceError where the memory cannot
    suffice.
    """
    if config.depth_lambda > 0.0:
        check_depths(scene)
    notes = [*scene.notes, *_rounding_notes(checkpoint, placement.device)]
    config, more = resolve_cap(config, scene, len(checkpoint.gaussians))
    notes += more
    cap = config.max_gaussians()
    if cap is not None and len(checkpoint.gaussians) > cap:
        notes.append(f"the run has {len(checkpoint.gaussians):,} Gaussians, more than the cap of {cap:,}: it adds none")
    if planned:
        config, more = _plan_resumed(checkpoint, scene, config, placement)
        notes += more
    state = shard_of(checkpoint, placement)
    apply_config(state, config)
    # The next command finds the scene, and images that may differ, where and as they are now.
    state.dataset = dataclasses.replace(state.dataset, root=str(scene.root), fingerprint=scene.fingerprint())
    # The stored cameras are bit-identical to those trained on; the scene's may be rounded differently.
    return state, dataclasses.replace(scene, cameras=state.cameras), notes


def _plan_resumed(
    checkpoint: Checkpoint, scene: Scene, config: Config, placement: Placement
) -> tuple[Config, list[str]]:
    """Return the settings of a resumed run and notes: it keeps the memory cap, unless it is given another budget."""
    if config.memory.budget != checkpoint.config.memory.budget and config.memory.cap == checkpoint.config.memory.cap:
        config = with_settings(config, {"memory.cap": None})
    # A run that offloads maps its checkpoint, and so do processes with shards: it does not count as memory.
    mapped = placement.storage.offloads or placement.shards > 1
    own = 3 * gaussian_bytes(checkpoint.gaussians) if placement.device.type == "cpu" and not mapped else 0
    cap, notes = plan_memory(config, scene, checkpoint.gaussians, placement, own=own)
    return with_settings(config, {"memory.cap": cap}), notes


def _rounding_notes(checkpoint: Checkpoint, device: torch.device) -> list[str]:
    """Return a note if the CPU library's instruction set rounds differently than the one the run was saved with."""
    before, now = checkpoint.writer.get("cpu_isa"), chosen_isa()
    if before is None or device.type != "cpu" or same_rounding(before, now):
        return []
    return [
        f"saved by the CPU library for {before}, resumed by that for {now}: they round differently, so the run goes on "
        f"with other bits than without the stop; {ISA_VARIABLE}={before} keeps them where the processor runs it"
    ]


def gaussian_bytes(gaussians: Gaussians) -> int:
    """Return the bytes of the six tensors."""
    return sum(tensor.nbytes for _, tensor in gaussians.items())
