"""Events as JSON, as log lines and as a progress bar."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest

from splatcli.cli.console import JsonReporter, Output, ProgressBar, ProgressReporter, describe_event, make_reporter
from splatcli.train.events import Evaluated, OpacityReset, Refined, Saved, Started, Stepped, Stopped, ViewScore

RUN = [
    Started(0, 1000, 500, 7, 1, "cpu", ("a note",)),
    *(Stepped(step, 0.5, 500, 0) for step in range(1, 1001)),
    Refined(600, 1, 2, 3, 500),
    OpacityReset(700),
    Evaluated(1000, 21.5, 0.75, 500, [ViewScore("a.png", 21.5, 0.75)]),
    Saved(1000, Path("x.pt")),
    Stopped(1000, "finished", Path("x.pt")),
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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
    assert "PSNR 21.50 dB" in captured.err
    assert "saved x.pt" in captured.err
    assert len(captured.err.splitlines()) < 10


def test_a_terminal_gets_a_bar_of_80_columns_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with ProgressReporter(Output()) as reporter:
        for event in RUN[:-3]:
            reporter.report(event)
        reporter.report(Evaluated(1000, 21.5, 0.75, 500, []))
        reporter.report(Stepped(1000, 0.5, 1_234_567, 0))
    assert capfd.readouterr().out == ""
    bar = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue()).rstrip().splitlines()[-1].split("\r")[-1]
    assert "1000/1000" in bar
    assert "loss 0.5000  PSNR 21.50  1.23M GS" in bar
    assert "it/s" in bar
    assert len(bar) <= 80


def test_a_log_gets_a_line_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seconds = iter(range(0, 1000, 2))
    monkeypatch.setattr("splatcli.cli.console.time.monotonic", lambda: next(seconds))
    with ProgressBar(Output(), unit="it") as progress:
        for step in range(1, 13):
            progress.update("train", step, 100, "loss 0.5")
    assert capfd.readouterr().err.splitlines() == [
        "train: 6/100  loss 0.5  0.5 it/s  3:08 left",
        "train: 12/100  loss 0.5  0.5 it/s  2:56 left",
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
    assert isinstance(make_reporter(Output(json=True)), JsonReporter)
    assert isinstance(make_reporter(Output()), ProgressReporter)
