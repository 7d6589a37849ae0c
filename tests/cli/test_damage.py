"""Checkpoints that are damaged, and such as cannot be read: an older one never stands in without a word."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from splatcli.checkpoint import container
from splatcli.checkpoint.run_dir import RunDir, find_latest_sound
from splatcli.errors import OutputError
from tests.cli.tiny import QUICK, write_scene
from tests.running import Done, Splat
from tests.scene import made


@pytest.fixture(scope="session")
def stopped_run(tiny_scene: Path, tmp_path_factory: pytest.TempPathFactory, splat_once: Splat) -> Path:
    """A run with the checkpoints of steps 10 and 20; not to be changed."""
    folder = tmp_path_factory.mktemp("stopped") / "ball"
    settings = ("--set", "save.steps=[10]", "--set", "save.keep_last=2")
    done = splat_once("train", tiny_scene, "-o", folder, "-n", 30, "--stop-at", 20, "-q", *settings, *QUICK)
    assert done.code == 0, done.err
    return folder


@pytest.fixture
def run(stopped_run: Path, tmp_path: Path) -> Path:
    shutil.copytree(stopped_run, tmp_path / "run")
    return tmp_path / "run"


def newest(run: Path) -> Path:
    return run / "ckpts" / "ckpt_000020.pt"


def older(run: Path) -> Path:
    return run / "ckpts" / "ckpt_000010.pt"


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "ckpts").iterdir())


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


COMMANDS = ("export {run} -o {out}/x.ply", "render {run} -o {out}/views", "eval {run}")


def test_an_older_model_is_refused_unless_a_flag_accepts_it(
    run: Path, tiny_scene: Path, tmp_path: Path, splat: Splat
) -> None:
    truncate(newest(run))
    for number, command in enumerate(COMMANDS):
        words = command.format(run=run, out=tmp_path / f"out{number}").split()
        for more in ((), ("-q",), ("-q", "--json")):
            done = splat(*words, *more)
            assert done.code == 11, (command, more, done)
            assert done.err.startswith("error[E011]: the newest checkpoint is damaged (truncated or extended"), done.err
            assert f"where: {newest(run)}" in done.err
            assert f"--allow-older takes {older(run)}" in done.err
            assert not (tmp_path / f"out{number}").exists()
            assert "--json" not in more or done.objects[-1]["exit_code"] == 11
        done = splat(*words, "--allow-older", "-q", "--json")
        assert done.code == 0, done.err
        assert done.err.count("warning: ") == 1
        assert "step 10" in done.err, done.err
        event = done.objects[0]
        assert event["event"] == "older-checkpoint"
        assert (event["path"], event["step"], event["damaged"]) == (str(older(run)), 10, [str(newest(run))])
        assert done.objects[-1]["event"] == "result"
    done = splat("train", tiny_scene, "-o", tmp_path / "new", "--init", run)
    assert (done.code, f"name the older one: {older(run)}" in done.err) == (11, True)


def test_resume_falls_back_from_a_damaged_checkpoint_with_a_warning(run: Path, splat: Splat) -> None:
    truncate(newest(run))
    done = splat("resume", run, "--stop-at", "12", "-q", "--json")
    assert done.code == 0, done.err
    assert "the newest checkpoint is damaged" in done.err
    assert [event["event"] for event in done.objects][:2] == ["older-checkpoint", "started"]
    assert "ckpt_000020.pt.old-1" in names(run)
    assert done.objects[-1]["step"] == 12


def test_where_no_checkpoint_is_sound_no_other_run_stands_in(
    run: Path, stopped_run: Path, tmp_path: Path, splat: Splat, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(stopped_run, tmp_path / "output" / "old")
    shutil.move(run, tmp_path / "output" / "new")
    damaged = tmp_path / "output" / "new"
    for path in (older(damaged), newest(damaged)):
        truncate(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", None)
    done = splat("export", "-o", "x.ply", "--allow-older")
    assert done.code == 5
    assert "no checkpoint of this run is sound" in done.err
    assert "output/new/ckpts/ckpt_000020.pt" in done.err


REFUSALS = {
    "EACCES": (5, "Permission denied"),
    "EIO": (5, "Input/output error"),
    "ESTALE": (5, "Stale file handle"),
    "EMFILE": (4, "too many files are open"),
    "ENOMEM": (4, "out of memory"),
}


@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.parametrize("call", ["open", "zip", "torch"])
def test_what_the_system_refuses_is_not_damage(
    run: Path, tmp_path: Path, splat: Splat, monkeypatch: pytest.MonkeyPatch, name: str, call: str
) -> None:
    """Wherever it does: at the first look, inside the zip, and inside torch, which have words of their own for it."""
    code, said = REFUSALS[name]
    number = getattr(errno, name)
    before = names(run)

    def refuse(path: object) -> None:
        if Path(str(path)) == newest(run):
            raise OSError(number, os.strerror(number), str(path))

    if call == "open":
        plain = Path.open
        monkeypatch.setattr(Path, "open", lambda self, *words, **more: refuse(self) or plain(self, *words, **more))
    elif call == "zip":

        class Zip(container.zipfile.ZipFile):
            def __init__(self, path: Path) -> None:
                try:
                    refuse(path)
                except OSError:
                    raise container.zipfile.BadZipFile("File is not a zip file")  # noqa: B904 - as zipfile does it
                super().__init__(path)

        monkeypatch.setattr(container.zipfile, "ZipFile", Zip)
    else:
        import torch

        load = torch.load

        def loaded(path: str, **more: object) -> object:
            try:
                refuse(path)
            except OSError as error:
                raise RuntimeError(
                    f"unable to open file <{path}> in read-only mode: {error.strerror} ({number})"
                ) from None
            return load(path, **more)

        monkeypatch.setattr(torch, "load", loaded)
    for command in (*COMMANDS, "resume {run} --stop-at 22", "info {run}"):
        done = splat(*command.format(run=run, out=tmp_path / "out").split(), "-q")
        assert done.code == code, (command, done)
        assert said in done.err, (command, done.err)
        assert str(newest(run)) in done.err
        assert "help: " in done.err
        assert "Traceback" not in done.err
    assert names(run) == before
    assert not (tmp_path / "out").exists()


def as_another_user(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """A command of an unprivileged user, for whom permissions are real; it may read ``folder``."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root, to be somebody else")
    while folder != Path("/tmp"):
        folder.chmod(0o755)
        folder = folder.parent
        if folder == folder.parent:
            pytest.skip("the test's folder is not below /tmp")
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable, "-m", "splatcli"]
    done = subprocess.run([*command, *map(str, words)], capture_output=True, text=True, check=False, cwd="/")
    if "Permission denied: '" in done.stderr or "No module named" in done.stderr:
        pytest.skip("another user cannot read this Python")
    return done


@pytest.mark.parametrize(
    ("words", "code"), [(("sfm", "SECRET"), 3), (("train", "SECRET"), 3), (("train", "SCENE", "--init", "SECRET"), 5)]
)
def test_a_place_of_another_user_is_not_taken_for_missing(run: Path, words: tuple[str, ...], code: int) -> None:
    closed = run / "closed"
    (closed / "scene").mkdir(parents=True)
    closed.chmod(0o700)
    named = {"SECRET": closed / "scene", "SCENE": write_scene(run / "scene")}
    done = as_another_user(run, *(named.get(word, word) for word in words))
    assert done.returncode == code, done.stderr
    assert "cannot be read: Permission denied" in done.stderr


def test_a_checkpoint_of_another_user_is_unreadable(run: Path) -> None:
    newest(run).chmod(0)
    done = as_another_user(run, "check", run)
    assert done.returncode == 5, done.stderr
    assert "cannot be read: Permission denied" in done.stderr
    assert f"UNREADABLE  {newest(run)}" in done.stdout
    assert f"sound       {older(run)}" in done.stdout


# --- splat check ---


def states(done: Done) -> dict[str, str]:
    return {
        Path(finding["path"]).name: finding["state"] for finding in done.objects[-2 if done.code else -1]["findings"]
    }


def test_check_reports_every_file_of_a_sound_run(run: Path, splat: Splat) -> None:
    done = splat("check", run, "--json", "-q")
    assert (done.code, done.err) == (0, "")
    expected = ["ckpt_000020.pt", "ckpt_000010.pt", "latest", "config.json", "metrics.jsonl"]
    assert states(done) == dict.fromkeys(expected, "sound")
    assert done.objects[-1]["sound"] is True
    assert [event["event"] for event in done.objects] == ["checked"] * 5 + ["result"]
    lines = splat("check", run).lines
    assert len(lines) == 5
    for word in ("archive", "manifest", "schema", "digest", "finite", "parameter space", "settings", "cameras"):
        assert word in lines[0], word


def test_check_of_a_run_that_works_expects_metrics_after_its_checkpoint(run: Path, splat: Splat) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30}\n')
    with RunDir.open(run):
        assert states(splat("check", run, "--json"))["metrics.jsonl"] == "sound"
    assert states(splat("check", run, "--json"))["metrics.jsonl"] == "warning"


def test_check_finds_what_is_spoiled(run: Path, splat: Splat) -> None:
    content = bytearray(older(run).read_bytes())
    content[len(content) // 2] ^= 1  # in a tensor, where structure and manifest stay sound
    older(run).write_bytes(content)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2')
    (run / "latest").write_text("ckpts/ckpt_000010.pt\n")
    (run / "config.json").write_text("{")
    (run / "ckpts" / f"ckpt_000030.pt.tmp.{os.getpid()}.0123abcd").touch()
    done = splat("check", run, "--json")
    assert done.code == 5
    assert states(done) == {
        "ckpt_000020.pt": "sound",
        "ckpt_000010.pt": "damaged",
        "latest": "warning",
        "config.json": "damaged",
        "metrics.jsonl": "warning",
        f"ckpt_000030.pt.tmp.{os.getpid()}.0123abcd": "warning",
    }
    assert "does not match its digest" in done.objects[-1]["what"]
    assert "1 more of 6 files" in done.objects[-1]["what"]
    truncate(newest(run))
    assert splat("check", run).code == 5, "none is sound"
    shutil.copy(newest(run), older(run))


def test_check_names_a_checkpoint_that_has_the_name_of_another_step(run: Path, splat: Splat) -> None:
    shutil.copy(older(run), run / "ckpts/ckpt_000050.pt")
    done = splat("check", run, "--json")
    assert done.code == 0, done.err
    assert states(done)["ckpt_000050.pt"] == "warning"
    (renamed,) = (one for one in done.objects if one.get("state") == "warning" and one["path"].endswith("50.pt"))
    assert renamed["what"].startswith("step 10, ")
    assert "its name is that of step 50" in renamed["what"]
    assert "ckpt_000010.pt" in renamed["help"]


def test_check_gives_the_code_of_an_older_model(run: Path, splat: Splat) -> None:
    truncate(newest(run))
    done = splat("check", run)
    assert done.code == 11
    assert str(older(run)) in done.err.splitlines()[-1]
    assert [line.split()[0] for line in done.lines if "ckpt_" in line] == ["DAMAGED", "sound"]


@pytest.mark.parametrize("suffix", ["ply", "spz", "sog", "splat", "compressed.ply", "glb"])
def test_check_reads_exported_files(run: Path, tmp_path: Path, splat: Splat, suffix: str) -> None:
    path = tmp_path / f"x.{suffix}"
    assert splat("export", run, "-o", path, "-q").code == 0
    done = splat("check", path)
    assert done.code == 0, done.err
    assert "finite values, parameter space" in done.out
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3 + 1])
    done = splat("check", path)
    assert done.code == 5, done.out
    assert done.out.startswith("DAMAGED")
    assert done.err.startswith("error[E005]: ")


def test_check_of_activated_parameters_and_of_files_without_a_model(
    run: Path, tiny_scene: Path, tmp_path: Path, splat: Splat
) -> None:
    assert splat("check", newest(run)).lines[0].startswith("sound")
    assert "splat info" in splat("check", tiny_scene).err
    assert splat("check", tmp_path / "absent").code == 2
    (tmp_path / "x.ply").write_bytes(b"")
    assert splat("check", tmp_path / "x.ply").code == 5
    record = json.loads((run / "config.json").read_text())
    record["train"]["iterations"] = -1
    (run / "config.json").write_text(json.dumps(record))
    done = splat("check", run)
    assert done.code == 5
    assert "train.iterations" in done.err


# --- housekeeping ---


def test_housekeeping_that_fails_does_not_end_a_running_training(
    tiny_scene: Path, tmp_path: Path, splat: Splat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pointer and the removal of old checkpoints come after a good save."""
    run = tmp_path / "run"
    listed = RunDir.checkpoints
    calls: list[int] = []

    def stale(self: RunDir) -> list[Path]:
        calls.append(1)
        if len(calls) > 1:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(self.path))
        return listed(self)

    monkeypatch.setattr(RunDir, "checkpoints", stale)
    stat = os.stat

    def refused(path: object, *words: object, **more: object) -> os.stat_result:
        if str(path) == str(run / "latest"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return stat(path, *words, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", refused)
        done = splat("train", tiny_scene, "-o", run, "-n", 6, "--set", "save.steps=[2,4]", *QUICK)
    assert done.code == 0, done.err
    assert len(calls) > 2
    assert "Stale file handle" in done.err
    assert "pointer to the checkpoint: Input/output error" in done.err
    latest = find_latest_sound(run).path
    assert latest is not None
    assert latest.name == "ckpt_000006.pt"


def test_errors_of_the_system_have_codes_and_name_the_place(tmp_path: Path, splat: Splat) -> None:
    from splatcli.errors import ModelFileError, SceneError, SplatError, from_os_error

    cases: list[tuple[int, type[SplatError], int]] = [
        (errno.EIO, SceneError, 3),
        (errno.ESTALE, ModelFileError, 5),
        (errno.EACCES, OutputError, 8),
        (errno.ENOSPC, SceneError, 8),
        (errno.EROFS, ModelFileError, 8),
        (errno.ENOMEM, OutputError, 4),
        (errno.EMFILE, SceneError, 4),
    ]
    for number, kind, code in cases:
        problem = from_os_error(OSError(number, os.strerror(number), "a/b"), kind)
        assert (problem.exit_code, problem.where) == (code, "a/b"), os.strerror(number)
        assert problem.remedy


def test_a_run_that_lost_an_image_goes_on_as_its_error_says(tmp_path: Path, splat: Splat) -> None:
    scene, run = made.colmap_scene(tmp_path / "a scene"), tmp_path / "run"
    assert splat("train", scene, "-o", run, "-n", 4, "-q", *QUICK).code == 0
    (scene / "images" / made.names()[3]).unlink()
    done = splat("resume", run, "-n", 6)
    assert done.code == 3, done.err
    (command,) = re.findall(r"splat train .* --init .* --skip-missing", done.err)
    again = splat(*shlex.split(command)[1:], "-o", tmp_path / "again", "-n", 2, "-q", *QUICK)
    assert again.code == 0, again.err
