"""What is known of lenses before anything is solved: who shares one, and the focal length that EXIF tells."""

from __future__ import annotations

import math
from pathlib import Path, PurePosixPath

from PIL import Image

from splatcli.scene._pycolmap import pycolmap
from splatcli.scene.filetypes import FORMATS
from splatcli.sfm.options import CameraPer

#: Focal length over the longer side where nothing is known: 45 degrees, between a phone and a standard lens.
GUESSED_FOCAL = 1.2
#: EXIF: the sub-folder of the camera's tags, and the focal length on 35 mm film in it.
_EXIF_IFD, _FOCAL_35MM = 0x8769, 0xA405
#: The longer side of 35 mm film, mm.
_FILM = 36.0

LensKey = tuple[str, int, int, float]


def focal_share(path: Path) -> float:
    """Focal length over the longer side of the photo, as EXIF tells; 0 where it does not."""
    try:
        with Image.open(path, formats=FORMATS) as image:
            # A PNG without EXIF would be decoded to look for some behind the pixels.
            if image.format == "PNG" and "exif" not in image.info:
                return 0.0
            share = float(image.getexif().get_ifd(_EXIF_IFD).get(_FOCAL_35MM, 0)) / _FILM
    except Exception:
        return 0.0  # the picture can be whole although its metadata is not
    return share if math.isfinite(share) and 0.1 <= share <= 50 else 0.0


def lens_key(name: str, width: int, height: int, share: float, per: CameraPer) -> LensKey:
    """What photos have in common that share a lens: the folder (or the name, or nothing), size and zoom."""
    owner = {"folder": str(PurePosixPath(name).parent), "image": name, "all": ""}[per]
    return owner, width, height, share


def first_guess(model: str, key: LensKey) -> pycolmap.Camera:
    """The camera that the solver starts from."""
    _, width, height, share = key
    focal = (share or GUESSED_FOCAL) * max(width, height)
    camera = pycolmap.Camera.create_from_model_name(0, model, focal, width, height)
    camera.has_prior_focal_length = share > 0
    return camera
