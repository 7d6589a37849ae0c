"""Streams of a GPU, with stand-ins: calls take the current one, and buffers that are reused follow to another one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from splatcli.gaussians import GROUPS
from splatcli.native import abi
from splatcli.native.backend import Backend
from splatcli.rasterizer import AsyncEngine
from splatcli.rasterizer.adam import AdamState, decay_table
from splatcli.rasterizer.step_inputs import StepInputs
from tests.rasterizer.fixed_budget import FixedBudget
from tests.rasterizer.scenes import random_camera, random_scene

DEVICE = torch.device("cuda", 1)


@dataclass(eq=False)
class Stream:
    """A stream that notes which streams it waits for."""

    cuda_stream: int
    log: list[tuple[Any, ...]]

    def wait_stream(self, other: Stream) -> None:
        self.log.append(("wait", self.cuda_stream, other.cuda_stream))


@dataclass
class Gpu:
    """A library that notes its calls and their streams, and the current stream of each device."""

    log: list[tuple[Any, ...]] = field(default_factory=list)
    streams: dict[int, Stream] = field(default_factory=dict)
    capturing: bool = False

    def __getattr__(self, name: str) -> Any:
        def entry(call: abi.Call, *rest: object) -> int:
            self.log.append((name.removeprefix("splat_"), call.device, call.stream))
            return 64 if name.endswith("_bytes") else 0

        return entry

    def current_stream(self, device: torch.device) -> Stream:
        return self.streams[device.index]

    @contextlib.contextmanager
    def stream(self, number: int, device: int = 1) -> Iterator[None]:
        before = self.streams.get(device)
        self.streams[device] = Stream(number, self.log)
        yield
        if before is not None:
            self.streams[device] = before


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    decay_table(0.9, 0.999)  # is kept, so it must not be made of tensors without memory
    one = Gpu()
    monkeypatch.setattr(torch.cuda, "current_stream", one.current_stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: one.capturing)
    monkeypatch.setattr(
        Tensor, "record_stream", lambda tensor, stream: one.log.append(("record", id(tensor), stream.cuda_stream))
    )
    return one


def backend_of(gpu: Gpu, ordinal: int = 1) -> Backend:
    return Backend(gpu, torch.float32, 0, torch.device("cuda", ordinal), ordinal, deferred=True)  # type: ignore[arg-type]


def test_a_call_takes_the_stream_that_is_current_on_its_device_at_that_time(gpu: Gpu) -> None:
    first, second = backend_of(gpu, 0), backend_of(gpu, 1)
    with gpu.stream(0x10, device=0), gpu.stream(0x20, device=1):
        first.call("noise")
        second.call("noise")
        with gpu.stream(0x30, device=1):
            second.call("noise")
            first.call("noise")
        second.call("noise")
    assert gpu.log == [
        ("noise", 0, 0x10),
        ("noise", 1, 0x20),
        ("noise", 1, 0x30),
        ("noise", 0, 0x10),
        ("noise", 1, 0x20),
    ]


@dataclass
class Training:
    """Steps of an AsyncEngine on tensors without memory."""

    gpu: Gpu

    def __post_init__(self) -> None:
        self.gaussians = random_scene(5, 80, sh_degree=2)[0].to(DEVICE)
        self.adam = AdamState.zeros_like(self.gaussians)
        self.engine = AsyncEngine(backend_of(self.gpu), budget=FixedBudget(1 << 40), capacity=1000)

    def step(self) -> None:
        camera = random_camera(2, 37, 29)
        target, background = torch.zeros(29, 37, 3, device=DEVICE), torch.zeros(3, device=DEVICE)
        inputs = StepInputs(camera, target, dict.fromkeys(GROUPS, 1e-3), 2, background, 0.2, False, None)
        self.engine._pipeline.run(self.gaussians, self.adam, 1, inputs, capacity=1000)

    def buffers(self) -> set[int]:
        stages = self.engine._pipeline
        return {id(tensor) for tensor in [*stages.context.tensors(), *stages.arena.buffers()]}


def test_a_step_on_another_stream_waits_and_its_buffers_are_recorded(gpu: Gpu) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), gpu.stream(0x10):
        training = Training(gpu)
        training.step()
        training.step()
        assert {row[2] for row in gpu.log} == {0x10}, "on one stream nothing waits and nothing is recorded"
        assert len(training.buffers()) > 10
        before = len(gpu.log)
        with gpu.stream(0x20):
            buffers = training.buffers()
            training.step()
        rows = gpu.log[before:]
        assert rows[0] == ("wait", 0x20, 0x10), "before anything is enqueued"
        assert buffers <= {row[1] for row in rows if row[0] == "record" and row[2] == 0x20}
        assert {row[2] for row in rows if row[0] not in ("wait", "record")} == {0x20}
        before = len(gpu.log)
        training.step()
        assert gpu.log[before] == ("wait", 0x10, 0x20), "and back"


def test_a_retry_waits_for_the_stream_of_the_steps_in_flight(gpu: Gpu) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), gpu.stream(0x10):
        training = Training(gpu)
        training.step()
        with gpu.stream(0x20):
            training.engine._retry()
    assert ("wait", 0x20, 0x10) in gpu.log
    assert ("record", id(training.engine._results), 0x20) in gpu.log


def test_a_graph_is_captured_without_waiting_for_a_stream_outside(gpu: Gpu) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), gpu.stream(0x10):
        training = Training(gpu)
        training.step()
        gpu.capturing = True
        with gpu.stream(0x20):
            training.step()
    assert not any(row[0] in ("wait", "record") for row in gpu.log)
