"""Mapping with fisheye lenses: what the mapper needs for them, and when it is worth a second mapping.

The mapper finds images of a fisheye lens with SIMPLE_RADIAL, too, but bends the scene to fit. No adjustment of that
gets out again, so wide images are mapped anew with OPENCV_FISHEYE and compared by withheld observations.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from splatcli.scene._pycolmap import pycolmap
from splatcli.sfm.lens import LEAST_GAIN, doubt, withheld_errors
from splatcli.sfm.options import FISHEYE, is_fisheye_model

#: Half the angle of view from corner to corner, in degrees, from which a lens may be a fisheye.
_WIDE = 50.0


def with_fisheyes(database: Path, model: str, cameras: Iterable[int] | None = None) -> Path:
    """Return a copy of a matched database, beside it, whose cameras have a fisheye model without distortion.

    model: one of COLMAP's. cameras: those that are changed; None: all. Focal lengths stay and count as known: without
    that COLMAP starts no model from images of a fisheye, and its adjustments find the right one from any.
    """
    copy = database.with_name(f"{database.stem}-fisheye.db")
    shutil.copyfile(database, copy)
    with pycolmap.Database.open(copy) as store, pycolmap.DatabaseTransaction(store):
        for camera in store.read_all_cameras():
            if cameras is not None and camera.camera_id not in cameras:
                continue
            focal = (camera.focal_length_x + camera.focal_length_y) / 2
            lens = pycolmap.Camera.create_from_model_name(camera.camera_id, model, focal, camera.width, camera.height)
            lens.has_prior_focal_length = True
            store.update_camera(lens)
    return copy


def wide_cameras(model: pycolmap.Reconstruction, lenses: Iterable[Mapping[str, Any]]) -> set[int]:
    """Return the cameras that see far to the side and whose withheld observations a fisheye predicts better.

    lenses: the report of choose_lenses() on the model.
    """
    found = set()
    for fact in lenses:
        camera = model.camera(fact["camera"])
        corner = math.hypot(camera.width, camera.height) / 2 / min(camera.focal_length_x, camera.focal_length_y)
        half = corner if is_fisheye_model(camera.model_name) else math.atan(corner)
        tried = [trial["error_px"] for trial in fact["tried"] if is_fisheye_model(trial["model"])]
        better = is_fisheye_model(fact["model"]) or min(tried) < (1.0 - LEAST_GAIN) * fact["error_px"]
        if math.degrees(half) > _WIDE and better:
            found.add(int(fact["camera"]))
    return found


def compared(
    found: pycolmap.Reconstruction,
    model: pycolmap.Reconstruction,
    lenses: list[dict[str, Any]],
    cameras: set[int],
    *,
    constant: set[int],
    seed: int,
    threads: int,
) -> list[dict[str, Any]] | None:
    """Return the report with fisheyes where the model that was mapped with them is better; None where it is not.

    found: mapped with fisheyes in place of ``cameras``. model, lenses: as choose_lenses() returned them.
    """
    if found.num_reg_images() < model.num_reg_images():
        return None
    errors = withheld_errors(found, cameras, constant=constant, seed=seed, threads=threads)
    report = []
    for fact in lenses:
        number = int(fact["camera"])
        if number in cameras:
            error = errors.get(number)
            if error is None or not error < (1.0 - LEAST_GAIN) * fact["error_px"]:
                return None
            lens = found.camera(number)
            if doubt(lens, lens):
                return None
            fact = {**fact, "model": FISHEYE, "error_px": error, "mapped": FISHEYE}
        report.append(fact)
    return report
