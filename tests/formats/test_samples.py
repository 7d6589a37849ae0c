"""Files that other programs wrote are read as those programs meant them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from splatcli.checkpoint.foreign.imported import ImportOptions, to_gaussians
from splatcli.formats.registry import import_model
from splatcli.gaussians import SH_C0, Gaussians
from tests.formats.made import rotation_errors

SAMPLES = Path(__file__).parents[2] / "../shared/data/import_samples"
pytestmark = pytest.mark.skipif(not SAMPLES.is_dir(), reason="no sample files of other programs beside the project")


def load(name: str) -> Gaussians:
    path = SAMPLES / name
    if "v4" in name or name.startswith("biker/biker.spz"):
        pytest.importorskip("zstandard", reason="SPZ version 4 needs splatcli[spz]")
    return to_gaussians(import_model(path), ImportOptions(), path)[0]


#: The largest error in colour: SPZ stores sh0 in bytes of 1/(255 * 0.15), the others the colour itself.
@pytest.mark.parametrize(
    ("name", "position", "scale", "colour"),
    [
        ("minimal.splat", 0.0, 1e-6, 0.5 / 255),
        ("minimal.ksplat", 0.0, 1e-6, 0.5 / 255),
        ("minimal-v2.spz", 1e-6, 0.5 / 16, 0.5 / 255 / 0.15 * SH_C0),
        ("minimal-v3.spz", 1e-6, 0.5 / 16, 0.5 / 255 / 0.15 * SH_C0),
        ("minimal-v4.spz", 1e-6, 0.5 / 16, 0.5 / 255 / 0.15 * SH_C0),
    ],
)
def test_four_splats_in_a_square(name: str, position: float, scale: float, colour: float) -> None:
    """x = i - 1, z = j - 1 for i, j in 0, 1; sizes 0.1; colour ((i + 1) / 3, (j + 1) / 3, 0.5); opacity 230 / 255."""
    found = load(f"tiny/{name}")
    # Versions 3 and 4 were written by a program that stored SPZ with y up, which the files do not say.
    turn = -1.0 if name in ("minimal-v3.spz", "minimal-v4.spz") else 1.0
    places = torch.tensor([[i - 1.0, 0.0, turn * (j - 1.0)] for j in (0, 1) for i in (0, 1)])
    colours = torch.tensor([[(i + 1) / 3, (j + 1) / 3, 0.5] for j in (0, 1) for i in (0, 1)])
    assert (found.means - places).abs().max() <= position
    assert (found.log_scales - np.log(0.1)).abs().max() <= scale
    assert (found.logit_opacities.sigmoid() - 230 / 255).abs().max() <= 1e-6
    if name != "minimal-v2.spz":  # its maker stored colours as they are, which is not what the format says
        assert (0.5 + SH_C0 * found.sh0 - colours).abs().max() <= colour + 1e-6
    assert found.sh_degree == 0


def test_an_spz_without_gzip_is_read_too() -> None:
    plain, packed = load("tiny/minimal-raw.spz"), load("tiny/minimal-v2.spz")
    for (name, a), (_, b) in zip(plain.items(), packed.items(), strict=True):
        assert torch.equal(a, b), name


def test_a_scan_as_spz_version_4() -> None:
    found = load("biker/biker.spz")
    assert len(found) == 152_746
    assert found.sh_degree == 0
    low, high = found.means.amin(dim=0).tolist(), found.means.amax(dim=0).tolist()
    # With y up and z back, as the program that wrote it stored SPZ at that time; as a PLY it has y down.
    assert low == pytest.approx([-0.621, 0.0, -0.613], abs=1e-3)
    assert high == pytest.approx([0.414, 3.180, 0.532], abs=1e-3)


def test_the_same_scan_as_compressed_ply_and_as_spz() -> None:
    """Two programs' files of one scan: the Gaussians agree within what each format rounds away."""
    ply, spz = load("biker/biker.compressed.ply"), load("biker/biker.spz")
    assert len(ply) == len(spz) == 152_746
    assert ply.means.amin(dim=0).tolist() == pytest.approx([-0.621, -3.180, -0.532], abs=1e-3)
    # In the same order, one turned upside down (x, -y, -z) against the other.
    flip = torch.tensor([1.0, -1.0, -1.0])
    assert (spz.means * flip - ply.means).abs().max() < 1e-3
    assert (spz.log_scales - ply.log_scales.clamp(min=-10)).abs().max() < 0.05  # SPZ holds no smaller ones
    assert (spz.logit_opacities.sigmoid() - ply.logit_opacities.sigmoid()).abs().max() < 0.005
    assert (spz.sh0 - ply.sh0).abs().max() < 0.03
    turned = spz.quats * torch.tensor([1.0, 1.0, -1.0, -1.0])
    assert rotation_errors(turned, ply.quats).median() < 0.2


@pytest.mark.parametrize("place", ["playbot_sog/6_0/meta.json"])
def test_a_sog_of_another_program(place: str) -> None:
    found = load(place)
    assert len(found) == 1873
    assert found.sh_degree == 2
    # The extremes of a logarithmic measure, from its meta.json: 0.7044 there is e^0.7044 - 1 here.
    assert found.means.amax(dim=0).tolist() == pytest.approx(
        [np.expm1(x) for x in (0.70438, 0.03670, 0.70744)], abs=1e-4
    )
    assert -9.53 < float(found.log_scales.min()) < -9.52
    assert 0 < float(found.shN.abs().max()) < 4
