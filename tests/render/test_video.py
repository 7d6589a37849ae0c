"""Videos by a real encoder, read back by its decoder; tests/cli/test_render.py has the arguments of the encoder."""

from __future__ import annotations

import errno
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from splatcli.errors import OutputError, ResourceError, SceneError
from splatcli.render.video import find_ffmpeg, write_video


@pytest.fixture
def ffmpeg() -> str:
    try:
        return find_ffmpeg()
    except ResourceError:
        pytest.skip("neither imageio-ffmpeg nor ffmpeg is installed: pip install 'splatcli[video]'")


def frames(count: int = 5) -> list[np.ndarray]:
    """Plain pictures of 31x17 in colours that are far apart."""
    colours = [(200, 30, 30), (30, 200, 30), (30, 30, 200), (128, 128, 128), (255, 255, 255)]
    return [np.tile(np.array(colours[i % 5], np.uint8), (17, 31, 1)) for i in range(count)]


def test_every_frame_comes_back_in_its_colour(ffmpeg: str, tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.mp4"
    write_video(path, iter(frames()), (31, 17), 25)
    assert [p.name for p in path.parent.iterdir()] == ["x.mp4"]
    words = [ffmpeg, "-loglevel", "error", "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    raw = subprocess.run(words, capture_output=True, check=True).stdout
    decoded = np.frombuffer(raw, np.uint8).reshape(5, 18, 32, 3).astype(int)
    for shown, expected in zip(decoded, frames(), strict=True):
        assert np.abs(shown[:17, :31] - expected).max() <= 6
    reported = subprocess.run(
        [ffmpeg, "-hide_banner", "-i", str(path)], capture_output=True, text=True, check=False
    ).stderr
    assert "25 fps" in reported
    assert "bt709" in reported


@pytest.mark.parametrize("end", ["gif", "webp"])
def test_an_animation_has_every_frame_and_repeats(ffmpeg: str, tmp_path: Path, end: str) -> None:
    path = tmp_path / f"x.{end}"
    write_video(path, iter(frames()), (31, 17), 25)
    with Image.open(path) as shown:
        assert (shown.size, shown.n_frames, shown.info["loop"]) == ((31, 17), 5, 0)
        for index, expected in enumerate(frames()):
            shown.seek(index)
            shown.load()
            assert shown.info["duration"] == 40
            assert np.abs(np.asarray(shown.convert("RGB")).astype(int) - expected).max() <= 3
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_an_error_of_the_frames_is_raised_and_leaves_no_file(ffmpeg: str, tmp_path: Path) -> None:
    def broken():  # type: ignore[no-untyped-def]
        yield from frames(2)
        raise SceneError("no photo")

    with pytest.raises(SceneError, match="no photo"):
        write_video(tmp_path / "x.mp4", broken(), (31, 17), 25)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_its_place_is_an_error(ffmpeg: str, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="a folder"):
        write_video(tmp_path, [], (2, 2), 25)


def test_a_lack_of_a_temporary_folder_is_named(ffmpeg: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the encoder says goes into a temporary file."""

    def none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._get_default_tempdir", none)
    with pytest.raises(ResourceError, match="set TMPDIR to a folder"):
        write_video(tmp_path / "x.mp4", iter([np.zeros((16, 16, 3), np.uint8)]), (16, 16), 10)
    assert list(tmp_path.iterdir()) == []
