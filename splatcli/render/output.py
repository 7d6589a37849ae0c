"""The output of renders that -o and --format name: images in a folder, one file, or stdout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from splatcli.errors import UsageError
from splatcli.render.video import VIDEOS

#: Formats that --format takes.
FORMATS = ("png", "exr", *VIDEOS, "raw")

#: Suffixes of other files of images and videos, which would otherwise be taken as names of folders.
_OTHER_PICTURES = {".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".avif"}
_OTHER_VIDEOS = {".apng", ".avi", ".m4v", ".mkv", ".mov", ".webm"}


@dataclass(frozen=True, slots=True)
class Target:
    """The output of renders.

    format: one of FORMATS. folder: for a file for each view. file: for one file. Both are None for stdout.
    """

    format: str
    folder: Path | None = None
    file: Path | None = None

    @property
    def is_video(self) -> bool:
        """Return whether all frames go to one stream, which needs one size."""
        return self.format in (*VIDEOS, "raw")


def check_format(output: Path | None, format: str | None) -> None:
    """Raise UsageError for a format, or a suffix of ``output``, that no views can be written in.

    output, format: of the command line.
    """
    if format is not None and format not in FORMATS:
        raise UsageError(f"{format!r} is not a format", where="--format", remedy=f"one of {', '.join(FORMATS)}")
    if output is None:
        return
    suffix = output.suffix.lower()
    if suffix in _OTHER_VIDEOS:
        raise UsageError(
            "videos are MP4, GIF or WebP files",
            where=output,
            remedy=f"-o {output.with_suffix('.mp4')}; or pipe frames: --size 640x480 --format raw -o - | ffmpeg "
            f"-f rawvideo -pix_fmt rgb24 -s 640x480 -r 30 -i - {output} (docs/cameras.md)",
        )
    if suffix in _OTHER_PICTURES and not output.is_dir():
        raise UsageError(
            "pictures are PNG or EXR files", where=output, remedy=f"-o {output.with_suffix('.png')}; or name a folder"
        )


def resolve_target(output: Path | None, format: str | None, count: int, default: Path) -> Target:
    """Return the output of ``count`` views.

    output, format: of the command line. default: the folder without -o, and the stem of a video.
    Raises UsageError.
    """
    check_format(output, format)
    if str(output) == "-":
        named = format or ("png" if count == 1 else "raw")
        if named in ("exr", *VIDEOS):
            raise UsageError(
                f"{named} files cannot be written to a pipe",
                where="-o",
                remedy=f"name a file: -o x.{named}; or pipe raw frames: --format raw",
            )
        return Target(named)
    if format == "raw":
        raise UsageError("raw frames go to stdout", where="--format", remedy="add -o -, and a pipe or redirection")
    if output is None:
        return (
            Target(format, file=default.with_name(f"{default.name}.{format}"))
            if format in VIDEOS
            else _folder(format, default)
        )
    suffix = output.suffix.lower()
    named = suffix.removeprefix(".")
    if named not in ("png", "exr", *VIDEOS) or output.is_dir():
        if format in VIDEOS:
            raise UsageError("a video is one file", where=output, remedy=f"-o {output / 'video'}.{format}")
        return _folder(format, output)
    if format not in (None, named):
        raise UsageError(f"--format {format} contradicts the suffix {suffix}", where="-o", remedy="leave one out")
    if named == "webp" and count == 1:
        raise UsageError("a WebP file is an animation, of several views", where=output, remedy=f"-o {output.stem}.png")
    if named not in VIDEOS and count != 1:
        raise UsageError(
            f"one {named.upper()} file cannot hold {count} views",
            where="-o",
            remedy=f"name a folder: -o {output.with_suffix('')} --format {named}; or a video: -o {output.stem}.mp4",
        )
    return Target(named, file=output)


def _folder(format: str | None, folder: Path) -> Target:
    return Target(format or "png", folder=folder)
