"""Scorer: what a run's views look like now; it draws no random number and touches nothing of the state."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from splatcli.errors import SceneError, SplatError
from splatcli.gaussians import Gaussians
from splatcli.raster import render
from splatcli.raster.allowance import PairBudget
from splatcli.scene.camera import Camera
from splatcli.scene.scene import Scene
from splatcli.train.events import Alarmed, Evaluated, Probed
from splatcli.train.failures import as_splat_error, is_out_of_memory
from splatcli.train.metrics import evaluation_background, load_photo, mean_scores, psnr, quantised, score_views
from splatcli.train.state import TrainState

BACKGROUNDS = {"black": (0.0, 0.0, 0.0), "white": (1.0, 1.0, 1.0)}


class Renderer(Protocol):
    """Gives the float image [H, W, 3] of a view."""

    def __call__(
        self, gaussians: Gaussians, camera: Camera, *, sh_degree: int, background: Tensor, antialiased: bool
    ) -> Tensor: ...


def renderer_within(budget: PairBudget | None) -> Renderer:
    """The Renderer of the state's device; ``budget`` has the bytes for tile pairs, None takes what is free."""

    def render_image(
        gaussians: Gaussians, camera: Camera, *, sh_degree: int, background: Tensor, antialiased: bool
    ) -> Tensor:
        return render(
            gaussians, camera, sh_degree=sh_degree, background=background, antialiased=antialiased, budget=budget
        ).image

    return render_image


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
        try:
            gaussians = state.settled() if state.test else state.gaussians
            for score in score_views(lambda camera: self._draw(state, gaussians, camera), self.scene, state.test):
                scores.append(score)
                if (reason := should_stop()) is not None:
                    return None, reason
        except Exception as error:
            self.problem = _bearable(error)
            text = f"the held-out views could not be scored: {self.problem.what}"
            return Alarmed(state.step, "evaluation", text), None
        if not scores:
            return None, None
        return Evaluated(state.step, *mean_scores(scores), len(state.gaussians), scores), None

    def probe(self, state: TrainState) -> Probed | Alarmed:
        """Mean PSNR of the probe views: training views, evenly spaced, the same ones all through a run."""
        count = min(state.config.guard.probe_views, len(state.train))
        rows = [i * len(state.train) // count for i in range(count)]
        try:
            gaussians = state.settled()
            values = [value for row in rows if (value := self._psnr(state, gaussians, row)) is not None]
        except Exception as error:
            problem = _bearable(error)
            return Alarmed(state.step, "evaluation", f"the probe views could not be measured: {problem.what}")
        mean = sum(values) / len(values) if values else math.nan
        return Probed(state.step, mean, len(state.gaussians))

    def _psnr(self, state: TrainState, gaussians: Gaussians, row: int) -> float | None:
        """PSNR of a training view in dB, as it is trained on; None where a mask hides all of it."""
        view, corrections = state.train[row], state.corrections
        image = self._draw(state, gaussians, corrections.camera(row, self.scene.cameras[view]))
        image = quantised(corrections.shown(row, image))
        target, hidden = load_photo(self.scene, view, image.device)
        if hidden is not None and bool(hidden.all()):
            return None
        return psnr(image, target.to(image.dtype) / 255.0, hidden)

    @torch.no_grad()
    def _draw(self, state: TrainState, gaussians: Gaussians, camera: Camera) -> Tensor:
        config, device = state.config, gaussians.device
        return self.renderer(
            gaussians,
            camera,
            sh_degree=state.sh_degree(),
            background=torch.tensor(BACKGROUNDS[evaluation_background(config)], device=device),
            antialiased=config.train.antialiased,
        )


def _bearable(error: Exception) -> SplatError:
    """What keeps views from being scored and need not keep a run from going on; raises ``error`` if it is more."""
    if isinstance(error, SceneError) or is_out_of_memory(error):
        return as_splat_error(error)
    raise error
