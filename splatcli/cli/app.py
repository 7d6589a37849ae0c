"""The list of commands."""

from __future__ import annotations

from typing import Annotated

import typer

from splatcli import __version__
from splatcli.cli import bench, check, doctor, export, info, merge, render, resume, sfm, train, view
from splatcli.cli import eval as eval_command

_EPILOG = """\b
Results go to stdout, words to stderr; commands chain:
  splat train scene/ | splat render --views

\b
Exit codes:
  0 done              5 bad model file       9 run in use by another process
  2 bad usage         6 unknown version     10 training diverged
  3 bad input data    7 ranks disagree      70 internal error
  4 no resources      8 cannot write       11 newest checkpoint damaged
                                           129, 130, 143 interrupted (state saved)
"""

app = typer.Typer(
    name="splat",
    help="Photos to 3D Gaussian Splats.",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"splat {__version__}")
        raise typer.Exit


@app.callback()
def splat(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Photos to 3D Gaussian Splats."""


app.command("train")(train.train)
app.command("sfm")(sfm.sfm)
app.command("resume")(resume.resume)
app.command("merge")(merge.merge)
app.command("render", cls=render.RenderCommand)(render.render)
app.command("export")(export.export)
app.command("view")(view.view)
app.command("eval")(eval_command.evaluate)
app.command("info")(info.info)
app.command("check")(check.check)
app.command("bench")(bench.bench)
app.command("doctor")(doctor.doctor)
