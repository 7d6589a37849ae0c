"""``splat edit``: models in, operations in the order of the command line, one file out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from splatcli.cli import options
from splatcli.cli.console import open_output
from splatcli.cli.edit_models import (
    DENSEST,
    edit_model,
    join_models,
    refine_result,
    warn_of_differences,
    with_align_targets,
)
from splatcli.cli.edit_order import ORDERED, OUTPUT, operations_by_model
from splatcli.cli.edit_output import EditTarget, place_comments, show_plan, write_picture, write_result
from splatcli.cli.model import find_model
from splatcli.errors import UsageError

#: The end of the name of a checkpoint.
_CHECKPOINT = ".pt"


def _option(*names: str, metavar: str, text: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=text, show_default=False, rich_help_panel="Operations")


@dataclass(frozen=True)
class EditArguments:
    """The arguments and options of ``splat edit``.

    The operations' own fields are there for the help: EditCommand moves what they are given to ``ordered``.
    """

    models: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Checkpoints, files of splats (.ply, .spz, .sog, ...) or run folders, also of other programs; several "
            "are put together in their own coordinates. Without one: the path from a pipe, else the newest run under "
            "output/.",
            show_default=False,
        ),
        options.MODEL_EXISTS,
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(
            *OUTPUT,
            metavar="FILE",
            help="File to write; the end of its name selects the format, as for splat export, and .pt a checkpoint for "
            "splat resume, where Gaussians are only dropped. - writes a PLY to stdout.  [required]",
            show_default=False,
        ),
    ] = None
    translate: Annotated[
        list[str] | None, _option("-t", "--translate", metavar="X,Y,Z", text="Add to the positions.")
    ] = None
    rotate: Annotated[
        list[str] | None,
        _option(
            *("-r", "--rotate"),
            metavar="X,Y,Z",
            text="Rotate about the origin by degrees about the x axis, then about the y axis, then about the z axis, "
            "each of them fixed.",
        ),
    ] = None
    level: Annotated[
        list[str] | None,
        _option(
            "--level",
            metavar="AXIS",
            text="Rotate about the origin so that up is along AXIS: -y, as in most PLY files, y, z, x, -x or -z. Up is "
            "that of the training cameras of a checkpoint, else the normal of the dominant plane.",
        ),
    ] = None
    align_to: Annotated[
        list[str] | None,
        _option(
            "--align-to",
            metavar="OTHER",
            text="Rotate, scale and move onto OTHER: a run, a checkpoint, a scene or a file of splats. The training "
            "cameras come onto those of the same images; where one of both has none, Gaussians onto Gaussians.",
        ),
    ] = None
    scale: Annotated[
        list[str] | None, _option("-s", "--scale", metavar="S", text="Scale from the origin by a factor.")
    ] = None
    scale_from: Annotated[
        list[str] | None,
        _option(
            "--scale-from",
            metavar="X0,Y0,Z0,X1,Y1,Z1,LENGTH",
            text="Scale from the origin so that these two points are LENGTH apart.",
        ),
    ] = None
    crop: Annotated[
        list[str] | None,
        _option(
            "--crop",
            metavar="REGION",
            text="Keep Gaussians whose mean is inside box:X0,Y0,Z0,X1,Y1,Z1, sphere:X,Y,Z,RADIUS, seen along z "
            "polygon:z:X0,Y0,X1,Y1,X2,Y2 of any number of corners, or one of the regions on the lines of file:PATH.",
        ),
    ] = None
    crop_out: Annotated[
        list[str] | None,
        _option("--crop-out", metavar="REGION", text="Drop Gaussians whose mean is inside such a region."),
    ] = None
    filter: Annotated[
        list[str] | None,
        _option(
            "--filter",
            metavar="CONDITION",
            text="Keep Gaussians that match, for example 'opacity>0.1' or 'scale<=2': x, y, z, opacity, scale (longest "
            "standard deviation), min_scale, anisotropy (longest by shortest), volume (of the ellipsoid at one "
            "standard deviation), with < <= > >= == or !=. nan: drop those with NaN or infinite values.",
        ),
    ] = None
    sh_degree: Annotated[
        list[str] | None, _option("--sh-degree", metavar="D", text="Leave out SH coefficients above degree D.")
    ] = None
    simplify: Annotated[
        list[str] | None,
        _option(
            "--simplify",
            metavar="N",
            text="Merge neighbours until N Gaussians are left: a number (100k), a share (0.5) or 50%. The cameras of a "
            "checkpoint tell which ones the images need.",
        ),
    ] = None
    clean: Annotated[
        list[str] | None,
        _option(
            "--clean",
            metavar="[light|normal|strong]",
            text="Drop floaters: by the photos and cameras of a checkpoint, or of the scene that --data names; in a "
            "file of splats alone by their neighbours.  [default: normal]",
        ),
    ] = None
    reorder: Annotated[
        list[str] | None,
        _option(
            "--reorder", metavar="morton", text="Sort Gaussians along a Z curve: neighbours in space, in the file."
        ),
    ] = None
    ordered: Annotated[list[str] | None, typer.Option(ORDERED, hidden=True)] = None
    refine: Annotated[
        int | None,
        typer.Option(
            "--refine",
            metavar="STEPS",
            min=1,
            help="After all operations, train the Gaussians that are left for STEPS steps on the photos of the run's "
            "training views; none is added or removed. For one run or checkpoint whose photos are there.",
            show_default=False,
            rich_help_panel="Operations",
        ),
    ] = None
    overwrite: Annotated[bool, typer.Option("-w", "--overwrite", help="Replace a file that is already there.")] = False
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print how many Gaussians each operation touches, and write nothing."),
    ] = False
    overlap: Annotated[
        str,
        typer.Option(
            "--overlap",
            metavar="HOW",
            help="Where several models fill the same space: keep all of them, or only the densest one there.",
        ),
    ] = "keep"
    picture: Annotated[
        Path | None,
        typer.Option(
            "--picture",
            metavar="FILE.png",
            help="Also draw what is dropped, in red over what stays; with --dry-run that is all that is written.",
            show_default=False,
        ),
    ] = None
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="DIR",
            help="Folder of the scene, where it has moved since training. For a file of splats, the scene that it was "
            "trained on: its cameras and photos serve --clean, --simplify, --level and --align-to.",
        ),
        options.SCENE_EXISTS,
    ] = None
    allow_older: options.AllowOlder = False
    json: options.Json = False
    quiet: options.Quiet = False
    foreign: options.ForeignModelOptions = field(default_factory=options.ForeignModelOptions)

    def __post_init__(self) -> None:
        if self.output is None and not self.dry_run:
            last = self.models[-1] if self.models else None
            # Other programs write the file that is named last.
            meant = last is not None and bool(last.suffix) and not last.exists()
            remedy = f"-o {last}" if meant else "splat edit MODEL -o edited.ply --scale 2"
            raise UsageError("no file to write is named", where="-o", remedy=remedy)
        if any((self.translate, self.rotate, self.scale)):
            raise UsageError("an operation is in one word with another flag", where="-t, -r, -s", remedy="-w -t 0,0,1")
        if self.output is not None and self.output.suffix.lower() in (".pth", ".ckpt"):
            raise UsageError("checkpoints of other programs are only read", where="-o", remedy="-o edited.pt")
        if self.writes_checkpoint:
            self._check_checkpoint()
        if self.overlap not in ("keep", DENSEST):
            raise UsageError(f"there is no {self.overlap!r}", where="--overlap", remedy="keep or densest")
        if self.overlap == DENSEST and len(self.models or []) < 2:
            raise UsageError("one model overlaps no other", where="--overlap", remedy="name several models")
        if self.refine is not None and len(self.models or []) > 1:
            raise UsageError(
                "several models have no photos in common to train on",
                where="--refine",
                remedy="refine each in a command of its own, and put the files together",
            )
        options.require_png(self.picture, "--picture")
        if self.output is not None and self.output.suffix.lower() == ".json":
            raise UsageError(
                "cameras alone are not edited",
                where="-o",
                remedy="splat export MODEL -o cameras.json, or -o edited.ply",
            )

    @property
    def writes_checkpoint(self) -> bool:
        return self.output is not None and self.output.suffix.lower() == _CHECKPOINT

    def _check_checkpoint(self) -> None:
        remedy = "-o edited.ply; to train on: splat train SCENE --init edited.ply"
        if len(self.models or []) > 1:
            raise UsageError("several models are no state of one run", where="-o", remedy=remedy)
        if self.refine is not None:
            raise UsageError("--refine does not train the state of the run", where="-o", remedy=remedy)
        if self.output is not None and self.output.absolute().parent.name == "ckpts":
            raise UsageError(
                "a run writes its own checkpoints there",
                where=self.output,
                remedy="-o edited.pt; splat resume edited.pt continues in a run folder of its own",
            )


def edit(args: EditArguments) -> int:
    """Move, cut and clean models after training, and put several together.

    Prints the path of the file. Operations apply in the order given: those after a MODEL to that model, those after -o
    to all together. Rotations turn SH coefficients along, so that the scene looks the same from a camera that moves
    with it; the first view of a page moves, too. Coordinates are those of a PLY. A file that is there stays without -w
    (`splat docs edit`).

    \b
    Examples:
      splat edit output/scene -o small.spz --crop sphere:0,0,0,5 --filter 'opacity>0.05'
      splat edit scene.ply -o upright.ply --rotate 90,0,0 --scale 0.5
      splat edit room.ply chair.ply --scale 0.1 --translate 1,0,2 -o both.ply
      splat edit download.ply -o clean.ply --filter nan --filter 'scale<3' --reorder morton
      splat edit output/scene -o phone.sog --simplify 50%
      splat edit output/scene -o phone.sog --simplify 25% --refine 500
      splat edit output/scene -o clean.ply --clean
      splat edit east.ply west.ply -o both.ply --overlap densest
      splat edit point_cloud.ply -o clean.ply --clean --data scene/
      splat edit output/scene -o clean.pt --clean && splat resume clean.pt --iterations 10000
      splat edit scene.ply --crop-out box:-1,-1,-1,1,1,1 --dry-run --picture edit.png
    """
    own, together = operations_by_model(args.ordered or [], len(args.models or [None]))
    target = EditTarget.of(args, [*own[0], *together])
    with open_output(json=args.json, quiet=args.quiet) as out:
        # All names first, so that a wrong one is an error before the work.
        named: Sequence[Path | None] = args.models or [None]
        paths = [find_model(path, out=out, allow_older=args.allow_older) for path in named]
        own = [with_align_targets(operations, out) for operations in own]
        together = with_align_targets(together, out)
        parts = [edit_model(path, operations, together, args, out) for path, operations in zip(paths, own, strict=True)]
        warn_of_differences(parts, out)
        if args.data is not None and not any(part.uses_data for part in parts):
            out.note(
                "--data has no effect; it names the photos for --clean and --refine, and those of a file of "
                "splats for --simplify, --level and --align-to"
            )
        result = join_models(parts, together, args, out)
        comments = place_comments(parts[0], result, target.format, out)
        if args.refine is not None:
            refine_result(result, parts[0], args.refine, out, dry_run=args.dry_run)
        if args.picture is not None:
            write_picture(result, args.picture, out)
        if args.dry_run:
            show_plan(result, target, out)
        else:
            write_result(result, target, comments, parts[0].checkpoint, out)
    return 0
