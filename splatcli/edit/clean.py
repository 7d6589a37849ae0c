"""Floaters: Gaussians in empty space that the photos contradict, or that nothing is near.

With the photos of the training cameras, Gaussian i costs what its removal changes in their squared error. Its removal
changes an image by d_i = -w_i (c_i - b_i), where w_i is its blend weight, c_i its colour and b_i what is blended behind
it. An image is linear in the opacity of one Gaussian, so that with the error e of the image the change is exactly

    sum 2 e d_i + sum d_i^2

The first sum is a gradient with respect to opacities. The second one is the mean of (sum r d_i)^2 over random signs r
of pixels and channels (Hutchinson's estimate), of SAMPLES in each view. A Gaussian is in empty space where the surface
at its pixels is farther from the camera than the Gaussian. Floaters hide each other and change the error at the pixels
of others, so the worst go first, and the sums are computed again.

The sum over the training views alone would also choose Gaussians that many views need and a few photos contradict, for
instance where these are blurred; held-out views need them, too. So views that lose error by a removal lose little
beside those that save some. A Gaussian that training fitted to one photo is known by the views other than that one.

M. F. Hutchinson, "A stochastic estimator of the trace of the influence matrix for Laplacian smoothing splines",
Communications in Statistics - Simulation and Computation 18(3), 1989.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from scipy.spatial import cKDTree
from torch import Tensor

from splatcli import machine
from splatcli.checkpoint.state import Checkpoint
from splatcli.errors import SceneError
from splatcli.gaussians import Gaussians
from splatcli.progress import track
from splatcli.rasterizer.rendering import Render, ViewRender, render
from splatcli.scene.camera import Camera
from splatcli.scene.images import ImageStore
from splatcli.scene.scene import Scene
from splatcli.train.backgrounds import evaluation_colour, image_background
from splatcli.train.evaluate import FITTED_DB, UNLIKE_DB
from splatcli.train.image_metrics import color_corrected, psnr
from splatcli.train.run_scene import run_scene

LEVELS = ("light", "normal", "strong")
#: Squared error over the pixels and channels of all views, colours of 0 to 1, that the removal of a floater saves at
#: least; a round each, by level.
SAVED = {"normal": (64.0, 16.0, 4.0), "strong": (64.0, 16.0, 4.0, 1.0)}
#: What some views lose by the removal of a floater is below this share of what the others save.
LOST = 0.2
#: All views but the one that saves most lose at most this share of that together.
BEST_LOST = 0.1
#: Of a floater that one view fits: what the other views lose is below this share of what they save, and they save more
#: than this share of the bound without the best of them.
FITTED_LOST, FITTED_REST = 0.05, 0.25
#: They are looked for in rounds of this bound.
FITTED_BOUND = 1.0
#: Least share of a floater's blend weight that lies in views that see through it.
SEEN_THROUGH = 0.2
#: A view sees through a Gaussian where the surface is farther by this share of its depth (the mean of inverse depths,
#: 0 where the view shows no surface).
GAP = 0.1
#: A pixel shows a surface above this alpha.
OPAQUE = 0.5
#: An unseen Gaussian covers fewer pixels of all views together, although it is in the frame of one. Of those below 1
#: pixel, held-out views show some.
UNSEEN = 0.3
#: Samples of random signs in each view. Their mean less its standard deviation is SURE times the mean.
SAMPLES = 4
SURE = 1 - math.sqrt(2 / SAMPLES)
#: Pixels of a view's longer side.
VIEW_SIDE = 640
#: Two Gaussians touch where their distance is below REACH times the sum of their longest standard deviations; among the
#: nearest NEIGHBOURS. Groups of at most GROUP are floaters; of one, for light.
REACH = 2.0
GROUP = 10
NEIGHBOURS = 12
#: Views whose photos tell the background, the frame and the size of the images of a file of splats.
TRIED = 8
#: Divisors of the photos' sides that are tried for the size at which the model of a file was trained.
DIVISORS = (1, 2, 4, 8)
#: Opacities closer to 1 lose too many digits in their logit's gradient.
_LEAST_TRANSPARENCY = 1e-6


@dataclass(frozen=True, eq=False)
class Photos:
    """The photos of training views.

    load: name of a camera -> pixels [H, W, 3] uint8, and masked pixels [H, W] bool or None; None without a photo.
    background: R G B in 0..1, as in training.
    fit_colours: each photo's colours are first fitted to the render, for runs that trained colours of views.
    held_out: number of the views whose photos are not used.
    """

    load: Callable[[str], tuple[NDArray[np.uint8], NDArray[np.bool_] | None] | None]
    background: tuple[float, float, float] = (0.0, 0.0, 0.0)
    antialiased: bool = False
    fit_colours: bool = False
    held_out: int = 0

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint, data: Path | None = None) -> Photos:
        """Return the photos of a checkpoint's training views.

        data: the scene, where it has moved. Raises SceneError where it is gone, has other views or lacks a photo.
        """
        config = checkpoint.config
        scene = run_scene(checkpoint, data, image_background(config))
        index = {camera.name: row for row, camera in enumerate(scene.cameras) if scene.images.has(row)}
        missing = next((one.name for one in checkpoint.training_cameras() if one.name not in index), None)
        if missing is not None:
            raise SceneError(f"the scene has no image {missing}", where=scene.root, remedy="name its scene: --data DIR")

        background = evaluation_colour(config)
        coloured = any(not name.startswith("pose") for name in checkpoint.views)
        return cls(partial(_loaded, scene.images, index), background, config.train.antialiased, coloured)

    @classmethod
    def of_scene(cls, scene: Scene, gaussians: Gaussians, *, antialiased: bool = False) -> tuple[Photos, int]:
        """Return the photos of a scene's training views, for a file of splats in the scene's frame, of all its cameras.

        And one of DIVISORS: of the photos' sides at which the model was trained. Its renders of that size, enlarged,
        are the nearest to photos of up to TRIED views: larger ones have gaps between Gaussians that are thinner than
        the pixels of training were, smaller ones lack detail.
        The background is black or white, whichever is nearer to the photos; each photo's colours are fitted first if
        that brings renders nearer by FITTED_DB. Raises SceneError where the renders do not resemble the photos, or none
        can be read.
        """
        index = {scene.cameras[row].name: row for row in scene.train if scene.images.has(row)}
        some = [scene.cameras[row] for row in [*index.values()][:: max(1, -(-len(index) // TRIED))]]
        best: tuple[float, Photos, int] | None = None
        # Together: at another size than that of training, black may be nearer to photos on white.
        for level, divisor in itertools.product((0, 255), DIVISORS):
            store = scene.images.over((level, level, level))
            one = cls(
                partial(_loaded, store, index),
                (level / 255, level / 255, level / 255),
                antialiased,
                held_out=len(scene.cameras) - len(index),
            )
            plain, fitted = one._resemblance(gaussians, some, divisor)
            if best is None or plain > best[0]:
                best = plain, replace(one, fit_colours=fitted > plain + FITTED_DB), divisor
        if best is None or not best[0] >= UNLIKE_DB:
            raise SceneError(
                "the renders do not resemble the images: the model may be of another scene, or in another frame",
                where=scene.root,
                remedy="name the scene that it was trained on, or bring it there: splat edit MODEL --align-to RUN",
            )
        return best[1], best[2]

    def _resemblance(self, gaussians: Gaussians, cameras: Sequence[Camera], divisor: int) -> tuple[float, float]:
        """Return the mean PSNR of the renders to the photos in dB, and that with the photos' colours fitted.

        divisor: of the renders' sides; they are enlarged to the size that photos are compared at.
        """
        pairs = []
        for camera in cameras:
            found = self.load(camera.name)
            if found is None or (found[1] is not None and found[1].all()):
                continue
            small = _sized(camera)
            photo, masked = _reduced(found, small)
            background = torch.tensor(self.background)
            shown = _sized(camera, divisor)
            image = render(gaussians, shown, background=background, antialiased=self.antialiased).image
            image = _enlarged(image, small).clamp(0, 1)
            pairs.append((psnr(image, photo, masked), psnr(image, color_corrected(photo, image, masked), masked)))
        return tuple(np.mean(pairs, axis=0).tolist()) if pairs else (0.0, 0.0)


def _loaded(
    store: ImageStore, index: Mapping[str, int], name: str
) -> tuple[NDArray[np.uint8], NDArray[np.bool_] | None] | None:
    """Return the photo of that name, and its masked pixels; None where the index has none."""
    if name not in index:
        return None
    image = store.image(index[name])
    return image.pixels, image.masked


def floaters(
    gaussians: Gaussians,
    level: str,
    cameras: Sequence[Camera] = (),
    photos: Photos | None = None,
    *,
    antialiased: bool = False,
) -> Tensor:
    """Return [N] bool, the Gaussians to drop. Deterministic.

    gaussians: finite, on the CPU, float32. level: of LEVELS. cameras: of training, in the Gaussians' coordinates.
    With photos normal and strong drop what these contradict. Without photos they drop small groups that touch no
    others, as light does without cameras. With cameras all levels drop what is in the frame of a view and is not seen;
    what lies beside all frames may be seen by other views. antialiased: the model was trained so.
    """
    left = torch.arange(len(gaussians))
    if photos is not None and level != "light":
        left = left[~_contradicted(gaussians, SAVED[level], cameras, photos)]
    elif not cameras or level != "light":
        left = left[~isolated(_rows(gaussians, left), REACH, 1 if level == "light" else GROUP)]
    if cameras:
        seen = _Views.of(_rows(gaussians, left), cameras, None, "blend weights", antialiased=antialiased)
        left = left[~((seen.weights < UNSEEN) & _in_frame(gaussians.means[left], cameras))]
    return _all_but(left, len(gaussians))


def _contradicted(gaussians: Gaussians, bounds: Sequence[float], cameras: Sequence[Camera], photos: Photos) -> Tensor:
    """Return [N] bool, the Gaussians whose removal brings the images nearer to the photos."""
    left, seen = torch.arange(len(gaussians)), None
    for number, bound in enumerate(bounds, 1):
        if seen is None:
            task = f"floaters, round {number} of {len(bounds)}"
            seen = _Views.of(_rows(gaussians, left), cameras, photos, task)
        floats = seen.contradicted(bound)
        if bound <= FITTED_BOUND:
            floats |= seen.fitted(bound)
        floats &= seen.through >= SEEN_THROUGH * seen.weights
        if floats.any():
            left, seen = left[~floats], None
    return _all_but(left, len(gaussians))


def _in_frame(means: Tensor, cameras: Sequence[Camera]) -> Tensor:
    """Return [N] bool, whether a mean is in front of one of the cameras and inside its image."""
    inside = torch.zeros(len(means), dtype=torch.bool)
    for camera in cameras:
        if camera.model != "pinhole":
            inside |= torch.from_numpy(camera.pixels_of(means.numpy())[2])
            continue
        viewmat = torch.from_numpy(camera.viewmat)
        x, y, z = (means.double() @ viewmat[:3, :3].T + viewmat[:3, 3]).T
        column, row = camera.fx * x + camera.cx * z, camera.fy * y + camera.cy * z
        inside |= (z > 0) & (column >= 0) & (column <= camera.width * z) & (row >= 0) & (row <= camera.height * z)
    return inside


def _rows(gaussians: Gaussians, rows: Tensor) -> Gaussians:
    return gaussians.map(lambda tensor: tensor[rows])


def _all_but(rows: Tensor, count: int) -> Tensor:
    """Return [count] bool, True but for the rows."""
    others = torch.ones(count, dtype=torch.bool)
    others[rows] = False
    return others


def isolated(gaussians: Gaussians, reach: float, group: int) -> Tensor:
    """Return [N] bool, whether a Gaussian is one of at most ``group`` that touch each other and no others."""
    count = len(gaussians)
    means = gaussians.means.double().numpy()
    sizes = gaussians.log_scales.double().exp().amax(dim=1).numpy()
    neighbours = min(NEIGHBOURS, count - 1)
    distances, found = cKDTree(means).query(means, neighbours + 1, workers=machine.cores())
    distances, found = distances.reshape(count, -1)[:, 1:].ravel(), found.reshape(count, -1)[:, 1:].ravel()
    rows = np.repeat(np.arange(count), neighbours)
    touch = distances < reach * (sizes[rows] + sizes[found])
    graph = coo_matrix((np.ones(int(touch.sum())), (rows[touch], found[touch])), shape=(count, count))
    _, labels = connected_components(graph, directed=False)
    members = np.bincount(labels)
    # The largest group is the scene, however small.
    members[members.argmax()] = group + 1
    return torch.from_numpy(members[labels] <= group)


@dataclass(slots=True, eq=False)
class _Views:
    """Sums over the training views for each Gaussian, [N] float64 each.

    weights: sum of its blend weights over the pixels. through: the part of it in views that see through the Gaussian.
    saved: the squared error that its removal saves; negative where it adds error. gained: the same of the views that
    save some. lost: what it adds in the others, at least. most_saved, least_saved, most_lost: the largest and smallest
    of saved and the largest of lost of one view.
    """

    weights: Tensor
    through: Tensor
    saved: Tensor
    gained: Tensor
    lost: Tensor
    most_saved: Tensor
    least_saved: Tensor
    most_lost: Tensor

    def contradicted(self, bound: float) -> Tensor:
        """Return [N] bool: the removal saves more than the bound, and views in which it adds error add little."""
        others = self.saved - self.most_saved
        return (self.saved > bound) & (self.lost < LOST * self.gained) & (others >= -BEST_LOST * self.most_saved)

    def fitted(self, bound: float) -> Tensor:
        """Return [N] bool: without the view that loses most the removal saves more than the bound, in two at least."""
        saved, lost = self.saved - self.least_saved, self.lost - self.most_lost
        return (saved > bound) & (lost < FITTED_LOST * self.gained) & (saved - self.most_saved > FITTED_REST * bound)

    @classmethod
    def of(
        cls,
        gaussians: Gaussians,
        cameras: Sequence[Camera],
        photos: Photos | None,
        task: str,
        *,
        antialiased: bool = False,
    ) -> _Views:
        """Return the sums over the views of ``cameras``.

        photos: None sums the weights alone, ``antialiased`` or not; else the photos say which.
        """
        total = cls(*(torch.zeros(len(gaussians), dtype=torch.float64) for _ in range(8)))
        signs = torch.Generator().manual_seed(0)
        opacities = gaussians.logit_opacities.clone().requires_grad_()
        moving = replace(gaussians, logit_opacities=opacities)
        for camera in track(cameras, task):
            small = _sized(camera)
            if photos is None:
                area = camera.width * camera.height / (small.width * small.height)
                ones = torch.ones(small.height, small.width, 1)
                total.weights += area * _weighted(gaussians, small, ones, antialiased)[:, 0]
                continue
            found = photos.load(camera.name)
            if found is None:
                continue
            background = torch.tensor(photos.background)
            shown = render(moving, small, background=background, antialiased=photos.antialiased)
            total._add_surfaces(gaussians, small, shown, photos.antialiased)
            error, counted = _error(shown.image.detach(), *_reduced(found, small), photos.fit_colours)
            (first,) = torch.autograd.grad(shown.image, opacities, 2 * error, retain_graph=True)
            squares = torch.zeros_like(total.saved)
            for _ in range(SAMPLES):
                noise = torch.randint(0, 2, error.shape, generator=signs).float() * 2 - 1
                (sample,) = torch.autograd.grad(shown.image, opacities, noise * counted, retain_graph=True)
                squares += sample.double() ** 2 / SAMPLES
            # The gradient by a factor of the opacity; the removal is that factor from 1 to 0.
            scale = (1 - gaussians.logit_opacities.double().sigmoid()).clamp(min=_LEAST_TRANSPARENCY)
            total._add_saved(first.double() / scale, squares / scale**2)
        return total

    def _add_saved(self, first: Tensor, second: Tensor) -> None:
        """Add one view. first, second: [N], minus the first of the two sums of the module, and the second one."""
        saved = first - second
        lost = (SURE * second - first).clamp(min=0)
        self.saved += saved
        self.gained += saved.clamp(min=0)
        self.lost += lost
        self.most_saved = torch.maximum(self.most_saved, saved)
        self.least_saved = torch.minimum(self.least_saved, saved)
        self.most_lost = torch.maximum(self.most_lost, lost)

    def _add_surfaces(self, gaussians: Gaussians, camera: Camera, shown: Render, antialiased: bool) -> None:
        alpha = shown.alpha.detach()
        nearness = torch.where(alpha > OPAQUE, alpha / shown.depth.detach(), 0.0)
        maps = torch.stack([torch.ones_like(alpha), nearness], dim=2)
        weights, nearnesses = _weighted(gaussians, camera, maps, antialiased).T
        viewmat = torch.from_numpy(camera.viewmat)
        own = gaussians.means.double() @ viewmat[2, :3] + viewmat[2, 3]
        self.weights += weights
        self.through += weights * (own * nearnesses < (1 - GAP) * weights)


def _weighted(gaussians: Gaussians, camera: Camera, maps: Tensor, antialiased: bool = False) -> Tensor:
    """Return [N, D] float64: the sum over the pixels of each Gaussian's blend weight times maps [H, W, D]."""
    colors = torch.zeros(len(gaussians), maps.shape[2], requires_grad=True)
    image = ViewRender(gaussians, camera, colors=colors, antialiased=antialiased).blend().image
    (found,) = torch.autograd.grad(image, colors, maps)
    return found.double()


def _sized(camera: Camera, divisor: int = 1) -> Camera:
    """Return the view with a longer side of at most VIEW_SIDE pixels, its sides divided at least by ``divisor``."""
    return camera.scaled(min(1 / divisor, VIEW_SIDE / max(camera.width, camera.height)))


def _enlarged(image: Tensor, camera: Camera) -> Tensor:
    """Return a render [H, W, 3] at the camera's size."""
    if image.shape[:2] == (camera.height, camera.width):
        return image
    planes = image.permute(2, 0, 1)[None]
    size = (camera.height, camera.width)
    return torch.nn.functional.interpolate(planes, size, mode="bicubic", align_corners=False)[0].permute(1, 2, 0)


def _reduced(photo: tuple[NDArray[np.uint8], NDArray[np.bool_] | None], camera: Camera) -> tuple[Tensor, Tensor | None]:
    """Return the photo [H, W, 3] in 0..1 and its masked pixels [H, W] at the camera's size."""
    pixels, masked = photo
    size = (camera.height, camera.width)

    def area_mean(values: NDArray[np.float32]) -> Tensor:
        tensor = torch.from_numpy(values).permute(2, 0, 1)
        return torch.nn.functional.adaptive_avg_pool2d(tensor, size).permute(1, 2, 0)

    colours = area_mean(pixels.astype(np.float32)) / 255
    return colours, None if masked is None else area_mean(masked[..., None].astype(np.float32))[..., 0] > 0


def _error(image: Tensor, photo: Tensor, masked: Tensor | None, fit_colours: bool) -> tuple[Tensor, Tensor]:
    """Return the image minus the photo, [H, W, 3], 0 where masked, and [H, W, 1] which pixels count."""
    counted = torch.ones(*image.shape[:2], 1) if masked is None else (~masked).float()[..., None]
    if fit_colours and bool(counted.any()):
        photo = color_corrected(photo, image.clamp(0, 1), masked)
    return (image - photo) * counted, counted
