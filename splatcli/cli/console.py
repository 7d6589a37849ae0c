"""The console: results on stdout, messages and progress on stderr."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import shutil
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self, TextIO, cast

from splatcli.errors import OutputError, SplatError, UsageError
from splatcli.progress import listening
from splatcli.sizes import counted, listed

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from splatcli.cli.tables import Table
    from splatcli.train.events import Event


#: The variable with which everything is plain text: no colour, no boxes, and lines instead of progress bars.
PLAIN_VARIABLE = "SPLATCLI_PLAIN"


def has_cursor(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal whose lines can be redrawn; with TERM=dumb and --plain it is not."""
    plain = os.environ.get(PLAIN_VARIABLE, "") not in ("", "0") or os.environ.get("TERM") == "dumb"
    return stream is not None and stream.isatty() and not plain


def is_styled(stream: TextIO | None) -> bool:
    """Return whether a stream gets colour and boxes: as has_cursor(), and not with NO_COLOR."""
    return has_cursor(stream) and not os.environ.get("NO_COLOR")


#: Failures of stdout other than a closed pipe.
_stdout_failures: list[OSError] = []


class Output:
    """The output of a command.

    json: results and events are JSON objects, one a line.
    quiet: stderr gets errors and alarms only.

    When the reader of stdout closes the pipe, the rest of the output is dropped and the command continues:
    ``splat train ... | head -1`` must not end a training run. When stdout cannot be written (a full disk), the command
    also continues, and ends with the error of ``take_stdout_error``.
    """

    def __init__(self, *, json: bool = False, quiet: bool = False) -> None:
        self.json = json
        self.quiet = quiet
        #: Whether another process reports for this one: nothing is printed then, results and errors included.
        self.muted = False
        #: The progress that is shown now.
        self.bar: ProgressBar | None = None

    def result(self, facts: dict[str, Any], lines: Iterable[object], tables: Sequence[Table] = ()) -> None:
        """Print the result: ``facts`` as the last JSON object with --json, else ``lines``.

        tables: say what the lines say, and are shown in their place on a terminal.
        """
        if self.json:
            self.event("result", facts)
        elif tables and not self.muted and is_styled(sys.stdout):
            from splatcli.cli.tables import draw

            self._to_stdout(draw(tables, shutil.get_terminal_size().columns))
        elif not self.muted:
            self._to_stdout("".join(f"{line}\n" for line in lines))

    def event(self, name: str, facts: dict[str, Any]) -> None:
        """Print a JSON object on stdout, with --json only."""
        if self.json and not self.muted:
            self._to_stdout(json.dumps(_to_json({"event": name, **facts}), allow_nan=False) + "\n")

    def data(self, payload: bytes | memoryview) -> bool:
        """Write bytes to stdout, for ``-o -``. Return False when the reader has closed the pipe. Raise OutputError."""
        if sys.stdout is None:
            raise _stdout_error(OSError(errno.EBADF, os.strerror(errno.EBADF)))
        stream: BinaryIO = sys.stdout.buffer
        try:
            stream.write(payload)
            stream.flush()
        except OSError as error:
            _discard_stdout(error)
            if isinstance(error, BrokenPipeError):
                return False
            raise _stdout_error(error) from None
        return True

    def message(self, text: str) -> None:
        """Print a message."""
        if not self.quiet and not self.muted:
            self._to_stderr(text)

    def note(self, *texts: str) -> None:
        """Print notes: what the user may want to know or do."""
        for text in texts:
            self.message(f"note: {text}")

    def warn(self, text: str) -> None:
        """Print a warning."""
        self.message(f"warning: {text}")

    def alarm(self, text: str, name: str, facts: dict[str, Any]) -> None:
        """Print a warning also with -q, and as an event with --json."""
        if not self.muted:
            self.event(name, facts)
            self._to_stderr(f"warning: {text}")

    def error(self, problem: SplatError) -> None:
        """Print an error: ``error[E003]: what``, then the lines of where and help."""
        if self.muted:
            return
        self.event("error", problem.as_dict())
        self._to_stderr("\n".join(problem.lines()))

    def close(self) -> None:
        """Flush both streams, so that the interpreter reports no failure at exit."""
        self._to_stdout("")
        self._to_stderr("", end="")

    @staticmethod
    def _to_stdout(text: str) -> None:
        if sys.stdout is None:
            return
        try:
            if text:  # an unbuffered stream passes even nothing on
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
        except OSError:  # there is no stream left to report it on
            _detach(sys.stderr)


class _Stderr:
    """stderr for rich. What a terminal does not take after it is closed is dropped: a run outlives its terminal."""

    def __init__(self) -> None:
        stream = sys.stderr
        self._stream: TextIO = getattr(stream, "rich_proxied_file", stream)  # that of a bar that is open already
        self.encoding = self._stream.encoding
        self.fileno = self._stream.fileno
        self.isatty = self._stream.isatty

    def write(self, text: str) -> int:
        """Write as a text stream does."""
        try:
            return self._stream.write(text)
        except OSError:
            _detach(self._stream)
            return len(text)

    def flush(self) -> None:
        """Flush as a text stream does."""
        try:
            self._stream.flush()
        except OSError:
            _detach(self._stream)


@contextmanager
def open_output(*, json: bool, quiet: bool) -> Iterator[Output]:
    """Open the Output of a command. While open it prints warnings, log records and progress of the library."""
    out = Output(json=json, quiet=quiet)
    stages = _Stages(out)
    logger, handler = logging.getLogger("splatcli"), _LogHandler(out)
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    with warnings.catch_warnings():
        # Pillow warns about metadata without naming the file; relevant problems are errors or notes of this package.
        warnings.filterwarnings("ignore", module=r"PIL\.")
        warnings.showwarning = lambda message, *_args, **_kwargs: out.warn(str(message))
        try:
            with listening(stages.report):
                yield out
        finally:
            stages.close()
            logger.removeHandler(handler)
            logger.setLevel(level)


def announce(text: str) -> None:
    """Print a message before the libraries are loaded, which takes seconds; nothing where they are loaded already.

    Of the ranks of a run only the first does so.
    """
    if "torch" not in sys.modules and os.environ.get("RANK", "0") == "0":
        Output().message(text)


def take_stdout_error() -> OutputError | None:
    """Return the error of the first failed write to stdout since the last call; None without one."""
    problem = _stdout_error(_stdout_failures[0]) if _stdout_failures else None
    _stdout_failures.clear()
    return problem


def printed_text_error(error: OSError) -> OutputError | None:
    """Return the error of a text that stdout did not take, as of --help; None for an error of something else.

    The text is in the stream's buffer still, so that the stream fails once more.
    """
    if error.filename is not None or sys.stdout is None:
        return None
    try:
        sys.stdout.flush()
    except OSError as again:
        return _stdout_error(again, lost="") if again.errno == error.errno else None
    except ValueError:  # a stream of a caller that is closed
        return None
    return None


def _discard_stdout(error: OSError) -> None:
    """Drop everything that is written to stdout from now on."""
    if not isinstance(error, BrokenPipeError):
        _stdout_failures.append(error)
    _detach(sys.stdout)


def _stdout_error(
    error: OSError, lost: str = "; the printed results are lost, written files are complete"
) -> OutputError:
    closed = error.errno == errno.EBADF
    return OutputError(
        "stdout is closed" if closed else f"cannot write to stdout: {error.strerror}",
        where="stdout",
        remedy=f"{'' if closed else 'free disk space or '}redirect stdout elsewhere{lost}",
    )


def stdout_or(output: Path, *, json: bool) -> Path:
    """Return ``output``, or ``-`` for /dev/stdout and other names of stdout.

    json: whether stdout gets JSON objects. Raise UsageError if it would get both.
    """
    from splatcli.checkpoint.atomic import names_stdout

    path = Path("-") if names_stdout(output) else output
    if json and str(path) == "-":
        raise UsageError("--json and -o - both want stdout", where="-o", remedy="leave one out")
    return path


class _LogHandler(logging.Handler):
    def __init__(self, out: Output) -> None:
        super().__init__(logging.INFO)
        self._out = out
        self._warned: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno >= logging.ERROR:
            self._out.alarm(text, "warning", {"text": text})
        elif record.levelno >= logging.WARNING:
            if text not in self._warned:  # a missing compiler is one for each view
                self._out.warn(text)
            self._warned.add(text)
        else:
            self._out.message(text)


def _detach(stream: TextIO) -> None:
    """Redirect a stream that cannot be written to the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def _to_json(value: Any) -> Any:
    """Return ``value`` in JSON's types; numbers that are not finite become null."""
    if isinstance(value, dict):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


#: Seconds between two lines of progress in a log.
_LOG_INTERVAL = 10.0

#: Updates that a rate is measured over.
_RATE_UPDATES = 100

#: Step events that a whole run sends with --json.
_JSON_STEPS = 100


class ProgressBar:
    """Progress on stderr while open: a line for each task on a terminal, a line every ten seconds in a log.

    unit: what a rate counts; without it no rate is shown. transient: the lines go away at the end.
    With --json and -q nothing is shown.
    """

    def __init__(self, out: Output, unit: str = "", *, transient: bool = False) -> None:
        self._out = out
        self._unit = unit
        self._silent = out.json or out.quiet or out.muted
        self._tasks: dict[str, TaskID] = {}
        self._updates: dict[str, deque[tuple[float, int]]] = {}
        self._last_line = time.monotonic()
        self._outer: ProgressBar | None = None
        self._bar = _rich_progress(transient) if has_cursor(sys.stderr) and not self._silent else None

    def __enter__(self) -> Self:
        self._outer, self._out.bar = self._out.bar, self
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._out.bar = self._outer
        if self._bar is not None:
            self._bar.stop()

    @property
    def on_terminal(self) -> bool:
        """Return whether there is a bar."""
        return self._bar is not None

    def print(self, text: str) -> None:
        """Print a message above the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._out.message(text)
        self._last_line = time.monotonic()

    def update(
        self,
        task: str,
        done: int,
        total: int,
        facts: Sequence[str] = (),
        *,
        inner: bool = False,
        left: float | None = None,
    ) -> None:
        """Report that ``done`` of ``total`` of a task are done.

        facts: further figures for the same line, the most important first: a narrow terminal gets the first ones.
        inner: the task is a part of another one, which has the rate, and its line goes away at its end.
        left: how many parts like the present one the rest is worth; total - done without it.
        """
        if self._silent:
            return
        now, unit = time.monotonic(), "" if inner else self._unit
        rate = self._rate(task, now, done)
        seconds = None if rate is None else (total - done if left is None else left) / rate
        if self._bar is not None:
            shown = ProgressLine(task, done, total, rate if unit else None, unit, seconds, tuple(facts))
            if task not in self._tasks:
                self._tasks[task] = self._bar.add_task(task, shown=shown)
            self._bar.update(self._tasks[task], completed=done, total=total, shown=shown)
            if inner and done >= total:
                self._bar.remove_task(self._tasks.pop(task))
        elif now - self._last_line > _LOG_INTERVAL:
            speed = [] if not unit or rate is None else [format_rate(rate, unit)]
            ends = [] if seconds is None else [f"{format_time(seconds)} left"]
            self._out.message("  ".join([f"{task}: {done}/{total}", *facts, *speed, *ends]))
            self._last_line = now

    def _rate(self, task: str, now: float, done: int) -> float | None:
        """Return the rate of a task, of which ``done`` parts are done now; None before it is known."""
        updates = self._updates.setdefault(task, deque(maxlen=_RATE_UPDATES + 1))
        if updates and updates[-1][1] > done:  # it begins again
            updates.clear()
        updates.append((now, done))
        (begin, first), (end, last) = updates[0], updates[-1]
        return (last - first) / (end - begin) if end > begin and last > first else None


#: Seconds that a stage takes before it is shown.
_SHOWN_AFTER = 0.5


class _Stages:
    """Shows the progress that the library reports (splatcli/progress.py), in the open bar or one of its own."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self._own: ProgressBar | None = None
        self._task, self._began = "", 0.0

    def report(self, task: str, done: int, total: int) -> None:
        """Show how far a task is."""
        if self._out.bar is not None and self._out.bar is not self._own:
            self._out.bar.update(task, done, total, inner=True)
            return
        now = time.monotonic()
        if task != self._task or done == 0:
            self.close()
            self._task, self._began = task, now
        if self._own is None and done < total and now - self._began > _SHOWN_AFTER:
            self._own = ProgressBar(self._out, transient=True)
            self._own.__enter__()
        if self._own is not None:
            self._own.update(task, done, total)
            if done >= total:
                self.close()

    def close(self) -> None:
        """End the stage that is shown."""
        if self._own is not None:
            self._own.__exit__(None, None, None)
        self._own = None


#: Columns of the smallest and of the largest bar, and of the spaces between two figures.
_MIN_BAR, _MAX_BAR, _GAP = 8, 40, 2


@dataclass(frozen=True)
class ProgressLine:
    """A line of progress. Task, steps, rate and time left are never cut; the bar and ``facts`` take what is left.

    rate: per second, None if unknown. left: seconds, None if unknown. facts: the most important first.
    """

    task: str
    done: int
    total: int
    rate: float | None
    unit: str
    left: float | None
    facts: tuple[str, ...] = ()

    def text(self, width: int) -> str:
        """Return the line in at most ``width`` columns, or in as many as its fixed part needs."""
        head = f"{self.task} {self.done}/{self.total}"
        speed = [] if self.rate is None else [format_rate(self.rate, self.unit)]
        ends = [] if self.left is None else [format_time(self.left)]
        shown = [head, *speed, *(f"{end} left" for end in ends)]
        if _columns(shown) > width:
            narrow = [head, *speed, *ends]
            return " ".join(narrow if len(" ".join(narrow)) <= width else [f"{self.done}/{self.total}", *narrow[1:]])
        for fact in self.facts:
            if _columns([*shown, fact]) <= width:
                shown.append(fact)
        room = min(_MAX_BAR, width - _columns(shown) - _GAP)
        if room >= _MIN_BAR:
            filled = room * self.done // max(1, self.total)
            shown.insert(1, "\u2501" * filled + "\u2500" * (room - filled))
        return (" " * _GAP).join(shown)


def _columns(parts: list[str]) -> int:
    return sum(map(len, parts)) + _GAP * (len(parts) - 1)


def _rich_progress(transient: bool) -> Progress:
    """Return rich's display of tasks, whose lines are those of ProgressLine."""
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.progress import Progress, ProgressColumn, Task
    from rich.text import Text

    @dataclass(frozen=True)
    class Fitted:
        line: ProgressLine

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            text = Text(self.line.text(options.max_width), no_wrap=True, overflow="crop")
            text.highlight_regex("\u2501+", "cyan")
            text.highlight_regex("\u2500+", "dim")
            yield text

    class Line(ProgressColumn):
        max_refresh = None

        def render(self, task: Task) -> Any:
            return Fitted(task.fields["shown"])

    console = Console(file=cast(TextIO, _Stderr()), stderr=True)
    return Progress(Line(), console=console, expand=True, transient=transient)


def make_reporter(out: Output, steps_left: Callable[[], float]) -> JsonReporter | ProgressReporter:
    """Return the reporter that suits the output: JSON objects, or a progress bar and messages.

    steps_left: how many steps like the present one the rest of the run is worth.
    """
    return JsonReporter(out) if out.json else ProgressReporter(out, steps_left)


class JsonReporter:
    """Writes an object for each event; of the steps about a hundred a run, evenly spaced and the same in every run."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self._every = 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def report(self, event: Event) -> None:
        from splatcli.train.events import Started, Stepped

        if isinstance(event, Started):
            self._every = max(1, event.iterations // _JSON_STEPS)
        if isinstance(event, Stepped) and event.step % self._every:
            return
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", type(event).__name__).lower()
        self._out.event(name, asdict(event))


class ProgressReporter(ProgressBar):
    """Shows step, rate, time left, PSNR, number of Gaussians and loss in a line, and other events as messages."""

    def __init__(self, out: Output, steps_left: Callable[[], float] | None = None) -> None:
        super().__init__(out, unit="it")
        self._steps_left = steps_left
        self._iterations = 0
        #: Newest PSNR of training views and of test views, the newer one first.
        self._psnr: dict[str, str] = {}

    def report(self, event: Event) -> None:
        from splatcli.train.events import Evaluated, Probed, Stepped

        if isinstance(event, Stepped):
            count = event.num_gaussians
            shown = f"{count / 1e6:.2f}M" if count >= 1_000_000 else f"{count:,}"
            newest, *older = [*self._psnr.values()] or [""]
            facts = [newest, f"{shown} GS", f"loss {event.loss:.4f}", *older]
            left = None if self._steps_left is None else self._steps_left()
            self.update("train", event.step, self._iterations, [fact for fact in facts if fact], left=left)
            return
        self._iterations = getattr(event, "iterations", self._iterations)
        if isinstance(event, Evaluated | Probed):
            kind = "test" if isinstance(event, Evaluated) else "train"
            others = {other: text for other, text in self._psnr.items() if other != kind}
            self._psnr = {kind: f"{kind} PSNR {event.psnr:.2f}", **others}
        text = describe_event(event)
        if text is not None:
            self.print(text)


def describe_event(event: Event) -> str | None:
    """Return the message for an event; None for frequent events."""
    from splatcli.train.events import (
        Alarmed,
        Capped,
        Evaluated,
        RolledBack,
        Saved,
        SaveFailed,
        Started,
        Stopped,
        ViewsCompared,
    )

    match event:
        case Started():
            views = f"{counted(event.num_train, 'view')}, {event.num_test} held out"
            begin, span = f"training on {event.device}: {views}", f"steps {event.step + 1} to {event.iterations}"
            if event.step >= event.iterations:
                begin, span = f"on {event.device}: {views}", "no step is left"
            first = f"{begin}; {span}, {event.num_gaussians:,} Gaussians"
            return "\n".join([first, *(f"note: {note}" for note in event.notes)])
        case Evaluated():
            figures = f"test PSNR {event.psnr:.2f} dB  SSIM {event.ssim:.4f}"
            return (
                f"step {event.step}: {figures} on {len(event.views)} held-out views, {event.num_gaussians:,} Gaussians"
            )
        case Capped():
            reason = f"the memory budget allows no more than {event.num_gaussians:,} Gaussians; densification stops"
            return f"step {event.step}: {reason}; raise --vram-budget or use smaller images (-r)"
        case ViewsCompared() if event.skipped:
            few = len(event.skipped) == 1
            which = f"{len(event.skipped)} of {event.num_train} training views {'does' if few else 'do'} not fit"
            named = named_views(
                [
                    f"{name} ({view.gain:.2f} times as bright)" if view.has_other_exposure else name
                    for name, view in event.skipped.items()
                ]
            )
            return f"warning: step {event.step}: {which} the others, and {'is' if few else 'are'} left out: {named}"
        case ViewsCompared():
            return f"step {event.step}: all {event.num_train} training views are used again"
        case Alarmed():
            return f"warning: step {event.step}: {event.text}"
        case RolledBack():
            return f"warning: rolled back from step {event.from_step} to step {event.step}: {event.text}"
        case SaveFailed():
            return f"warning: step {event.step}: {event.text}; next attempt in {event.retry_seconds:.0f} s"
        case Saved():
            return f"step {event.step}: saved {event.path}"
        case Stopped() if event.reason != "finished":
            return f"stopped at step {event.step} ({event.reason}); continue with: splat resume {event.path}"
        case _:
            return None


def named_views(named: Sequence[str]) -> str:
    """Return the first names of a list of views, and how many more there are."""
    from splatcli.train.outlier_views import LISTED

    return listed(named, LISTED)


def format_rate(rate: float, unit: str) -> str:
    """Return a rate for people: ``123 it/s``, ``4.5 it/s`` or ``2.3 s/it``."""
    if rate < 1:
        return f"{1 / rate:.1f} s/{unit}"
    return f"{rate:.0f} {unit}/s" if rate >= 100 else f"{rate:.1f} {unit}/s"


def format_time(seconds: float) -> str:
    """Return a length of time for people: ``1:02:03`` or ``2:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
