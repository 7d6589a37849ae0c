"""Equirectangular panoramas as perspective faces: six pinholes side by side, from the middle of the panorama.

The panorama's camera frame has OpenCV axes: z through the middle of the image, x to its right, y down. Column and row
of a direction are those of COLMAP's EQUIRECTANGULAR.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np
from numpy.typing import NDArray

from splatcli.scene._pycolmap import pycolmap

#: COLMAP's name of the model.
EQUIRECTANGULAR = "EQUIRECTANGULAR"
#: Faces of a panorama, side by side all around. The ground below the camera and the sky above are in none of them.
FACES = 6
#: Half of a face's field of view, degrees: across (each overlaps its neighbours by 15 degrees) and up or down.
_ACROSS, _UP = 37.5, 45.0


def face_camera(width: int) -> pycolmap.Camera:
    """Return the lens of the faces of a panorama of ``width`` pixels, as fine as its middle row."""
    focal = width / (2 * math.pi)
    size = [max(16, 2 * round(focal * math.tan(math.radians(half)))) for half in (_ACROSS, _UP)]
    camera = pycolmap.Camera.create_from_model_name(0, "PINHOLE", focal, *size)
    camera.has_prior_focal_length = True
    return camera


def face_from_rig(face: int) -> NDArray[np.float64]:
    """Return [3, 3], from the first face's camera frame, which is the panorama's, to that of ``face``; OpenCV axes."""
    yaw = 2 * math.pi * face / FACES
    return np.array([[math.cos(yaw), 0.0, -math.sin(yaw)], [0.0, 1.0, 0.0], [math.sin(yaw), 0.0, math.cos(yaw)]])


def face_pose(viewmat: NDArray[np.float64], face: int) -> NDArray[np.float64]:
    """Return [4, 4], the pose of a face of a panorama with the pose ``viewmat`` [4, 4]; both world to camera."""
    turn = np.eye(4)
    turn[:3, :3] = face_from_rig(face)
    return np.asarray(turn @ viewmat)


def face_name(name: str, face: int) -> str:
    """Return the name of a face of the panorama ``name``: as splat sfm names the files of faces."""
    return f"{name}/{face}{PurePosixPath(name).suffix}"


def panorama_name(name: str) -> str | None:
    """Return the name of the panorama of which face_name() calls a face ``name``; None where it is no face's."""
    path = PurePosixPath(name)
    faces = [face_name(str(path.parent), face) for face in range(FACES)]
    return str(path.parent) if name in faces else None


def places_of(rays: NDArray[np.float64], width: int, height: int) -> NDArray[np.float64]:
    """Return [..., 2], column and row in pixels from the upper left corner where a panorama shows rays [..., 3]."""
    east = np.arctan2(rays[..., 0], rays[..., 2])
    down = np.arctan2(rays[..., 1], np.hypot(rays[..., 0], rays[..., 2]))
    return np.stack([(east / (2 * math.pi) + 0.5) * width, (down / math.pi + 0.5) * height], axis=-1)


@dataclass(frozen=True, slots=True, eq=False)
class PanoramaFace:
    """The lens through which a face of a panorama is seen, with what undistort.py uses of a ``pycolmap.Camera``.

    width, height: of the panorama in pixels. face: 0 to FACES - 1.
    """

    width: int
    height: int
    face: int

    @property
    def model_name(self) -> str:
        return EQUIRECTANGULAR

    @property
    def params(self) -> NDArray[np.float64]:
        """[3], width, height and face: other numbers for each face, as lens_key() asks for."""
        return np.array([self.width, self.height, self.face], dtype=np.float64)

    def img_from_cam(self, rays: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return [N, 2], pixels of the panorama that show ``rays`` [N, 3] of the face.

        Their columns are not cut at the panorama's edges, so that they are side by side.
        """
        turns = (self.face + FACES // 3) % FACES - FACES // 3  # from the panorama's middle: -2 to 3
        places = places_of(rays, self.width, self.height)
        places[:, 0] += turns * self.width / FACES
        return places
