"""From views as described to a Scene: photos found and measured, sizes settled, lenses undone, split made."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from splatcli.config import DataConfig
from splatcli.errors import SceneError, UsageError
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.camera import Camera
from splatcli.scene.decode import Header, read_header
from splatcli.scene.frame import extent_of, moved, offset_for, on_one_line
from splatcli.scene.images import ImageSource, ImageStore
from splatcli.scene.locate import DIVISORS, find_photos, photos_below
from splatcli.scene.points import PointCloud, settle_points
from splatcli.scene.problems import Problems
from splatcli.scene.scene import Scene
from splatcli.scene.source import SceneSource, View
from splatcli.scene.split import split_views
from splatcli.scene.undistort import LensKey, check_lens, is_pinhole, lens_key, pinhole_of, rescaled

#: Without a resolution, wider photos are reduced to this many pixels (INRIA's rule).
MAX_WIDTH = 1600
#: A width below this is a mistaken divisor.
MIN_WIDTH = 16
#: A model that registers fewer views than this, of more photos, has failed.
MIN_VIEWS = 3


def assemble(source: SceneSource, data: DataConfig, background: tuple[int, int, int], problems: Problems) -> Scene:
    """The Scene of a described source.

    Raises SceneError for photos and cameras that do not fit together, with all that ``problems`` holds already.
    """
    check_resolution(data.resolution)
    notes = list(source.notes)
    views = sorted(source.views, key=lambda view: view.name)
    views = _distinct(views, source.file, problems)
    found, divided = find_photos(source, views, data, notes, problems)
    _check_registered(source, len(views), found.folder, notes, problems)
    views = [view for view in views if view.name in found.paths]
    offset = _offset(views, data, notes)
    points: PointCloud | None = None
    if source.points is not None:
        with problems.collect():
            points = settle_points(source.points, offset, drop_bad=data.drop_bad_points, notes=notes)
    builder = _Builder(None if divided else data.resolution, divided)
    sources = []
    for view in views:
        with problems.collect():
            source_of_view = builder.add(moved(view, offset), found.paths[view.name])
            if source_of_view is not None:
                sources.append(source_of_view)
    problems.settle()
    notes += builder.notes()
    cameras = [item.camera for item in sources]
    train, test = split_views(source, [camera.name for camera in cameras], data.test_every, notes)
    _check_places([cameras[i] for i in train], data.scene_extent, source.file, notes)
    if points is None:
        notes.append("the scene has no points: training starts from random ones")
    store = ImageStore(sources, background, data.cache_bytes)
    return Scene(source.root, source.kind, cameras, store, points, train, test, notes, offset, data.scene_extent)


def check_resolution(resolution: float | None) -> None:
    """Raises UsageError for a width that can only be a mistaken divisor."""
    if resolution is not None and resolution not in DIVISORS and round(resolution) < MIN_WIDTH:
        raise UsageError(
            f"resolution {resolution:g} would make photos {resolution:g} pixels wide",
            where="--resolution",
            remedy="1, 2, 4 and 8 divide; any other number is a width in pixels",
        )


def training_size(width: int, height: int, resolution: float | None) -> tuple[int, int]:
    """INRIA's sizes: divisors round; a width keeps the aspect with the height cut to whole pixels; never enlarges."""
    if resolution in DIVISORS:
        factor = int(resolution or 1)
        return max(1, round(width / factor)), max(1, round(height / factor))
    wanted = MAX_WIDTH if resolution is None else round(resolution)
    if wanted >= width:
        return width, height
    return wanted, max(1, height * wanted // width)


@dataclass(slots=True)
class _Builder:
    """Makes an ImageSource of each view, and keeps count of what the user should know.

    divided: the photos come from a folder of reduced copies, so that they differ from the lens's size on purpose.
    usable: whether each lens, as described, passed its check.
    pinholes: what each lens, at the photo's size, is trained as; None for one that cannot be undone.
    """

    resolution: float | None
    divided: bool
    usable: dict[LensKey, bool] = field(default_factory=dict)
    pinholes: dict[LensKey, pycolmap.Camera | None] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    models: set[str] = field(default_factory=set)

    def add(self, view: View, path: Path) -> ImageSource | None:
        """The source of one view; None when its lens was refused before. Raises SceneError."""
        header = read_header(path)
        lens = view.lens(header.width, header.height)
        if lens_key(lens) not in self.usable:
            self.usable[lens_key(lens)] = False
            check_lens(lens, view.lens.file, view.lens.label)
            self.usable[lens_key(lens)] = True
        if not self.usable[lens_key(lens)]:
            return None
        stored, orientation = self._fit(header, lens, path)
        lens = rescaled(lens, *stored)
        key = lens_key(lens)
        if key not in self.pinholes:
            self.pinholes[key] = None
            self.pinholes[key] = pinhole_of(lens, view.lens.file, view.lens.label)
        pinhole = self.pinholes[key]
        if pinhole is None:
            return None
        camera = Camera(
            name=view.name,
            width=int(pinhole.width),
            height=int(pinhole.height),
            fx=float(pinhole.focal_length_x),
            fy=float(pinhole.focal_length_y),
            cx=float(pinhole.principal_point_x),
            cy=float(pinhole.principal_point_y),
            viewmat=view.viewmat,
        )
        size = (camera.width, camera.height) if self.divided else self._target(camera)
        straight = is_pinhole(lens)
        reduced = size
        if not straight:
            self.models.add(lens.model_name)
            reduced = (
                max(1, round(stored[0] * size[0] / camera.width)),
                max(1, round(stored[1] * size[1] / camera.height)),
            )
        if reduced != stored:
            self.counts["reduced"] += 1
        self.counts["alpha"] += header.has_alpha
        self.counts["cmyk"] += header.mode == "CMYK"
        return ImageSource(path, camera.resized(*size), stored, reduced, None if straight else lens, orientation)

    def _target(self, camera: Camera) -> tuple[int, int]:
        if self.resolution is not None and self.resolution not in DIVISORS and self.resolution > camera.width:
            self.counts["narrow"] += 1
        return training_size(camera.width, camera.height, self.resolution)

    def _fit(self, header: Header, lens: pycolmap.Camera, path: Path) -> tuple[tuple[int, int], int]:
        """The stored size to use and the EXIF orientation to apply, so that photo and lens have the same aspect."""
        stored, wanted = (header.width, header.height), (int(lens.width), int(lens.height))
        if _same_aspect(stored, wanted):
            self.counts["scaled"] += stored != wanted and not self.divided
            return stored, 1
        turned = stored[::-1]
        if header.orientation >= 5 and _same_aspect(turned, wanted):
            self.counts["turned"] += 1
            self.counts["scaled"] += turned != wanted and not self.divided
            return turned, header.orientation
        raise SceneError(
            f"the photo is {stored[0]}x{stored[1]} pixels, its camera {wanted[0]}x{wanted[1]}: not the same shape",
            where=path,
            remedy="use the photos that the cameras were computed from"
            + ("; this one seems to have been turned by a quarter" if _same_aspect(turned, wanted) else ""),
        )

    def notes(self) -> list[str]:
        texts = {
            "scaled": "{} photos differ in size from their cameras; the intrinsics were scaled to the photos",
            "turned": "{} photos were turned as their EXIF orientation says, to match their cameras",
            "reduced": "{} photos are reduced while loading (Lanczos over the area of each pixel)",
            "alpha": "{} photos have transparency and are composited on the background",
            "cmyk": "{} photos are CMYK and are converted to RGB",
            "narrow": "{} photos are narrower than the resolution asked for and keep their size",
        }
        notes = [text.format(self.counts[key]) for key, text in texts.items() if self.counts[key]]
        if self.models:
            notes.append(f"lens distortion ({', '.join(sorted(self.models))}) is undone while loading")
        return notes


def _same_aspect(size: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether one size is the other scaled, but for rounding to whole pixels."""
    return abs(size[0] * other[1] - size[1] * other[0]) <= max(*size, *other)


def _distinct(views: list[View], file: Path, problems: Problems) -> list[View]:
    """``views``, which are in name order, without those that repeat the name of another."""
    if not views:
        problems.settle()
        raise SceneError("describes no views", where=file, remedy="run structure from motion again")
    kept = views[:1]
    for view in views[1:]:
        if view.name != kept[-1].name:
            kept.append(view)
            continue
        problems.add(
            SceneError(
                f"{kept[-1].label} and {view.label} name the same photo {view.name}",
                where=file,
                remedy="remove one of them",
            )
        )
    return kept


def _check_registered(source: SceneSource, registered: int, folder: Path, notes: list[str], problems: Problems) -> None:
    """COLMAP leaves out photos that it cannot place; when that is nearly all of them, the model is of no use."""
    if source.kind != "colmap" or problems.total or folder == source.root or not folder.is_dir():
        return
    photos = sum(1 for _ in photos_below(folder))
    if photos <= registered:
        return
    what = f"the COLMAP model registers {registered} of the {photos} photos in {folder.name}/"
    if registered >= MIN_VIEWS:
        notes.append(what)
        return
    remedy = "run COLMAP's mapper again, with more overlap between photos or exhaustive matching"
    problems.add(
        SceneError(f"{what}, too few to train on", where=source.file.parent, remedy=source.alternatives or remedy)
    )


def _offset(views: list[View], data: DataConfig, notes: list[str]) -> NDArray[np.float64]:
    """How far the scene is moved, and a note when it is."""
    if not views:
        return np.zeros(3)
    centers = np.stack([view.center for view in views])
    offset = offset_for(centers, data.scene_extent or extent_of(centers))
    if offset.any():
        place = ", ".join(f"{value:.15g}" for value in offset)
        notes.append(
            f"the scene lies {np.linalg.norm(offset):.2g} units from its origin, too far for float32; ({place}) is "
            "subtracted from its coordinates and stored with the run"
        )
    return offset


def _check_places(cameras: list[Camera], given_extent: float | None, file: Path, notes: list[str]) -> None:
    centers = np.stack([camera.center for camera in cameras])
    if extent_of(centers) > 0:
        if on_one_line(centers):
            notes.append("all training cameras stand on one line: what is seen from one side only may come out wrong")
        return
    what = (
        "there is one training view" if len(cameras) == 1 else f"all {len(cameras)} training views are from one point"
    )
    if given_extent is None:
        raise SceneError(
            f"{what}, so that nothing can be triangulated and the scene has no size (extent 0)",
            where=file,
            remedy="use photos from different places; or say how large the scene is: splat train --scene-extent SIZE",
        )
    notes.append(f"{what}: there is no depth to be learnt")
