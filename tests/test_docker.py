"""The Dockerfile, without Docker: its structure, its context, and its commands in an environment of their own."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.cli.tiny import QUICK, write_scene

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Stage:
    """A FROM and what follows it: (instruction, argument), continued lines joined."""

    base: str
    name: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def arguments(self, instruction: str) -> list[str]:
        return [argument for name, argument in self.instructions if name == instruction]


def stages() -> dict[str, Stage]:
    """The stages of the Dockerfile by name, in their order."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    found: dict[str, Stage] = {}
    stage = None
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        instruction, _, argument = line.partition(" ")
        if instruction == "FROM":
            base, _, name = argument.partition(" AS ")
            stage = found[name] = Stage(base, name)
        else:
            assert stage is not None
            stage.instructions.append((instruction, re.sub(r" +", " ", argument)))
    return found


def chain(name: str) -> list[Stage]:
    """The stages that ``name`` builds upon, the first one first, and itself."""
    found = stages()
    stage = found[name]
    return [*(chain(stage.base) if stage.base in found else []), stage]


def copy_context(target: Path) -> Path:
    """The files that ``docker build`` gets of this checkout, by .dockerignore."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    kept = [rule[1:] for rule in rules if rule.startswith("!")]
    left_out = [rule.removeprefix("**/") for rule in rules[1:] if not rule.startswith("!")]

    def ignored(folder: str, names: list[str]) -> set[str]:
        inside = Path(folder).relative_to(ROOT)
        return {name for name in names if any(rule in (str(inside / name), name) for rule in left_out)}

    for name in kept:
        source, copy = ROOT / name, target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, ignore=ignored)
        else:
            shutil.copy(source, copy)
    return target


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_the_images_run_splat_without_rights_and_without_a_compiler(target: str) -> None:
    parents = chain(target)
    assert parents[0].base.startswith("python:3.")
    last = parents[-1]
    assert last.arguments("ENTRYPOINT") == ['["splat"]']
    (user,) = last.arguments("USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)
    position = [name for name, _ in last.instructions].index("USER")
    assert not {"RUN", "COPY"} & {name for name, _ in last.instructions[position:]}, "nothing is changed after that"
    commands = " ".join(command for stage in parents for command in stage.arguments("RUN"))
    assert "apt-get" not in commands
    assert "nvcc" not in commands
    assert f"--mount=type=bind,from=wheel-{target}," in commands
    (work,) = {place for stage in parents for place in stage.arguments("WORKDIR")}
    assert work == "/work"


def test_the_compiler_for_cuda_is_that_of_the_extra() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["cuda"]
    install = next(command for command in stages()["wheel-cuda"].arguments("RUN") if "nvcc" in command)
    assert [word for word in shlex.split(install) if word.startswith("nvidia-")] == extra


def test_commands_are_of_the_shell_and_files_exist(tmp_path: Path) -> None:
    context = copy_context(tmp_path / "context")
    for stage in stages().values():
        for command in stage.arguments("RUN"):
            text = re.sub(r"--mount=\S+ ", "", command)
            assert subprocess.run(["bash", "-nc", text], check=False).returncode == 0, text
        for copy in stage.arguments("COPY"):
            assert (context / shlex.split(copy)[0]).exists()
        assert not stage.arguments("ADD")


def test_the_context_is_enough_for_the_wheel(tmp_path: Path) -> None:
    context = copy_context(tmp_path / "context")
    names = []
    for number, root in enumerate((ROOT, context)):
        dist = tmp_path / str(number)
        command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(dist), str(root)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        (wheel,) = dist.iterdir()
        with zipfile.ZipFile(wheel) as archive:
            names.append(sorted(archive.namelist()))
    assert names[0] == names[1]


@pytest.mark.slow  # installs torch
def test_the_commands_work_in_an_environment_of_their_own(tmp_path: Path) -> None:
    """Those of the target cpu, but for apt-get and useradd: a wheel is built, installed elsewhere, and trains."""
    places = {"/opt/constraints.txt": str(ROOT / "constraints.txt"), "/dist/": str(tmp_path / "src" / "dist") + "/"}

    def run_stage(environment: Path, stage: Stage, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        arguments = dict(argument.split("=", 1) for argument in stage.arguments("ARG"))
        paths = {"PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        for command in stage.arguments("RUN"):
            if re.match(r"apt-get|useradd", command):
                continue
            text = re.sub(r"--mount=\S+ ", "", command)
            for place, here in places.items():
                text = text.replace(place, here)
            done = subprocess.run(
                ["bash", "-euc", text],
                cwd=folder,
                env={**os.environ, **arguments, **paths},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"

    build, installed = tmp_path / "build", tmp_path / "installed"
    for environment in (build, installed):
        venv.create(environment, with_pip=True)
    copy_context(tmp_path / "src")
    run_stage(build, stages()["wheel-cpu"], tmp_path / "src")
    run_stage(installed, stages()["cpu"], tmp_path / "work")

    scene = write_scene(tmp_path / "work" / "scene")
    splat, bare = installed / "bin" / "splat", {"PATH": "", "HOME": "/nonexistent"}
    words = ["train", str(scene), *QUICK, "-n", "30", "-o", str(tmp_path / "work" / "run")]
    for command in (["doctor"], words, ["export", words[-1], "-o", str(tmp_path / "work" / "scene.spz")]):
        done = subprocess.run(
            [splat, *command], cwd=tmp_path / "work", env=bare, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "plain torch" not in done.stderr, "the native library came with the wheel"
