"""Malformed scene files for the scene reader: COLMAP models, binary and text, and transforms.json of two kinds."""

from __future__ import annotations

import json
import random
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from splatcli.config import DataConfig
from splatcli.scene.colmap import MODEL_PARAMS
from splatcli.scene.read import read_scene
from tests.scene.made import blender_scene, colmap_scene, lens, nerfstudio_scene
from tests.torture.harness import Figure, main, refused, rng_of, run_cases, wanted, workplace
from tests.torture.mutate import FLOATS, INTEGERS, any_value, dumps, spoil_bytes, spoil_json, spoil_text

#: File -> content, of one scene.
Files = dict[Path, bytes]
Spoil = Callable[[random.Random, Files], Files]

_WHAT = "a scene with malformed {} is read: it is refused with a message, or what is read is sound"


def figures(count: int, seed: int) -> dict[str, Figure]:
    kinds: dict[str, tuple[str, Callable[[Path], list[Files]], Spoil]] = {
        "fuzz_colmap_binary": ("COLMAP files (binary)", lambda root: _colmap(root, text=False), _spoil_binary),
        "fuzz_colmap_text": ("COLMAP files (text)", lambda root: _colmap(root, text=True), _spoil_texts),
        "fuzz_transforms": ("transforms.json (nerfstudio, Blender)", _transforms, _spoil_jsons),
    }
    found = {}
    for name, (words, make, spoil) in kinds.items():
        if not wanted(name):
            continue
        start = time.monotonic()
        with workplace() as folder:
            originals = make(folder)

            def case(index: int, originals: list[Files] = originals, spoil: Spoil = spoil) -> str:
                rng = rng_of(seed, index)
                return _case(rng, rng.choice(originals), spoil)

            found[name] = run_cases(case, count).figure(_WHAT.format(words), time.monotonic() - start)
    return found


def _case(rng: random.Random, files: Files, spoil: Spoil) -> str:
    spoiled = spoil(rng, files)
    for path in files:
        if path in spoiled:
            path.write_bytes(spoiled[path])
        else:
            path.unlink(missing_ok=True)
    root = next(iter(files)).parent
    while not (root / "images").is_dir() and not (root / "train").is_dir():
        root = root.parent
    return "refused" if refused(lambda: _read(root)) else "read"


def _read(root: Path) -> None:
    scene = read_scene(root, DataConfig())
    assert scene.train
    for camera in scene.cameras:
        assert camera.width > 0
        assert camera.height > 0
        numbers = [camera.fx, camera.fy, camera.cx, camera.cy, *camera.viewmat.ravel()]
        assert np.isfinite(np.float32(numbers)).all(), camera
        assert camera.fx > 0
        assert camera.fy > 0
        rotation = camera.viewmat[:3, :3]
        assert np.abs(rotation @ rotation.T - np.eye(3)).max() < 1e-6
        assert np.linalg.det(rotation) > 0
    if scene.points is not None:
        assert np.isfinite(scene.points.xyz).all()


def _files(folder: Path, pattern: str) -> Files:
    return {path: path.read_bytes() for path in sorted(folder.glob(pattern))}


# --- COLMAP ----------------------------------------------------------------------------------------------------------


def _colmap(root: Path, *, text: bool) -> list[Files]:
    cameras = {
        "pinhole": None,
        "opencv": lens("OPENCV", [60.0, 61.0, 32.0, 24.0, 0.01, -0.01, 0.001, 0.001]),
        "simple": lens("SIMPLE_PINHOLE", [60.0, 32.0, 24.0]),
    }
    scenes = [colmap_scene(root / name, "sparse/0", text=text, camera=camera) for name, camera in cameras.items()]
    models = [scene / "sparse" / "0" for scene in scenes]
    if not text:
        for model in models[1:]:  # as older versions write them: without rigs and frames
            (model / "rigs.bin").unlink(missing_ok=True)
            (model / "frames.bin").unlink(missing_ok=True)
    else:
        for model in models:
            _add_observations(model / "images.txt")
    return [_files(model, "*.txt" if text else "*.bin") for model in models]


def _add_observations(path: Path) -> None:
    """Gives every image a line of observations, which a model without tracks has empty."""
    lines = path.read_text().split("\n")
    rows = [i for i, line in enumerate(lines) if line.endswith(".png")]
    for i in rows:
        lines[i + 1] = "10.5 20.25 -1 30 12.125 -1"
    path.write_text("\n".join(lines))


def _victims(rng: random.Random, files: Files) -> Iterator[Path]:
    for path in rng.sample(sorted(files), min(len(files), rng.choice([1, 1, 1, 2]))):
        if rng.random() < 0.02:
            del files[path]
        else:
            yield path


def _spoil_binary(rng: random.Random, files: Files) -> Files:
    spoiled = dict(files)
    for path in _victims(rng, spoiled):
        content = spoiled[path]
        if path.name == "cameras.bin" and rng.random() < 0.3:
            content = _odd_camera(rng)
        elif rng.random() < 0.3:  # a count or an id, at the start
            place = rng.choice([0, 8, 12, 16, 24])
            kind = rng.choice(["<Q", "<I", "<i", "<d"])
            number = rng.choice(FLOATS) if kind == "<d" else rng.choice(INTEGERS) % (1 << 31)
            piece = struct.pack(kind, number)
            content = content[:place] + piece + content[place + len(piece) :]
        else:
            content = spoil_bytes(rng, content)
        spoiled[path] = content
    return spoiled


def _odd_camera(rng: random.Random) -> bytes:
    """cameras.bin of the right form, with a model and numbers that may make no sense together."""
    model = rng.choice(list(MODEL_PARAMS))
    size = [rng.choice([64, 48, *INTEGERS]) % (1 << 64) for _ in range(2)]
    values = [60.0, 61.0, 32.0, 24.0, *[0.0] * 16]
    params = [rng.choice(FLOATS) if rng.random() < 0.2 else values[i] for i in range(MODEL_PARAMS[model])]
    return struct.pack("<QIiQQ", 1, 1, model, *size) + struct.pack(f"<{len(params)}d", *params)


def _spoil_texts(rng: random.Random, files: Files) -> Files:
    spoiled = dict(files)
    for path in _victims(rng, spoiled):
        if rng.random() < 0.15:
            spoiled[path] = spoil_bytes(rng, spoiled[path])
        else:
            spoiled[path] = spoil_text(rng, spoiled[path].decode()).encode("utf-8", "surrogatepass")
    return spoiled


# --- transforms.json -------------------------------------------------------------------------------------------------


def _transforms(root: Path) -> list[Files]:
    plain = nerfstudio_scene(root / "plain")
    rich = nerfstudio_scene(
        root / "rich",
        camera_model="OPENCV",
        **{"k1": 0.01, "k2": -0.01, "p1": 0.001, "p2": 0.0},
        ply_file_path="points.ply",
        train_filenames=["images/0001.png", "images/0002.png", "images/0003.png"],
        test_filenames=["images/0000.png"],
    )
    header = (
        "ply\nformat ascii 1.0\nelement vertex 2\nproperty float x\nproperty float y\nproperty float z\nend_header\n"
    )
    (rich / "points.ply").write_text(header + "0 0 0\n1 1 1\n")
    angle = nerfstudio_scene(root / "angle", fl_x=None, fl_y=None, camera_angle_x=0.9, is_fisheye=True, k1=0.01)
    blender = blender_scene(root / "blender")
    return [_files(scene, "transforms*.json") for scene in (plain, rich, angle, blender)]


def _spoil_jsons(rng: random.Random, files: Files) -> Files:
    spoiled = dict(files)
    for path in _victims(rng, spoiled):
        document = json.loads(spoiled[path])
        way = rng.random()
        if way < 0.6:
            spoiled[path] = dumps(spoil_json(rng, document))
        elif way < 0.7:  # one odd value under a key that is known
            target = rng.choice([document, rng.choice(document["frames"])])
            target[rng.choice(_KEYS)] = any_value(rng)
            spoiled[path] = dumps(document)
        elif way < 0.72:
            depth = rng.choice([10, 900, 1100, 100_000])
            spoiled[path] = b"[" * depth + (b"]" * depth if rng.random() < 0.5 else b"")
        elif way < 0.85:
            spoiled[path] = spoil_text(rng, spoiled[path].decode()).encode("utf-8", "surrogatepass")
        else:
            spoiled[path] = spoil_bytes(rng, spoiled[path])
    return spoiled


_KEYS = [
    *("frames", "file_path", "transform_matrix", "fl_x", "fl_y", "cx", "cy", "w", "h", "camera_angle_x"),
    *("camera_angle_y", "k1", "k2", "k3", "k4", "k5", "k6", "p1", "p2", "camera_model", "is_fisheye"),
    *("distortion_params", "ply_file_path", "train_filenames", "test_filenames", "val_filenames", "applied_transform"),
]


if __name__ == "__main__":
    main(figures, 100_000)
