"""Rendering of views to the requested kinds of image, the ground truth and the error map among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from splatcli.errors import SceneError, UsageError
from splatcli.render.colour_maps import MASKED_COLOUR, error_map, mask_grey
from splatcli.render.images import COMPARED, LAYERS, ModelRenderer, RenderedMaps, layer_images, to_uint8
from splatcli.render.scoring import Comparison, GroundTruth
from splatcli.scene.camera import MODELS, Camera, CameraModel
from splatcli.train.events import ViewScore

KINDS = LAYERS + COMPARED

_LARGEST_SIDE = 65_536


def parse_kinds(text: str) -> tuple[str, ...]:
    """Return the kinds of image in a comma-separated list, each once. Raise UsageError."""
    kinds = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise UsageError(f"{unknown[0]!r} is not a kind of image", where="--what", remedy=f"any of {', '.join(KINDS)}")
    return kinds


def parse_size(text: str) -> tuple[int, int]:
    """Return width and height of ``640x480``. Raise UsageError."""
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise UsageError(f"{text!r} is not a size", where="--size", remedy="width x height in pixels, e.g. 1920x1080")
    width, height = (int(part) for part in parts)
    if not (0 < width <= _LARGEST_SIDE and 0 < height <= _LARGEST_SIDE):
        raise UsageError(f"{text} is not a size", where="--size", remedy=f"sides from 1 to {_LARGEST_SIDE} pixels")
    return width, height


#: A camera model, or a panorama.
RenderProjection = CameraModel | Literal["equirectangular"]


def parse_projection(text: str) -> RenderProjection:
    """Return the projection that is named. Raise UsageError."""
    known: tuple[RenderProjection, ...] = (*MODELS, "equirectangular")
    for projection in known:
        if text == projection:
            return projection
    raise UsageError(f"{text!r} is not a projection", where="--projection", remedy=" or ".join(known))


def parse_numbers(text: str, count: int, where: str, remedy: str) -> tuple[float, ...]:
    """Return ``count`` finite numbers of a comma-separated list. Raise UsageError."""
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if len(values) != count or not np.isfinite(values).all():
        raise UsageError(f"{text!r} is not a list of {count} numbers", where=where, remedy=remedy)
    return values


def parse_range(text: str) -> tuple[float, float]:
    """Return near and far of ``0.5,20``. Raise UsageError."""
    remedy = "near and far in scene units, as 0.5,20"
    near, far = parse_numbers(text, 2, "--depth-range", remedy)
    if not 0 < near < far:
        raise UsageError(f"{text} is not a depth range", where="--depth-range", remedy=remedy)
    return near, far


@dataclass(frozen=True, slots=True, eq=False)
class RenderedView:
    """A rendered view: its maps, its images by kind in the requested order, and its score if it was compared."""

    camera: Camera
    maps: RenderedMaps
    images: dict[str, NDArray[np.uint8]]
    score: ViewScore | None


class ViewRenderer:
    """Renders the views of one command.

    kinds: the kinds of image of each view; those of COMPARED need ``ground_truth``.
    near_far: the depth range of the colours, as of ``ModelRenderer.depth_range``.
    """

    def __init__(
        self,
        renderer: ModelRenderer,
        kinds: Sequence[str],
        ground_truth: GroundTruth | None,
        near_far: tuple[float, float],
    ) -> None:
        self._renderer = renderer
        self._kinds = tuple(kinds)
        self._ground_truth = ground_truth
        self._near_far = near_far

    def render_view(self, camera: Camera) -> RenderedView:
        """Render one view. Raise SceneError if it needs an image that the scene does not have."""
        maps = self._renderer.render_maps(camera)
        compared = None
        fully_masked = self._ground_truth is not None and self._ground_truth.is_fully_masked(camera.name)
        if self._ground_truth is not None and not fully_masked:
            compared = self._ground_truth.compare(camera.name, to_uint8(maps.rgb))
        made = layer_images(maps, self._kinds, self._near_far)
        if set(self._kinds) & set(COMPARED):
            if fully_masked:
                grey = np.full((camera.height, camera.width, 3), MASKED_COLOUR, np.uint8)
                made |= {"photo": grey, "error": grey}
            else:
                made |= self._compared(camera, compared)
        score = None if compared is None else compared.score
        return RenderedView(camera, maps, {kind: made[kind] for kind in self._kinds if kind in made}, score)

    @staticmethod
    def _compared(camera: Camera, one: Comparison | None) -> dict[str, NDArray[np.uint8]]:
        if one is None:
            raise SceneError(
                "this view has no image to compare with",
                where=camera.name,
                remedy="leave photo and error out of --what",
            )
        photo = mask_grey(one.truth, one.masked)
        return {"photo": photo, "error": error_map(one.truth, one.pixels, one.masked)}
