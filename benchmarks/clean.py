"""What splat edit --clean costs on trained models, and how many of planted floaters it finds.

    PYTHONPATH=. python benchmarks/clean.py RUN [RUN ...] > clean.json

RUN is a folder of `splat train`. Floaters of four kinds are put into free space in front of the surfaces that training
views show, and behind them. Levels run with cameras and photos, and without both; the change of the held-out views'
PSNR is that of the model without planted floaters. The same models as PLY files are cleaned by `splat edit FILE`, with
and without `--data SCENE`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import splatcli
from benchmarks.origin import origin
from splatcli.api import build_config
from splatcli.edit.clean import LEVELS, Photos, floaters
from splatcli.edit.operations import merged
from splatcli.gaussians import SH_C0, Gaussians

COMMAND = "PYTHONPATH=. python benchmarks/clean.py RUN [RUN ...]"
KINDS = ("fog", "needles", "clusters", "behind")
#: Floaters of a kind, and Gaussians of a cluster.
COUNT, CLUSTER = 20, 5


class Planter:
    """Makes floaters along the rays of training views."""

    def __init__(self, model: splatcli.Model, scene: splatcli.Scene, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.model, self.views = model, scene.train
        self.rows: list[tuple[NDArray[np.float64], NDArray[np.float64], float, NDArray[np.float64]]] = []
        self.kinds: list[int] = []

    def ray(self) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
        """Return the centre of a camera, the direction of one of its pixels with camera z of 1, the surface's z."""
        camera = self.model.cameras[int(self.rng.choice(self.views))]
        with torch.no_grad():
            shown = self.model.render(camera)
        while True:
            x, y = self.rng.uniform(0.1, 0.9, 2) * (camera.width, camera.height)
            alpha = float(shown.alpha[int(y), int(x)])
            if alpha > 0.8:
                break
        across = np.array([(x - camera.cx) / camera.fx, (y - camera.cy) / camera.fy, 1.0])
        return camera.center, across @ camera.viewmat[:3, :3], float(shown.depth[int(y), int(x)]) / alpha

    def add(self, kind: str, mean: NDArray[np.float64], scales: NDArray[np.float64], opacity: float, rgb: Any) -> None:
        self.rows.append((mean, scales, opacity, np.clip(rgb, 0, 1)))
        self.kinds.append(KINDS.index(kind))

    def plant(self) -> tuple[Gaussians, NDArray[np.int64]]:
        """Return the model with the floaters behind its own Gaussians, and the kind of each row; -1 for its own."""
        uniform = self.rng.uniform
        for _ in range(COUNT):
            center, across, z = self.ray()
            near = uniform(0.05, 0.25) * z
            sizes = near * uniform(0.1, 0.4) * uniform(0.7, 1.3, 3)
            self.add("fog", center + near * across, sizes, uniform(0.05, 0.3), uniform(0.4, 1) * np.ones(3))
            center, across, z = self.ray()
            sizes = z * uniform(0.05, 0.15) * np.array([1, 1 / 30, 1 / 30])
            self.add("needles", center + uniform(0.25, 0.8) * z * across, sizes, uniform(0.3, 0.9), uniform(0, 1, 3))
            center, across, z = self.ray()
            sizes = 0.008 * z * uniform(0.5, 1.5, 3)
            self.add("behind", center + uniform(1.1, 1.5) * z * across, sizes, uniform(0.5, 0.95), uniform(0, 1, 3))
        for _ in range(COUNT // CLUSTER):
            center, across, z = self.ray()
            middle, rgb = center + uniform(0.25, 0.8) * z * across, uniform(0, 1, 3)
            for _ in range(CLUSTER):
                mean = middle + 0.015 * z * self.rng.normal(size=3)
                sizes = 0.006 * z * uniform(0.5, 1.5, 3)
                self.add("clusters", mean, sizes, uniform(0.5, 0.95), rgb + 0.1 * self.rng.normal(size=3))
        means, scales, opacities, colours = (
            torch.from_numpy(np.array(column)).float() for column in zip(*self.rows, strict=True)
        )
        own = self.model.gaussians
        planted = Gaussians(
            means=means,
            quats=torch.from_numpy(self.rng.normal(size=(len(means), 4))).float(),
            log_scales=scales.log(),
            logit_opacities=opacities.logit(),
            sh0=(colours - 0.5) / SH_C0,
            shN=own.shN.new_zeros(len(means), *own.shN.shape[1:]),
        )
        return merged([own, planted]), np.concatenate([np.full(len(own), -1), self.kinds])


def psnr(gaussians: Gaussians, model: splatcli.Model, scene: splatcli.Scene) -> float:
    """The mean over the held-out views, with colours of 8 bits."""
    found = []
    for index in scene.test:
        with torch.no_grad():
            image = splatcli.Model(gaussians, settings=model.settings).render(scene.cameras[index]).image
        wanted = torch.as_tensor(scene.images.image(index).pixels).double() / 255
        error = ((image.double().clamp(0, 1) * 255).round() / 255 - wanted).square().mean()
        found.append(-10 * float(error.log10()))
    return sum(found) / len(found)


def measure(run: Path) -> dict[str, Any]:
    """The figures of one run."""
    model = splatcli.Model.load(run)
    config = json.loads((run / "config.json").read_text())
    config = build_config({f"data.{key}": value for key, value in config.get("data", config).items()})
    white = model.settings.background[0] > 0.5
    scene = splatcli.Scene.read(config.data, (255, 255, 255) if white else (0, 0, 0))
    own, cameras = model.gaussians, [model.cameras[index] for index in scene.train]
    index = {camera.name: row for row, camera in enumerate(scene.cameras)}

    def load(name: str) -> Any:
        image = scene.images.image(index[name])
        return image.pixels, image.masked

    photos = Photos(load, model.settings.background, model.settings.antialiased)
    planted, kinds = Planter(model, scene, seed=1).plant()
    before = psnr(own, model, scene)
    facts: dict[str, Any] = {"scene": run.name, "gaussians": len(own), "psnr": round(before, 3)}
    facts["planted psnr"] = round(psnr(planted, model, scene), 3)
    for known, evidence in (("nothing", ((), None)), ("photos", (cameras, photos))):
        for level in LEVELS:
            rows = floaters(own, level, *evidence)
            after = psnr(own.map(lambda tensor, rows=rows: tensor[~rows]), model, scene)
            found = floaters(planted, level, *evidence)
            facts[f"{level}, {known}"] = {
                "dropped": int(rows.sum()),
                "psnr change": round(after - before, 3),
                "recall": {kind: round(float(found[kinds == row].float().mean()), 2) for row, kind in enumerate(KINDS)},
                "own dropped of planted": int(found[kinds < 0].sum()),
                "psnr of planted": round(psnr(planted.map(lambda t, rows=found: t[~rows]), model, scene), 3),
            }
    scene_folder = Path(config.data.scene)
    facts["files"] = {
        name: measure_file(splatcli.Model(gaussians, settings=model.settings), model, scene, scene_folder)
        for name, gaussians in (("own", own), ("planted", planted))
    }
    return facts


#: Of `splat edit FILE`, by what they go by.
FILE_FLAGS = {"neighbours": ["--clean"], "normal": ["--clean", "--data"], "strong": ["--clean", "strong", "--data"]}


def measure_file(of_file: splatcli.Model, model: splatcli.Model, scene: splatcli.Scene, folder: Path) -> dict[str, Any]:
    """The held-out views' PSNR of a model as a PLY file, and of what `splat edit` makes of it."""
    found: dict[str, Any] = {"psnr": round(psnr(of_file.gaussians, model, scene), 3)}
    with tempfile.TemporaryDirectory() as place:
        source, cleaned = Path(place, "a.ply"), Path(place, "b.ply")
        of_file.export(source)
        for name, flags in FILE_FLAGS.items():
            words = ["edit", str(source), *flags, *([str(folder)] if "--data" in flags else [])]
            subprocess.run(
                [sys.executable, "-m", "splatcli", *words, "-o", str(cleaned), "-w", "-q"], check=True, stdout=2
            )
            after = splatcli.Model.load(cleaned).gaussians
            dropped = len(of_file.gaussians) - len(after)
            found[name] = {"dropped": dropped, "psnr": round(psnr(after, model, scene), 3)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    scenes = [measure(run) for run in parser.parse_args().runs]
    print(json.dumps({"command": COMMAND, **origin(), "scenes": scenes}, indent=1))


if __name__ == "__main__":
    main()
