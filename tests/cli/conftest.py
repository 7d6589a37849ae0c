"""Running ``splat`` in this process, and a scene and a run to do it with."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

from splatcli.cli.commands import run
from tests.cli.tiny import QUICK, write_scene
from tests.running import Done, Splat


@pytest.fixture
def splat(capfd: pytest.CaptureFixture[str]) -> Splat:
    """Runs a command line in this process, through splatcli.cli.commands."""

    def call(*words: object) -> Done:
        capfd.readouterr()
        code = run([str(word) for word in words])
        return Done(code, *capfd.readouterr())

    return call


@pytest.fixture(scope="session")
def splat_once() -> Splat:
    """The same for fixtures that outlive a test."""

    def call(*words: object) -> Done:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run([str(word) for word in words])
        return Done(code, out.getvalue(), err.getvalue())

    return call


@pytest.fixture(scope="session")
def tiny_scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scene folder; not to be changed."""
    return write_scene(tmp_path_factory.mktemp("scenes") / "ball")


@pytest.fixture(scope="session")
def finished_run(tiny_scene: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of 40 steps; not to be changed."""
    folder = tmp_path_factory.mktemp("runs") / "ball"
    code = run(["train", str(tiny_scene), "-o", str(folder), "-n", "40", "-q", *QUICK])
    assert code == 0
    return folder


@pytest.fixture(scope="session")
def good_run(splat_once: Splat, tiny_scene: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of enough steps for a PSNR that can fall by 8 dB; not to be changed."""
    folder = tmp_path_factory.mktemp("runs") / "good"
    assert splat_once("train", tiny_scene, "-o", folder, "-n", "300", "-q", *QUICK).code == 0
    return folder


@pytest.fixture(scope="session")
def exported_ply(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The PLY of the finished run; not to be changed."""
    return _exported(finished_run, tmp_path_factory.mktemp("ply") / "x.ply")


@pytest.fixture(scope="session")
def cameras(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The camera file of the finished run; not to be changed."""
    return _exported(finished_run, tmp_path_factory.mktemp("cameras") / "cameras.json")


def _exported(run_folder: Path, path: Path) -> Path:
    assert run(["export", str(run_folder), "-o", str(path), "-q"]) == 0
    return path
