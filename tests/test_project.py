"""The files that a visitor's tools read: they parse, and say what the package says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from splatcli import __version__
from tests.ptx.machine import REQUIRE_NVCC

yaml: Any = pytest.importorskip("yaml", reason="PyYAML comes with other packages, not with this one")
ROOT = Path(__file__).resolve().parents[1]
FILES = ["CITATION.cff", ".pre-commit-config.yaml", *sorted((ROOT / ".github").rglob("*.yml"))]


def load(name: str | Path) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", FILES, ids=lambda name: Path(name).name)
def test_it_parses(name: str | Path) -> None:
    assert load(name)


def test_the_citation_has_version_and_licence_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = load("CITATION.cff")
    assert citation["version"] == __version__
    assert citation["license"] == project["license"]
    assert citation["title"].endswith(project["description"].split(",")[0][0].lower() + project["description"][1:])


def test_the_workflow_runs_what_a_change_has_to_pass() -> None:
    jobs = load(".github/workflows/ci.yml")["jobs"]
    commands = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    assert "bash .ci/run" in commands["test"]
    install, kernels, architectures = commands["cuda"][-3:]
    assert install == ".venv/bin/python -m pip install -c constraints.txt -e '.[dev,cuda]'"
    assert kernels.startswith(".venv/bin/python -m pytest tests/kernels tests/ptx ")
    assert architectures == ".venv/bin/python -m pytest --slow tests/kernels/test_nvcc.py"
    assert jobs["cuda"]["env"]["SPLATCLI_REQUIRE_NVCC"] == 1
    assert commands["docs"] == ["make docs", ".venv/bin/python -m pytest tests/test_docs_site.py"]
    assert "make wheel FLAGS=--no-cuda" in commands["wheels"]
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_the_release_publishes_what_was_tested_and_built() -> None:
    jobs = load(".github/workflows/release.yml")["jobs"]
    assert jobs["test"]["uses"] == "./.github/workflows/ci.yml"
    assert "workflow_call" in load(".github/workflows/ci.yml")[True]  # YAML takes the key "on" for a boolean
    assert sorted(jobs["publish"]["needs"]) == ["build", "test"]
    commands = [step["run"] for step in jobs["build"]["steps"] if "run" in step]
    version = next(command for command in commands if command.startswith("test "))
    command = version.replace(".venv/bin/python", sys.executable)
    for tag, code in ((f"v{__version__}", 0), ("v9.9", 1)):
        done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=os.environ | {"GITHUB_REF_NAME": tag}, check=False)
        assert done.returncode == code
    assert commands.index("make wheel FLAGS=--no-cuda") > commands.index(version)


def test_a_job_that_requires_nvcc_does_not_pass_by_skipping(tmp_path: Path) -> None:
    (tmp_path / "no_nvcc_here.py").write_text("from splatcli.native import build_cuda\nbuild_cuda._candidates = list\n")
    tests = ["tests/kernels/test_nvcc.py", "tests/kernels/test_noise.py", "tests/native/test_device_headers.py"]
    command = [sys.executable, "-m", "pytest", "-q", "--slow", "-p", "no_nvcc_here", "-k", "not emulator", *tests]
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    plain = {name: value for name, value in os.environ.items() if name != REQUIRE_NVCC} | {"PYTHONPATH": path}
    for environment, outcome in ((plain, {"skipped"}), ({**plain, REQUIRE_NVCC: "1"}, {"failed", "errors"})):
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        last = done.stdout.splitlines()[-1]
        assert set(re.findall(r"\d+ (passed|failed|skipped|errors?)", last)) == outcome, done.stdout[-2000:]


@pytest.mark.parametrize("name", ["SECURITY.md", "llms.txt"])
def test_pages_that_a_file_names_exist(name: str) -> None:
    targets = re.findall(r"\]\(([^)]+)\)", (ROOT / name).read_text(encoding="utf-8"))
    assert len(targets) > 2
    for target in targets:
        assert (ROOT / target).is_file(), target
