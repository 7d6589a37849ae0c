"""MetricsLogger: the events that a run writes into metrics.jsonl, and the curves of them for TensorBoard."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from splatcli.checkpoint.run_dir import RunDir
from splatcli.errors import OutputError, ResourceError
from splatcli.scene.scene import Scene
from splatcli.train.evaluate import protocol
from splatcli.train.events import Alarmed, Evaluated, Event, Probed, RolledBack, SaveFailed, Stepped, ViewsCompared
from splatcli.train.state import TrainState
from splatcli.train.tensorboard import TensorBoardWriter

#: Steps between two records of the loss.
LOG_EVERY = 10

#: Names of the other events that are written.
_NAMES = {
    Evaluated: "eval",
    Probed: "probe",
    ViewsCompared: "views",
    Alarmed: "alarm",
    RolledBack: "rollback",
    SaveFailed: "save-failed",
}


class MetricsLogger:
    """Writes the events that pass through log(). A disk that takes no line raises one alarm, and training goes on.

    clock: seconds; steps are written with those since start(). curves: whether TensorBoard's are written, too.
    """

    def __init__(self, run_dir: RunDir, scene: Scene, clock: Callable[[], float], *, curves: bool) -> None:
        self._run_dir = run_dir
        self._scene = scene
        self._clock = clock
        self._started_at = clock()
        self._first_step = self._scored_step = 0
        self._lines_lost = False
        self._wants_curves = curves
        self._curves: TensorBoardWriter | None = None

    def start(self, step: int) -> None:
        """Start the clock anew. step: steps are logged from the one after it."""
        self._started_at = self._clock()
        self._first_step, self._curves = step, None
        self._scored_step = step  # a finished run that is resumed does no step, and is scored anew

    def log(self, events: Iterable[Event], state: Callable[[], TrainState]) -> Iterator[Event]:
        """Yield ``events`` one by one; with the first line that is lost comes an alarm."""
        for event in events:
            record = self._record(event, state)
            if record is not None:
                try:
                    # A run whose time ends with a step that was scored is scored anew, as it is saved.
                    again = isinstance(event, Evaluated) and event.step == self._scored_step
                    self._run_dir.append_metrics(record, again=again)
                    if isinstance(event, Evaluated):
                        self._scored_step = event.step
                    if self._wants_curves:
                        self._curves = self._curves or TensorBoardWriter(self._run_dir.path, self._first_step)
                        self._curves.add(record)
                except (OutputError, ResourceError) as error:
                    if not self._lines_lost:
                        self._lines_lost = True
                        yield Alarmed(event.step, "metrics", f"lines of the metrics are lost: {error.what}")
            yield event

    def _record(self, event: Event, state: Callable[[], TrainState]) -> dict[str, object] | None:
        name = _NAMES.get(type(event))
        if isinstance(event, Stepped) and event.step % LOG_EVERY == 0:
            return {"event": "step", **dataclasses.asdict(event), "seconds": round(self._clock() - self._started_at, 3)}
        if name is None:
            return None
        record = {"event": name, **dataclasses.asdict(event)}
        if isinstance(event, Evaluated):
            record["protocol"] = protocol(state().config, self._scene, state().test)
        return record
