"""Programs of others read what is written here, as it was meant; where they are at hand.

From PyPI: gsply, zstandard. From npm: @playcanvas/splat-transform (Node 22 or newer), in the folder node_modules that
the variable SPLATCLI_NODE_MODULES names.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from splatcli.checkpoint.foreign.imported import ImportOptions, to_gaussians
from splatcli.cli.commands import run
from splatcli.formats.format import ExportMetadata
from splatcli.formats.registry import FORMATS, import_model
from splatcli.formats.selection import select
from splatcli.gaussians import Gaussians
from tests.browser import MODULES, node
from tests.formats.made import by_position, errors, read_ply, rotation_errors, scene
from tests.formats.test_round_trips import BOUNDS, displayable

TRANSFORM = MODULES / "@playcanvas/splat-transform/bin/cli.mjs"


def transformed(source: Path, target: Path, *actions: str) -> Path:
    """``source`` as splat-transform writes it anew, after some actions."""
    if not TRANSFORM.exists() or not node():
        pytest.skip("splat-transform is not installed (SPLATCLI_NODE_MODULES)")
    command = [node(), str(TRANSFORM), "-w", "-g", "cpu", str(source), *actions, str(target)]
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


@pytest.mark.parametrize(
    "actions",
    [
        ("--translate", "0.5,-1.25,3"),
        ("--rotate", "30,-20,110"),
        ("--scale", "2.5"),
        ("--rotate", "0,90,0", "--translate", "1,0,0", "--rotate", "-75,0,12", "--scale", "0.3"),
        ("--crop", "box:-0.4,-0.3,-0.5,0.6,0.4,0.2"),
        ("--crop", "sphere:0.1,0,-0.2,0.6"),
        ("--filter", "opacity>0.4"),
        ("--filter", "x<=0.1"),
        ("--sh-degree", "1"),
        ("--translate", "1,0,0", "--crop", "box:0.5,-1,-1,2,1,1", "--scale", "2"),
    ],
    ids=lambda actions: " ".join(actions),
)
def test_edits_are_those_of_splat_transform(actions: tuple[str, ...], tmp_path: Path) -> None:
    if not TRANSFORM.exists() or not node():
        pytest.skip("splat-transform is not installed (SPLATCLI_NODE_MODULES)")
    source = written("ply", tmp_path / "a.ply", model())
    theirs = read_ply(transformed(source, tmp_path / "theirs.ply", *in_their_words(actions)))
    assert run(["edit", str(source), "-o", str(tmp_path / "ours.ply"), *actions, "-q"]) == 0
    ours = read_ply(tmp_path / "ours.ply")
    assert len(ours) == len(theirs)
    assert 0 < len(ours) <= 700
    found = errors(by_position(theirs, ours), ours)
    bounds = {"means": 2e-6, "quats": 0.02, "log_scales": 2e-6, "opacities": 1e-6, "sh0": 0.0, "shN": 2e-6}
    for attribute, error in found.items():
        assert error <= bounds[attribute], (attribute, found)


def in_their_words(actions: tuple[str, ...]) -> list[str]:
    """The flags of ``splat edit`` as those of splat-transform.

    It acts in the frame of its engine, that of a PLY turned by 180 degrees about z: x and y change their signs.
    """
    found = []
    for flag, value in zip(actions[::2], actions[1::2], strict=True):
        match = re.fullmatch(r"(\w+)(>|<=)(.*)", value)
        if flag == "--crop":
            region, _, text = value.partition(":")
            x, y, z, *rest = map(float, text.split(","))
            numbers = [-rest[0], -rest[1], z, -x, -y, rest[2]] if region == "box" else [-x, -y, z, *rest]
            found += [f"--filter-{region}", ",".join(map(str, numbers))]
        elif match is not None:
            sign, name = (-1 if match[1] in "xy" else 1), match[1]
            compare = {(">", 1): "gt", ("<=", 1): "lte", (">", -1): "lt", ("<=", -1): "gte"}[match[2], sign]
            found += ["--filter-value", f"{name},{compare},{sign * float(match[3])}"]
        elif flag in ("--translate", "--rotate"):
            x, y, z = map(float, value.split(","))
            found += [flag, f"{-x},{-y},{z}"]
        else:
            found += ["--filter-harmonics" if flag == "--sh-degree" else flag, value]
    return found


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
