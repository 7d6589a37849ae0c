"""SfmOptions: what a user may choose of structure from motion, checked."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from splatcli.errors import UsageError

CameraPer = Literal["folder", "image", "all"]
Georeferencing = Literal["auto", "on", "off"]
Matching = Literal["auto", "exhaustive", "sequential", "retrieval"]
Mapper = Literal["incremental", "global"]
#: Lens models that are estimated, those of pycolmap that the scene reader can undo.
MODELS = (
    "SIMPLE_RADIAL",
    "OPENCV",
    "RADIAL",
    "PINHOLE",
    "SIMPLE_PINHOLE",
    "OPENCV_FISHEYE",
    "FULL_OPENCV",
    "THIN_PRISM_FISHEYE",
)
#: The default: the first of MODELS for mapping, then the one that held-out observations ask for (see lens.py).
AUTO = "auto"
#: The lens model that wide images are mapped with where their lens is not known.
FISHEYE = "OPENCV_FISHEYE"
#: Frames taken from a video, by default: exhaustive matching of so many takes minutes on a small machine.
VIDEO_FRAMES = 120
#: ... and from several at most.
MOST_FRAMES = 300
#: ... and from one of panoramas, each of which becomes six images.
PANORAMA_FRAMES = 40
#: The folder beside the database with frames of videos that are panoramas.
PANORAMAS = "panoramas"
#: The folder beside the database with the colours of the features, a file for each image in it.
COLOURS = "colours"
#: The file beside the database with the places where features do not move.
STATIONARY = "stationary.json"
#: In a folder that is being worked in: the file that is locked meanwhile, and what its features were made from.
LOCK, KEY = "lock", "key.json"
#: A model of fewer images is no scene.
MIN_IMAGES = 3
#: The remedy for a lack of memory.
SMALLER = "--max-image-size 1000, --max-features 4000 or fewer images take less memory"


def is_fisheye_model(name: str) -> bool:
    """Return whether a COLMAP lens model goes by the angle from the optical axis."""
    return "FISHEYE" in name


@dataclass(frozen=True, slots=True)
class SfmOptions:
    """All that decides the result, beside the images themselves.

    camera_model: one of MODELS, or AUTO. camera_per: which images share a lens; those of different sizes never do.
    mapper: incremental adds image after image to a model; global estimates all rotations, then all positions, at once.
    max_image_size: pixels of the longer side at which features are looked for; larger images are reduced for that.
    max_features: the strongest that are kept of an image.
    frames: at most so many, the sharpest of stretches that are equal in number, or of a video in motion; None takes all
        images, VIDEO_FRAMES of a video, and at most MOST_FRAMES of several.
    seed: of every random choice.
    georeference: align with the GPS positions of the images: always, never, or where these are good enough.
    scale_from: "A,B,LENGTH": the cameras of the images A and B are LENGTH metres apart; None leaves the scale as it is.
    control_points: ControlPoints.as_dict() of a file of ground control points to align with, or None.
    cameras: known_cameras() that are held, so that points alone are triangulated, or None.
    """

    camera_model: str = AUTO
    camera_per: CameraPer = "folder"
    matching: Matching = "auto"
    mapper: Mapper = "incremental"
    max_image_size: int = 1600
    max_features: int = 8192
    frames: int | None = None
    seed: int = 42
    georeference: Georeferencing = "auto"
    scale_from: str | None = None
    control_points: dict[str, Any] | None = None
    cameras: dict[str, dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        """Raise UsageError for a value that cannot be followed."""
        for flag, value, known in (
            ("--camera-model", self.camera_model, (AUTO, *MODELS)),
            ("--camera-per", self.camera_per, get_args(CameraPer)),
            ("--matching", self.matching, get_args(Matching)),
            ("--mapper", self.mapper, get_args(Mapper)),
            ("--georeference", self.georeference, get_args(Georeferencing)),
        ):
            if value not in known:
                raise UsageError(f"there is no {value!r}", where=flag, remedy=f"one of {', '.join(known)}")
        for flag, number, least in (
            ("--max-image-size", self.max_image_size, 64),
            ("--max-features", self.max_features, 64),
            ("--frames", MIN_IMAGES if self.frames is None else self.frames, MIN_IMAGES),
            ("--seed", self.seed, 0),
        ):
            if not least <= number < 2**31:
                raise UsageError(f"{number} is not in range", where=flag, remedy=f"at least {least}")
        if self.cameras is not None:
            for flag, given in (
                ("--camera-model", self.camera_model != AUTO),
                ("--mapper", self.mapper != "incremental"),
                ("--georeference", self.georeference == "on"),
                ("--scale-from", self.scale_from is not None),
                ("--gcp", self.control_points is not None),
            ):
                if given:
                    raise UsageError("known cameras are held as they are", where=flag, remedy=f"leave out {flag}")
        if self.control_points is not None and (self.scale_from is not None or self.georeference == "on"):
            raise UsageError(
                "the model is aligned with control points alone",
                where="--gcp",
                remedy="leave out --scale-from and --georeference on",
            )
        if self.scale_from is not None:
            self.known_distance()
            if self.georeference == "on":
                raise UsageError(
                    "the scale comes either from GPS positions or from a distance",
                    where="--scale-from",
                    remedy="leave out --georeference on",
                )

    @property
    def sharing(self) -> CameraPer:
        """Which images share a lens; with known cameras each has its own."""
        return self.camera_per if self.cameras is None else "image"

    @property
    def mapped_model(self) -> str:
        """The lens model that the mapper estimates."""
        return MODELS[0] if self.camera_model == AUTO else self.camera_model

    @property
    def matched_model(self) -> str:
        """The lens model of cameras while pairs are verified.

        COLMAP verifies no pair of fisheyes of unknown focal length; the fundamental matrix of their pixels holds.
        """
        return MODELS[0] if is_fisheye_model(self.mapped_model) else self.mapped_model

    def known_distance(self) -> tuple[str, str, float]:
        """Return the two images of scale_from and the metres between their cameras. Raises UsageError."""
        parts = (self.scale_from or "").rsplit(",", 1)
        names = parts[0].split(",")
        try:
            length = float(parts[-1])
        except ValueError:
            length = math.nan
        if len(parts) != 2 or len(names) != 2 or names[0] == names[1] or not 0 < length < math.inf:
            raise UsageError(
                f"{self.scale_from!r} is not A,B,LENGTH",
                where="--scale-from",
                remedy="two names of images, and the metres between their cameras: --scale-from a.jpg,b.jpg,2.5",
            )
        return names[0].strip(), names[1].strip(), length

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        values = asdict(self)
        # Cameras made before there were these options are still known.
        if self.control_points is None:
            del values["control_points"]
        if self.mapper == "incremental":
            del values["mapper"]
        return values
