"""Faults in one of several ranks that train together: every rank ends soon, and one that is at fault is named.

Two to four processes train on a made-up scene over gloo. At a random step something happens to one of them:
it is killed, stopped, raises, leaves, falls behind, has other images or settings than the rest, skips an exchange, or
has a number changed in its memory. Whatever ends with exit code 0 must have ended on all ranks, in the same state.

Sharded, only one rank has the numbers of a row: a change in its memory, and not on its way, is not detected, and the
trials expect that.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from splatcli.config import with_settings
from splatcli.distributed.process_group import ProcessGroup
from splatcli.native.backend import best_isa, load_cpu
from splatcli.train.events import Stepped
from splatcli.train.trainer import Trainer
from tests.distributed.ranks import Ended, run_ranks
from tests.distributed.training import STEPS, batch_config, digest_of, run_of
from tests.torture.harness import Figure, Tally, enough, main, rng_of, wanted
from tests.train.worlds import made_scene, plain_renderer

#: Seconds in which all must be over from when a rank has met the others; and with those for starting them.
LIMIT, IN_ALL = 30.0, 90.0

#: What a rank may be as late as without a complaint; and how late a rank is that sleeps.
PATIENCE, LATE = 8.0, 40.0


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault of ``rank`` after ``step``; kind is a key of KINDS, or of SHARDED."""

    kind: str
    rank: int
    step: int
    sharded: bool = False


def train_with(group: ProcessGroup, fault: Fault) -> tuple[int, int]:
    """(step, digest) that this rank's run ends with."""
    mine = group.rank == fault.rank
    pixels = None
    config = batch_config(4)
    if mine and fault.kind == "photos":
        scene = made_scene(12)
        pixels = [255 - scene.images.load(i) for i in range(12)]
    if mine and fault.kind == "seed":
        config = with_settings(config, {"train.seed": config.train.seed + 1})
    if mine and fault.kind == "setting":
        config = with_settings(config, {"optim.sh0_lr": 1.01 * config.optim.sh0_lr})
    trainer = Trainer.start(
        config,
        made_scene(12, pixels=pixels),
        run_dir=run_of(group),
        renderer=plain_renderer,
        group=group,
        sharded=fault.sharded,
    )
    for event in trainer.run():
        if mine and isinstance(event, Stepped) and event.step == fault.step:
            kinds_of(fault.sharded)[fault.kind](group, trainer)
    return trainer.state.step, digest_of(trainer.state, group)


def _send(number: signal.Signals) -> Callable[[ProcessGroup, Trainer], None]:
    return lambda group, trainer: os.kill(os.getpid(), number)


def _raise(group: ProcessGroup, trainer: Trainer) -> None:
    raise RuntimeError("something broke")


def _sleep(seconds: float) -> Callable[[ProcessGroup, Trainer], None]:
    return lambda group, trainer: time.sleep(seconds)


def _skip_message(group: ProcessGroup, trainer: Trainer) -> None:
    gather = group.all_gather_scalars

    def skipped(what: str, numbers: list[float], problem: Exception | None = None) -> list[list[float]]:
        group.all_gather_scalars = gather  # type: ignore[method-assign]
        return [list(numbers) for _ in range(group.size)]

    group.all_gather_scalars = skipped  # type: ignore[assignment,method-assign]


def _skip_sum(group: ProcessGroup, trainer: Trainer) -> None:
    add = group.reduce_scatter_in_order

    def skipped(total: Tensor, own: Tensor, count: int) -> None:
        group.reduce_scatter_in_order = add  # type: ignore[method-assign]

    group.reduce_scatter_in_order = skipped  # type: ignore[assignment,method-assign]


def _change_sum(group: ProcessGroup, trainer: Trainer) -> None:
    all_gather = group.all_gather_parts

    def changed(total: Tensor) -> None:
        group.all_gather_parts = all_gather  # type: ignore[method-assign]
        all_gather(total)
        total += 1e-3

    group.all_gather_parts = changed  # type: ignore[method-assign]


def _change_own(group: ProcessGroup, trainer: Trainer) -> None:
    add = group.reduce_scatter_in_order

    def changed(total: Tensor, own: Tensor, count: int) -> None:
        group.reduce_scatter_in_order = add  # type: ignore[method-assign]
        own += 1e-3
        add(total, own, count)

    group.reduce_scatter_in_order = changed  # type: ignore[method-assign]


def _skip_rows(group: ProcessGroup, trainer: Trainer) -> None:
    exchange = group.all_to_all_rows

    def skipped(rows: Tensor, counts: Sequence[int], problem: Exception | None = None) -> tuple[Tensor, list[int]]:
        group.all_to_all_rows = exchange  # type: ignore[method-assign]
        return rows[:0], [0] * group.size

    group.all_to_all_rows = skipped  # type: ignore[method-assign]


def _lose_rows(group: ProcessGroup, trainer: Trainer) -> None:
    """One rank does not send the last row to the last rank."""
    exchange = group.all_to_all_rows

    def lost(rows: Tensor, counts: Sequence[int], problem: Exception | None = None) -> tuple[Tensor, list[int]]:
        if not counts[-1]:
            return exchange(rows, counts, problem)
        group.all_to_all_rows = exchange  # type: ignore[method-assign]
        return exchange(rows[:-1], [*counts[:-1], counts[-1] - 1], problem)

    group.all_to_all_rows = lost  # type: ignore[method-assign]


def _change_on_the_way(group: ProcessGroup, trainer: Trainer) -> None:
    swap = group._swap

    def changed(received: Tensor, own: Tensor, *sizes: Any) -> Any:
        if own.numel():
            group._swap = swap  # type: ignore[method-assign]
            own.view(torch.int32)[own.numel() // 2] ^= 1 << 12
        return swap(received, own, *sizes)

    group._swap = changed  # type: ignore[method-assign]


def _change_arrived(group: ProcessGroup, trainer: Trainer) -> None:
    exchange = group.all_to_all_rows

    def changed(rows: Tensor, counts: Sequence[int], problem: Exception | None = None) -> tuple[Tensor, list[int]]:
        group.all_to_all_rows = exchange  # type: ignore[method-assign]
        received, came = exchange(rows, counts, problem)
        return received * 1.001, came

    group.all_to_all_rows = changed  # type: ignore[method-assign]


def _change_state(group: ProcessGroup, trainer: Trainer) -> None:
    trainer.state.adam.exp_avg_sq.means += 1e-3


def _nothing(group: ProcessGroup, trainer: Trainer) -> None:
    """It has happened before the first step."""


KINDS: dict[str, Callable[[ProcessGroup, Trainer], None]] = {
    "kill": _send(signal.SIGKILL),
    "stop": _send(signal.SIGSTOP),
    "kill the meeting place": _send(signal.SIGKILL),
    "stop the meeting place": _send(signal.SIGSTOP),
    "exit": lambda group, trainer: os._exit(3),
    "raise": _raise,
    "late": _sleep(LATE),
    "photos": _nothing,
    "seed": _nothing,
    "setting": _nothing,
    "skipped message": _skip_message,
    "skipped sum": _skip_sum,
    "changed sum": _change_sum,
    "changed gradient": _change_own,
    "changed state": _change_state,
    "slow": _sleep(3.0),
}

#: The faults of sharded training: those above that it has, and its own.
_NO_SUMS = ("skipped sum", "changed sum", "changed gradient")
SHARDED: dict[str, Callable[[ProcessGroup, Trainer], None]] = {
    **{kind: happens for kind, happens in KINDS.items() if kind not in _NO_SUMS},
    "skipped rows": _skip_rows,
    "lost rows": _lose_rows,
    "changed on the way": _change_on_the_way,
    "changed gradient": _change_arrived,
}

#: Happens to rank 0, at which the ranks meet where no launcher keeps the store.
MEETING = {"kill the meeting place", "stop the meeting place"}

#: What all ranks must get over: a rank that is slow, and a gradient that is wrong in the same way for all.
HARMLESS = {"slow", "changed gradient"}

#: Faults that sharded training cannot detect.
UNSEEN = {"changed state"}


def kinds_of(sharded: bool) -> dict[str, Callable[[ProcessGroup, Trainer], None]]:
    """Return the faults that may happen to a rank."""
    return SHARDED if sharded else KINDS


def fault_of(seed: int, index: int, *, sharded: bool = False) -> tuple[int, Fault]:
    """(ranks, what happens to one of them) of a case."""
    rng = rng_of(seed, index)
    kinds = list(kinds_of(sharded))
    size = rng.choice([2, 3, 4])
    kind = kinds[index % len(kinds)]
    return size, Fault(kind, 0 if kind in MEETING else rng.randrange(size), rng.randint(1, STEPS - 2), sharded)


def judge(fault: Fault, ended: list[Ended]) -> str:
    """The word for an outcome as it should be; AssertionError for another."""
    harmless = HARMLESS | UNSEEN if fault.sharded else HARMLESS
    if all(one.code == 0 for one in ended):
        assert fault.kind in harmless, "all ranks ended well"
        assert len({one.value for one in ended}) == 1, f"they ended in different states: {ended}"
        assert ended[0].value[0] == STEPS
        return "went on"
    assert fault.kind not in harmless, f"a false alarm: {ended}"
    others = [one for rank, one in enumerate(ended) if rank != fault.rank]
    for one in others:
        assert one.code == 7, f"a rank ended with {one.code}: {ended}"
        assert one.seconds < LIMIT, f"a rank took {one.seconds:.0f} s"
        assert f"rank {fault.rank}" in (one.error or ""), f"rank {fault.rank} is not named: {ended}"
    if fault.kind not in MEETING:  # where there is nothing left that a common verdict could be in
        assert len({one.error for one in others}) == 1, f"the ranks report different faults: {ended}"
    at_fault = ended[fault.rank]
    assert at_fault.code != 0, f"the rank at fault ended well: {ended}"
    return fault.kind


def figures(count: int, seed: int) -> dict[str, Figure]:
    """count: trials."""
    found = {}
    for sharded, name in [(False, "fault_ranks"), (True, "fault_ranks_sharded")]:
        if wanted(name):
            found[name] = figure_of([fault_of(seed, index, sharded=sharded) for index in range(count)])
    return found


def figure_of(cases: list[tuple[int, Fault]]) -> Figure:
    """Return the figure of (ranks, fault) one after another."""
    load_cpu(best_isa())  # building it is no part of a run
    start, slowest = time.monotonic(), 0.0
    tally = Tally()
    for index, (size, fault) in enumerate(cases):
        if enough(start):
            break
        place = fault.kind in MEETING
        ended = run_ranks(train_with, size, fault, patience=PATIENCE, limit=IN_ALL, store_at_rank_0=place)
        try:
            tally.words[judge(fault, ended)] += 1
            slowest = max(slowest, *(one.seconds for one in ended))
        except AssertionError as error:
            tally.failures.append((index, f"{size} ranks, {fault}: {error}"))
    what = (
        "one of 2 to 4 ranks that train together fails, stops, lags or differs: every other one ends with exit code 7 "
        f"within {LIMIT:.0f} s and names it, and what ends well is the same on all"
    )
    if any(fault.sharded for _, fault in cases):
        what += "; sharded, where a number that changes in a rank's memory is not detected"
    return tally.figure(what, time.monotonic() - start, slowest_seconds=round(slowest, 1))


if __name__ == "__main__":
    # Imported anew under its name, by which ranks find what they are to do.
    from tests.torture import fault_ranks

    main(fault_ranks.figures, 200)
