"""Bad scenes: folders, COLMAP models, transforms files, poses and points (rows 1 to 22 and 38 to 44)."""

from __future__ import annotations

import math
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from splatcli.checkpoint.file import load_checkpoint
from splatcli.cli.commands import run
from splatcli.scene._pycolmap import pycolmap
from tests.bad_input.harms import (
    MODEL,
    Harm,
    as_blender,
    as_nerfstudio,
    as_text,
    both,
    camera,
    change,
    document,
    frame,
    keep_views,
    matrices,
    move,
    nothing,
    pack,
    points,
    poses,
    remove,
    rename_view,
    replace,
    top,
    write,
    write_transforms,
)
from tests.bad_input.table import Case, Expect

CAMERAS, IMAGES, POINTS, RIGS, FRAMES = (
    f"{MODEL}/{kind}.bin" for kind in ("cameras", "images", "points3D", "rigs", "frames")
)
TRANSFORMS = "scene/transforms.json"
#: Of the first image in images.bin: the quaternion, behind the count and the id.
FIRST_POSE = 12
#: Before COLMAP knew rigs, poses stood in images.bin alone.
OLD_STYLE = remove(RIGS, FRAMES)
#: What the note on a moved scene says.
MOVED = "is subtracted from its coordinates and stored with the run"


def second_model(folder: Path) -> None:
    """sparse/0 with two views, sparse/1 with all twelve."""
    keep_views(2, "scene/few")(folder)
    move(MODEL, "scene/sparse/1")(folder)
    move("scene/few", MODEL)(folder)


def text_twin(views: int) -> Harm:
    """A text model of the first ``views`` views beside the binary one."""

    def harm(folder: Path) -> None:
        made = pycolmap.Reconstruction()
        made.read_binary(str(folder / MODEL))
        for image_id in sorted(made.images)[views:]:
            made.deregister_frame(made.images[image_id].frame_id)
        made.write_text(str(folder / MODEL))

    return harm


def renamed_image(number: int, name: str, in_model: str | None = None) -> Harm:
    """Another name for an image file, and for it in the model."""

    def harm(folder: Path) -> None:
        old = sorted((folder / "scene/images").rglob("*.jpg"))[number]
        (folder / "scene/images" / name).parent.mkdir(exist_ok=True)
        old.rename(folder / "scene/images" / name)
        rename_view(number, in_model or name)(folder)

    return harm


def linked_images(folder: Path) -> None:
    """Each image a link to a store outside, as data stores and downloaders leave them."""
    (folder / "scene/images").rename(folder / "store")
    (folder / "scene/images").mkdir()
    for path in (folder / "store").iterdir():
        (folder / "scene/images" / path.name).symlink_to(path)


def looped_image(folder: Path) -> None:
    """An image replaced by a link to itself."""
    path = min((folder / "scene/images").iterdir())
    path.unlink()
    path.symlink_to(path.name)


def looped_scene(folder: Path) -> None:
    """The scene replaced by a link to itself."""
    shutil.rmtree(folder / "scene")
    (folder / "scene").symlink_to("scene")


def a_folder_and_a_dead_link(folder: Path) -> None:
    """Two images replaced."""
    remove("scene/images/view_004.jpg", "scene/images/view_008.jpg")(folder)
    (folder / "scene/images/view_004.jpg").mkdir()
    (folder / "scene/images/view_008.jpg").symlink_to("gone.jpg")


def absolute_names(folder: Path) -> None:
    """transforms.json names images that lie beside the scene, by absolute paths."""
    as_nerfstudio(folder)
    (folder / "scene/images").rename(folder / "photos")
    replace(TRANSFORMS, "images/", f"{folder}/photos/", 12)(folder)


def drop_line(number: int) -> Harm:
    """images.txt without one of its lines, counted from the first that is no comment."""

    def edit(data: bytes) -> bytes:
        lines = data.split(b"\n")
        first = next(i for i, line in enumerate(lines) if not line.startswith(b"#"))
        return b"\n".join(lines[: first + number] + lines[first + number + 1 :])

    return change(f"{MODEL}/images.txt", edit)


def each_text(edit: Callable[[bytes], bytes]) -> Harm:
    """Every text file of the model as ``edit`` gives it."""
    return both(as_text, *(change(f"{MODEL}/{name}.txt", edit) for name in ("cameras", "images", "points3D")))


def centers(edit: Callable[[int], list[float]]) -> Harm:
    """The cameras at other places, looking where they looked."""
    return poses(lambda i, pose: np.column_stack([pose[:, :3], -pose[:, :3] @ np.array(edit(i), dtype=float)]))


def far_away(*by: float) -> Harm:
    """The whole scene at another place."""
    return both(
        points(lambda xyz: xyz + by),
        poses(lambda i, pose: np.column_stack([pose[:, :3], pose[:, 3] - pose[:, :3] @ np.array(by)])),
    )


def duplicate_image(folder: Path) -> None:
    """images.bin whose second image has the id of the first."""
    data = (folder / IMAGES).read_bytes()
    name_end = data.index(b"\0", 8 + 64) + 1
    (observations,) = struct.unpack_from("<Q", data, name_end)
    pack(IMAGES, name_end + 8 + 24 * observations, "<I", 1)(folder)


def at_a_camera(xyz: np.ndarray) -> np.ndarray:
    made = pycolmap.Reconstruction()
    made.read_binary(str(Path.cwd() / MODEL))
    # The first view is held out; the second is trained on.
    return np.vstack([xyz, made.images[sorted(made.images)[1]].projection_center()])


def sparse_file(path: str, size: int) -> Harm:
    """A file of many zeros that takes no room on the disk."""

    def harm(folder: Path) -> None:
        (folder / path).touch()
        with (folder / path).open("rb+") as file:
            file.truncate(size)

    return harm


#: Where a step of training would prove no more than reading the scene does.
READ = ("info", "scene")

CASES = [
    # Nothing to read.
    Case(1, "no such folder", remove("scene"), says=("no such folder", "where: ", "help: name the folder")),
    Case(1, "a file", both(remove("scene"), write("scene", "x")), says=("is a file, not a scene's folder",)),
    Case(1, "an archive", write("s 1.zip", "x"), command=("train", "s 1.zip"), says=("unzip 's 1.zip' -d 's 1'",)),
    Case(1, "a raw video", write("a.insv", "x"), command=("sfm", "a.insv"), says=("export it as an equirectangular",)),
    Case(
        1,
        "an empty folder",
        lambda folder: (shutil.rmtree(folder / "scene"), (folder / "scene").mkdir()),
        says=("the folder is empty", "help: name the folder that holds the images or the scene"),
    ),
    Case(
        1,
        "a folder of something else",
        both(remove("scene"), write("scene/x", "")),
        says=("no cameras here", "sparse, colmap/sparse", "for transforms_train.json", "for transforms.json"),
    ),
    Case(1, "a name too long", nothing, command=("train", "x" * 300, "-o", "out"), says=("File name too long",)),
    # Models in other places.
    Case(2, "in sparse", both(move(MODEL, "scene/0"), remove("scene/sparse"), move("scene/0", "scene/sparse")), code=0),
    Case(
        2, "in colmap/sparse/0", move(MODEL, "scene/colmap/sparse/0"), 0, ("in colmap/sparse/0/ is used",), command=READ
    ),
    Case(
        2,
        "in distorted/sparse/0, images in input",
        both(move(MODEL, "scene/distorted/sparse/0"), move("scene/images", "scene/input")),
        0,
        ("in distorted/sparse/0/ is used",),
        command=READ,
    ),
    Case(2, "in a/b/model", move(MODEL, "scene/a/b/model"), 0, ("in a/b/model/ is used",), command=READ),
    Case(
        2,
        "two that do not belong together",
        both(keep_views(12, "scene/friday"), move(MODEL, "scene/monday")),
        says=("the folder has several COLMAP models: friday, monday", "help: name one of them as the scene, such as "),
    ),
    # A mapper that gave up.
    Case(
        3,
        "the largest of two is taken",
        second_model,
        0,
        ("of 2 COLMAP models sparse/1 with 12 images is used", "--model sparse/0 has 2 images", "cameras         12\n"),
        command=READ,
    ),
    Case(
        3,
        "two of twelve registered, and another model",
        second_model,
        says=("registers 2 of the 12 images in images/", "help: --model sparse/1 has 12 images"),
        flags=("--model", "sparse/0"),
    ),
    Case(
        3, "two of twelve registered", keep_views(2), says=("registers 2 of the 12 images", "run COLMAP's mapper again")
    ),
    Case(3, "seven of twelve registered", keep_views(7), 0, ("registers 7 of the 12 images",), command=READ),
    Case(
        3,
        "a model that is not there",
        second_model,
        says=("there is no COLMAP model", "sparse/1 (12 images), sparse/0 (2 images)"),
        flags=("--model", "sparse/7"),
    ),
    # Binary files that are cut off or lie.
    *(
        Case(
            4,
            f"{Path(path).name} cut to {size} bytes",
            change(path, lambda data, n=size: data[:n]),
            says=(path[6:], "byte"),
        )
        for path, size in [
            (CAMERAS, 0),
            (CAMERAS, 50),
            (IMAGES, 7),
            (IMAGES, 900),
            (POINTS, 700),
            (RIGS, 20),
            (FRAMES, 99),
        ]
    ),
    Case(
        4,
        "no way round through the text files",
        both(text_twin(12), change(CAMERAS, lambda data: data[:40])),
        says=("cameras.bin", "ends in the middle of camera 1 of 1"),
    ),
    Case(
        4,
        "cameras.bin without images.bin",
        both(text_twin(12), remove(IMAGES)),
        0,
        ("the text files are used: cameras.bin is there without its counterpart",),
        command=READ,
    ),
    *(
        Case(
            5,
            f"{Path(path).name} claims 10^18",
            pack(path, 0, "<Q", 10**18),
            says=("claims 1,000,000,000,000,000,000",),
        )
        for path in (CAMERAS, IMAGES, POINTS, RIGS, FRAMES)
    ),
    Case(5, "an observation count of 2^62", both(OLD_STYLE, pack(IMAGES, 8 + 64 + 13, "<Q", 2**62)), says=("claims",)),
    Case(
        6,
        "text and binary disagree",
        text_twin(5),
        0,
        ("images.bin (12 images) is used, not images.txt (5 images)", "cameras         12\n"),
        command=READ,
    ),
    # Text files.
    Case(7, "junk", both(as_text, replace(f"{MODEL}/cameras.txt", "1 PINHOLE", "hello")), says=("cameras.txt:4",)),
    Case(7, "CRLF", each_text(lambda data: data.replace(b"\n", b"\r\n")), 0, command=READ),
    Case(7, "byte order mark", each_text(lambda data: b"\xef\xbb\xbf" + data), 0, command=READ),
    Case(7, "no comments", each_text(lambda data: data[data.rindex(b"#") :].partition(b"\n")[2]), 0, command=READ),
    Case(7, "second line missing", both(as_text, drop_line(1)), says=("images.txt:6", "expected X Y POINT3D_ID")),
    Case(7, "commas for points", both(as_text, replace(f"{MODEL}/images.txt", ".", ",", 999)), says=("images.txt:5",)),
    Case(
        7,
        "commas in the points",
        both(as_text, replace(f"{MODEL}/points3D.txt", ".", ",", 99)),
        says=("points3D.txt:4",),
    ),
    Case(7, "spaces in a name", both(renamed_image(1, "a b c.jpg"), as_text), 0, command=READ),
    Case(
        7,
        "an image twice",
        both(as_text, replace(f"{MODEL}/images.txt", "\n5 ", "\n1 ")),
        says=("there already, in line 5",),
    ),
    # Lenses.
    Case(8, "OPENCV", camera(4, 68, 68, 40, 30, 0.05, -0.01, 0.001, 0.001), 0, ("distortion (OPENCV) is undone",)),
    Case(8, "OPENCV_FISHEYE", camera(5, 68, 68, 40, 30, 0.05, -0.01, 0, 0), 0, ("OPENCV_FISHEYE",), command=READ),
    Case(8, "FULL_OPENCV", camera(6, 68, 68, 40, 30, 0.05, *[0.0] * 7), 0, ("FULL_OPENCV",), command=READ),
    Case(
        8,
        "model id 99",
        camera(99, 68, 40, 30),
        says=("camera 1 has the unknown model id 99", "cameras.bin", "colmap image_undistorter"),
    ),
    Case(
        8,
        "an unknown model",
        both(as_text, replace(f"{MODEL}/cameras.txt", "PINHOLE", "WIDEVIEW")),
        says=("camera 1 has the unknown model WIDEVIEW", "cameras.txt:4", "colmap image_undistorter"),
    ),
    Case(8, "distortion that folds", camera(4, 68, 68, 40, 30, -9, 0, 0, 0), says=("camera 1: its OPENCV distortion",)),
    Case(
        9,
        "PINHOLE with a distortion",
        both(as_text, change(f"{MODEL}/cameras.txt", lambda data: data.rstrip() + b" 0.1\n")),
        says=("camera 1 is PINHOLE, which has 4 parameters, not 5", "cameras.txt:4"),
    ),
    Case(
        9,
        "PINHOLE with k1",
        top(camera_model="PINHOLE", k1=0.1),
        says=("PINHOLE has the distortion k1", "top of the file"),
    ),
    Case(10, "focal length 0", camera(1, 0, 68, 40, 30), says=("camera 1: its focal length is 0, 68", "cameras.bin")),
    Case(10, "focal length -68", camera(0, -68, 40, 30), says=("camera 1: its focal length is -68", "cameras.bin")),
    Case(
        10,
        "focal length NaN",
        camera(1, math.nan, 68, 40, 30),
        says=("camera 1: its parameters are not finite", "cameras.bin"),
    ),
    Case(
        10,
        "principal point outside",
        camera(1, 68, 68, 400, 30),
        says=("camera 1: its principal point (400, 30)", "cameras.bin"),
    ),
    Case(10, "width 0", camera(1, 68, 68, 40, 30, width=0), says=("camera 1: its size is 0x60",)),
    Case(
        10, "width 2^63", camera(1, 68, 68, 40, 30, width=2**63), says=("camera 1: its size is 9223372036854775808x60",)
    ),
    # Poses.
    Case(
        11,
        "quaternion 0",
        both(OLD_STYLE, pack(IMAGES, FIRST_POSE, "<4d", 0, 0, 0, 0)),
        says=("view_000.jpg", "length 0,"),
    ),
    Case(
        11,
        "quaternion NaN",
        both(OLD_STYLE, pack(IMAGES, FIRST_POSE, "<d", math.nan)),
        says=("view_000.jpg", "length nan"),
    ),
    Case(
        11, "quaternion of length 2", both(OLD_STYLE, pack(IMAGES, FIRST_POSE, "<4d", 2, 0, 0, 0)), says=("length 2,",)
    ),
    Case(
        11,
        "quaternion of length 1.0005",
        both(OLD_STYLE, pack(IMAGES, FIRST_POSE, "<4d", 1.0005, 0, 0, 0)),
        0,
        command=READ,
    ),
    Case(11, "place NaN", both(OLD_STYLE, pack(IMAGES, FIRST_POSE + 32, "<d", math.nan)), says=("not finite",)),
    Case(11, "scaled", matrices(lambda m: m * [[2, 2, 2, 1]]), 0, says=("12 poses have a scale",), command=READ),
    Case(11, "stretched", matrices(lambda m: m * [[2, 1, 1, 1]]), says=("frame 0", "12 problems", "2, 1, 1 long")),
    Case(11, "mirrored", matrices(lambda m: m * [[1, 1, -1, 1]]), says=("frame 0", "mirrored (determinant -1)")),
    Case(
        11, "sheared", matrices(lambda m: m + np.eye(4)[[1, 1, 1, 1]] * [[0], [1], [0], [0]]), says=("not a rotation",)
    ),
    # Cameras that show no depth.
    Case(
        12, "all at one point", centers(lambda i: [1, 2, 3]), says=("from one point", "extent 0", "--scene-extent SIZE")
    ),
    Case(
        12,
        "all at one point, and a size",
        centers(lambda i: [1, 2, 3]),
        0,
        ("no depth to be learnt",),
        flags=("--scene-extent", "3"),
    ),
    Case(
        12,
        "one camera",
        both(keep_views(1), *(remove(f"scene/images/view_{i:03}.jpg") for i in range(4, 48, 4))),
        says=("there is one training view", "extent 0"),
    ),
    Case(12, "all on one line", centers(lambda i: [i, i, 2 * i]), 0, ("stand on one line",), command=READ),
    Case(12, "a size of 0", nothing, 2, ("scene_extent",), flags=("--scene-extent", "0")),
    # Coordinates that float32 cannot tell apart.
    Case(13, "UTM", far_away(448262.1, 5411932.7, 297.5), 0, (MOVED, "(448262, 5411933, 299)")),
    Case(13, "ECEF", far_away(4190900.0, 638100.0, 4748900.0), 0, (MOVED,), command=READ),
    # Points.
    Case(14, "no file", remove(POINTS), 0, ("points3D.bin is missing", "started from 99 random points")),
    Case(14, "none", points(lambda xyz: xyz[:0]), 0, ("the scene has no points",), command=READ),
    Case(
        14,
        "one",
        points(lambda xyz: xyz[:1]),
        0,
        ("only 1 usable point", "random"),
    ),
    Case(
        14,
        "all equal",
        points(lambda xyz: xyz * 0 + 1),
        0,
        ("1 of 646 points is used: 645 repeat others", "only 1 usable point", "started from 99 random points"),
    ),
    Case(
        14,
        "NaN",
        points(lambda xyz: np.vstack([xyz, [math.nan] * 3])),
        says=("1 of 647 points", "points3D.bin", "--drop-bad-points"),
    ),
    Case(
        14,
        "NaN, to be dropped",
        points(lambda xyz: np.vstack([xyz, [math.nan] * 3])),
        0,
        ("1 of 647 points were not finite and are left out", "663 Gaussians"),
        flags=("--drop-bad-points",),
    ),
    Case(
        14,
        "more than wanted",
        points(lambda xyz: np.tile(xyz, (50, 1)) + np.arange(len(xyz) * 50)[:, None] * 1e-6),
        0,
        ("979 of 32,300 points are taken",),
        flags=("--set", "data.max_points=1000"),
    ),
    Case(
        14,
        "not wanted",
        nothing,
        0,
        ("started from 99 random",),
        ("--init", "random"),
    ),
    Case(15, "at a camera", points(at_a_camera), 0, ("1 at a camera's centre", "663 Gaussians")),
    # Images that are not where they should be.
    Case(
        16,
        "one",
        remove("scene/images/view_004.jpg"),
        says=("1 of 12 images are missing: view_004.jpg", "--skip-missing"),
    ),
    Case(
        16,
        "a folder and a dead link",
        a_folder_and_a_dead_link,
        says=("2 of 12 images", "view_004.jpg (a folder), view_008.jpg (a link to gone.jpg, which is not there)"),
    ),
    Case(
        16,
        "seven",
        remove(*(f"scene/images/view_{i:03}.jpg" for i in range(0, 28, 4))),
        says=("7 of 12 images are missing: view_000.jpg", "view_016.jpg, and 2 more"),
    ),
    Case(
        16,
        "one, skipped",
        remove("scene/images/view_004.jpg"),
        0,
        ("1 of 12 views has no image",),
        ("--skip-missing",),
    ),
    Case(
        16,
        "all, others are there",
        both(remove("scene/images"), write("scene/pictures/IMG_1.JPG", "")),
        says=("none of the 12 images", "looked in images/, ", "1 others, such as pictures/IMG_1.JPG", "--images DIR"),
    ),
    Case(16, "all, skipped", remove("scene/images"), says=("the scene has no image file",), flags=("--skip-missing",)),
    Case(
        16,
        "the folder named",
        nothing,
        says=("there is no such folder of images", "scene/nowhere", "that holds images: --images images\n"),
        flags=("--images", "nowhere"),
    ),
    Case(
        16,
        "a folder of reduced copies",
        nothing,
        says=("no such folder", "leave out --images; splat train -r 4 divides the sides of the images in images/ by 4"),
        flags=("--images", "images_4"),
    ),
    Case(
        16,
        "a folder of reduced copies of another folder",
        move("scene/images", "scene/photos"),
        says=("no such folder", "help: --images photos; splat train -r 2 divides the sides of the images in photos/"),
        flags=("--images", "photos_2"),
    ),
    Case(
        16,
        "the folder named and all images",
        remove("scene/images"),
        says=("there is no such folder of images", "the scene has no image file"),
        flags=("--images", "nowhere"),
    ),
    Case(
        17,
        "another case and ending",
        both(
            move("scene/images/view_004.jpg", "scene/images/VIEW_004.JPG"),
            move("scene/images/view_008.jpg", "scene/images/view_008.jpeg"),
        ),
        0,
        ("2 images were found under another ending, case or Unicode form", "cameras         12\n"),
        command=READ,
    ),
    Case(
        17,
        "two that could be meant",
        both(move("scene/images/view_004.jpg", "scene/images/VIEW_004.JPG"), write("scene/images/view_004.png", "")),
        says=("view_004.jpg is not there, and 2 files could be meant: VIEW_004.JPG, view_004.png", "keep one"),
    ),
    Case(
        18,
        "one name in two folders",
        both(renamed_image(0, "cam1/0001.jpg"), renamed_image(1, "cam2/0001.jpg")),
        0,
        command=READ,
    ),
    Case(
        19,
        "a name twice",
        rename_view(1, "view_000.jpg"),
        says=("image 1 'view_000.jpg' and image 5", "name the same image"),
    ),
    Case(
        19,
        "a frame twice",
        frame(3, file_path="images/view_000.jpg"),
        says=("frame 0 ", "and frame 3 ", "the same image"),
    ),
    Case(19, "an id twice", both(OLD_STYLE, duplicate_image), says=("image 1 is there twice",)),
    *(
        Case(20, f"named {name[:12]!r}", renamed_image(1, name), 0, command=READ)
        for name in ("a.b.jpg", "größe.jpg", "a b.jpg", "🦊.jpg", "-x.jpg", "n" * 251 + ".jpg")
    ),
    Case(
        20,
        "composed in the model, decomposed on the disk",
        renamed_image(1, "gro\u0308\u00dfe.jpg", "gr\u00f6\u00dfe.jpg"),
        0,
        ("another ending, case or Unicode form",),
        command=READ,
    ),
    Case(
        20,
        "a name of 300 characters",
        rename_view(1, "n" * 300 + ".jpg"),
        says=("is not the name of a file", "help: correct the name"),
    ),
    # Names that lead elsewhere.
    *(
        Case(
            21,
            name,
            frame(3, file_path=name),
            says=("frame 3", "lies outside the scene's folder", "help: put the file"),
        )
        for name in (
            "../../etc/passwd",
            "/etc/passwd",
            "C:\\photo.jpg",
            "https://example.org/a.jpg",
            "images/../../a.jpg",
        )
    ),
    Case(
        21,
        "../ in a model",
        rename_view(1, "../../etc/passwd"),
        says=("image 5 '../../etc/passwd'", "outside", "images.bin", "--allow-outside"),
    ),
    Case(21, "points outside", top(ply_file_path="../points.ply"), says=("ply_file_path", "lies outside")),
    Case(
        21,
        "a URL, whatever is allowed",
        frame(3, file_path="ftp://a/b.jpg"),
        says=("nothing is downl",),
        flags=("--allow-outside",),
    ),
    Case(21, "outside and allowed", absolute_names, 0, flags=("--allow-outside",)),
    Case(
        21,
        "a file that is no image, allowed",
        frame(3, file_path="/etc/passwd"),
        flags=("--allow-outside",),
        says=("root:x:0",),
    ),
    Case(
        21,
        "links",
        linked_images,
        0,
        ("12 links lead out of the scene's folder", "images/view_000.jpg to"),
        command=READ,
    ),
    Case(21, "a link to itself", looped_image, says=("Too many levels of symbolic links", "images/view_000")),
    Case(
        21,
        "a scene that links to itself",
        looped_scene,
        says=("Too many levels of symbolic links",),
        command=("train", "scene", "-n", "1"),
    ),
    Case(22, "no images_4", nothing, 0, ("training on cpu",), flags=("-r", "4")),
    # transforms.json
    Case(
        38,
        "cut off",
        both(as_nerfstudio, change(TRANSFORMS, lambda data: data[:500])),
        says=("transforms.json:2", "not valid"),
    ),
    Case(
        38,
        "NaN",
        both(as_nerfstudio, replace(TRANSFORMS, '"fl_x": 68.0', '"fl_x": NaN')),
        says=("json:2:10", "has NaN"),
    ),
    Case(
        38, "1 GB", both(as_nerfstudio, sparse_file(TRANSFORMS, 1 << 30)), says=("is 1024 MB large, more than 128 MB",)
    ),
    Case(38, "deeply nested", both(as_nerfstudio, write(TRANSFORMS, "[" * 100_000)), says=("nested too deeply",)),
    Case(
        38,
        "an integer of 5000 digits",
        both(as_nerfstudio, replace(TRANSFORMS, "68.0", "6" * 5000)),
        says=("transforms.json",),
    ),
    Case(
        38,
        "an integer of 400 digits",
        both(as_nerfstudio, replace(TRANSFORMS, "68.0", "6" * 400)),
        says=("fl_x is 6666",),
    ),
    Case(38, "not UTF-8", both(as_nerfstudio, change(TRANSFORMS, lambda data: b"\xff" + data)), says=("not UTF-8",)),
    Case(
        39,
        "no focal length",
        top(fl_x=None, fl_y=None),
        says=("no focal length", "fl_x (pixels) or camera_angle_x (radians)"),
    ),
    Case(
        39, "an angle in degrees", top(fl_x=None, fl_y=None, camera_angle_x=60), says=("camera_angle_x is 60; radians",)
    ),
    Case(39, "fl_x 0", top(fl_x=0), says=("fl_x is 0; a focal length is positive",)),
    Case(40, "a frame with its own", frame(3, fl_x=70.0, fl_y=70.0), 0, command=READ),
    Case(40, "no w and h", top(w=None, h=None), 0, command=READ),
    Case(41, "no frames", top(frames=[]), says=("no list 'frames' with at least one frame",)),
    Case(41, "three rows", matrices(lambda m: m[:3]), 0, command=READ),
    Case(
        41,
        "strings",
        frame(3, transform_matrix=[["1", "0", "0", "0"]] * 4),
        says=("frame 3", "not a 4x4 matrix of numbers"),
    ),
    Case(41, "no matrix", frame(3, transform_matrix=None), says=("frame 3", "no 'transform_matrix'")),
    Case(41, "no file_path", frame(3, file_path=None), says=("frame 3 has no 'file_path'",)),
    Case(
        41,
        "transposed",
        matrices(lambda m: m.T),
        says=("the last row of its 'transform_matrix'", "transpose the matrices"),
    ),
    Case(42, "no endings", as_blender, 0, ("10 views, 2 held out",)),
    Case(
        42,
        "no endings, JPEG",
        both(as_blender, move("scene/train/view_008.png", "scene/train/view_008.jpg")),
        0,
        command=READ,
    ),
    # Two layouts.
    Case(
        43,
        "both, alike",
        write_transforms,
        0,
        ("the COLMAP model is used, not transforms.json, which describes the same views",),
    ),
    Case(
        43,
        "both, another number",
        both(write_transforms, document(lambda content: content["frames"].pop())),
        2,
        ("images.bin has 12 views, transforms.json 11", "splat train --format colmap or nerfstudio"),
    ),
    Case(
        43, "both, another pose", both(write_transforms, centers(lambda i: [i, 0, i % 3])), 2, ("at different places",)
    ),
    Case(
        43,
        "both, one chosen",
        both(write_transforms, document(lambda content: content["frames"].pop())),
        0,
        ("scene kind      nerfstudio\n", "cameras         11\n"),
        flags=("--format", "nerfstudio"),
        command=READ,
    ),
    Case(
        43,
        "one broken",
        both(write_transforms, write(TRANSFORMS, "{")),
        0,
        ("cannot be read and is not used",),
        command=READ,
    ),
    Case(
        43, "chosen and not there", nothing, says=("no blender here", "--format colmap"), flags=("--format", "blender")
    ),
    Case(43, "an unknown layout", nothing, 2, ("format",), flags=("--format", "bundler")),
    # Nothing held out.
    Case(44, "seven views", keep_views(7), 0, ("only 7 views: none is held out",)),
    Case(44, "no test views named", top(test_filenames=[]), 0, ("no views out",)),
    Case(
        44,
        "an empty test file",
        both(as_blender, document(lambda c: c["frames"].clear(), "scene/transforms_test.json")),
        0,
    ),
    Case(44, "all held out", nothing, says=("no view is left to train on",), flags=("--test-every", "1")),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case, expect: Expect) -> None:
    expect(case)


def test_the_good_scene_is_trained_without_a_warning(expect: Expect) -> None:
    err = expect(Case(0, "nothing is wrong", nothing, code=0))
    notes = [line for line in err.splitlines() if line.startswith("note: ")]
    beginnings = ["note: added ", "note: growth", "note: traini", "note: memory"]  # its views are far apart
    assert [note[:12] for note in notes] == beginnings, "the notes of every run"
    assert "warning" not in err


def test_names_stay_those_of_the_files(expect: Expect) -> None:
    """Images of one name in two folders are two views, and a name with spaces is a whole one in text files too."""
    expect(Case(18, "names", both(renamed_image(0, "cam1/a b.jpg"), renamed_image(1, "cam2/a b.jpg"), as_text), 0))
    cameras = load_checkpoint(Path("out/ckpts/ckpt_000001.pt")).cameras
    assert {camera.name for camera in cameras} >= {"cam1/a b.jpg", "cam2/a b.jpg"}


def test_images_outside_are_rendered_inside(expect: Expect) -> None:
    """A name that leads out of the scene must not lead a render out of the output folder."""
    expect(Case(21, "absolute names", absolute_names, 0, flags=("--allow-outside",)))
    assert run(["render", "out", "--views", "all", "-o", "out/pictures", "-q"]) == 0
    assert len(list(Path("out/pictures").rglob("*.png"))) == 12


def test_a_scene_in_utm_trains_like_the_same_scene_at_the_origin(
    expect: Expect, capfd: pytest.CaptureFixture[str]
) -> None:
    place = (448262.0, 5411933.0, 298.0)
    near = expect(Case(13, "at the origin", points(lambda xyz: xyz), 0))
    here = load_checkpoint(Path("out/ckpts/ckpt_000001.pt"))
    far = expect(Case(13, "in UTM", far_away(*place), 0, flags=("-o", "output")))
    there = load_checkpoint(Path("output/ckpts/ckpt_000001.pt"))
    figures = [re.search(r"PSNR ([\d.]+) dB", err).group(1) for err in (near, far)]
    assert abs(float(figures[0]) - float(figures[1])) < 0.05
    offset = np.array(there.dataset.offset)
    assert (offset != 0).all()
    centers_here, centers_there = (np.stack([camera.center for camera in c.cameras]) for c in (here, there))
    np.testing.assert_allclose(centers_there + offset, centers_here + place, atol=1e-6)
    np.testing.assert_allclose(
        there.gaussians.means.double().numpy() + offset, here.gaussians.means.double().numpy() + place, atol=1e-2
    )
    assert run(["export", "output", "-o", "out/a.ply"]) == 0
    offset_words = f"add {' '.join(f'{value:.15g}' for value in offset)} to positions"
    assert offset_words in capfd.readouterr().err
    assert offset_words.encode() in Path("out/a.ply").read_bytes()[:2000]
    assert run(["export", "output", "-o", "out/a.json"]) == 0
    assert run(["render", "out/a.ply", "--views", "out/a.json", "-o", "out/p", "-q"]) == 0
    assert run(["eval", "output", "-q"]) == 0
