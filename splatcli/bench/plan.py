"""Plan: which scenes are trained with which settings and seeds; from a TOML file or from the command line."""

from __future__ import annotations

import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from splatcli.errors import UsageError

#: What names of scenes and settings are made of; they become names of files.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,60}")


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: names, and the arguments of ``splat train`` but for the seed and the output."""

    scene: str
    setting: str
    seed: int
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        """What its files are called."""
        return f"{self.scene}--{self.setting}--{self.seed}"


class _Scene(BaseModel):
    model_config = ConfigDict(extra="forbid")
    path: str
    args: list[str] = Field(default_factory=list)


class _Setting(BaseModel):
    model_config = ConfigDict(extra="forbid")
    args: list[str] = Field(default_factory=list)


class _Plan(BaseModel):
    model_config = ConfigDict(extra="forbid")
    #: Arguments of every run.
    args: list[str] = Field(default_factory=list)
    seeds: list[int] = Field(default_factory=lambda: [42, 43, 44], min_length=1)
    scenes: dict[str, _Scene] = Field(min_length=1)
    settings: dict[str, _Setting] = Field(default_factory=lambda: {"default": _Setting()}, min_length=1)


def read_plan(path: Path, *, data: Path | None = None, seeds: list[int] | None = None) -> list[Cell]:
    """The runs that a TOML file asks for: ``seeds``, ``args``, ``[scenes.NAME]`` with ``path`` and ``args``, and
    ``[settings.NAME]`` with ``args``.

    data: where relative paths of scenes begin; the file's own folder unless given.
    seeds: instead of the file's.
    Raises UsageError.
    """
    try:
        plan = _Plan.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UsageError(
            f"cannot read the plan: {error.strerror}", where=path, remedy="see splat bench --help"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"not valid TOML: {error}", where=path, remedy="benchmarks/plans/ has examples") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UsageError(f"{place}: {first['msg']}", where=path, remedy="benchmarks/plans/ has examples") from None
    root = path.parent if data is None else data
    scenes = {name: [str(root / scene.path), *scene.args] for name, scene in plan.scenes.items()}
    settings = {name: [*plan.args, *setting.args] for name, setting in plan.settings.items()}
    return _cells(scenes, settings, seeds or plan.seeds)


def plan_of(scenes: list[Path], settings: list[str], seeds: list[int]) -> list[Cell]:
    """The runs that a command line asks for. settings: ``NAME=FLAGS of splat train``. Raises UsageError."""
    named: dict[str, Any] = {}
    for scene in scenes:
        name = re.sub(r"[^A-Za-z0-9._+-]", "_", scene.resolve().name) or "scene"
        if name in named:
            raise UsageError(f"two scenes are called {name}", remedy="name them in a plan: splat bench --plan FILE")
        named[name] = [str(scene)]
    flags: dict[str, list[str]] = {}
    for text in settings:
        name, equals, words = text.partition("=")
        if not equals:
            raise UsageError(
                f"--setting wants NAME=FLAGS, got {text!r}", remedy='e.g. --setting "small=--cap-max 50000"'
            )
        try:
            flags[name.strip()] = shlex.split(words)
        except ValueError as error:
            raise UsageError(f"--setting {name}: {error}", remedy="close the quotes") from None
    return _cells(named, flags or {"default": []}, seeds)


def _cells(scenes: dict[str, list[str]], settings: dict[str, list[str]], seeds: list[int]) -> list[Cell]:
    for name in (*scenes, *settings):
        if not _NAME.fullmatch(name):
            raise UsageError(f"{name!r} is no name for a file", remedy="use letters, digits and . _ + -")
    return [
        Cell(scene, setting, seed, (*where, *flags))
        for scene, where in scenes.items()
        for setting, flags in settings.items()
        for seed in dict.fromkeys(seeds)
    ]
