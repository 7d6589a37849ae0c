"""From views as described to a Scene: photos found and measured, sizes settled, lenses undone, split made."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from splatcli.config import DataConfig
from splatcli.errors import SceneError, UsageError
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.camera import Camera
from splatcli.scene.decode import Header, read_header
from splatcli.scene.images import ImageSource, ImageStore
from splatcli.scene.locate import Found, choose_folder, doubtful_error, find_images, missing_error
from splatcli.scene.problems import Problems
from splatcli.scene.scene import Scene
from splatcli.scene.source import SceneSource, View
from splatcli.scene.undistort import LensKey, check_lens, is_pinhole, lens_key, pinhole_of, rescaled

#: Without a resolution, wider photos are reduced to this many pixels (INRIA's rule).
MAX_WIDTH = 1600
#: These resolutions divide; any other number is a width in pixels.
DIVISORS = (1, 2, 4, 8)
#: A width below this is a mistaken divisor.
MIN_WIDTH = 16


def assemble(source: SceneSource, data: DataConfig, background: tuple[int, int, int], problems: Problems) -> Scene:
    """The Scene of a described source.

    Raises SceneError for photos and cameras that do not fit together, with all that ``problems`` holds already.
    """
    check_resolution(data.resolution)
    notes = list(source.notes)
    views = sorted(source.views, key=lambda view: view.name)
    views = _distinct(views, source.file, problems)
    found, divided = _find(source, views, data, notes, problems)
    builder = _Builder(None if divided else data.resolution, divided)
    sources = []
    for view in views:
        with problems.collect():
            source_of_view = builder.add(view, found.paths[view.name]) if view.name in found.paths else None
            if source_of_view is not None:
                sources.append(source_of_view)
    problems.settle()
    notes += builder.notes()
    cameras = [item.camera for item in sources]
    train, test = _split(source, cameras, data.test_every, notes)
    _refuse_single_place([cameras[i] for i in train], source.file)
    if source.points is None:
        notes.append("the scene has no points: training starts from random ones")
    store = ImageStore(sources, background, data.cache_bytes)
    return Scene(source.root, source.kind, cameras, store, source.points, train, test, notes)


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


def _find(
    source: SceneSource, views: list[View], data: DataConfig, notes: list[str], problems: Problems
) -> tuple[Found, bool]:
    """The files of the views; and whether they are copies already reduced by the resolution asked for."""
    names = [view.name for view in views]
    folders = source.image_folders
    if data.images is not None:
        folders = [source.root / data.images]
        if not folders[0].is_dir():
            raise SceneError("the folder of images is not there", where=folders[0], remedy="correct --images")
    found = choose_folder(folders, names)
    if found.missing:
        skip = data.skip_missing or (source.tolerant and len(found.paths) > len(found.missing))
        if not (skip and found.paths):
            problems.add(missing_error(found, len(names), folders))
        else:
            notes.append(f"{len(found.missing)} of {len(names)} views have no photo and are left out")
    for name, candidates in found.doubtful:
        problems.add(doubtful_error(found.folder, name, candidates))
    if found.loose:
        name, file = found.loose[0]
        notes.append(f"{len(found.loose)} photos were found under another ending or case, e.g. {file} for {name}")
    if source.resized_folders and data.resolution in DIVISORS and data.resolution != 1:
        smaller = found.folder.with_name(f"{found.folder.name}_{int(data.resolution or 1)}")
        if smaller.is_dir():
            copies = find_images(smaller, list(found.paths))
            if len(copies.paths) == len(found.paths):
                notes.append(f"the photos of {smaller.name}/ are used")
                return copies, True
            notes.append(f"{smaller.name}/ lacks {len(found.paths) - len(copies.paths)} photos and is not used")
    return found, False


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


def _split(
    source: SceneSource, cameras: list[Camera], test_every: int, notes: list[str]
) -> tuple[list[int], list[int]]:
    """Indices of training and held-out views: the layout's own split, else every n-th in name order."""
    everyone = list(range(len(cameras)))
    if source.test is not None:
        test = [i for i in everyone if cameras[i].name in source.test]
        held = set(test)
        train = [i for i in everyone if i not in held and (source.train is None or cameras[i].name in source.train)]
    elif test_every == 0:
        train, test = everyone, []
    elif len(cameras) < test_every:
        notes.append(f"only {len(cameras)} views: none is held out (one in {test_every} would be)")
        train, test = everyone, []
    else:
        train = [i for i in everyone if i % test_every]
        test = [i for i in everyone if i % test_every == 0]
    if not train:
        raise SceneError(
            f"no view is left to train on: all {len(cameras)} are held out",
            where=source.file,
            remedy="hold fewer out with --test-every (0 holds none out)",
        )
    return train, test


def _refuse_single_place(cameras: list[Camera], file: Path) -> None:
    centers = np.stack([camera.center for camera in cameras])
    spread = np.abs(centers - centers[0]).max()
    if spread <= 1e-9 * max(1.0, float(np.abs(centers).max())):
        raise SceneError(
            f"all {len(cameras)} training views were taken from one point, so that nothing can be triangulated",
            where=file,
            remedy="use photos from different places; hold fewer out with --test-every 0",
        )
