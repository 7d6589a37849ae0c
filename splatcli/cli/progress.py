"""Progress: a trainer's events as a live line on a terminal, as plain lines in a log, or as JSON."""

from __future__ import annotations

import re
import sys
import time
from collections import deque
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from splatcli.cli.output import Output

if TYPE_CHECKING:
    from rich.progress import Progress

    from splatcli.train.events import Event

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

    def tell(self, event: Event) -> None:
        """One more event."""


def reporter_for(out: Output) -> Reporter:
    """The reporter that suits the output: JSON, nothing, a terminal or a log."""
    if out.json:
        return JsonReporter(out)
    if out.quiet or out.muted:
        return SilentReporter()
    if sys.stderr is not None and sys.stderr.isatty():
        return TerminalReporter()
    return PlainReporter(out)


class _Base:
    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class SilentReporter(_Base):
    """Says nothing."""

    def tell(self, event: Event) -> None:
        return None


class JsonReporter(_Base):
    """One object an event; of the steps about a hundred a run, evenly spaced and the same in every run."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self._every = 1

    def tell(self, event: Event) -> None:
        from splatcli.train.events import Started, Stepped

        if isinstance(event, Started):
            self._every = max(1, event.iterations // _JSON_STEPS)
        if isinstance(event, Stepped) and event.step % self._every:
            return
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", type(event).__name__).lower()
        self._out.event(name, asdict(event))


class PlainReporter(_Base):
    """A line now and then, for logs."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self._pace = _Pace()
        self._last_line = time.monotonic()
        self._iterations = 0

    def tell(self, event: Event) -> None:
        from splatcli.train.events import Stepped

        if isinstance(event, Stepped):
            self._pace.step()
            if time.monotonic() - self._last_line < _PLAIN_EVERY:
                return
            rate = self._pace.rate
            left = (self._iterations - event.step) / rate if rate else 0.0
            self._out.note(
                f"step {event.step}/{self._iterations}  loss {event.loss:.4f}  {event.num_gaussians:,} Gaussians  "
                f"{rate:.1f} it/s  {_clock(left)} left"
            )
        else:
            self._iterations = getattr(event, "iterations", self._iterations)
            text = describe(event)
            if text is None:
                return
            self._out.note(text)
        self._last_line = time.monotonic()


class TerminalReporter(_Base):
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
        self._pace = _Pace()
        self._psnr = ""

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def tell(self, event: Event) -> None:
        from splatcli.train.events import Evaluated, Probed, Rescheduled, Started, Stepped

        if isinstance(event, Stepped):
            self._pace.step()
            facts = f"{self._pace.rate:5.1f} it/s  loss {event.loss:.4f}  {event.num_gaussians:,} Gaussians{self._psnr}"
            self._bar.update(self._task, completed=event.step, facts=facts)
            return
        if isinstance(event, Started | Rescheduled):
            self._bar.update(self._task, completed=event.step, total=event.iterations)
        if isinstance(event, Evaluated | Probed):
            self._psnr = f"  PSNR {event.psnr:.2f}"
        text = describe(event)
        if text is not None:
            self._bar.console.print(text, markup=False, highlight=False)


def describe(event: Event) -> str | None:
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


class _Pace:
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


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
