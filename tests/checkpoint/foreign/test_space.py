"""The gate for models of other programs: activated parameters never pass, and nothing is converted unasked."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch

from splatcli.checkpoint.activation_check import Space
from splatcli.checkpoint.foreign.imported import Columns, ImportOptions, to_gaussians
from splatcli.errors import ModelFileError
from splatcli.formats.registry import import_model
from splatcli.gaussians import Gaussians
from splatcli.scene.camera import Camera
from tests.checkpoint.foreign.made import WRITERS, activated, tables_of, write

SUBSETS = [subset for subset in itertools.product((0, 1), repeat=3) if any(subset)]


def read(path: Path, reading: ImportOptions | None = None) -> tuple[Gaussians, list[str]]:
    return to_gaussians(import_model(path), reading or ImportOptions(), path)


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(("scales", "quats", "opacities"), SUBSETS)
def test_whatever_was_activated_is_refused_but_quaternions(
    kind: str, times: int, scales: int, quats: int, opacities: int, tmp_path: Path
) -> None:
    tables = activated(tables_of(), scales=times * scales, quats=times * quats, opacities=times * opacities)
    path = write(kind, tables, tmp_path)
    if not scales and not opacities:
        assert torch.equal(read(path)[0].quats, tables.quats)
        return
    with pytest.raises(ModelFileError) as caught:
        read(path)
    assert caught.value.exit_code == 5
    assert ("scales" if scales else "opacities") + " look already activated" in caught.value.what
    assert caught.value.remedy is not None
    assert "--param-space activated" in caught.value.remedy
    assert "--param-space raw" in caught.value.remedy


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize(("scales", "quats", "opacities"), [subset for subset in SUBSETS if subset[0] or subset[2]])
def test_param_space_activated_brings_the_raw_values_back_and_says_so(
    kind: str, scales: int, quats: int, opacities: int, tmp_path: Path
) -> None:
    raw = tables_of()
    path = write(kind, activated(raw, scales=scales, quats=quats, opacities=opacities), tmp_path)
    gaussians, notes = read(path, ImportOptions(Space.ACTIVATED))
    torch.testing.assert_close(gaussians.log_scales, raw.scales, rtol=0, atol=1e-6)
    torch.testing.assert_close(gaussians.logit_opacities, raw.opacities, rtol=1e-5, atol=1e-5)
    said = next(note for note in notes if "--param-space activated" in note)
    assert ("took logarithms of the scales" in said) == bool(scales)
    assert ("left the scales, which are logarithms" in said) == (not scales)
    assert ("took logits of the opacities" in said) == bool(opacities)


@pytest.mark.parametrize("kind", WRITERS)
def test_param_space_raw_takes_the_bits_as_they_are_and_says_why_not(kind: str, tmp_path: Path) -> None:
    tables = activated(tables_of(), scales=1)
    gaussians, notes = read(write(kind, tables, tmp_path), ImportOptions(Space.RAW))
    assert torch.equal(gaussians.log_scales, tables.scales)
    assert any("taken for raw, as --param-space says, although scales look already activated" in n for n in notes)


@pytest.mark.parametrize("kind", WRITERS)
def test_param_space_activated_for_a_raw_model_is_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="nothing here is activated") as caught:
        read(write(kind, tables_of(), tmp_path), ImportOptions(Space.ACTIVATED))
    assert caught.value.remedy == "leave --param-space out"


@pytest.mark.parametrize("unit", [1e-3, 1e-2, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("which", ["scales", "opacities"])
def test_one_inversion_is_not_enough_for_what_was_activated_twice(which: str, unit: float, tmp_path: Path) -> None:
    raw = tables_of(500)
    raw = raw._replace(means=raw.means * unit, scales=raw.scales + torch.log(torch.tensor(unit)))
    path = write("gsplat", activated(raw, **{which: 2}), tmp_path)
    with pytest.raises(ModelFileError, match=f"after one inversion the {which} still look activated"):
        read(path, ImportOptions(Space.ACTIVATED))


def test_values_at_the_ends_have_finite_logarithms(tmp_path: Path) -> None:
    tables = activated(tables_of(), scales=1, opacities=1)
    tables.scales[0, 0], tables.opacities[1], tables.opacities[2] = 0.0, 0.0, 1.0
    gaussians, notes = read(write("inria", tables, tmp_path), ImportOptions(Space.ACTIVATED))
    assert torch.isfinite(gaussians.log_scales).all()
    assert torch.isfinite(gaussians.logit_opacities).all()
    assert float(gaussians.logit_opacities[2]) == pytest.approx(-float(gaussians.logit_opacities[1]), rel=1e-3)
    assert any("(1 were 0)" in note and "(2 were 0 or 1)" in note for note in notes)


def predicted(message: str) -> tuple[int, float]:
    """(tiles, GiB) that a refusal names."""
    found = re.search(r"cover ([\d,]+) tiles .*: ([\d,.]+) GiB for one training step", message)
    assert found is not None, message
    return int(found[1].replace(",", "")), float(found[2].replace(",", ""))


def test_the_refusal_tells_what_a_known_camera_would_cost(tmp_path: Path) -> None:
    viewmat = torch.eye(4, dtype=torch.float64).numpy()
    viewmat[2, 3] = 1.5
    camera = Camera("front.jpg", 1600, 1063, 1400.0, 1400.0, 800.0, 531.5, viewmat)
    path = write("inria", activated(tables_of(5_000, 0), scales=1), tmp_path)
    with pytest.raises(ModelFileError) as caught:
        to_gaussians(import_model(path), ImportOptions(), path, lambda: [camera])
    assert "of front.jpg, 1600x1063 pixels" in caught.value.what
    tiles, gibibytes = predicted(caught.value.what)
    # All of them are larger than the scene: each covers each of the 100 x 67 tiles.
    assert tiles == 5_000 * 100 * 67
    assert gibibytes == pytest.approx(tiles * 86 / 2**30, abs=0.1)


def test_without_cameras_a_nominal_view_stands_in(tmp_path: Path) -> None:
    path = write("ply", activated(tables_of(5_000, 0), scales=1), tmp_path)
    with pytest.raises(ModelFileError, match="of a nominal view, 1600x1200 pixels") as caught:
        read(path)
    assert predicted(caught.value.what)[0] == 5_000 * 100 * 75


def test_a_broken_scene_does_not_hide_why_the_model_is_refused(tmp_path: Path) -> None:
    def fail() -> list[Camera]:
        raise ModelFileError("no cameras today")

    path = write("ply", activated(tables_of(), scales=1), tmp_path)
    with pytest.raises(ModelFileError, match="look already activated"):
        to_gaussians(import_model(path), ImportOptions(), path, fail)


def test_odd_looks_are_remarked_upon_and_accepted(tmp_path: Path) -> None:
    tables = tables_of()
    swapped = tables._replace(quats=torch.tensor([0.0, 0.0, 0.0, 1.0]).repeat(200, 1))
    assert any("x y z w" in note for note in read(write("ply", swapped, tmp_path))[1])
    colours = Columns(*tables)._replace(sh0=torch.rand(200, 3, generator=torch.Generator().manual_seed(0)))
    assert any("plain RGB" in note for note in read(write("ply", colours, tmp_path))[1])
    assert read(write("ply", tables, tmp_path))[1] == []
