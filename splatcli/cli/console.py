"""Console: results go to stdout and nothing else does; messages and progress go to stderr."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, Self, TextIO

from splatcli.errors import OutputError, SplatError

if TYPE_CHECKING:
    from rich.progress import Progress

    from splatcli.train.events import Event


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
            self._to_stdout(json.dumps(_to_json({"event": name, **facts}), allow_nan=False) + "\n")

    def data(self, payload: bytes | memoryview) -> bool:
        """Bytes on stdout, for ``-o -``; whether anyone is still there to read them. Raises OutputError."""
        stream: BinaryIO | None = getattr(sys.stdout, "buffer", None)
        if stream is None:
            return False
        try:
            stream.write(payload)
            stream.flush()
        except OSError as error:
            _discard_stdout(error)
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
            _discard_stdout(error)

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
def open_output(*, json: bool, quiet: bool) -> Iterator[Output]:
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


def take_stdout_error() -> OutputError | None:
    """The error to end with when stdout has refused something since this was asked last; else None."""
    problem = _stdout_error(_stdout_failures[0]) if _stdout_failures else None
    _stdout_failures.clear()
    return problem


def _discard_stdout(error: OSError) -> None:
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


def _to_json(value: Any) -> Any:
    """``value`` in JSON's types; what is not finite becomes null, for JSON has no word for it."""
    if isinstance(value, dict):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


#: Seconds between two plain lines.
_BAR_PLAIN_EVERY = 10.0


class ProgressBar:
    """Tells on stderr how many of ``total`` are done, while it is open.

    noun: what is counted, in the plural. With --json or -q nothing is told.
    """

    def __init__(self, out: Output, total: int, noun: str) -> None:
        self._out = out
        self._total = total
        self._noun = noun
        self._done = 0
        self._last_line = time.monotonic()
        self._bar = _bar() if not (out.json or out.quiet) and sys.stderr is not None and sys.stderr.isatty() else None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._task = self._bar.add_task(self._noun, total=self._total)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def note(self, text: str) -> None:
        """Something worth knowing, above the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            self._out.note(text)
        self._last_line = time.monotonic()

    def advance(self) -> None:
        """One more is done."""
        self._done += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
        elif not self._out.json and time.monotonic() - self._last_line > _BAR_PLAIN_EVERY:
            self._out.note(f"{self._noun}: {self._done}/{self._total}")
            self._last_line = time.monotonic()


def _bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


#: Seconds between two plain lines about mere steps.
_PLAIN_EVERY = 10.0

#: Events about mere steps that a whole run may send as JSON.
_JSON_STEPS = 100


class Reporter(Protocol):
    """Tells about events while it is open."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def report(self, event: Event) -> None:
        """One more event."""


def make_reporter(out: Output) -> Reporter:
    """The reporter that suits the output: JSON, nothing, a terminal or a log."""
    if out.json:
        return JsonReporter(out)
    if out.quiet or out.muted:
        return SilentReporter()
    if sys.stderr is not None and sys.stderr.isatty():
        return TerminalReporter()
    return PlainReporter(out)


class _ReporterBase:
    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class SilentReporter(_ReporterBase):
    """Says nothing."""

    def report(self, event: Event) -> None:
        return None


class JsonReporter(_ReporterBase):
    """One object an event; of the steps about a hundred a run, evenly spaced and the same in every run."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self._every = 1

    def report(self, event: Event) -> None:
        from splatcli.train.events import Started, Stepped

        if isinstance(event, Started):
            self._every = max(1, event.iterations // _JSON_STEPS)
        if isinstance(event, Stepped) and event.step % self._every:
            return
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", type(event).__name__).lower()
        self._out.event(name, asdict(event))


class PlainReporter(_ReporterBase):
    """A line now and then, for logs."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self._rate = _StepRate()
        self._last_line = time.monotonic()
        self._iterations = 0

    def report(self, event: Event) -> None:
        from splatcli.train.events import Stepped

        if isinstance(event, Stepped):
            self._rate.step()
            if time.monotonic() - self._last_line < _PLAIN_EVERY:
                return
            rate = self._rate.rate
            left = (self._iterations - event.step) / rate if rate else 0.0
            self._out.note(
                f"step {event.step}/{self._iterations}  loss {event.loss:.4f}  {event.num_gaussians:,} Gaussians  "
                f"{rate:.1f} it/s  {_format_time(left)} left"
            )
        else:
            self._iterations = getattr(event, "iterations", self._iterations)
            text = describe_event(event)
            if text is None:
                return
            self._out.note(text)
        self._last_line = time.monotonic()


class TerminalReporter(_ReporterBase):
    """A bar with rate, loss, Gaussians, PSNR and time left; what is worth keeping scrolls above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar: Progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("training", total=None, facts="")
        self._rate = _StepRate()
        self._psnr = ""

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def report(self, event: Event) -> None:
        from splatcli.train.events import Evaluated, Probed, Rescheduled, Started, Stepped

        if isinstance(event, Stepped):
            self._rate.step()
            facts = f"{self._rate.rate:5.1f} it/s  loss {event.loss:.4f}  {event.num_gaussians:,} Gaussians{self._psnr}"
            self._bar.update(self._task, completed=event.step, facts=facts)
            return
        if isinstance(event, Started | Rescheduled):
            self._bar.update(self._task, completed=event.step, total=event.iterations)
        if isinstance(event, Evaluated | Probed):
            self._psnr = f"  PSNR {event.psnr:.2f}"
        text = describe_event(event)
        if text is not None:
            self._bar.console.print(text, markup=False, highlight=False)


def describe_event(event: Event) -> str | None:
    """What a person wants to know of an event, in a line or a few; None for what happens all the time."""
    from splatcli.train.events import Alarmed, Capped, Evaluated, RolledBack, Saved, SaveFailed, Started, Stopped

    match event:
        case Started():
            begin = f"training on {event.device}: {event.num_train} views, {event.num_test} held out"
            span = f"steps {event.step + 1} to {event.iterations}, {event.num_gaussians:,} Gaussians"
            return "\n".join([f"{begin}; {span}", *(f"note: {note}" for note in event.notes)])
        case Evaluated():
            figures = f"PSNR {event.psnr:.2f} dB  SSIM {event.ssim:.4f}"
            return (
                f"step {event.step}: {figures} on {len(event.views)} held-out views, {event.num_gaussians:,} Gaussians"
            )
        case Capped():
            reason = f"{event.num_gaussians:,} Gaussians, for as many as the memory suffices: growth stops here"
            return f"step {event.step}: {reason}; a larger --vram-budget or smaller images (-r) have room for more"
        case Alarmed():
            return f"warning: step {event.step}: {event.text}"
        case RolledBack():
            return f"warning: back at step {event.step}, after step {event.from_step}: {event.text}"
        case SaveFailed():
            return f"warning: step {event.step}: {event.text}; the next attempt is in {event.retry_seconds:.0f} s"
        case Saved():
            return f"step {event.step}: saved {event.path}"
        case Stopped() if event.reason != "finished":
            return f"stopped at step {event.step} ({event.reason}); splat resume {event.path} goes on"
        case _:
            return None


class _StepRate:
    """Steps a second over the last hundred steps."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=101)

    def step(self) -> None:
        self._times.append(time.monotonic())

    @property
    def rate(self) -> float:
        if len(self._times) < 2:
            return 0.0
        span = self._times[-1] - self._times[0]
        return (len(self._times) - 1) / span if span > 0 else 0.0


def _format_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
