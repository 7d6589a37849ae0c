"""What a scene of 1,000 photos and 3 million points takes to start and to train, and 10 million Gaussians to show.

    python -m benchmarks.many FOLDER [--views N] [--points N] [--rendered N] [--steps N] [--out FILE]

The scene is made up once, in FOLDER: a COLMAP model whose cameras look outward from a ring, its points on a wall around
them, each seen by three images; a few JPEG files under hard links, so that FOLDER takes some 400 MB. Whole commands run
one after the other, with one thread: `splat train -r 1` for a few steps, and `splat render` of a PLY. Peaks are the
largest resident memory of the process (ru_maxrss), times its CPU time and wall time, and those from the start of the
process to the beginning and the end of its first step.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

#: The clock of a command, before anything of the program is imported.
STARTED = time.perf_counter()

#: Width and height of the photos; of renders.
SIZE, RENDERED = (4000, 3000), (1280, 720)

#: JPEG files that all photos share, and the images that see a point.
_FILES, _TRACK = 4, 3

_POINT = np.dtype(
    [
        *(("id", "<u8"), ("xyz", "<f8", 3), ("rgb", "u1", 3), ("error", "<f8"), ("length", "<u8")),
        ("track", "<u4", (_TRACK, 2)),
    ]
)
_OBSERVATION = np.dtype([("xy", "<f8", 2), ("id", "<i8")])


def make_scene(root: Path, views: int, points: int, size: tuple[int, int]) -> Path:
    """Write the scene to ``root`` unless it is there; return ``root``."""
    wanted = {"views": views, "points": points, "size": list(size)}
    facts = root / "facts.json"
    if facts.exists() and json.loads(facts.read_text(encoding="utf-8")) == wanted:
        return root
    (root / "images").mkdir(parents=True, exist_ok=True)
    (root / "sparse" / "0").mkdir(parents=True, exist_ok=True)
    _write_photos(root / "images", views, size)
    _write_model(root / "sparse" / "0", views, points, size)
    facts.write_text(json.dumps(wanted), encoding="utf-8")
    return root


def _write_photos(folder: Path, views: int, size: tuple[int, int]) -> None:
    random, (width, height) = np.random.default_rng(0), size
    x, y = np.arange(width) / width, np.arange(height)[:, None] / height
    for number in range(min(_FILES, views)):
        waves = [np.sin((3 + c + number) * x * 20) * np.cos((2 + c) * y * 17) for c in range(3)]
        noise = random.normal(0.0, 6.0, (height, width, 1))
        pixels = np.clip(128 + 60 * np.stack(waves, axis=-1) + noise, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:04d}.jpg", quality=85)
    for number in range(_FILES, views):
        link = folder / f"{number:04d}.jpg"
        link.unlink(missing_ok=True)
        os.link(folder / f"{number % _FILES:04d}.jpg", link)


def wall(points: int) -> NDArray[np.float64]:
    """Return [points, 3]: a rough cylinder of radius 4 around the y axis."""
    random = np.random.default_rng(1)
    angle = 2 * np.pi * np.arange(points) / points
    radius = 4.0 + 0.05 * random.normal(size=points) + 0.3 * np.sin(40 * angle)
    return np.stack([radius * np.sin(angle), random.uniform(-3.0, 3.0, points), radius * np.cos(angle)], axis=1)


def _write_model(folder: Path, views: int, points: int, size: tuple[int, int]) -> None:
    width, height = size
    lens = struct.pack("<QIiQQdddd", 1, 1, 1, width, height, 0.7 * width, 0.7 * width, width / 2, height / 2)
    (folder / "cameras.bin").write_bytes(lens)
    track = min(_TRACK, views)
    table = np.zeros(points, _POINT)
    table["id"], table["xyz"], table["length"] = np.arange(1, points + 1), wall(points), _TRACK
    table["rgb"] = np.random.default_rng(2).integers(0, 256, (points, 3))
    # Point i lies in the direction of view i * views / points, and its neighbours see it too.
    first = np.arange(points) * views // points
    seen_by = (first[:, None] + np.arange(_TRACK)) % views
    observations: list[NDArray[Any]] = [np.zeros(0, _OBSERVATION)] * views
    order = np.argsort(seen_by, axis=None, kind="stable")
    starts = np.searchsorted(seen_by.reshape(-1)[order], np.arange(views + 1))
    place = np.empty(points * _TRACK, np.int64)
    for view in range(views):
        mine = order[starts[view] : starts[view + 1]]
        place[mine] = np.arange(len(mine))
        observations[view] = np.zeros(len(mine), _OBSERVATION)
        observations[view]["id"] = mine // _TRACK + 1
        observations[view]["xy"] = [width / 2, height / 2]
    table["track"][:, :, 0], table["track"][:, :, 1] = seen_by + 1, place.reshape(points, _TRACK)
    assert track == _TRACK
    (folder / "points3D.bin").write_bytes(struct.pack("<Q", points) + table.tobytes())
    with (folder / "images.bin").open("wb") as file:
        file.write(struct.pack("<Q", views))
        for view in range(views):
            # World to camera: a turn about y; the camera stands 1 from the axis and looks outward.
            angle = 2 * math.pi * (view + 0.5) / views
            pose = (math.cos(angle / 2), 0.0, -math.sin(angle / 2), 0.0, 0.0, 0.0, -1.0)
            file.write(struct.pack("<I7dI", view + 1, *pose, 1) + f"{view:04d}.jpg".encode() + b"\0")
            file.write(struct.pack("<Q", len(observations[view])) + observations[view].tobytes())


def run(*words: str) -> dict[str, Any]:
    """Run ``splat WORDS``; return its times and peak. Raises SystemExit when it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "first_step.json"
        command = [sys.executable, "-m", "benchmarks.many", "--command", str(notes), *words]
        started = time.perf_counter()
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"splat {' '.join(words)} ended with {process.returncode}")
        return {
            "command": " ".join(["splat", *words]),
            "wall_s": round(time.perf_counter() - started, 1),
            "cpu_s": round(usage.ru_utime + usage.ru_stime, 1),
            "peak_gib": round(usage.ru_maxrss / 2**20, 2),
            **(json.loads(notes.read_text(encoding="utf-8")) if notes.exists() else {}),
        }


def run_here(notes: Path, words: list[str]) -> int:
    """Run ``splat WORDS`` in this process on one processor; write to ``notes`` when its first step begins and ends."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    from splatcli.cli import main as splat
    from splatcli.train.step import Stepper

    step = Stepper.step

    def now() -> tuple[float, float]:
        return round(time.perf_counter() - STARTED, 2), round(time.process_time(), 2)

    def first_step(self: Stepper, *arguments: Any, **options: Any) -> Any:
        begins = now()
        result = step(self, *arguments, **options)
        ends = now()
        times = {"first_step_begins_s": begins[0], "first_step_begins_cpu_s": begins[1]}
        notes.write_text(json.dumps({**times, "first_step_ends_s": ends[0], "first_step_ends_cpu_s": ends[1]}))
        Stepper.step = step  # type: ignore[method-assign]
        return result

    Stepper.step = first_step  # type: ignore[method-assign]
    sys.argv = ["splat", *words]
    return int(splat() or 0)


def write_ply(path: Path, count: int) -> None:
    """Write a PLY of ``count`` Gaussians of SH degree 3 on the wall, piece by piece, unless it is there."""
    names = ["x", "y", "z", *(f"f_dc_{i}" for i in range(3)), *(f"f_rest_{i}" for i in range(45)), "opacity"]
    names += [*(f"scale_{i}" for i in range(3)), *(f"rot_{i}" for i in range(4))]
    lines = [
        "ply",
        "format binary_little_endian 1.0",
        f"element vertex {count}",
        *(f"property float {n}" for n in names),
    ]
    header = "\n".join([*lines, "end_header", ""]).encode()
    if path.exists() and path.stat().st_size == len(header) + 4 * len(names) * count:
        return
    random, means = np.random.default_rng(3), wall(count)
    with path.open("wb") as file:
        file.write(header)
        for begin in range(0, count, 1 << 18):
            part = means[begin : begin + (1 << 18)]
            table = random.normal(0.0, 0.1, (len(part), len(names))).astype("<f4")
            table[:, :3] = part
            table[:, -8] = random.normal(0.0, 1.5, len(part))
            table[:, -7:-4] = math.log(12.0 / math.sqrt(count)) + random.normal(0.0, 0.3, (len(part), 3))
            table[:, -4] += 1.0
            file.write(table.tobytes())


def row(result: dict[str, Any]) -> str:
    """Return the training of one scene as a row of a Markdown table."""
    train = result["train"]
    cells = [f"{result['views']:,}", f"{result['points']:,}", f"{train['peak_gib']:.1f} GiB"]
    cells += [f"{train[key]:.1f} s" for key in ("first_step_begins_cpu_s", "first_step_ends_cpu_s")]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--views", type=int, default=1000)
    parser.add_argument("--points", type=int, default=3_000_000)
    parser.add_argument("--rendered", type=int, default=10_000_000, help="Gaussians of the PLY")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--size", type=int, nargs=2, default=SIZE, help="width and height of the photos")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    scene = make_scene(options.folder / "scene", options.views, options.points, tuple(options.size))
    result: dict[str, Any] = {"views": options.views, "points": options.points, "size": list(options.size)}
    if options.steps:
        output = options.folder / f"run_{time.time_ns()}"
        train = ["train", str(scene), "-r", "1", "-n", str(options.steps), "--cap-max", str(2 * options.points)]
        result["train"] = run(*train, "--test-every", "0", "-q", "-o", str(output))
        result["train"]["steps"] = options.steps
    if options.rendered:
        ply = options.folder / f"wall_{options.rendered}.ply"
        write_ply(ply, options.rendered)
        views = ["--views", "orbit", "--frames", "2", "--size", "x".join(map(str, RENDERED))]
        about = ["--data", str(scene), "-q", "-o", str(options.folder / "pictures")]
        result["render"] = run("render", str(ply), *views, *about)
        result["render"] |= {"gaussians": options.rendered, "frames": 2}
    print(json.dumps(result, indent=1))
    if options.out:
        from splatcli.bench import describe_machine

        options.out.write_text(json.dumps({**describe_machine(), **result}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--command"]:
        sys.exit(run_here(Path(sys.argv[2]), sys.argv[3:]))
    main()
