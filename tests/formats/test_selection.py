"""What --crop, --min-opacity and --sh-degree leave in, and what they refuse."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from splatcli.edit.transform import move_gaussians, rounding_of
from splatcli.errors import UsageError
from splatcli.formats.crop import Crop
from splatcli.formats.selection import select
from splatcli.similarity import Similarity
from tests.formats.made import scene


def test_a_box_holds_what_lies_between_its_corners_in_any_order() -> None:
    gaussians = scene(500)
    inside = ((gaussians.means >= torch.tensor([-0.5, -0.2, 0.0])) & (gaussians.means <= 0.5)).all(dim=1)
    for text in ("box:-0.5,-0.2,0,0.5,0.5,0.5", "box:0.5,0.5,0.5,-0.5,-0.2,0"):
        kept, notes = select(gaussians, crop=Crop.parse(text))
        assert torch.equal(kept.means, gaussians.means[inside])
        assert torch.equal(kept.shN, gaussians.shN[inside])
        assert notes == [f"kept {int(inside.sum())} of 500 Gaussians"]


def test_a_sphere_holds_what_is_near_its_centre() -> None:
    gaussians = scene(500)
    inside = (gaussians.means.double() - torch.tensor([0.1, 0, 0])).norm(dim=1) <= 0.4
    kept, _ = select(gaussians, crop=Crop.parse("sphere:0.1,0,0,0.4"))
    assert 10 < len(kept) < 400
    assert torch.equal(kept.means, gaussians.means[inside])


@pytest.mark.parametrize(("axis", "across"), [("x", (1, 2)), ("y", (0, 2)), ("z", (0, 1))])
@pytest.mark.parametrize("backwards", [False, True])
def test_a_polygon_holds_what_its_triangles_hold(axis: str, across: tuple[int, int], backwards: bool) -> None:
    """An arrow head, concave, in either direction; barycentric coordinates of its triangles tell."""
    gaussians = scene(2000)
    corners = np.array([[-0.6, -0.5], [0.0, 0.7], [0.5, -0.6], [0.0, -0.1]])
    pair = gaussians.means.double().numpy()[:, across]

    def in_triangle(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        weights = np.linalg.solve(np.array([[*p, 1.0] for p in (a, b, c)]).T, np.c_[pair, np.ones(len(pair))].T)
        return (weights > 0).all(axis=0)

    inside = in_triangle(*corners[[0, 1, 3]]) | in_triangle(*corners[[1, 2, 3]])
    text = ",".join(f"{value:g}" for value in (corners[::-1] if backwards else corners).ravel())
    kept, _ = select(gaussians, crop=Crop.parse(f"polygon:{axis}:{text}"))
    assert 50 < len(kept) < 1500
    # A point on the edge that both triangles share is in neither.
    assert torch.equal(kept.means, gaussians.means[torch.from_numpy(inside)])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cube:1,2,3", "neither a box, a sphere nor a polygon"),
        ("box", "neither|no list"),
        ("box:1,2,3", "takes 6 finite numbers, 3"),
        ("box:1,2,3,4,5,nan", "takes 6 finite numbers, not '1,2,3,4,5,nan'"),
        ("sphere:0,0,0", "takes 4 finite numbers"),
        ("sphere:0,0,0,0", "holds nothing"),
        ("sphere:0,0,0,-1", "holds nothing"),
        ("sphere:0,0,0,x", "no list of numbers"),
        ("polygon:0,0,1,0,1,1", "no axis"),
        ("polygon:w:0,0,1,0,1,1", "'w' is no axis"),
        ("polygon:z:0,0,1,0,1", "pairs of finite numbers, 5"),
        ("polygon:z:0,0,1,0,nan,1", "pairs of finite numbers, not '0,0,1,0,nan,1'"),
        ("polygon:z:0,0,1,0,0,0", "of 2 corners holds nothing"),
        ("polygon:z:", "no list of numbers"),
        ("", "neither a box, a sphere nor a polygon"),
    ],
)
def test_a_region_that_is_none_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        Crop.parse(text)
    assert "--crop box:" in str(caught.value.remedy)


def test_the_opacity_is_compared_after_the_sigmoid() -> None:
    gaussians = scene(500)
    kept, _ = select(gaussians, min_opacity=0.3)
    assert torch.equal(kept.means, gaussians.means[gaussians.logit_opacities.double().sigmoid() >= 0.3])
    assert len(select(gaussians, min_opacity=0.0)[0]) == 500
    with pytest.raises(UsageError, match="none of the 500"):
        select(gaussians, min_opacity=1.0)


def test_a_lower_degree_drops_the_higher_bands_and_a_higher_one_adds_none() -> None:
    gaussians = scene(10, 3)
    lower, _ = select(gaussians, sh_degree=1)
    assert torch.equal(lower.shN, gaussians.shN[:, :3])
    assert select(gaussians, sh_degree=4)[0].shN.shape[1] == 15


def test_moving_tells_what_float32_rounds_away() -> None:
    gaussians = scene(10)
    away = move_gaussians(gaussians, Similarity(shift=np.array([5e5, 4e6, 0.0])))
    error = rounding_of(away.means)
    exact = gaussians.means.double() + torch.tensor([5e5, 4e6, 0.0], dtype=torch.float64)
    assert (away.means.double() - exact).abs().max() <= error
    assert error == math.ldexp(0.5, 21 - 23)  # half a step between floats from 2**21 to 2**22


def test_a_file_of_regions_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    """As Notepad writes it."""
    regions = tmp_path / "regions.txt"
    regions.write_bytes(b"\xef\xbb\xbfsphere:0,0,0,0.4 # the middle\r\n\r\nbox:0,0,0,1,1,1\r\n")
    gaussians = scene(500)
    kept, _ = select(gaussians, crop=Crop.parse(f"file:{regions}"))
    inside = Crop.parse("sphere:0,0,0,0.4").holds(gaussians.means) | Crop.parse("box:0,0,0,1,1,1").holds(
        gaussians.means
    )
    assert 0 < int(inside.sum()) < 500
    assert torch.equal(kept.means, gaussians.means[inside])
