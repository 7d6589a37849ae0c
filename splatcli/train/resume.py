"""Whether a scene on disk is still the one that a checkpoint was trained on."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np

from splatcli.checkpoint.state import Checkpoint
from splatcli.errors import SceneError
from splatcli.scene.camera import Camera
from splatcli.scene.scene import Scene

#: Differences that a message lists.
_LISTED = 8

#: Relative to the scene extent, and to the focal length: what another version of a reader's arithmetic may do.
_TOLERANCE = 1e-5


#: What the entries of a fingerprint are called.
_FINGERPRINT = {
    "count": "the number of photos",
    "sha256": "the digest of the photos",
    "masks": "the digest of the masks",
    "depths": "the digest of the depth maps",
}

#: What may differ if the user says so, and how that is said.
CONSENT = {"photos": "the photos' content", "cameras": "lenses and poses in the scene's files"}


def check_same_scene(checkpoint: Checkpoint, scene: Scene, allowed: Collection[str] = ()) -> None:
    """Raises SceneError, listing the differences, unless photos, split and cameras are those of the run.

    allowed: names in CONSENT: of "photos" the content may differ, of "cameras" lens and pose (the run goes on with
        those that it has). Names, sizes and the split may not.
    """
    found = [(kind, text) for kind, text in _differences(checkpoint, scene) if kind not in allowed]
    if not found:
        return
    listed = [text for _, text in found[:_LISTED]]
    more = f"; and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    kinds = sorted({kind for kind, _ in found})
    remedy = "give the folder that the run was started on, or start a new run from its model: "
    remedy += "splat train SCENE --init CKPT"
    if set(kinds) <= CONSENT.keys():
        flags = " ".join(f"--allow-config-change {kind}" for kind in kinds)
        remedy += f"; {flags} goes on, whatever {' and '.join(CONSENT[kind] for kind in kinds)} are now"
    raise SceneError(
        f"the scene has changed since step {checkpoint.step} was saved: " + "; ".join(listed) + more,
        where=scene.root,
        remedy=remedy,
    )


def _differences(checkpoint: Checkpoint, scene: Scene) -> Iterator[tuple[str, str]]:
    """(kind, sentence) of each; kinds beside those of CONSENT are "views" and "sizes"."""
    before, now = checkpoint.dataset.fingerprint, scene.fingerprint()
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            kind = "views" if key == "count" else "photos"
            yield kind, f"{_FINGERPRINT.get(key, key)} was {_short(before.get(key))}, is {_short(now.get(key))}"
    if len(checkpoint.cameras) != len(scene.cameras):
        yield "views", f"there were {len(checkpoint.cameras)} views, there are {len(scene.cameras)}"
        return
    if (checkpoint.train, checkpoint.test) != (list(scene.train), list(scene.test)):
        yield "views", "other views are held out"
    for old, new in zip(checkpoint.cameras, scene.cameras, strict=True):
        difference = _camera_difference(old, new, checkpoint.dataset.extent)
        if difference is not None:
            yield difference


def _camera_difference(old: Camera, new: Camera, extent: float) -> tuple[str, str] | None:
    if old.name != new.name:
        return "views", f"view {old.name!r} is now {new.name!r}"
    if (old.width, old.height) != (new.width, new.height):
        return "sizes", f"{old.name} was {old.width}x{old.height}, is {new.width}x{new.height}"
    lens = np.array([[c.fx, c.fy, c.cx, c.cy] for c in (old, new)])
    turned = np.abs(old.viewmat[:3, :3] - new.viewmat[:3, :3]).max()
    moved = np.abs(old.center - new.center).max()
    # Written so that NaN counts as a difference.
    if not (np.abs(lens[0] - lens[1]).max() <= _TOLERANCE * old.fx):
        return "cameras", f"{old.name} has another focal length or principal point"
    if not (turned <= _TOLERANCE and moved <= _TOLERANCE * extent):
        return "cameras", f"{old.name} has another pose"
    return None


def _short(value: str | int | None) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 12 else text[:12] + "..."
