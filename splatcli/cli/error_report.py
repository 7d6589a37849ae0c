"""Every exception that ends a command becomes an exit code and a message with a remedy."""

from __future__ import annotations

import errno
import itertools
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import typer

from splatcli import __version__
from splatcli.cli.console import Output, printed_text_error
from splatcli.cli.hints import command_hint, flag_hint, word_hint
from splatcli.cli.process import PipeError
from splatcli.errors import (
    DeviceFaultError,
    LaunchRefusedError,
    OutputError,
    PluginError,
    ResourceError,
    SceneError,
    SplatError,
    UsageError,
    first_line,
    from_os_error,
    is_gpu_out_of_memory,
    memory_words,
    system_error,
)

#: What takes less memory, by command.
_LESS_MEMORY = {
    **dict.fromkeys(("train", "demo", "bench"), "use fewer or smaller images (-r), or --cap-max"),
    "resume": "set --cap-max, or end other programs",
    "sfm": "use fewer or smaller images",
    "render": "choose a smaller --size, or end other programs",
    "mesh": "choose a larger --voxel, keep a part with --crop, or end other programs",
}
#: The message of a word too many.
_EXTRA = re.compile(r"unexpected extra argument.*\((.+)\)$")
#: Commands that take --device and are done within minutes on a CPU.
_FAST_ON_CPU = {"render", "eval", "compare", "mesh"}


def report_error(error: Exception, argv: Sequence[str], out: Output) -> int:
    """Report ``error`` to the user; return its exit code."""
    problem = problem_of(error, argv)
    out.error(problem)
    return problem.exit_code


def problem_of(error: Exception, argv: Sequence[str]) -> SplatError:
    """Return the user's view of an exception; for a bug, also one of a plug-in, it names the traceback's file."""
    if isinstance(error, PluginError) and error.__cause__ is not None:
        place = _write_traceback(error, argv)
        return PluginError(error.what, where=error.where, remedy=f"{error.remedy}; report it there with {place}")
    return _as_splat_error(error, argv) or _report_crash(error, argv)


def _as_splat_error(error: Exception, argv: Sequence[str]) -> SplatError | None:
    """Return the user's view of an exception; None for a bug. Refusals of the system are no bugs."""
    if isinstance(error, SplatError):
        return error
    if isinstance(error, typer.TyperException):
        return _from_typer(error, argv)
    if isinstance(error, OSError) and (unprinted := printed_text_error(error)) is not None:  # of a help text
        return unprinted
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutputError(
            "the disk is full", where=error.filename, remedy="free disk space, or write elsewhere with -o"
        )
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return UsageError("this file name is too long", where=f"{str(error.filename)[:100]}...")
    if isinstance(error, PipeError):
        return SceneError(str(error.strerror), where=error.filename)
    refused = system_error(error)
    if refused is not None and refused.errno == errno.ENOMEM:
        return ResourceError("the machine is out of memory", remedy=_less_memory(argv))
    if refused is not None and refused.errno == errno.EAGAIN and refused.filename is None:
        return from_os_error(refused, ResourceError)
    if is_gpu_out_of_memory(error):
        on_cpu = "; --device cpu takes the machine's memory instead" if argv and argv[0] in _FAST_ON_CPU else ""
        return ResourceError(f"the GPU is out of memory: {memory_words(error)}", remedy=f"{_less_memory(argv)}{on_cpu}")
    if refused is not None and refused.errno == errno.ELOOP:
        error = refused  # Path.resolve() turns it into a RuntimeError
    if type(error).__name__ == "AcceleratorError" and "no kernel image is available" in str(error):
        return LaunchRefusedError(
            f"torch has no kernels for this GPU: {first_line(error)}",
            remedy="install the torch build that pytorch.org names for the GPU; --device cpu works meanwhile",
        )
    if type(error).__name__ == "AcceleratorError":  # torch's, which is not loaded here
        return DeviceFaultError(f"a GPU has failed: {(str(error).splitlines() or [''])[0]}")
    if isinstance(error, OSError):  # an input, unless it lies where results go
        return from_os_error(error, OutputError if _is_output(error.filename, argv) else SceneError)
    return None


def _less_memory(argv: Sequence[str]) -> str:
    """Return the remedy that takes less memory."""
    return _LESS_MEMORY.get(argv[0] if argv else "", "end other programs, or use a model of fewer Gaussians")


def _is_output(name: object, argv: Sequence[str]) -> bool:
    """Return whether a file is, or is in, the path that the command line names with -o."""
    if not isinstance(name, str | bytes | os.PathLike):
        return False
    path = os.path.abspath(os.fsdecode(name))
    named = [word for flag, word in itertools.pairwise(argv) if flag in ("-o", "--output")]
    named += [word.partition("=")[2] for word in argv if word.startswith("--output=")]
    return any(os.path.commonpath([path, os.path.abspath(place)]) == os.path.abspath(place) for place in named)


def _from_typer(error: typer.TyperException, argv: Sequence[str]) -> UsageError:
    context, unknown = getattr(error, "ctx", None), getattr(error, "option_name", None)
    if context is None:  # a flag without its value
        place = f"splat {argv[0]}" if unknown is not None and argv else "splat"
        return UsageError(error.format_message().rstrip("."), remedy=f"see {place} --help")
    remedy = f"see {context.command_path} --help"
    names = [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]
    if unknown is None or unknown in names:
        return _from_words(error.format_message().rstrip("."), context, argv, remedy)
    hint = flag_hint(context.info_name or "", unknown, names)
    keys = _keys_of(unknown) if "--set" in names and (hint is None or hint.startswith("did")) else []
    if keys:
        return UsageError(
            f"there is no option {unknown}; {keys[0]} is a setting without one",
            remedy=f"--set {keys[0]}=VALUE; splat docs settings describes it",
        )
    return UsageError(f"there is no option {unknown}", remedy=hint or remedy)


def _from_words(message: str, context: typer.Context, argv: Sequence[str], remedy: str) -> UsageError:
    """Return the error for words that are no flags: a command that is not there, a word too many."""
    if context.parent is None and argv and not argv[0].startswith("-"):
        hint = command_hint(argv)
        return UsageError(f"there is no command {argv[0]}" if hint else message, remedy=hint or remedy)
    found = _EXTRA.search(message)
    hint = word_hint(context.info_name or "", found[1].split()) if found else None
    return UsageError(message, remedy=hint or remedy)


def _keys_of(option: str) -> list[str]:
    """Return the dotted keys of the settings that have the name of ``option``."""
    from splatcli.config import setting_fields

    name = option.lstrip("-").replace("-", "_")
    return [key for key in setting_fields() if key.partition(".")[2] == name]


def _report_crash(error: Exception, argv: Sequence[str]) -> SplatError:
    """Write the traceback to a file and return the error that names it."""
    from splatcli.plugins import imported

    others = "".join(f", of splat or of the plug-in {plugin}" for plugin in imported())
    summary = f"internal error: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".rstrip(": ")
    place = _write_traceback(error, argv)
    return SplatError(summary, remedy=f"this is a bug{others}; please report it with {place}")


def _write_traceback(error: Exception, argv: Sequence[str]) -> str:
    """Write the traceback to a file, or to stderr where that fails; return the words that say where it is."""
    text = f"splatcli {__version__}\nsplat {' '.join(argv)}\n\n{''.join(traceback.format_exception(error))}"
    name = f"splat-crash-{time.strftime('%Y%m%d-%H%M%S')}-{id(error):x}.txt"
    try:
        path = Path(tempfile.gettempdir()) / name
        # Others may write into that folder, so no existing file or link is written to.
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
        with open(number, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError:
        if sys.stderr is None:
            return "its traceback, for which there is neither a file nor a stream"
        sys.stderr.write(text)
        return "the traceback above"
    return str(path)
