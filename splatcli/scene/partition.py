"""Blocks: a scene cut into upright columns that are trained one by one, so that none needs the memory of all.

The ground is the plane in which the sparse points spread most, whichever way the cameras hold their heads: those of a
drone that looks straight down have no upper edge that points up. Cuts lie so that all columns hold the same number of
points, the first ones across the wider axis, the others within each strip; the outermost columns have no end.

A block is trained by the views that show enough of its column, on the points of the column and its margin and, thinned,
on what else these views see, so that the column's own Gaussians need not stand in for it (compare VastGaussian, Lin et
al., 2024). What lies outside the column is left out when blocks are merged.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splatcli.errors import SceneError, UsageError
from splatcli.scene.points import PointCloud
from splatcli.scene.scene import Scene
from splatcli.sizes import listed

Doubles = NDArray[np.float64]
Mask = NDArray[np.bool_]

#: How far a block reaches into its neighbours while it is trained, in parts of the mean width of a column.
MARGIN = 0.15

#: A view belongs to a block that this part of the points it sees lies in.
LEAST_SHARE = 0.15

#: Points that decide which views show a block; more add nothing.
_SAMPLE = 20_000

#: A block seen by fewer views than this cannot be trained.
LEAST_VIEWS = 3

#: Points around a block that it is trained on, for each one inside; and that are tried.
AROUND, _CANDIDATES = 1.0, 4


#: The arrays of a Grid, and by how much those of two machines may differ, relative to the scene's size.
_ARRAYS, _ROUNDING = ("axes", "strips", "columns"), 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Columns of a scene, numbered 0 to ``len(grid) - 1`` strip by strip.

    axes: [2, 3] orthogonal unit vectors along the ground. strips: [A - 1] cuts along the first axis, ascending.
    columns: [A, B - 1] cuts of each strip along the second.
    """

    axes: Doubles
    strips: Doubles
    columns: Doubles

    def __len__(self) -> int:
        strips, cuts = self.columns.shape
        return int(strips * (cuts + 1))

    def block_of(self, points: NDArray[np.floating]) -> NDArray[np.int64]:
        """Return [N], the block that each of ``points`` [N, 3] lies in; each lies in one, also if it is not finite."""
        first, second = self._across(points)
        strip = np.searchsorted(self.strips, first, side="right")
        within = np.zeros(len(points), np.int64)
        for cuts in self.columns.T:
            within += second >= cuts[strip]
        return np.asarray(strip * (self.columns.shape[1] + 1) + within, np.int64)

    def near(self, points: NDArray[np.floating], block: int, margin: tuple[float, float]) -> Mask:
        """Return [N], whether each point lies in ``block`` or no farther from it than ``margin`` along each axis."""
        first, second = self._across(points)
        strip, column = divmod(block, self.columns.shape[1] + 1)
        return _between(first, self.strips, strip, margin[0]) & _between(second, self.columns[strip], column, margin[1])

    def as_dict(self) -> dict[str, object]:
        """Return plain values, for JSON."""
        return {name: getattr(self, name).tolist() for name in _ARRAYS}

    def _across(self, points: NDArray[np.floating]) -> tuple[Doubles, Doubles]:
        ground = points.astype(np.float64) @ self.axes.T
        return ground[:, 0], ground[:, 1]


def same_cut(one: Mapping[str, Any], other: Mapping[str, Any], extent: float) -> bool:
    """Return whether two records of Grid.as_dict(), perhaps of two machines, have the same cuts.

    extent: of the scene, world units.
    """
    for name in _ARRAYS:
        try:
            first, second = (np.asarray(record.get(name), np.float64) for record in (one, other))
        except (TypeError, ValueError):  # not of as_dict()
            return False
        unit = 1.0 if name == "axes" else extent
        if first.shape != second.shape or not np.allclose(first, second, rtol=0.0, atol=_ROUNDING * unit):
            return False
    return True


def make_grid(scene: Scene, shape: tuple[int, int]) -> Grid:
    """Cut ``scene`` into columns of equally many points. shape: (A, B), strips and columns in each.

    Raises SceneError where there are too few points.
    """
    if scene.points is None or len(scene.points.xyz) < 100 * shape[0] * shape[1]:
        count = 0 if scene.points is None else len(scene.points.xyz)
        raise SceneError(
            f"{count} points are too few to cut the scene into {shape[0]} x {shape[1]} blocks",
            where=scene.root,
            remedy=f"splat sfm {shlex.quote(str(scene.root))} --cameras {shlex.quote(str(scene.root))} -o DIR "
            "triangulates points, and --points DIR takes them"
            if count == 0
            else "blocks are found by the sparse points of a reconstruction; take fewer blocks, or none",
        )
    xyz = scene.points.xyz.astype(np.float64)
    axes = _ground(xyz)
    ground = xyz @ axes.T
    strips = _cuts(ground[:, 0], shape[0])
    strip = np.searchsorted(strips, ground[:, 0], side="right")
    columns = np.stack([_cuts(ground[strip == k, 1], shape[1]) for k in range(shape[0])])
    return Grid(axes, strips, columns)


@dataclass(frozen=True, slots=True)
class BlockContents:
    """The training data of a block: numbers of training views, and parts of the scene's points, in it and around it."""

    views: int
    inside: float
    around: float

    @property
    def share(self) -> float:
        """The part of the scene's points that the block holds."""
        return self.inside + self.around


def block_contents(scene: Scene, shape: tuple[int, int]) -> list[BlockContents]:
    """Return what each block of ``scene`` will hold, by a sample of the points where there are many.

    Raises SceneError where there are too few points.
    """
    grid = make_grid(scene, shape)
    assert scene.points is not None
    xyz = scene.points.xyz
    sample = xyz[_sample(xyz)]
    own, margin = grid.block_of(sample), _margin(grid, xyz)
    views = [scene.cameras[i].pixels_of(sample)[2] for i in scene.train]
    found = []
    for block in range(len(grid)):
        inside = grid.near(sample, block, margin)
        shown = [view for view in views if _shows(view, own, inside, block, len(grid))]
        seen = np.logical_or.reduce(shown) if shown else np.zeros_like(inside)
        around = min(int((seen & ~inside).sum()), int(AROUND * inside.sum()))
        found.append(BlockContents(len(shown), float(inside.mean()), around / len(sample)))
    return found


def check_blocks(scene: Scene, shape: tuple[int, int], held: list[BlockContents], most: float) -> None:
    """Raise SceneError for blocks that cannot be trained, UsageError where one holds more than ``most`` of the scene.

    held: what block_contents() gives.
    """
    dark = [block for block, one in enumerate(held) if one.views < LEAST_VIEWS]
    if dark:
        raise SceneError(
            f"of {shape[0]}x{shape[1]} blocks {listed(dark, 8)} {'is' if len(dark) == 1 else 'are'} shown by fewer "
            f"than {LEAST_VIEWS} training views",
            where=scene.root,
            remedy="take fewer blocks",
        )
    largest = max(range(len(held)), key=lambda block: held[block].share)
    one = held[largest]
    if one.share > most:
        raise UsageError(
            f"blocks save next to nothing here: block {largest} holds {one.share:.0%} of the scene's points, and "
            f"{one.views} of {len(scene.train)} training views show it; all {len(held)} together take the time of "
            f"about {sum(other.views for other in held) / len(scene.train):.1f} runs over the whole",
            where="--blocks",
            remedy="leave out --blocks, or take more of them where the views see parts of the scene only; "
            "--set data.block_share=1 trains them all the same",
        )


def restrict_to_block(scene: Scene, shape: tuple[int, int], block: int) -> Scene:
    """Return ``scene`` with the views and points of one block; its cameras, images and size stay those of the whole.

    Raises UsageError where there is no such block, SceneError where too few views show it.
    """
    grid = make_grid(scene, shape)
    if block >= len(grid):
        raise UsageError(
            f"there is no block {block} of {shape[0]}x{shape[1]}", where="--block", remedy=f"0 to {len(grid) - 1}"
        )
    assert scene.points is not None
    xyz = scene.points.xyz
    inside = grid.near(xyz, block, _margin(grid, xyz))
    sample = _sample(xyz)
    own = grid.block_of(xyz[sample])
    views = {i: scene.cameras[i].pixels_of(xyz[sample])[2] for i in sorted([*scene.train, *scene.test])}
    train = [i for i in scene.train if _shows(views[i], own, inside[sample], block, len(grid))]
    if len(train) < LEAST_VIEWS:
        raise SceneError(
            f"block {block} is shown by {len(train)} training views",
            where=scene.root,
            remedy="take fewer blocks",
        )
    kept = inside | _surroundings(scene, train, inside)
    test = [i for i in scene.test if _shows(views[i], own, inside[sample], block, len(grid))]
    note = (
        f"block {block} of {shape[0]}x{shape[1]}: {len(train)} of {len(scene.train)} training views, "
        f"{int(inside.sum()):,} points and {int(kept.sum() - inside.sum()):,} around it of {len(xyz):,}"
    )
    return replace(
        scene,
        train=train,
        test=test,
        points=PointCloud(xyz[kept], scene.points.rgb[kept]),
        seen=None if scene.seen is None else _renumbered(scene.seen, kept),
        given_extent=scene.extent,
        notes=[*scene.notes, note],
    )


def _ground(xyz: Doubles) -> Doubles:
    """Return [2, 3], the axes along which points spread most, the farthest tenth of them aside."""
    offsets = xyz - np.median(xyz, axis=0)
    distances = np.linalg.norm(offsets, axis=1)
    near = offsets[distances <= np.quantile(distances, 0.9)]
    axes = np.linalg.eigh(near.T @ near)[1][:, :0:-1].T
    signs = np.take_along_axis(axes, np.abs(axes).argmax(axis=1)[:, None], axis=1)
    return np.asarray(np.where(signs < 0, -axes, axes), np.float64)  # the same sign wherever it is worked out


def _cuts(values: Doubles, parts: int) -> Doubles:
    return np.quantile(values, np.arange(1, parts) / parts) if parts > 1 else np.zeros(0)


def _between(values: Doubles, cuts: Doubles, place: int, margin: float) -> Mask:
    low = cuts[place - 1] - margin if place > 0 else -np.inf
    high = cuts[place] + margin if place < len(cuts) else np.inf
    inside: Mask = (values >= low) & (values < high)
    return inside


def _margin(grid: Grid, xyz: NDArray[np.floating]) -> tuple[float, float]:
    ground = xyz.astype(np.float64) @ grid.axes.T
    low, high = np.quantile(ground, (0.05, 0.95), axis=0)
    widths = (high - low) / (grid.columns.shape[0], grid.columns.shape[1] + 1)
    return float(MARGIN * widths[0]), float(MARGIN * widths[1])


def _sample(xyz: NDArray[np.floating]) -> NDArray[np.int64]:
    """Return evenly spread rows that stand for all."""
    return np.arange(0, len(xyz), max(1, len(xyz) // _SAMPLE))


def _shows(view: Mask, own: NDArray[np.int64], inside: Mask, block: int, blocks: int) -> bool:
    """Return whether a view belongs to ``block``: enough of what it sees lies there, or more than in any other.

    view: [N] bool, the points that it sees. own: [N], the block of each point. inside: [N] bool, those of ``block``.
    """
    total = int(view.sum())
    if total == 0:
        return False
    if int((view & inside).sum()) >= LEAST_SHARE * total:
        return True
    return int(np.bincount(own[view], minlength=blocks).argmax()) == block


def _surroundings(scene: Scene, train: list[int], inside: Mask) -> Mask:
    """Return the points outside that the views see, at most AROUND for each one inside."""
    assert scene.points is not None
    most = int(AROUND * inside.sum())
    rows = np.flatnonzero(_thinned(~inside, _CANDIDATES * most))
    xyz, seen = scene.points.xyz[rows], np.zeros(len(rows), bool)
    for i in train:
        seen |= scene.cameras[i].pixels_of(xyz)[2]
    around = np.zeros_like(inside)
    around[rows[seen]] = True
    return _thinned(around, most)


def _thinned(mask: Mask, most: int) -> Mask:
    """Return ``mask`` with at most ``most`` of its rows, evenly spread."""
    rows = np.flatnonzero(mask)
    if len(rows) <= most:
        return mask
    chosen = np.zeros_like(mask)
    chosen[rows[np.linspace(0, len(rows) - 1, most).astype(np.int64)]] = True
    return chosen


def _renumbered(seen: list[NDArray[np.int64]], kept: Mask) -> list[NDArray[np.int64]]:
    place = np.where(kept, np.cumsum(kept) - 1, -1)
    return [place[rows][place[rows] >= 0] for rows in seen]
