"""``splat bench``: trains scenes with several settings and seeds, and prints a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from splatcli.cli import options
from splatcli.cli.typer_command import add_command
from splatcli.errors import OutputError, UsageError

if TYPE_CHECKING:
    from splatcli.bench import Cell


@dataclass(frozen=True)
class BenchArguments:
    """The arguments and options of ``splat bench``."""

    scenes: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[SCENE]...", help="Scenes; none with --plan.", show_default=False),
    ] = None
    setting: Annotated[
        list[str] | None,
        typer.Option("--setting", metavar="NAME=FLAGS", help="Name for some flags of splat train; may be repeated."),
    ] = None
    plan: Annotated[
        Path | None, typer.Option("--plan", metavar="TOML", help="File with scenes, settings and seeds.")
    ] = None
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="DIR", help="Folder of the scenes of the plan.  [default: beside it]"),
    ] = None
    seeds: Annotated[
        str | None, typer.Option("--seeds", metavar="A,B,...", help="Seeds of the runs.  [default: 42,43,44]")
    ] = None
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="Folder for figures, logs and sheets.")
    ] = Path("output/bench")
    sheet: Annotated[bool, typer.Option("--sheet", help="Also write a contact sheet for each run.")] = False
    keep: Annotated[bool, typer.Option("--keep", help="Keep the runs, not only their figures.")] = False
    json: options.Json = False
    quiet: options.Quiet = False

    def __post_init__(self) -> None:
        if (self.plan is None) == (not self.scenes):
            raise UsageError("name scenes or a plan", remedy="splat bench SCENE... or splat bench --plan FILE")
        if self.plan is not None and self.setting:
            raise UsageError("a plan has its own settings", where="--setting", remedy="add the setting to the plan")


def bench(args: BenchArguments) -> int:
    """Train scenes with several settings and seeds, and compare them.

    Prints a Markdown table of quality, size, time and memory: mean and standard deviation over the seeds. Every run is
    a process of its own, one after the other. Figures stay in DIR, so the same command runs only what is missing, and
    the scenes whose files have changed since.

    \b
    Examples:
      splat bench scene/ --setting "adc=" --setting "mcmc=--strategy mcmc"
      splat bench scene/ --seeds 1,2 --setting "small=-r 4 --iterations 3000" -o output/small
      splat bench --plan benchmarks/plans/mipnerf360.toml --data /data/360_v2
    """
    from splatcli.bench import Record, check_scenes, describe_machine, markdown, measure, plan_of, read_plan
    from splatcli.cli.console import open_output
    from splatcli.cli.tables import of_markdown
    from splatcli.output_files import write_bytes

    numbers = _numbers(args.seeds)
    cells = (
        plan_of(args.scenes or [], args.setting or [], numbers or [42, 43, 44])
        if args.plan is None
        else read_plan(args.plan, data=args.data, seeds=numbers)
    )
    check_scenes(cells, args.output)
    _check_arguments(cells)
    with open_output(json=args.json, quiet=args.quiet) as out:
        try:
            args.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"cannot make the folder: {error.strerror}", where=args.output, remedy="choose another -o"
            ) from None
        records: list[Record] = []
        for number, cell in enumerate(cells, 1):
            record, known = measure(cell, args.output, keep=args.keep, sheet=args.sheet)
            records.append(record)
            out.event("run", asdict(record))
            how = "known" if known else f"{record.seconds:.0f} s"
            out.message(f"{number}/{len(cells)} {cell.name}: {record.psnr:.2f} dB, {record.num_gaussians:,} ({how})")
        report = {**describe_machine(), "runs": [asdict(record) for record in records]}
        path = args.output / "bench.json"
        write_bytes(path, (json.dumps(report, indent=1) + "\n").encode())
        lines = markdown(records)
        write_bytes(args.output / "table.md", ("\n".join(lines) + "\n").encode())
        out.result({"path": path, "runs": len(records), "table": lines}, lines, [of_markdown(lines)])
    return 0


def _check_arguments(cells: Sequence[Cell]) -> None:
    """Raise the error with which ``splat train`` would refuse the arguments of a run, before the first run."""
    from splatcli.bench import command_of
    from splatcli.cli import train
    from splatcli.cli.error_report import problem_of
    from splatcli.cli.other_programs import TrainCommand

    app = typer.Typer(name="splat", rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
    app.callback()(lambda: None)  # so that the one command has a name
    add_command(app, "train", train.check, TrainCommand, panel="")
    for cell in cells:
        if not Path(cell.arguments[0]).exists():  # check_scenes() has found its figures
            continue
        command = [*command_of(cell), "--quiet"]
        try:
            app(args=command, prog_name="splat", standalone_mode=False)
        except Exception as error:
            problem = problem_of(error, command)
            raise type(problem)(
                f"setting {cell.setting!r} for scene {cell.scene!r}: {problem.what}",
                where=problem.where,
                remedy=problem.remedy,
            ) from None


def _numbers(seeds: str | None) -> list[int] | None:
    if seeds is None:
        return None
    try:
        return [int(word) for word in seeds.split(",")]
    except ValueError:
        raise UsageError(
            f"{seeds!r} is not a list of seeds", where="--seeds", remedy="whole numbers: --seeds 1,2,3"
        ) from None
