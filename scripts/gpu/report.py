"""A check's report: what sections found, on disk after every number, and the summary for a person."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Set from the command line, for sections through the environment.
TINY, REHEARSE, CARRIED = "GPU_CHECK_TINY", "GPU_CHECK_REHEARSE", "GPU_CHECK_CARRIED"

#: Of the summary, which has to fit what is kept of a program's output (12,000 characters).
SUMMARY_CHARACTERS = 11_500

#: Of a section's log, in PART.log.
LOG_CHARACTERS = 700_000

#: How a missing GPU shows, in torch's words and in ours.
NO_GPU = (
    "torch sees none",
    "torch sees 0 GPUs",
    "Found no NVIDIA driver",
    "No CUDA GPUs are available",
    "not compiled with CUDA",
    "No CUDA devices",
)


def is_tiny() -> bool:
    return os.environ.get(TINY) == "1"


class Report:
    """A section's results so far, on disk after every new number."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.path, self.until = path, time.monotonic() + seconds
        self.found: dict[str, Any] = {}

    def __setitem__(self, name: str, value: Any) -> None:
        self.found[name] = value
        write_json(self.path, self.found)

    def left(self) -> float:
        return self.until - time.monotonic()

    def log(self, name: str) -> Path:
        """A file for what a command prints; it becomes a part of the section's log."""
        return self.path.with_name(f"{self.path.stem}-{name}.log")


class Skipped(Exception):
    """The section cannot run here, and no code is at fault."""


@dataclass(frozen=True)
class Section:
    run: Callable[[Report], None]
    seconds: float  # reserved; a section may also take what earlier ones have left over


def write_json(path: Path, value: Any) -> None:
    """Write a file that another process never sees half of."""
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(scratch, path)


def read_json(path: Path) -> dict[str, Any]:
    """Return a section's numbers so far; an empty dict where there are none yet."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}


def append_logs(merged: Path, work: Path, name: str) -> None:
    """Append what a section and its commands printed to the one log that is kept."""
    with merged.open("a", encoding="utf-8") as file:
        for log in [work / f"{name}.log", *sorted(work.glob(f"{name}-*.log"))]:
            if log.is_file():
                text = log.read_text(encoding="utf-8", errors="replace")
                file.write(f"\n===== {log.stem} =====\n{text[-LOG_CHARACTERS:]}")


def table(report: dict[str, Any]) -> list[str]:
    """Return a line for each section."""
    lines = [f"{report.get('part', '')} {report.get('started', '')}, {report.get('seconds', 0):.0f} s"]
    for name, section in report["sections"].items():
        words = str(section.get("error") or section.get("skipped") or section.get("no_gpu") or "").strip().splitlines()
        lines.append(f"{name:12} {section['status']:8} {section['seconds']:5.0f} s  {words[-1][:110] if words else ''}")
    return lines


def brief(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), default=str)


def summary(report: dict[str, Any]) -> str:
    """Return the report for a person, with all that is needed to act on it, in no more than SUMMARY_CHARACTERS."""
    sections: dict[str, Any] = report["sections"]

    def found(name: str) -> dict[str, Any]:
        hidden = ("status", "seconds", "error", "skipped", "no_gpu")
        return {key: value for key, value in sections.get(name, {}).items() if key not in hidden}

    blocks: list[tuple[int, list[str]]] = []  # what may be cut to so many characters, the first lines last
    for name in ("environment", "build", "determinism"):
        if found(name):
            blocks.append((900, [f"{name}: {brief(found(name))}"]))
    if found("tests"):
        blocks.append((3500, test_lines(found("tests"))))
    for name in ("training", "sanitizer"):
        blocks.append((1500, [f"{name} {key}: {brief(value)}" for key, value in found(name).items()]))
    blocks.append((2200, speed_lines(found("speed"), found("gsplat"))))
    blocks.append((2600, stage_lines(found("stages"))))
    blocks.append((1800, [f"ncu {key}: {brief(value)}" for key, value in found("counters").get("kernels", {}).items()]))
    blocks.append((1500, [f"beside {key}: {brief(value)}" for key, value in found("beside").items()]))
    for name, section in sections.items():
        if section.get("error"):
            lines = str(section["error"]).strip().splitlines()[-6:]
            blocks.append((700, [f"--- {name} failed:", *(line[:200] for line in lines)]))
    head = "\n".join(table(report))[:2000]
    text = [head]
    for most, lines in blocks:
        if lines:
            text.append("\n".join(lines)[:most])
    whole = "\n\n".join(text)
    # Errors come last and matter most: what is over the limit is cut out of the middle.
    return (
        whole
        if len(whole) <= SUMMARY_CHARACTERS
        else whole[:8500] + "\n[...]\n" + whole[-(SUMMARY_CHARACTERS - 8510) :]
    )


def test_lines(found: dict[str, Any]) -> list[str]:
    lines = []
    for name, result in found.items():
        if name != "alone":
            ending = f", in {result['while']}" if result.get("while") else ""
            lines.append(f"{name}: {result['summary']}{ending}")
    alone = found.get("alone", {})
    for name, result in found.items():
        if name != "alone":
            lines += [
                f"  {test.split('::')[-1]}{f' (alone: {alone[test]})' if test in alone else ''}: {words[:160]}"
                for test, words in result["failed"].items()
            ]
    return lines


def speed_lines(speeds: dict[str, Any], beside: dict[str, Any]) -> list[str]:
    """Ours of the section where gsplat was measured too, where there is one."""
    rows = []
    for name in dict.fromkeys([*beside, *speeds]):
        both = beside.get(name)
        ours = both["ours"] if isinstance(both, dict) and "ours" in both else speeds.get(name)
        if not isinstance(ours, dict) or "steps_per_second" not in ours:
            continue
        theirs = ""
        if isinstance(both, dict) and "gsplat" in both:
            peer = both["gsplat"]
            theirs = (
                f"{peer['steps_per_second']:8.1f} {peer['ms'] / ours['ms']:6.2f} {peer['peak_mib']:6d} "
                f"{peer['l1_only']['ms'] / ours['ms']:6.2f}"
            )
        # Older reports name it pairs_per_visible.
        isects = ours["isects_per_visible"] if "isects_per_visible" in ours else ours["pairs_per_visible"]
        rows.append(
            f"{name:18} {ours['steps_per_second']:8.1f} {ours['ms']:8.3f} {ours['spread']:6.3f} {ours['peak_mib']:6d} "
            f"{ours['visible_share']:5.2f} {isects:8.2f} {theirs}"
        )
    if not rows:
        return []
    head = f"{'training':18} {'steps/s':>8} {'ms':>8} {'spread':>6} {'MiB':>6} {'seen':>5} {'isects/V':>8} "
    extra = {key: beside[key] for key in ("version", "build", "waited") if key in beside}
    return [
        f"{head}{'gsplat/s':>8} {'ratio':>6} {'MiB':>6} {'L1':>6}",
        *rows,
        f"gsplat: {brief(extra)}" if extra else "",
    ]


def stage_lines(found: dict[str, Any]) -> list[str]:
    lines = []
    for name, row in found.items():
        if isinstance(row, dict) and "sum" in row:
            each = "  ".join(
                f"{stage} {values['ms']:.3f} ({values['times_floor']:.1f}x)"
                for stage, values in row.items()
                if "times_floor" in values
            )
            lines.append(f"{name}: ms and times the floor: {each}; sum {row['sum']['ms']:.3f}")
            for kernel, times in list(row.get("kernels", {}).items())[:4]:
                lines.append(f"    {times['us']:9.1f} us x{times['launches']:g}  {kernel.split('(')[0][-70:]}")
    return lines
