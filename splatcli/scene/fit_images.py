"""Images against their cameras: headers read, sizes chosen, lenses undistorted, and what the user should know."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from splatcli.config import DataConfig
from splatcli.errors import SceneError, UsageError
from splatcli.progress import track
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.camera import Camera
from splatcli.scene.decode import Header, read_header, same_shape
from splatcli.scene.depth_maps import DepthFile, check_depth_map
from splatcli.scene.find_images import DIVISORS, Found
from splatcli.scene.images import ImageSource, ImageStore, max_pixels
from splatcli.scene.masks import alpha_is_mask, check_mask
from splatcli.scene.panorama import FACES, PanoramaFace, face_camera, face_name, face_pose
from splatcli.scene.source import FixedLens, Problems, SceneSource, View
from splatcli.scene.undistort import LensKey, camera_of, check_lens, is_fisheye, is_pinhole, lens_key, rescaled
from splatcli.sizes import counted, listed

#: Without a resolution, wider images are reduced to this many pixels (INRIA's rule).
MAX_WIDTH = 1600
#: What is counted of the images; a word in braces is as it is for several images, and _ONE has it for one.
_NOTES = {
    "scaled": "image{s} {differ} in size from {their} camera{s}; the intrinsics were scaled to the image{s}",
    "turned": "image{s} {were} turned as {their} EXIF orientation says, to match {their} camera{s}",
    "unturned": "image{s} {have} an EXIF orientation that is not applied: as stored {they} {match} {their} camera{s}",
    "reduced": f"image{{s}} {{are}} reduced to {MAX_WIDTH} pixels in width while loading; -r 1 keeps the full size",
    "alpha": "image{s} {have} transparency and {are} composited on the background (--masks alpha hides it)",
    "hiding": "image{s} {have} transparency; what is transparent takes no part in training and scores",
    "masked": "image{s} {have} {masks}; what {they} {hide} takes no part in training and scores",
    "cut": "image{s} {have} {masks}; what {they} {hide} is empty, and shows the background in training and scores",
    "panoramas": f"image{{s}} {{are}} cut into {FACES} perspective faces, without the sky above and the ground below",
    "several": "file{s} {hold} several pictures, of which the first is used",
    "narrow": "image{s} {are} narrower than the resolution asked for and {keep} {their} size",
}
_ONE = {"s": "", "are": "is", "were": "was", "have": "has", "their": "its", "they": "it"}
_ONE |= {"differ": "differs", "match": "matches", "hold": "holds", "keep": "keeps", "masks": "a mask", "hide": "hides"}
_SEVERAL = {"s": "s"} | {word: word for word in _ONE if word != "s"}

#: A width below this is a mistaken divisor.
MIN_WIDTH = 16
#: Names that a note gives.
_MAX_LISTED = 3


def check_resolution(resolution: float | None) -> None:
    """Raise UsageError for a width that can only be a mistaken divisor."""
    if resolution is not None and resolution not in DIVISORS and round(resolution) < MIN_WIDTH:
        raise UsageError(
            f"resolution {resolution:g} would make images {resolution:g} pixels wide",
            where="--resolution",
            remedy="1, 2, 4 and 8 divide; any other number is a width in pixels",
        )


def training_size(width: int, height: int, resolution: float | None) -> tuple[int, int]:
    """Return INRIA's size: divisors round; a width keeps the aspect with the height rounded down; never larger."""
    if resolution in DIVISORS:
        factor = int(resolution or 1)
        return max(1, round(width / factor)), max(1, round(height / factor))
    wanted = MAX_WIDTH if resolution is None else round(resolution)
    if wanted >= width:
        return width, height
    return wanted, max(1, height * wanted // width)


class ImageFitter:
    """Makes an ImageSource of each view, and keeps count of what the user should know.

    found: the images of the views. masks, depths: by the names of the views.
    """

    def __init__(
        self, found: Found, masks: Mapping[str, Path], depths: Mapping[str, DepthFile], data: DataConfig
    ) -> None:
        self._found, self._masks, self._depths, self._data = found, masks, depths, data
        #: The images come from a folder of reduced copies, so that they differ from the lens's size on purpose.
        self._divided = bool(found.originals)
        #: As set; None where the images have their size already.
        self._resolution = None if self._divided else data.resolution
        self._max_pixels = max_pixels(data.max_pixels)
        #: Whether each lens, as described, passed its check.
        self._usable: dict[LensKey, bool] = {}
        #: What each lens, at the image's size, is trained as; None for one that cannot be undone.
        self._cameras: dict[LensKey, pycolmap.Camera | None] = {}
        self._counts: Counter[str] = Counter()
        self._models: set[str] = set()
        self._fisheyes: set[str] = set()
        self._colours: Counter[str] = Counter()
        self.bad: list[SceneError] = []

    def add(self, view: View) -> list[ImageSource]:
        """Return the source of one view, those of its faces where it is a panorama. Raises SceneError.

        There is none when it is left out, or its lens was refused before.
        """
        path, mask, depth = self._found.paths[view.name], self._masks.get(view.name), self._depths.get(view.name)
        try:
            header = read_header(path, self._max_pixels)
            lens_size = self._lens_size(view, header)
        except SceneError as error:
            if not self._data.skip_bad_images:
                raise
            self.bad.append(error)
            return []
        lens = view.lens(*lens_size)
        if lens_key(lens) not in self._usable:
            self._usable[lens_key(lens)] = False
            check_lens(lens, view.lens.file, view.lens.label)
            self._usable[lens_key(lens)] = True
        if not self._usable[lens_key(lens)]:
            return []
        stored, orientation = self._fit(header, lens, path)
        if depth is not None:
            if lens.is_spherical():
                raise SceneError(
                    "this is the depth map of a panorama, which is not read",
                    where=depth.path,
                    remedy="leave it out: --depths none; or cut the panorama and its map into perspective views",
                )
            depth = check_depth_map(depth, path, (header.width, header.height), orientation, self._max_pixels)
        mask_orientation = 1
        if mask is not None:
            mask_orientation = check_mask(mask, path, (header.width, header.height), orientation, self._divided)
        lens = rescaled(lens, *stored)
        target = face_camera(stored[0]) if lens.is_spherical() else self._camera_of(lens, view)
        if target is None:
            return []
        camera = Camera(
            name=view.name,
            width=int(target.width),
            height=int(target.height),
            fx=float(target.focal_length_x),
            fy=float(target.focal_length_y),
            cx=float(target.principal_point_x),
            cy=float(target.principal_point_y),
            viewmat=view.viewmat,
            model="fisheye" if is_fisheye(target) else "pinhole",
        )
        size = (camera.width, camera.height) if self._divided else self._target(camera)
        straight = is_pinhole(lens)
        reduced = size
        if not straight:
            if not lens.is_spherical():
                (self._models if camera.model == "pinhole" else self._fisheyes).add(lens.model_name)
            reduced = (
                max(1, round(stored[0] * size[0] / camera.width)),
                max(1, round(stored[1] * size[1] / camera.height)),
            )
        self._counts["reduced"] += reduced != stored and self._resolution is None
        self._counts["cut" if self._data.mask_mode == "transparent" else "masked"] += mask is not None
        self._count(header, orientation)
        image = ImageSource(
            path=path,
            camera=camera.resized(*size),
            stored=stored,
            reduced=reduced,
            view=view.name,
            lens=None if straight else lens,
            orientation=orientation,
            mask=mask,
            mask_orientation=mask_orientation,
            depth=depth,
        )
        return self._faces(image) if lens.is_spherical() else [image]

    def _faces(self, image: ImageSource) -> list[ImageSource]:
        """Return the faces of a panorama. image: with the camera of the first face."""
        self._counts["panoramas"] += 1
        return [
            replace(
                image,
                camera=replace(
                    image.camera,
                    name=face_name(image.view, face),
                    viewmat=face_pose(image.camera.viewmat, face),
                ),
                lens=PanoramaFace(*image.stored, face),
            )
            for face in range(FACES)
        ]

    def _lens_size(self, view: View, header: Header) -> tuple[int, int]:
        """Return the size that the lens is described for where its file gives none: that of the full-size image."""
        stored = header.width, header.height
        if not self._divided or isinstance(view.lens, FixedLens):
            return stored
        full = read_header(self._found.originals[view.name], self._max_pixels)
        size = full.width, full.height
        return size[::-1] if full.orientation >= 5 and not same_shape(size, stored) else size

    def _camera_of(self, lens: pycolmap.Camera, view: View) -> pycolmap.Camera | None:
        key = lens_key(lens)
        if key not in self._cameras:
            self._cameras[key] = None
            self._cameras[key] = camera_of(lens, self._data.projection, view.lens.file, view.lens.label)
        return self._cameras[key]

    def _target(self, camera: Camera) -> tuple[int, int]:
        if self._resolution is not None and self._resolution not in DIVISORS and self._resolution > camera.width:
            self._counts["narrow"] += 1
        return training_size(camera.width, camera.height, self._resolution)

    def _fit(self, header: Header, lens: pycolmap.Camera, path: Path) -> tuple[tuple[int, int], int]:
        """Return the stored size to use and the EXIF orientation to apply, so that image and lens have one aspect."""
        stored, wanted = (header.width, header.height), (int(lens.width), int(lens.height))
        if same_shape(stored, wanted):
            self._counts["scaled"] += stored != wanted and not self._divided
            return stored, 1
        turned = stored[::-1]
        if header.orientation >= 5 and same_shape(turned, wanted):
            self._counts["scaled"] += turned != wanted and not self._divided
            return turned, header.orientation
        raise SceneError(
            f"the image is {stored[0]}x{stored[1]} pixels, its camera {wanted[0]}x{wanted[1]}: not the same shape",
            where=path,
            remedy="use the images that the cameras were computed from"
            + ("; this one seems to have been turned by a quarter" if same_shape(turned, wanted) else ""),
        )

    def _count(self, header: Header, orientation: int) -> None:
        self._counts["turned"] += orientation != 1
        self._counts["unturned"] += header.orientation != orientation
        self._counts["hiding" if alpha_is_mask(self._data) else "alpha"] += header.has_alpha
        self._counts["several"] += header.several
        if header.colours != "sRGB":
            self._colours[header.colours] += 1

    def notes(self) -> list[str]:
        """Return notes for the user, a sentence each."""
        notes = [
            f"{number} {text.format_map(_ONE if number == 1 else _SEVERAL)}"
            for key, text in _NOTES.items()
            if (number := self._counts[key])
        ]
        if self._colours:
            names = ", ".join(name for name, _ in self._colours.most_common(_MAX_LISTED))
            converted = counted(self._colours.total(), "image is", "images are")
            notes.append(f"{converted} converted to sRGB, from {names}")
        if any(name.startswith("CMYK") for name in self._colours):
            notes.append("CMYK images without a profile show approximate colours; use the camera's own files")
        if self._models:
            notes.append(f"lens distortion ({', '.join(sorted(self._models))}) is undone while loading")
        if self._fisheyes:
            notes.append(
                f"images of {', '.join(sorted(self._fisheyes))} lenses are trained as fisheyes, up to 85 degrees to "
                "the side; --projection pinhole trains their middle"
            )
        return notes


def fit_images(
    source: SceneSource,
    found: Found,
    masks: Mapping[str, Path],
    depths: Mapping[str, DepthFile],
    data: DataConfig,
    problems: Problems,
) -> list[ImageSource]:
    """Return the images of the views, by their headers, in the order of their cameras' names.

    found: the images of all views. masks, depths: by the names of the views. Raises all problems known by now.
    """
    fitter = ImageFitter(found, masks, depths, data)
    images = []
    for view in track(source.views, "reading image headers"):
        with problems.collect():
            images += fitter.add(view)
    problems.raise_any()
    source.notes += fitter.notes()
    if not images:
        raise fitter.bad[0]
    if fitter.bad:
        source.notes.append(_bad_note(fitter.bad))
    same = _identical_note(images)
    if same is not None:
        source.notes.append(same)
    return sorted(images, key=lambda image: image.camera.name)


def keep_decodable(store: ImageStore, data: DataConfig, notes: list[str], problems: Problems) -> ImageStore:
    """Keep the images that can be decoded in full. Others are left out; without skip_bad_images they are problems."""
    damaged = store.damaged()
    if not damaged:
        return store
    errors = list(dict.fromkeys(damaged.values()))  # faces of one panorama share theirs
    if not data.skip_bad_images or len(damaged) == len(store):
        for error in errors:
            problems.add(error)
        problems.raise_any()
    notes.append(_bad_note(errors))
    kept = [item for i, item in enumerate(store.sources) if i not in damaged]
    return store.of(kept)


def _bad_note(bad: list[SceneError]) -> str:
    """Return the note on images that are left out because they cannot be read."""
    named = listed([f"{Path(error.where or '').name} {error.what}" for error in bad], _MAX_LISTED, "; ")
    some = "1 image cannot be read and is" if len(bad) == 1 else f"{len(bad)} images cannot be read and are"
    return f"{some} left out: {named}"


def _identical_note(sources: Sequence[ImageSource]) -> str | None:
    """Return a warning of images that are byte for byte the same; None when there are none."""
    names = {source.path: source.view for source in sources}
    groups = identical_files(names)
    if not groups:
        return None
    pairs = "; ".join(" = ".join(names[path] for path in group[:_MAX_LISTED]) for group in groups[:_MAX_LISTED])
    cameras = {source.path: source.camera for source in sources}
    centers = np.array([camera.center for camera in cameras.values()])
    far = _SAME_POSE * float(np.linalg.norm(centers - centers.mean(axis=0), axis=1).max())
    apart = any(not _same_pose(cameras[group[0]], cameras[path], far) for group in groups for path in group[1:])
    means = (
        "one of them is not what its camera saw"
        if apart
        else "they count several times, and a copy that is held out is trained by another name"
    )
    return f"{sum(map(len, groups))} images are identical files ({pairs}): {means}; remove the copies"


#: Poses that structure from motion finds for one image differ by less: in an axis, and in the centre as a part of the
#: largest distance of a camera from the middle of all.
_SAME_POSE = 0.02


def _same_pose(a: Camera, b: Camera, far: float) -> bool:
    """Return whether two cameras have one pose; ``far`` is the distance of their centres at most."""
    turned = float(np.abs(a.viewmat[:3, :3] - b.viewmat[:3, :3]).max())
    return turned < _SAME_POSE and float(np.linalg.norm(a.center - b.center)) <= far


#: Bytes at the start of files of one size that are compared before whole files are.
_START = 4 << 10


def identical_files(paths: Iterable[Path]) -> list[list[Path]]:
    """Return groups of two and more files with the same bytes, in the order given.

    Files are distinguished by size, then by their first bytes; only what is left is read to the end. A file that cannot
    be read belongs to no group. A file with several names is read once.
    """
    known: dict[tuple[Hashable, Hashable], Hashable] = {}

    def once(key_of: Callable[[Path], Hashable], path: Path) -> Hashable:
        found = path.stat()
        key = (key_of, (found.st_dev, found.st_ino))
        if key not in known:
            known[key] = key_of(path)
        return known[key]

    groups = [list(paths)]
    for key_of in (_size, _start, _digest):
        groups = [part for group in groups for part in _parts(group, partial(once, key_of))]
    return groups


def _parts(group: list[Path], key_of: Callable[[Path], Hashable]) -> list[list[Path]]:
    parts: dict[Hashable, list[Path]] = defaultdict(list)
    for path in group:
        try:
            parts[key_of(path)].append(path)
        except OSError:
            continue
    return [part for part in parts.values() if len(part) > 1]


def _size(path: Path) -> int:
    return path.stat().st_size


def _start(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_START)


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
