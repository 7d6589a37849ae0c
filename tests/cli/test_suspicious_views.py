"""Views that are far worse than the others, and images of another exposure, are named with a remedy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import imageio.v3 as imageio
import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter

from splatcli.checkpoint.file import load_checkpoint
from splatcli.checkpoint.run_dir import find_latest_sound
from splatcli.cli.run_summary import _misfit_remark, _overfit_remark
from splatcli.train.events import Evaluated, Probed, ViewScore
from splatcli.train.outlier_views import misfits, score_note
from tests.running import Splat

SAMPLE = Path(__file__).parents[2] / "data" / "samples" / "courtyard"


def changed(scene: Path, folder: Path, views: list[int], gain: float, shift: float) -> Path:
    """A copy of the scene where the pixels of some views are ``gain`` times as large, plus ``shift``."""
    shutil.copytree(scene, folder)
    for view in views:
        path = folder / "images" / f"view_{view:02d}.png"
        pixels = imageio.imread(path).astype(float) * gain + shift
        imageio.imwrite(path, pixels.clip(0, 255).astype(np.uint8))
    return folder


def test_eval_names_a_view_far_below_the_others(splat: Splat, tiny_scene: Path, good_run: Path, tmp_path: Path) -> None:
    usual = splat("eval", good_run, "--views", "all")
    assert "below the median" not in usual.err
    scene = changed(tiny_scene, tmp_path / "scene", [4], -1.0, 255.0)
    done = splat("eval", good_run, "--data", scene, "--views", "all")
    assert done.code == 0
    assert "1 of 10 views is far below the median PSNR of" in done.err
    assert "view_04.png" in done.err
    assert "with its colours fitted" in done.err
    assert "--views all --sheet sheet.png shows them" in done.err
    with_sheet = splat("eval", good_run, "--data", scene, "--views", "all", "--sheet", tmp_path / "sheet.png")
    assert "help: see the sheet" in with_sheet.err
    assert "--sheet" not in with_sheet.err
    assert "far below" not in done.out
    assert "far below" not in splat("eval", good_run, "--data", scene, "--views", "all", "-q").err


def test_eval_says_that_images_differ_in_exposure(
    splat: Splat, tiny_scene: Path, good_run: Path, tmp_path: Path
) -> None:
    scene = changed(tiny_scene, tmp_path / "scene", list(range(10)), 0.5, 30.0)
    done = splat("eval", good_run, "--data", scene, "--views", "all")
    assert done.code == 0
    assert "the images differ in exposure or white balance" in done.err
    assert "--ppisp" in done.err
    assert "cc_psnr" not in done.out, "it is reported where it is asked for"
    higher = float(done.err.split(" dB higher")[0].split()[-1])
    asked = splat("eval", good_run, "--data", scene, "--views", "all", "--color-corrected")
    figures = dict(line.split() for line in asked.out.splitlines())
    assert higher == pytest.approx(float(figures["cc_psnr"]) - float(figures["psnr"]), abs=0.06)


def test_the_end_of_a_run_names_a_view_far_below_the_others(splat: Splat, tmp_path: Path) -> None:
    scene, run = tmp_path / "scene", tmp_path / "run"
    shutil.copytree(SAMPLE, scene)
    held_out = sorted((scene / "images").iterdir())[16]
    imageio.imwrite(held_out, 255 - imageio.imread(held_out))
    done = splat("train", scene, "-o", run, "-r", "8", "-n", "100", "--cap-max", "5000")
    assert done.code == 0
    assert "1 of 7 views is far below the median PSNR of" in done.err
    assert held_out.name in done.err
    assert f"splat eval {run} --sheet sheet.png" in done.err


def test_the_end_of_a_run_tells_of_details_that_no_other_image_shows(splat: Splat, tmp_path: Path) -> None:
    scene, run = tmp_path / "scene", tmp_path / "run"
    shutil.copytree(SAMPLE, scene)
    for i, image in enumerate(sorted((scene / "images").iterdir())):
        if i % 7:
            image.unlink()
    settings = ("-r", "8", "--cap-max", "3000", "--skip-missing", "--test-every", "4", "--set", "guard.probe_every=100")
    done = splat("train", scene, "-o", run, *settings, "-n", "320")
    assert done.code == 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    probed, score = ([line["psnr"] for line in lines if line["event"] == kind][-1] for kind in ("probe", "eval"))
    assert probed > score + 6.0, "six images say too little of what lies between them"
    figures = f"training views have a PSNR of {probed:.1f} dB and held-out ones {score:.1f} dB"
    assert f"{figures}: the model fits details that no other image shows" in done.err
    assert "help: take more images between the others; splat docs guides/better-results" in done.err
    assert "-n 7000" in _overfit_remark(Probed(29500, 30.0, 1), Evaluated(30000, 23.9, 0.7, 1, []), 30000)
    assert not _overfit_remark(Probed(29500, 30.0, 1), Evaluated(30000, 24.1, 0.7, 1, []), 30000)
    assert not _overfit_remark(Probed(500, 30.0, 1), Evaluated(999, 10.0, 0.7, 1, []), 999), "an early figure"

    whole = splat("train", SAMPLE, "-o", tmp_path / "whole", "-r", "8", "-n", "120", "--set", "guard.probe_every=100")
    assert whole.code == 0
    assert "no other image shows" not in whole.err


def with_negatives(scene: Path, dark: tuple[int, ...] = ()) -> list[str]:
    """Copies the sample scene, two of its training images as negatives, others darker; returns the negatives' names."""
    shutil.copytree(SAMPLE, scene)
    images = sorted((scene / "images").iterdir())
    for i in dark:
        imageio.imwrite(images[i], imageio.imread(images[i]) // 2)
    for i in (10, 31):
        imageio.imwrite(images[i], 255 - imageio.imread(images[i]))
    return [images[i].name for i in (10, 31)]


@pytest.mark.parametrize("batch", [1, 2])
def test_the_end_of_a_run_names_training_views_that_are_of_something_else(
    splat: Splat, tmp_path: Path, batch: int
) -> None:
    scene, run = tmp_path / "scene", tmp_path / "run"
    names = with_negatives(scene)
    settings = ("-r", "8", "-n", "250", "--cap-max", "5000", "--batch-size", str(batch))
    done = splat("train", scene, "-o", run, *settings, "--set", "train.max_view_error=0")
    assert done.code == 0
    lines = [line for line in done.err.splitlines() if "training views are fitted" in line]
    assert len(lines) == 1
    assert lines[0].startswith("2 of 43 training views are fitted far worse than the others: ")
    assert sorted(lines[0].split()[i] for i in (12, 18)) == names
    assert "left out" not in done.err
    named = done.err.split(f"splat eval {run} --views ")[1].split()[0]
    seen = splat("eval", run, "--views", named, "--json")
    assert {view["name"] for view in json.loads(seen.out)["views"]} == {*names}


def test_training_views_that_do_not_fit_are_left_out(splat: Splat, tmp_path: Path) -> None:
    scene, run = tmp_path / "scene", tmp_path / "run"
    names = with_negatives(scene, dark=(21,))
    spoiled = [names[0], "view_021.jpg", names[1]]
    train = ("train", scene, "-r", "8", "-n", "260", "--cap-max", "5000", "--batch-size", "2")
    done = splat(*train, "-o", run)
    assert done.code == 0
    (warned,) = [line for line in done.err.splitlines() if "do not fit the others" in line]
    assert warned.startswith("warning: step 108: 3 of 43 training views do not fit the others, and are left out: ")
    assert sorted(name.split()[0] for name in warned.rsplit(": ", 1)[1].split(", ")) == spoiled
    assert " times as bright)" in warned.split("view_021.jpg")[1]
    (remark,) = [line for line in done.err.splitlines() if "were left out" in line]
    assert (
        remark == f"3 of 43 training views were left out, since the others do not show the same: {', '.join(spoiled)}"
    )
    assert "--set train.max_view_error=0" in done.err
    assert "fitted far worse" not in done.err
    named = done.err.split(f"splat eval {run} --views ")[1].split(" --")[0]
    scores = json.loads(splat("eval", run, "--views", named, "--json").out)["views"]
    assert sorted(view["name"] for view in scores) == spoiled
    assert json.loads(splat("info", run, "--json").out)["skipped_views"] == spoiled
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (event,) = [line for line in lines if line["event"] == "views"]
    assert sorted(event["skipped"]) == spoiled

    kept = tmp_path / "kept"
    assert splat(*train, "-o", kept, "--set", "train.max_view_error=0").code == 0
    quality = [json.loads(splat("eval", one, "--json").out)["psnr"] for one in (run, kept)]
    assert quality[0] > quality[1]
    parts = tmp_path / "parts"
    assert splat(*train, "-o", parts, "--stop-at", "150").code == 0
    assert splat("resume", parts).code == 0
    whole, resumed = (load_checkpoint(find_latest_sound(one).path) for one in (run, parts))
    assert resumed.skipped == whole.skipped == (8, 18, 27)
    for name, tensor in resumed.gaussians.items():
        assert torch.equal(tensor, getattr(whole.gaussians, name)), name
    assert splat("resume", parts, "-n", "262", "--set", "train.max_view_error=0").code == 0
    assert load_checkpoint(find_latest_sound(parts).path).skipped == (), "what was left out comes back"


def test_a_sound_capture_keeps_all_its_views(splat: Splat, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = splat("train", SAMPLE, "-o", run, "-r", "8", "-n", "260", "--cap-max", "5000", "--batch-size", "2")
    assert done.code == 0
    assert "left out" not in done.err
    assert "brightness" not in done.err
    assert " blurred, " not in done.err
    assert load_checkpoint(find_latest_sound(run).path).skipped == ()


def test_blurred_images_are_named(splat: Splat, tmp_path: Path) -> None:
    scene, run = tmp_path / "scene", tmp_path / "run"
    shutil.copytree(SAMPLE, scene)
    images = sorted((scene / "images").iterdir())
    for i, radius in ((10, 6), (31, 12)):
        Image.open(images[i]).filter(ImageFilter.GaussianBlur(radius)).save(images[i], quality=95)
    done = splat("train", scene, "-o", run, "-r", "4", "-n", "260", "--cap-max", "5000", "--batch-size", "2")
    assert done.code == 0
    (warned,) = [line for line in done.err.splitlines() if " blurred, " in line]
    assert warned == (
        "warning: step 108: 2 of 43 training images are blurred, with less than 60 % of the detail of their renders: "
        "view_031.jpg, view_010.jpg; add sharp images of what they show"
    )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line.get("alarm") == "blur"] == [108]


def test_exposures_that_vary_are_said_with_a_remedy(splat: Splat, tmp_path: Path) -> None:
    scene = tmp_path / "scene"
    shutil.copytree(SAMPLE, scene)
    for i, path in enumerate(sorted((scene / "images").iterdir())):
        if i % 8:
            imageio.imwrite(path, (imageio.imread(path) * (0.75 if i % 2 else 0.95)).astype(np.uint8))
    train = ("train", scene, "-r", "8", "-n", "260", "--cap-max", "5000", "--batch-size", "2")
    plain = splat(*train, "-o", tmp_path / "plain")
    assert plain.code == 0
    (warned,) = [line for line in plain.err.splitlines() if "brightness" in line]
    assert warned.startswith("warning: step 108: the brightness of the 43 training images varies from the model's by ")
    assert "--ppisp or, faster, --exposure in a new run learns" in warned
    lines = [json.loads(line) for line in (tmp_path / "plain" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line.get("alarm") == "exposure"] == [108]
    learnt = splat(*train, "-o", tmp_path / "learnt", "--exposure")
    assert learnt.code == 0
    assert "brightness" not in learnt.err
    quality = [
        json.loads(splat("eval", tmp_path / name, "--color-corrected", "--json").out) for name in ("plain", "learnt")
    ]
    assert quality[0]["cc_psnr"] < quality[1]["cc_psnr"]


@pytest.mark.parametrize(("names", "views"), [(["a,b.jpg", "c.jpg"], "c.jpg"), (["a,b.jpg"], "train")])
def test_a_name_with_a_comma_is_not_in_the_command_that_shows_misfits(names: list[str], views: str) -> None:
    losses = {f"{i}.jpg": 0.01 for i in range(9)} | dict.fromkeys(names, 0.1)
    remark = _misfit_remark(losses, len(losses), "run")
    assert f"splat eval run --views {views} --sheet" in remark
    assert "a,b.jpg (10 times" in remark


@pytest.mark.parametrize(
    ("losses", "found"),
    [
        ([0.01] * 6 + [0.9], []),  # too few to tell
        ([0.01] * 7 + [0.039], []),
        ([0.01] * 7 + [0.05, 0.03], [7]),
        ([0.01] * 9 + [0.05, 0.09], [10, 9]),
        ([0.0] * 9 + [0.05], []),
    ],
)
def test_misfits_are_judged_by_the_median_loss(losses: list[float], found: list[int]) -> None:
    assert [*misfits({str(i): loss for i, loss in enumerate(losses)})] == [str(i) for i in found]


def test_letterbox_bars_are_named_at_the_end_of_a_run_and_by_eval(splat: Splat, tmp_path: Path) -> None:
    scene, run = tmp_path / "scene", tmp_path / "run"
    shutil.copytree(SAMPLE, scene)
    for path in (scene / "images").iterdir():
        pixels = imageio.imread(path)
        pixels[: len(pixels) // 8] = pixels[-len(pixels) // 8 :] = 0
        imageio.imwrite(path, pixels)
    done = splat("train", scene, "-o", run, "-r", "4", "-n", "20", "--cap-max", "5000")
    assert done.code == 0
    note = "the images have black borders (top 7, bottom 7 of 80x60 pixels), which are trained as part of the scene"
    assert note in done.err
    scored = splat("eval", run)
    assert scored.code == 0
    assert note in scored.err
    assert "black borders" not in scored.out
    assert "black borders" not in splat("eval", run, "-q").err


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ([30.0, 31, 10], None),  # too few to tell
        ([30.0, 31, 32, 25], None),
        ([30.0, 31, 32, 21], ["3.png 21.0"]),
        ([30.0, 31, 12, 32, 10, 33], ["4.png 10.0", "2.png 12.0"]),
        ([30.0] * 20 + [10.0] * 6, ["and 2 more"]),
    ],
)
def test_outliers_are_judged_by_the_median(values: list[float], named: list[str] | None) -> None:
    note = score_note([ViewScore(f"{i}.png", value, 0.9) for i, value in enumerate(values)])
    assert (note is None) == (named is None)
    for text in named or []:
        assert text in str(note)
    if named and len(named) == 2:
        assert str(note).index(named[0]) < str(note).index(named[1]), "worst first"
