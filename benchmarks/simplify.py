"""PSNR of held-out views against the number of Gaussians: splat edit --simplify beside pruning and splat-transform.

    PYTHONPATH=. python benchmarks/simplify.py RUN [RUN ...] [--splat-transform cli.mjs] > simplify.json

RUN is a folder of `splat train`. Each model is brought to half, a quarter and a tenth of its Gaussians: by --simplify
with the cameras of the run, followed by --refine 500, and without cameras; by keeping the most opaque ones, and by the
--decimate of splat-transform.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import torch

import splatcli
from benchmarks.origin import origin
from splatcli.api import build_config
from splatcli.checkpoint.file import load_checkpoint
from splatcli.edit.refine import refine, scene_of
from splatcli.edit.simplify import simplify
from splatcli.formats.ply import write_ply_file
from splatcli.gaussians import Gaussians
from tests.formats.made import read_ply

COMMAND = "PYTHONPATH=. python benchmarks/simplify.py RUN [RUN ...] --splat-transform cli.mjs"
#: The version that the column splat-transform is of.
OTHER = "2.7.1"
SHARES = (0.5, 0.25, 0.1)
STEPS = 500


def psnr(gaussians: Gaussians, model: splatcli.Model, scene: splatcli.Scene) -> float:
    """The mean over the held-out views, with colours of 8 bits."""
    found = []
    for index in scene.test:
        image = splatcli.Model(gaussians, settings=model.settings).render(scene.cameras[index]).image
        wanted = torch.as_tensor(scene.images.image(index).pixels).double() / 255
        error = ((image.double().clamp(0, 1) * 255).round() / 255 - wanted).square().mean()
        found.append(-10 * float(error.log10()))
    return sum(found) / len(found)


def measure(run: Path, program: Path | None) -> dict[str, object]:
    """The curves of one run."""
    model = splatcli.Model.load(run)
    assert model.path is not None
    checkpoint = load_checkpoint(model.path)
    photos = scene_of(checkpoint, None)
    config = json.loads((run / "config.json").read_text())
    config = build_config({f"data.{key}": value for key, value in config.get("data", config).items()})
    white = model.settings.background[0] > 0.5
    scene = splatcli.Scene.read(config.data, (255, 255, 255) if white else (0, 0, 0))
    gaussians, cameras = model.gaussians, [model.cameras[index] for index in scene.train]
    curve = []
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole.ply"
        write_ply_file(gaussians, whole)
        for share in SHARES:
            count = round(share * len(gaussians))
            opaque = gaussians.logit_opacities.argsort(descending=True, stable=True)[:count].sort().values
            simple = simplify(gaussians, count, cameras)
            point = {
                "gaussians": count,
                "simplify": psnr(simple, model, scene),
                f"simplify + refine {STEPS}": psnr(refine(simple, checkpoint, photos, STEPS, "cpu"), model, scene),
                "simplify without cameras": psnr(simplify(gaussians, count), model, scene),
                "most opaque": psnr(gaussians.map(lambda tensor, rows=opaque: tensor[rows]), model, scene),
            }
            if program is not None:
                target = Path(folder) / "other.ply"
                command = ["node", str(program), "-w", "-g", "cpu", str(whole), "-F", str(count), str(target)]
                subprocess.run(command, check=True, capture_output=True)
                point["splat-transform"] = psnr(read_ply(target), model, scene)
            curve.append({key: round(value, 2) if isinstance(value, float) else value for key, value in point.items()})
    return {
        "scene": run.name,
        "gaussians": len(gaussians),
        "psnr": round(psnr(gaussians, model, scene), 2),
        "curve": curve,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--splat-transform", type=Path)
    arguments = parser.parse_args()
    runs = [measure(run, arguments.splat_transform) for run in arguments.runs]
    print(json.dumps({"command": COMMAND, **origin(), "splat-transform": OTHER, "runs": runs}, indent=1))


if __name__ == "__main__":
    main()
