"""``splat resume``: an interrupted run continues as if nothing had happened."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from splatcli.cli import options
from splatcli.cli.typer_command import SettingFlags


@dataclass(frozen=True)
class ResumeArguments:
    """The arguments and options of ``splat resume``; ``settings``: dotted key -> given value."""

    checkpoint: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CKPT]",
            help="Checkpoint or run folder. Without it: the path from a pipe, else the newest run under output/.",
            show_default=False,
        ),
        options.MODEL_EXISTS,
    ] = None
    stop_at: options.StopAt = None
    export: options.ExportFiles = None
    data: options.Data = None
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; may be repeated."),
    ] = None
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="TOML file that the settings are compared with."),
    ] = None
    allowed: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-config-change",
            metavar="KEY",
            help="Continue although this differs: a key of FILE, photos or cameras; may be repeated.",
        ),
    ] = None
    device: options.Device = "auto"
    json: options.Json = False
    quiet: options.Quiet = False
    settings: Annotated[
        dict[str, Any],
        SettingFlags(
            ("train.iterations", "memory.budget", "memory.offload", "data.cache_bytes"),
            help={
                "train.iterations": "Continue to N steps in all; the schedule stays as it was.",
                "memory.offload": "Keep the higher SH coefficients and their moments outside the device from now on, "
                "or inside with --no-offload.  [default: as before]",
            },
            negatable=True,
        ),
    ] = field(default_factory=dict)
    processes: options.RankOptions = field(default_factory=options.RankOptions)
    page: options.ViewerOptions = field(default_factory=options.ViewerOptions)

    def all_assignments(self) -> list[str]:
        """Return what the flags of settings and --set change, as key=value; --set comes last, and decides."""
        flags = {key: str(value).lower() if isinstance(value, bool) else value for key, value in self.settings.items()}
        return [*(f"{key}={value}" for key, value in flags.items()), *(self.assignments or [])]


def resume(args: ResumeArguments) -> int:
    """Continue a run that was stopped, or extend a finished one.

    Settings, cameras and the path of the scene are in the checkpoint. The result is bit-identical to an uninterrupted
    run, unless a setting is changed. Prints the path of the last checkpoint. Where the newest checkpoint of a run is
    damaged, the newest sound one is used, with a warning that -q does not hide.

    \b
    Examples:
      splat resume output/scene
      splat resume output/scene --export scene.ply
      splat resume output/scene/ckpts/ckpt_007000.pt --iterations 30000
      splat resume output/scene --set optim.means_lr=8e-5
      splat train scene/ --stop-at 1000 | splat resume
    """
    from splatcli.cli.console import open_output
    from splatcli.cli.export import ExportAtEnd
    from splatcli.cli.model import find_model
    from splatcli.cli.ranks import joined_group, start_ranks
    from splatcli.cli.run_training import ResumeOverrides, RunContext, resume_training
    from splatcli.cli.view import live_page

    processes, exports = args.processes, ExportAtEnd(args.export)
    with open_output(json=args.json, quiet=args.quiet) as out:
        path = find_model(args.checkpoint, out=out, allow_older=True)
        if processes.ranks is not None:
            words = sys.argv[1:]
            if args.checkpoint is None:  # all ranks continue the run that was piped or found here
                words.insert(1, str(path))
            return start_ranks(processes, words, device=args.device, out=out)
        with (
            joined_group(processes.distributed, args.device, out) as (group, own_device),
            live_page(args.page, out) as live,
        ):
            overrides = ResumeOverrides(args.data, args.config, args.all_assignments(), args.allowed or [])
            context = RunContext(own_device, out, live, args.stop_at, exports, group, processes.sharded)
            return resume_training(path, overrides, context)
