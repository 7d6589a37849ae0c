from typing import Any

from splatcli.gsplat import depth_to_normal, depth_to_points, normalized_quat_to_rotmat

save_ply: Any
get_projection_matrix: Any

__all__ = ["depth_to_normal", "depth_to_points", "get_projection_matrix", "normalized_quat_to_rotmat", "save_ply"]
