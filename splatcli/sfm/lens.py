"""The lens model of each camera: chosen by held-out observations after mapping, and fisheyes mapped anew.

The mapper solves with SIMPLE_RADIAL, which few images determine. Here richer models are tried on the finished model:
one observation of a share of the tracks is withheld, everything is adjusted without them, and the model must predict
where they are. More parameters always fit the observations that they are fitted to; these they fit only if the lens
is so. The simplest model that predicts significantly better is kept.

The mapper finds images of a fisheye lens with SIMPLE_RADIAL, too, but bends the scene to fit. No adjustment of that
gets out again, so wide images are mapped anew with OPENCV_FISHEYE and compared by withheld observations.
"""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from splatcli.errors import SceneError
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.camera import MAX_ANGLE
from splatcli.scene.undistort import FieldOfView, camera_of, check_lens
from splatcli.sfm.execution import Execution
from splatcli.sfm.options import FISHEYE, is_fisheye_model

#: The models that are tried, from the fewest parameters to the most.
CANDIDATES = ("RADIAL", "OPENCV", "OPENCV_FISHEYE", "FULL_OPENCV", "THIN_PRISM_FISHEYE")
#: Tracks that one observation can be withheld of: three others still fix the point well.
_TRACK = 4
#: Share of these tracks of which one observation is withheld, and how many there are at most.
_SHARE, _MOST = 0.25, 50_000
#: Images and withheld observations of a camera below which its lens stays as it is.
_MIN_IMAGES, _MIN_WITHHELD = 5, 100
#: Gain in the mean error of withheld observations below which a model with more parameters is not worth them.
_LEAST_GAIN = 0.05
#: The same for a lens of its own for each image of a camera, which is many more parameters.
_OWN_GAIN = 0.15
#: Resamplings of the images, and the share of them that may show no gain.
_RESAMPLED, _DOUBT = 1000, 0.01
#: Pixels at which an error is cut: a point behind a camera has no place in its image.
_WORST = 20.0
#: Focal lengths relative to those before, and the ratio of the two, beyond which a lens is refused.
_FOCAL, _ASPECT = 2.0, 1.1
#: Lines from the principal point to the edge along which a lens is checked, and points on each.
_LINES, _POINTS = 64, 48
#: Degrees per pixel anywhere on a line, relative to the mean along it. A pinhole of 120 degrees has 0.4 to 1.7.
_SLOWEST, _FASTEST = 0.2, 5.0
#: Pixels by which the way from a pixel to its ray and back may miss.
_MISS = 0.5
#: Half the angle of view from corner to corner, in degrees, from which a lens may be a fisheye.
_WIDE = 50.0

Lenses = dict[int, str]


@dataclass(frozen=True, slots=True, eq=False)
class Withheld:
    """Observations that an adjustment does not see: [N] image ids, indices of 2D points there, ids of 3D points."""

    images: NDArray[np.int64]
    points2d: NDArray[np.int64]
    points3d: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """An adjustment without the withheld observations.

    errors: [N] pixels by which it misses them. cameras: id -> the lens. refused: camera id -> why it cannot be right.
    """

    errors: NDArray[np.float64]
    cameras: dict[int, pycolmap.Camera]
    refused: dict[int, str]


@dataclass(frozen=True, slots=True, eq=False)
class LensChoice:
    """A model with the lenses that its withheld observations ask for; the one that was given where none is better.

    cameras: a report of each camera with enough observations. zoomed: of those each image of which has its own lens.
    wide: cameras that fisheyes may fit so much better that they are mapped anew, see remapped_lenses().
    """

    model: pycolmap.Reconstruction
    cameras: list[dict[str, Any]] = field(default_factory=list)
    zoomed: list[dict[str, Any]] = field(default_factory=list)
    wide: set[int] = field(default_factory=set)


def choose_lenses(
    model: pycolmap.Reconstruction,
    execution: Execution,
    *,
    constant: AbstractSet[int] = frozenset(),
    each_image: bool = True,
) -> LensChoice:
    """Choose the lens model of each camera, or a lens for each of its images where these were zoomed.

    constant: cameras whose lens is exact and stays. each_image: whether lenses of their own are tried, without
    ``constant``. The model that is given stays untouched.
    """
    trials = _Trials(model, execution, constant)
    tested = [
        camera
        for camera, used in sorted(trials.images.items())
        if len(used) >= _MIN_IMAGES and np.count_nonzero(trials.rows(camera)) >= _MIN_WITHHELD
    ]
    if not tested:
        return LensChoice(model)
    progress, each_image = execution.start("lens"), each_image and not constant
    # The model as it is, the candidates, the choice, and lenses for each image.
    total = 1 + len(CANDIDATES) + 1 + each_image
    progress(0, total)
    before = trials.attempt({})
    progress(1, total)
    tried: dict[str, Trial] = {}
    for done, name in enumerate(CANDIDATES, 2):
        tried[name] = trials.attempt(dict.fromkeys(tested, name))
        progress(done, total)
    found, report = trials.choose(tested, before, tried)
    progress(2 + len(CANDIDATES), total)
    fisheyes = any(is_fisheye_model(fact["start"]) for fact in report)
    wide = set() if fisheyes else wide_cameras(found, report)
    own = trials.own_lenses(report, before) if each_image and not fisheyes and not wide else None
    progress(total, total)
    if own is None:
        return LensChoice(found, report, [], wide)
    zoomed = {fact["camera"] for fact in own[1]}
    return LensChoice(own[0], [fact for fact in report if fact["camera"] not in zoomed], own[1])


class _Trials:
    """Trials of lenses on a model, judged by observations that are withheld of the adjustments.

    constant: cameras whose lens is exact and stays. images: those of each other camera, or of ``cameras`` among them.
    """

    def __init__(
        self,
        model: pycolmap.Reconstruction,
        execution: Execution,
        constant: AbstractSet[int] = frozenset(),
        cameras: set[int] | None = None,
    ) -> None:
        self.model = model
        self.constant = constant
        self.seed = execution.random_seed
        self.num_threads = execution.num_threads
        images = _images_of(model, constant)
        self.images = images if cameras is None else {camera: images[camera] for camera in images if camera in cameras}
        self.withheld = _withhold(model, set().union(*self.images.values()), self.seed)

    def rows(self, camera: int) -> NDArray[np.bool_]:
        """Return which of the withheld observations are of ``camera``."""
        return np.isin(self.withheld.images, sorted(self.images[camera]))

    def gain(self, before: Trial, after: Trial, rows: NDArray[np.bool_] | slice = slice(None)) -> tuple[float, float]:
        """Return gain() by the withheld observations ``rows``."""
        return gain(before.errors[rows], after.errors[rows], self.withheld.images[rows], self.seed)

    def attempt(self, lenses: Lenses, model: pycolmap.Reconstruction | None = None) -> Trial:
        """Adjust a copy of the model with other lenses, without the withheld observations, and see where these fall.

        model: the same one with other cameras.
        """
        model = self.model if model is None else model
        withheld, trial = self.withheld, copy.deepcopy(model)
        for image, point in zip(withheld.images.tolist(), withheld.points2d.tolist(), strict=True):
            trial.delete_observation(image, point)
        for camera, name in lenses.items():
            _set_lens(trial.camera(camera), converted(model.camera(camera), name))
        _adjust(trial, self.constant, self.num_threads, min_track_length=3)
        errors = np.full(len(withheld.images), _WORST)
        for number in np.unique(withheld.images).tolist():
            own = withheld.images == number
            image, seen = trial.image(number), model.image(number)
            points = np.stack([trial.point3D(point).xyz for point in withheld.points3d[own].tolist()])
            there = np.stack([seen.point2D(point).xy for point in withheld.points2d[own].tolist()])
            rays = np.asarray(image.cam_from_world() * points, dtype=np.float64)
            found = np.asarray(trial.camera(image.camera_id).img_from_cam(rays), dtype=np.float64)
            off = np.linalg.norm(found - there, axis=1)
            errors[own] = np.where((rays[:, 2] > 0) & (off < _WORST), off, _WORST)
        cameras = {camera: copy.deepcopy(trial.camera(camera)) for camera in lenses}
        refused = {camera: reason for camera, lens in cameras.items() if (reason := doubt(lens, model.camera(camera)))}
        return Trial(errors, cameras, refused)

    def choose(
        self, tested: list[int], before: Trial, tried: Mapping[str, Trial]
    ) -> tuple[pycolmap.Reconstruction, list[dict[str, Any]]]:
        """Return the model with the lens models that predict clearly better, and a report of each camera of ``tested``.

        before: of the model as it is. tried: of each candidate for all of ``tested``.
        """
        report = [self.decide(camera, before, tried) for camera in tested]
        chosen = {fact["camera"]: fact["model"] for fact in report if fact["model"] != fact["start"]}
        found, last = self.model, before
        if chosen:
            one = set(chosen.values()) if chosen.keys() == set(tested) else set()
            last = tried[one.pop()] if len(one) == 1 else self.attempt(chosen)
            if len(tested) > 1:
                chosen, last = self.without_the_idle(chosen, last)
            found, reason = self.adopt(chosen, before, last)
            if found is self.model:
                chosen, last = {}, before
            for fact in report:
                if fact["camera"] not in chosen and fact["model"] != fact["start"]:
                    fact.update(model=fact["start"], kept=reason or "it gains nothing beside the other cameras' lenses")
        for fact in report:
            fact["error_px"] = float(last.errors[self.rows(fact["camera"])].mean())
        return found, report

    def decide(self, number: int, before: Trial, tried: Mapping[str, Trial]) -> dict[str, Any]:
        """Choose the lens of a camera that predicts clearly better than the simpler ones; return it with all tried."""
        camera, own = self.model.camera(number), self.rows(number)
        best, last = camera.model_name, before
        facts = []
        for name, trial in tried.items():
            share, low = self.gain(before, trial, own)
            fact: dict[str, Any] = {
                "model": name,
                "error_px": float(trial.errors[own].mean()),
                "gain": share,
                "gain_low": low,
            }
            if reason := trial.refused.get(number):
                fact["refused"] = reason
            else:
                more, least = self.gain(last, trial, own)
                if more > _LEAST_GAIN and least > 0:
                    best, last = name, trial
            facts.append(fact)
        return {
            "camera": number,
            "images": len(self.images[number]),
            "withheld": int(np.count_nonzero(own)),
            "start": camera.model_name,
            "model": best,
            "error_px_start": float(before.errors[own].mean()),
            "tried": facts,
        }

    def without_the_idle(self, chosen: Lenses, last: Trial) -> tuple[Lenses, Trial]:
        """Take back the lens of each camera whose own observations are predicted as well without it.

        Cameras share points: one whose lens was right all along seems to gain when the others' become right.
        """
        for camera in sorted(chosen):
            fewer = {other: name for other, name in chosen.items() if other != camera}
            without = self.attempt(fewer)
            share, low = self.gain(without, last, self.rows(camera))
            if camera in last.refused or not (share > _LEAST_GAIN and low > 0):
                chosen, last = fewer, without
        return chosen, last

    def adopt(self, chosen: Lenses, before: Trial, last: Trial) -> tuple[pycolmap.Reconstruction, str]:
        """Return the model adjusted with the lenses and all observations; itself, and why, where that is worse."""
        model = self.model
        _, low = self.gain(before, last)
        if not low > 0 or last.refused:
            return model, "the lenses chosen for each camera are not better together"
        found = copy.deepcopy(model)
        for camera in chosen:
            _set_lens(found.camera(camera), last.cameras[camera])
        _adjust(found, self.constant, self.num_threads, min_track_length=0)
        found.update_point_3d_errors()
        as_it_was = copy.deepcopy(model)
        as_it_was.update_point_3d_errors()
        for camera in chosen:
            if reason := doubt(found.camera(camera), model.camera(camera)):
                return model, f"adjusted with all observations, {reason}"
        if not found.compute_mean_reprojection_error() < as_it_was.compute_mean_reprojection_error():
            return model, "adjusted with all observations, the error is larger"
        return found, ""

    def own_lenses(
        self, lenses: list[dict[str, Any]], before: Trial
    ) -> tuple[pycolmap.Reconstruction, list[dict[str, Any]]] | None:
        """Return the model with a lens for each image of the cameras whose zoom changed, and facts; None without any.

        Withheld observations must be predicted clearly better than by any lens that all images of the camera share. A
        camera whose focal length EXIF tells is not tried: it has the images of one focal length.
        lenses, before: of choose().
        """
        model = self.model
        asked = [fact for fact in lenses if not model.camera(fact["camera"]).has_prior_focal_length]
        if not asked:
            return None
        after = self.attempt({}, _split(model, {fact["camera"] for fact in asked}))
        facts = []
        for fact in asked:
            rows = self.rows(fact["camera"])
            share, low = self.gain(before, after, rows)
            error = float(after.errors[rows].mean())
            shared = min(fact["error_px"], *(trial["error_px"] for trial in fact["tried"]))
            if share > _OWN_GAIN and low > _LEAST_GAIN and error < (1.0 - _OWN_GAIN) * shared:
                about = {"images": len(self.images[fact["camera"]]), "error_px_shared": shared, "error_px": error}
                facts.append({"camera": fact["camera"], **about})
        if not facts:
            return None
        found = _split(model, {fact["camera"] for fact in facts})
        _adjust(found, self.constant, self.num_threads, min_track_length=0)
        found.update_point_3d_errors()
        for fact in facts:
            own_cameras = [found.camera(found.image(image).camera_id) for image in self.images[fact["camera"]]]
            focal = [float(camera.mean_focal_length()) for camera in own_cameras]
            fact["focal_px"] = [min(focal), max(focal)]
            if any(doubt(camera, model.camera(fact["camera"])) for camera in own_cameras):
                return None
        return found, facts

    def mean_errors(self) -> dict[int, float]:
        """Return the mean error in pixels of the withheld observations of each camera that has enough of them."""
        trial, own = self.attempt({}), {camera: self.rows(camera) for camera in self.images}
        enough = {camera: rows for camera, rows in own.items() if np.count_nonzero(rows) >= _MIN_WITHHELD}
        return {camera: float(trial.errors[rows].mean()) for camera, rows in enough.items()}


def _split(model: pycolmap.Reconstruction, cameras: set[int]) -> pycolmap.Reconstruction:
    """Return a copy of a model without rigs of several cameras, in which each image of ``cameras`` has its own."""
    found = pycolmap.Reconstruction()
    above = max(model.cameras)
    for number in sorted({int(model.image(image).camera_id) for image in model.reg_image_ids()} - cameras):
        found.add_camera_with_trivial_rig(copy.deepcopy(model.camera(number)))
    for number in model.reg_image_ids():
        image = model.image(number)
        camera = int(image.camera_id)
        if camera in cameras:
            lens = copy.deepcopy(model.camera(camera))
            lens.camera_id = camera = above + int(number)
            found.add_camera_with_trivial_rig(lens)
        xy = np.array([point.xy for point in image.points2D], dtype=np.float64).reshape(-1, 2)
        copied = pycolmap.Image(name=image.name, keypoints=xy, camera_id=camera, image_id=number)
        found.add_image_with_trivial_frame(copied, image.cam_from_world())
    for number, point in model.points3D.items():
        found.add_point3D_with_id(number, copy.deepcopy(point))
    return found


def gain(
    before: NDArray[np.float64], after: NDArray[np.float64], groups: NDArray[np.int64], seed: int
) -> tuple[float, float]:
    """Return by which share the mean of paired errors falls, and its lower bound: images are resampled, not errors.

    Errors in one image have causes in common, its pose before all, so they are no independent witnesses.
    """
    _, inverse = np.unique(groups, return_inverse=True)
    sums = np.stack([np.bincount(inverse, errors) for errors in (before, after)])
    generator = np.random.default_rng(seed)
    drawn = generator.integers(0, sums.shape[1], (_RESAMPLED, sums.shape[1]))
    old, new = sums[:, drawn].sum(axis=2)
    shares = 1.0 - new / np.maximum(old, 1e-300)
    total = 1.0 - sums[1].sum() / max(float(sums[0].sum()), 1e-300)
    return float(total), float(np.quantile(shares, _DOUBT))


def _images_of(model: pycolmap.Reconstruction, constant: AbstractSet[int]) -> dict[int, set[int]]:
    """Return the registered images of each camera that may change."""
    images: dict[int, set[int]] = {}
    for number in model.reg_image_ids():
        camera = int(model.image(number).camera_id)
        if camera not in constant:
            images.setdefault(camera, set()).add(int(number))
    return images


def _withhold(model: pycolmap.Reconstruction, images: set[int], seed: int) -> Withheld:
    generator = np.random.default_rng(seed)
    rows = []
    for number in sorted(model.point3D_ids()):
        elements = model.point3D(number).track.elements
        if len(elements) >= _TRACK and generator.random() < _SHARE:
            element = elements[int(generator.integers(len(elements)))]
            if int(element.image_id) in images:
                rows.append((int(element.image_id), int(element.point2D_idx), int(number)))
    if len(rows) > _MOST:
        rows = [rows[i] for i in sorted(generator.choice(len(rows), _MOST, replace=False))]
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    return Withheld(table[:, 0], table[:, 1], table[:, 2])


def _adjust(
    model: pycolmap.Reconstruction, constant: AbstractSet[int], num_threads: int, *, min_track_length: int
) -> None:
    """Run bundle adjustment of poses, points and lenses; principal points stay in the middle, as in the mapper."""
    options = pycolmap.BundleAdjustmentOptions()
    options.print_summary = False
    options.refine_sensor_from_rig = False
    options.min_track_length = min_track_length
    options.ceres.solver_options.num_threads = num_threads
    options.ceres.solver_options.max_num_iterations = 50
    options.ceres.solver_options.function_tolerance = 1e-6
    config = pycolmap.BundleAdjustmentConfig()
    for number in model.reg_image_ids():
        config.add_image(number)
    for camera in constant & set(model.cameras):
        config.set_constant_cam_intrinsics(camera)
    config.fix_gauge(pycolmap.BundleAdjustmentGauge.TWO_CAMS_FROM_WORLD)
    pycolmap.create_default_bundle_adjuster(options, config, model).solve()


def _set_lens(camera: pycolmap.Camera, lens: pycolmap.Camera) -> None:
    camera.model = lens.model
    camera.params = list(lens.params)


def converted(camera: pycolmap.Camera, name: str) -> pycolmap.Camera:
    """Return the lens of another model that sees most alike, to begin an adjustment with."""
    focal = camera.mean_focal_length()
    lens = pycolmap.Camera.create_from_model_name(camera.camera_id, name, focal, camera.width, camera.height)
    params = np.array(lens.params, dtype=np.float64)
    params[lens.principal_point_idxs()] = camera.principal_point_x, camera.principal_point_y
    names = [part.strip() for part in lens.params_info.split(",")]
    if not is_fisheye_model(name) and not is_fisheye_model(camera.model_name):
        old = [part.strip() for part in camera.params_info.split(",")]
        for part, value in zip(old, camera.params, strict=True):
            coefficient = "k1" if part == "k" else part
            if coefficient in names:
                params[names.index(coefficient)] = value
        lens.params = params.tolist()
        return lens
    lens.params = params.tolist()
    rays, pixels = _rays_of(camera)
    fitted = [names.index(part) for part in ("f", "fx", "fy", "k", "k1", "k2") if part in names]

    def misses(values: NDArray[np.float64]) -> NDArray[np.float64]:
        params[fitted] = values
        lens.params = params.tolist()
        return np.nan_to_num((np.asarray(lens.img_from_cam(rays)) - pixels).ravel(), nan=1e6)

    scales = [focal if names[index].startswith("f") else 1.0 for index in fitted]
    misses(least_squares(misses, params[fitted], x_scale=scales, max_nfev=50).x)
    return lens


def _rays_of(camera: pycolmap.Camera) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return rays [M, 3] all over the image of a camera, and where it sees them, [M, 2]."""
    if is_fisheye_model(camera.model_name):
        x, y = np.meshgrid(*[np.linspace(-MAX_ANGLE, MAX_ANGLE, 65)] * 2)
        angle = np.hypot(x, y).ravel()
        scale = np.sinc(angle / np.pi)
        rays = np.column_stack([x.ravel() * scale, y.ravel() * scale, np.cos(angle)])[angle <= MAX_ANGLE]
        pixels = np.asarray(camera.img_from_cam(rays), dtype=np.float64)
        kept = ((pixels >= 0.0) & (pixels <= [camera.width, camera.height])).all(axis=1)
    else:
        x, y = np.meshgrid(np.linspace(0, camera.width, 17), np.linspace(0, camera.height, 17))
        pixels = np.stack([x.ravel(), y.ravel()], axis=1)
        rays = np.column_stack([np.asarray(camera.cam_from_img(pixels), dtype=np.float64), np.ones(len(pixels))])
        kept = np.isfinite(rays).all(axis=1)
    return rays[kept], pixels[kept]


def doubt(lens: pycolmap.Camera, before: pycolmap.Camera) -> str:
    """Return why a lens cannot be right, relative to the one before; nothing if it can."""
    try:
        check_lens(lens, None, "lens")
    except SceneError as problem:
        return problem.what
    old = before.mean_focal_length()
    focal = lens.focal_length_x, lens.focal_length_y
    if not old / _FOCAL <= min(focal) <= max(focal) <= old * _FOCAL:
        return f"its focal length goes from {old:.0f} to {focal[0]:.0f} pixels"
    if max(focal) > _ASPECT * min(focal):
        return f"its focal lengths, {focal[0]:.0f} and {focal[1]:.0f} pixels, differ"
    if not _is_monotone(lens):
        return "its distortion folds within the image"
    try:
        camera_of(lens, "auto", None, "lens")
    except SceneError:
        return "its distortion cannot be undone"
    return ""


def _is_monotone(lens: pycolmap.Camera) -> bool:
    """Return whether rays go out steadily from the principal point to the image's edge, each seen at one place."""
    if is_fisheye_model(lens.model_name):
        return _is_monotone_fisheye(lens)
    middle = np.array([lens.principal_point_x, lens.principal_point_y])
    angles = np.linspace(0, 2 * np.pi, _LINES, endpoint=False)
    # Corners matter most, and evenly spaced directions miss them.
    corners = np.array([(x, y) for x in (0, lens.width) for y in (0, lens.height)]) - middle
    angles = np.concatenate([angles, np.arctan2(corners[:, 1], corners[:, 0])])
    ways = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    room = np.where(ways > 0, np.array([lens.width, lens.height]) - middle, middle)
    reach = (room / np.maximum(np.abs(ways), 1e-12)).min(axis=1)
    steps = np.linspace(0, 1, _POINTS + 1)[1:]
    pixels = middle + (reach[:, None] * steps)[..., None] * ways[:, None]
    rays = np.asarray(lens.cam_from_img(pixels.reshape(-1, 2)), dtype=np.float64)
    if not np.isfinite(rays).all():
        return False
    back = np.asarray(lens.img_from_cam(np.column_stack([rays, np.ones(len(rays))])), dtype=np.float64)
    if not (np.abs(back - pixels.reshape(-1, 2)) <= _MISS).all():
        return False
    outwards = np.arctan(np.linalg.norm(rays, axis=1)).reshape(len(ways), _POINTS)
    risen = np.diff(outwards, axis=1, prepend=0.0)
    mean = outwards[:, -1:] / _POINTS
    return bool(((risen >= _SLOWEST * mean) & (risen <= _FASTEST * mean)).all())


def _is_monotone_fisheye(lens: pycolmap.Camera) -> bool:
    """Return the same up to MAX_ANGLE; COLMAP has no way back from pixels beyond 90 degrees, so rays are followed."""
    fov = FieldOfView.of(lens)
    if fov is None or (fov.limit < MAX_ANGLE and fov.widest >= fov.limit):
        return False
    turns = np.linspace(0.0, 2.0 * np.pi, _LINES, endpoint=False)
    angles = np.linspace(0.0, fov.widest, _POINTS + 1)
    across = np.sin(angles)[None, :, None] * np.stack([np.cos(turns), np.sin(turns)], axis=1)[:, None]
    ahead = np.broadcast_to(np.cos(angles)[None, :, None], (_LINES, _POINTS + 1, 1))
    rays = np.concatenate([across, ahead], axis=2).reshape(-1, 3)
    seen = np.asarray(lens.img_from_cam(rays), dtype=np.float64).reshape(_LINES, _POINTS + 1, 2)
    risen = np.linalg.norm(np.diff(seen, axis=1), axis=2)
    inside = np.asarray(((seen >= 0.0) & (seen <= [lens.width, lens.height])).all(axis=2))[:, 1:]
    mean = np.nanmean(np.where(inside, risen, np.nan), axis=1, keepdims=True)
    return bool(((risen >= mean / _FASTEST) & (risen <= mean / _SLOWEST))[inside].all())


# --- fisheyes ---------------------------------------------------------------------------------------------------------


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
            focal = camera.mean_focal_length()
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
        better = is_fisheye_model(fact["model"]) or min(tried) < (1.0 - _LEAST_GAIN) * fact["error_px"]
        if math.degrees(half) > _WIDE and better:
            found.add(int(fact["camera"]))
    return found


def remapped_lenses(
    found: pycolmap.Reconstruction, chosen: LensChoice, execution: Execution
) -> list[dict[str, Any]] | None:
    """Return the report with fisheyes where the model that was mapped with them is better; None where it is not.

    found: mapped with fisheyes in place of the wide cameras of ``chosen``.
    """
    if found.num_reg_images() < chosen.model.num_reg_images():
        return None
    errors = _Trials(found, execution, cameras=chosen.wide).mean_errors()
    report = []
    for fact in chosen.cameras:
        number = int(fact["camera"])
        if number in chosen.wide:
            error = errors.get(number)
            if error is None or not error < (1.0 - _LEAST_GAIN) * fact["error_px"]:
                return None
            lens = found.camera(number)
            if doubt(lens, lens):
                return None
            fact = {**fact, "model": FISHEYE, "error_px": error, "mapped": FISHEYE}
        report.append(fact)
    return report
