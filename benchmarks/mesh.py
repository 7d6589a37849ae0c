"""Accuracy and completeness of meshes of the sample scene, whose surfaces are known, and pictures of meshes.

    splat train data/samples/courtyard -n 3000 -o output/courtyard
    PYTHONPATH=. python benchmarks/mesh.py measure output/courtyard --out benchmarks/results/mesh.json
    splat mesh output/courtyard -o court.ply --crop sphere:0,0,0.6,2.3
    PYTHONPATH=. python benchmarks/mesh.py compare court.ply
    PYTHONPATH=. python benchmarks/mesh.py draw court.ply court.jpg --eye 2.6,-2.2,1.9 --target 0,0.2,0.4 --up 0,0,1

The true surface is what the cameras of the scene see of it, a point a pixel, within 2.1 m of (0, 0, 0.6). Accuracy is
the distance of the mesh's vertices from the tangent plane of the nearest true point, or from that point where it is
beside it. Completeness is the share of true points within a distance of the mesh. `measure` makes a mesh for each of
RESOLUTIONS in a process of its own, and adds its processor time and its peak of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.spatial import cKDTree

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "data" / "samples"))

from courtyard_maker.cameras import views
from courtyard_maker.world import cast, things

from benchmarks.origin import origin

Doubles = NDArray[np.float64]

MIDDLE, RADIUS = np.array([0.0, 0.0, 0.6]), 2.1
#: Of make_courtyard.py.
SEED = 7
#: A true point is beside a vertex when it is so far along the surface, metres.
BESIDE = 0.03
WITHIN = (0.02, 0.05, 0.1)
#: Voxels along the longest side of the region.
RESOLUTIONS = (128, 256, 400)
CROP = f"sphere:{','.join(f'{value:g}' for value in MIDDLE)},2.3"


def read(path: Path) -> tuple[Doubles, NDArray[np.int64], Doubles]:
    """The vertices, faces and colours of a PLY of splat mesh."""
    data = path.read_bytes()
    end = data.index(b"end_header\n") + len(b"end_header\n")
    count, faces = (int(line.split()[2]) for line in data[:end].decode().splitlines() if line.startswith("element"))
    kind = np.dtype([("at", "<f4", 3), ("colour", "u1", 3)])
    table = np.frombuffer(data, kind, count, end)
    corners = np.frombuffer(data, np.dtype([("n", "u1"), ("at", "<i4", 3)]), faces, end + table.nbytes)
    return table["at"].astype(float), corners["at"].astype(np.int64), table["colour"] / 255.0


def true_points() -> tuple[Doubles, Doubles]:
    """Points and normals of the surfaces that the cameras see."""
    points, normals = [], []
    for view in views(np.random.default_rng(np.random.SeedSequence(SEED).spawn(3)[0])):
        pixels = np.stack(np.meshgrid(np.arange(view.width) + 0.5, np.arange(view.height) + 0.5), -1).reshape(-1, 2)
        hits = cast(*view.rays(pixels))
        near = (hits.thing >= 0) & (np.linalg.norm(hits.points - MIDDLE, axis=1) < RADIUS)
        normal = np.zeros_like(hits.points)
        for number, thing in enumerate(things()):
            rows = np.flatnonzero(near & (hits.thing == number))
            normal[rows] = thing.shape.normal(thing.own(hits.points[rows])) @ thing.rotation.T
        points.append(hits.points[near])
        normals.append(normal[near])
    return np.concatenate(points).astype(float), np.concatenate(normals).astype(float)


def compare(path: Path) -> dict[str, object]:
    """Distances in metres."""
    vertices, faces, _ = read(path)
    points, normals = true_points()
    near = vertices[np.linalg.norm(vertices - MIDDLE, axis=1) < RADIUS - 0.05]
    away, index = cKDTree(points).query(near, workers=-1)
    along = np.einsum("ij,ij->i", near - points[index], normals[index])
    error = np.where(np.sqrt(np.maximum(away**2 - along**2, 0)) < BESIDE, np.abs(along), away)
    middles = vertices[faces].mean(axis=1)
    missing, _ = cKDTree(np.concatenate([vertices, middles])).query(points, workers=-1)
    return {
        "mesh": path.name,
        "triangles": len(faces),
        "accuracy: median": round(float(np.median(error)), 4),
        "accuracy: 90 %": round(float(np.percentile(error, 90)), 4),
        "bias, positive outside": round(float(np.median(along)), 4),
        **{f"complete within {limit} m": round(float((missing < limit).mean()), 3) for limit in WITHIN},
    }


def measure(run: Path) -> dict[str, object]:
    """Return the figures of a mesh of each resolution: metres, seconds of processor time, GB of memory at the peak."""
    meshes = []
    with tempfile.TemporaryDirectory() as folder:
        for resolution in RESOLUTIONS:
            path = Path(folder) / f"{resolution}.ply"
            words = ["mesh", str(run), "-o", str(path), "--crop", CROP, "--resolution", str(resolution), "--json"]
            with subprocess.Popen([sys.executable, "-m", "splatcli", *words], stdout=subprocess.PIPE) as process:
                assert process.stdout is not None
                facts = json.loads(process.stdout.read().splitlines()[-1])
                _, status, used = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
            figures = {
                "resolution": resolution,
                "voxel": round(facts["voxel"], 4),
                **compare(path),
                "seconds": round(used.ru_utime + used.ru_stime, 1),
                "memory_gb": round(used.ru_maxrss * 1024 / 1e9, 2),
            }
            meshes.append({name: value for name, value in figures.items() if name != "mesh"})
    return {
        **origin(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "gaussians": json.loads(_said(sys.executable, "-m", "splatcli", "info", str(run), "--json"))["num_gaussians"],
        "meshes": meshes,
    }


def _said(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def draw(path: Path, target: Path, eye: Doubles, focus: Doubles, up: Doubles, size: int) -> None:
    """Write a picture: the mesh with its colours, and beside it shaded grey."""
    vertices, faces, colours = read(path)
    forward = (focus - eye) / np.linalg.norm(focus - eye)
    right = np.cross(forward, up)
    right /= np.linalg.norm(right)
    local = (vertices - eye) @ np.stack([right, np.cross(forward, right), forward]).T
    a, b, c = (local[faces[:, k]] for k in range(3))
    normal = np.cross(b - a, c - a)
    normal /= np.maximum(np.linalg.norm(normal, axis=1, keepdims=True), 1e-12)
    shade = 0.25 + 0.75 * np.abs(normal @ np.array([-0.4, -0.7, -0.6]))
    front = ((normal * (a + b + c)).sum(axis=1) < 0) & (np.minimum(np.minimum(a, b), c)[:, 2] > 0.01)
    depth = np.full(size * size * 4, np.inf)
    chosen = np.zeros((depth.size, 6))
    steps = [(i, j) for i in range(12) for j in range(12 - i)]
    for i, j in steps:  # points of each triangle, nearest last, so that they win
        w = np.array([i + 1 / 3, j + 1 / 3, 0]) / 12
        w[2] = 1 - w.sum()
        at = (w[0] * a + w[1] * b + w[2] * c)[front]
        pixel = (at[:, :2] / at[:, 2:] * size * 1.8 + size).astype(int)
        inside = ((pixel >= 0) & (pixel < 2 * size)).all(axis=1)
        row = pixel[inside, 1] * 2 * size + pixel[inside, 0]
        z, rows = at[inside, 2], np.flatnonzero(front)[inside]
        order = np.argsort(-z)
        order = order[z[order] < depth[row[order]]]
        depth[row[order]] = z[order]
        mixed = w[0] * colours[faces[rows, 0]] + w[1] * colours[faces[rows, 1]] + w[2] * colours[faces[rows, 2]]
        chosen[row[order]] = np.column_stack([mixed, np.repeat(shade[rows, None], 3, 1)])[order]
    chosen[~np.isfinite(depth)] = 1.0
    image = chosen.reshape(size, 2, size, 2, 6).mean(axis=(1, 3))
    both = np.concatenate([image[..., :3], image[..., 3:]], axis=1)
    Image.fromarray((both.clip(0, 1) * 255).round().astype(np.uint8)).save(target, quality=82)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    jobs = parser.add_subparsers(dest="job", required=True)
    one = jobs.add_parser("compare")
    one.add_argument("meshes", nargs="+", type=Path)
    three = jobs.add_parser("measure")
    three.add_argument("run", type=Path)
    three.add_argument("--out", type=Path)
    two = jobs.add_parser("draw")
    two.add_argument("mesh", type=Path)
    two.add_argument("picture", type=Path)
    for name, default in (("--eye", "3,-3,2"), ("--target", "0,0,0"), ("--up", "0,0,1")):
        two.add_argument(name, default=default, type=lambda text: np.array([float(part) for part in text.split(",")]))
    two.add_argument("--size", type=int, default=480)
    given = parser.parse_args()
    if given.job == "compare":
        print(json.dumps([compare(path) for path in given.meshes], indent=1))
    elif given.job == "measure":
        text = json.dumps(measure(given.run), indent=1)
        print(text)
        if given.out is not None:
            given.out.write_text(text + "\n", encoding="utf-8")
    else:
        draw(given.mesh, given.picture, given.eye, given.target, given.up, given.size)


if __name__ == "__main__":
    main()
