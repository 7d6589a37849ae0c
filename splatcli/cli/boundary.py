"""The boundary: every way in which a command can end becomes an exit code and a message fit to read."""

from __future__ import annotations

import difflib
import errno
import itertools
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import typer

from splatcli import __version__
from splatcli.cli.app import app
from splatcli.cli.console import Output, stdout_problem
from splatcli.cli.guards import PipeError, require_address_space
from splatcli.errors import OutputError, ResourceError, SceneError, SplatError, UsageError, from_os_error, system_error

_INTERRUPTED = 130


def run(argv: Sequence[str]) -> int:
    """Run one command line, ``argv`` without the program's name; returns the exit code and never raises.

    With ``--json`` an error is also the last object on stdout.
    """
    _make_streams_lenient()
    stdout_problem()  # of an earlier command in this process
    out = Output(json="--json" in argv, quiet=False)
    code = _run(argv, out)
    out.close()
    problem = stdout_problem()
    if problem is not None and code == 0:
        out.error(problem)
        code = problem.exit_code
    return code


def _run(argv: Sequence[str], out: Output) -> int:
    try:
        _check_current_folder()
        require_address_space(argv)
        code = app(args=list(argv), prog_name="splat", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        return _INTERRUPTED
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    except Exception as error:
        return told(error, argv, out)


def told(error: Exception, argv: Sequence[str], out: Output) -> int:
    """Tells people of ``error``; the exit code that goes with it."""
    problem = problem_of(error, argv)
    out.error(problem)
    return problem.exit_code


def problem_of(error: Exception, argv: Sequence[str]) -> SplatError:
    """The user's view of an exception; of a bug of ours a SplatError proper, with the file that its traceback is in."""
    return _as_splat_error(error, argv) or _report_crash(error, argv)


def _check_current_folder() -> None:
    """Raises UsageError where paths lead nowhere: torch's libraries do not even load there, and end the process."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UsageError("the folder that you are in has been deleted", remedy="cd to one that is there") from None


def _as_splat_error(error: Exception, argv: Sequence[str]) -> SplatError | None:
    """The user's view of an exception; None for a bug of ours. What the system refuses is none."""
    if isinstance(error, SplatError):
        return error
    if isinstance(error, typer.TyperException):
        return _from_typer(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutputError(
            "the disk is full", where=error.filename, remedy="free some space, or write elsewhere with -o"
        )
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return UsageError("this name is longer than a file's name can be", where=f"{str(error.filename)[:100]}...")
    if isinstance(error, PipeError):
        return SceneError(str(error.strerror), where=error.filename)
    refused = system_error(error)
    if refused is not None and refused.errno == errno.ENOMEM:
        return ResourceError("the machine is out of memory", remedy="use fewer or smaller images (-r), or --cap-max")
    if isinstance(error, OSError):  # what nobody has said more about: an input, unless it lies where results go
        return from_os_error(error, OutputError if _is_output(error.filename, argv) else SceneError)
    return None


def _is_output(name: object, argv: Sequence[str]) -> bool:
    """Whether a file is in the place, or is the place, that a command line names with -o."""
    if not isinstance(name, str | bytes | os.PathLike):
        return False
    path = os.path.abspath(os.fsdecode(name))
    named = [word for flag, word in itertools.pairwise(argv) if flag in ("-o", "--output")]
    named += [word.partition("=")[2] for word in argv if word.startswith("--output=")]
    return any(os.path.commonpath([path, os.path.abspath(place)]) == os.path.abspath(place) for place in named)


def _from_typer(error: typer.TyperException) -> UsageError:
    context, unknown = getattr(error, "ctx", None), getattr(error, "option_name", None)
    if context is None:
        return UsageError(error.format_message().rstrip("."), remedy="see splat --help")
    remedy = f"see {context.command_path} --help"
    names = [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]
    if unknown is None or unknown in names:
        return UsageError(error.format_message().rstrip("."), remedy=remedy)
    near = [name for name in names if name.startswith(unknown)] or difflib.get_close_matches(unknown, names, n=1)
    return UsageError(f"there is no option {unknown}", remedy=f"did you mean {near[0]}?" if near else remedy)


def _report_crash(error: Exception, argv: Sequence[str]) -> SplatError:
    """Put the traceback where it can be sent from and return the one line that says so."""
    text = f"splatcli {__version__}\nsplat {' '.join(argv)}\n\n{''.join(traceback.format_exception(error))}"
    path = Path(tempfile.gettempdir()) / f"splat-crash-{time.strftime('%Y%m%d-%H%M%S')}-{id(error):x}.txt"
    summary = f"internal error: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".rstrip(": ")
    try:
        # Others may write into that folder: no file and no link that lies there already is written to.
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
        with open(number, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError:
        sys.stderr.write(text)
        return SplatError(summary, remedy="this is a bug; please report it with the traceback above")
    return SplatError(summary, remedy=f"this is a bug; please report it with {path}")


def _make_streams_lenient() -> None:
    """A path that is no valid text must not turn a result into a crash."""
    for stream, errors in ((sys.stdout, "surrogateescape"), (sys.stderr, "backslashreplace")):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors=errors)
