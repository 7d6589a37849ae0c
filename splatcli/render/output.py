"""Where renders go: pictures in a folder, one file, a video, or stdout, from what -o and --format say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from splatcli.errors import UsageError

FORMATS = ("png", "exr", "mp4", "raw")

#: Other ends of video files; taken for folders they would surprise.
_OTHER_VIDEOS = {".avi", ".gif", ".m4v", ".mkv", ".mov", ".webm"}


@dataclass(frozen=True, slots=True)
class Target:
    """format: one of FORMATS.

    folder: for a file a view; None otherwise. file: the one file; None and None is stdout.
    """

    format: str
    folder: Path | None = None
    file: Path | None = None

    @property
    def is_video(self) -> bool:
        """Whether all frames go into one stream, and so have to be of one size."""
        return self.format in ("mp4", "raw")


def target_of(output: Path | None, format: str | None, count: int, default: Path) -> Target:
    """Where ``count`` views go.

    output, format: what the command line says. default: a folder to make up for it; a video gets its name.
    Raises UsageError.
    """
    if format is not None and format not in FORMATS:
        raise UsageError(f"{format!r} is no format", where="--format", remedy=f"one of {', '.join(FORMATS)}")
    if str(output) == "-":
        named = format or ("png" if count == 1 else "raw")
        if named in ("exr", "mp4"):
            raise UsageError(
                f"{named} files are not written from front to back, as a pipe wants it",
                where="-o",
                remedy=f"name a file: -o x.{named}; or pipe raw frames: --format raw",
            )
        return Target(named)
    if format == "raw":
        raise UsageError("raw frames go to stdout", where="--format", remedy="-o -, and a pipe or a > file behind it")
    if output is None:
        return (
            Target("mp4", file=default.with_name(f"{default.name}.mp4"))
            if format == "mp4"
            else _folder(format, default)
        )
    suffix = output.suffix.lower()
    if suffix in _OTHER_VIDEOS:
        raise UsageError("videos are MP4 files", where=output, remedy=f"-o {output.with_suffix('.mp4')}")
    if suffix.removeprefix(".") not in ("png", "exr", "mp4") or output.is_dir():
        if format == "mp4":
            raise UsageError("a video is one file", where=output, remedy=f"-o {output / 'video.mp4'}")
        return _folder(format, output)
    named = suffix.removeprefix(".")
    if format not in (None, named):
        raise UsageError(f"--format {format} and a name that ends in {suffix}", where="-o", remedy="leave one out")
    if named != "mp4" and count != 1:
        raise UsageError(
            f"{count} views are not one file",
            where="-o",
            remedy=f"name a folder: -o {output.with_suffix('')} --format {named}; or a video: -o {output.stem}.mp4",
        )
    return Target(named, file=output)


def _folder(format: str | None, folder: Path) -> Target:
    return Target(format or "png", folder=folder)
