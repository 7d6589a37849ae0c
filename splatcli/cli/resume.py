"""``splat resume``: an interrupted run goes on as if nothing had happened."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from splatcli.cli import options


def resume(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CKPT]",
            help="Checkpoint or run folder. Without it: the path that comes through a pipe, else the newest run under "
            "output/.",
            show_default=False,
        ),
    ] = None,
    iterations: Annotated[
        int | None,
        typer.Option(
            "--iterations",
            "--max-steps",
            "-n",
            metavar="N",
            min=1,
            help="Go on to N steps in all; the schedule stays as it was.",
        ),
    ] = None,
    ranks: options.Ranks = None,
    distributed: options.Distributed = None,
    stop_at: options.StopAt = None,
    vram_budget: options.VramBudget = None,
    offload: Annotated[
        bool | None,
        typer.Option(
            "--offload/--no-offload",
            help="Keep SH coefficients and their moments outside the device from now on; --no-offload: inside.  "
            "[default: as the run did]",
        ),
    ] = None,
    cache_budget: options.CacheBudget = None,
    data: options.Data = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Go on with another setting; may be repeated."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="TOML file that the settings are compared with."),
    ] = None,
    allowed: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-config-change",
            metavar="KEY",
            help="Go on although this differs: a key of FILE, `photos` or `cameras`; may be repeated.",
        ),
    ] = None,
    device: options.Device = "auto",
    viewer: options.Viewer = False,
    viewer_port: options.ViewerPort = None,
    viewer_host: options.ViewerHost = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Go on with a run that was stopped, or extend one that is finished.

    Settings, cameras and the place of the scene are in the checkpoint; the result has the same bits as an
    uninterrupted run, unless a setting is changed. Prints the path of the last checkpoint. Of a run whose newest
    checkpoint is damaged the newest sound one is taken, which a warning tells, whatever -q says.

    \b
    Examples:
      splat resume output/scene
      splat resume output/scene/ckpts/ckpt_007000.pt --iterations 30000
      splat resume output/scene --set optim.means_lr=8e-5
      splat train scene/ --stop-at 1000 | splat resume
    """
    from splatcli.cli.console import open_output
    from splatcli.cli.model import find_model
    from splatcli.cli.ranks import SHARDED, joined_group, start_ranks
    from splatcli.cli.training import ResumeOverrides, resume_training
    from splatcli.cli.view import live_page

    settings = [*(assignments or []), *([f"train.iterations={iterations}"] if iterations is not None else [])]
    settings += [] if vram_budget is None else [f"memory.budget={vram_budget}"]
    settings += [] if offload is None else [f"memory.offload={str(offload).lower()}"]
    settings += [] if cache_budget is None else [f"data.cache_bytes={cache_budget}"]
    with open_output(json=json, quiet=quiet) as out:
        path = find_model(checkpoint, out=out, allow_older=True)
        if ranks is not None:
            asked = options.name_of_ranks(sys.argv[1:])
            arguments = options.without_ranks(sys.argv[1:])
            # What came through a pipe, or was looked for, is named, so that all ranks take the same.
            named = arguments if checkpoint is not None else [arguments[0], str(path), *arguments[1:]]
            return start_ranks(ranks, named, device=device, mode=distributed, asked=asked)
        with (
            joined_group(distributed, device, out) as (group, own_device),
            live_page(viewer, host=viewer_host, port=viewer_port, out=out) as live,
        ):
            return resume_training(
                path,
                ResumeOverrides(data, config, settings, allowed or []),
                stop_at=stop_at,
                device=own_device,
                live=live,
                out=out,
                group=group,
                sharded=distributed == SHARDED,
            )
