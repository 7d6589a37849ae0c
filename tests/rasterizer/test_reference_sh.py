"""The spherical harmonics of the reference: the field's constants, orthonormality and signs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from splatcli.rasterizer.reference import sh_basis


def directions(n: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return vectors / vectors.square().sum(1, keepdim=True).sqrt()


def written_out(v: torch.Tensor) -> torch.Tensor:
    """[N, 25] the polynomials with the decimal constants that 3DGS files are read with everywhere."""
    x, y, z = v.unbind(1)
    xx, yy, zz = x * x, y * y, z * z
    columns = [
        torch.full_like(x, 0.28209479177387814),
        -0.4886025119029199 * y,
        0.4886025119029199 * z,
        -0.4886025119029199 * x,
        1.0925484305920792 * x * y,
        -1.0925484305920792 * y * z,
        0.31539156525252005 * (2 * zz - xx - yy),
        -1.0925484305920792 * x * z,
        0.5462742152960396 * (xx - yy),
        -0.5900435899266435 * y * (3 * xx - yy),
        2.890611442640554 * x * y * z,
        -0.4570457994644658 * y * (4 * zz - xx - yy),
        0.3731763325901154 * z * (2 * zz - 3 * xx - 3 * yy),
        -0.4570457994644658 * x * (4 * zz - xx - yy),
        1.445305721320277 * z * (xx - yy),
        -0.5900435899266435 * x * (xx - 3 * yy),
        2.5033429417967046 * x * y * (xx - yy),
        -1.7701307697799304 * y * z * (3 * xx - yy),
        0.9461746957575601 * x * y * (7 * zz - 1),
        -0.6690465435572892 * y * z * (7 * zz - 3),
        0.10578554691520431 * (zz * (35 * zz - 30) + 3),
        -0.6690465435572892 * x * z * (7 * zz - 3),
        0.47308734787878004 * (xx - yy) * (7 * zz - 1),
        -1.7701307697799304 * x * z * (xx - 3 * yy),
        0.6258357354491761 * (xx * (xx - 3 * yy) - yy * (3 * xx - yy)),
    ]
    return torch.stack(columns, 1)


@pytest.mark.parametrize("degree", range(5))
def test_basis_is_the_fields_in_order_and_sign(degree: int) -> None:
    v = directions(200)
    assert_close(sh_basis(v, degree), written_out(v)[:, : (degree + 1) ** 2], rtol=0, atol=1e-13)


def test_basis_is_orthonormal_over_the_sphere() -> None:
    # Gauss-Legendre in z and equal steps in azimuth integrate polynomials of degree 8 exactly.
    heights, weights = np.polynomial.legendre.leggauss(8)
    azimuths = np.arange(16) * 2 * math.pi / 16
    z, phi = (grid.ravel() for grid in np.meshgrid(heights, azimuths, indexing="ij"))
    radius = np.sqrt(1 - z * z)
    basis = sh_basis(torch.from_numpy(np.stack([radius * np.cos(phi), radius * np.sin(phi), z], 1)), 4)
    area = torch.from_numpy(np.repeat(weights, 16) * 2 * math.pi / 16)
    assert_close(basis.T @ (area[:, None] * basis), torch.eye(25, dtype=torch.float64), rtol=0, atol=1e-13)


def test_poles_have_finite_gradients() -> None:
    poles = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, -1.0]], dtype=torch.float64, requires_grad=True)
    torch.autograd.backward(sh_basis(poles, 4).sum())
    assert poles.grad is not None
    assert bool(poles.grad.isfinite().all())
