"""Programs of others read what is written here, as it was meant; where they are at hand.

From PyPI: gsply, zstandard. From npm: @playcanvas/splat-transform (Node 22 or newer), in the folder node_modules that
the variable SPLATCLI_NODE_MODULES names.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from splatcli.checkpoint.foreign.imported import ImportOptions, to_gaussians
from splatcli.formats.format import ExportMetadata
from splatcli.formats.ply import read_ply
from splatcli.formats.registry import FORMATS, import_model
from splatcli.formats.selection import select
from splatcli.gaussians import Gaussians
from tests.browser import MODULES, node
from tests.formats.made import by_position, errors, rotation_errors, scene
from tests.formats.test_round_trips import BOUNDS, displayable

TRANSFORM = MODULES / "@playcanvas/splat-transform/bin/cli.mjs"


def transformed(source: Path, target: Path) -> Path:
    """``source`` as splat-transform writes it anew."""
    if not TRANSFORM.exists() or not node():
        pytest.skip("splat-transform is not installed (SPLATCLI_NODE_MODULES)")
    command = [node(), str(TRANSFORM), "-w", "-g", "cpu", str(source), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def needs_the_frame_of_a_ply(name: str) -> None:
    """Skip the test where splat-transform turns the axes of SPZ files, which it does up to version 2."""
    package = json.loads((TRANSFORM.parents[1] / "package.json").read_text()) if TRANSFORM.exists() else {}
    if name.startswith("spz") and int(package.get("version", "3").partition(".")[0]) < 3:
        pytest.skip("splat-transform before version 3 reads SPZ in another frame")


def written(name: str, path: Path, gaussians: Gaussians) -> Path:
    known = next(known for known in FORMATS if known.name == name)
    if name == "spz4":
        pytest.importorskip("zstandard", reason="SPZ version 4 needs splatcli[spz]")
    assert known.write is not None
    path.write_bytes(known.write(gaussians, ExportMetadata()).payload)
    return path


def model() -> Gaussians:
    """With opacities below the last byte, which splat-transform gives an infinite logit."""
    gaussians = displayable(scene(700))
    gaussians.logit_opacities.clamp_(-5, 5)
    return gaussians


#: What splat-transform reads; its .splat decoder takes quaternion bytes as b/255*2-1, which turns by another half step.
READS = {"compressed.ply": 0.0, "splat": 1.0, "spz": 0.0, "spz4": 0.0, "sog": 0.0}


@pytest.mark.parametrize("name", READS)
def test_splat_transform_reads_what_is_written_here(name: str, tmp_path: Path) -> None:
    needs_the_frame_of_a_ply(name)
    known = next(known for known in FORMATS if known.name == name)
    before, _ = select(model(), sh_degree=known.sh_degree)
    source = written(name, tmp_path / f"a{known.suffix or '.spz'}", before)
    after = by_position(read_ply(transformed(source, tmp_path / "b.ply")), before)
    found = errors(before, after)
    for attribute, error in found.items():
        allowed = getattr(BOUNDS[name], attribute) + (READS[name] if attribute == "quats" else 0.0)
        assert error <= allowed + 1e-5, (attribute, found)


@pytest.mark.parametrize("name", ["compressed.ply", "spz", "sog"])
def test_what_splat_transform_writes_is_read_here_as_it_reads_it_itself(name: str, tmp_path: Path) -> None:
    """Not compared with the original: its palettes begin anew by chance each time."""
    needs_the_frame_of_a_ply(name)
    if name == "spz":
        pytest.importorskip("zstandard", reason="splat-transform writes SPZ version 4")
    path = transformed(written("ply", tmp_path / "a.ply", model()), tmp_path / f"b.{name}")
    ours = to_gaussians(import_model(path), ImportOptions(), path)[0]
    found = errors(read_ply(transformed(path, tmp_path / "c.ply")), ours)
    for attribute, error in found.items():
        assert error <= (2e-3 if attribute == "quats" else 2e-5), (attribute, found)


def test_gsply_reads_spz_and_its_spz_is_read_here(tmp_path: Path) -> None:
    gsply = pytest.importorskip("gsply", reason="gsply is not installed")
    before = model()
    theirs = gsply.read_spz(str(written("spz", tmp_path / "a.spz", before)))
    ours = to_gaussians(import_model(tmp_path / "a.spz"), ImportOptions(), tmp_path / "a.spz")[0]
    assert np.abs(theirs.means - ours.means.numpy()).max() < 1e-6
    assert np.abs(theirs.scales - ours.log_scales.numpy()).max() < 1e-5
    assert np.abs(theirs.sh0 - ours.sh0.numpy()).max() < 1e-5
    assert np.abs(theirs.shN.reshape(ours.shN.shape) - ours.shN.numpy()).max() < 1e-5
    assert rotation_errors(torch.from_numpy(np.array(theirs.quats)), ours.quats).max() < 0.01
    gsply.write_spz(str(tmp_path / "b.spz"), theirs)
    again = to_gaussians(import_model(tmp_path / "b.spz"), ImportOptions(), tmp_path / "b.spz")[0]
    found = errors(ours, again)
    for attribute, error in found.items():
        assert error <= getattr(BOUNDS["spz"], attribute), (attribute, found)
