"""Output: results go to stdout and nothing else does; words for people go to stderr."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from splatcli.errors import OutputError, SplatError

#: The first failure of stdout that was no reader's going away, if there was one.
_stdout_failures: list[OSError] = []


class Output:
    """Where a command's words go.

    json: results and events are JSON objects, one a line.
    quiet: stderr stays silent but for errors and alarms.

    When the reader of stdout goes away the rest of the output is dropped and the work goes on:
    ``splat train ... | head -1`` must not cost a training run. So it does when stdout cannot be written (a full disk),
    and the command ends with an error then, see ``stdout_problem``.
    """

    def __init__(self, *, json: bool = False, quiet: bool = False) -> None:
        self.json = json
        self.quiet = quiet
        #: Whether another process speaks for this one: then nothing is said, results and errors included.
        self.muted = False

    def mute(self) -> None:
        """From here on another process speaks for this one."""
        self.muted = True

    def result(self, facts: dict[str, Any], lines: Iterable[object]) -> None:
        """The outcome: ``facts`` as the final JSON object, or else ``lines``, one value a line."""
        if self.json:
            self.event("result", facts)
        elif not self.muted:
            self._to_stdout("".join(f"{line}\n" for line in lines))

    def event(self, name: str, facts: dict[str, Any]) -> None:
        """One JSON object on stdout, with --json only."""
        if self.json and not self.muted:
            self._to_stdout(json.dumps(_plain({"event": name, **facts}), allow_nan=False) + "\n")

    def data(self, payload: bytes | memoryview) -> bool:
        """Bytes on stdout, for ``-o -``; whether anyone is still there to read them. Raises OutputError."""
        stream: BinaryIO | None = getattr(sys.stdout, "buffer", None)
        if stream is None:
            return False
        try:
            stream.write(payload)
            stream.flush()
        except OSError as error:
            _give_up_stdout(error)
            if isinstance(error, BrokenPipeError):
                return False
            raise _stdout_error(error) from None
        return True

    def note(self, text: str) -> None:
        """Something worth knowing."""
        if not self.quiet and not self.muted:
            self._to_stderr(text)

    def warn(self, text: str) -> None:
        """Something that may be wrong."""
        if not self.quiet and not self.muted:
            self._to_stderr(f"warning: {text}")

    def alarm(self, text: str, name: str, facts: dict[str, Any]) -> None:
        """A warning that nobody may miss: -q does not silence it, and with --json it is an event as well."""
        if not self.muted:
            self.event(name, facts)
            self._to_stderr(f"warning: {text}")

    def error(self, problem: SplatError) -> None:
        """The reason of a failure: ``error[E003]: what``, with where and help on lines of their own."""
        if self.muted:
            return
        self.event("error", problem.as_dict())
        self._to_stderr("\n".join(problem.lines()))

    def close(self) -> None:
        """Flush, so that the interpreter finds nothing left to complain about at exit."""
        self._to_stdout("")
        self._to_stderr("", end="")

    @staticmethod
    def _to_stdout(text: str) -> None:
        if sys.stdout is None:
            return
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except OSError as error:
            _give_up_stdout(error)

    @staticmethod
    def _to_stderr(text: str, end: str = "\n") -> None:
        if sys.stderr is None:
            return
        try:
            sys.stderr.write(text + end)
            sys.stderr.flush()
        except OSError:  # nobody is left to be told of it
            _detach(sys.stderr)


@contextmanager
def speaking(*, json: bool, quiet: bool) -> Iterator[Output]:
    """An Output for one command; while open, the library's warnings and log records go through it as well."""
    out = Output(json=json, quiet=quiet)
    logger, handler = logging.getLogger("splatcli"), _LogHandler(out)
    logger.addHandler(handler)
    with warnings.catch_warnings():
        # Pillow warns of metadata without naming the file; what matters of it becomes an error or a note of ours.
        warnings.filterwarnings("ignore", module=r"PIL\.")
        warnings.showwarning = lambda message, *_args, **_kwargs: out.warn(str(message))
        try:
            yield out
        finally:
            logger.removeHandler(handler)


def stdout_problem() -> OutputError | None:
    """The error to end with when stdout has refused something since this was asked last; else None."""
    problem = _stdout_error(_stdout_failures[0]) if _stdout_failures else None
    _stdout_failures.clear()
    return problem


def _give_up_stdout(error: OSError) -> None:
    """From here on what is written to stdout is dropped."""
    if not isinstance(error, BrokenPipeError):
        _stdout_failures.append(error)
    _detach(sys.stdout)


def _stdout_error(error: OSError) -> OutputError:
    return OutputError(
        f"cannot write to stdout: {error.strerror}",
        where="stdout",
        remedy="free some space, or send it elsewhere: what was to be printed is lost, files that were written are not",
    )


def stdout_or(output: Path) -> Path:
    """``output``, with ``-`` in place of /dev/stdout and other names of stdout: one way leads there."""
    from splatcli.checkpoint.atomic import names_stdout

    return Path("-") if names_stdout(output) else output


class _LogHandler(logging.Handler):
    def __init__(self, out: Output) -> None:
        super().__init__(logging.INFO)
        self._out = out

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno >= logging.ERROR:
            self._out.alarm(text, "warning", {"text": text})
        elif record.levelno >= logging.WARNING:
            self._out.warn(text)
        else:
            self._out.note(text)


def _detach(stream: TextIO) -> None:
    """Point a stream that cannot be written any more at nothing."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def _plain(value: Any) -> Any:
    """``value`` in JSON's types; what is not finite becomes null, for JSON has no word for it."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
