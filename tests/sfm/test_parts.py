"""The parts by themselves: sharpness and choice of frames, pairs, lenses, orientation, options, report."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import numpy as np
import pytest
from PIL import Image, ImageFilter

from splatcli.errors import SceneError, UsageError
from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.decode import Header
from splatcli.scene.find_images import images_below
from splatcli.scene.read import has_images_only
from splatcli.sfm.features import first_guess, focal_share, lens_key, stretched
from splatcli.sfm.images import find_input, needs_upright_copy, orientation_of
from splatcli.sfm.mapping import largest_first, own_images
from splatcli.sfm.matching import EXHAUSTIVE_UP_TO, OVERLAP, alike, choose_pairs, how_to_match, pairs_to_retry
from splatcli.sfm.options import MODELS, SfmOptions
from splatcli.sfm.report import doubts, lines, notes
from splatcli.sfm.video import sharpest, sharpness
from tests.sfm import corner
from tests.sfm.conftest import write_noise


def test_blur_lowers_sharpness() -> None:
    image = Image.fromarray(corner.image(0))
    scores = [sharpness(np.asarray(image.filter(ImageFilter.GaussianBlur(radius)))) for radius in (0, 1, 2, 4)]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] > 10 * scores[2]
    assert sharpness(np.full((50, 70, 3), 77, dtype=np.uint8)) == 0.0


@pytest.mark.parametrize(
    ("scores", "total", "count", "kept"),
    [
        ([1, 5, 2, 3, 9, 4], 6, 3, [1, 3, 4]),
        ([1, 1, 1, 1], 4, 2, [0, 2]),  # the first among equals
        ([3, 1, 2], 3, 10, [0, 1, 2]),  # no more than there are
        ([1, 2, 3, 4, 9], 4, 2, [1, 4]),  # more than were announced: the last stretch is longer
        ([4, 5], 6, 3, [1]),  # fewer than were announced
        ([], 6, 3, []),
        ([0.0, 0.0], 2, 1, [0]),
    ],
)
def test_the_sharpest_of_each_stretch_is_kept(scores, total: int, count: int, kept: list[int]) -> None:
    assert list(sharpest(enumerate(scores), total, count)) == kept


def test_images_that_a_model_lacks_are_matched_with_all_others() -> None:
    none: list[str | None] = [None] * 5
    assert pairs_to_retry([(0, 1)], {3}, none) == [(0, 3), (1, 3), (2, 3), (3, 4)]
    faces = ["a", "a", "b", None, None]
    assert pairs_to_retry([], {1}, faces) == [(1, 2), (1, 3), (1, 4)]
    assert pairs_to_retry([], {3}, faces) == [(0, 3), (1, 3), (2, 3), (3, 4)]
    many: list[str | None] = [None] * 300
    assert pairs_to_retry([(0, 1), (1, 200), (2, 3)], set(range(1, 100, 2)) | {1}, many)[-1] == (99, 299)
    assert pairs_to_retry([(0, 1), (1, 200), (2, 4)], set(range(1, 300, 2)), many) == [(0, 1), (1, 200)]


class Piece:
    """Registered images and a number of points, as a pycolmap.Reconstruction has them."""

    def __init__(self, images: set[int], points: int) -> None:
        self._images, self._points = images, points

    def reg_image_ids(self) -> list[int]:
        return sorted(self._images)

    def num_reg_images(self) -> int:
        return len(self._images)

    def num_points3D(self) -> int:
        return self._points


def test_a_model_whose_images_a_larger_one_has_is_no_piece() -> None:
    """The mapper starts anew with images that it later adds to another model."""
    small, large, own, partly = Piece({2, 9}, 30), Piece(set(range(8)) | {9}, 90), Piece({11, 12}, 5), Piece({7, 8}, 9)
    found = largest_first({0: small, 1: large, 2: own, 3: partly})
    assert found == [large, partly, own]


@pytest.mark.parametrize(
    ("asked", "count", "is_video", "how"),
    [
        ("auto", 20, False, "exhaustive"),
        ("auto", EXHAUSTIVE_UP_TO + 1, False, "sequential"),
        ("auto", 20, True, "sequential"),
        ("retrieval", 20, True, "retrieval"),
        ("exhaustive", 900, False, "exhaustive"),
    ],
)
def test_matching_follows_the_number_of_images(asked, count: int, is_video: bool, how: str) -> None:
    assert how_to_match(asked, count, video=is_video) == how


def looks(groups: int, each: int) -> list[np.ndarray]:
    """Descriptors of images of ``groups`` things, ``each`` times in a row, with noise."""
    generator = np.random.default_rng(3)
    things = generator.integers(0, 200, (groups, 60, 128))
    noisy = [things[i // each] + generator.integers(0, 25, (60, 128)) for i in range(groups * each)]
    return [rows.astype(np.uint8) for rows in noisy]


def test_images_of_the_same_thing_are_alike() -> None:
    pairs = alike(looks(groups=5, each=4), neighbours=3, seed=1)
    assert pairs == [(i, j) for i in range(20) for j in range(i + 1, 20) if i // 4 == j // 4]


def test_sequential_pairs_hold_neighbours_and_a_path_that_comes_back() -> None:
    seen = looks(groups=40, each=1)
    seen += seen[:2]  # back where it began
    pairs = choose_pairs("sequential", seen, seed=1)
    assert {(i, i + step) for i in range(42 - OVERLAP) for step in range(1, OVERLAP + 1)} <= set(pairs)
    assert {(0, 40), (1, 41)} <= set(pairs)
    assert pairs == sorted(set(pairs))
    assert all(i < j for i, j in pairs)
    assert len(choose_pairs("exhaustive", seen, seed=1)) == 42 * 41 // 2


def test_images_without_features_are_no_harm() -> None:
    nothing = np.zeros((0, 128), dtype=np.uint8)
    assert alike([nothing, nothing, nothing], 2, seed=1) == []
    assert alike([*looks(1, 2), nothing], 2, seed=1) == [(0, 1)]


def test_only_pictures_of_low_contrast_are_stretched() -> None:
    grey = np.asarray(Image.fromarray(corner.image(0)).convert("L"))
    assert stretched(grey) is grey
    dim = (40 + grey * 0.3).astype(np.uint8)
    wide = stretched(dim)
    assert (wide.min(), wide.max(), wide.dtype, wide.shape) == (0, 255, np.uint8, grey.shape)
    order = np.argsort(dim, axis=None, kind="stable")
    assert (np.diff(wide.ravel()[order].astype(int)) >= 0).all()
    plain = np.full((9, 9), 30, dtype=np.uint8)
    assert np.ptp(stretched(plain)) == 0
    assert stretched(plain[:0]).shape == (0, 9)


@pytest.mark.parametrize(("per", "num_lenses"), [("folder", 3), ("image", 5), ("all", 2)])
def test_images_share_a_lens_only_at_one_size(per, num_lenses: int) -> None:
    images = [("a/1.jpg", 40, 30), ("a/2.jpg", 40, 30), ("a/3.jpg", 30, 40), ("b/1.jpg", 40, 30), ("b/2.jpg", 40, 30)]
    assert len({lens_key(*image, 0.0, per) for image in images}) == num_lenses


def test_the_focal_length_of_exif_is_where_the_solver_starts(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif.get_ifd(0x8769)[0xA405] = 26  # mm on 36 x 24 mm film
    Image.new("RGB", (40, 30)).save(tmp_path / "a.jpg", exif=exif)
    Image.new("RGB", (40, 30)).save(tmp_path / "b.png")
    # The same diagonal angle of view: 50 pixels here, 43.27 mm there.
    assert focal_share(tmp_path / "a.jpg") == pytest.approx(26 / 43.267 * 50 / 40, rel=1e-4)
    assert focal_share(tmp_path / "b.png") == 0.0
    for model in MODELS:
        known = first_guess(model, ("", 3600, 2400, 26 / 36))
        assert known.mean_focal_length() == pytest.approx(2600)
        assert known.has_prior_focal_length
    assert not first_guess("OPENCV", ("", 3600, 2400, 0.0)).has_prior_focal_length


@pytest.mark.parametrize(
    ("size", "changed", "share"),
    [
        ((4368, 2912), {}, 50 / (4368 * 25.4 / 3086.926)),
        ((2912, 4368), {}, 50 / (4368 * 25.4 / 3086.926)),
        ((4368, 2912), {0xA210: 3, 0xA20E: 3086.926 / 2.54, 0xA20F: 3091.295 / 2.54}, 50 / (4368 * 25.4 / 3086.926)),
        # Reduced: with EXIF's size as it was, or corrected; 7.9 mm would be a compact camera's sensor.
        ((2184, 1456), {}, 0.0),
        ((960, 640), {0xA002: 960, 0xA003: 640}, 0.0),
        # No such sensors and units.
        ((4368, 2912), {0xA20E: 16393.4, 0xA20F: 50000.0}, 0.0),
        ((4368, 2912), {0xA20E: 308692.6, 0xA20F: 308692.6}, 0.0),
        ((4368, 2912), {0xA210: 9}, 0.0),
        ((4368, 2912), {0xA20E: 0.0}, 0.0),
    ],
)
def test_focal_length_and_sensor_stand_in_for_that_on_film(size, changed, share: float, tmp_path: Path) -> None:
    exif = Image.Exif()
    canon = {0x920A: 50.0, 0xA20E: 3086.926, 0xA20F: 3091.295, 0xA210: 2, 0xA002: 4368, 0xA003: 2912}
    exif.get_ifd(0x8769).update(canon | changed)
    Image.new("L", size).save(tmp_path / "a.jpg", exif=exif)
    assert focal_share(tmp_path / "a.jpg") == pytest.approx(share, rel=1e-4)


@pytest.mark.parametrize(
    ("width", "height", "exif", "applied"),
    [(40, 30, 1, 1), (40, 30, 6, 6), (40, 30, 8, 8), (40, 30, 3, 1), (40, 40, 6, 1), (4000, 4001, 6, 6)],
)
def test_images_are_turned_where_the_scene_reader_will(width: int, height: int, exif: int, applied: int) -> None:
    header = Header(width, height, "RGB", False, exif, "sRGB", False)
    assert orientation_of(header) == applied
    assert needs_upright_copy(header) == (exif != applied)


def test_images_are_found_in_images_without_copies_and_masks(tmp_path: Path) -> None:
    previews = ("images/Thumbnails", "images/@eaDir/0.png", "images/__MACOSX")
    for width, folder in enumerate(("images/left", "images/right", "images_2", "masks", *previews), 60):
        write_noise(tmp_path / folder, 2, size=(width, 40))
    assert find_input(tmp_path).names == ("left/0.png", "left/1.png", "right/0.png", "right/1.png")
    with pytest.raises(SceneError, match="neither a folder of images nor a video"):
        find_input(tmp_path / "images" / "left" / "0.png")


def test_images_with_the_bytes_of_others_are_left_out_and_named(tmp_path: Path) -> None:
    write_noise(tmp_path, 4)
    (tmp_path / "day").mkdir()
    for copy in ("0 (1).png", "day/2.png", "1 copy.png"):
        (tmp_path / copy).write_bytes((tmp_path / f"{PurePosixPath(copy).name[0]}.png").read_bytes())
    for empty in ("x.png", "y.png"):
        (tmp_path / empty).write_bytes(b"")
    found = find_input(tmp_path)
    assert found.names == ("0.png", "1.png", "2.png", "3.png", "x.png", "y.png")
    assert found.copies == {"0 (1).png": "0.png", "1 copy.png": "1.png", "day/2.png": "2.png"}
    said = "3 images are copies of others, byte for byte, and left out: 0 (1).png of 0.png, 1 copy.png of 1.png"
    assert f"{said}, day/2.png of 2.png" in notes(REPORT | {"copies": found.copies})
    for name in ("1.png", "1 copy.png", "2.png", "day/2.png", "3.png", "x.png", "y.png"):
        (tmp_path / name).unlink()
    with pytest.raises(
        SceneError, match=r"only one image here.*; 1 image is a copy of another.*: 0 \(1\).png of 0.png"
    ):
        find_input(tmp_path)


def test_links_to_folders_elsewhere_are_followed_once(tmp_path: Path) -> None:
    for width, folder in enumerate(("photos/left", "store/right", "store/right/deep", "store/other"), 60):
        write_noise(tmp_path / folder, 1, size=(width, 40))
    photos = tmp_path / "photos"
    links = {
        "right": tmp_path / "store" / "right",
        "again": tmp_path / "store" / "right" / "deep",  # a part of it
        "whole": tmp_path,  # all of it, and the photos themselves
        "self": photos,
        "copy": photos / "left",
        ".hidden": tmp_path / "store" / "other",
        "dead": tmp_path / "nowhere",
    }
    for name, target in links.items():
        (photos / name).symlink_to(target, target_is_directory=True)
    (tmp_path / "store" / "right" / "back").symlink_to(photos, target_is_directory=True)
    # "again" comes first by its name, and the rest of what holds it has the other name.
    assert sorted(images_below(photos)) == ["again/0.png", "left/0.png", "right/0.png"]
    (photos / "again").unlink()
    assert sorted(images_below(photos)) == ["left/0.png", "right/0.png", "right/deep/0.png"]
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "all").symlink_to(photos, target_is_directory=True)
    assert has_images_only(tmp_path / "only")
    write_noise(photos / "left", 3)
    left = ("all/left/0.png", "all/left/1.png", "all/left/2.png")
    assert find_input(tmp_path / "only").names == (*left, "all/right/0.png", "all/right/deep/0.png")


@pytest.mark.parametrize(
    "wrong",
    [{"camera_model": "THIN"}, {"matching": "all"}, {"camera_per": "x"}, {"frames": 2}, {"seed": -1}],
    ids=str,
)
def test_options_that_cannot_be_followed_are_refused(wrong) -> None:
    with pytest.raises(UsageError) as caught:
        SfmOptions(**wrong)
    assert caught.value.remedy
    assert str(caught.value.where).startswith("--")


REPORT = {
    "registered": 9,
    "total": 10,
    "unregistered": ["x.jpg"],
    "unreadable": {"y.jpg": "is empty"},
    "points": 1234,
    "reprojection_error_px": 0.5,
    "track_length": 4.25,
    "cameras": [{"model": "OPENCV", "width": 40, "height": 30, "focal_px": [31.0, focal]} for focal in range(32, 39)]
    + [{"model": "PINHOLE", "width": 50, "height": 50, "focal_px": [25.0]}] * 6,
    "matching": "exhaustive",
    "pairs": 45,
    "verified_pairs": 30,
    "seconds": {"features": 2.4, "matching": 3.0},
    "threads": 2,
}


def test_images_that_two_models_have_are_named_once() -> None:
    """pycolmap's mapper lets models share some images."""

    def model(*numbers: int) -> pycolmap.Reconstruction:
        made = pycolmap.Reconstruction()
        made.add_camera_with_trivial_rig(pycolmap.Camera.create_from_model_name(1, "PINHOLE", 30.0, 40, 30))
        for number in numbers:
            image = pycolmap.Image(f"{number}.jpg", pycolmap.Point2DList(), 1, number)
            made.add_image_with_trivial_frame(image, pycolmap.Rigid3d())
        return made

    models = [model(1, 2, 3, 4, 5), model(4, 5, 6, 7), model(7, 8, 9)]
    own = own_images(models)
    assert own == [[f"{i}.jpg" for i in part] for part in ((1, 2, 3, 4, 5), (6, 7), (8, 9))]
    facts = {**REPORT, "other_models": [4, 3], "other_images": own[1:]}
    said = [line for line in notes(facts) if "a model of their own" in line]
    assert len(said) == 2
    assert "2 images form a model of their own, with 2 of a larger model, kept as sparse/1: 6.jpg, 7.jpg" in said[0]
    assert any("fall into 3 models that too little connects" in line for line in doubts(facts))
    apart = [line for line in notes({**facts, "other_models": [2, 2]}) if "a model of their own" in line]
    assert apart[1].startswith("2 images form a model of their own, kept as sparse/2: 8.jpg, 9.jpg")


def test_larger_images_are_advised_where_the_images_are_larger_than_what_was_used() -> None:
    few = {"registered": 7, "observations_per_image": 60.0, "matching": "exhaustive"}
    for size, advised in ((49, True), (50, False)):
        said = [line for line in doubts({**REPORT, **few, "max_image_size": size}) if "take " in line]
        assert len(said) == 2
        assert all(("--max-image-size" in line) == advised for line in said), said


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, []),
        ({"registered": 7}, ["only 7 of 10 images could be registered: take more images in between, or try a larger"]),
        ({"registered": 5, "total": 5}, ["only 5 views"]),
        ({"points": 91}, ["only 91 sparse points, so poses and the start are weak"]),
        ({"points": 91, "cameras_held": True}, ["only 91 sparse points, so the start is weak: take sharper"]),
        ({"observations_per_image": 60.0}, ["only 60 points on average, so poses are uncertain"]),
        (
            {"observations_per_image": 60.0, "cameras_held": True},
            ["only 60 points on average, so the start is weak: take sharper"],
        ),
        (
            {"registered": 7, "points": 11, "observations_per_image": 3.4, "rotation": 0.98},
            ["a rotation alone explains 98 % of what two images have in common, in the median, so the camera stayed"],
        ),
        (
            {"points": 51, "observations_per_image": 51.0, "rotation": 0.72},
            ["only 51 sparse points", "only 51 points on average"],
        ),
        ({"contradicted_matches": 0.3}, []),
        ({"contradicted_matches": 0.52}, ["52 % of the matches between images contradict the cameras: images may be"]),
        ({"contradicted_matches": 0.52, "rotation": 0.98}, ["a rotation alone explains 98 %"]),
        ({"parallax_degrees": 4.4}, ["4.4 degrees of parallax"]),
        ({"parallax_degrees": 4.6}, []),
        ({"reprojection_error_px": 1.75}, ["1.75 pixels"]),
        ({"reprojection_error_px": float("nan")}, ["nan pixels"]),
        ({"reprojection_error_px": 1.75, "cameras_held": True}, ["1.75 pixels on average with these cameras"]),
        ({"registered": 6, "other_models": [4, 3]}, ["only 6 of 10", "3 models that nothing connects"]),
        (
            {"unreadable": {"y.jpg": "is empty"}},
            ["1 image cannot be read and is left out: y.jpg is empty"],
        ),
        (
            {"not_read": ["a.dng", "b.gif"]},
            ["2 files are images of a kind that is not read, and left out: a.dng, b.gif"],
        ),
    ],
)
def test_the_report_doubts_what_is_doubtful(changes, says: list[str]) -> None:
    found = doubts({**REPORT, "unreadable": {}, **changes})
    assert len(found) == len(says)
    assert all(said in text for said, text in zip(says, found, strict=True))


def test_the_report_tells_what_counts() -> None:
    text = "\n".join(lines(REPORT))
    for said in (
        "9 of 10",
        "0.500 pixels",
        "1,234",
        "4.2 images",
        "and 3 more cameras",
        "30 of 45",
        "5 s with 2 threads",
    ):
        assert said in text
    assert text.count("focal length 31.0 and 3") == 5
    faces = lines({**REPORT, "cameras": REPORT["cameras"][-6:]})  # type: ignore[index]
    assert "camera              PINHOLE, 50x50, focal length 25.0 pixels; 6 cameras" in faces
    assert "not registered      x.jpg" in text
    assert "not readable        y.jpg" in text
