"""The spherical harmonics of exports, edits and gsplat's functions are those of the reference."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from splatcli.rasterizer import reference
from splatcli.sh import sh_basis


@pytest.mark.parametrize("degree", range(5))
def test_the_basis_is_that_of_the_reference(degree: int) -> None:
    generator = torch.Generator().manual_seed(degree)
    directions = torch.nn.functional.normalize(torch.randn(500, 3, generator=generator, dtype=torch.float64))
    ours = sh_basis(directions, degree)
    assert ours.shape == (500, (degree + 1) ** 2)
    assert_close(ours, reference.sh_basis(directions, degree), rtol=0, atol=1e-13)
