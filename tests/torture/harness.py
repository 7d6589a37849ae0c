"""The harnesses' common parts: figures, and cases that run where they may die, hang or eat memory.

A harness is a module with ``figures(count, seed) -> dict[str, Figure]``, which also runs by itself:
``python -m tests.torture.NAME --n COUNT --seed SEED --json FILE``. Case i of a seed is always the same one, so that
a failure can be run again: ``case_of(seed, folder)(i)``.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import os
import platform
import random
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch

from splatcli.errors import SplatError

#: Seconds of a processor after which a case counts as hung; and seconds on the clock, for those that only wait.
#: Two numbers, since other work on the machine stretches the clock.
PATIENCE = 10.0
WAITING = 90.0
#: Bytes of address space that the cases of one process may take beyond what the modules take.
MEMORY = 1 << 30
#: Failures that a figure lists; all are counted.
SHOWN = 10

#: What a case comes to: "refused", "read" or another word to count by.
Case = Callable[[int], str]


@dataclass
class Figure:
    """The outcome of a harness, as it is stored in benchmarks/reliability.json.

    what: what one trial is and when it fails, for the page.
    details: further counts and measures, by name.
    shown: the first failures, in words.
    run: the command, date, commit and machine, once it is known.
    """

    what: str
    trials: int
    failures: int
    seconds: float
    details: dict[str, int | float | str] = field(default_factory=dict)
    shown: list[str] = field(default_factory=list)
    run: dict[str, int | str] = field(default_factory=dict)


@dataclass
class Tally:
    """The outcomes of a number of cases. hangs and crashes are among the failures."""

    words: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str]] = field(default_factory=list)
    hangs: int = 0
    crashes: int = 0
    peak: int = 0  # bytes of memory beyond those at the start
    watched: bool = False  # cases that may hang, crash or eat memory

    def figure(self, what: str, seconds: float, **details: int | float | str) -> Figure:
        trials = self.words.total() + len(self.failures)
        counts = {word: self.words[word] for word in sorted(self.words)}
        more = (
            {"hangs": self.hangs, "crashes": self.crashes, "peak_mb": round(self.peak / 2**20)} if self.watched else {}
        )
        shown = [f"case {index}: {text}" for index, text in self.failures[:SHOWN]]
        return Figure(what, trials, len(self.failures), round(seconds, 1), {**counts, **more, **details}, shown)


def main(figures: Callable[[int, int], dict[str, Figure]], count: int) -> None:
    """The command line of a harness; exits with 1 when a trial failed. count: the default number of trials."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int, default=count, help="trials (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, help="of fuzzing: report the trials done by then")
    parser.add_argument("--only", metavar="FIGURE", help="of a harness with several")
    parser.add_argument("--json", type=Path, help="where the figures go; stdout without it")
    options = parser.parse_args()
    name = sys.modules["__main__"].__spec__.name
    command = f"python -m {name} --n {options.n} --seed {options.seed}"
    if options.minutes is not None:
        _enough.minutes = options.minutes
        command += f" --minutes {options.minutes:g}"
    if options.only is not None:
        _enough.only = options.only
        command += f" --only {options.only}"
    run = circumstances()
    found = figures(options.n, options.seed)
    for figure in found.values():
        figure.run = {"command": command, **run}
    text = json.dumps({name: dataclasses.asdict(figure) for name, figure in found.items()}, indent=2) + "\n"
    if options.json is None:
        sys.stdout.write(text)
    else:
        options.json.write_text(text)
    sys.exit(any(figure.failures for figure in found.values()))


@dataclass
class _Enough:
    """When run_cases() is to leave it at what has been tried, and which figure alone is asked for."""

    minutes: float = math.inf
    only: str | None = None


_enough = _Enough()


def minutes() -> float | None:
    """The minutes of the command line, for a process that is started anew; None without."""
    return _enough.minutes if math.isfinite(_enough.minutes) else None


def stop_after(minutes: float | None) -> None:
    """Leave it at what has been tried after so many minutes; None: do not."""
    _enough.minutes = math.inf if minutes is None else minutes


def enough(start: float) -> bool:
    """Whether the minutes of the command line are over, since ``start`` on the monotonic clock."""
    return time.monotonic() > start + 60 * _enough.minutes


def wanted(name: str) -> bool:
    """Whether the command line asks for the figure ``name``."""
    return _enough.only in (None, name)


def circumstances() -> dict[str, int | str]:
    """When, of what and where a figure is measured."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=False).stdout.strip()

    commit = git("rev-parse", "--short", "HEAD") or "unknown"
    models = re.findall(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else ""),
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count() or 0,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def rng_of(seed: int, index: int) -> random.Random:
    """The randomness of one case."""
    return random.Random(f"{seed}:{index}")


@contextmanager
def workplace(*, memory: bool = True) -> Iterator[Path]:
    """A folder for a harness's files; in memory where the system has that, unless ``memory`` is False."""
    shared = Path("/dev/shm")
    place = shared if memory and os.access(shared, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="splat-torture-", dir=place) as name:
        yield Path(name)


def refused(read: Callable[[], object]) -> bool:
    """Whether ``read`` refuses its input as it should, with one of the user's errors; any other error passes."""
    try:
        read()
    except SplatError as error:
        if error.exit_code == SplatError.exit_code:
            raise
        if not error.what.strip():
            raise AssertionError("an error without words") from error
        return True
    return False


def run_cases(case: Case, count: int, *, memory: int = MEMORY, apart: bool = False) -> Tally:
    """Cases 0 ... count - 1 in a process apart, which is replaced when it dies or hangs; ``apart``: after each case.

    An exception that leaves a case is a failure, and so is a warning, a death of the process and a hang.
    """
    tally = Tally(watched=True)
    index = 0
    until = time.monotonic() + 60 * _enough.minutes
    while index < count and time.monotonic() < until:
        index = _run_from(case, index, index + 1 if apart else count, tally, memory, until)
    return tally


def fuzz(name: str, what: str, case_of: Callable[[int, Path], Case], count: int, seed: int) -> dict[str, Figure]:
    """The figure ``name`` of a harness whose cases, ``case_of(seed, folder)``, need only a folder."""
    start = time.monotonic()
    with workplace() as folder:
        tally = run_cases(case_of(seed, folder), count)
    return {name: tally.figure(what, time.monotonic() - start)}


def fork() -> int:
    """os.fork(), for children that use no threads of their parent."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns when torch has threads
        return os.fork()


def _run_from(case: Case, index: int, count: int, tally: Tally, memory: int, until: float) -> int:
    """Cases from ``index`` on in one process, until a moment of the clock; the first case that is left to do."""
    reader, writer = os.pipe()
    child = fork()
    if child == 0:
        os.close(reader)
        _work(case, index, count, writer, memory)
    os.close(writer)
    pending, end = b"", ""
    while not end:
        if not _answers(reader, child):
            end = f"no answer within {PATIENCE:g} s"
            tally.hangs += 1
        elif not (piece := os.read(reader, 1 << 16)):
            end = "the process died"
            tally.crashes += 1
        else:
            *lines, pending = (pending + piece).split(b"\n")
            for line in lines:
                word, text, peak = json.loads(line)
                if word == "end":
                    end = word
                    break
                _count(tally, index, word, text, peak)
                index += 1
            if time.monotonic() > until:
                end = "end"
    os.close(reader)
    os.kill(child, signal.SIGKILL)  # a zombie does not mind
    os.waitpid(child, 0)
    if end == "end":
        return count
    tally.failures.append((index, end))
    return index + 1


def _answers(reader: int, child: int) -> bool:
    """Whether something can be read from ``reader``; waits until it can, or until the child counts as hung."""
    used, until = _processor_time(child), time.monotonic() + WAITING
    while not select.select([reader], [], [], 1.0)[0]:
        if _processor_time(child) - used > PATIENCE or time.monotonic() > until:
            return False
    return True


def _processor_time(pid: int) -> float:
    """Seconds that a process has computed so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _count(tally: Tally, index: int, word: str, text: str, peak: int) -> None:
    tally.peak = max(tally.peak, peak)
    if word == "failure":
        tally.failures.append((index, text))
    else:
        tally.words[word] += 1


def _work(case: Case, index: int, count: int, writer: int, memory: int) -> None:
    """The child's life; never returns."""
    try:
        torch.set_num_threads(1)  # the parent's threads did not survive the fork
        warnings.simplefilter("error")
        limit = _address_space() + memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        gc.collect()
        start = _resident()
        for i in range(index, count):
            try:
                word, text = case(i), ""
            except BaseException as error:
                word, text = "failure", _summary(error)
            peak = max(0, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start)
            os.write(writer, json.dumps([word, text, peak]).encode() + b"\n")
        os.write(writer, json.dumps(["end", "", 0]).encode() + b"\n")
    finally:
        os._exit(0)


def _summary(error: BaseException) -> str:
    """The error's kind and words, and where in our code it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "splatcli" in frame.filename] or frames
    place = f" at {Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else ""
    words = (str(error).splitlines() or [""])[0][:600]
    return f"{type(error).__name__}: {words}{place}"


def _address_space() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
    return int(pages) * resource.getpagesize()


def _resident() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * resource.getpagesize()


def quiet_streams() -> None:
    """Sends this process's stdout and stderr nowhere; for cases that run commands."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.close(null)
