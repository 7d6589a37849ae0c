"""The checkpoint's manifest: which tensors a file holds, in which space, and every number beside them.

The manifest is JSON text inside the file. Doubles survive JSON exactly (shortest representation that reads back
to the same bits), so cameras and learning state are stored as plain numbers.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Final, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from torch import Tensor

from splatcli import __version__, machine
from splatcli.config import fault
from splatcli.errors import ModelFileError, VersionError
from splatcli.native.backend import chosen_isa
from splatcli.scene.camera import NEAR
from splatcli.sizes import listed

FORMAT: Final = "splatcli-checkpoint"
#: [major, minor] of the format written here. A reader takes a file when the major number is its own and the
#: file's min_reader is not above its own version.
FORMAT_VERSION = (1, 1)

#: Stored name of each parameter group; the names are INRIA's, which everyone knows to hold raw values.
STORED_NAMES = {
    "means": "_xyz",
    "quats": "_rotation",
    "log_scales": "_scaling",
    "logit_opacities": "_opacity",
    "sh0": "_features_dc",
    "shN": "_features_rest",
}

#: Stored name -> (space, units). No activated space exists.
PARAMETER_SPACES = {
    "_xyz": ("world", "scene units"),
    "_rotation": ("raw_quat_wxyz", "1"),
    "_scaling": ("log", "ln(scene units)"),
    "_opacity": ("logit", "1"),
    "_features_dc": ("sh_dc", "1"),
    "_features_rest": ("sh_rest", "1"),
}

#: Prefixes of the names of Adam's first and second moments.
MOMENT_PREFIXES = ("adam.exp_avg.", "adam.exp_avg_sq.")

#: [N] int32, the last step in which Adam updated _features_rest and its moments (see AdamState); new in format 1.1.
#: Without it that is the optimiser's step for all.
SH_LAST_STEP = "adam.rest_steps"

#: [N] float32, sizes of the 3D filter (rasterizer/filter_3d.py): images differ without them, so a file with them
#: requires a reader that knows them.
FILTER_3D = "filter_3d"

#: [N] float32, the effective number of training views that show each Gaussian (train/view_dependence.py): they damp its
#: view-dependent colour, so a file with them requires a reader that knows them.
EFFECTIVE_VIEWS = "effective_views"

#: Columns of the Gaussians beside their parameters, each float32 [N] and not below zero.
COLUMNS = (FILTER_3D, EFFECTIVE_VIEWS)

#: [N, 1 + K, 3] float32, what a finished run adds to _features_dc and _features_rest (train/view_dependence.py), in
#: place of EFFECTIVE_VIEWS; a file with it requires a reader that knows it.
SH_CHANGE = "sh_change"

#: The file has cameras that are no pinholes: a reader that took them for some would render something else.
CAMERA_MODEL = "camera_model"

#: Entries of ``requires`` that this version understands.
KNOWN_FEATURES = (*COLUMNS, SH_CHANGE, CAMERA_MODEL)

#: Per-view parameters and the shape of a view's row (train/per_view_params.py): the change of a camera's pose, and an
#: affine map of colours, or a grid of such maps, or PPISP's numbers of the view. Those that PPISP has for a camera, in
#: CAMERA_TABLES, have a row for each different intrinsics of the training cameras. The state of each table's Adam lies
#: beside it, see VIEW_PARTS.
VIEW_TABLES: dict[str, tuple[int, ...]] = {
    "pose": (6,),
    "exposure": (3, 4),
    "bilateral_grid": (12, 8, 16, 16),
    "ppisp": (9,),
    "ppisp_camera": (27,),
}
CAMERA_TABLES = ("ppisp_camera",)

#: The dtype of a table: double precision, except for the large one.
VIEW_DTYPES = {name: torch.float32 if name == "bilateral_grid" else torch.float64 for name in VIEW_TABLES}

#: Stored with each table; "steps" is int64 [T], the others have the dtype of the table itself.
VIEW_PARTS = ("", ".exp_avg", ".exp_avg_sq", ".steps")

VIEW_PREFIX = "views."

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "bool": torch.bool,
}

#: Last parts of names that other programs give to activated tensors.
_ACTIVATED_NAME = re.compile(r"get_\w+|scales?|scaling|opacity|opacities|alphas?|rotations?|quats|covariances?|cov3d")

_FREE_NAME = re.compile(r"(strategy|rng)\.[A-Za-z0-9_][A-Za-z0-9_.]*")


class _Part(BaseModel):
    """Strict: a number is not accepted as a string nor a string as a number. Unknown keys are ignored,
    since a newer minor version may add optional ones; ``requires`` lists what a reader must understand."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


#: An integer of 64 bits; JSON has none.
_Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]

#: Largest number of steps or pixels: steps are stored in 32 bits beside the tensors.
MAX_COUNT = 2**31 - 1
#: A camera's matrix is singular when it shrinks one direction by more than this against another.
MIN_CONDITION = 1e-6


class TensorSpec(_Part):
    """The manifest's entry of a tensor; it is checked before the tensor is used."""

    name: str
    dtype: Literal["float32", "float64", "int32", "int64", "uint8", "bool"]
    shape: list[int] = Field(max_length=8)
    nbytes: int = Field(ge=0)
    #: Of the tensor's bytes, little-endian, row-major.
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    space: str
    units: str


class CameraSpec(_Part):
    """A Camera as JSON: pixels, and the 4x4 world-to-camera matrix in double precision."""

    name: str
    width: int = Field(gt=0, le=MAX_COUNT)
    height: int = Field(gt=0, le=MAX_COUNT)
    fx: float = Field(gt=0)
    fy: float = Field(gt=0)
    cx: float
    cy: float
    viewmat: list[list[float]] = Field(min_length=4, max_length=4)
    #: Optional: a reader without it renders Gaussians too that lie nearer.
    near: float = Field(default=NEAR, gt=0)
    #: Optional; a file with another one than the default requires CAMERA_MODEL.
    model: Literal["pinhole", "fisheye"] = "pinhole"

    @field_validator("viewmat")
    @classmethod
    def _is_a_motion(cls, rows: list[list[float]]) -> list[list[float]]:
        """Check that the matrix can be inverted and has the last row of a motion."""
        if any(len(row) != 4 for row in rows):
            raise ValueError("is not a 4x4 matrix")
        if max(map(abs, rows[3][:3])) > MIN_CONDITION or rows[3][3] <= 0.0:
            raise ValueError(f"has the last row {rows[3]}, not [0, 0, 0, 1]")
        turn = np.array([row[:3] for row in rows[:3]], dtype=np.float64)
        with np.errstate(all="ignore"):
            sizes = np.linalg.svd(turn, compute_uv=False)
            if not sizes[-1] > MIN_CONDITION * sizes[0]:
                raise ValueError("is singular")
        return rows


class DatasetSpec(_Part):
    """The scene of a run, see checkpoint/state.py DatasetInfo."""

    root: str
    kind: str
    extent: float
    fingerprint: dict[str, str | int]
    #: Optional: a reader without it renders the same image; only the coordinates differ from the input's.
    offset: list[float] = Field(default=[0.0, 0.0, 0.0], min_length=3, max_length=3)
    #: Optional: a run of a version without it goes on as it began.
    clearances: list[Annotated[float, Field(ge=0.0)]] = []
    #: Optional: a reader without it renders the same image; it does not know where on the Earth that is.
    place: list[float] | None = Field(default=None, min_length=3, max_length=3)


class TrainSpec(_Part):
    """The numbers of a run; its tensors are listed under ``tensors``."""

    step: int = Field(ge=0, le=MAX_COUNT)
    adam_step: int = Field(ge=0, le=MAX_COUNT)
    active_sh_degree: int = Field(ge=0, le=4)
    strategy: dict[str, bool | _Whole | float | str]
    sampler: dict[str, _Whole]
    #: Optional: rows of train_views that training leaves out; a reader without it renders the same images.
    skipped: list[Annotated[int, Field(ge=0)]] = []
    #: Optional: how many times the views were compared to find those.
    comparisons: int = Field(default=0, ge=0, le=MAX_COUNT)
    #: Optional: the name of the caller's loss function; a reader without it renders the same images.
    loss: str | None = None


class Manifest(_Part):
    """The JSON text of a checkpoint; train_views and test_views are indices into cameras."""

    format: Literal["splatcli-checkpoint"]
    format_version: list[int] = Field(min_length=2, max_length=2)
    min_reader: list[int] = Field(min_length=2, max_length=2)
    #: Features without which the file cannot be understood; this version has KNOWN_FEATURES.
    requires: list[str]
    writer: dict[str, str]
    sh_basis: Literal["real, INRIA signs"]
    tensors: list[TensorSpec]
    config: dict[str, Any]
    cameras: list[CameraSpec]
    train_views: list[int]
    test_views: list[int]
    dataset: DatasetSpec
    train: TrainSpec

    @field_validator("train_views", "test_views")
    @classmethod
    def _each_once(cls, views: list[int]) -> list[int]:
        if len(set(views)) < len(views):
            raise ValueError("names a view twice")
        return views

    def to_text(self) -> str:
        """Return the JSON to store. Raises ValueError when a number is not finite."""
        return json.dumps(self.model_dump(mode="python"), allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def writer_info() -> dict[str, str]:
    """Return the program that writes the file, for messages only. cpu_isa: instruction set of its CPU library."""
    return {"tool": "splatcli", "version": __version__, "torch": str(torch.__version__), "cpu_isa": chosen_isa()}


def parse_manifest(text: str, where: object) -> Manifest:
    """Return the manifest of JSON text.

    Raises VersionError when a newer splatcli wrote the file, ModelFileError when the manifest is not valid;
    every fault is listed, up to twenty.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"the manifest is not valid JSON ({error})", where=where) from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ModelFileError(f"the manifest does not say format = {FORMAT!r}", where=where)
    _check_version(data, where)
    try:
        return Manifest.model_validate(data)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc']))}: {fault(e)}" for e in error.errors()]
        raise ModelFileError(problem_list("the manifest is not valid", problems), where=where) from None


def _check_version(data: dict[str, Any], where: object) -> None:
    version, needed, requires = (data.get(key) for key in ("format_version", "min_reader", "requires"))
    for pair in (version, needed):
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(part) is int for part in pair)):
            raise ModelFileError("the manifest has no format_version and min_reader [major, minor]", where=where)
    assert isinstance(version, list)
    assert isinstance(needed, list)
    writer = data.get("writer")
    maker = f"splatcli {writer.get('version', '?')}" if isinstance(writer, dict) else "an unknown program"
    ours = "{}.{}".format(*FORMAT_VERSION)
    if version[0] != FORMAT_VERSION[0] or tuple(needed) > FORMAT_VERSION:
        theirs = "{}.{}".format(*version)
        raise VersionError(
            f"made by {maker} in format {theirs}; this is splatcli {__version__}, which reads format {ours}",
            where=where,
            remedy="pip install --upgrade splatcli" if tuple(version) > FORMAT_VERSION else f"use {maker}",
        )
    unknown = [name for name in requires if name not in KNOWN_FEATURES] if isinstance(requires, list) else requires
    if unknown:
        raise VersionError(
            f"made by {maker}; it needs {unknown!r}, which splatcli {__version__} does not know",
            where=where,
            remedy="pip install --upgrade splatcli",
        )


def space_of(name: str) -> tuple[str, str]:
    """Return (space, units) of the tensor of this name."""
    if name in PARAMETER_SPACES:
        return PARAMETER_SPACES[name]
    if name.startswith(MOMENT_PREFIXES):
        return ("gradient" if name.startswith(MOMENT_PREFIXES[0]) else "gradient_squared", "1")
    if name == FILTER_3D:
        return ("world", "scene units")
    if name.startswith(VIEW_PREFIX):
        table, _, part = name.removeprefix(VIEW_PREFIX).partition(".")
        units = {"pose": "radians, scene units"}.get(table, "1") if not part else "1"
        return (part or ("camera_motion" if table == "pose" else "colour_map"), units)
    return ("generator_state" if name.startswith("rng.") else "statistic", "1")


def name_problems(names: list[str]) -> list[str]:
    """Return the faults of a set of tensor names: missing, unknown, or the name of an activated tensor."""
    parameters = set(PARAMETER_SPACES)
    moments = {prefix + name for prefix in MOMENT_PREFIXES for name in parameters}
    present = set(names)
    problems = [f"{name} is listed twice" for name in sorted(present) if names.count(name) > 1]
    problems += [f"{name} is missing" for name in sorted(parameters - present)]
    if present & moments:
        problems += [f"{name} is missing" for name in sorted(moments - present)]
    tables = {VIEW_PREFIX + table: {VIEW_PREFIX + table + part for part in VIEW_PARTS} for table in VIEW_TABLES}
    for stored in tables.values():
        if present & stored:
            problems += [f"{name} is missing" for name in sorted(stored - present)]
    for name in sorted(present.difference(parameters, moments, {SH_LAST_STEP, SH_CHANGE, *COLUMNS}, *tables.values())):
        if _ACTIVATED_NAME.fullmatch(name.rsplit(".", 1)[-1]):
            problems.append(
                f"{name} names an activated tensor; checkpoints hold raw parameters only "
                "(_scaling is a logarithm, _opacity a logit), so that nothing is activated twice"
            )
        elif not _FREE_NAME.fullmatch(name):
            problems.append(f"{name} is not a tensor of this format")
    return problems


def shape_problems(tensors: dict[str, Tensor]) -> list[str]:
    """Return the faults of dtypes and shapes; all parameters have to be present."""
    count = tensors["_xyz"].shape[0] if tensors["_xyz"].dim() else -1
    shN = tensors["_features_rest"]
    shapes = {
        "_xyz": (count, 3),
        "_rotation": (count, 4),
        "_scaling": (count, 3),
        "_opacity": (count, 1),
        "_features_dc": (count, 1, 3),
        "_features_rest": (count, shN.shape[1] if shN.dim() == 3 else 0, 3),
    }
    problems = []
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES.values():
            problems.append(f"{name} is {dtype_name(tensor)}; only {', '.join(DTYPES)} are stored")
        base = name.removeprefix(MOMENT_PREFIXES[0]).removeprefix(MOMENT_PREFIXES[1])
        if base in shapes:
            if tensor.dtype != torch.float32:
                problems.append(f"{name} is {dtype_name(tensor)}, not float32")
            if tuple(tensor.shape) != shapes[base]:
                problems.append(f"{name} has shape {list(tensor.shape)}, not {list(shapes[base])}")
        elif name == SH_LAST_STEP and (tensor.dtype != torch.int32 or tuple(tensor.shape) != (count,)):
            problems.append(f"{name} is {dtype_name(tensor)} {list(tensor.shape)}, not int32 [{count}]")
        elif name in COLUMNS and (tensor.dtype != torch.float32 or tuple(tensor.shape) != (count,)):
            problems.append(f"{name} is {dtype_name(tensor)} {list(tensor.shape)}, not float32 [{count}]")
        elif name == SH_CHANGE:
            wanted = [count, 1 + shapes["_features_rest"][1], 3]
            if tensor.dtype != torch.float32 or list(tensor.shape) != wanted:
                problems.append(f"{name} is {dtype_name(tensor)} {list(tensor.shape)}, not float32 {wanted}")
        elif name.startswith(VIEW_PREFIX):
            problems += _view_problems(name, tensor, tensors)
        elif name.startswith("rng.") and (tensor.dtype != torch.uint8 or tensor.dim() != 1):
            problems.append(f"{name} is {dtype_name(tensor)} {list(tensor.shape)}, not a uint8 vector")
    if shN.dim() == 3 and shN.shape[1] not in (0, 3, 8, 15, 24):
        problems.append(f"_features_rest has {shN.shape[1]} coefficients, not 0, 3, 8, 15 or 24")
    return problems


def _view_problems(name: str, tensor: Tensor, tensors: dict[str, Tensor]) -> list[str]:
    """Return the faults of a tensor of a per-view table; all tensors of a table have the same number of rows."""
    table = name.removeprefix(VIEW_PREFIX).partition(".")[0]
    stem = tensors.get(VIEW_PREFIX + table)
    rows = len(stem) if stem is not None and stem.dim() else -1
    is_steps = name.endswith(".steps")
    shape = (rows,) if is_steps else (rows, *VIEW_TABLES[table])
    dtype = torch.int64 if is_steps else VIEW_DTYPES[table]
    if tensor.dtype == dtype and tuple(tensor.shape) == shape:
        return []
    expected = f"{str(dtype).removeprefix('torch.')} {list(shape)}"
    return [f"{name} is {dtype_name(tensor)} {list(tensor.shape)}, not {expected}"]


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype, as in DTYPES."""
    return str(tensor.dtype).removeprefix("torch.")


def digests_of(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Return name -> sha256 in hex of each contiguous CPU tensor's bytes, without a copy; several at a time."""

    def digest(tensor: Tensor) -> str:
        return hashlib.sha256(tensor.reshape(-1).numpy().view(np.uint8).data).hexdigest()  # releases the GIL

    with ThreadPoolExecutor(max_workers=min(8, machine.cores())) as pool:
        return dict(zip(tensors, pool.map(digest, tensors.values()), strict=True))


def nonfinite(tensor: Tensor) -> tuple[int, tuple[int, ...]] | None:
    """Return (number of NaN or infinite values, index of the first); None when all are finite."""
    if not tensor.is_floating_point():
        return None
    # A sum is several times faster, and NaN if a value is; but finite values may overflow it.
    if bool(torch.isfinite(tensor.sum())):
        return None
    bad = (~torch.isfinite(tensor)).nonzero()
    return (len(bad), tuple(bad[0].tolist())) if len(bad) else None


def nonfinite_path(value: object, path: str = "") -> str | None:
    """Return the dotted path of the first number in nested dicts and lists that JSON cannot hold; None without one."""
    if isinstance(value, float):
        return None if math.isfinite(value) else path
    if isinstance(value, dict):
        items = [(f"{path}.{key}" if path else str(key), item) for key, item in value.items()]
    elif isinstance(value, list):
        items = [(f"{path}[{i}]", item) for i, item in enumerate(value)]
    else:
        return None
    return next((found for key, item in items if (found := nonfinite_path(item, key)) is not None), None)


#: Problems that an error names.
_MAX_LISTED = 20


def problem_list(title: str, problems: list[str]) -> str:
    """Return ``title`` and the first problems on one line."""
    return f"{title}: {listed(problems, _MAX_LISTED, '; ')}"
