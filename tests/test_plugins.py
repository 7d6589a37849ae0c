"""Strategies and formats of other packages: found by name, imported when asked for, named when they do not work."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from splatcli.checkpoint.foreign.imported import ImportOptions, to_gaussians
from splatcli.cli.error_report import problem_of
from splatcli.config import build_config
from splatcli.errors import UsageError
from splatcli.formats.format import ExportMetadata
from splatcli.formats.registry import format_of, format_to_write, import_model
from splatcli.plugins import FORMATS, STRATEGIES, plugins
from splatcli.train import densify
from splatcli.train.densify import check_strategy, make_strategy
from tests.formats.made import scene
from tests.plugin_packages import install
from tests.train.worlds import MemoryRun, resume_plain, short_config, start_plain

WORKING = """
from splatcli.train.densify import AdcStrategy

class Mine(AdcStrategy):
    pass
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on sys.path."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_strategy_of_another_package_is_made_by_its_name(place: Path) -> None:
    install(place, "splat_mine", WORKING, {STRATEGIES: {"mine": "splat_mine:Mine"}})
    assert "mine" in plugins(STRATEGIES)
    assert "splat_mine" not in sys.modules  # listed, not imported
    config = build_config({"strategy.name": "mine"})
    check_strategy(config)
    strategy = make_strategy(config, 2.0)
    assert strategy.collects_stats(config.schedule.refine_start + 1)


def test_an_unknown_name_lists_what_exists(place: Path) -> None:
    install(place, "splat_listed", "raise RuntimeError('never imported')", {STRATEGIES: {"listed": "splat_listed:X"}})
    with pytest.raises(UsageError, match=rf"no such strategy\n.*{', '.join([*densify.STRATEGIES, 'listed'])}"):
        check_strategy(build_config({"strategy.name": "unlisted"}))


@pytest.mark.parametrize(
    ("module", "point", "fault"),
    [
        ("import no_such_package_anywhere", "splat_broken:Mine", "ModuleNotFoundError: No module named 'no_such_pack"),
        ("import sys; sys.exit(7)", "splat_broken:Mine", "SystemExit: 7"),
        ("open('/no/such/file')", "splat_broken:Mine", "FileNotFoundError: [Errno 2]"),
        ("", "splat_broken:Mine", "has no attribute 'Mine'"),
        ("", "no such target", "AttributeError"),
        ("Mine = 5", "splat_broken:Mine", "5 cannot be called"),
        ("def Mine(config): ...", "splat_broken:Mine", "TypeError: Mine() takes 1 positional argument"),
        ("def Mine(config, extent): return 5", "splat_broken:Mine", "int lacks a method"),
    ],
)
def test_a_broken_plugin_is_named_with_its_package_and_entry_point(
    place: Path, monkeypatch: pytest.MonkeyPatch, module: str, point: str, fault: str
) -> None:
    monkeypatch.delitem(sys.modules, "splat_broken", raising=False)
    install(place, "splat_broken", module, {STRATEGIES: {"broken": point}})
    make_strategy(build_config({"strategy.name": "adc"}), 2.0)  # nobody else is harmed
    with pytest.raises(UsageError) as caught:
        make_strategy(build_config({"strategy.name": "broken"}), 2.0)
    assert fault in caught.value.what
    assert caught.value.where == f"splat_broken (splatcli.strategies: broken = {point})"


def test_a_crash_names_the_plugins_that_are_loaded(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(place))
    monkeypatch.delitem(sys.modules, "splat_crash", raising=False)
    install(place, "splat_crash", WORKING, {STRATEGIES: {"crash": "splat_crash:Mine"}})
    assert "plug-in" not in str(problem_of(KeyError("x"), []).remedy)
    make_strategy(build_config({"strategy.name": "crash"}), 2.0)
    remedy = str(problem_of(KeyError("x"), []).remedy)
    assert ", of splat or of the plug-in splat_crash (splatcli.strategies: crash = splat_crash:Mine);" in remedy


FAILING = """
import dataclasses
from splatcli.train.densify import AdcStrategy

class Failing(AdcStrategy):
    def regularisation(self, step, means_lr):
        if {fails_in!r} == "regularisation" and step == 14:
            raise KeyError("mine")
        return super().regularisation(step, means_lr)

    def refine(self, step, *rest):
        refinement = super().refine(step, *rest)
        if {fails_in!r} == "rows":
            return dataclasses.replace(refinement, source=refinement.source + 10_000)
        return {fails_in!r} if {fails_in!r} == "refine" else refinement
"""


@pytest.mark.parametrize(
    ("fails_in", "fault", "saved"),
    [
        ("regularisation", "Failing.regularisation() raised KeyError: 'mine'", 13),
        ("refine", "Failing.refine() returned str, no Refinement", 0),  # the step is done, its refinement is not
        ("rows", "Failing.refine() returned a refinement whose source has rows 10000 to ", 0),
    ],
)
def test_a_strategy_that_fails_in_mid_run_is_named_and_a_sound_state_is_saved(
    place: Path, monkeypatch: pytest.MonkeyPatch, fails_in: str, fault: str, saved: int
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(place))
    monkeypatch.delitem(sys.modules, "splat_failing", raising=False)
    points = {STRATEGIES: {"failing": "splat_failing:Failing"}}
    module = install(place, "splat_failing", FAILING.format(fails_in=fails_in), points)
    config, run = short_config(20, strategy={"name": "failing"}), MemoryRun()
    with pytest.raises(UsageError) as caught:
        list(start_plain(config, run).run())
    assert fault in caught.value.what
    assert max(run.saved) == saved
    problem = problem_of(caught.value, ["train"])
    assert (problem.exit_code, problem.what, problem.where) == (2, caught.value.what, caught.value.where)
    if saved:
        (report,) = place.glob("splat-crash-*.txt")
        assert str(report) in str(problem.remedy)
        assert str(module) in report.read_text()
        again, whole = MemoryRun(), MemoryRun()  # with a plug-in that is mended
        module.write_text(FAILING.format(fails_in=""))
        monkeypatch.delitem(sys.modules, "splat_failing")
        list(resume_plain(run.saved[saved], again).run())
        list(start_plain(config, whole).run())
        for (name, resumed), (_, plain) in zip(
            again.saved[20].gaussians.items(), whole.saved[20].gaussians.items(), strict=True
        ):
            assert torch.equal(resumed, plain), name


def test_two_packages_with_one_name_are_both_named(place: Path) -> None:
    for package in ("splat_one", "splat_two"):
        install(place, package, WORKING, {STRATEGIES: {"twice": f"{package}:Mine"}})
    with pytest.raises(UsageError, match=r"several packages .*(splat_one.*splat_two|splat_two.*splat_one)"):
        check_strategy(build_config({"strategy.name": "twice"}))


def test_a_config_with_an_unknown_strategy_can_be_read(place: Path) -> None:
    """A checkpoint of a run with a plug-in is rendered and exported where the plug-in is not installed."""
    assert build_config({"strategy.name": "of_another_machine"}).strategy.name == "of_another_machine"
    with pytest.raises(UsageError, match="expected a name of letters"):
        build_config({"strategy.name": "../x"})


FORMAT_MODULE = """
import numpy as np
from splatcli.checkpoint.foreign.imported import Columns, ImportedModel
from splatcli.formats.format import Encoded, Format

def write(gaussians, metadata):
    columns = Columns.of(gaussians)
    return Encoded(np.column_stack([column.reshape(len(gaussians), -1) for column in columns]).astype("<f4").tobytes())

def read(path, *, lenient=False):
    rows = np.fromfile(path, "<f4").reshape(-1, 14)
    means, quats, scales, opacities, sh0 = np.split(rows, [3, 7, 10, 11], axis=1)
    shN = np.zeros((len(rows), 0, 3))
    columns = Columns.tensors(means=means, quats=quats, scales=scales, opacities=opacities[:, 0], sh0=sh0, shN=shN)
    return ImportedModel("plain rows", columns, declared=True)

FORMAT = Format("plain", ".plain", "plain rows", 0, write, read)
ONLY_READ = Format("only", ".only", "plain rows", 0, read=read)
"""


@pytest.fixture
def plain(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a package of formats."""
    monkeypatch.delitem(sys.modules, "splat_formats", raising=False)
    points = {"plain": "splat_formats:FORMAT", "only": "splat_formats:ONLY_READ", "wrong": "splat_formats:np"}
    install(place, "splat_formats", FORMAT_MODULE, {FORMATS: points})
    return place


def test_a_format_of_another_package_is_written_and_read_by_its_suffix(plain: Path) -> None:
    gaussians = scene(5, 0)
    for chosen in (format_to_write(Path("x.plain"), None), format_to_write(Path("x.bin"), "plain")):
        assert (chosen.name, chosen.suffix) == ("plain", ".plain")
    assert chosen.write is not None
    (plain / "x.plain").write_bytes(chosen.write(gaussians, ExportMetadata()).payload)
    assert format_of(plain / "x.plain").name == "plain"
    model = import_model(plain / "x.plain")
    again = to_gaussians(model, ImportOptions(), plain)[0]
    for (name, before), (_, after) in zip(gaussians.items(), again.items(), strict=True):
        assert torch.equal(before, after), name


def test_formats_that_exist_are_listed_and_not_imported(plain: Path) -> None:
    for output, name in (("x.unknown", None), ("x.ply", "unknown")):
        with pytest.raises(UsageError, match=r"only.*plain.*wrong"):
            format_to_write(Path(output), name)
    assert format_to_write(Path("x.ply"), None).name == "ply"
    assert "splat_formats" not in sys.modules


def test_a_broken_format_is_named(plain: Path) -> None:
    for name, fault in (("wrong", "is not a splatcli"), ("only", "are not written")):
        with pytest.raises(UsageError, match=fault):
            format_to_write(Path("x.bin"), name)
    (plain / "x.plain").write_bytes(b"12345678")  # no whole row
    with pytest.raises(UsageError, match=r"plug-in 'plain' does not work: ValueError"):
        import_model(plain / "x.plain")
