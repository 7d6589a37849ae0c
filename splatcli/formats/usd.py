"""OpenUSD's ParticleField3DGaussianSplat in a ``.usdz``, for Omniverse, Houdini and the like; written by usd-core.

USD has y up here, so the Gaussians are turned by half a turn about z, as in glTF, and turned back when they are read;
those of a georeferenced scene, with z up, by a quarter turn about x.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from splatcli.checkpoint.foreign.imported import Columns, Floats, ImportedModel
from splatcli.errors import ModelFileError, OutputError, ResourceError
from splatcli.formats.format import COLOUR_SPACE, Encoded, ExportMetadata, Format, file_size, first_member
from splatcli.formats.quantisation import (
    FLOAT_STEP,
    Doubles,
    beyond_row,
    log_scales_of,
    logits_of,
    negative_row,
    opacities_of,
    scales_of,
    unit_quats,
)
from splatcli.formats.transform import Z_TO_Y_UP, half_turn, placed, with_y_up
from splatcli.formats.usd_stage import library
from splatcli.gaussians import SHN_COUNTS, Gaussians

#: Gaussians are drawn up to so many standard deviations, which is their extent.
_DRAWN = 3.0
_PRIM = "/gaussians"
#: Names of the colour space of photos: that of NVIDIA's programs and glTF, and USD's own for the same curve and
#: primaries.
_SAME_SPACES = (COLOUR_SPACE, "srgb_rec709_scene", "sRGB")


def encode_usdz(gaussians: Gaussians, metadata: ExportMetadata) -> Encoded:
    """Return the Gaussians as a packed stage, one unit of the scene a metre.

    Raises DivergedError for values that are not finite, ResourceError without usd-core, OutputError when it fails.
    """
    usd = _library()
    columns = with_y_up(Columns.of(gaussians), z_up=metadata.z_up)
    with tempfile.TemporaryDirectory(prefix="splat-usd-") as name:
        folder = Path(name)
        stage = usd.Usd.Stage.CreateNew(str(folder / "scene.usdc"))
        usd.UsdGeom.SetStageUpAxis(stage, usd.UsdGeom.Tokens.y)
        usd.UsdGeom.SetStageMetersPerUnit(stage, 1.0)
        if metadata.comments:
            stage.SetMetadata("comment", "\n".join(metadata.comments))
        field = usd.UsdVol.ParticleField3DGaussianSplat.Define(stage, _PRIM)
        _fill(field, columns, gaussians.sh_degree, usd.Vt)
        usd.Usd.ColorSpaceAPI.Apply(field.GetPrim()).CreateColorSpaceNameAttr(COLOUR_SPACE)
        stage.SetDefaultPrim(field.GetPrim())
        stage.Save()
        del field, stage
        packed = folder / "scene.usdz"
        if not usd.UsdUtils.CreateNewUsdzPackage(str(folder / "scene.usdc"), str(packed)):
            raise OutputError("usd-core could not pack the stage", where=folder)
        payload = packed.read_bytes()
    return Encoded(payload, metadata.antialiased_notes("USD"))


def _fill(field: Any, columns: Columns[Floats], degree: int, vt: Any) -> None:
    """Write the attributes of the schema; all floats, for readers prefer them to halves."""
    scales = scales_of(columns.scales)
    quats = unit_quats(columns.quats)
    harmonics = np.concatenate([columns.sh0[:, None], columns.shN], axis=1).reshape(-1, 3)
    field.CreatePositionsAttr(vt.Vec3fArray.FromNumpy(columns.means))
    field.CreateScalesAttr(vt.Vec3fArray.FromNumpy(scales.astype(np.float32)))
    # In memory the real part of a quaternion of USD comes last.
    xyzw = np.ascontiguousarray(quats[:, [1, 2, 3, 0]].astype(np.float32))
    field.CreateOrientationsAttr(vt.QuatfArray.FromNumpy(xyzw))
    field.CreateOpacitiesAttr(vt.FloatArray.FromNumpy(opacities_of(columns.opacities).astype(np.float32)))
    field.CreateRadianceSphericalHarmonicsDegreeAttr(degree)
    coefficients = vt.Vec3fArray.FromNumpy(np.ascontiguousarray(harmonics))
    # Of one Gaussian; programs divide the array by it.
    field.CreateRadianceSphericalHarmonicsCoefficientsAttr(coefficients).SetMetadata("elementSize", (degree + 1) ** 2)
    field.CreateExtentAttr(vt.Vec3fArray.FromNumpy(_extent(columns.means.astype(np.float64), scales)))


def _extent(means: Doubles, scales: Doubles) -> Any:
    """Return [2, 3] float32: the corners of a box around what is drawn of every Gaussian, whatever its rotation."""
    reach, most = _DRAWN * scales.max(axis=1, keepdims=True), np.finfo(np.float32).max
    corners = np.stack([(means - reach).min(axis=0), (means + reach).max(axis=0)])
    return np.clip(corners, -most, most).astype(np.float32)


def _library() -> Any:
    """Return usd-core. Raises ResourceError without it."""
    try:
        return library()
    except ImportError as error:
        raise ResourceError(str(error), remedy="pip install 'splatcli[usd]', or write a .glb") from None


# --- reading: usd_stage.py opens the stage in a process of its own
#
# The stage's up axis, and transforms of prims that rotate, move and scale evenly, are applied, harmonics included.

#: usd-core recognises files by their names; of any other name, this one takes text and binary.
_SUFFIXES = (".usdz", ".usd", ".usda", ".usdc")
#: Opacities in halves are as fine as this near 1.
_HALF_STEP = 2.0**-10
#: Threads reserve address space, which is limited there; a machine with many cores would use it up.
_ONE_THREAD = dict.fromkeys(("PXR_WORK_THREAD_LIMIT", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


def import_usd(path: Path, *, lenient: bool = False) -> ImportedModel:
    """Return the only Gaussians of a stage, in the frame of a PLY.

    Raises ModelFileError; ResourceError without usd-core.
    """
    size = file_size(path)
    with tempfile.TemporaryDirectory(prefix="splat-usd-") as name:
        place = path.resolve()
        if path.suffix.lower() not in _SUFFIXES or not _is_utf8(place):
            with path.open("rb") as file:
                suffix = ".usdz" if file.read(2) == b"PK" else ".usd"
            place = Path(name) / f"stage{suffix}"
            place.symlink_to(path.resolve())
        out = Path(name) / "tables.npz"
        facts = _opened(place, out, size, path)
        with np.load(out, allow_pickle=False) as archive:
            tables = {key: archive[key] for key in archive.files}
    count, harmonics = len(tables["means"]), tables.pop("harmonics")
    degree = next((d for d, shN_count in enumerate(SHN_COUNTS) if len(harmonics) == count * (shN_count + 1)), None)
    if not count or degree is None or degree != facts["degree"]:
        raise ModelFileError(
            f"{len(harmonics):,} harmonics of degree {facts['degree']} for {count:,} Gaussians do not go together",
            where=path,
        )
    for key, table in tables.items():
        if len(table) != count:
            raise ModelFileError(f"{len(table):,} rows of {key}; there are {count:,} positions", where=path)
    if (row := negative_row(tables["scales"])) is not None:
        raise ModelFileError(f"a standard deviation below 0 in row {row} of scales", where=path)
    if (row := beyond_row(tables["opacities"][:, 0])) is not None:
        raise ModelFileError(f"an opacity outside 0 to 1 in row {row} of opacities", where=path)
    coefficients = harmonics.reshape(count, -1, 3)
    step = _HALF_STEP if "opacities" in facts["half"] else FLOAT_STEP
    columns = Columns(
        tables["means"],
        tables["quats"][:, [3, 0, 1, 2]],
        log_scales_of(tables["scales"]).astype(np.float32),
        logits_of(tables["opacities"][:, 0], step).astype(np.float32),
        coefficients[:, 0],
        coefficients[:, 1:],
    )
    with np.errstate(all="ignore"):  # NaN are refused later, with their place
        turned = half_turn(_placed(columns, facts, path))
    notes = []
    if (space := facts["colour_space"]) not in (None, *_SAME_SPACES):
        notes.append(f"its colour space is {space[:40]!r}; it is taken for {COLOUR_SPACE}")
    return ImportedModel(
        "USD",
        Columns.tensors(**turned._asdict()),
        declared=True,
        sealed=True,
        notes=notes,
    )


def _is_utf8(path: Path) -> bool:
    """Return whether OpenUSD can take the path: it knows UTF-8 only."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def _placed(columns: Columns[Floats], facts: dict[str, Any], path: Path) -> Columns[Floats]:
    """Return the Gaussians where the stage shows them, with y up."""
    matrix = np.array(facts["matrix"])
    if facts["up"] not in ("Y", "Z"):
        raise ModelFileError(f"the stage's up axis is {facts['up'][:20]!r}; Y and Z are known", where=path)
    if facts["up"] == "Z":
        matrix = Z_TO_Y_UP @ matrix
    return placed(columns, matrix, path)


def _opened(place: Path, out: Path, size: int, path: Path) -> dict[str, Any]:
    """Return the facts of a stage, its arrays being in ``out`` then."""
    package = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    worker = subprocess.run(
        [sys.executable, "-m", "splatcli.formats.usd_stage", str(place), str(out), str(size)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": paths, **_ONE_THREAD},
        check=False,
    )
    try:
        reply: dict[str, Any] = json.loads(worker.stdout)
    except ValueError:
        code = worker.returncode
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        raise ModelFileError(f"usd-core ended {how} while it read this", where=path) from None
    if "missing" in reply:
        raise ResourceError(
            reply["missing"], where=path, remedy="pip install 'splatcli[usd]'; or export it as a PLY or .glb elsewhere"
        )
    if "refused" in reply:
        remedy = reply.get("remedy")
        raise ModelFileError(reply["refused"].replace(str(place), path.name), where=path, remedy=remedy)
    facts: dict[str, Any] = reply["facts"]
    return facts


def is_usdz(head: bytes) -> bool:
    """Return whether a file begins as a packed stage does."""
    return first_member(head).endswith((".usdc", ".usda", ".usd"))


def is_stage(head: bytes) -> bool:
    """Return whether a file begins as a stage does, in text or in binary."""
    return head.startswith((b"#usda ", b"PXR-USDC"))


FORMAT = Format("usdz", ".usdz", "a packed USD stage", 3, encode_usdz, import_usd, is_usdz, has_comments=True)
FORMAT_STAGE = Format("usd", ".usd", "a USD stage", 3, read=import_usd, recognises=is_stage)
