"""Programs of others read what is written here, as it was meant; where they are at hand.

From PyPI: gsply, zstandard. From npm: @playcanvas/splat-transform (Node 22 or newer) with its @adobe/spz,
@mkkellogg/gaussian-splats-3d and three, in the folder node_modules that the variable SPLATCLI_NODE_MODULES names.
"""

from __future__ import annotations

import json
import re
import struct
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
from tests.formats.made import by_position, covariances, errors, read_ply, rotation_errors, scene
from tests.formats.made_sog import bundled, sog_1
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


def by_others(package: str, what: str, source: Path, target: Path, *more: object) -> Path:
    """What a library of another program makes of a file: others.mjs tells."""
    if not (MODULES / package).exists() or not node():
        pytest.skip(f"{package} is not installed (SPLATCLI_NODE_MODULES)")
    script = Path(__file__).with_name("others.mjs")
    command = [node(), script, MODULES.resolve(), what, source, target, *more]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def needs_version_3() -> None:
    """Skip the test where splat-transform is older."""
    package = json.loads((TRANSFORM.parents[1] / "package.json").read_text()) if TRANSFORM.exists() else {}
    if int(package.get("version", "3").partition(".")[0]) < 3:
        pytest.skip("splat-transform is older than version 3")


def needs_the_frame_of_a_ply(name: str) -> None:
    """Skip the test where splat-transform turns the axes of SPZ files, which it does up to version 2."""
    if name.startswith("spz"):
        needs_version_3()


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


def test_a_page_that_splat_transform_writes_is_read_as_its_sog(tmp_path: Path) -> None:
    """Codebooks of scales and harmonics begin anew by chance each time."""
    source = written("ply", tmp_path / "a.ply", model())
    page, sog = (import_model(transformed(source, tmp_path / name)).columns for name in ("b.html", "b.sog"))
    for attribute in ("means", "quats", "opacities"):
        assert torch.equal(getattr(page, attribute), getattr(sog, attribute)), attribute


def test_a_sog_of_version_1_is_read_as_splat_transform_reads_it(tmp_path: Path) -> None:
    """From version 3 on."""
    needs_version_3()
    (tmp_path / "a.sog").write_bytes(bundled(sog_1(scene(900))))
    ours = to_gaussians(import_model(tmp_path / "a.sog"), ImportOptions(), tmp_path / "a.sog")[0]
    found = errors(read_ply(transformed(tmp_path / "a.sog", tmp_path / "b.ply")), ours)
    for attribute, error in found.items():
        assert error <= (1e-4 if attribute == "quats" else 0.0), (attribute, found)


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


#: The frames of SPZ by number, but for those that are refused.
FRAMES = [0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 14]


@pytest.mark.parametrize("frame", FRAMES)
def test_the_makers_of_spz_read_the_same(frame: int, tmp_path: Path) -> None:
    """Also where the file names its frame, which theirs and ours bring into that of a PLY."""
    source = written("spz4", tmp_path / "a.spz", model())
    if frame:
        data = bytearray(source.read_bytes())
        data[14] |= 2
        struct.pack_into("<I", data, 16, 32 + 12)
        source.write_bytes(data[:32] + struct.pack("<III", 0xADBE0003, 4, frame) + data[32:])
    made = by_others("@adobe/spz", "spz", source, tmp_path / "a.json", "RDF" if frame else "UNSPECIFIED")
    found = {name: torch.tensor(values) for name, values in json.loads(made.read_text()).items()}
    ours = to_gaussians(import_model(source), ImportOptions(), source)[0]
    count = len(ours)
    theirs = Gaussians(
        means=found["positions"].reshape(count, 3),
        quats=found["rotations"].reshape(count, 4)[:, [3, 0, 1, 2]],
        log_scales=found["scales"].reshape(count, 3),
        logit_opacities=found["alphas"],
        sh0=found["colors"].reshape(count, 3),
        shN=found["sh"].reshape(ours.shN.shape),
    )
    found_errors = errors(theirs, ours)
    assert max(found_errors[name] for name in ("means", "log_scales", "sh0", "shN")) < 1e-6
    assert found_errors["opacities"] < 0.26 / 255  # an opacity of 0 or 1 is read a quarter of a step inside
    scale = covariances(theirs).abs().amax(dim=(1, 2), keepdim=True)
    assert ((covariances(theirs) - covariances(ours)) / scale).abs().max() < 1e-5


@pytest.mark.parametrize("sections", [(0,), (300, 2.0, 64)], ids=["one section", "three"])
@pytest.mark.parametrize("degree", [0, 1, 2])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_ksplat_of_its_makers_is_read(level: int, degree: int, sections: tuple[float, ...], tmp_path: Path) -> None:
    before, _ = select(model(), sh_degree=degree)
    source = written("ply", tmp_path / "a.ply", before)
    package = "@mkkellogg/gaussian-splats-3d"
    path = by_others(package, "ksplat", source, tmp_path / "a.ksplat", level, degree, *sections)
    after = by_position(to_gaussians(import_model(path), ImportOptions(), path)[0], before)
    bounds = {"means": 4e-5, "quats": 0.06, "log_scales": 1e-3, "opacities": 1 / 255, "sh0": 1.01 / 255 / 0.282}
    bounds["shN"] = [1e-6, 1e-3, 8e-3][level]
    found = errors(before, after)
    assert all(error <= bounds[name] for name, error in found.items()), found


def test_three_js_reads_a_glb(tmp_path: Path) -> None:
    """y is up there: x and y, and harmonics of odd order, change their signs."""
    before = model()
    source = written("glb", tmp_path / "a.glb", before)
    made = by_others(
        "three/examples/jsm/loaders/GLTFGaussianSplatLoaderExtension.js", "glb", source, tmp_path / "a.json"
    )
    found = {name: np.array(values).reshape(len(before), -1) for name, values in json.loads(made.read_text()).items()}
    np.testing.assert_array_equal(found["position"], (before.means * torch.tensor([-1.0, -1.0, 1.0])).numpy())
    flips = torch.tensor([[1.0, 1, -1], [1, 1, -1], [-1, -1, 1]])
    expected = (covariances(before) * flips)[:, [0, 0, 0, 1, 1, 2], [0, 1, 2, 1, 2, 2]].numpy()
    np.testing.assert_allclose(found["covariance"], expected, rtol=1e-4, atol=1e-6 * np.abs(expected).max())
    for band in (1, 2, 3):
        first, count = band * band - 1, 2 * band + 1
        signs = np.array([-1.0 if m % 2 else 1.0 for m in range(-band, band + 1)])
        wanted = before.shN[:, first : first + count].numpy() * signs[None, :, None] * 128 + 128
        stored = found[f"sphericalHarmonics{band}"][:, : 3 * count].reshape(-1, count, 3)
        assert np.abs(stored - wanted.clip(0, 255)).max() < 1
