"""Image files by name and first bytes: which are read, and what to say of those that are not."""

from __future__ import annotations

import errno
import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from splatcli.errors import SceneError

#: File name endings that are taken for images, when an ending has to be guessed.
SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".webp", ".bmp", ".avif")

#: Pillow's names of the formats that are read. Its others stay closed: some start programs, some know no signature.
FORMATS = ("PNG", "JPEG", "TIFF", "WEBP", "AVIF", "BMP", "GIF", "JPEG2000", "PPM")
SUPPORTED = "PNG, JPEG, TIFF, WebP, AVIF, BMP, GIF, JPEG 2000 and PNM"

#: Endings of camera raw files. Many are TIFF inside, with a thumbnail where a photo would be.
RAW_SUFFIXES = (
    *(".3fr", ".arw", ".cr2", ".cr3", ".crw", ".dcr", ".dng", ".erf", ".iiq", ".kdc", ".mef", ".mos", ".mrw"),
    *(".nef", ".nrw", ".orf", ".pef", ".raf", ".raw", ".rw2", ".rwl", ".sr2", ".srf", ".srw", ".x3f"),
)

#: What a file starts with -> what it is; all of them need another program.
_SIGNATURES = (
    (b"\x76\x2f\x31\x01", "an OpenEXR image"),
    (b"#?RADIANCE", "a Radiance HDR image"),
    (b"#?RGBE", "a Radiance HDR image"),
    (b"\xff\x0a", "a JPEG XL image"),
    (b"\0\0\0\x0cJXL ", "a JPEG XL image"),
    (b"8BPS", "a Photoshop document"),
    (b"PF\n", "a floating point image in colour"),
)
#: What the formats that are read start with.
_READ = (
    (b"\x89PNG", "a PNG"),
    (b"\xff\xd8\xff", "a JPEG"),
    (b"II*\0", "a TIFF"),
    (b"MM\0*", "a TIFF"),
    (b"GIF8", "a GIF"),
    (b"BM", "a BMP"),
)
#: Brands of the ISO media container (bytes 8 to 11, after "ftyp").
_HEIF_BRANDS = frozenset((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"))

#: Bytes that tell what a file is.
_START = 64


def refuse_raw(path: Path) -> None:
    """Raises SceneError for a camera's raw file, by its name."""
    if path.suffix.lower() in RAW_SUFFIXES:
        raise raw_error(path)


def raw_error(path: Path) -> SceneError:
    """The error for a camera's raw file."""
    return SceneError("is a camera's raw file, which has to be developed first", where=path, remedy=conversion(path))


def unreadable_error(path: Path) -> SceneError:
    """The error for a file that no decoder knows: what it is, as far as its first bytes tell, and what helps."""
    try:
        with path.open("rb") as file:
            start = file.read(_START)
    except OSError as error:
        return SceneError(f"cannot be read: {error.strerror}", where=path, remedy="check the file and its permissions")
    if not start:
        return SceneError("is empty", where=path, remedy="copy the file again from its source")
    if start.startswith(b"version https://git-lfs"):
        return SceneError(
            "is not an image: it is a placeholder of Git LFS", where=path, remedy="fetch the files with: git lfs pull"
        )
    kind = _kind(start)
    if kind is not None:
        return SceneError(f"is {kind}, which is not read here", where=path, remedy=conversion(path))
    for signature, kind in _READ:
        if start.startswith(signature):
            return SceneError(
                f"starts as {kind}, but its header is damaged or of a kind that is not read here",
                where=path,
                remedy=f"copy the file again from its source; if it opens elsewhere: {conversion(path)}",
            )
    return SceneError(
        f"is not an image (it starts with {_shown(start)})",
        where=path,
        remedy=f"copy or download the file again; {SUPPORTED} are read",
    )


def conversion(path: Path) -> str:
    """The remedy for a photo that another program can read: a command that makes PNG copies, and how to use them."""
    folder = shlex.quote(path.parent.name or ".")
    copies = shlex.quote(f"{path.parent.name}_png")
    return (
        f"{SUPPORTED} are read; convert the others, beside their folder: mkdir {copies} && magick mogrify "
        f"-path {copies} -format png {folder}/*{path.suffix}, and add --images {copies}"
    )


def reduction(path: Path) -> str:
    """The remedy for photos that are too large: a command that makes smaller copies, and how to use them."""
    folder = shlex.quote(path.parent.name or ".")
    copies = shlex.quote(f"{path.parent.name}_small")
    return (
        f"make smaller copies, beside their folder: mkdir {copies} && magick mogrify -path {copies} -resize 25% "
        f"{folder}/*{path.suffix}, and add --images {copies}"
    )


def _kind(start: bytes) -> str | None:
    for signature, kind in _SIGNATURES:
        if start.startswith(signature):
            return kind
    if start[4:8] == b"ftyp":
        brand = start[8:12]
        if brand == b"crx ":
            return "a camera's raw file"
        return "a HEIF image" if brand in _HEIF_BRANDS else "a video"
    return None


def _shown(start: bytes) -> str:
    """The first bytes as text where they are, else as numbers."""
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n")[:16]
    if text and all(32 <= byte < 127 or byte in b"\t\r\n" for byte in text):
        return repr(text.split(b"\n")[0].decode("ascii").rstrip())
    return start[:8].hex(" ")


#: A name that is not there, or that no disk takes.
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)


def is_file(path: Path) -> bool:
    """Whether a file is there. Raises OSError when the system does not tell: then it is not absent."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except ValueError:  # a NUL in the name
        return False
    except OSError as error:
        if error.errno in _ABSENT:
            return False
        raise


def walk(folder: Path, *, private: bool = False) -> Iterator[tuple[str, list[str], list[str]]]:
    """os.walk(), which keeps silent about folders that cannot be read; here they raise OSError.

    private: folders that belong to somebody else (EACCES) are passed over, where it is only looked around.
    """

    def refuse(error: OSError) -> None:
        if error.errno not in _ABSENT and not (private and isinstance(error, PermissionError)):
            raise error

    return os.walk(folder, onerror=refuse)
