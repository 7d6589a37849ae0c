"""The state that a run starts from: a new one, or a checkpoint's, and whether scene and settings still match it."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from splatcli.checkpoint.state import Checkpoint, DatasetInfo
from splatcli.config import COLOUR_MAPS, Config, DataConfig, flat_settings, read_settings, resolve, with_settings
from splatcli.errors import SceneError, UsageError
from splatcli.gaussians import SH_REST, Gaussians
from splatcli.native.backend import ISA_VARIABLE, chosen_isa, same_rounding
from splatcli.rasterizer.adam import AdamState, sum_of_log_sizes
from splatcli.rasterizer.filter_3d import filter_sizes
from splatcli.rasterizer.offload import DEVICE_STORAGE, TensorStorage, storage_for
from splatcli.rasterizer.step_inputs import DensifyStats, Shard
from splatcli.scene.camera import Camera
from splatcli.scene.decode import Rgb
from splatcli.scene.depth_maps import AUTO
from splatcli.scene.inspect import mask_notes, masked_share, scene_notes
from splatcli.scene.read import read_scene
from splatcli.scene.scene import Scene, check_depths
from splatcli.train.data_parallel import digest_of
from splatcli.train.densify.free_space import clearances
from splatcli.train.dropout import resolve_by_spacing
from splatcli.train.init import initial_gaussians, resolve_cap
from splatcli.train.memory_plan import plan_memory
from splatcli.train.per_view_params import PerViewParams
from splatcli.train.sampler import ViewSampler
from splatcli.train.sharding import shard_of
from splatcli.train.state import TRAINING_STREAMS, TrainState, stream_generator

#: Differences that a message lists.
_LISTED = 8

#: Relative to the scene extent and to the focal length: the rounding of another version of a scene reader.
_TOLERANCE = 1e-5


#: Names of the entries of a fingerprint in messages.
_FINGERPRINT = {
    "count": "the number of photos",
    "sha256": "the digest of the photos",
    "masks": "the digest of the masks",
    "depths": "the digest of the depth maps",
}

#: Differences of the scene that --allow-config-change accepts.
CONSENT = {"photos": "the photos' content", "cameras": "lenses and poses in the scene's files"}


def check_loss_given(checkpoint: Checkpoint, run: Path, *, given: bool) -> None:
    """Raise UsageError for a run with the caller's loss where none is ``given``: a checkpoint holds only its name."""
    if checkpoint.loss is not None and not given:
        raise UsageError(
            f"this run was trained with a loss function of its own, {checkpoint.loss!r}; a checkpoint does not hold it",
            where=run,
            remedy=f"continue in Python: splatcli.Trainer.resume({str(run)!r}, loss=...).run(); or start a new run "
            "from its model with the standard loss: splat train SCENE --init CKPT",
        )


def scene_folder(checkpoint: Checkpoint, data: Path | None) -> Path:
    """Return the folder of a run's scene: ``data`` where it is given. Raise SceneError where the run's own is gone."""
    root = data or Path(checkpoint.dataset.root)
    if data is None and not root.exists():
        raise SceneError(
            "the scene of this run does not exist", where=root, remedy="name its present folder: --data DIR"
        )
    return root


def data_to_resume(data: DataConfig) -> tuple[DataConfig, list[str]]:
    """Return the settings to read the scene of a resumed run with, and notes: without points that are gone.

    The checkpoint has what the points gave: Gaussians, near planes, clearances and settings. Only their depths and the
    bounds of a block are not in it; SceneError where these are needed.
    """
    if data.points is None or Path(data.points).exists():
        return data, []
    use = None
    if data.block is not None:
        use = "its block is cut by them"
    elif data.depths == AUTO:
        use = "its depth term uses their depths"
    elif data.depths is not None and data.depth_type != "metric":
        use = "its depth maps are fitted to them"
    if use is not None:
        raise SceneError(
            f"the points that the run began with are gone, and {use}",
            where=data.points,
            remedy="put them back, or say where they are: --set data.points=PATH",
        )
    note = f"the points that the run began with are gone, and not needed any more: {data.points}"
    return data.model_copy(update={"points": None}), [note]


def run_scene(checkpoint: Checkpoint, data: Path | None, background: Rgb | None) -> Scene:
    """Return the scene of a run with the photos of its training views: the same views, of the same sizes.

    data: where it is now, if it has moved. background: as of read_scene(). The content of photos, lenses and poses may
    have changed. Raises SceneError where the scene is gone or has other views.
    """
    settings = checkpoint.config.data.images_only()
    scene = read_scene(scene_folder(checkpoint, data), settings, background=background)
    check_same_scene(checkpoint, scene, allowed=CONSENT)
    return scene


def check_same_scene(checkpoint: Checkpoint, scene: Scene, allowed: Collection[str] = ()) -> None:
    """Raise SceneError, listing the differences, unless images, split and cameras are those of the run.

    allowed: names in CONSENT: with "photos" the content of images may differ, with "cameras" lens and pose (the run
        keeps its own). Names, sizes and the split may not.
    """
    differences = [(kind, text) for kind, text in _differences(checkpoint, scene) if kind not in allowed]
    if not differences:
        return
    listed = [text for _, text in differences[:_LISTED]]
    more = f"; and {len(differences) - _LISTED} more" if len(differences) > _LISTED else ""
    kinds = sorted({kind for kind, _ in differences})
    remedy = "give the folder that the run was started on, or start a new run from its model: "
    remedy += "splat train SCENE --init CKPT"
    if set(kinds) <= CONSENT.keys():
        flags = " ".join(f"--allow-config-change {kind}" for kind in kinds)
        remedy += f"; {flags} goes on, whatever {' and '.join(CONSENT[kind] for kind in kinds)} are now"
    raise SceneError(
        f"the scene has changed since step {checkpoint.step} was saved: " + "; ".join(listed) + more,
        where=scene.root,
        remedy=remedy,
    )


def _differences(checkpoint: Checkpoint, scene: Scene) -> Iterator[tuple[str, str]]:
    """Yield (kind, sentence) of each difference; kinds beside those of CONSENT are "views" and "sizes"."""
    before, now = checkpoint.dataset.fingerprint, scene.fingerprint()
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            kind = "views" if key == "count" else "photos"
            yield kind, f"{_FINGERPRINT.get(key, key)} was {_short(before.get(key))}, is {_short(now.get(key))}"
    if len(checkpoint.cameras) != len(scene.cameras):
        yield "views", f"there were {len(checkpoint.cameras)} views, there are {len(scene.cameras)}"
        return
    if (checkpoint.train, checkpoint.test) != (list(scene.train), list(scene.test)):
        yield "views", "other views are held out"
    for old, new in zip(checkpoint.cameras, scene.cameras, strict=True):
        difference = _camera_difference(old, new, checkpoint.dataset.extent)
        if difference is not None:
            yield difference


def _camera_difference(old: Camera, new: Camera, extent: float) -> tuple[str, str] | None:
    if old.name != new.name:
        return "views", f"view {old.name!r} is now {new.name!r}"
    if (old.width, old.height) != (new.width, new.height):
        return "sizes", f"{old.name} was {old.width}x{old.height}, is {new.width}x{new.height}"
    if old.model != new.model:
        return "cameras", f"{old.name} was a {old.model}, is a {new.model}"
    lens = np.array([[c.fx, c.fy, c.cx, c.cy] for c in (old, new)])
    turned = np.abs(old.viewmat[:3, :3] - new.viewmat[:3, :3]).max()
    moved = np.abs(old.center - new.center).max()
    # Written so that NaN counts as a difference.
    if not (np.abs(lens[0] - lens[1]).max() <= _TOLERANCE * old.fx):
        return "cameras", f"{old.name} has another focal length or principal point"
    if not (turned <= _TOLERANCE and moved <= _TOLERANCE * extent):
        return "cameras", f"{old.name} has another pose"
    return None


def _short(value: str | int | None) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 12 else text[:12] + "..."


#: Settings that affect no trained bit.
_HARMLESS = ("save.", "guard.", "train.eval_every", "data.cache_bytes", "data.points", "memory.offload")

#: Settings that took effect before the first step.
_FIXED_VIEWS = ("views.pose_opt", *(f"views.{name}" for name in COLOUR_MAPS))
_FIXED = ("model.", "data.", "train.seed", "train.filter_3d", "strategy.name")

#: Settings that a new run decides where they have this value, see planned_config().
_UNDECIDED = {
    "strategy.cap_max": "auto",
    "memory.cap": None,
    "train.dropout": None,
    "data.depth_type": None,
    "schedule.sh_degree_start": None,
}

#: Settings that a run decides by its scene or first Gaussians where they are None; a resumed one has decided.
_DECIDED = ("train.dropout", "optim.means_size_power", "schedule.sh_degree_start")

#: Settings with which shN catches up on missed steps (AdamState).
_FLUSH_SETTINGS = {"optim.shN_lr", "optim.beta1", "optim.beta2", "optim.eps"}


def changed_config(
    stored: Config,
    *,
    file: Path | None = None,
    assignments: list[str] | None = None,
    values: dict[str, Any] | None = None,
    allowed: Iterable[str] = (),
) -> tuple[Config, list[str]]:
    """Return the settings to continue with, and a sentence for each changed one.

    file: settings as they were given to the run; differences are refused, unless they are harmless or ``allowed``.
    assignments: ``key=value`` strings, which request a change.
    values: dotted key -> value, which request a change too.
    Raises UsageError, listing the differences that need consent and those that are not possible.
    """
    before = flat_settings(stored)
    allowed = _known_keys(allowed, before)
    requested = read_settings(assignments=assignments) | (values or {})
    given = {
        key: value
        for key, value in (read_settings(file=file) | requested).items()
        if key != "data.scene"  # the flag --data says where the scene is
        and not (key in _DECIDED and value in (None, "none"))
    }
    config = with_settings(stored, given)
    after = flat_settings(config)
    different = [key for key in given if after[key] != before[key]]
    changes = {key: f"{key} was {shown(before[key])}, is {shown(after[key])}" for key in different}
    if "train.iterations" in changes and "schedule.lr_steps" not in changes:
        changes["train.iterations"] += "; the schedule stays, added steps have the final learning rate"
    fixed = [
        key for key in different if key in _FIXED_VIEWS or (key.startswith(_FIXED) and not key.startswith(_HARMLESS))
    ]
    if fixed:
        raise UsageError(
            "these settings are fixed when a run is made: " + "; ".join(changes[key] for key in fixed),
            where=file,
            remedy="leave them out, or start a new run from this one's model: splat train SCENE --init CKPT",
        )
    refused = [key for key in different if key not in requested.keys() | allowed and not key.startswith(_HARMLESS)]
    if refused:
        raise UsageError(
            "these settings are not those of the run: " + "; ".join(changes[key] for key in refused),
            where=file,
            remedy=" ".join(f"--allow-config-change {key}" for key in refused) + " goes on with them",
        )
    return config, [f"changed: {text}" for text in changes.values()]


def differing_settings(config: Config, stored: Config) -> dict[str, Any]:
    """Return dotted key -> value of the settings in which ``config``, of a new run, differs from those of a run.

    What the run has decided when it began is no difference.
    """
    before = flat_settings(stored)
    return {
        key: value
        for key, value in flat_settings(config).items()
        if value != before[key] and not (key in _UNDECIDED and value == _UNDECIDED[key])
    }


def check_iterations(config: Config, step: int) -> None:
    """Raise UsageError where a run has more steps than ``config`` asks for."""
    if config.train.iterations < step:
        raise UsageError(
            f"{config.train.iterations} iterations are asked for and {step} are done already",
            remedy=f"ask for more than {step}, or resume from an earlier checkpoint",
        )


def apply_config(state: TrainState, config: Config) -> None:
    """Continue ``state`` with ``config``; shN catches up under the old settings first."""
    before, after = flat_settings(state.config), flat_settings(config)
    if any(before[key] != after[key] for key in _FLUSH_SETTINGS):
        state.adam.flush(state.gaussians, state.config.optim.shN_lr)
    state.config = config
    optim = config.optim
    state.adam.beta1, state.adam.beta2, state.adam.eps = optim.beta1, optim.beta2, optim.eps
    state.adam.size_power = optim.means_size_power or 0.0


def _known_keys(allowed: Iterable[str], settings: dict[str, Any]) -> set[str]:
    keys = set(allowed)
    names = [*settings, *CONSENT]
    for key in sorted(keys - set(names)):
        near = difflib.get_close_matches(key, names, n=1)
        raise UsageError(
            f"there is no setting {key!r}",
            where="--allow-config-change",
            remedy=f"did you mean {near[0]}?" if near else f"a key of splat docs settings, or {' or '.join(CONSENT)}",
        )
    return keys


def shown(value: Any) -> str:
    """Return a setting's value for a message."""
    return "none" if value is None else str(value)


def new_state(
    config: Config,
    scene: Scene,
    device: str,
    init_model: Gaussians | None,
    *,
    initial: tuple[Gaussians, list[str]] | None = None,
    planned: bool = True,
    folder: Path | None = None,
    place: tuple[int, int] | None = None,
) -> tuple[TrainState, list[str]]:
    """Return the state of a new run on ``device``, and notes for the user.

    init_model: the model that ``config.model.init`` names.
    initial: the result of first_gaussians(), if it is known already.
    planned: whether to plan the memory of the device's own engine, see plan_memory().
    folder: of the file of a run that offloads on the CPU, see storage_for().
    place: (rank, size) of this process where each holds a shard; None: it holds all Gaussians.
    Raises SceneError where there is no view or no scale, ResourceError where the memory cannot suffice.
    """
    check_trainable(config, scene)
    seed, store = config.train.seed, storage_for(config.memory.offload, device, folder)
    gaussians, notes = initial or first_gaussians(config, scene, init_model)
    shards = 1 if place is None else place[1]
    config, more = planned_config(config, scene, gaussians, device, planned=planned, shards=shards, store=store)
    notes = notes + more
    shard = None if place is None else Shard(*place, len(gaussians))
    optim, log_size = config.optim, sum_of_log_sizes(gaussians.log_scales) / max(1, len(gaussians))
    per_view_params, sizes = PerViewParams.new(config.views, [scene.cameras[view] for view in scene.train]), None
    if config.train.filter_3d:
        cameras = [per_view_params.camera(row, scene.cameras[view]) for row, view in enumerate(scene.train)]
        sizes = filter_sizes(gaussians.means.to(device), cameras)
    origin = 0
    if shard is not None:
        origin = digest_of(column for _, column in gaussians.items())
        gaussians = gaussians.map(lambda column: column[shard.rows].clone())
        sizes = None if sizes is None else sizes[shard.rows].clone()
    gaussians = _to_device(gaussians, device, store)
    state = TrainState(
        config=config,
        step=0,
        gaussians=gaussians,
        adam=AdamState.zeros_like(
            gaussians, optim.beta1, optim.beta2, optim.eps, store, optim.means_size_power or 0.0, log_size
        ),
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
        per_view_params=per_view_params,
        filter_3d=sizes,
        shard=shard,
        origin=origin,
    )
    return state, [*scene.notes, *mask_notes(scene.images), *scene_notes(scene), *notes]


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
            remedy="add photos from other places; one place shows no depth",
        )
    if config.depth_lambda > 0.0:
        check_depths(scene)


def planned_config(
    config: Config,
    scene: Scene,
    gaussians: Gaussians,
    device: str,
    *,
    planned: bool = True,
    shards: int = 1,
    store: TensorStorage = DEVICE_STORAGE,
) -> tuple[Config, list[str]]:
    """Return the settings of a new run with the caps of its scene and of the memory, and notes for the user.

    gaussians: the first ones, on the CPU. planned, store: as for new_state(). shards: of the Gaussians, in processes.
    Raises ResourceError where the memory cannot suffice.
    """
    config = resolve(_with_depth_type(config, scene), sh_degree_start=_used_sh_degree(gaussians))
    config, notes = resolve_cap(config, scene, len(gaussians))
    config, more = resolve_by_spacing(config, scene)
    notes = [*notes, *more]
    if not planned:
        return config, notes
    own = gaussian_bytes(gaussians) if torch.device(device).type == "cpu" else 0
    cap, more = plan_memory(config, scene, gaussians, torch.device(device), own=own, shards=shards, store=store)
    return resolve(config, memory_cap=cap), [*notes, *more]


def _with_depth_type(config: Config, scene: Scene) -> Config:
    """Return the settings with the type of the depth maps, so that a resumed run does not decide it anew."""
    if config.data.depths in (None, AUTO) or config.data.depth_type is not None:
        return config
    relative = any(source.depth is not None and source.depth.relative for source in scene.images.sources)
    return with_settings(config, {"data.depth_type": "relative" if relative else "metric"})


def _used_sh_degree(gaussians: Gaussians) -> int:
    """Return the highest SH degree of which a coefficient is not zero."""
    for degree in range(gaussians.sh_degree, 0, -1):
        if bool(gaussians.shN[:, SH_REST[degree - 1] : SH_REST[degree]].any()):
            return degree
    return 0


def first_gaussians(config: Config, scene: Scene, init_model: Gaussians | None) -> tuple[Gaussians, list[str]]:
    """Return the Gaussians before the first step, on the CPU, and notes for the user. init_model: see new_state()."""
    return initial_gaussians(config, scene, stream_generator(config.train.seed, "init"), init_model)


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
    """Return the state of ``checkpoint`` on ``device``, the scene with the stored cameras, and notes for the user.

    config: settings to continue with in place of the stored ones.
    allowed: accepted differences of the scene, see check_same_scene().
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
    cap = config.max_gaussians()
    if cap is not None and len(checkpoint.gaussians) > cap:
        notes.append(f"the run has {len(checkpoint.gaussians):,} Gaussians, more than the cap of {cap:,}: it adds none")
    store = storage_for(config.memory.offload, device, folder)
    if planned:
        shards = 1 if place is None else place[1]
        config, more = _plan_resumed(checkpoint, scene, torch.device(device), config, shards, store)
        notes += more
    state = shard_of(checkpoint, place, device, store=store)
    if lengthened:
        check_iterations(config, state.step)
    apply_config(state, config)
    # The next command finds the scene where it is now.
    state.dataset = dataclasses.replace(state.dataset, root=str(scene.root))
    if "photos" in allowed:
        state.dataset = dataclasses.replace(state.dataset, fingerprint=scene.fingerprint())
    # The stored cameras are bit-identical to those trained on; the scene's may be rounded differently.
    return state, dataclasses.replace(scene, cameras=state.cameras), notes


def _rounding_notes(checkpoint: Checkpoint, device: str) -> list[str]:
    """Return a note if the CPU library's instruction set rounds differently than the one the run was saved with."""
    before, now = checkpoint.writer.get("cpu_isa"), chosen_isa()
    if before is None or torch.device(device).type != "cpu" or same_rounding(before, now):
        return []
    return [
        f"saved by the CPU library for {before}, resumed by that for {now}: they round differently, so the run goes on "
        f"with other bits than without the stop; {ISA_VARIABLE}={before} keeps them where the processor runs it"
    ]


def gaussian_bytes(gaussians: Gaussians) -> int:
    """Return the bytes of the six tensors."""
    return sum(tensor.nbytes for _, tensor in gaussians.items())


def _to_device(gaussians: Gaussians, device: str, store: TensorStorage) -> Gaussians:
    """Return ``gaussians`` on the run's device and in its store; tensors that are there already are shared."""
    if not store.offloads:
        return gaussians.to(device)
    return gaussians.map(lambda tensor: tensor.to(device), rest=lambda tensor: store.copy(tensor, device))


def _plan_resumed(
    checkpoint: Checkpoint, scene: Scene, device: torch.device, config: Config, shards: int, store: TensorStorage
) -> tuple[Config, list[str]]:
    """Return the settings of a resumed run and notes: it keeps the memory cap, unless it is given another budget."""
    if config.memory.budget != checkpoint.config.memory.budget and config.memory.cap == checkpoint.config.memory.cap:
        config = with_settings(config, {"memory.cap": None})
    # A run that offloads maps its checkpoint, and so do processes with shards: it does not count as memory.
    mapped = store.offloads or shards > 1
    own = 3 * gaussian_bytes(checkpoint.gaussians) if device.type == "cpu" and not mapped else 0
    cap, notes = plan_memory(config, scene, checkpoint.gaussians, device, own=own, shards=shards, store=store)
    return resolve(config, memory_cap=cap), notes
