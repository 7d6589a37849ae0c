"""Command lines of nonsense, run in this process: each ends with a documented exit code."""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import tempfile
from pathlib import Path

import typer

from splatcli.checkpoint.file import load_checkpoint
from splatcli.cli.commands import app, run
from splatcli.config import Config
from splatcli.formats.ply import write_ply_file
from splatcli.native.backend import best_isa, load_cpu
from splatcli.render.camera_files import cameras_json
from tests.scene.made import nerfstudio_scene
from tests.torture.harness import Case, Figure, fuzz, main, quiet_streams, rng_of, run_cases
from tests.torture.mutate import NUMBERS, STRINGS

#: 0, and the errors that a command line alone can bring about.
EXPECTED = {0, 2, 3, 4, 5, 8, 10}

#: Names in the folder in which the commands run, beside some that are not there.
_PATHS = [
    "scene",
    "model.ply",
    "run",
    "run/ckpts/ckpt_000005.pt",
    "text.txt",
    "empty",
    "nothing",
    "out",
    "out.ply",
    "-",
]
_PATHS += ["cameras.json", "settings.toml", "out.png", "a/b/c", "/dev/null", "/dev/null/x", "/proc/x/y", ".", ""]
_WORDS = ["sfm", "random", "default", "auto", "cpu", "cuda:1", "test", "train", "all", "white", "#fff", "1,2,3"]
_WORDS += ["0", "1", "2", "4", "8", "0.5", "-1", "true", "false", "[]", "[1, 2]", "null"]


def figures(count: int, seed: int) -> dict[str, Figure]:
    load_cpu(best_isa())  # building it is no part of a command's time
    what = "a command line of odd words runs: it ends with one of the exit codes that are its own fault, never a bug's"
    return fuzz("fuzz_argv", what, case_of, count, seed)


def case_of(seed: int, folder: Path) -> Case:
    original, place = folder / "original", folder / "here"
    _furnish(original)
    options = _options()

    def case(index: int) -> str:
        if tempfile.tempdir != str(folder):  # once in the process that runs the cases
            quiet_streams()
            tempfile.tempdir = str(folder)  # where reports of crashes go
            typer.main.get_command = functools.cache(typer.main.get_command)  # most of a refusal's time otherwise
            os.close(0)
            os.open(os.devnull, os.O_RDONLY)
        if index % 50 == 0 or not place.is_dir():
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(original, place)
        os.chdir(place)
        words = command_line(rng_of(seed, index), options)
        code = run(words)
        if code not in EXPECTED:
            reports = sorted(folder.glob("splat-crash-*"))
            said = reports[-1].read_text().strip().splitlines()[-1] if reports else ""
            raise AssertionError(f"exit code {code} of splat {json.dumps(words)}: {said}")
        return f"exit_{code}"

    return case


def _furnish(folder: Path) -> None:
    """A scene, a run on it, a PLY, cameras and settings: what the words may name."""
    scene = nerfstudio_scene(folder / "scene")

    def train(_: int) -> str:
        quiet_streams()
        words = ["train", str(scene), "-o", str(folder / "run"), "-n", "20", "--stop-at", "5", "--init", "random"]
        return str(run([*words, "--set", "model.random_points=30", "--sh-degree", "1"]))

    assert run_cases(train, 1).words == {"0": 1}
    checkpoint = load_checkpoint(folder / "run" / "ckpts" / "ckpt_000005.pt")
    (folder / "empty").mkdir()
    write_ply_file(checkpoint.gaussians, folder / "model.ply")
    (folder / "text.txt").write_text("hello\n")
    (folder / "cameras.json").write_text(cameras_json(checkpoint.cameras))
    (folder / "settings.toml").write_text("[train]\niterations = 1\n")


def _options() -> dict[str, list[str]]:
    """Command -> the names of its options."""
    group = typer.main.get_command(app)
    found: dict[str, list[str]] = {}
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        names = [name for parameter in command.get_params(typer.Context(command)) for name in parameter.opts]
        found[name] = [option for option in names if option.startswith("-")]
    return found


def command_line(rng: random.Random, options: dict[str, list[str]]) -> list[str]:
    words = _nearly_right(rng, options) if rng.random() < 0.7 else _wild(rng, options)
    if words and words[0] in ("train", "resume"):
        # Lengths are the last word, so that what can run ends soon.
        words += rng.choice([["-n", "1"], ["-n", "0"], ["--stop-at", "1"], ["-n", "2", "--stop-at", "0"]])
    # No command line can hold a NUL, and bytes that are no UTF-8 arrive as surrogates of the lower half.
    return [word[:3000].replace("\0", "0").replace("\ud800", "\udcff") for word in words]


#: Command lines that work.
_GOOD = [
    "train scene -o out -r 2 --sh-degree 1 --test-every 4 --seed 3 --set save.keep_last=2 -q",
    "train scene --init model.ply --strategy default --cap-max 50 --white-background --json",
    "train scene --strategy mcmc --config settings.toml --random-background --antialiased --images images -o out",
    "resume run/ckpts/ckpt_000005.pt --data scene -q",
    *["render run --views all -o pictures --background white --data scene --device cpu"] * 2,
    *["render model.ply --views cameras.json --background 0.1,0.2,0.3 -o pictures"] * 3,
    *["render run/ckpts/ckpt_000005.pt --views test -o - --json"] * 3,
    *["export run -o out.ply", "export model.ply -o - -q", "export run -o cameras2.json --json"] * 4,
    *["compare run model.ply -o out.html --pictures 2", "compare model.ply scene --json"] * 2,
    *["compare model.ply model.ply --frames 2 -o out -w", "compare run --views train --background white -q"] * 2,
    *["edit run -o out.ply --crop sphere:0,0,0,9 --filter opacity>0", "edit model.ply -o out.sog -t 1,0,0 -w"] * 2,
    *["edit run --filter opacity>0 -o out.pt", "edit model.ply -o out.lod --scale 2 -w --json"] * 2,
    *["eval run --data scene --sheet sheet.png --json", "info run", "info model.ply --json"] * 4,
]


def _nearly_right(rng: random.Random, options: dict[str, list[str]]) -> list[str]:
    """A command line that works, but for one or two words of it."""
    words = rng.choice(_GOOD).split()
    for _ in range(rng.choice([1, 1, 1, 2])):
        at = rng.randrange(1, len(words)) if len(words) > 1 else 0
        match rng.randrange(8):
            case 0:
                del words[at]
            case 1:
                words[at:at] = [rng.choice(options[words[0]] if words and words[0] in options else ["-x"]), _value(rng)]
            case 2:
                words[at:at] = ["--set", f"{rng.choice(_KEYS)}={_value(rng)}"]
            case 3:
                words.insert(at, words[rng.randrange(len(words))])
            case _:
                words[at] = _value(rng)
        words = words or ["info"]
    return words


def _wild(rng: random.Random, options: dict[str, list[str]]) -> list[str]:
    """A command, nearly always one that exists, and up to six words that may belong to it."""
    names = [name for name in options if name not in ("bench", "doctor")]  # which take their time
    name = rng.choice([*names, rng.choice(["", "Train", "trian", "--version", "-h", "--", "\0", "é"])])
    known = options.get(name, ["--help"])
    words = [name]
    for _ in range(rng.randint(0, 6)):
        match rng.randrange(10):
            case 0 | 1 | 2:
                words += [rng.choice(known), _value(rng)]
            case 3:
                words.append(f"{rng.choice(known)}{rng.choice(['=', ''])}{_value(rng)}")
            case 4:
                words += ["--set", f"{rng.choice(_KEYS)}{rng.choice(['=', '=', '', ' = ', '=='])}{_value(rng)}"]
            case 5:
                words.append(rng.choice(["--", "-", "---", "--jsn", "-q", "--json", "-qq", "-xyz", "--no-json"]))
            case 6:
                words.append(_value(rng))
            case _:
                words.append(rng.choice(_PATHS))
    return words


def _value(rng: random.Random) -> str:
    odd = rng.choice([rng.choice(NUMBERS), rng.choice(_STRINGS)])
    return rng.choice([rng.choice(_PATHS), rng.choice(_PATHS), rng.choice(_WORDS), odd])


#: Without those that would lead a command out of its folder.
_STRINGS = [text for text in STRINGS if not text.startswith(("/", "..", "~")) and "/.." not in text]
_SECTIONS = Config().model_dump()
_KEYS = [f"{section}.{key}" for section, values in _SECTIONS.items() for key in values]
_KEYS += ["", ".", "train", "train.", "train.iteration", "save.steps.0", "nothing.at.all"]


if __name__ == "__main__":
    main(figures, 100_000)
