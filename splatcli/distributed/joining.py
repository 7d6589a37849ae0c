"""Joining: the place that a launcher gave to this process becomes a World."""

from __future__ import annotations

import atexit
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

#: Seconds that a rank of a program that is not ours may come later to a rendering than another: it may save, or
#: evaluate. A rank that has ended or gives no sign of life is missed sooner.
_FOREIGN_PATIENCE = 600.0

#: Exchanges are watched over by us (distributed/heartbeat.py); this is only for what nobody waits for any more.
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
    _await_all(met, place.rank, place.size, meeting, where, "start all ranks with the same --distributed flag")
    return met


def _await_all(met: dist.Store, rank: int, size: int, meeting: float, where: str, remedy: str) -> None:
    """Waits until all ranks have come here. Raises DistributedError naming those that do not."""
    met.set(f"here/{rank}", "1")
    deadline = time.monotonic() + meeting
    while missing := [other for other in range(size) if not met.check([f"here/{other}"])]:
        if time.monotonic() > deadline:
            listed = ", ".join(map(str, missing))
            raise DistributedError(
                f"of {size} ranks {listed} did not come within {meeting:.0f} s",
                where=where,
                remedy=f"{remedy}, and look at what those ranks say",
            )
        time.sleep(0.05)


def world_of_group(device: torch.device, *, patience: float = PATIENCE) -> World:
    """The World of the default process group, which a framework has made; every rank has to ask for it.

    device: this process' own. Of a group of NCCL it has to be a GPU.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    host = os.environ.get("MASTER_ADDR") or socket.gethostname()
    opened = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    told = [None if opened is None else (host, opened.port)]
    # NCCL takes tensors on GPUs only; without a device it would take the current one, which may be another rank's.
    dist.broadcast_object_list(told, src=0, device=device if dist.get_backend() == "nccl" else None)
    assert told[0] is not None
    store = opened or dist.TCPStore(*told[0], is_master=False)
    control = dist.new_group(backend="gloo", timeout=_NEVER)
    data = dist.new_group(backend="nccl") if device.type == "cuda" else dist.new_group(backend="gloo", timeout=_NEVER)
    return World(store, rank, size, control=control, data=data, patience=patience)


#: The default process group that a World was made of last, its kind of device, and the World.
_default: tuple[dist.ProcessGroup, torch.device, World] | None = None


def default_world(device: torch.device, *, meeting: float = MEETING) -> World:
    """The World of the default process group, made when it is first asked for; every rank has to ask for it.

    device: this process' own, on which its tensors are.
    Raises UsageError where there is no such group, DistributedError naming the ranks that do not come.
    """
    global _default
    if not dist.is_initialized():
        raise UsageError(
            "distributed=True renders with the ranks of the default process group, and there is none",
            where="rasterization()",
            remedy="call torch.distributed.init_process_group() first, or give world=splatcli.distributed.join(...); "
            "without distributed=True the render is local",
        )
    group = dist.group.WORLD
    assert group is not None
    if _default is not None and _default[0] is group:
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
    world = world_of_group(device, patience=_FOREIGN_PATIENCE)
    if _default is not None:
        _default[2].watch.close()
    else:
        atexit.register(_leave)
    _default = group, device, world
    world.agree("a rasterization", on_GPUs=int(device.type == "cuda"))
    return world


def _leave() -> None:
    """Tells the other ranks that this process ends in good order."""
    if _default is not None:
        _default[2].watch.close()
