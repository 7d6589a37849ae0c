"""Evaluation: scores of views, the protocol that makes figures comparable, and the Scorer of a run.

Scoring draws no random number and does not change the state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypedDict

import torch
from torch import Tensor

from splatcli.config import Config
from splatcli.errors import SceneError, SplatError, as_splat_error, is_out_of_memory
from splatcli.gaussians import Gaussians
from splatcli.progress import track
from splatcli.rasterizer import render
from splatcli.rasterizer.memory_budget import MemoryBudget
from splatcli.rasterizer.sharded import ShardedEngine
from splatcli.scene.camera import Camera
from splatcli.scene.scene import Scene
from splatcli.sizes import evenly
from splatcli.train.backgrounds import evaluation_background, evaluation_colour
from splatcli.train.events import Alarmed, Evaluated, Probed, ViewScore
from splatcli.train.image_metrics import psnr, quantised, ssim
from splatcli.train.outlier_views import ViewError, compared_divisor, view_error
from splatcli.train.state import TrainState
from splatcli.train.training_images import TrainingImage, tensor_of


def score_views(render: Callable[[Camera], Tensor], scene: Scene, indices: Iterable[int]) -> Iterator[ViewScore]:
    """Yield the scores of views ``indices`` of ``scene``, except of views that are completely masked.

    render: returns the [H, W, 3] float image of a camera, with the scene's size; it is quantised to 8 bits first.
    """
    for i in indices:
        scores = score_view(render(scene.cameras[i]), scene, i)
        if scores is not None:
            yield ViewScore(scene.cameras[i].name, *scores)


def score_view(image: Tensor, scene: Scene, index: int) -> tuple[float, float] | None:
    """Return (PSNR, SSIM) of a rendered image [H, W, 3] of view ``index``, see score_views()."""
    image = quantised(image)
    target, masked = load_image(scene, index, image.device)
    if masked is not None and bool(masked.all()):
        return None
    truth = target.to(image.dtype) / 255.0
    return psnr(image, truth, masked), ssim(image, truth, masked)


def mean_scores(views: Sequence[ViewScore]) -> tuple[float, float]:
    """Return (mean of the views' PSNR, mean of their SSIM). Raises ValueError without views."""
    if not views:
        raise ValueError("no view was scored")
    return sum(v.psnr for v in views) / len(views), sum(v.ssim for v in views) / len(views)


#: Training views that are so many dB better than the held-out ones show what no other view confirms. The captures of
#: docs/quality.md that gain by more steps are below it, but for one whose views are far apart.
OVERFIT_DB = 6.0
#: The part of a run after which a measurement of the probe views tells of its end.
_LATE = 0.8


def overfit_note(probed: Probed | None, score: Evaluated | None) -> str | None:
    """Return a sentence about a model that fits its training views far better than the held-out ones, None if not.

    probed, score: the last ones of a run.
    """
    if probed is None or score is None or probed.step < _LATE * score.step:
        return None
    if not probed.psnr - score.psnr > OVERFIT_DB:
        return None
    return (
        f"training views have a PSNR of {probed.psnr:.1f} dB and held-out ones {score.psnr:.1f} dB: the model fits "
        "details that no other image shows"
    )


#: A mean PSNR below this is one of images that show different things, in dB.
UNLIKE_DB = 12.0
#: A gain of mean PSNR in dB by fitted colours that tells of images with other exposures or white balances.
FITTED_DB = 1.0


def unlike_note(psnr: float, scene: Path) -> str | None:
    """Return a sentence about a model that does not fit ``scene``, None where a mean PSNR in dB is that of a model."""
    if psnr >= UNLIKE_DB:
        return None
    return (
        f"the renders do not resemble the images of {scene}: the model may be of another scene, or in another frame\n"
        "  help: name the scene that it was trained on, or bring it into the frame: splat edit MODEL --align-to RUN"
    )


def load_image(scene: Scene, index: int, device: torch.device | str) -> tuple[Tensor, Tensor | None]:
    """Return the image of view ``index`` on ``device``, [H, W, 3] uint8, and its masked pixels, [H, W] bool or None.

    With a random training background it is composited over black, as renders are that are scored.
    """
    loaded = scene.images.image(index)
    pixels = tensor_of(loaded.pixels).to(device)
    return pixels, None if loaded.masked is None else tensor_of(loaded.masked).to(device)


def protocol(config: Config, scene: Scene, indices: Sequence[int]) -> dict[str, object]:
    """Return how figures were obtained. Figures are comparable only if their protocols are equal."""
    return {
        "images": config.data.images or "the layout's own folder",
        "downscale": "none" if config.data.resolution == 1 else "resized on load, unless the folder holds that size",
        "resolution": config.data.resolution,
        "sizes": sorted({f"{scene.cameras[i].width}x{scene.cameras[i].height}" for i in indices}),
        "split": _split(config, scene),
        "views": len(indices),
        "quantisation": "renders are rounded to 8 bits",
        "background": evaluation_background(config),
        "masks": _masks(scene),
        "psnr": "mean of the views' values; peak 1",
        "ssim": {"taps": 11, "sigma": 1.5, "padding": "zeros, same size", "channels": "RGB mean"},
    }


def _masks(scene: Scene) -> str:
    if scene.images.masked:
        return "masked pixels do not count"
    return "masked pixels show the background in images" if scene.images.has_masks else "none"


def _split(config: Config, scene: Scene) -> str:
    if not scene.test:
        return "nothing is held out"
    if not follows_test_every(config, scene):
        return "the scene's own test views"
    return f"of the views in name order, those whose index {config.data.test_every} divides are held out"


def follows_test_every(config: Config, scene: Scene) -> bool:
    """Return whether ``data.test_every`` chose the held-out views, and not the scene's own lists."""
    every = config.data.test_every
    return scene.kind != "blender" and every > 0 and list(scene.test) == list(range(0, len(scene.cameras), every))


#: Figures of a view that processes exchange, at most.
MEASURES = len(ViewError._fields)


class Renderer(Protocol):
    """Returns the float image [H, W, 3] of a view."""

    def __call__(self, gaussians: Gaussians, camera: Camera, *, background: Tensor, antialiased: bool) -> Tensor: ...


def make_renderer(budget: MemoryBudget | None) -> Renderer:
    """Return the Renderer of the state's device. budget: bytes for tile intersections; None takes the free memory."""

    def render_image(gaussians: Gaussians, camera: Camera, *, background: Tensor, antialiased: bool) -> Tensor:
        return render(gaussians, camera, background=background, antialiased=antialiased, budget=budget).image

    return render_image


class _RenderSettings(TypedDict):
    """Settings of renders that are scored."""

    background: Tensor
    antialiased: bool


class Scorer:
    """Scores the held-out views and the probe views with a state on ``scene``.

    problem: why the last evaluation has no figures; None when it has.
    """

    def __init__(self, scene: Scene, renderer: Renderer) -> None:
        self.scene = scene
        self.renderer = renderer
        self.problem: SplatError | None = None

    def evaluate(
        self, state: TrainState, should_stop: Callable[[], str | None]
    ) -> tuple[Evaluated | Alarmed | None, str | None]:
        """Return (scores of the held-out views, None), or (None, the reason for a stop in between)."""
        self.problem = None
        scores = []
        cameras = [self.scene.cameras[view] for view in state.test]

        def score(i: int, image: Tensor) -> Sequence[float] | None:
            image = state.per_view_params.recolour_unseen(cameras[i], image)
            return score_view(image, self.scene, state.test[i])

        try:
            measured = track(self._measure(state, cameras, score), "test views", len(cameras))
            for figures, camera in zip(measured, cameras, strict=False):
                if figures is not None:
                    scores.append(ViewScore(camera.name, *figures))
                if (reason := should_stop()) is not None:
                    return None, reason
        except Exception as error:
            self.problem = _as_scoring_problem(error)
            text = f"the held-out views could not be scored: {self.problem.what}"
            return Alarmed(state.step, "evaluation", text), None
        if not scores:
            return None, None
        return Evaluated(state.step, *mean_scores(scores), state.count, scores), None

    def probe(self, state: TrainState) -> Probed | Alarmed:
        """Return the mean PSNR of the probe views: evenly spaced training views, the same ones throughout a run."""
        rows = evenly(range(len(state.train)), state.config.guard.probe_views)
        cameras = [state.per_view_params.camera(row, self.scene.cameras[state.train[row]]) for row in rows]
        try:
            measured = self._measure(state, cameras, lambda i, image: self._psnr(state, rows[i], image))
            values = [figures[0] for figures in measured if figures is not None]
        except Exception as error:
            problem = _as_scoring_problem(error)
            return Alarmed(state.step, "evaluation", f"the probe views could not be measured: {problem.what}")
        mean = sum(values) / len(values) if values else math.nan
        return Probed(state.step, mean, state.count)

    def view_errors(self, state: TrainState) -> dict[int, ViewError] | Alarmed:
        """Return the view_error() of the training views by row; of those that are masked as a whole there is none."""
        cameras = [state.per_view_params.camera(row, self.scene.cameras[view]) for row, view in enumerate(state.train)]
        cameras = [camera.downscaled(compared_divisor(camera.width, camera.height)) for camera in cameras]
        try:
            measured = self._measure(state, cameras, lambda row, image: self._view_error(state, row, image))
            return {row: ViewError(*figures) for row, figures in enumerate(measured) if figures is not None}
        except Exception as error:
            problem = _as_scoring_problem(error)
            return Alarmed(state.step, "evaluation", f"the training views could not be compared: {problem.what}")

    def _measure(
        self, state: TrainState, cameras: Sequence[Camera], measure: Callable[[int, Tensor], Sequence[float] | None]
    ) -> Iterator[Sequence[float] | None]:
        """Yield ``measure(i, image)`` of the image of each camera i."""
        if not cameras:
            return
        gaussians = state.gaussians_to_render()
        for i, camera in enumerate(cameras):
            with torch.no_grad():
                image = self.renderer(gaussians, camera, **_render_settings(state))
            yield measure(i, image)

    def _view_error(self, state: TrainState, row: int, image: Tensor) -> Sequence[float] | None:
        """Return the view_error() of a training view whose ``image`` may be a reduced one."""
        for view in state.train[row + 1 : row + 2]:
            self.scene.images.prefetch(view)
        target = TrainingImage(*load_image(self.scene, state.train[row], image.device))
        height, width, _ = target.pixels.shape
        target = target.reduced(compared_divisor(width, height))
        return view_error(state.per_view_params.recolour(row, image), target.pixels / 255.0, target.masked)

    def _psnr(self, state: TrainState, row: int, image: Tensor) -> Sequence[float] | None:
        """Return the PSNR of a training view in dB, with its trained parameters; None where all of it is masked."""
        image = quantised(state.per_view_params.recolour(row, image))
        target, masked = load_image(self.scene, state.train[row], image.device)
        if masked is not None and bool(masked.all()):
            return None
        return [psnr(image, target.to(image.dtype) / 255.0, masked)]


class ShardedScorer(Scorer):
    """The same by processes that hold shards: each renders and scores some of the views.

    All receive the figures, which are those of one process; every process has to call the methods.
    """

    def __init__(self, scene: Scene, renderer: Renderer, engine: ShardedEngine) -> None:
        super().__init__(scene, renderer)
        self.engine = engine

    def _measure(
        self, state: TrainState, cameras: Sequence[Camera], measure: Callable[[int, Tensor], Sequence[float] | None]
    ) -> Iterator[Sequence[float] | None]:
        if not cameras:
            return
        group, gaussians = self.engine.group, state.gaussians_to_render()
        for first in range(0, len(cameras), group.size):
            batch = cameras[first : first + group.size]
            image, problem = self.engine.render(gaussians, batch, **_render_settings(state))
            found: Sequence[float] | None = None
            try:
                if image is not None:
                    found = measure(first + group.rank, image)
            except Exception as error:
                problem = error
            figures = [] if found is None else [*found]
            numbers = [float(len(figures)), *figures, *[0.0] * (MEASURES - len(figures))]
            results = group.all_gather_scalars("a score", numbers, problem)
            yield from (row[1 : 1 + int(row[0])] if row[0] else None for row in results[: len(batch)])


def _render_settings(state: TrainState) -> _RenderSettings:
    config = state.config
    colour = evaluation_colour(config)
    background = torch.tensor(colour, dtype=torch.float32, device=state.gaussians.device)
    return {"background": background, "antialiased": config.train.antialiased}


def _as_scoring_problem(error: Exception) -> SplatError:
    """Return ``error`` for users if training can continue without the scores; raise it if not."""
    if isinstance(error, SceneError) or is_out_of_memory(error):
        return as_splat_error(error)
    raise error
