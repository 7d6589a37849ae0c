"""The scene of a run that goes on: where it is, and whether it is still the one that was trained on."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from splatcli.checkpoint.state import Checkpoint
from splatcli.config import DataConfig
from splatcli.disk import is_there
from splatcli.errors import SceneError
from splatcli.scene.camera import Camera
from splatcli.scene.decode import Rgb
from splatcli.scene.depth_maps import AUTO
from splatcli.scene.read import read_scene
from splatcli.scene.scene import DEPTHS, LENSES, Scene
from splatcli.sizes import listed

_log = logging.getLogger(__name__)

#: Differences that a message lists.
_LISTED = 8

#: Relative to the scene extent and to the focal length: the rounding of another version of a scene reader.
_TOLERANCE = 1e-5

#: Names of the entries of a fingerprint in messages.
_FINGERPRINT = {
    "count": "the number of photos",
    "sha256": "the digest of the photos",
    "masks": "the digest of the masks",
    DEPTHS: "the digest of the depth maps",
    LENSES: "the digest of the lenses that are undone in the photos",
}

#: Differences of the scene that --allow-config-change accepts.
CONSENT = {"photos": "the contents of the photos", "cameras": "lenses and poses in the scene's files"}


def scene_folder(checkpoint: Checkpoint, data: Path | None, remedy: str = "--data DIR") -> Path:
    """Return the folder of a run's scene: ``data`` where it is given. Raise SceneError where the run's own is gone.

    remedy: what names its present folder.
    """
    root = data or Path(checkpoint.dataset.root)
    if data is None and not is_there(root):
        raise SceneError(
            "the scene of this run does not exist", where=root, remedy=f"name its present folder: {remedy}"
        )
    return root


def data_to_resume(data: DataConfig) -> tuple[DataConfig, list[str]]:
    """Return the settings to read the scene of a resumed run with, and notes: without points that are gone.

    The checkpoint has what the points gave: Gaussians, near planes, clearances and settings. Only their depths and the
    bounds of a block are not in it; SceneError where these are needed.
    """
    if data.points is None or Path(data.points).exists():
        return data, []
    use = None
    if data.block is not None:
        use = "its block is cut by them"
    elif data.depths == AUTO:
        use = "its depth term uses their depths"
    elif data.depths is not None and data.depth_type != "metric":
        use = "its depth maps are fitted to them"
    if use is not None:
        raise SceneError(
            f"the points that the run began with are gone, and {use}",
            where=data.points,
            remedy="put them back, or say where they are: --set data.points=PATH",
        )
    note = f"the points that the run began with are gone, and not needed any more: {data.points}"
    return data.model_copy(update={"points": None}), [note]


def run_scene(checkpoint: Checkpoint, data: Path | None, background: Rgb | None, *, alike: bool = True) -> Scene:
    """Return the scene of a run with its images as they are now; a logged error says what has changed since.

    data: where it is now, if it has moved. background: as of read_scene(). alike: views that are not those of the run,
    or not of their sizes, raise SceneError; else a caller looks for each by its name.
    Raises SceneError where the scene is gone.
    """
    settings = checkpoint.config.data.images_only()
    scene = read_scene(scene_folder(checkpoint, data), settings, background=background)
    differences = list(_differences(checkpoint, scene, images_only=True))
    if alike:
        _check(checkpoint, scene, differences, allowed=CONSENT)
    log_changes(checkpoint, scene, differences=differences)
    return scene


def log_changes(
    checkpoint: Checkpoint, scene: Scene, *, of: Path | None = None, differences: list[tuple[str, str]] | None = None
) -> None:
    """Log an error where the images or cameras of ``scene``, read for its images, are not those of a run.

    of: the checkpoint's file, where it is not clear which is meant. differences: those that are known already.
    """
    if differences is None:
        differences = list(_differences(checkpoint, scene, images_only=True))
    if differences:
        _log.error(
            "%s: the scene has changed since step %d%s was saved: %s; its images are used as they are now, with the "
            "cameras of the run",
            scene.root,
            checkpoint.step,
            "" if of is None else f" in {of}",
            listed([text for _, text in differences], _LISTED, "; "),
        )


def check_same_scene(checkpoint: Checkpoint, scene: Scene, allowed: Collection[str]) -> None:
    """Raise SceneError, listing the differences, unless images, split and cameras are those of the run.

    allowed: names in CONSENT: with "photos" the content of images may differ, with "cameras" lens and pose (the run
        keeps its own). Names, sizes and the split may not.
    """
    _check(checkpoint, scene, _differences(checkpoint, scene), allowed)


def _check(
    checkpoint: Checkpoint, scene: Scene, differences: Iterable[tuple[str, str]], allowed: Collection[str]
) -> None:
    differences = [(kind, text) for kind, text in differences if kind not in allowed]
    if not differences:
        return
    changes = listed([text for _, text in differences], _LISTED, "; ")
    kinds = sorted({kind for kind, _ in differences})
    remedy = "give the folder that the run was started on, or start a new run from its model: "
    remedy += "splat train SCENE --init CKPT"
    if set(kinds) <= CONSENT.keys():
        flags = " ".join(f"--allow-config-change {kind}" for kind in kinds)
        remedy += f"; {flags} goes on, whatever {' and '.join(CONSENT[kind] for kind in kinds)} are now"
    raise SceneError(
        f"the scene has changed since step {checkpoint.step} was saved: {changes}",
        where=scene.root,
        remedy=remedy,
    )


def fingerprint_differences(before: Mapping[str, str | int], now: Mapping[str, str | int]) -> Iterator[tuple[str, str]]:
    """Yield (kind, sentence) of each difference of two fingerprints, as check_same_scene() lists them."""
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key) and not (key == LENSES and key not in before):  # of an earlier version
            kind = "views" if key == "count" else "photos"
            yield kind, f"{_FINGERPRINT.get(key, key)} was {_short(before.get(key))}, is {_short(now.get(key))}"


def _differences(checkpoint: Checkpoint, scene: Scene, *, images_only: bool = False) -> Iterator[tuple[str, str]]:
    """Yield (kind, sentence) of each difference; kinds beside those of CONSENT are "views" and "sizes".

    images_only: the scene was read without depth maps.
    """
    before = dict(checkpoint.dataset.fingerprint)
    if images_only:
        before.pop(DEPTHS, None)
    yield from fingerprint_differences(before, scene.fingerprint())
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
    if old.model != new.model:
        return "cameras", f"{old.name} was a {old.model}, is a {new.model}"
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
