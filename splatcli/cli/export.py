"""``splat export``: a model in, a file for other programs out."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from splatcli.cli import options
from splatcli.errors import SplatError, UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from splatcli.cli.console import Output
    from splatcli.cli.model import Model
    from splatcli.formats.crop import Crop
    from splatcli.formats.format import Encoded, ExportMetadata, Format
    from splatcli.gaussians import Gaussians


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
            ".sog, .glb, .usdz or .html (a page with a viewer), .lod (a folder with a streamed SOG), or "
            ".json for the cameras. - writes to stdout, a PLY unless --format says otherwise.  [required]",
            show_default=False,
        ),
    ] = None
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help="Format, whatever the name of the file: ply, compressed.ply, splat, spz, spz4 (version 4, smaller, "
            "read by fewer), sog, lod, glb, usdz, html, json, or the name of a plug-in.",
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
            help="Keep only Gaussians whose mean is inside box:X0,Y0,Z0,X1,Y1,Z1, sphere:X,Y,Z,RADIUS, "
            "polygon:z:X0,Y0,X1,Y1,X2,Y2, or file:PATH with such lines, in the coordinates of a PLY.",
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
    target_size: Annotated[
        str | None,
        typer.Option(
            "--target-size",
            metavar="SIZE",
            help="Make the file at most as large as 8MB or 800kB: with a smaller palette of harmonics, fewer Gaussians "
            "or a lower SH degree. The cameras of a run tell which Gaussians the images need.",
        ),
    ] = None
    lod_levels: Annotated[
        int | None,
        typer.Option(
            "--lod-levels",
            metavar="N",
            min=1,
            max=16,
            help="Levels of detail of a streamed SOG, each with half the Gaussians of the one before.  [default: 5]",
            show_default=False,
        ),
    ] = None
    overwrite: Annotated[
        bool,
        typer.Option(
            "-w", "--overwrite", help="Replace the folder of a streamed SOG; files are replaced without this flag."
        ),
    ] = False
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
        if self.target_size is not None:
            self.target()

    def target(self) -> int:
        """Return the bytes of --target-size. Raises UsageError."""
        from splatcli.sizes import parse_size

        try:
            size = parse_size(self.target_size, least=1000)
        except ValueError as error:
            raise UsageError(str(error), where="--target-size", remedy="--target-size 8MB, or 800kB") from None
        assert isinstance(size, int), "a text becomes a number"
        return size


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
      splat export output/scene -o scene.sog --target-size 8MB
      splat export output/scene -o scene.lod/ --lod-levels 4
      splat export output/scene -o cameras.json
      splat export nerfstudio_models/step-000029999.ckpt -o scene.ply
      splat train scene/ | splat export -o - > scene.ply
    """
    from splatcli.cli.console import open_output, stdout_or
    from splatcli.cli.model import find_model, load_model

    assert args.output is not None, "checked above"
    target = _Target.of(stdout_or(args.output, json=args.json and not args.dry_run), args)
    with open_output(json=args.json, quiet=args.quiet) as out:
        found = find_model(args.model, out=out, allow_older=args.allow_older)
        loaded = load_model(found, import_options=args.foreign.import_options(), out=out)
        made = _Export(loaded, target, args, out).write()
        if made is not None:
            out.result(*made)
    return 0


@dataclass(frozen=True)
class _Target:
    """The output of an export.

    format: of a file of splats; None for cameras as JSON. folder: of a streamed SOG. region: of the Gaussians to keep.
    """

    output: Path
    format: Format | None
    folder: Path | None
    region: Crop | None

    @classmethod
    def of(cls, output: Path, args: ExportArguments) -> _Target:
        """Return the target of ``output``. Raises UsageError and OutputError where it cannot be written."""
        from splatcli.checkpoint.atomic import check_name
        from splatcli.formats import streamed_sog
        from splatcli.formats.crop import Crop
        from splatcli.formats.registry import format_to_write

        check_name(output)
        name = "ply" if str(output) == "-" and args.format is None else args.format
        folder = streamed_sog.folder_to_write(output, name)
        if folder is not None:
            streamed_sog.check_folder(folder, overwrite=args.overwrite or args.dry_run)
        elif args.lod_levels is not None:
            raise UsageError("only a streamed SOG has levels of detail", where="--lod-levels", remedy="-o scene.lod/")
        chosen: Format | None = None
        if folder is not None:
            chosen = streamed_sog.FORMAT
        elif name == "json" or (name is None and output.suffix.lower() == ".json"):
            _refuse_choices(args)
        else:
            chosen = format_to_write(output, name, others=(".lod", ".json"), by_name="--format ply")
        if args.target_size is not None and (chosen is None or folder is not None):
            raise UsageError("only a file of splats has a target size", where="--target-size", remedy="-o scene.sog")
        return cls(output, chosen, folder, None if args.crop is None else Crop.parse(args.crop))


def _refuse_choices(args: ExportArguments) -> None:
    """Raise UsageError for options that choose Gaussians, of which a file of cameras has none."""
    given = {"--crop": args.crop, "--min-opacity": args.min_opacity, "--sh-degree": args.sh_degree}
    for flag, value in given.items():
        if value is not None:
            raise UsageError("a file of cameras has no Gaussians", where=flag, remedy="leave it out, or -o scene.ply")


#: The result of a command: facts for --json, and lines.
_Result = tuple[dict[str, Any], list[object]]


@dataclass(frozen=True)
class _Export:
    """The export of a model to one target. Notes are printed on ``out``."""

    model: Model
    target: _Target
    args: ExportArguments
    out: Output

    def write(self) -> _Result | None:
        """Write the file and return the result; None where the model itself goes to stdout."""
        chosen = self.target.format
        if chosen is None:
            return self._finish(self._cameras(), len(self.model.gaussians), "cameras (JSON)")
        gaussians, metadata = self._selected(chosen)
        if self.target.output.stem != "-":
            metadata = replace(metadata, title=self.target.output.stem)
        if self.target.folder is not None:
            return self._stream(gaussians, metadata, self.target.folder)
        assert chosen.write is not None, "format_to_write() gives formats that are written"
        if self.args.target_size is None:
            encoded = chosen.write(gaussians, metadata)
        else:
            encoded, gaussians = self._fit(gaussians, metadata, chosen)
        self.out.note(*encoded.notes)
        return self._finish(encoded.payload, len(gaussians), chosen.title)

    def _cameras(self) -> bytes:
        """Return the cameras of a checkpoint as JSON. Raises UsageError for a model without cameras."""
        import numpy as np

        from splatcli.edit.transform import move_camera
        from splatcli.render.camera_files import cameras_json
        from splatcli.similarity import Similarity

        checkpoint, offset = self.model.checkpoint, self.model.offset
        if checkpoint is None:
            raise UsageError(
                f"the model has no cameras: {self.model.origin}",
                where=self.model.path,
                remedy="export from a checkpoint",
            )
        cameras = checkpoint.refined_cameras()
        if any(offset) and self.args.frame is Frame.INPUT:
            back = Similarity(shift=np.array(offset))
            return cameras_json([move_camera(camera, back) for camera in cameras]).encode()
        note_offset(self.model, self.out)
        return cameras_json(cameras, offset).encode()

    def _selected(self, chosen: Format) -> tuple[Gaussians, ExportMetadata]:
        """Return the Gaussians that go into the file, as its format can hold them, and the facts beside them."""
        import numpy as np

        from splatcli.edit.transform import move_gaussians, rounding_of
        from splatcli.formats.format import ExportMetadata
        from splatcli.formats.selection import select_for_format
        from splatcli.scene.georeference import offset_text
        from splatcli.similarity import Similarity

        model, args, out = self.model, self.args, self.out
        gaussians, offset, comments = model.gaussians, model.offset, []
        if any(offset) and args.frame is Frame.INPUT:
            gaussians = move_gaussians(gaussians, Similarity(shift=np.array(offset)))
            error = rounding_of(gaussians.means)
            out.note(f"in the input's own frame float32 tells positions to {error:.2g} units only")
        elif any(offset):
            comments = [f"splatcli: {offset_text(offset)}"]
            note_offset(model, out)
        place = model.place_note()
        if place is not None:
            comments.append(f"splatcli: {place}")
            if not chosen.has_comments:
                out.note(f"{place}; {chosen.title} has no place for that")
        gaussians, notes = select_for_format(
            gaussians, chosen, crop=self.target.region, min_opacity=args.min_opacity, sh_degree=args.sh_degree
        )
        if not len(gaussians) and chosen.name != "ply":
            raise UsageError(
                "the model has no Gaussians, and only a PLY can hold none", where=model.path, remedy="-o scene.ply"
            )
        out.note(*notes)
        return gaussians, ExportMetadata.of(model.checkpoint, comments, antialiased=model.antialiased)

    def _fit(self, gaussians: Gaussians, metadata: ExportMetadata, chosen: Format) -> tuple[Encoded, Gaussians]:
        """Return a file of --target-size and the Gaussians in it, and print what was chosen."""
        from splatcli.edit.fit_size import SizedFile, fit_size

        file, keep = SizedFile(chosen, metadata, self.args.target()), self.args.sh_degree is not None
        fitted = fit_size(gaussians, file, lambda: self._contributions(gaussians), keep_degree=keep)
        made = fitted.gaussians
        palette = "" if fitted.entries is None else f", a palette of {fitted.entries:,} harmonics"
        self.out.message(
            f"target size: {len(made):,} of {len(gaussians):,} Gaussians, SH degree {made.sh_degree} of "
            f"{gaussians.sh_degree}{palette}: {fitted.size:,} of {file.most:,} bytes"
        )
        return fitted.encoded, made

    def _stream(self, gaussians: Gaussians, metadata: ExportMetadata, folder: Path) -> _Result:
        """Write a streamed SOG and return the result; with --dry-run what would be written."""
        from splatcli.formats.streamed_sog import level_counts

        levels = self.args.lod_levels or LOD_LEVELS
        if self.args.dry_run:
            counts = level_counts(len(gaussians), levels)
            words = f"a streamed SOG with levels of about {_listed(counts)} Gaussians"
            return self._plan(folder, words, {"num_gaussians": len(gaussians), "levels": counts})
        facts = write_stream(gaussians, metadata, folder, levels, self._contributions(gaussians), self.out)
        return facts, [facts["path"]]

    def _contributions(self, gaussians: Gaussians) -> NDArray[np.float64] | None:
        """Return what each Gaussian contributes to the training images, [N]; None where no camera is known."""
        from splatcli.edit.simplify import contributions

        checkpoint = self.model.checkpoint
        if checkpoint is None:
            self.out.note("a file of splats has no cameras to tell which Gaussians count; a run has")
            return None
        if any(self.model.offset) and self.args.frame is Frame.INPUT:
            self.out.note("with --frame input the cameras do not tell which Gaussians count")
            return None
        return contributions(gaussians, checkpoint.training_cameras(), antialiased=self.model.antialiased)

    def _finish(self, payload: bytes, count: int, kind: str) -> _Result | None:
        """Write a file and return the result; with --dry-run what would be written. kind: what the file is."""
        from splatcli.output_files import write_bytes

        output, facts = self.target.output, {"bytes": len(payload), "num_gaussians": count}
        if self.args.dry_run:
            return self._plan(output, f"{kind}, {count:,} Gaussians, {len(payload):,} bytes", facts)
        if str(output) == "-":
            self.out.data(payload)
            return None
        write_bytes(output, payload)
        return {"path": output, **facts}, [output]

    def _plan(self, output: Path, what: str, facts: dict[str, Any]) -> _Result:
        """Return what would be read and written. what, facts: the output, in words and for --json."""
        model, replaces = self.model, output.exists()
        lines: list[object] = [
            f"reads  {model.path}: {model.origin}, {len(model.gaussians):,} Gaussians",
            f"makes  {output}{', which is there and is replaced' if replaces else ''}: {what}",
        ]
        return {"dry_run": True, "reads": model.path, "makes": output, "replaces": replaces, **facts}, lines


def note_offset(model: Model, out: Output) -> None:
    """Print how far the scene of a model was moved, where it lies far from its origin."""
    from splatcli.scene.georeference import offset_text

    if any(model.offset):
        out.note(f"the scene lies far from its origin and was moved: {offset_text(model.offset)}")


def write_stream(
    gaussians: Gaussians,
    metadata: ExportMetadata,
    folder: Path,
    levels: int,
    masses: NDArray[np.float64] | None,
    out: Output,
) -> dict[str, Any]:
    """Write a streamed SOG and return the facts. masses: [N], what each contributes to images, where that is known."""
    from splatcli.edit.simplify import simplify_in_steps
    from splatcli.formats.streamed_sog import INDEX, level_counts, write_streamed

    def coarser(part: Gaussians, rows: Tensor) -> Iterator[Gaussians]:
        of_part = None if masses is None else masses[rows.numpy()]
        return simplify_in_steps(part, level_counts(len(part), levels)[1:], of_part)

    written = write_streamed(gaussians, folder, metadata, coarser)
    out.message(f"levels of {_listed(written.counts)} Gaussians in {written.chunks} chunks, {written.bytes:,} bytes")
    facts = {"bytes": written.bytes, "num_gaussians": len(gaussians), "levels": written.counts}
    return {"path": folder / INDEX, **facts, "chunks": written.chunks}


#: Levels of detail without --lod-levels.
LOD_LEVELS = 5


def _listed(counts: Sequence[int]) -> str:
    return ", ".join(f"{count:,}" for count in counts)


class ExportAtEnd:
    """The files that ``splat train --export`` writes when a run has finished.

    Raises UsageError for an ending of no format, OutputError for places that cannot be written.
    """

    def __init__(self, files: Sequence[Path] | None = None) -> None:
        from splatcli.checkpoint.atomic import names_stdout
        from splatcli.output_files import check_file_place, check_place

        self.files = list(dict.fromkeys(files or ()))
        self._targets = []
        for file in self.files:
            if str(file) == "-" or names_stdout(file):
                raise UsageError(
                    "stdout gets the path of the checkpoint",
                    where="--export",
                    remedy="name a file; or splat train SCENE | splat export -o -",
                )
            args = ExportArguments(output=file, overwrite=True)
            try:
                target = _Target.of(file, args)
            except UsageError as error:
                raise UsageError(
                    error.what, where="--export", remedy="--export scene.ply, .spz, .sog or .html"
                ) from None
            (check_file_place if target.folder is None else check_place)(file)
            self._targets.append((target, args))

    def write(self, checkpoint: Path, out: Output) -> tuple[dict[str, Any], SplatError | None]:
        """Write the model of a checkpoint to each file, and print a message for each.

        Return the files that were written, as a fact of the result, and what went wrong.
        """
        from splatcli.cli.model import load_model

        if not self._targets:
            return {}, None
        written: list[Path] = []
        try:
            loaded = load_model(checkpoint, mapped=True)
            for target, args in self._targets:
                made = _Export(loaded, target, args, out).write()
                assert made is not None, "nothing goes to stdout"
                facts, _ = made
                written.append(facts["path"])
                out.message(f"exported {facts['path']}: {facts['bytes'] / 1e6:,.1f} MB")
        except SplatError as error:
            return {"exports": written}, error
        return {"exports": written}, None

    def note_unwritten(self, run: Path | None, out: Output) -> None:
        """Print a note where a run has not finished. run: None where splat resume cannot go on."""
        if not self.files:
            return
        words = [word for file in self.files for word in ("--export", str(file))]
        go_on = "the same command" if run is None else shlex.join(["splat", "resume", str(run), *words])
        names, verb = " and ".join(map(str, self.files)), "is" if len(self.files) == 1 else "are"
        out.note(f"{names} {verb} not written, because the run has not finished; {go_on} goes on and writes then")
