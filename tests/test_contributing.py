"""The recipes of CONTRIBUTING.md work: their code, installed as a package of its own, trains, exports and reads."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from splatcli import plugins
from tests.cli.tiny import QUICK, write_scene
from tests.plugin_packages import install
from tests.scene import made

PAGE = (Path(__file__).resolve().parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
PLUGINS = {
    "Add a strategy": plugins.STRATEGIES,
    "Add a file format": plugins.FORMATS,
    "Add a scene reader": plugins.READERS,
}


def recipe(heading: str) -> str:
    """The section of the page."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    assert section, f"CONTRIBUTING.md has no section {heading!r}"
    return section


def code_of(heading: str) -> str:
    return re.findall(r"^```python\n(.*?)^```", recipe(heading), re.DOTALL | re.MULTILINE)[0]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages of the recipes, for commands of ``shell``."""
    place = tmp_path / "site"
    for heading, group in PLUGINS.items():
        table = re.findall(r"^  ```toml\n(.*?)^  ```", recipe(heading), re.DOTALL | re.MULTILINE)[0]
        points = tomllib.loads(table)["project"]["entry-points"]
        assert [*points] == [group]
        ((target),) = points[group].values()
        install(place, target.partition(":")[0], code_of(heading), points)
    paths = filter(None, [str(place), os.environ.get("PYTHONPATH")])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


@pytest.mark.parametrize("heading", [*PLUGINS, "Add a kernel", "Add a command"])
def test_a_recipe_is_short(heading: str) -> None:
    lines = code_of(heading).splitlines() if heading in PLUGINS else recipe(heading).splitlines()
    assert len([line for line in lines if line.strip()]) <= 30


@pytest.mark.usefixtures("installed")
def test_the_strategy_trains_and_the_format_is_written_and_read(shell: Callable[..., Any], tmp_path: Path) -> None:
    write_scene(tmp_path / "scene")
    done = shell(f"splat train scene -o run -n 25 --strategy pruning {' '.join(QUICK)}")
    assert done.code == 0, done.err
    (config,) = (tmp_path / "run").glob("config.*")
    assert '"pruning"' in config.read_text()
    done = shell(
        "splat export run -o model.rows && splat export model.rows -o model.ply && splat info model.rows --json"
    )
    assert done.code == 0, done.err
    facts = json.loads(done.lines[-1])
    assert (facts["kind"], facts["format"], facts["usable"]) == ("rows", "rows", True)
    assert (tmp_path / "model.ply").is_file()


@pytest.mark.usefixtures("installed")
def test_the_reader_reads(shell: Callable[..., Any], tmp_path: Path) -> None:
    made.write_images(tmp_path / "scene/images")
    lens = [made.WIDTH, made.HEIGHT, 60.0, 61.0, 32.0, 24.0]
    rows = [",".join(map(str, [name, *lens, *made.w2c(i)[:3].ravel()])) for i, name in enumerate(made.names())]
    (tmp_path / "scene/poses.csv").write_text("\n".join(rows))
    done = shell("splat info scene --json")
    assert done.code == 0, done.err
    assert "csvposes" in done.out
