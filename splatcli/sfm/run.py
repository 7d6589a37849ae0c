"""Structure from motion as a folder: made once for the same images and options, whole or not at all.

DIR/images/    the images, linked, or the frames of a video
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
import math
import os
import platform
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from splatcli import errors, machine
from splatcli.checkpoint.atomic import ended_by_signals, other_process_lives, sync
from splatcli.disk import NO_LOCKS, free_bytes
from splatcli.errors import OutputError, ResourceError, SceneError, SplatError, UsageError
from splatcli.scene import heif
from splatcli.scene._pycolmap import ALONE
from splatcli.scene.control_points import MIN_IMAGES, MIN_POINTS, ControlPoints
from splatcli.scene.find_images import listed, unread_note
from splatcli.scene.inspect import few_notes
from splatcli.scene.sfm_report import REPORT
from splatcli.sfm.images import SfmInput
from splatcli.sfm.options import COLOURS, LOCK, SMALLER, SfmOptions

_log = logging.getLogger(__name__)

#: Changes when the same images and options would give another result.
_VERSION = 2
_OVERWRITE = "--overwrite replaces it; or choose another place with -o"


@dataclass(frozen=True, slots=True)
class SfmResult:
    """A scene's folder, the report's figures, and whether they were there already."""

    folder: Path
    facts: dict[str, Any]
    reused: bool


def run_sfm(
    footage: SfmInput,
    options: SfmOptions,
    *,
    place: Path | None,
    beside: Path,
    overwrite: bool,
    gpu: bool,
    tell: Tell,
    keep_failed: bool = True,
) -> SfmResult:
    """Build the scene of the images in ``place``; by default in ``<beside>/<name>-sfm``, numbered where others have it.

    What is there already for the same images and options is used again, unless ``overwrite`` says to replace it.
    Raises SceneError for images that do not suffice or are not there, OutputError for the place, ResourceError when
    pycolmap crashed.
    Whatever ends this call, features and matches that were found are kept for the next one; ``keep_failed=False`` keeps
    none where images do not suffice.
    """
    key = {"version": _VERSION, "photos": footage.fingerprint(), "options": options.as_dict()}
    folder = (place or _free_place(beside, footage, key)).absolute()
    if folder.is_symlink():
        folder = folder.resolve()  # the link stays, and the work is done on its target's disk
    _finish_put(folder)
    known = _known(folder) or {}
    overwrite = overwrite or (known.get("key") == key and _is_outdated(known))
    if not overwrite and _is_made(folder, known, key):
        return SfmResult(folder, known, True)
    _check_place(folder, footage, key, overwrite=overwrite)
    _check_named(footage, options)
    with ended_by_signals(), _temporary(folder, _features_key(key, options, gpu), keep_failed) as made:
        threads = machine.cores()
        facts = run_worker(footage, options, made, threads=threads, gpu=gpu, tell=tell)
        facts = {"source": str(footage.path), **facts, "not_read": list(footage.unread), "key": key}
        known = _known(folder) or {}
        if not overwrite and _is_made(folder, known, key):  # by another call meanwhile
            shutil.rmtree(made)
            return SfmResult(folder, known, True)
        _check_place(folder, footage, key, overwrite=overwrite)
        shutil.rmtree(made / "work")
        for name in (_KEY, LOCK):
            (made / name).unlink()
        (made / REPORT).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        sync(made / REPORT)
        _put(made, folder)
    return SfmResult(folder, facts, False)


def _features_key(key: dict[str, Any], options: SfmOptions, gpu: bool) -> dict[str, Any]:
    """Return what features and matches depend on."""
    from splatcli.scene._pycolmap import pycolmap

    names = ("sharing", "cameras", "matched_model", "max_image_size", "max_features", "frames", "seed")
    chosen = {name: getattr(options, name) for name in names}
    return {**key, "options": chosen, "gpu": gpu, "pycolmap": pycolmap.__version__}


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


def _free_place(beside: Path, footage: SfmInput, key: dict[str, Any]) -> Path:
    """Return the first of NAME-sfm, NAME-sfm-2, ... that holds these cameras, all of them, or nothing yet."""
    source = footage.path
    if source.name == "images" and not footage.is_video:
        source = source.parent
    first = beside / f"{(source.stem if footage.is_video else source.name) or 'photos'}-sfm"
    place, number = first, 2
    _finish_put(place)
    while os.path.lexists(place):
        known = _known(place) or {}
        if _is_made(place, known, key) or (known.get("key") == key and _is_outdated(known)):
            break
        place, number = first.with_name(f"{first.name}-{number}"), number + 1
        _finish_put(place)
    return place


def _known(folder: Path) -> dict[str, Any] | None:
    """Return the report in a folder; None when there is none that can be read."""
    try:
        facts = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return facts if isinstance(facts, dict) else None


def _is_made(folder: Path, facts: dict[str, Any], key: dict[str, Any]) -> bool:
    """Return whether a folder, whose report is ``facts``, has the scene of ``key``: model, images and masks."""
    sparse = folder / "sparse" / "0"
    if facts.get("key") != key or not all(
        (sparse / f"{kind}.bin").is_file() for kind in ("cameras", "images", "points3D")
    ):
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


def _check_named(footage: SfmInput, options: SfmOptions) -> None:
    """Raise UsageError or SceneError for what cannot be followed, before hours of mapping.

    That are --georeference on for a video, and images of --scale-from and --gcp that are not there.
    """
    if footage.is_video:
        if options.georeference == "on":
            raise UsageError(
                "the frames of a video have no GPS positions",
                where="--georeference",
                remedy="leave it out; --scale-from A,B,LENGTH gives the model metres",
            )
        return
    # The faces of a panorama are named NAME/0.jpg, a HEIC may end otherwise in the model, and --gcp leaves folders out.
    there = {str(PurePosixPath(name).with_suffix("")) for name in footage.names} | set(footage.names)

    def known(name: str) -> bool:
        path = PurePosixPath(name)
        return str(path.with_suffix("")) in there or str(path.parent) in there

    if options.scale_from is not None:
        for name in options.known_distance()[:2]:
            if not known(name):
                close = difflib.get_close_matches(name, footage.names, 1) or footage.names
                raise SceneError(
                    f"{name!r} is not among the {len(footage.names)} images",
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
                f"{usable} of {len(marked)} control points are marked in {MIN_IMAGES} of the {len(footage.names)} "
                f"images or more, at least {MIN_POINTS} are needed",
                where=control.file,
                remedy=f"mark more, and name images as they are named here, such as {footage.names[0]}",
            )


def _check_place(folder: Path, footage: SfmInput, key: dict[str, Any], *, overwrite: bool) -> None:
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
    for inside in (footage.path, Path.cwd()):
        if inside.resolve().is_relative_to(folder.resolve()):
            raise OutputError(
                f"{inside} lies in it, so it cannot be replaced", where=folder, remedy="choose another -o"
            )
    known = _known(folder)
    if known is None or "key" not in known:
        raise OutputError(
            "the folder has other content, which is not replaced", where=folder, remedy="choose another place with -o"
        )
    if not overwrite:
        raise OutputError(
            "it was made of these images, and files of the model, images or masks in it are gone"
            if known["key"] == key
            else "it holds the cameras of other images, or made with other options",
            where=folder,
            remedy=_OVERWRITE,
        )


#: In a folder that is being worked in: what its features were made from. Its LOCK holds the name of the machine.
_KEY = "key.json"


@contextlib.contextmanager
def _temporary(folder: Path, key: dict[str, Any], keep_failed: bool) -> Iterator[Path]:
    """Have a folder to work in, beside ``folder``; what an earlier call with this key left may be in it.

    It is removed at the end, unless an exception ends the block and features were found. keep_failed: also where it is
    a SceneError.
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
            (made / _KEY).write_text(json.dumps(key), encoding="utf-8")
        except OSError as error:
            raise OutputError(f"cannot be written: {error.strerror}", where=error.filename) from None
        try:
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
                same = json.loads((path / _KEY).read_text(encoding="utf-8")) == key
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


Tell = Callable[[str, int, int], None]

#: Bytes that are free on a disk that is not full.
_LEAST_FREE = 1 << 16
#: Bytes at the end of the worker's log in which the reason of a crash is looked for.
_LOG_TAIL = 16 << 10


def run_worker(
    footage: SfmInput, options: SfmOptions, folder: Path, *, threads: int, gpu: bool, tell: Tell
) -> dict[str, Any]:
    """Run the worker in ``folder``; return its facts. Raises what the worker met, ResourceError when it crashed.

    Whatever ends this call, Ctrl-C included, the worker has ended too when it returns.
    """
    request = {
        "path": str(footage.path),
        "names": footage.names,
        "masks": dict(footage.masks),
        "mask_folder": None if footage.mask_folder is None else str(footage.mask_folder),
        "static_masks": footage.static_masks,
        "options": options.as_dict(),
        "folder": str(folder),
        "threads": threads,
        "gpu": gpu,
    }
    # The worker has no terminal to be stopped from, and must find this very package, installed or not.
    package = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    log = folder / "log"
    with log.open("wb") as errors_to:
        worker = subprocess.Popen(
            [sys.executable, "-m", "splatcli.sfm.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors_to,
            env={**os.environ, "PYTHONPATH": paths, ALONE: "1"},
            text=True,
            encoding="utf-8",
        )
        try:
            outcome = _listen(worker, request, tell)
            worker.wait()
        finally:
            worker.kill()
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):  # what was not read of a long request
                        pipe.close()
    if "facts" in outcome:
        log.unlink()
        return dict(outcome["facts"])
    if "error" in outcome:
        raise _rebuilt(outcome["error"])
    raise crashed(worker.returncode, log)


def _listen(worker: subprocess.Popen[str], request: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Return the last word of the worker; empty when it ended without one."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        worker.stdin.write(json.dumps(request))
        worker.stdin.close()
    except BrokenPipeError:
        return {}
    for line in worker.stdout:
        fact: dict[str, Any] = json.loads(line)
        if "phase" not in fact:
            return fact
        tell(fact["phase"], fact["done"], fact["total"])
    return {}


def crashed(code: int, log: Path) -> SplatError:
    """Return the error for a worker that ended without a word. code: as Popen.returncode, negative for a signal.

    log: lies in the folder that the worker wrote to.
    """
    if code == -signal.SIGKILL:
        return ResourceError(
            "structure from motion was killed, most likely because the machine ran out of memory", remedy=SMALLER
        )
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    reason = _last_words(log)
    if "MemoryError" in reason or "bad_alloc" in reason:
        return ResourceError("the machine ran out of memory during structure from motion", remedy=SMALLER)
    if "disk is full" in reason or free_bytes(log.parent) < _LEAST_FREE:  # SQLite's words, if there was room for them
        return OutputError(
            "the disk became full during structure from motion",
            where=log.parent,
            remedy="free some space, or choose another place with -o",
        )
    return ResourceError(
        f"pycolmap ended {how} during structure from motion" + (f": {reason}" if reason else ""),
        remedy=f"{SMALLER}; or compute cameras with COLMAP, and name the scene's folder",
    )


def _last_words(log: Path) -> str:
    """Return the last line of a log that says something, without pycolmap's stamp of time and place."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_TAIL))
        lines = file.read().decode(errors="replace").splitlines()
    telling = [line for line in lines if line[:1] in ("E", "F") and "] " in line[:90]] or lines
    telling = [line.removeprefix("  what():  ") for line in telling]
    telling = [line for line in telling if line.strip() and not line.startswith((" ", "***", "PC: @"))]
    return telling[-1].split("] ", 1)[-1].strip()[:300] if telling else ""


def _rebuilt(facts: dict[str, Any]) -> SplatError:
    """Return the worker's error, of the kind that it was there."""
    kinds = {
        kind.code: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SplatError)
    }
    return kinds[facts["error"]](facts["what"], where=facts["where"], remedy=facts["help"])


#: Of the images, the share below which the result is doubtful; and mean reprojection errors above, in pixels.
_FEW, _LARGE_ERROR = 0.8, 1.5
#: Observations per image, and degrees of parallax, below which the result is doubtful. The mapper registers an image
#: from 30 observations. It finds no pair to begin with below about 4 degrees (tests/sfm/test_captures.py); a walk
#: through a room that trains well has 6.2, the other real scenes tried 19 to 48.
_FEW_OBSERVATIONS, _LITTLE_PARALLAX = 100, 4.5
#: Names that a line shows, and cameras.
_MAX_LISTED, _SHOWN = 8, 5


def notes(facts: dict[str, Any]) -> list[str]:
    """Return what became of the images that are not in the model, a sentence each."""
    found = []
    if missing := facts["unregistered"]:
        found.append(
            f"{facts['registered']} of {facts['total']} images are registered; left out: {listed(missing, _MAX_LISTED)}"
        )
    for number, names in enumerate(facts.get("other_images", []), start=1):
        found.append(
            f"{len(names)} images form a model of their own, kept as sparse/{number}: {listed(names, _MAX_LISTED)}; "
            f"sparse/0, the largest, is used"
        )
    for fact in facts.get("zoomed") or []:
        found.append(
            f"the focal length changes from image to image, between {fact['focal_px'][0]:.0f} and "
            f"{fact['focal_px'][1]:.0f} pixels: each of {fact['images']} images has a lens of its own, which is off by "
            f"{fact['error_px']:.2f} instead of {fact['error_px_shared']:.2f} pixels on held-out points; "
            "splat sfm --camera-per image maps with such lenses from the start"
        )
    placed = facts.get("georeference") or {}
    for name, reason in list(placed.get("control_points_not_placed", {}).items())[:_SHOWN]:
        found.append(f"control point {name} is not used: {reason}")
    if "control_points" in placed and placed["left_out"]:
        found.append(
            f"control points that disagree with the others are left out: {listed(placed['left_out'], _MAX_LISTED)}"
        )
    return found


def doubts(facts: dict[str, Any]) -> list[str]:
    """Return doubts about the result, a sentence each with what may help."""
    found = []
    if facts["registered"] < _FEW * facts["total"]:
        matching = "" if facts["matching"] == "exhaustive" else "--matching exhaustive and "
        found.append(
            f"only {facts['registered']} of {facts['total']} images could be registered: take more images in between, "
            f"or try {matching}a larger --max-image-size"
        )
    if not facts["reprojection_error_px"] <= _LARGE_ERROR and facts.get("cameras_held"):
        found.append(
            f"points are off by {facts['reprojection_error_px']:.2f} pixels on average with these cameras: splat train "
            "--pose-opt refines their poses, or splat sfm IMAGES estimates others"
        )
    elif not facts["reprojection_error_px"] <= _LARGE_ERROR:
        lenses = {camera["model"] for camera in facts["cameras"]}
        model = "another --camera-model than OPENCV" if lenses == {"OPENCV"} else "--camera-model OPENCV"
        lens = "other lens models do not help; try " if facts.get("lenses") else f"try {model}, and "
        found.append(
            f"points are off by {facts['reprojection_error_px']:.2f} pixels on average: {lens}"
            "--camera-per image if lenses were changed or zoomed"
        )
    held = bool(facts.get("cameras_held"))
    found += few_notes(facts["registered"], facts["points"], cameras_held=held)
    if facts.get("observations_per_image", math.inf) < _FEW_OBSERVATIONS:
        uncertain = "the start is weak" if held else "poses are uncertain"
        found.append(
            f"an image has only {facts['observations_per_image']:.0f} points on average, so {uncertain}: take "
            "sharper images with more texture and overlap, or try a larger --max-image-size"
        )
    if facts.get("parallax_degrees", math.inf) < _LITTLE_PARALLAX:
        found.append(
            f"points are seen under {facts['parallax_degrees']:.1f} degrees of parallax in the median, so depths are "
            "uncertain: step sideways between images, around the subject, instead of turning or zooming"
        )
    if unreadable := facts.get("unreadable"):
        first = min(unreadable)
        found.append(
            f"{len(unreadable)} images cannot be read and are left out; the first, {first}, {unreadable[first]}"
        )
    if unread := facts.get("not_read"):
        found.append(unread_note(unread))
    for fact in facts.get("stationary") or []:
        places = "; ".join("x {} to {}, y {} to {}".format(*(box[i] for i in (0, 2, 1, 3))) for box in fact["boxes"])
        found.append(
            f"features do not move in the {fact['images']} images of {fact['width']}x{fact['height']} pixels, mostly "
            f"at {places}, as in a watermark, on a part of the vehicle or behind a turntable: cameras are estimated "
            "without them"
            + (
                ", and masks/ hides such regions from training; look at some, splat train --masks none does without"
                if facts.get("static_masks")
                else "; hide these pixels with masks, or training puts them into the scene"
            )
        )
    if facts.get("other_models"):
        found.append(
            f"the images fall into {1 + len(facts['other_models'])} models that nothing connects: take images that "
            "lead from one to another, a step apart"
        )
    return found


#: What masks are, by whether they were made here.
_MASKS = {False: "what they hide gave no features", True: "made of what does not move"}


def lines(facts: dict[str, Any]) -> list[str]:
    """Return the report as a table of two columns."""
    cameras = _cameras(facts["cameras"])
    rows = [
        ("images registered", f"{facts['registered']} of {facts['total']}"),
        ("reprojection error", f"{facts['reprojection_error_px']:.3f} pixels"),
        ("points", f"{facts['points']:,}, each seen in {facts['track_length']:.1f} images"),
        *(("camera", text) for text in cameras[:_SHOWN]),
        *(("lens", _lens(lens)) for lens in facts.get("lenses", [])[:_SHOWN]),
        *([("panoramas", f"{len(facts['panoramas'])}, each cut into faces")] if facts.get("panoramas") else []),
        *(
            [("masks", f"of {facts['masks']} images; {_MASKS[bool(facts.get('static_masks'))]}")]
            if facts.get("masks")
            else []
        ),
        *_placed(facts.get("georeference") or {}),
        ("matching", f"{facts['matching']}, {facts['verified_pairs']:,} of {facts['pairs']:,} pairs hold"),
        *_added(facts.get("added_frames")),
        *_retried(facts.get("retried")),
        ("time", f"{sum(facts['seconds'].values()):.0f} s with {facts['threads']} threads"),
    ]
    if len(cameras) > _SHOWN:
        rows.insert(3 + _SHOWN, ("", f"and {len(cameras) - _SHOWN} more cameras"))
    for title, names in (("not registered", facts["unregistered"]), ("not readable", sorted(facts["unreadable"]))):
        if names:
            rows.append((title, listed(names, _MAX_LISTED)))
    return [f"{title:<20}{text}" for title, text in rows]


def _added(facts: dict[str, Any] | None) -> list[tuple[str, str]]:
    if not facts:
        return []
    better = facts["after"] > facts["before"]
    change = f"{facts['after']} instead of {facts['before']}" if better else "no more"
    tried = f"{facts['frames']} more between neighbours that were not joined"
    return [("more frames", f"{tried}, {facts['kept']} kept: {change} of the first {facts['of']} registered")]


def _retried(facts: dict[str, Any] | None) -> list[tuple[str, str]]:
    if not facts:
        return []
    change = f"{facts['after']} instead of {facts['before']}" if facts["after"] > facts["before"] else "no more"
    return [("second try", f"{facts['images']} images matched again, with a looser test: {change} registered")]


def _lens(facts: dict[str, Any]) -> str:
    """Return how a camera's lens model was chosen: errors of held-out observations before, after, and of others."""
    others = ", ".join(
        f"{trial['model']} {'refused' if 'refused' in trial else format(trial['error_px'], '.3f')}"
        for trial in facts["tried"]
        if trial["model"] != facts["model"]
    )
    kept = f" ({facts['kept']})" if "kept" in facts else ""
    before = f"{facts['start']} {facts['error_px_start']:.3f}"
    if facts["model"] == facts["start"]:
        return f"{before} pixels on held-out points is kept{kept}; tried {others}"
    return f"{facts['model']} {facts['error_px']:.3f} pixels on held-out points, {before}; tried {others}"


def _placed(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return rows on metres and place; none where no image has a position."""
    if facts.get("applied") and "origin" in facts:
        lat, lon, _ = facts["origin"]
        off = math.sqrt(sum(value**2 for value in facts["residual_m"].values()))
        some = f", {len(facts['left_out'])} of {facts['positions']} left out" if facts["left_out"] else ""
        what = f"{facts['positions']} control points are" if "control_points" in facts else "GPS is"
        return [("georeference", f"metres east, north, up of {lat:.6f}, {lon:.6f}; {what} off by {off:.2f} m{some}")]
    if facts.get("applied") and "control_points" in facts:
        off = math.sqrt(sum(value**2 for value in facts["residual_m"].values()))
        return [("control points", f"metres in their axes; {facts['positions']} are off by {off:.3g} m")]
    if facts.get("applied"):
        count = facts.get("unused_positions")
        unused = f"; the GPS positions of {count} images are not used" if count else ""
        return [("scale", f"metres, {facts['metres_per_unit']:.4g} to a unit before{unused}")]
    reason = str(facts.get("reason", ""))
    return [("georeference", f"none: {reason}")] if reason and not reason.startswith(_SILENT) else []


#: Reasons against an alignment with GPS that go without saying.
_SILENT = ("off", "videos", "no image has")


def _cameras(cameras: list[dict[str, Any]]) -> list[str]:
    """Return a line for each kind of camera, as the six faces of a panorama are of one."""
    counts = Counter(
        f"{camera['model']}, {camera['width']}x{camera['height']}, focal length "
        f"{' and '.join(f'{value:.1f}' for value in camera['focal_px'])} pixels"
        for camera in cameras
    )
    return [f"{text}; {count} cameras" if count > 1 else text for text, count in counts.items()]
