"""LPIPS: which package computes it, what it is fed, and what is said when something is not there.

Packages and weights are stood in for; the interfaces are those of lpips 0.1.4, torchmetrics 1.9 and torchvision 0.29.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from splatcli.errors import ResourceError, SceneError, SplatError, UsageError
from splatcli.render.scoring import Lpips

FILES = {"vgg": "vgg16-397923af.pth", "alex": "alexnet-owt-7be5be79.pth"}


class FakeNet:
    """Mean absolute difference of what a network sees, times the length of its name; notes the range it was fed."""

    fed: tuple[float, float] = (0.0, 0.0)

    def __init__(self, net: str) -> None:
        self.net = net

    def to(self, device: torch.device) -> FakeNet:
        return self

    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        assert x.shape[:2] == (1, 3)
        type(self).fed = (float(min(x.min(), y.min())), float(max(x.max(), y.max())))
        return (x - y).abs().mean() * len(self.net)


class FakeLpips(FakeNet):
    def __init__(self, *, net: str, version: str, verbose: bool) -> None:
        assert (version, verbose) == ("0.1", False)
        super().__init__(net)

    def __call__(self, x: Tensor, y: Tensor, normalize: bool = False) -> Tensor:
        return self.distance(2 * x - 1, 2 * y - 1) if normalize else self.distance(x, y)


class FakeTorchmetrics(FakeNet):
    def __init__(self, *, net_type: str, normalize: bool) -> None:
        super().__init__(net_type)
        self.normalize = normalize

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        return self.distance(2 * x - 1, 2 * y - 1) if self.normalize else self.distance(x, y)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Path]:
    """Makes the named packages importable and no others; returns torchvision's folder of weights, which is empty."""

    def module(name: str, **contents: Any) -> None:
        made = ModuleType(name)
        made.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, made)

    def install(*names: str, **contents: Any) -> Path:
        for name in [
            name for name in sys.modules if name.partition(".")[0] in ("lpips", "torchmetrics", "torchvision")
        ]:
            monkeypatch.delitem(sys.modules, name)
        for name in ("lpips", "torchmetrics", "torchvision"):
            monkeypatch.setitem(sys.modules, name, None)
        if "lpips" in names:
            module("lpips", **{"LPIPS": FakeLpips, **contents})
        if "torchmetrics" in names:
            module("torchmetrics")
            module("torchmetrics.image")
            module("torchmetrics.image.lpip", LearnedPerceptualImagePatchSimilarity=FakeTorchmetrics)
        if "torchvision" in names:
            module("torchvision")
            urls = {net: f"https://download.pytorch.org/models/{file}" for net, file in FILES.items()}
            weights = {net: SimpleNamespace(IMAGENET1K_V1=SimpleNamespace(url=url)) for net, url in urls.items()}
            module("torchvision.models", VGG16_Weights=weights["vgg"], AlexNet_Weights=weights["alex"])
        monkeypatch.setattr(metadata, "version", lambda name: "9.9")
        monkeypatch.setenv("TORCH_HOME", str(tmp_path))
        folder = tmp_path / "hub" / "checkpoints"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    return install


def with_weights(folder: Path) -> None:
    for file in FILES.values():
        (folder / file).write_bytes(b"")


@pytest.mark.parametrize("package", ["lpips", "torchmetrics"])
@pytest.mark.parametrize("net", ["vgg", "alex"])
def test_either_package_gives_the_distance_and_sees_minus_one_to_one(
    installed: Callable[..., Path], package: str, net: str
) -> None:
    with_weights(installed(package, "torchvision"))
    lpips = Lpips(net)
    black, white = torch.zeros(32, 40, 3), torch.ones(32, 40, 3)
    assert lpips(black, black) == 0.0
    assert lpips(black, white) == pytest.approx(2.0 * len(net))
    assert (FakeLpips if package == "lpips" else FakeTorchmetrics).fed == (-1.0, 1.0)
    reported = lpips.protocol()
    assert (reported["net"], reported["package"], reported["input"]) == (net, f"{package} 9.9", "0..1 scaled to -1..1")


def test_lpips_comes_before_torchmetrics(installed: Callable[..., Path]) -> None:
    with_weights(installed("lpips", "torchmetrics", "torchvision"))
    assert Lpips("vgg").package == "lpips"


def refusal(kind: type[SplatError], net: str = "vgg") -> SplatError:
    with pytest.raises(kind) as caught:
        Lpips(net)
    assert type(caught.value) is kind
    return caught.value


def test_without_a_package_the_remedy_names_one(installed: Callable[..., Path]) -> None:
    installed()
    problem = refusal(ResourceError)
    assert problem.exit_code == 4
    assert "lpips, or torchmetrics with torchvision" in problem.what
    assert "pip install 'splatcli[lpips]'" in str(problem.remedy)
    assert "downloads its weights once" in str(problem.remedy)


@pytest.mark.parametrize("package", ["lpips", "torchmetrics"])
def test_a_package_without_torchvision_is_an_error(installed: Callable[..., Path], package: str) -> None:
    installed(package)
    problem = refusal(ResourceError)
    assert f"{package} is installed, but torchvision is not" in problem.what
    assert "pip install 'splatcli[lpips]'" in str(problem.remedy)


@pytest.mark.parametrize(("net", "function"), [("vgg", "vgg16"), ("alex", "alexnet")])
def test_missing_weights_are_an_error_and_never_downloaded(
    installed: Callable[..., Path], net: str, function: str
) -> None:
    folder = installed("lpips", "torchvision", LPIPS=lambda **_: pytest.fail("it would have downloaded them"))
    problem = refusal(ResourceError, net)
    assert FILES[net] in problem.what
    assert problem.where == str(folder)
    assert f"m.{function}(weights='IMAGENET1K_V1')" in str(problem.remedy)


def test_damaged_weights_are_an_error_with_their_file(installed: Callable[..., Path]) -> None:
    def broken(**_: object) -> None:
        raise RuntimeError("PytorchStreamReader failed\nmore")

    folder = installed("lpips", "torchvision", LPIPS=broken)
    with_weights(folder)
    problem = refusal(ResourceError)
    assert problem.what == "lpips cannot build its network: PytorchStreamReader failed"
    assert problem.where == str(folder / FILES["vgg"])


def test_a_network_that_gives_no_number_is_an_error_and_no_figure(installed: Callable[..., Path]) -> None:
    class Broken(FakeLpips):
        def distance(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.tensor(torch.nan)

    with_weights(installed("lpips", "torchvision", LPIPS=Broken))
    with pytest.raises(ResourceError, match="LPIPS of two images is nan"):
        Lpips("vgg")(torch.zeros(32, 32, 3), torch.zeros(32, 32, 3))


@pytest.mark.parametrize(("net", "least"), [("vgg", 16), ("alex", 31)])
def test_images_too_small_for_the_network_are_an_error(installed: Callable[..., Path], net: str, least: int) -> None:
    with_weights(installed("lpips", "torchvision"))
    lpips, enough, small = Lpips(net), torch.zeros(least, 64, 3), torch.zeros(64, least - 1, 3)
    assert lpips(enough, enough) == 0.0
    with pytest.raises(SceneError, match=f"{least - 1}x64 pixels are too small.* needs {least}"):
        lpips(small, small)


def test_a_net_that_does_not_exist_is_a_usage_error() -> None:
    assert refusal(UsageError, "squeeze").remedy == "vgg or alex"
