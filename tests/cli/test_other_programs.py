"""Command lines and folders as people know them from other programs."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import typer

from splatcli.cli.commands import app
from splatcli.cli.other_programs import _CHOICES, _FLAGS, _LISTS, _METHODS, _OFF, _SWITCHES
from splatcli.cli.train import scene_to_train
from splatcli.config import Config, flat_settings
from tests.cli.tiny import QUICK
from tests.running import Splat


@pytest.mark.parametrize(
    ("words", "where", "command"),
    [
        ("-s X -m Y", "-s", "splat train X -o Y"),
        ("--source_path X --model_path=Y --eval", "--source_path", "splat train X -o Y"),
        ("--data X --max-num-iterations 30000", "--data", "splat train X -n 30000"),
        ("X --data_dir=a --max_steps 7 -q", "--data_dir", "splat train a X -n 7 -q"),
        ("X --white_background --sh_degree 2", "--white_background", "splat train X --white-background --sh-degree 2"),
        ("-m 'a b' -s X -- --data", "-m", "splat train X -o 'a b' -- --data"),
        ("-s X --densify_until_iter 9", "-s", "splat train X --set schedule.refine_stop=9"),
        ("X --save_iterations 7 30 -q", "--save_iterations", "splat train X --set 'save.steps=[7,30]' -q"),
        ("X --strategy.grow-grad2d=2e-4", "--strategy.grow-grad2d", "splat train X --set strategy.grow_grad2d=2e-4"),
        ("X --opacity_reg 0.01", "--opacity_reg", "splat train X --set strategy.opacity_reg=0.01"),
        ("X --antialiasing --packed", "--antialiasing", "splat train X --antialiased"),
        ("-r 2 -s", "-s", "splat train ... -r 2"),
        ("default --data_dir X --data_factor 4 --result_dir Y", "--data_dir", "splat train X -r 4 -o Y"),
        ("mcmc --data-dir X --cap-max 9", "--data-dir", "splat train X --strategy mcmc --cap-max 9"),
        ("mcmc --cap-max 9", "mcmc", "splat train SCENE --strategy mcmc --cap-max 9"),
        ("splatfacto-mcmc --data X", "--data", "splat train X --strategy mcmc"),
        ("splatfacto --data X colmap --downscale-factor 4", "--data", "splat train X -r 4"),
        ("splatfacto --data X nerfstudio-data --eval-mode all", "--data", "splat train X"),
        ("X --strategy.absgrad True -n 7", "--strategy.absgrad", "splat train X --strategy absgrad -n 7"),
        ("X --strategy.absgrad=False", "--strategy.absgrad", "splat train X --strategy adc"),
        ("X --strategy.refine_every 50", "--strategy.refine_every", "splat train X --set schedule.refine_every=50"),
        ("X --post_processing ppisp -q", "--post_processing", "splat train X --ppisp -q"),
        ("X --steps_scaler 0.25", "--steps_scaler", "splat train X -n 7500"),
        ("X --near_plane 0.2 --steps_scaler 0.25", "--near_plane", "splat train X -n 7500"),
        ("X --batch_size=4 --depth_loss", "--batch_size", "splat train X --batch-size=4 --depth-loss"),
        ("X --random_bkgd", "--random_bkgd", "splat train X --random-background"),
        ("default --data_dir X --ckpt a.pt b.pt", "--data_dir", "splat eval a.pt --data X"),
        ("X --data_device cpu --test_iterations 7 30 -q", "--data_device", "splat train X -q"),
        ("X -w -d depths -i images_4", "-w", "splat train X --white-background --depths depths --images images_4"),
        ("splatfacto --data X --load-dir Y", "--data", "splat resume Y"),
        (
            "X --pipeline.model.camera-optimizer.mode SO3xR3 --pipeline.model.use_bilateral_grid True",
            "--pipeline.model.camera-optimizer.mode",
            "splat train X --pose-opt --bilateral-grid",
        ),
    ],
)
def test_flags_of_other_programs_get_the_command_that_they_mean(
    words: str, where: str, command: str, splat: Splat
) -> None:
    done = splat("train", *shlex.split(words))
    assert done.code == 2
    assert done.err.splitlines()[1:] == [f"  where: {where}", f"  help: {command}"]


def test_a_choice_without_a_counterpart_stays_an_unknown_flag(splat: Splat) -> None:
    done = splat("train", "X", "--camera_model", "fisheye")
    assert done.code == 2
    assert "there is no option --camera_model" in done.err


@pytest.mark.parametrize("guide", ["from-gsplat", "from-3dgs"])
def test_flags_in_the_tables_of_a_guide_are_answered(guide: str, splat: Splat) -> None:
    """A flag that differs from ours is answered with what its row says."""
    answered = 0
    page = (Path(__file__).resolve().parents[2] / "docs" / "guides" / f"{guide}.md").read_text(encoding="utf-8")
    for theirs, ours in re.findall(r"^\| `((?:default |mcmc |-)[^`]*)`[^|]* \| ([^|]*) \|$", page, re.MULTILINE):
        done = splat("train", *shlex.split(theirs), *(() if "--data_dir" in theirs else ("garden",)), "--dry-run")
        if "this is a flag of another program" not in done.err:
            assert theirs.split()[0] in ours  # the same flag
            continue
        answered += 1
        for flag in re.findall(r"(?<![\w-])-[\w-]+", ours.partition(";")[0].partition(",")[0]):
            assert flag in done.err.partition("help: ")[2], theirs
    assert answered > 6


def test_what_stands_for_a_flag_exists() -> None:
    targets = [target for target in {*_FLAGS.values(), *_LISTS.values()} if target]
    settings = [target.rstrip("=") for target in targets if target.endswith("=")]
    assert set(settings) <= flat_settings(Config()).keys()
    command = typer.main.get_command(app).commands["train"]  # type: ignore[attr-defined]
    context = command.make_context("train", ["X"], resilient_parsing=True)
    ours = {name for parameter in context.command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    flags = {target for target in _FLAGS.values() if target and not target.endswith("=")}
    choices = [words for table in _CHOICES.values() for words in table.values()]
    words = [word for words in (*_SWITCHES.values(), *_METHODS.values(), *_OFF.values(), *choices) for word in words]
    assert flags | {word for word in words if word.startswith("-")} <= ours


def test_a_run_and_a_checkpoint_are_resumed(splat: Splat, finished_run: Path) -> None:
    done = splat("train", finished_run, "--json")
    assert done.code == 2
    assert done.objects[-1]["help"] == f"splat resume {finished_run} continues it"
    checkpoint = finished_run / "ckpts" / "ckpt_000040.pt"
    done = splat("train", checkpoint, "--json")
    assert done.code == 2
    assert f"splat resume {checkpoint} continues its run" in done.objects[-1]["help"]


@pytest.fixture
def colmap(tmp_path: Path) -> Path:
    """A folder with images/ and sparse/0/."""
    scene = tmp_path / "a scene"
    (scene / "sparse" / "0").mkdir(parents=True)
    (scene / "images").mkdir()
    (scene / "sparse" / "0" / "cameras.bin").touch()
    return scene


def test_parts_of_a_scene_stand_for_it(colmap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("sparse", "sparse/0", "images"):
        found, note = scene_to_train(colmap / part, is_layout_given=False)
        assert found == colmap
        assert note == f"{colmap / part} belongs to the scene {colmap}, which is trained"
        assert scene_to_train(colmap / part, is_layout_given=True) == (colmap / part, None)
    monkeypatch.chdir(colmap.parent)
    assert scene_to_train(Path("a scene/sparse/0/"), is_layout_given=False)[0] == Path("a scene")
    monkeypatch.chdir(colmap / "images")
    assert scene_to_train(Path("."), is_layout_given=False)[0] == colmap
    assert scene_to_train(Path("../sparse"), is_layout_given=False)[0].samefile(colmap)


def test_other_folders_are_taken_as_they_are(colmap: Path, tmp_path: Path) -> None:
    alone = tmp_path / "images"
    alone.mkdir()
    for path in (colmap, alone, tmp_path / "nosuch", colmap / "sparse" / "nosuch"):
        assert scene_to_train(path, is_layout_given=False) == (path, None)
    shutil.rmtree(colmap / "sparse" / "0")  # an empty sparse/ describes nothing
    assert scene_to_train(colmap / "images", is_layout_given=False) == (colmap / "images", None)


def test_one_of_several_models_is_named_with_its_flag(colmap: Path, splat: Splat) -> None:
    shutil.copytree(colmap / "sparse" / "0", colmap / "sparse" / "1")
    done = splat("train", colmap / "sparse" / "1", "--json")
    assert done.code == 2
    assert done.objects[-1]["help"] == f"splat train '{colmap}' --model sparse/1"


def test_images_beside_their_cameras_train_the_scene(splat: Splat, tiny_scene: Path, tmp_path: Path) -> None:
    done = splat("train", tiny_scene / "images", "-o", tmp_path / "run", "-n", 3, *QUICK)
    assert done.code == 0, done.err
    assert f"note: {tiny_scene / 'images'} belongs to the scene {tiny_scene}, which is trained" in done.err
    assert "estimates" not in done.err
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["data"]["scene"] == str(tiny_scene)


def test_counts_take_k_and_m(splat: Splat, tiny_scene: Path, tmp_path: Path) -> None:
    words = ["-n", "0.003k", "--cap-max", "1.5M", "-o", tmp_path / "run", "-q"]
    done = splat("train", tiny_scene, *words, *QUICK)
    assert done.code == 0, done.err
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["train"]["iterations"], config["strategy"]["cap_max"]) == (3, 1_500_000)
    assert splat("resume", tmp_path / "run", "-n", "0.004k", "-q").lines[0].endswith("ckpt_000004.pt")
