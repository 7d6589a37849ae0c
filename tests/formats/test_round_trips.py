"""Each format gives back what it was given, within stated bounds that follow from how it stores it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from splatcli.checkpoint.foreign.imported import Columns, ImportOptions, to_gaussians
from splatcli.errors import ModelFileError
from splatcli.formats.format import ExportMetadata, Format
from splatcli.formats.registry import FORMATS, import_model
from splatcli.formats.selection import select
from splatcli.formats.sog import sog_files
from splatcli.formats.spz import encode_spz
from splatcli.gaussians import Gaussians
from tests.formats.made import by_position, errors, scene

COUNTS = (1, 2, 255, 256, 257, 1500)


@dataclass(frozen=True)
class Bound:
    """The largest error that a format may make in each attribute of scene(), with the reason; see errors()."""

    means: float = 0.0
    quats: float = 0.0
    log_scales: float = 0.0
    opacities: float = 0.0
    sh0: float = 0.0
    shN: float = 0.0


def degrees(step: float) -> float:
    """The largest rotation error when three components of a unit quaternion are rounded to ``step``.

    Worst are four components of a half, rounded the same way: the largest then misses by the sum of the others' errors.
    """
    return math.degrees(2 * math.sqrt(3 + 9) * step / 2) + 1e-3


SPZ = Bound(
    means=0.5 / 4096 + 1e-6,
    quats=degrees(1 / 511 / math.sqrt(2)),
    log_scales=0.5 / 16 + 1e-6,
    opacities=0.5 / 255 + 1e-6,
    sh0=0.5 / 255 / 0.15 + 1e-6,
    shN=2.5 / 128 + 1e-6,
)

#: A colour byte is 1/255, half of it is rounding; sh0 = colour / 0.282. scene() keeps most colours inside 0...1; those
#: outside are clamped by formats that hold displayed colours, so they are compared where they are not.
BOUNDS = {
    "ply": Bound(quats=1e-5, opacities=0.0),
    # Four components in steps of 1/128, each off by half of that.
    "splat": Bound(
        quats=math.degrees(2 * 2 * 0.5 / 128) + 1e-3,
        log_scales=2e-6,
        opacities=0.5 / 255 + 1e-6,
        sh0=0.5 / 255 / 0.282 + 1e-6,
    ),
    # 24-bit fixed point of 1/4096; 10 bits of each of three components; 1/16 nat; bytes; SH in steps of 1/32.
    "spz": SPZ,
    "spz4": SPZ,
    # Floats of activated values: logarithms lose the last bits, and opacities near 1 some more.
    "glb": Bound(quats=1e-4, log_scales=2e-6, opacities=1e-6),
    # 16 bits of a logarithmic range; bytes of three components; codebooks of 256 for values and harmonics, the latter
    # of a palette, for which noise is the worst that there is.
    "sog": Bound(
        means=6e-5,
        quats=degrees(math.sqrt(2) / 255),
        log_scales=0.03,
        opacities=0.5 / 255 + 1e-6,
        sh0=0.03,
        shN=0.5,
    ),
    # 10 bits at least of each chunk's range; the chunks of so few Gaussians are as large as the scene.
    "compressed.ply": Bound(
        means=0.5 / 1023 * 4.5,
        quats=degrees(math.sqrt(2) / 1023),
        log_scales=0.5 / 1023 * 6,
        opacities=0.5 / 255 + 1e-6,
        sh0=0.5 / 255 * 3.6,
        shN=0.5 * 8 / 256 + 1e-6,
    ),
}

#: Formats without bounds: one that is only read, a folder and a page of SOGs, and floats in a stage of another library.
ELSEWHERE = {
    "ksplat": "formats/test_ksplat.py",
    "lod": "cli/test_streamed_sog.py",
    "html": "formats/test_html.py",
    "usdz": "formats/test_usd.py",
}


def test_every_format_is_tried_and_recognised_and_has_a_row_in_its_page() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")
    rows = "".join(re.findall(r"^\| `[^|]*\| (?:both|read)[^|]*\|", page, re.MULTILINE))
    for known in FORMATS:
        if known.name == "usd":  # read only, by the reader of usdz
            continue
        assert (known.name in BOUNDS) != (known.name in ELSEWHERE), f"{known.name} needs bounds"
        assert known.read is None or known.recognises or known.names, f"no file is recognised as {known.name}"
        assert f"`.{known.name}`" in rows or f"`--format {known.name}`" in rows, f"{known.name} has no row"
    for name in ELSEWHERE.values():
        assert (Path(__file__).parents[1] / name).is_file()


def round_trip(gaussians: Gaussians, name: str, path: Path) -> Gaussians:
    known = next(known for known in FORMATS if known.name == name)
    assert known.write is not None
    if name == "spz4":
        pytest.importorskip("zstandard", reason="SPZ version 4 needs splatcli[spz]")
    encoded = known.write(gaussians, ExportMetadata())
    path.write_bytes(encoded.payload)
    return to_gaussians(import_model(path), ImportOptions(), path)[0]


def displayable(gaussians: Gaussians) -> Gaussians:
    """With constant colours inside 0...1, as formats for viewers hold them."""
    gaussians.sh0.clamp_(-1.77, 1.77)
    return gaussians


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("count", COUNTS)
def test_a_round_trip_stays_within_the_bounds(name: str, count: int, tmp_path: Path) -> None:
    known = next(known for known in FORMATS if known.name == name)
    before, _ = select(displayable(scene(count)), sh_degree=min(3, known.sh_degree))
    after = by_position(round_trip(before, name, tmp_path / f"x{known.suffix or '.' + name}"), before)
    assert after.sh_degree == before.sh_degree
    found = errors(before, after)
    for attribute, error in found.items():
        assert error <= getattr(BOUNDS[name], attribute), (attribute, found)


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("degree", range(4))
def test_every_degree_that_a_format_holds_comes_back(name: str, degree: int, tmp_path: Path) -> None:
    known = next(known for known in FORMATS if known.name == name)
    before, _ = select(displayable(scene(70, degree)), sh_degree=min(degree, known.sh_degree))
    after = by_position(round_trip(before, name, tmp_path / f"x{known.suffix or '.' + name}"), before)
    assert after.shN.shape == before.shN.shape
    assert errors(before, after)["shN"] <= BOUNDS[name].shN


@pytest.mark.parametrize("name", BOUNDS)
def test_a_second_round_trip_changes_nothing_more(name: str, tmp_path: Path) -> None:
    known = next(known for known in FORMATS if known.name == name)
    first, _ = select(displayable(scene(300)), sh_degree=min(3, known.sh_degree))
    path = tmp_path / f"x{known.suffix or '.' + name}"
    once = round_trip(first, name, path)
    twice = by_position(round_trip(once, name, path), once)
    bound = BOUNDS[name]
    for attribute, error in errors(once, twice).items():
        # What was rounded once lies on the grid; but a quaternion is brought to length 1 first, which leaves it.
        assert error <= (1.0 if attribute == "quats" else 0.1) * getattr(bound, attribute) + 1e-5, attribute


@pytest.mark.parametrize("scale", [1.0, 1e-2, 1e-3, 1e-4])
def test_positions_in_spz_are_fine_enough_for_small_gaussians(scale: float, tmp_path: Path) -> None:
    """Sizes end at 4.5e-5 units there."""
    gaussians = scene(200, 0).map(lambda column: column.clone())
    gaussians.means[:] *= scale
    gaussians.log_scales[:] = math.log(0.05) + 0.02 * gaussians.log_scales + math.log(scale)
    once = round_trip(gaussians, "spz", tmp_path / "a.spz")
    size = gaussians.log_scales.amax(dim=1).clamp(min=-10.0).exp().median()
    assert float((once.means - gaussians.means).abs().max()) <= max(0.125 * 1.1 * float(size), 1e-7)
    again = round_trip(once, "spz", tmp_path / "b.spz")
    assert again.means.equal(once.means)


def test_an_spz_that_its_makers_library_refuses_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splatcli.formats.spz._MOST_READ", 200)
    said = "201 Gaussians; Niantic's library and programs with it read up to 200"
    assert said in encode_spz(scene(201, 0), ExportMetadata()).notes
    assert not [note for note in encode_spz(scene(200, 0), ExportMetadata()).notes if "Niantic" in note]


@pytest.mark.parametrize("known", [known for known in FORMATS if known.write], ids=lambda known: known.name)
@pytest.mark.parametrize("antialiased", [False, True])
def test_a_file_says_whether_its_model_was_trained_antialiased(
    known: Format, antialiased: bool, tmp_path: Path
) -> None:
    package = {"spz4": "zstandard", "usdz": "pxr"}.get(known.name)
    if package is not None:
        pytest.importorskip(package, reason="an extra of splatcli is not installed")
    assert known.write is not None
    encoded = known.write(scene(40, 0), ExportMetadata(antialiased=antialiased))
    path = tmp_path / f"x{known.suffix or '.' + known.name}"
    path.write_bytes(encoded.payload)
    model = import_model(path)
    if known.name in ("splat", "glb", "usdz"):
        assert not model.antialiased
        assert any("trained antialiased" in note for note in encoded.notes) == antialiased
        return
    assert model.antialiased == antialiased
    notes = to_gaussians(model, ImportOptions(), path)[1]
    assert notes == (["it was trained antialiased, as the file says, and is rendered so"] if antialiased else [])


@pytest.mark.parametrize(
    ("comments", "antialiased"),
    [
        (["Exported from Brush", "SH degree: 0", "SplatRenderMode: mip"], True),
        (["  SPLATRENDERMODE:  Mip "], True),
        (["SplatRenderMode: default"], False),
        (["antialiased 1"], True),
        (["antialiased 0"], False),
        (["antialiased 1", "SplatRenderMode: default"], False),
        (["not antialiased 1"], False),
    ],
)
@pytest.mark.parametrize("name", ["ply", "compressed.ply"])
def test_comments_of_other_programs_say_it_too(
    name: str, comments: list[str], antialiased: bool, tmp_path: Path
) -> None:
    known = next(known for known in FORMATS if known.name == name)
    assert known.write is not None
    path = tmp_path / "x.ply"
    path.write_bytes(known.write(scene(9, 0), ExportMetadata(comments)).payload)
    assert import_model(path).antialiased == antialiased


@pytest.mark.parametrize(
    ("changes", "antialiased"),
    [
        ({"antialias": True}, True),
        ({"model": "antialiased"}, True),
        ({"antialias": False, "model": "default"}, False),
        ({"antialias": None}, False),
    ],
)
def test_either_name_in_a_sog_says_it(changes: dict[str, object], antialiased: bool, tmp_path: Path) -> None:
    for name, content in sog_files(scene(9, 0)).items():
        (tmp_path / name).write_bytes(content)
    meta = tmp_path / "meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | changes))
    assert import_model(meta).antialiased == antialiased


@pytest.mark.parametrize("part", ["scales", "sh0", "shN"])
def test_a_sog_whose_first_code_is_null_is_read(part: str, tmp_path: Path) -> None:
    """SuperSplat wrote such files; the entry is as far below the second as the others lie apart in the mean."""
    for name, content in sog_files(scene(300, 1)).items():
        (tmp_path / name).write_bytes(content)
    meta = tmp_path / "meta.json"
    document = json.loads(meta.read_text())
    codes = document[part]["codebook"]

    def read(first: float | None, second: float | None = codes[1]) -> Columns[Tensor]:
        document[part]["codebook"] = [first, second, *codes[2:]]
        meta.write_text(json.dumps(document))
        return import_model(meta).columns

    for found, wanted in zip(read(None), read(codes[1] + (codes[1] - codes[255]) / 255), strict=True):
        assert torch.equal(found, wanted)
    with pytest.raises(ModelFileError, match=rf"{part}\.codebook"):
        read(None, None)


@pytest.mark.parametrize("name", [known.name for known in FORMATS if known.write is not None])
@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("log_scales", 3e38),
        ("log_scales", 1000.0),
        ("log_scales", -1000.0),
        ("logit_opacities", 3e38),
        ("logit_opacities", -3e38),
        ("quats", 0.0),
        ("sh0", -3e38),
        ("shN", 3e38),
    ],
)
def test_numbers_at_the_ends_of_float32_are_clamped(name: str, column: str, value: float, tmp_path: Path) -> None:
    """Without a warning, which the command line would show, and so that the file is read again."""
    if name == "spz4":
        pytest.importorskip("zstandard", reason="SPZ version 4 needs splatcli[spz]")
    if name == "usdz":
        pytest.importorskip("pxr", reason="usd-core is not installed (splatcli[usd])")
    known = next(known for known in FORMATS if known.name == name)
    gaussians = scene(150, min(1, known.sh_degree))
    getattr(gaussians, column)[:] = value
    assert known.write is not None
    path = tmp_path / f"a{known.suffix or '.spz'}"
    path.write_bytes(known.write(gaussians, ExportMetadata()).payload)
    again = import_model(path)
    assert len(again) == 150
    assert again.nonfinite() == []
    if column == "logit_opacities":
        assert bool(((again.columns.opacities > 0) == (value > 0)).all())
