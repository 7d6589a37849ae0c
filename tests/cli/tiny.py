"""A scene so small that a run over it takes a second: a coloured ball seen from a ring of ten cameras."""

from __future__ import annotations

import json
import math
from pathlib import Path

import imageio.v3 as imageio
import numpy as np

WIDTH, HEIGHT, VIEWS = 40, 30, 10

#: What makes training on this scene quick, for the command line. So few and so large Gaussians would all be pruned by
#: the rules for real scenes, and a refinement a step leaves them no time to show. The alpha term would make those
#: opaque that so few steps leave in front of the ball.
QUICK = (
    *("--init", "random", "--set", "model.random_points=200", "--sh-degree", "1"),
    *("--set", "strategy.prune_scale3d=100", "--set", "strategy.prune_opacity=0.0001"),
    *("--set", "schedule.refine_every=10", "--set", "train.alpha_lambda=0"),
)


def write_scene(root: Path) -> Path:
    """The scene in nerfstudio's layout; returns ``root``."""
    (root / "images").mkdir(parents=True)
    focal = float(WIDTH)
    frames = []
    for index in range(VIEWS):
        name = f"images/view_{index:02d}.png"
        c2w = look_at_origin(2 * math.pi * index / VIEWS)
        imageio.imwrite(root / name, _ball(c2w, focal))
        frames.append({"file_path": name, "transform_matrix": c2w.tolist()})
    lens = {"fl_x": focal, "fl_y": focal, "cx": WIDTH / 2, "cy": HEIGHT / 2, "w": WIDTH, "h": HEIGHT}
    (root / "transforms.json").write_text(json.dumps({**lens, "frames": frames}))
    return root


def add_points(root: Path, count: int = 400) -> Path:
    """Grey points on the ball of the scene in ``root``, as its sparse points; returns ``root``."""
    points = np.random.default_rng(0).normal(size=(count, 3))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    lines = [" ".join([*(f"{x:.6f}" for x in point), "128 128 128"]) for point in points]
    names = ["float x", "float y", "float z", "uchar red", "uchar green", "uchar blue"]
    header = [
        "ply",
        "format ascii 1.0",
        f"element vertex {count}",
        *(f"property {name}" for name in names),
        "end_header",
    ]
    (root / "points.ply").write_text("\n".join([*header, *lines, ""]))
    transforms = json.loads((root / "transforms.json").read_text())
    (root / "transforms.json").write_text(json.dumps({**transforms, "ply_file_path": "points.ply"}))
    return root


def look_at_origin(angle: float, distance: float = 3.0) -> np.ndarray:
    """Camera to world, [4, 4], OpenGL axes (x right, y up, z back), on a ring around the z axis."""
    back = np.array([math.cos(angle), math.sin(angle), 0.3])
    back /= np.linalg.norm(back)
    right = np.cross([0.0, 0.0, 1.0], back)
    right /= np.linalg.norm(right)
    c2w = np.eye(4)
    c2w[:3, :3] = np.stack([right, np.cross(back, right), back], axis=1)
    c2w[:3, 3] = distance * back
    return c2w


def _ball(c2w: np.ndarray, focal: float) -> np.ndarray:
    """The unit ball, coloured by its surface normal, on black: [H, W, 3] uint8."""
    x = (np.arange(WIDTH) + 0.5 - WIDTH / 2) / focal
    y = -(np.arange(HEIGHT) + 0.5 - HEIGHT / 2) / focal
    rays = np.stack([*np.meshgrid(x, y), np.full((HEIGHT, WIDTH), -1.0)], axis=-1)
    rays = rays / np.linalg.norm(rays, axis=-1, keepdims=True) @ c2w[:3, :3].T
    origin = c2w[:3, 3]
    along = rays @ origin
    inside = along**2 - (origin @ origin - 1.0)
    depth = -along - np.sqrt(np.maximum(inside, 0.0))
    normal = origin + depth[..., None] * rays
    shade = np.where(inside[..., None] > 0, 0.5 + 0.5 * normal, 0.0)
    return (shade * 255).round().astype(np.uint8)
