"""The files in images/ that structure from motion works on: frames of videos, faces of panoramas, copies, links."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from splatcli.errors import SceneError, SplatError, UsageError
from splatcli.scene.decode import Header, decode_rgb
from splatcli.scene.images import max_pixels
from splatcli.scene.panorama import face_camera
from splatcli.sfm.execution import Execution
from splatcli.sfm.features import SfmImage
from splatcli.sfm.images import SfmInput, needs_upright_copy, readable
from splatcli.sfm.options import (
    COLOURS,
    KEY,
    LOCK,
    MIN_IMAGES,
    MOST_FRAMES,
    PANORAMA_FRAMES,
    PANORAMAS,
    STATIONARY,
    VIDEO_FRAMES,
    SfmOptions,
)
from splatcli.sfm.panorama import are_panoramas, is_panorama, write_faces, write_masks
from splatcli.sfm.upright import write_upright, write_upright_mask
from splatcli.sfm.video import Video, folder_of, read_video, shares, sharpest, sharpness, write_frames


@dataclass(frozen=True, slots=True)
class Prepared:
    """The images to find features in, and what became of the files that they are made of.

    images: in the order of their names; they lie in, or are linked from, images/.
    videos: those that can be read, by name. most_frames: how many frames each of them may give.
    panoramas: names of those whose faces are images. upright_copies: names of images that EXIF turns or mirrors.
    unreadable: names -> why an image or a video cannot be read.
    """

    images: list[SfmImage]
    videos: Mapping[str, Video]
    most_frames: Mapping[str, int]
    panoramas: list[str]
    upright_copies: list[str]
    unreadable: Mapping[str, str]


def prepare(inputs: SfmInput, options: SfmOptions, folder: Path, execution: Execution) -> Prepared:
    """Make the files in images/, and masks/ where masks are given; remove what an earlier call left beside them.

    folder: exists; receives images/, masks/ and work/. Frames of videos that an earlier call of the same inputs and
    options wrote are used, and what it left in work/ of features and matches stays.
    Raises SceneError for fewer than MIN_IMAGES images, UsageError for a panorama with the global mapper.
    """
    return _Preparation(inputs, options, folder, execution).run()


def check_count(inputs: SfmInput, names: Sequence[str], unreadable: Mapping[str, str]) -> None:
    """Raise SceneError where the images ``names`` are too few for a model. unreadable: as of Prepared."""
    if len(names) >= MIN_IMAGES:
        return
    kind = "frames" if inputs.is_video else "images"
    first = next(iter(unreadable.items()), None)
    others = "" if first is None else f"; {len(unreadable)} cannot be read, {first[0]}: {first[1]}"
    total = len(names) + len(unreadable)
    have = f"only {len(names)} of {total}" if names else f"none of the {total}"
    raise SceneError(
        f"{have} {kind} can be used, at least {MIN_IMAGES} are needed{others}",
        where=inputs.path,
        remedy="add images that can be read" if kind == "images" else "use a longer video",
    )


def reasons(bad: Mapping[str, SplatError]) -> dict[str, str]:
    """Return why images cannot be read, by their names, for the report."""
    return {name: problem.what for name, problem in bad.items()}


class _Preparation:
    """One call of prepare()."""

    def __init__(self, inputs: SfmInput, options: SfmOptions, folder: Path, execution: Execution) -> None:
        self._inputs = inputs
        self._options = options
        self._folder = folder
        self._images = folder / "images"
        self._masks = folder / "masks"
        self._frame_list = folder / "work" / "frames.json"
        #: Frames that are panoramas, whose faces lie in images/.
        self._apart = folder / "work" / PANORAMAS
        self._execution = execution
        self._unreadable: dict[str, str] = {}

    def run(self) -> Prepared:
        """Run all steps."""
        (self._folder / "work").mkdir(exist_ok=True)
        known = self._known_frames()
        _remove_unfinished(self._folder, keep_images=known is not None)
        self._images.mkdir(exist_ok=True)
        videos: dict[str, Video] = {}
        most_frames: dict[str, int] = {}
        copies: list[str] = []
        if self._inputs.is_video:
            videos = self._read_videos()
            most_frames = self._most_frames(videos)
            images, faces = self._of_frames(self._frames(videos, most_frames) if known is None else known)
        else:
            images, faces, copies = self._of_images()
        return Prepared(
            images=sorted([*images, *faces], key=lambda image: image.name),
            videos=videos,
            most_frames=most_frames,
            panoramas=list(dict.fromkeys(face.panorama[0] for face in faces if face.panorama is not None)),
            upright_copies=copies,
            unreadable=self._unreadable,
        )

    def _of_images(self) -> tuple[list[SfmImage], list[SfmImage], list[str]]:
        """Return the images to work on, the faces of panoramas among them, and the names of upright copies."""
        headers, bad = self._headers(self._inputs)
        held = self._options.cameras is not None
        faces = [] if held else self._panoramas(headers, bad)
        self._leave_out(bad)
        path, mask = self._inputs.path, self._inputs.mask
        images = [SfmImage.of(name, path, header, mask(name)) for name, header in headers.items()]
        if self._options.frames is not None and self._options.frames < len(images):
            images = self._sharpest(images, self._options.frames)
        self._check_count([image.name for image in [*images, *faces]])
        found = {} if held else headers
        turned = {name: header.orientation for name, header in found.items() if needs_upright_copy(header)}
        images = self._put_in(images, turned)
        self._check_count([image.name for image in [*images, *faces]])
        return images, faces, [image.name for image in images if image.name in turned]

    def _of_frames(self, names: list[str]) -> tuple[list[SfmImage], list[SfmImage]]:
        """Return the images to work on, of these frames, and the faces of panoramas among them."""
        self._frame_list.write_text(json.dumps(names), encoding="utf-8")
        self._remove_all_but(names)
        self._check_count(names)
        panoramas = [name for name in names if (self._apart / name).is_file()]
        flat = SfmInput(self._images, tuple(name for name in names if name not in panoramas))
        apart = SfmInput(self._apart, tuple(panoramas))
        headers, bad = self._headers(flat)
        faces = self._faces(apart, readable(apart, max_pixels(None))[0], bad)
        self._leave_out(bad)
        images = [SfmImage.of(name, flat.path, header) for name, header in headers.items()]
        self._check_count([image.name for image in [*images, *faces]])
        return images, faces

    def _headers(self, inputs: SfmInput) -> tuple[dict[str, Header], dict[str, SplatError]]:
        """Return the headers of the images that are used, and the reasons of those that cannot be read."""
        headers, bad = readable(inputs, max_pixels(None))
        cameras = self._options.cameras
        if cameras is not None:
            headers = {name: header for name, header in headers.items() if name in cameras}
        return headers, bad

    def _known_frames(self) -> list[str] | None:
        """Return the frames of the videos that an earlier call wrote, if they are all there."""
        try:
            names: list[str] = json.loads(self._frame_list.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        folders = (self._images, self._apart)
        return names if all(any((folder / name).is_file() for folder in folders) for name in names) else None

    def _put_in(self, images: list[SfmImage], turned: dict[str, int]) -> list[SfmImage]:
        """Link the images and their masks into the folder, those of ``turned`` as upright copies; return all.

        turned: names -> EXIF's orientation.
        """
        found: dict[str, SfmImage] = {}
        copied = []
        for image in images:
            if image.name in turned:
                copied.append(image)
                continue
            _link(image.path, self._images / image.name)
            if image.mask is not None:
                _link(image.mask, self._masks / self._inputs.masks[image.name])
            found[image.name] = image

        def copy(image: SfmImage) -> SfmImage | SceneError:
            place, orientation = self._images / image.name, turned[image.name]
            mask = None if image.mask is None else self._masks / self._inputs.masks[image.name]
            try:
                write_upright(image.path, orientation, place)
                if image.mask is not None and mask is not None:
                    write_upright_mask(image.mask, orientation, mask)
            except SceneError as problem:
                place.unlink(missing_ok=True)
                return problem
            return replace(image, path=place, mask=mask)

        if copied:
            progress = self._execution.start("upright copies")
            with ThreadPoolExecutor(self._execution.num_threads) as pool:
                for done, (image, made) in enumerate(zip(copied, pool.map(copy, copied), strict=True), start=1):
                    if isinstance(made, SceneError):
                        self._leave_out({image.name: made})
                    else:
                        found[image.name] = made
                    progress(done, len(copied))
        return list(found.values())

    def _read_videos(self) -> dict[str, Video]:
        """Return the videos that can be read, by name. Raises SceneError where none can."""
        inputs, videos = self._inputs, {}
        for name in inputs.videos:
            try:
                videos[name] = read_video(inputs.path / name)
            except SceneError as problem:
                if len(inputs.videos) == 1:
                    raise
                self._leave_out({name: problem})
        if not videos:
            first, reason = next(iter(self._unreadable.items()))
            raise SceneError(
                f"none of the {len(inputs.videos)} videos can be read; the first, {first}, {reason}",
                where=inputs.path,
                remedy="try them in a player; copy them again",
            )
        return videos

    def _most_frames(self, videos: Mapping[str, Video]) -> dict[str, int]:
        """Return how many frames each video may give: its share, and no more than it has."""
        most = self._options.frames or min(VIDEO_FRAMES * len(videos), MOST_FRAMES)
        each = shares(most, [video.seconds for video in videos.values()])
        return {name: min(share, videos[name].frames or share) for name, share in zip(videos, each, strict=True)}

    def _frames(self, videos: Mapping[str, Video], most: Mapping[str, int]) -> list[str]:
        """Write frames of the videos, those that are panoramas apart; return their names."""
        folders = self._inputs.frame_folders
        by_folder = {folders[name]: (video, most[name]) for name, video in videos.items()}
        return self._set_panoramas_apart(write_frames(by_folder, self._images, self._execution.start("frames")))

    def _remove_all_but(self, names: list[str]) -> None:
        """Remove from images/ what an earlier call that was stopped added to the frames."""
        there = set(names)
        for path in list(self._images.rglob("*")):
            if path.is_file() and path.relative_to(self._images).as_posix() not in there:
                path.unlink()
        for path in sorted(self._images.rglob("*"), reverse=True):
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()

    def _set_panoramas_apart(self, frames: list[str]) -> list[str]:
        """Move frames of videos that show panoramas out of images/, fewer by default; return the frames to work on."""
        shutil.rmtree(self._apart, ignore_errors=True)
        images, kept = self._images, []
        for folder, of_one in groupby(frames, key=folder_of):
            names = list(of_one)
            if not are_panoramas([images / name for name in names]):
                kept += names
                continue
            most = min(len(names), len(names) if self._options.frames else PANORAMA_FRAMES)
            names = [names[(2 * i + 1) * len(names) // (2 * most)] for i in range(most)]
            (self._apart / folder).mkdir(parents=True)
            for name in names:
                (images / name).rename(self._apart / name)
            kept += names
        return kept

    def _panoramas(self, headers: dict[str, Header], bad: dict[str, SplatError]) -> list[SfmImage]:
        """Write the faces of panoramas and return them; take the panoramas out of ``headers``."""
        found: dict[str, Header] = {}
        for name, header in list(headers.items()):
            try:
                if is_panorama(self._inputs.path / name, header):
                    found[name] = headers.pop(name)
            except SceneError as problem:
                bad[name] = problem
                del headers[name]
        return self._faces(self._inputs, found, bad)

    def _faces(self, inputs: SfmInput, headers: dict[str, Header], bad: dict[str, SplatError]) -> list[SfmImage]:
        """Write the faces of the panoramas ``headers`` of ``inputs``, and return them."""
        faces: list[SfmImage] = []
        for name, header in headers.items():
            if self._options.mapper == "global":
                raise UsageError(
                    f"{name} is a panorama, which needs the incremental mapper",
                    where="--mapper",
                    remedy="leave out --mapper global, or the panorama",
                )
            try:
                written = write_faces(inputs.path / name, self._images / name)
                mask = inputs.mask(name)
                place = self._masks / name
                masks = [] if mask is None else write_masks(mask, header.width, header.height, place)
            except SceneError as problem:
                bad[name] = problem
                continue
            lens = face_camera(header.width)
            size = int(lens.width), int(lens.height)
            for i, file in enumerate(written):
                of = (name, header.width, i)
                mask_of = masks[i] if masks else None
                faces.append(SfmImage(f"{name}/{file.name}", file, 1, *size, mask_of, 1, of))
        return faces

    def _sharpest(self, images: list[SfmImage], count: int) -> list[SfmImage]:
        progress = self._execution.start("frames")

        def score(index: int, image: SfmImage) -> float:
            progress(index + 1, len(images))
            try:
                return sharpness(decode_rgb(image.path, (0, 0, 0)))
            except SplatError:
                return 0.0  # is reported when features are looked for, if nothing better is near it

        return list(sharpest(((p, score(i, p)) for i, p in enumerate(images)), len(images), count))

    def _leave_out(self, bad: dict[str, SplatError]) -> None:
        self._unreadable.update(reasons(bad))

    def _check_count(self, names: list[str]) -> None:
        check_count(self._inputs, names, self._unreadable)


def _remove_unfinished(folder: Path, *, keep_images: bool) -> None:
    """Remove what an earlier call left and this one makes anew: not features and matches, nor images if kept."""
    kept = {KEY, LOCK, "log", "work", *(["images"] if keep_images else [])}
    stored = {COLOURS, STATIONARY, PANORAMAS, "frames.json"}
    stored |= {f"database.db{end}" for end in ("", "-journal", "-wal", "-shm")}
    for place, names in ((folder, kept), (folder / "work", stored)):
        for path in place.iterdir():
            if path.name in names:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def _link(image: Path, place: Path) -> None:
    """Give an image a second name, which takes no room and survives a move of either folder; else a symbolic link.

    A second name is not possible on another file system, and on some systems for files of somebody else.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    real = image.resolve()
    try:
        os.link(real, place)
    except OSError:
        place.symlink_to(real)
