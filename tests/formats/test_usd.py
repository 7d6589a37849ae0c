"""USDZ: the schema's attributes hold what they should, as its own library reads them."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from splatcli.errors import ModelFileError, ResourceError
from splatcli.formats.registry import file_kind, read_stored
from splatcli.formats.turn import half_turn
from splatcli.formats.units import Told, columns_of
from splatcli.formats.usd import encode_usdz
from tests.formats.made import scene

NEEDS_USD = "usd-core is not installed (splatcli[usd])"


@pytest.mark.parametrize("degree", [0, 3])
def test_the_stage_holds_the_gaussians(degree: int, tmp_path: Path) -> None:
    pytest.importorskip("pxr", reason=NEEDS_USD)
    from pxr import Usd, UsdGeom, UsdVol

    gaussians = scene(40, degree)
    path = tmp_path / "a.usdz"
    path.write_bytes(encode_usdz(gaussians, Told(comments=["add 1 2 3"])).payload)
    stage = Usd.Stage.Open(str(path))
    assert UsdGeom.GetStageUpAxis(stage) == "Y"
    assert stage.GetMetadata("comment") == "add 1 2 3"
    field = UsdVol.ParticleField3DGaussianSplat(stage.GetDefaultPrim())
    expected = half_turn(columns_of(gaussians))
    np.testing.assert_array_equal(np.array(field.GetPositionsAttr().Get()), expected.means)
    np.testing.assert_allclose(np.array(field.GetScalesAttr().Get()), np.exp(expected.log_scales), rtol=1e-5)
    opacities = 1 / (1 + np.exp(-expected.logit_opacities.astype(float)))
    np.testing.assert_allclose(np.array(field.GetOpacitiesAttr().Get()), opacities, atol=1e-6)
    assert field.GetRadianceSphericalHarmonicsDegreeAttr().Get() == degree
    harmonics = np.array(field.GetRadianceSphericalHarmonicsCoefficientsAttr().Get()).reshape(40, (degree + 1) ** 2, 3)
    np.testing.assert_array_equal(harmonics[:, 0], expected.sh0)
    np.testing.assert_array_equal(harmonics[:, 1:], expected.shN)
    norm = np.linalg.norm(expected.quats, axis=1)
    for row, quat in enumerate(field.GetOrientationsAttr().Get()):
        found = np.array([quat.GetReal(), *quat.GetImaginary()])
        np.testing.assert_allclose(found, expected.quats[row] / norm[row], atol=1e-6)
    low, high = np.array(field.GetExtentAttr().Get())
    assert (low < expected.means.min(axis=0)).all()
    assert (high > expected.means.max(axis=0)).all()


def test_without_the_library_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def no_pxr(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "pxr":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_pxr)
    with pytest.raises(ResourceError, match="usd-core") as caught:
        encode_usdz(scene(3), Told())
    assert "splatcli[usd]" in str(caught.value.remedy)


@pytest.mark.parametrize(
    ("content", "kind"),
    [(b"PK\x03\x04" + bytes(22) + b"\x0a\0\0\0scene.usdc" + bytes(40), "usdz"), (b"<!doctype html>\n<html>", "html")],
)
def test_what_is_only_written_is_told_apart_and_refused(content: bytes, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    assert file_kind(path) == kind
    with pytest.raises(ModelFileError, match="written here and not read"):
        read_stored(path, kind)
