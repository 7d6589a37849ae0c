"""The main commands in processes without what macOS lacks. No test has ever run on a Mac."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from splatcli.distributed import launch
from splatcli.native import build
from tests.cli.tiny import QUICK, write_scene
from tests.native.cases import NEEDS_COMPILER
from tests.sfm.conftest import write_noise

ROOT = Path(__file__).resolve().parents[2]
#: Commands of one process, as a list on stdin; what came of them goes into the file that is named.
PROGRAM = """
import json, sys
from splatcli.cli.commands import run
codes = [run(words) for words in json.load(sys.stdin)]
libraries = [name for name in sys.modules if name in ("torch", "pycolmap")]
json.dump({"codes": codes, "libraries": libraries}, open(sys.argv[1], "w"))
"""


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """That of a process without what macOS lacks, for which the CPU library has been built already."""
    isa = "neon" if build.machine_name() == "aarch64" else "portable"
    ready = build.cpu_library(isa)

    def take(folder: Path, name: str, *_: object) -> None:
        folder.mkdir()
        shutil.copy2(ready, folder / name)

    with monkeypatch.context() as changed:
        changed.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        changed.setattr(sys, "platform", "darwin")
        changed.setattr(build, "_build", take)
        assert build.cpu_library(isa).parent.parent == tmp_path / "cache/splatcli/native"
    paths = os.pathsep.join([str(ROOT / "tests/darwin/lacking"), str(ROOT)])
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SPLATCLI_", "OMP_"))}
    return {**kept, "PYTHONPATH": paths, "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}


def run(environment: dict[str, str], folder: Path, *commands: tuple[object, ...]) -> tuple[dict[str, Any], str, str]:
    """Exit codes and loaded libraries, stdout and stderr of commands in one process."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, folder / "results.json"],
        input=json.dumps([[str(word) for word in words] for words in commands]),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "results.json").read_text()), done.stdout, done.stderr


@NEEDS_COMPILER
def test_from_images_to_an_export(environment: dict[str, str], tmp_path: Path) -> None:
    scene, made, ply = write_scene(tmp_path / "ball"), tmp_path / "run", tmp_path / "x.ply"
    photos = write_noise(tmp_path / "photos", 3)
    found, out, err = run(
        environment,
        tmp_path,
        ("sfm", photos, "-o", tmp_path / "cameras"),  # features come from processes that are not forked
        ("train", scene, "-o", made, "-n", "20", "--offload", "-q", *QUICK),
        ("resume", made, "-n", "30", "-q"),
        ("render", made, "-o", tmp_path / "renders", "-q"),
        ("export", made, "-o", ply, "-q"),
        ("info", ply, "--json"),
        ("doctor", "--json"),
    )
    assert found["codes"] == [3] + [0] * 6, err
    assert "no two of the 3 images show the same thing" in err
    assert found["libraries"] == ["torch", "pycolmap"], "see splatcli/scene/_pycolmap.py"
    info, doctor = (json.loads(line) for line in out.splitlines()[-2:])
    assert (info["kind"], info["num_gaussians"]) == ("ply", 200)
    assert (doctor["isa"], doctor["threads"]) == (
        "neon" if build.machine_name() == "aarch64" else "portable",
        os.cpu_count(),
    )
    assert doctor["memory_bytes"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert doctor["backends"]["cpu"]["works"]
    assert [path.name for path in sorted((made / "ckpts").iterdir())] == ["ckpt_000020.pt", "ckpt_000030.pt"]
    assert len(list((tmp_path / "renders").rglob("*.png"))) > 0
    assert not list(made.rglob("*.tmp.*"))


def test_a_worker_ends_with_the_process_that_made_it(environment: dict[str, str]) -> None:
    """Linux's kernel does this by itself."""
    code = "import time; from splatcli.sfm import features as f; f.die_with_parent(); print(flush=True); time.sleep(60)"
    parent = subprocess.Popen(
        ["sh", "-c", '"$0" "$@"; true', sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    with parent.stdout:
        assert parent.stdout.readline() == b"\n"
        parent.kill()
        parent.wait()
        since = time.monotonic()
        assert parent.stdout.read() == b"", "the worker closes the pipe as it ends"
    assert time.monotonic() - since < 30


def test_the_reader_of_usd_files_limits_what_the_system_lets_it(environment: dict[str, str]) -> None:
    code = (
        "import resource as r; from splatcli.formats import usd_stage as u; before = r.getrlimit(r.RLIMIT_AS);"
        "u._limit(0); assert r.getrlimit(r.RLIMIT_AS) == before; print(r.getrlimit(r.RLIMIT_CPU)[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "60\n"), done.stderr


def test_ranks_meet_on_the_network_that_always_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert launch._environment(0, 2, 1234, None)["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert launch._environment(0, 2, 1234, None)["GLOO_SOCKET_IFNAME"] == "lo0"
