"""Watch: who of the processes lives, how far each one is, and which one failed first.

A thread in each process writes a beat into the shared store every second and reads those of the others, so that a
process that was killed or stopped is missed although its peers only wait. The first verdict is everybody's: it is
written once, and all processes end with it, so that nobody is blamed for having lost its neighbour.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed import Store

from splatcli.errors import DistributedError

#: Seconds between two beats; and without any after which a process counts as gone. A machine that is busy beyond
#: measure may stop a thread for seconds.
BEAT = 1.0
SILENCE = 10.0

#: Seconds for the store's answer to a verdict.
ANSWER = 3.0

#: Seconds that an exchange may still take to arrive from a process that has left in good order.
GONE = 3.0

#: Seconds from a verdict on after which a process is ended that cannot hear of it, for it waits in a call on a GPU.
GRACE = 8.0


#: What a person can do about most verdicts.
REMEDY = "splat resume goes on from the last checkpoint, with any number of ranks"


@dataclass(slots=True)
class Heartbeat:
    """What a process last said: how many exchanges it has begun, what it does, and whether that takes its time.

    at: when it was heard, by this process' clock.
    """

    text: str
    count: int
    doing: str
    patient: bool
    at: float


class HeartbeatMonitor:
    """Beats for rank ``rank`` of ``size``; a thread that ends with the process, or with close().

    store: a client of its own, which no other thread waits in.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._store = store
        self._lock = threading.Lock()
        self._count, self._doing = 0, "the start"
        self._alone: str | None = None
        self._waiting = False
        now = self._answered = self._awake = time.monotonic()
        self._beats = {other: Heartbeat("", 0, "the start", False, now) for other in range(size) if other != rank}
        self._left: set[int] = set()
        self._verdict: dict[str, Any] | None = None
        self._verdict_at = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="splat-watch", daemon=True)
        self._thread.start()

    # --- what this process does ---------------------------------------------------------------------------------

    def enter(self, doing: str) -> None:
        """This process begins its next exchange."""
        self._count, self._doing, self._waiting = self._count + 1, doing, True

    def leave(self) -> None:
        """The exchange is over."""
        self._waiting = False

    def alone(self, doing: str | None) -> None:
        """This process begins something that takes its time; None: it is back among the others."""
        self._alone = doing

    def awake(self) -> None:
        """This process runs. While it was itself stopped it has not listened, and holds that against nobody."""
        with self._lock:
            now = time.monotonic()
            stopped, self._awake = now - self._awake, now
            if stopped > SILENCE / 2:
                self._answered += stopped
                for beat in self._beats.values():
                    beat.at += stopped

    # --- what is known of the others ----------------------------------------------------------------------------

    def check(self) -> None:
        """Raises DistributedError when a verdict is known."""
        if self._verdict is not None:
            raise self.error()

    @property
    def judged(self) -> bool:
        """Whether there is a verdict."""
        return self._verdict is not None

    def error(self) -> DistributedError:
        """The verdict in words."""
        assert self._verdict is not None
        return DistributedError(self._verdict["what"], where=f"rank {self.rank} of {self.size}", remedy=REMEDY)

    @property
    def speaks(self) -> bool:
        """Whether it is for this rank to tell people of the verdict, see speaker_of()."""
        return self._verdict is None or self.rank == speaker_of(self._verdict, self.size)

    def judge(self, ranks: list[int], what: str, *, told: bool = False) -> None:
        """Writes the verdict, unless there is one already; either way it is known here afterwards.

        told: the rank that is blamed tells people itself.
        """
        mine = verdict(ranks, what, told=told)

        def write() -> None:
            with contextlib.suppress(RuntimeError, ValueError):
                self._take(json.loads(self._store.compare_set("verdict", "", json.dumps(mine))))

        # A store whose process was stopped never answers.
        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        writer.join(timeout=ANSWER)
        self._take(mine)

    def waited(self, seconds: float, patience: float) -> None:
        """This process has waited so long for an exchange; raises when it is time for a verdict on who has not come.

        seconds: without those for which it was itself stopped.
        """
        unheard = time.monotonic() - self._answered
        if unheard > SILENCE + ANSWER:
            self._take_lost_store()  # the thread, which would have noticed, is itself waiting for the store
        elif unheard > ANSWER:
            return  # what is known of the others is old
        elif seconds > GONE and (gone := sorted(self._left)):
            ended = " and ".join(f"rank {rank}" for rank in gone)
            self.judge(gone, f"{ended} has ended, and rank {self.rank} is in {self._doing}")
        elif seconds > patience:
            behind = [rank for rank, beat in self._beats.items() if beat.count < self._count]
            if any(self._beats[rank].patient for rank in behind):
                return
            places = [self._beats[rank].doing if rank in self._beats else self._doing for rank in range(self.size)]
            late = behind or minority(places)
            words = [f"rank {rank} has not come to {self._doing}, it is in {places[rank]}" for rank in late]
            said = "; ".join(words) or f"all ranks have come to {self._doing}, but it does not end"
            self.judge(late, f"{said} (rank {self.rank} has waited {seconds:.0f} s)")
        self.check()

    def missed(self) -> list[int]:
        """Ranks that have said nothing for too long."""
        now = time.monotonic()
        return [rank for rank, beat in self._beats.items() if rank not in self._left and now - beat.at > SILENCE]

    def close(self) -> None:
        """Tells the others that this process leaves in good order."""
        self._closed.set()
        self._thread.join(timeout=2.0 * BEAT)
        with contextlib.suppress(RuntimeError):  # who kept the store may have left already
            self._store.set(f"left/{self.rank}", "1")

    # --- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.wait(BEAT):
            self.awake()
            try:
                if self._verdict is None:
                    self._round()
                self._answered = time.monotonic()
            except (RuntimeError, ValueError):
                if time.monotonic() - self._answered > SILENCE and not self._closed.is_set():
                    self._take_lost_store()
            if self._verdict is not None and time.monotonic() - self._verdict_at > GRACE and self._waiting:
                self._end()

    def _round(self) -> None:
        told = [time.monotonic(), self._count, self._alone or self._doing, self._alone is not None]
        text = json.dumps(told)
        self._store.set(f"beat/{self.rank}", text)
        if self._verdict is None and self._store.check(["verdict"]):
            self._take(json.loads(self._store.get("verdict")))
        for rank, beat in self._beats.items():
            if rank not in self._left:
                self._hear(rank, beat)
        if self._verdict is None and (silent := self.missed()):
            words = " and ".join(f"rank {rank} (last in {self._beats[rank].doing})" for rank in silent)
            self.judge(
                silent,
                f"{words} has given no sign of life for {SILENCE:.0f} s: killed, stopped, or its machine is gone",
            )

    def _hear(self, rank: int, beat: Heartbeat) -> None:
        if not self._store.check([f"beat/{rank}"]):
            return
        text = self._store.get(f"beat/{rank}").decode()
        if text == beat.text:
            if self._store.check([f"left/{rank}"]):
                self._left.add(rank)
            return
        _, count, doing, patient = json.loads(text)
        self._beats[rank] = Heartbeat(text, count, doing, patient, time.monotonic())

    def _take(self, verdict: dict[str, Any]) -> None:
        with self._lock:
            if self._verdict is None:
                self._verdict_at = time.monotonic()
                self._verdict = verdict

    def _take_lost_store(self) -> None:
        what = "the process at which the ranks meet (the launcher, or rank 0) does not answer"
        self._take(verdict([0], what))

    def _end(self) -> None:
        """Ends the process, whose main thread waits for what will never come."""
        if self.speaks:
            sys.stderr.write("\n".join(self.error().lines()) + "\n")
            sys.stderr.flush()
        os._exit(DistributedError.exit_code)


def verdict(ranks: list[int], what: str, *, told: bool = False) -> dict[str, Any]:
    """See Watch.judge()."""
    return {"ranks": ranks, "what": what, "told": told}


def speaker_of(verdict: dict[str, Any], size: int) -> int:
    """The one of ``size`` ranks that tells people: the one that fails if it says so itself, else the first other."""
    blamed: list[int] = verdict["ranks"]
    others = [rank for rank in range(size) if rank not in blamed]
    return (blamed if verdict["told"] else others or [0])[0]


def minority(values: Sequence[object]) -> list[int]:
    """The ranks whose value is not that of more than half of all; all where there is none such, none if all agree."""
    most = max(values, key=lambda value: sum(value == other for other in values))
    odd = [rank for rank, value in enumerate(values) if value != most]
    return odd if 2 * len(odd) < len(values) else list(range(len(values)))
