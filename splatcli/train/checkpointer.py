"""Checkpointer: when a run is saved. A disk that takes no checkpoint does not end training."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from splatcli.checkpoint.run_dir import RunDir, RunMovedError
from splatcli.errors import OutputError, ResourceError
from splatcli.train.events import Alarmed, Event, Saved, SaveFailed
from splatcli.train.state import TrainState

#: Seconds until a failed save is tried again: the first time, and at most. Each pause is twice as long as the last.
RETRY_FIRST = 30.0
RETRY_LAST = 600.0

#: Seconds between attempts to save the last state of a run.
RETRY_AT_END = 10.0


class Checkpointer:
    """Decides when to save, saves, and records the saves that failed.

    saved: the newest checkpoint that this process has saved.
    missed: steps of ``save.steps`` that have no checkpoint.
    clock: seconds.
    """

    def __init__(self, run_dir: RunDir, clock: Callable[[], float]) -> None:
        self.run_dir = run_dir
        self.saved: Saved | None = None
        self.missed: list[int] = []
        self._clock = clock
        self._sleep = time.sleep
        self._saved_at = clock()
        self._failures = 0
        self._no_memory = False
        self._moved: RunMovedError | None = None
        self._retry_at = 0.0

    def start(self, state: TrainState) -> Iterator[Event]:
        """Make sure that there is a checkpoint to roll back to, and that the disk takes one; warn when it may get full.

        Raises OutputError where there is no room, before hours of training.
        """
        checkpoint = state.to_checkpoint()
        if self.run_dir.has(state.step):
            self.run_dir.probe_room(checkpoint)
        else:
            yield self._save(state)
        self._saved_at = self._clock()
        save = state.config.save
        named = sum(state.step < step <= state.config.train.iterations for step in save.steps)
        count = max(len(state.gaussians), state.config.max_gaussians() or 0)
        room, needed = self.run_dir.room_for(checkpoint, count), save.keep_last + named
        if room < needed:
            yield Alarmed(
                state.step,
                "space",
                f"there is room for {room} more checkpoints of {count:,} Gaussians, and the run may keep {needed}; "
                "should the disk get full, training goes on and tries again later",
            )

    def due(self, state: TrainState) -> bool:
        """Return whether the state after this step should be saved."""
        save = state.config.save
        if state.step in save.steps:
            return True
        if self._failures:
            return self._clock() >= self._retry_at
        return self._clock() - self._saved_at >= 60.0 * save.every_minutes

    def save(self, state: TrainState) -> Saved | SaveFailed:
        """Try to save once. Raises DivergedError for a state that must not be kept."""
        try:
            return self._save(state)
        except (OutputError, ResourceError, MemoryError) as error:
            self._no_memory = not isinstance(error, OutputError)
            self._moved = error if isinstance(error, RunMovedError) else None
            pause = min(RETRY_LAST, RETRY_FIRST * 2.0**self._failures)
            self._failures += 1
            self._retry_at = self._clock() + pause
            if state.step in state.config.save.steps and state.step not in self.missed:
                self.missed.append(state.step)
            return SaveFailed(state.step, _reason(error), pause)

    def finish(self, state: TrainState, *, keep_trying: Callable[[], bool]) -> Iterator[Event]:
        """Save the last state; where that fails, try again as long as ``keep_trying`` and the settings allow.

        Raises OutputError in the end, ResourceError when memory did not suffice.
        """
        if self.saved is not None and self.saved.step == state.step:
            return
        deadline = self._clock() + 60.0 * state.config.save.patience_minutes
        while True:
            event = self.save(state)
            if isinstance(event, Saved):
                yield event
                return
            if (self._moved is not None and self._moved.removed) or not self._wait(deadline, keep_trying):
                break
            yield SaveFailed(event.step, event.text, RETRY_AT_END)
        newest = self.run_dir.newest_path() if self.saved is None else self.saved.path
        kind, free = (ResourceError, "memory") if self._no_memory else (OutputError, "space")
        remedy = f"free some {free}, then splat resume {self.run_dir.path} goes on from there"
        if self._moved is not None and self._moved.removed:
            newest, remedy = None, self._moved.remedy or remedy
        elif newest is not None and self._moved is not None:
            place = self._moved.place or Path("DIR")  # of a folder that was removed, a copy may be left
            newest = place / newest.parent.name / newest.name
            remedy = f"splat resume {shlex.quote(str(place))} goes on from there"
            if self._moved.place is None:
                remedy += "; DIR is where the run folder is now, if it was moved"
        last = "nothing is saved" if newest is None else f"the newest checkpoint is {newest}"
        raise kind(
            f"the state after step {state.step} could not be saved: {event.text}; {last}",
            where=self.run_dir.path,
            remedy=remedy,
        )

    def _save(self, state: TrainState) -> Saved:
        self.saved = Saved(state.step, self.run_dir.save(state.to_checkpoint()))
        self._saved_at, self._failures = self._clock(), 0
        if state.step in self.missed:
            self.missed.remove(state.step)
        return self.saved

    def _wait(self, deadline: float, keep_trying: Callable[[], bool]) -> bool:
        """Wait between two attempts; return whether to make another one."""
        if self._clock() + RETRY_AT_END > deadline:
            return False
        for _ in range(int(RETRY_AT_END)):  # by the second, so that a signal ends it soon
            if not keep_trying():
                return False
            self._sleep(1.0)
        return keep_trying()


def _reason(error: BaseException) -> str:
    return error.what if isinstance(error, OutputError | ResourceError) else "no memory for the copy that is written"
