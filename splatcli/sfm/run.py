"""Structure from motion as a folder: made once for the same photos and options, whole or not at all.

DIR/images/    the photos, linked, or the frames of a video
DIR/masks/     their masks, linked, where there are any
DIR/sparse/0/  COLMAP's binary model
DIR/sfm.json   what it was made from, and the report
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from splatcli.errors import OutputError, ResourceError
from splatcli.sfm.options import SfmOptions
from splatcli.sfm.photos import Footage
from splatcli.sfm.process import Tell, run_worker

REPORT = "sfm.json"
#: Changes when the same photos and options would give another result.
_VERSION = 1
_OVERWRITE = "--overwrite replaces it; or choose another place with -o"


@dataclass(frozen=True, slots=True)
class SfmResult:
    """A scene's folder, the report's figures, and whether they were there already."""

    folder: Path
    facts: dict[str, Any]
    reused: bool


def run_sfm(
    footage: Footage,
    options: SfmOptions,
    *,
    place: Path | None,
    beside: Path,
    overwrite: bool,
    gpu: bool,
    tell: Tell,
) -> SfmResult:
    """The scene of the photos in ``place``; without one in ``<beside>/<name>-sfm``, numbered where others have it.

    What is there already for the same photos and options is used again, unless ``overwrite`` says to replace it.
    Raises SceneError for photos that do not suffice, OutputError for the place, ResourceError when pycolmap crashed;
    nothing is left behind then.
    """
    key = {"version": _VERSION, "photos": footage.fingerprint(), "options": options.as_dict()}
    folder = (place or _free_place(beside, footage, key)).absolute()
    known = _known(folder)
    if known is not None and known.get("key") == key and not overwrite and _is_whole(folder, known):
        return SfmResult(folder, known, True)
    _check_place(folder, footage, known, overwrite=overwrite)
    with _ended_by_signals(), _temporary(folder) as made:
        threads = len(os.sched_getaffinity(0))
        facts = run_worker(footage, options, made, threads=threads, gpu=gpu, tell=tell)
        facts = {"source": str(footage.path), **facts, "key": key}
        shutil.rmtree(made / "work")
        (made / REPORT).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        _put(made, folder)
    return SfmResult(folder, facts, False)


def gpu_wanted(device: str) -> bool:
    """Whether pycolmap shall use a GPU, for ``auto``, ``cpu`` or ``cuda``. Raises ResourceError when it cannot."""
    import torch

    from splatcli.scene._pycolmap import pycolmap

    there = bool(pycolmap.has_cuda) and torch.cuda.is_available()
    if device.startswith("cuda") and not there:
        raise ResourceError(
            "pycolmap sees no GPU" if pycolmap.has_cuda else "this pycolmap was built without CUDA",
            where="--device",
            remedy="--device cpu; or install pycolmap-cuda12 in pycolmap's place, on a machine with an NVIDIA GPU",
        )
    return there and device != "cpu"


def _free_place(beside: Path, footage: Footage, key: dict[str, Any]) -> Path:
    """The first of NAME-sfm, NAME-sfm-2, ... that holds these cameras, or nothing yet."""
    source = footage.path
    if source.name == "images" and not footage.is_video:
        source = source.parent
    first = beside / f"{(source.stem if footage.is_video else source.name) or 'photos'}-sfm"
    place, number = first, 2
    while place.exists() and (_known(place) or {}).get("key") != key:
        place, number = first.with_name(f"{first.name}-{number}"), number + 1
    return place


def _known(folder: Path) -> dict[str, Any] | None:
    """The report in a folder; None when there is none that can be read."""
    try:
        facts = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return facts if isinstance(facts, dict) else None


def _is_whole(folder: Path, facts: dict[str, Any]) -> bool:
    """Whether model, photos and masks are still there."""
    sparse = folder / "sparse" / "0"
    if not all((sparse / f"{kind}.bin").is_file() for kind in ("cameras", "images", "points3D")):
        return False
    wanted = {"images": int(facts.get("total", 1)), "masks": int(facts.get("masks", 0))}
    return all(
        sum(1 for path in (folder / name).rglob("*") if path.is_file()) >= count for name, count in wanted.items()
    )


def _check_place(folder: Path, footage: Footage, known: dict[str, Any] | None, *, overwrite: bool) -> None:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not folder.is_dir():
        raise OutputError("this is a file; cameras need a folder", where=folder, remedy="choose another -o")
    for inside in (footage.path, Path.cwd()):
        if inside.resolve().is_relative_to(folder.resolve()):
            raise OutputError(
                f"{inside} lies in it, so it cannot be replaced", where=folder, remedy="choose another -o"
            )
    if known is None or "key" not in known:
        raise OutputError(
            "the folder has other content, which is not replaced", where=folder, remedy="choose another place with -o"
        )
    if not overwrite:
        raise OutputError(
            "it holds the cameras of other photos, or made with other options", where=folder, remedy=_OVERWRITE
        )


@contextlib.contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    """A folder beside ``folder`` that is gone at the end, as are those of processes that were killed."""
    made = folder.with_name(f"{folder.name}.tmp.{os.getpid()}.{secrets.token_hex(4)}")
    parents = [parent for parent in folder.parents if not parent.exists()]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder)
        made.mkdir()
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror}", where=error.filename) from None
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        for parent in parents:
            with contextlib.suppress(OSError):
                parent.rmdir()  # only if empty


def _remove_stale(folder: Path) -> None:
    """Removes what was left for this place by a process that is not there any more."""
    ours = re.compile(re.escape(folder.name) + r"\.tmp\.(\d+)\.[0-9a-f]{8}")
    for path in folder.parent.iterdir():
        found = ours.fullmatch(path.name)
        if found and not Path("/proc", found[1]).exists():
            shutil.rmtree(path, ignore_errors=True)


def _put(made: Path, folder: Path) -> None:
    """Moves a complete folder to its place; what was there goes when the new one is in."""
    old = made.with_name(f"{made.name}.old")
    try:
        if folder.exists():
            folder.rename(old)
        try:
            made.rename(folder)
        except OSError:
            if old.exists():
                old.rename(folder)
            raise
    except OSError as error:
        raise OutputError(f"cannot be put in its place: {error.strerror}", where=folder) from None
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit meanwhile, as SIGINT raises KeyboardInterrupt, so that nothing is left."""
    before = {}

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:
                before[number] = signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
