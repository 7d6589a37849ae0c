"""Inspect a scene: findings on its images, masks, cameras and points, those that look wrong with a remedy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from splatcli.errors import SceneError
from splatcli.scene import colmap
from splatcli.scene.camera import Camera
from splatcli.scene.decode import decode
from splatcli.scene.images import OPAQUE, ImageSource, ImageStore
from splatcli.scene.masks import read_mask
from splatcli.scene.scene import Scene
from splatcli.sizes import counted, evenly, listed

#: Points and cameras that are inspected; enough for shares to be good to some percent.
_POINTS, _CAMERAS = 2_000, 200
#: A camera that shows less than this of all points sees nothing of the scene; cameras of which more than _BLIND do so
#: have their axes mixed up, more often than not.
_SHOWN, _BLIND = 0.002, 0.5
#: Times the median distance of the cameras from their middle: a camera farther away is registered wrongly.
_FAR = 10.0
#: Parts of the scene's extent, and of a radian: two cameras nearer than that are one.
_SAME = 1e-6
#: A held-out view from which points appear nearer than this part of the image's longer side to where a training view of
#: the same lens shows them, in the median, is that view: 0.04 pixels of 946 between a photo and its smaller, re-encoded
#: copy after structure from motion, 4.5 of 1280 between the nearest frames of phone videos. As many of the nearest
#: training views are compared.
_SAME_IMAGE, _NEAREST = 1e-3, 4
#: Times the errors that a model states: a larger median reprojection error is no inaccuracy.
_TIMES_STATED = 3.0
#: Names that a sentence gives.
_MAX_LISTED = 3
#: Views, and sparse points, below which a scene is likely to come out wrong.
FEW_VIEWS, FEW_POINTS = 6, 100
_MORE_VIEWS = "take more images around the subject, each overlapping the next by two thirds"
_SHARPER = "take sharper images with more texture and overlap"
_MORE_POINTS = f"{_SHARPER}, and run structure from motion again"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked for.

    state: "found", "none" (not there, and not needed), or "warning" (likely to do harm).
    subject: what was looked for, one word or two. remedy: what to do about it, where something can be done.
    """

    state: Literal["found", "none", "warning"]
    subject: str
    text: str
    remedy: str | None = None

    def as_dict(self) -> dict[str, str | None]:
        return {"state": self.state, "subject": self.subject, "text": self.text, "help": self.remedy}


def inspect_scene(scene: Scene) -> list[Finding]:
    """Return all findings of a scene that could be read: what is there first, then what looks wrong."""
    found = [
        *_cameras(scene),
        *_images(scene),
        *_beside(scene),
        *_points(scene),
        *compare_observations(scene),
        *_split(scene),
    ]
    return sorted(found, key=lambda finding: finding.state == "warning")


def few_notes(views: int, points: int, *, cameras_held: bool = False) -> list[str]:
    """Return notes on a scene of very few views or sparse points; no points at all are no problem of this kind.

    cameras_held: whether the cameras were known before the points, which then say nothing of the poses.
    """
    found = (
        [f"only {counted(views, 'view')}, from which surfaces are guesses: {_MORE_VIEWS}"] if views < FEW_VIEWS else []
    )
    if 0 < points < FEW_POINTS and cameras_held:
        found.append(f"only {points} sparse points, so the start is weak: {_SHARPER}")
    elif 0 < points < FEW_POINTS:
        found.append(f"only {points} sparse points, so poses and the start are weak: {_MORE_POINTS}")
    return found


def scene_notes(scene: Scene) -> list[str]:
    """Return notes on a scene of no points, few_notes(), and a note on held-out views that repeat training views."""
    none = ["the scene has no points: training makes its own"] if scene.points is None else []
    count = 0 if scene.points is None else len(scene.points)
    few = few_notes(len(scene.cameras), count, cameras_held=scene.cameras_held)
    return [*none, *few, *(f"{text}: {remedy}" for text, remedy in _repeated_notes(scene))]


def _cameras(scene: Scene) -> Iterator[Finding]:
    lenses = Counter("pinhole" if source.lens is None else source.lens.model_name for source in scene.images.sources)
    models = ", ".join(f"{count} {name}" for name, count in lenses.most_common())
    where = scene.file.relative_to(scene.root) if scene.file.is_relative_to(scene.root) else scene.file
    yield Finding("found", "cameras", f"{where}: {counted(len(scene.cameras), 'view')} ({models})")
    centers = np.stack([camera.center for camera in scene.cameras])
    distances = np.linalg.norm(centers - np.median(centers, axis=0), axis=1)
    far = [scene.cameras[i].name for i in np.flatnonzero(distances > _FAR * max(float(np.median(distances)), 1e-12))]
    if far and len(far) < len(centers) / 2:
        yield Finding(
            "warning",
            "cameras",
            f"{len(far)} stand more than {_FAR:g} times as far out as most: {listed(far, _MAX_LISTED)}",
            "they are likely misplaced: take them out, or run structure from motion again with more overlap",
        )
    turns = np.stack([camera.viewmat[:3, :3].ravel() for camera in scene.cameras])
    poses = np.round(np.concatenate([centers / max(scene.extent, 1e-300), turns], axis=1) / _SAME)
    repeated = len(poses) - len(np.unique(poses, axis=0))
    if repeated:
        yield Finding(
            "warning",
            "cameras",
            f"{repeated} stand and look as another one does",
            "copies teach nothing, and held-out copies of training views measure nothing: leave them out",
        )


def _images(scene: Scene) -> Iterator[Finding]:
    sources = scene.images.sources
    photos = _photos(scene)
    stored = Counter(source.stored for source in photos)
    trained = Counter((source.camera.width, source.camera.height) for source in sources)
    folders = {_top(source) for source in sources}
    where = f"{folders.pop()}: " if len(folders) == 1 else ""
    yield Finding("found", "photos", f"{where}{len(photos)}, stored as {_sizes(stored)}, trained at {_sizes(trained)}")
    gone = [source.view for source in photos if not source.path.is_file()]
    if gone:
        yield Finding("warning", "photos", f"{len(gone)} have gone: {listed(gone, _MAX_LISTED)}", "put them back")


def _photos(scene: Scene) -> list[ImageSource]:
    """Return one source of each photo: a panorama has several, its faces."""
    return list({source.view: source for source in scene.images.sources}.values())


def _beside(scene: Scene) -> Iterator[Finding]:
    """Yield the findings on masks and depth maps."""
    photos = _photos(scene)
    count = sum(source.mask is not None for source in photos)
    if count:
        yield Finding("found", "masks", f"{count} of {len(photos)} images have one")
    elif scene.images.alpha_is_mask:
        yield Finding("found", "masks", "the transparency of the images")
    else:
        looked = "mask_path in the file" if scene.kind == "nerfstudio" else "a.png or a.jpg.png for a.jpg"
        yield Finding("none", "masks", f"looked for masks/ beside the photos ({looked})")
    depths = sum(source.depth is not None for source in photos)
    if depths:
        yield Finding("found", "depth maps", f"{depths} of {len(photos)} images have one")
    elif not any("depth maps" in note for note in scene.notes):
        yield Finding("none", "depth maps", "none named; --depths DIR takes a folder of them")


def _points(scene: Scene) -> Iterator[Finding]:
    if scene.points is None or not len(scene.points):
        yield Finding("none", "points", "no sparse points: splat train makes some (docs/inputs.md)")
        return
    count = len(scene.points)
    yield Finding("found", "points", f"{count:,} sparse points")
    shown = shown_shares(scene.points.xyz, scene.cameras)
    blind = float((shown < _SHOWN).mean())
    if blind > _BLIND:
        yield Finding(
            "warning",
            "points",
            f"{100 * blind:.0f} % of the cameras show none of the points: the two do not belong together, or the poses "
            "have other axes than the layout says",
            "transforms.json has poses camera to world with OpenGL axes, COLMAP world to camera with OpenCV axes; "
            "splat info --plot shows where the cameras look",
        )
    if count < len(scene.cameras):
        yield Finding(
            "warning",
            "points",
            f"fewer than one a view: {count} for {len(scene.cameras)} views",
            "run structure from motion again, or start from random points: --init random",
        )


def compare_observations(scene: Scene) -> Iterator[Finding]:
    """Yield findings on cameras and poses, by the observations of points; nothing without observations."""
    found = colmap.read_reprojections(scene.file) if scene.kind == colmap.READER.name else scene.reprojections
    if found is None:
        return
    observed, projected = found.observed, found.projected
    error, stated = _median_distance(projected, observed), float(np.median(found.errors)) if len(found.errors) else 0.0
    text = f"sparse points are off by {error:.3g} pixels in the median ({found.points:,} of them)"
    if error == np.inf:
        text = f"sparse points lie behind the cameras that see them ({found.points:,} inspected)"
    if error <= max(found.off, _TIMES_STATED * stated):
        yield Finding("found", "points", text)
        return
    if _median_distance(projected, _scale(observed, projected) * observed) <= found.off:
        return  # of the images at another size, which the cameras were scaled to
    offsets, seen = projected - found.centers, observed - found.centers
    factor = _scale(offsets, seen)
    fits = _median_distance(factor * offsets, seen) <= max(found.off, error / 4)
    yield Finding(
        "warning",
        "points",
        f"{text}, where the model says {stated:.3g}: cameras or poses were changed after they were solved"
        if stated
        else f"{text}: cameras and poses do not belong to the observations",
        (f"focal lengths {factor:.3g} times as long fit; " if fits else "")
        + "copy the whole model again from where it was made, or run structure from motion again",
    )


def _median_distance(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Return the median distance between two lists of pixels [O, 2]; NaN is as far as can be."""
    return float(np.median(np.nan_to_num(np.linalg.norm(one - other, axis=1), nan=np.inf)))


def _scale(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Return the median factor from the lengths of ``one`` [O, 2] to those of ``other``."""
    factors = np.linalg.norm(other, axis=1) / np.maximum(np.linalg.norm(one, axis=1), 1e-9)
    known = factors[np.isfinite(factors)]
    return float(np.median(known)) if len(known) else 1.0


def _split(scene: Scene) -> Iterator[Finding]:
    state: Literal["found", "none"] = "found" if scene.test else "none"
    yield Finding(
        state, "held out", f"{counted(len(scene.test), 'view')} to measure with, {len(scene.train)} to train on"
    )
    for text, remedy in _repeated_notes(scene):
        yield Finding("warning", "held out", text, remedy)


def _repeated_notes(scene: Scene) -> list[tuple[str, str]]:
    """Return what is wrong with held-out views that repeat training views, and the remedy; nothing where none does."""
    repeated = repeated_views(scene)
    if not repeated:
        return []
    pairs = [f"{scene.cameras[i].name} = {scene.cameras[j].name}" for i, j in repeated.items()]
    many = "1 held-out view stands and looks" if len(pairs) == 1 else f"{len(pairs)} held-out views stand and look"
    return [
        (
            f"{many} as a training view does ({listed(pairs, _MAX_LISTED)}), so that the figures are too good",
            "remove copies of images, and frames of a camera at rest",
        )
    ]


def repeated_views(scene: Scene) -> dict[int, int]:
    """Return {held-out view: training view} of those that show the same: copies in another file, cameras at rest.

    Poses are compared by what they show: the median shift of the sparse points between both views, seen through the
    lens of the held-out one. Without points nothing is compared.
    """
    if scene.points is None or not len(scene.points) or not scene.train:
        return {}
    some = scene.points.xyz[:: -(-len(scene.points) // _POINTS)]
    train = [scene.cameras[j] for j in scene.train]
    centers = np.stack([camera.center for camera in train]) / max(scene.extent, 1e-300)
    axes = np.stack([camera.viewmat[:3, :3].ravel() for camera in train])
    repeated = {}
    for i in scene.test:
        camera = scene.cameras[i]
        x, y, _ = camera.project(some)
        inside = (x >= 0) & (x < camera.width) & (y >= 0) & (y < camera.height)
        if not inside.any():
            continue
        away = np.linalg.norm(centers - camera.center / max(scene.extent, 1e-300), axis=1)
        away += np.linalg.norm(axes - camera.viewmat[:3, :3].ravel(), axis=1)
        for j in np.argsort(away, kind="stable")[:_NEAREST]:
            u, v, _ = replace(camera, viewmat=train[j].viewmat).project(some[inside])
            shift = np.nan_to_num(np.hypot(u - x[inside], v - y[inside]), nan=np.inf)
            if float(np.median(shift)) < _SAME_IMAGE * max(camera.width, camera.height):
                repeated[i] = scene.train[j]
                break
    return repeated


def shown_shares(xyz: NDArray[np.float32], cameras: list[Camera]) -> NDArray[np.float64]:
    """Return [C], the part of the points [P, 3] in the image of each of some cameras, which are spread over all."""
    some = xyz[:: -(-len(xyz) // _POINTS)]
    return np.array([camera.pixels_of(some)[2].mean() for camera in cameras[:: -(-len(cameras) // _CAMERAS)]])


def _top(source: ImageSource) -> str:
    """Return the folder that image names are relative to."""
    folders = PurePosixPath(source.view).parent.parts
    inside = source.path.parent.parts[-len(folders) :] == folders if folders else False
    return source.path.parents[len(folders) if inside else 0].name + "/"


def _sizes(sizes: Counter[tuple[int, int]]) -> str:
    named = [f"{width}x{height}" for (width, height), _ in sizes.most_common(_MAX_LISTED)]
    return ", ".join(named) + (f" and {len(sizes) - _MAX_LISTED} other sizes" if len(sizes) > _MAX_LISTED else "")


#: Masks that are inspected; a mean over so many is good to some percent, and reading them takes no second.
_LOOKS = 16
#: More masked than this of all images: the masks are inverted, more often than not.
_MOST = 0.95


def masked_share(store: ImageStore) -> tuple[float, int] | None:
    """Return (the mean masked part of the images inspected, their number); None where nothing can be inspected.

    Masks that cannot be read are passed over: loading them reports the error.
    """
    masked = [i for i, source in enumerate(store.sources) if store.alpha_is_mask or source.mask is not None]
    shares = []
    for i in evenly(masked, _LOOKS):
        try:
            shares.append(_share(store, i))
        except SceneError:
            continue
    return (sum(shares) / len(shares), len(shares)) if shares else None


def mask_notes(store: ImageStore) -> list[str]:
    """Return a note on masks for the user; none where there are no masks."""
    found = masked_share(store)
    if found is None:
        return []
    share, looked = found
    text = f"masks hide {_percent(share)} of the images on average"
    if looked < len(store):
        text += f" ({looked} of {len(store)} inspected)"
    if share == 0.0:
        return [f"{text}: black or transparent hides, white counts; these masks do nothing"]
    if share > _MOST:
        return [f"{text}, which leaves little to learn from: black or transparent hides; are they inverted?"]
    return [text]


def _share(store: ImageStore, i: int) -> float:
    source = store.sources[i]
    if source.mask is not None:
        return float(read_mask(source.mask, source.mask_orientation).mean())
    alpha = decode(source.path, None, source.orientation, source.stored).alpha
    return 0.0 if alpha is None else float((alpha < OPAQUE).mean())


def _percent(share: float) -> str:
    """Return a share in per cent; 0 % and 100 % only where it is nothing or all."""
    percent = 100.0 * share
    if 0.0 < percent < 1.0 or 99.0 < percent < 100.0:
        return f"{percent:.2g} %" if percent < 1.0 else "more than 99 %"
    return f"{percent:.0f} %"
