"""pycolmap, imported in the one way that is safe; every module of ours takes it from here.

Its library exports its own copy of zlib (58,000 symbols in all, none masked) and pulls in the system's libz. If that
is the first time the process sees libz, libz binds to the foreign copy and the next zlib call from Python or Pillow
aborts ("free(): invalid pointer"). Loading Python's zlib first binds libz to itself.

It also takes SIGTERM for itself, to print where the program was. Who asks a program to end does not ask that, and a
handler of ours would never be called; so the handler that was there is put back.

On macOS both pycolmap's and torch's wheels bring the OpenMP library, and the loader binds the templates in both to the
copy that was loaded first. Threads of the other copy run into state that nobody has set up, and the process crashes.
So torch comes first, except where pycolmap's threads are wanted and torch is not: in processes that have ALONE in their
environment.

Where it is not installed, scene/pinholes.py stands in for it.

Its log goes to stderr only: by default each process also leaves files of it in the temporary folder, for ever.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
import zlib  # noqa: F401  (before pycolmap, see above)

from splatcli.errors import ResourceError, first_line

#: A variable of the environment of processes that use no torch.
ALONE = "SPLATCLI_PYCOLMAP_ALONE"

if sys.platform == "darwin" and not os.environ.get(ALONE):
    import torch  # noqa: F401  (before pycolmap, see above)

_before = signal.getsignal(signal.SIGTERM)

try:
    import pycolmap
except (ImportError, RuntimeError) as error:  # a library that it needs, or threads, are missing; it raises its own
    if not (isinstance(error, ModuleNotFoundError) and error.name == "pycolmap"):
        cause = error.__cause__ or error
        raise ResourceError(
            f"pycolmap cannot be loaded: {first_line(cause)}",
            where=sys.executable,
            remedy=f"{shlex.quote(sys.executable)} -m pip install --force-reinstall pycolmap",
        ) from error
    from splatcli.scene import pinholes as pycolmap  # type: ignore[no-redef]

if _before is not None and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGTERM, _before)

if pycolmap.__name__ == "pycolmap":
    pycolmap.logging.logtostderr = True

__all__ = ["ALONE", "pycolmap"]
