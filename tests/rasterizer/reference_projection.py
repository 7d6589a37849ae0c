"""The reference's projection with a row for each Gaussian, as tests compare it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from splatcli.gaussians import Gaussians
from splatcli.rasterizer.reference import Splats, project_visible
from splatcli.scene.camera import Camera


@dataclass(frozen=True, slots=True)
class ReferenceProjection(Splats):
    """One row per input Gaussian: V = N, rows of zeros for the culled.

    valid  [N] bool, False for the culled (docs/math.md 3.6); a valid Gaussian may be outside the image.
    """

    valid: Tensor


def project_reference(
    gaussians: Gaussians,
    camera: Camera,
    *,
    sh_degree: int | None = None,
    viewmat: Tensor | None = None,
    antialiased: bool = False,
) -> ReferenceProjection:
    """Project every Gaussian and keep its row; the arguments are those of ``render_reference``."""
    index, splats = project_visible(
        gaussians,
        camera,
        sh_degree=sh_degree,
        viewmat=viewmat,
        antialiased=antialiased,
    )
    n = len(gaussians)

    def scatter(rows: Tensor) -> Tensor:
        return rows.new_zeros((n, *rows.shape[1:])).index_copy(0, index, rows)

    return ReferenceProjection(
        means2d=scatter(splats.means2d),
        cov2d=scatter(splats.cov2d),
        conics=scatter(splats.conics),
        depths=scatter(splats.depths),
        colors=scatter(splats.colors),
        opacities=scatter(splats.opacities),
        valid=torch.zeros(n, dtype=torch.bool, device=index.device).index_fill(0, index, True),
    )
