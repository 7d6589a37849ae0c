"""``splat export``: a model in, a file for other programs out."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from splatcli.cli import options
from splatcli.errors import UsageError

if TYPE_CHECKING:
    from splatcli.checkpoint.state import Checkpoint
    from splatcli.cli.console import Output
    from splatcli.cli.model import Model
    from splatcli.formats.format import Format
    from splatcli.formats.selection import Crop


class Frame(Enum):
    """The values of ``--frame``."""

    INPUT = "input"
    NORMALISED = "normalised"


@dataclass(frozen=True)
class ExportArguments:
    """The arguments and options of ``splat export``."""

    model: options.Model = None
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="File to write; the end of its name selects the format: .ply, .compressed.ply, .splat, .spz, "
            ".sog, .glb, .usdz or .html (a page with a viewer), or .json for the cameras. - writes to stdout, a PLY "
            "unless --format says otherwise.  [required]",
            show_default=False,
        ),
    ] = None
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help="Format, whatever the name of the file: ply, compressed.ply, splat, spz, spz4 (version 4, smaller, "
            "read by fewer), sog, glb, usdz, html, json, or the name of a plug-in.",
            show_default=False,
        ),
    ] = None
    sh_degree: Annotated[
        int | None,
        typer.Option(
            "--sh-degree",
            metavar="D",
            min=0,
            max=4,
            help="Leave out SH coefficients above degree D.  [default: what the format holds]",
        ),
    ] = None
    min_opacity: Annotated[
        float | None,
        typer.Option("--min-opacity", metavar="A", min=0.0, max=1.0, help="Leave out Gaussians of lower opacity."),
    ] = None
    crop: Annotated[
        str | None,
        typer.Option(
            "--crop",
            metavar="REGION",
            help="Keep only Gaussians whose mean is inside box:X0,Y0,Z0,X1,Y1,Z1, sphere:X,Y,Z,RADIUS or "
            "polygon:z:X0,Y0,X1,Y1,X2,Y2, in the coordinates of a PLY.",
        ),
    ] = None
    frame: Annotated[
        Frame,
        typer.Option(
            "--frame",
            metavar="FRAME",
            help="For a scene far from its origin (UTM): normalised keeps the coordinates of training, input restores "
            "those of the scene, as far as float32 can represent them.  [default: normalised]",
            show_default=False,
        ),
    ] = Frame.NORMALISED
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be read and written, and write nothing.")
    ] = False
    allow_older: options.AllowOlder = False
    json: options.Json = False
    quiet: options.Quiet = False
    foreign: options.ForeignModelOptions = field(default_factory=options.ForeignModelOptions)

    def __post_init__(self) -> None:
        if self.output is None:
            raise UsageError("no file to write is named", where="-o", remedy="splat export MODEL -o scene.ply")


def export(args: ExportArguments) -> int:
    """Write a model as a file that other viewers and editors read, or its cameras as JSON.

    Prints the path of the file. The end of its name selects the format: a PLY is exact and read everywhere, a .sog or
    .spz is a fraction of its size for the web, an .html opens in any browser, a .glb or .usdz opens in 3D tools
    (`splat docs formats` compares them). Coordinates are those of the input, except for a scene far from its origin
    (UTM), where a note gives the offset to add, and for formats whose standard has y up. A note reports what a format
    cannot hold.

    \b
    Examples:
      splat export output/scene -o scene.ply
      splat export output/scene -o scene.sog --crop sphere:0,0,0,5 --min-opacity 0.02
      splat export output/scene -o scene.ply --allow-older
      splat export scene.ply -o scene.spz --sh-degree 1
      splat export download.spz -o scene.ply
      splat export output/scene -o scene.html
      splat export output/scene -o cameras.json
      splat export nerfstudio_models/step-000029999.ckpt -o scene.ply
      splat train scene/ | splat export -o - > scene.ply
    """
    from splatcli.cli.console import open_output, stdout_or
    from splatcli.cli.model import find_model, load_model
    from splatcli.formats.registry import format_to_write
    from splatcli.formats.selection import Crop
    from splatcli.render.images import write_bytes

    assert args.output is not None, "checked above"
    output = stdout_or(args.output)
    to_stdout = str(output) == "-"
    name = "ply" if to_stdout and args.format is None else args.format
    cameras_only = name == "json" if name is not None else output.suffix.lower() == ".json"
    chosen = None if cameras_only else format_to_write(output, name)
    region = None if args.crop is None else Crop.parse(args.crop)
    with open_output(json=args.json, quiet=args.quiet) as out:
        import_options = args.foreign.import_options()
        loaded = load_model(
            find_model(args.model, out=out, allow_older=args.allow_older), import_options=import_options, echo=out.note
        )
        if chosen is None:
            payload, count = _cameras(loaded, out), len(loaded.gaussians)
        else:
            payload, count = _splats(loaded, chosen, args.sh_degree, args.min_opacity, region, args.frame, out)
        if args.dry_run:
            made = {"dry_run": True, "reads": loaded.path, "makes": output, "replaces": output.exists()}
            replaced = ", which is there and is replaced" if output.exists() else ""
            kind = "cameras (JSON)" if chosen is None else chosen.title
            lines = [
                f"reads  {loaded.path}: {loaded.origin}, {len(loaded.gaussians):,} Gaussians",
                f"makes  {output}{replaced}: {kind}, {count:,} Gaussians, {len(payload):,} bytes",
            ]
            out.result({**made, "bytes": len(payload), "num_gaussians": count}, lines)
        elif to_stdout:
            out.data(payload)
        else:
            write_bytes(output, payload)
            out.result({"path": output, "bytes": len(payload), "num_gaussians": count}, [output])
    return 0


def _cameras(loaded: Model, out: Output) -> bytes:
    """Return the cameras of a checkpoint as JSON. Raises UsageError for a model without cameras."""
    from splatcli.render.camera_files import cameras_json

    if loaded.checkpoint is None:
        raise UsageError(
            f"the model has no cameras: {loaded.origin}", where=loaded.path, remedy="export from a checkpoint"
        )
    offset = loaded.checkpoint.dataset.offset
    if any(offset):
        out.note(f"note: the scene lies far from its origin and was moved: {offset_note(offset)}")
    return cameras_json(loaded.checkpoint.refined_cameras(), offset).encode()


def _splats(
    loaded: Model,
    chosen: Format,
    sh_degree: int | None,
    min_opacity: float | None,
    crop: Crop | None,
    frame: Frame,
    out: Output,
) -> tuple[bytes, int]:
    """Return the content of the file and the number of Gaussians in it."""
    from splatcli.formats.format import ExportMetadata
    from splatcli.formats.selection import moved, select

    checkpoint, gaussians = loaded.checkpoint, loaded.gaussians
    offset = checkpoint.dataset.offset if checkpoint else (0.0, 0.0, 0.0)
    comments = []
    if any(offset) and frame is Frame.INPUT:
        gaussians, error = moved(gaussians, offset)
        out.note(f"note: in the input's own frame float32 tells positions to {error:.2g} units only")
    elif any(offset):
        comments = [f"splatcli: {offset_note(offset)}"]
        out.note(f"note: the scene lies far from its origin and was moved: {offset_note(offset)}")
    place = None if checkpoint is None else place_note(checkpoint)
    if place is not None:
        comments.append(f"splatcli: {place}")
        if chosen.name not in COMMENTED:
            out.note(f"note: {place}; {chosen.title} has no place for that")
    degree = chosen.sh_degree if sh_degree is None else min(sh_degree, chosen.sh_degree)
    if sh_degree is None and gaussians.sh_degree > degree:
        out.note(f"note: SH degree {gaussians.sh_degree} -> {degree}, the most that {chosen.title} holds")
    gaussians, notes = select(gaussians, crop=crop, min_opacity=min_opacity, sh_degree=degree)
    if not len(gaussians) and chosen.name != "ply":
        raise UsageError(
            "the model has no Gaussians, and only a PLY can hold none", where=loaded.path, remedy="-o scene.ply"
        )
    assert chosen.write is not None, "format_to_write() gives formats that are written"
    encoded = chosen.write(gaussians, ExportMetadata.of(checkpoint, comments))
    for note in [*notes, *encoded.notes]:
        out.note(f"note: {note}")
    return encoded.payload, len(gaussians)


#: Formats that have comments.
COMMENTED = ("ply", "compressed.ply", "glb", "usdz")


def place_note(checkpoint: Checkpoint) -> str | None:
    """Return where the scene lies on the Earth; None where nobody knows."""
    from splatcli.scene.georeference import place_of, place_text, read_sidecar

    dataset = checkpoint.dataset
    # Checkpoints of earlier versions lack the place, which is still beside their scene.
    place = dataset.place or place_of(read_sidecar(Path(dataset.root), checkpoint.config.data.model))
    return None if place is None else place_text(place)


def offset_note(offset: tuple[float, ...]) -> str:
    """Return how positions of a scene that was moved become those of its input."""
    return f"add {' '.join(f'{value:.15g}' for value in offset)} to positions for the input's coordinates"
