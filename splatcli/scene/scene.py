"""Scene: cameras at the training resolution, their photos, points, and who is held out."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from splatcli.errors import SceneError
from splatcli.scene.camera import Camera
from splatcli.scene.images import ImageStore
from splatcli.scene.points import PointCloud
from splatcli.scene.source import Kind

#: INRIA's margin: the extent is this times the largest distance of a training camera from their mean.
EXTENT_MARGIN = 1.1
#: Bytes at each end of a photo that go into the fingerprint.
_SAMPLE = 64 << 10


@dataclass(slots=True, eq=False)
class Scene:
    """A scene, ready for training.

    root: absolute folder.
    cameras: sorted by name, undistorted, at the training resolution.
    images: photo ``i`` belongs to ``cameras[i]``.
    points: sparse points in the input frame, or None.
    train, test: indices into ``cameras``, ascending; disjoint.
    notes: sentences worth telling the user.
    """

    root: Path
    kind: Kind
    cameras: list[Camera]
    images: ImageStore
    points: PointCloud | None
    train: list[int]
    test: list[int]
    notes: list[str] = field(default_factory=list)

    @property
    def extent(self) -> float:
        """1.1 times the largest distance of a training camera from the mean of all, in world units."""
        centers = np.stack([self.cameras[i].center for i in self.train])
        distances = np.linalg.norm(centers - centers.mean(axis=0), axis=1)
        return float(distances.max()) * EXTENT_MARGIN

    def fingerprint(self) -> dict[str, str | int]:
        """Count of photos, and a SHA-256 over names, sizes, and the first and last 64 kB of each.

        Raises SceneError when a photo has gone.
        """
        digest = hashlib.sha256()
        for camera, source in zip(self.cameras, self.images.sources, strict=True):
            try:
                with source.path.open("rb") as file:
                    size = source.path.stat().st_size
                    digest.update(f"{camera.name}\0{size}\0".encode())
                    digest.update(file.read(_SAMPLE))
                    file.seek(max(0, size - _SAMPLE))
                    digest.update(file.read(_SAMPLE))
            except OSError as error:
                raise SceneError(
                    f"cannot read the photo: {error.strerror}", where=source.path, remedy="put the file back"
                ) from None
        return {"count": len(self.cameras), "sha256": digest.hexdigest()}
