"""Estimates of times on an H200 from benchmarks/results/gauge.json, and their block in docs/cuda.md.

    python -m benchmarks.roofline      # writes the block anew; make gauge does so too

Nothing here was measured on a GPU.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "gauge.json"
DOCUMENT = ROOT / "docs" / "cuda.md"
BEGIN, END = "<!-- gauge: by python -m benchmarks.roofline -->\n", "<!-- /gauge -->\n"

#: An H200: quarters of its multiprocessors, their clock, and bytes a second that a kernel reaches of the 4.8e12.
QUARTERS, CLOCK, BANDWIDTH = 132 * 4, 1.98e9, 4.3e12
#: Assumed: the share of its cycles in which the busiest pipe works, when dependencies and latencies stall it.
EFFICIENCY = 0.6

#: Stages and the beginnings of their kernels' names, ours and gsplat's; what is not among them bins.
STAGES = {
    "projection, colours": (
        ("project_chunks", "project_totals"),
        ("projection_ewa_3dgs_fused_fwd", "spherical_harmonics_fwd"),
    ),
    "binning": ((), ("intersect", "DeviceRadixSort")),
    "blend": (("blend_fast",), ("rasterize_to_pixels_3dgs_fwd",)),
    "loss": (("loss",), ()),
    "blend, backward": (("blend_vjp",), ("rasterize_to_pixels_3dgs_bwd",)),
    "projection, backward, Adam": (
        ("project_vjp",),
        ("projection_ewa_3dgs_fused_bwd", "spherical_harmonics_bwd", "adam_kernel"),
    ),
}


def least_bytes(kernel: dict[str, Any]) -> int:
    """Bytes of global memory that a kernel reads and writes, each once a launch."""
    return int(32 * (kernel["sectors_read"] + kernel["sectors_written"]))


def seconds(kernel: dict[str, Any]) -> tuple[float, float, float]:
    """The floors of a kernel by bandwidth and by its busiest pipe, and the estimate."""
    memory, pipe = least_bytes(kernel) / BANDWIDTH, kernel["cycles"] / (QUARTERS * CLOCK)
    return memory, pipe, max(memory, pipe / EFFICIENCY)


def stage_of(name: str, side: int) -> str:
    return next((stage for stage, names in STAGES.items() if name.startswith(names[side])), "binning")


def stages(scene: dict[str, Any], side: str) -> dict[str, tuple[float, float]]:
    """Cycles and estimated seconds of each stage."""
    found = dict.fromkeys(STAGES, (0.0, 0.0))
    for name, kernel in scene[side].items():
        stage = stage_of(name, ("ours", "gsplat").index(side))
        cycles, time = found[stage]
        found[stage] = (cycles + kernel["cycles"], time + seconds(kernel)[2])
    return found


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["", *(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows]), ""]


def kernel_table(scene: dict[str, Any]) -> list[str]:
    """A line for each of our kernels that takes a thousandth of the step."""
    whole = sum(seconds(kernel)[2] for kernel in scene["ours"].values())
    rows, left = [], 0.0
    for name, kernel in sorted(scene["ours"].items(), key=lambda item: -seconds(item[1])[2]):
        memory, pipe, estimate = seconds(kernel)
        if estimate < 1e-3 * whole:
            left += estimate
            continue
        numbers = [
            f"{kernel['instructions'] / 1e6:.2f}",
            f"{kernel['lanes']:.0f}",
            f"{kernel['cycles'] / 1e6:.2f}",
            kernel["busiest"],
        ]
        traffic = [f"{32e-6 * kernel['sectors']:.0f}", f"{1e-6 * least_bytes(kernel):.1f}"]
        times = [f"{1e6 * memory:.1f}", f"{1e6 * pipe:.1f}", f"**{1e6 * estimate:.1f}**"]
        rows.append([f"`{name}`", str(kernel["launches"]), *numbers, *traffic, *times])
    rows.append(["the others", *[""] * 9, f"{1e6 * left:.1f}"])
    head = ["kernel", "launches", "M instructions", "lanes", "M cycles", "busiest", "MB in sectors", "MB at least"]
    return table([*head, "floor by bandwidth, µs", "floor by pipe, µs", "estimate, µs"], rows)


def stage_table(scene: dict[str, Any]) -> list[str]:
    """Ours beside gsplat's, stage by stage: cycles, estimates, ratios; kernels alone, then with what torch does."""
    ours, theirs = stages(scene, "ours"), stages(scene, "gsplat")
    rows = []

    def row(name: str, mine: tuple[float, float], other: tuple[float, float]) -> list[str]:
        ratios = [f"{b / a:.2f}" if a and b else "" for a, b in zip(mine, other, strict=True)]
        numbers = [f"{mine[0] / 1e6:.1f}", f"{other[0] / 1e6:.1f}" if other[0] else "", ratios[0]]
        return [name, *numbers, f"{1e6 * mine[1]:.0f}", f"{1e6 * other[1]:.0f}" if other[1] else "", ratios[1]]

    def added(*pairs: tuple[float, float]) -> tuple[float, float]:
        return sum(a for a, _ in pairs), sum(b for _, b in pairs)

    compared = [stage for stage in STAGES if theirs[stage][0]]
    rows = [row(stage, ours[stage], theirs[stage]) for stage in compared]
    kernels = added(*(ours[stage] for stage in compared)), added(*theirs.values())
    rows.append(row("**kernel to kernel**", *kernels))
    glue = (0.0, sum(scene["gsplat_glue_bytes"].values()) / BANDWIDTH)
    rows.append(row("loss; there torch's part, by bytes", ours["loss"], glue))
    rows.append(row("**modelled step**", added(kernels[0], ours["loss"]), added(kernels[1], glue)))
    head = ["", "M cycles", "gsplat", "ratio", "estimate, µs", "gsplat", "ratio"]
    return table(head, rows)


def block(results: dict[str, Any]) -> str:
    made = f"Counted on {results['date']}, nvcc {results['nvcc']}, {results['architecture']}."
    lines = [f"{made} All times are estimates; nothing has run on a GPU."]
    for name, scene in results["scenes"].items():
        size, isects = f"{scene['width']}x{scene['height']}", f"{scene['isects']:,} tile intersections"
        lines += ["", f"### {name}", ""]
        lines += [f"{scene['gaussians']:,} Gaussians, {scene['visible']:,} visible, {size}, {isects}:"]
        lines += kernel_table(scene)
        if "gsplat" in scene:
            theirs = f"{scene['gsplat_isects']:,} tile intersections"
            lines += [f"Beside gsplat 1.5.3, which has {theirs} there:", *stage_table(scene)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def with_block(document: str, results: dict[str, Any]) -> str:
    before, _, rest = document.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"{DOCUMENT.name} has no block between {BEGIN.strip()} and {END.strip()}")
    return f"{before}{BEGIN}\n{block(results)}\n{END}{after}"


def write() -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    DOCUMENT.write_text(with_block(DOCUMENT.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    write()
