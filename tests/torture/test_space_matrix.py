"""No model with activated scales or opacities is taken for a raw one, in any format and unit of length."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from splatcli.checkpoint.activation_check import Space
from splatcli.checkpoint.foreign.imported import Columns, ImportedModel, ImportOptions, to_gaussians
from splatcli.config import Config, DataConfig
from splatcli.errors import ModelFileError
from splatcli.formats.registry import import_model
from splatcli.scene.read import read_scene
from splatcli.train.init import gaussians_from_points
from tests.checkpoint.foreign.made import activated
from tests.checkpoint.test_space import shells
from tests.torture.harness import Tally
from tests.torture.space_matrix import (
    DATA,
    UNITS,
    WRITERS,
    Count,
    accepted,
    compressed_tables,
    figures,
    scaled,
)
from tests.torture.space_parts import SCENE, mixed, try_model


def test_the_matrix_has_no_false_accept() -> None:
    found = figures(quick=True)
    assert (found["false_accepts"], found["false_refusals"], found["normalised_refused"]) == (0, 0, 0)
    assert found["activated_models"] == 5 * len(WRITERS) * 12
    assert found["raw_models"] == 5 * len(WRITERS)
    assert set(found["synthetic_by_format"]) == set(WRITERS)


def test_an_accepted_activated_model_would_be_counted() -> None:
    count = Count()
    count.add((1, 0, 0), accepted=True, unit=1.0)
    count.add((0, 1, 0), accepted=False, unit=1.0)
    count.add((0, 0, 0), accepted=False, unit=10.0)
    assert (count.false_accepts, count.normalised_refused, count.false_refusals) == (1, 1, 1)
    assert count.refused_by_unit == {"10": 1}


@pytest.mark.skipif(not DATA.is_dir(), reason="no models of other programs beside the project")
@pytest.mark.parametrize("name", ["inria_ply/point_cloud_iter7000_9080.ply", "biker/biker.compressed.ply"])
def test_real_models_pass_raw_and_fail_activated(name: str) -> None:
    path: Path = DATA / "import_samples" / name
    tables = compressed_tables(path) if "compressed" in name else import_model(path).columns
    for unit in [1.0] if len(tables.means) > 100_000 else UNITS[::4]:
        raw = scaled(tables, unit)
        assert accepted(ImportedModel("PLY", raw)), unit
        assert not accepted(ImportedModel("PLY", activated(raw, scales=1))), unit
        assert not accepted(ImportedModel("PLY", activated(raw, scales=2))), unit
        assert not accepted(ImportedModel("PLY", activated(raw, opacities=1))), unit


def initial_courtyard() -> Columns:
    points = read_scene(SCENE, DataConfig()).points
    assert points is not None
    start = gaussians_from_points(points.xyz, points.rgb, Config())
    return Columns(start.means, start.quats, start.log_scales, start.logit_opacities, start.sh0, start.shN)


def trained_alike() -> Columns:
    """Flat Gaussians with logits about those of a trained model."""
    means, logs = shells(1.0, 1.0, 0.0, count=4000)
    rng = torch.Generator().manual_seed(0)
    quats, sh0 = torch.randn(4000, 4, generator=rng), torch.randn(4000, 3, generator=rng)
    opacities = 3.0 * torch.randn(4000, generator=rng) - 1.0
    return Columns(torch.from_numpy(means), quats, torch.from_numpy(logs), opacities, sh0, torch.zeros(4000, 0, 3))


@pytest.mark.parametrize("make", [initial_courtyard, trained_alike])
def test_partly_activated_models_are_refused_and_raw_ones_pass_in_any_unit(make: Callable[[], Columns]) -> None:
    tally, units = Tally(), [1e-6, 1e-2, 1.0, 3.0, 30.0, 1e3, 1e7]
    try_model(make.__name__, make(), units, tally)
    assert tally.failures == []
    assert (tally.words["raw"], tally.words["axis"], tally.words["scales 50%"]) == (
        len(units),
        3 * len(units),
        len(units),
    )


def test_one_negative_scale_proves_nothing_about_the_others() -> None:
    raw = trained_alike()
    scales = activated(raw, scales=1).scales
    scales[0] = -3.0
    assert not accepted(ImportedModel("PLY", raw._replace(scales=scales)))


@pytest.mark.parametrize("part", ["scales", "opacities"])
def test_a_partly_activated_model_is_converted_by_no_word(part: str) -> None:
    raw = trained_alike()
    some = mixed(raw, torch.arange(len(raw.means)) % 2 == 0, part)
    with pytest.raises(ModelFileError, match=f"^model: {part} look partly activated") as caught:
        to_gaussians(ImportedModel("PLY", some), ImportOptions(), Path("model"))
    assert str(caught.value.remedy).startswith("export the model again")
    with pytest.raises(ModelFileError, match=r"partly activated.*cannot be distinguished"):
        to_gaussians(ImportedModel("PLY", some), ImportOptions(space=Space.ACTIVATED), Path("model"))
    gaussians, notes = to_gaussians(ImportedModel("PLY", some), ImportOptions(space=Space.RAW), Path("model"))
    assert gaussians.log_scales.equal(some.scales)
    assert any("partly activated" in note for note in notes)
