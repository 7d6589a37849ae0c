"""Camera: one view without distortion, in the one convention that the whole package uses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from splatcli.errors import UsageError

#: The near plane of a camera that says nothing else, world units.
NEAR = 0.01

#: How a camera point (x, y, z) becomes a pixel: by x/z ("pinhole"), by x ("ortho"), or by the angle between the point
#: and the optical axis ("fisheye", equidistant). docs/math.md 3.1, 3.9, 3.10
CameraModel = Literal["pinhole", "ortho", "fisheye"]
MODELS: tuple[CameraModel, ...] = get_args(CameraModel)

#: Angle from the optical axis, in radians, up to which the fisheyes of a scene have pixels: 85 degrees. Gaussians at a
#: right angle have a camera z of 0, where no near plane can be.
MAX_ANGLE = math.radians(85.0)


@dataclass(frozen=True, slots=True, eq=False)
class Camera:
    """A camera with OpenCV axes: x right, y down, z forward.

    name: the image's path relative to the image folder, with forward slashes; unique in a scene.
    width, height: pixels.
    fx, fy, cx, cy: pixels; the upper left *corner* is (0, 0), the first pixel's centre (0.5, 0.5). An "ortho" camera's
        fx and fy are pixels a world unit, a "fisheye" one's pixels a radian.
    viewmat: [4, 4] float64, world to camera; made of a list, or of a tensor on the CPU without gradient.
    near: the near plane: camera z up to which Gaussians are not rendered, world units.
    model: "pinhole", "ortho" or "fisheye". Scenes have pinholes and fisheyes.

    Raises ValueError for another model, and for a viewmat of another shape or with a gradient. Numbers are checked when
    the camera is rendered.
    """

    name: str
    width: int
    height: int
    fx: float
    fy: float
    cx: float
    cy: float
    viewmat: NDArray[np.float64]
    near: float = NEAR
    model: CameraModel = "pinhole"

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ValueError(f"there is no camera model {self.model!r}; there are {', '.join(MODELS)}")
        if getattr(self.viewmat, "requires_grad", False):
            raise ValueError(
                "the camera's viewmat requires a gradient, and a camera has none: "
                "splatcli.rasterizer.render(gaussians, camera, viewmat=pose) gives the pose one"
            )
        object.__setattr__(self, "viewmat", np.asarray(self.viewmat, dtype=np.float64))
        if self.viewmat.shape != (4, 4):
            raise ValueError(f"the camera's viewmat has shape {self.viewmat.shape}, not (4, 4)")

    def __setstate__(self, state: list[Any]) -> None:
        """Take what pickle and copy store: the fields in their order, those of the version that wrote them."""
        for k, one in enumerate(fields(self)):
            object.__setattr__(self, one.name, state[k] if k < len(state) else one.default)

    @property
    def K(self) -> NDArray[np.float64]:
        """[3, 3] the intrinsics [[fx, 0, cx], [0, fy, cy], [0, 0, 1]], pixels from the upper left corner of the image.

        As gsplat's ``Ks``. Of an "ortho" camera fx and fy are pixels a world unit, of a "fisheye" one pixels a radian.
        """
        return np.array([[self.fx, 0.0, self.cx], [0.0, self.fy, self.cy], [0.0, 0.0, 1.0]])

    @property
    def camtoworld(self) -> NDArray[np.float64]:
        """[4, 4] camera to world, the inverse of viewmat: columns x right, y down, z forward, and the position.

        In world units. nerfstudio's matrices have y up and z back: their second and third columns are the negatives.
        """
        matrix = np.eye(4)
        matrix[:3, :3], matrix[:3, 3] = self.viewmat[:3, :3].T, self.center
        return matrix

    @property
    def center(self) -> NDArray[np.float64]:
        """[3] the camera's position in the world."""
        rotation, translation = self.viewmat[:3, :3], self.viewmat[:3, 3]
        return -product(rotation.T, translation[:, None])[:, 0]

    def project(
        self, points: NDArray[np.floating[Any]]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Return (x, y, z) of each of ``points`` [P, 3], world units: pixel coordinates and camera z, [P] each.

        x and y are NaN where z is not positive.
        """
        points = np.asarray(points, dtype=np.float64)
        # Sums in a fixed order for any number of threads: every process of a run starts from the same points.
        x, y, z = (
            (row[0] * points[:, 0] + row[1] * points[:, 1]) + (row[2] * points[:, 2] + row[3])
            for row in self.viewmat[:3]
        )
        depth = np.where(z > 0.0, z, np.nan)
        if self.model == "pinhole":
            return self.fx * x / depth + self.cx, self.fy * y / depth + self.cy, z
        if self.model == "ortho":
            scale = np.where(z > 0.0, 1.0, np.nan)
        else:
            axis = np.hypot(x, y)
            scale = np.where(axis > 0.0, np.arctan2(axis, depth) / np.where(axis > 0.0, axis, 1.0), 1.0 / depth)
        return self.fx * (x * scale) + self.cx, self.fy * (y * scale) + self.cy, z

    def pixels_of(
        self, points: NDArray[np.floating[Any]]
    ) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.bool_]]:
        """Return column and row of each of ``points`` [P, 3], world units, and whether it is in the image.

        Both are 0 where it is not.
        """
        x, y, _ = self.project(points)
        inside = (x >= 0) & (x < self.width) & (y >= 0) & (y < self.height)
        return np.where(inside, x, 0).astype(np.intp), np.where(inside, y, 0).astype(np.intp), inside

    def resized(self, width: int, height: int) -> Camera:
        """Return the same view at another image size; intrinsics scale with each axis."""
        sx, sy = width / self.width, height / self.height
        return replace(
            self,
            width=width,
            height=height,
            fx=self.fx * sx,
            fy=self.fy * sy,
            cx=self.cx * sx,
            cy=self.cy * sy,
        )

    def scaled(self, factor: float) -> Camera:
        """Return the same view with the sides of its image times ``factor``, rounded, at least a pixel."""
        return self.resized(max(1, round(factor * self.width)), max(1, round(factor * self.height)))

    def downscaled(self, divisor: int) -> Camera:
        """Return the same view with ``divisor`` x ``divisor`` pixels in each; a shorter side becomes one pixel.

        The pixels that are left over at the right and at the bottom are cut off.
        """
        x, y = min(divisor, self.width), min(divisor, self.height)
        return replace(
            self,
            width=self.width // x,
            height=self.height // y,
            fx=self.fx / x,
            fy=self.fy / y,
            cx=self.cx / x,
            cy=self.cy / y,
        )

    def as_pinhole(self) -> Camera:
        """Return the pinhole of the same pose, size and focal lengths, which shows less than a fisheye does.

        The near plane of a fisheye of a scene is nearer than that of a pinhole (scene/build.py); this moves it back.
        Raises UsageError for an orthographic camera.
        """
        if self.model == "pinhole":
            return self
        if self.model == "ortho":
            raise UsageError(f"{self.name!r} is orthographic, and no pinhole shows what it does")
        return replace(self, model="pinhole", near=self.near / math.cos(MAX_ANGLE))


def lens_rows(cameras: Sequence[Camera]) -> list[int]:
    """Return for each camera the row of its intrinsics among those that differ, in the order of their first camera."""
    rows: dict[tuple[float | str, ...], int] = {}
    return [rows.setdefault((c.width, c.height, c.fx, c.fy, c.cx, c.cy, c.model), len(rows)) for c in cameras]


def lens_at_size(lenses: Sequence[Camera], camera: Camera) -> int | None:
    """Return the index of the one of ``lenses`` that sees as ``camera`` does, whose image may have another size.

    Its height counts: what ``splat render --size`` makes of a camera may show less to both sides, but not more.
    An image of the same size has the same intrinsics. Sides are whole pixels, which moves those of another size by a
    pixel at most; the nearest lens is taken. None where there is none.
    """
    off = []
    for lens in lenses:
        factor = camera.height / lens.height
        same_size = (camera.width, camera.height) == (lens.width, lens.height)
        alike = camera.model == lens.model and camera.width < factor * lens.width + 1.0
        side = min(camera.width, camera.height)
        differences = (
            (camera.fx / (factor * lens.fx) - 1.0) * side,
            (camera.fy / (factor * lens.fy) - 1.0) * side,
            (camera.cx - camera.width / 2) - factor * (lens.cx - lens.width / 2),
            camera.cy - factor * lens.cy,
        )
        most = max(map(abs, differences))
        off.append(most if alike and most <= (0.0 if same_size else 1.0) else math.inf)
    best = min(range(len(off)), key=off.__getitem__, default=None)
    return best if best is not None and off[best] < math.inf else None


def product(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return [I, J], the product of a [I, 3] and b [3, J], without BLAS, whose last bits depend on the processor."""
    columns: NDArray[np.float64] = a[:, 0:1] * b[0] + a[:, 1:2] * b[1] + a[:, 2:3] * b[2]
    return columns


#: The mean of unit vectors that is shorter than this is no direction.
_COMMON = 1e-3


def common_up(cameras: Sequence[Camera]) -> NDArray[np.float64] | None:
    """Return [3], unit, world: the mean of the cameras' up directions; None when they cancel out, or without any."""
    return mean_direction(np.array([-camera.viewmat[1, :3] for camera in cameras]).reshape(-1, 3))


def mean_direction(directions: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """Return [3], unit: the mean direction of unit vectors [N, 3]; None when they cancel out, or without any."""
    total = directions.sum(axis=0)
    length = float(np.linalg.norm(total))
    return np.asarray(total / length) if length > _COMMON * len(directions) else None


#: Below this angle, in radians, the series of the coefficients are exact to double precision.
_SMALL = 1e-4


def apply_pose_delta(camera: Camera, delta: NDArray[np.float64]) -> Camera:
    """Return ``camera`` turned about its own centre and then shifted, both in its own axes.

    delta: [6], a rotation vector in radians and a translation in world units. Zeros return the camera itself.
    """
    if not delta.any():
        return camera
    rotation, _ = _exponential(delta[:3])
    viewmat = camera.viewmat.copy()
    viewmat[:3] = product(rotation, camera.viewmat[:3])
    viewmat[:3, 3] += delta[3:]
    return replace(camera, viewmat=viewmat)


def pose_delta_vjp(camera: Camera, delta: NDArray[np.float64], v_viewmat: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return [6], the gradient in ``delta``.

    v_viewmat: [4, 4], the gradient in the matrix of ``apply_pose_delta(camera, delta)``.
    """
    rotation, jacobian = _exponential(delta[:3])
    turned = product(rotation, camera.viewmat[:3])
    v_turn = np.cross(turned.T, v_viewmat[:3].T).sum(axis=0)
    return np.concatenate([product(jacobian.T, v_turn[:, None])[:, 0], v_viewmat[:3, 3]])


def _exponential(vector: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the rotation of a rotation vector, and the left Jacobian: R(w + dw) = R(J dw) R(w) to first order."""
    x, y, z = vector
    cross = np.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])
    angle2 = float(x * x + y * y + z * z)
    angle = math.sqrt(angle2)
    if angle < _SMALL:
        sine, cosine, rest = 1.0 - angle2 / 6.0, 0.5 - angle2 / 24.0, 1.0 / 6.0 - angle2 / 120.0
    else:
        sine = math.sin(angle) / angle
        cosine = 2.0 * (math.sin(0.5 * angle) / angle) ** 2
        rest = (1.0 - sine) / angle2
    square = product(cross, cross)
    return np.eye(3) + sine * cross + cosine * square, np.eye(3) + cosine * cross + rest * square


#: Least mean of sin^2 of the angles between the axes and one direction (about 0.6 degrees); below it their nearest
#: point is dominated by noise.
_LEAST_SPREAD = 1e-4


def focus_point(poses: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """Return [3], the point nearest to all optical axes in least squares; None if the axes are parallel.

    poses: [N, 4, 4] camera to world, of which column 2 is the axis, forward or back.
    With unit directions d and centres c it solves sum (I - d d^T) (p - c) = 0.
    """
    across = np.eye(3) - poses[:, :3, 2, None] * poses[:, None, :3, 2]
    normal = across.mean(axis=0)
    if np.linalg.eigvalsh(normal)[0] < _LEAST_SPREAD:
        return None
    return np.linalg.solve(normal, np.einsum("nij,nj->i", across, poses[:, :3, 3]) / len(poses))
