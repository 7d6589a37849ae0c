"""Targets: the photos that steps are compared with, on the device that trains, without a wait for the copy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from splatcli.rasterizer.depth_loss import DepthTarget
from splatcli.scene.camera import Camera
from splatcli.scene.depth_maps import depths_of_map
from splatcli.scene.images import Photo
from splatcli.scene.scene import Scene, known_depths

#: Of a budget, or of what is free on a GPU when training starts, this part may hold photos.
SHARE_OF_MEMORY = 0.25

#: On the CPU, photos at a smaller size may take this part of what whole ones take: halved ones have a quarter as many
#: pixels. Each is used several times before the size changes, and to reduce one takes as long as a coarse step.
SHARE_OF_PHOTOS = 0.25


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A photo on the device that trains; as scene.images.Photo, in tensors.

    depth: what is known of its depths; None where none is asked for.
    """

    pixels: Tensor
    hidden: Tensor | None
    alpha: Tensor | None = None
    depth: DepthTarget | None = None

    @property
    def nbytes(self) -> int:
        more = (self.hidden, self.alpha, self.depth)
        return self.pixels.nbytes + sum(0 if part is None else part.nbytes for part in more)

    def over(self, background: Tensor) -> Tensor:
        """[H, W, 3] uint8: the picture with a colour [3], 0 to 1, where nothing is; ``pixels`` if all of it is opaque.

        Pixels and alpha are 8-bit and the sum is rounded to nearest, so that a channel is off by less than one level
        of 255. Hidden pixels stay black.
        """
        if self.alpha is None:
            return self.pixels
        empty = (255 - self.alpha).float()
        if self.hidden is not None:
            empty.masked_fill_(self.hidden, 0.0)
        shown = torch.empty_like(self.pixels)
        for channel in range(3):  # one at a time: a third of the memory, and contiguous
            mixed = torch.addcmul(self.pixels[..., channel].float(), empty, background[channel])
            shown[..., channel] = mixed.round_().clamp_(max=255.0)
        return shown

    def reduced(self, width: int, height: int) -> Target:
        """The photo at a smaller size: each pixel the mean of those it covers, hidden where one of them is."""
        size = (height, width)

        def mean(planes: Tensor) -> Tensor:
            return torch.nn.functional.adaptive_avg_pool2d(planes.float(), size).round().to(torch.uint8)

        pixels = mean(self.pixels.permute(2, 0, 1)).permute(1, 2, 0).contiguous()
        alpha = None if self.alpha is None else mean(self.alpha[None])[0]
        depth = None if self.depth is None else self.depth.reduced((self.pixels.shape[0], self.pixels.shape[1]), size)
        if self.hidden is None:
            return Target(pixels, None, alpha, depth)
        hidden = torch.nn.functional.adaptive_max_pool2d(self.hidden[None].float(), size)[0] > 0.0
        return Target(pixels.masked_fill_(hidden[..., None], 0), hidden, alpha, depth)


def reduced(camera: Camera, target: Target, divisor: int) -> tuple[Camera, Target]:
    """A view and its photo with the sides divided."""
    if divisor == 1:
        return camera, target
    camera = camera.resized(max(1, camera.width // divisor), max(1, camera.height // divisor))
    return camera, target.reduced(camera.width, camera.height)


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
        #: Reduced ones, all by the same divisor, and how many bytes more there is room for.
        self._reduced: dict[int, tuple[Camera, Target]] = {}
        self._divisor = self._reduced_room = 0

    def load(self, view: int) -> Target:
        """The photo of ``view``. Raises SceneError when it is damaged."""
        kept = self._kept.get(view)
        if kept is not None:
            return kept
        photo = self.scene.images.photo(view)
        parts = (None if part is None else tensor_of(part) for part in (photo.pixels, photo.hidden, photo.alpha))
        target = Target(*(None if part is None else to_device(part, self.device) for part in parts))  # type: ignore[arg-type]
        if self.depth_lambda > 0.0:
            target = replace(target, depth=self._depth(view, photo))
        if self.device.type == "cuda" and target.nbytes <= self._room:
            self._room -= target.nbytes
            self._kept[view] = target
        return target

    def reduced(self, view: int, divisor: int) -> tuple[Camera, Target]:
        """The camera and the photo of ``view`` with their sides divided. Raises SceneError when it is damaged."""
        camera = self.scene.cameras[view]
        if divisor != self._divisor:  # also to whole ones: then the others go, and whole ones are fetched ahead again
            self._reduced.clear()
            self._divisor, self._reduced_room = divisor, int(SHARE_OF_PHOTOS * self.scene.images.most_bytes())
        if divisor == 1 or self.device.type == "cuda":
            return reduced(camera, self.load(view), divisor)
        made = self._reduced.get(view)
        if made is None:
            made = reduced(camera, self.load(view), divisor)
            if made[1].nbytes <= self._reduced_room:
                self._reduced_room -= made[1].nbytes
                self._reduced[view] = made
        return made

    def _depth(self, view: int, photo: Photo) -> DepthTarget:
        """Depths of the pixels that count; what is known of none has no weight."""
        known = known_depths(self.scene, view) if photo.depth is None else depths_of_map(photo.depth)
        if photo.hidden is not None:
            known = known.without(photo.hidden)
        median = float(np.median(known.depths)) if len(known.depths) else 0.0
        inverse = torch.from_numpy((1.0 / known.depths).astype(np.float32))
        pixels = torch.from_numpy(known.pixels)
        return DepthTarget(to_device(pixels, self.device), to_device(inverse, self.device), self.depth_lambda * median)

    def prefetch(self, views: Iterable[int]) -> None:
        """Starts decoding what will be loaded soon; what is loaded, and its bits, stay the same."""
        for view in views:
            if view not in self._kept and view not in self._reduced:
                self.scene.images.prefetch(view)


def photo_room(scene: Scene, device: torch.device, limit: int | None, *, reduced: bool = False) -> int:
    """Bytes that photos take at most beside a run: a part of ``limit`` bytes, by default of what is free.

    reduced: the run begins with smaller ones.
    """
    if device.type == "cpu":
        return int((1.0 + SHARE_OF_PHOTOS * reduced) * scene.images.most_bytes())
    room = int(SHARE_OF_MEMORY * (torch.cuda.mem_get_info(device)[0] if limit is None else limit))
    # Three bytes a pixel, and a mask; and alpha where it is kept; and of a known depth its place and its inverse.
    pixel = 4 + (scene.images.background is None) + 12 * scene.images.has_depths
    return min(room, sum(pixel * camera.width * camera.height for camera in scene.cameras))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor``, of the CPU, on ``device``; a copy to a GPU is enqueued, not waited for."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def tensor_of(array: NDArray[Any]) -> Tensor:
    """``array`` as a tensor, sharing its memory where torch allows it."""
    # The cache may hand out read-only arrays, which torch cannot wrap.
    return torch.from_numpy(array if array.flags.writeable else array.copy())
