"""What masks gain: a made turntable, photos with marks drawn on them, and photos with rectangles masked.

    python -m benchmarks.masks FOLDER --model RUN --background PHOTO --scene FOX [--steps 2000] [--seed 42] > masks.json

docs/sfm.md, "Masks of what does not move" and "Dates, logos and frames", and docs/quality.md, "Masked pixels". FOLDER
gets the captures, their scenes and runs. RUN is a trained model of an object in the middle of its scene, z up, such as
NeRF-synthetic's lego; 48 renders of it from a circle stand before the photo, which does not move. FOX is a COLMAP
scene.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter
from scipy.ndimage import binary_erosion

import splatcli
from benchmarks.origin import origin
from splatcli.cli.commands import run
from splatcli.scene.camera import Camera

COMMAND = "python -m benchmarks.masks FOLDER --model RUN --background PHOTO --scene FOX"
#: The turntable: views, size, focal length in pixels, distance and elevation of the cameras, noise of the images.
VIEWS, WIDTH, HEIGHT, FOCAL, DISTANCE, ELEVATION, NOISE = 48, 640, 480, 900.0, 4.0, 0.45, 0.006
#: Where the logo and the timestamp are drawn: left, top, right, bottom of an image of 530x946.
LOGO, STAMP = (40, 40, 180, 100), (230, 866, 510, 918)
#: Part of each side that a rectangle hides.
HIDDEN = (0.3, 0.6)
#: Every so manieth view is held out.
HELD_OUT = 8

Image3 = NDArray[np.float32]


def turntable(folder: Path, model: splatcli.Model, background: Path) -> None:
    """Write images/ and alpha/: renders of a model before a photo that stays where it is."""
    photo = Image.open(background).convert("RGB")
    scale = max(WIDTH / photo.width, HEIGHT / photo.height)
    photo = photo.resize((round(photo.width * scale), round(photo.height * scale))).crop((0, 0, WIDTH, HEIGHT))
    behind = np.asarray(photo.filter(ImageFilter.GaussianBlur(1)), np.float32) / 255
    rng = np.random.default_rng(0)
    for kind in ("images", "alpha"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    for view in range(VIEWS):
        with torch.no_grad():
            shown = model.render(on_circle(2 * np.pi * view / VIEWS), background=(0, 0, 0))
        alpha = shown.alpha.numpy()
        image = shown.image.numpy() + (1 - alpha[..., None]) * behind + rng.normal(0, NOISE, behind.shape)
        to_8_bits(image).save(folder / "images" / f"{view:03d}.jpg", quality=92)
        to_8_bits(alpha).save(folder / "alpha" / f"{view:03d}.png")


def on_circle(azimuth: float) -> Camera:
    centre = DISTANCE * np.array(
        [np.cos(ELEVATION) * np.cos(azimuth), np.cos(ELEVATION) * np.sin(azimuth), np.sin(ELEVATION)]
    )
    forward = -centre / np.linalg.norm(centre)
    right = np.cross(forward, (0.0, 0.0, 1.0))
    right /= np.linalg.norm(right)
    pose = np.eye(4)
    pose[:3, :3] = np.stack([right, np.cross(forward, right), forward])
    pose[:3, 3] = -pose[:3, :3] @ centre
    return Camera("", WIDTH, HEIGHT, FOCAL, FOCAL, WIDTH / 2, HEIGHT / 2, pose)


def marked(folder: Path, photos: Sequence[Path]) -> None:
    """Write every second photo with a logo and a timestamp drawn on it."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    blocks = np.random.default_rng(1).integers(0, 256, (6, 14, 3), dtype=np.uint8)
    logo = Image.fromarray(np.kron(blocks, np.ones((10, 10, 1), np.uint8)))
    for i, path in enumerate(photos[::2]):
        image = Image.open(path).convert("RGB")
        draw = ImageDraw.Draw(image)
        draw.rectangle(STAMP, fill=(0, 0, 0))
        text = f"2026-05-01 12:{i // 4:02d}:{i * 13 % 60:02d} CAM 1"
        draw.text((STAMP[0] + 10, STAMP[1] + 8), text, fill=(255, 255, 0), font_size=26)
        image.paste(logo, LOGO[:2])
        image.save(folder / "images" / f"{i:03d}.jpg", quality=93)


def with_rectangles(folder: Path, scene: Path, photos: Sequence[Path]) -> None:
    """Write masks of the scene's photos that hide a rectangle of each, but for those that are held out."""
    (folder / "masks").mkdir(parents=True, exist_ok=True)
    for name in ("images", "sparse"):
        if not (folder / name).exists():
            (folder / name).symlink_to((scene / name).resolve())
    rng = np.random.default_rng(0)
    for i, path in enumerate(photos):
        width, height = Image.open(path).size
        mask = np.full((height, width), 255, np.uint8)
        if i % HELD_OUT:
            w, h = (int(side * rng.uniform(*HIDDEN)) for side in (width, height))
            x, y = rng.integers(0, width - w), rng.integers(0, height - h)
            mask[y : y + h, x : x + w] = 0
        Image.fromarray(mask).save(folder / "masks" / f"{path.stem}.png")


def to_8_bits(image: NDArray[Any]) -> Image.Image:
    return Image.fromarray((np.asarray(image).clip(0, 1) * 255).round().astype(np.uint8))


def psnr(error: NDArray[Any]) -> float:
    return float(-10 * np.log10((error**2).mean()))


def renders(model: splatcli.Model) -> list[tuple[Camera, Image3, Image3]]:
    """Return the held-out cameras, by name every eighth, with image and alpha."""
    found = []
    for camera in sorted(model.cameras, key=lambda camera: camera.name)[::HELD_OUT]:
        with torch.no_grad():
            shown = model.render(camera)
        found.append((camera, shown.image.numpy().clip(0, 1), shown.alpha.numpy()))
    return found


def read(path: Path, camera: Camera, mode: str) -> Image3:
    size = (camera.width, camera.height)
    return np.asarray(Image.open(path).convert(mode).resize(size, Image.Resampling.BOX), np.float32) / 255


def score_turntable(model: splatcli.Model, folder: Path) -> dict[str, float]:
    """Return the PSNR of the object, of it without its outermost three pixels, and the mean alpha outside of it."""
    rows = []
    for camera, image, alpha in renders(model):
        error = image - read(folder / "images" / camera.name, camera, "RGB")
        inside = read(folder / "alpha" / f"{Path(camera.name).stem}.png", camera, "L") > 0.5
        core = binary_erosion(inside, iterations=3)
        rows.append((psnr(error[inside]), psnr(error[core]), float(alpha[~inside].mean())))
    return dict(zip(("object", "object_without_rim", "alpha_outside"), means(rows), strict=True))


def score_marked(model: splatcli.Model, photos: Sequence[Path]) -> dict[str, float]:
    """Return the PSNR against the photos without marks: whole, and under these."""
    rows = []
    for camera, image, _ in renders(model):
        error = image - read(photos[2 * int(Path(camera.name).stem)], camera, "RGB")
        under = np.zeros(error.shape[:2], bool)
        for box in (LOGO, STAMP):
            left, top, right, bottom = (round(edge * camera.width / 530) for edge in box)
            under[top:bottom, left:right] = True
        rows.append((psnr(error), psnr(error[under])))
    return dict(zip(("whole", "under_marks"), means(rows), strict=True))


def score_whole(model: splatcli.Model, scene: Path) -> dict[str, float]:
    """Return the PSNR of whole held-out photos."""
    errors = [image - read(scene / "images" / camera.name, camera, "RGB") for camera, image, _ in renders(model)]
    return {"whole": means([(psnr(error),) for error in errors])[0]}


def means(rows: Sequence[tuple[float, ...]]) -> list[float]:
    return [round(float(value), 3) for value in np.mean(rows, axis=0)]


def splat(*words: str) -> None:
    if run([*words, "-q"]):
        sys.exit(f"splat {' '.join(words)} failed")


def main() -> None:
    """Make the captures, train, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    for name in ("model", "background", "scene"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--captures", nargs="+", default=("turntable", "marked", "rectangles"))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--cap-max", type=int, default=15_000)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    folder: Path = args.folder
    stdout = os.dup(1)
    os.dup2(2, 1)  # the commands' results go elsewhere
    photos = sorted((args.scene / "images").iterdir())
    makers: dict[str, Callable[[Path], None]] = {
        "turntable": lambda place: turntable(place, splatcli.Model.load(args.model), args.background),
        "marked": lambda place: marked(place, photos),
        "rectangles": lambda place: with_rectangles(place, args.scene, photos),
    }
    for name in args.captures:
        makers[name](folder / name)
        if name != "rectangles":
            splat("sfm", str(folder / name / "images"), "-o", str(folder / f"{name}-sfm"), "--overwrite")
    scores: dict[str, Callable[[splatcli.Model], dict[str, float]]] = {
        "turntable": lambda model: score_turntable(model, folder / "turntable"),
        "marked": lambda model: score_marked(model, photos),
        "rectangles": lambda model: score_whole(model, args.scene),
    }
    flags = {"none": ["--masks", "none"], "weight 0": ["--set", "train.mask_lambda=0"], "default": []}
    wanted = {"turntable": [*flags], "marked": ["none", "default"], "rectangles": ["weight 0", "default"]}
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name in args.captures:
        scene = folder / (name if name == "rectangles" else f"{name}-sfm")
        size = ["-r", "4" if name == "rectangles" else "2", "--test-every", str(HELD_OUT), "--seed", str(args.seed)]
        length = ["-n", str(args.steps), "--cap-max", str(args.cap_max)]
        for setting in wanted[name]:
            out = folder / f"{name} {setting}"
            splat("train", str(scene), "-o", str(out), "--overwrite", *size, *length, *flags[setting])
            results.setdefault(name, {})[setting] = scores[name](splatcli.Model.load(out))
    words = f"{COMMAND} --steps {args.steps} --cap-max {args.cap_max} --seed {args.seed}"
    os.dup2(stdout, 1)
    print(json.dumps({"command": words, **origin(), "results": results}, indent=1), flush=True)


if __name__ == "__main__":
    main()
