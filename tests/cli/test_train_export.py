"""``splat train --export`` and ``splat resume --export``: the finished model as files of other programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from splatcli.errors import OutputError
from tests.cli.test_blocks import ANYWAY
from tests.cli.tiny import QUICK, add_points, write_scene
from tests.running import Splat


def test_the_files_are_those_of_splat_export(splat: Splat, tiny_scene: Path, tmp_path: Path) -> None:
    run, ply, spz = tmp_path / "run", tmp_path / "new" / "scene.ply", tmp_path / "scene.spz"
    streamed, cameras = tmp_path / "scene.lod", tmp_path / "cameras.json"
    files = (ply, spz, streamed, cameras)
    words = [word for file in files for word in ("--export", file)]
    done = splat("train", tiny_scene, "-o", run, "-n", 20, *QUICK, *words)
    assert done.code == 0, done.err
    assert done.lines == [str(run / "ckpts/ckpt_000020.pt")]
    assert f"exported {ply}: " in done.err
    assert "splat export" not in done.err, "what is done is no next step"
    for file in files:
        again = tmp_path / "again" / file.name
        assert splat("export", run, "-o", again).code == 0
        parts = sorted(path.relative_to(again) for path in again.rglob("*") if path.is_file()) or [Path()]
        for part in parts:
            assert (file / part).read_bytes() == (again / part).read_bytes()


def test_a_stopped_run_exports_when_it_goes_on(splat: Splat, tiny_scene: Path, tmp_path: Path) -> None:
    run, ply = tmp_path / "run", tmp_path / "scene.ply"
    words = ("train", tiny_scene, "-o", run, "-n", 6, *QUICK)
    stopped = splat(*words, "--export", ply, "--stop-at", 3)
    assert stopped.code == 0
    assert not ply.exists()
    again = f"splat resume {run} --export {ply}"
    assert f"{ply} is not written, because the run has not finished; {again} goes on" in stopped.err
    resumed = splat("resume", run, "--export", ply, "--json")
    assert resumed.code == 0, resumed.err
    assert resumed.objects[-1]["exports"] == [str(ply)]
    assert ply.is_file()
    ply.unlink()
    for command in (words, ("resume", run)):
        finished = splat(*command, "--export", ply)
        assert finished.code == 0, finished.err
        assert ply.is_file(), "the run was finished before"
        ply.unlink()


@pytest.mark.parametrize(
    ("file", "code", "says"),
    [
        ("scene.xyz", 2, "cannot tell a format from 'scene.xyz'\n  where: --export\n"),
        ("-", 2, "stdout gets the path of the checkpoint\n  where: --export\n"),
        ("taken/scene.ply", 8, "cannot write here: Not a directory"),
        ("folder", 2, "cannot tell a format"),
        ("folder.ply", 8, "this is a folder, not a file"),
    ],
)
def test_what_cannot_be_written_is_refused_before_training(
    splat: Splat,
    tiny_scene: Path,
    finished_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    file: str,
    code: int,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken").write_text("")
    Path("folder.ply").mkdir()
    for words in (("train", tiny_scene, "-o", "run", "-n", 1, *QUICK), ("resume", finished_run)):
        done = splat(*words, "--export", file)
        assert done.code == code
        assert says in done.err
        assert done.out == ""
    assert not Path("run").exists()


def test_a_result_is_printed_also_where_the_export_fails(
    splat: Splat, tiny_scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_the_disk(*_: object) -> None:
        raise OutputError("the disk is full", where=tmp_path / "scene.spz")

    monkeypatch.setattr("splatcli.output_files.write_bytes", fill_the_disk)
    done = splat("train", tiny_scene, "-o", tmp_path / "run", "-n", 2, *QUICK, "--export", tmp_path / "scene.spz")
    assert done.code == 8
    assert done.lines == [str(tmp_path / "run/ckpts/ckpt_000002.pt")]
    assert "the disk is full" in done.err


def test_of_blocks_the_merged_model_is_exported(splat: Splat, tmp_path: Path) -> None:
    scene = add_points(write_scene(tmp_path / "ball"))
    words = ("train", scene, "--blocks", "1x2", "-o", tmp_path / "run", "-n", 4, *QUICK, *ANYWAY)
    refused = splat(*words, "--block", 0, "--export", tmp_path / "scene.ply")
    assert refused.code == 2
    assert "one block is no finished model" in refused.err
    done = splat(*words, "--export", tmp_path / "scene.ply")
    assert done.code == 0, done.err
    assert splat("export", tmp_path / "run", "-o", tmp_path / "again.ply").code == 0
    assert (tmp_path / "scene.ply").read_bytes() == (tmp_path / "again.ply").read_bytes()
