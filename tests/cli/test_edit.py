"""``splat edit`` from outside: order, regions, conditions, several models, and what it refuses."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import imageio.v3 as imageio
import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from splatcli.checkpoint.file import load_checkpoint, save_checkpoint
from splatcli.edit.transform import move_camera
from splatcli.formats.ply import write_ply_file
from splatcli.formats.registry import import_model
from splatcli.gaussians import Gaussians
from splatcli.render.camera_files import read_cameras
from splatcli.scene.points import morton_order
from splatcli.similarity import Similarity
from tests.cli.tiny import write_scene
from tests.formats.made import errors, read_ply, scene
from tests.native.cases import NEEDS_COMPILER
from tests.running import Splat


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.ply"
    write_ply_file(scene(400, 2), path)
    return path


def edited(splat: Splat, *words: object) -> Gaussians:
    """The PLY that a command line with -o makes."""
    done = splat("edit", *words)
    assert done.code == 0, done.err
    return read_ply(Path(done.lines[-1]))


def test_operations_apply_in_the_order_given(splat: Splat, model: Path, tmp_path: Path) -> None:
    means = read_ply(model).means
    shift = torch.tensor([1.0, 0.0, -2.0])
    first = edited(splat, model, "-o", tmp_path / "a.ply", "--translate", "1,0,-2", "--scale", "2")
    assert torch.allclose(first.means, 2 * (means + shift), atol=1e-6)
    second = edited(splat, model, "-s2", "--translate=1,0,-2", "-o", tmp_path / "b.ply")
    assert torch.allclose(second.means, 2 * means + shift, atol=1e-6)
    third = edited(splat, "-o", tmp_path / "c.ply", model, "-r", "0,0,90", "-t", "-1,0,0")
    assert torch.allclose(third.means, torch.stack([-means[:, 1] - 1, means[:, 0], means[:, 2]], dim=1), atol=1e-6)
    # A region is in the coordinates that the operations before it lead to.
    moved = edited(splat, model, "-t", "9,0,0", "--crop", "sphere:9,0,0,0.5", "-t", "-9,0,0", "-o", tmp_path / "d.ply")
    assert 10 < len(moved) == int((means.double().norm(dim=1) <= 0.5).sum())


def test_a_rotation_and_back_is_the_model(splat: Splat, model: Path, tmp_path: Path) -> None:
    there = edited(splat, model, "-o", tmp_path / "there.ply", "-r", "30,0,0", "-s", "3", "-t", "1,2,3")
    assert (there.means - read_ply(model).means).abs().max() > 1
    words = ("-t", "-1,-2,-3", "-s", 1 / 3, "-r", "-30,0,0")
    back = edited(splat, tmp_path / "there.ply", "-o", tmp_path / "back.ply", *words)
    found = errors(read_ply(model), back)
    assert found.pop("quats") < 0.1  # degrees; float32 tells no less
    assert max(found.values()) < 3e-6, found


def test_a_known_distance_gives_the_scale(splat: Splat, model: Path, tmp_path: Path) -> None:
    before = read_ply(model)
    ends = [f"{value:.9g}" for value in [*before.means[3].tolist(), *before.means[8].tolist()]]
    after = edited(splat, model, "--scale-from", ",".join([*ends, "12.5"]), "-o", tmp_path / "x.ply")
    assert float((after.means[3] - after.means[8]).norm()) == pytest.approx(12.5, rel=1e-6)
    factor = 12.5 / float((before.means[3] - before.means[8]).norm())
    assert torch.allclose(after.log_scales, before.log_scales + np.log(factor), atol=1e-5)


@pytest.mark.parametrize(
    "region", ["box:-0.4,-0.4,-0.4,0.4,1,0.4", "sphere:0.1,0,0,0.6", "polygon:y:-0.5,-0.5,0.6,-0.4,0,0.7"]
)
def test_crop_and_crop_out_divide_the_model(region: str, splat: Splat, model: Path, tmp_path: Path) -> None:
    inside = edited(splat, model, "--crop", region, "-o", tmp_path / "in.ply")
    outside = edited(splat, model, "--crop-out", region, "-o", tmp_path / "out.ply")
    assert min(len(inside), len(outside)) > 10
    both = edited(splat, tmp_path / "in.ply", tmp_path / "out.ply", "-o", tmp_path / "both.ply")
    before = read_ply(model)
    assert torch.equal(both.means[both.means[:, 0].argsort()], before.means[before.means[:, 0].argsort()])


@pytest.mark.parametrize(
    "condition",
    [
        *("x>0.1", "y<=-0.2", "z >= 0", "opacity>0.3", "opacity<0.05", "opacity<1", "scale<0.02", "min_scale>=0.01"),
        *("anisotropy<3", "volume>1e-6", "scale!=0", "opacity>-1"),
    ],
)
def test_a_condition_keeps_what_matches_in_activated_values(
    condition: str, splat: Splat, model: Path, tmp_path: Path
) -> None:
    before = read_ply(model)
    x, y, z = before.means.double().numpy().T
    sizes = np.exp(before.log_scales.double().numpy())
    names = {
        **{"x": x, "y": y, "z": z, "opacity": 1 / (1 + np.exp(-before.logit_opacities.double().numpy()))},
        **{"scale": sizes.max(axis=1), "min_scale": sizes.min(axis=1)},
        **{"anisotropy": sizes.max(axis=1) / sizes.min(axis=1), "volume": 4 / 3 * np.pi * sizes.prod(axis=1)},
    }
    rows = torch.from_numpy(eval(condition, {}, names))
    assert rows.any()
    nothing = splat("edit", model, "--filter", re.sub("[<>!].*", "<-1e30", condition), "-o", tmp_path / "none.ply")
    name = re.split("[ <>!]", condition)[0]
    assert f"help: {name} is from {names[name].min():.4g} to {names[name].max():.4g} here" in nothing.err
    kept = edited(splat, model, "--filter", condition, "-o", tmp_path / "kept.ply")
    assert torch.equal(kept.means, before.means[rows])
    assert torch.equal(kept.shN, before.shN[rows])


def test_filter_nan_drops_broken_rows_and_counts_them(splat: Splat, tmp_path: Path) -> None:
    path = tmp_path / "broken.ply"
    write_ply_file(scene(50), path)
    payload = bytearray(path.read_bytes())
    start = payload.index(b"end_header\n") + len(b"end_header\n")
    payload[start : start + 4] = np.array(np.nan, "<f4").tobytes()
    path.write_bytes(payload)
    assert splat("edit", path, "-o", tmp_path / "x.ply").code == 5
    assert not (tmp_path / "x.ply").exists()
    done = splat("edit", path, "--filter", "nan", "-o", tmp_path / "x.ply", "--json")
    assert done.code == 0, done.err
    (effect,) = done.objects[-1]["operations"]
    assert (effect["dropped"], effect["left"]) == (1, 49)
    assert torch.equal(read_ply(tmp_path / "x.ply").means, scene(50).means[1:])
    done = splat("edit", path, path, "-o", tmp_path / "both.ply", "--scale", 2, "--filter", "nan", "--json")
    assert done.code == 0, done.err
    effect = done.objects[-1]["operations"][-1]
    assert (effect["dropped"], effect["left"]) == (2, 98), "an operation after -o is for all models"
    done = splat("edit", path, "-o", tmp_path / "after.ply", "--filter", "nan")
    assert done.code == 0, done.err
    assert (tmp_path / "after.ply").read_bytes() == (tmp_path / "x.ply").read_bytes(), "the place of -o is free"


def test_degree_and_order(splat: Splat, model: Path, tmp_path: Path) -> None:
    before = read_ply(model)
    after = edited(splat, model, "--sh-degree", "1", "--reorder", "morton", "-o", tmp_path / "x.ply")
    order = torch.from_numpy(morton_order(before.means.numpy()))
    assert not torch.equal(order, torch.arange(len(order)))
    assert torch.equal(after.means, before.means[order])
    assert torch.equal(after.shN, before.shN[order][:, :3])


def test_models_have_operations_of_their_own_and_together(splat: Splat, model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.ply"
    write_ply_file(scene(30, 0, seed=1), other)
    a, b = read_ply(model), read_ply(other)
    words = (model, "--scale", "2", other, "-t", "0,0,5", "-o", tmp_path / "x.ply", "-t", "1,0,0")
    both = edited(splat, *words)
    step = torch.tensor([1.0, 0.0, 0.0])
    assert torch.allclose(both.means[:400], 2 * a.means + step, atol=1e-6)
    assert torch.allclose(both.means[400:], b.means + step + torch.tensor([0, 0, 5.0]), atol=1e-6)
    # The lower degree has no harmonics, and gets zeros.
    assert torch.equal(both.shN[:400], a.shN)
    assert both.sh_degree == 2
    assert not both.shN[400:].any()
    refused = splat("edit", "--scale", "2", model, other, "-o", tmp_path / "y.ply")
    assert refused.code == 2
    assert "before all of several models" in refused.err


def test_a_dry_run_counts_and_writes_nothing(splat: Splat, model: Path, tmp_path: Path) -> None:
    words = (model, "-t", "0,0,1", "--crop", "sphere:0,0,1,0.5", "--filter", "opacity>0.5")
    before = sorted(tmp_path.rglob("*"))
    planned = splat("edit", *words, "-o", tmp_path / "no" / "x.ply", "--dry-run", "--json").objects[-1]
    assert splat("edit", *words, "--dry-run").code == 0
    assert sorted(tmp_path.rglob("*")) == before
    done = splat("edit", *words, "-o", tmp_path / "no" / "x.ply", "--json").objects[-1]
    assert planned["operations"] == done["operations"]
    moved, cropped, faint = done["operations"]
    assert (moved["changed"], moved["left"]) == (400, 400)
    assert cropped["left"] == 400 - cropped["dropped"]
    assert faint["left"] == done["num_gaussians"] == len(read_ply(tmp_path / "no" / "x.ply")) > 0


@NEEDS_COMPILER
def test_a_picture_shows_what_is_dropped_in_red(splat: Splat, finished_run: Path, tmp_path: Path) -> None:
    picture, other = tmp_path / "edit.png", tmp_path / "none.png"
    words = (finished_run, "--translate", "3,0,0", "--filter", "x>3", "--rotate", "0,90,0")
    done = splat("edit", *words, "--dry-run", "--picture", picture, "--json")
    assert done.code == 0, done.err
    assert [path.name for path in tmp_path.iterdir()] == ["edit.png"]
    assert done.objects[-1]["picture"] == str(picture)
    assert done.objects[-1]["operations"][1]["dropped"] > 0
    assert splat("edit", finished_run, "--scale", "2", "--dry-run", "--picture", other).code == 0

    def redness(path: Path) -> np.ndarray:
        red, green, blue = np.moveaxis(imageio.imread(path).astype(float), -1, 0)
        return (red > 2 * green) & (red > 2 * blue) & (red > 60)

    assert redness(picture).mean() > 0.05 + redness(other).mean()
    # Two views: a camera of the run, and one from outside, of the same height.
    height, width = imageio.imread(picture).shape[:2]
    assert width > height
    # A move of everything moves the cameras along; the picture inside stays.
    moved = tmp_path / "moved.png"
    assert splat("edit", finished_run, "--filter", "x>0", "--dry-run", "--picture", moved).code == 0
    inside = (slice(None), slice(0, width - height))
    same = np.abs(imageio.imread(picture)[inside].astype(int) - imageio.imread(moved)[inside].astype(int))
    assert (same > 8).mean() < 0.01
    assert splat("edit", *words, "--dry-run", "--picture", picture).code == 8
    refused = splat("edit", *words, "--dry-run", "--picture", tmp_path / "edit.jpg")
    assert refused.code == 2
    assert "pictures are PNG files" in refused.err


@NEEDS_COMPILER
def test_a_picture_of_a_file_without_cameras_is_one_view_from_outside(
    splat: Splat, model: Path, tmp_path: Path
) -> None:
    picture, target = tmp_path / "edit.png", tmp_path / "small.ply"
    words = ("edit", model, model, "-o", target, "--crop", "sphere:0,0,0,0.5", "--picture", picture)
    assert splat(*words).code == 0
    image = imageio.imread(picture)
    assert image.shape == (960, 960, 3)
    assert 0.01 < (image.max(axis=2) > 40).mean() < 0.99  # all of it, and some room around
    assert len(read_ply(target)) > 0


def test_a_file_that_is_there_stays_without_overwrite(splat: Splat, model: Path, tmp_path: Path) -> None:
    payload = model.read_bytes()
    refused = splat("edit", model, "-o", model, "--scale", "2")
    assert refused.code == 8
    assert "-w" in refused.err
    assert model.read_bytes() == payload
    assert edited(splat, model, "-o", model, "--scale", "2", "-w").means.abs().max() > 0
    assert model.read_bytes() != payload


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--crop", "sphere:90,0,0,1"), "positions are from (-"),
        (("-o", "x", "--scale", "2"), ".usdz, .lod, .pt\n"),
        (("--crop-out", "sphere:0,0,0,99"), "none of the 400"),
        (("--crop-out", "cube:1"), "--crop-out box:"),
        (("--filter", "opacity>=1"), "none of the 400"),
        (("--filter", "size>1"), "no 'size'"),
        (("--filter", "opacity"), "no condition"),
        (("--filter", "x>nan"), "1 finite number"),
        (("--scale", "0"), "leaves no scene"),
        (("--scale", "-2"), "leaves no scene"),
        (("--scale", "inf"), "1 finite number"),
        (("--translate", "1,2"), "3 finite numbers"),
        (("--rotate", "a,b,c"), "no list of numbers"),
        (("--translate", "1e39,0,0"), "range of float32"),
        (("--sh-degree", "5"), "no SH degree"),
        (("--reorder", "hilbert"), "no order"),
        (("--scale-from", "1,2,3,1,2,3,1"), "the same point"),
        (("--scale-from", "0,0,0,1,0,0,0"), "leaves no scene"),
        (("--scale-from", "0,0,0,1,0,0"), "7 finite numbers"),
        (("--scale",), "requires an argument"),
        (("-wt", "1,0,0"), "in one word"),
        (("--ordered-operation", "x"), "no such option"),
        (("-o", "-", "--scale", "2", "--json"), "both want stdout"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(
    words: tuple[str, ...], said: str, splat: Splat, model: Path, tmp_path: Path
) -> None:
    output = () if "-o" in words else ("-o", tmp_path / "x.ply")
    done = splat("edit", model, *output, *words)
    assert done.code == 2, done.err
    assert said in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "x.ply").exists()


def test_every_model_is_looked_for_before_the_work(splat: Splat, model: Path, tmp_path: Path) -> None:
    done = splat("edit", model, "--clean", tmp_path / "nowhere.ply", "-o", tmp_path / "x.ply")
    assert (done.code, "there is no such model" in done.err, "--clean" in done.err) == (2, True, False), done.err


def test_a_checkpoint_comes_in(splat: Splat, finished_run: Path, tmp_path: Path) -> None:
    plain, turned = tmp_path / "plain.ply", tmp_path / "turned.glb"
    assert splat("export", finished_run, "-o", plain).code == 0
    assert splat("edit", finished_run, "-r", "0,0,180", "-o", turned).code == 0
    before, after = read_ply(plain), import_model(turned).columns
    assert torch.allclose(after.means[:, :2], -before.means[:, :2], atol=1e-5)
    assert torch.allclose(after.means[:, 2], before.means[:, 2], atol=1e-5)


def test_the_first_view_of_a_page_moves_along(splat: Splat, finished_run: Path, tmp_path: Path) -> None:
    views = []
    for name, words in (("a", ()), ("b", ("--scale", "2")), ("c", ("--scale", "2", "-t", "0,3,4"))):
        page = tmp_path / f"{name}.html"
        assert splat("edit", finished_run, "-o", page, *words).code == 0
        found = re.search(r'"initial": ({.*?})', page.read_text())
        assert found is not None
        views.append({key: np.array(value) for key, value in json.loads(found.group(1)).items()})
    plain, scaled, shifted = views
    assert np.linalg.norm(plain["position"]) > 1
    # The middle of the scene is found in Gaussians that a page stores roughly.
    for key, tolerance in (("position", 1e-9), ("target", 1e-4)):
        assert np.abs(scaled[key] - 2 * plain[key]).max() < tolerance
        assert np.linalg.norm(shifted[key] - scaled[key]) == pytest.approx(5, abs=tolerance)


def test_what_leads_to_the_input_stays_only_without_a_move(splat: Splat, finished_run: Path, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(next((finished_run / "ckpts").glob("*.pt")))
    place = (47.25, -8.5, 430.25)
    checkpoint.dataset = replace(checkpoint.dataset, offset=(1000.0, 2000.0, 0.0), place=place)
    save_checkpoint(tmp_path / "far.pt", checkpoint)
    for frame, shift in (("normalised", 0.0), ("input", (1000.0, 2000.0, 0.0))):
        done = splat("export", tmp_path / "far.pt", "-o", tmp_path / "c.json", "--frame", frame)
        assert done.code == 0, done.err
        found = np.stack([camera.center for camera in read_cameras(tmp_path / "c.json")])
        assert_allclose(found, np.stack([camera.center for camera in checkpoint.cameras]) + shift, rtol=0, atol=1e-9)
        assert ("offset" in json.loads((tmp_path / "c.json").read_text())) is (frame == "normalised")
    unmoved = [("--filter", "opacity>0"), ("--level", "z")]  # z is up in a run with a place
    for words, kept in ((unmoved[0], True), (unmoved[1], True), (("-t", "0,0,1"), False), (("--level", "x"), False)):
        done = splat("edit", tmp_path / "far.pt", "-o", tmp_path / "x.ply", "-w", *words)
        assert done.code == 0, done.err
        header = (tmp_path / "x.ply").read_bytes().partition(b"end_header")[0].decode()
        assert ("add 1000 2000 0 to positions" in header) is kept
        assert ("47.25 -8.5 430.25" in header) is kept
        assert ("are left out" in done.err) is not kept
    for words, kept in (((), True), (("-t", "0,0,1"), False)):
        done = splat("edit", finished_run, "-o", tmp_path / "x.ply", "-w", "--align-to", tmp_path / "far.pt", *words)
        assert done.code == 0, done.err
        header = (tmp_path / "x.ply").read_bytes().partition(b"end_header")[0].decode()
        assert ("add 1000 2000 0 to positions" in header) is kept, "the offset of the model that it lies on now"
        assert ("47.25 -8.5 430.25" in header) is kept
        assert ("lies as the one that it was aligned with: add 1000" in done.err) is kept


@pytest.fixture
def moved(finished_run: Path, tmp_path: Path) -> Path:
    """The run's checkpoint with the poses that MOVES lead to."""
    checkpoint = load_checkpoint(next((finished_run / "ckpts").glob("*.pt")))
    whole = Similarity(scale=2.5, shift=np.array([1.0, 2.0, -3.0])).after(Similarity.euler([20.0, -50.0, 110.0]))
    checkpoint.cameras = [move_camera(camera, whole) for camera in checkpoint.cameras]
    save_checkpoint(tmp_path / "moved.pt", checkpoint)
    return tmp_path / "moved.pt"


MOVES = ("--rotate", "20,-50,110", "--scale", "2.5", "--translate", "1,2,-3")


def test_a_model_is_aligned_with_the_cameras_of_another(
    splat: Splat, finished_run: Path, moved: Path, tmp_path: Path
) -> None:
    wanted = edited(splat, finished_run, "-o", tmp_path / "a.ply", *MOVES)
    # Whatever was done before, and whichever side of -o it is on.
    found = edited(splat, finished_run, "-o", tmp_path / "b.ply", "--scale", "7", "--level", "x", "--align-to", moved)
    own = edited(splat, finished_run, "--align-to", moved, "-o", tmp_path / "c.ply")
    for model in (found, own):
        differences = errors(wanted, model)
        assert differences.pop("quats") < 0.05, differences
        assert max(differences.values()) < 2e-5, differences
    done = splat("edit", finished_run, "--align-to", moved, "--dry-run", "--json").objects[-1]["operations"][0]
    count = len(load_checkpoint(moved).train)
    assert f"{count} of {count} shared cameras agree, off by" in done["line"]


def test_a_model_is_aligned_with_a_scene(splat: Splat, finished_run: Path, tiny_scene: Path, tmp_path: Path) -> None:
    back = edited(splat, finished_run, "-o", tmp_path / "b.ply", *MOVES, "--align-to", tiny_scene)
    same = edited(splat, finished_run, "-o", tmp_path / "a.ply", "--scale", "1")
    assert (back.means - same.means).abs().max() < 1e-4


def test_what_cannot_be_aligned_is_named(
    splat: Splat, finished_run: Path, tiny_scene: Path, moved: Path, model: Path, tmp_path: Path
) -> None:
    checkpoint = load_checkpoint(moved)
    checkpoint.cameras = [replace(camera, name=f"other/{camera.name}") for camera in checkpoint.cameras]
    save_checkpoint(tmp_path / "renamed.pt", checkpoint)
    for words, reason in (
        ((model, "--align-to", tiny_scene), "the model has no cameras, and a scene has no Gaussians"),
        ((model, "--align-to", moved), "bring the model roughly into place first"),
        ((finished_run, "--align-to", tmp_path / "renamed.pt"), "training cameras are in it by name, at least 5"),
        ((finished_run, "--align-to", tmp_path / "none"), "there is no such model"),
    ):
        done = splat("edit", *words, "-o", tmp_path / "x.ply")
        assert done.code == 2, done.err
        assert reason in done.err
        assert not (tmp_path / "x.ply").exists()


def test_models_at_different_offsets_are_reported(splat: Splat, finished_run: Path, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(next((finished_run / "ckpts").glob("*.pt")))
    checkpoint.dataset = replace(checkpoint.dataset, offset=(1000.0, 2000.5, 0.0))
    save_checkpoint(tmp_path / "far.pt", checkpoint)
    words = ("edit", finished_run, tmp_path / "far.pt", "-o", tmp_path / "x.ply", "-w")
    done = splat(*words)
    assert done.code == 0
    assert "name --translate 1000,2000.5,0 after it" in done.err
    done = splat(*words[:3], "--translate", "1000,2000.5,0", *words[3:])
    assert done.code == 0
    assert "offset from the input than" not in done.err
    means = read_ply(tmp_path / "x.ply").means
    half = len(means) // 2
    assert torch.allclose(means[half:] - means[:half], torch.tensor([1000.0, 2000.5, 0.0]), atol=2e-3)


@pytest.mark.parametrize(("given", "left"), [("100", 100), ("0.25", 100), ("25%", 100), ("0.3k", 300), ("9k", 400)])
def test_neighbours_are_merged(splat: Splat, model: Path, tmp_path: Path, given: str, left: int) -> None:
    done = splat("edit", model, "-o", tmp_path / "a.ply", "--simplify", given, "--json")
    assert done.code == 0, done.err
    (operation,) = done.objects[-1]["operations"]
    assert operation["merged"] == 400 - left
    assert operation["left"] == len(read_ply(tmp_path / "a.ply")) == left


@NEEDS_COMPILER
def test_the_cameras_of_a_checkpoint_tell_what_may_be_merged(splat: Splat, finished_run: Path, tmp_path: Path) -> None:
    before = len(load_checkpoint(finished_run / "ckpts" / "ckpt_000040.pt").gaussians)
    seen = edited(splat, finished_run, "-o", tmp_path / "seen.ply", "--simplify", "50%")
    splat("export", finished_run, "-o", tmp_path / "model.ply", "-q")
    blind = edited(splat, tmp_path / "model.ply", "-o", tmp_path / "blind.ply", "--simplify", "50%")
    assert len(seen) == len(blind) == round(before / 2)
    assert not torch.equal(seen.means, blind.means)
    # Moved cameras see the moved model: the same pairs, but for those that rounding decides.
    words = ("-t", "8,0,0", "-r", "0,0,90", "--simplify", "50%", "-r", "0,0,-90", "-t", "-8,0,0")
    moved = edited(splat, finished_run, "-o", tmp_path / "moved.ply", *words)
    same = [torch.cdist(seen.means.double(), other.means.double()).amin(dim=1) < 1e-5 for other in (moved, blind)]
    assert same[0].double().mean() > 0.9 > same[1].double().mean()


@pytest.mark.parametrize("given", ["0", "-3", "1.5", "120%", "many", "nan", "0%"])
def test_no_number_of_gaussians(splat: Splat, model: Path, tmp_path: Path, given: str) -> None:
    done = splat("edit", model, "-o", tmp_path / "a.ply", f"--simplify={given}")
    assert done.code == 2
    assert "--simplify" in done.err
    assert not (tmp_path / "a.ply").exists()


def test_a_run_is_levelled_by_its_cameras(splat: Splat, finished_run: Path, tmp_path: Path) -> None:
    """The cameras of the tiny scene stand upright around the z axis."""
    splat("export", finished_run, "-o", tmp_path / "before.ply", "-q")
    before = read_ply(tmp_path / "before.ply").means
    upright = edited(splat, finished_run, "-o", tmp_path / "z.ply", "--level", "z")
    assert torch.allclose(upright.means, before, atol=1e-4)
    tilted = ("--rotate", "30,40,0", "--level", "-y")
    down = edited(splat, finished_run, "-o", tmp_path / "y.ply", *tilted).means
    assert torch.allclose(-down[:, 1], before[:, 2], atol=1e-4)
    assert torch.allclose(down.norm(dim=1), before.norm(dim=1), atol=1e-4)


def test_what_has_no_up_is_not_levelled(splat: Splat, model: Path, tmp_path: Path) -> None:
    done = splat("edit", model, "-o", tmp_path / "a.ply", "--level", "z")
    assert done.code == 2
    assert "neither cameras nor a dominant plane" in done.err
    done = splat("edit", model, "-o", tmp_path / "a.ply", "--level", "up")
    assert done.code == 2
    assert "'up' is no axis" in done.err
    assert not (tmp_path / "a.ply").exists()


@pytest.fixture
def fogged(finished_run: Path, tmp_path: Path) -> Path:
    """The checkpoint of a short run with patches."""
    return with_patches(finished_run, tmp_path)


def with_patches(run: Path, folder: Path) -> Path:
    """The run's checkpoint with a bright patch before each fourth training camera, beside the ball."""
    checkpoint = load_checkpoint(max((run / "ckpts").glob("*.pt")))
    own = checkpoint.gaussians
    cameras = checkpoint.refined_cameras()[1::4]
    places = [camera.center + camera.viewmat[:3, :3].T @ [0.42, 0.25, 1.0] for camera in cameras]
    patches = own.map(lambda tensor: torch.zeros(len(places), *tensor.shape[1:]))
    patches.means.copy_(torch.from_numpy(np.stack(places)))
    patches.quats[:, 0] = 1
    patches.log_scales.fill_(np.log(0.06))
    patches.logit_opacities.fill_(0.0)
    patches.sh0.fill_(1.7)
    checkpoint.gaussians = Gaussians(
        **{name: torch.cat([tensor, dict(patches.items())[name]]) for name, tensor in own.items()}
    )
    checkpoint.moments = checkpoint.sh_last_step = None
    save_checkpoint(folder / "fogged.pt", checkpoint)
    return folder / "fogged.pt"


@NEEDS_COMPILER
def test_clean_drops_what_the_photos_contradict(splat: Splat, fogged: Path, tiny_scene: Path, tmp_path: Path) -> None:
    before = load_checkpoint(fogged).gaussians
    words = ("edit", fogged, "--translate", "3,0,0", "--clean", "-o", tmp_path / "clean.ply")
    planned = splat(*words, "--dry-run", "--json", "--picture", tmp_path / "edit.png").objects[-1]
    assert (tmp_path / "edit.png").is_file()
    assert not (tmp_path / "clean.ply").exists()
    done = splat(*words, "--json")
    assert done.code == 0, done.err
    facts = done.objects[-1]
    assert facts["operations"] == planned["operations"]
    effect = facts["operations"][1]
    assert "--clean normal" in effect["line"]
    assert "; by the photos of " in effect["line"]
    left = read_ply(tmp_path / "clean.ply").means - torch.tensor([3.0, 0, 0])
    assert len(left) == len(before) - effect["dropped"] > len(before) / 2
    patches = before.means[before.sh0[:, 0] == 1.7]
    assert len(patches) >= 2
    assert torch.cdist(left, patches).min() > 0.01
    # Moved operations behind -o see the same; so does a scene that is named.
    words = ("edit", fogged, "-o", tmp_path / "other.ply", "--clean=normal", "--data", tiny_scene, "--json")
    assert splat(*words).objects[-1]["num_gaussians"] == pytest.approx(facts["num_gaussians"], abs=2)


@NEEDS_COMPILER
def test_a_file_of_splats_has_the_cameras_and_photos_of_the_scene_that_is_named(
    splat: Splat, good_run: Path, tiny_scene: Path, tmp_path: Path
) -> None:
    """Its own scene serves --clean and --level; one of other images is an error before anything is dropped."""
    fogged = with_patches(good_run, tmp_path)
    assert splat("export", fogged, "-o", tmp_path / "fogged.ply", "-q").code == 0
    words = ("edit", tmp_path / "fogged.ply", "-o", tmp_path / "clean.ply", "--clean")
    done = splat(*words, "--data", tiny_scene, "--json")
    assert done.code == 0, done.err
    effect = done.objects[-1]["operations"][0]
    cameras = load_checkpoint(fogged).refined_cameras()
    held_out = len(cameras) - len(load_checkpoint(fogged).train)
    assert held_out > 0
    assert effect["line"].endswith(f"; by the photos of {len(cameras) - held_out} of {len(cameras)} views")
    before = read_ply(tmp_path / "fogged.ply")
    left = read_ply(tmp_path / "clean.ply").means
    assert len(left) == len(before) - effect["dropped"] > len(before) / 2
    of_run = edited(splat, fogged, "-o", tmp_path / "of_run.ply", "--clean").means
    patches = before.means[before.sh0[:, 0] == 1.7]
    known, gone = (torch.cdist(patches, means).min(dim=1).values > 0.01 for means in (of_run, left))
    assert known.sum() >= 2
    assert torch.equal(gone, known)
    levelled = ("-o", tmp_path / "z.ply", "--rotate", "30,40,0", "--level", "z", "--data", tiny_scene)
    refused = splat("edit", tmp_path / "fogged.ply", *levelled[:2], "--refine", 5, "--data", tiny_scene)
    assert (refused.code, "is a file of splats" in refused.err) == (2, True)
    upright = edited(splat, tmp_path / "fogged.ply", *levelled)
    assert torch.allclose(upright.means[:, 2], before.means[:, 2], atol=1e-3)
    turned = ("-o", tmp_path / "back.ply", "--rotate", "30,40,0", "--align-to", good_run, "--data", tiny_scene)
    done = splat("edit", tmp_path / "fogged.ply", *turned)
    assert f"{len(cameras)} of {len(cameras)} shared cameras agree" in done.err, done.err
    assert torch.allclose(read_ply(tmp_path / "back.ply").means, before.means, atol=1e-3)
    half = ("-o", tmp_path / "half.ply", "-w", "--simplify", "0.5")
    alone, known = (edited(splat, tmp_path / "fogged.ply", *half, *more).means for more in ((), ("--data", tiny_scene)))
    assert len(alone) == len(known) == (len(before) + 1) // 2
    assert not torch.equal(alone, known)
    other = write_scene(tmp_path / "inverted")
    for path in other.rglob("*.png"):
        imageio.imwrite(path, 255 - imageio.imread(path)[..., :3])
    before_error = (tmp_path / "clean.ply").read_bytes()
    done = splat(*words, "--overwrite", "--data", other)
    assert (done.code, (tmp_path / "clean.ply").read_bytes()) == (3, before_error)
    assert "do not resemble the images" in done.err
    assert str(other) in done.err


@NEEDS_COMPILER
def test_clean_says_what_it_goes_by(splat: Splat, fogged: Path, model: Path, tiny_scene: Path, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(fogged)
    checkpoint.dataset = replace(checkpoint.dataset, root=str(tmp_path / "gone"))
    save_checkpoint(tmp_path / "moved.pt", checkpoint)
    done = splat("edit", tmp_path / "moved.pt", "--clean", "--dry-run")
    assert done.code == 0, done.err
    assert "--clean goes without photos" in done.err
    assert "by neighbours, and blend weights in " in done.out
    assert splat("edit", tmp_path / "moved.pt", "--clean", "--data", tmp_path / "gone", "--dry-run").code == 3
    checkpoint.train, checkpoint.test = sorted([*checkpoint.train, *checkpoint.test]), []
    checkpoint.dataset = replace(checkpoint.dataset, root=str(tiny_scene))
    save_checkpoint(tmp_path / "of_others.pt", checkpoint)
    done = splat("edit", tmp_path / "of_others.pt", "--clean", "--dry-run")
    assert done.code == 0, done.err
    assert "--clean goes without photos: the scene has changed since step" in done.err
    refused = splat("edit", tmp_path / "of_others.pt", "--clean", "--data", tiny_scene, "--dry-run")
    assert refused.code == 3
    assert "other views are held out" in refused.err
    done = splat("edit", fogged, "--clean", "light", "--dry-run")
    assert "--clean light" in done.out
    assert "; by blend weights in " in done.out
    done = splat("edit", "--clean", model, "--dry-run")
    assert done.code == 0, done.err
    assert "by neighbours alone" in done.out
    for words, has_effect in (
        ((fogged, "--clean"), True),
        ((fogged, "--scale", 2), False),
        ((model, "--scale", 2), False),
    ):
        done = splat("edit", *words, "--data", tiny_scene, "--dry-run")
        assert (done.code, "--data has no effect" in done.err) == (0, not has_effect), done.err
    refused = splat("edit", model, "--clean=much", "--dry-run")
    assert refused.code == 2
    assert "no level 'much'" in refused.err
