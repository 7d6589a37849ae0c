"""pycolmap, imported in the one order that is safe; every module of ours takes it from here.

Its library exports its own copy of zlib (58,000 symbols in all, none hidden) and pulls in the system's libz. If that
is the first time the process sees libz, libz binds to the foreign copy and the next zlib call from Python or Pillow
aborts ("free(): invalid pointer"). Loading Python's zlib first binds libz to itself.
"""

from __future__ import annotations

import zlib  # noqa: F401  (before pycolmap, see above)

import pycolmap

__all__ = ["pycolmap"]
