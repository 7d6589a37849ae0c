"""World: processes that work on one thing together. It is handed in where it is wanted, and nothing looks for one.

All exchanges are of two kinds. Cards are a few numbers of fixed size, whatever the occasion, with the name and number
of the occasion on them: processes that have come to different places see it in the card, where collectives of
different shapes would hang or give rubbish. Tensors follow only when the cards agreed.
"""

from __future__ import annotations

import contextlib
import math
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from splatcli.distributed.faults import problem_of, told_problem, words_of
from splatcli.distributed.heartbeat import SILENCE, HeartbeatMonitor, minority
from splatcli.distributed.sharded import render_sharded
from splatcli.errors import DistributedError
from splatcli.gaussians import Gaussians
from splatcli.rasterizer.context import Z_FAR, Z_NEAR
from splatcli.rasterizer.rendering import Render
from splatcli.scene.camera import Camera

#: Numbers on a card: four of its head, and what is told; with more than ten ranks, two for each.
CARD = 24
_HEAD = 4

#: What ranks tell each other about; a card has the name's checksum.
NAMES = (
    "the settings",
    "the run",
    "the state",
    "words",
    "wishes",
    "an exchange",
    "a view",
    "a score",
    "the numbers",
    "a rendering",
    "a rasterization",
    "colours",
    "the end",
)
_NAMES = {crc32(name.encode()): name for name in NAMES}

#: Numbers that are summed at once: torch makes a wider copy of them.
_PIECE = 1 << 18

#: Seconds that a wait for the others is cut into, to look in between at what has become of them.
SLICE = timedelta(seconds=0.5)

#: Seconds of a slice that count at most: for the rest of a longer one this process was stopped.
_AWAKE = 2.0

#: Seconds that a rank may come later than another; the verdict then takes a moment more.
PATIENCE = 15.0


class World:
    """This process' place among ``size`` others.

    rank: 0 to size - 1.
    sent: bytes of tensors that this rank has sent to others, as exchanges of this kind have to: in a "sum", as "rows",
        to make a "whole" of them, or when they "gather"; and "cards".
    patience: seconds that a rank may come later to an exchange than this one.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        control: dist.ProcessGroup,
        data: dist.ProcessGroup,
        patience: float = PATIENCE,
    ) -> None:
        """control: a gloo group. data: the group for tensors, NCCL where they are on GPUs."""
        self.rank, self.size = rank, size
        self._card = max(CARD, _HEAD + 2 * size)
        self.patience = patience
        self.sent: dict[str, int] = {}
        self._store = store
        self._control, self._data = control, data
        self._on_gpu = dist.get_backend(data) == "nccl"
        self._number = 0
        self.watch = HeartbeatMonitor(store.clone(), rank, size)  # type: ignore[attr-defined]  # torch's stubs miss it

    # --- cards --------------------------------------------------------------------------------------------------

    def tell(self, what: str, numbers: Sequence[float], problem: Exception | None = None) -> list[list[float]]:
        """The ``numbers`` of every rank, by rank. A rank with a ``problem`` raises it, and all others an error like it.

        Raises DistributedError, on all ranks, when they have come to different places.
        """
        self._number += 1
        if problem is not None:
            self._store.set(f"problem/{self._number}/{self.rank}", problem_of(problem))
        bits = [struct.unpack("<q", struct.pack("<d", float(number)))[0] for number in numbers]
        head = [self._number, crc32(what.encode()), len(bits), problem is not None]
        card = torch.tensor([*head, *bits, *[0] * (self._card - _HEAD - len(bits))], dtype=torch.int64)
        cards = [torch.empty_like(card) for _ in range(self.size)]
        self._count("cards", card.nbytes * (self.size - 1))
        self._complete(f"{what} ({self._number})", lambda: dist.all_gather(cards, card, self._control, True))
        heads = [tuple(other[:3].tolist()) for other in cards]
        self._compare_heads(what, heads)
        if problem is not None:
            raise problem
        for rank, other in enumerate(cards):
            if int(other[3]):
                raise told_problem(rank, self._store.get(f"problem/{self._number}/{rank}").decode())
        return [
            [struct.unpack("<d", struct.pack("<q", word))[0] for word in other[_HEAD : _HEAD + len(bits)].tolist()]
            for other in cards
        ]

    def agree(self, what: str, **facts: int) -> None:
        """Raises DistributedError on every rank, naming those that differ, unless all give the same numbers.

        Whole numbers up to 2^53.
        """
        told = self.tell(what, list(facts.values()))
        for place, name in enumerate(facts):
            values = [row[place] for row in told]
            odd = minority(values)
            if odd:
                listed = ", ".join(f"rank {rank}: {int(value)}" for rank, value in enumerate(values))
                self.watch.judge(odd, f"ranks disagree on {what}: {name} is {listed}")
                raise self.watch.error()

    def say(self, text: str) -> str:
        """What rank 0 says; the others' ``text`` is not looked at."""
        key = f"words/{self._number}"
        if self.rank == 0:
            self._store.set(key, text)
        self.tell("words", [])
        words: str = self._store.get(key).decode()
        return words

    def render(
        self,
        gaussians: Gaussians,
        camera: Camera,
        *,
        background: Tensor | None = None,
        antialiased: bool = False,
        z_range: tuple[float, float] = (Z_NEAR, Z_FAR),
    ) -> Render:
        """See sharded.render_sharded()."""
        return render_sharded(self, gaussians, camera, background=background, antialiased=antialiased, z_range=z_range)

    def check(self) -> None:
        """Raises DistributedError when another rank is known to have failed."""
        self.watch.check()

    @contextlib.contextmanager
    def apart(self, doing: str) -> Iterator[None]:
        """While this rank does something alone that takes its time, the others wait for it without complaint."""
        self.watch.alone(doing)
        try:
            yield
        finally:
            self.watch.alone(None)

    # --- tensors ------------------------------------------------------------------------------------------------

    def gather(self, own: Tensor) -> list[Tensor]:
        """The tensors of every rank, all of one shape and on the CPU, by rank."""
        parts = [torch.empty_like(own) for _ in range(self.size)]
        self._count("gather", own.nbytes * (self.size - 1))
        self._complete("a gathering", lambda: dist.all_gather(parts, own.contiguous(), self._control, True))
        return parts

    def exchange_rows(
        self, rows: Tensor, counts: Sequence[int], problem: Exception | None = None
    ) -> tuple[Tensor, list[int]]:
        """The first ``counts[0]`` of ``rows`` [V, width] go to rank 0, and so on; (what came, how much from each rank).

        Four bytes a number. A rank with a ``problem`` raises it, and all others an error like it; its rows stay.
        Raises DistributedError, naming the sender, when what arrives is not what was sent.
        """
        return self._exchange("rows", rows, counts, problem)

    def collect(self, own: Tensor, *, everywhere: bool) -> Tensor | None:
        """The rows of all ranks, one rank after another: on every rank, or on the first one, and None on the others.

        own: [n, ...], of another n on each rank. Four bytes a number.
        """
        rows = own.reshape(len(own), math.prod(own.shape[1:]))
        counts = [len(own) if everywhere or rank == 0 else 0 for rank in range(self.size)]
        received, came = self._exchange("whole", rows.repeat(self.size if everywhere else 1, 1), counts, None)
        return received.view(sum(came), *own.shape[1:]) if everywhere or self.rank == 0 else None

    def _exchange(
        self, what: str, rows: Tensor, counts: Sequence[int], problem: Exception | None
    ) -> tuple[Tensor, list[int]]:
        """See exchange_rows(). what: see ``sent``.

        Every rank says on a card how many rows go to each other, and a sum of their bits, which have to arrive.
        """
        facts = [0.0] * (2 * self.size)
        if problem is None:
            parts = torch.split(rows, list(counts))
            facts = [float(fact) for part in parts for fact in (len(part), _bits_of(part))]
        told = self.tell("an exchange", facts, problem)
        incoming = [(int(row[2 * self.rank]), int(row[2 * self.rank + 1])) for row in told]
        width, came = rows.shape[1], [count for count, _ in incoming]
        received = rows.new_empty(sum(came), width)
        sizes = [count * width for count in came], [count * width for count in counts]
        self._count(what, rows.nbytes - parts[self.rank].nbytes)

        def look() -> None:
            for rank, (part, (_, bits)) in enumerate(zip(torch.split(received, came), incoming, strict=True)):
                if _bits_of(part) != bits:
                    self.watch.judge([rank], f"what rank {rank} has sent to rank {self.rank} is not what arrived")
                    raise self.watch.error()

        self._complete(
            "an exchange of rows",
            lambda: self._swap(received.view(-1), rows.reshape(-1), sizes),
            in_stream=self._on_gpu,
            look=look,
        )
        return received, came

    def add_in_order(self, total: Tensor, own: Tensor, count: int) -> None:
        """Adds the ``own`` [L] of the first ``count`` ranks to ``total`` [L], one after the other; L divides by size.

        Rank r gets the r-th of ``size`` parts of the sum; complete() brings the parts together. Every rank sends each
        other one its part, so that the order of additions is that of the ranks whatever the network does.
        """
        received = torch.empty_like(own)
        self._count("sum", own.nbytes * (self.size - 1) // self.size)
        self._complete("a sum of gradients", lambda: self._swap(received, own), in_stream=self._on_gpu)
        mine = total.chunk(self.size)[self.rank]
        for part in received.chunk(self.size)[:count]:
            mine += part

    def _swap(
        self, received: Tensor, own: Tensor, sizes: tuple[list[int] | None, list[int] | None] = (None, None)
    ) -> dist.Work | None:
        """Part r of ``own`` goes to rank r; ``sizes`` of what comes from each and goes to each, by default equal."""
        work: dist.Work | None = dist.all_to_all_single(received, own, *sizes, group=self._data, async_op=True)
        return work

    def complete(self, total: Tensor) -> None:
        """Fills ``total`` [L] on every rank with the parts of all."""
        parts = list(total.chunk(self.size))
        mine = parts[self.rank].clone()
        self._count("sum", mine.nbytes * (self.size - 1))
        self._complete(
            "the end of a sum", lambda: dist.all_gather(parts, mine, self._data, True), in_stream=self._on_gpu
        )

    # --- how an exchange is waited for --------------------------------------------------------------------------

    def _complete(
        self,
        what: str,
        begin: Callable[[], dist.Work | None],
        *,
        in_stream: bool = False,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        """Does an exchange. Raises DistributedError, naming who is to blame, when it does not come about.

        in_stream: it is ordered by a GPU's stream, and nothing need be waited for. look: at what has come, for which a
        GPU has to be waited for all the same.
        """
        self.watch.enter(what)
        try:
            work = begin()
            assert work is not None
            if in_stream:
                work.wait()
                look()
                return
            waited, before = 0.0, time.monotonic()
            while not self._arrived(work):
                now = time.monotonic()
                waited += min(now - before, _AWAKE)
                before = now
                self.watch.awake()
                self.watch.check()
                self.watch.waited(waited, self.patience)
            look()
        except RuntimeError as error:
            raise self._lost(what, error) from None
        finally:
            self.watch.leave()

    @staticmethod
    def _arrived(work: dist.Work) -> bool:
        """Whether an exchange is done, after a slice of time at most. Raises RuntimeError when it has failed."""
        try:
            work.wait(SLICE)
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait()  # what made it complete: success, just now, or a failure
        return True

    def _lost(self, what: str, error: RuntimeError) -> DistributedError:
        """The verdict on a connection that broke: it has to be found out who was first."""
        deadline = time.monotonic() + SILENCE + 3.0
        while time.monotonic() < deadline:
            if self.watch.judged:
                return self.watch.error()
            time.sleep(0.1)
        text = str(error).splitlines()[0]
        self.watch.judge([], f"the ranks lost each other in {what}, and all of them are alive: {text}")
        return self.watch.error()

    def _compare_heads(self, what: str, heads: list[tuple[int, ...]]) -> None:
        """Raises DistributedError when the ranks have come to different places."""
        odd = minority(heads)
        if not odd:
            return
        places = ", ".join(
            f"rank {rank} has come to {_NAMES.get(name, 'another place')} ({number})"
            for rank, (number, name, _) in enumerate(heads)
        )
        self.watch.judge(odd, f"ranks have lost step: {places}")
        raise self.watch.error()

    def _count(self, what: str, nbytes: int) -> None:
        self.sent[what] = self.sent.get(what, 0) + nbytes

    # --- the end ------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """This rank ends for ``error``: the others are told why, unless they know of something earlier."""
        if not self.watch.judged:
            self.watch.judge([self.rank], f"rank {self.rank} failed: {words_of(error)}", told=True)

    def close(self) -> None:
        """Waits for all to come to their end, and leaves in good order."""
        self.tell("the end", [])
        self.watch.close()

    def release(self) -> None:
        """After close(), end the process groups that join() made, and their threads.

        A thread of gloo that drops its last exchange while Python shuts down aborts the process.
        """
        del self._control, self._data
        dist.destroy_process_group()


def _bits_of(rows: Tensor) -> int:
    """A sum of all bits, which no change of a single number leaves as it is; exact in a float64."""
    words = rows.reshape(-1).view(torch.int32)
    return sum(int(piece.sum(dtype=torch.int64)) for piece in torch.split(words, _PIECE)) & ((1 << 52) - 1)
