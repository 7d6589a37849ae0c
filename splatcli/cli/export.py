"""``splat export``: a model in, a file for other programs out."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Annotated

import typer

from splatcli.cli import options
from splatcli.errors import UsageError


def export(
    model: options.Model = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="x.ply for the Gaussians, x.json for the cameras, - for the PLY on stdout.  [required]",
            show_default=False,
        ),
    ] = None,
    param_space: options.ParamSpace = None,
    lenient: options.Lenient = False,
    drop_nonfinite: options.DropNonfinite = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Write a model as a PLY that other viewers and editors read, or its cameras as JSON.

    Prints the path of the file. The PLY has the layout of the original 3DGS program; coordinates are the input's own,
    but for a scene far from its origin (UTM), where a note says what to add to them.

    \b
    Examples:
      splat export output/scene -o scene.ply
      splat export output/scene -o cameras.json
      splat export nerfstudio_models/step-000029999.ckpt -o scene.ply
      splat train scene/ | splat export -o - > scene.ply
    """
    if output is None:
        raise UsageError("no file to write is named", where="-o", remedy="splat export MODEL -o scene.ply")
    to_stdout = str(output) == "-"
    kind = "ply" if to_stdout else output.suffix.lower().removeprefix(".")
    if kind not in ("ply", "json"):
        raise UsageError(f"cannot tell a format from {output.name!r}", where="-o", remedy="name it x.ply or x.json")

    from splatcli.cli.model import find_model, load_model
    from splatcli.cli.output import speaking
    from splatcli.formats.ply import write_ply
    from splatcli.views.cameras import cameras_json
    from splatcli.views.pictures import write_bytes

    with speaking(json=json, quiet=quiet) as out:
        reading = options.reading(param_space, lenient, drop_nonfinite)
        loaded = load_model(find_model(model), reading=reading, say=out.note)
        offset = loaded.checkpoint.dataset.offset if loaded.checkpoint else (0.0, 0.0, 0.0)
        comments = []
        if any(offset):
            remark = f"add {' '.join(f'{value:.15g}' for value in offset)} to positions for the input's coordinates"
            comments = [f"splatcli: {remark}"]
            out.note(f"note: the scene lies far from its origin and was moved: {remark}")
        if kind == "json":
            if loaded.checkpoint is None:
                raise UsageError(
                    f"this carries no cameras: {loaded.origin}", where=loaded.path, remedy="export from a checkpoint"
                )
            payload = cameras_json(loaded.checkpoint.refined_cameras(), offset).encode()
        else:
            buffer = io.BytesIO()
            write_ply(loaded.gaussians, buffer, comments)
            payload = buffer.getvalue()
            if loaded.checkpoint is not None and loaded.checkpoint.config.train.antialiased:
                out.note("note: trained antialiased; viewers that cannot compensate opacity show it too thick")
        if to_stdout:
            out.data(payload)
        else:
            write_bytes(output, payload)
            out.result({"path": output, "bytes": len(payload), "num_gaussians": len(loaded.gaussians)}, [output])
    return 0
