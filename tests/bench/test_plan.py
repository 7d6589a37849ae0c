"""Plans: what is run, and what is said of a plan that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from splatcli.bench import Cell, plan_of, read_plan
from splatcli.config import build_config
from splatcli.errors import UsageError

PLAN = """
args = ["--iterations", "50"]
seeds = [1, 2]

[scenes.fox]
path = "fox"
args = ["-r", "2"]

[scenes.lego]
path = "nerf/lego"

[settings.adc]

[settings.mcmc]
args = ["--strategy", "mcmc"]
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_plan_is_scenes_times_settings_times_seeds(tmp_path: Path) -> None:
    cells = read_plan(written(tmp_path, "\ufeff" + PLAN))  # a byte order mark, of some editors
    assert len(cells) == 8
    assert cells[0] == Cell("fox", "adc", 1, (str(tmp_path / "fox"), "-r", "2", "--iterations", "50"))
    assert cells[-1].name == "lego--mcmc--2"
    assert cells[-1].arguments == (str(tmp_path / "nerf/lego"), "--iterations", "50", "--strategy", "mcmc")


def test_data_and_seeds_of_the_command_line_win(tmp_path: Path) -> None:
    cells = read_plan(written(tmp_path, PLAN), data=Path("/data"), seeds=[7])
    assert [cell.seed for cell in cells] == [7] * 4
    assert cells[0].arguments[0] == "/data/fox"


def test_a_setting_may_be_for_some_scenes_only(tmp_path: Path) -> None:
    cells = read_plan(written(tmp_path, PLAN + 'scenes = ["lego"]\n'), seeds=[7])
    assert [cell.name for cell in cells] == ["fox--adc--7", "lego--adc--7", "lego--mcmc--7"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("scenes = 3", "scenes"),
        ("[scenes.a]\n", "scenes.a.path"),
        ('[scenes.a]\npath = "x"\nsize = 3', "scenes.a.size"),
        ("[scenes\n", "not valid TOML"),
        (f"seeds = [{'1' * 5000}]", "not valid TOML: Exceeds the limit"),
        (f"seeds = {'[' * 5000}", "not valid TOML: maximum recursion depth"),
        ('[scenes."a/b"]\npath = "x"', "is not a valid name"),
        ('seeds = []\n[scenes.a]\npath = "x"', "seeds"),
        ("", "scenes"),
        ('[scenes.a]\npath = "x"\n[settings.b]\nscenes = ["c"]', "settings.b.scenes: no scene has the name c"),
    ],
)
def test_a_plan_that_cannot_be_followed_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        read_plan(written(tmp_path, text))
    assert caught.value.remedy


def test_a_plan_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the plan"):
        read_plan(tmp_path / "none.toml")


def test_a_command_line_makes_a_plan() -> None:
    cells = plan_of([Path("a/fox"), Path("b/mi ku")], ["x=", "y=--set 'a.b=[1, 2]'"], [3])
    assert [cell.name for cell in cells] == ["fox--x--3", "fox--y--3", "mi_ku--x--3", "mi_ku--y--3"]
    assert cells[1].arguments == ("a/fox", "--set", "a.b=[1, 2]")


@pytest.mark.parametrize(
    ("scenes", "settings", "words"),
    [
        (["a/x", "b/x"], [], "two scenes"),
        (["a"], ["plain"], "NAME=FLAGS"),
        (["a"], ["x='"], "quot"),
        (["a"], ["x=", "x=-r 2"], "two settings have the name x"),
        (["a"], ["/=1"], "name"),
    ],
)
def test_a_command_line_that_says_no_plan_is_refused(scenes: list[str], settings: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        plan_of([Path(scene) for scene in scenes], settings, [1])


@pytest.mark.parametrize(
    ("plan", "runs"),
    [
        ("mipnerf360", 9 * 2 * 3),
        ("nerf-synthetic", 8 * 3),
        ("quality", 3 * 5 * 3),
        ("budget", 3 * 3),
        ("captures", 8 * 9),
        ("minute", 4 * 2 * 3),
        ("ablation", 101 * 2),
    ],
)
def test_the_ready_plans_can_be_read(plan: str, runs: int) -> None:
    cells = read_plan(Path(__file__).resolve().parents[2] / "benchmarks/plans" / f"{plan}.toml", data=Path("/data"))
    assert len(cells) == runs
    for words in {cell.arguments for cell in cells}:
        build_config(assignments=[words[at + 1] for at, word in enumerate(words) if word == "--set"])
