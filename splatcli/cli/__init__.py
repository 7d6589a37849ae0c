"""The command line: thin commands, one file each; nothing heavy is imported before one of them runs."""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def main() -> int:
    """Run the command of ``sys.argv`` and return its exit code, for the console script ``splat``."""
    try:
        _open_missing_streams()
        # Schedulers send SIGUSR1 at any time, and by default it kills. Training handles it later.
        if hasattr(signal, "SIGUSR1"):
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        from splatcli.cli.process import (
            collect_garbage_rarely,
            exit_on_sigint_in_imports,
            freeze_garbage,
            refuse_pipes,
        )

        exit_on_sigint_in_imports()
        collect_garbage_rarely()
        refuse_pipes()
        from splatcli.cli.commands import run, without_plain
        from splatcli.cli.console import PLAIN_VARIABLE

        words = without_plain(sys.argv[1:])
        if words != sys.argv[1:]:
            os.environ[PLAIN_VARIABLE] = "1"  # also for processes that the command starts with its own words
            sys.argv[1:] = words
        try:
            code = run(words)
        finally:
            freeze_garbage()
        _ignore_interrupts()
    except KeyboardInterrupt:  # `run` catches it too; here it came while libraries loaded or as the command ended
        code = 130
        _ignore_interrupts()
    return code


def _ignore_interrupts() -> None:
    """Ignore SIGINT from now on: the command is done, and its exit code stands.

    The interpreter's end takes a part of a second. By default SIGINT ends the process by the signal then, or prints a
    traceback of the libraries' cleaning up.
    """
    while True:
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        except KeyboardInterrupt:
            continue
        return


def _open_missing_streams() -> None:
    """Open the null device in place of a closed stdin, stdout or stderr.

    Otherwise the next files would get their descriptors, and what a library or a child process prints would land there.
    A closed stdout is opened for reading: what is written to it is lost, which is an error here and in child processes.
    """
    with contextlib.suppress(OSError):  # a place without /dev/null
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
            if descriptor == 1:
                os.close(descriptor)
                os.open(os.devnull, os.O_RDONLY)
                sys.stdout = os.fdopen(1, "w", closefd=False)
            os.set_inheritable(descriptor, True)
        os.close(descriptor)
