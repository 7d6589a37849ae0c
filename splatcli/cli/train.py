"""``splat train``: a scene in, a run folder with checkpoints out."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from splatcli.cli import options
from splatcli.cli.model import is_splats_file
from splatcli.cli.other_programs import check_run_folder
from splatcli.cli.typer_command import SettingFlags, exclusion
from splatcli.errors import UsageError

if TYPE_CHECKING:
    from splatcli.config import Config


def _check_text(value: object) -> None:
    """Raise UsageError for a path that is no text: settings are stored as JSON, which is UTF-8."""
    try:
        str(value).encode()
    except UnicodeEncodeError:
        raise UsageError(
            "this name is not valid UTF-8, and checkpoints could not hold it",
            where=str(value),
            remedy="rename it, or name a symbolic link to it; with a locale of another encoding, set LC_ALL=C.UTF-8",
        ) from None


@dataclass(frozen=True)
class TrainArguments:
    """The arguments and options of ``splat train``; ``settings``: dotted key -> given value."""

    scene: Annotated[
        Path,
        typer.Argument(
            metavar="SCENE",
            help="Folder of a COLMAP, nerfstudio or Blender scene or of another program's cameras; or images without "
            "cameras, or videos, whose cameras splat sfm estimates first.",
        ),
    ]
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="DIR", help="Run folder.  [default: output/NAME, numbered]"),
    ] = None
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Move a run that is in DIR aside, to DIR.old-1, instead of refusing.")
    ] = False
    preset: Annotated[
        str,
        typer.Option(
            "--preset",
            metavar="NAME",
            help="Settings that go together: fast, default, quality, or 3dgs, the original method as a baseline.",
        ),
    ] = "default"
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="TOML file with settings; flags override it.")
    ] = None
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set any setting of `splat docs settings`; may be repeated."),
    ] = None
    max_time: Annotated[
        str | None,
        typer.Option(
            "--max-time",
            metavar="T",
            help="Choose the number of steps so that the command ends within 60s, 5m or 2h.",
        ),
    ] = None
    stop_at: options.StopAt = None
    export: options.ExportFiles = None
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print what would be read and made, memory and time; train nothing."),
    ] = False
    device: options.Device = "auto"
    json: options.Json = False
    quiet: options.Quiet = False
    settings: Annotated[dict[str, Any], SettingFlags()] = field(default_factory=dict)
    foreign: options.ForeignModelOptions = field(default_factory=options.ForeignModelOptions)
    processes: options.RankOptions = field(default_factory=options.RankOptions)
    page: options.ViewerOptions = field(default_factory=options.ViewerOptions)

    def __post_init__(self) -> None:
        from splatcli.config import COLOUR_MAPS

        settings, processes = self.settings, self.processes
        if self.output is None or not os.path.isdir(self.output / "ckpts"):  # a finished run needs no scene
            with contextlib.suppress(OSError):  # which is reported when it is read
                options.SCENE_EXISTS.check(self.scene)
        check_run_folder(self.output)
        if self.max_time is not None:
            _seconds(self.max_time)
        maps = [f"--{name.replace('_', '-')}" for name in COLOUR_MAPS if settings.get(f"views.{name}")]
        if len(maps) > 1:
            raise exclusion(*maps[:2], remedy="give one; each maps the colours of an image")
        self._check_combination(settings)
        if self.dry_run and processes.distributed and processes.ranks is None:
            raise UsageError(
                "--dry-run starts no processes, and does not join those of a launcher",
                where="--dry-run",
                remedy="say how many there are: --ranks N",
            )

    def given_settings(self) -> dict[str, Any]:
        """Return the settings of flags, file and --set. Raises UsageError for settings that do not go together."""
        from splatcli.config import read_settings

        given = read_settings(self.settings, file=self.config, assignments=self.assignments)
        self._check_combination(given)
        return given

    def _check_combination(self, given: Mapping[str, Any]) -> None:
        batch = given.get("train.batch_size", 1)
        several = self.processes.ranks or self.processes.distributed or (isinstance(batch, int) and batch > 1)
        if self.max_time is not None and several:
            raise UsageError(
                "--max-time plans for one process and one view per step",
                where="--max-time",
                remedy="give --iterations, or leave out --ranks, --distributed and --batch-size",
            )
        if given.get("memory.offload") and (several or self.max_time is not None):
            raise UsageError(
                "--offload is for one process, one view per step, and a number of steps",
                where="--offload",
                remedy="leave out --ranks, --distributed, --batch-size and --max-time",
            )
        if self.max_time is not None and "train.iterations" in given:
            raise UsageError("--max-time chooses the steps itself", where="--iterations", remedy="give one of the two")

    def with_points_of_init(self) -> tuple[TrainArguments, str | None]:
        """Return the arguments, with a point cloud that --init names moved to --points; and a note where it is."""
        from splatcli.config import NAMED_STARTS
        from splatcli.formats.ply import is_point_cloud

        init = self.settings.get("model.init")
        if init is None or init in NAMED_STARTS or "data.points" in self.settings:
            return self, None
        path = Path(init).expanduser()
        if not os.path.isfile(path) or not is_point_cloud(path):  # a place that is hidden is reported when it is read
            return self, None
        others = {key: value for key, value in self.settings.items() if key != "model.init"}
        note = f"{init} holds points, no Gaussians: --init is taken as --points {shlex.quote(init)}"
        return replace(self, settings={**others, "data.points": init}), note

    def build(self, values: Mapping[str, Any], found: Mapping[str, Any]) -> Config:
        """Return the settings of the run.

        values: others, under dotted keys, in place of those of the flags; --set goes before them.
        found: others in place of all that are given.
        """
        from splatcli.config import build_config

        flags = {"data.scene": str(self.scene.absolute()), **self.settings, **values, **found}
        for value in flags.values():
            _check_text(value)
        kept = [one for one in self.assignments or [] if one.partition("=")[0].strip() not in found]
        return build_config(flags, file=self.config, assignments=kept, preset=self.preset)


def train(args: TrainArguments) -> int:
    """Train Gaussians on the images of a scene.

    Prints the path of the last checkpoint. Ctrl-C, SIGTERM and SIGHUP stop at the next step, after a complete save;
    SIGUSR1 saves, and training continues. The same command with the same -o continues a run that was stopped. For
    images without cameras `splat sfm` runs first; its result is kept beside the run as NAME-sfm and used again.

    \b
    Examples:
      splat train scene/
      splat train images/
      splat train scene/ -r 2 --iterations 7000 -o output/small
      splat train scene/ --max-time 60s
      splat train scene/ --export scene.ply
      splat train scene/ --blocks 2x3 -o output/city
      splat train scene/ --dry-run
      splat train scene/ --viewer
      splat train scene/ | splat render --views
      splat train scene/ --ranks 4
      splat train scene/ --ranks 4 --distributed sharded
      splat train scene/ --init point_cloud.ply
      splat train scene/ --set optim.means_lr=1e-4 --json > log.jsonl
    """
    from splatcli.cli.console import open_output
    from splatcli.cli.export import ExportAtEnd
    from splatcli.cli.ranks import check_ranks, joined_group, start_ranks
    from splatcli.cli.run_request import RunRequest
    from splatcli.cli.run_training import NewRun, RunContext, start_training
    from splatcli.cli.view import live_page

    processes = args.processes
    layout = any(args.settings.get(f"data.{key}") for key in ("format", "model", "images"))
    args.given_settings()  # checks them before any work
    exports = ExportAtEnd(args.export)
    scene, note = scene_to_train(args.scene, is_layout_given=layout)
    args, points_note = replace(args, scene=scene).with_points_of_init()
    with open_output(json=args.json, quiet=args.quiet) as out:
        device, mode = args.device, processes.distributed
        if args.dry_run and processes.ranks is not None:  # this process plans for all
            device, mode = check_ranks(processes, sys.argv[1:], device=device), None
        elif processes.ranks is not None:
            return start_ranks(processes, sys.argv[1:], device=device, out=out)
        with joined_group(mode, device, out) as (group, own_device):
            ranks = processes.ranks if group is None else group.size
            out.note(*filter(None, (note, points_note)))
            # The request has no default batch of ranks, so that another number of ranks recognises the run.
            options_given = {"--max-time": args.max_time, **args.foreign.request()}
            request = RunRequest(partial(args.build, {}), options_given)
            config, build = _checked(args, ranks)
            run = NewRun(
                config,
                build,
                request,
                args.foreign.import_options(),
                output=args.output,
                overwrite=args.overwrite,
                limit=None if args.max_time is None else _seconds(args.max_time),
                dry=args.dry_run,
                ranks=ranks,
                given=tuple(args.given_settings()),
            )
            with live_page(args.page, out) as live:
                context = RunContext(own_device, out, live, args.stop_at, exports, group, processes.sharded)
                if config.data.blocks is not None:
                    from splatcli.cli.blocks import train_blocks

                    return train_blocks(run, context)
                return start_training(run, context)


def check(args: TrainArguments) -> int:
    """Check the arguments of ``splat train`` as far as that needs neither the scene nor a run; return 0."""
    from splatcli.cli.export import ExportAtEnd
    from splatcli.cli.ranks import check_ranks
    from splatcli.native.backend import resolve_device

    args, _ = args.with_points_of_init()
    processes = args.processes
    args.given_settings()  # checks them
    ExportAtEnd(args.export)
    if processes.ranks is not None:
        check_ranks(processes, (), device=args.device)
    elif args.device != "auto":  # which takes what there is
        resolve_device(args.device)
    _checked(args, processes.ranks)
    return 0


def _checked(
    args: TrainArguments, ranks: int | None
) -> tuple[Config, Callable[[Mapping[str, Any], Mapping[str, Any]], Config]]:
    """Return the settings for so many processes, and the function that builds them anew, as TrainArguments.build().

    Raises UsageError for settings and options that do not go together, and for a strategy that is not there.
    """
    from splatcli.cli.ranks import check_sharded
    from splatcli.cli.run_training import check_batch
    from splatcli.config import NAMED_STARTS
    from splatcli.train.densify import check_strategy
    from splatcli.train.tensorboard import check_tensorboard

    by_ranks: dict[str, Any] = {}
    if ranks is not None and "train.batch_size" not in args.given_settings():
        by_ranks["train.batch_size"] = ranks

    def build(values: Mapping[str, Any], found: Mapping[str, Any]) -> Config:
        return args.build({**by_ranks, **values}, found)

    config = build({}, {})
    check_batch(config, ranks)
    check_strategy(config)
    check_tensorboard(config)
    if args.stop_at is not None and args.max_time is None and args.stop_at > config.train.iterations:
        raise UsageError(
            f"the run ends at step {config.train.iterations:,}, before step {args.stop_at:,}",
            where="--stop-at",
            remedy=f"-n {args.stop_at} for a run of so many steps; or leave out --stop-at",
        )
    if args.processes.sharded:
        check_sharded(viewer=args.page.viewer)
    args.foreign.check_model_is_given(config.model.init not in NAMED_STARTS)
    if config.data.blocks is not None:
        _check_blocks(args, config.data.block)
        if ranks is not None:
            raise UsageError(
                "a block is trained by one process", where="--blocks", remedy="start one for each --block K"
            )
    elif config.data.block is not None:
        raise UsageError("of how many blocks?", where="--block", remedy="e.g. --blocks 2x2 --block 0")
    return config, build


def _check_blocks(args: TrainArguments, block: int | None) -> None:
    """Raise UsageError for options that do not apply to blocks."""
    if block is not None and args.output is None:
        raise UsageError("jobs of one scene need one folder", where="--block", remedy="name it with -o DIR")
    if block is not None and args.export:
        raise UsageError(
            "one block is no finished model",
            where="--export",
            remedy="leave it out; splat merge RUN | splat export -o FILE",
        )
    if args.overwrite:
        raise UsageError(
            "finished blocks stay, and the others continue", where="--overwrite", remedy="leave it out, or another -o"
        )
    if args.max_time is not None:
        raise UsageError("each block takes its own time", where="--max-time", remedy="give --iterations")


def _seconds(text: str) -> float:
    """Return the seconds of ``--max-time``. Raises UsageError."""
    from splatcli.train.step_time import seconds_of

    try:
        return seconds_of(text)
    except ValueError:
        raise UsageError(
            f"{text!r} is not a length of time", where="--max-time", remedy="e.g. 60s, 5m or 1.5h"
        ) from None


def scene_to_train(path: Path, *, is_layout_given: bool) -> tuple[Path, str | None]:
    """Return the folder of the scene that ``path`` means, and a note where that is another folder.

    The model folder of a scene (sparse/, sparse/0) and its images/ stand for the scene. is_layout_given: flags say how
    the folder is to be read, and it is taken as it is. Raises UsageError, which names the command, for a run or a
    checkpoint, and for one of several models.
    """
    name = shlex.quote(str(path))
    if not os.path.exists(path):  # False also for a name that no file can have
        return path, None
    if path.is_file() and path.suffix == ".pt" and path.parent.name == "ckpts":
        raise UsageError(
            "this is a checkpoint, and training takes a scene",
            where=path,
            remedy=f"splat resume {name} continues its run; splat train SCENE --init {name} starts from it",
        )
    if is_splats_file(path):
        raise UsageError(
            "this is a file of splats, and training takes a scene",
            where=path,
            remedy=f"splat train SCENE --init {name} starts from it; splat view {name} shows it",
        )
    if (path / "ckpts").is_dir() and not (path / "images").is_dir():
        raise UsageError(
            "this is a run folder, and training takes a scene", where=path, remedy=f"splat resume {name} continues it"
        )
    if is_layout_given or not path.is_dir():
        return path, None
    absolute = path.absolute()
    root = absolute.parent
    if absolute.parent.name == "sparse" and _is_model(path) and (root.parent / "images").is_dir():
        models = [folder for folder in root.iterdir() if _is_model(folder)]
        if len(models) > 1:
            scene = shlex.quote(str(_shortened(root.parent, path)))
            raise UsageError(
                f"this is one of {len(models)} models of a scene",
                where=path,
                remedy=f"splat train {scene} --model sparse/{absolute.name}",
            )
        return _moved(root.parent, path)
    has_models = _is_model(path) or _is_model(path / "0")
    if absolute.name == "sparse" and has_models and (root / "images").is_dir():
        return _moved(root, path)
    described = (root / "sparse").is_dir() and (_is_model(root / "sparse") or _is_model(root / "sparse" / "0"))
    if absolute.name == "images" and (described or (root / "transforms.json").is_file()):
        return _moved(root, path)
    return path, None


def _is_model(folder: Path) -> bool:
    return any((folder / f"cameras{suffix}").is_file() for suffix in (".bin", ".txt"))


def _moved(scene: Path, given: Path) -> tuple[Path, str]:
    shown = _shortened(scene, given)
    return shown, f"{given} belongs to the scene {shown}, which is trained"


def _shortened(scene: Path, given: Path) -> Path:
    """Return ``scene``, which is above ``given``, written as that is."""
    if given.is_absolute():
        return scene
    above = given
    while above.absolute() != scene and above.name not in ("", ".."):
        above = above.parent
    return above if above.absolute() == scene else scene
