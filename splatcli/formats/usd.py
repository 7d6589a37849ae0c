"""OpenUSD's ParticleField3DGaussianSplat in a ``.usdz``, for Omniverse, Houdini and the like; written by usd-core.

USD has y up here, so the Gaussians are turned by half a turn about z, as in glTF; usd_read turns them back.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from splatcli.errors import OutputError, ResourceError
from splatcli.formats.quantisation import (
    Columns,
    Doubles,
    Encoded,
    ExportMetadata,
    columns_of,
    opacities_of,
    scales_of,
    unit_quats,
)
from splatcli.formats.transform import half_turn
from splatcli.formats.usd_stage import library
from splatcli.gaussians import Gaussians

#: Gaussians are drawn up to so many standard deviations, which is their extent.
_DRAWN = 3.0
_PRIM = "/gaussians"


def encode_usdz(gaussians: Gaussians, told: ExportMetadata) -> Encoded:
    """The Gaussians as a packed stage, one unit of the scene a metre.

    Raises DivergedError for values that are not finite, ResourceError without usd-core, OutputError when it fails.
    """
    usd = _library()
    columns = half_turn(columns_of(gaussians))
    with tempfile.TemporaryDirectory(prefix="splat-usd-") as name:
        folder = Path(name)
        stage = usd.Usd.Stage.CreateNew(str(folder / "scene.usdc"))
        usd.UsdGeom.SetStageUpAxis(stage, usd.UsdGeom.Tokens.y)
        usd.UsdGeom.SetStageMetersPerUnit(stage, 1.0)
        if told.comments:
            stage.SetMetadata("comment", "\n".join(told.comments))
        field = usd.UsdVol.ParticleField3DGaussianSplat.Define(stage, _PRIM)
        _fill(field, columns, gaussians.sh_degree, usd.Vt)
        stage.SetDefaultPrim(field.GetPrim())
        stage.Save()
        del field, stage
        packed = folder / "scene.usdz"
        if not usd.UsdUtils.CreateNewUsdzPackage(str(folder / "scene.usdc"), str(packed)):
            raise OutputError("usd-core could not pack the stage", where=folder)
        payload = packed.read_bytes()
    note = "trained antialiased; USD has no word for it, and viewers show it too thick"
    return Encoded(payload, [note] if told.antialiased else [])


def _fill(field: Any, columns: Columns, degree: int, vt: Any) -> None:
    """The attributes of the schema; all floats, for readers prefer them to halves."""
    scales = scales_of(columns.log_scales)
    quats = unit_quats(columns.quats)
    harmonics = np.concatenate([columns.sh0[:, None], columns.shN], axis=1).reshape(-1, 3)
    field.CreatePositionsAttr(vt.Vec3fArray.FromNumpy(columns.means))
    field.CreateScalesAttr(vt.Vec3fArray.FromNumpy(scales.astype(np.float32)))
    # In memory the real part of a quaternion of USD comes last.
    xyzw = np.ascontiguousarray(quats[:, [1, 2, 3, 0]].astype(np.float32))
    field.CreateOrientationsAttr(vt.QuatfArray.FromNumpy(xyzw))
    field.CreateOpacitiesAttr(vt.FloatArray.FromNumpy(opacities_of(columns.logit_opacities).astype(np.float32)))
    field.CreateRadianceSphericalHarmonicsDegreeAttr(degree)
    field.CreateRadianceSphericalHarmonicsCoefficientsAttr(vt.Vec3fArray.FromNumpy(np.ascontiguousarray(harmonics)))
    field.CreateExtentAttr(vt.Vec3fArray.FromNumpy(_extent(columns.means.astype(np.float64), scales)))


def _extent(means: Doubles, scales: Doubles) -> Any:
    """[2, 3] float32: the corners of a box around what is drawn of every Gaussian, whatever its rotation."""
    reach = _DRAWN * scales.max(axis=1, keepdims=True)
    return np.stack([(means - reach).min(axis=0), (means + reach).max(axis=0)]).astype(np.float32)


def _library() -> Any:
    """usd-core. Raises ResourceError without it."""
    try:
        return library()
    except ImportError as error:
        raise ResourceError(str(error), remedy="pip install 'splatcli[usd]', or write a .glb") from None
