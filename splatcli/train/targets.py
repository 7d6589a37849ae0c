"""Targets: the photos that steps are compared with, on the device that trains, without a wait for the copy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from splatcli.raster.depth import DepthTarget
from splatcli.scene.depths import known_depths
from splatcli.scene.scene import Scene
from splatcli.train.metrics import load_photo

#: Of a budget, or of what is free on a GPU when training starts, this part may hold photos.
SHARE_OF_MEMORY = 0.25


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A photo: pixels [H, W, 3] uint8, black where hidden; hidden [H, W] bool, or None where all of it counts.

    depth: what is known of its depths; None where none is asked for.
    """

    pixels: Tensor
    hidden: Tensor | None
    depth: DepthTarget | None = None

    @property
    def nbytes(self) -> int:
        parts = (self.pixels, self.hidden, self.depth)
        return sum(part.nbytes for part in parts if part is not None)


class Targets:
    """Photos on ``device``.

    On a GPU they stay there once used, in a quarter of ``limit`` bytes (None: of what is free); the others are copied
    for each step. The first ones stay and are not replaced: a pass visits every photo once, so that throwing out the
    oldest would always throw out the next one needed.

    depth_lambda: weight of the depth term of the loss; 0 asks for no depths.
    """

    def __init__(
        self, scene: Scene, device: torch.device, *, limit: int | None = None, depth_lambda: float = 0.0
    ) -> None:
        self.scene = scene
        self.depth_lambda = depth_lambda
        self.device = device
        self._room = photo_room(scene, device, limit) if device.type == "cuda" else 0
        self._kept: dict[int, Target] = {}

    def load(self, view: int) -> Target:
        """The photo of ``view``. Raises SceneError when it is damaged."""
        kept = self._kept.get(view)
        if kept is not None:
            return kept
        pixels, hidden = load_photo(self.scene, view, "cpu")
        target = Target(
            to_device(pixels, self.device),
            None if hidden is None else to_device(hidden, self.device),
            self._depth(view, hidden) if self.depth_lambda > 0.0 else None,
        )
        if self.device.type == "cuda" and target.nbytes <= self._room:
            self._room -= target.nbytes
            self._kept[view] = target
        return target

    def _depth(self, view: int, hidden: Tensor | None) -> DepthTarget:
        """Depths of the pixels that count; what is known of none has no weight."""
        known = known_depths(self.scene, view)
        if hidden is not None:
            known = known.without(hidden.numpy())
        median = float(np.median(known.depths)) if len(known.depths) else 0.0
        inverse = torch.from_numpy((1.0 / known.depths).astype(np.float32))
        pixels = torch.from_numpy(known.pixels)
        return DepthTarget(to_device(pixels, self.device), to_device(inverse, self.device), self.depth_lambda * median)

    def prefetch(self, views: Iterable[int]) -> None:
        """Starts decoding what will be loaded soon; what is loaded, and its bits, stay the same."""
        for view in views:
            if view not in self._kept:
                self.scene.images.prefetch(view)


def photo_room(scene: Scene, device: torch.device, limit: int | None) -> int:
    """Bytes that photos take at most beside a run: a part of ``limit`` bytes, by default of what is free."""
    if device.type == "cpu":
        return scene.images.most_bytes(None if limit is None else int(SHARE_OF_MEMORY * limit))
    room = int(SHARE_OF_MEMORY * (torch.cuda.mem_get_info(device)[0] if limit is None else limit))
    # Three bytes a pixel, and a mask.
    return min(room, sum(4 * camera.width * camera.height for camera in scene.cameras))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor``, of the CPU, on ``device``; a copy to a GPU is enqueued, not waited for."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
