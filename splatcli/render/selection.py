"""Selection of views: ``test``, ``train``, ``all``, names of images, the name of a camera path, or a camera file."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from splatcli.errors import UsageError
from splatcli.render.camera_files import read_camera_file
from splatcli.render.camera_paths import Rig, circle, ellipse, nearest_order, orbit, spiral, through
from splatcli.render.panorama import panorama_of
from splatcli.scene.camera import NEAR, Camera, CameraModel
from splatcli.scene.panorama import FACES, face_name, panorama_name
from splatcli.sizes import listed

SPLITS = ("test", "train", "all")
#: The label of views that are named by their images.
NAMED = "named"
#: Names that a message lists where none is near, and where some are.
_SHOWN, _NEAR = 5, 3
#: Camera paths that are computed from the training cameras.
PATHS = ("orbit", "ellipse", "spiral", "interpolate")
#: Those of them that go around a model whose cameras are not known.
AROUND = ("orbit", "ellipse")

#: Default number of frames (four seconds at 30 fps); and for interpolation, frames from one camera to the next.
FRAMES = 120
_FRAMES_A_CAMERA = 10

_NO_CAMERAS = "the model has no cameras"
#: What messages call a camera file where none is known.
CAMERA_FILE = Path("cameras.json")


@dataclass(frozen=True, slots=True)
class Views:
    """Cameras to render.

    label: the name for folders and messages.
    from_run: the cameras are the run's own, so renders can be compared with the images of the scene.
    fps: the frame rate of a camera file.
    note: what is worth knowing of a path.
    """

    label: str
    cameras: list[Camera]
    from_run: bool
    fps: float | None = None
    note: str | None = None

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """The distinct sizes (width, height), most frequent first."""
        return _sizes(self.cameras)

    def sized(self, width: int, height: int) -> Views:
        """Return the views at another size. They cannot be compared with images."""
        return replace(self, cameras=[_sized(camera, width, height) for camera in self.cameras], from_run=False)

    def projected(self, model: CameraModel, distance: Callable[[Camera], float]) -> Views:
        """Return the views through cameras of another model. They cannot be compared with images.

        A fisheye sees 180 degrees from the image's centre to both sides of its farthest corner. An orthographic camera
        shows what the pinhole shows at the distance of the scene, ``distance``: one of a path that of its frames.
        A fisheye is changed by way of the pinhole of its scale in the middle. Views that are of this model stay what
        they are. Raises UsageError for orthographic ones.
        """
        if all(camera.model == model for camera in self.cameras):
            return self
        if any(camera.model == "ortho" for camera in self.cameras):
            raise UsageError(
                "the views are ortho cameras, and only pinholes and fisheyes are changed",
                where="--projection",
                remedy="leave it out",
            )
        away = [1.0] * len(self.cameras)
        if model == "ortho":
            is_path = self.label in PATHS or self.fps is not None
            few = self.cameras[:: -(-len(self.cameras) // _FEW)] if is_path else self.cameras
            away = [distance(camera) or 1.0 for camera in few]
            if is_path:
                away = [float(np.median(away))] * len(self.cameras)
        changed = [_of_model(camera, model, z) for camera, z in zip(self.cameras, away, strict=True)]
        return replace(self, cameras=changed, from_run=False)

    def panoramas(self, size: tuple[int, int] | None) -> Views:
        """Return the panoramas from the positions of the views, one where all faces of a panorama are there.

        size: width and height. Raises UsageError.
        """
        names = {camera.name for camera in self.cameras}
        made: list[Camera] = []
        for camera in self.cameras:
            whole = panorama_name(camera.name)
            if whole is None or any(face_name(whole, face) not in names for face in range(FACES)):
                made.append(panorama_of(camera, size))
            elif camera.name == face_name(whole, 0):  # the panorama's own pose
                made.append(replace(panorama_of(camera, size), name=whole))
        return replace(self, cameras=made, from_run=False)


@dataclass(frozen=True, slots=True, eq=False)
class PathOptions:
    """Options of a camera path.

    frames: None for FRAMES, or more for an interpolation of many cameras.
    loop: close an interpolated path; the other paths are closed anyway.
    nearest: order cameras by the nearest that is left, not by name.
    focus: the point to look at, if not the focus of the cameras.
    distance: returns the distance of the scene from a camera, for cameras without a focus.
    georeferenced: z is up, whatever the cameras say: those of a flight look down.
    fov: the vertical field of view in degrees, if not that of the cameras.
    """

    frames: int | None = None
    loop: bool = False
    nearest: bool = False
    focus: tuple[float, float, float] | None = None
    distance: Callable[[Camera], float] | None = None
    georeferenced: bool = False
    fov: float | None = None


_Z_UP = np.array([0.0, 0.0, 1.0])


@dataclass(frozen=True, slots=True)
class KnownCameras:
    """The cameras that ``--views`` chooses among: those of a run, a scene or a camera file; none of a file of splats.

    train, test: rows of them. camera_file: the one to advise where there are no cameras.
    """

    cameras: Sequence[Camera] = ()
    train: Sequence[int] = ()
    test: Sequence[int] = ()
    camera_file: Path = CAMERA_FILE

    def split(self, name: str) -> list[Camera]:
        """Return the cameras of one of SPLITS. Raises UsageError where it has none."""
        rows = {"test": self.test, "train": self.train, "all": range(len(self.cameras))}[name]
        if not rows:
            raise UsageError(
                f"the run has no {'held-out' if name == 'test' else name} views",
                where="--views",
                remedy="--views train, or --views all",
            )
        return [self.cameras[row] for row in rows]


def select_views(
    text: str,
    known: KnownCameras,
    options: PathOptions | None = None,
    *,
    size: tuple[int, int] | None = None,
    images_only: bool = False,
) -> Views:
    """Return the views that ``text`` names: one of SPLITS or PATHS, a .json, or images with commas.

    options: of a camera path, which has cameras of the model that the known ones have.
    size: of the images, for a camera file that has none.
    images_only: advise neither paths nor camera files.
    Raises UsageError when there are none, SceneError for a broken camera file.
    """
    if text in PATHS:
        return _path(text, known, options or PathOptions())
    path = Path(text)
    if path.suffix.lower() == ".json":
        file = read_camera_file(path, min((camera.near for camera in known.cameras), default=NEAR), size)
        return Views(path.stem, file.cameras, from_run=False, fps=file.fps)
    if not known.cameras:
        raise UsageError(
            _NO_CAMERAS,
            where="--views",
            remedy=f"name the scene with --data SCENE, or a camera file: --views {known.camera_file}",
        )
    if text in SPLITS:
        return Views(text, known.split(text), from_run=True)
    words = SPLITS if images_only else (*SPLITS, *PATHS)
    return Views(NAMED, _named(text, known.cameras, words), from_run=True)


def _named(text: str, cameras: Sequence[Camera], words: Sequence[str]) -> list[Camera]:
    """Return the cameras of the images that ``text`` names with commas, in its order, each once. Raises UsageError.

    An image may be named without its ending, its folder or both, where that leaves one, and by the path of its file.
    The name of a panorama names its faces. words: SPLITS and PATHS that may be named instead.
    """
    if whole := [camera for camera in cameras if camera.name == text]:  # a name may have a comma
        return whole
    if faces := _faces_of(text, cameras):
        return faces
    found = []
    for name in map(str.strip, text.split(",")):
        found += _faces_of(name, cameras) or [_camera_of(name, cameras, words)]
    return list({camera.name: camera for camera in found}.values())


def _faces_of(name: str, cameras: Sequence[Camera]) -> list[Camera]:
    """Return the cameras of the faces of a panorama, none where ``name`` is not one's."""
    names = {face_name(name, face) for face in range(FACES)}
    return [camera for camera in cameras if camera.name in names]


def _camera_of(name: str, cameras: Sequence[Camera], words: Sequence[str]) -> Camera:
    written = [(camera, PurePosixPath(camera.name)) for camera in cameras]
    for matches in (
        [camera for camera, path in written if str(path) == name],
        [camera for camera, path in written if str(path.with_suffix("")) == name],
        [camera for camera, path in written if path.name == name],
        [camera for camera, path in written if path.stem == name],
        [camera for camera, path in written if name.endswith(f"/{path}")],
    ):
        if len(matches) > 1:
            raise UsageError(
                f"{name!r} names {len(matches)} views",
                where="--views",
                remedy=f"name one with its folder: {listed([camera.name for camera in matches], _SHOWN)}",
            )
        if matches:
            return matches[0]
    names = [camera.name for camera in cameras]
    short = {PurePosixPath(one).name: one for one in reversed(names)}
    if name in words:
        raise UsageError(
            f"{name} stands alone, and here other views are named beside it",
            where="--views",
            remedy=f"one of {', '.join(words)} (all has test and train), or images with commas",
        )
    files = "a .json of cameras, " if PATHS[0] in words else ""
    near = difflib.get_close_matches(name, [*words, *names], n=_NEAR)
    near += [short[one] for one in difflib.get_close_matches(PurePosixPath(name).name, short, n=_NEAR)]
    raise UsageError(
        f"{name!r} names no views, and no image of one of the {len(cameras)}",
        where="--views",
        remedy=f"did you mean {' or '.join(list(dict.fromkeys(near))[:_NEAR])}?"
        if near
        else f"{', '.join(words)}, {files}or images with commas: {listed(names, _SHOWN)}",
    )


def _path(name: str, known: KnownCameras, options: PathOptions) -> Views:
    """Return the frames of the path ``name`` along the training cameras, or all where the split is not known.

    They have the most frequent size and the median focal length of these.
    """
    cameras = [known.cameras[row] for row in known.train] or list(known.cameras)
    if not cameras:
        raise UsageError(
            _NO_CAMERAS,
            where="--views",
            remedy=f"name the cameras for {name}: --cameras {known.camera_file}, or the scene with --data; "
            f"{' and '.join(AROUND)} do without",
        )
    lens = _lens(cameras) if options.fov is None else _of_fov(_lens(cameras), options.fov)
    poses = np.stack([np.linalg.inv(camera.viewmat) for camera in cameras])
    frames = options.frames or (
        FRAMES if name != "interpolate" else max(FRAMES, _FRAMES_A_CAMERA * (len(cameras) - 1 + options.loop))
    )
    note = None
    if name == "interpolate":
        order = sorted(range(len(cameras)), key=lambda i: cameras[i].name)
        poses = poses[order]
        key_poses = poses[nearest_order(poses)] if options.nearest else poses
        path, _ = through(key_poses, frames, loop=options.loop)
    else:
        focus = None if options.focus is None else np.array(options.focus)
        # A spiral keeps to the up of images, which cameras that look down have too.
        rig = Rig.of(poses, focus, _Z_UP if options.georeferenced and name != "spiral" else None)
        path = _around(name, rig, frames, options)
        if name == "orbit" and (arc := circle(rig).arc) is not None:
            degrees = np.degrees(arc[1] - arc[0])
            note = f"the cameras cover {degrees:.0f} degrees of the circle, and the orbit swings there"
    named = [replace(lens, name=f"{i:05d}", viewmat=np.linalg.inv(pose)) for i, pose in enumerate(path)]
    return Views(name, named, from_run=False, note=note)


def _around(name: str, rig: Rig, frames: int, options: PathOptions) -> NDArray[np.float64]:
    if name == "orbit":
        return orbit(rig, frames)
    if name == "ellipse":
        return ellipse(rig, frames)
    distance = None
    if rig.focus is None and options.distance is not None:
        distance = options.distance(Camera("", 1, 1, 1.0, 1.0, 0.5, 0.5, np.linalg.inv(rig.poses[0])))
    return spiral(rig, frames, distance)


def _lens(cameras: Sequence[Camera]) -> Camera:
    """Return a camera of the most frequent size, with the median focal lengths of that size and a central axis.

    Its near plane is the nearest of all. Raises UsageError for cameras of several models.
    """
    models = sorted({camera.model for camera in cameras})
    if len(models) > 1:
        raise UsageError(
            f"the cameras of a path have one model, and these have {', '.join(models)}",
            where="--cameras",
            remedy="leave cameras out of the file",
        )
    width, height = _sizes(cameras)[0]
    alike = [camera for camera in cameras if (camera.width, camera.height) == (width, height)]
    fx, fy = (float(np.median([getattr(camera, key) for camera in alike])) for key in ("fx", "fy"))
    near = min(camera.near for camera in cameras)
    return Camera("", width, height, fx, fy, width / 2, height / 2, np.eye(4), near, models[0])


def _of_fov(lens: Camera, fov: float) -> Camera:
    """Return a pinhole with a vertical field of view of ``fov`` degrees. Raises UsageError for orthographic cameras."""
    if lens.model == "ortho":
        raise UsageError("orthographic cameras have no field of view", where="--fov", remedy="leave it out")
    lens = lens.as_pinhole()
    factor = 0.5 * lens.height / np.tan(np.radians(fov) / 2) / lens.fy
    return replace(lens, fx=lens.fx * factor, fy=lens.fy * factor)


#: Frames of a path at most at which the distance of the scene is measured.
_FEW = 12


def _of_model(camera: Camera, model: CameraModel, distance: float) -> Camera:
    """Return a pinhole or fisheye as a camera of ``model``.

    distance: camera z at which an orthographic one shows the same.
    """
    if camera.model == model:
        return camera
    camera = camera.as_pinhole()
    if model == "pinhole":
        return camera
    if model == "ortho":
        return replace(camera, model=model, fx=camera.fx / distance, fy=camera.fy / distance)
    across = max(camera.cx, camera.width - camera.cx), max(camera.cy, camera.height - camera.cy)
    focal = float(np.hypot(*across)) / (np.pi / 2)
    return replace(camera, model=model, fx=focal, fy=focal)


def _sizes(cameras: Sequence[Camera]) -> list[tuple[int, int]]:
    return [size for size, _ in Counter((camera.width, camera.height) for camera in cameras).most_common()]


def _sized(camera: Camera, width: int, height: int) -> Camera:
    """Return the camera at another size with the same vertical field of view."""
    factor = height / camera.height
    return replace(
        camera,
        width=width,
        height=height,
        fx=camera.fx * factor,
        fy=camera.fy * factor,
        cx=width / 2 + (camera.cx - camera.width / 2) * factor,
        cy=camera.cy * factor,
    )
