"""Masks: which pixels of an image count. Found beside the images or named by the scene, checked, and read.

A mask has the size of its image; what is black or transparent in it is masked, as in COLMAP and nerfstudio.
Masked pixels take no part in anything, or are empty (``data.mask_mode``).
"""

from __future__ import annotations

import contextlib
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from splatcli.config import DataConfig
from splatcli.errors import SceneError
from splatcli.scene.decode import decode_nonzero, read_header, same_shape
from splatcli.scene.find_images import SHOWN, SUFFIXES, Found, ambiguous_error, find_in, is_file
from splatcli.scene.source import Problems, SceneSource
from splatcli.sizes import listed

if TYPE_CHECKING:
    from torch import Tensor

#: Settings of ``data.masks`` that name no folder.
NONE, ALPHA = "none", "alpha"

#: What programs add to the name of an image for that of its mask.
_MARKS = ("_mask", ".mask")

#: Weight of masked pixels in a resampled one that hides it; beyond the rounding of the resampling.
_HIDES = 1e-3

_REMEDY = "add them, white where all of an image counts; splat train and splat sfm use no masks with --masks none"


def find_masks(source: SceneSource, found: Found, data: DataConfig, problems: Problems) -> dict[str, Path]:
    """Find the mask of each view, by name; none when there are none. Of reduced images, masks reduced alike come first.

    found: the images of all views. Every image has a mask or none has: the missing ones are added to ``problems``.
    """
    if data.masks in (NONE, ALPHA):
        return {}
    factor = int(data.resolution or 1) if found.originals else None
    if data.masks is None and any(view.mask is not None for view in source.views):
        return _named(source, factor, problems)
    folders = _folders(source, found, factor) if data.masks is None else [source.root / data.masks]
    folder = next((folder for folder in folders if folder.is_dir()), None)
    if folder is None:
        if data.masks is not None:
            raise SceneError(
                "the folder of masks is not there",
                where=folders[0],
                remedy="put the folder back; with splat train, --masks none uses no masks, --masks alpha the images' "
                "transparency",
            )
        source.notes += _unread(folders[-1])
        return {}
    masks = masks_in(folder, list(found.paths), problems, wanted=data.masks is not None)
    if not masks and data.masks is None:
        first = next(iter(found.paths), "a.jpg")
        source.notes.append(
            f"{folder.name}/ holds no mask of these images and is not used; that of {first} would be {first}.png, "
            f"{Path(first).stem}.png or {Path(first).stem}_mask.png"
        )
    return masks


def masks_in(folder: Path, names: list[str], problems: Problems, *, wanted: bool) -> dict[str, Path]:
    """Return each image's mask in ``folder``, by COLMAP's names (a.jpg.png), else by the image's with any ending.

    Where none is named so, a_mask and a.mask are, or a.jpg_mask and a.jpg.mask, with any ending.
    wanted: a folder without any mask of these images is a problem too. Masks of some images only always are one.
    """
    masks = {name: folder / f"{name}.png" for name in names if is_file(folder / f"{name}.png")}
    others = find_in(folder, {name: name for name in names if name not in masks})
    masks |= others.paths
    for name, candidates in others.ambiguous:
        problems.add(ambiguous_error(folder, name, candidates))
    missing = others.missing
    if len(missing) == len(names):
        masks = {name: mask for name in names if (mask := _marked(folder, name)) is not None}
        missing = [name for name in names if name not in masks]
    if missing and (masks or wanted):
        problems.add(
            SceneError(
                f"{len(missing)} of {len(names)} images have no mask: {listed(missing, SHOWN)}; "
                f"looked for {missing[0]}.png and {Path(missing[0]).stem}.*",
                where=folder,
                remedy=_REMEDY,
            )
        )
    return masks


def _marked(folder: Path, name: str) -> Path | None:
    """Return the mask of an image that its name calls one; None without it."""
    stems = (str(PurePosixPath(name).with_suffix("")), name)
    marked = (f"{stem}{mark}{suffix}" for stem in stems for mark in _MARKS for suffix in SUFFIXES)
    return next((folder / each for each in marked if is_file(folder / each)), None)


def check_mask(mask: Path, image: Path, stored: tuple[int, int], orientation: int, reduced: bool) -> int:
    """Return the EXIF orientation to apply to a mask: that of its image, unless it is upright already.

    stored: the image's size in its file. reduced: the image is a smaller copy, whose mask may be larger.
    Raises SceneError when the mask cannot be read or has another size.
    """
    header = read_header(mask)
    size = (header.width, header.height)
    upright = stored[::-1] if orientation >= 5 else stored
    for wanted, turn in ((stored, orientation), (upright, 1)):
        if size == wanted or (reduced and same_shape(size, wanted)):
            return turn
    raise SceneError(
        f"the mask is {size[0]}x{size[1]} pixels, its image {image.name} {stored[0]}x{stored[1]}",
        where=mask,
        remedy="make the mask from that image; splat train and splat sfm use no masks with --masks none",
    )


def read_mask(mask: Path, orientation: int) -> NDArray[np.bool_]:
    """Return [H, W], the pixels that a mask hides. Raises SceneError when it is damaged."""
    return ~decode_nonzero(mask, orientation)


def read_mask_as_alpha(mask: Path, orientation: int, size: tuple[int, int]) -> NDArray[np.uint8]:
    """Return [H, W] of an image's size: 255 where its mask hides nothing, 0 where it hides all. Raises SceneError."""
    visible = Image.fromarray((~read_mask(mask, orientation)).astype(np.uint8) * np.uint8(255))
    return np.array(visible if visible.size == size else visible.resize(size, Image.Resampling.BOX))


def alpha_is_mask(data: DataConfig) -> bool:
    """Return whether transparency is a mask, rather than a part of the picture."""
    return data.masks == ALPHA and data.mask_mode == "ignore"


def reduce_mask(masked: NDArray[np.bool_], size: tuple[int, int]) -> NDArray[np.bool_]:
    """Return masked pixels at another width and height: those whose area holds a masked one."""
    if (masked.shape[1], masked.shape[0]) == size:
        return masked
    covered = Image.fromarray(masked.astype(np.float32)).resize(size, Image.Resampling.BOX)
    return np.asarray(covered) > _HIDES


def resample_mask(masked: NDArray[np.bool_], grid: Tensor) -> NDArray[np.bool_]:
    """Return masked pixels [h, w] seen through a lens's sampling grid [1, H, W, 2]: those that a masked one touches."""
    import torch

    field = torch.from_numpy(masked.astype(np.float32))[None, None]
    with torch.inference_mode():
        weight = torch.nn.functional.grid_sample(
            field, grid, mode="bilinear", padding_mode="border", align_corners=False
        )
        return (weight[0, 0] > _HIDES).numpy()


def _named(source: SceneSource, factor: int | None, problems: Problems) -> dict[str, Path]:
    """Return the masks that the scene's own file names. factor: by which the images are reduced; None: they are not."""
    masks: dict[str, Path] = {}
    for view in source.views:
        if view.mask is None:
            what = f"{view.label}: has no mask, and other frames have one"
            problems.add(SceneError(what, where=source.file, remedy=_REMEDY))
            continue
        top, slash, rest = view.mask.partition("/")
        smaller = source.root / f"{top}_{factor}{slash}{rest}"
        path = smaller if factor is not None and slash and smaller.is_file() else source.root / view.mask
        if path.is_file():
            masks[view.name] = path
        else:
            what = f"{view.label}: its mask {view.mask} is not there"
            problems.add(SceneError(what, where=source.file, remedy=_REMEDY))
    return masks


def _unread(folder: Path) -> list[str]:
    """Return a note on a folder beside the missing ``folder`` of masks whose name is almost its name."""
    with contextlib.suppress(OSError):
        for near in sorted(folder.parent.iterdir()):
            if near.name.lower() in (folder.name, "mask") and near.is_dir():
                return [f"{near.name}/ is not used; masks lie in {folder.name}/, or in --masks {near.name}"]
    return []


def _folders(source: SceneSource, found: Found, factor: int | None) -> list[Path]:
    """Return where masks may be: masks/ beside the images' folder, or in the scene's where the images lie there."""
    base = found.folder / "masks" if found.folder == source.root else found.folder.with_name("masks")
    return [base] if factor is None else [base.with_name(f"masks_{factor}"), base]
