"""Options that several commands share, so that they are spelt and explained the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="One JSON object per line on stdout instead of plain lines.")]

Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Nothing on stderr but errors.")]

Model = Annotated[
    Path | None,
    typer.Argument(
        metavar="[MODEL]",
        help="Checkpoint, PLY or run folder. Without it: the path that comes through a pipe, else the newest run "
        "under output/.",
        show_default=False,
    ),
]

StopAt = Annotated[
    int | None,
    typer.Option(
        "--stop-at",
        metavar="K",
        min=1,
        help="End after step K of the same schedule; `splat resume` goes on from there.",
    ),
]

Device = Annotated[str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:1.")]

Data = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", help="Where the scene is now, if it is not where it was trained."),
]
