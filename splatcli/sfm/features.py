"""SIFT features of every image, found by several processes, written into COLMAP's database."""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.ExifTags import IFD, Base

from splatcli.errors import ResourceError, SplatError
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.decode import Header, decode_rgb, exif_of, open_image
from splatcli.scene.masks import check_mask, read_mask
from splatcli.scene.panorama import FACES, face_camera, face_from_rig
from splatcli.sfm.execution import Execution, Phase
from splatcli.sfm.images import orientation_of
from splatcli.sfm.options import COLOURS, SMALLER, CameraPer, SfmOptions

#: prctl(2): the signal that a process gets when the one that made it ends.
_PR_SET_PDEATHSIG = 1
#: Descriptors of an image that are enough to tell which others look like it.
_SAMPLE = 1000
#: The percentiles between which the levels of a picture are taken to lie, and the span of levels below which it is
#: spread over all. Photos of seven real captures span 135 to 241 levels. Of photos at 0.4, 0.2 and 0.1 of their levels,
#: SIFT finds half, a tenth and none of the features; spread, as many as at full contrast.
_TAILS, _LOW_CONTRAST = (0.5, 99.5), 128
#: Images whose features are committed together: what a process that is killed may lose.
_COMMITTED = 16

#: Pixels at top, bottom, left and right.
Border = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class SfmImage:
    """An image to find features in.

    orientation: EXIF's, to be applied. width, height: in pixels, then.
    mask: what of it counts, or None; mask_orientation: to be applied to that.
    panorama: the name and the width of the panorama that it is a face of, and which; None for an image of its own.
    border: pixels at top, bottom, left and right that show nothing, as letterbox bars.
    """

    name: str
    path: Path
    orientation: int
    width: int
    height: int
    mask: Path | None = None
    mask_orientation: int = 1
    panorama: tuple[str, int, int] | None = None
    border: Border = (0, 0, 0, 0)

    @property
    def size(self) -> tuple[int, int]:
        return self.width, self.height

    @classmethod
    def of(cls, name: str, folder: Path, header: Header, mask: Path | None = None) -> SfmImage:
        """Return the image that a header describes. Raises SceneError for a mask that is not of this image."""
        orientation = orientation_of(header)
        stored = (header.width, header.height)
        turn = 1 if mask is None else check_mask(mask, folder / name, stored, orientation, False)
        size = stored if orientation < 5 else stored[::-1]
        return cls(name, folder / name, orientation, *size, mask, turn)


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """The features of one image.

    xy: [N, 2] float32 pixels of the whole image, the middle of the first is 0.5. descriptors: [N, 128] uint8.
    colours: [N, 3] uint8 sRGB under the points. share: focal length over the longer side by EXIF, 0 if unknown.
    problem: why the image could not be decoded, else None.
    """

    xy: NDArray[np.float32]
    descriptors: NDArray[np.uint8]
    colours: NDArray[np.uint8]
    share: float = 0.0
    problem: SplatError | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """An image that is in the database: its name and its id there, a sample of its descriptors, and all its colours.

    key: its place in a list of images, in digits: pycolmap's lists know no names with spaces.
    """

    image: SfmImage
    key: str
    image_id: int
    sample: NDArray[np.uint8]
    colours: NDArray[np.uint8]


def extract(
    database: Path, images: list[SfmImage], options: SfmOptions, execution: Execution, phase: Phase = "features"
) -> tuple[list[Stored], dict[str, SplatError]]:
    """Find features and write them, with images and cameras, into the database, one image after another.

    Images are named by their place among ``images``, see Stored. Those that an earlier call for the same images and
    options wrote are taken from the database.
    Returns what was stored, and the reasons of images that could not be decoded.
    """
    progress = execution.start(phase)
    known = _known(database, images)
    stored: list[Stored] = []
    bad: dict[str, SplatError] = {}
    cameras: dict[LensKey, int] = {}
    rigs = _Rigs()
    # A rig is written when all its faces are there.
    together = len(images) if any(image.panorama for image in images) else _COMMITTED
    missing = [image for index, image in enumerate(images) if index not in known]
    with _features(missing, options, execution) as found, pycolmap.Database.open(database) as store:
        for start in range(0, len(images), together):
            with pycolmap.DatabaseTransaction(store):
                for index, image in enumerate(images[start : start + together], start):
                    if index in known:
                        stored.append(known[index])
                        if image.panorama is None:
                            key = lens_key(image.name, *image.size, focal_share(image.path), options.sharing)
                            cameras.setdefault(key, int(store.read_image(known[index].image_id).camera_id))
                    elif (features := next(found)).problem is not None:
                        bad[image.name] = features.problem
                    else:
                        save_colours(database, str(index), features.colours)
                        if image.panorama is not None:
                            image_id = rigs.add(store, str(index), image.panorama, features)
                        else:
                            key = lens_key(image.name, *image.size, features.share, options.sharing)
                            if key not in cameras:
                                cameras[key] = _add_camera(store, options.matched_model, key)
                            image_id = _add_image(store, str(index), cameras[key], features)
                        sample = sample_of(features.descriptors)
                        stored.append(Stored(image, str(index), image_id, sample, features.colours))
                    progress(index + 1, len(images))
                rigs.finish(store)
    return stored, bad


def sample_of(descriptors: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return so many of the descriptors of an image that they tell which others look like it."""
    return descriptors[:: max(1, len(descriptors) // _SAMPLE)].copy()


def _known(database: Path, images: list[SfmImage]) -> dict[int, Stored]:
    """Return those of ``images`` that are in the database, by their place.

    A database that is not whole is removed.
    """
    found: dict[int, Stored] = {}
    folder = database.with_name(COLOURS)
    try:
        with pycolmap.Database.open(database) as store:
            for image in store.read_all_images():
                image_id, index = int(image.image_id), int(image.name)
                colours = np.load(folder / f"{index}.npy")
                data = store.read_descriptors(image_id).data
                if (
                    index >= len(images)
                    or len(colours) != len(data)
                    or len(data) != store.num_keypoints_for_image(image_id)
                ):
                    raise ValueError(f"the features of image {index} are not whole")
                sample = sample_of(np.asarray(data, dtype=np.uint8).reshape(-1, 128))
                found[index] = Stored(images[index], image.name, image_id, sample, colours)
    except (OSError, ValueError, RuntimeError, EOFError):
        for path in database.parent.glob(f"{database.name}*"):
            path.unlink()
        shutil.rmtree(folder, ignore_errors=True)
        found = {}
    folder.mkdir(exist_ok=True)
    return found


def save_colours(database: Path, key: str, colours: NDArray[np.uint8]) -> None:
    """Write the colours of the features of an image, named as in the database, beside it."""
    np.save(database.with_name(COLOURS) / f"{key}.npy", colours)


class _Rigs:
    """The rigs of panoramas: one for all of a width, whose sensors are the faces; a frame for each panorama."""

    def __init__(self) -> None:
        self._cameras: dict[int, list[int]] = {}
        self._frames: dict[tuple[str, int], list[int]] = {}

    def add(self, store: pycolmap.Database, name: str, panorama: tuple[str, int, int], features: Features) -> int:
        """Write the image of a face; return its id."""
        source, width, face = panorama
        if width not in self._cameras:
            self._cameras[width] = self._write_rig(store, width)
        image_id = _write_image(store, name, self._cameras[width][face], features)
        self._frames.setdefault((source, width), []).append(image_id)
        return image_id

    def _write_rig(self, store: pycolmap.Database, width: int) -> list[int]:
        cameras = []
        for _ in range(FACES):
            camera = face_camera(width)
            camera.camera_id = int(store.write_camera(camera))
            cameras.append(camera)
        rig = pycolmap.Rig(rig_id=cameras[0].camera_id)
        rig.add_ref_sensor(cameras[0].sensor_id)
        for face, camera in enumerate(cameras[1:], 1):
            rig.add_sensor(camera.sensor_id, pycolmap.Rigid3d(np.column_stack([face_from_rig(face), np.zeros(3)])))
        store.write_rig(rig, use_rig_id=True)
        return [int(camera.camera_id) for camera in cameras]

    def finish(self, store: pycolmap.Database) -> None:
        """Write the frames, when all faces are there."""
        for (_, width), image_ids in self._frames.items():
            frame = pycolmap.Frame(rig_id=self._cameras[width][0])
            for image_id in image_ids:
                frame.add_data_id(store.read_image(image_id).data_id)
            store.write_frame(frame)


@contextmanager
def _features(images: list[SfmImage], options: SfmOptions, execution: Execution) -> Iterator[Iterator[Features]]:
    """Give the features of each image, in order, as they are found. The iterator raises ResourceError."""
    work = partial(_features_of, options=options, use_gpu=execution.use_gpu)
    processes = min(1 if execution.use_gpu else execution.num_threads, len(images))
    if processes <= 1:
        yield map(work, images)
        return
    # pycolmap holds Python's lock while it looks for features, so that threads would take turns. A multiprocessing.Pool
    # would wait forever for a process that was killed. Only on Linux may a forked process use whatever its parent did.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=die_with_parent)
    try:
        yield _until_killed(pool.map(work, images))
    finally:
        pool.shutdown(cancel_futures=True)


def _until_killed(found: Iterator[Features]) -> Iterator[Features]:
    try:
        yield from found
    except BrokenProcessPool:
        raise ResourceError(
            "a process that looks for features was killed, most likely because the machine ran out of memory",
            remedy=SMALLER,
        ) from None


def die_with_parent() -> None:
    """Let this process end when the one that made it does, however that ends; leave Ctrl-C to that one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_end_without, args=(os.getppid(),), daemon=True).start()


def _end_without(parent: int) -> None:
    """End this process once ``parent`` is not the one that made it any more, as where the system tells nobody."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def _add_camera(store: pycolmap.Database, model: str, key: LensKey) -> int:
    camera = first_guess(model, key)
    camera.camera_id = camera_id = int(store.write_camera(camera))
    rig = pycolmap.Rig(rig_id=camera_id)
    rig.add_ref_sensor(camera.sensor_id)
    store.write_rig(rig, use_rig_id=True)
    return camera_id


def _add_image(store: pycolmap.Database, name: str, camera_id: int, features: Features) -> int:
    image_id = _write_image(store, name, camera_id, features)
    frame = pycolmap.Frame(rig_id=camera_id)
    frame.add_data_id(store.read_image(image_id).data_id)
    store.write_frame(frame)
    return image_id


def _write_image(store: pycolmap.Database, name: str, camera_id: int, features: Features) -> int:
    image_id = int(store.write_image(pycolmap.Image(name=name, camera_id=camera_id)))
    store.write_keypoints(image_id, features.xy)
    kind = pycolmap.FeatureExtractorType.SIFT
    store.write_descriptors(image_id, pycolmap.FeatureDescriptors(type=kind, data=features.descriptors))
    return image_id


def _features_of(image: SfmImage, options: SfmOptions, use_gpu: bool) -> Features:
    try:
        rgb = decode_rgb(image.path, (0, 0, 0), image.orientation)
        masked = None if image.mask is None else read_mask(image.mask, image.mask_orientation)
    except SplatError as error:
        nothing = np.zeros((0, 0), dtype=np.uint8)
        return Features(nothing.astype(np.float32), nothing, nothing, problem=error)
    picture = Image.fromarray(rgb)
    picture.thumbnail((options.max_image_size,) * 2, Image.Resampling.BOX)
    keypoints, descriptors = _extractor(options.max_features, use_gpu).extract_from_uint8_array(
        stretched(np.asarray(picture.convert("L")))
    )
    xy = np.array([(point.x, point.y) for point in keypoints], dtype=np.float32).reshape(-1, 2)
    # Both sizes are whole numbers, so that the two scales differ a little.
    xy *= np.array([image.width / picture.width, image.height / picture.height], dtype=np.float32)
    column, row = np.minimum(xy.astype(np.int64), [image.width - 1, image.height - 1]).T
    data = np.asarray(descriptors.data, dtype=np.uint8).reshape(-1, 128)
    if masked is not None:
        seen = ~masked[row, column]
        xy, data, row, column = xy[seen], data[seen], row[seen], column[seen]
    if any(image.border):
        top, bottom, left, right = image.border
        seen = (row >= top) & (row < image.height - bottom) & (column >= left) & (column < image.width - right)
        xy, data, row, column = xy[seen], data[seen], row[seen], column[seen]
    return Features(xy, data, rgb[row, column], focal_share(image.path))


def stretched(grey: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return a picture [H, W] of low contrast spread over all levels, and any other as it is.

    SIFT drops what differs from its surroundings by less than a fixed number of levels: in the dark, in fog, or behind
    an under-exposed lens nearly everything.
    """
    low, high = np.percentile(grey, _TAILS) if grey.size else (0.0, 255.0)
    if high - low >= _LOW_CONTRAST:
        return grey
    levels = (np.arange(256) - low) * (255.0 / max(high - low, 1.0))
    return np.clip(levels, 0.0, 255.0).round().astype(np.uint8)[grey]


_extractors: dict[int, pycolmap.FeatureExtractor] = {}


def _extractor(max_features: int, use_gpu: bool) -> pycolmap.FeatureExtractor:
    """Return the extractor of this process, which is kept: a GPU's takes a second to set up."""
    if os.getpid() not in _extractors:
        options = pycolmap.FeatureExtractionOptions()
        options.use_gpu = use_gpu
        options.num_threads = 1
        options.sift.max_num_features = max_features
        _extractors.clear()
        _extractors[os.getpid()] = pycolmap.FeatureExtractor.create(options)
    return _extractors[os.getpid()]


#: Focal length over the longer side where nothing is known: 45 degrees, between a phone and a standard lens.
GUESSED_FOCAL = 1.2
#: EXIF: pixels per unit of the sensor along x and y.
_PER_UNIT = (Base.FocalPlaneXResolution, Base.FocalPlaneYResolution)
#: The diagonal of 35 mm film, mm: by definition (CIPA DCG-001) the angle of view across the diagonal is the same.
_FILM = math.hypot(36.0, 24.0)
#: EXIF's units of the sensor, mm.
_UNITS = {2: 25.4, 3: 10.0, 4: 1.0, 5: 0.001}
#: Pixels of the longer side from which an image is taken to be as large as the sensor made it. Programs that reduce
#: images often correct the size in EXIF, and not the pixels per unit of the sensor.
_FULL_SIZE = 2000
#: The longer side of a sensor, mm: from small phones to medium format.
_SENSORS = (4.0, 60.0)

LensKey = tuple[str, int, int, float]


def focal_share(path: Path) -> float:
    """Return the focal length over the longer side of the image, from EXIF; 0 where it is not there."""
    try:
        with open_image(path) as image:
            exif = exif_of(image).get_ifd(IFD.Exif)
            width, height = image.size
            on_film = float(exif.get(Base.FocalLengthIn35mmFilm, 0)) / _FILM
            share = on_film * math.hypot(width, height) / max(width, height)
            share = share or _share_of_sensor(exif, width, height)
    except Exception:
        return 0.0  # the picture can be whole although its metadata is not
    return share if math.isfinite(share) and 0.1 <= share <= 50 else 0.0


def _share_of_sensor(exif: Mapping[int, Any], width: int, height: int) -> float:
    """Return the focal length over the longer side of the sensor, both in mm; 0 where EXIF does not give them."""
    if not all(tag in exif for tag in (Base.FocalLength, Base.FocalPlaneResolutionUnit, *_PER_UNIT)):
        return 0.0
    written = [int(exif.get(tag, 0)) for tag in (Base.ExifImageWidth, Base.ExifImageHeight)]
    along, across = (float(exif[tag]) for tag in _PER_UNIT)
    if max(width, height) < _FULL_SIZE or (all(written) and sorted(written) != sorted((width, height))):
        return 0.0
    sensor = max(width, height) * _UNITS[int(exif[Base.FocalPlaneResolutionUnit])] / along
    if not (_SENSORS[0] <= sensor <= _SENSORS[1] and 0.9 <= along / across <= 1.1):
        return 0.0
    return float(exif[Base.FocalLength]) / sensor


def lens_key(name: str, width: int, height: int, share: float, per: CameraPer) -> LensKey:
    """Return the key of images that share a lens: the folder (or the name, or nothing), size and zoom."""
    owner = {"folder": str(PurePosixPath(name).parent), "image": name, "all": ""}[per]
    return owner, width, height, share


def first_guess(model: str, key: LensKey) -> pycolmap.Camera:
    """Return the camera that the solver starts from."""
    _, width, height, share = key
    focal = (share or GUESSED_FOCAL) * max(width, height)
    camera = pycolmap.Camera.create_from_model_name(0, model, focal, width, height)
    camera.has_prior_focal_length = share > 0
    return camera
