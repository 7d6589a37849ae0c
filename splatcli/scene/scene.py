"""Scene: cameras at the training resolution, their images, points, and the held-out views."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from splatcli.errors import SceneError, UsageError
from splatcli.scene.camera import Camera, product
from splatcli.scene.depth_maps import KnownDepths, depths_of_points
from splatcli.scene.images import ImageStore
from splatcli.scene.points import WITH_TRACKS, PointCloud, Reprojections
from splatcli.scene.source import SceneSource, View
from splatcli.sizes import counted

#: Bytes at each end of an image that go into the fingerprint.
_SAMPLE = 64 << 10
#: What a fingerprint calls the digest of each kind of file, and that of the lenses of distorted images.
DEPTHS, LENSES = "depths", "lenses"
_KEYS = {"image": "sha256", "mask": "masks", "depth map": DEPTHS}


@dataclass(slots=True, eq=False)
class Scene:
    """A scene, ready for training.

    root: absolute folder.
    kind: name of the reader: colmap, blender, nerfstudio or that of a plug-in.
    cameras: sorted by name, undistorted pinholes and equidistant fisheyes, at the training resolution.
    images: image ``i`` belongs to ``cameras[i]``.
    points: sparse points in the cameras' frame, or None.
    train, test: indices into ``cameras``, ascending; disjoint.
    notes: sentences worth telling the user.
    offset: [3] float64; added to coordinates of the scene it gives those of the input. Zero, unless the input lies so
        far from its origin (UTM, ECEF) that float32 could not tell its points apart.
    given_extent: the size that the user gave, in world units; None takes that of the cameras.
    file: the file that describes the views, for messages.
    place: latitude, longitude, height (EPSG:4979) of the input's origin, where a sidecar (georeference.py) or the
        scene's own files tell it.
    reprojections: of some points, in the input's images; None for a COLMAP model, whose files have them.
    seen: for each camera the rows of ``points`` that its image is known to see; None where that was not asked for.
    cameras_held: the cameras were known before the points: these were triangulated with them, or given.
    """

    root: Path
    kind: str
    cameras: list[Camera]
    images: ImageStore
    points: PointCloud | None
    train: list[int]
    test: list[int]
    notes: list[str] = field(default_factory=list)
    offset: NDArray[np.float64] = field(default_factory=lambda: np.zeros(3))
    given_extent: float | None = None
    seen: list[NDArray[np.int64]] | None = None
    file: Path = field(default_factory=Path)
    place: tuple[float, float, float] | None = None
    reprojections: Reprojections | None = None
    cameras_held: bool = False

    def __post_init__(self) -> None:
        if any(camera.model == "ortho" for camera in self.cameras):
            raise UsageError("a scene has pinhole and fisheye cameras, not orthographic ones", where=self.root)

    @property
    def extent(self) -> float:
        """World units: as given, else 1.1 times the largest distance of a training camera from the mean of all."""
        if self.given_extent is not None:
            return self.given_extent
        return extent_of(np.stack([self.cameras[i].center for i in self.train]))

    def fingerprint(self) -> dict[str, str | int]:
        """Return the image count, a SHA-256 over names, sizes, first and last 64 kB of each; others of masks and maps.

        And one of the lenses that are undone. Raises SceneError when a file has gone.
        """
        digests: dict[str, hashlib._Hash] = {}
        for camera, source in zip(self.cameras, self.images.sources, strict=True):
            if source.lens is not None:
                numbers = " ".join(f"{value:.9g}" for value in source.lens.params)
                lens = f"{camera.name}\0{source.lens.model_name} {source.lens.width} {source.lens.height} {numbers}\0"
                digests.setdefault(LENSES, hashlib.sha256()).update(lens.encode())
            depth = None if source.depth is None else source.depth.path
            for kind, path in (("image", source.path), ("mask", source.mask), ("depth map", depth)):
                if path is not None:
                    add_sample(kind, path, camera.name, digests.setdefault(_KEYS[kind], hashlib.sha256()))
        return {"count": len(self.cameras), **{key: digest.hexdigest() for key, digest in digests.items()}}


def add_sample(kind: str, path: Path, name: str, digest: hashlib._Hash) -> None:
    """Add the name, the size and both ends of a file to a digest. kind: of file, for the SceneError."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            digest.update(f"{name}\0{size}\0".encode())
            digest.update(file.read(_SAMPLE))
            file.seek(max(0, size - _SAMPLE))
            digest.update(file.read(_SAMPLE))
    except OSError as error:
        raise SceneError(f"cannot read the {kind}: {error.strerror}", where=path, remedy="put the file back") from None


#: Sizes of the scene that its middle may be away from the origin. There a float32 coordinate moves in steps of 1e-6 of
#: the size, which is what the last steps of training move a Gaussian by (means_lr_final).
FAR = 10.0

#: INRIA's margin: the extent is this times the largest distance of a training camera from their mean.
EXTENT_MARGIN = 1.1

#: Smaller spreads than this, in units of the coordinates themselves, are rounding: the cameras stand at one point.
ROUNDING = 1e-9


def spread_of(centers: NDArray[np.float64]) -> float:
    """Return the largest distance of a camera from the mean of all [N, 3]."""
    return float(np.linalg.norm(centers - centers.mean(axis=0), axis=1).max())


def extent_of(centers: NDArray[np.float64], offset: NDArray[np.float64] | float = 0.0) -> float:
    """Return the size of a scene by its cameras [N, 3]: INRIA's, and 0 when they stand at one point.

    offset: [3], that was subtracted from the input's coordinates: these were rounded, not what is left.
    """
    spread = spread_of(centers)
    return 0.0 if spread <= ROUNDING * max(1.0, float(np.abs(centers + offset).max())) else spread * EXTENT_MARGIN


def origin_offset(centers: NDArray[np.float64], extent: float | None) -> NDArray[np.float64]:
    """Return [3] float64, to subtract from the input's coordinates; zeros unless the scene lies far from the origin.

    centers: [N, 3] of the cameras. extent: of the scene, in the same units; None: that of the cameras.
    The offset is a round number in decimal, so that people can add it back.
    """
    middle = centers.mean(axis=0)
    extent = spread_of(centers) * EXTENT_MARGIN if extent is None else extent
    if not extent > 0 or np.abs(middle).max() <= FAR * extent:
        return np.zeros(3)
    unit = 10.0 ** math.floor(math.log10(extent))
    return np.asarray(np.round(middle / unit) * unit)


def move_origin(view: View, offset: NDArray[np.float64]) -> View:
    """Return the same view in the frame whose origin is ``offset`` in the input's."""
    viewmat = view.viewmat.copy()
    viewmat[:3, 3] += product(viewmat[:3, :3], offset[:, None])[:, 0]
    return replace(view, viewmat=viewmat)


def collinear(centers: NDArray[np.float64]) -> bool:
    """Return whether three or more cameras [N, 3] stand on a straight line."""
    spreads = np.linalg.svd(centers - centers.mean(axis=0), compute_uv=False)
    return len(centers) > 2 and bool(spreads[1] <= 1e-6 * spreads[0])


def split_views(
    source: SceneSource, names: list[str], test_every: int, notes: list[str]
) -> tuple[list[int], list[int]]:
    """Return indices of training and held-out views: the layout's own split, else every n-th in name order.

    names: of all views, sorted. Faces of a panorama overlap and have its name: they are held out together.
    Raises SceneError when none is left to train on.
    """
    everyone = list(range(len(names)))
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    if source.test is not None:
        test = [i for i in everyone if names[i] in source.test]
        held = set(test)
        train = [i for i in everyone if i not in held and (source.train is None or names[i] in source.train)]
        if not test:
            notes.append("the scene holds no views out: there will be no figures of quality")
    elif test_every == 0:
        train, test = everyone, []
    elif len(numbers) < test_every:
        notes.append(f"only {counted(len(numbers), 'view')}: none is held out (one in {test_every} would be)")
        train, test = everyone, []
    else:
        train = [i for i in everyone if numbers[names[i]] % test_every]
        test = [i for i in everyone if numbers[names[i]] % test_every == 0]
    if not train:
        raise SceneError(
            f"no view is left to train on: of {counted(len(names), 'view')} {len(test)} are held out",
            where=source.file,
            remedy="hold fewer out with splat train --test-every (0 holds none out)"
            if source.test is None
            else "correct the lists of file names for training and testing",
        )
    return train, test


def known_depths(scene: Scene, view: int) -> KnownDepths:
    """Return the depths of pixels by the points that ``view`` sees; masked pixels included."""
    if scene.points is None or scene.seen is None:
        return KnownDepths(np.zeros(0, np.int64), np.zeros(0))
    return depths_of_points(scene.cameras[view], scene.points.xyz[scene.seen[view]])


def check_depths(scene: Scene) -> None:
    """Raise SceneError where no training view has a known depth."""
    if any(scene.images.has_depth(view) for view in scene.train):
        return
    if scene.seen is not None and any(len(scene.seen[view]) for view in scene.train):
        return
    what = "has no points" if scene.points is None else "has points, but not which images see them"
    raise SceneError(
        f"{what}: no depth is known of any training view",
        where=scene.root,
        remedy=f"--depth-loss wants depth maps (depth_file_path in transforms.json, or --depths DIR), or {WITH_TRACKS}",
    )
