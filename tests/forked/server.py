"""The server of tests/forked: it loads what commands use, and forks a process for each client until its stdin closes.

A fork of it answers the client, and the command is a fork of that one. So the server itself never waits for a command,
and a command whose client was killed is killed too.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import pkgutil
import resource
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import warnings
from typing import Any, NoReturn

#: Modules that read the environment or the terminal when they are loaded, are programs, or take seconds for few tests.
LEFT_OUT = ("splatcli.cli", "splatcli.__main__", "splatcli.sfm.worker", "splatcli.lightning")


def load() -> None:
    import torch  # noqa: F401

    import splatcli

    for module in pkgutil.walk_packages(splatcli.__path__, "splatcli."):
        if not module.name.startswith(LEFT_OUT):
            with contextlib.suppress(ImportError):  # of an extra that is not installed
                importlib.import_module(module.name)


def serve(listening: socket.socket) -> list[str]:
    """Fork for each client; return the words of its command in a process that has taken its place."""
    while True:
        ready, _, _ = select.select([listening, 0], [], [])
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):  # those that have answered
                pass
        if 0 in ready:
            os._exit(0)
        connection, _ = listening.accept()
        if os.fork() == 0:
            break
        connection.close()
    listening.close()
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 4)
    with connection.makefile("r") as lines:
        request = json.loads(lines.readline())
    worker = os.fork()
    if worker == 0:
        connection.close()
        become(request, descriptors)
        return list(request["words"])
    for descriptor in (*descriptors, 0, 1, 2):  # pipes of the client close when the command closes them
        os.close(descriptor)
    connection.sendall(f"{worker}\n".encode())
    if connection in select.select([connection, os.pidfd_open(worker)], [], [])[0]:
        os.kill(worker, signal.SIGKILL)  # the client is dead
    code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(f"{code}\n".encode())
    os._exit(0)


def become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Take the client's place."""
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    os.fchdir(descriptors[3])
    for descriptor in descriptors:
        os.close(descriptor)
    os.umask(request["umask"])
    for name, limits in request["limits"].items():
        resource.setrlimit(getattr(resource, name), limits)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    importlib.invalidate_caches()
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads:
        import torch

        torch.set_num_threads(int(threads))
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = stream(1, "strict")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = stream(2, "backslashreplace")  # type: ignore[misc]


def stream(descriptor: int, errors: str) -> io.TextIOWrapper:
    raw = open(descriptor, "wb", closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(raw, errors=errors, line_buffering=descriptor == 2 or os.isatty(descriptor))


def run(words: list[str]) -> object:
    """Run a command, a program after -c or a module after -m; return or raise what ends it."""
    with contextlib.suppress(FileNotFoundError):  # the working directory was deleted
        sys.path.insert(0, os.getcwd())
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return 0
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        return 0
    import splatcli
    from splatcli.cli import main as splat

    sys.argv = [f"{splatcli.__path__[0]}/__main__.py", *words]
    return splat()


def leave(code: object) -> NoReturn:
    """End as the interpreter does, but leave its memory to the system: the server's modules take seconds to delete."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = 120
    os._exit((code or 0) & 255)


def main() -> NoReturn:
    del sys.path[0]  # the folder of this file
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(sys.argv[1])
    listening.listen(64)
    load()
    warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)  # threads of OpenBLAS survive one
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    words = serve(listening)
    try:
        code = run(words)
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    leave(code)


if __name__ == "__main__":
    main()
