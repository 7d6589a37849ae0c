"""Options that commands share: each flag is declared once."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from splatcli.cli.typer_command import Exists
from splatcli.errors import SceneError, UsageError

if TYPE_CHECKING:
    from splatcli.checkpoint.foreign.imported import ImportOptions

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object per line instead of plain lines on stdout.")]

Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print nothing but errors on stderr.")]

MODEL_HINT = "name a checkpoint, a file of splats (a PLY, for one) or a run folder"

MODEL_EXISTS = Exists("there is no such model", MODEL_HINT)

#: As scene/read.py says it.
SCENE_EXISTS = Exists("no such folder", "name the folder that holds the images and cameras", SceneError)

Model = Annotated[
    Path | None,
    typer.Argument(
        metavar="[MODEL]",
        help="Checkpoint, file of splats (.ply, .spz, .sog, ...) or run folder, also of other programs. Without it: "
        "the path from a pipe, else the newest run under output/.",
        show_default=False,
    ),
    MODEL_EXISTS,
]

StopAt = Annotated[
    int | None,
    typer.Option(
        "--stop-at", metavar="K", min=1, help="Stop after step K of the schedule; splat resume continues from there."
    ),
]

ExportFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--export",
        metavar="FILE",
        help="When the run has finished, also write the model as `splat export` does: .ply, .spz, .sog, .html, ...; "
        "may be repeated. A file that is there is replaced. The time for it comes on top of --max-time.",
    ),
]

Device = Annotated[str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:1.")]

Data = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", help="Folder of the scene, where it has moved since training."),
    SCENE_EXISTS,
]

AllowOlder = Annotated[
    bool,
    typer.Option(
        "--allow-older",
        help="Where the newest checkpoint of a run is damaged, use the newest sound one instead of ending with 11.",
    ),
]

Lenient = Annotated[
    bool,
    typer.Option(
        "--lenient",
        help="Ignore bytes after the data of a file of splats.",
        rich_help_panel="Models of other programs",
    ),
]

#: Aliases of one flag; under the second one processes on the CPU are refused.
RANKS = ("--ranks", "--gpus")

#: What ``--distributed`` takes.
REPLICATED, SHARDED = MODES = ("replicated", "sharded")


@dataclass(frozen=True)
class RankOptions:
    """The processes that share a run."""

    ranks: Annotated[
        int | None,
        typer.Option(
            *RANKS,
            metavar="N",
            min=1,
            help="Share the work among N processes of this machine, each with a GPU of its own, or on the CPU with "
            "--device cpu.",
            rich_help_panel="Several processes",
        ),
    ] = None
    distributed: Annotated[
        str | None,
        typer.Option(
            "--distributed",
            metavar="MODE",
            help="Share the views of a batch among the processes of --ranks or torchrun. replicated: each holds all "
            "Gaussians; sharded: each holds a part of them.  [default with --ranks: replicated]",
            rich_help_panel="Several processes",
        ),
    ] = None

    @property
    def sharded(self) -> bool:
        return self.distributed == SHARDED


@dataclass(frozen=True)
class ViewerOptions:
    """The page that shows a run while it trains."""

    viewer: Annotated[
        bool,
        typer.Option(
            "--viewer", help="Show the run in a browser, at the address that is printed.", rich_help_panel="Viewer"
        ),
    ] = False
    port: Annotated[
        int | None,
        typer.Option(
            "--viewer-port",
            metavar="N",
            min=0,
            max=65535,
            help="Show the run at this port; 0 uses any free port.  [default: the first free one from 8080 on]",
            rich_help_panel="Viewer",
        ),
    ] = None
    host: Annotated[
        str | None,
        typer.Option(
            "--viewer-host",
            metavar="ADDRESS",
            help="Show the run at this address; with 0.0.0.0 all machines that reach this one see it.  "
            "[default: 127.0.0.1]",
            rich_help_panel="Viewer",
        ),
    ] = None


class Space(Enum):
    """The values of ``--param-space``."""

    RAW = "raw"
    ACTIVATED = "activated"


@dataclass(frozen=True)
class ForeignModelOptions:
    """How models of other programs are read."""

    param_space: Annotated[
        Space | None,
        typer.Option(
            "--param-space",
            metavar="SPACE",
            help="raw: scales are logarithms and opacities are logits, whatever their values; activated: their "
            "logarithms and logits are taken.  [default: decided by the values, refused in doubt]",
            show_default=False,
            rich_help_panel="Models of other programs",
        ),
    ] = None
    lenient: Lenient = False
    drop_nonfinite: Annotated[
        bool,
        typer.Option(
            "--drop-nonfinite",
            help="Leave out Gaussians with NaN or infinite values instead of refusing the model.",
            rich_help_panel="Models of other programs",
        ),
    ] = False

    def import_options(self) -> ImportOptions:
        """Return these options as the readers of models take them."""
        from splatcli.checkpoint import activation_check
        from splatcli.checkpoint.foreign.imported import ImportOptions

        known = None if self.param_space is None else activation_check.Space(self.param_space.value)
        return ImportOptions(known, self.lenient, self.drop_nonfinite)

    def request(self) -> dict[str, Any]:
        """Return these options as a run's request records them."""
        space = None if self.param_space is None else self.param_space.value
        return {"--param-space": space, "--lenient": self.lenient, "--drop-nonfinite": self.drop_nonfinite}

    def flags(self) -> list[str]:
        """Return these options as the words of a command."""
        given = {flag: value for flag, value in self.request().items() if value}
        return [word for flag, value in given.items() for word in ([flag] if value is True else [flag, value])]

    def check_model_is_given(self, given: bool) -> None:
        """Raise UsageError when one of these options is given, but no model that it could apply to."""
        for flag, value in self.request().items():
            if value and not given:
                raise UsageError("no model is given that this applies to", where=flag, remedy="--init MODEL")


def refuse_stdout(path: Path | None, flag: str, remedy: str) -> None:
    """Raise UsageError for ``-`` as the name of a file beside the result, which has stdout."""
    if str(path) == "-":
        raise UsageError("stdout gets the result of the command", where=flag, remedy=f"name a file: {flag} {remedy}")


def require_png(path: Path | None, flag: str) -> None:
    """Raise UsageError for a picture whose name ends in other than .png, and for stdout; a pipe has no ending."""
    refuse_stdout(path, flag, "x.png")
    if path is not None and path.suffix.lower() not in ("", ".png"):
        raise UsageError("pictures are PNG files", where=path, remedy=f"{flag} {path.stem}.png")
