"""Targets: the photos that steps are compared with, on the device that trains, without a wait for the copy."""

from __future__ import annotations

import torch
from torch import Tensor

from splatcli.scene.scene import Scene
from splatcli.train.metrics import load_target

#: Of what is free on a GPU when training starts, this part may hold photos.
SHARE_OF_GPU = 0.25


class Targets:
    """Photos as [H, W, 3] uint8 tensors on ``device``.

    On a GPU they stay there once used, up to ``budget`` bytes (None: a quarter of what is free); the others are copied
    for each step. The first ones stay and are not replaced: a pass visits every photo once, so that throwing out the
    oldest would always throw out the next one needed.
    """

    def __init__(self, scene: Scene, device: torch.device, *, budget: int | None = None) -> None:
        self.scene = scene
        self.device = device
        if budget is None and device.type == "cuda":
            budget = int(SHARE_OF_GPU * torch.cuda.mem_get_info(device)[0])
        self._room = budget or 0
        self._kept: dict[int, Tensor] = {}

    def load(self, view: int) -> Tensor:
        """The photo of ``view``. Raises SceneError when it is damaged."""
        kept = self._kept.get(view)
        if kept is not None:
            return kept
        target = to_device(load_target(self.scene, view, "cpu"), self.device)
        if self.device.type == "cuda" and target.nbytes <= self._room:
            self._room -= target.nbytes
            self._kept[view] = target
        return target


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor``, of the CPU, on ``device``; a copy to a GPU is enqueued, not waited for."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
