"""The good scene, and ``expect``, which runs a case of the table."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from splatcli.cli.commands import run
from tests.bad_input.table import TRAIN, Case, Expect, check, copy_scene, make_good_scene


@pytest.fixture(scope="session")
def good_scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scene that trains; not to be changed. Training it once loads every library before memory is measured."""
    folder = tmp_path_factory.mktemp("good")
    make_good_scene(folder / "scene")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run([*TRAIN, "-q"]) == 0
    return folder / "scene"


@pytest.fixture
def expect(
    good_scene: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Expect:
    """Runs a case in a folder of its own and checks how it ends."""
    folder, temporary = tmp_path / "work", tmp_path / "temporary"
    folder.mkdir()
    temporary.mkdir()
    copy_scene(good_scene, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def call(case: Case) -> str:
        return check(case, folder, temporary, capfd)

    return call
