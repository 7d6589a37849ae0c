"""``splat render`` beyond PNG files of a run's views: paths, kinds of picture, videos, raw frames."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import imageio.v3 as imageio
import numpy as np
import pytest

from splatcli.checkpoint.file import load_checkpoint
from splatcli.cli.commands import run
from splatcli.cli.model import load_model
from splatcli.formats.ply import write_ply_file
from splatcli.formats.transform import PLY_UP
from splatcli.render.camera_files import cameras_json, read_camera_file
from splatcli.render.outside import views_from_outside
from tests.cli.tiny import HEIGHT, QUICK, VIEWS, WIDTH, write_scene
from tests.formats.made import scene
from tests.running import Done, Splat

Shell = Callable[..., Done]

#: Stands for ffmpeg on PATH: keeps its words and its stdin, and writes a file that is no video where one is wanted.
FAKE = """#!/bin/sh
for target; do :; done
printf '%s\\n' "$@" > "$0.words"
cat > "$0.frames"
printf 'film' > "$target"
"""


@pytest.fixture
def encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake ffmpeg, the only one to be found."""
    return fake_ffmpeg(FAKE, tmp_path, monkeypatch)


def fake_ffmpeg(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("splatcli.render.video.bundled", lambda: None)
    program = folder / ".bin" / "ffmpeg"
    program.parent.mkdir(exist_ok=True)
    program.write_text(script)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return program


def test_images_choose_views_of_a_run_and_of_a_scene(
    splat: Splat, finished_run: Path, exported_ply: Path, tiny_scene: Path, tmp_path: Path
) -> None:
    words = ("--views", "view_03,images/view_00.png")
    done = splat("render", finished_run, *words, "-o", tmp_path / "run")
    assert [Path(line).name for line in done.lines] == ["view_03.png", "view_00.png"], done.err
    assert "PSNR" in done.err, "they are compared with their photos"
    every = splat("render", finished_run, "--views", "all", "-q", "-o", tmp_path / "all").lines
    assert [Path(line).read_bytes() for line in done.lines] == [Path(every[i]).read_bytes() for i in (3, 0)]
    ply = splat("render", exported_ply, "--data", tiny_scene, *words, "-q", "-o", tmp_path / "ply").lines
    assert [Path(line).read_bytes() for line in ply] == [Path(line).read_bytes() for line in done.lines]
    one = splat("render", finished_run, "--views", "view_03.png", "-q", "-o", tmp_path / "one.png")
    assert one.lines == [str(tmp_path / "one.png")], one.err
    wrong = splat("render", finished_run, "--views", "view_3.png")
    assert wrong.code == 2
    assert "help: did you mean view_03.png or " in wrong.err


class TestPaths:
    @pytest.mark.parametrize("path", ["orbit", "interpolate"])
    def test_a_path_begins_as_its_first_camera_sees_it(
        self, splat: Splat, finished_run: Path, tmp_path: Path, path: str
    ) -> None:
        """The cameras of the scene stand on a circle and look at its axis, so that this holds for an orbit too."""
        done = splat("render", finished_run, "--views", path, "--frames", 4, "-o", tmp_path / "out")
        assert done.code == 0, done.err
        assert [Path(line).name for line in done.lines] == [f"{i:05d}.png" for i in range(4)]
        first = splat("render", finished_run, "--views", "train", "-q", "-o", tmp_path / "train").lines[0]
        shown, expected = (imageio.imread(path).astype(int) for path in (done.lines[0], first))
        assert shown.shape == (HEIGHT, WIDTH, 3)
        # Held-out cameras leave gaps in the circle, which tilt the mean up a little; upside down is another thing.
        assert np.abs(shown - expected).mean() < 0.2 * np.abs(shown - expected[::-1]).mean()

    def test_a_spiral_around_a_ring_is_refused(self, splat: Splat, finished_run: Path) -> None:
        done = splat("render", finished_run, "--views", "spiral")
        assert done.code == 2
        assert "--views orbit" in done.err

    def test_a_path_goes_around_no_empty_model(self, splat: Splat, tmp_path: Path) -> None:
        """The remedy named orbit, which was asked for."""
        write_ply_file(scene(0), tmp_path / "empty.ply")
        done = splat("render", tmp_path / "empty.ply", "--views", "orbit", "-o", tmp_path / "out")
        assert done.code == 2
        assert "the model has no Gaussians to go around" in done.err

    def test_a_ply_flies_with_cameras_or_a_scene_as_the_run_does(
        self, splat: Splat, finished_run: Path, exported_ply: Path, tiny_scene: Path, tmp_path: Path
    ) -> None:
        checkpoint = load_checkpoint(finished_run / "ckpts" / "ckpt_000040.pt")
        (tmp_path / "c.json").write_text(cameras_json([checkpoint.cameras[i] for i in checkpoint.train]))
        common = ("--views", "orbit", "--frames", 2, "-q", "-o")
        expected = [Path(p).read_bytes() for p in splat("render", finished_run, *common, tmp_path / "run").lines]
        for words in (("--cameras", tmp_path / "c.json"), ("--data", tiny_scene)):
            done = splat("render", exported_ply, *words, *common, tmp_path / "ply")
            assert [Path(line).read_bytes() for line in done.lines] == expected

    def test_a_path_has_the_field_of_view_that_is_asked_for(
        self, splat: Splat, finished_run: Path, exported_ply: Path, cameras: Path, tmp_path: Path
    ) -> None:
        """In height; positions stay. Fisheyes, whose paths are those of pinholes, have it too."""
        from_fisheyes = tmp_path / "fisheyes.json"
        as_fisheyes = ("--views", "all", "--projection", "fisheye", "--save-cameras", from_fisheyes)
        assert splat("render", finished_run, *as_fisheyes, "-q", "-o", tmp_path / "out").code == 0
        saved, plain = tmp_path / "c.json", tmp_path / "plain.json"
        words = ("--views", "orbit", "--frames", 2, "--size", "48x24", "-q", "-o", tmp_path / "out", "--save-cameras")
        assert splat("render", finished_run, *words, plain).code == 0
        sources = (("--cameras", cameras), ("--cameras", from_fisheyes), ())
        for model, more in ((finished_run, ()), *((exported_ply, source) for source in sources)):
            done = splat("render", model, *more, *words, saved, "--fov", 90)
            assert done.code == 0, done.err
            for camera, other in zip(*(read_camera_file(path).cameras for path in (saved, plain)), strict=True):
                assert (camera.fx, camera.fy) == pytest.approx((12.0, 12.0))
                assert (camera.width, camera.height, camera.model) == (48, 24, "pinhole")
                assert model != finished_run or np.allclose(camera.viewmat, other.viewmat)
        for refused, said in (
            (("--views", "test", "--fov", 90), "it does not apply to --views test"),
            (("--views", "orbit", "--fov", 90, "--projection", "fisheye"), "180 degrees from corner to corner"),
            (("--views", "orbit", "--fov", 180), "--fov"),
        ):
            done = splat("render", finished_run, *refused)
            assert done.code == 2
            assert said in done.err

    @pytest.mark.parametrize("path", ["orbit", "ellipse"])
    def test_a_model_without_cameras_is_gone_around(
        self, splat: Splat, exported_ply: Path, tmp_path: Path, path: str
    ) -> None:
        """On the circle of the views that compare and edit draw of such a model."""
        saved = tmp_path / "c.json"
        words = ("--views", path, "--frames", 3, "--size", "32x32", "--save-cameras", saved)
        done = splat("render", exported_ply, *words, "-o", tmp_path / "out")
        assert (done.code, len(done.lines)) == (0, 3), done.err
        assert f"note: the model has no cameras: the {path} goes around its middle, 30 degrees above it" in done.err
        assert all(imageio.imread(line).max() > 30 for line in done.lines)
        gaussians = load_model(exported_ply).gaussians
        found = read_camera_file(saved).cameras
        assert all(one.pixels_of(gaussians.means.numpy())[2].mean() > 0.85 for one in found), "they show most of it"
        circle = views_from_outside(gaussians, PLY_UP, 3)
        size = np.linalg.norm(circle[0].center - circle[1].center)
        for ours, theirs in zip(found, circle, strict=True):
            assert np.linalg.norm(ours.center - theirs.center) < (1e-3 if path == "orbit" else 0.05) * size
        quiet = splat("render", exported_ply, *words, "-q", "-o", tmp_path / "out")
        assert quiet.err == ""

    @pytest.mark.parametrize("path", ["spiral", "interpolate"])
    def test_paths_from_camera_to_camera_need_cameras(self, splat: Splat, exported_ply: Path, path: str) -> None:
        refused = splat("render", exported_ply, "--views", path)
        assert refused.code == 2
        assert "--cameras" in refused.err
        assert "orbit and ellipse do without" in refused.err

    def test_saved_cameras_render_the_same(self, splat: Splat, finished_run: Path, tmp_path: Path) -> None:
        cameras = tmp_path / "c.json"
        words = ("--frames", 3, "--size", "32x24", "--focus", "0,0,0.1", "--save-cameras", cameras)
        path = splat("render", finished_run, "--views", "orbit", *words, "-q", "-o", tmp_path / "a").lines
        again = splat("render", finished_run, "--views", cameras, "-q", "-o", tmp_path / "b").lines
        assert len(path) == len(again) == 3
        for left, right in zip(path, again, strict=True):
            assert Path(left).read_bytes() == Path(right).read_bytes()

    def test_projections_are_rendered_and_saved(self, splat: Splat, finished_run: Path, tmp_path: Path) -> None:
        """The cameras look at the scene's middle, where an orthographic one shows about what they do."""
        words, images = ("render", finished_run, "--views", "test", "--what", "rgb,normals", "-q", "-o"), {}
        for model in ("pinhole", "fisheye", "ortho"):
            cameras = tmp_path / f"{model}.json"
            done = splat(*words, tmp_path / model, "--projection", model, "--save-cameras", cameras)
            assert done.code == 0, done.err
            again = splat(*words, tmp_path / "again", "--views", cameras)
            assert [Path(path).read_bytes() for path in again.lines] == [Path(path).read_bytes() for path in done.lines]
            assert {camera.model for camera in read_camera_file(cameras).cameras} == {model}
            images[model] = imageio.imread(done.lines[0]).astype(int)
        apart = {model: np.abs(image - images["pinhole"]).mean() for model, image in images.items()}
        assert 0 < apart["ortho"] < apart["fisheye"]
        path = splat(*words, tmp_path / "x", "--projection", "ortho", "--save-cameras", tmp_path / "x.camera_path.json")
        assert path.code == 2
        assert "the views are ortho" in path.err

    def test_panoramas_are_rendered(self, splat: Splat, finished_run: Path, tmp_path: Path) -> None:
        words = ("render", finished_run, "--projection", "equirectangular", "-q", "-o")
        done = splat(*words, tmp_path / "all", "--views", "test", "--size", "64x32", "--what", "rgb,depth")
        assert done.code == 0, done.err
        assert {imageio.imread(path).shape[:2] for path in done.lines} == {(32, 64)}
        assert len({Path(path).parent.name for path in done.lines}) == 2
        done = splat(*words, tmp_path / "path.exr", "--views", "orbit", "--frames", 1, "--size", "64x32")
        assert done.code == 0, done.err
        frames = splat(*words, "-", "--format", "raw", "--views", "orbit", "--frames", 2, "--size", "64x32")
        assert frames.code == 0, frames.err
        one = splat(*words, tmp_path / "fine", "--views", "test")
        assert one.code == 0, one.err
        height, width = imageio.imread(one.lines[0]).shape[:2]
        assert width == 2 * height > 64

    def test_cameras_are_saved_as_a_camera_path_by_suffix(
        self, splat: Splat, finished_run: Path, tmp_path: Path
    ) -> None:
        names = ("c.json", "orbit.camera_path.json")
        words = ("--views", "orbit", "--frames", 2, "--size", "16x12", "--focus", "0,0,0.1", "-o", tmp_path / "a")
        for name, fps in zip(names, ((), ("--fps", 24)), strict=True):
            done = splat("render", finished_run, *words, "--save-cameras", tmp_path / name, *fps)
            assert done.code == 0, done.err
        ours, theirs = (read_camera_file(tmp_path / name) for name in names)
        assert (ours.fps, theirs.fps) == (None, 24.0)
        for left, right in zip(ours.cameras, theirs.cameras, strict=True):
            assert (left.width, left.height, left.name) == (right.width, right.height, right.name)
            np.testing.assert_allclose(left.viewmat, right.viewmat, atol=1e-9)
            np.testing.assert_allclose(left.fy, right.fy)

    def test_a_folder_named_like_views_is_not_a_model(
        self, finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Runs of the original program have folders called train and test."""
        (tmp_path / "test").mkdir()
        monkeypatch.chdir(tmp_path)
        assert run(["render", str(finished_run), "--views", "test", "-q", "-o", "out"]) == 0


def test_a_file_that_cannot_be_written_ends_the_command_after_those_before_it(
    splat: Splat, finished_run: Path, tmp_path: Path
) -> None:
    """Files are written while later views are rendered; results keep the views' order."""
    words = ("render", finished_run, "--views", "orbit", "--frames", 12, "--size", "32x24", "-o", tmp_path, "--json")
    *events, result = splat(*words).objects
    paths = [Path(event["path"]) for event in events]
    assert paths == sorted(paths)
    assert result["paths"] == [str(path) for path in paths]
    for path in paths:
        path.unlink()
    paths[5].mkdir()
    done = splat(*words)
    assert done.code == 8
    assert str(paths[5]) in done.err
    assert [path.is_file() for path in paths[:6]] == [True] * 5 + [False]


class TestKinds:
    def test_each_kind_has_a_folder(self, splat: Splat, finished_run: Path, tmp_path: Path) -> None:
        kinds = ("rgb", "depth", "alpha", "normals", "photo", "error")
        done = splat("render", finished_run, "--what", ",".join(kinds), "-o", tmp_path, "--json")
        assert done.code == 0, done.err
        *rendered, result = done.objects
        assert [list(one["paths"]) for one in rendered] == [list(kinds)] * 2
        assert result["paths"] == [path for one in rendered for path in one["paths"].values()]
        near, far = result["depth_range"]
        assert 0 < near < far
        for kind in kinds:
            assert [path.name for path in sorted((tmp_path / kind).rglob("*.png"))] == ["view_00.png", "view_08.png"]

    def test_side_by_side_is_image_render_error(
        self, splat: Splat, finished_run: Path, tiny_scene: Path, tmp_path: Path
    ) -> None:
        done = splat("render", finished_run, "--side-by-side", "-o", tmp_path / "a", "-q")
        plain = splat("render", finished_run, "-o", tmp_path / "b", "-q")
        joined = imageio.imread(done.lines[0])
        assert joined.shape == (HEIGHT, 3 * WIDTH, 3)
        assert np.array_equal(joined[:, :WIDTH], imageio.imread(tiny_scene / "images" / "view_00.png"))
        assert np.array_equal(joined[:, WIDTH : 2 * WIDTH], imageio.imread(plain.lines[0]))

    def test_one_view_is_one_file(self, splat: Splat, finished_run: Path, tmp_path: Path) -> None:
        words = ("--views", "orbit", "--frames", 1, "--what", "rgb,alpha", "--side-by-side", "--size", "20x10")
        done = splat("render", finished_run, *words, "-o", tmp_path / "one.png", "-q")
        assert done.lines == [str(tmp_path / "one.png")]
        assert imageio.imread(tmp_path / "one.png").shape == (10, 40, 3)


class TestVideo:
    def test_the_encoder_gets_every_frame(
        self, splat: Splat, finished_run: Path, tmp_path: Path, encoder: Path
    ) -> None:
        """A fake encoder at the border of the process; tests/render/test_video.py has a real one where there is one."""
        video = tmp_path / "x.mp4"
        words = ("--views", "orbit", "--frames", 3, "--size", "33x24", "--what", "rgb,depth,alpha")
        done = splat("render", finished_run, *words, "--fps", 12.5, "-o", video, "--json")
        assert done.code == 0, done.err
        assert video.read_bytes() == b"film"
        result = done.objects[-1]
        assert (result["paths"], result["frames"], result["fps"]) == ([str(video)], 3, 12.5)
        reported = encoder.with_name("ffmpeg.words").read_text().split("\n")
        # 99 columns are odd: the encoder gets a hundredth.
        assert (reported[reported.index("-s") + 1], reported[reported.index("-r") + 1]) == ("100x24", "12.5")
        frames = np.frombuffer(encoder.with_name("ffmpeg.frames").read_bytes(), np.uint8).reshape(3, 24, 100, 3)
        pictures = splat("render", finished_run, *words, "--side-by-side", "-o", tmp_path / "out", "-q").lines
        for frame, picture in zip(frames, pictures, strict=True):
            assert np.array_equal(frame[:, :99], imageio.imread(picture))
            assert np.array_equal(frame[:, 99], frame[:, 98])

    @pytest.mark.parametrize(("end", "most"), [("mp4", 16_384), ("webp", 16_383), ("gif", 65_535)])
    def test_frames_that_a_file_cannot_hold_are_refused_before_they_are_rendered(
        self, splat: Splat, finished_run: Path, tmp_path: Path, encoder: Path, end: str, most: int
    ) -> None:
        """The frames are those of all kinds of image side by side."""
        words = ("--views", "orbit", "--frames", 2, "--what", "rgb,alpha")
        done = splat("render", finished_run, *words, "--size", f"{most // 2 + 1}x1", "-o", tmp_path / f"x.{end}")
        assert done.code == 2, done.err
        assert f"frames of {2 * (most // 2 + 1)}x1 pixels; {end.upper()} files hold sides of up to {most:,}" in done.err
        assert "choose a smaller --size" in done.err
        assert not list(encoder.parent.glob("*.words"))
        assert not (tmp_path / f"x.{end}").exists()
        done = splat("render", finished_run, *words, "--size", f"{most // 2}x1", "-o", tmp_path / f"x.{end}")
        assert done.code == 0, done.err

    def test_a_camera_path_sets_the_frame_rate(
        self, splat: Splat, finished_run: Path, tmp_path: Path, encoder: Path
    ) -> None:
        pose = np.linalg.inv(load_checkpoint(finished_run / "ckpts" / "ckpt_000040.pt").cameras[0].viewmat)
        entry = {"camera_to_world": (pose @ np.diag([1.0, -1, -1, 1])).reshape(-1).tolist(), "fov": 40}
        path = tmp_path / "path.json"
        path.write_text(json.dumps({"render_width": 16, "render_height": 8, "fps": 24, "camera_path": [entry] * 2}))
        done = splat("render", finished_run, "--views", path, "-o", tmp_path / "x.mp4")
        assert done.code == 0, done.err
        reported = encoder.with_name("ffmpeg.words").read_text().split("\n")
        assert (reported[reported.index("-s") + 1], reported[reported.index("-r") + 1]) == ("16x8", "24")

    @pytest.mark.parametrize(
        ("script", "code", "message"),
        [
            ("#!/bin/sh\necho 'Unknown encoder libx264' >&2; exit 8\n", 4, "status 8: Unknown encoder libx264"),
            ("#!/bin/sh\ncat > $0.x; echo 'x: No space left on device' >&2; exit 1\n", 8, "No space left on device"),
            ("no program", 4, "does not start"),
        ],
    )
    def test_a_failing_encoder_is_an_error_and_the_old_video_is_kept(
        self,
        splat: Splat,
        finished_run: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        script: str,
        code: int,
        message: str,
    ) -> None:
        fake_ffmpeg(script, tmp_path, monkeypatch)
        folder = tmp_path / "out"
        folder.mkdir()
        (folder / "x.mp4").write_text("old")
        done = splat("render", finished_run, "--views", "orbit", "--frames", 2, "-o", folder / "x.mp4")
        assert (done.code, done.out) == (code, "")
        assert message in done.err
        assert [p.name for p in folder.iterdir()] == ["x.mp4"]
        assert (folder / "x.mp4").read_text() == "old"

    def test_without_an_encoder_there_is_a_remedy(
        self, splat: Splat, finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("splatcli.render.video.bundled", lambda: None)
        monkeypatch.setattr("splatcli.render.video.shutil.which", lambda name: None)
        done = splat("render", finished_run, "--views", "orbit", "-o", tmp_path / "x.mp4")
        assert done.code == 4
        assert "splatcli[video]" in done.err
        assert list(tmp_path.iterdir()) == []


class TestStdout:
    def test_raw_frames_go_through_a_pipe(self, shell: Shell, splat: Splat, finished_run: Path, tmp_path: Path) -> None:
        words = "--views all --size 24x16"
        done = shell(f"splat render {finished_run} {words} -o - > frames.rgb")
        assert done.code == 0, done.err
        assert f"raw frames: {VIEWS} of 24x16" in done.err
        assert "-f rawvideo -pix_fmt rgb24 -s 24x16 -r 30 -i -" in done.err
        frames = np.frombuffer((tmp_path / "frames.rgb").read_bytes(), np.uint8).reshape(VIEWS, 16, 24, 3)
        pictures = splat("render", finished_run, *words.split(), "-o", tmp_path / "out", "-q").lines
        for frame, picture in zip(frames, pictures, strict=True):
            assert np.array_equal(frame, imageio.imread(picture))

    def test_png_files_follow_each_other(self, shell: Shell, finished_run: Path) -> None:
        done = shell(f"splat render {finished_run} --views all -q --format png -o - | grep -ac IHDR")
        assert done.out == f"{VIEWS}\n"

    def test_a_closed_pipe_is_not_an_error(self, shell: Shell, finished_run: Path) -> None:
        done = shell(
            f"set -o pipefail; splat render {finished_run} --views orbit --frames 2000 -q -o - | head -c 9 | wc -c"
        )
        assert (done.code, done.out, done.err) == (0, "9\n", "")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--what", "rgb,deph"], 2, "'deph' is not a kind of image"),
        (["--size", "640"], 2, "is not a size"),
        (["--projection", "panorama"], 2, "'panorama' is not a projection"),
        (["--projection", "ortho", "--what", "error"], 2, "no images of their size and projection"),
        (["--projection", "equirectangular", "--what", "error"], 2, "no images of their size and projection"),
        (["--projection", "equirectangular", "--size", "64x48"], 2, "twice as wide as high"),
        (["--projection", "equirectangular", "--views", "orbit", "--fov", "60"], 2, "a panorama shows all"),
        (["--projection", "equirectangular", "--save-cameras", "x.json"], 2, "camera files hold no panoramas"),
        (["--size", "0x5"], 2, "is not a size"),
        (["--size", "100000x100000"], 2, "sides from 1 to 65536 pixels"),
        (["--size", "٣x5"], 2, "is not a size"),
        (["--depth-range", "3,1", "--what", "depth"], 2, "is not a depth range"),
        (["--depth-range", "1,3"], 2, "no depth image is written"),
        (["--focus", "1,2", "--views", "orbit"], 2, "not a list of 3 numbers"),
        (["--focus", "nan,0,0", "--views", "orbit"], 2, "not a list of 3 numbers"),
        (["--focus", "0,0,0"], 2, "does not apply to --views test"),
        (["--frames", "9"], 2, "does not apply to --views test"),
        (["--frames", "0", "--views", "orbit"], 2, "--frames"),
        (["--loop", "--views", "train"], 2, "does not apply to"),
        (["--order", "age", "--views", "interpolate"], 2, "is not an order"),
        (["--order", "name", "--views", "orbit"], 2, "does not apply to"),
        (["--cameras", "x.json"], 2, "only paths are made from cameras"),
        (["--cameras", "x.json", "--views", "orbit"], 3, "cannot read the cameras"),
        (["--fps", "24"], 2, "images have no frame rate"),
        (["--fps", "nan", "-o", "x.mp4"], 2, "--fps"),
        (["--format", "jpg"], 2, "is not a format"),
        (["--format", "raw"], 2, "raw frames go to stdout"),
        (["--format", "mp4", "-o", "-"], 2, "cannot be written to a pipe"),
        (["--format", "mp4", "-o", "folder"], 2, "a video is one file"),
        (["--format", "png", "-o", "x.mp4"], 2, "contradicts the suffix .mp4"),
        (["-o", "x.mov"], 2, "videos are MP4, GIF or WebP"),
        (["-o", "x.webm"], 2, "-s 640x480 -r 30 -i - x.webm"),
        (["-o", "x.avi", "--views", "orbit"], 2, "--format raw -o - | ffmpeg"),
        (["-o", "x.gif", "--fps", "60", "--views", "orbit"], 2, "at most 50 frames a second"),
        (["-o", "x.webp", "--views", "orbit", "--frames", "1"], 2, "-o x.png"),
        (["-o", "x.png", "--format", "gif"], 2, "contradicts the suffix .png"),
        (["-o", "x.jpg"], 2, "pictures are PNG or EXR files"),
        (["-o", "/dev/null/x"], 8, "Not a directory"),
        (["-o", "x.png"], 2, "one PNG file cannot hold 2 views"),
        (["-o", "-", "--json"], 2, "both want stdout"),
        (["--what", "error", "--size", "20x10"], 2, "these views have no images of their size"),
        (["--what", "error", "--views", "orbit"], 2, "these views have no images of their size"),
        (
            ["--what", "rgb,alpha", "--views", "orbit", "--frames", "1", "-o", "x.png"],
            2,
            "one file cannot hold 2 images",
        ),
        (["--views", "orbits"], 2, "names no views"),
    ],
)
def test_invalid_options_are_errors(
    splat: Splat,
    finished_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    done = splat("render", finished_run, *words)
    assert done.code == code, done.err
    assert message in done.err
    assert "help:" in done.err
    assert "Traceback" not in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("encoder")
@pytest.mark.parametrize(
    ("words", "frames"),
    [
        (["-o", "x.gif"], 120),
        (["-o", "x.mp4", "--frames", "9"], 9),
        (["--format", "mp4", "--frames", "7", "-o", "x.mp4", "--what", "depth"], 7),
        (["-o", "x.gif", "--views"], 2),
        (["-o", "x.gif", "--side-by-side"], 2),
        (["-o", "x.gif", "--what", "error"], 2),
    ],
)
def test_a_video_without_views_goes_round_the_model(
    splat: Splat, finished_run: Path, tmp_path: Path, words: list[str], frames: int
) -> None:
    """One with images of the scene shows held-out views, which have them."""
    words = [str(tmp_path / word) if word.startswith("x.") else word for word in words]
    done = splat("render", finished_run, *words, "--json")
    assert done.code == 0, done.err
    assert done.objects[-1]["frames"] == frames
    assert ("--views orbit" in done.err) == (frames > 2)


def test_a_video_of_views_of_two_sizes_wants_one(splat: Splat, finished_run: Path, tmp_path: Path) -> None:
    entries = json.loads(cameras_json(load_checkpoint(finished_run / "ckpts" / "ckpt_000040.pt").cameras[:3]))
    entries["cameras"][2]["width"] = 50
    (tmp_path / "c.json").write_text(json.dumps(entries))
    done = splat("render", finished_run, "--views", tmp_path / "c.json", "-o", tmp_path / "x.mp4")
    assert done.code == 2
    assert f"--size {WIDTH}x{HEIGHT}" in done.err


def test_no_file_has_the_name_of_another_views_folder(splat: Splat, finished_run: Path, tmp_path: Path) -> None:
    views = load_checkpoint(finished_run / "ckpts" / "ckpt_000040.pt").cameras[:4]
    names = ("a.png", "A.png/b", "a_2/c.png", "a_2")
    cameras = [replace(view, name=name) for view, name in zip(views, names, strict=True)]
    (tmp_path / "c.json").write_text(cameras_json(cameras))
    done = splat("render", finished_run, "--views", tmp_path / "c.json", "-o", tmp_path / "out", "-q")
    assert done.code == 0, done.err
    found = [str(Path(line).relative_to(tmp_path / "out")) for line in done.out.splitlines()]
    assert found == ["a_2.png", "A.png/b.png", "a_2/c.png", "a_2_2.png"]


def test_an_image_that_a_mask_hides_whole_is_gray_in_comparisons(splat: Splat, tmp_path: Path) -> None:
    """One such image must not keep the others from being written."""
    scene = write_scene(tmp_path / "scene")
    (scene / "masks").mkdir()
    for index in range(VIEWS):
        white = np.full((HEIGHT, WIDTH), 0 if index == 1 else 255, np.uint8)
        imageio.imwrite(scene / "masks" / f"view_{index:02d}.png", white)
    assert splat("train", scene, "-o", tmp_path / "run", "-n", 5, "-q", *QUICK).code == 0
    done = splat("render", tmp_path / "run", "--views", "train", "--what", "photo,error", "-o", tmp_path / "out")
    assert done.code == 0, done.err
    for kind in ("photo", "error"):
        shown = [imageio.imread(path) for path in sorted((tmp_path / "out" / kind).iterdir())]
        assert [bool((image == 128).all()) for image in shown] == [True] + [False] * (len(shown) - 1)
    assert "view_01.png: PSNR" not in done.err
    assert "view_02.png: PSNR" in done.err


@pytest.mark.parametrize("name", ["x.webm", "x.jpg"])
def test_a_suffix_is_refused_before_the_model_is_read(splat: Splat, tmp_path: Path, name: str) -> None:
    (tmp_path / "model.ply").write_bytes(b"ply\nbroken")
    done = splat("render", tmp_path / "model.ply", "--views", "orbit", "-o", tmp_path / name)
    assert done.code == 2
    assert name in done.err


def test_a_folder_that_takes_no_images_is_named_as_it_was_given(
    splat: Splat, finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    access = os.access  # root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and access(path, mode))
    done = splat("render", finished_run, "--views", "orbit", "--frames", 2, "-o", "images")
    assert done.code == 8
    assert "cannot write here" in done.err
    assert "where: images\n" in done.err
