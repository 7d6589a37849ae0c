"""Numbers of processes that this machine is too small for are reported before any of them starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from splatcli import machine
from tests.cli.conftest import Splat


@pytest.mark.parametrize("words", [("train",), ("resume",)])
def test_more_processes_than_cores_or_memory_are_reported_first(
    splat: Splat,
    tiny_scene: Path,
    finished_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
) -> None:
    started: list[int] = []
    monkeypatch.setattr("splatcli.distributed.launch.launch", lambda _, ranks, **__: started.append(ranks) or 0)
    monkeypatch.setattr(machine, "cores", lambda: 2)
    monkeypatch.setattr(machine, "free_memory", lambda: 8 << 30)
    monkeypatch.chdir(tmp_path)
    call = [*words, tiny_scene if words == ("train",) else finished_run, "--device", "cpu", "--ranks"]
    fits, many, too_many = (splat(*call, number) for number in (2, 9, 100))
    assert (fits.code, many.code, started) == (0, 0, [2, 9])
    assert "processes share" not in fits.err
    assert "9 processes share 2 cores" in many.err
    assert too_many.code == 2
    assert "100 processes take at least 19.5 GiB of memory, and 8.0 GiB are available" in too_many.err
    assert "--ranks 2" in too_many.err
