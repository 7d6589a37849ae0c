"""Time of a run. --max-time chooses the numbers of steps and Gaussians that fit, and corrects them during the run.

The time includes the start of the interpreter and of the libraries.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from splatcli.cli.console import Output, format_time
from splatcli.cli.process import process_age
from splatcli.errors import UsageError

if TYPE_CHECKING:
    from splatcli.config import Config
    from splatcli.gaussians import Gaussians
    from splatcli.scene.scene import Scene
    from splatcli.train.trainer import Trainer

#: Seconds for the last save and the end of the process.
END_SECONDS = 1.0

#: Share of the time that points of a scene without any may take. The fox at half its size gains 0.4 dB or more in 60 s
#: and 120 s by them (docs/quality.md); where they took half of 25 s of CPU time it lost 0.4.
POINTS_SHARE = 0.25

#: Factor on the measured time of evaluation, which varies.
SCORING_MARGIN = 1.5


#: Learning rates that a rollback lowers.
_RATES = frozenset({"optim.means_lr", "optim.means_lr_final"})


#: Seconds of training after which its speed is known, and seconds that are long for a run whose length nobody chose.
_KNOWN, _LONG = 10.0, 1800.0


class LongRunNote:
    """Prints once, where a run on the CPU takes over half an hour, which flags take less time."""

    def __init__(self, trainer: Trainer, out: Output) -> None:
        self._trainer = trainer
        self._out = out
        self._first: tuple[float, int] | None = None
        self._is_done = False

    def update(self, step: int) -> None:
        """Take notice that a step is complete."""
        now = time.monotonic()
        if self._first is None:
            self._first = now, step
        since, first = self._first
        if self._is_done or step == first or now - since < _KNOWN:
            return
        self._is_done = True
        left = self._trainer.steps_left() * (now - since) / (step - first)
        if left > _LONG:
            self._out.note(
                f"about {format_time(left)} are left on this CPU; --max-time 10m, --preset fast or a larger "
                "-r take less (Ctrl-C saves and stops)"
            )


class TimeBudget:
    """The plan of a run that ends ``limit`` seconds after the start of this process.

    rebuild_config: makes settings with other values under dotted keys, schedules scaled to them; options of the user
        take precedence.
    config: the settings of the first plan. deadline: time.monotonic() at the end of the last step.
    Raises UsageError when no time is left.
    """

    def __init__(
        self,
        limit: float,
        scene: Scene,
        given: Gaussians | None,
        device: str,
        rebuild_config: Callable[[Mapping[str, Any]], Config],
        out: Output,
    ) -> None:
        from splatcli.rasterizer.train_step import engine_for
        from splatcli.train.resolve import auto_cap
        from splatcli.train.start import first_gaussians
        from splatcli.train.step_time import (
            PLANNED,
            RANDOM_POINTS,
            TimePlanner,
            halvings_for,
            measure_scoring_time,
            measure_step_time,
        )

        ends = time.monotonic() + limit - process_age()
        self._rebuild_config = rebuild_config
        self._values: dict[str, Any] = {
            "model.random_points": RANDOM_POINTS,
            "schedule.num_downscales": halvings_for(scene),
        }
        asked = rebuild_config(self._values)
        self._first: tuple[Gaussians, list[str]] | None = first_gaussians(asked, scene, given)
        gaussians = self._first[0].to(device)
        self._start = len(gaussians)
        self._given_cap = asked.strategy.cap_max
        self._most = auto_cap(scene, self._start) if self._given_cap == "auto" else asked.max_gaussians()
        step_times = measure_step_time(asked, scene, gaussians, engine_for(device))
        scoring = SCORING_MARGIN * len(scene.test) * measure_scoring_time(asked, scene, gaussians)
        self.deadline = ends - END_SECONDS - scoring
        self._planner = TimePlanner(step_times, self.deadline, views=len(scene.train))
        left = self._planner.left()
        if left <= 0:
            raise UsageError(
                f"{limit:g} s end before the first step",
                where="--max-time",
                remedy=f"give more than {math.ceil(limit - left)} s",
            )
        steps, count = step_times.plan(PLANNED * left, self._start, self._most)
        out.message(f"{limit:.0f} s allow about {steps:,} steps and {count:,} Gaussians")
        self.config = self._planned(steps, count)

    def take_first_gaussians(self) -> tuple[Gaussians, list[str]] | None:
        """Hand the result of first_gaussians() to the run, once, so that the run does not compute it again."""
        first, self._first = self._first, None
        return first

    def update(self, trainer: Trainer) -> None:
        """Reschedule the run when the plan is off; called after each step."""
        from splatcli.config import flat_settings, with_settings
        from splatcli.train.step_time import GAUSSIANS_PER_STEP

        state = trainer.state
        self._heed_rollbacks(trainer.next_config)
        count, cap = len(state.gaussians), state.config.max_gaussians()
        steps = self._planner.replan(state.step, state.config.train.iterations, count, cap or count)
        if steps is None:
            return
        wanted = max(self._start, count, GAUSSIANS_PER_STEP * steps)
        planned = self._planned(steps, wanted if self._most is None else min(wanted, self._most))
        # What the run has decided since, such as dropout and the limit by memory, stays.
        before, after = flat_settings(self.config), flat_settings(planned)
        changes = {key: after[key] for key in after if after[key] != before[key]}
        for key in _RATES & changes.keys():
            changes[key] *= self._slower
        self.config = planned
        trainer.reschedule(with_settings(trainer.next_config, changes))

    def _heed_rollbacks(self, config: Config) -> None:
        """Take over what rollbacks have changed in ``config``, so that no later plan undoes it."""
        cap, planned_cap = config.strategy.cap_max, self.config.strategy.cap_max
        if isinstance(cap, int) and isinstance(planned_cap, int) and cap < planned_cap:
            self._most = cap if self._most is None else min(self._most, cap)
        self._slower = config.optim.means_lr / self.config.optim.means_lr

    def _planned(self, steps: int, count: int) -> Config:
        from splatcli.train.step_time import COARSE_PART

        coarse = max(1, round(COARSE_PART * steps))
        values = {**self._values, "train.iterations": steps, "schedule.resolution_schedule": coarse}
        if not isinstance(self._given_cap, int):
            values["strategy.cap_max"] = count
        return self._rebuild_config(values)
