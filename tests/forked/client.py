"""A process that stands for a command that tests/forked/server.py forks. Standard library alone: it has to be quick."""

import contextlib
import json
import os
import resource
import signal
import socket
import sys

SIGNALS = [signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2]
worker = None
early = []


def pass_on(number, frame):
    if worker is None:
        early.append(number)
    else:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, number)


def main() -> None:
    global worker
    ignored = [int(number) for number in SIGNALS if signal.getsignal(number) == signal.SIG_IGN]
    for number in SIGNALS:
        if number not in ignored:
            signal.signal(number, pass_on)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1])
    mask = os.umask(0)
    os.umask(mask)
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    request = {
        "words": sys.argv[2:],
        "environment": dict(os.environ),
        "ignored": ignored,
        "umask": mask,
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in names},
    }
    socket.send_fds(connection, [b"."], [0, 1, 2, os.open(".", os.O_RDONLY)])
    connection.sendall(json.dumps(request).encode() + b"\n")
    answers = connection.makefile("r")
    worker = int(answers.readline())
    for number in early:
        pass_on(number, None)
    code = int(answers.readline())
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
