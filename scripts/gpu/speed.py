"""The sections of the part speed: steps a second, stages and kernels beside the least they can take, ncu."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import re
import statistics
from collections import defaultdict
from typing import Any

from gpu.process import run_child, this_program, tool
from gpu.report import NO_GPU, Report, Skipped, is_tiny, read_json
from gpu.scenes import SIZES, Training, cases, measure

#: Bytes a second that a device-to-device copy moves on an H200, reads and writes counted.
H200_BYTES = 4.3e12


def speed(report: Report) -> None:
    """Training steps a second, memory, and what the scenes are like."""
    for case in cases():
        if report.left() < 8:
            report["left_out"] = "the time was up"
            return
        report[case.name] = measure(case, 4.0)


def least_bytes(n: int, visible: int, isects: int, pixels: int) -> dict[str, float]:
    """Return the least that each stage moves through device memory, with today's layouts and SH degree 3.

    project      44 B geometry of all; of the visible 192 B SH read, 76 B projected Gaussian written, and SH that
                 missed a step brought up to it: moments read, all three written
    bin          depth sort: 4 passes over 8 B, read and written; intersections: 12 B written, 2 passes,
                 lists of 10 B
    blend        the projected Gaussians of three fifths of the intersections, before a pixel stops; image and alpha
    loss         cuda/src/cuda/loss.cu
    blend_vjp    as blend, and 64 B written an intersection; image, alpha and gradient read
    project_vjp  64 B an intersection; parameters and both moments read and written, of SH only where visible
    """
    return {
        "project": 44.0 * n + (268.0 + 45 * 20 * (1 - visible / n)) * visible,
        "bin": 64.0 * visible + (12 + 48 + 10) * isects,
        "blend": 0.6 * isects * 70 + 16.0 * pixels,
        "loss": 114.0 * pixels,
        "blend_vjp": 0.6 * isects * 70 + 64.0 * isects + 28.0 * pixels,
        "project_vjp": 64.0 * isects + 24.0 * (14 * n + 45 * visible),
    }


def stages(report: Report) -> None:
    """Milliseconds of each stage (events around its call) and of each kernel (torch's profiler), beside the floor."""
    import torch

    from splatcli.native.backend import Backend

    class Timed(Backend):
        """Puts events around each call."""

        events: dict[str, list[Any]] = defaultdict(list)  # noqa: RUF012

        def call(self, name: str, *arguments: Any) -> int:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            result = Backend.call(self, name, *arguments)
            end.record()
            Timed.events[name].append((begin, end))
            return result

    plain = Backend.cuda("cuda:0")
    timed = Timed(**{field.name: getattr(plain, field.name) for field in dataclasses.fields(Backend)})
    for case in cases()[:6]:
        if report.left() < 8:
            return
        width, height = SIZES[case.size]
        training = Training(case, backend=timed)
        for _ in range(2 if is_tiny() else 24):
            training.step()
        training.finish()
        Timed.events.clear()
        for _ in range(2 if is_tiny() else 48):
            training.step()
        training.finish()
        counts = training.counts()
        floors = least_bytes(case.n, int(counts["visible"]), int(counts["isects"]), width * height)
        result: dict[str, Any] = {}
        for name, events in Timed.events.items():
            if name in floors:
                ms = statistics.median(begin.elapsed_time(end) for begin, end in events)
                floor = 1e3 * floors[name] / H200_BYTES
                result[name] = {"ms": round(ms, 4), "floor_ms": round(floor, 4), "times_floor": round(ms / floor, 2)}
        result["sum"] = {
            "ms": round(sum(row["ms"] for row in result.values()), 4),
            "floor_ms": round(1e3 * sum(floors.values()) / H200_BYTES, 4),
        }
        report[case.name] = result
        with contextlib.suppress(Exception):  # the profiler may not work where all else does
            result["kernels"] = kernel_times(training)
            report[case.name] = result
        del training


def kernel_times(training: Training, steps: int = 12) -> dict[str, dict[str, float]]:
    """Microseconds a step of each kernel, and its launches a step; the slowest first."""
    import torch

    steps = 2 if is_tiny() else steps
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            training.step()
        training.finish()
    rows = {}
    for event in profile.key_averages():
        if event.device_time_total <= 0:
            continue
        rows[event.key] = {"us": round(event.device_time_total / steps, 2), "launches": event.count / steps}
    return dict(sorted(rows.items(), key=lambda row: -row[1]["us"]))


#: By guess; where the stages were measured before, their five slowest kernels are taken.
LARGEST = ("blend_fast", "blend_vjp_fast", "project_chunks", "project_vjp_chunks", "loss_statistics")

#: Metrics of ncu that are kept, by section and name.
METRICS = {
    "Duration": "duration",
    "Compute (SM) Throughput": "compute",
    "Memory Throughput": "memory",
    "DRAM Throughput": "dram",
    "L2 Cache Throughput": "l2",
    "L1/TEX Hit Rate": "l1_hits",
    "L2 Hit Rate": "l2_hits",
    "Achieved Occupancy": "occupancy",
    "Registers Per Thread": "registers",
    "No Eligible": "no_eligible",
}


def bare_name(kernel: str) -> str:
    """``void splat::gpu::blend_fast<3>(splat::Job)`` -> ``blend_fast<3>``."""
    signature = kernel.replace("(anonymous namespace)::", "").replace("<unnamed>::", "")
    return re.sub(r"<.*", "", signature.split("(")[0]).split("::")[-1].split()[-1] + "".join(
        re.findall(r"<[^()]*>", signature.split("(")[0])[:1]
    )


def largest_kernels(stages_found: dict[str, Any]) -> list[str]:
    """Names, without namespaces and template arguments, of the five slowest kernels of ours that were seen."""
    for row in stages_found.values():
        if isinstance(row, dict) and row.get("kernels"):
            names = [re.sub("<.*", "", bare_name(key)) for key in row["kernels"] if "splat::" in key]
            if names:
                return list(dict.fromkeys(names))[:5]
    return list(LARGEST)


def counters(report: Report) -> None:
    """ncu over one step: what bounds the five largest kernels. Machines may refuse their hardware counters."""
    program = tool("ncu")
    names = largest_kernels(read_json(report.path.with_name("stages.json")))
    report["asked"] = names
    log = report.log("ncu")
    options = ["--clock-control", "none", "--profile-from-start", "off", "--target-processes", "all"]
    for section in ("SpeedOfLight", "MemoryWorkloadAnalysis", "Occupancy", "LaunchStats", "SchedulerStats"):
        options += ["--section", section]
    options += ["--kernel-name", f"regex:^({'|'.join(names)})", "--launch-count", "10", "--csv", "--page", "details"]
    command = [program, *options, *this_program("--profiled-step")]
    status = run_child(command, log, report.left() - 3)
    text = log.read_text(errors="replace")
    if any(words in text for words in NO_GPU):
        raise AssertionError(text[-400:])
    for words in ("ERR_NVGPUCTRPERM", "Failed to initialize the profiler", "LibraryNotLoaded"):
        if words in text:
            raise Skipped(f"the hardware counters are refused: {words}")
    found = parse_counters(text)
    report["kernels"] = found
    if not found:
        ending = " / ".join(text.strip().splitlines()[-3:])[-400:]
        raise AssertionError(f"ncu: {'out of time' if status is None else f'exit status {status}'}: {ending}")


def parse_counters(text: str) -> dict[str, dict[str, str]]:
    """{kernel and launch: {metric: value and unit}} of what ``ncu --csv --page details`` prints."""
    start = text.find('"ID","Process ID"')
    if start < 0:
        return {}
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for row in csv.DictReader(io.StringIO(text[start:])):
        metric = METRICS.get(row.get("Metric Name") or "")
        if metric is not None and row.get("Metric Value"):
            found[f"{row['ID']} {bare_name(row['Kernel Name'])}"].setdefault(
                metric, f"{row['Metric Value']} {row.get('Metric Unit', '')}".strip()
            )
    return dict(found)


def profiled_step() -> None:
    """Run one step of the first case under ncu, after some that are not profiled."""
    import torch

    training = Training(cases()[0])
    for _ in range(2 if is_tiny() else 10):
        training.step()
    training.finish()
    torch.cuda.profiler.start()
    training.step()
    training.finish()
    torch.cuda.profiler.stop()
    print("profiled step done")
