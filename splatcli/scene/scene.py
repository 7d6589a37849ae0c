"""Scene: cameras at the training resolution, their photos, points, and who is held out."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from splatcli.errors import SceneError
from splatcli.scene.camera import Camera
from splatcli.scene.frame import extent_of
from splatcli.scene.images import ImageStore
from splatcli.scene.points import PointCloud
from splatcli.scene.source import Kind

#: Bytes at each end of a photo that go into the fingerprint.
_SAMPLE = 64 << 10
#: What a fingerprint calls the digest of each kind of file.
_KEYS = {"photo": "sha256", "mask": "masks", "depth map": "depths"}


@dataclass(slots=True, eq=False)
class Scene:
    """A scene, ready for training.

    root: absolute folder.
    cameras: sorted by name, undistorted, at the training resolution.
    images: photo ``i`` belongs to ``cameras[i]``.
    points: sparse points in the cameras' frame, or None.
    train, test: indices into ``cameras``, ascending; disjoint.
    notes: sentences worth telling the user.
    offset: [3] float64; added to coordinates of the scene it gives those of the input. Zero, unless the input lies so
        far from its origin (UTM, ECEF) that float32 could not tell its points apart.
    given_extent: the size that the user gave, in world units; None takes that of the cameras.
    file: the file that describes the views, for messages.
    seen: for each camera the rows of ``points`` that its photo is known to see; None where that was not asked for.
    """

    root: Path
    kind: Kind
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

    @property
    def extent(self) -> float:
        """World units: as given, else 1.1 times the largest distance of a training camera from the mean of all."""
        if self.given_extent is not None:
            return self.given_extent
        return extent_of(np.stack([self.cameras[i].center for i in self.train]))

    def fingerprint(self) -> dict[str, str | int]:
        """Count of photos, a SHA-256 over names, sizes, and the first and last 64 kB of each; others of masks and maps.

        Raises SceneError when a file has gone.
        """
        digests: dict[str, hashlib._Hash] = {}
        for camera, source in zip(self.cameras, self.images.sources, strict=True):
            depth = None if source.depth is None else source.depth.path
            for kind, path in (("photo", source.path), ("mask", source.mask), ("depth map", depth)):
                if path is not None:
                    _sample(kind, path, camera.name, digests.setdefault(_KEYS[kind], hashlib.sha256()))
        return {"count": len(self.cameras), **{key: digest.hexdigest() for key, digest in digests.items()}}


def _sample(kind: str, path: Path, name: str, digest: hashlib._Hash) -> None:
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            digest.update(f"{name}\0{size}\0".encode())
            digest.update(file.read(_SAMPLE))
            file.seek(max(0, size - _SAMPLE))
            digest.update(file.read(_SAMPLE))
    except OSError as error:
        raise SceneError(f"cannot read the {kind}: {error.strerror}", where=path, remedy="put the file back") from None
