"""``--max-time`` from the command line."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from splatcli.cli import time_budget
from splatcli.cli.console import Output, ProgressReporter
from splatcli.cli.time_budget import TimeBudget
from splatcli.cli.train import TrainArguments
from splatcli.config import Config, with_settings
from splatcli.scene.read import read_scene
from splatcli.train import start
from splatcli.train.events import Event, Stepped
from splatcli.train.init import initial_gaussians
from tests.cli.tiny import QUICK
from tests.native.cases import NEEDS_COMPILER
from tests.running import Splat


@NEEDS_COMPILER
def test_a_run_is_planned_to_fit_its_time(
    splat: Splat, tiny_scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_budget, "process_age", lambda: 0.0)  # this one is all of pytest's
    made = []
    monkeypatch.setattr(start, "initial_gaussians", lambda *given: made.append(1) or initial_gaussians(*given))
    done = splat("train", tiny_scene, "--max-time", "6s", "--json", "-o", tmp_path / "run")
    assert done.code == 0, done.err
    assert len(made) == 1, "what steps were timed with is what the run starts from"
    assert "6 s allow about" in done.err
    result = done.objects[-1]
    # On a busy machine the time may be over before the first step.
    assert result["step"] >= 1 if result["reason"] == "finished" else result["reason"] == "max-time"
    assert result["psnr"] > 0
    settings = json.loads((tmp_path / "run/config.json").read_text())
    assert settings["train"]["iterations"] < 30_000
    assert settings["schedule"]["lr_steps"] == settings["train"]["iterations"], "schedules fit the length"


@NEEDS_COMPILER
@pytest.mark.parametrize(("flags", "noted"), [((), True), (("-n", "20000"), False)])
def test_a_long_run_whose_length_nobody_chose_names_flags_that_take_less(
    flags: tuple[str, ...],
    noted: bool,
    splat: Splat,
    tiny_scene: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time_budget, "_KNOWN", 0.0)
    monkeypatch.setattr(time_budget, "_LONG", 0.0)
    report = ProgressReporter.report

    def report_and_stop(self: ProgressReporter, event: Event) -> None:
        report(self, event)
        if isinstance(event, Stepped) and event.step == 4:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(ProgressReporter, "report", report_and_stop)
    done = splat("train", tiny_scene, *QUICK, *flags, "-o", tmp_path / "run")
    assert done.code == 130, done.err
    assert done.err.count("--max-time 10m, --preset fast or a larger -r take less") == noted
    assert "stopped at step" in done.err


@NEEDS_COMPILER
def test_a_time_that_is_over_already_is_refused(
    splat: Splat, tiny_scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_budget, "process_age", lambda: 100.0)
    done = splat("train", tiny_scene, "--max-time", "60s", "-o", tmp_path / "run")
    assert done.code == 2
    assert "end before the first step" in done.err
    asked = re.search(r"give more than (\d+) s", done.err)
    assert asked is not None
    assert int(asked[1]) > 100, "what was over when the run began"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [(("--max-time", "soon"), "not a length of time"), (("--max-time", "9s", "-n", "50"), "chooses the steps itself")],
)
def test_times_that_make_no_sense_are_refused(
    splat: Splat, tiny_scene: Path, tmp_path: Path, flags: tuple[str, ...], words: str
) -> None:
    done = splat("train", tiny_scene, *flags, "-o", tmp_path / "run")
    assert done.code == 2
    assert words in done.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--set", "train.iterations=50"), "chooses the steps itself"),
        (("--config", "SETTINGS"), "chooses the steps itself"),
        (("--set", "train.batch_size=2"), "one view per step"),
        (("--set", "memory.offload=true"), "--offload is for"),
    ],
)
def test_settings_that_do_not_fit_are_refused_however_they_are_given(
    splat: Splat, tiny_scene: Path, tmp_path: Path, flags: tuple[str, ...], words: str
) -> None:
    (tmp_path / "settings.toml").write_text("[train]\niterations = 50\n")
    given = [str(tmp_path / "settings.toml") if flag == "SETTINGS" else flag for flag in flags]
    done = splat("train", tiny_scene, "--max-time", "60s", *given, "-o", tmp_path / "run")
    assert (done.code, words in done.err) == (2, True), done.err


@NEEDS_COMPILER
def test_a_correction_keeps_what_the_run_and_its_rollbacks_decided(
    tiny_scene: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = TrainArguments(scene=tiny_scene, max_time="3600s")
    scene = read_scene(tiny_scene, arguments.build({}, {}).data)
    budget = TimeBudget(3600.0, scene, None, "cpu", lambda values: arguments.build(values, {}), Output(quiet=True))
    first = budget.config
    decided = {
        "optim.means_lr": 0.5 * first.optim.means_lr,
        "optim.means_lr_final": 0.5 * first.optim.means_lr_final,
        "strategy.cap_max": 1000,
        "train.dropout": 0.2,
        "memory.cap": 5000,
    }
    found: list[Config] = []
    for steps in (2 * first.train.iterations, first.train.iterations):
        config = found[-1] if found else with_settings(first, decided)
        state = SimpleNamespace(step=100, config=config, gaussians=range(900))
        monkeypatch.setattr(budget._planner, "replan", lambda *_, steps=steps: steps)
        budget.update(SimpleNamespace(state=state, next_config=config, reschedule=found.append))  # type: ignore[arg-type]
        assert found[-1].train.iterations == found[-1].schedule.lr_steps == steps
        planned = arguments.build({"train.iterations": steps}, {})
        assert found[-1].optim.means_lr == pytest.approx(0.5 * planned.optim.means_lr)
        assert found[-1].optim.means_lr_final == pytest.approx(0.5 * planned.optim.means_lr_final)
        kept = (found[-1].strategy.cap_max, found[-1].train.dropout, found[-1].memory.cap)
        assert kept == (1000, 0.2, 5000)


def test_the_age_of_a_process_is_that_since_its_start() -> None:
    program = "from splatcli.cli.process import process_age; import time; time.sleep(0.5); print(process_age())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 0.5 <= float(done.stdout) < 600.0
