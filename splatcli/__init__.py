"""splatcli: photos to 3D Gaussian Splats, from the command line."""

import importlib
import os
import sys
from typing import TYPE_CHECKING

if "torch" not in sys.modules:
    # Torch's OpenMP threads sleep between operations, here and in child processes. By default they spin after each
    # operation on many elements, and take the cores of the native library's threads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if TYPE_CHECKING:
    from splatcli.api import Model as Model
    from splatcli.api import Run as Run
    from splatcli.api import Scene as Scene
    from splatcli.api import Trainer as Trainer
    from splatcli.api import train as train
    from splatcli.formats.gsplat_export import export_splats as export_splats
    from splatcli.rasterizer.gsplat_api import rasterization as rasterization
    from splatcli.rasterizer.gsplat_ops import fully_fused_projection as fully_fused_projection
    from splatcli.rasterizer.gsplat_ops import spherical_harmonics as spherical_harmonics
    from splatcli.rasterizer.image_loss import fused_ssim as fused_ssim
    from splatcli.rasterizer.image_loss import l1_ssim_loss as l1_ssim_loss
    from splatcli.scene.camera import Camera as Camera
    from splatcli.train.densify.gsplat_strategies import DefaultStrategy as DefaultStrategy
    from splatcli.train.densify.gsplat_strategies import MCMCStrategy as MCMCStrategy

__version__ = "0.1.0"

#: Public names, and the modules that they are imported from when they are first asked for.
_PUBLIC = {
    "Camera": "splatcli.scene.camera",
    "DefaultStrategy": "splatcli.train.densify.gsplat_strategies",
    "MCMCStrategy": "splatcli.train.densify.gsplat_strategies",
    "Model": "splatcli.api",
    "Run": "splatcli.api",
    "Scene": "splatcli.api",
    "Trainer": "splatcli.api",
    "export_splats": "splatcli.formats.gsplat_export",
    "fully_fused_projection": "splatcli.rasterizer.gsplat_ops",
    "spherical_harmonics": "splatcli.rasterizer.gsplat_ops",
    "rasterization": "splatcli.rasterizer.gsplat_api",
    "fused_ssim": "splatcli.rasterizer.image_loss",
    "l1_ssim_loss": "splatcli.rasterizer.image_loss",
}


def __getattr__(name: str) -> object:
    """Import a public name, without loading torch for those who only ask for the version."""
    if name == "train":
        # The package of that name, which can be called: its modules make it an attribute anyway.
        return importlib.import_module("splatcli.train")
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'splatcli' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC, "train"})
