"""Comparison of renders with the images of their views: PSNR, SSIM, and LPIPS by an optional package."""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from splatcli.errors import ResourceError, SceneError, UsageError
from splatcli.scene.scene import Scene
from splatcli.train.evaluate import blackened, color_corrected, psnr, ssim
from splatcli.train.events import ViewScore

_INSTALL = "pip install 'splatcli[lpips]'"


class _Net(NamedTuple):
    """A trunk: its class of weights in torchvision, its function there, and the shortest side its layers can take."""

    weights: str
    function: str
    least: int


#: By the names that papers use. Five reductions halve what VGG sees four times; AlexNet begins with strides of 4.
NETS = {"vgg": _Net("VGG16_Weights", "vgg16", 16), "alex": _Net("AlexNet_Weights", "alexnet", 31)}


class Lpips:
    """LPIPS version 0.1 with the trunk ``net`` of two images in 0..1, which the network gets as -1..1.

    The package ``lpips`` computes it, or else ``torchmetrics``. Neither gets to download anything: weights that are not
    on this machine are an error that says how to fetch them.
    Raises UsageError for an unknown net, ResourceError for a package or weights that are not there or do not load.
    """

    def __init__(self, net: str, device: torch.device | str = "cpu") -> None:
        if net not in NETS:
            raise UsageError(f"{net!r} is no network of LPIPS", where="--lpips", remedy="vgg or alex")
        self.net = net
        self.device = torch.device(device)
        self.package = _package()
        weights = _weights(net)
        if not weights.is_file():
            raise ResourceError(
                f"the weights of {net} for LPIPS are not on this machine: no {weights.name}",
                where=weights.parent,
                remedy=f"torchvision downloads them once: {_fetch(net)}; or copy the file there",
            )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # lpips calls torchvision in a way that is going to be removed
                self._distance = _BUILDERS[self.package](net, self.device)
        except Exception as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ResourceError(
                f"{self.package} cannot build its network: {first}",
                where=weights,
                remedy=f"delete that file and fetch it anew: {_fetch(net)}; or install anew: {_INSTALL}",
            ) from error

    @torch.no_grad()
    def __call__(self, x: Tensor, y: Tensor) -> float:
        """The distance of two images [H, W, 3] in 0..1; 0 for equal ones.

        Raises SceneError where they are too small, ResourceError where the network gives no number.
        """
        height, width = x.shape[:2]
        least = NETS[self.net].least
        if min(height, width) < least:
            raise SceneError(
                f"images of {width}x{height} pixels are too small: LPIPS with {self.net} needs {least} a side",
                where="--lpips",
                remedy="evaluate at a larger size, or without --lpips",
            )
        value = float(self._distance(*(image.permute(2, 0, 1)[None].float().to(self.device) for image in (x, y))))
        if not math.isfinite(value):
            raise ResourceError(
                f"LPIPS of two images is {value}, so the weights must be damaged",
                where=_weights(self.net),
                remedy=f"delete that file and fetch it anew: {_fetch(self.net)}",
            )
        return value

    def protocol(self) -> dict[str, str]:
        """What has to agree for two values to compare."""
        return {
            "net": self.net,
            "version": "0.1",
            "package": f"{self.package} {_version(self.package)}",
            "input": "0..1 scaled to -1..1",
            "masks": "hidden pixels are black in both",
        }


def _package() -> str:
    """Name of the package that computes LPIPS; it can be imported. Raises ResourceError."""
    for name in ("lpips", "torchmetrics"):
        try:
            importlib.import_module(name)
            importlib.import_module("torchvision.models")
        except ModuleNotFoundError as error:
            missing = (error.name or "a module of it").partition(".")[0]
            if missing == name:
                continue
            raise ResourceError(
                f"{name} is installed, but {missing} is not, which it needs for LPIPS",
                where="--lpips",
                remedy=_INSTALL,
            ) from None
        except Exception as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ResourceError(
                f"{name} is installed, but cannot be loaded: {first}",
                where="--lpips",
                remedy=f"install it anew, and a torchvision that fits torch {torch.__version__}: {_INSTALL}",
            ) from error
        return name
    raise ResourceError(
        "LPIPS needs the package lpips (or torchmetrics with torchvision), and neither is installed",
        where="--lpips",
        remedy=f"{_INSTALL}; its weights are downloaded by that package once, later it needs no network",
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "of unknown version"  # on the path without having been installed


def _weights(net: str) -> Path:
    """Where torchvision keeps the weights of the trunk, whether they are there or not."""
    models = importlib.import_module("torchvision.models")
    url = getattr(models, NETS[net].weights).IMAGENET1K_V1.url
    return Path(torch.hub.get_dir()) / "checkpoints" / PurePosixPath(urlsplit(url).path).name


def _fetch(net: str) -> str:
    """The command that downloads the weights of the trunk."""
    function = NETS[net].function
    return f"python -c \"import torchvision.models as m; m.{function}(weights='IMAGENET1K_V1')\""


_Distance = Callable[[Tensor, Tensor], Tensor]


def _by_lpips(net: str, device: torch.device) -> _Distance:
    model = importlib.import_module("lpips").LPIPS(net=net, version="0.1", verbose=False).to(device)
    return lambda x, y: model(x, y, normalize=True)  # takes 0..1


def _by_torchmetrics(net: str, device: torch.device) -> _Distance:
    kind = importlib.import_module("torchmetrics.image.lpip").LearnedPerceptualImagePatchSimilarity
    return kind(net_type=net, normalize=True).to(device)  # type: ignore[no-any-return]  # takes 0..1


_BUILDERS: dict[str, Callable[[str, torch.device], _Distance]] = {"lpips": _by_lpips, "torchmetrics": _by_torchmetrics}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One render beside its photo, [H, W, 3] uint8 each; index is the view's in its scene.

    hidden: [H, W] bool, what a mask hides; None where nothing is.
    extra: the figures that were asked for beside PSNR and SSIM, by their names.
    """

    index: int
    score: ViewScore
    truth: NDArray[np.uint8]
    pixels: NDArray[np.uint8]
    hidden: NDArray[np.bool_] | None = None
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def figures(self) -> dict[str, float]:
        """All figures by name."""
        return {"psnr": self.score.psnr, "ssim": self.score.ssim, **self.extra}


def means(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean over views, at least one, of each figure."""
    return {name: sum(one[name] for one in figures) / len(figures) for name in figures[0]}


class GroundTruth:
    """The photos of a scene, by the names of their views.

    color_corrected: also compare after the render's colours were fitted to the photo's.
    lpips: also measure with this network.
    """

    def __init__(self, scene: Scene, *, color_corrected: bool = False, lpips: Lpips | None = None) -> None:
        self._scene = scene
        self._index = {camera.name: i for i, camera in enumerate(scene.cameras)}
        self._color_corrected = color_corrected
        self._lpips = lpips

    def is_fully_masked(self, name: str) -> bool:
        """Whether a mask hides the whole photo of view ``name``, so that nothing of it can be compared."""
        index = self._index.get(name)
        if not self._scene.images.masked or index is None or not self._scene.images.has(index):
            return False
        hidden = self._scene.images.photo(index).hidden
        return hidden is not None and bool(hidden.all())

    def compare(self, name: str, pixels: NDArray[np.uint8]) -> Comparison | None:
        """The render of view ``name`` against its photo; None when there is no photo of that view and size.

        Both are 8-bit, as files are, so that anyone can repeat the figures from the PNG.
        """
        index = self._index.get(name)
        if index is None or not self._scene.images.has(index):
            return None
        photo = self._scene.images.photo(index)
        truth = photo.pixels
        if truth.shape != pixels.shape:
            return None
        hidden = None if photo.hidden is None else torch.from_numpy(photo.hidden)
        shown, seen = (torch.from_numpy(array.astype(np.float32) / 255.0) for array in (pixels, truth))
        score = ViewScore(name, psnr(shown, seen, hidden), ssim(shown, seen, hidden))
        return Comparison(index, score, truth, pixels, photo.hidden, self._extra(shown, seen, hidden))

    def _extra(self, shown: Tensor, seen: Tensor, hidden: Tensor | None) -> dict[str, float]:
        """What was asked for beside PSNR and SSIM, of two images [H, W, 3] in 0...1."""
        fitted = color_corrected(shown, seen, hidden) if self._color_corrected else None
        extra: dict[str, float] = {}
        if fitted is not None:
            extra |= {"cc_psnr": psnr(fitted, seen, hidden), "cc_ssim": ssim(fitted, seen, hidden)}
        if self._lpips is not None:
            black = blackened(seen, hidden)
            extra["lpips"] = self._lpips(blackened(shown, hidden), black)
            if fitted is not None:
                extra["cc_lpips"] = self._lpips(blackened(fitted, hidden), black)
        return extra

    def protocol(self) -> dict[str, object]:
        """How the extra figures are obtained, in the form of ``train.metrics.protocol``."""
        facts: dict[str, object] = {}
        if self._color_corrected:
            facts["color_correction"] = (
                "cc_*: each view's render, rounded to 8 bits, mapped by the affine 3x4 colour transform that fits its "
                "photo best (least squares over visible pixels), clamped to 0..1, not rounded again"
            )
        if self._lpips is not None:
            facts["lpips"] = self._lpips.protocol()
        return facts
