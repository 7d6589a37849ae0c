"""Runs scripts/gpu_check and tests/gpu without a GPU: on a simulated one, where the tools for that are.

    python -m tests.gpu.rehearse --out DIR [--part check|speed] [--seconds 900]

The kernels are compiled by nvcc and their PTX runs on the CPU (tests/ptx); gsplat, ncu, compute-sanitizer and
nvidia-smi are stand-ins. DIR gets what gpu_check writes, and, where the package coverage is installed, `uncovered.txt`:
the lines of gpu_check that no process has run. Exit code: 0 when only tests failed that ask for memory of a device,
1 otherwise, 3 where a tool is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.ptx import machine

ROOT = Path(__file__).resolve().parents[2]
SIMULATED = Path(__file__).resolve().parent / "simulated"
#: Tests that fail where a GPU's tensors lie in the memory of the host.
NEEDS_A_DEVICE = {
    "test_tensors_on_the_wrong_device_are_a_type_error",
    "test_it_takes_as_much_less_of_the_device_as_is_planned",
    "test_a_number_that_is_none_is_found_there_too",
}

#: Programs by name, with words of the real ones.
PROGRAMS = {
    "nvidia-smi": 'echo "580.00.00, 345 MHz, 3201 MHz"',
    "compute-sanitizer": """
[ "$1" = --version ] && { echo "Version 2025.3.1.0 (build 36400806) (public-release)"; exit; }
while [ "${1#--}" != "$1" ]; do
  case "$1" in --tool|--error-exitcode|--kernel-name) shift 2;; *) echo "unrecognised option '$1'"; exit 1;; esac
done
"$@" || exit
echo "========= ERROR SUMMARY: 0 errors"
""",
    "ncu": """
[ "$1" = --version ] && { echo "Version 2025.3.1.0 (build 36398880) (public-release)"; exit; }
while [ "${1#--}" != "$1" ]; do case "$1" in --csv) shift;; *) shift 2;; esac; done
"$@" || exit
echo '==PROF== Disconnected from process 7'
echo '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device",\
"CC","Section Name","Metric Name","Metric Unit","Metric Value"'
for m in '"Duration","us","71.20"' '"Memory Throughput","%","48.81"' '"Registers Per Thread","register/thread","64"'; do
  echo '"0","7","python3","127.0.0.1","void splat::gpu::blend_fast<3>(splat::Job)","1","7","(256, 1, 1)",\
"(8160, 1, 1)","0","9.0","GPU Speed Of Light Throughput",'"$m"
done
""",
}


def environment(folder: Path, native: Path) -> dict[str, str]:
    """That of programs which are to find a simulated GPU."""
    tools = folder / "tools"
    tools.mkdir(parents=True, exist_ok=True)
    for name, lines in PROGRAMS.items():
        (tools / name).write_text(f"#!/bin/sh\n{lines.strip()}\n")
        (tools / name).chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GPU_CHECK_")}
    paths = [str(SIMULATED), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **inherited,
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONDONTWRITEBYTECODE": "1",
        "SIMULATED_GPU": str(native),
        "SPLATCLI_FUZZ": "1",
    }


def run(part: str, out: Path, native: Path, seconds: float, *flags: str) -> dict[str, Any]:
    """One part of gpu_check in the smallest sizes; its report."""
    scratch = out / "scratch"
    settings = environment(scratch, native)
    if importlib.util.find_spec("coverage"):
        rules = scratch / "coverage.ini"
        (scratch / "covered").mkdir(exist_ok=True)
        rules.write_text(
            f"[run]\nparallel = true\nsigterm = true\ndata_file = {scratch / 'covered' / 'lines'}\n"
            f"include = {ROOT / 'scripts' / 'gpu_check.py'},{ROOT / 'scripts' / 'gpu' / '*'}\n"
        )
        settings["COVERAGE_PROCESS_START"] = str(rules)
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), "--part", part, "--out", str(out), "--tiny"]
    command += ["--carried", str(scratch / "carried"), "--seconds", str(seconds), *flags]
    subprocess.run(command, env=settings, check=False, cwd=ROOT)
    report: dict[str, Any] = json.loads((out / f"{part}.json").read_text(encoding="utf-8"))
    return report


def carry(folder: Path) -> None:
    """The scenes that --prepare cuts, without its wheels."""
    program = "import sys, pathlib; sys.path.insert(0, 'scripts'); from gpu.prepare import write_scenes; "
    program += "write_scenes(pathlib.Path(sys.argv[1]))"
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-c", program, str(folder / "scene")], cwd=ROOT, check=True)


def unexpected(report: dict[str, Any]) -> list[str]:
    """Sections that did not end as they should where a GPU is simulated."""
    found = []
    for name, section in report["sections"].items():
        if name == "tests" and section["status"] == "failed":
            results = [result for result in section.values() if isinstance(result, dict) and "failed" in result]
            failed = {test.split("::")[-1] for result in results for test in result["failed"]}
            if failed and failed <= NEEDS_A_DEVICE and all(result["status"] in (0, 1) for result in results):
                continue
        if section["status"] != "ok":
            words = section.get("error") or section.get("skipped") or ""
            found.append(f"{name}: {section['status']}: {words[-400:]}")
    return found


def uncovered(out: Path) -> str:
    """The lines of gpu_check that no process has run, by coverage; empty where it is not installed."""
    if not importlib.util.find_spec("coverage") or not (out / "scratch" / "covered").is_dir():
        return ""
    rules = f"--rcfile={out / 'scratch' / 'coverage.ini'}"
    subprocess.run([sys.executable, "-m", "coverage", "combine", "-q", rules], cwd=ROOT, check=False)
    report = [sys.executable, "-m", "coverage", "report", "-m", rules]
    return subprocess.run(report, cwd=ROOT, check=False, capture_output=True, text=True).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", choices=("check", "speed"))
    parser.add_argument("--seconds", type=float, default=900.0)
    options = parser.parse_args()
    if (reason := machine.missing()) is not None:
        print(f"rehearse: {reason}", file=sys.stderr)
        return 3
    out = options.out.resolve()
    (out / "scratch").mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out / "scratch" / "covered", ignore_errors=True)
    native = machine.kernel_library()
    carry(out / "scratch" / "carried")
    wrong: list[str] = []
    for part in [options.part] if options.part else ["check", "speed"]:
        wrong += [f"{part}: {words}" for words in unexpected(run(part, out, native, options.seconds))]
    if text := uncovered(out):
        (out / "uncovered.txt").write_text(text, encoding="utf-8")
        print(text)
    print("\n".join(wrong) or "every section came to its end")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
