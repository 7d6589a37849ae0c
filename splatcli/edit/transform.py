"""Similarity transforms of whole models: Gaussians and cameras move together, so that each view stays the same."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from splatcli.checkpoint.foreign.imported import Columns
from splatcli.formats.format import ExportMetadata
from splatcli.formats.transform import transformed
from splatcli.gaussians import Gaussians
from splatcli.progress import track
from splatcli.scene.camera import Camera
from splatcli.similarity import Similarity

#: Gaussians that are transformed at once; bounds the memory for float64.
_ROWS = 1 << 16
#: Directions that differ by less are the same.
_SAME = 1e-9


def move_gaussians(gaussians: Gaussians, similarity: Similarity) -> Gaussians:
    """Return the Gaussians under a similarity: positions, rotations, scales and SH coefficients of every degree.

    Values are computed in float64 and rounded once. Columns that the map leaves alone are the same tensors; a value
    that leaves the range of float32 becomes infinite.
    """
    if similarity.is_identity:
        return gaussians
    if not similarity.turns:
        shift = torch.from_numpy(similarity.shift)
        means = (gaussians.means.double() * similarity.scale + shift).float()
        scales = gaussians.log_scales
        if similarity.scale != 1.0:
            scales = (scales.double() + math.log(similarity.scale)).float()
        return replace(gaussians, means=means, log_scales=scales)
    matrix = similarity.matrix()
    made = gaussians.map(torch.empty_like)
    # Opacities and constant colours do not depend on the frame.
    made.logit_opacities, made.sh0 = gaussians.logit_opacities, gaussians.sh0
    for start in track(range(0, len(gaussians), _ROWS), "rotating"):
        rows = slice(start, start + _ROWS)
        part = Columns(*(tensor[rows].numpy() for _, tensor in gaussians.items()))
        with np.errstate(over="ignore"):
            done = transformed(part, matrix)
        made.means[rows] = torch.from_numpy(done.means)
        made.quats[rows] = torch.from_numpy(done.quats)
        made.log_scales[rows] = torch.from_numpy(done.scales)
        made.shN[rows] = torch.from_numpy(done.shN)
    return made


def rounding_of(means: Tensor) -> float:
    """Return by how much float32 rounds the coordinates of ``means`` [N, 3] at most."""
    farthest = float(means.abs().max()) if len(means) else 0.0
    return 2.0 ** (math.floor(math.log2(farthest)) - 24) if farthest > 0 else 0.0


def move_camera(camera: Camera, similarity: Similarity) -> Camera:
    """Return the camera that sees the moved Gaussians as ``camera`` sees the original ones."""
    viewmat = camera.viewmat.copy()
    viewmat[:3, :3] = camera.viewmat[:3, :3] @ similarity.rotation.T
    viewmat[:3, 3] = similarity.scale * camera.viewmat[:3, 3] - viewmat[:3, :3] @ similarity.shift
    moved = replace(camera, viewmat=viewmat, near=similarity.scale * camera.near)
    if camera.model != "ortho":
        return moved
    return replace(moved, fx=camera.fx / similarity.scale, fy=camera.fy / similarity.scale)


def move_metadata(metadata: ExportMetadata, similarity: Similarity) -> ExportMetadata:
    """Return the facts for a file of the moved Gaussians: the first view and up move along."""
    if similarity.is_identity:
        return metadata
    camera = None if metadata.camera is None else move_camera(metadata.camera, similarity)
    up = None if metadata.up is None else similarity.rotation @ metadata.up
    z_up = metadata.z_up and up is not None and bool(abs(up - [0.0, 0.0, 1.0]).max() < _SAME)
    return replace(metadata, camera=camera, up=up, z_up=z_up)
