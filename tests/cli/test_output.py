"""What goes to stdout and what to stderr."""

from __future__ import annotations

import json
import logging
import math
import warnings
from pathlib import Path

import pytest

from splatcli.cli.output import Output, speaking


def test_results_are_lines_or_one_object(capfd: pytest.CaptureFixture[str]) -> None:
    Output().result({"path": Path("a")}, [Path("a"), "b"])
    Output(json=True).result({"path": Path("a")}, ["not shown"])
    lines = capfd.readouterr().out.splitlines()
    assert lines[:2] == ["a", "b"]
    assert json.loads(lines[2]) == {"event": "result", "path": "a"}


def test_numbers_that_json_cannot_hold_become_null(capfd: pytest.CaptureFixture[str]) -> None:
    Output(json=True).event("x", {"a": math.nan, "b": [math.inf, 1.5]})
    assert json.loads(capfd.readouterr().out) == {"event": "x", "a": None, "b": [None, 1.5]}


def test_quiet_leaves_errors_only(capfd: pytest.CaptureFixture[str]) -> None:
    from splatcli.errors import SceneError

    out = Output(quiet=True)
    out.note("a")
    out.warn("b")
    out.error(SceneError("c"))
    assert capfd.readouterr().err == "error[E003]: c\n"


def test_warnings_and_records_of_the_library_are_told(capfd: pytest.CaptureFixture[str]) -> None:
    with speaking(json=False, quiet=False):
        warnings.simplefilter("always")
        warnings.warn("slow", stacklevel=1)
        logging.getLogger("splatcli.somewhere").warning("odd")
    assert capfd.readouterr().err == "warning: slow\nwarning: odd\n"
    logging.getLogger("splatcli.somewhere").warning("not ours any more")
    assert "warning:" not in capfd.readouterr().err
