"""The rotations of exports, edits and gsplat's functions are those of the reference and of scipy."""

from __future__ import annotations

import torch
from scipy.spatial.transform import Rotation
from torch.testing import assert_close

from splatcli.rasterizer import reference
from splatcli.rotation import rotation_matrices


def test_matrices_are_those_of_the_reference_at_any_length() -> None:
    quats = torch.randn(500, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    quats *= torch.logspace(-3, 3, 500, dtype=torch.float64)[:, None]
    assert torch.equal(rotation_matrices(torch.zeros(1, 4))[0], torch.eye(3)), "files of other programs may hold zeros"
    ours = rotation_matrices(quats)
    assert_close(ours, reference.rotation_matrices(quats), rtol=0, atol=1e-14)
    scipys = Rotation.from_quat(quats[:, [1, 2, 3, 0]].numpy()).as_matrix()
    assert_close(ours, torch.from_numpy(scipys), rtol=0, atol=1e-13)
