"""A plot of a scene's cameras and points, from above and from the side."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from splatcli.errors import UsageError
from splatcli.render.camera_paths import mean_up
from splatcli.scene.camera import Camera
from splatcli.scene.scene import Scene

Doubles = NDArray[np.float64]
_Color = tuple[int, int, int]
_Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

_PAPER, _PANEL, _INK, _FAINT = (18, 20, 26), (26, 29, 37), (235, 237, 240), (140, 147, 160)
_TRAIN, _TEST, _UP = (88, 166, 255), (255, 168, 60), (120, 220, 130)
_AXES: tuple[_Color, ...] = ((240, 90, 90), (110, 210, 110), (110, 150, 255))

#: Pixels: the side of a panel, the gap around it, and the height of the text above the panels.
_SIDE, _GAP, _HEAD = 820, 16, 74
#: Supersampling factor.
_FINER = 2
#: Maximum number of points drawn, and of cameras drawn as frustums; more cameras are dots.
_MOST_POINTS, _MOST_FRUSTUMS = 60_000, 1_500
#: Below this number points are drawn larger.
_FEW_POINTS = 20_000
#: In half sides of the map: its margin, and the largest and smallest depth of a frustum.
_MARGIN, _DEEP, _FLAT = 0.07, 0.09, 0.02
#: The map covers the inner share of the points within this many camera radii of the cameras' centre.
_REACH, _INNER = 2.5, 0.95


@dataclass(frozen=True, slots=True)
class _Window:
    """A panel, which maps world points to pixels. across, down: [3] unit, world; middle: [2] along them."""

    title: str
    across: Doubles
    down: Doubles
    middle: Doubles
    half: float

    def pixels(self, points: Doubles) -> Doubles:
        """Return [N, 2]: x y of points [N, 3] on the supersampled panel."""
        flat = points @ np.stack([self.across, self.down], axis=1) - self.middle
        return (flat / self.half + 1.0) * (0.5 * _FINER * _SIDE)


def draw_camera_map(scene: Scene, title: str) -> NDArray[np.uint8]:
    """Return [H, W, 3] uint8: the scene from above and the side; training cameras blue, held-out ones orange."""
    poses = np.stack([np.linalg.inv(camera.viewmat) for camera in scene.cameras])
    points, colours = _some_points(scene)
    windows, up = _windows(poses, points)
    small, large = ImageFont.load_default(size=14), ImageFont.load_default(size=20)
    sheet = Image.new("RGB", (2 * _SIDE + 3 * _GAP, _SIDE + _HEAD + _GAP), _PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((_GAP, 12), title, fill=_INK, font=large)
    _legend(draw, scene, len(points), small)
    for index, window in enumerate(windows):
        panel = _panel(window, scene, poses, points, colours)
        left = _GAP + index * (_SIDE + _GAP)
        sheet.paste(panel.resize((_SIDE, _SIDE), Image.Resampling.LANCZOS), (left, _HEAD))
        draw.text((left + 12, _HEAD + 10), window.title, fill=_INK, font=small)
        _scale_bar(draw, window, left, small)
        _axes(draw, window, up, left, small)
    return np.asarray(sheet)


def _some_points(scene: Scene) -> tuple[Doubles, NDArray[np.uint8]]:
    if scene.points is None:
        return np.zeros((0, 3)), np.zeros((0, 3), np.uint8)
    step = max(1, -(-len(scene.points) // _MOST_POINTS))
    return scene.points.xyz[::step].astype(np.float64), scene.points.rgb[::step]


def _windows(poses: Doubles, points: Doubles) -> tuple[list[_Window], Doubles | None]:
    """Return both panels at one scale, and the common up direction; None, with z instead, if there is none."""
    centers = poses[:, :3, 3]
    try:
        up: Doubles | None = mean_up(poses)
    except UsageError:
        up = None
    vertical = np.array([0.0, 0.0, 1.0]) if up is None else up
    spread = centers - centers.mean(axis=0)
    flat = spread - np.outer(spread @ vertical, vertical)
    # The cameras' widest level direction goes across; any level one where they stand at one point.
    across = np.linalg.svd(flat, full_matrices=False)[2][0] if np.abs(flat).max() > 0 else poses[0, :3, 0]
    across = across - vertical * (across @ vertical)
    length = np.linalg.norm(across)
    across = across / length if length > 1e-9 else np.linalg.svd(vertical[None])[2][1]
    if across @ poses[0, :3, 0] < 0:  # the first camera's right is on the right
        across = -across
    forward = np.cross(vertical, across)
    shown = np.concatenate([centers, _near(points, centers)])
    titles = ("from above", "from the side")
    downs = (-forward, -vertical)
    bounds = [np.stack([shown @ across, shown @ down], axis=1) for down in downs]
    spans = [(flat.min(axis=0), flat.max(axis=0)) for flat in bounds]
    half = max(float((high - low).max()) for low, high in spans) / 2 * (1 + 2 * _MARGIN)
    half = half if half > 0 else 1.0
    windows = [
        _Window(name, across, down, (low + high) / 2, half)
        for name, down, (low, high) in zip(titles, downs, spans, strict=True)
    ]
    return windows, up


def _near(points: Doubles, centers: Doubles) -> Doubles:
    """Return the points that the map has to cover: those around the cameras, without the farthest."""
    middle = np.median(centers, axis=0)
    radius = float(np.linalg.norm(centers - middle, axis=1).max())
    distances = np.linalg.norm(points - middle, axis=1)
    reach = _REACH * radius if radius > 0 else math.inf
    inner = np.sort(distances[distances <= reach])
    if not len(inner):
        return points[:0]
    shown: Doubles = points[distances <= inner[int(_INNER * (len(inner) - 1))]]
    return shown


def _panel(window: _Window, scene: Scene, poses: Doubles, points: Doubles, colours: NDArray[np.uint8]) -> Image.Image:
    side = _FINER * _SIDE
    pixels = np.full((side, side, 3), _PANEL, dtype=np.uint8)
    x, y = np.floor(window.pixels(points)).astype(np.int64).T
    inside = (x >= 0) & (x < side - 2) & (y >= 0) & (y < side - 2)
    # Brightened, since dark points are invisible on the dark panel.
    shades = (64 + 0.75 * colours[inside].astype(np.float64)).astype(np.uint8)
    wide = 3 if len(points) < _FEW_POINTS else 2
    for dx, dy in np.ndindex(wide, wide):
        pixels[y[inside] + dy, x[inside] + dx] = shades
    panel = Image.fromarray(pixels)
    draw = ImageDraw.Draw(panel)
    held = set(scene.test)
    depth = _depth(poses, window)
    order = [*(i for i in range(len(poses)) if i not in held), *sorted(held)]
    for i in order:
        colour = _TEST if i in held else _TRAIN
        if len(poses) > _MOST_FRUSTUMS:
            ((cx, cy),) = window.pixels(poses[i, :3, 3][None])
            draw.rectangle((cx - 1, cy - 1, cx + 1, cy + 1), fill=colour)
        else:
            _draw_frustum(draw, window.pixels(_frustum(scene.cameras[i], poses[i], depth)), colour)
    return panel


def _depth(poses: Doubles, window: _Window) -> float:
    """Return the depth of the frustums in world units: about the distance between neighbours, within limits."""
    centers = poses[:: max(1, len(poses) // 300), :3, 3]
    gaps = np.linalg.norm(centers[:, None] - centers[None], axis=2)
    gaps[np.arange(len(gaps)), np.arange(len(gaps))] = np.inf
    nearest = gaps.min(axis=1)
    usual = float(np.median(nearest[np.isfinite(nearest)])) if np.isfinite(nearest).any() else math.inf
    return min(max(usual, _FLAT * window.half), _DEEP * window.half)


def _frustum(camera: Camera, pose: Doubles, depth: float) -> Doubles:
    """Return [5, 3]: the tip of a camera's frustum and its corners, the upper two first. pose: camera to world."""
    corners = np.array([[0, 0], [camera.width, 0], [camera.width, camera.height], [0, camera.height]], np.float64)
    rays = np.concatenate([(corners - [camera.cx, camera.cy]) / [camera.fx, camera.fy], np.ones((4, 1))], axis=1)
    # The frustum of a wide lens is flat instead of large.
    rays *= depth / max(1.0, float(np.abs(rays[:, :2]).max()))
    base = rays @ pose[:3, :3].T + pose[:3, 3]
    return np.concatenate([pose[None, :3, 3], base])


def _draw_frustum(draw: ImageDraw.ImageDraw, points: Doubles, colour: _Color) -> None:
    """Draw a frustum, whose tip and corners are at the pixels ``points`` [5, 2]."""
    tip, *around = (tuple(point) for point in points)
    draw.line([*around, around[0]], fill=colour, width=_FINER)
    for corner in around:
        draw.line([tip, corner], fill=colour, width=_FINER)
    draw.line(around[:2], fill=_INK, width=_FINER)  # the upper edge
    radius = 1.5 * _FINER
    draw.ellipse((tip[0] - radius, tip[1] - radius, tip[0] + radius, tip[1] + radius), fill=colour)


def _legend(draw: ImageDraw.ImageDraw, scene: Scene, shown: int, font: _Font) -> None:
    total = 0 if scene.points is None else len(scene.points)
    points = f"{total:,} points" + (f" ({shown:,} drawn)" if shown < total else "")
    words = ((_TRAIN, f"{len(scene.train)} training views"), (_TEST, f"{len(scene.test)} held out"), (_FAINT, points))
    x = float(_GAP)
    for colour, text in words:
        draw.rectangle((x, 49, x + 11, 60), fill=colour)
        draw.text((x + 18, 46), text, fill=_INK, font=font)
        x += 18 + font.getlength(text) + 28
    draw.text((x, 46), "white: a picture's upper edge", fill=_FAINT, font=font)


def _scale_bar(draw: ImageDraw.ImageDraw, window: _Window, left: int, font: _Font) -> None:
    """Draw a round length of scene units, an eighth to a quarter of the panel wide."""
    wanted = window.half / 2
    unit = 10.0 ** math.floor(math.log10(wanted))
    length = unit * max(step for step in (1, 2, 5) if step * unit <= wanted)
    width = length / window.half * _SIDE / 2
    y = _HEAD + _SIDE - 22
    right = left + _SIDE - 18
    draw.line((right - width, y, right, y), fill=_INK, width=2)
    for end in (right - width, right):
        draw.line((end, y - 4, end, y + 4), fill=_INK, width=2)
    text = f"{length:g} units" if length != 1 else "1 unit"
    draw.text((right - (width + font.getlength(text)) / 2, y - 22), text, fill=_INK, font=font)


def _axes(draw: ImageDraw.ImageDraw, window: _Window, up: Doubles | None, left: int, font: _Font) -> None:
    """Draw the world's axes and the cameras' up, as far as they lie in the panel's plane."""
    x, y = left + 60.0, _HEAD + _SIDE - 60.0
    arrows = [(axis, colour, name) for axis, colour, name in zip(np.eye(3), _AXES, "xyz", strict=True)]
    if up is not None:
        arrows.append((1.35 * up, _UP, "up"))
    for axis, colour, name in arrows:
        dx, dy = 38.0 * float(axis @ window.across), 38.0 * float(axis @ window.down)
        if math.hypot(dx, dy) < 8.0:
            continue  # perpendicular to the panel
        draw.line((x, y, x + dx, y + dy), fill=colour, width=4 if name == "up" else 2)
        reach = 1.0 + 12.0 / math.hypot(dx, dy)
        draw.text((x + reach * dx, y + reach * dy), name, fill=colour, font=font, anchor="mm")
