"""Writing nerfstudio camera paths, which ``ns-render camera-path`` and the add-ons for Blender and others fly along."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import numpy as np

from splatcli.errors import UsageError
from splatcli.render.cameras import FLIP
from splatcli.scene.camera import Camera

#: The end of a file's name that asks for this layout.
SUFFIX = "camera_path.json"
#: Pixels that the optical axis may be off the middle, and the share by which focal lengths may differ, unnoticed.
_PIXELS, _SHARE = 0.5, 1e-3


def camera_path_json(cameras: Sequence[Camera], fps: float) -> tuple[str, list[str]]:
    """(the file, notes on what it cannot hold). Poses are in the frame of the model.

    Raises UsageError when the cameras are of several sizes.
    """
    sizes = sorted({(camera.width, camera.height) for camera in cameras})
    if len(sizes) != 1:
        raise UsageError(
            f"a camera path is of one size, and the views have {len(sizes)}",
            where="--save-cameras",
            remedy="--size {}x{}".format(*sizes[-1]) + "; or another name, for a file of our own layout",
        )
    ((width, height),) = sizes
    document = {
        "camera_type": "perspective",
        "render_width": width,
        "render_height": height,
        "fps": fps,
        "seconds": len(cameras) / fps,
        "keyframes": [],
        "camera_path": [
            {
                "camera_to_world": (np.linalg.inv(camera.viewmat) @ FLIP).ravel().tolist(),
                "fov": math.degrees(2 * math.atan(height / (2 * camera.fy))),
                "aspect": width / height,
            }
            for camera in cameras
        ],
    }
    odd = sum(_is_odd(camera) for camera in cameras)
    notes = [f"a camera path has square pixels and its axis in the middle, unlike {odd} of the views"] if odd else []
    return json.dumps(document, indent=1) + "\n", notes


def _is_odd(camera: Camera) -> bool:
    off = max(abs(camera.cx - camera.width / 2), abs(camera.cy - camera.height / 2))
    return off > _PIXELS or abs(camera.fx / camera.fy - 1) > _SHARE
