"""export_splats(): gsplat's call writes what the writers write."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import splatcli
from splatcli import export_splats
from splatcli.errors import OutputError
from tests.train.worlds import random_gaussians


@pytest.mark.parametrize(
    ("name", "suffix"), [("ply", "ply"), ("splat", "splat"), ("ply_compressed", "compressed.ply"), ("spz", "spz")]
)
def test_a_file_is_that_of_an_export(tmp_path: Path, name: str, suffix: str) -> None:
    gaussians = random_gaussians(20)
    columns = {
        "means": gaussians.means.requires_grad_(),
        "scales": gaussians.log_scales,
        "quats": gaussians.quats,
        "opacities": gaussians.logit_opacities,
        "sh0": gaussians.sh0[:, None],
        "shN": gaussians.shN,
    }
    content = export_splats(**columns, format=name, save_to=tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == content
    splatcli.Model(gaussians.map(torch.Tensor.detach)).export(tmp_path / f"b.{suffix}")
    assert (tmp_path / f"b.{suffix}").read_bytes() == content


def test_rows_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    gaussians = random_gaussians(6)
    gaussians.means[2, 1], gaussians.shN[4, 1, 1] = torch.nan, torch.inf
    g = gaussians
    export_splats(g.means, g.log_scales, g.quats, g.logit_opacities, g.sh0, g.shN, save_to=tmp_path / "a.ply")
    kept = splatcli.Model.load(tmp_path / "a.ply").gaussians
    assert torch.equal(kept.means, gaussians.means[[0, 1, 3, 5]])


@pytest.mark.parametrize("name", ["obj", "json", ""])
def test_an_unknown_format_is_named(name: str) -> None:
    g = random_gaussians(2)
    with pytest.raises(NotImplementedError, match=f"format='{name}'"):
        export_splats(g.means, g.log_scales, g.quats, g.logit_opacities, g.sh0, g.shN, format=name)


@pytest.mark.parametrize("name", ["ply", "splat", "sog", "glb", "usdz", "html"])
def test_nothing_but_rows_that_are_not_finite_is_a_ply_or_an_error(name: str) -> None:
    g = random_gaussians(3).map(lambda column: column * float("nan"))
    with nullcontext() if name == "ply" else pytest.raises(ValueError, match="no Gaussian is finite"):
        assert export_splats(g.means, g.log_scales, g.quats, g.logit_opacities, g.sh0, g.shN, format=name)


def test_activated_values_are_refused(tmp_path: Path) -> None:
    """A PLY of them would say that they are raw."""
    generator = torch.Generator().manual_seed(1)
    g = random_gaussians(500)
    means = torch.randn(500, 3, generator=generator)
    scales, opacities = torch.rand(500, 3, generator=generator) * 0.1, torch.rand(500, generator=generator)
    for given in ((scales, opacities), (g.log_scales, opacities), (scales, g.logit_opacities)):
        with pytest.raises(ValueError, match="takes raw tensors"):
            export_splats(means, given[0], g.quats, given[1], g.sh0, g.shN, save_to=tmp_path / "a.ply")
    assert not (tmp_path / "a.ply").exists()


@pytest.mark.parametrize(
    ("name", "suffix", "degree"),
    [
        ("ply", "ply", 4),
        ("splat", "splat", 0),
        ("ply_compressed", "compressed.ply", 3),
        ("spz", "spz", 3),
        ("sog", "sog", 3),
        ("glb", "glb", 3),
        ("html", "html", 3),
    ],
)
def test_a_file_has_the_harmonics_that_its_format_holds(tmp_path: Path, name: str, suffix: str, degree: int) -> None:
    g = random_gaussians(20)
    shN = 0.1 * torch.randn(20, 24, 3, generator=torch.Generator().manual_seed(1))
    path = tmp_path / f"a.{suffix}"
    export_splats(g.means, g.log_scales, g.quats, g.logit_opacities, g.sh0, shN, format=name, save_to=path)
    assert splatcli.Model.load(path).gaussians.sh_degree == degree


def test_no_gaussians_are_a_ply_without_any(tmp_path: Path) -> None:
    g = random_gaussians(3).map(lambda column: column[:0])
    columns = (g.means, g.log_scales, g.quats, g.logit_opacities, g.sh0[:, None], g.shN)
    export_splats(*columns, save_to=tmp_path / "a.ply")
    assert len(splatcli.Model.load(tmp_path / "a.ply")) == 0
    with pytest.raises(ValueError, match="no Gaussian is finite"):
        export_splats(*columns, format="sog")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    g = random_gaussians(3)
    with pytest.raises(OutputError, match="this is a folder"):
        export_splats(g.means, g.log_scales, g.quats, g.logit_opacities, g.sh0, g.shN, save_to=tmp_path)
