"""Every way to end has its exit code and its message."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from splatcli import errors
from splatcli.cli import commands, error_report
from tests.forked import splat_command


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch):
    """Makes every command fail with a given exception."""

    def arrange(error: BaseException) -> None:
        def fail(*_args: object, **_kwargs: object) -> int:
            raise error

        monkeypatch.setattr(commands, "app", fail)

    return arrange


@pytest.mark.parametrize(
    "kind",
    [
        errors.UsageError,
        errors.SceneError,
        errors.ResourceError,
        errors.ModelFileError,
        errors.VersionError,
        errors.DistributedError,
        errors.OutputError,
        errors.LockedError,
        errors.DivergedError,
    ],
)
def test_each_error_has_its_code(failing, splat, kind: type[errors.SplatError]) -> None:
    failing(kind("what", where="where", remedy="remedy"))
    done = splat("info")
    assert done.code == kind.exit_code
    assert done.err == f"error[{kind.code}]: what\n  where: where\n  help: remedy\n"
    assert done.out == ""


def test_a_bug_leaves_its_traceback_in_a_file(failing, splat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(ZeroDivisionError("by zero"))
    with monkeypatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(tmp_path))
        done = splat("info", "x")
    assert done.code == 70
    assert "Traceback" not in done.err
    (report,) = tmp_path.glob("splat-crash-*.txt")
    assert str(report) in done.err
    text = report.read_text()
    assert "splat info x" in text
    assert "ZeroDivisionError: by zero" in text


def test_a_gpu_that_has_failed_is_no_bug(failing, splat) -> None:
    failing(torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors"))
    done = splat("info", "x")
    assert done.code == 4
    assert "a GPU has failed: CUDA error: an illegal memory access was encountered" in done.err
    assert "splat resume RUN" in done.err


def test_a_torch_without_kernels_for_the_gpu_is_no_fault_of_the_gpu(failing, splat) -> None:
    failing(torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device\nSearch for"))
    done = splat("info", "x")
    assert done.code == 4
    assert "torch has no kernels for this GPU: CUDA error: no kernel image is available" in done.err
    assert "pytorch.org" in done.err
    assert not any(wrong in done.err for wrong in ("has failed", "dmesg", "a bug"))


#: Lack of memory on a GPU: of torch's allocator, of the driver (as for pinned memory), of cuBLAS.
GPU_SHORTAGES = {
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB of which 9.00 MiB is free": (
        torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB of which 9.00 MiB is free. If reserved "
            "but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True"
        )
    ),
    "CUDA error: out of memory": torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be"),
    "CUBLAS_STATUS_ALLOC_FAILED": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
}


@pytest.mark.parametrize("words", GPU_SHORTAGES)
def test_a_gpu_without_memory_is_neither_a_bug_nor_a_fault(failing, splat, words: str) -> None:
    failing(GPU_SHORTAGES[words])
    done = splat("render", "x")
    assert done.code == 4
    assert "error[E004]: the GPU is out of memory: " in done.err
    assert words in done.err
    assert "smaller --size" in done.err
    assert "--device cpu" in done.err
    assert not any(wrong in done.err for wrong in ("has failed", "a bug", "PYTORCH_ALLOC_CONF"))
    assert "--device" not in splat("edit", "x").err


def test_a_bug_is_reported_if_no_file_can_be_written(failing, splat, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(ZeroDivisionError("by zero"))
    for name, value in (("tempdir", "/nowhere/at/all"), ("_get_default_tempdir", no_temporary_folder)):
        with monkeypatch.context() as patch:
            patch.setattr("tempfile.tempdir", None)
            patch.setattr(f"tempfile.{name}", value)
            done = splat("info")
        assert done.code == 70
        assert "ZeroDivisionError: by zero" in done.err


def no_temporary_folder() -> str:
    raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/var/tmp']")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (MemoryError(), 4),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), 4),
        (OSError(errno.ENOSPC, "No space left on device", "x.ply"), 8),
        (RuntimeError("can't start new thread"), 4),
        (FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/var/tmp']"), 4),
    ],
)
def test_the_machine_s_own_failures_have_codes(failing, splat, error: BaseException, code: int) -> None:
    failing(error)
    done = splat("info")
    assert done.code == code
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    "error", [RuntimeError("can't start new thread"), BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")]
)
def test_a_limit_of_threads_and_processes_is_named(failing, splat, error: Exception) -> None:
    failing(error)
    done = splat("train")
    assert "error[E004]: no further thread or process can be started" in done.err
    assert "ulimit -u" in done.err
    assert "-r" not in done.err, "smaller images need as many"


def test_a_report_never_overwrites_a_file(
    failing, splat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A link that waits at its place is not followed, and others may not read it."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(error_report.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    monkeypatch.setattr(error_report.time, "strftime", lambda _form: "now")
    error = RuntimeError("a bug")
    failing(error)
    assert splat("info").code == 70
    (report,) = (tmp_path / "tmp").iterdir()
    assert (report.stat().st_mode & 0o777, report.name) == (0o600, f"splat-crash-now-{id(error):x}.txt")
    report.unlink()
    report.symlink_to(victim)
    done = splat("info")
    assert (done.code, victim.read_text()) == (70, "mine")
    assert "RuntimeError: a bug" in done.err, "it is reported on stderr instead"
    monkeypatch.setattr("sys.stderr", None)  # of a program without a console
    assert splat("info").code == 70


#: A process of ``splat`` with a scene of pipes in it: each of the command lines, and what has come of it.
IN_TURN = """
import contextlib, io, json, sys
from splatcli.cli.process import refuse_pipes
refuse_pipes()
from splatcli.cli.commands import run
for words in json.loads(sys.argv[1]):
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        code = run(words)
    print(json.dumps([code, err.getvalue()]), flush=True)
"""
PIPES: list[tuple[list[str], int, str]] = [
    (["info", "{pipe}"], 5, "{pipe}"),
    (["info", "{scene}"], 3, "{scene}/images/view_00.png"),
    (["train", "{pipe}", "-o", "run"], 3, "{pipe}"),
    (["train", "{scene}", "-o", "run", "-n", "2"], 3, "{scene}/images/view_00.png"),
    (["train", "{scene}", "-o", "run", "--init", "{pipe}"], 5, "{pipe}"),
    (["train", "{scene}", "-o", "run", "--config", "{pipe}"], 2, "{pipe}"),
    (["resume", "{pipe}"], 5, "{pipe}"),
    (["export", "{pipe}", "-o", "x.ply"], 5, "{pipe}"),
    (["render", "{run}", "--views", "{pipe}.json"], 3, "{pipe}.json"),
    (["sfm", "{scene}/images", "-o", "solved"], 3, "{scene}/images/view_00.png"),
]


def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(
    tiny_scene: Path, finished_run: Path, tmp_path: Path
) -> None:
    """By commands of one process, but for the first one, which has one of its own."""
    scene, pipe = tmp_path / "scene", tmp_path / "pipe"
    shutil.copytree(tiny_scene, scene)
    (scene / "images" / "view_00.png").unlink()
    for place in (pipe, tmp_path / "pipe.json", scene / "images" / "view_00.png"):
        os.mkfifo(place)
    places = {"pipe": pipe, "scene": scene, "run": finished_run}
    lines = [[word.format(**places) for word in words] for words, _, _ in PIPES]

    def process(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    alone = process(sys.executable, "-m", "splatcli", *lines[0])
    others = process(*splat_command(), "-c", IN_TURN, json.dumps(lines[1:]))
    ends = [[alone.returncode, alone.stderr], *map(json.loads, others.stdout.splitlines())]
    assert len(ends) == len(PIPES), others.stderr
    for (got, said), line, (_, code, named) in zip(ends, lines, PIPES, strict=True):
        assert got == code, (line, said)
        assert named.format(**places) in said, line
        assert "pipe" in said, line
        assert "disk or network" not in said, "that is no remedy for a pipe"
    assert not (tmp_path / "run").exists()


def test_a_library_that_cannot_be_loaded_is_no_bug(tiny_scene: Path, tmp_path: Path) -> None:
    """pycolmap's own words leave out the cause, as of a system that lacks a library."""
    (tmp_path / "pycolmap").mkdir()
    (tmp_path / "pycolmap/__init__.py").write_text(
        "try:\n"
        "    raise ImportError('libgomp.so.1: cannot open shared object file')\n"
        "except ImportError as e:\n"
        "    raise RuntimeError('\\nCannot import the C++ backend') from e\n"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "splatcli", "info", str(tiny_scene)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 4, done.stderr
    assert "pycolmap cannot be loaded: libgomp.so.1: cannot open shared object file" in done.stderr
    assert "-m pip install --force-reinstall pycolmap" in done.stderr


@pytest.mark.parametrize("megabytes", [100, 400, 800, 1200])
def test_too_little_address_space_is_reported_before_libraries_load(
    megabytes: int, tiny_scene: Path, tmp_path: Path
) -> None:
    limited = f'ulimit -v {megabytes * 1000}; exec "{sys.executable}" -m splatcli "$@"'
    words = ["train", str(tiny_scene), "-o", str(tmp_path / "run"), "-n", "2", "--json"]
    done = subprocess.run(
        ["bash", "-c", limited, "splat", *words], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 4, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["where"] == "ulimit -v"
    helped = subprocess.run(
        ["bash", "-c", limited, "splat", "--version"], capture_output=True, timeout=120, check=False
    )
    assert helped.returncode == 0


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("std::bad_alloc"),
    ],
)
def test_libraries_that_want_for_memory_are_no_bugs(failing, splat, error: Exception) -> None:
    failing(error)
    for command, remedy in (("info", "end other programs"), ("render", "--size"), ("train", "--cap-max")):
        done = splat(command)
        assert done.code == 4
        assert remedy in done.err
