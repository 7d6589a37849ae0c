"""Videos: MP4, GIF and WebP files by ffmpeg, that of the package imageio-ffmpeg or the one on PATH.

Frames go through a pipe, and the file is written beside its target, which it replaces when the last frame is in: a
video is whole or absent.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from splatcli.checkpoint.atomic import write_atomically
from splatcli.errors import OutputError, ResourceError, SplatError, UsageError
from splatcli.output_files import make_parent_folder

#: Formats of one file for all frames.
VIDEOS = ("mp4", "gif", "webp")
#: Constant rate factor of x264: visually near-lossless, about 5 Mbit/s at 1080p.
CRF = 17
#: Options of ffmpeg for animated pictures. A GIF has a palette for each frame: one for all would need all at once.
_ANIMATED = {
    "gif": ("-vf", "split[a][b];[a]palettegen=stats_mode=single[p];[b][p]paletteuse=new=1", "-loop", "0", "-f", "gif"),
    "webp": ("-pix_fmt", "bgra", "-c:v", "libwebp_anim", "-quality", "85", "-loop", "0", "-f", "webp"),
}
#: Pixels of a frame's longer side at most: those of x264, and what GIF and WebP have room for.
_MAX_SIDE = {"mp4": 16_384, "gif": 65_535, "webp": 16_383}
#: Frames a second of a GIF at most: browsers show shorter frames than 20 ms for 100.
MAX_GIF_FPS = 50.0

_REMEDY = "install a working ffmpeg: pip install 'splatcli[video]'; or write PNG files: -o FOLDER"


def find_ffmpeg() -> str:
    """Return the ffmpeg program. Raise ResourceError if there is none."""
    found = bundled() or shutil.which("ffmpeg")
    if found is None:
        raise ResourceError(
            "videos need ffmpeg; neither the package imageio-ffmpeg nor the program is installed",
            where="-o",
            remedy="pip install 'splatcli[video]'; or write PNG files: -o FOLDER",
        )
    return found


def bundled() -> str | None:
    """Return the ffmpeg of the package imageio-ffmpeg; None without the package or a build for this machine."""
    try:
        return str(importlib.import_module("imageio_ffmpeg").get_ffmpeg_exe())
    except (ImportError, RuntimeError):
        return None


@dataclass(frozen=True, slots=True)
class Video:
    """A video file: its kind, one of VIDEOS, width and height of its frames in pixels, and frames a second."""

    kind: str
    size: tuple[int, int]
    fps: float

    @property
    def encoded_size(self) -> tuple[int, int]:
        """Return width and height as they are stored: H.264 in 4:2:0 needs even sides."""
        width, height = self.size
        return self.size if self.kind in _ANIMATED else (width + width % 2, height + height % 2)

    def command(self, program: str, target: str) -> list[str]:
        """Return the words that start the encoder: raw RGB frames on stdin, a file to ``target``, however that ends."""
        width, height = self.encoded_size
        source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", f"{self.fps:g}", "-i", "-"]
        begin = [program, "-y", "-hide_banner", "-loglevel", "error", *source, "-an"]
        if self.kind in _ANIMATED:
            return [*begin, *_ANIMATED[self.kind], target]
        # Full-range RGB becomes BT.709, and the file declares it, since players guess otherwise.
        convert = ["-vf", "scale=out_color_matrix=bt709:out_range=tv", "-pix_fmt", "yuv420p", "-colorspace", "bt709"]
        curves = ["-color_primaries", "bt709", "-color_trc", "bt709", "-color_range", "tv"]
        encode = ["-c:v", "libx264", "-crf", str(CRF), "-movflags", "+faststart", "-f", "mp4"]
        return [*begin, *convert, *curves, *encode, target]

    def check_size(self, where: Path) -> None:
        """Raise UsageError for frames that are larger than a file of this kind holds."""
        most, (width, height) = _MAX_SIDE[self.kind], self.size
        if max(width, height) > most:
            raise UsageError(
                f"frames of {width}x{height} pixels; {self.kind.upper()} files hold sides of up to {most:,}",
                where=where,
                remedy="choose a smaller --size, which each kind of image takes; or write PNG files: -o FOLDER",
            )

    def encode(self, program: str, file: BinaryIO, frames: Iterable[NDArray[np.uint8]]) -> None:
        """Let the ffmpeg ``program`` write ``frames`` [H, W, 3] to ``file``, which has a name.

        Raises ResourceError where it does not start or fails, OSError for a full disk, and errors of ``frames``.
        """
        with tempfile.TemporaryFile() as words:
            try:
                # In its own session ffmpeg gets no Ctrl-C; this process handles it.
                encoder = subprocess.Popen(
                    self.command(program, file.name), stdin=subprocess.PIPE, stderr=words, start_new_session=True
                )
            except OSError as error:
                raise ResourceError(f"ffmpeg does not start: {error.strerror}", where=program, remedy=_REMEDY) from None
            try:
                with contextlib.suppress(BrokenPipeError):  # ffmpeg has ended early; its message is reported below
                    self._feed(encoder, frames)
                code = encoder.wait()
            except BaseException:
                encoder.kill()
                encoder.wait()
                raise
            words.seek(0)
            text = words.read(10_000).decode(errors="replace").strip()
        if code:
            reason = text.splitlines()[-1] if text else "no message"
            if "No space left" in text:
                raise OSError(reason)
            raise ResourceError(f"ffmpeg failed with status {code}: {reason}", where=program, remedy=_REMEDY)
        file.seek(0, os.SEEK_END)

    def _feed(self, encoder: subprocess.Popen[bytes], frames: Iterable[NDArray[np.uint8]]) -> None:
        """Write the frames to the encoder's stdin; the last row or column of an odd side is doubled where it has to."""
        assert encoder.stdin is not None
        width, height = self.encoded_size
        with encoder.stdin as pipe:
            for frame in frames:
                missing = (0, height - frame.shape[0]), (0, width - frame.shape[1]), (0, 0)
                pipe.write(np.ascontiguousarray(np.pad(frame, missing, mode="edge")).data)


def write_video(path: Path, frames: Iterable[NDArray[np.uint8]], size: tuple[int, int], fps: float) -> None:
    """Encode ``frames`` [H, W, 3], all of ``size`` (W, H), as the suffix says: ``.mp4``, ``.gif`` or ``.webp``.

    MP4 is H.264 in 4:2:0, which every player supports. GIF and WebP repeat for ever.
    Raises UsageError for frames that are too large, before the first is asked for, OutputError if the file cannot be
    written, ResourceError without a working ffmpeg, and errors of ``frames``.
    """
    program = find_ffmpeg()
    make_parent_folder(path)
    video = Video(path.suffix.lower().removeprefix("."), size, fps)
    video.check_size(path)
    try:
        write_atomically(path, lambda file: video.encode(program, file, frames), what="the video")
    except OutputError as error:
        # An error of the frames is not an error of the file.
        if isinstance(error.__cause__, SplatError):
            raise error.__cause__ from None
        raise
