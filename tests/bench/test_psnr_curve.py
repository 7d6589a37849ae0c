"""PSNR over wall time: the measurement on a scene of ten views, the picture, and that it shows the stored figures."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from benchmarks import psnr_curve, psnr_plot
from tests.cli.tiny import write_scene
from tests.native.cases import NEEDS_COMPILER

ROOT = Path(__file__).resolve().parents[2]
OTHER = {"program": "other", "points": [{"seconds": 8.0, "psnr": 11.0}, {"seconds": 64.0, "step": 9, "psnr": 15.5}]}


@NEEDS_COMPILER
def test_a_run_is_scored_over_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*words: object) -> int:
        monkeypatch.setattr(sys, "argv", ["psnr_curve", *map(str, words)])
        return psnr_curve.main()

    scene, out = write_scene(tmp_path / "ball"), tmp_path / "curve.json"
    facts = {"scene": "ball", "size": "40x30", "view": "view_00.png"}
    older = {"program": "splat train", "points": []}
    out.write_text(json.dumps({**facts, "curves": [older, OTHER]}))
    steps = ["-r", 1, "--iterations", 12, "--cap-max", 500, "--at", 0, 0.01]

    assert measure(scene, facts["view"], "--out", out, *steps) == 0
    data = json.loads(out.read_text())
    assert {key: data[key] for key in facts} == facts
    ours, other = data["curves"]
    assert other == OTHER, "curves of other programs stay"
    assert ours["program"] == "splat train"
    assert ours["settings"] == {"iterations": 12, "cap_max": 500}
    assert [point["step"] for point in ours["points"]] == [1, 12], "times that have passed are scored once"
    assert all(0 < point["psnr"] < 60 for point in ours["points"])
    assert ours["points"][0]["seconds"] < ours["points"][1]["seconds"]
    assert ours["metrics"]["step"] == 12
    assert {"date", "version", "processor", "threads", "matmul_gflops"} <= ours.keys()

    with pytest.raises(SystemExit, match=r"view_01\.png is not held out; these are: view_00\.png"):
        measure(scene, "view_01.png", "--out", out, *steps)
    assert json.loads(out.read_text()) == data


def test_curves_of_another_scene_are_not_mixed(tmp_path: Path) -> None:
    out = tmp_path / "curve.json"
    out.write_text(json.dumps({"scene": "a", "size": "1x1", "view": "b", "curves": []}))
    with pytest.raises(SystemExit, match=r"is of .*'scene': 'a'.* and this is .*'scene': 'c'"):
        psnr_curve.with_curve(out, {"scene": "c", "size": "1x1", "view": "b"}, OTHER)


def test_the_picture_has_every_point_in_order() -> None:
    ours = {"program": "ours & <us>", "points": [{"seconds": 4.0, "psnr": 9.0}, {"seconds": 16.0, "psnr": 21.0}]}
    picture = ElementTree.fromstring(psnr_plot.draw({"view": "v.jpg", "curves": [ours, OTHER]}))
    space = "{http://www.w3.org/2000/svg}"
    first, second = (
        [tuple(map(float, place.split(","))) for place in line.attrib["points"].split()]
        for line in picture.iter(f"{space}polyline")
    )
    # 4, 16 and 64 s are evenly spaced on a logarithmic axis; 8 s is in the middle of the first two.
    assert first[1][0] - first[0][0] == pytest.approx(second[1][0] - first[1][0], abs=0.2)
    assert second[0][0] == pytest.approx((first[0][0] + first[1][0]) / 2, abs=0.2)
    # Up is better, by the same number of pixels for each decibel.
    assert (first[0][1] - first[1][1]) / 12 == pytest.approx((second[0][1] - second[1][1]) / 4.5, abs=0.1)
    assert first[1][1] < second[1][1] < second[0][1] < first[0][1]
    words = [text.text for text in picture.iter(f"{space}text")]
    assert {"ours & <us>: 21.0 dB", "other: 15.5 dB", "10 s", "1 min"} <= set(words)


def test_the_picture_in_the_readme_is_of_the_stored_figures(tmp_path: Path) -> None:
    out = tmp_path / "picture.svg"
    command = [sys.executable, "-m", "benchmarks.psnr_plot", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True)
    assert out.read_text() == psnr_plot.PICTURE.read_text(), "run python -m benchmarks.psnr_plot"
