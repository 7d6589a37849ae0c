"""Scorer: what a run's views look like now; it draws no random number and touches nothing of the state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypedDict

import torch
from torch import Tensor

from splatcli.errors import SceneError, SplatError
from splatcli.gaussians import Gaussians
from splatcli.rasterizer import render
from splatcli.rasterizer.intersection_budget import MemoryBudget
from splatcli.rasterizer.sharded import ShardedEngine
from splatcli.scene.camera import Camera
from splatcli.scene.scene import Scene
from splatcli.train.events import Alarmed, Evaluated, Probed, ViewScore
from splatcli.train.failures import as_splat_error, is_out_of_memory
from splatcli.train.metrics import evaluation_background, load_photo, mean_scores, psnr, quantised, score_view
from splatcli.train.state import TrainState

#: Figures of a view that processes tell each other, after whether there are any.
MEASURES = 3

BACKGROUNDS = {"black": (0.0, 0.0, 0.0), "white": (1.0, 1.0, 1.0)}


class Renderer(Protocol):
    """Gives the float image [H, W, 3] of a view."""

    def __call__(
        self, gaussians: Gaussians, camera: Camera, *, sh_degree: int, background: Tensor, antialiased: bool
    ) -> Tensor: ...


def renderer_within(budget: MemoryBudget | None) -> Renderer:
    """The Renderer of the state's device; ``budget`` has the bytes for tile pairs, None takes what is free."""

    def render_image(
        gaussians: Gaussians, camera: Camera, *, sh_degree: int, background: Tensor, antialiased: bool
    ) -> Tensor:
        return render(
            gaussians, camera, sh_degree=sh_degree, background=background, antialiased=antialiased, budget=budget
        ).image

    return render_image


class _Looks(TypedDict):
    """How pictures are drawn to be scored."""

    sh_degree: int
    background: Tensor
    antialiased: bool


class Scorer:
    """Scores the held-out views, and measures the probe views, of a state on ``scene``.

    problem: why the last evaluation gave no figures; None when it did.
    """

    def __init__(self, scene: Scene, renderer: Renderer) -> None:
        self.scene = scene
        self.renderer = renderer
        self.problem: SplatError | None = None

    def evaluate(
        self, state: TrainState, should_stop: Callable[[], str | None]
    ) -> tuple[Evaluated | Alarmed | None, str | None]:
        """Scores of the held-out views; None where there are none, or with the reason for a stop in between."""
        self.problem = None
        scores = []
        cameras = [self.scene.cameras[view] for view in state.test]

        def score(i: int, image: Tensor) -> Sequence[float] | None:
            return score_view(image, self.scene, state.test[i])

        try:
            for camera, found in zip(cameras, self._measured(state, cameras, score), strict=False):
                if found is not None:
                    scores.append(ViewScore(camera.name, *found))
                if (reason := should_stop()) is not None:
                    return None, reason
        except Exception as error:
            self.problem = _bearable(error)
            text = f"the held-out views could not be scored: {self.problem.what}"
            return Alarmed(state.step, "evaluation", text), None
        if not scores:
            return None, None
        return Evaluated(state.step, *mean_scores(scores), state.count, scores), None

    def probe(self, state: TrainState) -> Probed | Alarmed:
        """Mean PSNR of the probe views: training views, evenly spaced, the same ones all through a run."""
        count = min(state.config.guard.probe_views, len(state.train))
        rows = [i * len(state.train) // count for i in range(count)]
        cameras = [state.per_view_params.camera(row, self.scene.cameras[state.train[row]]) for row in rows]
        try:
            found = self._measured(state, cameras, lambda i, image: self._psnr(state, rows[i], image))
            values = [numbers[0] for numbers in found if numbers is not None]
        except Exception as error:
            problem = _bearable(error)
            return Alarmed(state.step, "evaluation", f"the probe views could not be measured: {problem.what}")
        mean = sum(values) / len(values) if values else math.nan
        return Probed(state.step, mean, state.count)

    def _measured(
        self, state: TrainState, cameras: Sequence[Camera], measure: Callable[[int, Tensor], Sequence[float] | None]
    ) -> Iterator[Sequence[float] | None]:
        """What ``measure`` finds in the image of each camera, whose number it is told."""
        if not cameras:
            return
        gaussians = state.flushed()
        for i, camera in enumerate(cameras):
            with torch.no_grad():
                image = self.renderer(gaussians, camera, **_looks(state))
            yield measure(i, image)

    def _psnr(self, state: TrainState, row: int, image: Tensor) -> Sequence[float] | None:
        """PSNR of a training view in dB, as it is trained on; None where a mask hides all of it."""
        image = quantised(state.per_view_params.shown(row, image))
        target, hidden = load_photo(self.scene, state.train[row], image.device)
        if hidden is not None and bool(hidden.all()):
            return None
        return [psnr(image, target.to(image.dtype) / 255.0, hidden)]


class JointScorer(Scorer):
    """The same by processes of which each holds some of the Gaussians: each draws and measures some of the views.

    All get the figures, which are those of one process; every one has to ask for them.
    """

    def __init__(self, scene: Scene, renderer: Renderer, engine: ShardedEngine) -> None:
        super().__init__(scene, renderer)
        self.engine = engine

    def _measured(
        self, state: TrainState, cameras: Sequence[Camera], measure: Callable[[int, Tensor], Sequence[float] | None]
    ) -> Iterator[Sequence[float] | None]:
        if not cameras:
            return
        team, gaussians = self.engine.team, state.flushed()
        for first in range(0, len(cameras), team.size):
            group = cameras[first : first + team.size]
            image, problem = self.engine.render(gaussians, group, **_looks(state))
            found: Sequence[float] | None = None
            try:
                if image is not None:
                    found = measure(first + team.rank, image)
            except Exception as error:
                problem = error
            numbers = [0.0] * MEASURES if found is None else [1.0, *found, *[0.0] * (MEASURES - 1 - len(found))]
            told = team.tell("a score", numbers, problem)
            yield from (row[1:] if row[0] else None for row in told[: len(group)])


def scorer_for(scene: Scene, renderer: Renderer, engine: object) -> Scorer:
    """What scores a run's views: one process, or with a ShardedEngine those that the Gaussians are shared out among."""
    return JointScorer(scene, renderer, engine) if isinstance(engine, ShardedEngine) else Scorer(scene, renderer)


def _looks(state: TrainState) -> _Looks:
    config = state.config
    background = torch.tensor(BACKGROUNDS[evaluation_background(config)], device=state.gaussians.device)
    return {"sh_degree": state.sh_degree(), "background": background, "antialiased": config.train.antialiased}


def _bearable(error: Exception) -> SplatError:
    """What keeps views from being scored and need not keep a run from going on; raises ``error`` if it is more."""
    if isinstance(error, SceneError) or is_out_of_memory(error):
        return as_splat_error(error)
    raise error
