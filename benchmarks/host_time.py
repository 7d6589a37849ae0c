"""The host's part of a training step on a GPU: what Python and the native entries take to enqueue one.

    PYTHONPATH=. python -m benchmarks.host_time         # in the checkout; nvcc and g++ are needed

The CUDA library of tests/ptx runs with launches that do nothing, on tensors of the host. Times are those of this
process alone on its processor, the median over rounds. Left out is what only a GPU has: the driver's part of a launch
and of a copy, and torch's streams and events, whose calls are counted instead.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable

import torch

from splatcli.gaussians import GROUPS
from splatcli.native import abi
from splatcli.native.backend import Backend
from splatcli.rasterizer import AdamState, AsyncEngine, DensifyStats
from splatcli.rasterizer.step_inputs import Regularisation, StepInputs
from tests.kernels.simt import Emulator
from tests.ptx.machine import TWIN_FLAGS, kernel_library, load, machine
from tests.rasterizer.scenes import random_scene

ROUNDS, TIMES = 15, 100


def microseconds(work: Callable[[], object], rounds: int = ROUNDS, times: int = TIMES) -> float:
    """Return the processor time of a call, the median over rounds."""
    taken = []
    for _ in range(rounds):
        started = time.thread_time_ns()
        for _ in range(times):
            work()
        taken.append((time.thread_time_ns() - started) / times / 1e3)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", action="store_true", help="print a profile of the steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    library = load(kernel_library(flags=TWIN_FLAGS))
    backend = Backend(library, torch.float32, 0, torch.device("cpu"), 0, 0x51, True)
    gaussians, camera = random_scene(3, 50_000, width=960, height=720, sh_degree=3)
    adam, stats = AdamState.zeros_like(gaussians), DensifyStats.zeros(len(gaussians))
    target = torch.zeros(camera.height, camera.width, 3, dtype=torch.uint8)
    lrs, background = dict.fromkeys(GROUPS, 1e-3), torch.zeros(3)
    emulator = Emulator(library)

    def step(engine: AsyncEngine, inputs: StepInputs) -> None:
        engine.submit(gaussians, adam, inputs)

    with machine().idle(), torch.no_grad():
        for name, noise in (("adc", 0.0), ("mcmc", 5e5)):
            inputs = StepInputs(camera, target, lrs, 3, background, 0.2, False, stats if name == "adc" else None,
                                regularisation=Regularisation(0.01, 0.01, noise))  # fmt: skip
            engine = AsyncEngine(backend, capacity=400_000)
            step(engine, inputs)
            emulator.clear_trace()
            calls: Counter[str] = Counter()
            original = Backend.call

            def counted(self: Backend, entry: str, *arguments: object) -> int:
                calls[entry] += 1  # noqa: B023 (used at once)
                return original(self, entry, *arguments)  # noqa: B023

            Backend.call = counted  # type: ignore[method-assign]
            step(engine, inputs)
            Backend.call = original  # type: ignore[method-assign]
            launches = len(emulator.trace())
            print(f"{name}: {launches} launches, {sum(calls.values())} entries: {dict(calls)}")
            print(f"{name}: a step {microseconds(lambda: step(engine, inputs)):7.1f} us")  # noqa: B023
            emulator.clear_trace()
        pipeline, context = engine._pipeline, engine.context
        view = pipeline.view(gaussians, camera, inputs)
        update = pipeline._adam_update(adam, 1, inputs)
        arrays = backend.arrays(gaussians)
        image, v_image, alpha = pipeline._images(camera)
        out, v_out = context.images(view, image, alpha, None), context.images(view, v_image, None, None)
        call = abi.Call(device=0, stream=0x51, dtype=0, threads=0)
        parts: dict[str, Callable[[], object]] = {
            "view": lambda: pipeline.view(gaussians, camera, inputs),
            "Adam's arrays": lambda: pipeline._adam_update(adam, 1, inputs),
            "project": lambda: context.project(view, gaussians, update),
            "bin": lambda: context.bin(view, arrays, capacity=400_000),
            "blend": lambda: context.blend(view, background, image, alpha, None),
            "loss": lambda: pipeline.loss(image, target, v_image, 0.2),
            "blend, backward": lambda: context.blend_vjp(view, background, out, v_out),
            "images": lambda: (pipeline._images(camera), context.images(view, image, alpha, None)),
            "projection, backward": lambda: context.project_vjp(
                view, arrays, adam=update, grad2d=stats.grad2d, count=stats.count
            ),
            "noise": lambda: pipeline.noise(gaussians, 1, inputs),
            "one entry": lambda: backend.call("bin_bytes", view, context.native),
            "the same without Backend.call": lambda: library.splat_bin_bytes(call, view, context.native),
            "six tensors' checks": lambda: backend.arrays(gaussians),
        }
        for name, part in parts.items():
            print(f"    {name:32} {microseconds(part):7.1f} us")
            emulator.clear_trace()
        if options.profile:
            import cProfile
            import pstats

            profile = cProfile.Profile()
            profile.enable()
            for _ in range(500):
                step(engine, inputs)
            profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(35)


if __name__ == "__main__":
    main()
