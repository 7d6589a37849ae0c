"""What training on fisheye images gains over training on their middle: docs/quality.md, "Wide lenses".

    python -m benchmarks.fisheye FOLDER [--steps 3000] [--cap-max 20000] [--seed 42] [--preview] > fisheye.json

FOLDER gets a capture of the sample courtyard through a fisheye lens, traced ray by ray (minutes, once), and a run for
each projection. Both models are scored on the images of the lens, and on perspective views of several widths cut out
of its undistorted images. --preview makes a capture of small images in coarse light, in seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pycolmap
from numpy.typing import NDArray
from PIL import Image

import splatcli
from benchmarks.origin import origin
from splatcli.cli.commands import run
from splatcli.config import DataConfig
from splatcli.scene.read import read_scene
from splatcli.scene.scene import Scene

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "data" / "samples"))
from courtyard_maker import render as tracing
from courtyard_maker.cameras import views
from courtyard_maker.light import BakeQuality, bake
from courtyard_maker.model import find_points, write_model

COMMAND = "python -m benchmarks.fisheye FOLDER"
#: An OPENCV_FISHEYE lens that sees 146 degrees from the left edge to the right, 181 from corner to corner.
WIDTH, HEIGHT, FOCAL, K = 400, 300, 153.0, (0.03, -0.012, 0.002, -0.0003)
SEED, JPEG_QUALITY, SAMPLES = 7, 92, 3
#: Half the horizontal angles of the perspective views, degrees; they are 4:3.
HALVES = (20, 30, 40, 50)
PROJECTIONS = ("fisheye", "pinhole")

Doubles = NDArray[np.float64]
_ANGLES = np.linspace(0.0, np.radians(115.0), 20_001)
_RADII = _ANGLES * (1.0 + sum(k * _ANGLES ** (2 * i) for i, k in enumerate(K, 1)))


@dataclass(frozen=True, slots=True, eq=False)
class FisheyeView(tracing.View):
    """A view of the courtyard through the lens."""

    def rays(self, pixels: Doubles) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        away = (pixels - np.array([self.width, self.height]) / 2) / self.focal
        radius = np.hypot(*away.T)
        angle = np.interp(radius, _RADII, _ANGLES)
        across = away * (np.sin(angle) / np.maximum(radius, 1e-12))[:, None]
        rays = np.column_stack([across, np.cos(angle)]) @ self.rotation
        return np.tile(self.centre, (len(rays), 1)).astype(np.float32), rays.astype(np.float32)

    def project(self, points: NDArray[np.floating[Any]]) -> tuple[Doubles, Doubles]:
        at = (np.asarray(points, np.float64) - self.centre) @ self.rotation.T
        across = np.hypot(at[:, 0], at[:, 1])
        angle = np.arctan2(across, at[:, 2])
        scale = np.interp(angle, _ANGLES, _RADII) / np.maximum(across, 1e-12)
        distance = np.linalg.norm(at, axis=1)
        return at[:, :2] * scale[:, None] * self.focal + np.array([self.width, self.height]) / 2, np.where(
            angle < np.radians(100.0), distance, -distance
        )


def make_capture(folder: Path, preview: bool) -> None:
    """Write images and a COLMAP model with the true cameras."""
    (folder / "images").mkdir(parents=True)
    (folder / "sparse/0").mkdir(parents=True)
    tracing.SAMPLES = 1 if preview else SAMPLES
    quality = BakeQuality(texels=0.2, sun_rays=4, sky_rays=4, first_rays=2) if preview else BakeQuality()
    reduced = 4 if preview else 1
    width, height, focal = WIDTH // reduced, HEIGHT // reduced, FOCAL / reduced
    camera_seed, light_seed, point_seed = np.random.SeedSequence(SEED).spawn(3)
    shots = [
        FisheyeView(view.name, width, height, focal, view.rotation, view.centre)
        for view in views(np.random.default_rng(camera_seed))
    ]
    images = []
    with ProcessPoolExecutor() as pool:
        light = bake(quality, np.random.default_rng(light_seed), pool)
        for shot, job in zip(shots, [pool.submit(tracing.render, shot, light) for shot in shots], strict=True):
            path = folder / "images" / shot.name
            Image.fromarray(job.result()).save(path, quality=JPEG_QUALITY, subsampling=0)
            images.append(np.asarray(Image.open(path), np.uint8))
            print(path, file=sys.stderr, flush=True)
    place = folder / "sparse/0"
    write_model(place, shots, find_points(shots, images, np.random.default_rng(point_seed)))
    model = pycolmap.Reconstruction(str(place))
    camera = model.camera(1)
    camera.model = pycolmap.CameraModelId.OPENCV_FISHEYE
    camera.params = [focal, focal, width / 2, height / 2, *K]
    model.update_point_3d_errors()
    model.write_binary(str(place))


def of_lens(model: splatcli.Model, scene: Scene) -> float:
    """Return the mean PSNR of the held-out images as the lens sees them."""
    found = model.compare(scene, cameras=[scene.cameras[i] for i in scene.test])
    return float(np.mean([view["psnr"] for view in found.values()]))


def of_perspective(model: splatcli.Model, scene: Scene, half: float) -> float:
    """Return the mean PSNR of perspective views that see ``half`` degrees to the left and right of held-out ones."""
    found = []
    for i in scene.test:
        camera = scene.cameras[i]
        across = np.tan(np.radians(half)) * np.array([1.0, 0.75]) * camera.fx
        x, y = (max(0, int(c - a)) for c, a in zip((camera.cx, camera.cy), across, strict=True))
        right, bottom = int(min(camera.width, camera.cx + across[0])), int(min(camera.height, camera.cy + across[1]))
        view = replace(camera, width=right - x, height=bottom - y, cx=camera.cx - x, cy=camera.cy - y)
        image = scene.images.load(i)[y:bottom, x:right] / 255.0
        found.append(-10.0 * np.log10(np.square(model.render(view).image.clamp(0, 1).numpy() - image).mean()))
    return float(np.mean(found))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the scores of both runs as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--cap-max", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--preview", action="store_true")
    options = parser.parse_args(arguments)
    capture = options.folder / "courtyard"
    if not capture.is_dir():
        make_capture(capture, options.preview)
    scenes = {name: read_scene(capture, DataConfig.model_validate({"projection": name})) for name in PROJECTIONS}
    runs = {}
    for name in PROJECTIONS:
        output = options.folder / f"{name}_{options.steps}_{options.cap_max}_{options.seed}"
        words = ["--iterations", options.steps, "--cap-max", options.cap_max, "--seed", options.seed]
        if not output.is_dir():
            command = ["train", capture, "--projection", name, *words, "-o", output]
            if status := run([*map(str, command), "--json", "-q"]):
                return status
        model = splatcli.Model.load(output)
        runs[name] = {
            "lens": round(of_lens(model, scenes["fisheye"]), 2),
            "perspective": {half: round(of_perspective(model, scenes["pinhole"], half), 2) for half in HALVES},
        }
    command = f"{COMMAND} --preview" if options.preview else COMMAND
    about = {"command": command, **origin(), "steps": options.steps, "seed": options.seed, "cap_max": options.cap_max}
    print(json.dumps({**about, "psnr": runs}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
