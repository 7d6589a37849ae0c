"""ProcessGroup: the processes of one run, their collectives, and how they join. docs/distributed.md

A group is passed in where processes communicate; no code looks for one. A collective is one of two kinds. A scalar
message carries a few numbers. It has one fixed size, and names and numbers the collective that it belongs to: ranks in
different collectives see it in the message, where collectives of different shapes would hang or give rubbish. Tensors
follow only when the messages agreed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from splatcli.distributed.heartbeat import SILENCE_LIMIT, HeartbeatMonitor, first_of, minority
from splatcli.errors import DistributedError, SplatError, UsageError, as_splat_error, first_line, is_out_of_memory

#: Numbers in a scalar message: four of its head, and those that are gathered; with more than ten ranks, two for each.
SCALARS = 24
_HEAD = 4

#: Names of the collectives; a scalar message has the name's checksum.
NAMES = (
    "the settings",
    "the run",
    "the state",
    "a broadcast",
    "stop and save requests",
    "a check on all ranks",
    "a maximum",
    "sizes of the Gaussians",
    "an exchange",
    "a view",
    "a score",
    "a rendering",
    "a rasterization",
    "the end",
)
_NAMES = {crc32(name.encode()): name for name in NAMES}

#: Numbers that are summed at once: torch makes a wider copy of them.
_PIECE = 1 << 18

#: Seconds of a slice of a wait for the others, after which their heartbeats are checked.
SLICE = timedelta(seconds=0.5)

#: Seconds of a slice that count at most: for the rest of a longer one this process was stopped.
_AWAKE = 2.0

#: Seconds that a rank may come to a collective later than another; its failure is declared a moment later.
PATIENCE = 15.0

#: The same for a program that is not ours, which may save or evaluate between two renders. A rank that has ended or
#: sends no heartbeat is detected sooner.
_FOREIGN_PATIENCE = 600.0

#: Variables that torchrun, and ``splat train --ranks``, set for each process.
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

#: Seconds in which all processes have to join.
MEETING = 60.0

#: torch's timeout; a wait for the others ends by their heartbeats (distributed/heartbeat.py).
_NEVER = timedelta(hours=12)


class ProcessGroup:
    """``size`` processes that work together, seen from the one of number ``rank``.

    rank: 0 to size - 1.
    sent: bytes that this rank has sent to others, by kind: "scalars", "gather", "sum" for gradients, "rows" for
        projected Gaussians and their gradients, "whole" for gathered columns.
    patience: seconds that a rank may come to a collective later than this one.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        control: dist.ProcessGroup,
        data: dist.ProcessGroup,
        joined: bool = False,
        patience: float = PATIENCE,
    ) -> None:
        """control: a gloo group. data: the group for tensors, NCCL where they are on GPUs.

        joined: torch's default process group was made for this one, and ends with it.
        """
        self.rank, self.size = rank, size
        self._scalars = max(SCALARS, _HEAD + 2 * size)
        self.patience = patience
        self.sent: dict[str, int] = {}
        self._store = store
        self._control, self._data, self._joined = control, data, joined
        #: No collective has begun and not ended well.
        self._idle = True
        self._on_gpu = dist.get_backend(data) == "nccl"
        self._number = 0
        own = store.clone()  # type: ignore[attr-defined]  # torch's stubs miss it
        self.monitor = HeartbeatMonitor(own, rank, size, enqueues=self._on_gpu)

    # --- scalars ------------------------------------------------------------------------------------------------

    def all_gather_scalars(
        self, what: str, numbers: Sequence[float], problem: Exception | None = None
    ) -> list[list[float]]:
        """Return the ``numbers`` of every rank, by rank.

        what: the collective, one of NAMES.
        A rank with a ``problem`` raises it, and all others an error of the same kind. Raises DistributedError, on all
        ranks, when they are in different collectives.
        """
        self._number += 1
        if problem is not None:
            self._store.set(f"problem/{self._number}/{self.rank}", _encode_problem(problem))
        bits = [struct.unpack("<q", struct.pack("<d", float(number)))[0] for number in numbers]
        head = [self._number, crc32(what.encode()), len(bits), problem is not None]
        message = torch.tensor([*head, *bits, *[0] * (self._scalars - _HEAD - len(bits))], dtype=torch.int64)
        messages = [torch.empty_like(message) for _ in range(self.size)]
        self._count("scalars", message.nbytes * (self.size - 1))
        self._wait(f"{what} ({self._number})", lambda: dist.all_gather(messages, message, self._control, True))
        self._compare_heads([tuple(other[:3].tolist()) for other in messages])
        if problem is not None:
            raise problem
        for rank, other in enumerate(messages):
            if int(other[3]):
                raise self._problem_of(rank, self._store.get(f"problem/{self._number}/{rank}").decode())
        return [
            [struct.unpack("<d", struct.pack("<q", word))[0] for word in other[_HEAD : _HEAD + len(bits)].tolist()]
            for other in messages
        ]

    def all_reduce_max(self, number: float) -> float:
        """Return the largest ``number`` of all ranks."""
        return max(other for (other,) in self.all_gather_scalars("a maximum", [number]))

    def check_agreement(self, what: str, **facts: int) -> None:
        """Raise DistributedError on every rank, naming those that differ, unless all give the same numbers.

        facts: whole numbers up to 2^53.
        """
        gathered = self.all_gather_scalars(what, list(facts.values()))
        for place, name in enumerate(facts):
            values = [row[place] for row in gathered]
            odd = minority(values)
            if odd:
                listed = first_of([f"rank {rank}: {int(value)}" for rank, value in enumerate(values)], ", ", odd)
                self.monitor.declare(odd, f"ranks disagree on {what}: {name} is {listed}")
                raise self.monitor.error()

    def raise_on_all(self, check: Callable[[], None]) -> None:
        """Run ``check`` on every rank; what it raises on one is raised on all."""
        problem = None
        try:
            check()
        except Exception as error:
            problem = error
        self.all_gather_scalars("a check on all ranks", [], problem)

    def broadcast(self, text: str) -> str:
        """Return the ``text`` of rank 0; that of the others is ignored."""
        key = f"words/{self._number}"
        if self.rank == 0:
            self._store.set(key, text)
        self.all_gather_scalars("a broadcast", [])
        words: str = self._store.get(key).decode()
        return words

    def check_heartbeats(self) -> None:
        """Raise DistributedError when another rank is known to have failed."""
        self.monitor.check()

    @contextlib.contextmanager
    def slow_section(self, doing: str) -> Iterator[None]:
        """Let the others wait without limit while this rank does something that may take long."""
        self.monitor.slow(doing)
        try:
            yield
        finally:
            self.monitor.slow(None)

    def rank0_section(self, doing: str) -> contextlib.AbstractContextManager[None]:
        """Let the other ranks wait without limit for work of rank 0."""
        return self.slow_section(doing) if self.rank == 0 else contextlib.nullcontext()

    # --- tensors ------------------------------------------------------------------------------------------------

    def all_gather(self, own: Tensor) -> list[Tensor]:
        """Return the tensors of every rank, all of one shape and on the CPU, by rank."""
        parts = [torch.empty_like(own) for _ in range(self.size)]
        self._count("gather", own.nbytes * (self.size - 1))
        self._wait("a gathering", lambda: dist.all_gather(parts, own.contiguous(), self._control, True))
        return parts

    def all_to_all_rows(
        self, rows: Tensor, counts: Sequence[int], problem: Exception | None = None
    ) -> tuple[Tensor, list[int]]:
        """Send the first ``counts[0]`` of ``rows`` [V, width] to rank 0, and so on.

        Numbers have four bytes. Returns (received rows [R, width], how many from each rank).
        A rank with a ``problem`` raises it and sends nothing; all others raise an error of the same kind. Raises
        DistributedError, naming the sender, when the bits that arrive are not those that were sent.
        """
        return self._all_to_all("rows", rows, counts, problem)

    def all_gather_rows(self, own: Tensor) -> Tensor:
        """Return the rows of all ranks, one rank after another.

        own: [n, ...], with another n on each rank. Numbers have four bytes.
        """
        rows = own.reshape(len(own), math.prod(own.shape[1:])).repeat(self.size, 1)
        received, _ = self._all_to_all("whole", rows, [len(own)] * self.size, None)
        return received.view(len(received), *own.shape[1:])

    def gather_rows(self, own: Tensor) -> Tensor | None:
        """Return on rank 0 the rows of all ranks, as all_gather_rows(); on the others None."""
        rows = own.reshape(len(own), math.prod(own.shape[1:]))
        received, _ = self._all_to_all("whole", rows, [len(own)] + [0] * (self.size - 1), None)
        return None if self.rank else received.view(len(received), *own.shape[1:])

    def _all_to_all(
        self, kind: str, rows: Tensor, counts: Sequence[int], problem: Exception | None
    ) -> tuple[Tensor, list[int]]:
        """Exchange rows as all_to_all_rows() does. kind: see ``sent``.

        A scalar message has, for each other rank, how many rows it gets and the sum of their bits.
        """
        facts = [0.0] * (2 * self.size)
        if problem is None:
            parts = torch.split(rows, list(counts))
            facts = [float(fact) for part in parts for fact in (len(part), _bit_sum(part))]
        gathered = self.all_gather_scalars("an exchange", facts, problem)
        incoming = [(int(row[2 * self.rank]), int(row[2 * self.rank + 1])) for row in gathered]
        width, came = rows.shape[1], [count for count, _ in incoming]
        received = rows.new_empty(sum(came), width)
        sizes = [count * width for count in came], [count * width for count in counts]
        self._count(kind, rows.nbytes - parts[self.rank].nbytes)

        def verify() -> None:
            for rank, (part, (_, bits)) in enumerate(zip(torch.split(received, came), incoming, strict=True)):
                if _bit_sum(part) != bits:
                    self.monitor.declare([rank], f"what rank {rank} has sent to rank {self.rank} is not what arrived")
                    raise self.monitor.error()

        self._wait(
            "an exchange of rows",
            lambda: self._swap(received.view(-1), rows.reshape(-1), sizes),
            in_stream=self._on_gpu,
            verify=verify,
        )
        return received, came

    def reduce_scatter_in_order(self, total: Tensor, own: Tensor, count: int) -> None:
        """Add the ``own`` [L] of the first ``count`` ranks to ``total`` [L], in the order of the ranks.

        L is a multiple of ``size``; rank r adds the r-th part only, see all_gather_parts(). Every rank sends each other
        one its part, so that the order of additions does not depend on the network.
        """
        received = torch.empty_like(own)
        self._count("sum", own.nbytes * (self.size - 1) // self.size)
        self._wait("a sum of gradients", lambda: self._swap(received, own), in_stream=self._on_gpu)
        mine = total.chunk(self.size)[self.rank]
        for part in received.chunk(self.size)[:count]:
            mine += part

    def all_gather_parts(self, total: Tensor) -> None:
        """Fill ``total`` [L] on every rank with the parts of all."""
        parts = list(total.chunk(self.size))
        mine = parts[self.rank].clone()
        self._count("sum", mine.nbytes * (self.size - 1))
        self._wait("the end of a sum", lambda: dist.all_gather(parts, mine, self._data, True), in_stream=self._on_gpu)

    def _swap(
        self, received: Tensor, own: Tensor, sizes: tuple[list[int] | None, list[int] | None] = (None, None)
    ) -> dist.Work | None:
        """Send part r of ``own`` to rank r. sizes: of what comes from each rank and goes to each, by default equal."""
        work: dist.Work | None = dist.all_to_all_single(received, own, *sizes, group=self._data, async_op=True)
        return work

    # --- waiting for the others ---------------------------------------------------------------------------------

    def _wait(
        self,
        what: str,
        begin: Callable[[], dist.Work | None],
        *,
        in_stream: bool = False,
        verify: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin a collective and wait for it. Raises DistributedError, naming the ranks to blame, when it fails.

        in_stream: a GPU's stream orders it, so that there is no need to wait. verify: checks what has arrived; for that
        a GPU has to be waited for all the same.
        """
        self.monitor.enter(what)
        self._idle = False
        try:
            work = begin()
            assert work is not None
            if in_stream:
                work.wait()
                verify()
                self._idle = True
                return
            waited, before = 0.0, time.monotonic()
            while not self._arrived(work):
                now = time.monotonic()
                waited += min(now - before, _AWAKE)
                before = now
                self.monitor.discount_own_stop()
                self.monitor.check()
                self.monitor.check_wait(waited, self.patience)
            verify()
            self._idle = True
        except RuntimeError as error:
            raise self._lost(what, error) from None
        finally:
            self.monitor.leave()

    @staticmethod
    def _arrived(work: dist.Work) -> bool:
        """Return whether a collective is done, after one slice at most. Raises RuntimeError when it has failed."""
        try:
            work.wait(SLICE)
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait()  # what made it complete: success, just now, or a failure
        return True

    def _lost(self, what: str, error: RuntimeError) -> DistributedError:
        """Return the failure behind a broken connection, once it is known which rank failed first."""
        deadline = time.monotonic() + SILENCE_LIMIT + 3.0
        while time.monotonic() < deadline:
            if self.monitor.failed:
                return self.monitor.error()
            time.sleep(0.1)
        text = first_line(error)
        self.monitor.declare([], f"the ranks lost each other in {what}, and all of them are alive: {text}")
        return self.monitor.error()

    def _problem_of(self, rank: int, text: str) -> SplatError:
        """Return an error of the same kind as that of ``rank``. A bug is a failure that its rank reports itself."""
        problem = json.loads(text)
        if problem["code"] == SplatError.exit_code:
            self.monitor.declare([rank], f"rank {rank} failed: {problem['what']}", reported=True)
            return self.monitor.error()
        kinds = {kind.exit_code: kind for kind in SplatError.__subclasses__()}
        kind = kinds.get(problem["code"], DistributedError)
        return kind(f"rank {rank}: {problem['what']}", where=problem["where"], remedy=problem["help"])

    def _compare_heads(self, heads: list[tuple[int, ...]]) -> None:
        """Raise DistributedError when the ranks are in different collectives."""
        odd = minority(heads)
        if not odd:
            return
        words = [
            f"rank {rank} has come to {_NAMES.get(name, 'another place')} ({number})"
            for rank, (number, name, _) in enumerate(heads)
        ]
        places = first_of(words, ", ", odd)
        self.monitor.declare(odd, f"ranks have lost step: {places}")
        raise self.monitor.error()

    def _count(self, kind: str, nbytes: int) -> None:
        self.sent[kind] = self.sent.get(kind, 0) + nbytes

    # --- the end ------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Declare that this rank ends for ``error``, unless an earlier failure is known."""
        if not self.monitor.failed:
            self.monitor.declare([self.rank], f"rank {self.rank} failed: {_one_line(error)}", reported=True)

    def close(self) -> None:
        """Wait until all ranks are done, and leave in good order."""
        self.all_gather_scalars("the end", [])
        self.monitor.close()

    def destroy(self) -> None:
        """End torch's process groups that were made for this one, and their threads; after close().

        A thread of gloo that drops its last collective while Python shuts down aborts the process. After a collective
        that did not end well this does nothing: its thread would be waited for.
        """
        if not self._idle:
            return
        made = () if self._joined else (self._control, self._data)
        del self._control, self._data
        if self._joined:
            dist.destroy_process_group()
        for group in made:
            with contextlib.suppress(ValueError):  # it has ended with the default group
                dist.destroy_process_group(group)


def _bit_sum(rows: Tensor) -> int:
    """Return a sum of all bits, which a change of any single number changes; exact in a float64."""
    words = rows.reshape(-1).view(torch.int32)
    return sum(int(piece.sum(dtype=torch.int64)) for piece in torch.split(words, _PIECE)) & ((1 << 52) - 1)


def _encode_problem(error: Exception) -> str:
    """Return ``error`` as JSON, for the other ranks."""
    known = as_splat_error(error) if is_out_of_memory(error) else error
    if not isinstance(known, SplatError):
        return json.dumps({"code": SplatError.exit_code, "what": _one_line(error), "where": None, "help": None})
    return json.dumps({"code": known.exit_code, "what": known.what, "where": known.where, "help": known.remedy})


def _one_line(error: BaseException) -> str:
    """Return an error in one line."""
    if isinstance(error, SplatError):
        return error.what
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


# --- joining ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """The place that a launcher gives a process. local: its number on this machine, which chooses the GPU.

    store_is_kept: by the launcher; otherwise rank 0 keeps the store that the ranks meet at.
    """

    rank: int
    size: int
    local: int
    host: str
    port: int
    store_is_kept: bool

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Place:
        """Return the place in the variables. Raises UsageError without any, DistributedError when some lack."""
        missing = [name for name in VARIABLES if not environment.get(name)]
        if len(missing) == len(VARIABLES):
            raise UsageError(
                "no launcher has given this process a rank",
                where="--distributed",
                remedy="--ranks N starts N processes here; so does torchrun --nproc-per-node N -m splatcli train ...",
            )
        if missing:
            raise DistributedError(
                f"of the launcher's variables {', '.join(missing)} are not set, the others are",
                where="environment",
                remedy="start all ranks with torchrun, or with --ranks N; a stray variable is removed with unset",
            )
        try:
            rank, size, local, port = (int(environment[n]) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"))
        except ValueError as error:
            raise DistributedError(f"a variable of the launcher is no number: {error}", where="environment") from None
        if not 0 <= rank < size:
            raise DistributedError(f"there is no rank {rank} among {size}", where="environment")
        kept = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(rank, size, local, environment["MASTER_ADDR"], port, kept)


def join(place: Place, device: torch.device, *, patience: float = PATIENCE) -> ProcessGroup:
    """Return the group of all processes of a launcher, once all have come.

    device: of this process; NCCL exchanges tensors on GPUs. patience: see ProcessGroup.
    Raises DistributedError, naming the ranks that do not come.
    """
    store = _meet(place)
    try:
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("gloo", store), rank=place.rank, world_size=place.size, timeout=_NEVER
        )
        control = dist.group.WORLD
        assert control is not None
        data = dist.new_group(backend="nccl") if device.type == "cuda" else dist.new_group(timeout=_NEVER)
    except RuntimeError as error:
        raise DistributedError(
            f"the ranks cannot connect: {first_line(error)}",
            where=f"rank {place.rank}",
            remedy="GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the network between the machines",
        ) from None
    return ProcessGroup(
        dist.PrefixStore("splat", store),
        place.rank,
        place.size,
        control=control,
        data=data,
        joined=True,
        patience=patience,
    )


def _meet(place: Place) -> dist.Store:
    """Return the store of all processes, when the last one has come."""
    where = f"{place.host}:{place.port}"
    try:
        store = dist.TCPStore(
            place.host,
            place.port,
            place.size,
            is_master=place.rank == 0 and not place.store_is_kept,
            timeout=timedelta(seconds=MEETING),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        raise DistributedError(
            f"rank {place.rank} cannot reach the meeting place: {first_line(error)}", where=where
        ) from None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    met = dist.PrefixStore(f"splat-{attempt}", store)
    _await_all(met, place.rank, place.size, MEETING, where, "start all ranks with the same --distributed flag")
    return met


def _await_all(met: dist.Store, rank: int, size: int, meeting: float, where: str, remedy: str) -> None:
    """Wait until all ranks have come here. Raises DistributedError, naming those that do not."""
    met.set(f"here/{rank}", "1")
    deadline = time.monotonic() + meeting
    while missing := [other for other in range(size) if not met.check([f"here/{other}"])]:
        if time.monotonic() > deadline:
            listed = first_of([str(rank) for rank in missing], ", ")
            raise DistributedError(
                f"of {size} ranks {listed} did not come within {meeting:.0f} s",
                where=where,
                remedy=f"{remedy}, and look at what those ranks say",
            )
        time.sleep(0.05)


def wrap_default_group(device: torch.device, *, patience: float = PATIENCE) -> ProcessGroup:
    """Return a group of torch's default process group, which a framework has made; every rank must call it.

    device: of this process; with NCCL it must be a GPU. patience: see ProcessGroup.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    host = os.environ.get("MASTER_ADDR") or _own_host()
    opened = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    address = [None if opened is None else (host, opened.port)]
    # NCCL takes tensors on GPUs only; without a device it would take the current one, which may be another rank's.
    dist.broadcast_object_list(address, src=0, device=device if dist.get_backend() == "nccl" else None)
    assert address[0] is not None
    store = opened or dist.TCPStore(*address[0], is_master=False)
    control = dist.new_group(backend="gloo", timeout=_NEVER)
    data = dist.new_group(backend="nccl") if device.type == "cuda" else dist.new_group(backend="gloo", timeout=_NEVER)
    return ProcessGroup(store, rank, size, control=control, data=data, patience=patience)


def _own_host() -> str:
    """Return the name of this machine, or localhost where the name has no address: torch would try it for minutes."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return "localhost"
    return name


#: torch's default process group, the device of this process, and the ProcessGroup that was made of them last.
_default: tuple[dist.ProcessGroup, torch.device, ProcessGroup] | None = None


def default_group(device: torch.device, *, meeting: float = MEETING) -> ProcessGroup:
    """Return the group of torch's default process group, made by the first call; every rank must call it.

    device: of this process' tensors.
    Raises UsageError where there is no default group, DistributedError naming the ranks that do not come.
    """
    global _default
    if not dist.is_initialized():
        raise UsageError(
            "distributed=True renders with the ranks of the default process group, and there is none",
            where="rasterization()",
            remedy="call torch.distributed.init_process_group() first, or give group=splatcli.distributed.join(...); "
            "without distributed=True the render is local",
        )
    whole = dist.group.WORLD
    assert whole is not None
    if _default is not None and _default[0] is whole:
        if _default[1] != device:
            raise UsageError(
                f"this rank has rendered on {_default[1]}, and these tensors are on {device}",
                where="rasterization()",
                remedy="keep the tensors of a rank on one device",
            )
        return _default[2]
    if dist.get_backend() == "nccl" and device.type != "cuda":
        raise UsageError(
            f"the default process group is NCCL's, and these tensors are on {device}",
            where="rasterization()",
            remedy="move them to this rank's GPU, or init_process_group(backend='gloo')",
        )
    rank, size = dist.get_rank(), dist.get_world_size()
    met = dist.PrefixStore("splat-default", dist.distributed_c10d._get_default_store())
    _await_all(met, rank, size, meeting, "rasterization()", "call it with distributed=True on every rank")
    group = wrap_default_group(device, patience=_FOREIGN_PATIENCE)
    if _default is not None:
        _default[2].monitor.close()
    else:
        atexit.register(_leave)
    _default = whole, device, group
    group.check_agreement("a rasterization", on_GPUs=int(device.type == "cuda"))
    return group


def _leave() -> None:
    """Tell the other ranks that this process leaves in good order, and end the threads of its group."""
    global _default
    if _default is not None:
        _default[2].monitor.close()
        _default[2].destroy()
    _default = None


def destroy_default_group() -> None:
    """End torch's default process group, and its threads, where a framework has left it to the end of Python."""
    if dist.is_initialized():
        dist.destroy_process_group()
