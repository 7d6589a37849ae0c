from typing import Any

from splatcli.gsplat import RenderMode, rasterization

rasterization_2dgs: Any
rasterization_2dgs_inria_wrapper: Any
rasterization_inria_wrapper: Any

__all__ = [
    "RenderMode",
    "rasterization",
    "rasterization_2dgs",
    "rasterization_2dgs_inria_wrapper",
    "rasterization_inria_wrapper",
]
