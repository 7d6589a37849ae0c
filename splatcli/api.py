"""The Python interface: Scene, Model, Trainer, train(). docs/api.md

They are the faces of the engine's own parts: scene/read.py reads, train/trainer.py trains, rasterizer/rendering.py
renders, formats/ reads and writes. Nothing numerical happens here.
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from splatcli.checkpoint.container import is_own
from splatcli.checkpoint.file import load_checkpoint
from splatcli.checkpoint.foreign.imported import ImportOptions, to_gaussians
from splatcli.checkpoint.foreign.read import newest_foreign
from splatcli.checkpoint.run_dir import find_latest_sound
from splatcli.checkpoint.state import Checkpoint
from splatcli.config import DataConfig, build_config, setting_fields
from splatcli.errors import UnreadableError, UsageError, os_errors
from splatcli.formats.format import ExportMetadata
from splatcli.formats.registry import CHECKPOINT, format_of, format_to_write, import_model
from splatcli.formats.selection import Crop, select
from splatcli.gaussians import Gaussians
from splatcli.native.backend import resolve_device
from splatcli.rasterizer.rendering import Render, render
from splatcli.render.images import RenderSettings, parse_background, write_bytes
from splatcli.scene.camera import Camera, common_up
from splatcli.scene.decode import Rgb
from splatcli.scene.read import read_scene
from splatcli.scene.scene import Scene as EngineScene
from splatcli.train.state import flushed


@dataclass(slots=True, eq=False)
class Scene(EngineScene):
    """Cameras, images and points of a folder, as training reads them; its fields are those of scene.scene.Scene.

    data: the settings that it was read with.
    """

    data: DataConfig = field(default_factory=DataConfig)

    @classmethod
    def open(cls, path: str | Path, **settings: Any) -> Scene:
        """Return the scene in a folder, of any layout that ``splat train`` reads.

        settings: those of the section [data] in docs/settings.md by their names, as ``resolution=2``.
        Only headers of the images are read; ``scene.images.image(i).pixels`` decodes one, [H, W, 3] uint8. Images
        without cameras need ``splat sfm`` first. Raises SceneError for anything missing, damaged or contradictory.
        """
        values = dotted_settings(settings)
        other = [key for key in values if not key.startswith("data.")]
        if other:
            raise UsageError(f"{other[0]} is no setting of a scene", where="Scene.open()", remedy="give it to train()")
        return cls.read(build_config({**values, "data.scene": str(path)}).data)

    @classmethod
    def read(cls, data: DataConfig, background: Rgb | None = (0, 0, 0)) -> Scene:
        """Return the scene that ``data`` names. background: R G B in 0..255, under what is transparent in images."""
        found = read_scene(Path(data.scene), data, background=background)
        return cls(**{one.name: getattr(found, one.name) for one in dataclasses.fields(EngineScene)}, data=data)

    def __len__(self) -> int:
        """The number of views."""
        return len(self.cameras)

    def __repr__(self) -> str:
        sizes = sorted({f"{camera.width}x{camera.height}" for camera in self.cameras})
        size = sizes[0] if len(sizes) == 1 else f"{len(sizes)} sizes"
        points = "no" if self.points is None else f"{len(self.points.xyz):,}"
        return (
            f"<Scene {self.root.name}: {self.kind}, {len(self)} views of {size} "
            f"({len(self.train)} to train on, {len(self.test)} held out), {points} points>"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """Gaussians, and how to show them.

    gaussians: raw parameters, see splatcli.gaussians.Gaussians.
    path, origin: the file that they were read from, and what it is.
    step: of the run that made them; None where that is not known.
    cameras: all views of the run, with trained poses; none where the file has no cameras.
    settings: SH degree, background and opacity compensation of render().
    offset: the coordinates plus this are those of the input; see Scene.
    notes: what is worth knowing of the file, sentences.
    """

    gaussians: Gaussians
    path: Path | None = None
    origin: str = "Gaussians"
    step: int | None = None
    cameras: tuple[Camera, ...] = ()
    settings: RenderSettings = field(default_factory=RenderSettings)
    offset: tuple[float, ...] = (0.0, 0.0, 0.0)
    notes: tuple[str, ...] = ()

    @classmethod
    def load(
        cls, path: str | Path, *, device: str | torch.device = "cpu", import_options: ImportOptions | None = None
    ) -> Model:
        """Return the model in a run folder (its newest checkpoint), a checkpoint, or a file of any format that is read.

        device: "auto" takes the GPU if there is one. import_options: how files of other programs are taken.
        Raises ModelFileError, UsageError where there is no such file, UnreadableError when the system refuses it.
        """
        device = resolve_device(device) if isinstance(device, str) else device
        with os_errors(UnreadableError, path):
            file = find_model(Path(path))
            if is_checkpoint(file):
                return cls.of_checkpoint(load_checkpoint(file), file, device)
            imported = import_model(file)
            gaussians, notes = to_gaussians(imported, import_options or ImportOptions(), file, None)
            return cls(gaussians.to(device), file, imported.origin, notes=tuple(notes))

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint, path: Path, device: str | torch.device = "cpu") -> Model:
        """Return the model of a loaded checkpoint."""
        return cls(
            flushed(checkpoint).to(device),
            path,
            "checkpoint",
            checkpoint.step,
            tuple(checkpoint.refined_cameras()),
            RenderSettings.trained(checkpoint),
            tuple(checkpoint.dataset.offset),
        )

    def __len__(self) -> int:
        """The number of Gaussians."""
        return len(self.gaussians)

    def __repr__(self) -> str:
        where = "" if self.path is None else f" {self.path}:"
        step = "" if self.step is None else f" of step {self.step:,}"
        degree, device = self.gaussians.sh_degree, self.gaussians.device
        return f"<Model{where} {self.origin}{step}, {len(self):,} Gaussians, SH degree {degree}, {device}>"

    def to(self, device: str | torch.device) -> Model:
        """Return the model with its Gaussians on ``device``."""
        return dataclasses.replace(self, gaussians=self.gaussians.to(device))

    def render(
        self,
        camera: Camera,
        *,
        size: tuple[int, int] | None = None,
        background: Tensor | tuple[float, float, float] | str | None = None,
        sh_degree: int | None = None,
        antialiased: bool | None = None,
    ) -> Render:
        """Return image [H, W, 3], alpha [H, W] and depth [H, W] of a view, tensors on the Gaussians' device.

        size: width and height in place of the camera's. background: R G B in 0..1, or a name or #rrggbb.
        What is not given is as the model was trained. Differentiable in Gaussians that require gradients.
        """
        camera = camera if size is None else camera.resized(*size)
        if isinstance(background, str):
            background = parse_background(background)
        behind = self.settings.background if background is None else background
        return render(
            self.gaussians,
            camera,
            sh_degree=self.settings.sh_degree if sh_degree is None else sh_degree,
            background=torch.as_tensor(behind, dtype=torch.float32, device=self.gaussians.device),
            antialiased=self.settings.antialiased if antialiased is None else antialiased,
        )

    def export(
        self,
        path: str | Path,
        *,
        format: str | None = None,
        sh_degree: int | None = None,
        min_opacity: float | None = None,
        crop: str | None = None,
    ) -> list[str]:
        """Write the model as a file that other programs read, and return what the format could not hold.

        format: its name, as of ``splat export --format``; by default the end of the file's name tells it.
        sh_degree, min_opacity, crop: as of ``splat export``.
        Raises UsageError for an unknown format, and where no Gaussian is left; OutputError when it cannot be written.
        """
        path = Path(path)
        chosen = format_to_write(path, format)
        assert chosen.write is not None, "format_to_write() gives formats that are written"
        degree = chosen.sh_degree if sh_degree is None else min(sh_degree, chosen.sh_degree)
        region = None if crop is None else Crop.parse(crop)
        kept, notes = select(self.gaussians.to("cpu"), crop=region, min_opacity=min_opacity, sh_degree=degree)
        comments = []
        if any(self.offset):
            place = " ".join(f"{value:.15g}" for value in self.offset)
            comments = [f"splatcli: add {place} to positions for the input's coordinates"]
        first, up = (self.cameras[0], common_up(self.cameras)) if self.cameras else (None, None)
        encoded = chosen.write(kept, ExportMetadata(comments, self.settings.antialiased, first, up))
        write_bytes(path, encoded.payload)
        return [*notes, *encoded.notes]


def find_model(path: Path) -> Path:
    """Return the file of a model: ``path``, or what is newest in a run folder, of splat or of another program."""
    if not path.exists():
        raise UsageError("there is no such model", where=path, remedy="name a run folder, a checkpoint or a PLY")
    if not path.is_dir():
        return path
    latest = find_latest_sound(path)
    if latest.damaged:
        raise latest.damaged[0]
    unbundled = path / "meta.json"  # of a SOG
    found = latest.path or newest_foreign(path) or (unbundled if unbundled.is_file() else None)
    if found is None:
        raise UsageError("this folder holds no run", where=path, remedy="name a run folder, a checkpoint or a PLY")
    return found


def is_checkpoint(path: Path) -> bool:
    """Return whether a file is a checkpoint of splat, sound or not."""
    return format_of(path) is CHECKPOINT and is_own(path)


def dotted_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return dotted key -> value of settings under their own names, ``cap_max``, or their dotted ones.

    Raises UsageError for a name that no setting has.
    """
    keys = setting_fields()
    short = {key.partition(".")[2]: key for key in keys}
    found = {}
    for name, value in settings.items():
        key = name if name in keys else short.get(name)
        if key is None:
            near = difflib.get_close_matches(name, [*short, *keys], n=1)
            remedy = f"did you mean {near[0]}?" if near else "docs/settings.md lists the names"
            raise UsageError(f"there is no setting {name!r}", remedy=remedy)
        found[key] = value
    return found
