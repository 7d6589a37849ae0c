"""The depth of the surface that a view shows: that at which the transmittance falls through one half.

The rasterizer blends the mean depth, which lies between two surfaces at every silhouette and behind everything that is
seen through. A second render blends three moments of the depth in place of colours. Two layers are fitted to them, and
the nearer one counts if its weight reaches one half, else the farther one. docs/mesh.md has the accuracy.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from splatcli.gaussians import SH_C0, Gaussians
from splatcli.rasterizer import render
from splatcli.scene.camera import Camera

#: Alpha that a surface reaches.
COVERED = 0.5
#: The standard deviation in a pixel, as a share of the logarithmic range of the view, above which two layers are
#: fitted: below, float32 does not hold the third moment.
_SPREAD = 0.01
#: The weight of the nearer layer, between which neither layer is the surface with certainty.
_UNCERTAIN = (0.35, 0.65)
#: Shares of the Gaussians in the image between which their depths are distinguished, and how many are asked.
_RANGE, _ASKED = (0.005, 0.995), 1 << 20


def surface_depth(gaussians: Gaussians, camera: Camera, *, antialiased: bool = False) -> Tensor:
    """Return [H, W]: camera z of the surface, scene units; infinite where there is none, NaN where it is uncertain."""
    z = camera_z(gaussians.means, camera)
    near, far = _z_range(gaussians.means, z, camera)
    length = math.log(far / near)
    x = (z.clamp(near, far) / near).log() / length
    moments = torch.stack([x, x.square(), x.pow(3)], dim=1)
    coded = replace(gaussians, sh0=(moments - 0.5) / SH_C0, shN=gaussians.shN[:, :0])
    with torch.no_grad():
        shown = render(coded, camera, antialiased=antialiased)
    alpha = shown.alpha.double()
    covered = alpha >= COVERED
    first, second, third = (shown.image.double() / alpha.clamp(min=COVERED)[..., None]).unbind(-1)
    variance = (second - first.square()).clamp(min=1e-12)
    skew = (third - 3 * first * second + 2 * first.pow(3)) / variance
    # The two points that have these moments are the roots of t^2 - skew t - variance, about the mean.
    root = (skew.square() + 4 * variance).sqrt()
    nearer, farther = (skew - root) / 2, (skew + root) / 2
    weight = farther / root * alpha
    single = variance.sqrt() < _SPREAD
    layer = torch.where(single, torch.zeros_like(first), torch.where(weight >= COVERED, nearer, farther))
    depth = near * ((first + layer).clamp(0, 1) * length).exp()
    uncertain = ~single & (weight > _UNCERTAIN[0]) & (weight < _UNCERTAIN[1])
    depth[uncertain] = torch.nan
    depth[~covered] = torch.inf
    return depth.float()


def camera_z(points: Tensor, camera: Camera) -> Tensor:
    """Return [N] camera z of points [N, 3]."""
    row = torch.from_numpy(camera.viewmat[2]).to(points)
    return points @ row[:3] + row[3]


def _z_range(means: Tensor, z: Tensor, camera: Camera) -> tuple[float, float]:
    """Return the camera z between which nearly all Gaussians in the image lie."""
    chosen = slice(None, None, -(-len(z) // _ASKED) or 1)
    u, v, seen = project(means[chosen], camera)
    found = z[chosen][seen & (u >= 0) & (v >= 0) & (u < camera.width) & (v < camera.height)]
    if not len(found):
        return camera.near, 2 * camera.near
    near, far = np.quantile(found.cpu().numpy(), _RANGE)
    return float(near), max(float(far), 1.01 * float(near))


def project(points: Tensor, camera: Camera) -> tuple[Tensor, Tensor, Tensor]:
    """Return ([N] u, [N] v in pixels, [N] whether the point [N, 3] is in front of the camera)."""
    matrix = torch.from_numpy(camera.viewmat[:3]).to(points)
    local = points @ matrix[:, :3].T + matrix[:, 3]
    front = local[:, 2] > camera.near
    z = torch.where(front, local[:, 2], torch.ones_like(local[:, 2]))
    return local[:, 0] / z * camera.fx + camera.cx, local[:, 1] / z * camera.fy + camera.cy, front


def points_of(depth: Tensor, camera: Camera) -> Tensor:
    """Return [N, 3] world positions of the pixels of ``depth`` that have a finite one."""
    v, u = torch.nonzero(torch.isfinite(depth), as_tuple=True)
    z = depth[v, u].double()
    local = torch.stack([(u + 0.5 - camera.cx) / camera.fx * z, (v + 0.5 - camera.cy) / camera.fy * z, z], dim=1)
    pose = torch.from_numpy(np.linalg.inv(camera.viewmat)).to(local)
    return (local @ pose[:3, :3].T + pose[:3, 3]).float()
