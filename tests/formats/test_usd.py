"""USDZ: the schema's attributes hold what they should, as its own library reads them."""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from splatcli.checkpoint.foreign.imported import Columns, ImportOptions, to_gaussians
from splatcli.errors import ModelFileError, ResourceError
from splatcli.formats.format import ExportMetadata
from splatcli.formats.registry import format_of, import_model
from splatcli.formats.transform import half_turn
from splatcli.formats.usd import encode_usdz
from splatcli.gaussians import Gaussians
from tests.formats.made import errors, scene

NEEDS_USD = "usd-core is not installed (splatcli[usd])"


@pytest.mark.parametrize("degree", [0, 3])
def test_the_stage_holds_the_gaussians(degree: int, tmp_path: Path) -> None:
    pytest.importorskip("pxr", reason=NEEDS_USD)
    from pxr import Usd, UsdGeom, UsdVol

    gaussians = scene(40, degree)
    path = tmp_path / "a.usdz"
    path.write_bytes(encode_usdz(gaussians, ExportMetadata(comments=["add 1 2 3"])).payload)
    stage = Usd.Stage.Open(str(path))
    assert UsdGeom.GetStageUpAxis(stage) == "Y"
    assert stage.GetMetadata("comment") == "add 1 2 3"
    field = UsdVol.ParticleField3DGaussianSplat(stage.GetDefaultPrim())
    expected = half_turn(Columns.of(gaussians))
    np.testing.assert_array_equal(np.array(field.GetPositionsAttr().Get()), expected.means)
    np.testing.assert_allclose(np.array(field.GetScalesAttr().Get()), np.exp(expected.scales), rtol=1e-5)
    opacities = 1 / (1 + np.exp(-expected.opacities.astype(float)))
    np.testing.assert_allclose(np.array(field.GetOpacitiesAttr().Get()), opacities, atol=1e-6)
    assert field.GetRadianceSphericalHarmonicsDegreeAttr().Get() == degree
    assert field.GetRadianceSphericalHarmonicsCoefficientsAttr().GetMetadata("elementSize") == (degree + 1) ** 2
    assert Usd.ColorSpaceAPI(field.GetPrim()).GetColorSpaceNameAttr().Get() == "srgb_rec709_display"
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


def test_the_extent_of_huge_gaussians_is_finite(tmp_path: Path) -> None:
    pytest.importorskip("pxr", reason=NEEDS_USD)
    from pxr import Usd, UsdVol

    gaussians = scene(40, 0)
    gaussians.log_scales[0] = 88.0
    path = tmp_path / "a.usdz"
    path.write_bytes(encode_usdz(gaussians, ExportMetadata()).payload)
    stage = Usd.Stage.Open(str(path))
    assert np.isfinite(
        np.array(UsdVol.ParticleField3DGaussianSplat(stage.GetDefaultPrim()).GetExtentAttr().Get())
    ).all()


def test_without_the_library_the_remedy_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def no_pxr(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "pxr":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_pxr)
    with pytest.raises(ResourceError, match="usd-core") as caught:
        encode_usdz(scene(3), ExportMetadata())
    assert "splatcli[usd]" in str(caught.value.remedy)


def stage_of(gaussians: Gaussians, path: Path, edit: Callable[[Any, Any], object] = lambda stage, field: None) -> Path:
    """What encode_usdz() writes, changed by ``edit``, in another of USD's formats."""
    packed = path.with_name("packed.usdz")
    packed.write_bytes(encode_usdz(gaussians, ExportMetadata()).payload)
    from pxr import Usd, UsdVol

    stage = Usd.Stage.Open(Usd.Stage.Open(str(packed)).Flatten())
    edit(stage, UsdVol.ParticleField3DGaussianSplat(stage.GetDefaultPrim()))
    stage.GetRootLayer().Export(str(path))
    return path


def load(path: Path) -> Gaussians:
    return to_gaussians(import_model(path), ImportOptions(), path)[0]


def check_same(before: Gaussians, after: Gaussians, **more: float) -> None:
    """Floats of activated values: logarithms lose the last bits, and opacities near 1 some more."""
    limits = {"means": 0.0, "quats": 1e-4, "log_scales": 2e-6, "opacities": 1e-6, "sh0": 0.0, "shN": 0.0, **more}
    for attribute, error in errors(before, after).items():
        assert error <= limits[attribute], (attribute, error)


@pytest.mark.parametrize(
    ("degree", "name"),
    [
        (0, "a.usdz"),
        (3, "a.usdz"),
        (2, "a.usda"),
        (3, "a.usdc"),
        (1, "a.bin"),
        pytest.param(1, os.fsdecode(b"a\xff.usdz"), id="not UTF-8"),
    ],
)
def test_what_is_written_comes_back(degree: int, name: str, tmp_path: Path) -> None:
    """Positions and harmonics bit for bit, in all formats of USD, whatever the file is called."""
    pytest.importorskip("pxr", reason=NEEDS_USD)
    before = scene(30, degree)
    path = tmp_path / name
    if name.endswith(".usdz"):
        path.write_bytes(encode_usdz(before, ExportMetadata()).payload)
    elif name.endswith(".bin"):
        stage_of(before, tmp_path / "x.usdc").rename(path)
    else:
        stage_of(before, path)
    assert format_of(path).name == ("usdz" if name.endswith("z") else "usd")
    after = load(path)
    assert after.sh_degree == degree
    check_same(before, after)


def test_transforms_of_prims_and_the_up_axis_are_applied(tmp_path: Path) -> None:
    pytest.importorskip("pxr", reason=NEEDS_USD)
    from pxr import Gf, UsdGeom

    def edit(stage: Any, field: Any) -> None:
        UsdGeom.SetStageUpAxis(stage, UsdGeom.Tokens.z)
        # A row vector times this is where USD puts a point.
        field.AddTransformOp().Set(Gf.Matrix4d(*[0, 2, 0, 0, 0, 0, 2, 0, 2, 0, 0, 0, 5, 6, 7, 1]))

    before = scene(20, 2)
    after = load(stage_of(before, tmp_path / "a.usdc", edit))
    x, y, z = (before.means * torch.tensor([-1.0, -1.0, 1.0])).unbind(1)  # as the file has them
    x, y, z = 2 * z + 5, 2 * x + 6, 2 * y + 7  # on the stage, z up
    wanted = torch.stack([-x, -z, -y], dim=1)  # half a turn of (x, z, -y), which has y up
    assert (after.means - wanted).abs().max() < 1e-5
    assert (after.log_scales - before.log_scales - np.log(2)).abs().max() < 1e-5
    assert (after.shN.norm(dim=1) - before.shN.norm(dim=1)).abs().max() < 1e-5
    assert (after.shN - before.shN).abs().max() > 0.05


def test_halves_are_read_where_there_are_no_floats(tmp_path: Path) -> None:
    pytest.importorskip("pxr", reason=NEEDS_USD)
    from pxr import Vt

    def edit(stage: Any, field: Any) -> None:
        opacities = np.array(field.GetOpacitiesAttr().Get()).astype(np.float16)
        opacities[0] = 1.0
        field.GetOpacitiesAttr().Clear()
        field.CreateOpacitieshAttr(Vt.HalfArray.FromNumpy(opacities))

    before = scene(20, 1)
    before.logit_opacities[0] = 30.0
    check_same(before, load(stage_of(before, tmp_path / "a.usdc", edit)), opacities=2.0**-11)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda stage, field: stage.RemovePrim("/gaussians"), "0 sets of Gaussians"),
        (lambda stage, field: field.GetPositionsAttr().Clear(), "has no positions"),
        (lambda stage, field: field.GetPositionsAttr().Set([(0, 0, 0)] * 3), "do not go together"),
        (lambda stage, field: field.GetScalesAttr().Set([(1, 1, 1)] * 3), "3 rows of scales; there are 5"),
        (lambda stage, field: field.GetScalesAttr().Set([(1, 1, -1)] * 5), "below 0 in row 0 of scales"),
        (lambda stage, field: field.GetOpacitiesAttr().Set([0, 1, 2.5, 1, 1]), "outside 0 to 1 in row 2 of opacities"),
        (lambda stage, field: field.GetRadianceSphericalHarmonicsDegreeAttr().Set(2), "of degree 2"),
        (lambda stage, field: field.AddScaleOp().Set((1, 2, 1)), "scales its axes differently"),
    ],
)
def test_a_stage_that_holds_no_gaussians_is_refused(edit: Any, said: str, tmp_path: Path) -> None:
    pytest.importorskip("pxr", reason=NEEDS_USD)
    path = stage_of(scene(5, 1), tmp_path / "a.usda", edit)
    with pytest.raises(ModelFileError) as caught:
        import_model(path)
    assert said in caught.value.what
    assert caught.value.where == str(path)
    assert ("export the Gaussians alone" in str(caught.value.remedy)) == said.startswith("0 sets")


@pytest.mark.parametrize(
    ("name", "above", "noted"),
    [
        ("srgb_rec709_display", False, False),
        ("srgb_rec709_scene", False, False),
        ("lin_rec709_scene", False, True),
        ("lin_rec709_scene", True, True),
    ],
)
def test_another_colour_space_of_a_stage_is_noted(name: str, above: bool, noted: bool, tmp_path: Path) -> None:
    """Of the Gaussians' prim, or of one above it, as 3DGRUT writes it for linear colours."""
    pytest.importorskip("pxr", reason=NEEDS_USD)
    from pxr import Sdf, Usd

    def edit(stage: Any, field: Any) -> None:
        prim = field.GetPrim()
        if above:
            prim.RemoveProperty("colorSpace:name")
            layer, prim = stage.GetRootLayer(), stage.DefinePrim("/World", "Xform")
            Sdf.CopySpec(layer, "/gaussians", layer, "/World/gaussians")
            stage.RemovePrim("/gaussians")
        Usd.ColorSpaceAPI.Apply(prim).CreateColorSpaceNameAttr(name)

    model = import_model(stage_of(scene(5, 1), tmp_path / "a.usda", edit))
    assert model.notes == [f"its colour space is '{name}'; it is taken for srgb_rec709_display"] * noted


def test_a_volume_of_nurec_is_named_with_what_converts_it(tmp_path: Path) -> None:
    """As NVIDIA's programs wrote Gaussians before the schema: a volume whose field is a file of their own."""
    pytest.importorskip("pxr", reason=NEEDS_USD)
    path = tmp_path / "a.usda"
    path.write_text(
        """#usda 1.0
def Xform "World"
{
    def Volume "gauss"
    {
        custom bool omni:nurec:isNuRecVolume = 1
        rel field:density = </World/gauss/density_field>
        def OmniNuRecFieldAsset "density_field"
        {
            custom asset filePath = @./gauss.nurec@
        }
    }
}
"""
    )
    with pytest.raises(ModelFileError, match="NuRec volume") as caught:
        import_model(path)
    assert caught.value.where == str(path)
    assert "3DGRUT converts such a file" in str(caught.value.remedy)


def test_a_damaged_stage_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pxr", reason=NEEDS_USD)
    whole = stage_of(scene(5, 1), tmp_path / "whole.usdc").read_bytes()
    for name, content in (
        ("cut.usdc", whole[: len(whole) // 2]),
        ("text.usda", b"#usda 1.0\ndef {{{"),
        ("bytes.usda", b"#usda 1.0\ndef \x82\x83 {{{"),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(ModelFileError, match="usd-core cannot read it"):
            import_model(path)


def test_reading_without_the_library_tells_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pxr.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    path = tmp_path / "a.usda"
    path.write_text("#usda 1.0\n")
    with pytest.raises(ResourceError, match="not installed") as caught:
        import_model(path)
    assert "splatcli[usd]" in str(caught.value.remedy)


def test_a_reader_that_dies_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pxr.py").write_text("import os\nos.abort()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    path = tmp_path / "a.usdc"
    path.write_bytes(b"PXR-USDC" + bytes(80))
    with pytest.raises(ModelFileError, match="ended by SIGABRT"):
        import_model(path)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"PK\x03\x04" + bytes(22) + b"\x0a\0\0\0scene.usdc" + bytes(40), "usdz"),
        (b"PXR-USDC" + bytes(80), "usd"),
        (b"#usda 1.0\n", "usd"),
        (b"<!doctype html>\n<html>", "html"),
    ],
)
def test_stages_and_pages_are_reported_by_their_content(content: bytes, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    assert format_of(path).name == kind
