"""Incremental mapping: from matches to cameras and points, bundle adjusted; the largest model wins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from splatcli.scene._pycolmap import pycolmap
from splatcli.sfm.options import MIN_PHOTOS


def solve(
    database: Path, folder: Path, *, seed: int, threads: int, total: int, progress: Callable[[int, int], None]
) -> list[pycolmap.Reconstruction]:
    """The models that the matches give, those with most photos first; they need not be of one piece.

    folder: where pycolmap may write. progress: hears photos placed in the model that is being built, and ``total``.
    """
    options = pycolmap.IncrementalPipelineOptions()
    options.random_seed = seed
    options.num_threads = threads
    options.min_model_size = MIN_PHOTOS
    options.extract_colors = False  # pycolmap would decode the photos again, and not in every format
    placed = 0

    def start() -> None:
        nonlocal placed
        placed = 2
        progress(placed, total)

    def go_on() -> None:
        nonlocal placed
        placed = min(placed + 1, total)
        progress(placed, total)

    folder.mkdir()
    models = pycolmap.incremental_mapping(
        database, folder, folder, options, initial_image_pair_callback=start, next_image_callback=go_on
    )
    return sorted(models.values(), key=lambda model: (-model.num_reg_images(), -model.num_points3D()))


def finish(model: pycolmap.Reconstruction, names: Mapping[int, str], colours: Mapping[int, NDArray[np.uint8]]) -> None:
    """Gives images their names, and each point the mean colour of its observations.

    names: image id -> path of the photo. colours: image id -> [N, 3] of its features.
    """
    for number in list(model.images):
        model.image(number).name = names[number]
    for number, point in list(model.points3D.items()):
        seen = [colours[element.image_id][element.point2D_idx] for element in point.track.elements]
        model.point3D(number).color = np.mean(seen, axis=0).round().astype(np.uint8)
