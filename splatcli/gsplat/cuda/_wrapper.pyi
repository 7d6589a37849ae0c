from typing import Any

from splatcli.gsplat import (
    CameraModel,
    RollingShutterType,
    fully_fused_projection,
    isect_offset_encode,
    isect_tiles,
    proj,
    quat_scale_to_covar_preci,
    rasterize_to_indices_in_range,
    rasterize_to_pixels,
    spherical_harmonics,
    world_to_cam,
)

fully_fused_projection_with_ut: Any
rasterize_to_pixels_eval3d: Any
fully_fused_projection_2dgs: Any
rasterize_to_pixels_2dgs: Any
rasterize_to_indices_in_range_2dgs: Any
FThetaCameraDistortionParameters: Any
FThetaPolynomialType: Any
UnscentedTransformParameters: Any

__all__ = [
    "CameraModel",
    "FThetaCameraDistortionParameters",
    "FThetaPolynomialType",
    "RollingShutterType",
    "UnscentedTransformParameters",
    "fully_fused_projection",
    "fully_fused_projection_2dgs",
    "fully_fused_projection_with_ut",
    "isect_offset_encode",
    "isect_tiles",
    "proj",
    "quat_scale_to_covar_preci",
    "rasterize_to_indices_in_range",
    "rasterize_to_indices_in_range_2dgs",
    "rasterize_to_pixels",
    "rasterize_to_pixels_2dgs",
    "rasterize_to_pixels_eval3d",
    "spherical_harmonics",
    "world_to_cam",
]
