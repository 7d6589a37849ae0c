"""The model that a command works on: the one named, the one that comes through a pipe, or the newest run."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from splatcli.cli.options import MODEL_EXISTS, MODEL_HINT
from splatcli.errors import ModelFileError, OlderModelError, UnreadableError, UsageError, os_errors
from splatcli.output_files import OUTPUT

if TYPE_CHECKING:
    from splatcli.checkpoint.foreign.imported import CameraSource, ImportOptions
    from splatcli.checkpoint.state import Checkpoint
    from splatcli.cli.console import Output
    from splatcli.gaussians import Gaussians
    from splatcli.render.images import RenderSettings

#: Bytes that no path of a pipe has; tabs are allowed.
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f]")
#: No path has more letters.
_LONGEST = 4096
#: Paths of a folder that is no run to look at for models, and models to name.
_INSPECTED, _SHOWN = 1000, 3
#: Suffixes of files that hold nothing but splats; a GLB may be a mesh, and a PLY anything.
_SPLATS = (".ksplat", ".sog", ".splat", ".spz")


@dataclass(frozen=True)
class Model:
    """A model that was read; ``checkpoint`` is None when the file is not a checkpoint of ours.

    origin: what the file is.
    gaussians: on the device that was asked for, as of the checkpoint's step; those of ``checkpoint`` are on the CPU and
        as stored.
    dropped: Gaussians with NaN or infinite values that the import options left out.
    antialiased: trained with opacity compensation.
    """

    path: Path
    origin: str
    gaussians: Gaussians
    checkpoint: Checkpoint | None
    dropped: int = 0
    antialiased: bool = False

    @property
    def offset(self) -> tuple[float, ...]:
        """Return what the model's coordinates lack to those of the input: a scene far from its origin is moved."""
        return (0.0, 0.0, 0.0) if self.checkpoint is None else self.checkpoint.dataset.offset

    def place_note(self) -> str | None:
        """Return a sentence on the scene's place on the Earth; None where it is unknown."""
        from splatcli.scene.georeference import place_of, place_text, read_sidecar

        if self.checkpoint is None:
            return None
        dataset = self.checkpoint.dataset
        # Checkpoints of earlier versions lack the place, which is still beside their scene.
        place = dataset.place or place_of(read_sidecar(Path(dataset.root), self.checkpoint.config.data.model))
        return None if place is None else place_text(place)

    def render_settings(self) -> RenderSettings:
        """Return the settings of a render as the model was trained; black where no checkpoint says its background."""
        from splatcli.render.images import RenderSettings

        if self.checkpoint is None:
            return RenderSettings(antialiased=self.antialiased)
        return RenderSettings.trained(self.checkpoint)


def refuse_empty(model: Model, purpose: str = "") -> None:
    """Raise UsageError for a model without Gaussians. purpose: what they are for, after a space."""
    if not len(model.gaussians):
        raise UsageError(f"the model has no Gaussians{purpose}", where=model.path, remedy="name another model")


def find_model(given: Path | None, *, out: Output | None = None, allow_older: bool | None = None) -> Path:
    """Return the file of the model to work on: a checkpoint or a file of splats; it exists.

    given: what the command line names; a run folder stands for its newest checkpoint.
    out, allow_older: as for newest_checkpoint().
    Raises UsageError when there is no such thing, OlderModelError when only an older checkpoint of a run is sound,
    UnreadableError when the system does not let us look.
    """
    path = named_path(given)
    with os_errors(UnreadableError, path):
        if path.is_dir():
            return _newest_in(path, out, allow_older)
        MODEL_EXISTS.check(path)
    return path


def is_run_folder(folder: Path) -> bool:
    """Return whether a folder holds a run, of splat or another program, or an unbundled SOG, and not a scene."""
    from splatcli.formats.registry import newest_import

    return folder.name == "ckpts" or (folder / "ckpts").is_dir() or newest_import(folder) is not None


def named_path(given: Path | None) -> Path:
    """Return the path that the command line names, else that of a pipe, else the newest run. Raises UsageError."""
    return given or _piped_path() or _newest_run()


def newest_checkpoint(folder: Path, *, out: Output | None = None, allow_older: bool | None = None) -> Path | None:
    """Return the newest sound checkpoint of a run; None where the folder has none at all.

    When the newest is damaged an older one stands in for it only if ``allow_older`` says so, with a warning on
    ``out`` that -q does not hide; else OlderModelError is raised. None for ``allow_older``: the command has no such
    flag.
    Raises ModelFileError when all are damaged, and as find_latest_sound().
    """
    from splatcli.checkpoint.run_dir import find_latest_sound, step_of

    latest = find_latest_sound(folder)
    if not latest.damaged:
        return latest.path
    newest = latest.damaged[0]
    if latest.path is None:
        raise ModelFileError(
            f"no checkpoint of this run is sound; of the newest: {newest.what}",
            where=newest.where,
            remedy=f"splat check {folder} tells what is wrong with each; restore one from a copy",
        )
    remedy = f"--allow-older takes {latest.path}" if allow_older is not None else f"name the older one: {latest.path}"
    problem = OlderModelError(
        f"the newest checkpoint is damaged ({newest.what}), and the newest that is sound is of step "
        f"{step_of(latest.path)}",
        where=newest.where,
        remedy=f"restore it from a copy; {remedy}; splat check {folder} tells more",
    )
    if not allow_older:
        raise problem
    if out is not None:
        damaged = [error.where for error in latest.damaged]
        facts = {"damaged": damaged, "what": newest.what, "path": latest.path, "step": step_of(latest.path)}
        out.alarm(f"{newest.where}: {problem.what}; {latest.path} is used", "older-checkpoint", facts)
    return latest.path


def run_folder(checkpoint: Path) -> Path | None:
    """Return the run of a checkpoint, relative as the checkpoint's path; None for one that was copied elsewhere."""
    from splatcli.checkpoint.run_dir import run_of

    run = run_of(checkpoint)
    return run if run is None or checkpoint.is_absolute() else Path(os.path.relpath(run))


def load_model(
    path: Path,
    device: str = "cpu",
    *,
    import_options: ImportOptions | None = None,
    cameras: CameraSource | None = None,
    out: Output | None = None,
    mapped: bool = False,
) -> Model:
    """Read a checkpoint, a file of splats or a checkpoint of another program, recognised by its content.

    import_options: how files of other programs are to be taken.
    cameras: those that are going to be used, for messages. out: gets the notes on the file.
    mapped: as for load_checkpoint().
    Raises ModelFileError.
    """
    from splatcli.checkpoint.file import load_checkpoint
    from splatcli.checkpoint.foreign.imported import ImportOptions, to_gaussians
    from splatcli.formats.registry import import_model, is_own_checkpoint
    from splatcli.train.state import gaussians_to_render

    with os_errors(UnreadableError, path):
        import_options = import_options or ImportOptions()
        if out is not None:
            out.message(f"reading {path}")
        if is_own_checkpoint(path):
            if import_options.space is not None:
                raise UsageError(
                    "a checkpoint of splat says itself what its values are",
                    where="--param-space",
                    remedy="leave --param-space out",
                )
            checkpoint = load_checkpoint(path, mapped=mapped)
            antialiased = checkpoint.config.train.antialiased
            return Model(
                path, "checkpoint", gaussians_to_render(checkpoint).to(device), checkpoint, antialiased=antialiased
            )
        model = import_model(path, lenient=import_options.lenient)
        gaussians, notes = to_gaussians(model, import_options, path, cameras)
        if out is not None:
            out.note(*notes)
        return Model(path, model.origin, gaussians.to(device), None, len(model) - len(gaussians), model.antialiased)


def _piped_path() -> Path | None:
    """Return the path on the last line of a piped stdin; with --json upstream, that of the last object.

    Only a pipe or a redirected file is read: a terminal, /dev/null or a closed stdin has no path to give.
    An empty pipe is an error, for the command before it failed, and another run's model must not stand in.
    """
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return None
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return None
    text, is_text = "", True
    for line in sys.stdin.buffer:
        line = line.removesuffix(b"\n").removesuffix(b"\r")
        is_text = is_text and not _CONTROL.search(line)
        text = os.fsdecode(line) or text  # spaces are part of a path
    if not text:
        raise UsageError(
            "no path came through the pipe", where="stdin", remedy=f"{MODEL_HINT}, or see why nothing was sent"
        )
    if not is_text or (len(text) > _LONGEST and not text.startswith("{")):
        raise UsageError(
            "a file came through the pipe, not the path of one",
            where="stdin",
            remedy=f"{MODEL_HINT}; write it with -o first",
        )
    if text.startswith("{"):
        try:
            text = str(json.loads(text)["path"])
        except (ValueError, KeyError):
            raise UsageError("the last line is JSON without a path", where="stdin", remedy=MODEL_HINT) from None
    return Path(text)


def _newest_run() -> Path:
    from splatcli.checkpoint.run_dir import newest_run

    run = newest_run(OUTPUT)
    if run is None:
        raise UsageError(f"no model is named and there is no run under {OUTPUT}/", remedy=MODEL_HINT)
    return run


def _newest_in(folder: Path, out: Output | None, allow_older: bool | None) -> Path:
    """Return the newest checkpoint of our run, or the newest model of a run of another program."""
    from splatcli.formats.registry import newest_import

    found = newest_checkpoint(folder, out=out, allow_older=allow_older) or newest_import(folder)
    if found is None and folder.name == "ckpts":
        found = newest_checkpoint(folder.parent, out=out, allow_older=allow_older)
    if found is None:
        below = models_below(folder)
        raise UsageError("this folder holds no run", where=folder, remedy=f"name {below}" if below else MODEL_HINT)
    return found


def models_below(folder: Path) -> str | None:
    """Return models in a folder that is no run, for a remedy: files of splats, else runs up to three down."""
    with os_errors(UnreadableError, folder):
        found = sorted(path for path in islice(folder.iterdir(), _INSPECTED) if is_splats_file(path))
        for pattern in ("*", "*/*", "*/*/*"):
            if not found:
                inside = (path for path in islice(folder.glob(pattern), _INSPECTED) if path.is_dir())
                found = sorted(path for path in inside if path.name != "ckpts" and is_run_folder(path))
    return " or ".join(map(str, found[:_SHOWN])) + (", ..." if len(found) > _SHOWN else "") if found else None


def is_splats_file(path: Path) -> bool:
    """Return whether a file has the suffix of splats alone, or is a PLY with their columns and no point cloud."""
    suffix = path.suffix.lower()
    if suffix != ".ply" or not path.is_file():
        return suffix in _SPLATS and path.is_file()
    with path.open("rb") as file:
        head = file.read(4096)
    return b" f_dc_0" in head or b" packed_position" in head
