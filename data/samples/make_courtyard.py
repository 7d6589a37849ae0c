"""Make the sample scene `courtyard` anew: python data/samples/make_courtyard.py [OUTPUT_FOLDER]."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

# The work is split by process; threads inside a process would only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import imageio.v3 as iio
import numpy as np
from courtyard_maker.cameras import views
from courtyard_maker.light import BakeQuality, bake
from courtyard_maker.model import find_points, write_model
from courtyard_maker.render import render

SEED = 7
JPEG_QUALITY = 92


def main(arguments: Sequence[str] | None = None) -> int:
    """Render all views and write them with the COLMAP model; the same seed gives the same scene."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", nargs="?", type=Path, default=Path(__file__).parent / "courtyard")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="how many to work in at the same time")
    options = parser.parse_args(arguments)
    image_folder, model_folder = options.output / "images", options.output / "sparse" / "0"
    for folder in (image_folder, model_folder):
        folder.mkdir(parents=True, exist_ok=True)
    camera_seed, light_seed, point_seed = np.random.SeedSequence(SEED).spawn(3)
    all_views = views(np.random.default_rng(camera_seed))
    images = []
    with ProcessPoolExecutor(options.processes) as pool:
        print("baking the light ...", flush=True)
        light = bake(BakeQuality(), np.random.default_rng(light_seed), pool)
        jobs = [pool.submit(render, view, light) for view in all_views]
        for view, job in zip(all_views, jobs, strict=True):
            buffer = io.BytesIO()
            iio.imwrite(buffer, job.result(), extension=".jpg", quality=JPEG_QUALITY, subsampling=0, optimize=True)
            (image_folder / view.name).write_bytes(buffer.getvalue())
            # The points take their colours from the pictures as stored, compression and all.
            images.append(np.asarray(iio.imread(buffer.getvalue(), extension=".jpg"), np.uint8))
            print(f"{view.name}: {len(buffer.getvalue()) / 1024:.0f} kB", flush=True)
    sightings = find_points(all_views, images, np.random.default_rng(point_seed))
    write_model(model_folder, all_views, sightings)
    print(f"{len(images)} views and {len(sightings)} points in {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
