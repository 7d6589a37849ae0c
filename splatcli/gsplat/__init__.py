"""gsplat's package under gsplat's module paths, for programs that are written for it.

``from splatcli.gsplat.strategy import DefaultStrategy`` stands for ``from gsplat.strategy import DefaultStrategy``.
After install(), ``import gsplat`` is this package; ``python -m splatcli.gsplat program.py`` runs a program so,
unchanged. A name of gsplat that is not served can be imported, and is an error that names the remedy when it is called:
many programs import more than they use.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import importlib.util
import logging
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from splatcli.errors import UsageError

if TYPE_CHECKING:  # the names of _SERVED, which are imported when they are first used
    from torch import Tensor

    from splatcli.formats.gsplat_export import export_splats as export_splats
    from splatcli.rasterizer.adam import SelectiveAdam as SelectiveAdam
    from splatcli.rasterizer.gsplat_api import RenderMode as RenderMode
    from splatcli.rasterizer.gsplat_api import rasterization as rasterization
    from splatcli.rasterizer.gsplat_ops import depth_to_normal as depth_to_normal
    from splatcli.rasterizer.gsplat_ops import depth_to_points as depth_to_points
    from splatcli.rasterizer.gsplat_ops import fully_fused_projection as fully_fused_projection
    from splatcli.rasterizer.gsplat_ops import normalized_quat_to_rotmat as normalized_quat_to_rotmat
    from splatcli.rasterizer.gsplat_ops import proj as proj
    from splatcli.rasterizer.gsplat_ops import quat_scale_to_covar_preci as quat_scale_to_covar_preci
    from splatcli.rasterizer.gsplat_ops import spherical_harmonics as spherical_harmonics
    from splatcli.rasterizer.gsplat_ops import world_to_cam as world_to_cam
    from splatcli.rasterizer.gsplat_tiles import accumulate as accumulate
    from splatcli.rasterizer.gsplat_tiles import isect_offset_encode as isect_offset_encode
    from splatcli.rasterizer.gsplat_tiles import isect_tiles as isect_tiles
    from splatcli.rasterizer.gsplat_tiles import rasterize_to_indices_in_range as rasterize_to_indices_in_range
    from splatcli.rasterizer.gsplat_tiles import rasterize_to_pixels as rasterize_to_pixels
    from splatcli.scene.camera import CameraModel as CameraModel
    from splatcli.train.densify.gsplat_edits import compute_relocation as compute_relocation
    from splatcli.train.densify.gsplat_edits import duplicate as duplicate
    from splatcli.train.densify.gsplat_edits import inject_noise_to_position as inject_noise_to_position
    from splatcli.train.densify.gsplat_edits import relocate as relocate
    from splatcli.train.densify.gsplat_edits import remove as remove
    from splatcli.train.densify.gsplat_edits import reset_opa as reset_opa
    from splatcli.train.densify.gsplat_edits import sample_add as sample_add
    from splatcli.train.densify.gsplat_edits import split as split
    from splatcli.train.densify.gsplat_strategies import DefaultStrategy as DefaultStrategy
    from splatcli.train.densify.gsplat_strategies import MCMCStrategy as MCMCStrategy
    from splatcli.train.densify.gsplat_strategies import Strategy as Strategy

_log = logging.getLogger(__name__)

#: The release of gsplat that programs ask for; names and arguments of later ones are served as well.
__version__ = "1.5.3"

_API, _OPS, _TILES = (f"splatcli.rasterizer.gsplat_{part}" for part in ("api", "ops", "tiles"))
_STRATEGIES, _EDITS = (f"splatcli.train.densify.gsplat_{part}" for part in ("strategies", "edits"))

#: Names of gsplat, and where they are here; with a colon where they have another name.
_SERVED = {
    "rasterization": _API,
    "RenderMode": _API,
    "CameraModel": "splatcli.scene.camera",
    "spherical_harmonics": _OPS,
    "fully_fused_projection": _OPS,
    "quat_scale_to_covar_preci": _OPS,
    "world_to_cam": _OPS,
    "proj": _OPS,
    "normalized_quat_to_rotmat": _OPS,
    "depth_to_points": _OPS,
    "depth_to_normal": _OPS,
    "isect_tiles": _TILES,
    "isect_offset_encode": _TILES,
    "rasterize_to_pixels": _TILES,
    "rasterize_to_indices_in_range": _TILES,
    "accumulate": _TILES,
    "Strategy": _STRATEGIES,
    "DefaultStrategy": _STRATEGIES,
    "MCMCStrategy": _STRATEGIES,
    "duplicate": _EDITS,
    "split": _EDITS,
    "remove": _EDITS,
    "reset_opa": _EDITS,
    "relocate": _EDITS,
    "sample_add": _EDITS,
    "inject_noise_to_position": _EDITS,
    "compute_relocation": _EDITS,
    "_update_param_with_optimizer": f"{_EDITS}:update_param_with_optimizer",
    "_multinomial_sample": f"{_EDITS}:multinomial_sample",
    "SelectiveAdam": "splatcli.rasterizer.adam",
    "export_splats": "splatcli.formats.gsplat_export",
}

_2DGS = "2DGS is not served; splat mesh makes surfaces of the Gaussians of rasterization()"
_3DGUT = "3DGUT is not served; undistort the images, as splat does on load, and call rasterization()"

#: Names of gsplat that are not served, and the remedy.
_UNSERVED = {
    "rasterization_2dgs": _2DGS,
    "rasterization_2dgs_inria_wrapper": _2DGS,
    "fully_fused_projection_2dgs": _2DGS,
    "rasterize_to_pixels_2dgs": _2DGS,
    "rasterize_to_indices_in_range_2dgs": _2DGS,
    "accumulate_2dgs": _2DGS,
    "rasterization_inria_wrapper": "rasterization() gives the same images",
    "fully_fused_projection_with_ut": _3DGUT,
    "rasterize_to_pixels_eval3d": _3DGUT,
    "FThetaCameraDistortionParameters": _3DGUT,
    "FThetaPolynomialType": _3DGUT,
    "UnscentedTransformParameters": _3DGUT,
    "PngCompression": "export_splats(format='sog') writes a compressed file",
    "save_ply": "export_splats(format='ply') writes a PLY",
    "get_projection_matrix": "rasterization() takes intrinsics, Ks",
}

#: The parts of gsplat's interface that programs ask for before they use it.
_HAS = {"has_3dgs": True, "has_adam": True, "has_reloc": True}
_HAS |= dict.fromkeys(("has_2dgs", "has_3dgut", "has_camera_wrappers", "has_losses"), False)

#: Modules of other packages, and where their names are here.
_OTHERS = {
    "fused_ssim": {"fused_ssim": "splatcli.rasterizer.image_loss"},
    "diff_gaussian_rasterization": dict.fromkeys(
        ("GaussianRasterizationSettings", "GaussianRasterizer"), "splatcli.rasterizer.inria_api"
    ),
    "simple_knn": {},
    "simple_knn._C": {"distCUDA2": "splatcli.gsplat"},
}

_RENDERING = ("rasterization", "rasterization_2dgs", "rasterization_2dgs_inria_wrapper", "rasterization_inria_wrapper")
_STRATEGY = ("DefaultStrategy", "MCMCStrategy", "Strategy")
_OPERATIONS = (
    "duplicate", "split", "remove", "reset_opa", "relocate", "sample_add", "inject_noise_to_position",
    "_update_param_with_optimizer", "_multinomial_sample", "compute_relocation", "normalized_quat_to_rotmat",
)  # fmt: skip
_WRAPPER = (
    "RollingShutterType", "CameraModel", "world_to_cam", "spherical_harmonics", "quat_scale_to_covar_preci", "proj",
    "fully_fused_projection", "isect_tiles", "isect_offset_encode", "rasterize_to_pixels",
    "rasterize_to_indices_in_range", "fully_fused_projection_with_ut", "rasterize_to_pixels_eval3d",
    "fully_fused_projection_2dgs", "rasterize_to_pixels_2dgs", "rasterize_to_indices_in_range_2dgs",
    "FThetaCameraDistortionParameters", "FThetaPolynomialType", "UnscentedTransformParameters",
)  # fmt: skip

#: gsplat's modules, and their names.
_MODULES: dict[str, tuple[str, ...]] = {
    "rendering": (*_RENDERING, "RenderMode"),
    "strategy": _STRATEGY,
    "strategy.base": ("Strategy",),
    "strategy.default": ("DefaultStrategy", *_OPERATIONS),
    "strategy.mcmc": ("MCMCStrategy", *_OPERATIONS),
    "strategy.ops": _OPERATIONS,
    "relocation": ("compute_relocation",),
    "cuda": (),
    "cuda._wrapper": _WRAPPER,
    "cuda._torch_impl": ("accumulate",),
    "exporter": ("export_splats",),
    "optimizers": ("SelectiveAdam",),
    "optimizers.selective_adam": ("SelectiveAdam",),
    "compression": ("PngCompression",),
    "distributed": ("cli",),
    "utils": ("normalized_quat_to_rotmat", "depth_to_points", "depth_to_normal", "save_ply", "get_projection_matrix"),
    "version": ("__version__",),
}


class RollingShutterType(enum.Enum):
    """gsplat's enumeration; rasterization() takes GLOBAL alone."""

    ROLLING_TOP_TO_BOTTOM = 0
    ROLLING_LEFT_TO_RIGHT = 1
    ROLLING_BOTTOM_TO_TOP = 2
    ROLLING_RIGHT_TO_LEFT = 3
    GLOBAL = 4


def cli(fn: Callable[[int, int, int, Any], object], args: Any, verbose: bool = False) -> bool:
    """Call ``fn(local_rank, world_rank, world_size, args)`` in this process, which is the only one."""
    import torch

    if torch.cuda.device_count() > 1:
        gpus = torch.cuda.device_count()
        _log.warning("gsplat.distributed.cli() uses one of %d GPUs; splat train --ranks uses more", gpus)
    fn(0, 0, 1, args)
    return True


def distCUDA2(points: Tensor) -> Tensor:
    """Return [P] the mean squared distance of points [P, 3] to their three nearest neighbours, as simple_knn's."""
    import torch

    from splatcli.train.init import mean_squared_distance

    return torch.from_numpy(mean_squared_distance(points.detach().float().cpu().numpy())).float().to(points.device)


def __getattr__(name: str) -> Any:
    """Import a name of gsplat when it is first used."""
    if name in _SERVED:
        module, _, other = _SERVED[name].partition(":")
        return getattr(importlib.import_module(module), other or name)
    if name in _UNSERVED:
        return _stand_in(name)
    if name in _HAS:
        return lambda: _HAS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SERVED, *_UNSERVED, *_HAS})


def _stand_in(name: str) -> type:
    """Return a class in the place of a name that is not served; to make one is an error."""

    def refuse(cls: type, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"gsplat.{name} is not supported; {_UNSERVED[name]}")

    made = type(name, (), {"__new__": refuse, "__module__": __name__})
    globals()[name] = made
    return made


class _Module(ModuleType):
    """A module of gsplat, whose names are looked up in the package."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{__name__}.{path}", f"gsplat.{path}")
        self.__path__: list[str] = []  # a package: its modules are all in sys.modules
        self.__all__ = [name for name in _MODULES[path] if not name.startswith("_")]
        self._names = _MODULES[path]

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_names", ()):
            return getattr(sys.modules[__name__], name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *self._names})


def _register(package: str, root: ModuleType) -> None:
    """Have ``import <package>.rendering`` and likewise find the modules of this package."""
    for path in _MODULES:
        full = f"{__name__}.{path}"
        if full not in sys.modules:
            sys.modules[full] = _Module(path)
            parent, _, last = path.rpartition(".")
            setattr(sys.modules[f"{__name__}.{parent}"] if parent else root, last, sys.modules[full])
        sys.modules[f"{package}.{path}"] = sys.modules[full]


def install() -> None:
    """Have ``import gsplat`` find this package, and the modules of _OTHERS ours where there are no others.

    Raises UsageError where another gsplat has been imported before.
    """
    here = sys.modules[__name__]
    if sys.modules.get("gsplat", here) is not here:
        raise UsageError(
            "another gsplat is imported already", where="splatcli.gsplat.install()", remedy="call it before that"
        )
    sys.modules["gsplat"] = here
    _register("gsplat", here)
    for name, served in _OTHERS.items():
        top = name.partition(".")[0]
        if top in sys.modules and not isinstance(sys.modules[top], _Stub):
            continue
        if top not in sys.modules and importlib.util.find_spec(top) is not None:
            continue
        sys.modules[name] = module = _Stub(name)
        for attribute, place in served.items():
            path, _, other = place.partition(":")
            setattr(module, attribute, getattr(importlib.import_module(path), other or attribute))
        if name != top:
            setattr(sys.modules[top], name.rpartition(".")[2], module)


class _Stub(ModuleType):
    """A module of another package that programs ask for, with our functions."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []


def cpu_for_cuda() -> contextlib.AbstractContextManager[None]:
    """Return a context in which torch takes the CPU for "cuda" where there is no GPU; else it changes nothing."""
    import torch

    from splatcli.gsplat.without_gpu import cpu_in_place

    return contextlib.nullcontext() if torch.cuda.is_available() else cpu_in_place()


_USAGE = "python -m splatcli.gsplat program.py [its arguments]"

#: torch's words where a program asks for a GPU and there is none.
_NO_CUDA = ("Torch not compiled with CUDA", "Found no NVIDIA driver", "No CUDA GPUs are available")


def run_program(arguments: list[str]) -> None:
    """Run a Python program with its arguments as ``python`` does, after install().

    Raises UsageError where no program is named, or none is found, and what the program raises.
    """
    if not arguments:
        raise UsageError("no program is named", remedy=_USAGE)
    if arguments[0] in ("-h", "--help"):
        print(f"{_USAGE}\n\nRuns a program that is written for gsplat with splatcli in its place.")
        return
    program = Path(arguments[0])
    if not program.is_file():
        raise UsageError("there is no such program", where=program, remedy="name a Python file")
    install()
    sys.argv = arguments
    sys.path[0] = str(program.resolve().parent)
    try:
        with cpu_for_cuda():
            runpy.run_path(str(program), run_name="__main__")
    except (AssertionError, RuntimeError) as error:
        if any(words in str(error) for words in _NO_CUDA):
            error.add_note('help: the program asks torch for a GPU, and there is none: write "cpu" in it for "cuda"')
        raise


_register(__name__, sys.modules[__name__])
