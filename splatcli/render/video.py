"""Videos: frames through ffmpeg into an MP4 file.

ffmpeg is that of the package imageio-ffmpeg, or the one on PATH. It is fed by a pipe and writes to a temporary file,
which takes its place when the last frame is in: a video is there whole or not at all.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from splatcli.checkpoint.atomic import write_atomically
from splatcli.errors import OutputError, ResourceError, SplatError
from splatcli.render.images import make_room

#: Constant rate factor of x264: near-lossless to the eye, some 5 Mbit/s at 1080p.
CRF = 17


def find_ffmpeg() -> str:
    """The program to run. Raises ResourceError when there is none."""
    found = bundled() or shutil.which("ffmpeg")
    if found is None:
        raise ResourceError(
            "a video needs ffmpeg, and neither the package imageio-ffmpeg nor the program is there",
            where="-o",
            remedy="pip install 'splatcli[video]'; or write PNG files: -o FOLDER",
        )
    return found


def bundled() -> str | None:
    """The program that the package imageio-ffmpeg brings; None without the package, or without one for this machine."""
    try:
        return str(importlib.import_module("imageio_ffmpeg").get_ffmpeg_exe())
    except (ImportError, RuntimeError):
        return None


def write_video(path: Path, frames: Iterable[NDArray[np.uint8]], size: tuple[int, int], fps: float) -> None:
    """Encode ``frames`` [H, W, 3], all of ``size`` (W, H), as H.264 in 4:2:0, which everything plays.

    That wants even sides: an odd one gets its last line twice.
    Raises OutputError when it cannot be written, ResourceError without an ffmpeg that works, and what ``frames``
    raises.
    """
    program = find_ffmpeg()
    make_room(path)
    try:
        write_atomically(path, lambda file: _encode(program, file, frames, size, fps), what="the video")
    except OutputError as error:
        # Not everything that ends a video has to do with its place.
        if isinstance(error.__cause__, SplatError):
            raise error.__cause__ from None
        raise


def command(program: str, size: tuple[int, int], fps: float, target: str) -> list[str]:
    """The words that start the encoder: raw RGB frames on stdin, MP4 to ``target``, whatever that is called."""
    width, height = size
    source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", f"{fps:g}", "-i", "-"]
    # RGB is taken for full range and written as BT.709, and the file says so: players guess otherwise.
    convert = ["-vf", "scale=out_color_matrix=bt709:out_range=tv", "-pix_fmt", "yuv420p", "-colorspace", "bt709"]
    curves = ["-color_primaries", "bt709", "-color_trc", "bt709", "-color_range", "tv"]
    encode = ["-c:v", "libx264", "-crf", str(CRF), "-movflags", "+faststart", "-f", "mp4"]
    return [program, "-y", "-hide_banner", "-loglevel", "error", *source, "-an", *convert, *curves, *encode, target]


def _encode(
    program: str, file: BinaryIO, frames: Iterable[NDArray[np.uint8]], size: tuple[int, int], fps: float
) -> None:
    even = size[0] + size[0] % 2, size[1] + size[1] % 2
    with tempfile.TemporaryFile() as words:
        try:
            # A Ctrl-C is ours to handle: in a session of its own ffmpeg does not hear it.
            encoder = subprocess.Popen(
                command(program, even, fps, file.name), stdin=subprocess.PIPE, stderr=words, start_new_session=True
            )
        except OSError as error:
            raise ResourceError(f"ffmpeg does not start: {error.strerror}", where=program, remedy=_REMEDY) from None
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended early, and says why
                _feed(encoder, frames, even)
            code = encoder.wait()
        except BaseException:
            encoder.kill()
            encoder.wait()
            raise
        words.seek(0)
        text = words.read(10_000).decode(errors="replace").strip()
    if code:
        reason = text.splitlines()[-1] if text else "it says nothing"
        if "No space left" in text:
            raise OSError(reason)
        raise ResourceError(f"ffmpeg failed with status {code}: {reason}", where=program, remedy=_REMEDY)
    file.seek(0, os.SEEK_END)


_REMEDY = "pip install 'splatcli[video]' brings one that works; or write PNG files: -o FOLDER"


def _feed(encoder: subprocess.Popen[bytes], frames: Iterable[NDArray[np.uint8]], size: tuple[int, int]) -> None:
    assert encoder.stdin is not None
    with encoder.stdin as pipe:
        for frame in frames:
            missing = (0, size[1] - frame.shape[0]), (0, size[0] - frame.shape[1]), (0, 0)
            pipe.write(np.ascontiguousarray(np.pad(frame, missing, mode="edge")).data)
