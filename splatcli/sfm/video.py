"""Frames of a video, as PNG files: read through imageio, with its ffmpeg plugin or pyav, whichever is there."""

from __future__ import annotations

import importlib.util
import math
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import accumulate, groupby, islice, pairwise
from itertools import count as counting
from operator import itemgetter
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import imageio.v3 as imageio
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import laplace

from splatcli.errors import ResourceError, SceneError
from splatcli.scene.hdr import Colour, coded, colour_of, to_srgb
from splatcli.sfm.motion import Motion, stretches

#: Packages that read videos -> imageio's name of the plugin; the first turns frames as the phone was held by itself.
_PLUGINS = {"imageio_ffmpeg": "FFMPEG", "av": "pyav"}

Samples = NDArray[np.uint8] | NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Video:
    """A video, and the properties that it names.

    frames: how many it says it has, None where it does not say. seconds: its length, 0 where it does not say.
    colour: of its samples. size: width and height in pixels, as its frames are given. mirrored: whether left and right
    of these are swapped. turns: quarter turns anticlockwise that make them upright after that. aspect: width of a pixel
    over its height; 1 with imageio-ffmpeg, whose filters know it.
    """

    path: Path
    frames: int | None
    seconds: float
    colour: Colour
    size: tuple[int, int]
    turns: int = 0
    mirrored: bool = False
    aspect: float = 1.0


def read_video(path: Path) -> Video:
    """Return a video with the properties that it names. Raises what write_frames() does."""
    with _opened(path) as plugin:
        meta = imageio.immeta(path, plugin=plugin, **_hint(plugin))
        length = _num_frames(meta), float(meta.get("duration") or 0)
        if plugin == "pyav":
            colour, size, matrix, aspect = _described_by_av(path)
            return Video(path, *length, colour, size, *orientation_of_matrix(matrix), aspect)
        width, height = meta.get("size") or (0, 0)
        return Video(path, *length, colour_of(str(meta.get("pix_fmt", ""))), (int(width), int(height)))


def write_frames(
    videos: Mapping[str, tuple[Video, int]], images: Path, progress: Callable[[int, int], None]
) -> list[str]:
    """Write the sharpest frame of each stretch of the videos, and return their names.

    Stretches of a video are equal in motion: where the camera stands, there are none (see motion.py).
    videos: each with the most frames that it gives, by the folder within ``images`` that these are written to, "" for
    ``images`` itself. Frames are called frame_000123.png; numbers are the video's. progress: hears frames read, and how
    many the videos say they have. Raises SceneError for what is no video, ResourceError without a package that reads
    any.
    """
    names: list[str] = []
    before = 0
    said = sum(video.frames or 0 for video, _ in videos.values())
    for within, (video, most) in videos.items():
        folder = images / within
        folder.mkdir(parents=True, exist_ok=True)
        read = 0

        def advance(done: int, total: int, before: int = before) -> None:
            nonlocal read
            read = done
            progress(before + done, max(2 * said, before + total))

        with _opened(video.path) as plugin:
            total = video.frames or most
            motion, way, scores = Motion(), [], []
            for frame in _judged(video, plugin, 2 * total, advance):
                way.append(motion.add(frame))
                scores.append(sharpness(frame))
            chosen = list(_best_of_each(zip(stretches(way, most), counting(), scores, strict=False)))
            written = _write(video, plugin, chosen, folder, 2 * total, advance)
        names += [str(PurePosixPath(within, name)) for name in written]
        before += read
    return names


def write_more_frames(
    video: Video, folder: Path, ranges: Sequence[range], progress: Callable[[int, int], None]
) -> list[str]:
    """Write the sharpest frame of each range of frame indices to a folder, as write_frames(); return their names in it.

    ranges: disjoint, ascending. The video is read up to the end of the last one.
    """
    numbers = {index: number for number, part in enumerate(ranges) for index in part}
    total = max(numbers, default=-1) + 1
    with _opened(video.path) as plugin, closing(_judged(video, plugin, 2 * total, progress)) as frames:
        scored = (
            (numbers[index], index, sharpness(frame))
            for index, frame in enumerate(islice(frames, total))
            if index in numbers
        )
        return _write(video, plugin, list(_best_of_each(scored)), folder, 2 * total, progress)


def shares(count: int, lengths: Sequence[float]) -> list[int]:
    """Return how many of ``count`` frames each video gives: in proportion to its length, and one at least.

    lengths: 0 where a video does not say; such a video counts as the mean of the others.
    """
    known = [length for length in lengths if length > 0]
    mean = sum(known) / len(known) if known else 1.0
    filled = [length if length > 0 else mean for length in lengths]
    ends = [round(count * part / sum(filled)) for part in accumulate(filled)]
    return [max(1, end - start) for start, end in pairwise([0, *ends])]


@contextmanager
def _opened(video: Path) -> Iterator[str]:
    """Give imageio's name of the plugin to read a video with. Raises what write_frames() does for errors within."""
    plugin = next((name for package, name in _PLUGINS.items() if importlib.util.find_spec(package)), None)
    if plugin is None:
        raise ResourceError(
            "no package that reads videos is installed",
            where=video,
            remedy="pip install 'splatcli[video]'; or make images of it: ffmpeg -i VIDEO -vf fps=2 photos/%06d.png",
        )
    try:
        yield plugin
    except (OSError, ValueError, RuntimeError, IndexError, KeyError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason, remedy = _reason(str(error).strip() or type(error).__name__, video)
        raise SceneError(f"cannot be read as a video: {reason}", where=video, remedy=remedy) from None


def _reason(error: str, video: Path) -> tuple[str, str]:
    """Return why a video cannot be read, and the remedy, from the words of imageio with ffmpeg's log."""
    if video.stat().st_size == 0:
        return "it is empty", "copy it again from the camera"
    if "misdetection possible" in error:
        return "its content is something else", "try it in a player; copy it again"
    if "moov atom not found" in error:
        return (
            "its end is missing, as where copying or recording was cut off",
            "copy it again from the camera; programs that mend such recordings need another video of the same camera",
        )
    if "does not contain any stream" in error or "matches no streams" in error:
        return "it has no picture, only sound or other data", "name another file"
    last = [line.partition("Error opening input: ")[2] for line in error.splitlines()]
    return next(filter(None, last), error.splitlines()[0]), "try it in a player; copy it again"


def _hint(plugin: str) -> dict[str, Any]:
    """Return what lets imageio take files whose endings it does not know, as .mts and .m4v; ffmpeg goes by content."""
    return {"extension": ".mp4"} if plugin == "FFMPEG" else {}


#: Filters of ffmpeg: frames that are marked as interlaced get whole lines; pixels that are not square become so.
_DEINTERLACE = "bwdif", "mode=send_frame:deint=interlaced"
#: A hundredth is the rounding of a program that changed the size.
_SQUARE = "w='if(lt(abs({0}-1),0.01),iw,round(iw*{0}/2)*2)':h=ih"
#: Filters of ffmpeg that give each decoded frame once, whatever its time and, by the second, its duration: a frame that
#: is to be shown for long would come several times.
_EACH_ONCE = "setpts=N/FRAME_RATE/TB,fps=source_fps"
#: Frames up to which ffmpeg selects those that are written: more make an option too long.
_MOST_SELECTED = 2000


def _judged(
    video: Video, plugin: str, total: int, progress: Callable[[int, int], None]
) -> Generator[NDArray[np.uint8]]:
    """Give each frame of a video, [H, W, 3], at the size at which sharpness and motion are judged.

    A frame of 4K and 10 bits takes half of the CPU time so. progress: hears frames read, of ``total``.
    """
    kind = _hint(plugin)
    width, height = video.size
    share = _JUDGED_AT / max(width, height, 1)
    size = (max(2, round(width * share)), max(2, round(height * share))) if share < 1 else None
    if plugin == "FFMPEG":
        kind |= {"output_params": ["-vf", ",".join(["=".join(_DEINTERLACE), _EACH_ONCE])]} | (
            {"size": size} if size else {}
        )
    elif plugin == "pyav":
        scale = [("scale", f"{size[0]}:{size[1]}")] if size else []
        kind |= {"filter_sequence": [_DEINTERLACE, *scale]}
    frames: Any = imageio.imiter(video.path, plugin=plugin, **kind)
    with closing(frames):
        for index, frame in enumerate(frames):
            progress(index + 1, max(total, index + 1))
            yield frame


def _chosen(video: Video, plugin: str, indices: Sequence[int]) -> Generator[tuple[int, Samples]]:
    """Give frames [H, W, 3] of a video, of 16 bits where they are to be converted to sRGB. indices: ascending."""
    kind = _hint(plugin)
    matrix = video.colour.assumed_matrix(*video.size)
    scale = _SQUARE.format("sar" if plugin == "FFMPEG" else video.aspect) + (
        f":in_color_matrix={matrix}" if matrix else ""
    )
    numbers: Iterator[int] = counting()
    if plugin == "FFMPEG":
        chain = [f"scale={scale}"]
        limit = []
        if len(indices) <= _MOST_SELECTED:
            # imageio-ffmpeg waits ten seconds for the first frame, and a selected one may lie minutes away. The second
            # brings the first one through the filter fps.
            given = sorted({0, 1, *indices})
            select = _any_of([f"eq(n,{index})" for index in given])
            chain, numbers, limit = [f"select='{select}'", *chain], iter(given), ["-frames:v", str(len(given))]
        kind |= {"output_params": ["-vf", ",".join(["=".join(_DEINTERLACE), *chain, _EACH_ONCE]), *limit]}
        kind |= {"dtype": "uint16"} if video.colour.converts else {}
    elif plugin == "pyav":
        kind |= {"format": "rgb48le"} if video.colour.converts else {}
        kind |= {"filter_sequence": [_DEINTERLACE, ("scale", scale)]}
    wanted = set(indices)
    frames: Any = imageio.imiter(video.path, plugin=plugin, **kind)
    with closing(frames):
        for index, frame in zip(numbers, frames, strict=False):
            if index in wanted:
                yield index, frame
            if index >= indices[-1]:
                return


#: Terms of one sum: ffmpeg 9 takes expressions that are nested 100 deep at most, and each term of a sum is a level.
_MOST_TERMS = 50


def _any_of(terms: Sequence[str]) -> str:
    """Return an expression of ffmpeg that is not 0 where one of up to _MOST_SELECTED terms is."""
    groups = ("+".join(terms[start : start + _MOST_TERMS]) for start in range(0, len(terms), _MOST_TERMS))
    return "+".join(f"({group})" for group in groups)


#: PyAV's number of a matrix that the video does not name.
_AV_UNSPECIFIED = 2


def orientation_of_matrix(matrix: Sequence[int]) -> tuple[int, bool]:
    """Return ``turns`` and ``mirrored`` of a Video whose container has this display matrix.

    matrix: nine numbers, the first a, b, x, c, d, of which a pixel x, y is shown at a x + c y, b x + d y; or none.
    """
    a, b, _, c, d = map(float, matrix[:5]) if matrix else (1.0, 0.0, 0.0, 0.0, 1.0)
    mirrored = a * d < b * c
    if mirrored:
        a, b = -a, -b
    return round(math.atan2(-b, a) / (math.pi / 2)) % 4, mirrored


def _described_by_av(path: Path) -> tuple[Colour, tuple[int, int], Sequence[int], float]:
    """Return the colours, the size, the display matrix, empty where it has none, and the pixel aspect of a video."""
    import av  # type: ignore[import-not-found]

    with av.open(str(path)) as container:
        codec = container.streams.video[0].codec_context
        matrix = "" if codec.colorspace == _AV_UNSPECIFIED else "named"
        colour = coded(codec.color_primaries, codec.color_trc, matrix)
        beside = next((list(frame.side_data) for frame in container.decode(video=0)), [])
        matrices = [bytes(data) for data in beside if data.type.name == "DISPLAYMATRIX"]
        matrix = np.frombuffer(matrices[0], np.int32).tolist() if matrices else []
        aspect = float(container.streams.video[0].sample_aspect_ratio or 1)
        return colour, (codec.width, codec.height), matrix, aspect if aspect > 0 else 1.0


def _write(
    video: Video, plugin: str, indices: Sequence[int], folder: Path, total: int, progress: Callable[[int, int], None]
) -> list[str]:
    """Write frames of a video, and return their names. progress: goes on from the half of ``total``, see _judged()."""
    names = []
    for index, frame in _chosen(video, plugin, indices) if indices else ():
        names.append(frame_name(index))
        pixels = to_srgb(frame.astype(np.uint16), video.colour) if video.colour.converts else frame
        pixels = np.rot90(pixels[:, ::-1] if video.mirrored else pixels, video.turns)
        # Level 1: a frame is read twice more and then stays; a third of the time for a tenth of the room.
        Image.fromarray(pixels).save(folder / names[-1], compress_level=1)
        done = total // 2 + index + 1
        progress(done, max(total, done))
    progress(total, total)
    return names


def _num_frames(meta: dict[str, Any]) -> int | None:
    """Return how many frames a video says it has, None where it does not say."""
    said = meta.get("nframes", math.inf)
    if math.isfinite(said) and said >= 1:
        return int(said)
    length = float(meta.get("duration") or 0) * float(meta.get("fps") or 0)
    return max(1, round(length)) if math.isfinite(length) and length >= 1 else None


#: The longer side, in pixels, at which sharpness is judged: noise of single pixels does not count as detail.
_JUDGED_AT = 512

Item = TypeVar("Item")


def sharpness(rgb: NDArray[np.uint8]) -> float:
    """Return the variance of the Laplacian of the luminance, [H, W, 3] or [H, W]; larger is sharper, 0 is flat."""
    picture = Image.fromarray(rgb).convert("L")
    picture.thumbnail((_JUDGED_AT, _JUDGED_AT), Image.Resampling.BOX)
    return float(laplace(np.asarray(picture, dtype=np.float32)).var())


def sharpest(scored: Iterable[tuple[Item, float]], total: int, count: int) -> Iterator[Item]:
    """Return the item with the highest score of each of ``count`` equal stretches of ``total`` items, in order.

    The first among equals. Only one item is held at a time. Where there are more items than ``total`` the last
    stretch is longer, where there are fewer some stretches stay empty.
    """
    count = min(count, total)
    return _best_of_each(
        (min(index * count // total, count - 1), item, score) for index, (item, score) in enumerate(scored)
    )


def _best_of_each(scored: Iterable[tuple[int, Item, float]]) -> Iterator[Item]:
    """Yield the item with the highest score of each stretch, the first among equals; numbers of stretches ascend."""
    for _, stretch in groupby(scored, key=itemgetter(0)):
        yield max(stretch, key=itemgetter(2))[1]


# --- gaps: neighbouring frames that mapping did not join, and where to take further ones ---
#
# Names of frames are relative to images/, with the folder of their video where there are several.

#: Frames that are added between two neighbours, at most.
_MORE = 3


def frame_name(index: int) -> str:
    """Return the file name of a frame of a video, which sorts as its index, from 0."""
    return f"frame_{index:06d}.png"


def frame_index(name: str) -> int:
    """Return the index that ``frame_name`` was given."""
    return int(PurePosixPath(name).name.removeprefix("frame_").removesuffix(".png"))


def folder_of(name: str) -> str:
    """Return the folder of a frame within images/, empty where frames lie in it."""
    folder = str(PurePosixPath(name).parent)
    return "" if folder == "." else folder


def find_gaps(names: Sequence[str], models: Iterable[set[str]]) -> list[tuple[str, str]]:
    """Return the neighbours among ``names``, in order of time, that no model of ``models`` has both of.

    Frames of different videos are no neighbours.
    """
    owner = {name: number for number, model in enumerate(models) for name in model}
    return [
        (first, second)
        for first, second in pairwise(names)
        if folder_of(first) == folder_of(second) and (first not in owner or owner[first] != owner.get(second))
    ]


def stretches_in(gaps: Sequence[tuple[str, str]], most: int) -> dict[str, list[range]]:
    """Return disjoint ranges of frame indices by folder, ascending, of which each is to give a frame; at most ``most``.

    A gap is cut into up to ``_MORE`` equal ranges, which leave out its ends.
    """
    found: dict[str, list[range]] = defaultdict(list)
    for first, second in gaps:
        start, stop = frame_index(first) + 1, frame_index(second)
        pieces = min(_MORE, most // len(gaps), stop - start)
        cuts = [start + (stop - start) * piece // max(1, pieces) for piece in range(pieces + 1)]
        found[folder_of(first)] += [range(low, high) for low, high in pairwise(cuts)]
    return {folder: stretches for folder, stretches in found.items() if stretches}
