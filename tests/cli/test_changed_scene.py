"""What commands say of a scene whose images or cameras have changed since a run was trained on it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import imageio.v3 as imageio
import pytest

from tests.cli.tiny import QUICK
from tests.forked import splat_command
from tests.running import Done, Splat


def reexport(scene: Path) -> None:
    photo = scene / "images/view_03.png"
    imageio.imwrite(photo, imageio.imread(photo) // 2)


def turn(scene: Path) -> None:
    transforms = json.loads((scene / "transforms.json").read_text())
    frame = next(one for one in transforms["frames"] if one["file_path"].endswith("view_08.png"))
    frame["transform_matrix"][0][3] += 0.1
    (scene / "transforms.json").write_text(json.dumps(transforms))


def zoom(scene: Path) -> None:
    transforms = json.loads((scene / "transforms.json").read_text())
    (scene / "transforms.json").write_text(json.dumps({**transforms, "fl_x": 1.1 * transforms["fl_x"]}))


def add(scene: Path) -> None:
    transforms = json.loads((scene / "transforms.json").read_text())
    shutil.copy(scene / "images/view_09.png", scene / "images/view_10.png")
    frame = {**transforms["frames"][-1], "file_path": "images/view_10.png"}
    (scene / "transforms.json").write_text(json.dumps({**transforms, "frames": [*transforms["frames"], frame]}))


def mask(scene: Path) -> None:
    (scene / "masks").mkdir()
    for photo in (scene / "images").iterdir():
        imageio.imwrite(scene / "masks" / photo.name, imageio.imread(photo)[..., 0] * 0 + 255)


def commands(splat: Splat, run: Path, scene: Path, out: Path) -> dict[str, Done]:
    """The commands that use the images of a run."""
    return {
        "eval": splat("eval", run, "--data", scene, "--json", "-q"),
        "render": splat("render", run, "--views", "--data", scene, "-o", out / "views", "--json", "-q"),
        "compare": splat("compare", run, scene, "--json", "-q"),
        "edit": splat("edit", run, "--clean", "--data", scene, "-o", out / "x.ply", "-w", "--json", "-q"),
    }


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (reexport, "the digest of the photos was "),
        (turn, "view_08.png has another pose"),
        (zoom, "view_00.png has another focal length or principal point"),
        (mask, "the digest of the masks was absent, is "),
    ],
)
def test_commands_that_use_images_say_what_has_changed(
    finished_run: Path, tiny_scene: Path, splat: Splat, tmp_path: Path, change: Callable[[Path], None], said: str
) -> None:
    scene = tmp_path / "scene"
    shutil.copytree(tiny_scene, scene)
    for name, done in commands(splat, finished_run, scene, tmp_path).items():
        assert (done.code, done.err) == (0, ""), f"{name}: a copy is the same scene: {done.err}"
    change(scene)
    for name, done in commands(splat, finished_run, scene, tmp_path).items():
        texts = [event["text"] for event in done.objects if event["event"] == "warning"]
        assert (done.code, len(texts)) == (0, 1), f"{name}: {done.err}"
        assert texts[0].startswith(f"{scene}: the scene has changed since step 40 was saved: "), name
        assert said in texts[0], name
        assert done.err == f"warning: {texts[0]}\n", name


def test_views_that_were_added_change_no_figure_silently(
    finished_run: Path, tiny_scene: Path, splat: Splat, tmp_path: Path
) -> None:
    scene = tmp_path / "scene"
    shutil.copytree(tiny_scene, scene)
    before = splat("eval", finished_run, "--json").objects[-1]
    add(scene)
    done = splat("eval", finished_run, "--data", scene, "--json")
    assert "the number of photos was 10, is 11" in done.err
    assert "there were 10 views, there are 11" in done.err
    assert done.objects[-1]["views"] == before["views"], "the run's own held-out views"


def test_a_lens_that_is_undone_otherwise_is_another_image(tiny_scene: Path, splat: Splat, tmp_path: Path) -> None:
    scene, run = tmp_path / "scene", tmp_path / "run"
    shutil.copytree(tiny_scene, scene)
    transforms = json.loads((scene / "transforms.json").read_text())

    def bend(k1: float) -> None:
        lens = {"camera_model": "OPENCV", "k1": k1, "k2": 0.0, "p1": 0.0, "p2": 0.0}
        (scene / "transforms.json").write_text(json.dumps({**transforms, **lens}))

    bend(0.02)
    assert splat("train", scene, "-o", run, "-n", 4, "-q", *QUICK).code == 0
    before = splat("eval", run, "--json", "-q")
    bend(0.021)
    after = splat("eval", run, "--json", "-q")
    assert after.objects[-1]["psnr"] != before.objects[-1]["psnr"], "of views of the same sizes and focal lengths"
    said = f"{scene}: the scene has changed since step 4 was saved: the digest of the lenses that are undone"
    assert (before.err, after.err.startswith(f"warning: {said}")) == ("", True)
    longer = ("resume", run, "-n", 6, "-q")
    refused = splat(*longer)
    assert (refused.code, "--allow-config-change photos" in refused.err) == (3, True), refused.err
    assert splat(*longer, "--allow-config-change", "photos").code == 0
    assert splat("resume", run, "-n", 8, "-q").code == 0, "the run has the new lens from then on"


def test_the_second_run_of_a_comparison_may_have_had_other_images(
    tiny_scene: Path, splat: Splat, tmp_path: Path
) -> None:
    scene = tmp_path / "scene"
    shutil.copytree(tiny_scene, scene)
    for name in ("first", "second"):
        assert splat("train", scene, "-o", tmp_path / name, "-n", 2, "-q", *QUICK).code == 0
        reexport(scene)
    (scene / "images/view_03.png").unlink()
    shutil.copy(tiny_scene / "images/view_03.png", scene / "images/view_03.png")
    first, second = tmp_path / "first", tmp_path / "second"
    done = splat("compare", first, second)
    assert done.code == 0, done.err
    of = second / "ckpts/ckpt_000002.pt"
    assert done.err.count(f"{scene}: the scene has changed since step 2 in {of} was saved: ") == 1
    assert done.err.count("the scene has changed") == 1, "the first run's images are as they were"
    assert "the scene has changed" not in splat("compare", first, first).err


@pytest.mark.parametrize("change", [reexport, lambda scene: (scene / "images/view_03.png").unlink()])
def test_a_scene_that_changes_while_a_run_trains_is_an_alarm(
    tiny_scene: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    scene = tmp_path / "scene"
    shutil.copytree(tiny_scene, scene)
    words = ["train", str(scene), "-o", str(tmp_path / "run"), "-n", "2000", *QUICK, "--json", "-q"]
    with subprocess.Popen([*splat_command(), *words], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        events = []
        for line in process.stdout:
            events.append(json.loads(line))
            if len([event for event in events if event["event"] == "stepped"]) == 1:
                change(scene)
                break
        events += [json.loads(line) for line in process.stdout]
    assert process.returncode == 0, events[-1]
    (alarm,) = (event for event in events if event["event"] == "alarmed" and event["alarm"] == "images")
    assert alarm["text"].startswith("the scene has changed while the run trained: ")
    assert ("the digest of the photos was" in alarm["text"]) != (f"{scene}/images/view_03.png: " in alarm["text"])
