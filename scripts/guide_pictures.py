"""The pictures of docs/guides/better-results.md: the sample scene spoiled on purpose, and the remedy beside it.

    PYTHONPATH=. python scripts/guide_pictures.py docs/pictures

Prints PSNR and SSIM of the held-out views of each model, which the page quotes.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pycolmap
from PIL import Image, ImageDraw

SAMPLE = Path(__file__).parents[1] / "data" / "samples" / "courtyard"
TRAIN = ("-n", "2000", "--cap-max", "30000")
EVERY, SIZE, QUALITY = 8, (320, 240), 80

Make = Callable[[Path], None]


def copied(folder: Path) -> None:
    shutil.copytree(SAMPLE, folder)


def trained_images(folder: Path) -> list[Path]:
    return [path for i, path in enumerate(sorted((folder / "images").iterdir())) if i % EVERY]


def with_wrong_poses(folder: Path) -> None:
    """The scene with every third training camera turned by a degree about a random axis."""
    copied(folder)
    wrong = {path.name for path in trained_images(folder)[::3]}
    rng = np.random.default_rng(1)
    model = pycolmap.Reconstruction(str(folder / "sparse" / "0"))
    for image in sorted(model.images.values(), key=lambda image: image.name):
        if image.name not in wrong:
            continue
        pose, axis = image.cam_from_world(), rng.normal(size=3)
        axis *= math.radians(1.0) / np.linalg.norm(axis)
        turned = pycolmap.Rotation3d(axis)
        image.frame.set_cam_from_world(
            image.camera_id, pycolmap.Rigid3d(turned * pose.rotation, turned.matrix() @ np.array(pose.translation))
        )
    model.write(str(folder / "sparse" / "0"))


def with_passer_by(folder: Path) -> None:
    """The scene with a red figure at another place in each training image, and masks of it."""
    copied(folder)
    rng = np.random.default_rng(1)
    masks = folder / "masks"
    masks.mkdir()
    trained = set(trained_images(folder))
    for path in sorted((folder / "images").iterdir()):
        image = Image.open(path).convert("RGB")
        mask = Image.new("L", image.size, 255)
        if path in trained:
            x, y = rng.uniform(60, 260), rng.uniform(110, 200)
            for canvas, colour in ((image, (200, 40, 30)), (mask, 0)):
                draw = ImageDraw.Draw(canvas)
                draw.ellipse([x - 18, y - 18, x + 18, y + 18], fill=colour)
                draw.rectangle([x - 22, y + 18, x + 22, y + 80], fill=colour)
            image.save(path, quality=95)
        mask.save(masks / f"{path.name}.png")


def with_few_images(folder: Path) -> None:
    """The scene with every sixth training image, and no other."""
    copied(folder)
    kept = set(trained_images(folder)[::6])
    for path in (folder / "images").iterdir():
        if path not in kept:
            path.unlink()


class Model(NamedTuple):
    """A training run. size: of its renders; they are enlarged to SIZE, pixel by pixel."""

    make: Make
    flags: tuple[str, ...] = ()
    size: tuple[int, int] = SIZE


SOUND = Model(copied)
SMALL = (SIZE[0] // 4, SIZE[1] // 4)
#: The name of a picture -> a view, the spoiled model and the remedy.
PICTURES = {
    "few_gaussians": ("view_000", Model(copied, ("--cap-max", "1500")), SOUND),
    "wrong_poses": ("view_000", Model(with_wrong_poses), Model(with_wrong_poses, ("--pose-opt",))),
    "few_images": ("view_016", Model(with_few_images, ("--test-every", "0", "--skip-missing")), SOUND),
    "passer_by": ("view_000", Model(with_passer_by, ("--masks", "none")), Model(with_passer_by)),
    "aliasing": ("view_024", Model(copied, size=SMALL), Model(copied, ("--antialiased",), SMALL)),
}


def splat(*words: str | Path) -> str:
    command = [sys.executable, "-m", "splatcli", *map(str, words)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def trained(model: Model, folder: Path) -> Path:
    """The PLY file of a model; its figures are printed. Equal runs are made once."""
    run = folder / "-".join([model.make.__name__, *model.flags]).replace("--", "")
    file = run.with_suffix(".ply")
    if not file.exists():
        scene = folder / f"scene_{model.make.__name__}"
        if not scene.exists():
            model.make(scene)
        splat("train", scene, "-o", run, *TRAIN, *model.flags, "-q")
        splat("export", run, "-o", file, "-q")
        figures = json.loads(splat("eval", file, "--data", SAMPLE, "--json", "-q"))
        print(f"{run.name}: {figures['psnr']:.1f} dB, {figures['ssim']:.3f}")
    return file


def tile(model: Model, view: str, folder: Path) -> Image.Image:
    file, picture = trained(model, folder), folder / "picture.png"
    width, height = model.size
    splat(
        "render", file, "--data", SAMPLE, "--views", f"{view}.jpg", "--size", f"{width}x{height}", "-o", picture, "-q"
    )
    return Image.open(picture).convert("RGB").resize(SIZE, Image.Resampling.NEAREST)


def main() -> None:
    output = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as name:
        for title, (view, *models) in PICTURES.items():
            sheet = Image.new("RGB", (2 * SIZE[0] + 4, SIZE[1]), "white")
            for place, model in enumerate(models):
                sheet.paste(tile(model, view, Path(name)), (place * (SIZE[0] + 4), 0))
            sheet.save(output / f"{title}.jpg", quality=QUALITY)


if __name__ == "__main__":
    main()
