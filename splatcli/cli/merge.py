"""``splat merge``: the blocks of a scene become one model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from splatcli.cli import options


def merge(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="What `splat train --blocks` was given as -o.", show_default=False)
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE.ply",
            help="Write a PLY instead, with one block in memory at a time.  [default: a checkpoint in RUN]",
            show_default=False,
        ),
    ] = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Merge blocks that were trained one by one.

    `splat train --blocks` does so itself when it has trained all; this is for blocks that were jobs of their own.
    Prints the path of the checkpoint, which resume, render, eval and export take like that of any run.

    \b
    Examples:
      splat merge output/city
      splat merge output/city -o city.ply
      splat merge output/city | splat render --views
    """
    from splatcli.cli.blocks import merge_run
    from splatcli.cli.console import speaking

    with speaking(json=json, quiet=quiet) as out:
        merge_run(run, output, out)
    return 0
