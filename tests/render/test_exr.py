"""EXR files: what the channels hold, and that another reader finds them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from splatcli.errors import OutputError, ResourceError
from splatcli.render.exr import channels, check_installed, linear, write_exr
from splatcli.render.images import RenderedMaps


def maps() -> RenderedMaps:
    """Half covered everywhere but at one pixel where nothing is."""
    alpha = np.full((4, 6), 0.5, np.float32)
    alpha[0, 0] = 0
    depth = np.where(alpha > 0, np.float32(3.25), np.float32(np.inf))
    shown = torch.from_numpy(0.5 * alpha[..., None].repeat(3, -1))
    return RenderedMaps(shown, alpha, depth, np.repeat(alpha[..., None], 3, axis=-1))


def test_colours_become_linear_without_their_coverage() -> None:
    planes = channels(maps(), ("rgb", "alpha", "depth", "normals"))
    assert list(planes) == ["R", "G", "B", "A", "Z", "N.X", "N.Y", "N.Z"]
    # sRGB 0.5 is 0.21404 of light, of which half is covered.
    assert_allclose(planes["G"][1], 0.21404 * 0.5, atol=1e-5)
    assert planes["G"][0, 0] == 0
    assert np.isinf(planes["Z"][0, 0])
    assert all(plane.dtype == np.float32 for plane in planes.values())


@pytest.mark.parametrize(
    ("display", "light"), [(0.0, 0.0), (0.04, 0.04 / 12.92), (0.5, 0.214041), (1.0, 1.0), (2.0, 4.953846), (-0.1, 0.0)]
)
def test_the_curve_is_that_of_srgb(display: float, light: float) -> None:
    colour = np.full((1, 1, 3), display, np.float32)
    assert_allclose(linear(colour, np.ones((1, 1), np.float32)), light, rtol=1e-5)


def test_a_file_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    openexr = pytest.importorskip("OpenEXR", reason="OpenEXR is not installed: pip install 'splatcli[exr]'")
    planes = channels(maps(), ("rgb", "alpha", "depth", "normals"))
    write_exr(tmp_path / "sub" / "x.exr", planes)
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["x.exr"]
    with openexr.File(str(tmp_path / "sub" / "x.exr"), separate_channels=True) as file:
        found = {name: channel.pixels for name, channel in file.channels().items()}
    assert found.keys() == planes.keys()
    for name, plane in planes.items():
        assert np.array_equal(found[name], plane), name


def test_a_folder_in_its_place_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("OpenEXR", reason="OpenEXR is not installed: pip install 'splatcli[exr]'")
    with pytest.raises(OutputError, match="a folder"):
        write_exr(tmp_path, {})


def test_without_the_package_there_is_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splatcli.render.exr.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ResourceError) as caught:
        check_installed()
    assert "splatcli[exr]" in str(caught.value)
