"""Bytes a Gaussian of each format, and PSNR between renders of a model and of the file that it is written to.

    PYTHONPATH=. python benchmarks/fidelity.py MODEL.ply

Six views of 400x300 pixels, 60 degrees apart on a circle of twice the radius that holds 90 % of the Gaussians.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from splatcli.checkpoint.foreign.imported import ImportOptions, to_gaussians
from splatcli.formats.format import ExportMetadata
from splatcli.formats.registry import FORMATS, import_model
from splatcli.gaussians import Gaussians
from splatcli.rasterizer import render
from splatcli.scene.camera import Camera

VIEWS, WIDTH, HEIGHT, FOCAL = 6, 400, 300, 350.0


def cameras(gaussians: Gaussians) -> list[Camera]:
    """The views; y is down in the scene, and they look down a little."""
    middle = gaussians.means.median(dim=0).values
    radius = float((gaussians.means - middle).norm(dim=1).quantile(0.9))
    found = []
    for number in range(VIEWS):
        angle = 2.0 * math.pi * number / VIEWS
        away = np.array([math.cos(angle), -0.3, math.sin(angle)])
        forward = -away / np.linalg.norm(away)
        right = np.cross([0.0, 1.0, 0.0], forward)
        right /= np.linalg.norm(right)
        rotation = np.stack([right, np.cross(forward, right), forward])
        viewmat = np.eye(4)
        viewmat[:3, :3] = rotation
        viewmat[:3, 3] = -rotation @ (middle.numpy().astype(np.float64) - 2.0 * radius * forward)
        found.append(Camera(f"{number}", WIDTH, HEIGHT, FOCAL, FOCAL, WIDTH / 2, HEIGHT / 2, viewmat))
    return found


def read(path: Path) -> Gaussians:
    return to_gaussians(import_model(path), ImportOptions(), path)[0]


@torch.no_grad()
def images(gaussians: Gaussians, views: list[Camera]) -> list[torch.Tensor]:
    return [render(gaussians, view, background=torch.zeros(3)).image.clamp(0.0, 1.0) for view in views]


def psnr(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    errors = [float((one.double() - other.double()).square().mean()) for one, other in zip(found, wanted, strict=True)]
    return sum(-10.0 * math.log10(error) if error else math.inf for error in errors) / len(errors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    gaussians = read(parser.parse_args().model)
    views = cameras(gaussians)
    wanted = images(gaussians, views)
    flat = images(replace(gaussians, shN=torch.zeros_like(gaussians.shN)), views)
    with tempfile.TemporaryDirectory() as folder:
        for each in FORMATS:
            if each.write is None or each.name in ("html", "usdz"):
                continue
            payload = each.write(gaussians, ExportMetadata()).payload
            path = Path(folder) / f"x{each.suffix or '.spz'}"
            path.write_bytes(payload)
            found = images(read(path), views)
            line = f"{each.name:15} {len(payload) / len(gaussians):6.1f} bytes {psnr(found, wanted):6.1f} dB"
            print(line, f"without harmonics {psnr(found, flat):.1f} dB" if each.name == "splat" else "")


if __name__ == "__main__":
    main()
