"""A run while it trains, for browsers: they send cameras, and get pictures drawn between two steps.

The training thread draws, and only what somebody waits for: nobody there, nothing done. Drawing reads the state and
draws no random number, so that a run has the same bits with and without onlookers. Browsers meet a server's threads,
which do nothing but hand wishes over and wait; whatever becomes of a browser, training goes on.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any

from splatcli.render.live_pictures import Painter, RenderRequest, jpeg, parse_wish, stage_of
from splatcli.render.server import Document, Request
from splatcli.train.events import Event, Started, Stepped
from splatcli.train.state import TrainState

_log = logging.getLogger(__name__)

#: Of the time, so much may go into pictures while somebody moves, and while they only look on; and seconds between two
#: of the latter at least: training makes steps faster than anyone can see them.
_MOVING_SHARE, _STILL_SHARE, _STILL_EVERY = 0.5, 0.05, 0.5
#: Seconds that drawing may go on between two steps, and that the next wish of somebody who moves is waited for.
_LONGEST, _NEXT_WISH = 0.25, 0.03
#: Seconds until a browser is told how far the run is without a new picture, and after which one that asked for nothing
#: is gone.
_PATIENCE, _GONE = 1.0, 15.0
#: JPEG quality of what is wanted at once, and of what stays.
_QUALITIES = {True: 80, False: 92}
#: Wishes that may wait at once; browsers have one each.
_MOST_WISHES = 64
#: The header of every answer to a wish that tells how far the run is.
_FACTS = "X-Splat-Facts"


class LiveRun:
    """A run as browsers see it: answers them (``__call__``, from any thread), and draws for them (``tell``).

    goes_on: whether training has to go on although it is paused, for a signal or a deadline.
    """

    def __init__(
        self, goes_on: Callable[[], bool] = lambda: False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.goes_on = goes_on
        self._clock = clock
        self._lock = threading.Condition()  # of all that follows up to the empty line
        self._wishes: list[RenderRequest] = []
        self._paused = False
        self._asked = -math.inf
        self._stage: bytes | None = None
        self._facts: dict[str, Any] = {}

        self._runs = 0
        self._loss: float | None = None
        self._problem: str | None = None
        self._left = clock()
        self._credit = 0.0
        self._next_still = -math.inf

    # For the training thread.

    def tell(self, event: Event, state: TrainState) -> None:
        """What happened last; the state may be read until this returns, which is when training goes on."""
        if isinstance(event, Started):
            self._runs += 1
            self._loss = None
            self._stage = json.dumps(stage_of(state)).encode()
        elif isinstance(event, Stepped):
            self._loss = event.loss if math.isfinite(event.loss) else None
        if not self._wishes and not self._paused:
            return
        self._facts = {
            "step": state.step,
            "iterations": state.config.train.iterations,  # may change on the way
            "gaussians": len(state.gaussians),
            "loss": self._loss,
            "run": self._runs,  # of several, one after the other
        }
        painter = Painter(state)
        began = self._clock()
        # Training has earned as much as it took.
        earned = (began - self._left) * _MOVING_SHARE / (1.0 - _MOVING_SHARE)
        self._credit = min(_LONGEST, self._credit + earned)
        self._draw(painter, began + self._credit)
        self._credit -= self._clock() - began
        while self._is_held():
            self._draw(painter, self._clock() + _LONGEST)
            with self._lock:
                self._lock.wait(_STILL_EVERY / 5)
        self._left = self._clock()

    def _is_held(self) -> bool:
        """Whether training is paused, by somebody who is still there, and nothing more important wants it to go on."""
        with self._lock:
            if self._paused and self._clock() - self._asked > _GONE:
                self._paused = False
            return self._paused and not self.goes_on()

    def _draw(self, painter: Painter, until: float) -> None:
        """Grant the wishes whose time has come, and of somebody who moves the next ones too, while there is time."""
        while due := self._due(painter.state.step, hurry=self._clock() < until):
            for wish in due:
                self._grant(wish, painter)
            if not any(wish.urgent for wish in due):
                return
            with self._lock:
                self._lock.wait_for(lambda: any(wish.urgent for wish in self._wishes), timeout=_NEXT_WISH)

    def _due(self, step: int, *, hurry: bool) -> list[RenderRequest]:
        """Takes the wishes to be granted now. hurry: there is time for urgent ones."""
        still = self._clock() >= self._next_still
        with self._lock:
            due = [wish for wish in self._wishes if (hurry if wish.urgent else still and wish.seen != step)]
            self._wishes = [wish for wish in self._wishes if wish not in due]
        return due

    def _grant(self, wish: RenderRequest, painter: Painter) -> None:
        began = self._clock()
        try:
            wish.picture = painter.paint(wish)
        except Exception as error:  # memory, most likely: whatever somebody wants to see, it must not end the run
            wish.problem = str(error).splitlines()[0] if str(error) else type(error).__name__
            if wish.problem != self._problem:  # once: the page asks again and again
                _log.warning("a picture for the viewer could not be drawn: %s", wish.problem)
            self._problem = wish.problem
        took = self._clock() - began
        self._next_still = self._clock() + max(_STILL_EVERY, took * (1.0 / _STILL_SHARE - 1.0))
        wish.facts, wish.seconds = self._facts, took
        wish.done.set()

    # For the threads of a server.

    def __call__(self, request: Request) -> Document | None:
        """The page and what it asks for; everything but the page is for its own script only."""
        if (request.method, request.path) == ("GET", "/"):
            return Document("text/html; charset=utf-8", _page())
        if not request.own:
            return None
        match request.method, request.path:
            case "GET", "/stage":
                return _NOTHING if self._stage is None else Document("application/json", self._stage)
            case "GET", "/picture":
                return self._picture(request)
            case "POST", "/pause" | "/resume":
                with self._lock:
                    self._asked = self._clock()
                    self._paused = request.path == "/pause"
                    self._lock.notify_all()
                return _NOTHING
        return None

    def _picture(self, request: Request) -> Document:
        try:
            wish = parse_wish(request)
        except (KeyError, ValueError) as error:
            return _refusal(400, f"this is no view: {error}")
        with self._lock:
            self._asked = self._clock()
            self._forget([other for other in self._wishes if other.who == wish.who])
            if len(self._wishes) >= _MOST_WISHES:
                return _refusal(503, "too many browsers look on")
            self._wishes.append(wish)
            self._lock.notify_all()
        if not wish.done.wait(_PATIENCE):
            with self._lock:
                self._forget([wish])
        if wish.problem is not None:
            return _refusal(503, wish.problem)
        facts = {**(wish.facts or self._facts), "paused": self._paused, "seconds": wish.seconds}
        headers = {_FACTS: json.dumps(facts, allow_nan=False)}
        if wish.picture is None:
            return Document("text/plain", b"", status=204, headers=headers)
        return Document("image/jpeg", jpeg(wish.picture, _QUALITIES[wish.urgent]), headers=headers)

    def _forget(self, wishes: Sequence[RenderRequest]) -> None:
        """Nobody waits for these any more."""
        self._wishes = [wish for wish in self._wishes if wish not in wishes]
        for wish in wishes:
            wish.done.set()


#: An answer without content.
_NOTHING = Document("text/plain", b"", status=204)


def _refusal(status: int, text: str) -> Document:
    return Document("text/plain; charset=utf-8", text.encode(), status=status)


def _page() -> bytes:
    return (files("splatcli.render") / "live.html").read_bytes()
