"""Events as JSON, as log lines and as a progress bar."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from splatcli.cli.console import (
    JsonReporter,
    Output,
    ProgressBar,
    ProgressLine,
    ProgressReporter,
    describe_event,
    format_rate,
    format_time,
    make_reporter,
)
from splatcli.train.events import Evaluated, OpacityReset, Refined, Saved, Started, Stepped, Stopped, ViewScore
from tests.cli.terminal import run_on_terminal
from tests.cli.tiny import QUICK
from tests.forked import splat_command
from tests.running import Splat

RUN = [
    Started(0, 1000, 500, 7, 1, "cpu", ("a note",)),
    *(Stepped(step, 0.5, 500, 0) for step in range(1, 1001)),
    Refined(600, 1, 2, 3, 500),
    OpacityReset(700),
    Evaluated(1000, 21.5, 0.75, 500, [ViewScore("a.png", 21.5, 0.75)]),
    Saved(1000, Path("x.pt")),
    Stopped(1000, "finished", Path("x.pt")),
]


def report(reporter) -> None:
    with reporter:
        for event in RUN:
            reporter.report(event)


def test_json_sends_each_event_and_a_hundred_steps(capfd: pytest.CaptureFixture[str]) -> None:
    report(JsonReporter(Output(json=True)))
    sent = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    names = [one["event"] for one in sent]
    assert names[0] == "started"
    assert names.count("stepped") == 100
    assert names[-5:] == ["refined", "opacity-reset", "evaluated", "saved", "stopped"]
    assert sent[-3]["views"] == [{"name": "a.png", "psnr": 21.5, "ssim": 0.75}]
    assert sent[-1]["path"] == "x.pt"


def test_a_log_gets_what_matters(capfd: pytest.CaptureFixture[str]) -> None:
    report(ProgressReporter(Output()))
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "7 views, 1 held out" in captured.err
    assert "note: a note" in captured.err
    assert "test PSNR 21.50 dB" in captured.err
    assert "saved x.pt" in captured.err
    assert len(captured.err.splitlines()) < 10


LINE = ProgressLine(
    "train", 12_345, 30_000, 123.4, "it", 3723.0, ("test PSNR 21.50", "1.23M GS", "loss 0.0123", "train PSNR 23.00")
)


@pytest.mark.parametrize(
    ("width", "text"),
    [
        (20, "12345/30000 123 it/s 1:02:03"),
        (40, "train 12345/30000 123 it/s 1:02:03"),
        (60, "train 12345/30000  123 it/s  1:02:03 left  test PSNR 21.50"),
        (80, "train 12345/30000  123 it/s  1:02:03 left  test PSNR 21.50  1.23M GS"),
    ],
)
def test_a_narrow_line_drops_figures_and_never_step_rate_and_time(width: int, text: str) -> None:
    assert LINE.text(width).replace("━", "").replace("─", "").replace("    ", "  ") == text


def test_a_line_fits_any_width() -> None:
    lines = (LINE, replace(LINE, done=30_000, left=0.0), replace(LINE, rate=None, left=None, done=0))
    for line, width in itertools.product(lines, range(34, 200)):
        text = line.text(width)
        assert len(text) <= width
        assert f"{line.done}/30000" in text
        assert line.rate is None or "123 it/s" in text
        assert line.left is None or format_time(line.left) in text
    assert "loss 0.0123" not in LINE.text(40)
    assert all(fact in LINE.text(140) for fact in LINE.facts)


def test_a_bar_shows_the_share_that_is_done() -> None:
    text = LINE.text(200)
    assert text.count("━") == 40 * 12_345 // 30_000
    assert text.count("━") + text.count("─") == 40


@pytest.mark.parametrize(
    ("rate", "text"), [(1234.4, "1234 it/s"), (12.34, "12.3 it/s"), (1.0, "1.0 it/s"), (0.4, "2.5 s/it")]
)
def test_rates_have_the_digits_that_matter(rate: float, text: str) -> None:
    assert format_rate(rate, "it") == text


REPORTED = """
import sys, time
from splatcli.cli.console import Output, ProgressReporter
from splatcli.train.events import Evaluated, Probed, Saved, Started, Stepped
from pathlib import Path
with ProgressReporter(Output()) as reporter:
    reporter.report(Started(0, 30000, 500, 7, 1, "cpu", ()))
    for step in range(1, 2001):
        reporter.report(Stepped(step, 0.5, 1_234_567, 0))
        if step == 100:
            reporter.report(Probed(100, 23.0, 500))
            reporter.report(Evaluated(100, 21.5, 0.75, 500, []))
            reporter.report(Saved(100, Path("a-long-path/" * 10)))
"""


@pytest.mark.parametrize("columns", [40, 60, 80, 140])
def test_a_terminal_gets_a_line_that_fits(columns: int) -> None:
    screen = run_on_terminal([*splat_command(), "-c", REPORTED], columns, 24, piped=True, variables={})
    assert (screen.code, screen.stdout) == (0, "")
    last = screen.drawn[-1]
    assert len(last) <= columns
    assert re.search(r"2000/30000 .*it/s .*\d:\d\d", last)
    assert ("test PSNR 21.50" in last) is (columns >= 60)
    assert ("train PSNR 23.00" in last) is (columns >= 140)
    assert "saved " + "a-long-path/" * 9 + "a-long-path\n" in screen.text  # a path that can be copied


def test_plain_and_dumb_terminals_get_lines() -> None:
    for variables in ({"TERM": "dumb"}, {"SPLATCLI_PLAIN": "1"}):
        screen = run_on_terminal([*splat_command(), "-c", REPORTED], 80, 24, piped=True, variables=variables)
        assert screen.code == 0
        assert "\x1b" not in screen.raw
        assert "step 100: test PSNR 21.50 dB" in screen.text


def test_a_log_gets_a_line_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seconds = iter(range(0, 1000, 2))
    monkeypatch.setattr("splatcli.cli.console.time.monotonic", lambda: next(seconds))
    with ProgressBar(Output(), unit="it") as progress:
        for step in range(1, 13):
            progress.update("train", step, 100, ["loss 0.5"])
    assert capfd.readouterr().err.splitlines() == [
        "train: 6/100  loss 0.5  2.0 s/it  3:08 left",
        "train: 12/100  loss 0.5  2.0 s/it  2:56 left",
    ]


def test_quiet_and_json_show_no_progress(capfd: pytest.CaptureFixture[str]) -> None:
    report(ProgressReporter(Output(quiet=True)))
    with ProgressBar(Output(json=True)) as progress:
        progress.update("views", 1, 10)
    assert capfd.readouterr() == ("", "")


def test_a_stop_names_the_command_that_continues() -> None:
    text = describe_event(Stopped(5, "SIGINT", Path("run/ckpts/ckpt_000005.pt")))
    assert text is not None
    assert "splat resume run/ckpts/ckpt_000005.pt" in text


def test_json_output_has_its_own_reporter() -> None:
    assert isinstance(make_reporter(Output(json=True), lambda: 1.0), JsonReporter)
    assert isinstance(make_reporter(Output(), lambda: 1.0), ProgressReporter)


def test_the_time_left_is_that_of_the_steps_that_are_left(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps get longer as Gaussians get more: at a rate of two a second the rest may be worth 500 of them."""
    seconds = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: seconds)
    with make_reporter(Output(), lambda: 500.0) as reporter:
        reporter.report(RUN[0])
        for event in RUN[1:60]:
            seconds += 0.5
            reporter.report(event)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("train: ")]
    assert lines
    assert all("2.0 it/s" in line and line.endswith("4:10 left") for line in lines)


STAGES = """
import sys, time
from splatcli.cli import console
from splatcli.cli.console import open_output, ProgressBar
from splatcli.progress import track
with open_output(json="--json" in sys.argv, quiet="-q" in sys.argv) as out:
    list(track(range(3), "too quick to be shown"))
    console._SHOWN_AFTER = 0.0
    for item in track(range(5), "reading image headers"):
        if item == 2:
            out.message("a message")
        time.sleep(0.15)
    with ProgressBar(out, unit="it") as bar:
        bar.update("train", 1, 9)
        for item in track(range(5), "test views"):
            time.sleep(0.15)
        bar.update("train", 2, 9)
        time.sleep(0.15)
"""


def test_what_the_library_reports_is_shown_and_goes_away() -> None:
    screen = run_on_terminal([*splat_command(), "-c", STAGES], 80, 24, piped=True, variables={})
    assert (screen.code, screen.stdout) == (0, "")
    assert re.search(r"^reading image headers [1-4]/5", screen.text, re.MULTILINE)
    assert re.search(r"^test views [1-4]/5", screen.text, re.MULTILINE)
    assert "too quick" not in screen.text
    assert "a message" in screen.drawn
    assert screen.drawn[-1].startswith("train 2/9")
    assert all(len(line) <= 80 for line in screen.drawn)


@pytest.mark.parametrize("flag", ["-q", "--json"])
def test_nothing_of_it_is_shown_with_q_and_json(flag: str) -> None:
    screen = run_on_terminal([*splat_command(), "-c", STAGES, flag], 80, 24, piped=True, variables={})
    assert (screen.code, screen.stdout) == (0, "")
    assert screen.drawn == ([] if flag == "-q" else ["a message"])


def test_a_command_says_at_once_that_it_works(tmp_path: Path) -> None:
    (tmp_path / "other.ply").write_text("no PLY")
    said = {}
    for flag in ("--json", "-q"):
        command = [sys.executable, "-m", "splatcli", "info", str(tmp_path / "other.ply"), flag]
        said[flag] = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    first, second, *_ = said["--json"].splitlines()
    assert first == "splat info: loading libraries"
    assert second.startswith("error[E005]: ")
    assert said["-q"].startswith("error[E005]: ")


def test_a_run_whose_gaussians_may_grow_without_end_has_a_forecast(
    splat: Splat, tiny_scene: Path, tmp_path: Path
) -> None:
    growth = ("--strategy", "mcmc", "--cap-max", "none", "--set", "schedule.refine_every=1")
    words = ("train", tiny_scene, "-n", 30_000, "--stop-at", 2, "-o", tmp_path / "run", *QUICK[:6], *growth)
    done = splat(*words)
    assert done.code == 0, done.err
    assert done.lines == [str(tmp_path / "run/ckpts/ckpt_000002.pt")]
