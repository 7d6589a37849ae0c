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

from splatcli.errors import ResourceError, SceneError, UsageError, first_line
from splatcli.scene.images import LoadedImage
from splatcli.scene.scene import Scene
from splatcli.train.events import ViewScore
from splatcli.train.image_metrics import color_corrected, mask_out, psnr, ssim

_INSTALL = "pip install 'splatcli[lpips]'"


class _Net(NamedTuple):
    """A backbone: its weights class and function in torchvision, and the shortest image side that it accepts."""

    weights: str
    function: str
    least: int


#: Backbones by the names of the papers. VGG halves the image four times; AlexNet begins with a stride of 4.
NETS = {"vgg": _Net("VGG16_Weights", "vgg16", 16), "alex": _Net("AlexNet_Weights", "alexnet", 31)}


class Lpips:
    """LPIPS version 0.1 with the backbone ``net``, of two images in 0..1, which the network gets as -1..1.

    The package ``lpips`` computes it, else ``torchmetrics``. Nothing is downloaded: missing weights are an error whose
    remedy is the command that downloads them.
    Raises UsageError for an unknown net, ResourceError if the package or the weights are missing or do not load.
    """

    def __init__(self, net: str, device: torch.device | str = "cpu") -> None:
        if net not in NETS:
            raise UsageError(f"LPIPS has no network {net!r}", where="--lpips", remedy="vgg or alex")
        self.net = net
        self.device = torch.device(device)
        self.package = _package()
        weights = _weights(net)
        if not weights.is_file():
            raise ResourceError(
                f"the LPIPS weights of {net} are missing: {weights.name}",
                where=weights.parent,
                remedy=f"download them once: {_fetch(net)}; or copy the file there",
            )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # lpips uses a deprecated call of torchvision
                self._distance = _BUILDERS[self.package](net, self.device)
        except Exception as error:
            first = first_line(error)
            raise ResourceError(
                f"{self.package} cannot build its network: {first}",
                where=weights,
                remedy=f"delete the file and download it again: {_fetch(net)}; or reinstall: {_INSTALL}",
            ) from error

    @torch.no_grad()
    def __call__(self, x: Tensor, y: Tensor) -> float:
        """Return the distance of two images [H, W, 3] in 0..1; 0 for equal ones.

        Raises SceneError for too small images, ResourceError if the result is not finite.
        """
        height, width = x.shape[:2]
        least = NETS[self.net].least
        if min(height, width) < least:
            raise SceneError(
                f"images of {width}x{height} pixels are too small: LPIPS with {self.net} needs {least} pixels a side",
                where="--lpips",
                remedy="evaluate at a larger size, or without --lpips",
            )
        value = float(self._distance(*(image.permute(2, 0, 1)[None].float().to(self.device) for image in (x, y))))
        if not math.isfinite(value):
            raise ResourceError(
                f"LPIPS of two images is {value}: the weights are damaged",
                where=_weights(self.net),
                remedy=f"delete the file and download it again: {_fetch(self.net)}",
            )
        return value

    def protocol(self) -> dict[str, str]:
        """Return the settings on which the values depend."""
        return {
            "net": self.net,
            "version": "0.1",
            "package": f"{self.package} {_version(self.package)}",
            "input": "0..1 scaled to -1..1",
            "masks": "masked pixels are black in both",
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
                f"{name} is installed, but {missing} is not; LPIPS needs it",
                where="--lpips",
                remedy=_INSTALL,
            ) from None
        except Exception as error:
            first = first_line(error)
            raise ResourceError(
                f"{name} is installed but does not load: {first}",
                where="--lpips",
                remedy=f"reinstall it, with a torchvision for torch {torch.__version__}: {_INSTALL}",
            ) from error
        return name
    raise ResourceError(
        "LPIPS needs the package lpips, or torchmetrics with torchvision; neither is installed",
        where="--lpips",
        remedy=f"{_INSTALL}; the package downloads its weights once",
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "of unknown version"  # importable but not installed


def _weights(net: str) -> Path:
    """Return the file in which torchvision keeps the weights of the backbone; it may not exist."""
    models = importlib.import_module("torchvision.models")
    url = getattr(models, NETS[net].weights).IMAGENET1K_V1.url
    return Path(torch.hub.get_dir()) / "checkpoints" / PurePosixPath(urlsplit(url).path).name


def _fetch(net: str) -> str:
    """Return the command that downloads the weights of the backbone."""
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
    """A render and the image of its view, [H, W, 3] uint8 each; index: of the view in its scene.

    masked: [H, W] bool, the masked pixels; None without a mask.
    cc_psnr: PSNR after color_corrected().
    extra: further metrics by name.
    """

    index: int
    score: ViewScore
    truth: NDArray[np.uint8]
    pixels: NDArray[np.uint8]
    masked: NDArray[np.bool_] | None = None
    cc_psnr: float | None = None
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def figures(self) -> dict[str, float]:
        """Return all metrics by name."""
        return {"psnr": self.score.psnr, "ssim": self.score.ssim, **self.extra}


def means(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the views, at least one."""
    return {name: sum(one[name] for one in figures) / len(figures) for name in figures[0]}


class GroundTruth:
    """The ground-truth images of a scene, by the names of their views.

    color_corrected: also compare after fitting the render's colours to the image's.
    lpips: also compute LPIPS with this network.
    """

    def __init__(self, scene: Scene, *, color_corrected: bool = False, lpips: Lpips | None = None) -> None:
        self._scene = scene
        self._index = {camera.name: i for i, camera in enumerate(scene.cameras)}
        self._color_corrected = color_corrected
        self._lpips = lpips

    def is_fully_masked(self, name: str) -> bool:
        """Return whether a mask hides the whole image of view ``name``."""
        index = self._index.get(name)
        if not self._scene.images.masked or index is None or not self._scene.images.has(index):
            return False
        masked = self._scene.images.image(index).masked
        return masked is not None and bool(masked.all())

    def photo(self, name: str, shape: tuple[int, ...]) -> LoadedImage | None:
        """Return the image of view ``name`` with its mask; None without one whose pixels have this shape [H, W, 3]."""
        index = self._index.get(name)
        if index is None or not self._scene.images.has(index):
            return None
        photo = self._scene.images.image(index)
        return photo if photo.pixels.shape == shape else None

    def compare(self, name: str, pixels: NDArray[np.uint8]) -> Comparison | None:
        """Compare the render of view ``name`` with its image; None without an image of that size.

        Both are 8-bit, so the metrics can be recomputed from the PNG files.
        """
        photo = self.photo(name, pixels.shape)
        if photo is None:
            return None
        index, truth = self._index[name], photo.pixels
        masked = None if photo.masked is None else torch.from_numpy(photo.masked)
        shown, seen = (torch.from_numpy(array.astype(np.float32) / 255.0) for array in (pixels, truth))
        score = ViewScore(name, psnr(shown, seen, masked), ssim(shown, seen, masked))
        fitted = color_corrected(shown, seen, masked)
        cc_psnr = psnr(fitted, seen, masked)
        extra = {"cc_psnr": cc_psnr, "cc_ssim": ssim(fitted, seen, masked)} if self._color_corrected else {}
        extra |= self._lpips_figures(shown, fitted, seen, masked)
        return Comparison(index, score, truth, pixels, photo.masked, cc_psnr, extra)

    def _lpips_figures(self, shown: Tensor, fitted: Tensor, seen: Tensor, masked: Tensor | None) -> dict[str, float]:
        """Return LPIPS of images [H, W, 3] in 0..1 where it is wanted; fitted: shown with fitted colours."""
        extra: dict[str, float] = {}
        if self._lpips is not None:
            black = mask_out(seen, masked)
            extra["lpips"] = self._lpips(mask_out(shown, masked), black)
            if self._color_corrected:
                extra["cc_lpips"] = self._lpips(mask_out(fitted, masked), black)
        return extra

    def protocol(self) -> dict[str, object]:
        """Return how the further metrics are computed, in the form of ``train.evaluate.protocol``."""
        facts: dict[str, object] = {}
        if self._color_corrected:
            facts["color_correction"] = (
                "cc_*: each view's render, rounded to 8 bits, mapped by the affine 3x4 colour transform that fits its "
                "photo best (least squares over visible pixels), clamped to 0..1, not rounded again"
            )
        if self._lpips is not None:
            facts["lpips"] = self._lpips.protocol()
        return facts
