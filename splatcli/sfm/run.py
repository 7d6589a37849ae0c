"""Structure from motion as a folder: made once for the same images and options, whole or not at all.

DIR/images/    the images, linked, or the frames of videos
DIR/masks/     their masks, linked, where there are any
DIR/sparse/0/  COLMAP's binary model; further ones, which nothing connects with it, are in sparse/1/ and so on
DIR/sfm.json   what it was made from, and the report

Work happens in DIR.tmp.PID.RANDOM, whose file "lock" is locked meanwhile. A call that fails or is stopped leaves that
folder if it holds features, and the next call for the same images goes on with them.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import glob
import json
import logging
import os
import platform
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from splatcli import machine
from splatcli.checkpoint.atomic import ended_by_signals, other_process_lives, sync
from splatcli.disk import NO_LOCKS
from splatcli.errors import OutputError, ResourceError, SceneError, SplatError, UsageError
from splatcli.progress import Listener
from splatcli.scene import heif
from splatcli.scene.colmap import check_written
from splatcli.scene.control_points import MIN_IMAGES, MIN_POINTS, ControlPoints
from splatcli.scene.sfm_report import REPORT, read_report
from splatcli.sfm.execution import Execution
from splatcli.sfm.flight_log import flight_log_beside
from splatcli.sfm.images import SfmInput
from splatcli.sfm.options import COLOURS, KEY, LOCK, SfmOptions
from splatcli.sfm.worker import run_worker

_log = logging.getLogger(__name__)

#: Changes when what was made of the same images and options cannot be used any more; it is made anew then.
_VERSION = 2
#: Changes when the same images and options would give another result; what was made before is used, with a note: a new
#: model has another frame, in which runs and edits made with the former one would not fit. 1 is that of reports
#: without a number. 2: frames chosen by motion, whole and square, borders, dates and logos masked, mirrored photos
#: upright, no image registered by matches alone. 3: all photos that EXIF turns upright. 4: neighbours by the numbers in
#: names, pairs left out that only look alike.
_REVISION = 4
#: Changes when features or matches of the same images are others: those that an earlier version left are not used then.
_FEATURES = 5
_OVERWRITE = "--overwrite replaces it; or choose another place with -o"


@dataclass(frozen=True, slots=True)
class SfmResult:
    """A scene's folder, the report's figures, and whether they were there already."""

    folder: Path
    facts: dict[str, Any]
    reused: bool

    @property
    def is_earlier(self) -> bool:
        """Whether an earlier version made it, and this one would make another."""
        return int(self.facts.get("revision", 1)) < _REVISION


def run_sfm(
    inputs: SfmInput,
    options: SfmOptions,
    *,
    place: Path | None,
    beside: Path,
    overwrite: bool,
    gpu: bool,
    progress: Listener,
    automatic: bool = False,
) -> SfmResult:
    """Build the scene of the images in ``place``; by default in ``<beside>/<name>-sfm``, numbered where others have it.

    What is there already for the same images and options is used again, unless ``overwrite`` says to replace it.
    Raises SceneError for images that do not suffice or are not there, OutputError for the place, ResourceError when
    pycolmap crashed.
    Whatever ends this call, features and matches that were found are kept for the next one.
    automatic: for points that a run needs and no user asked for: nothing is kept where images do not suffice, and one
    of the default places that has the same with features of larger images is used, too.
    """
    key = _key_of(inputs, options)
    if automatic and place is None and not overwrite and (finer := _finer(beside, inputs, key)) is not None:
        return finer
    folder = (place or _free_place(beside, inputs, key)).absolute()
    if folder.is_symlink():
        folder = folder.resolve()  # the link stays, and the work is done on its target's disk
    _finish_put(folder)
    known = read_report(folder)
    overwrite = overwrite or (known.get("key") == key and _is_outdated(known))
    if not overwrite and _is_made(folder, known, key):
        return SfmResult(folder, known, True)
    _check_place(folder, inputs, key, overwrite=overwrite)
    _check_named(inputs, options)
    features_key = _features_key(key, options, gpu)
    with ended_by_signals(), _temporary(folder, features_key, keep_failed=not automatic, named=place or folder) as made:
        facts = run_worker(inputs, options, made, Execution(options.seed, machine.cores(), gpu, progress))
        facts = {"source": str(inputs.path), **facts, "not_read": list(inputs.unread)}
        facts |= {"videos_left_out": list(inputs.videos_beside), "copies": dict(inputs.copies)}
        facts |= {"edits": dict(inputs.edits)}
        facts |= {"revision": _REVISION, "key": key}
        known = read_report(folder)
        if not overwrite and _is_made(folder, known, key):  # by another call meanwhile
            shutil.rmtree(made)
            return SfmResult(folder, known, True)
        _check_place(folder, inputs, key, overwrite=overwrite)
        shutil.rmtree(made / "work")
        for name in (KEY, LOCK):
            (made / name).unlink(missing_ok=True)
        (made / REPORT).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        sync(made / REPORT)
        _put(made, folder)
    return SfmResult(folder, facts, False)


def made_before(inputs: SfmInput, options: SfmOptions, beside: Path) -> SfmResult | None:
    """Return what run_sfm() has made in a default place, with features of images of the same size or a larger one."""
    return _finer(beside, inputs, _key_of(inputs, options))


def _key_of(inputs: SfmInput, options: SfmOptions) -> dict[str, Any]:
    return {"version": _VERSION, "photos": inputs.fingerprint(), "options": options.as_dict()}


def _features_key(key: dict[str, Any], options: SfmOptions, gpu: bool) -> dict[str, Any]:
    """Return the key of features and matches: all that they depend on."""
    from splatcli.scene._pycolmap import pycolmap

    names = ("sharing", "cameras", "matched_model", "max_image_size", "max_features", "frames", "seed")
    chosen = {name: getattr(options, name) for name in names}
    return {**key, "features": _FEATURES, "options": chosen, "gpu": gpu, "pycolmap": pycolmap.__version__}


def gpu_wanted(device: str) -> bool:
    """Return whether pycolmap uses a GPU, for ``auto``, ``cpu`` or ``cuda``. Raises ResourceError when it cannot."""
    from splatcli.scene._pycolmap import pycolmap

    there = bool(pycolmap.has_cuda) and _torch_sees_gpu()
    if device.startswith("cuda") and not there:
        raise ResourceError(
            "pycolmap sees no GPU" if pycolmap.has_cuda else "this pycolmap was built without CUDA",
            where="--device",
            remedy="--device cpu; or install pycolmap-cuda12 in pycolmap's place, on a machine with an NVIDIA GPU",
        )
    return there and device != "cpu"


def _torch_sees_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _places(beside: Path, inputs: SfmInput) -> Iterator[Path]:
    """Yield NAME-sfm, NAME-sfm-2, ... up to the first that is not there."""
    source = inputs.path
    if source.name == "images" and source.is_dir():
        source = source.parent
    first = beside / f"{(source.stem if source.is_file() else source.name) or 'photos'}-sfm"
    place, number = first, 2
    _finish_put(place)
    while os.path.lexists(place):
        yield place
        place, number = first.with_name(f"{first.name}-{number}"), number + 1
        _finish_put(place)
    yield place


def _free_place(beside: Path, inputs: SfmInput, key: dict[str, Any]) -> Path:
    """Return the first of NAME-sfm, NAME-sfm-2, ... that holds these cameras, all of them, or nothing yet."""
    for place in _places(beside, inputs):
        known = read_report(place)
        if _is_made(place, known, key) or (known.get("key") == key and _is_outdated(known)):
            break
    return place


def _finer(beside: Path, inputs: SfmInput, key: dict[str, Any]) -> SfmResult | None:
    """Return the scene of ``key``, also of features of larger images, in one of the default places; None without."""
    for place in _places(beside, inputs):
        known = read_report(place)
        made_with = known.get("key")
        chosen = made_with.get("options") if isinstance(made_with, dict) else None
        size = chosen.get("max_image_size") if isinstance(chosen, dict) else None
        if not isinstance(size, int):
            continue
        same = {**key, "options": {**key["options"], "max_image_size": size}}
        if size >= key["options"]["max_image_size"] and _is_made(place, known, same) and not _is_outdated(known):
            return SfmResult(place.resolve() if place.is_symlink() else place.absolute(), known, True)
    return None


def _is_made(folder: Path, facts: dict[str, Any], key: dict[str, Any]) -> bool:
    """Return whether a folder, whose report is ``facts``, has the scene of ``key``: model, images and masks."""
    if facts.get("key") != key:
        return False
    try:
        check_written(folder / "sparse" / "0")
    except (SceneError, OSError):
        return False
    wanted = {"images": int(facts.get("total", 1)), "masks": int(facts.get("masks", 0))}
    return all(
        sum(1 for path in (folder / name).rglob("*") if path.is_file()) >= count for name, count in wanted.items()
    )


def _is_outdated(facts: dict[str, Any]) -> bool:
    """Return whether images were left out for an extra that is installed now, or what is kept now was not."""
    if facts.get("other_models") and "other_images" not in facts:
        return True
    if facts.get("stationary") and "static_masks" not in facts:
        return True
    return any(heif.INSTALL in reason for reason in facts.get("unreadable", {}).values()) and heif.can_read()


def _check_named(inputs: SfmInput, options: SfmOptions) -> None:
    """Raise UsageError or SceneError for options that cannot be met, before hours of mapping.

    That are --georeference on for a video, and images of --scale-from and --gcp that are not there.
    """
    if inputs.is_video:
        if options.georeference == "on" and not any(map(flight_log_beside, inputs.files)):
            raise UsageError(
                "the frames of a video have no GPS positions: no .SRT with those of a drone lies beside it",
                where="--georeference",
                remedy="leave it out; --scale-from A,B,LENGTH gives the model metres",
            )
        return
    # The faces of a panorama are named NAME/0.jpg, a HEIC may end otherwise in the model, and --gcp leaves folders out.
    there = {str(PurePosixPath(name).with_suffix("")) for name in inputs.names} | set(inputs.names)

    def known(name: str) -> bool:
        path = PurePosixPath(name)
        return str(path.with_suffix("")) in there or str(path.parent) in there

    if options.scale_from is not None:
        for name in options.known_distance()[:2]:
            if not known(name):
                close = difflib.get_close_matches(name, inputs.names, 1) or inputs.names
                raise SceneError(
                    f"{name!r} is not among the {len(inputs.names)} images",
                    where="--scale-from",
                    remedy=f"name two that are, such as {close[0]}",
                )
    if options.control_points is not None:
        control = ControlPoints.from_dict(options.control_points)
        there |= {PurePosixPath(name).name for name in there}
        marked = [sum(known(name) or known(Path(name).name) for name in point.pixels) for point in control.points]
        usable = sum(count >= MIN_IMAGES for count in marked)
        if usable < MIN_POINTS:
            raise SceneError(
                f"{usable} of {len(marked)} control points are marked in {MIN_IMAGES} of the {len(inputs.names)} "
                f"images or more, at least {MIN_POINTS} are needed",
                where=control.file,
                remedy=f"mark more, and name images as they are named here, such as {inputs.names[0]}",
            )


def _check_place(folder: Path, inputs: SfmInput, key: dict[str, Any], *, overwrite: bool) -> None:
    """Raise OutputError for a folder that the scene of ``key`` may not be put at."""
    if folder.is_mount():
        raise OutputError(
            "another disk is mounted here, so that a scene cannot be put in its place",
            where=folder,
            remedy=f"name a folder in it: -o {folder / 'scene'}",
        )
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not folder.is_dir():
        raise OutputError("this is a file; cameras need a folder", where=folder, remedy="choose another -o")
    for inside in (inputs.path, Path.cwd()):
        if inside.resolve().is_relative_to(folder.resolve()):
            raise OutputError(
                f"{inside} lies in it, so it cannot be replaced", where=folder, remedy="choose another -o"
            )
    known = read_report(folder)
    if "key" not in known:
        raise OutputError(
            "the folder has other content, which is not replaced", where=folder, remedy="choose another place with -o"
        )
    if not overwrite:
        raise OutputError(
            "it was made of these images, and files of the model, images or masks in it are gone or damaged"
            if known["key"] == key
            else "it holds the cameras of other images, or made with other options",
            where=folder,
            remedy=_OVERWRITE,
        )


@contextlib.contextmanager
def _temporary(folder: Path, key: dict[str, Any], *, keep_failed: bool, named: Path) -> Iterator[Path]:
    """Have a folder to work in, beside ``folder``; what an earlier call with this key left may be in it.

    It is removed at the end, unless an exception ends the block and features were found. keep_failed: also where it is
    a SceneError. named: the folder as errors name it.
    """
    made = folder.with_name(f"{folder.name}.tmp.{os.getpid()}.{secrets.token_hex(4)}")
    parents = [parent for parent in folder.parents if not parent.exists()]
    with contextlib.ExitStack() as stack:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            left = _left_over(folder, key, stack)
            if left is None:
                made.mkdir()
                _lock(made, stack)
            else:
                left.rename(made)
                _log.info("features and matches of the last try are used again")
            (made / KEY).write_text(json.dumps(key), encoding="utf-8")
        except OSError as error:
            raise _not_written(error, named) from None
        try:
            with _named(made, named):
                yield made
        except BaseException as error:
            if isinstance(error, SceneError) and not keep_failed:
                shutil.rmtree(made, ignore_errors=True)
            if _has_features(made):
                _log.info(f"features and matches are kept in {made}; the same command goes on with them")
            raise
        finally:
            if not _has_features(made):
                shutil.rmtree(made, ignore_errors=True)
            for parent in parents:
                with contextlib.suppress(OSError):
                    parent.rmdir()  # only if empty


def _not_written(error: OSError, folder: Path) -> OutputError:
    return OutputError(
        f"cannot be written: {error.strerror}", where=folder, remedy="make room there, or choose another place with -o"
    )


@contextlib.contextmanager
def _named(made: Path, folder: Path) -> Iterator[None]:
    """Let errors that lie in ``made`` name ``folder``, which the user named."""
    try:
        yield
    except OSError as error:
        if not Path(os.fsdecode(error.filename or "")).is_relative_to(made):
            raise
        raise _not_written(error, folder) from None
    except SplatError as error:
        if error.where is None or not Path(error.where).is_relative_to(made):
            raise
        raise type(error)(error.what, where=folder, remedy=error.remedy) from None


def _has_features(made: Path) -> bool:
    return (made / "work" / COLOURS).is_dir() and any((made / "work" / COLOURS).iterdir())


def _left_over(folder: Path, key: dict[str, Any], stack: contextlib.ExitStack) -> Path | None:
    """Return what an earlier, ended call left for this place and key, or None; remove what others left.

    stack: holds the lock of what is returned.
    """
    ours = re.compile(re.escape(folder.name) + r"\.tmp\.(\d+)\.[0-9a-f]{8}")
    found: Path | None = None
    for path in sorted(folder.parent.iterdir()):
        match = ours.fullmatch(path.name)
        if match is None:
            continue
        with contextlib.ExitStack() as own:
            if not _lock(path, own, int(match[1])):
                continue
            try:
                same = json.loads((path / KEY).read_text(encoding="utf-8")) == key
            except (OSError, ValueError):
                same = False
            if same and found is None and _has_features(path):
                found = path
                stack.push(own.pop_all())
            else:
                shutil.rmtree(path, ignore_errors=True)
    return found


def _lock(made: Path, stack: contextlib.ExitStack, owner: int | None = None) -> bool:
    """Lock a folder to work in until ``stack`` is closed; return whether no other call works in it.

    The file LOCK holds the name of the machine.
    owner: the process that made the folder; None is this one. It counts where the file system has no locks and where
    the folder has no lock file; of another machine nobody knows whether it has ended, and it counts as working.
    """
    try:
        file = stack.enter_context((made / LOCK).open("w" if owner is None else "r+", encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return owner is not None and not other_process_lives(owner)
    except PermissionError:
        if owner is None:
            raise
        return False  # somebody else's
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        if owner is not None and (file.read() != platform.node() or other_process_lives(owner)):
            return False
    if owner is None:
        file.write(platform.node())
        file.flush()
    return True


def _put(made: Path, folder: Path) -> None:
    """Move a complete folder to its place; what was there is removed when the new one is in.

    A folder that is there and empty stays, with its permissions, and as somebody's current folder: the report, which
    makes it whole, comes last.
    """
    old = made.with_name(f"{made.name}.old")
    try:
        if folder.exists() and not any(folder.iterdir()):
            for path in sorted(made.iterdir(), key=lambda path: path.name == REPORT):
                path.rename(folder / path.name)
            return
        if folder.exists():
            folder.rename(old)
        try:
            made.rename(folder)
        except BaseException:  # also a signal
            if old.exists() and not folder.exists():
                old.rename(folder)
            raise
    except OSError as error:
        raise OutputError(f"cannot be put in its place: {error.strerror}", where=folder) from None
    shutil.rmtree(old, ignore_errors=True)


def _finish_put(folder: Path) -> None:
    """Finish what a process that was killed in _put() began: put the new folder in, else the old one back."""
    folder = folder.absolute()
    ours = re.compile(re.escape(folder.name) + r"\.tmp\.(\d+)\.[0-9a-f]{8}\.old")
    for old in folder.parent.glob(f"{glob.escape(folder.name)}.tmp.*.old"):
        match = ours.fullmatch(old.name)
        if match is None or other_process_lives(int(match[1])):
            continue
        made = old.with_suffix("")
        if not os.path.lexists(folder):
            try:
                (made if (made / REPORT).is_file() else old).rename(folder)
            except OSError as error:
                raise OutputError(f"cannot be put in its place: {error.strerror}", where=folder) from None
            _log.info(f"a call that was killed left the scene beside {folder}; it is in its place again")
        shutil.rmtree(old, ignore_errors=True)
