"""Capacity: how many Gaussians the photos of a scene can tell apart; what ``cap_max = "auto"`` stands for."""

from __future__ import annotations

import math

from splatcli.config import Config, resolve
from splatcli.scene.scene import Scene

#: Gaussians for each pixel of a photo: more brought nothing where it was tried (benchmarks/README.md).
PER_PIXEL = 0.5

#: So many views see about one side of a scene. More show more of it, each overlapping with the others: by the root.
VIEWS = 40


def auto_cap(scene: Scene, start: int) -> int:
    """The most Gaussians of a run on ``scene``, rounded to two digits; at least the ``start`` that it begins with."""
    cameras = [scene.cameras[i] for i in scene.train]
    pixels = sum(camera.width * camera.height for camera in cameras) / len(cameras)
    cap = PER_PIXEL * pixels * math.sqrt(max(1.0, len(cameras) / VIEWS))
    grain: int = 10 ** max(0, int(math.log10(max(1.0, cap))) - 1)
    return max(start, grain, grain * math.floor(cap / grain + 0.5))


def resolve_cap(config: Config, scene: Scene, start: int) -> tuple[Config, list[str]]:
    """Return the settings with a number in the place of "auto", and a note about it for the user."""
    if config.strategy.cap_max != "auto":
        return config, []
    cap = auto_cap(scene, start)
    note = f"growth stops at {cap:,} Gaussians, as many as the photos can tell apart"
    return resolve(config, auto_cap=cap), [note]
