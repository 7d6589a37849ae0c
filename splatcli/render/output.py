"""Output of renders: images in a folder, one file, EXR, a video or stdout, as -o and --format say.

EXR files hold float32 channels for compositing, written by OpenEXR, an optional package:

R G B    linear light with sRGB's primaries (EXR's default), premultiplied by A, over nothing
A        coverage
Z        mean camera z in scene units, infinite where nothing is
N.X N.Y N.Z  normals as in render/images.py

A model's colours are display colours, as in the images. sRGB's curve makes them linear, applied to the colour divided
by A, so a compositor shows the same as the PNG. Negative colours become black; those above 1 continue along the curve.

Videos are MP4, GIF and WebP files by ffmpeg: that of the package imageio-ffmpeg, or the one on PATH. Frames go through
a pipe, and the file is written beside its target, which it replaces when the last frame is in: a video is whole or
absent.
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
from splatcli.output_files import make_parent_folder
from splatcli.render.images import RenderedMaps
from splatcli.scene.hdr import srgb_decoded

#: Kinds in an EXR file by default.
DEFAULT = ("rgb", "alpha", "depth")

Floats = NDArray[np.float32]


def check_installed() -> None:
    """Raise ResourceError if OpenEXR is not installed."""
    if importlib.util.find_spec("OpenEXR") is None:
        raise ResourceError(
            "EXR files need the package OpenEXR, which is not installed",
            where="--format exr",
            remedy="pip install 'splatcli[exr]'; or write PNG files",
        )


def channels(maps: RenderedMaps, kinds: Iterable[str]) -> dict[str, Floats]:
    """Return the channels of each kind, [H, W] each. ``maps`` are rendered over black."""
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
    """Convert display colours times alpha to linear light times alpha, [H, W, 3]."""
    coverage = alpha[..., None].astype(np.float64)
    light = srgb_decoded(np.maximum(colour, 0.0) / np.maximum(coverage, 1e-12))
    return np.where(coverage > 0, light * coverage, 0.0).astype(np.float32)


def write_exr(path: Path, planes: dict[str, Floats]) -> None:
    """Write ``planes`` [H, W] as a lossless scan-line EXR file. Raise OutputError or ResourceError."""
    check_installed()
    openexr = importlib.import_module("OpenEXR")
    header = {"compression": openexr.ZIP_COMPRESSION, "type": openexr.scanlineimage}

    def write(file: BinaryIO) -> None:
        openexr.File(header, dict(planes)).write(file.name)
        file.seek(0, os.SEEK_END)

    make_parent_folder(path)
    write_atomically(path, write, what="the EXR file")


#: Constant rate factor of x264: visually near-lossless, about 5 Mbit/s at 1080p.
CRF = 17


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


def write_video(path: Path, frames: Iterable[NDArray[np.uint8]], size: tuple[int, int], fps: float) -> None:
    """Encode ``frames`` [H, W, 3], all of ``size`` (W, H), as the suffix says: ``.mp4``, ``.gif`` or ``.webp``.

    MP4 is H.264 in 4:2:0, which every player supports; that needs even sides: the last row or column of an odd one is
    doubled. GIF and WebP repeat for ever.
    Raises OutputError if the file cannot be written, ResourceError without a working ffmpeg, and errors of ``frames``.
    """
    program = find_ffmpeg()
    make_parent_folder(path)
    try:
        kind = path.suffix.lower().removeprefix(".")
        write_atomically(path, lambda file: _encode(program, file, frames, size, fps, kind), what="the video")
    except OutputError as error:
        # An error of the frames is not an error of the file.
        if isinstance(error.__cause__, SplatError):
            raise error.__cause__ from None
        raise


#: Options of ffmpeg for animated pictures. A GIF has a palette for each frame: one for all would need all at once.
_ANIMATED = {
    "gif": ("-vf", "split[a][b];[a]palettegen=stats_mode=single[p];[b][p]paletteuse=new=1", "-loop", "0", "-f", "gif"),
    "webp": ("-pix_fmt", "bgra", "-c:v", "libwebp_anim", "-quality", "85", "-loop", "0", "-f", "webp"),
}
#: Frames a second of a GIF at most: browsers show shorter frames than 20 ms for 100.
MAX_GIF_FPS = 50.0


def command(program: str, size: tuple[int, int], fps: float, target: str, kind: str = "mp4") -> list[str]:
    """Return the command of the encoder: raw RGB frames on stdin, a file of ``kind`` to ``target``, however that ends.

    kind: one of VIDEOS.
    """
    width, height = size
    source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", f"{fps:g}", "-i", "-"]
    if kind in _ANIMATED:
        return [program, "-y", "-hide_banner", "-loglevel", "error", *source, "-an", *_ANIMATED[kind], target]
    # Full-range RGB becomes BT.709, and the file declares it, since players guess otherwise.
    convert = ["-vf", "scale=out_color_matrix=bt709:out_range=tv", "-pix_fmt", "yuv420p", "-colorspace", "bt709"]
    curves = ["-color_primaries", "bt709", "-color_trc", "bt709", "-color_range", "tv"]
    encode = ["-c:v", "libx264", "-crf", str(CRF), "-movflags", "+faststart", "-f", "mp4"]
    return [program, "-y", "-hide_banner", "-loglevel", "error", *source, "-an", *convert, *curves, *encode, target]


def _encode(
    program: str, file: BinaryIO, frames: Iterable[NDArray[np.uint8]], size: tuple[int, int], fps: float, kind: str
) -> None:
    even = size if kind in _ANIMATED else (size[0] + size[0] % 2, size[1] + size[1] % 2)
    with tempfile.TemporaryFile() as words:
        try:
            # In its own session ffmpeg gets no Ctrl-C; this process handles it.
            encoder = subprocess.Popen(
                command(program, even, fps, file.name, kind),
                stdin=subprocess.PIPE,
                stderr=words,
                start_new_session=True,
            )
        except OSError as error:
            raise ResourceError(f"ffmpeg does not start: {error.strerror}", where=program, remedy=_REMEDY) from None
        try:
            with contextlib.suppress(BrokenPipeError):  # ffmpeg has ended early; its message is reported below
                _feed(encoder, frames, even)
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


_REMEDY = "install a working ffmpeg: pip install 'splatcli[video]'; or write PNG files: -o FOLDER"


def _feed(encoder: subprocess.Popen[bytes], frames: Iterable[NDArray[np.uint8]], size: tuple[int, int]) -> None:
    assert encoder.stdin is not None
    with encoder.stdin as pipe:
        for frame in frames:
            missing = (0, size[1] - frame.shape[0]), (0, size[0] - frame.shape[1]), (0, 0)
            pipe.write(np.ascontiguousarray(np.pad(frame, missing, mode="edge")).data)


#: Formats of one file for all frames.
VIDEOS = ("mp4", "gif", "webp")
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
