"""``splat mesh``: a triangle mesh of a model, from the depths that its views show."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from splatcli.cli import options
from splatcli.cli.export import note_offset
from splatcli.errors import UsageError

if TYPE_CHECKING:
    from splatcli.cli.console import Output
    from splatcli.cli.model import Model
    from splatcli.mesh.build import Made
    from splatcli.scene.camera import Camera


@dataclass(frozen=True)
class MeshArguments:
    """The arguments and options of ``splat mesh``."""

    model: options.Model = None
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="File to write: .glb, .ply or .obj, all with the colours of the vertices.  [required]",
            show_default=False,
        ),
    ] = None
    views: Annotated[
        str | None,
        typer.Option(
            "--views",
            metavar="VIEWS",
            help="Views whose depths are fused, as of splat render: train, test, all, images by name, a path such as "
            "orbit, or a .json with cameras.  [default: train; 64 cameras around a model that has none]",
            show_default=False,
        ),
    ] = None
    resolution: Annotated[
        int | None,
        typer.Option(
            "--resolution",
            metavar="N",
            min=8,
            max=65536,
            help="Voxels along the longest side of the region.  [default: 256]",
            show_default=False,
        ),
    ] = None
    voxel: Annotated[
        float | None,
        typer.Option("--voxel", metavar="SIZE", help="Size of a voxel in scene units, instead of --resolution."),
    ] = None
    crop: Annotated[
        str | None,
        typer.Option(
            "--crop",
            metavar="REGION",
            help="Use only Gaussians whose mean is inside box:X0,Y0,Z0,X1,Y1,Z1, sphere:X,Y,Z,RADIUS, "
            "polygon:z:X0,Y0,X1,Y1,X2,Y2, or file:PATH with such lines, in the coordinates of a PLY.",
        ),
    ] = None
    max_depth: Annotated[
        float | None,
        typer.Option(
            "--max-depth",
            metavar="Z",
            help="Ignore surfaces farther from a camera, in scene units.  [default: 3 times the median depth]",
            show_default=False,
        ),
    ] = None
    watertight: Annotated[
        bool,
        typer.Option(
            "--watertight",
            help="Write a closed mesh, for collision and printing: what no view sees is solid, as far as the region "
            "goes.",
        ),
    ] = False
    keep_components: Annotated[
        str,
        typer.Option(
            "--keep-components",
            metavar="N|P%",
            help="Keep the N largest connected parts, or those with at least P % of the triangles of the largest.",
        ),
    ] = "1%"
    overwrite: Annotated[bool, typer.Option("-w", "--overwrite", help="Replace a file that is already there.")] = False
    data: options.Data = None
    allow_older: options.AllowOlder = False
    device: options.Device = "auto"
    json: options.Json = False
    quiet: options.Quiet = False
    foreign: options.ForeignModelOptions = field(default_factory=options.ForeignModelOptions)

    def __post_init__(self) -> None:
        if self.output is None:
            raise UsageError("no file to write is named", where="-o", remedy="splat mesh MODEL -o mesh.glb")
        if self.voxel is not None and self.resolution is not None:
            raise UsageError("both say how large a voxel is", where="--voxel, --resolution", remedy="leave one out")
        for flag, value in (("--voxel", self.voxel), ("--max-depth", self.max_depth)):
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"{value:g} is no size", where=flag, remedy="a positive number of scene units")


def mesh(args: MeshArguments) -> int:
    """Write the surface of a model as a triangle mesh with colours, for previews, collision and measuring.

    Prints the path of the file. The depths of the views are fused in voxels, and the mesh runs where their signed
    distance is zero (`splat docs mesh` has the accuracy, and what such a mesh lacks). Coordinates are those of a PLY; a
    .glb has y up, as its standard demands. A file that is there stays without -w.

    \b
    Examples:
      splat mesh output/scene -o scene.glb
      splat mesh output/scene -o object.ply --crop sphere:0,0,0,1.5 --resolution 400
      splat mesh output/scene -o walls.obj --watertight --voxel 0.1 --keep-components 1
      splat mesh scene.ply --views cameras.json -o scene.glb
      splat mesh chkpnt30000.pth --data scene/ -o scene.glb
    """
    from splatcli.cli.console import open_output
    from splatcli.cli.model import find_model, load_model, refuse_empty
    from splatcli.formats.crop import Crop
    from splatcli.formats.selection import select
    from splatcli.mesh.build import RESOLUTION, MeshOptions, build_mesh
    from splatcli.mesh.files import format_of
    from splatcli.native.backend import resolve_device
    from splatcli.output_files import check_file_place, refuse_existing, write_bytes

    assert args.output is not None, "checked above"
    encode = format_of(args.output)
    components, share = _kept(args.keep_components)
    region = None if args.crop is None else Crop.parse(args.crop)
    refuse_existing(args.output, overwrite=args.overwrite)
    check_file_place(args.output)
    with open_output(json=args.json, quiet=args.quiet) as out:
        device = resolve_device(args.device)
        path = find_model(args.model, out=out, allow_older=args.allow_older)
        loaded = load_model(path, device, import_options=args.foreign.import_options(), out=out)
        refuse_empty(loaded)
        gaussians, notes = select(loaded.gaussians, crop=region)
        out.note(*notes)
        checkpoint = loaded.checkpoint
        made = build_mesh(
            gaussians,
            _cameras(loaded, args, out),
            loaded.render_settings(),
            MeshOptions(
                voxel=args.voxel,
                resolution=args.resolution or RESOLUTION,
                max_depth=args.max_depth,
                watertight=args.watertight,
                components=components,
                least_share=share,
            ),
        )
        payload = encode(made.mesh, _comments(loaded, out), checkpoint is not None and bool(checkpoint.dataset.place))
        write_bytes(args.output, payload)
        _report(made, args.output, len(payload), out)
    return 0


#: Cameras around a model that has none.
_VIEWS = 64


def _kept(text: str) -> tuple[int | None, float]:
    """Return (the number of components to keep, or None; the least share of the largest). Raises UsageError."""
    number = text.removesuffix("%")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if text.endswith("%") and 0 <= value <= 100:
        return None, value / 100
    if text == number and value >= 1 and value.is_integer():
        return int(value), 0.0
    raise UsageError(
        f"{text!r} is neither a number nor a share of components", where="--keep-components", remedy="1, 20 or 5%"
    )


def _cameras(loaded: Model, args: MeshArguments, out: Output) -> list[Camera]:
    """Return the cameras whose depths are fused. Raises UsageError where there are none."""
    from splatcli.cli.model_views import camera_file_beside, views_of
    from splatcli.render.outside import views_from_all_sides
    from splatcli.render.selection import CAMERA_FILE, PathOptions

    if args.views is None and args.data is None and loaded.checkpoint is None:
        out.note(
            f"the model has no cameras, {_VIEWS} around it are used; "
            f"--views {camera_file_beside(loaded.path) or CAMERA_FILE} or --data SCENE has better ones"
        )
        return views_from_all_sides(loaded.gaussians, _VIEWS)
    chosen, _ = views_of(loaded, args.views or "train", args.data, None, PathOptions())
    if chosen.note is not None:
        out.note(chosen.note)
    return chosen.cameras


def _comments(loaded: Model, out: Output) -> list[str]:
    """Return the comments of a file on its coordinates, and print them as notes."""
    from splatcli.scene.georeference import offset_text

    place = loaded.place_note()
    note_offset(loaded, out)
    return [*([] if place is None else [place]), *([offset_text(loaded.offset)] if any(loaded.offset) else [])]


def _report(made: Made, path: Path, size: int, out: Output) -> None:
    mesh = made.mesh
    open_edges = mesh.open_edges()
    out.message(
        f"{len(mesh.faces):,} triangles, {len(mesh.vertices):,} vertices, "
        f"{'closed' if not open_edges else 'open'}; voxels of {made.region.voxel:.4g}; "
        f"{made.kept:,} of {made.found:,} components; surfaces up to a depth of {made.max_depth:.4g}"
    )
    facts = {
        "bytes": size,
        "num_vertices": len(mesh.vertices),
        "num_triangles": len(mesh.faces),
        "open_edges": open_edges,
        "voxel": made.region.voxel,
        "max_depth": made.max_depth,
        "components": made.kept,
        "components_found": made.found,
    }
    out.result({"path": path, **facts}, [path])
