"""Models from a database of matches, by pycolmap's mappers; reading and changing a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from splatcli.scene._pycolmap import pycolmap
from splatcli.sfm.execution import Execution, Phase
from splatcli.sfm.features import Stored
from splatcli.sfm.options import MIN_IMAGES


def run_mapper(
    database: Path, folder: Path, total: int, execution: Execution, phase: Phase = "mapping"
) -> list[pycolmap.Reconstruction]:
    """Return the models that the matches give, those with most images first; they need not be of one piece.

    folder: where pycolmap may write. progress: hears images registered in the model that is being built, and ``total``.
    """
    progress = execution.start(phase)
    options = pycolmap.IncrementalPipelineOptions()
    options.random_seed = execution.random_seed
    options.num_threads = execution.num_threads
    options.min_model_size = MIN_IMAGES
    rigged = rig_cameras(database)
    if rigged:
        options.constant_cameras = rigged
        options.ba_refine_sensor_from_rig = False
    # Registers an image by matches along epipolar lines alone, which chance and things that repeat also give.
    options.structure_less_registration_fallback = False
    options.extract_colors = False  # pycolmap would decode the images again, and not in every format
    registered = 0

    def start() -> None:
        nonlocal registered
        registered = 2
        progress(registered, total)

    def go_on() -> None:
        nonlocal registered
        registered = min(registered + 1, total)
        progress(registered, total)

    folder.mkdir()
    models = pycolmap.incremental_mapping(
        database, folder, folder, options, initial_image_pair_callback=start, next_image_callback=go_on
    )
    return largest_first(models)


def run_global_mapper(
    database: Path, folder: Path, total: int, execution: Execution, phase: Phase = "mapping"
) -> list[pycolmap.Reconstruction]:
    """Return the models that the matches give by pycolmap's global mapper (GLOMAP), as run_mapper().

    The focal lengths in the database are calibrated, see calibrate(). progress: hears the end only.
    It adjusts the lens of every camera, so images that are faces of panoramas are not for it.
    """
    progress = execution.start(phase)
    progress(0, total)
    options = pycolmap.GlobalPipelineOptions()
    options.min_model_size = MIN_IMAGES
    for each in (options, options.mapper):
        each.random_seed, each.num_threads = execution.random_seed, execution.num_threads
    options.mapper.global_positioning.use_gpu = options.mapper.bundle_adjustment.ceres.use_gpu = execution.use_gpu
    folder.mkdir()
    models = pycolmap.global_mapping(database, folder, folder, options)
    progress(total, total)
    return largest_first(models)


def calibrate(database: Path, random_seed: int) -> None:
    """Estimate the focal lengths without EXIF from the pairs, in the database, as the global mapper needs them.

    It takes the fundamental matrices of pinholes: lenses become fisheyes after it.
    """
    calibration = pycolmap.ViewGraphCalibrationOptions()
    calibration.random_seed = random_seed
    pycolmap.calibrate_view_graph(database, calibration)


def largest_first(models: Mapping[int, pycolmap.Reconstruction]) -> list[pycolmap.Reconstruction]:
    """Return the models without those whose images larger ones have too: mappers may try the same images twice."""
    kept: list[pycolmap.Reconstruction] = []
    known: set[int] = set()
    for model in sorted(models.values(), key=lambda model: (-model.num_reg_images(), -model.num_points3D())):
        images = set(model.reg_image_ids())
        if images - known:
            kept.append(model)
            known |= images
    return kept


def own_images(models: Sequence[pycolmap.Reconstruction]) -> list[list[str]]:
    """Return the names of each model's images that none before it has, in order: models may share some."""
    known: set[str] = set()
    found = []
    for model in models:
        names = {model.image(image_id).name for image_id in model.reg_image_ids()} - known
        found.append(sorted(names))
        known |= names
    return found


def rig_cameras(database: Path) -> set[int]:
    """Return the cameras of rigs of several, the faces of panoramas, whose lens is exact."""
    with pycolmap.Database.open(database) as store:
        rigs = [rig for rig in store.read_all_rigs() if rig.num_sensors() > 1]
        return {int(sensor.id) for rig in rigs for sensor in [rig.ref_sensor_id, *rig.non_ref_sensors]}


def name_and_colour(model: pycolmap.Reconstruction, stored: Sequence[Stored]) -> None:
    """Give the images of a model their own names, and each point the mean colour of its observations."""
    of = {item.image_id: item for item in stored}
    for image_id in list(model.images):
        model.image(image_id).name = of[image_id].image.name
    for point_id, point in list(model.points3D.items()):
        seen = [of[element.image_id].colours[element.point2D_idx] for element in point.track.elements]
        model.point3D(point_id).color = np.mean(seen, axis=0).round().astype(np.uint8)


def centers_of(model: pycolmap.Reconstruction) -> dict[str, NDArray[np.float64]]:
    """Return the positions of the registered cameras by the names of their images."""
    images = (model.image(image_id) for image_id in model.reg_image_ids())
    return {image.name: np.asarray(image.projection_center()) for image in images}
