"""The input of structure from motion: the images or the videos below a folder, or a video, and their digests."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path, PurePosixPath

from PIL.ExifTags import IFD, Base

from splatcli.checkpoint.atomic import TEMPORARY
from splatcli.disk import is_there
from splatcli.errors import SceneError, SplatError
from splatcli.scene.decode import Header, exif_of, open_image, read_header
from splatcli.scene.find_images import (
    SHOWN,
    SUFFIXES,
    VIDEO_SUFFIXES,
    file_remedy,
    file_with_remedy,
    files_below,
    images_below,
    unread_below,
    unread_error,
    unread_note,
)
from splatcli.scene.masks import ALPHA, NONE, masks_in
from splatcli.scene.sfm_report import REPORT
from splatcli.scene.source import Problems
from splatcli.sfm.flight_log import flight_log_beside
from splatcli.sfm.options import MIN_IMAGES
from splatcli.sizes import listed

#: Folders beside or among the images that hold something else: masks, and copies reduced for training.
_NOT_IMAGES = frozenset(("masks", "images_2", "images_4", "images_8"))
#: Folders of previews and of what file systems note, in lower case.
_PREVIEWS = frozenset(("thumbnails", "thumbs", "@eadir", "__macosx"))
#: Bytes at each end of a file that go into the fingerprint.
_SAMPLE = 64 << 10
#: Kinds whose size and ends stay where pixels in the middle change. Their files go into the fingerprint as a whole.
_UNCOMPRESSED = (".tif", ".tiff", ".bmp")


@dataclass(frozen=True, slots=True)
class SfmInput:
    """The images or the videos to work on.

    path: absolute; a video's file, or the folder that names are relative to.
    names: of the images, forward slashes, in the order of their names; empty for videos.
    videos: names of the videos in the order of their names, ("",) where ``path`` is one; empty for images.
    unread: images of kinds that are not read, by their endings.
    videos_beside: videos among the images, which are not used.
    copies: names of images left out -> the image of ``names`` whose bytes they have.
    edits: names of images left out -> the image of ``names`` that they show in another form.
    masks: names -> files below ``mask_folder`` that say what of an image counts; empty where there are none.
    static_masks: whether masks may be made of what stands still, where there are none.
    """

    path: Path
    names: tuple[str, ...] = ()
    masks: Mapping[str, str] = field(default_factory=dict)
    mask_folder: Path | None = None
    unread: tuple[str, ...] = ()
    videos: tuple[str, ...] = ()
    videos_beside: tuple[str, ...] = ()
    static_masks: bool = True
    copies: Mapping[str, str] = field(default_factory=dict)
    edits: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_video(self) -> bool:
        return bool(self.videos)

    @property
    def files(self) -> list[Path]:
        return [self.path / name for name in self.names or self.videos]

    @property
    def frame_folders(self) -> dict[str, str]:
        """Names of the videos -> folders of their frames within images/, empty for a single video."""
        if len(self.videos) == 1:
            return {self.videos[0]: ""}
        stems = [str(PurePosixPath(name).with_suffix("")) for name in self.videos]
        return {name: stem if stems.count(stem) == 1 else name for name, stem in zip(self.videos, stems, strict=True)}

    def mask(self, name: str) -> Path | None:
        """Return the mask of an image; None where it has none."""
        return None if self.mask_folder is None or name not in self.masks else self.mask_folder / self.masks[name]

    def fingerprint(self) -> dict[str, str | int]:
        """Return the count of files, a SHA-256 over names, sizes and both ends of each, and one of masks.

        Of kinds that are not compressed, all bytes count.
        Images that cannot be opened count by their names, for they are left out. Raises SceneError for other files.
        """
        named = list(zip(self.names or self.videos, self.files, strict=True))
        found: dict[str, str | int] = {"count": len(named), "sha256": _digest(named, lenient=not self.is_video)}
        logs = [
            (f"{name}.srt", log) for name in self.videos if (log := flight_log_beside(self.path / name)) is not None
        ]
        if logs:
            found["flight_logs"] = _digest(logs)
        masks = [(name, path) for name in self.names if (path := self.mask(name)) is not None]
        if not self.static_masks:
            found["static_masks"] = 0
        return {**found, "masks": _digest(masks)} if masks else found


def _digest(files: list[tuple[str, Path]], *, lenient: bool = False) -> str:
    digest = hashlib.sha256()
    for name, file in files:
        try:
            with file.open("rb") as stream:
                size = file.stat().st_size
                digest.update(f"{name}\0{size}\0".encode(errors="surrogateescape"))
                if file.suffix.lower() in _UNCOMPRESSED:
                    digest.update(hashlib.file_digest(stream, "sha256").digest())
                    continue
                digest.update(stream.read(_SAMPLE))
                stream.seek(max(0, size - _SAMPLE))
                digest.update(stream.read(_SAMPLE))
        except OSError as error:
            if lenient and error.errno != errno.ESPIPE:  # a named pipe would be waited for
                digest.update(f"{name}\0{error.strerror}\0".encode(errors="surrogateescape"))
                continue
            raise SceneError(
                f"cannot be read: {error.strerror}", where=file, remedy="check the file and its permissions"
            ) from None
    return digest.hexdigest()


def is_video(path: Path) -> bool:
    """Return whether a path names a file that is taken for a video."""
    return path.suffix.lower() in VIDEO_SUFFIXES and path.is_file()


def find_input(path: Path, masks: str | None = None) -> SfmInput:
    """Find the images below a folder, in its ``images/`` alone where that has any; or videos. Raises SceneError.

    Videos among images are not used.
    masks: a folder of masks relative to ``path``, or "none"; None takes ``masks/`` in ``path`` or beside it, where it
    has masks of these images.
    """
    path = Path(path).absolute()
    if not is_there(path):
        raise SceneError("there is nothing here", where=path, remedy="name a folder of images, or a video")
    if path.is_file():
        if is_video(path):
            return _of_videos(path, ("",), masks)
        raise SceneError(
            "is neither a folder of images nor a video",
            where=path,
            remedy=file_remedy(path) or f"name the folder of the images; videos end in {', '.join(VIDEO_SUFFIXES)}",
        )
    for folder in (path / "images", path):
        names = tuple(_images(folder)) if folder.is_dir() else ()
        if masks is not None:
            names = tuple(name for name in names if not (folder / name).is_relative_to((path / masks).absolute()))
        if names:
            break
    videos = _videos(folder, names)
    copies = _copies(folder, names)
    names = tuple(name for name in names if name not in copies)
    edits = _edits(folder, names)
    names = tuple(name for name in names if name not in edits)
    if not names and videos:
        return _of_videos(folder, videos, masks)
    unread = tuple(filter(_is_image, unread_below(folder)))
    if not names and unread:
        raise unread_error(folder, unread)
    if len(names) < MIN_IMAGES:
        have = {0: "there are no images", 1: "there is only one image"}.get(
            len(names), f"there are only {len(names)} images"
        )
        others = f"; {copies_note(copies)}" if copies else ""
        others += f"; {edits_note(edits)}" if edits else ""
        others += f"; {unread_note(unread)}" if unread else ""
        if videos:
            others += f"; videos are read where no images lie beside them ({videos[0]})"
        other = None if names else file_with_remedy(folder)
        if other is not None:
            others += f"; {other[0].name} is no image and no video that is read"
        raise SceneError(
            f"{have} here, at least {MIN_IMAGES} are needed{others}",
            where=path,
            remedy=other[1]
            if other
            else "take 20 or more images from all around, each overlapping the next by two thirds or more",
        )
    found = SfmInput(folder, names, unread=unread, videos_beside=videos, copies=copies, edits=edits)
    return _with_masks(found, path, masks)


def copies_note(copies: Mapping[str, str]) -> str:
    """Return the sentence that names images whose bytes others have."""
    named = listed([f"{name} of {original}" for name, original in copies.items()], SHOWN)
    are = "1 image is a copy of another" if len(copies) == 1 else f"{len(copies)} images are copies of others"
    return f"{are}, byte for byte, and left out: {named}"


def _copies(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Return the images that have the bytes of another one -> that one, whose name is shorter or comes first.

    Files that are empty or cannot be read are no copies.
    """
    by_size: dict[int, list[str]] = defaultdict(list)
    for name in sorted(names, key=lambda name: (len(name), name)):
        with contextlib.suppress(OSError):
            by_size[(folder / name).stat().st_size].append(name)
    copies: dict[str, str] = {}
    for size, alike in by_size.items():
        kept: dict[bytes, str] = {}
        for name in alike if size and len(alike) > 1 else ():
            with contextlib.suppress(OSError), (folder / name).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").digest()
                if digest in kept:
                    copies[name] = kept[digest]
                else:
                    kept[digest] = name
    return dict(sorted(copies.items()))


#: Stems of what phones and their programs make of a photo -> that of the photo: edited copies of iPhones, of Android,
#: of Google Photos, and the blurred one of a Pixel's portrait.
_EDITED = (
    (re.compile(r"(IMG_)E(\d+)", re.IGNORECASE), r"\1\2"),
    (re.compile(r"(.+)~\d+"), r"\1"),
    (re.compile(r"(.+)-edited", re.IGNORECASE), r"\1"),
    (re.compile(r"(.+\.PORTRAIT-)01\.COVER", re.IGNORECASE), r"\g<1>02.ORIGINAL"),
)


def edits_note(edits: Mapping[str, str]) -> str:
    """Return the sentence that names images of a photo that is there in another form."""
    named = listed([f"{name} of {original}" for name, original in edits.items()], SHOWN)
    are = "1 image is another form" if len(edits) == 1 else f"{len(edits)} images are other forms"
    return f"{are} of the same photo, edited or of another format, and left out: {named}"


def _edits(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Return the images that show a photo which is there as well, edited or in another format -> that photo.

    Their names say it, and EXIF does not say that they were taken at different times; of one photo in two formats, it
    says that they were taken at one. The first format of SUFFIXES is kept.
    """
    forms: dict[str, list[str]] = defaultdict(list)
    for name in names:
        forms[_form(name)].append(name)
    taken = cache(lambda name: _taken(folder / name))
    edits: dict[str, str] = {}
    for form, alike in forms.items():
        alike.sort(key=lambda name: SUFFIXES.index(PurePosixPath(name).suffix.lower()))
        for name in alike[1:]:
            if taken(alike[0]) is not None and taken(name) == taken(alike[0]):
                edits[name] = alike[0]
        parent, _, stem = form.rpartition("/")
        for pattern, photo in _EDITED:
            whole = pattern.fullmatch(stem)
            original = forms.get(f"{parent}/{whole.expand(photo).casefold()}") if whole else None
            for name in alike if original else ():
                if original and (None in (taken(name), taken(original[0])) or taken(name) == taken(original[0])):
                    edits[name] = original[0]
    return dict(sorted(edits.items()))


def _form(name: str) -> str:
    """Return the folder and the stem of an image, by which forms of one photo are known."""
    path = PurePosixPath(name)
    return f"{path.parent}/{path.stem.casefold()}"


def _taken(path: Path) -> tuple[str, str] | None:
    """Return when a photo was taken, by its EXIF, to the second and in parts of it; None where that is not there."""
    with contextlib.suppress(Exception), open_image(path) as image:  # the picture can be whole without its metadata
        exif = exif_of(image).get_ifd(IFD.Exif)
        time, part = (str(exif.get(tag, "")).strip("\0 ") for tag in (Base.DateTimeOriginal, Base.SubsecTimeOriginal))
        return (time, part) if time else None
    return None


def _of_videos(path: Path, videos: tuple[str, ...], masks: str | None) -> SfmInput:
    if masks not in (None, NONE, ALPHA):
        raise SceneError(
            "frames of a video have no masks",
            where=path,
            remedy="leave out --masks; then make masks of the frames, which lie in images/ of the folder that splat "
            "sfm makes, and name that images/ with --masks",
        )
    return SfmInput(path, videos=videos, static_masks=masks is None)


def _with_masks(inputs: SfmInput, path: Path, wanted: str | None) -> SfmInput:
    if wanted in (NONE, ALPHA):
        return replace(inputs, static_masks=False)
    if wanted is not None and not (path / wanted).is_dir():
        raise SceneError(
            "the folder of masks is not there",
            where=path / wanted,
            remedy="--masks names a folder as seen from that of the images; none does without masks",
        )
    places = [path / "masks"] if wanted is None else [(path / wanted).absolute()]
    if wanted is None and inputs.path == path:
        places.append(path.with_name("masks"))
    for place in places:
        if not place.is_dir() or place == path:
            continue
        problems = Problems(place)
        masks = masks_in(place, list(inputs.names), problems, wanted=wanted is not None)
        problems.raise_any()
        if masks:
            inside = {name: mask.relative_to(place).as_posix() for name, mask in masks.items()}
            return replace(inputs, masks=inside, mask_folder=place)
    return inputs


def _images(folder: Path) -> list[str]:
    """Return the images below a folder, but for those in scenes and runs that were made there."""
    return _not_made(folder, images_below(folder))


def _videos(folder: Path, images: Sequence[str]) -> tuple[str, ...]:
    """Return the videos below a folder as _images(), but for those of Live Photos: an image has their name.

    iCloud adds to it when the video is HEVC.
    """
    forms = {_form(name) for name in images}
    found = _not_made(folder, files_below(folder, VIDEO_SUFFIXES))
    return tuple(name for name in found if _form(name).removesuffix("_hevc") not in forms)


def _not_made(folder: Path, names: Iterable[str]) -> list[str]:
    made: dict[PurePosixPath, bool] = {PurePosixPath(): False}

    def is_made(place: PurePosixPath) -> bool:
        if place not in made:
            there = folder / place
            is_run = (there / "ckpts").is_dir() and (there / "config.json").is_file()
            unfinished = TEMPORARY.fullmatch(place.name) is not None
            made[place] = unfinished or is_run or (there / REPORT).is_file() or is_made(place.parent)
        return made[place]

    return [name for name in names if _is_image(name) and not is_made(PurePosixPath(name).parent)]


def _is_image(name: str) -> bool:
    return not any(
        part in _NOT_IMAGES or part.lower() in _PREVIEWS or part.startswith(".") for part in Path(name).parts
    )


def readable(inputs: SfmInput, max_pixels: int) -> tuple[dict[str, Header], dict[str, SplatError]]:
    """Return the headers of the images by name, and the reasons of those that cannot be read."""
    headers: dict[str, Header] = {}
    bad: dict[str, SplatError] = {}
    for name in inputs.names:
        try:
            name.encode()  # a model holds names in UTF-8
            headers[name] = read_header(inputs.path / name, max_pixels)
        except UnicodeEncodeError:
            bad[name] = SceneError("has a name that is not valid UTF-8", where=inputs.path / name, remedy="rename it")
        except SceneError as error:
            bad[name] = error
    return headers, bad


def orientation_of(header: Header) -> int:
    """Return the EXIF orientation that images are worked on in: the one that the reader of scenes will choose.

    The reader turns an image only where its shape shows that the cameras belong to the turned one.
    """
    return header.orientation if header.orientation >= 5 and header.width != header.height else 1


def needs_upright_copy(header: Header) -> bool:
    """Return whether EXIF turns or mirrors an image, and the reader of scenes would take it as it is stored.

    Structure from motion would find a mirrored scene, or one that stands on its head: it works on an upright copy.
    """
    return header.orientation != 1 and orientation_of(header) == 1
