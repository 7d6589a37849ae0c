"""Save and load a checkpoint file.

A crash, full disk or divergence during a save leaves the last checkpoint untouched. Loading returns a state only after
every check has passed.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from splatcli.checkpoint.activation_check import activation_cost, checkpoint_space_problem
from splatcli.checkpoint.atomic import write_atomically
from splatcli.checkpoint.container import DIGEST_KEY, MANIFEST_KEY, read_container
from splatcli.checkpoint.schema import (
    CAMERA_MODEL,
    CAMERA_TABLES,
    COLUMNS,
    EFFECTIVE_VIEWS,
    FILTER_3D,
    FORMAT,
    FORMAT_VERSION,
    MOMENT_PREFIXES,
    SH_CHANGE,
    SH_LAST_STEP,
    STORED_NAMES,
    VIEW_PREFIX,
    CameraSpec,
    DatasetSpec,
    Manifest,
    TensorSpec,
    TrainSpec,
    digests_of,
    dtype_name,
    name_problems,
    nonfinite,
    nonfinite_path,
    parse_manifest,
    problem_list,
    shape_problems,
    space_of,
    writer_info,
)
from splatcli.checkpoint.state import Checkpoint, DatasetInfo, RenderColumns, Scalar
from splatcli.config import Config, fault, parse_config
from splatcli.errors import DivergedError, ModelFileError, SplatError, UsageError
from splatcli.gaussians import GROUPS, Gaussians
from splatcli.scene.camera import Camera, lens_rows


def pack_tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return stored name -> tensor, each contiguous on the CPU in a storage of its own that it fills exactly.

    Tensors that are so already are not copied. Moments before the optimiser's first step, all zeros, are left out.
    """
    named: dict[str, Tensor] = {}
    for group, tensor in checkpoint.gaussians.items():
        named[STORED_NAMES[group]] = _stored_shape(group, tensor)
    if checkpoint.moments is not None and not _at_the_start(checkpoint):
        for group in GROUPS:
            for prefix, moment in zip(MOMENT_PREFIXES, checkpoint.moments[group], strict=True):
                named[prefix + STORED_NAMES[group]] = _stored_shape(group, moment)
    if checkpoint.sh_last_step is not None:
        named[SH_LAST_STEP] = checkpoint.sh_last_step
    named.update(checkpoint.columns.present())
    named.update({f"strategy.{key}": v for key, v in checkpoint.strategy.items() if isinstance(v, Tensor)})
    named.update({VIEW_PREFIX + key: tensor for key, tensor in checkpoint.views.items()})
    named.update({f"rng.{key}": state for key, state in checkpoint.rng.items()})

    owned: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in named.items():
        plain = tensor.detach().to("cpu").contiguous()
        storage = plain.untyped_storage()
        window = storage.nbytes() != plain.nbytes
        if window or (storage.nbytes() and storage.data_ptr() in seen):
            plain = plain.clone()
        seen.add(plain.untyped_storage().data_ptr())
        owned[name] = plain
    return owned


def build_manifest(checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> Manifest:
    """Return the manifest of a checkpoint with the ``tensors`` of pack_tensors(); all bytes are hashed."""
    specs = []
    digests = digests_of(tensors)
    for name, tensor in tensors.items():
        space, units = space_of(name)
        specs.append(
            TensorSpec(
                name=name,
                dtype=dtype_name(tensor),  # type: ignore[arg-type]  # validated at run time
                shape=list(tensor.shape),
                nbytes=tensor.nbytes,
                sha256=digests[name],
                space=space,
                units=units,
            )
        )
    dataset = checkpoint.dataset
    return Manifest.model_construct(
        format=FORMAT,
        format_version=list(FORMAT_VERSION),
        min_reader=list(FORMAT_VERSION),
        requires=_features(checkpoint, tensors),
        writer=writer_info(),
        sh_basis="real, INRIA signs",
        tensors=specs,
        config=checkpoint.config.model_dump(mode="json"),
        cameras=[_camera_spec(camera) for camera in checkpoint.cameras],
        train_views=[int(i) for i in checkpoint.train],
        test_views=[int(i) for i in checkpoint.test],
        dataset=DatasetSpec.model_construct(
            root=dataset.root,
            kind=dataset.kind,
            extent=float(dataset.extent),
            fingerprint=dict(dataset.fingerprint),
            offset=[float(value) for value in dataset.offset],
            clearances=[float(value) for value in dataset.clearances],
            place=None if dataset.place is None else [float(value) for value in dataset.place],
        ),
        train=TrainSpec.model_construct(
            step=int(checkpoint.step),
            adam_step=int(checkpoint.adam_step),
            active_sh_degree=int(checkpoint.active_sh_degree),
            strategy={k: v for k, v in checkpoint.strategy.items() if not isinstance(v, Tensor)},
            sampler={key: int(value) for key, value in checkpoint.sampler.items()},
            skipped=[int(row) for row in checkpoint.skipped],
            comparisons=int(checkpoint.comparisons),
            loss=checkpoint.loss,
        ),
    )


def unpack(manifest: Manifest, tensors: dict[str, Tensor], where: object) -> Checkpoint:
    """Return the Checkpoint of a checked manifest and checked tensors; the tensors are not copied.

    Raises ModelFileError when settings or cameras contradict each other or the tensors.
    """
    gaussians = Gaussians(**{group: _group_shape(group, tensors[name]) for group, name in STORED_NAMES.items()})
    cameras = [_camera(spec) for spec in manifest.cameras]
    for name, views in (("train_views", manifest.train_views), ("test_views", manifest.test_views)):
        if any(not 0 <= index < len(cameras) for index in views):
            raise ModelFileError(f"{name}: a view index is outside the {len(cameras)} cameras", where=where)
    if any(row >= len(manifest.train_views) for row in manifest.train.skipped):
        raise ModelFileError(
            f"train.skipped names a row that is not among the {len(manifest.train_views)} training views", where=where
        )
    if len(manifest.dataset.clearances) not in (0, len(manifest.train_views)):
        raise ModelFileError(
            f"dataset.clearances has {len(manifest.dataset.clearances)} numbers for {len(manifest.train_views)} "
            "training views",
            where=where,
        )
    if manifest.train.active_sh_degree > gaussians.sh_degree:
        raise ModelFileError(
            f"SH degree {manifest.train.active_sh_degree} is in use, but the tensors have room for "
            f"{gaussians.sh_degree}",
            where=where,
        )
    strategy: dict[str, Tensor | Scalar] = dict(manifest.train.strategy)
    strategy.update(_under("strategy.", tensors))
    return Checkpoint(
        step=manifest.train.step,
        gaussians=gaussians,
        moments=_moments(manifest, gaussians, tensors),
        adam_step=manifest.train.adam_step,
        sh_last_step=_sh_last_step(manifest, tensors, where),
        active_sh_degree=manifest.train.active_sh_degree,
        strategy=strategy,
        rng=_under("rng.", tensors),
        sampler=dict(manifest.train.sampler),
        skipped=tuple(manifest.train.skipped),
        comparisons=manifest.train.comparisons,
        config=_config(manifest, where),
        cameras=cameras,
        train=list(manifest.train_views),
        test=list(manifest.test_views),
        views=_views(manifest, cameras, tensors, where),
        columns=RenderColumns(
            filter_3d=_column(FILTER_3D, tensors, where),
            effective_views=_column(EFFECTIVE_VIEWS, tensors, where),
            sh_change=tensors.get(SH_CHANGE),
        ),
        dataset=DatasetInfo(
            **{
                **manifest.dataset.model_dump(),
                "offset": tuple(manifest.dataset.offset),
                "clearances": tuple(manifest.dataset.clearances),
                "place": None if manifest.dataset.place is None else tuple(manifest.dataset.place),
            }
        ),
        loss=manifest.train.loss,
        writer=dict(manifest.writer),
    )


def _stored_shape(group: str, tensor: Tensor) -> Tensor:
    """Return a tensor in INRIA's shape: [N, 1, 3] for the constant SH coefficient, [N, 1] for the opacity."""
    return tensor.unsqueeze(1) if group in ("sh0", "logit_opacities") else tensor


def _group_shape(group: str, tensor: Tensor) -> Tensor:
    return tensor.squeeze(1) if group in ("sh0", "logit_opacities") else tensor


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _at_the_start(checkpoint: Checkpoint) -> bool:
    """Return whether the optimiser has made no step; then its moments are zeros and follow from the parameters."""
    return (
        checkpoint.adam_step == 0
        and checkpoint.sh_last_step is not None
        and not any(tensor.any() for pair in (checkpoint.moments or {}).values() for tensor in pair)
    )


def _moments(
    manifest: Manifest, gaussians: Gaussians, tensors: dict[str, Tensor]
) -> dict[str, tuple[Tensor, Tensor]] | None:
    stored = MOMENT_PREFIXES[0] + STORED_NAMES["means"] in tensors
    if not stored and (manifest.train.adam_step > 0 or SH_LAST_STEP not in tensors):
        return None
    pairs = {}
    for group, parameter in gaussians.items():
        names = [prefix + STORED_NAMES[group] for prefix in MOMENT_PREFIXES]
        first, second = (_group_shape(group, tensors[name]) if stored else _zeros(parameter) for name in names)
        pairs[group] = (first, second)
    return pairs


def _zeros(tensor: Tensor) -> Tensor:
    """Return zeros like ``tensor``, which take memory only once they are written to."""
    return torch.from_numpy(np.zeros(tuple(tensor.shape), dtype=np.float32))


def _sh_last_step(manifest: Manifest, tensors: dict[str, Tensor], where: object) -> Tensor | None:
    steps = tensors.get(SH_LAST_STEP)
    if steps is not None and len(steps) and not 0 <= int(steps.min()) <= int(steps.max()) <= manifest.train.adam_step:
        raise ModelFileError(
            f"{SH_LAST_STEP} goes from {int(steps.min())} to {int(steps.max())}, beyond the optimiser's "
            f"{manifest.train.adam_step} steps",
            where=where,
        )
    return steps


def _column(name: str, tensors: dict[str, Tensor], where: object) -> Tensor | None:
    """Return one of COLUMNS."""
    values = tensors.get(name)
    if values is not None and bool((values < 0.0).any()):
        raise ModelFileError(f"{name} holds numbers below zero, the least is {float(values.min()):g}", where=where)
    return values


def _views(manifest: Manifest, cameras: list[Camera], tensors: dict[str, Tensor], where: object) -> dict[str, Tensor]:
    views = _under(VIEW_PREFIX, tensors)
    lenses = len(set(lens_rows([cameras[i] for i in manifest.train_views])))
    for name, tensor in views.items():
        of_camera = name.partition(".")[0] in CAMERA_TABLES
        rows = lenses if of_camera else len(manifest.train_views)
        if len(tensor) != rows:
            raise ModelFileError(
                f"{VIEW_PREFIX}{name} has {len(tensor)} rows for {rows} training {'cameras' if of_camera else 'views'}",
                where=where,
            )
        if name.endswith(".steps") and len(tensor) and not 0 <= int(tensor.min()) <= int(tensor.max()) <= 2**53:
            raise ModelFileError(f"{VIEW_PREFIX}{name} holds counts below zero or beyond reason", where=where)
    return views


def _config(manifest: Manifest, where: object) -> Config:
    try:
        return parse_config(manifest.config)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {fault(e)}" for e in error.errors())
        raise ModelFileError(f"the settings stored inside are not valid: {problems}", where=where) from None


def _features(checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> list[str]:
    """Return ``requires``, the features that a reader has to know."""
    features = [name for name in (*COLUMNS, SH_CHANGE) if name in tensors]
    return features + [CAMERA_MODEL] * any(camera.model != "pinhole" for camera in checkpoint.cameras)


def _camera_spec(camera: Camera) -> CameraSpec:
    if camera.model == "ortho":
        raise UsageError(f"a checkpoint has pinholes and fisheyes, and {camera.name!r} is orthographic")
    return CameraSpec.model_construct(
        name=camera.name,
        width=int(camera.width),
        height=int(camera.height),
        fx=float(camera.fx),
        fy=float(camera.fy),
        cx=float(camera.cx),
        cy=float(camera.cy),
        viewmat=cast(list[list[float]], np.asarray(camera.viewmat, dtype=np.float64).tolist()),
        near=float(camera.near),
        model=camera.model,
    )


def _camera(spec: CameraSpec) -> Camera:
    fields = spec.model_dump()
    fields["viewmat"] = np.array(spec.viewmat, dtype=np.float64)
    return Camera(**fields)


#: Bytes for the zip's own records and the alignment of members, beside 2 percent of the content.
_MARGIN = 1 << 20

#: Columns that only the last checkpoint of a run has, one of them.
_FINISHED = frozenset((EFFECTIVE_VIEWS, SH_CHANGE))

#: The matrix and the lens of one camera as JSON: 20 doubles of at most 25 characters, and the keys.
_CAMERA_JSON = 700


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint to ``path``; when this returns it is complete, verified and on the disk.

    Raises DivergedError when a value is not finite or the parameters are not raw any more, OutputError when it
    cannot be written; in both cases the file that was there is untouched. load_checkpoint() makes the same checks.
    """
    tensors = pack_tensors(checkpoint)
    problems = name_problems(list(tensors))
    problems = problems or shape_problems(tensors)
    if problems:
        raise SplatError(problem_list("this state is not a checkpoint", problems), where=path)
    _check_finite(tensors, path)
    if (fault := checkpoint_space_problem(checkpoint.gaussians, checkpoint.config)) is not None:
        raise DivergedError(f"not written: {fault}", where=path)
    text = _manifest_text(checkpoint, tensors, path)
    stored: dict[str, Tensor | str] = {
        MANIFEST_KEY: text,
        DIGEST_KEY: hashlib.sha256(text.encode()).hexdigest(),
        **tensors,
    }

    def write(file: BinaryIO) -> None:
        torch.save(stored, file)

    write_atomically(
        path,
        write,
        what="checkpoint",
        reserve=_file_size(sum(tensor.nbytes + 512 for tensor in tensors.values()) + len(text.encode())),
        verify=lambda temporary: read_container(temporary, mmap=True),
    )


def checkpoint_bytes(checkpoint: Checkpoint, count: int | None = None) -> int:
    """Return the most bytes that the file of ``checkpoint`` takes; with ``count``, as if it had that many Gaussians."""
    per_row = sum(tensor[:1].nbytes for _, tensor in checkpoint.gaussians.items())
    rows = 3 * per_row if checkpoint.moments is not None else per_row
    rows += 0 if checkpoint.sh_last_step is None else checkpoint.sh_last_step[:1].nbytes
    columns = checkpoint.columns.present()
    rows += sum(column[:1].nbytes for column in columns.values())
    train, coefficients = checkpoint.config.train, 1 + checkpoint.gaussians.shN.shape[1]
    if train.sh_views > 0.0 and checkpoint.gaussians.sh_degree >= 3 and not columns.keys() & _FINISHED:
        rows += 12 * coefficients if train.sh_prior else 4  # the last checkpoint of the run has them
    rows += sum(v[:1].nbytes for v in checkpoint.strategy.values() if isinstance(v, Tensor))
    fixed = sum(state.nbytes for states in (checkpoint.rng, checkpoint.views) for state in states.values())
    cameras = sum(_CAMERA_JSON + len(camera.name.encode()) for camera in checkpoint.cameras)
    return _file_size(rows * (len(checkpoint.gaussians) if count is None else count) + fixed + cameras)


def _file_size(content: int) -> int:
    return content + content // 50 + _MARGIN


def _check_finite(tensors: dict[str, Tensor], path: Path) -> None:
    for name, tensor in tensors.items():
        if (found := nonfinite(tensor)) is not None:
            count, index = found
            raise DivergedError(
                f"not written: {name} has {count} NaN or infinite values, the first at {list(index)}",
                where=path,
                remedy="splat resume the last checkpoint, perhaps with a smaller learning rate",
            )


def _manifest_text(checkpoint: Checkpoint, tensors: dict[str, Tensor], path: Path) -> str:
    """Return the manifest as JSON, after reading it back: a state that cannot be loaded must not be written."""
    manifest = build_manifest(checkpoint, tensors)
    if (bad := nonfinite_path(manifest.model_dump(mode="python"))) is not None:
        raise DivergedError(f"not written: {bad} is NaN or infinite", where=path)
    text = manifest.to_text()
    try:
        unpack(parse_manifest(text, path), tensors, path)
    except ModelFileError as error:
        raise SplatError(f"this state is not a checkpoint: {error.what}", where=path) from None
    return text


def load_checkpoint(path: Path, *, mapped: bool = False) -> Checkpoint:
    """Return the state stored in a checkpoint file, tensors on the CPU.

    mapped: tensors are memory-mapped; the file must not be truncated meanwhile.

    Order: the zip, the pickle's imports, the manifest and its digest, the version, names, dtypes, shapes, storage,
    the sha256 of every tensor, finite values, the parameters' space, settings and cameras.
    Raises ModelFileError (damaged, changed, hostile, or another kind of file) or VersionError.
    """
    container = read_container(path, mmap=mapped)
    for name, tensor in container.tensors.items():
        if (found := nonfinite(tensor)) is not None:
            count, index = found
            raise ModelFileError(f"{name} has {count} NaN or infinite values, the first at {list(index)}", where=path)
    checkpoint = unpack(container.manifest, container.tensors, path)
    if (fault := checkpoint_space_problem(checkpoint.gaussians, checkpoint.config)) is not None:
        if fault.startswith("scales"):
            gaussians = checkpoint.gaussians
            fault += f"; {activation_cost(gaussians.means.numpy(), gaussians.log_scales.numpy(), checkpoint.cameras)}"
        raise ModelFileError(
            fault, where=path, remedy="write the file again from the raw parameters; splatcli's own files hold those"
        )
    return checkpoint
