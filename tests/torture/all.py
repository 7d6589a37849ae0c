"""All harnesses at full length, one after another: ``make torture``, or ``python -m tests.torture.all [NAME ...]``.

A harness is a module of this folder that runs by itself; each takes ``--json FILE``. Its figures replace those of the
same name in benchmarks/reliability.json, which keeps the rest, and the table in docs/reliability.md is written anew.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FIGURES = ROOT / "benchmarks" / "reliability.json"
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


def harnesses() -> list[str]:
    files = sorted(Path(__file__).parent.glob("*.py"))
    return [file.stem for file in files if file.stem != "all" and '__name__ == "__main__"' in file.read_text()]


def main() -> int:
    known = harnesses()
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help=f"of {', '.join(known)}; all without one")
    parser.add_argument("--take", type=Path, metavar="FOLDER", help="run none; take NAME.json from there")
    options = parser.parse_args()
    if unknown := set(options.names) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.names or known:
            path = (options.take or Path(scratch)) / f"{name}.json"
            if options.take is None and not _run(name, path):
                failed.append(name)
            if path.exists():
                store(read_figures(name, path))
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def _run(name: str, path: Path) -> bool:
    """Whether a harness, run in a process apart, found no failure; its figures go to ``path``."""
    print(f"{name} ...", flush=True)
    command = [sys.executable, "-m", f"tests.torture.{name}", "--json", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0


def read_figures(name: str, path: Path) -> dict[str, Any]:
    """Name -> figure; a harness with one figure may leave its name out."""
    found: dict[str, Any] = json.loads(path.read_text())
    return {name: found} if "trials" in found else found


def store(found: dict[str, Any]) -> None:
    """Puts figures beside those that are there, and into the page."""
    kept = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    figures = dict(sorted({**kept, **found}.items()))
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(figures)}\n{END}{after}")


def table(figures: dict[str, Any]) -> str:
    """The figures as Markdown."""
    lines = ["| harness | one trial, and what must hold | trials | failures | measured |", "|---|---|---|---|---|"]
    for name, figure in figures.items():
        run = figure.get("run", figure)
        when = " ".join(str(run[key]) for key in ("date", "commit") if key in run)
        lines.append(f"| `{name}` | {figure['what']} | {figure['trials']:,} | {figure['failures']:,} | {when} |")
    runs = [figure.get("run", figure) for figure in figures.values()]
    machines = sorted({f"{run['cpu']}, {run['cores']} cores, torch {run['torch']}" for run in runs if "cpu" in run})
    return "\n".join([*lines, "", f"On: {'; '.join(machines) or 'unknown'}."])


if __name__ == "__main__":
    sys.exit(main())
