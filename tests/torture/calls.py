"""The library calls.c: which calls on files a piece of code makes, and what becomes of it when one of them fails.

The library works in a process that was started with it (LD_PRELOAD), so harnesses run themselves again in one.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Kinds of calls that change files and can be made to fail; those that read them; and large allocations.
KINDS = ("open", "write", "fsync", "rename", "unlink", "fallocate", "truncate", "mkdir")
READING = ("open", "read", "stat", "readdir", "close")
MEMORY = "malloc"
COMPILER = os.environ.get("CC", "cc")
#: Stands for an errno: the call writes half of what it was given and says so.
SHORT_WRITE = -1


@dataclass(frozen=True)
class Call:
    """One call that was made. name: the file or folder; other: where a rename leads."""

    number: int
    kind: str
    name: str
    other: str


def run_under(function: str, *arguments: object) -> Any:
    """``module:function(*arguments)`` in a process with the library; what it returns, through JSON."""
    module, _, name = function.partition(":")
    code = (
        f"import json, sys, {module}; print(json.dumps({module}.{name}(*json.loads(sys.argv[1]))), file=sys.__stdout__)"
    )
    environment = {**os.environ, "LD_PRELOAD": str(_library()), "SPLAT_CALLS": str(_library())}
    command = [sys.executable, "-c", code, json.dumps(arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{function} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def armed(
    below: Path,
    kind: str = "",
    count: int = 0,
    fault: int = 0,
    *,
    lasting: bool = False,
    log: Path | None = None,
    copies: Path | None = None,
) -> Iterator[ctypes.CDLL]:
    """While open, the ``count``-th call of ``kind`` on files below a folder fails; and those after it, if ``lasting``.

    Of MEMORY it is the ``count``-th large allocation of the process. ``calls_seen(kind)`` of the library is how
    many calls of a kind there were, ``calls_fired()`` how many failed.
    log: takes a line for each call. copies: takes a copy of each file as it is synced, named after the call's number.
    """
    library = ctypes.CDLL(os.environ["SPLAT_CALLS"])
    library.calls_fired.restype = library.calls_seen.restype = ctypes.c_long
    texts = [str(path or "").encode() for path in (below, log, copies)]
    arguments = (texts[0], kind.encode(), ctypes.c_long(count), fault, int(lasting), texts[1], texts[2])
    library.calls_arm(*arguments)
    try:
        yield library
    finally:
        library.calls_disarm()


def read_log(path: Path) -> list[Call]:
    rows = [line.split("\t") for line in path.read_text().splitlines()]
    return [Call(int(number), kind, name, other) for number, kind, name, other in rows]


@functools.cache
def _library() -> Path:
    source = Path(__file__).with_name("calls.c")
    folder = Path(tempfile.mkdtemp(prefix="splat-calls-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = folder / "calls.so"
    subprocess.run([COMPILER, "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return library
