"""Events as JSON, as lines, and on a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from splatcli.cli.console import JsonReporter, Output, PlainReporter, TerminalReporter, describe_event, make_reporter
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


def report(reporter) -> None:
    with reporter:
        for event in RUN:
            reporter.report(event)


def test_json_sends_each_event_and_a_hundred_steps(capfd: pytest.CaptureFixture[str]) -> None:
    import json

    report(JsonReporter(Output(json=True)))
    sent = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    names = [one["event"] for one in sent]
    assert names[0] == "started"
    assert names.count("stepped") == 100
    assert names[-5:] == ["refined", "opacity-reset", "evaluated", "saved", "stopped"]
    assert sent[-3]["views"] == [{"name": "a.png", "psnr": 21.5, "ssim": 0.75}]
    assert sent[-1]["path"] == "x.pt"


def test_a_log_gets_what_matters(capfd: pytest.CaptureFixture[str]) -> None:
    report(PlainReporter(Output()))
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "7 views, 1 held out" in captured.err
    assert "note: a note" in captured.err
    assert "PSNR 21.50 dB" in captured.err
    assert "saved x.pt" in captured.err
    assert len(captured.err.splitlines()) < 10


def test_a_terminal_gets_a_bar_on_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    report(TerminalReporter())
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "1000/1000" in captured.err
    assert "PSNR 21.50" in captured.err


def test_a_stop_tells_how_to_go_on() -> None:
    text = describe_event(Stopped(5, "SIGINT", Path("run/ckpts/ckpt_000005.pt")))
    assert text is not None
    assert "splat resume run/ckpts/ckpt_000005.pt" in text


def test_the_output_decides_on_the_reporter() -> None:
    assert isinstance(make_reporter(Output(json=True)), JsonReporter)
    assert type(make_reporter(Output(quiet=True))).__name__ == "SilentReporter"
