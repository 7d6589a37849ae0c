"""What the command line answers to commands and flags that other programs have, and to names like ours."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from splatcli.cli.commands import app
from splatcli.cli.hints import _COMMANDS, _FLAGS, similar_flag
from splatcli.config import Config, flat_settings
from tests.cli.tiny import QUICK
from tests.running import Splat


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("mcmc --data_dir garden", "splat train SCENE --strategy mcmc"),
        ("convert a.ply b.spz", "splat export MODEL -o FILE converts, splat edit moves and cuts"),
        ("viewer run", "splat view MODEL"),
        ("help trian", "see splat --help"),
        ("render -m run", "the model is a word without a flag: splat render MODEL"),
        ("render run --skip_train", "--views test, which is the default"),
        ("render run --width 640", "--size WxH"),
        ("eval run -o figures.json", "splat eval MODEL --json > figures.json; --sheet sheet.png draws the views"),
        ("edit a.ply -o b.ply --filter-nan", "--filter nan"),
        ("edit a.ply -o b.ply --decimate 50%", "--simplify 50%"),
        ("train X --resume", "splat resume RUN continues a run, and so does the same command with the same -o"),
        ("train X --steps 7000", "-n N"),
        ("train X --max-splats 500k --total-steps 7000", "splat train X --cap-max 500k -n 7000"),
        ("train X --depth-scal 2", "did you mean --depth-scale?"),
        ("train X --compresion", "see splat train --help"),  # --resolution is no typing error of it
        ("sfm X --camera_model OPENCV", "did you mean --camera-model?"),
        ("mesh X --depth 10", "did you mean --max-depth?"),
        ("merge a b", "splat edit A B -o both.ply puts models together; splat merge joins the blocks of one run"),
        ("export run b.ply", "-o names the file to write: -o b.ply"),
        ("render run --views orbit b.gif", "-o names the file to write: -o b.gif"),
        ("train --scene fox", "the scene is a word without a flag: splat train SCENE"),
        ("edit a.ply b.spz", "-o b.spz"),
    ],
)
def test_words_of_other_programs_are_answered(line: str, answer: str, splat: Splat) -> None:
    done = splat(*line.split())
    assert done.code == 2
    assert done.err.splitlines()[-1] == f"  help: {answer}"


def test_a_path_in_place_of_a_command_is_answered_with_the_command_for_it(splat: Splat, tmp_path: Path) -> None:
    scene, run, model = tmp_path / "a scene", tmp_path / "run", tmp_path / "model.ply"
    for folder in (scene / "images", run / "ckpts"):
        folder.mkdir(parents=True)
    model.touch()
    for words, answer in [
        ((scene,), f"splat train '{scene}'"),
        ((run,), f"splat view {run}"),
        ((model, "small.spz"), f"splat export {model} -o small.spz"),
        ((model,), f"splat view {model} shows a model, splat info {model} describes a file"),
    ]:
        done = splat(*words)
        assert done.code == 2
        assert done.err.splitlines() == [f"error[E002]: there is no command {words[0]}", f"  help: {answer}"]


def test_what_is_named_exists() -> None:
    """Flags, settings and commands in the answers are there."""
    root = typer.main.get_command(app)
    flags: dict[str, set[str]] = {}
    for name, command in root.commands.items():  # type: ignore[attr-defined]
        context = command.make_context(name, [], resilient_parsing=True)
        flags[name] = {
            one for parameter in context.command.params for one in (*parameter.opts, *parameter.secondary_opts)
        }
    flags["--version"] = flags["--help"] = set()
    answers = [(name, hint) for names, table in _FLAGS.items() for name in names.split() for hint in table.values()]
    for name, hint in [*answers, *(("", hint) for hint in _COMMANDS.values())]:
        assert name in flags or not name
        own = name
        for part in re.split(r"(?=splat )|[,;] ", hint.format(command=name)):
            found = re.match(r"splat ([\w-]+)", part)
            own = found[1] if found else own
            assert own in flags or not part, hint
            assert set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", part)) <= flags.get(own, set()) | flags.get(
                name, {own}
            ), hint
        assert set(re.findall(r"--set '?([\w.]+)=", hint)) <= flat_settings(Config()).keys()
    taken = [
        (command, flag)
        for commands, table in _FLAGS.items()
        for command in commands.split()
        for flag in " ".join(table).split()
    ]
    assert not [(command, flag) for command, flag in taken if flag in flags[command]]  # an answer that nobody sees


def test_a_flag_is_offered_for_a_similar_one_only() -> None:
    names = ["--resolution", "--preset", "--viewer-host", "--projection", "--points", "--max-steps"]
    for typed in ("--compression", "--resume", "--verbose", "--version", "--iteration", "--max-splats"):
        assert similar_flag(typed, names) is None
    assert similar_flag("--resolutoin", names) == "--resolution"
    assert similar_flag("--res", names) == "--resolution"
    assert similar_flag("--train-resolution", names) == "--resolution"


@pytest.mark.parametrize("name", ["scene.ply", "out.SOG"])
def test_a_run_is_no_file_of_splats(name: str, tiny_scene: Path, splat: Splat, tmp_path: Path) -> None:
    output = tmp_path / name
    done = splat("train", tiny_scene, "-o", output, *QUICK)
    assert done.code == 2
    run = output.with_suffix("")
    assert done.err.splitlines()[1:] == [
        f"  where: -o {output}",
        f"  help: -o {run}, and then splat export {run} -o {output}",
    ]
    assert not output.exists()


def test_a_model_is_no_scene(splat: Splat, tmp_path: Path) -> None:
    model = tmp_path / "model.spz"
    model.touch()
    done = splat("train", model)
    assert done.code == 2
    assert f"splat train SCENE --init {model} starts from it" in done.err


def test_words_that_no_file_can_have_as_a_name_are_refused_as_others(splat: Splat) -> None:
    for words in ([""], [" "], ["a" * 5000], ["export", "run", " "]):
        done = splat(*words)
        assert done.code == 2
        assert done.err.splitlines()[-1] == f"  help: see splat {'export ' * (len(words) > 1)}--help"
