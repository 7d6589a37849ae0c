"""Where renders go: images in a folder, one file, EXR, a video, or stdout, from what -o and --format say.

EXR files hold float32 channels for compositing, written by OpenEXR, an optional package:

R G B    linear light with sRGB's primaries (EXR's default), premultiplied by A, over nothing
A        coverage
Z        mean camera z in scene units, infinite where nothing is
N.X N.Y N.Z  normals as in render/images.py

A model's colours are for display, as the images' were, so they become linear by sRGB's curve, of the colour without A:
a compositor shows what the PNG shows. Negative colours are black; those above 1 continue along the curve.

Videos are MP4 files by ffmpeg: that of the package imageio-ffmpeg, or the one on PATH. Frames go through a pipe,
and the file is written beside its target, which it replaces when the last frame is in: a video is whole or absent.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
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
from splatcli.render.images import RenderedMaps, make_parent_folder

#: What goes into a file unless told otherwise.
DEFAULT = ("rgb", "alpha", "depth")

Floats = NDArray[np.float32]


def check_installed() -> None:
    """Raises ResourceError where OpenEXR is not installed."""
    if importlib.util.find_spec("OpenEXR") is None:
        raise ResourceError(
            "EXR files need the package OpenEXR, which is not installed",
            where="--format exr",
            remedy="pip install 'splatcli[exr]'; or write PNG files",
        )


def channels(maps: RenderedMaps, kinds: Iterable[str]) -> dict[str, Floats]:
    """The channels of each kind, [H, W] each. ``sight`` was rendered over black."""
    made: dict[str, Floats] = {}
    for kind in kinds:
        if kind == "rgb":
            colour = linear(maps.rgb.detach().cpu().numpy(), maps.alpha)
            made |= {name: colour[..., i] for i, name in enumerate("RGB")}
        elif kind == "alpha":
            made["A"] = maps.alpha
        elif kind == "depth":
            made["Z"] = maps.depth
        elif kind == "normals" and maps.normals is not None:
            made |= {f"N.{name}": maps.normals[..., i] for i, name in enumerate("XYZ")}
    return {name: np.ascontiguousarray(values, dtype=np.float32) for name, values in made.items()}


def linear(colour: Floats, alpha: Floats) -> Floats:
    """[H, W, 3] linear light times alpha, of display colours times alpha."""
    coverage = alpha[..., None].astype(np.float64)
    shown = np.maximum(colour, 0.0) / np.maximum(coverage, 1e-12)
    light = np.where(shown <= 0.04045, shown / 12.92, ((shown + 0.055) / 1.055) ** 2.4)
    return np.where(coverage > 0, light * coverage, 0.0).astype(np.float32)


def write_exr(path: Path, planes: dict[str, Floats]) -> None:
    """Write ``planes`` [H, W] as a file with scan lines, compressed without loss. Raises OutputError, ResourceError."""
    check_installed()
    openexr = importlib.import_module("OpenEXR")
    header = {"compression": openexr.ZIP_COMPRESSION, "type": openexr.scanlineimage}

    def write(file: BinaryIO) -> None:
        openexr.File(header, dict(planes)).write(file.name)
        file.seek(0, os.SEEK_END)

    make_parent_folder(path)
    write_atomically(path, write, what="the EXR file")


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
    make_parent_folder(path)
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


def resolve_target(output: Path | None, format: str | None, count: int, default: Path) -> Target:
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
