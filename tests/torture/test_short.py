"""Each harness with a few trials; and that each one notices what it is there for."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from splatcli.checkpoint.atomic import write_atomically
from splatcli.checkpoint.state import Checkpoint, RenderColumns
from splatcli.errors import SplatError, UsageError
from tests.native.cases import NEEDS_COMPILER
from tests.torture import (
    bit_flips,
    fault_ranks,
    faults,
    faults_reading,
    fuzz_argv,
    fuzz_checkpoint,
    fuzz_config,
    fuzz_foreign,
    fuzz_formats,
    fuzz_ply,
    fuzz_scenes,
    harness,
    kill_runs,
    kill_saves,
    power_cuts,
)
from tests.torture.calls import COMPILER, Call, read_log, run_under
from tests.torture.harness import Figure, run_cases
from tests.torture.states import small_checkpoint

Figures = Callable[[int, int], dict[str, Figure]]


@pytest.mark.parametrize(
    ("figures", "count", "sound", "refused"),
    [
        (fuzz_ply.figures, 400, 30, 150),
        (fuzz_formats.figures, 300, 30, 120),
        (fuzz_checkpoint.figures, 200, 4, 100),
        (fuzz_foreign.figures, 120, 15, 50),
        (fuzz_scenes.figures, 80, 2, 30),
        (fuzz_config.figures, 400, 10, 200),
        (bit_flips.figures, 200, 6, 100),
    ],
    ids=["ply", "formats", "checkpoint", "foreign", "scenes", "config", "bits"],
)
def test_malformed_input_is_refused_or_sound(figures: Figures, count: int, sound: int, refused: int) -> None:
    for name, figure in figures(count, 1).items():
        assert figure.shown == [], name
        assert figure.trials == count, name
        # The faults are neither so coarse that nothing is read, nor so fine that nothing is wrong.
        assert figure.details.get("read", 0) + figure.details.get("harmless", 0) >= sound, name
        assert figure.details["refused"] >= refused, name


def test_command_lines_of_nonsense_end_with_a_documented_code() -> None:
    figure = fuzz_argv.figures(60, 1)["fuzz_argv"]
    assert figure.shown == []
    assert figure.details["exit_2"] >= 30


def test_kill_9_never_loses_an_acknowledged_checkpoint() -> None:
    figure = kill_saves.figures(9, 1)["kill_saves"]
    assert (figure.trials, figure.shown) == (9, [])
    assert figure.details["killed_in_mid_write"] >= 4


def test_runs_that_are_killed_go_on_with_the_same_bits() -> None:
    for name, figure in kill_runs.figures(2, 1).items():
        assert (figure.trials, figure.shown) == (2, []), name


@NEEDS_COMPILER
def test_a_fault_in_one_rank_ends_all_and_is_named() -> None:
    kinds = {"kill": 2, "setting": 3, "skipped message": 3, "changed sum": 3, "changed gradient": 2}
    cases = [(size, fault_ranks.Fault(kind, size - 1, 3)) for kind, size in kinds.items()]
    figure = fault_ranks.figure_of(cases)
    assert figure.shown == []
    assert figure.details["went on"] == 1
    assert all(figure.details[kind] == 1 for kind in kinds if kind != "changed gradient")


@NEEDS_COMPILER
def test_a_fault_in_one_rank_of_those_that_share_the_gaussians_ends_all_and_is_named() -> None:
    kinds = {
        "kill": 3,
        "skipped message": 3,
        "skipped rows": 3,
        "lost rows": 3,
        "changed on the way": 2,
        "changed state": 2,
    }
    cases = [(size, fault_ranks.Fault(kind, size - 1, 3, sharded=True)) for kind, size in kinds.items()]
    figure = fault_ranks.figure_of(cases)
    assert figure.shown == []
    assert figure.details["went on"] == 1
    assert all(figure.details[kind] == 1 for kind in kinds if kind != "changed state")


def test_calls_on_files_that_fail_lose_nothing(under_library: dict[str, Any]) -> None:
    assert under_library["faults"]["failures"] == []
    assert under_library["faults"]["trials"] == 30


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"needs a C compiler ({COMPILER})")
def test_commands_that_may_not_read_or_allocate_say_so_and_move_nothing() -> None:
    for name, figure in faults_reading.figures(12, 1).items():
        assert (figure.trials, figure.shown) == (12, []), name
        assert (figure.details["hangs"], figure.details["crashes"]) == (0, 0)
        # The faults come about, and most of them end a command.
        assert sum(figure.details.get(f"exit_{code}", 0) for code in (3, 4, 5, 8)) >= 6, figure.details
        assert figure.details["possible"] > 300, name


# --- the harnesses notice --------------------------------------------------------------------------------------------


def _die(index: int) -> str:
    os._exit(3)


def _spin(index: int) -> str:
    while True:
        pass


def _warn(index: int) -> str:
    warnings.warn("look out", RuntimeWarning, stacklevel=1)
    return "read"


def _eat(index: int) -> str:
    bytearray(harness.MEMORY + (64 << 20))
    return "read"


def _raise(index: int) -> str:
    raise KeyError("a bug")


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (_die, "the process died"),
        (_spin, "no answer within"),
        (_warn, "RuntimeWarning: look out"),
        (_eat, "MemoryError"),
        (_raise, "KeyError: 'a bug'"),
    ],
)
def test_a_case_that_goes_wrong_is_a_failure(
    case: Callable[[int], str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Seconds of a processor: enough for the first case of a process, which on a busy machine took more than 0.2.
    monkeypatch.setattr(harness, "PATIENCE", 1.0)
    tally = run_cases(lambda index: case(index) if index == 1 else "read", 4)
    assert [index for index, _ in tally.failures] == [1]
    assert said in tally.failures[0][1]
    assert tally.words == {"read": 3}
    assert (tally.hangs, tally.crashes) == (case is _spin, case is _die)


def test_an_internal_error_is_no_refusal() -> None:
    def refuse(error: Exception) -> Callable[[], object]:
        def read() -> object:
            raise error

        return read

    assert harness.refused(refuse(UsageError("no such thing")))
    assert not harness.refused(lambda: None)
    for bug in (SplatError("a bug"), ValueError("a traceback")):
        with pytest.raises(type(bug)):
            harness.refused(refuse(bug))
    with pytest.raises(AssertionError, match="without words"):
        harness.refused(refuse(UsageError(" ")))


def test_every_part_of_a_checkpoint_counts_in_its_digest() -> None:
    """Or a flipped bit could change what is loaded and pass for harmless."""
    original = small_checkpoint(5)
    assert bit_flips.digest(small_checkpoint(5)) == bit_flips.digest(original)
    other = small_checkpoint(5, degree=2, step=301, seed=1, train={"seed": 7})
    other.active_sh_degree, other.adam_step = 0, 2
    other.sampler, other.train, other.test = {"epoch": 0, "position": 0}, [0, 2], [1]
    other.cameras = [dataclasses.replace(camera, fx=camera.fx * (1 + 1e-16 * 4)) for camera in other.cameras]
    other.dataset = dataclasses.replace(other.dataset, extent=1.2)
    other.views = {"pose": torch.zeros(2, 6, dtype=torch.float64)}
    other.columns = RenderColumns(torch.ones(5), torch.ones(5), torch.ones(5, 1, 3))
    other.writer, other.loss, other.skipped = {"version": "0.0.1"}, "mine", (1,)
    other.comparisons = 1
    for field in dataclasses.fields(Checkpoint):
        changed = dataclasses.replace(original, **{field.name: getattr(other, field.name)})
        assert bit_flips.digest(changed) != bit_flips.digest(original), field.name
    for name, column in other.columns.present().items():
        changed = dataclasses.replace(original, columns=RenderColumns(**{name: column}))
        assert bit_flips.digest(changed) != bit_flips.digest(original), name


# --- with the library that records calls on files and makes them fail -------------------------------------------------


def _work_under_library(folder: str) -> dict[str, Any]:
    """In a process with the library; one for all tests, since starting it takes most of the time."""
    power_cuts.save_and_rewind(folder)
    return {"faults": faults.all_faults(30, 1), "careless": _lose_the_old_file(Path(folder))}


def _lose_the_old_file(folder: Path) -> list[str]:
    """Return what is found of a writer that empties what it replaces, and of one that does not."""
    path = folder / "place" / "x"

    def careless(place: Path) -> None:
        with path.open("wb") as file:
            write_atomically(place / "y", lambda other: other.write(b"new"), what="file")
            file.write(b"new")

    def careful(place: Path) -> None:
        write_atomically(path, lambda file: file.write(b"new"), what="file")

    def check(place: Path, succeeded: bool) -> None:
        assert path.read_bytes() in (b"old", b"new"), "lost"

    failures = []
    for act in (careless, careful):
        place = faults.Place(lambda place: path.write_bytes(b"old"), act, check)
        try:
            faults.one_fault(place, folder / "place", "fsync", 1, "EIO", lasting=False)
        except AssertionError as error:
            failures.append(str(error))
    return failures


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorded")


@pytest.fixture(scope="module")
def under_library(place: Path) -> dict[str, Any]:
    if shutil.which(COMPILER) is None:
        pytest.skip(f"needs a C compiler ({COMPILER})")
    found: dict[str, Any] = run_under(f"{__name__}:_work_under_library", str(place))
    return found


@pytest.fixture(scope="module")
def calls(under_library: dict[str, Any], place: Path) -> list[Call]:
    return read_log(place / "log")


def losses(folder: Path, calls: list[Call]) -> Iterator[str]:
    states = list(dict.fromkeys(power_cuts.states_after(calls, folder / "run", random.Random(0))))
    assert len(states) > 50
    return (text for state in states if (text := power_cuts.fault(state, folder)) is not None)


def test_no_loss_of_power_loses_an_acknowledged_checkpoint(place: Path, calls: list[Call]) -> None:
    assert list(losses(place, calls)) == []


@pytest.mark.parametrize("folders", [False, True], ids=["files", "folders"])
def test_a_writer_that_does_not_sync_would_be_found(folders: bool, place: Path, calls: list[Call]) -> None:
    kept = [call for call in calls if call.kind != "fsync" or (Path(call.name).name in ("run", "ckpts")) != folders]
    assert 0 < len(kept) < len(calls)
    assert any("was acknowledged" in text for text in losses(place, kept))


def test_a_save_writes_syncs_renames_and_syncs_the_folder(place: Path, calls: list[Call]) -> None:
    saves = [call for call in calls if call.kind == "rename" and ".tmp." in call.name and call.other.endswith(".pt")]
    assert [Path(call.other).name for call in saves] == [f"ckpt_{step:06d}.pt" for step in (1, 2, 3, 4, 5)]
    for save in saves:
        kinds = [call.kind for call in calls if save.name in (call.name, call.other)]
        assert kinds[0] == "create", kinds
        assert kinds[-2:] == ["fsync", "rename"], kinds
        assert "write" in kinds
        after = next(call for call in calls if call.number > save.number)
        assert (after.kind, after.name) == ("fsync", str(place / "run" / "ckpts"))


def test_a_careless_writer_would_be_found(under_library: dict[str, Any]) -> None:
    assert under_library["careless"] == ["lost"]


# --- the command line of a harness -----------------------------------------------------------------------------------


def test_a_harness_stops_when_its_minutes_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(index: int) -> str:
        time.sleep(0.02)
        return "read"

    monkeypatch.setattr(harness._enough, "minutes", 0.3 / 60)
    assert 1 <= run_cases(slow, 10_000).words["read"] < 1000


def test_a_harness_writes_its_figures_as_json(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.torture.fuzz_config", "--n", "20", "--json", str(tmp_path / "x.json")]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], timeout=300)
    found: dict[str, Any] = json.loads((tmp_path / "x.json").read_text())["fuzz_config"]
    assert (found["trials"], found["failures"]) == (20, 0)
    assert found["run"]["command"] == "python -m tests.torture.fuzz_config --n 20 --seed 0"
    assert found["run"]["torch"] == torch.__version__
    assert set(found["run"]) == {"command", "date", "commit", "cpu", "cores", "python", "torch"}
