"""Videos: which are found, how many frames each gives, and the colours of these."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from splatcli.cli.commands import run
from splatcli.errors import ResourceError, SceneError
from splatcli.scene.find_images import VIDEO_SUFFIXES
from splatcli.scene.hdr import Colour, colour_of, to_srgb
from splatcli.scene.read import has_images_only
from splatcli.sfm import video
from splatcli.sfm.images import SfmInput, find_input, is_video
from splatcli.sfm.report import doubts, lines
from splatcli.sfm.video import Video, read_video, shares, write_frames
from tests.sfm import corner
from tests.sfm.conftest import write_noise
from tests.sfm.test_parts import REPORT


def test_without_a_package_for_videos_the_message_names_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(video.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ResourceError, match=r"splatcli\[video\]"):
        read_video(tmp_path / "a.mp4")


def test_frames_of_a_video_are_the_sharpest_and_numbered(tmp_path: Path, monkeypatch) -> None:
    """Without a package for videos on the machine: imageio's reader of GIF stands in for it."""
    sharp = Image.fromarray(corner.image(0)).resize((480, 360))
    frames = [sharp.filter(ImageFilter.GaussianBlur(radius)).convert("L") for radius in (3, 0, 2, 3, 2, 0.5)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    monkeypatch.setattr(video, "_PLUGINS", {"PIL": "pillow"})
    reported: list[tuple[int, int]] = []
    gif = Video(tmp_path / "a.gif", 6, 0.0, Colour(), sharp.size)
    names = write_frames({"": (gif, 2)}, tmp_path / "out", lambda *words: reported.append(words))
    assert names == ["frame_000001.png", "frame_000005.png"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    assert reported[-1] == (12, 12)  # read to judge, and again to write
    (tmp_path / "b.mp4").write_bytes(b"no video")
    with pytest.raises(SceneError, match="cannot be read as a video"):
        read_video(tmp_path / "b.mp4")


@pytest.mark.parametrize(
    ("meta", "frames"),
    [
        ({"nframes": 30}, 30),
        ({"nframes": float("inf"), "duration": 2.0, "fps": 25.0}, 50),
        ({"duration": 0.0, "fps": 25.0}, None),
        ({}, None),
    ],
)
def test_the_length_of_a_video_is_what_it_says(meta, frames: int | None) -> None:
    assert video._num_frames(meta) == frames


def test_several_videos_share_the_frames_by_their_lengths() -> None:
    assert shares(120, [30.0]) == [120]
    assert shares(120, [10.0, 20.0, 30.0]) == [20, 40, 60]
    assert shares(100, [10.0, 0.0, 30.0]) == [17, 33, 50]  # one does not say: the mean of the others
    assert shares(10, [1000.0, 1.0]) == [10, 1]
    assert shares(7, [0.0, 0.0]) == [4, 3]
    assert sum(shares(300, [3.7, 11.2, 5.5, 9.1])) == 300


def test_a_folder_of_videos_is_input_and_images_come_first(tmp_path: Path) -> None:
    clips = tmp_path / "clips"
    (clips / "day 2").mkdir(parents=True)
    for name in ("b.MP4", "a.mov", "a.mp4", "day 2/a.mp4", ".hidden.mp4", "notes.txt"):
        (clips / name).write_bytes(name.encode())
    found = find_input(clips)
    assert found.videos == ("a.mov", "a.mp4", "b.MP4", "day 2/a.mp4")
    assert found.frame_folders == {"a.mov": "a.mov", "a.mp4": "a.mp4", "b.MP4": "b", "day 2/a.mp4": "day 2/a"}
    assert (found.is_video, found.names, found.videos_beside) == (True, (), ())
    assert found.files == [clips / name for name in found.videos]
    assert has_images_only(clips)
    one = find_input(clips / "a.mp4")
    for path in (clips, clips / "a.mp4"):
        assert not find_input(path, "none").static_masks
        with pytest.raises(SceneError, match="frames of a video have no masks"):
            find_input(path, "day 2")
    assert (one.files, one.frame_folders) == ([clips / "a.mp4"], {"": ""})
    assert one.fingerprint() == SfmInput(clips / "a.mp4", videos=("",)).fingerprint()
    before = found.fingerprint()
    (clips / "a.mp4").write_bytes(b"other")
    assert found.fingerprint() != before

    write_noise(clips, 3)
    (clips / "2.mov").write_bytes(b"the film of a Live Photo")
    mixed = find_input(clips)
    assert (mixed.is_video, len(mixed.names)) == (False, 3)
    assert mixed.videos_beside == found.videos
    said = doubts({**REPORT, "videos_left_out": list(mixed.videos_beside)})
    assert any("4 videos among the images are left out, a.mov: name it alone instead" in line for line in said)


def test_too_few_images_among_videos_say_why_these_are_not_read(tmp_path: Path) -> None:
    write_noise(tmp_path, 2)
    (tmp_path / "walk.mp4").write_bytes(b"x")
    with pytest.raises(SceneError, match=r"only 2 images here.*videos are read where no images lie beside them"):
        find_input(tmp_path)


def test_the_report_names_videos_and_hdr() -> None:
    def rows(*videos: dict[str, object]) -> list[str]:
        return [line for line in lines({**REPORT, "videos": list(videos)}) if line.startswith("video")]

    assert rows({"name": "", "frames": 9, "hdr": None}) == []
    assert rows({"name": "", "frames": 9, "hdr": "HLG"}) == ["video               HDR (HLG), converted to sRGB"]
    still = lines({**REPORT, "videos": [{"name": "", "frames": 9, "most": 120, "hdr": None}]})
    assert "frames              9 of up to 120: the others show the same, as where the camera stands" in still
    several = rows({"name": "a.mp4", "frames": 9, "hdr": "PQ"}, {"name": "b.mp4", "frames": 5, "hdr": None})
    assert several == ["videos              frames: 9 of a.mp4, 5 of b.mp4; 1 of them HDR (PQ), converted to sRGB"]


@pytest.mark.parametrize(
    ("pixel_format", "colour"),
    [
        ("yuv420p10le(tv, bt2020nc/bt2020/arib-std-b67, progressive)", Colour("bt2020nc", "bt2020", "arib-std-b67")),
        ("yuv420p10le(tv, bt2020nc/bt2020/smpte2084)", Colour("bt2020nc", "bt2020", "smpte2084")),
        ("yuv420p(tv, bt709)", Colour("bt709", "bt709", "bt709")),
        ("yuv420p(tv, bt709, progressive)", Colour("bt709", "bt709", "bt709")),
        ("yuvj420p(pc, bt470bg/unknown/unknown)", Colour("bt470bg")),
        ("yuv420p(progressive)", Colour()),
        ("yuv420p", Colour()),
        ("gbrp", Colour("gbr")),
        ("yuv420p(tv, smpte170m/smpte432/bt709)", Colour("smpte170m", "smpte432", "bt709")),
    ],
)
def test_the_colours_of_a_video_are_those_that_ffmpeg_names(pixel_format: str, colour: Colour) -> None:
    assert colour_of(pixel_format) == colour


def test_only_hd_videos_without_a_matrix_get_that_of_bt709() -> None:
    assert Colour().assumed_matrix(1920, 1080) == Colour().assumed_matrix(720, 1280) == "bt709"
    assert Colour().assumed_matrix(640, 480) is None
    assert Colour("bt470bg").assumed_matrix(1920, 1080) is None


#: Chromaticities of red, green, blue and of D65.
BT709 = ((0.64, 0.33), (0.30, 0.60), (0.15, 0.06))
BT2020 = ((0.708, 0.292), (0.170, 0.797), (0.131, 0.046))
P3 = ((0.680, 0.320), (0.265, 0.690), (0.150, 0.060))
D65 = (0.3127, 0.3290)


def xyz_of(primaries: tuple[tuple[float, float], ...]) -> NDArray[np.float64]:
    """Return the matrix from linear RGB to XYZ, after SMPTE RP 177."""
    columns = np.array([(x / y, 1, (1 - x - y) / y) for x, y in primaries]).T
    white = np.array([D65[0] / D65[1], 1, (1 - D65[0] - D65[1]) / D65[1]])
    return columns * np.linalg.solve(columns, white)


def linear(srgb: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def encoded(light: NDArray[np.float64], kind: str) -> NDArray[np.uint16]:
    """Return the codes of 16 bits of light in BT.2020, 1 at 203 cd/m^2, by the formulas of BT.2100 forwards."""
    nits = 203 * light
    if kind == "HLG":
        display = nits / 1000
        luminance = display @ xyz_of(BT2020)[1]
        scene = display * np.maximum(luminance, 1e-12)[..., None] ** ((1 - 1.2) / 1.2)
        a, b, c = 0.17883277, 1 - 4 * 0.17883277, 0.5 - 0.17883277 * np.log(4 * 0.17883277)
        low = np.sqrt(3 * np.clip(scene, 0, 1 / 12))
        codes = np.where(scene <= 1 / 12, low, a * np.log(np.maximum(12 * scene - b, 1e-9)) + c)
    else:
        y = (nits / 10000) ** 0.1593017578125
        codes = ((0.8359375 + 18.8515625 * y) / (1 + 18.6875 * y)) ** 78.84375
    return np.round(65535 * np.clip(codes, 0, 1)).astype(np.uint16)


KINDS = {"HLG": "arib-std-b67", "PQ": "smpte2084"}


@pytest.mark.parametrize("kind", KINDS)
def test_hdr_frames_become_the_colours_that_were_filmed(kind: str) -> None:
    """Colours of sRGB up to the knee come back; what is brighter keeps its hue and its order."""
    srgb = np.random.default_rng(1).integers(0, 187, (40, 50, 3))  # 187: half of the light of white
    to_2020 = np.linalg.solve(xyz_of(BT2020), xyz_of(BT709))
    colour = Colour("bt2020nc", "bt2020", KINDS[kind])
    got = to_srgb(encoded(linear(srgb / 255) @ to_2020.T, kind), colour)
    assert got.dtype == np.uint8
    assert np.abs(got.astype(int) - srgb).max() <= 1

    bright = np.linspace(0.5, 4.9, 60)[:, None] * (1.0, 0.5, 0.25)
    got = to_srgb(encoded(bright[None] @ to_2020.T, kind), colour)[0].astype(float) / 255
    assert (np.diff(got[:, 0]) >= 0).all()
    assert (got[0, 0], got[-1, 0]) == pytest.approx((0.735, 1.0), abs=0.005)
    assert linear(got[:, 1]) / linear(got[:, 0]) == pytest.approx(0.5, abs=0.02)
    white = to_srgb(encoded(np.ones((1, 1, 3)), kind), colour)
    assert white.min() >= 222
    assert np.ptp(white) <= 1


def test_wide_gamut_without_hdr_becomes_srgb() -> None:
    srgb = np.random.default_rng(2).integers(0, 256, (40, 50, 3))
    light = linear(srgb / 255) @ np.linalg.solve(xyz_of(P3), xyz_of(BT709)).T
    codes = np.where(light <= 0.0031308, 12.92 * light, 1.055 * np.maximum(light, 0) ** (1 / 2.4) - 0.055)
    got = to_srgb(np.round(65535 * codes).astype(np.uint16), Colour("bt709", "smpte432", "bt709"))
    assert np.abs(got.astype(int) - srgb).max() <= 1


def ffmpeg_writes(path: Path, frames: NDArray[np.uint16], *options: str) -> Path:
    """Write frames [N, H, W, 3] of 16 bits with a lossless codec."""
    imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg", reason="pip install 'splatcli[video]'")
    height, width = frames.shape[1:3]
    source = f"-f rawvideo -pix_fmt rgb48le -s {width}x{height} -r 10 -i -".split()
    words = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-y", *source, *options, "-c:v", "ffv1", str(path)]
    subprocess.run(words, input=frames.tobytes(), check=True)
    return path


def patches(width: int, height: int) -> NDArray[np.int64]:
    """Return an image of flat squares, so that subsampled colour changes nothing inside of them."""
    colours = np.random.default_rng(3).integers(20, 180, (height // 32, width // 32, 3))
    return colours.repeat(32, axis=0).repeat(32, axis=1)


#: imageio's reader leaves the pipes of ffmpeg to the garbage collector.
pipes_stay_open = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def inside(image: NDArray[np.uint8]) -> NDArray[np.int64]:
    return image.astype(np.int64).reshape(image.shape[0] // 32, 32, -1, 32, 3)[:, 8:24, :, 8:24]


@pipes_stay_open
@pytest.mark.parametrize("kind", KINDS)
def test_frames_of_an_hdr_video_are_srgb(kind: str, tmp_path: Path) -> None:
    srgb = patches(128, 96)
    light = linear(srgb / 255) @ np.linalg.solve(xyz_of(BT2020), xyz_of(BT709)).T
    tags = f"setparams=colorspace=bt2020nc:color_primaries=bt2020:color_trc={KINDS[kind]}:range=tv"
    options = ["-vf", f"scale=out_color_matrix=bt2020:out_range=tv,format=yuv420p10le,{tags}"]
    film = ffmpeg_writes(tmp_path / "a.mkv", np.stack([encoded(light, kind)] * 3), *options)
    assert read_video(film).colour.hdr == kind
    (name,) = write_frames({"": (read_video(film), 1)}, tmp_path / "out", lambda *_: None)
    got = np.asarray(Image.open(tmp_path / "out" / name))
    assert np.abs(inside(got) - inside(srgb.astype(np.uint8))).max() <= 3


@pipes_stay_open
@pytest.mark.parametrize(("size", "matrix"), [((1280, 96), "bt709"), ((128, 96), "bt601")])
def test_frames_of_a_video_without_a_matrix_have_the_colours_that_players_show(size, matrix, tmp_path: Path) -> None:
    srgb = patches(*size)
    scaled = ["-vf", f"scale=out_color_matrix={matrix}:out_range=tv,setparams=colorspace=unknown"]
    frames = np.stack([(srgb * 257).astype(np.uint16)] * 2)
    film = ffmpeg_writes(tmp_path / "a.mkv", frames, *scaled, "-pix_fmt", "yuv420p", "-colorspace", "unknown")
    assert read_video(film).colour == Colour()
    (name,) = write_frames({"": (read_video(film), 1)}, tmp_path / "out", lambda *_: None)
    got = np.asarray(Image.open(tmp_path / "out" / name))
    assert np.abs(inside(got) - inside(srgb.astype(np.uint8))).max() <= 4


#: How a container says that frames are to be turned, in degrees anticlockwise, and then mirrored.
TURNS = ((90, False), (180, False), (270, False), (0, True), (90, True), (180, True), (270, True))


@pipes_stay_open
@pytest.mark.parametrize("package", ["imageio_ffmpeg", "av"])
def test_frames_are_turned_and_mirrored_as_players_show_them(package: str, tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip(package, reason=f"pip install {package}")
    imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg", reason="it writes the videos: pip install 'splatcli[video]'")
    monkeypatch.setattr(video, "_PLUGINS", {package: video._PLUGINS[package]})
    upright = patches(128, 96).astype(np.uint8)
    for degrees, mirrors in TURNS:
        lies = np.rot90(upright[:, ::-1] if mirrors else upright, -degrees // 90).astype(np.uint16) * 257
        film = ffmpeg_writes(tmp_path / f"{degrees}{mirrors}.mkv", np.stack([lies] * 2), "-pix_fmt", "yuv420p")
        turned = film.with_name(f"{film.stem}-turned.mkv")
        tag = ["-display_rotation", str(degrees), *(["-display_hflip"] if mirrors else []), "-i", str(film)]
        program = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error"]
        subprocess.run([*program, *tag, "-c", "copy", str(turned)], check=True)
        (name,) = write_frames({"": (read_video(turned), 1)}, tmp_path / "out", lambda *_: None)
        got = np.asarray(Image.open(tmp_path / "out" / name))
        assert got.shape == upright.shape
        assert np.abs(inside(got) - inside(upright)).max() <= 4


def test_frames_that_lie_are_turned(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(video, "_PLUGINS", {"PIL": "pillow"})
    lies = Image.fromarray(np.arange(96, dtype=np.uint8).reshape(8, 12))
    lies.save(tmp_path / "a.gif")
    for mirrored in (False, True):
        gif = Video(tmp_path / "a.gif", 1, 0.0, Colour(), lies.size, turns=1, mirrored=mirrored)
        (name,) = write_frames({"": (gif, 1)}, tmp_path / "out", lambda *_: None)
        wanted = np.rot90(np.fliplr(np.asarray(lies)) if mirrored else np.asarray(lies))
        assert (np.asarray(Image.open(tmp_path / "out" / name).convert("L")) == wanted).all()


@pytest.mark.parametrize(
    ("matrix", "turns", "mirrored"),
    [
        ([], 0, False),
        ([1, 0, 0, 0, 1, 0], 0, False),
        ([0, -1, 0, 1, 0, 0], 1, False),
        ([-1, 0, 0, 0, -1, 0], 2, False),
        ([0, 1, 0, -1, 0, 0], 3, False),
        ([-1, 0, 0, 0, 1, 0], 0, True),
        ([0, 1, 0, 1, 0, 0], 1, True),
        ([1, 0, 0, 0, -1, 0], 2, True),
        ([0, -1, 0, -1, 0, 0], 3, True),
    ],
)
def test_a_display_matrix_turns_and_mirrors(matrix: list[int], turns: int, mirrored: bool) -> None:
    """Matrices as ffmpeg writes them, and what makes PyAV's frames those that ffmpeg's program gives."""
    assert video.orientation_of_matrix([number << 16 for number in matrix]) == (turns, mirrored)


@pipes_stay_open
def test_as_many_frames_as_are_asked_for_are_written(tmp_path: Path) -> None:
    """ffmpeg takes no sum of more than 100 terms."""
    levels = np.random.default_rng(0).integers(0, 65535, (2010, 8, 8, 3), dtype=np.uint16)
    clip = read_video(ffmpeg_writes(tmp_path / "a.mkv", levels, "-pix_fmt", "yuv420p"))
    for count in (101, video._MOST_SELECTED):
        names = write_frames({"": (clip, count)}, tmp_path / str(count), lambda *_: None)
        assert len(names) == count
        assert sorted(path.name for path in (tmp_path / str(count)).iterdir()) == names


@pipes_stay_open
def test_a_first_frame_that_comes_late_is_waited_for(tmp_path: Path, monkeypatch) -> None:
    """The camera stands at first, and long videos are decoded slowly: imageio-ffmpeg waits for ten seconds only."""
    reader = pytest.importorskip("imageio_ffmpeg", reason="pip install 'splatcli[video]'")
    levels = np.stack([corner.image(0).astype(np.uint16) * 128] * 40)
    levels[38] *= 2  # the sharpest
    clip = read_video(ffmpeg_writes(tmp_path / "a.mkv", levels, "-pix_fmt", "yuv420p"))
    slow = tmp_path / "ffmpeg"
    real = reader.get_ffmpeg_exe()
    slow.write_text(f'#!/bin/sh\ncase "$*" in *select=*) exec "{real}" -readrate 1 "$@";; esac\nexec "{real}" "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(slow))
    # Five seconds of its time are one of ours.
    monkeypatch.setattr(reader._io, "time", SimpleNamespace(time=lambda: 5 * time.time(), sleep=time.sleep))
    names = write_frames({"": (clip, 1)}, tmp_path / "out", lambda *_: None)
    assert names == [path.name for path in (tmp_path / "out").iterdir()] == ["frame_000038.png"]


@pipes_stay_open
@pytest.mark.parametrize("package", ["imageio_ffmpeg", "av"])
def test_interlaced_frames_and_pixels_that_are_not_square_are_mended(package: str, tmp_path: Path, monkeypatch) -> None:
    """As of camcorders: a moving bar has no comb, and a circle is round."""
    pytest.importorskip(package, reason=f"pip install {package}")
    monkeypatch.setattr(video, "_PLUGINS", {package: video._PLUGINS[package]})
    column = np.arange(128)
    frames = np.zeros((40, 96, 128, 3), np.uint16)
    for index, frame in enumerate(frames):
        frame[:, abs(column - 20 - 2 * index) < 6] = 60000
    options = ["-vf", "tinterlace=interleave_top,setfield=tff,setsar=4/3", "-pix_fmt", "yuv420p"]
    clip = read_video(ffmpeg_writes(tmp_path / "a.mkv", frames, *options))
    names = write_frames({"": (clip, 10)}, tmp_path / "out", lambda *_: None)
    for name in names[1:-1]:
        levels = np.asarray(Image.open(tmp_path / "out" / name).convert("L")).astype(float)
        assert levels.shape == (96, 170)
        assert np.abs(np.diff(levels[8:-8], axis=0)).max() < 40
    clip = read_video(ffmpeg_writes(tmp_path / "b.mkv", frames, "-vf", "setsar=249/250", "-pix_fmt", "yuv420p"))
    (name, *_) = write_frames({"": (clip, 2)}, tmp_path / "nearly", lambda *_: None)
    assert Image.open(tmp_path / "nearly" / name).size == (128, 96)


@pipes_stay_open
@pytest.mark.parametrize("time", ["N+floor(N/4)", "if(lt(N,20),6*N,100+N)", "if(lte(N,10),N,N+8)"])
def test_frames_keep_their_numbers_where_some_last_longer(time: str, tmp_path: Path) -> None:
    """As of phones: each frame has its number as its grey level."""
    count = 40
    levels = np.repeat(np.arange(count, dtype=np.uint16) * (5 * 257) + 10_000, 64 * 48 * 3).reshape(count, 48, 64, 3)
    options = ["-vf", f"settb=1/90000,setpts='({time})/30/TB'", "-fps_mode", "passthrough", "-enc_time_base", "1/90000"]
    clip = read_video(ffmpeg_writes(tmp_path / "a.mov", levels, *options, "-pix_fmt", "yuv420p"))
    ranges = [range(number, number + 1) for number in (2, 6, 11, 12, 17, 25, 38)]
    names = video.write_more_frames(clip, tmp_path, ranges, lambda *_: None)
    assert names == [f"frame_{part.start:06d}.png" for part in ranges]
    for name, part in zip(names, ranges, strict=True):
        grey = np.asarray(Image.open(tmp_path / name)).mean()
        assert abs(grey - (5 * part.start + 10_000 / 257)) < 2.0, name


@pipes_stay_open
def test_every_ending_of_a_video_is_read(tmp_path: Path) -> None:
    film = ffmpeg_writes(tmp_path / "a.mkv", np.full((4, 32, 32, 3), 9000, np.uint16), "-pix_fmt", "yuv420p")
    for suffix in (*VIDEO_SUFFIXES, ".MTS"):
        other = film.rename(film.with_suffix(suffix))
        assert is_video(other)
        assert (read_video(other).frames, read_video(other).size) == (4, (32, 32))
        (name,) = write_frames({"": (read_video(other), 1)}, tmp_path / "out", lambda *_: None)
        assert Image.open(tmp_path / "out" / name).size == (32, 32)
        film = other


@pipes_stay_open
def test_videos_that_cannot_be_read_are_named(tmp_path: Path, monkeypatch, capfd) -> None:
    pytest.importorskip("imageio_ffmpeg", reason="pip install 'splatcli[video]'")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clips").mkdir()
    for name in ("a.mp4", "b.mov"):
        (tmp_path / "clips" / name).write_bytes(b"no video")
    assert run(["train", "clips"]) == 3
    said = capfd.readouterr()
    assert "none of the 2 videos can be read; the first, a.mp4, cannot be read as a video" in said.err
    assert said.out == ""


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("empty", "it is empty"),
        ("cut", "its end is missing"),
        ("sound", "it has no picture"),
        ("text", "its content is something else"),
    ],
)
def test_why_a_video_cannot_be_read_is_said(kind: str, reason: str, tmp_path: Path, monkeypatch, capfd) -> None:
    reader = pytest.importorskip("imageio_ffmpeg", reason="pip install 'splatcli[video]'")
    monkeypatch.chdir(tmp_path)
    sources = {"cut": "testsrc2=s=64x64:d=2", "sound": "sine=d=1"}
    if kind in sources:
        words = [reader.get_ffmpeg_exe(), "-v", "error", "-f", "lavfi", "-i", sources[kind], "walk.mp4"]
        subprocess.run(words, check=True)
    whole = Path("walk.mp4").read_bytes() if kind in sources else b"no video" * (kind == "text")
    Path("walk.mp4").write_bytes(whole[: len(whole) // 2] if kind == "cut" else whole)
    assert run(["sfm", "walk.mp4"]) == 3
    said = capfd.readouterr()
    assert f"cannot be read as a video: {reason}" in said.err
    assert f"where: {tmp_path / 'walk.mp4'}\n  help: " in said.err
    assert not list(tmp_path.glob("output/*"))


@pytest.mark.parametrize("command", ["sfm", "train"])
@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("VID_20240501.insv", "export it as an equirectangular video (.mp4)"),
        ("my photos.zip", "unpack it, and name the folder: unzip 'from phone/my photos.zip' -d 'from phone/my photos'"),
    ],
)
def test_a_folder_of_files_that_need_another_program_says_what_to_do(
    command: str, name: str, remedy: str, tmp_path: Path, monkeypatch, capfd
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("from phone").mkdir()
    Path("from phone", name).write_bytes(b"something")
    Path("from phone", "notes.txt").write_text("read me")
    assert run([command, "from phone"]) == 3
    said = capfd.readouterr().err
    assert "there are no images" in said
    assert f"{name} is no image and no video that is read" in said
    assert f"help: {remedy}" in said


def test_photos_that_give_no_model_name_the_video_among_them(tmp_path: Path, capfd) -> None:
    write_noise(tmp_path / "photos", 3)
    (tmp_path / "photos" / "walk.mov").write_bytes(b"a video")
    assert run(["sfm", str(tmp_path / "photos"), "-o", str(tmp_path / "made")]) == 3
    assert f"or name a video that lies among them: splat sfm {tmp_path}/photos/walk.mov" in capfd.readouterr().err
