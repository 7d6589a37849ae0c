"""Joining: the place that a launcher gave to this process becomes a World."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from splatcli.distributed.world import PATIENCE, World
from splatcli.errors import DistributedError, UsageError

#: What torchrun, and ``splat train --ranks``, tell each process in its environment.
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

#: Seconds in which all processes have to come up.
MEETING = 60.0

#: Exchanges are watched over by us (distributed/watch.py); this is only for what nobody waits for any more.
_NEVER = timedelta(hours=12)


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process stands. local: its number on this machine, which chooses the GPU."""

    rank: int
    size: int
    local: int
    host: str
    port: int
    store_is_kept: bool

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Place:
        """The place that the launcher's variables give. Raises UsageError when there is none, or half of one."""
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


def join(place: Place, device: torch.device, *, patience: float = PATIENCE, meeting: float = MEETING) -> World:
    """The World of all processes of a launcher, once all have come.

    device: this process' own; tensors on GPUs are exchanged by NCCL.
    Raises DistributedError naming those that do not come.
    """
    store = _meet(place, meeting)
    try:
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("gloo", store), rank=place.rank, world_size=place.size, timeout=_NEVER
        )
        control = dist.group.WORLD
        assert control is not None
        data = dist.new_group(backend="nccl") if device.type == "cuda" else dist.new_group(timeout=_NEVER)
    except RuntimeError as error:
        raise DistributedError(
            f"the ranks cannot connect: {str(error).splitlines()[0]}",
            where=f"rank {place.rank}",
            remedy="GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the network between the machines",
        ) from None
    return World(
        dist.PrefixStore("splat", store), place.rank, place.size, control=control, data=data, patience=patience
    )


def _meet(place: Place, meeting: float) -> dist.Store:
    """The store of all processes, when the last one has come."""
    where = f"{place.host}:{place.port}"
    try:
        store = dist.TCPStore(
            place.host,
            place.port,
            place.size,
            is_master=place.rank == 0 and not place.store_is_kept,
            timeout=timedelta(seconds=meeting),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        raise DistributedError(
            f"rank {place.rank} cannot reach the meeting place: {str(error).splitlines()[0]}", where=where
        ) from None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    met = dist.PrefixStore(f"splat-{attempt}", store)
    met.set(f"here/{place.rank}", "1")
    deadline = time.monotonic() + meeting
    while missing := [rank for rank in range(place.size) if not met.check([f"here/{rank}"])]:
        if time.monotonic() > deadline:
            listed = ", ".join(map(str, missing))
            raise DistributedError(
                f"of {place.size} ranks {listed} did not come within {meeting:.0f} s",
                where=where,
                remedy="start all ranks with the same --distributed flag, and look at what those ranks say",
            )
        time.sleep(0.05)
    return met


def world_of_group(device: torch.device, *, patience: float = PATIENCE) -> World:
    """The World of the default process group, which a framework has made; every rank has to ask for it.

    device: this process' own.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    host = os.environ.get("MASTER_ADDR") or socket.gethostname()
    opened = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    told = [None if opened is None else (host, opened.port)]
    dist.broadcast_object_list(told, src=0)
    assert told[0] is not None
    store = opened or dist.TCPStore(*told[0], is_master=False)
    control = dist.new_group(backend="gloo", timeout=_NEVER)
    data = dist.new_group(backend="nccl") if device.type == "cuda" else dist.new_group(backend="gloo", timeout=_NEVER)
    return World(store, rank, size, control=control, data=data, patience=patience)
