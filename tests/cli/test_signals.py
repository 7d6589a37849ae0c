"""What signals do to a run, and when."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import termios
import textwrap
import time
from pathlib import Path

import pytest

from splatcli.checkpoint.file import load_checkpoint
from splatcli.checkpoint.run_dir import RunDir
from splatcli.cli import commands
from splatcli.cli.process import SignalRequests, exit_code
from tests.cli.tiny import QUICK
from tests.forked import splat_command
from tests.running import Splat


def test_handlers_are_put_back() -> None:
    numbers = [signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")]
    before = [signal.getsignal(number) for number in numbers]
    with SignalRequests() as requests:
        requests.listen_for_stops()
        assert requests.stop() is None
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)
        assert requests.stop() == "SIGTERM"
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_save_request_is_reported_once() -> None:
    with SignalRequests() as requests:
        assert not requests.save()
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert requests.stop() is None
        assert requests.save()
        assert not requests.save()


def test_until_there_is_something_to_save_a_stop_is_obeyed_as_ever() -> None:
    with SignalRequests(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_stop_in_the_middle_of_an_import_is_not_swallowed(tmp_path: Path) -> None:
    """As numpy and scipy do: they go on half loaded, and the program fails later, or never ends."""
    (tmp_path / "swallows.py").write_text(
        "import os, signal, time\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(1)\n"
        "except BaseException:\n"
        "    pass\n"
    )
    code = (
        "import sys, splatcli.cli.process as process; process.exit_on_sigint_in_imports(); sys.path[:0] = '.'; "
        "import swallows; print(1)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(("words", "said"), [((), "interrupted\n"), (("-q",), "")])
def test_ctrl_c_in_a_command_is_answered(
    words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "app", interrupted)
    assert commands.run(["view", *words]) == 130
    assert capfd.readouterr() == ("", said)


def test_ctrl_c_that_a_library_turns_into_another_error_is_an_interrupt(tmp_path: Path) -> None:
    """As pydantic's core does: a schema that is being built ends with SchemaError, whose cause is not chained."""
    (tmp_path / "main.py").write_text(
        "import signal, sys\n"
        "from splatcli import cli\n"
        "from splatcli.cli import commands\n"
        "def app(**_):\n"
        "    try:\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "    except KeyboardInterrupt:\n"
        "        raise RuntimeError('Error building validator') from None\n"
        "commands.app = app\n"
        "sys.exit(cli.main())\n"
    )
    command = [sys.executable, "main.py", "view", "nothing"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_ctrl_c_after_the_result_never_ends_the_process_by_the_signal(exported_ply: Path) -> None:
    """The interpreter's end takes a part of a second; the exit code of the command stands then."""
    command = [sys.executable, "-m", "splatcli", "info", str(exported_ply), "-q"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline()
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.003)
    assert (process.returncode in (0, 130), process.communicate()[1]) == (True, "")


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalRequests() as requests:
            requests.listen_for_stops()
            os.kill(os.getpid(), signal.SIGHUP)
            assert requests.stop() is None
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("reason", "code"), [("SIGHUP", 129), ("SIGINT", 130), ("SIGTERM", 143), ("finished", 0), ("stop-at", 0)]
)
def test_the_reason_gives_the_exit_code(reason: str, code: int) -> None:
    assert exit_code(reason) == code


@pytest.fixture
def endless(tiny_scene: Path, tmp_path: Path):
    """A run in another process that would take hours; it has begun, and its events are on stdout."""
    command = [*splat_command(), "train", str(tiny_scene), "-o", str(tmp_path / "run"), "--json"]
    process = subprocess.Popen(
        [*command, "-n", "1000000", *QUICK, "--set", "save.steps=[]"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        next_event(process, "saved")
        yield process
    finally:
        process.kill()
        process.communicate()


def next_event(process: subprocess.Popen[str], name: str) -> dict[str, object]:
    assert process.stdout is not None
    for line in process.stdout:
        event: dict[str, object] = json.loads(line)
        if event["event"] == name:
            return event
    raise AssertionError(f"the run ended without {name!r}: {process.communicate()[1]}")


def test_sigusr1_saves_and_training_continues(endless: subprocess.Popen[str]) -> None:
    steps = []
    for _ in range(2):
        endless.send_signal(signal.SIGUSR1)
        saved = next_event(endless, "saved")
        steps.append(load_checkpoint(Path(str(saved["path"]))).step)
    assert 0 < steps[0] < steps[1]
    endless.send_signal(signal.SIGTERM)
    out, err = endless.communicate(timeout=120)
    assert endless.returncode == 143, err
    result = json.loads(out.splitlines()[-1])
    assert load_checkpoint(Path(result["path"])).step == result["step"] > steps[1]


def test_a_lost_terminal_costs_nothing(endless: subprocess.Popen[str]) -> None:
    endless.send_signal(signal.SIGHUP)
    out, err = endless.communicate(timeout=120)
    assert endless.returncode == 129, err
    result = json.loads(out.splitlines()[-1])
    assert load_checkpoint(Path(result["path"])).step == result["step"]


def close_terminal(command: list[str], tmp_path: Path, *, own: bool) -> tuple[int, str]:
    """Run a command with stderr on a terminal that is closed once it shows a first save; return exit code and stdout.

    own: the terminal is that of its session, which gets SIGHUP then; else nothing tells the process.
    """
    ours, theirs = os.openpty()
    with (tmp_path / "stdout").open("w+") as out:
        process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=out,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm-256color"},
            start_new_session=own,
            preexec_fn=(lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)) if own else None,
        )
        os.close(theirs)
        try:
            got = b""
            while b"saved" not in got:
                got += os.read(ours, 65536)
            os.close(ours)
            code = process.wait(120)
        finally:
            process.kill()
            process.wait()
        out.seek(0)
        return code, out.read()


def test_a_run_whose_terminal_is_closed_is_stopped_by_its_signal_alone(tiny_scene: Path, tmp_path: Path) -> None:
    """The progress that it draws fails then, which is no error of the run."""
    words = ["train", str(tiny_scene), "-o", str(tmp_path / "run"), "-n", "1000000", *QUICK, "--set", "save.steps=[]"]
    code, out = close_terminal([sys.executable, "-m", "splatcli", *words], tmp_path, own=True)
    assert code == 129
    assert load_checkpoint(Path(out.rstrip("\n"))).step < 1_000_000


def test_a_run_that_no_signal_tells_of_a_closed_terminal_goes_on_to_its_end(tiny_scene: Path, tmp_path: Path) -> None:
    """As one that a shell disowned."""
    words = ["train", str(tiny_scene), "-o", str(tmp_path / "run"), "-n", "800", *QUICK, "--set", "save.steps=[500]"]
    code, out = close_terminal([*splat_command(), *words], tmp_path, own=False)
    assert (code, out) == (0, f"{tmp_path / 'run/ckpts/ckpt_000800.pt'}\n")


def test_a_run_whose_folder_is_moved_names_the_new_place(
    endless: subprocess.Popen[str], splat: Splat, tmp_path: Path
) -> None:
    """And writes nothing into another run that has the old place."""
    endless.send_signal(signal.SIGUSR1)
    kept = Path(str(next_event(endless, "saved")["path"])).name
    moved = (tmp_path / "run").rename(tmp_path / "my run")
    next_event(endless, "alarmed")
    (tmp_path / "run" / "ckpts").mkdir(parents=True)
    (tmp_path / "run" / "lock").touch()
    endless.send_signal(signal.SIGTERM)
    out, err = endless.communicate(timeout=120)
    assert endless.returncode == 8, err
    error = json.loads(out.splitlines()[-1])
    assert error["where"] == str(tmp_path / "run")
    assert f"the run folder was moved to {moved}" in error["what"]
    assert f"the newest checkpoint is {moved / 'ckpts' / kept}" in error["what"]
    assert error["help"] == f"splat resume '{moved}' goes on from there"
    assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == ["ckpts", "lock"]
    assert splat("resume", moved, "--stop-at", 1, "-q").lines == [str(moved / "ckpts" / kept)]


def test_a_run_whose_folder_is_removed_says_so(endless: subprocess.Popen[str], tmp_path: Path) -> None:
    endless.send_signal(signal.SIGUSR1)
    next_event(endless, "saved")  # the run is past its start, which looks at the room on the disk
    shutil.rmtree((tmp_path / "run").rename(tmp_path / "gone"))  # nothing is written into it meanwhile
    endless.send_signal(signal.SIGTERM)
    out, err = endless.communicate(timeout=120)
    assert endless.returncode == 8, err
    error = json.loads(out.splitlines()[-1])
    assert "the run folder was removed while the run was writing to it; nothing is saved" in error["what"]
    assert error["help"] == "train again, or splat resume a copy of the run"
    assert not (tmp_path / "run").exists()


def test_sigterm_during_a_save_lets_it_finish(
    splat: Splat, tiny_scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, sent = os.posix_fallocate, []

    def reserve(*args: int) -> None:
        if len(sent) < 2:  # not in the first save: the run has begun
            sent.append(os.kill(os.getpid(), signal.SIGTERM) if sent else None)
        real(*args)

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    words = ["-n", 50, "--set", "save.steps=[7]", "--json", *QUICK]
    done = splat("train", tiny_scene, "-o", tmp_path / "run", *words)
    assert done.code == 143, done.err
    assert (done.objects[-1]["step"], done.objects[-1]["reason"]) == (7, "SIGTERM")
    assert load_checkpoint(tmp_path / "run" / "ckpts" / "ckpt_000007.pt").step == 7


def test_a_second_sigint_ends_at_once(tiny_scene: Path, tmp_path: Path) -> None:
    """A save hangs, as on a server that is gone: the first SIGINT would wait for it, the second does not."""
    code = (
        "import os, sys, time\n"
        "real, calls = os.posix_fallocate, []\n"
        "def hang(*args):\n"
        "    calls.append(args)\n"
        "    if len(calls) > 1:\n"
        '        print(\'{"event": "hanging"}\', flush=True)\n'
        "    while len(calls) > 1:\n"  # a signal just before a long sleep is handled after it
        "        time.sleep(0.05)\n"
        "    real(*args)\n"
        "os.posix_fallocate = hang\n"
        "from splatcli.cli.commands import run\n"
        "sys.exit(run(sys.argv[1:]))\n"
    )
    words = ["train", str(tiny_scene), "-o", str(tmp_path / "run"), "--json", "--set", "save.steps=[7]", *QUICK]
    process = subprocess.Popen(
        [*splat_command(), "-c", code, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        next_event(process, "hanging")
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGINT
    assert "Traceback" not in err
    assert load_checkpoint(tmp_path / "run" / "ckpts" / "ckpt_000000.pt").step == 0


@pytest.mark.parametrize("handler", ["signal.SIG_DFL", "lambda number, frame: sys.exit(77)"])
def test_sigterm_is_not_taken_over_by_a_library(handler: str) -> None:
    """pycolmap would print a stack trace, and swallow the handler that was there."""
    program = f"""
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, {handler})
        from splatcli.scene._pycolmap import pycolmap
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    assert done.returncode == (-15 if "DFL" in handler else 77)
    assert done.stderr == ""


def test_the_same_command_continues_its_run(tiny_scene: Path, splat: Splat, tmp_path: Path) -> None:
    """As a scheduler that requeues a job starts it again: after SIGTERM, after SIGKILL, and when it is done."""
    words = ["train", str(tiny_scene), *QUICK, "-n", "600"]
    again = [*words, "-o", str(tmp_path / "run")]
    steps = []
    for number, code in ((signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        # A forked process ends a moment after the one that is killed.
        begins = (sys.executable, "-m", "splatcli") if number == signal.SIGKILL else splat_command()
        command = [*begins, *again, "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                event = json.loads(line)
                if event["event"] == "stepped":
                    steps.append(event["step"])
                    process.send_signal(number)
                    break
            process.stdout.read()
            assert process.wait(60) == code
    assert 0 < steps[0] < steps[1] < 600, "the second attempt went on from where the first one was stopped"
    done = splat(*again)
    assert done.code == 0, done.err
    assert "continuing the run from" in done.err
    assert splat(*words, "-o", tmp_path / "whole").code == 0
    one, other = (load_checkpoint(tmp_path / name / "ckpts/ckpt_000600.pt") for name in ("run", "whole"))
    for (name, tensor), (_, expected) in zip(one.gaussians.items(), other.gaussians.items(), strict=True):
        assert tensor.equal(expected), name
    bits = (tmp_path / "run/ckpts/ckpt_000600.pt").read_bytes()
    finished = splat(*again)
    assert (finished.code, finished.out) == (0, done.out), finished.err
    place = tmp_path / "run"
    assert f"the run is finished at step 600; for more steps: splat resume {place} --iterations N" in finished.err
    assert "steps 601" not in finished.err
    assert (tmp_path / "run/ckpts/ckpt_000600.pt").read_bytes() == bits


def test_a_finished_run_without_held_out_views_needs_no_scene(tiny_scene: Path, splat: Splat, tmp_path: Path) -> None:
    scene, run = tmp_path / "scene", tmp_path / "run"
    shutil.copytree(tiny_scene, scene)
    words = ("train", scene, "-o", run, "-n", 4, "--test-every", 0, *QUICK, "--json")
    first = splat(*words)
    assert first.code == 0, first.err
    scene.rename(tmp_path / "gone")
    for again in (splat(*words), splat("resume", run, "--json")):
        assert (again.code, again.objects) == (0, first.objects[-1:]), again.err


def test_a_finished_run_that_is_scored_again_replaces_its_line(
    finished_run: Path, splat: Splat, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    before = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    scored = splat("resume", run, "--json", "--set", "save.keep_last=1")
    assert scored.code == 0, scored.err
    assert "evaluated" in [event["event"] for event in scored.objects]
    again = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert again == before
    assert splat("resume", run, "-n", "50", "-q").code == 0
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "eval"] == [40, 50]


def test_stops_during_evaluations_lose_no_scores(tiny_scene: Path, splat: Splat, tmp_path: Path) -> None:
    """The run has more steps than it can take before a signal arrives; it is compared up to its last stop."""
    words = ("train", tiny_scene, "-n", 100_000, *QUICK, "--test-every", 2, "--set", "train.eval_every=1")
    run = tmp_path / "run"
    command = [str(word) for word in (*words, "-o", run, "--json", "-q")]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        process = subprocess.Popen(
            [*splat_command(), *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(5):
            next_event(process, "evaluated")
        process.send_signal(number)  # the next step takes less time than its evaluation
        _, err = process.communicate(timeout=120)
        assert process.returncode == 128 + number, err
    stopped = evaluation_lines(run)
    last = json.loads(stopped[-1])["step"]
    assert splat(*words, "-o", tmp_path / "whole", "-q", "--stop-at", last).code == 0
    whole = evaluation_lines(tmp_path / "whole")
    assert [json.loads(line)["step"] for line in whole] == list(range(1, last + 1))
    assert stopped == whole


def evaluation_lines(run: Path) -> list[str]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [line for line in lines if json.loads(line)["event"] == "eval"]


def test_a_stopped_run_names_the_command_for_a_scene_that_has_moved(
    tiny_scene: Path, splat: Splat, tmp_path: Path
) -> None:
    scene, run = tmp_path / "scene", tmp_path / "run"
    shutil.copytree(tiny_scene, scene)
    words = ("train", scene, "-o", run, "-n", 8, *QUICK)
    assert splat(*words, "--stop-at", 4).code == 0
    scene.rename(tmp_path / "moved")
    again = splat(*words)
    assert (again.code, f"splat resume {run} --data DIR" in again.err) == (3, True), again.err
    other = splat("train", scene, "-o", tmp_path / "new", "-n", 8, *QUICK)
    assert (other.code, "no such folder" in other.err) == (3, True), other.err
    assert splat("resume", run, "--data", tmp_path / "moved").code == 0


def test_a_finished_run_needs_neither_its_scene_nor_a_writable_folder(
    tiny_scene: Path, splat: Splat, tmp_path: Path
) -> None:
    scene, run = tmp_path / "scene", tmp_path / "run"
    shutil.copytree(tiny_scene, scene)
    words = ("train", scene, "-o", run, "-n", 4, *QUICK, "--json")
    first = splat(*words)
    assert first.code == 0, first.err
    before = {path.name: (path.stat().st_mtime_ns, path.stat().st_ino) for path in run.rglob("*")}
    again = splat(*words)
    assert (again.code, again.objects) == (0, first.objects[-1:]), again.err
    scene.rename(tmp_path / "gone")
    for again in (splat("resume", run, "--json"), splat(*words)):
        assert (again.code, again.objects) == (0, first.objects[-1:]), again.err
    assert {path.name: (path.stat().st_mtime_ns, path.stat().st_ino) for path in run.rglob("*")} == before
    longer = splat("resume", run, "-n", 5)
    assert (longer.code, "--data DIR" in longer.err) == (3, True)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:-1]))
    assert splat("resume", run).code == 3, "killed before its last scores, it makes them"
    (tmp_path / "gone").rename(scene)
    scored = splat("resume", run, "--json")
    assert (scored.code, scored.objects[-1]) == (0, first.objects[-1]), scored.err
    assert (run / "metrics.jsonl").read_text().splitlines(keepends=True) == lines
    with RunDir.open(run):
        assert splat("resume", run).code == 9


def test_another_command_does_not_go_on_with_a_run(finished_run: Path, tiny_scene: Path, splat: Splat) -> None:
    before = sorted(path.name for path in (finished_run / "ckpts").iterdir())
    done = splat("train", tiny_scene, "-o", finished_run, "-n", "40", "-q", *QUICK, "--seed", "7")
    assert done.code == 8
    assert "with other settings: train.seed was 42, is now 7" in done.err
    done = splat("train", tiny_scene, "-o", finished_run, "-n", "40", "--masks", "none", "-q", *QUICK)
    assert 'with other settings: data.masks was none, is now "none"' in done.err
    assert "--overwrite" in done.err
    assert sorted(path.name for path in (finished_run / "ckpts").iterdir()) == before


def test_a_scene_named_by_a_link_or_from_another_folder_is_the_same(
    finished_run: Path, tiny_scene: Path, splat: Splat, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(tiny_scene)
    for scene in (link, tmp_path / ".." / tmp_path.name / "link"):
        done = splat("train", scene, "-o", finished_run, "-n", "40", *QUICK)
        assert done.code == 0, done.err
        assert "the run is finished at step 40" in done.err
    copy = tmp_path / "copy"
    shutil.copytree(tiny_scene, copy)
    done = splat("train", copy, "-o", finished_run, "-n", "40", "-q", *QUICK)
    assert (done.code, "data.scene was" in done.err) == (8, True)


def test_a_scene_that_has_moved_is_the_same_after_a_resume_there(
    tiny_scene: Path, splat: Splat, tmp_path: Path
) -> None:
    before, after, run = tmp_path / "before", tmp_path / "after", tmp_path / "run"
    shutil.copytree(tiny_scene, before)
    words = ("-o", run, "-n", 9, "-q", *QUICK)
    assert splat("train", before, *words, "--stop-at", 3).code == 0
    before.rename(after)
    refused = splat("train", after, *words)
    assert refused.code == 8
    assert f"continue it with splat resume {run} --data {after}, move it aside" in refused.err
    assert splat("resume", run, "--data", after, "--stop-at", 6, "-q").code == 0
    done = splat("train", after, *words)
    assert (done.code, done.lines) == (0, [str(run / "ckpts" / "ckpt_000009.pt")]), done.err
    shutil.copytree(after, before)  # the first place is the run's as well
    assert splat("train", before, *words).lines == done.lines
    other = splat("train", shutil.copytree(after, tmp_path / "third"), *words)
    assert (other.code, "--data" in other.err) == (8, False), "the run's scene is where it was"


def test_a_model_to_start_from_is_the_same_from_another_folder(
    tiny_scene: Path, exported_ply: Path, splat: Splat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inside").mkdir()
    shutil.copy(exported_ply, tmp_path / "model.ply")
    run, folders = tmp_path / "run", {tmp_path: "model.ply", tmp_path / "inside": "../model.ply"}
    for folder, model in folders.items():
        monkeypatch.chdir(folder)
        done = splat("train", tiny_scene, "--init", model, "--sh-degree", 1, "-o", run, "-n", 6, "-q")
        assert (done.code, done.lines) == (0, [str(run / "ckpts" / "ckpt_000006.pt")]), done.err
    other = splat("train", tiny_scene, "--init", "model.ply", "--sh-degree", 1, "-o", run, "-n", 6, "-q")
    assert other.code == 8, "a file of that name in this folder is another one"
    assert f"model.init was {tmp_path}/model.ply, is now {tmp_path}/inside/model.ply" in other.err


def test_a_request_with_values_of_other_kinds_is_another_one(
    finished_run: Path, tiny_scene: Path, splat: Splat, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    odd = {"data.scene": None, "train.iterations": "40", "model.init": 3, "strategy.name": [], "train.seed": {}}
    (run / "request.json").write_text(json.dumps(odd))
    done = splat("train", tiny_scene, "-o", run, "-n", "40", "-q", *QUICK)
    assert (done.code, "train.iterations was 40, is now 40" in done.err) == (8, True), done.err
    assert f"splat resume {run}, " in done.err


def test_a_start_that_was_killed_before_its_first_checkpoint_is_made_again(
    finished_run: Path, tiny_scene: Path, splat: Splat, tmp_path: Path
) -> None:
    place = tmp_path / "run"
    (place / "ckpts").mkdir(parents=True)
    (place / "lock").write_text("1 host\n")
    (place / "ckpts/ckpt_000000.pt.tmp.999999.0123abcd").write_text("half")
    words = ("train", tiny_scene, *QUICK, "-n", 40, "-o", place)
    mine = place / "config.json"
    mine.write_text("{}")
    assert splat(*words).code == 8, "a file that is not known to be ours"
    (place / "request.json").write_bytes((finished_run / "request.json").read_bytes())
    done = splat(*words)
    assert done.code == 0, done.err
    assert (place / "ckpts/ckpt_000040.pt").exists()


def test_sigusr1_never_kills_from_the_first_line_on(tiny_scene: Path, tmp_path: Path) -> None:
    """A scheduler may send it while libraries still load."""
    program = (
        "import os, signal, sys\n"
        "import splatcli.cli\n"
        "class Send:\n"
        "    def find_spec(self, *_):\n"
        "        os.kill(os.getpid(), signal.SIGUSR1)\n"
        "sys.meta_path.insert(0, Send())\n"
        "sys.argv[0] = 'splat'\n"
        "sys.exit(splatcli.cli.main())\n"
    )
    words = ["train", str(tiny_scene), "-o", str(tmp_path / "run"), "-n", "2", "-q", *QUICK]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "ckpts" / "ckpt_000002.pt").exists()
