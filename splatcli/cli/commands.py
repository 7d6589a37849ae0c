"""The list of commands, and the path from arguments to exit code."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from splatcli import __version__
from splatcli.cli import (
    bench,
    blocks,
    check,
    compare,
    demo,
    docs,
    doctor,
    edit,
    export,
    info,
    mesh,
    render,
    resume,
    sfm,
    train,
    view,
)
from splatcli.cli import eval as eval_command
from splatcli.cli.console import Output, take_stdout_error
from splatcli.cli.edit_order import EditCommand
from splatcli.cli.error_report import report_error
from splatcli.cli.help import GUIDE
from splatcli.cli.other_programs import TrainCommand
from splatcli.cli.process import interrupts, require_address_space
from splatcli.cli.typer_command import Command, Group, add_command
from splatcli.errors import UsageError

_INTERRUPTED = 130

_PLAIN = "--plain"

_EPILOG = """\b
Results go to stdout, messages to stderr; commands chain:
  splat train scene/ | splat render --views

\b
Exit codes:
  0 done              5 bad model file    9 run in use by another process
  2 bad usage         6 unknown version  10 training diverged
  3 bad input data    7 ranks disagree   11 newest checkpoint damaged
  4 no resources      8 cannot write     70 internal error
  129, 130, 143 interrupted (state saved)
"""

app = typer.Typer(
    name="splat",
    cls=Group,
    help="Photos to 3D Gaussian Splats.",
    epilog=_EPILOG,
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"splat {__version__}")
        raise typer.Exit


@app.callback()
def splat(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("-V", "--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
    plain: Annotated[
        bool,
        typer.Option(
            _PLAIN,
            help="Print plain text, without colour, boxes and progress bars; may stand anywhere. SPLATCLI_PLAIN=1 and "
            "TERM=dumb do the same; NO_COLOR leaves out colour.",
        ),
    ] = False,
) -> None:
    """Photos to 3D Gaussian Splats."""
    if context.invoked_subcommand is None:
        typer.echo(GUIDE, nl=False)


_MODELS, _RESULTS, _EXAMINE = "Photos to splats", "Results", "Checks, comparisons, manual"

#: The flags of ``--help``, before -q and --json, where there are many: how long, how large, where to, what is shown.
_EVERYDAY = {
    "train": "-o --overwrite --preset -n --max-time -r --cap-max --export --viewer --dry-run --device",
    "sfm": "-o --frames --camera-model --matching --overwrite",
    "resume": "-n --stop-at --export --data --viewer --device",
    "render": "--views -o --what --size --background --frames --data --device",
    "export": "-o --format --sh-degree --min-opacity --crop --dry-run",
    "mesh": "-o --views --resolution --voxel --crop --watertight -w --device",
    "edit": "-o -t -r -s --crop --crop-out --filter -w --dry-run",
    "compare": "-o --views --pictures -w --data --device",
    "info": "--plot --verbose --model --images --param-space",
}


def _add(panel: str, name: str, function: Callable[[Any], int], kind: type[Command] = Command) -> None:
    flags = (*_EVERYDAY[name].split(), "-q", "--json") if name in _EVERYDAY else ()
    add_command(app, name, function, kind, panel=panel, everyday=flags)


_add(_MODELS, "train", train.train, TrainCommand)
_add(_MODELS, "sfm", sfm.sfm)
_add(_MODELS, "demo", demo.demo)
_add(_MODELS, "resume", resume.resume)
_add(_MODELS, "merge", blocks.merge)
_add(_RESULTS, "render", render.render, render.RenderCommand)
_add(_RESULTS, "export", export.export)
_add(_RESULTS, "mesh", mesh.mesh)
_add(_RESULTS, "edit", edit.edit, EditCommand)
_add(_RESULTS, "view", view.view)
_add(_RESULTS, "eval", eval_command.evaluate)
_add(_RESULTS, "compare", compare.compare)
_add(_EXAMINE, "info", info.info)
_add(_EXAMINE, "check", check.check)
_add(_EXAMINE, "bench", bench.bench)
_add(_EXAMINE, "doctor", doctor.doctor)
_add(_EXAMINE, "docs", docs.docs)


def run(argv: Sequence[str]) -> int:
    """Run one command line (``argv`` without the program's name) and return its exit code; never raise.

    With ``--json`` an error is also the last object on stdout.
    """
    _make_streams_lenient()
    take_stdout_error()  # of an earlier command in this process
    out = Output(json="--json" in argv, quiet=False)
    code = _run(_with_flags(without_plain(argv)), out)
    out.close()
    problem = take_stdout_error()
    if problem is not None and code == 0:
        out.error(problem)
        code = problem.exit_code
    return code


def _run(argv: Sequence[str], out: Output) -> int:
    before = interrupts()
    try:
        _check_current_folder()
        require_address_space(argv)
        code = app(args=list(argv), prog_name="splat", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        return _note_interrupt(argv, out)
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # typer's, of a help text that nobody reads to its end
            return 0
        return error.code if isinstance(error.code, int) else 1
    except Exception as error:
        return _note_interrupt(argv, out) if interrupts() > before else report_error(error, argv, out)


def _note_interrupt(argv: Sequence[str], out: Output) -> int:
    if not {"-q", "--quiet"} & set(argv):
        out.message("interrupted")
    return _INTERRUPTED


def without_plain(argv: Sequence[str]) -> list[str]:
    """Return a command line without ``--plain``, which main() obeys."""
    end = argv.index("--") if "--" in argv else len(argv)
    return [*(word for word in argv[:end] if word != _PLAIN), *argv[end:]]


def _with_flags(argv: list[str]) -> list[str]:
    """Return ``help``, ``help COMMAND`` and ``version``, which other programs take as commands, as flags."""
    if argv[:1] == ["version"]:
        return ["--version", *argv[1:]]
    if argv[:1] == ["help"]:
        return [*argv[1:], "--help"]
    return argv


def _check_current_folder() -> None:
    """Raise UsageError if the working directory was deleted: torch's libraries would end the process."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UsageError("the working directory has been deleted", remedy="cd to an existing folder") from None


def _make_streams_lenient() -> None:
    """Let paths that are not valid text be printed, and letters that the encoding of stdout does not have."""
    codecs.register_error("splatcli", _escape)
    for stream, errors in ((sys.stdout, "splatcli"), (sys.stderr, "backslashreplace")):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors=errors)


def _escape(error: UnicodeError) -> tuple[str | bytes, int]:
    """Return the bytes of a path that is no text, else escapes."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.lookup_error("backslashreplace")(error)
