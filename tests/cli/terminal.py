"""``splat`` in a process of its own, on a terminal of a given size."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from dataclasses import dataclass

from tests.forked import splat_command

#: Seconds that a command may take before a test gives up.
_LIMIT = 120.0


@dataclass(frozen=True)
class Screen:
    """Exit code, and the bytes that a terminal got; ``stdout`` where that is not the terminal."""

    code: int
    raw: str
    stdout: str

    @property
    def text(self) -> str:
        """The text without colour and movements of the cursor."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.raw).replace("\r\n", "\n")

    @property
    def drawn(self) -> list[str]:
        """Each line that was drawn at some time, in order."""
        return [line for line in re.split(r"[\r\n]+", self.text) if line.strip()]


def on_terminal(*words: object, columns: int = 80, rows: int = 24, piped: bool = False, **variables: str) -> Screen:
    """Run ``splat`` with stderr and stdout on a terminal, or stderr alone where ``piped``."""
    return run_on_terminal([*splat_command(), *map(str, words)], columns, rows, piped, variables)


def run_on_terminal(command: list[str], columns: int, rows: int, piped: bool, variables: dict[str, str]) -> Screen:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    unset = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "SPLATCLI_PLAIN")
    environment = {key: value for key, value in os.environ.items() if key not in unset}
    environment |= {"TERM": "xterm-256color", **variables}
    stdout = subprocess.PIPE if piped else theirs
    process = subprocess.Popen(command, stdin=theirs, stdout=stdout, stderr=theirs, env=environment)
    os.close(theirs)
    got, ends = bytearray(), time.monotonic() + _LIMIT
    while time.monotonic() < ends:
        ready, _, _ = select.select([ours], [], [], 0.1)
        if ready:
            try:
                chunk = os.read(ours, 65536)
            except OSError:  # the other side is closed
                break
            if not chunk:
                break
            got += chunk
        elif process.poll() is not None:
            break
    if process.poll() is None and time.monotonic() >= ends:
        process.kill()
    out = process.communicate()[0]
    os.close(ours)
    return Screen(process.returncode, got.decode(errors="replace"), (out or b"").decode())
