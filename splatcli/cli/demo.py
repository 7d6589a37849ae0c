"""``splat demo``: the sample scene, trained and shown, to try an installation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from splatcli.cli import options
from splatcli.errors import SceneError

_PACKAGE = Path(__file__).resolve().parents[1]
_SAMPLE = "courtyard"


@dataclass(frozen=True)
class DemoArguments:
    """The options of ``splat demo``."""

    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Run folder.")] = Path("output/demo")
    max_time: Annotated[
        str, typer.Option("--max-time", metavar="T", help="Time for the whole training: 60s, 5m or 2h.")
    ] = "60s"
    iterations: Annotated[
        int | None, typer.Option("-n", "--iterations", metavar="N", min=1, help="Number of steps, instead of a time.")
    ] = None
    view: Annotated[bool, typer.Option("--view", help="Show the result in a browser, until Ctrl-C.")] = False
    device: options.Device = "auto"
    json: options.Json = False
    quiet: options.Quiet = False


def sample_scene() -> Path:
    """Return the folder of the sample scene: 50 images of 320x240 with cameras, in the package or the checkout.

    Raises SceneError when neither has it.
    """
    for folder in (_PACKAGE / "_samples" / _SAMPLE, _PACKAGE.parent / "data" / "samples" / _SAMPLE):
        if (folder / "sparse").is_dir():
            return folder
    raise SceneError(
        "the sample scene is missing from this installation",
        where=_PACKAGE,
        remedy="install splatcli again, or train a scene of your own: splat train photos/",
    )


def demo(args: DemoArguments) -> int:
    """Train the sample scene, which comes with the package, for a minute; --view shows it in a browser.

    Prints the path of the last checkpoint, as `splat train` does, and may be stopped and repeated like it.

    \b
    Examples:
      splat demo --view
      splat demo -o output/courtyard --max-time 5m
    """
    from splatcli.cli.train import TrainArguments, train
    from splatcli.cli.view import ViewArguments, view

    code = train(
        TrainArguments(
            scene=sample_scene(),
            output=args.output,
            max_time=args.max_time if args.iterations is None else None,
            settings={} if args.iterations is None else {"train.iterations": args.iterations},
            device=args.device,
            json=args.json,
            quiet=args.quiet,
        )
    )
    if code != 0 or not args.view:
        return code
    return view(ViewArguments(model=args.output, json=args.json, quiet=args.quiet))
