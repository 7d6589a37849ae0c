"""Where the native sources are: beside the package in a checkout, inside it once installed."""

from __future__ import annotations

from pathlib import Path

from splatcli.errors import ResourceError

_PACKAGE = Path(__file__).resolve().parent.parent

#: A file that each copy of the sources has.
_LANDMARK = Path("include", "splat.h")


def source_root() -> Path:
    """The folder that holds ``include/``, ``math/`` and ``src/``; absolute.

    A wheel carries a copy; a checkout has none, and its ``cuda/`` is read in place, so that an edit needs no install.
    Raises ResourceError when neither is there.
    """
    candidates = (_PACKAGE / "_native_src", _PACKAGE.parent / "cuda")
    for candidate in candidates:
        if (candidate / _LANDMARK).is_file():
            return candidate
    raise ResourceError(
        "the native sources are missing from this installation",
        where=_PACKAGE,
        remedy="install splatcli again: pip install --force-reinstall --no-deps splatcli",
    )
