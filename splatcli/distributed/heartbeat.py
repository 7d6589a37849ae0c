"""Heartbeat monitor: which ranks are alive, how far each has come, and which one failed first.

A thread in each process writes a heartbeat into the shared store every second and reads those of the others. So a
process that was killed or stopped is detected while its peers only wait. The first failure is written once, and all
processes end with it, so that no rank is blamed for having lost another.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from torch.distributed import Store

from splatcli.errors import DistributedError

#: Seconds between two heartbeats; and without any, after which a process counts as gone. A busy machine may stop a
#: thread for seconds.
INTERVAL = 1.0
SILENCE_LIMIT = 10.0

#: Seconds for the store's answer to a failure.
STORE_TIMEOUT = 3.0

#: Seconds in which the last messages of a process that has left in good order may still arrive.
LEFT_TIMEOUT = 3.0

#: Seconds from a failure on after which a process is ended that cannot react to it, since it waits for a GPU.
EXIT_GRACE = 8.0
#: The same where collectives only begin with their call: a process may wait for one of them at any later place. One
#: that is not stuck reacts at its next collective.
ENQUEUED_GRACE = 3.0 * EXIT_GRACE

#: The failure's key in the store.
_KEY = "failure"

#: What a person can do about most failures.
REMEDY = "splat resume goes on from the last checkpoint, with any number of ranks"


@dataclass(slots=True)
class Heartbeat:
    """The last heartbeat of a process.

    count: of the collectives that it has begun. doing: what it does. slow: whether that may take long.
    at: when it was read, by this process' clock.
    """

    text: str
    count: int
    doing: str
    slow: bool
    at: float


@dataclass(frozen=True, slots=True)
class Failure:
    """The first failure of a run.

    ranks: to blame. reported: the failed rank prints it itself.
    """

    ranks: list[int]
    what: str
    reported: bool = False

    def reporter(self, size: int) -> int:
        """Return which of ``size`` ranks prints it: the failed one if it does so itself, else the first other."""
        others = [rank for rank in range(size) if rank not in self.ranks]
        return (self.ranks if self.reported else others or [0])[0]

    def publish(self, store: Store) -> Failure:
        """Write this failure into the store, unless there is an earlier one; return the one that is there."""
        return Failure(**json.loads(store.compare_set(_KEY, "", json.dumps(asdict(self)))))

    @classmethod
    def read(cls, store: Store) -> Failure | None:
        """Return the failure in the store; None without one."""
        return cls(**json.loads(store.get(_KEY))) if store.check([_KEY]) else None


class HeartbeatMonitor:
    """A thread of rank ``rank`` of ``size``, which ends with the process, or with close().

    store: a client of its own, which no other thread waits in.
    enqueues: collectives are over on a GPU, some time after their calls have returned.
    """

    def __init__(self, store: Store, rank: int, size: int, *, enqueues: bool = False) -> None:
        self.rank, self.size = rank, size
        self._enqueues = enqueues
        self._store = store
        self._lock = threading.Lock()
        self._count, self._doing = 0, "the start"
        self._slow: str | None = None
        self._waiting = False
        now = self._answered = self._awake = time.monotonic()
        self._beats = {other: Heartbeat("", 0, "the start", False, now) for other in range(size) if other != rank}
        self._left: set[int] = set()
        self._failure: Failure | None = None
        self._failed_at = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="splat-heartbeat", daemon=True)
        self._thread.start()

    # --- what this process does ---------------------------------------------------------------------------------

    def enter(self, doing: str) -> None:
        """Note that this process begins its next collective."""
        self._count, self._doing, self._waiting = self._count + 1, doing, True

    def leave(self) -> None:
        """Note that the collective is over."""
        self._waiting = False

    def slow(self, doing: str | None) -> None:
        """Note that this process begins something that may take long; None: it is over."""
        self._slow = doing

    def discount_own_stop(self) -> None:
        """Do not count time in which this process was itself stopped as silence of the others."""
        with self._lock:
            now = time.monotonic()
            stopped, self._awake = now - self._awake, now
            if stopped > SILENCE_LIMIT / 2:
                self._answered += stopped
                for beat in self._beats.values():
                    beat.at += stopped

    # --- the state of the others ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise DistributedError when a failure is known."""
        if self._failure is not None:
            raise self.error()

    @property
    def failed(self) -> bool:
        """Whether a failure of any rank is known."""
        return self._failure is not None

    def error(self) -> DistributedError:
        """Return the failure as an error."""
        assert self._failure is not None
        return DistributedError(self._failure.what, where=f"rank {self.rank} of {self.size}", remedy=REMEDY)

    @property
    def reports(self) -> bool:
        """Whether this rank prints the failure, see Failure.reporter()."""
        return self._failure is None or self.rank == self._failure.reporter(self.size)

    def declare(self, ranks: list[int], what: str, *, reported: bool = False) -> None:
        """Write a failure of ``ranks``, unless there is one already; either is known here afterwards.

        reported: the failed rank prints it itself.
        """
        mine = Failure(ranks, what, reported)

        def write() -> None:
            with contextlib.suppress(RuntimeError, ValueError):
                self._take(mine.publish(self._store))

        # A store whose process was stopped never answers.
        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        writer.join(timeout=STORE_TIMEOUT)
        self._take(mine)

    def check_wait(self, seconds: float, patience: float) -> None:
        """Raise DistributedError when this process has waited too long for a collective, naming the ranks to blame.

        seconds: of the wait, without those for which this process was itself stopped.
        """
        unheard = time.monotonic() - self._answered
        if unheard > SILENCE_LIMIT + STORE_TIMEOUT:
            self._take_lost_store()  # the thread itself waits for the store
        elif unheard > STORE_TIMEOUT:
            return  # the heartbeats of the others are old
        elif seconds > LEFT_TIMEOUT and (gone := sorted(self._left)):
            ended = first_of([f"rank {rank}" for rank in gone], " and ")
            self.declare(gone, f"{ended} has ended, and rank {self.rank} is in {self._doing}")
        elif seconds > patience:
            behind = [rank for rank, beat in self._beats.items() if beat.count < self._count]
            if any(self._beats[rank].slow for rank in behind):
                return
            places = [self._beats[rank].doing if rank in self._beats else self._doing for rank in range(self.size)]
            late = behind or minority(places)
            words = [f"rank {rank} has not come to {self._doing}, it is in {places[rank]}" for rank in late]
            said = first_of(words, "; ") or f"all ranks have come to {self._doing}, but it does not end"
            self.declare(late, f"{said} (rank {self.rank} has waited {seconds:.0f} s)")
        self.check()

    def silent_ranks(self) -> list[int]:
        """Return the ranks that have sent no heartbeat for too long."""
        now = time.monotonic()
        return [rank for rank, beat in self._beats.items() if rank not in self._left and now - beat.at > SILENCE_LIMIT]

    def close(self) -> None:
        """Tell the others that this process leaves in good order."""
        self._closed.set()
        self._thread.join(timeout=2.0 * INTERVAL)
        with contextlib.suppress(RuntimeError):  # the process that keeps the store may have left already
            self._store.set(f"left/{self.rank}", "1")

    # --- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.wait(INTERVAL):
            self.discount_own_stop()
            try:
                if self._failure is None:
                    self._round()
                self._answered = time.monotonic()
            except (RuntimeError, ValueError):
                if time.monotonic() - self._answered > SILENCE_LIMIT and not self._closed.is_set():
                    self._take_lost_store()
            if self._failure is not None and self._is_stuck(time.monotonic() - self._failed_at):
                self._end()

    def _is_stuck(self, passed: float) -> bool:
        """Return whether the process cannot react to a failure that is ``passed`` seconds old."""
        if self._waiting:
            return passed > EXIT_GRACE
        return self._enqueues and self._slow is None and passed > ENQUEUED_GRACE

    def _round(self) -> None:
        text = json.dumps([time.monotonic(), self._count, self._slow or self._doing, self._slow is not None])
        self._store.set(f"beat/{self.rank}", text)
        if self._failure is None and (found := Failure.read(self._store)) is not None:
            self._take(found)
        for rank, beat in self._beats.items():
            if rank not in self._left:
                self._read(rank, beat)
        if self._failure is None and (silent := self.silent_ranks()):
            words = first_of([f"rank {rank} (last in {self._beats[rank].doing})" for rank in silent], " and ")
            self.declare(
                silent,
                f"{words} has given no sign of life for {SILENCE_LIMIT:.0f} s: killed, stopped, or its machine is gone",
            )

    def _read(self, rank: int, beat: Heartbeat) -> None:
        if not self._store.check([f"beat/{rank}"]):
            return
        text = self._store.get(f"beat/{rank}").decode()
        if text == beat.text:
            if self._store.check([f"left/{rank}"]):
                self._left.add(rank)
            return
        _, count, doing, slow = json.loads(text)
        self._beats[rank] = Heartbeat(text, count, doing, slow, time.monotonic())

    def _take(self, failure: Failure) -> None:
        with self._lock:
            if self._failure is None:
                self._failed_at = time.monotonic()
                self._failure = failure

    def _take_lost_store(self) -> None:
        what = "the process at which the ranks meet (the launcher, or rank 0) does not answer"
        self._take(Failure([0], what))

    def _end(self) -> None:
        """End the process, whose main thread waits for a collective that will not end."""
        if self.reports and sys.stderr is not None:
            with contextlib.suppress(OSError):  # nothing may keep the process
                sys.stderr.write("\n".join(self.error().lines()) + "\n")
                sys.stderr.flush()
        os._exit(DistributedError.exit_code)


#: Ranks that a message names at most.
_MOST_NAMED = 8


def first_of(words: Sequence[str], joint: str, odd: Sequence[int] = ()) -> str:
    """Join sentences about ranks: the first _MOST_NAMED of them, and how many others there are.

    odd: places in ``words`` that come first then.
    """
    if len(words) <= _MOST_NAMED:
        return joint.join(words)
    order = sorted(range(len(words)), key=lambda place: place not in odd)
    return f"{joint.join(words[place] for place in order[:_MOST_NAMED])} and {len(words) - _MOST_NAMED} others"


def minority(values: Sequence[object]) -> list[int]:
    """Return the ranks that differ from the majority; all ranks where there is none, none where all agree."""
    common = max(values, key=lambda value: sum(value == other for other in values))
    odd = [rank for rank, value in enumerate(values) if value != common]
    return odd if 2 * len(odd) < len(values) else list(range(len(values)))
