"""Render an orbit around the scene of a run as PNGs: python examples/render_path.py MODEL FOLDER [FRAMES [WIDTH]]."""

from __future__ import annotations

import sys
from pathlib import Path

import imageio.v3 as imageio

import splatcli
from splatcli.render.images import to_uint8
from splatcli.render.selection import KnownCameras, PathOptions, select_views


def main(model: str, folder: str, frames: str = "60", width: str = "640") -> None:
    loaded = splatcli.Model.load(model, device="auto")
    print(loaded)
    cameras = select_views("orbit", KnownCameras(loaded.cameras), PathOptions(frames=int(frames))).cameras
    Path(folder).mkdir(parents=True, exist_ok=True)
    for number, camera in enumerate(cameras):
        size = (int(width), round(int(width) * camera.height / camera.width))
        image = loaded.render(camera, size=size).image
        imageio.imwrite(Path(folder) / f"{number:04d}.png", to_uint8(image))
    print(f"{len(cameras)} images in {folder}")


if __name__ == "__main__":
    main(*sys.argv[1:])
