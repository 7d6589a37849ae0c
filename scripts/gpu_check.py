"""Test and measure the CUDA backend on this machine's GPU, within a time limit.

    scripts/gpu_check --part check --out DIR     correctness: build, tests, training, compute-sanitizer
    scripts/gpu_check --part speed --out DIR     speed: stages, steps a second, ncu, beside gsplat
    scripts/gpu_check --prepare .wheels          on a machine with a network: fetches what the two parts need elsewhere

Each part ends within --seconds (540) and is useful without the other. Every section is a process of its own, with a
share of the time, so that a fault or a hang in one loses no other; time that one leaves over goes to the next.
DIR gets three files: PART.json has every number as soon as it is known, PART.log what the sections printed, PART.txt
the summary, which is also the last that is printed and fits 12,000 characters.
Exit code: 0 when no section failed, 1 when one did, 2 for wrong arguments or without a GPU.

--prepare fetches wheels for CPython 3.12 on x86-64 and cuts a small scene; --carried (.wheels) is where its
results lie. --rehearse runs every section as far as it comes without a GPU; --tiny takes the smallest sizes.

The scenes of the measurements are made up, with the statistics of trained ones. "front": of N Gaussians three fifths
are in view, on four wavy surfaces, each within a few pixels of its neighbours; eight cameras that turn and shift a
little. "orbit": surfaces all around and twelve cameras that look outward, each of which sees a quarter. At 1 M and
2 megapixels a visible Gaussian covers about four tiles in front, eight in orbits (the report says how many it was).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu import ROOT
from gpu.check import build, determinism, environment, sanitizer, tests, tiny_step, training
from gpu.peer import beside, gsplat, gsplat_building
from gpu.prepare import prepare, unpack
from gpu.process import run_child
from gpu.report import (
    CARRIED,
    NO_GPU,
    REHEARSE,
    TINY,
    Report,
    Section,
    Skipped,
    append_logs,
    read_json,
    summary,
    write_json,
)
from gpu.speed import counters, profiled_step, speed, stages

#: Runs a section in a folder within seconds, and publishes what it has found so far.
Runner = Callable[[str, Path, float, Callable[[dict[str, Any]], None]], dict[str, Any]]


def run_section(name: str, work: Path, seconds: float, publish: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Run a section in a process of its own; return what it found, also when it did not come to its end."""
    partial, log = work / f"{name}.json", work / f"{name}.log"
    partial.unlink(missing_ok=True)
    command = [sys.executable, str(Path(__file__).resolve()), "--section", name, "--out", str(work)]
    # A little more than the section knows of, so that it can end by itself.
    command += ["--seconds", str(max(1.0, seconds - 5.0))]
    status = run_child(command, log, seconds, lambda: publish(read_json(partial)))
    found = read_json(partial)
    if status is None:
        return {"status": "failed", "error": f"not done after {seconds:.0f} s", **found}
    if status != 0:
        lines = log.read_text(errors="replace").splitlines()
        return {"status": "failed", "error": "\n".join(lines[-15:]) or f"exit status {status}", **found}
    return {"status": "no GPU" if "no_gpu" in found else "skipped" if "skipped" in found else "ok", **found}


def check(
    part: str, out: Path, work: Path, seconds: float, names: list[str], runner: Runner = run_section
) -> dict[str, Any]:
    """Run sections one after the other within the time; the report is on disk after every number."""
    started = time.monotonic()
    report: dict[str, Any] = {
        "format": 2,
        "part": part,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "sections": {},
    }
    sections, known = report["sections"], PARTS[part]
    (out / f"{part}.log").write_text("")
    # Without the whole time, every section has its part of what there is.
    scale = min(1.0, seconds / sum(known[name].seconds for name in names))
    for i, name in enumerate(names):
        begun = time.monotonic()
        share = seconds - (begun - started) - scale * sum(known[later].seconds for later in names[i + 1 :])

        def publish(found: dict[str, Any], name: str = name, begun: float = begun) -> None:
            sections[name] = {"status": "running", **found, "seconds": round(time.monotonic() - begun, 1)}
            write_json(out / f"{part}.json", report)

        try:
            result = (
                runner(name, work, share, publish) if share >= 2 else {"status": "skipped", "skipped": "no time left"}
            )
        except Exception as error:
            result = {"status": "failed", "error": f"{type(error).__name__}: {error}"}
        sections[name] = {**result, "seconds": round(time.monotonic() - begun, 1)}
        report["seconds"] = round(time.monotonic() - started, 1)
        write_json(out / f"{part}.json", report)
        append_logs(out / f"{part}.log", work, name)
        print(f"{name}: {result['status']}, {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    return report


#: In the order in which they run; the seconds of a part sum up to less than --seconds.
PARTS = {
    "check": {
        "environment": Section(environment, 25),
        "build": Section(build, 100),
        "tests": Section(tests, 130),
        "determinism": Section(determinism, 25),
        "training": Section(training, 160),
        "sanitizer": Section(sanitizer, 90),
    },
    "speed": {
        "environment": Section(environment, 20),
        "build": Section(build, 100),
        "stages": Section(stages, 55),
        "speed": Section(speed, 80),
        "counters": Section(counters, 55),
        "gsplat": Section(gsplat, 140),
        "beside": Section(beside, 80),
    },
}

SECTIONS = {name: section for part in PARTS.values() for name, section in part.items()}


def no_gpu() -> str | None:
    """Return why nothing can be measured here, or None."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    count = torch.cuda.device_count()
    return None if count else "an NVIDIA GPU is needed, and torch sees none"


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=list(PARTS), help="correctness, or speed")
    parser.add_argument("--out", type=Path, help="folder for the report, the log and the summary")
    parser.add_argument("--seconds", type=float, default=540.0, help="time limit (540)")
    parser.add_argument("--only", help="comma-separated sections of the part")
    parser.add_argument("--carried", type=Path, default=ROOT / ".wheels", help="what --prepare has made (.wheels)")
    parser.add_argument("--prepare", type=Path, metavar="DIR", help="fetch wheels and cut a scene, and end")
    parser.add_argument("--rehearse", action="store_true", help="run every section as far as it comes without a GPU")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, to try the script itself")
    parser.add_argument("--section", choices=list(SECTIONS), help=argparse.SUPPRESS)
    parser.add_argument("--tiny-step", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--profiled-step", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.prepare is not None:
        return options
    if options.out is None:
        parser.error("--out is needed: a folder for the report")
    if options.section is None and options.part is None:
        parser.error(f"--part is needed: {' or '.join(PARTS)}")
    known = PARTS[options.part] if options.part else SECTIONS
    options.names = options.only.split(",") if options.only else list(known)
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"there is no section {', '.join(unknown)}; there are {', '.join(known)}")
    if not options.seconds > 0:
        parser.error("--seconds must be more than 0")
    return options


def child(name: str, out: Path, seconds: float) -> int:
    """Run a section in this process."""
    report = Report(out / f"{name}.json", seconds)
    try:
        SECTIONS[name].run(report)
    except Skipped as reason:
        report["skipped"] = str(reason)
    except Exception as error:
        reasons = [line for line in str(error).splitlines() if any(words in line for words in NO_GPU)]
        if os.environ.get(REHEARSE) == "1" and reasons:
            report["no_gpu"] = reasons[0].strip()[:200]
            return 0
        traceback.print_exc()
        return 1
    return 0


def stop(number: int, frame: Any) -> None:
    """End with the summary when the program is stopped."""
    raise SystemExit(128 + number)


def main(argv: list[str], runner: Runner = run_section) -> int:
    options = arguments(argv)
    if options.prepare is not None:
        return prepare(options.prepare.resolve())
    if options.rehearse:
        os.environ[REHEARSE] = "1"
    if options.tiny:
        os.environ[TINY] = "1"
    if os.environ.get(REHEARSE) != "1" and (reason := no_gpu()) is not None:
        print(f"gpu_check: {reason}", file=sys.stderr)
        return 2
    if options.tiny_step or options.profiled_step:
        tiny_step() if options.tiny_step else profiled_step()
        return 0
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if options.section:
        return child(options.section, out, options.seconds)
    signal.signal(signal.SIGTERM, stop)
    os.environ[CARRIED] = str(options.carried.resolve())
    with tempfile.TemporaryDirectory(prefix="gpu_check-", ignore_cleanup_errors=True) as folder:
        return run_part(options, out, Path(folder), runner)


def run_part(options: argparse.Namespace, out: Path, work: Path, runner: Runner) -> int:
    """Run the sections of a part; the summary comes last, whatever happens on the way."""
    started = time.monotonic()
    wheels = unpack(options.part, options.carried, work / "site")
    print(f"carried: {', '.join(wheels) or 'no wheels'}", file=sys.stderr)
    # ninja lies beside this Python, which may have been started through a link or a script elsewhere.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    paths = [str(work / "site"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    building = gsplat_building(work) if {"gsplat", "beside"} & set(options.names) else contextlib.nullcontext()
    try:
        with building:
            seconds = options.seconds - (time.monotonic() - started)
            report = check(options.part, out, work, seconds, options.names, runner)
    finally:
        append_logs(out / f"{options.part}.log", work, "gsplat-build")
        report = read_json(out / f"{options.part}.json") or {"part": options.part, "sections": {}}
        text = summary(report)
        (out / f"{options.part}.txt").write_text(text + "\n", encoding="utf-8")
        print(text, flush=True)
    return int(any(section["status"] == "failed" for section in report["sections"].values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
