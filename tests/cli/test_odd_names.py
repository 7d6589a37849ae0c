"""Names of folders that are no text, and text that stdout cannot hold."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from splatcli.checkpoint.file import load_checkpoint
from splatcli.checkpoint.run_dir import RunDir
from splatcli.errors import OutputError
from splatcli.output_files import free_folder
from splatcli.render.camera_files import cameras_json
from tests.cli.tiny import QUICK
from tests.native.cases import NEEDS_COMPILER
from tests.running import Done, Splat

#: A name in Latin-1, as old archives unpack it: it is not UTF-8.
LATIN = os.fsdecode(b"caf\xe9")


def test_a_run_in_a_folder_that_is_not_utf8_is_trained_and_used(splat: Splat, tiny_scene: Path, tmp_path: Path) -> None:
    run = tmp_path / LATIN
    done = splat("train", tiny_scene, "-o", run, "-n", 10, "--stop-at", 5, "-q", *QUICK)
    assert done.code == 0, done.err
    for words in (
        ("resume", run, "-q"),
        ("check", run),
        ("eval", run, "--sheet", tmp_path / f"{LATIN}.png"),
        ("render", run, "--views", "-o", tmp_path / f"{LATIN}-views"),
        ("export", run, "-o", tmp_path / f"{LATIN}.html"),
        ("compare", run, run, "-o", tmp_path / f"{LATIN}-compare.html"),
    ):
        done = splat(*words)
        assert done.code == 0, done.err


@NEEDS_COMPILER
def test_ranks_find_a_run_in_such_a_folder_again(shell: Callable[..., Done], tiny_scene: Path, tmp_path: Path) -> None:
    words = shlex.join(["train", str(tiny_scene), "-n", "2", "--ranks", "2", "--device", "cpu", "-q", *QUICK])
    for _ in range(2):
        done = shell(f"splat {words} -o $'caf\\xe9' > printed")
        assert done.code == 0, done.err
        assert (tmp_path / "printed").read_bytes() == b"caf\xe9/ckpts/ckpt_000002.pt\n"


@pytest.mark.parametrize("name", ["two\nlines", "bell\a", "a\r", "line\u2028"])
def test_a_run_whose_path_is_not_one_line_is_refused(
    splat: Splat, tiny_scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Before any work: with -o, by the name of its scene, for blocks, and where Python makes the folder."""
    monkeypatch.chdir(tmp_path)
    scene = tmp_path / name
    scene.symlink_to(tiny_scene, target_is_directory=True)
    for words in ((tiny_scene, "-o", f"{name}-run"), (scene,), (tiny_scene, "-o", f"{name}-run", "--dry-run")):
        done = splat("train", *words, "-n", 5, *QUICK)
        assert done.code == 8, done.err
        assert "no line breaks and control characters" in done.err
        assert f"where: {(f'{name}-run' if '-o' in words else f'output/{name}')!r}" in done.err
        assert "help: choose another place with -o" in done.err
        assert "reading" not in done.err
    with pytest.raises(OutputError, match="no line breaks"):
        RunDir.create(tmp_path / f"{name}-run")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    done = splat("train", scene, "-o", "tab\tand space", "-n", 1, "-q", *QUICK)
    assert done.lines == ["tab\tand space/ckpts/ckpt_000001.pt"]


@pytest.mark.parametrize("name", ["two\nlines", "a\r"])
def test_a_result_whose_path_is_not_one_line_is_refused(
    splat: Splat, finished_run: Path, exported_ply: Path, tmp_path: Path, name: str
) -> None:
    """The next command of a pipe would read the path of another file."""
    for words, made in (
        (("export", finished_run), f"{name}.ply"),
        (("export", finished_run), f"{name}/cameras.json"),
        (("export", finished_run), f"{name}.lod"),
        (("edit", exported_ply, "--scale", 2), f"{name}.ply"),
        (("render", finished_run), name),
        (("mesh", finished_run), f"{name}.glb"),
        (("compare", finished_run, exported_ply), f"{name}.html"),
        (("merge", finished_run), f"{name}.ply"),
    ):
        done = splat(*words, "-o", tmp_path / made)
        assert done.code == 8, (words, done.err)
        assert "no line breaks and control characters" in done.err, (words, done.err)
    assert not list(tmp_path.iterdir())


def test_a_scene_whose_name_is_not_utf8_is_refused_with_the_remedy(
    splat: Splat, tiny_scene: Path, tmp_path: Path
) -> None:
    scene = tmp_path / LATIN
    shutil.copytree(tiny_scene, scene)
    done = splat("train", scene, "-o", tmp_path / "run", "-n", 5, *QUICK)
    assert (done.code, "not valid UTF-8" in done.err) == (2, True), done.err
    assert "symbolic link" in done.err
    assert not (tmp_path / "run").exists()
    (tmp_path / "cafe").symlink_to(scene, target_is_directory=True)
    assert splat("train", tmp_path / "cafe", "-o", tmp_path / "run", "-n", 5, "-q", *QUICK).code == 0


def test_a_run_has_the_name_by_which_its_scene_was_given(
    splat: Splat, tiny_scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link too: what it leads to may be a number on a disk."""
    (tmp_path / "garden").symlink_to(tiny_scene, target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    for given in ("garden", "garden/", "garden/images/.."):
        assert f"{Path('output') / 'garden'}:" in splat("train", given, "--dry-run", *QUICK).out
    assert free_folder(tmp_path / "garden") == Path("output") / "garden"
    monkeypatch.chdir(tmp_path / "garden")
    assert free_folder(Path()) == Path("output") / tiny_scene.name  # the system says where a shell is


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_letters_that_stdout_does_not_have_are_escaped(tiny_scene: Path, tmp_path: Path, encoding: str) -> None:
    scene = tmp_path / "日本"
    scene.symlink_to(tiny_scene, target_is_directory=True)
    done = subprocess.run(
        [sys.executable, "-m", "splatcli", "info", scene],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": encoding},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"\\u65e5\\u672c" in done.stdout


def test_names_in_a_camera_file_become_names_of_files(splat: Splat, finished_run: Path, tmp_path: Path) -> None:
    """Other programs write what they like: names that are two lines, no text, or longer than a file's name may be."""
    names = ["two\nlines", "\ud800", "x" * 300, "x" * 300, "\u00e9" * 200 + "/one.jpg", "bell\a\0"]
    cameras = json.loads(cameras_json(load_checkpoint(finished_run / "ckpts" / "ckpt_000040.pt").cameras[:6]))
    for entry, name in zip(cameras["cameras"], names, strict=True):
        entry["name"] = name
    (tmp_path / "c.json").write_text(json.dumps(cameras))
    done = splat("render", finished_run, "--views", tmp_path / "c.json", "-o", tmp_path / "out", "-q")
    assert done.code == 0, done.err
    assert len(set(done.lines)) == len(done.lines) == len(names), done.out
    written = [Path(line) for line in done.lines]
    assert all(path.is_file() for path in written)
    assert written[0].name == "two_lines.png"
    assert written[2].name == "x" * 251 + ".png"
    assert written[3].name == "x" * 249 + "_2.png"
