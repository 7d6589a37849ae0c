"""Processes that have loaded torch already: each is forked from a server, and costs a tenth of a fresh interpreter.

    subprocess.Popen([*splat_command(), "train", "scene/"], ...)   # instead of [sys.executable, "-m", "splatcli", ...]
    subprocess.Popen([*splat_command(), "-c", PROGRAM], ...)
    subprocess.Popen([*splat_command(), "-m", "benchmarks.growth"], ...)

The process that is started is tests/forked/client.py. It passes its descriptors, working directory, environment,
limits, ignored signals and file mode mask on to the command, and then signals; and it ends as the command ends. What
imports do, in which order and how long they take, is not what such a process shows: start an interpreter for that.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_HERE = Path(__file__).resolve().parent
#: What takes the same words where processes cannot be waited for as files can.
_FRESH = """
import runpy, sys
del sys.argv[0]
if sys.argv[0] == "-c":
    exec(sys.argv.pop(1))
else:
    sys.argv[:0] = [] if sys.argv[0] == "-m" else ["-m", "splatcli"]
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@functools.cache
def splat_command() -> tuple[str, ...]:
    """Return the beginning of a command line that means ``splat``. The server of this process starts with the first."""
    if not hasattr(os, "pidfd_open"):
        return (sys.executable, "-c", _FRESH)
    folder = tempfile.mkdtemp(prefix="splat-")
    place = f"{folder}/server"
    command = [sys.executable, str(_HERE / "server.py"), place]
    server = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
    )

    def end() -> None:
        server.communicate()  # it ends with its stdin
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    return (sys.executable, "-I", "-S", str(_HERE / "client.py"), place)
