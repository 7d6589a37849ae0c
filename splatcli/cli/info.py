"""``splat info``: what a path holds, without changing anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from splatcli.cli import options
from splatcli.errors import UsageError


def info(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="[PATH]",
            help="Checkpoint, PLY, run folder or scene. Without it: the path that comes through a pipe, else the "
            "newest run under output/.",
            show_default=False,
        ),
    ] = None,
    images: options.Images = None,
    masks: options.Masks = None,
    max_pixels: options.MaxPixels = None,
    strict: options.Strict = False,
    skip_bad_images: options.SkipBadImages = False,
    format: options.Format = None,
    colmap_model: options.ColmapModel = None,
    skip_missing: options.SkipMissing = False,
    allow_outside: options.AllowOutside = False,
    drop_bad_points: options.DropBadPoints = False,
    scene_extent: options.SceneExtent = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Tell what a file or folder is and what is in it.

    A scene is checked as `splat train` checks it before it starts: the same flags, the same problems, the same notes.

    \b
    Examples:
      splat info scene/
      splat info scene/ --model sparse/1
      splat info output/scene
      splat info scene.ply --json
    """
    from splatcli.cli.model import find_model, load_model
    from splatcli.cli.output import speaking

    with speaking(json=json, quiet=quiet) as out:
        if path is not None and not path.exists():
            raise UsageError("there is nothing here", where=path, remedy="name a checkpoint, PLY, run folder or scene")
        if path is not None and path.is_dir() and not _is_run(path):
            flags = options.data_flags(
                format=format,
                model=colmap_model,
                images=images,
                masks=masks,
                max_pixels=max_pixels,
                strict=strict,
                skip_bad_images=skip_bad_images,
                skip_missing=skip_missing,
                allow_outside=allow_outside,
                drop_bad_points=drop_bad_points,
                scene_extent=scene_extent,
            )
            facts = _scene_facts(path, flags)
        else:
            kind = "run" if path is not None and path.is_dir() else None
            facts = _model_facts(load_model(find_model(path)), kind)
        out.result(facts, _lines(facts))
    return 0


def _is_run(folder: Path) -> bool:
    """Whether a folder holds a run rather than a scene."""
    return (folder / "ckpts").is_dir() or (folder / "point_cloud").is_dir()


def _model_facts(model: Any, kind: str | None) -> dict[str, Any]:
    gaussians, checkpoint = model.gaussians, model.checkpoint
    facts: dict[str, Any] = {
        "kind": kind or ("ply" if checkpoint is None else "checkpoint"),
        "path": model.path,
        "bytes": model.path.stat().st_size,
        "num_gaussians": len(gaussians),
        "sh_degree": gaussians.sh_degree,
    }
    if len(gaussians):
        facts["bounds"] = [gaussians.means.amin(dim=0).tolist(), gaussians.means.amax(dim=0).tolist()]
    if checkpoint is not None:
        facts |= {
            "step": checkpoint.step,
            "iterations": checkpoint.config.train.iterations,
            "active_sh_degree": checkpoint.active_sh_degree,
            "num_train": len(checkpoint.train),
            "num_test": len(checkpoint.test),
            "scene": checkpoint.dataset.root,
            "scene_kind": checkpoint.dataset.kind,
            "scene_present": Path(checkpoint.dataset.root).is_dir(),
            "resumable": checkpoint.moments is not None,
        }
        if any(checkpoint.dataset.offset):
            facts["offset"] = list(checkpoint.dataset.offset)
    return facts


def _scene_facts(path: Path, flags: dict[str, Any]) -> dict[str, Any]:
    from splatcli.config import build_config
    from splatcli.scene.read import read_scene

    scene = read_scene(path, build_config(flags).data)
    return {
        "kind": "scene",
        "path": path,
        "scene_kind": scene.kind,
        "num_cameras": len(scene.cameras),
        "num_train": len(scene.train),
        "num_test": len(scene.test),
        "num_points": len(scene.points.xyz) if scene.points is not None else 0,
        "sizes": sorted({f"{camera.width}x{camera.height}" for camera in scene.cameras}),
        "extent": scene.extent,
        **({"offset": scene.offset.tolist()} if scene.offset.any() else {}),
        "missing_photos": [c.name for i, c in enumerate(scene.cameras) if not scene.images.has(i)],
        "notes": scene.notes,
    }


def _lines(facts: dict[str, Any]) -> list[str]:
    width = max(map(len, facts))
    return [f"{key:<{width}}  {_text(value)}" for key, value in facts.items()]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        parts = [f"({_text(part)})" if isinstance(part, list) else _text(part) for part in value]
        return "; ".join(parts) or "none"
    return str(value)
