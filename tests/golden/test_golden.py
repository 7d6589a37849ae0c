"""Whole commands on the sample scene give the very results that are recorded in digests.json.

The portable CPU library rounds each operation by itself, and everything outside it is reproducible
(splatcli/reproducible.py), so the digests are the same on every processor. They hold what a change of structure must
not touch: runs of every strategy, alone and by two ranks, a run that is stopped and resumed, files of every format,
pictures and JSON. A change that means to alter results records them anew and argues it in its commit:

    python -m tests.golden.test_golden
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from splatcli.cli.commands import run as run_command
from tests.forked import splat_command

DIGESTS = Path(__file__).with_name("digests.json")
SAMPLE = Path(__file__).parents[2] / "data" / "samples" / "courtyard"
STEPS = 300
STRATEGIES = ("absgrad", "adc", "mcmc")

#: A short run with every kind of event: growth, pruning, resets, random backgrounds.
SETTINGS = (
    *(str(SAMPLE), "-r", "8", "-n", str(STEPS), "--cap-max", "3000", "-q", "--set", "train.background=random"),
    *("--set", "schedule.refine_every=20", "--set", "schedule.reset_every=60"),
)
VIEWS = ("--pose-opt", "--exposure", "--filter-3d")


def splat(*arguments: str, timeout: float = 900.0) -> str:
    """stdout of a command with the portable library."""
    environment = {**os.environ, "SPLATCLI_CPU_ISA": "portable"}
    done = subprocess.run(
        [*splat_command(), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def splat_here(*arguments: str) -> str:
    """The same in this process: most commands take less time than to start one."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setenv("SPLATCLI_CPU_ISA", "portable")
        code = run_command(list(arguments))
    assert code == 0, err.getvalue()
    return out.getvalue()


def train(run: Path, *more: str) -> Path:
    return Path(splat("train", *SETTINGS, *more, "-o", str(run)).strip())


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:32]


def of_checkpoint(path: Path) -> str:
    """All tensors by name; the manifest holds dates and versions."""
    tensors = {k: v for k, v in torch.load(path, weights_only=True).items() if isinstance(v, torch.Tensor)}
    parts: list[bytes] = []
    for name in sorted(tensors.keys() - {"manifest", "manifest_sha256"}):
        tensor = tensors[name].contiguous()
        parts += [
            f"{name} {tensor.dtype} {list(tensor.shape)}".encode(),
            tensor.reshape(-1).view(torch.uint8).numpy().tobytes(),
        ]
    return digest(*parts)


def of_file(path: Path) -> str:
    return digest(path.read_bytes())


def of_picture(path: Path) -> str:
    """Its pixels: how they are compressed is the library's business."""
    with Image.open(path) as picture:
        return digest(repr((picture.mode, picture.size)).encode(), picture.tobytes())


def runs(folder: Path) -> dict[str, str]:
    """Training by each strategy, stopped and resumed, and by two ranks that replicate or shard the Gaussians."""
    found = {}
    for strategy in STRATEGIES:
        found[f"train {strategy}"] = of_checkpoint(train(folder / strategy, *VIEWS, "--strategy", strategy))
    stopped = train(folder / "stopped", *VIEWS, "--strategy", "absgrad", "--stop-at", "130")
    found["train, stop, resume"] = of_checkpoint(Path(splat("resume", str(stopped), "-q").strip()))
    for kind in ("replicated", "sharded"):
        distributed = ("--ranks", "2", "--distributed", kind, "--batch-size", "2", "--device", "cpu")
        found[f"train on two ranks, {kind}"] = of_checkpoint(train(folder / kind, *distributed, "-n", "60"))
    return found


def files(folder: Path) -> dict[str, str]:
    """The model in every format that is written, its pictures, and what is said of it as JSON."""
    model = str(folder / "absgrad")
    found = {}
    ply = folder / "model.ply"
    splat_here("export", model, "-o", str(ply), "-q")
    found["export ply"] = of_file(ply)
    # Not .sog nor the .html around one: k-means has other last digits on another processor.
    for suffix in ("compressed.ply", "splat", "spz", "glb", "usdz"):
        out, again = folder / f"model.{suffix}", folder / f"{suffix}.ply"
        splat_here("export", str(ply), "-o", str(out), "-q")
        # Containers and image codecs are other libraries'; what the file says of the Gaussians is ours.
        splat_here("export", str(out), "-o", str(again), "-q")
        found[f"export {suffix}, read again"] = of_file(again)
        if suffix in ("compressed.ply", "splat"):
            found[f"export {suffix}"] = of_file(out)
    cameras = folder / "cameras.json"
    splat_here("export", model, "-o", str(cameras), "-q")
    found["export cameras"] = of_file(cameras)
    pictures = splat_here(
        "render", model, "--views", "test", "--what", "rgb,depth,alpha,normals", "-o", str(folder / "out"), "-q"
    )
    for path in sorted(Path(line) for line in pictures.splitlines()):
        found[f"render {path.relative_to(folder / 'out')}"] = of_picture(path)
    for command in (["info", str(ply)], ["info", str(SAMPLE)], ["eval", model]):
        name = f"{command[0]} {Path(command[1]).name} --json"
        found[name] = of_json(splat_here(*command, "--json", "-q"), folder)
    return found


def of_json(text: str, folder: Path) -> str:
    """JSON lines without what differs from machine to machine: places, times, versions and last digits."""
    reported = [json.loads(line) for line in text.splitlines()]

    def kept(value: Any) -> Any:
        if isinstance(value, dict):
            drop = {
                "seconds",
                "time",
                "version",
                "torch",
                "writer",
                "path",
                "root",
                "memory_bytes",
                "threads",
                "device",
            }
            return {k: kept(v) for k, v in value.items() if k not in drop and "second" not in k}
        if isinstance(value, list):
            return [kept(v) for v in value]
        if isinstance(value, float):
            return "a number"  # scores and statistics come from torch, whose last digits depend on the processor
        return value.replace(str(folder), "").replace(str(SAMPLE), "") if isinstance(value, str) else value

    return digest(json.dumps(kept(reported), sort_keys=True).encode())


def results(folder: Path) -> dict[str, str]:
    return {**runs(folder), **files(folder)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("golden")


@pytest.mark.parametrize("part", [runs, files])
def test_results_are_those_on_record(part: Callable[[Path], dict[str, str]], folder: Path) -> None:
    found, recorded = part(folder), json.loads(DIGESTS.read_text(encoding="utf-8"))
    assert found["train, stop, resume"] == found["train absgrad"] if part is runs else True
    different = {name: value for name, value in found.items() if recorded.get(name) != value}
    assert different == {}
    assert found.keys() <= recorded.keys()


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        DIGESTS.write_text(json.dumps(results(Path(place)), indent=1, sort_keys=True) + "\n", encoding="utf-8")
