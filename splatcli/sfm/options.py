"""SfmOptions: what a user may choose of structure from motion, checked."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from splatcli.errors import UsageError

CameraPer = Literal["folder", "image", "all"]
Matching = Literal["auto", "exhaustive", "sequential", "retrieval"]
#: Lens models that are estimated, those of pycolmap that the scene reader can undo. The first is the default.
MODELS = ("SIMPLE_RADIAL", "OPENCV", "RADIAL", "PINHOLE", "SIMPLE_PINHOLE", "OPENCV_FISHEYE")
#: Frames taken from a video, by default: exhaustive matching of so many takes minutes on a small machine.
VIDEO_FRAMES = 120
#: A model of fewer images is no scene.
MIN_IMAGES = 3


@dataclass(frozen=True, slots=True)
class SfmOptions:
    """All that decides the result, beside the images themselves.

    camera_model: one of MODELS. camera_per: which images share a lens; those of different sizes never do.
    max_image_size: pixels of the longer side at which features are looked for; larger images are reduced for that.
    max_features: the strongest that are kept of an image.
    frames: at most so many, the sharpest of as many equal stretches; None takes all images, VIDEO_FRAMES of a video.
    seed: of every random choice.
    """

    camera_model: str = MODELS[0]
    camera_per: CameraPer = "folder"
    matching: Matching = "auto"
    max_image_size: int = 1600
    max_features: int = 8192
    frames: int | None = None
    seed: int = 42

    def __post_init__(self) -> None:
        """Raises UsageError for a value that cannot be followed."""
        for flag, value, known in (
            ("--camera-model", self.camera_model, MODELS),
            ("--camera-per", self.camera_per, get_args(CameraPer)),
            ("--matching", self.matching, get_args(Matching)),
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

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)
