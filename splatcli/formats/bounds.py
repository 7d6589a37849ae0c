"""What a file claims to hold, compared with its size before anything of that size is allocated."""

from __future__ import annotations

from pathlib import Path

from splatcli.errors import ModelFileError, UnreadableError, from_os_error

#: A compressed file may become this many times larger, or this many bytes where that is more. Real scenes shrink to a
#: twentieth at best; deflate and WebP can pretend a thousandfold.
_MOST_EXPANSION = 100
_ALWAYS_ALLOWED = 16 << 20


def file_size(path: Path) -> int:
    """Bytes of a file that has some. Raises ModelFileError."""
    try:
        size = path.stat().st_size
        with path.open("rb"):
            pass
    except OSError as error:
        raise from_os_error(error, UnreadableError, path) from None
    if not size:
        raise ModelFileError("the file is empty (0 bytes)", where=path)
    return size


def check_expansion(claimed: int, size: int, path: Path, what: str) -> None:
    """Raise ModelFileError when ``size`` bytes claim to unpack to ``claimed``, of ``what``: beyond any scene."""
    most = max(_ALWAYS_ALLOWED, _MOST_EXPANSION * size)
    if claimed > most:
        raise ModelFileError(
            f"it claims {what}, {claimed:,} bytes in {size:,}: beyond {_MOST_EXPANSION} to 1, which no scene reaches",
            where=path,
        )
