"""Ways to turn the good scene into another layout, and to damage it; each takes the folder that holds ``scene/``."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from splatcli.cli.commands import run
from splatcli.scene._pycolmap import pycolmap
from tests.bad_input.table import HEIGHT, TRAIN, WIDTH

Harm = Callable[[Path], object]

#: Where the files of a COLMAP model lie in the good scene.
MODEL = "scene/sparse/0"


def nothing(folder: Path) -> None:
    """The good scene as it is."""


def trained(folder: Path) -> None:
    """The scene, and a run of one step in ``out/``."""
    assert run([*TRAIN, "-q"]) == 0


def both(*harms: Harm) -> Harm:
    """One after another."""

    def harm(folder: Path) -> None:
        for each in harms:
            each(folder)

    return harm


def write(path: str, data: bytes | str) -> Harm:
    """A file with this content."""

    def harm(folder: Path) -> None:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data.encode() if isinstance(data, str) else data)

    return harm


def remove(*paths: str) -> Harm:
    """Files or folders that are not there any more."""

    def harm(folder: Path) -> None:
        for path in paths:
            shutil.rmtree(folder / path) if (folder / path).is_dir() else (folder / path).unlink()

    return harm


def move(old: str, new: str) -> Harm:
    def harm(folder: Path) -> None:
        (folder / new).parent.mkdir(parents=True, exist_ok=True)
        (folder / old).rename(folder / new)

    return harm


def change(path: str, edit: Callable[[bytes], bytes]) -> Harm:
    """A file whose bytes ``edit`` changes; that it changes them is checked."""

    def harm(folder: Path) -> None:
        before = (folder / path).read_bytes()
        after = edit(before)
        assert after != before
        (folder / path).write_bytes(after)

    return harm


def replace(path: str, old: str, new: str, count: int = 1) -> Harm:
    """A text file with ``old`` replaced; that it is there is checked."""
    return change(path, lambda data: data.replace(old.encode(), new.encode(), count))


def pack(path: str, offset: int, layout: str, *values: Any) -> Harm:
    """A binary file with ``values`` written over what is at ``offset``."""

    def edit(data: bytes) -> bytes:
        changed = bytearray(data)
        struct.pack_into(layout, changed, offset, *values)
        return bytes(changed)

    return change(path, edit)


def model(edit: Callable[[pycolmap.Reconstruction], object], place: str = MODEL) -> Harm:
    """The COLMAP model as ``edit`` leaves it; written anew to ``place``."""

    def harm(folder: Path) -> None:
        made = pycolmap.Reconstruction()
        made.read_binary(str(folder / MODEL))
        edit(made)
        (folder / place).mkdir(parents=True, exist_ok=True)
        made.write_binary(str(folder / place))

    return harm


def poses(edit: Callable[[int, np.ndarray], np.ndarray]) -> Harm:
    """Each camera's pose, the [3, 4] world-to-camera matrix of the i-th image, as ``edit`` gives it."""

    def change_all(made: pycolmap.Reconstruction) -> None:
        for i, image_id in enumerate(sorted(made.images)):
            image = made.images[image_id]
            pose = edit(i, np.array(image.cam_from_world().matrix()))
            made.frame(image.frame_id).rig_from_world = pycolmap.Rigid3d(pose)

    return model(change_all)


def keep_views(count: int, place: str = MODEL) -> Harm:
    """A model of the first ``count`` views."""

    def drop(made: pycolmap.Reconstruction) -> None:
        for image_id in sorted(made.images)[count:]:
            made.deregister_frame(made.images[image_id].frame_id)

    return model(drop, place)


def rename_view(number: int, name: str) -> Harm:
    """The name that the model has for its ``number``-th image."""

    def rename(made: pycolmap.Reconstruction) -> None:
        made.images[sorted(made.images)[number]].name = name

    return model(rename)


def camera(model_id: int, *params: float, width: int = WIDTH, height: int = HEIGHT) -> Harm:
    """Another camera in place of the model's only one."""
    head = struct.pack("<QIiQQ", 1, 1, model_id, width, height)
    return write(f"{MODEL}/cameras.bin", head + struct.pack(f"<{len(params)}d", *params))


def points(edit: Callable[[np.ndarray], np.ndarray]) -> Harm:
    """The points [P, 3] as ``edit`` gives them, in points3D.bin without tracks."""

    def harm(folder: Path) -> None:
        made = pycolmap.Reconstruction()
        made.read_binary(str(folder / MODEL))
        xyz = edit(np.array([made.points3D[key].xyz for key in sorted(made.points3D)]))
        layout = [("id", "<u8"), ("xyz", "<f8", 3), ("rgb", "u1", 3), ("error", "<f8"), ("length", "<u8")]
        table = np.zeros(len(xyz), dtype=layout)
        table["id"], table["xyz"], table["rgb"] = np.arange(len(xyz)), xyz, 128
        (folder / MODEL / "points3D.bin").write_bytes(struct.pack("<Q", len(xyz)) + table.tobytes())

    return harm


def as_text(folder: Path) -> None:
    """The model as text files."""
    made = pycolmap.Reconstruction()
    made.read_binary(str(folder / MODEL))
    for path in (folder / MODEL).iterdir():
        path.unlink()
    made.write_text(str(folder / MODEL))


def write_transforms(folder: Path) -> None:
    """transforms.json beside the model."""
    content = {**_lens(), "frames": _frames(folder, "images/")}
    (folder / "scene/transforms.json").write_text(json.dumps(content, indent=1))


def as_nerfstudio(folder: Path) -> None:
    """transforms.json in place of the model."""
    write_transforms(folder)
    shutil.rmtree(folder / "scene/sparse")


def as_blender(folder: Path) -> None:
    """Ten views in transforms_train.json and two in transforms_test.json, PNG files, names without an ending."""
    frames = _frames(folder, "./train/")
    shutil.rmtree(folder / "scene/sparse")
    for split, chosen in (("train", frames[2:]), ("test", frames[:2])):
        (folder / "scene" / split).mkdir()
        for frame in chosen:
            stem = Path(frame["file_path"]).stem
            frame["file_path"] = f"./{split}/{stem}"
            Image.open(folder / f"scene/images/{stem}.jpg").save(folder / f"scene/{split}/{stem}.png")
        content = {"camera_angle_x": float(2 * np.arctan(WIDTH / 2 / _lens()["fl_x"])), "frames": chosen}
        (folder / f"scene/transforms_{split}.json").write_text(json.dumps(content))
    shutil.rmtree(folder / "scene/images")


def document(edit: Callable[[dict[str, Any]], object], path: str = "scene/transforms.json") -> Harm:
    """A JSON file as ``edit`` leaves it."""

    def harm(folder: Path) -> None:
        content = json.loads((folder / path).read_text())
        edit(content)
        (folder / path).write_text(json.dumps(content))

    return harm


def frame(number: int, **values: Any) -> Harm:
    """A nerfstudio scene in which one frame has other values; None takes a key away."""
    return both(as_nerfstudio, document(lambda content: _set(content["frames"][number], values)))


def top(**values: Any) -> Harm:
    """A nerfstudio scene with other values at the top of the file; None takes a key away."""
    return both(as_nerfstudio, document(lambda content: _set(content, values)))


def matrices(edit: Callable[[np.ndarray], np.ndarray]) -> Harm:
    """A nerfstudio scene whose matrices are as ``edit`` gives them."""

    def change_all(content: dict[str, Any]) -> None:
        for each in content["frames"]:
            each["transform_matrix"] = edit(np.array(each["transform_matrix"])).tolist()

    return both(as_nerfstudio, document(change_all))


def _set(content: dict[str, Any], values: dict[str, Any]) -> None:
    content.update(values)
    for key in [key for key, value in values.items() if value is None]:
        del content[key]


def _lens() -> dict[str, float]:
    ratio = WIDTH / 320
    return {"fl_x": 272 * ratio, "fl_y": 272 * ratio, "cx": WIDTH / 2, "cy": HEIGHT / 2, "w": WIDTH, "h": HEIGHT}


def _frames(folder: Path, prefix: str) -> list[dict[str, Any]]:
    made = pycolmap.Reconstruction()
    made.read_binary(str(folder / MODEL))
    frames = []
    for image in sorted(made.images.values(), key=lambda image: image.name):
        w2c = np.eye(4)
        w2c[:3] = image.cam_from_world().matrix()
        c2w = np.linalg.inv(w2c) @ np.diag([1.0, -1.0, -1.0, 1.0])
        frames.append({"file_path": prefix + image.name, "transform_matrix": c2w.tolist()})
    return frames
