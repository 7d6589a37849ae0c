"""TrainingImages: the images that steps are compared with, on the training device, without a wait for the copy."""

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
from splatcli.scene.images import LoadedImage
from splatcli.scene.scene import Scene, known_depths

#: Training images may take this part of a budget, or of the free memory of a GPU when training starts.
IMAGE_MEMORY_SHARE = 0.25

#: On the CPU, reduced images may take this part of the bytes of full-size ones: halved ones have a quarter as many
#: pixels. Each is used several times before the size changes, and reducing one takes as long as a step on it.
REDUCED_IMAGE_SHARE = 0.25


@dataclass(frozen=True, slots=True, eq=False)
class TrainingImage:
    """A training image on the training device; as scene.images.LoadedImage, in tensors.

    depth: its known depths; None without depth supervision.
    opaque: whether the image file has no transparency, not even under a background.
    """

    pixels: Tensor
    masked: Tensor | None
    alpha: Tensor | None = None
    depth: DepthTarget | None = None
    opaque: bool = True

    @property
    def nbytes(self) -> int:
        more = (self.masked, self.alpha, self.depth)
        return self.pixels.nbytes + sum(0 if part is None else part.nbytes for part in more)

    def over(self, background: Tensor) -> Tensor:
        """Return [H, W, 3] uint8, the image composited over a colour [3] in 0..1; ``pixels`` if it is opaque.

        Pixels and alpha are 8-bit and the sum is rounded to nearest, so that a channel is off by less than one level
        of 255. Masked pixels stay black.
        """
        if self.alpha is None:
            return self.pixels
        empty = (255 - self.alpha).float()
        if self.masked is not None:
            empty.masked_fill_(self.masked, 0.0)
        composited = torch.empty_like(self.pixels)
        for channel in range(3):  # one at a time: a third of the memory, and contiguous
            mixed = torch.addcmul(self.pixels[..., channel].float(), empty, background[channel])
            composited[..., channel] = mixed.round_().clamp_(max=255.0)
        return composited

    def reduced(self, divisor: int) -> TrainingImage:
        """Return the image of Camera.downscaled(): each pixel is the mean of those in it, masked where one of them is.

        No pixel counts in two, and none in part: what is between them stays where it is, and as sharp as it is.
        """
        if divisor == 1:
            return self
        height, width, _ = self.pixels.shape
        step = min(divisor, height), min(divisor, width)

        def mean(planes: Tensor) -> Tensor:
            return torch.nn.functional.avg_pool2d(planes.float(), step).round().to(torch.uint8)

        pixels = mean(self.pixels.permute(2, 0, 1)).permute(1, 2, 0).contiguous()
        alpha = None if self.alpha is None else mean(self.alpha[None])[0]
        depth = None if self.depth is None else self.depth.reduced((height, width), step)
        if self.masked is None:
            return TrainingImage(pixels, None, alpha, depth, self.opaque)
        masked = torch.nn.functional.max_pool2d(self.masked[None].float(), step)[0] > 0.0
        return TrainingImage(pixels.masked_fill_(masked[..., None], 0), masked, alpha, depth, self.opaque)


def reduced(camera: Camera, image: TrainingImage, divisor: int) -> tuple[Camera, TrainingImage]:
    """Return a view and its image with their sides divided."""
    return camera.downscaled(divisor), image.reduced(divisor)


class TrainingImages:
    """The training images on ``device``.

    On a GPU they stay once used, in a quarter of ``limit`` bytes (None: of the free memory); the others are copied for
    each step. The first ones stay: a pass visits every image once, so that evicting the oldest would always evict the
    next one needed.

    depth_lambda: weight of the depth term of the loss; 0 loads no depths.
    """

    def __init__(
        self, scene: Scene, device: torch.device, *, limit: int | None = None, depth_lambda: float = 0.0
    ) -> None:
        self.scene = scene
        self.depth_lambda = depth_lambda
        self.device = device
        self._bytes_left = training_image_bytes(scene, device, limit) if device.type == "cuda" else 0
        self._on_device: dict[int, TrainingImage] = {}
        #: Reduced images, all by the same divisor, and the bytes that more of them may take.
        self._reduced: dict[int, tuple[Camera, TrainingImage]] = {}
        self._medians: dict[int, float] = {}  # of the known depths of views
        self._divisor = self._reduced_bytes_left = 0

    def load(self, view: int) -> TrainingImage:
        """Return the full-size image of ``view``. Raises SceneError when it is damaged."""
        cached = self._on_device.get(view)
        if cached is not None:
            return cached
        loaded = self.scene.images.image(view)
        parts = (None if part is None else tensor_of(part) for part in (loaded.pixels, loaded.masked, loaded.alpha))
        image = TrainingImage(*(None if part is None else to_device(part, self.device) for part in parts))  # type: ignore[arg-type]
        image = replace(image, opaque=loaded.opaque)
        if self.depth_lambda > 0.0:
            image = replace(image, depth=self._depth(view, loaded))
        if self.device.type == "cuda" and image.nbytes <= self._bytes_left:
            self._bytes_left -= image.nbytes
            self._on_device[view] = image
        return image

    def reduced(self, view: int, divisor: int) -> tuple[Camera, TrainingImage]:
        """Return camera and image of ``view`` with their sides divided. Raises SceneError when it is damaged."""
        camera = self.scene.cameras[view]
        if divisor != self._divisor:  # also back to full size: reduced images are freed then
            self._reduced.clear()
            self._divisor, self._reduced_bytes_left = divisor, int(REDUCED_IMAGE_SHARE * self.scene.images.max_bytes())
        if divisor == 1 or self.device.type == "cuda":
            return reduced(camera, self.load(view), divisor)
        cached = self._reduced.get(view)
        if cached is None:
            cached = reduced(camera, self.load(view), divisor)
            if cached[1].nbytes <= self._reduced_bytes_left:
                self._reduced_bytes_left -= cached[1].nbytes
                self._reduced[view] = cached
        return cached

    def _depth(self, view: int, loaded: LoadedImage) -> DepthTarget:
        """Return the known depths of the pixels that are not masked; without any, the weight is 0."""
        known = known_depths(self.scene, view) if loaded.depth is None else depths_of_map(loaded.depth)
        if loaded.masked is not None:
            known = known.without(loaded.masked)
        median = self._medians.get(view)
        if median is None:
            median = self._medians[view] = float(np.median(known.depths)) if len(known.depths) else 0.0
        inverse = torch.from_numpy((1.0 / known.depths).astype(np.float32))
        pixels = torch.from_numpy(known.pixels)
        return DepthTarget(to_device(pixels, self.device), to_device(inverse, self.device), self.depth_lambda * median)

    def prefetch(self, views: Iterable[int]) -> None:
        """Start decoding images that will be loaded soon; this changes no bit of them."""
        for view in views:
            if view not in self._on_device and view not in self._reduced:
                self.scene.images.prefetch(view)


def training_image_bytes(scene: Scene, device: torch.device, limit: int | None, *, reduced: bool = False) -> int:
    """Return the bytes that training images take at most: a part of ``limit`` bytes, by default of the free memory.

    reduced: the run starts with reduced images.
    """
    if device.type == "cpu":
        return int((1.0 + REDUCED_IMAGE_SHARE * reduced) * scene.images.max_bytes())
    room = int(IMAGE_MEMORY_SHARE * (torch.cuda.mem_get_info(device)[0] if limit is None else limit))
    # Three bytes a pixel and its mask; alpha where it is kept; of a known depth its pixel and its inverse.
    pixel = 4 + (scene.images.background is None) + 12 * scene.images.has_depths
    return min(room, sum(pixel * camera.width * camera.height for camera in scene.cameras))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return ``tensor``, which is on the CPU, on ``device``; a copy to a GPU is enqueued and not waited for."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def tensor_of(array: NDArray[Any]) -> Tensor:
    """Return ``array`` as a tensor that shares its memory where torch allows it."""
    # The cache may hand out read-only arrays, which torch cannot wrap.
    return torch.from_numpy(array if array.flags.writeable else array.copy())
