"""Which views of a run are meant by ``test``, ``train``, ``all`` or a camera file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from splatcli.errors import UsageError
from splatcli.scene.camera import Camera
from splatcli.views.cameras import read_cameras

_NAMES = ("test", "train", "all")


@dataclass(frozen=True, slots=True)
class Views:
    """Cameras to render.

    label: a word for folders and messages.
    from_run: they are the run's own, so that photos of the scene can be compared with them.
    """

    label: str
    cameras: list[Camera]
    from_run: bool


def select_views(text: str, cameras: Sequence[Camera], train: Sequence[int], test: Sequence[int]) -> Views:
    """The views that ``text`` asks for.

    cameras, train, test: the run's; all empty when the model is a bare PLY.
    Raises UsageError when there are none, SceneError for a broken camera file.
    """
    if text not in _NAMES:
        path = Path(text)
        if path.suffix.lower() != ".json":
            raise UsageError(
                f"{text!r} names no views", where="--views", remedy="test, train, all, or a .json of cameras"
            )
        return Views(path.stem, read_cameras(path), from_run=False)
    if not cameras:
        raise UsageError(
            "this model carries no cameras", where="--views", remedy="give a file with cameras: --views cameras.json"
        )
    indices = {"test": test, "train": train, "all": range(len(cameras))}[text]
    if not indices:
        raise UsageError(
            f"the run has no {'held-out' if text == 'test' else text} views",
            where="--views",
            remedy="--views train or --views all",
        )
    return Views(text, [cameras[i] for i in indices], from_run=True)
