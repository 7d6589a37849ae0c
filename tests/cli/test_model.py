"""Which model a command takes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from splatcli.cli.model import find_model, load_model
from splatcli.errors import ModelFileError, UsageError
from splatcli.formats.registry import format_of


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch):
    """Puts a text into a real pipe and the pipe in place of stdin."""
    opened = []

    def arrange(text: str) -> None:
        read, write = os.pipe()
        os.write(write, os.fsencode(text))
        os.close(write)
        stream = os.fdopen(read)
        opened.append(stream)
        monkeypatch.setattr("sys.stdin", stream)

    yield arrange
    for stream in opened:
        stream.close()


def test_a_file_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "x.ply"
    path.write_bytes(b"ply\n")
    assert find_model(path) == path


def test_the_last_line_of_a_pipe_is_the_path(tmp_path: Path, piped) -> None:
    path = tmp_path / "x.ply"
    path.write_bytes(b"ply\n")
    piped(f"something\n{path}\n\n")
    assert find_model(None) == path


@pytest.mark.parametrize("name", [" x.ply", "x.ply ", "\tx.ply", " ", "\u3000x.ply", os.fsdecode(b"caf\xe9.ply")])
@pytest.mark.parametrize("end", ["\n", "\r\n", ""])
def test_spaces_are_part_of_the_path_of_a_pipe(
    tmp_path: Path, piped, monkeypatch: pytest.MonkeyPatch, name: str, end: str
) -> None:
    """A path without them would name another file."""
    monkeypatch.chdir(tmp_path)
    for path in (Path("x.ply"), Path(name)):
        path.write_bytes(b"ply\n")
    piped(f"x.ply\n{name}{end}")
    assert find_model(None) == Path(name)


def test_json_of_a_pipe_is_understood(tmp_path: Path, piped) -> None:
    path = tmp_path / "x.ply"
    path.write_bytes(b"ply\n")
    piped(f'{{"event": "started"}}\n{{"event": "result", "path": "{path}"}}\n')
    assert find_model(None) == path


def test_an_error_of_a_pipe_is_not_a_model(piped) -> None:
    piped('{"event": "error", "error": "E003"}\n')
    with pytest.raises(UsageError, match="JSON without a path"):
        find_model(None)


@pytest.mark.parametrize("content", ["ply\nformat binary_little_endian 1.0\n\x00\x01\x7f", "x" * 5_000, "a\rb"])
def test_a_file_in_a_pipe_is_no_path(content: str, piped) -> None:
    piped(content)
    with pytest.raises(UsageError, match="a file came through the pipe") as caught:
        find_model(None)
    assert len(str(caught.value)) < 300


def test_an_empty_pipe_never_falls_back_to_another_run(tmp_path: Path, piped, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    piped("")
    with pytest.raises(UsageError, match="no path came through"):
        find_model(None)


def test_a_named_model_leaves_the_pipe_alone(tmp_path: Path, piped) -> None:
    path = tmp_path / "x.ply"
    path.write_bytes(b"ply\n")
    piped("")
    assert find_model(path) == path


def test_the_newest_ply_of_an_inria_run_is_taken(tmp_path: Path) -> None:
    for number in (7000, 30000):
        folder = tmp_path / "point_cloud" / f"iteration_{number}"
        folder.mkdir(parents=True)
        (folder / "point_cloud.ply").write_bytes(b"ply\n")
    assert find_model(tmp_path).parent.name == "iteration_30000"


def test_the_folder_of_checkpoints_stands_for_its_run(finished_run: Path) -> None:
    assert find_model(finished_run / "ckpts") == find_model(finished_run)


def test_a_folder_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no run"):
        find_model(tmp_path)


def test_a_folder_around_runs_names_them(tmp_path: Path) -> None:
    """nerfstudio has outputs/SCENE/splatfacto/DATE, the original program point_cloud/iteration_N/."""
    run = tmp_path / "outputs" / "fox" / "splatfacto" / "2026-01-01"
    (run / "nerfstudio_models").mkdir(parents=True)
    (run / "nerfstudio_models" / "step-000029999.ckpt").write_bytes(b"PK\x03\x04")
    for folder in (run.parent, tmp_path / "outputs", run.parents[1]):
        with pytest.raises(UsageError) as caught:
            find_model(folder)
        assert caught.value.remedy == f"name {run}"
    (run / "config.yml").write_text("!!python/object:nerfstudio.engine.trainer.TrainerConfig\n")
    with pytest.raises(ModelFileError) as refused:
        load_model(run / "config.yml")
    assert refused.value.remedy == f"name the run folder that it lies in: {run}"


def test_a_folder_of_files_of_splats_names_them_and_no_point_cloud(tmp_path: Path) -> None:
    (tmp_path / "sparse_pc.ply").write_bytes(b"ply\nproperty float x\n")
    with pytest.raises(UsageError, match="holds no run") as caught:
        find_model(tmp_path)
    assert "sparse_pc" not in str(caught.value.remedy)
    (tmp_path / "point_cloud.ply").write_bytes(b"ply\nproperty float f_dc_0\n")
    with pytest.raises(UsageError) as named:
        find_model(tmp_path)
    assert named.value.remedy == f"name {tmp_path / 'point_cloud.ply'}"


def test_a_folder_of_other_formats_of_splats_names_them(tmp_path: Path) -> None:
    for name in ("a.spz", "b.splat", "c.glb"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "d.sog").mkdir()
    (tmp_path / "e.compressed.ply").write_bytes(b"ply\nproperty uint packed_position\n")
    with pytest.raises(UsageError) as named:
        find_model(tmp_path)
    assert named.value.remedy == "name " + " or ".join(
        str(tmp_path / name) for name in ("a.spz", "b.splat", "e.compressed.ply")
    )


def test_the_kind_is_detected_from_the_content(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    for content, kind in ((b"PK\x03\x04", "checkpoint"), (b"\x80\x02", "checkpoint"), (b"ply\nformat", "ply")):
        path.write_bytes(content)
        assert format_of(path).name == kind
    for content, said in (
        (b"", "empty"),
        (b"junk", "neither a checkpoint nor a file of splats: it starts with b'junk'"),
    ):
        path.write_bytes(content)
        with pytest.raises(ModelFileError, match=said):
            format_of(path)
    with pytest.raises(ModelFileError):
        format_of(tmp_path / "absent")
