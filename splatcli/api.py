"""The Python interface: Scene, Model, Trainer and Run, train(). docs/api.md

They are the faces of the engine's own parts: scene/read.py reads, train/trainer.py trains, rasterizer/rendering.py
renders, formats/ reads and writes. Nothing numerical happens here.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import itertools
import json
import logging
import os
import re
import shlex
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from splatcli import progress
from splatcli.checkpoint.file import load_checkpoint
from splatcli.checkpoint.foreign.imported import ImportOptions, to_gaussians
from splatcli.checkpoint.run_dir import METRICS, RunDir, checkpoints_of, find_latest_sound, run_of
from splatcli.checkpoint.state import Checkpoint
from splatcli.config import NAMED_STARTS, RANDOM, Config, DataConfig, build_config, setting_fields, setting_flags
from splatcli.disk import is_there
from splatcli.errors import ResourceError, SceneError, SplatError, UnreadableError, UsageError, os_errors
from splatcli.formats.crop import Crop
from splatcli.formats.format import ExportMetadata
from splatcli.formats.registry import format_to_write, import_model, is_own_checkpoint, newest_import
from splatcli.formats.selection import select_for_format
from splatcli.gaussians import Gaussians
from splatcli.native.backend import resolve_device
from splatcli.output_files import OUTPUT, free_folder, write_bytes
from splatcli.rasterizer.loss_engine import ASKED, Loss, LossEngine, asked_of
from splatcli.rasterizer.rendering import Render, render
from splatcli.render.comparison import Comparer, Rendered, own_cameras, score
from splatcli.render.images import RenderSettings
from splatcli.render.scoring import GroundTruth
from splatcli.scene.camera import Camera
from splatcli.scene.decode import Rgb
from splatcli.scene.georeference import offset_text, place_text
from splatcli.scene.read import read_scene
from splatcli.scene.scene import Scene as EngineScene
from splatcli.train.backgrounds import parse_background, training_image_background
from splatcli.train.changed_settings import changed_config
from splatcli.train.densify import STRATEGIES, Strategy, StrategyFactory, check_strategy
from splatcli.train.events import Alarmed, Evaluated, Event, Refined, RolledBack, SaveFailed, Started, Stepped, Stopped
from splatcli.train.init import resolve_init
from splatcli.train.run_scene import data_to_resume
from splatcli.train.start import check_loss_given
from splatcli.train.state import TrainState, gaussians_to_render
from splatcli.train.trainer import Trainer as EngineTrainer

_log = logging.getLogger(__name__)


#: A whole command of splat, up to the end of its clause; a setting of --set; another flag, with the value after it.
_FLAGS = re.compile(
    r"(?P<command>\bsplat [a-z]+\b[^;,:()]*)"
    r"|(?<![\w-])--set [a-z_]+\.(?P<key>\w+)="
    r"|(?<![\w-])(?P<flag>--?[a-z][a-z0-9-]*)"
    r"(?: (?P<value>\d[\w.]*|[A-Z]+|alpha|auto|cpu|none|random|raw|activated)\b)?"
)


@functools.cache
def _arguments() -> dict[str, tuple[str, str]]:
    """Return the argument of Python for each flag: alone, and with a value in place of {}."""
    found = {f"--{name}": (name, f"{name}={{}}") for name in ("device", "preset")}
    for key, flags in setting_flags().items():
        name = key.partition(".")[2]
        for flag in flags:
            alone = name if flag.metavar else f"{name}={flag.value!r}"
            found |= dict.fromkeys(flag.names, (alone, f"{name}={{}}" if flag.metavar else f"{alone} {{}}"))
    chosen = "import_options=ImportOptions(%s)"
    return found | {
        "-o": ("output", "output={}"),
        "--overwrite": ("overwrite=True", "overwrite=True {}"),
        "--strategy": ("strategy", "strategy={}"),
        "--min-opacity": ("min_opacity", "min_opacity={}"),
        "--crop": ("crop", "crop={}"),
        "--lenient": (chosen % "lenient=True",) * 2,
        "--drop-nonfinite": (chosen % "drop_nonfinite=True",) * 2,
        "--param-space": (chosen % "space=...", chosen % "space=Space({})"),
    }


def _with_arguments(text: str) -> str:
    """Return a text with arguments of Python in place of flags; those of whole commands stay."""

    def argument(match: re.Match[str]) -> str:
        if match["key"]:
            return f"{match['key']}="
        if match["command"] or match["flag"] not in _arguments():
            return match[0]
        alone, filled = _arguments()[match["flag"]]
        value = match["value"]
        return alone if value is None else filled.format(f'"{value}"' if value.islower() else value)

    return _FLAGS.sub(argument, text)


@contextmanager
def _naming_arguments() -> Iterator[None]:
    """Let errors name arguments of Python where the parts below name flags of the command line."""
    try:
        yield
    except SplatError as error:
        error.what = _with_arguments(error.what)
        error.remedy = None if error.remedy is None else _with_arguments(error.remedy)
        if error.where is not None and error.where.startswith("-"):
            name = _arguments().get(error.where, (error.where.removeprefix("--").replace("-", "_"), ""))[0]
            error.where = "path" if error.where == "-o" else name
        error.args = (str(error),)
        raise


@dataclass(slots=True, eq=False)
class Scene(EngineScene):
    """Cameras, images and points of a folder, as training reads them; its fields are those of scene.scene.Scene.

    data: the settings that it was read with.
    """

    data: DataConfig = field(default_factory=DataConfig)

    @classmethod
    @_naming_arguments()
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
        if "data.scene" in values:
            raise UsageError("the folder is named twice", where="Scene.open()", remedy="give the path alone")
        place = str(_path(path, "Scene.open()").absolute())  # it may be read again, from another folder
        return cls.read(build_config({**values, "data.scene": place}, by_flags=False).data)

    @classmethod
    def read(cls, data: DataConfig, background: Rgb | None = (0, 0, 0)) -> Scene:
        """Return the scene that ``data`` names. Raises as open().

        background: R G B in 0..255, under what is transparent in images; None keeps their alpha, for a background that
        is new each step.
        """
        found = read_scene(_path(data.scene, "Scene.read()"), data, background=background)
        return cls(**{one.name: getattr(found, one.name) for one in dataclasses.fields(EngineScene)}, data=data)

    @_naming_arguments()
    def triangulated(self, output: str | Path | None = None) -> Scene:
        """Return the scene with points that are triangulated from its images with its cameras held.

        ``splat train`` does so for a scene without points. Features and matches are found in a process of its own;
        ``splatcli.progress.listening()`` hears how far it is.
        output: the folder of the points, ``output/NAME-sfm`` by default; what was made there before for the same images
        and cameras is used. The scene is read anew, with the settings that it was read with.
        Raises SceneError where images and cameras give too few points, OutputError for the folder.
        """
        from splatcli.sfm.points_request import LEAST_POINTS, points_request
        from splatcli.sfm.run import gpu_wanted, run_sfm

        inputs, options, _ = points_request(self, self.data)
        place = None if output is None else _path(output, "output")
        made = run_sfm(
            inputs,
            options,
            place=place,
            beside=OUTPUT,
            overwrite=False,
            gpu=gpu_wanted("auto"),
            progress=progress.report,
            automatic=True,
        )
        if made.facts["points"] < LEAST_POINTS:
            raise SceneError(
                f"only {made.facts['points']} points could be triangulated, at least {LEAST_POINTS} are needed",
                where=self.root,
                remedy="check that images and cameras belong together; training begins with random points without any",
            )
        return Scene.read(self.data.model_copy(update={"points": str(made.folder)}))

    def __len__(self) -> int:
        """Return the number of views."""
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
    place: latitude, longitude and height of the input's origin, in metres with z up then; None where nobody knows.
    notes: what is worth knowing of the file, sentences.
    """

    gaussians: Gaussians
    path: Path | None = None
    origin: str = "Gaussians"
    step: int | None = None
    cameras: tuple[Camera, ...] = ()
    settings: RenderSettings = field(default_factory=RenderSettings)
    offset: tuple[float, ...] = (0.0, 0.0, 0.0)
    place: tuple[float, ...] | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.gaussians, Gaussians):
            raise _wrong(self.gaussians, "gaussians", "Model", "splatcli.Model.load(path) reads a file")

    @classmethod
    @_naming_arguments()
    def load(
        cls, path: str | Path, *, device: str | torch.device = "cpu", import_options: ImportOptions | None = None
    ) -> Model:
        """Return the model in a run folder (its newest checkpoint), a checkpoint, or a file of any format that is read.

        device: "auto" takes the GPU if there is one. import_options: how files of other programs are taken.
        Raises ModelFileError, UsageError where there is no such file, UnreadableError when the system refuses it.
        """
        path, device = _path(path, "Model.load()"), _device(device)
        with os_errors(UnreadableError, path), torch.device("cpu"):
            file = find_model(path)
            if is_own_checkpoint(file):
                return cls.of_checkpoint(load_checkpoint(file), file, device)
            imported = import_model(file)
            gaussians, notes = to_gaussians(imported, import_options or ImportOptions(), file, None)
            settings = RenderSettings(antialiased=imported.antialiased)
            return cls(gaussians.to(device), file, imported.origin, settings=settings, notes=tuple(notes))

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint, path: Path, device: str | torch.device = "cpu") -> Model:
        """Return the model of a loaded checkpoint."""
        return cls(
            gaussians_to_render(checkpoint).to(device),
            path,
            "checkpoint",
            checkpoint.step,
            tuple(checkpoint.refined_cameras()),
            RenderSettings.trained(checkpoint),
            tuple(checkpoint.dataset.offset),
            checkpoint.dataset.place,
        )

    def __len__(self) -> int:
        """Return the number of Gaussians."""
        return len(self.gaussians)

    def __repr__(self) -> str:
        where = "" if self.path is None else f" {self.path}:"
        step = "" if self.step is None else f" of step {self.step:,}"
        degree, device = self.gaussians.sh_degree, self.gaussians.device
        return f"<Model{where} {self.origin}{step}, {len(self):,} Gaussians, SH degree {degree}, {device}>"

    @_naming_arguments()
    def to(self, device: str | torch.device) -> Model:
        """Return the model with its Gaussians on ``device``; "auto" takes the GPU if there is one. Raises as load()."""
        return dataclasses.replace(self, gaussians=self.gaussians.to(_device(device)))

    @_naming_arguments()
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

        size: width and height in place of the camera's. background: R G B in 0..1, or a colour of --background.
        What is not given is as the model was trained; a run with PPISP shows the vignetting and the response of the
        camera, as splat render does. Differentiable in Gaussians that require gradients.
        """
        if not isinstance(camera, Camera):
            raise _wrong(camera, "camera", "Model.render()", "one Camera, such as scene.cameras[0]")
        two = isinstance(size, tuple | list) and len(size) == 2 and all(_is_whole(side) and side > 0 for side in size)
        if size is not None and not two:
            raise _wrong(size, "size", "Model.render()", "width and height in pixels: (640, 480)")
        if sh_degree is not None and not (_is_whole(sh_degree) and 0 <= sh_degree <= self.gaussians.sh_degree):
            raise _wrong(sh_degree, "sh_degree", "Model.render()", f"0 to {self.gaussians.sh_degree}")
        if not isinstance(antialiased, bool | None):
            raise _wrong(antialiased, "antialiased", "Model.render()", "True or False")
        behind = self.settings.background if background is None else _colour(background)
        shown = render(
            self.gaussians,
            camera if size is None else camera.resized(*size),
            sh_degree=sh_degree,
            background=torch.as_tensor(behind, dtype=torch.float32, device=self.gaussians.device),
            antialiased=self.settings.antialiased if antialiased is None else antialiased,
        )
        recolour = self.settings.recolour
        return shown if recolour is None else dataclasses.replace(shown, image=recolour(camera, shown.image))

    def compare(
        self, other: Model | EngineScene, cameras: Sequence[Camera] | None = None
    ) -> dict[str, dict[str, float]]:
        """Return the PSNR in dB and the SSIM of each view, {name: {"psnr": ..., "ssim": ...}}, as ``splat compare``.

        other: a scene, whose images the renders are compared with, without masked pixels and over the background of the
        model; or a model, rendered from its own camera of that name where it has one, over the background of this one.
        cameras: in the coordinates of this model, or of the scene; None: the held-out views of the scene (the others
        where none is held out), or the views that both models have. Views without an image of their size are left out.
        Raises UsageError for another kind of ``other``, and where no view is left.
        """
        if not isinstance(other, Model | EngineScene):
            raise _wrong(other, "other", "Model.compare()", "a Scene or a Model: Scene.open() or Model.load()")
        if cameras is not None:
            if not isinstance(cameras, Iterable):
                raise _wrong(cameras, "cameras", "Model.compare()", "a list of cameras, such as scene.cameras")
            cameras = list(cameras)
            for camera in cameras:
                if not isinstance(camera, Camera):
                    raise _wrong(camera, "one of cameras", "Model.compare()", "a Camera, such as scene.cameras[0]")
            _check_models(cameras, other.cameras)
        shift = np.subtract(self.offset, other.offset)
        mine, truth, theirs = Rendered(self.gaussians, self.settings), None, None
        if isinstance(other, Model):
            names = {camera.name for camera in other.cameras}
            shared = [camera for camera in self.cameras if camera.name in names]
            settings = dataclasses.replace(other.settings, background=self.settings.background)
            theirs = Rendered(other.gaussians, settings, own_cameras(other.cameras, shift))
        else:
            shared = [other.cameras[index] for index in other.test or other.train]
            mine = dataclasses.replace(mine, camera=own_cameras(self.cameras, -shift))
            # What is transparent in the images shows the background of the renders.
            r, g, b = (round(255 * value) for value in self.settings.background)
            if other.images.background != (r, g, b):
                other = dataclasses.replace(other, images=other.images.over((r, g, b)))
            truth = GroundTruth(other)
        comparer, side, found = Comparer(mine, theirs, truth), "a" if theirs is None else "ab", {}
        for camera in shared if cameras is None else cameras:
            images = comparer.images(camera)
            if images is not None:
                figures = score(camera, images).figures
                found[camera.name] = {"psnr": figures[f"psnr_{side}"], "ssim": figures[f"ssim_{side}"]}
        if not found:
            raise UsageError(
                "there is no view to compare",
                where="Model.compare()",
                remedy="name views of both: cameras=scene.cameras",
            )
        return found

    @_naming_arguments()
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
        Gaussians of another floating type become float32.
        Raises UsageError for an unknown format, and where no Gaussian is left; DivergedError for values that are not
        finite; OutputError when it cannot be written.
        """
        path = _path(path, "Model.export()")
        if not isinstance(format, str | None):
            raise _wrong(format, "format", "Model.export()", "its name, such as ply")
        chosen = format_to_write(path, format, by_name='format="ply"')
        assert chosen.write is not None, "format_to_write() gives formats that are written"
        if sh_degree is not None and not (_is_whole(sh_degree) and 0 <= sh_degree <= 4):
            raise UsageError(f"there is no SH degree {sh_degree!r}", where="sh_degree", remedy="0 to 4")
        if not isinstance(min_opacity, float | int | np.number | Tensor | None) or not 0 <= (min_opacity or 0) <= 1:
            raise UsageError(f"{min_opacity!r} is no opacity", where="min_opacity", remedy="0 to 1")
        if not isinstance(crop, str | None):
            raise UsageError(
                f"crop is a {type(crop).__name__}", where="Model.export()", remedy='crop="box:0,0,0,1,1,1"'
            )
        region = None if crop is None else Crop.parse(crop)
        with torch.device("cpu"):
            kept, notes = select_for_format(
                _as_stored(self.gaussians), chosen, crop=region, min_opacity=min_opacity, sh_degree=sh_degree
            )
        if not len(kept) and chosen.name != "ply":
            raise UsageError(
                "the model has no Gaussians, and only a PLY can hold none", where=path, remedy='export("scene.ply")'
            )
        comments = []
        if any(self.offset):
            comments = [f"splatcli: {offset_text(self.offset)}"]
        if self.place is not None:
            comments.append(f"splatcli: {place_text(self.place)}")
        metadata = ExportMetadata.of_cameras(self.cameras, comments, self.settings.antialiased, self.place)
        with torch.device("cpu"):
            encoded = chosen.write(kept, dataclasses.replace(metadata, title=path.stem))
        write_bytes(path, encoded.payload)
        return [*notes, *encoded.notes]


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """A run that has ended or was stopped.

    path: its folder. checkpoint: the file with its last state. step: completed steps.
    reason: "finished", "stop-at", or "stopped" by Trainer.stop().
    model: its Gaussians, on the device of the training.
    metrics: psnr, ssim, num_gaussians and step of the trainer's last evaluation; empty before it, and where no view is
        held out.
    """

    path: Path
    checkpoint: Path
    step: int
    reason: str
    model: Model
    metrics: dict[str, float]

    def history(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl: losses, evaluations and what else happened, by step."""
        metrics = self.path / METRICS
        if not metrics.exists():  # a short run without held-out views has none
            return []
        text = metrics.read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def __repr__(self) -> str:
        scores = f", PSNR {self.metrics['psnr']:.2f} dB" if self.metrics else ""
        return f"<Run {self.path}: {self.reason} after step {self.step:,}, {len(self.model):,} Gaussians{scores}>"


#: The hooks of a callback, and the events that they receive.
HOOKS: dict[type, str] = {Stepped: "on_step", Refined: "on_refine", Evaluated: "on_eval"}


class Trainer:
    """A run from Python: the engine of ``splat train`` with hooks, a loss and a strategy of one's own.

    scene: a Scene, or the path of one. output: the run folder; None takes output/<scene>, numbered if that exists.
        Without a name, run() takes the next number where another run has taken that folder since.
    overwrite: a run that is there is moved aside. device: auto, cpu, cuda or cuda:1. preset: as of ``splat train``.
    init: sfm, hull, random, the path of a model, a Model, or Gaussians.
    callbacks: objects with some of on_step(Stepped), on_refine(Refined), on_eval(Evaluated); train/events.py.
        What one raises stops the run, and is raised by run() after the state is saved.
    loss: see rasterizer/loss_engine.py; None takes the fused L1 + SSIM.
    strategy: adc, absgrad, mcmc, the name of a plug-in, an object as of train/densify/base.py, or a function that makes
        one of the run's settings, as they are once the scene is read, and the scene's extent.
    settings: any of docs/settings.md by its name, ``iterations=7_000``, or dotted, ``**{"optim.sh0_lr": 0.01}``.
        None is as not given: ``cap_max=None`` is auto, as without ``--cap-max``; ``cap_max="none"`` sets no maximum.

    Raises SceneError, and UsageError for settings that do not exist or do not fit.
    """

    @_naming_arguments()
    def __init__(
        self,
        scene: EngineScene | str | Path,
        *,
        output: str | Path | None = None,
        overwrite: bool = False,
        device: str | torch.device = "auto",
        preset: str | None = "default",
        init: str | Path | Model | Gaussians | None = None,
        callbacks: Iterable[object] = (),
        loss: Loss | None = None,
        strategy: str | Strategy | StrategyFactory | None = None,
        **settings: Any,
    ) -> None:
        values = dotted_settings(settings)
        given: Gaussians | None = None
        model = init if isinstance(init, Model) else None
        if isinstance(init, Model | Gaussians):
            given = init.gaussians if isinstance(init, Model) else init
            values["model.init"] = str(getattr(init, "path", None) or "Gaussians")
        elif init is not None:
            if not isinstance(init, str | Path):
                raise UsageError(
                    f"init is a {type(init).__name__}",
                    where="Trainer",
                    remedy="a Model, Gaussians, a path, sfm, hull or random",
                )
            values["model.init"] = str(init)
            if str(init) not in NAMED_STARTS:
                model = Model.load(init)
                given = model.gaussians
        given = None if given is None else _finite(_as_stored(given))
        if strategy is not None:
            values["strategy.name"] = strategy if isinstance(strategy, str) else _strategy_name(strategy)
        values |= self._data_settings(scene, values)
        config = build_config(values, preset=preset, by_flags=False)
        if config.data.blocks is not None:
            raise UsageError("blocks are trained by splat train", where="blocks", remedy="leave it out")
        self.scene = self._read(scene, config)
        if given is not None and model is not None and model.step is not None:  # a file of splats has no offset
            given = given.moved((np.array(model.offset) - self.scene.offset).tolist())
        start = resolve_init(config, self.scene) if given is None else config.model.init
        if start != config.model.init:  # known only after reading the scene; learning rates depend on it
            if start == RANDOM:
                name = shlex.quote(str(self.scene.root))
                _log.warning(
                    "the scene has no points, and training begins with random ones: scene.triangulated(), or splat sfm "
                    '%s --cameras %s for Scene.open(..., points=DIR), makes better ones; init="random" is silent',
                    name,
                    name,
                )
            config = build_config({**values, "model.init": start}, preset=preset, by_flags=False)
        self._prepare(config, device, callbacks, loss, strategy)
        # Absolute: the program may change its folder before and during the run.
        named = _path(output, "output") if output is not None else free_folder(self.scene.root)
        self.output = named.absolute()
        self._named = output is not None
        self._overwrite = overwrite
        self._given: Gaussians | None = given
        self._from: Path | None = None

    @classmethod
    @_naming_arguments()
    def resume(
        cls,
        path: str | Path,
        *,
        scene: EngineScene | str | Path | None = None,
        device: str | torch.device = "auto",
        callbacks: Iterable[object] = (),
        loss: Loss | None = None,
        strategy: str | Strategy | StrategyFactory | None = None,
        **settings: Any,
    ) -> Trainer:
        """Return a trainer that continues a run, bit-identical to one without a stop; as ``splat resume``.

        path: the run folder, or one of its checkpoints. scene: where it is now, if it has moved.
        loss, strategy: those of the run, if it has its own: a checkpoint holds only their names.
        settings: those to change, as iterations; here None is a value: ``cap_max=None`` sets no maximum.
        Raises as ``splat resume``, and UsageError without the run's own loss.
        """
        self = cls.__new__(cls)
        file = find_model(_path(path, "Trainer.resume()").absolute())
        folder = run_of(file)
        if folder is None or not is_own_checkpoint(file):
            raise UsageError("this is no run", where=path, remedy="name a run folder, or a checkpoint in one")
        checkpoint = load_checkpoint(file, mapped=True)
        check_loss_given(checkpoint, folder, given=loss is not None)
        values = dotted_settings(settings)
        if strategy is not None:
            values["strategy.name"] = strategy if isinstance(strategy, str) else _strategy_name(strategy)
        config, notes = changed_config(checkpoint.config, values=values)
        data, more = (config.data, []) if "data.points" in values else data_to_resume(config.data)
        to_read = config.model_copy(update={"data": data})
        self.scene = self._read(Path(checkpoint.dataset.root) if scene is None else scene, to_read)
        self._prepare(config, device, callbacks, loss, strategy, folder)
        self.output, self._from, self._given, self._overwrite, self._named = folder, file, None, False, True
        for note in [*notes, *more]:
            _log.info(note)
        return self

    def _prepare(
        self,
        config: Config,
        device: str | torch.device,
        callbacks: Iterable[object],
        loss: Loss | None,
        strategy: str | Strategy | StrategyFactory | None,
        run: Path | None = None,
    ) -> None:
        _check_default_device()
        self.config = config
        self.device = _device(device)
        if not isinstance(callbacks, Iterable):
            raise _wrong(callbacks, "callbacks", "Trainer", "a list of objects with hooks")
        self.callbacks = tuple(callbacks)
        for callback in self.callbacks:
            if not any(callable(getattr(callback, name, None)) for name in HOOKS.values()):
                raise UsageError(f"{callback!r} has no hook", where="callbacks", remedy=", ".join(HOOKS.values()))
        self._strategy = None if strategy is None or isinstance(strategy, str) else _strategy_factory(strategy)
        if self._strategy is None:
            check_strategy(config, run)
        elif config.strategy.name in STRATEGIES:
            raise UsageError(f"{config.strategy.name!r} is a strategy of splat", where="strategy", remedy="rename it")
        self._engine = None
        if loss is not None:
            _check_loss(loss)
            for name, wanted, problem in (
                ("batch_size", config.train.batch_size == 1, "takes one view a step"),
                ("offload", not config.memory.offload, "needs all Gaussians on the device"),
                ("budget", config.memory.budget is None, "takes memory that is not known beforehand"),
            ):
                if not wanted:
                    raise UsageError(f"a loss of one's own {problem}", where=name)
            self._engine = LossEngine(loss, self.device)
        self._trainer: EngineTrainer | None = None
        self._stop: str | None = None
        self._score: Evaluated | None = None
        self._busy = threading.Lock()

    @staticmethod
    def _data_settings(scene: EngineScene | str | Path, values: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of a scene that is open, or the path of one that is not."""
        if not isinstance(scene, EngineScene):
            return {"data.scene": str(_path(scene, "scene"))}
        again = [key for key in values if key.startswith("data.")]
        if again:
            raise UsageError("the scene is open already", where=again[0], remedy="give it to Scene.open()")
        data = scene.data if isinstance(scene, Scene) else DataConfig(scene=str(scene.root))
        return {f"data.{name}": value for name, value in data.model_dump().items()}

    @staticmethod
    def _read(scene: EngineScene | str | Path, config: Config) -> EngineScene:
        """Return the scene with the background that training needs."""
        wanted = training_image_background(config)
        if not isinstance(scene, EngineScene):
            return Scene.read(config.data.model_copy(update={"scene": str(_path(scene, "scene"))}), wanted)
        if scene.images.background == wanted:
            return scene
        return dataclasses.replace(scene, images=scene.images.over(wanted))  # its views and points may be the caller's

    @property
    def step(self) -> int:
        """Completed steps of this object's run; 0 before it. Raises ResourceError as ``model``."""
        return 0 if self._trainer is None else self._state_of(self._trainer).step

    @property
    def model(self) -> Model:
        """The Gaussians as they are, during a run too, for callbacks.

        Raises UsageError before the run, and ResourceError where a rollback has failed: its state is freed.
        """
        if self._trainer is None:
            raise UsageError("there are no Gaussians before run()", where="Trainer.model")
        state = self._state_of(self._trainer)
        return Model(
            state.gaussians_to_render(),
            origin="a run",
            step=state.step,
            cameras=tuple(state.refined_cameras()),
            settings=RenderSettings.of_run(state.config, state.per_view_params),
            offset=tuple(state.dataset.offset),
            place=state.dataset.place,
        )

    def _state_of(self, trainer: EngineTrainer) -> TrainState:
        """Return the state of the run. Raises ResourceError where a rollback has freed it and found no other."""
        state: TrainState | None = getattr(trainer, "state", None)
        if state is None:
            raise ResourceError(
                "the run has failed, and so has its rollback: no state is left",
                where=self.output,
                remedy="run() goes on from the last checkpoint",
            )
        return state

    def stop(self) -> None:
        """Stop the run after this step, with its state saved; for callbacks."""
        self._stop = "stopped"

    @_naming_arguments()
    def run(self, stop_at: int | None = None) -> Run:
        """Train to the end, to step ``stop_at`` or until stop(); a later call continues, also after an error.

        After a callback has raised, and after Ctrl-C, the state of that step is saved; then this raises what the
        callback raised, or KeyboardInterrupt. A second Ctrl-C raises it at once. Raises UsageError where the run is
        under way already, as in a callback; else as train/trainer.py Trainer.run().
        """
        if stop_at is not None and (not _is_whole(stop_at) or stop_at < 0):
            raise _wrong(stop_at, "stop_at", "Trainer.run()", "the number of a step")
        if not self._busy.acquire(blocking=False):
            raise UsageError("this run is under way", where="Trainer.run()", remedy="stop() ends it; call run() then")
        try:
            with torch.inference_mode(False):  # a loss of one's own needs gradients
                return self._run(stop_at)
        finally:
            self._busy.release()

    def _run(self, stop_at: int | None) -> Run:
        _check_default_device()
        self._stop = None
        stopped: Stopped | None = None
        failure: BaseException | None = None
        begun = False
        try:
            with self._open() as folder, _Interrupts() as interrupts:
                trainer = self._trainer = self._begin(folder)
                begun = True
                interrupts.listen()
                for event in trainer.run(stop_at, lambda: self._stop or interrupts.reason):
                    self.config = trainer.state.config  # a rollback changes it
                    if isinstance(event, Stepped):
                        folder.keep()
                    elif isinstance(event, Evaluated):
                        self._score = event
                    elif isinstance(event, Stopped):
                        stopped = event
                    if failure is None:
                        try:
                            self._report(event)
                        except BaseException as error:
                            failure, self._stop = error, "stopped"
        except BaseException:
            if begun:  # continue from what is left, which is nothing where the folder has been removed
                self._from = next(iter(reversed(checkpoints_of(self.output))), None)
            raise
        assert stopped is not None, "a trainer's last event is Stopped"
        self._from = stopped.path
        if failure is None and interrupts.reason is not None:
            failure = KeyboardInterrupt()
        if failure is not None:
            raise failure
        metrics: dict[str, float] = {}
        if self._score is not None:
            names = ("psnr", "ssim", "num_gaussians", "step")
            metrics = {name: getattr(self._score, name) for name in names}
        model = dataclasses.replace(self.model, path=stopped.path)
        return Run(self.output, stopped.path, stopped.step, stopped.reason, model, metrics)

    def _open(self) -> RunDir:
        """Return the run folder; of a new run without a name, the next free one if another run has taken its own."""
        if self._from is not None:
            return RunDir.open(self.output)
        if self._named:
            folder = RunDir.create(self.output, overwrite=self._overwrite)
            if folder.moved_aside is not None:
                _log.info("the run that was in %s is now %s", folder.path, folder.moved_aside)
            return folder
        places = itertools.chain([self.output], iter(lambda: free_folder(self.scene.root).absolute(), None))
        folder = RunDir.create_free(lambda: next(places))
        self.output = folder.path
        return folder

    def _begin(self, folder: RunDir) -> EngineTrainer:
        """Return the engine's trainer, of a new run or of one that continues."""
        if self._from is None:
            trainer = EngineTrainer.start(
                self.config,
                self.scene,
                run_dir=folder,
                device=self.device,
                engine=self._engine,
                init_model=self._given,
                strategy=self._strategy,
            )
        else:
            self._trainer = None  # frees its memory
            checkpoint = load_checkpoint(self._from)
            trainer = EngineTrainer.resume(
                checkpoint,
                self.scene,
                run_dir=folder,
                device=self.device,
                config=self.config,
                engine=self._engine,
                strategy=self._strategy,
            )
            folder.rewind(checkpoint.step)
        self.config = trainer.state.config
        folder.write_config(self.config)
        return trainer

    def _report(self, event: Event) -> None:
        """Call the hooks of an event, and log what needs attention."""
        if isinstance(event, Alarmed | RolledBack | SaveFailed):
            _log.warning("step %d: %s", event.step, event.text)
        elif isinstance(event, Started):
            for note in event.notes:
                _log.info(note)
        hook = HOOKS.get(type(event))
        if hook is not None:
            for callback in self.callbacks:
                called = getattr(callback, hook, None)
                if called is not None:
                    called(event)


#: Modules whose handlers of Ctrl-C cancel a task of the event loop, and do nothing while its thread is busy.
_LOOPS = ("asyncio.runners", "ipykernel.")


class _Interrupts:
    """Makes the first Ctrl-C a request to stop, and the second a KeyboardInterrupt.

    In the main thread only, and not where the program has a handler of its own. The handlers of asyncio.run() and of a
    notebook's cell with await are replaced: they leave Ctrl-C to the event loop, which waits for the run.

    reason: "SIGINT" once it has been pressed.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._before: Callable[[int, FrameType | None], Any] | int | None = None
        self._listens = False

    def __enter__(self) -> _Interrupts:
        return self

    def listen(self) -> None:
        """Take Ctrl-C from now on; before, there is nothing to save."""
        if threading.current_thread() is not threading.main_thread():
            return
        before = signal.getsignal(signal.SIGINT)
        module = getattr(getattr(before, "func", before), "__module__", None) or ""
        if before is signal.default_int_handler or module.startswith(_LOOPS):
            signal.signal(signal.SIGINT, self._pressed)
            self._before, self._listens = before, True

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        self.reason = "SIGINT"
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *_: object) -> None:
        if self._listens:
            self._listens = False
            signal.signal(signal.SIGINT, self._before)


def _check_models(cameras: Iterable[Camera], known: Iterable[Camera]) -> None:
    """Raise UsageError for a camera of another model than the known one of its name, or orthographic."""
    models = {camera.name: camera.model for camera in known}
    for camera in cameras:
        if camera.model == "ortho" or models.get(camera.name, camera.model) != camera.model:
            raise UsageError(
                f"{camera.name!r} has the model {camera.model!r}, and its image has not",
                where="Model.compare()",
                remedy="take the scene's cameras, or leave it out; renders take cameras of every model",
            )


def _wrong(value: object, name: str, where: str, remedy: str) -> UsageError:
    shown = repr(value) if isinstance(value, str | int | float | tuple | None) else ""
    if not 0 < len(shown) <= 100:
        shown = f"a {type(value).__name__}"
    return UsageError(f"{name} cannot be {shown}", where=where, remedy=remedy)


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _colour(background: Tensor | Sequence[float] | str) -> Tensor | tuple[float, float, float]:
    """Return R, G, B in 0..1, or a tensor of them as it is. Raises UsageError."""
    if isinstance(background, str):
        return parse_background(background)
    if isinstance(background, Tensor):  # its values may be on a GPU
        if background.shape == (3,):
            return background
        raise _wrong(background, "background", "Model.render()", "three numbers, R G B")
    try:
        values = [float(value) for value in background]
    except (TypeError, ValueError):
        values = []
    if len(values) != 3 or not all(0.0 <= value <= 1.0 for value in values):
        raise _wrong(background, "background", "Model.render()", "R G B from 0 to 1, a name, or '#rrggbb'")
    return values[0], values[1], values[2]


def _path(value: str | Path, where: str) -> Path:
    """Return the path, with the home folder that ``~`` names: no shell has done that."""
    if not isinstance(value, str | os.PathLike):
        raise _wrong(value, "the path", where, "a string or a pathlib.Path")
    if value == "":
        raise UsageError("the path is empty", where=where, remedy="perhaps a variable is not set; '.' is this folder")
    return Path(os.path.expanduser(value))


def _strategy_factory(strategy: object) -> StrategyFactory:
    """Return the factory of a strategy: ``strategy`` itself, or a function that returns the object that is one.

    Raises UsageError for anything else.
    """
    if isinstance(strategy, Strategy) and not isinstance(strategy, type):
        return lambda config, extent: strategy
    if not callable(strategy):
        raise _no_strategy(strategy)
    try:
        inspect.signature(strategy).bind(None, None)
    except ValueError:  # of a function of C
        pass
    except TypeError:
        name = getattr(strategy, "__name__", type(strategy).__name__)
        raise UsageError(
            f"{name} cannot be called with a run's settings and the scene's extent",
            where="strategy",
            remedy=f"an object, or strategy=lambda config, extent: {_called(name)}(...)",
        ) from None

    def make(config: Config, extent: float) -> Strategy:
        made = strategy(config, extent)
        if not isinstance(made, Strategy):
            raise _no_strategy(made)
        return made

    return make


def _no_strategy(value: object) -> UsageError:
    missing = [name for name in vars(Strategy) if not name.startswith("_") and not hasattr(value, name)]
    return UsageError(
        f"{type(value).__name__} lacks a method of a strategy: {', '.join(missing)}",
        where="strategy",
        remedy="splatcli/train/densify/base.py, class Strategy, describes them",
    )


def _strategy_name(strategy: object) -> str:
    """Return the name of a strategy of the caller's, by which its run is known: of the class, where there is one.

    Raises as _strategy_factory().
    """
    _strategy_factory(strategy)
    if isinstance(strategy, Strategy) and not isinstance(strategy, type):
        return type(strategy).__name__
    owner = getattr(strategy, "__self__", None)  # of Class.of
    return str(getattr(owner if isinstance(owner, type) else strategy, "__name__", type(strategy).__name__))


def _check_loss(loss: object) -> None:
    """Raise UsageError for a loss that cannot be called with image, target and counts."""
    if not callable(loss):
        raise UsageError(f"{loss!r} cannot be called", where="loss", remedy="loss=a function; see docs/api.md")
    try:  # a module of torch takes whatever its forward() takes
        signature = inspect.signature(getattr(loss, "forward", loss))
        asked = asked_of(loss)
    except (TypeError, ValueError):  # of a function of C
        return
    try:
        signature.bind(None, None, None, **dict.fromkeys(asked))
    except TypeError:
        name = getattr(loss, "__name__", type(loss).__name__)
        more = f"; and, after *, of any of {', '.join(ASKED)}"
        raise UsageError(
            f"{name}{signature} cannot be called with image, target and counts",
            where="loss",
            remedy=f"a function of all three, as loss=lambda image, target, counts: {_called(name)}(image, target)"
            + more,
        ) from None


def _called(name: str) -> str:
    """Return a name that stands for a function in an example."""
    return name if name.isidentifier() else "f"


def _check_default_device() -> None:
    """Raise UsageError unless torch makes tensors on the CPU by default, as training expects."""
    if (default := torch.get_default_device()).type != "cpu":
        raise UsageError(
            f"torch.set_default_device() says {str(default)!r}",
            where="Trainer",
            remedy="torch.set_default_device('cpu'); device= says where to train",
        )


def _device(device: str | torch.device) -> str:
    """Return the device that a text or an object of torch names. Raises as resolve_device()."""
    is_cpu = isinstance(device, torch.device) and device.type == "cpu"  # perhaps cpu:0
    return "cpu" if is_cpu else resolve_device(str(device))


def _as_stored(gaussians: Gaussians) -> Gaussians:
    """Return Gaussians as runs and files hold them, without gradients: on the CPU, in float32."""
    return gaussians.map(lambda tensor: tensor.detach().to("cpu", torch.float32))


def _finite(gaussians: Gaussians) -> Gaussians:
    """Return Gaussians to start from. Raises UsageError for values that are NaN or infinite."""
    for one in dataclasses.fields(Gaussians):
        wrong = int((~getattr(gaussians, one.name).isfinite()).sum())
        if wrong:
            raise UsageError(f"{one.name} has {wrong} NaN or infinite values", where="init", remedy="leave them out")
    return gaussians


def train(scene: EngineScene | str | Path, **options: Any) -> Run:
    """Train a scene to the end and return the run; the options are those of Trainer."""
    return Trainer(scene, **options).run()


def find_model(path: Path) -> Path:
    """Return the file of a model: ``path``, or what is newest in a run folder, of splat or of another program."""
    if not is_there(path):
        raise UsageError("there is no such model", where=path, remedy="name a run folder, a checkpoint or a PLY")
    if not path.is_dir():
        return path
    latest = find_latest_sound(path)
    if latest.damaged:
        raise latest.damaged[0]
    found = latest.path or newest_import(path)
    if found is None:
        raise UsageError("this folder holds no run", where=path, remedy="name a run folder, a checkpoint or a PLY")
    return found


#: Names of gsplat's, INRIA's, nerfstudio's and Brush's arguments -> ours; a value of theirs is not always one of ours.
_OTHER_NAMES = {
    **dict.fromkeys(
        ("downscale", "downscale_factor", "data_factor", "factor", "images_factor", "max_resolution"), "resolution"
    ),
    **dict.fromkeys(("num_steps", "total_steps", "max_num_iterations", "num_iters", "n"), "iterations"),
    **dict.fromkeys(("llffhold", "eval_split_every", "eval_interval", "test_interval"), "test_every"),
    **dict.fromkeys(("output_dir", "result_dir", "model_path", "out"), "output"),
    **dict.fromkeys(("max_splats", "max_gaussians", "num_gaussians"), "cap_max"),
    "lambda_dssim": "ssim_lambda",
    "lr": "means_lr, or another rate of [optim]",
}

#: What stands for options of ``splat train`` that are no settings.
_ELSEWHERE = {
    "max_time": "run() has no limit of time: splat train --max-time has one, and stop() in a callback ends a run",
    "ranks": "one process trains here: splat train --ranks and Lightning start several (docs/distributed.md)",
    "stop_at": "give it to run()",
}


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
            remedy = f"did you mean {near[0]}?" if near else "splat docs settings lists the names"
            if (flag := f"--{name.replace('_', '-')}") in _arguments():
                remedy = f"did you mean {_arguments()[flag][0]}?"
            if name in _OTHER_NAMES:
                remedy = f"did you mean {_OTHER_NAMES[name]}?"
            raise UsageError(f"there is no setting {name!r}", remedy=_ELSEWHERE.get(name, remedy))
        if name == "steps" and isinstance(value, int):
            raise UsageError(
                f"steps cannot be {value!r}",
                remedy="did you mean iterations? save.steps lists the steps after which checkpoints are kept",
            )
        found[key] = os.fspath(value) if isinstance(value, os.PathLike) else value
    return found
