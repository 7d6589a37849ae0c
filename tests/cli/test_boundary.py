"""Every way to end has its exit code and its message."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from splatcli import errors
from splatcli.cli import boundary


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch):
    """Makes every command fail with a given exception."""

    def arrange(error: BaseException) -> None:
        def fail(*_args: object, **_kwargs: object) -> int:
            raise error

        monkeypatch.setattr(boundary, "app", fail)

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


def test_a_bug_is_told_even_where_no_file_can_be_written(failing, splat, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(ZeroDivisionError("by zero"))
    with monkeypatch.context() as patch:
        patch.setattr("tempfile.tempdir", "/nowhere/at/all")
        done = splat("info")
    assert done.code == 70
    assert "ZeroDivisionError: by zero" in done.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (MemoryError(), 4),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), 4),
        (OSError(errno.ENOSPC, "No space left on device", "x.ply"), 8),
    ],
)
def test_the_machine_s_own_failures_have_codes(failing, splat, error: BaseException, code: int) -> None:
    failing(error)
    done = splat("info")
    assert done.code == code
    assert "Traceback" not in done.err
