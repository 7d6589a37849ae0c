"""Devices, waits, streams and pinned memory of the Python side, on simulated GPUs whose tensors know where they are."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import numpy as np
import pytest
import torch
from torch import Tensor

from splatcli.checkpoint.file import load_checkpoint
from splatcli.cli.commands import run
from splatcli.cli.options import RankOptions
from splatcli.cli.ranks import check_ranks
from splatcli.distributed.launch import launch
from splatcli.errors import UsageError
from splatcli.formats.ply import write_ply_file
from splatcli.native import abi
from splatcli.native.backend import Backend
from splatcli.train.densify.control import DensityControl
from splatcli.train.training_images import to_device
from tests.cli.test_mesh import ball
from tests.cli.tiny import HEIGHT, WIDTH, add_points, write_scene
from tests.gpu.simulated.device_tensors import (
    Event,
    Fault,
    Gpus,
    Stream,
    Wait,
    guard_library,
    missing,
    simulated_gpus,
)
from tests.rasterizer.scenes import random_scene

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no GPU can be simulated: {missing()}")

# --- training ---------------------------------------------------------------------------------------------------------

STEPS, STOP = 20, 11
#: Refinements and an opacity reset within 20 steps, with checks, probes and evaluations.
SHORT = (
    *("-n", str(STEPS), "-q", "--sh-degree", "1", "--cap-max", "700", "--masks", "none"),
    *("--set", "model.sky_points=0", "--set", "train.alpha_lambda=0", "--set", "train.dropout=0"),
    *("--set", "strategy.prune_scale3d=100", "--set", "strategy.prune_opacity=0.0001"),
    *("--set", "strategy.grow_grad2d=1e-7", "--set", "schedule.refine_every=5", "--set", "schedule.refine_start=4"),
    *("--set", "schedule.refine_stop=19", "--set", "schedule.reset_every=10", "--set", "train.eval_every=10"),
    *("--set", "guard.finite_every=4", "--set", "guard.probe_every=8"),
)

#: Degree 3 within the steps of a short run: the finished model's view-dependent colour is counted.
DEGREE_3 = ("--sh-degree", "3", "--set", "schedule.sh_degree_interval=5", "--set", "train.sh_prior=0")

#: Options with a path of their own through the Python side of a step, and the waits that they have in it: most times by
#: function, in both parts of a run. A table that is copied to the device is kept there.
RUNS: dict[str, tuple[tuple[str, ...], dict[str, int]]] = {
    "absgrad, sky": (("--set", "model.sky_points=500", "--set", "strategy.prune_weakest=0.1"), {}),
    "adc, alpha term, dropout": (
        ("--strategy", "adc", "--set", "train.alpha_lambda=0.5", "--set", "train.dropout=0.3", *DEGREE_3),
        {},
    ),
    "mcmc, transparent images": (("--strategy", "mcmc", "--antialiased", "--random-background"), {}),
    # Before a view is used again that is still in flight, as at the ends of passes over six views.
    "poses": (("--pose-opt", "--exposure", "--depth-loss", "--test-every", "3"), {"_collect": 4}),
    "bilateral grid": (("--bilateral-grid", "--test-every", "3"), {"_collect": 4, "_made_cut": 4, "_constant": 1}),
    # Every step waits for the one before it, whose gradients are of the same camera.
    "ppisp": (("--ppisp",), {"_collect": STEPS, "_from_centre": 2, "_constant": 5}),
    "filters": (
        (
            *("--filter-3d", "--set", "train.dropout=0.3", "--set", "strategy.prune_weakest=0.1"),
            *(*DEGREE_3, "--set", "train.sh_prior=1"),
        ),
        {},
    ),
    "reduced, masks": (("--masks", "masks", "--depth-loss", "--set", "schedule.resolution_schedule=6"), {}),
    "offload": (("--offload", "--strategy", "mcmc"), {}),
    # Steps on several views are done on return: each view's counts, losses and gradients are read.
    "batches": (
        ("--batch-size", "2", "--exposure", "--depth-loss"),
        {"max_isects": 2 * STEPS, "step_loss": 4 * STEPS, "_all_gather": 2 * STEPS, "_lagging": STEPS},
    ),
}
#: Once for each process: the first view's tile intersections are counted, and a table is copied.
FIRST = {"max_isects": 2, "_adam_update": 2}

#: Numbers and sizes that a refinement may read, with MCMC and else, and what it may copy to the device: draws, binomial
#: coefficients, the size of the grid around the cameras, the size of a typical Gaussian.
READS, COPIES = {True: 9, False: 8}, 3
#: What comes on top: tables that stay on the device, the sizes of the 3D filter, and the choice of the weakest.
BESIDE = {"_decays", "decayed", "of", "filter_sizes", "_weakest"}

#: Functions of the trainer that may wait: refinement, what is saved and scored, and the steps in flight before it.
PAUSES = {
    "refine",
    "update_filter_3d",
    "estimate_view_dependence",
    "_save",
    "_save_last",
    "_compare_views",
    "_evaluate",
    "_probe",
    "_drain_and_log",
}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ball with sparse points, masks and depth maps."""
    root = add_points(write_scene(tmp_path_factory.mktemp("devices") / "ball"))
    mask = np.full((HEIGHT, WIDTH), 255, np.uint8)
    mask[:5, :7] = 0
    depth = np.full((HEIGHT, WIDTH), 2500, np.uint16)
    document = json.loads((root / "transforms.json").read_text())
    for folder in ("masks", "depths"):
        (root / folder).mkdir()
    for frame in document["frames"]:
        name = Path(frame["file_path"]).name
        imageio.imwrite(root / "masks" / name, mask)
        imageio.imwrite(root / "depths" / name, depth)
        frame["depth_file_path"] = f"depths/{name}"
    (root / "transforms.json").write_text(json.dumps(document))
    return root


@pytest.fixture(scope="module")
def transparent_scene(scene: Path) -> Path:
    """The same with alpha in its images."""
    root = shutil.copytree(scene, scene.with_name("transparent"))
    alpha = np.linspace(0, 255, HEIGHT * WIDTH).astype(np.uint8).reshape(HEIGHT, WIDTH, 1)
    for path in (root / "images").iterdir():
        imageio.imwrite(path, np.concatenate([imageio.imread(path), alpha], axis=2))
    return root


def splat(*words: object) -> None:
    assert run([str(word) for word in words]) == 0, words


def train_in_two_parts(scene: Path, folder: Path, device: str, *options: str) -> Gpus:
    with simulated_gpus() as gpus:
        splat("train", scene, "-o", folder, "--device", device, *SHORT, *options, "--stop-at", STOP)
        splat("resume", folder, "--device", device, "-q")
        splat("render", folder, "--device", device, "-o", folder / "renders", "--what", "rgb,depth", "-q")
    return gpus


def bits_of(folder: Path) -> dict[str, bytes]:
    """All tensors of a run's last checkpoint."""
    found = load_checkpoint(folder / "ckpts" / f"ckpt_{STEPS:06d}.pt")
    assert found.moments is not None
    assert len(found.gaussians) > 400, "some were added"
    tensors: dict[str, Tensor] = {**dict(found.gaussians.items()), **found.views, **found.columns.present()}
    for name, pair in found.moments.items():
        tensors |= {f"{name} moment {i}": moment for i, moment in enumerate(pair)}
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def stalls(wait: Wait) -> bool:
    """Whether a GPU has nothing to do at ``wait``, which is of a training step and the trainer's loop around it."""
    functions = {line.split()[-1] for line in wait.stack}
    if "_train" not in functions or functions & PAUSES or not wait.idle:
        return False
    # The trainer drains the engine before a refinement, and within a step for a view that is still in flight.
    return "drain" not in functions or "step" in functions


def check(gpus: Gpus, device: str, options: tuple[str, ...], allowed: dict[str, int]) -> None:
    """Check a run on ``device`` with its waits in steps, as in RUNS, and in refinements."""
    assert gpus.faults == []
    assert set(gpus.operations) == set(gpus.calls) == {device}
    found = Counter(wait.stack[0].split()[-1] for wait in gpus.waits if stalls(wait))
    beyond = {function: times for function, times in found.items() if times > (FIRST | allowed).get(function, 0)}
    assert not beyond, [str(wait) for wait in gpus.waits if stalls(wait) and wait.stack[0].split()[-1] in beyond]
    refining = [wait for wait in gpus.waits if any(line.endswith(" refine") for line in wait.stack)]
    refinements = sum(wait.stack[0].endswith(" _lagging") for wait in refining)
    assert refinements == 3, "at steps 5, 10 and 15, which begin with shN"
    # Renders for the blend weights wait for their counts.
    refining = [wait for wait in refining if not any(line.endswith(" largest_weights") for line in wait.stack)]
    kinds = Counter(wait.kind for wait in refining if not {line.split()[-1] for line in wait.stack[:2]} & BESIDE)
    assert kinds["read"] <= READS["mcmc" in options] * refinements, [str(wait) for wait in refining]
    if "--offload" not in options:  # which moves rows between both memories
        assert kinds["copy"] <= COPIES * refinements, [str(wait) for wait in refining]
    events = [
        wait for wait in gpus.waits if wait.kind == "event" and any(line.endswith(" step") for line in wait.stack)
    ]
    assert len(events) <= STEPS, "a step waits for one step before it"


@pytest.mark.parametrize("name", RUNS)
def test_training_stays_on_its_gpu_seldom_waits_and_has_the_bits_of_the_cpu(
    scene: Path, transparent_scene: Path, tmp_path: Path, name: str
) -> None:
    options, allowed = RUNS[name]
    scene = transparent_scene if "transparent" in name else scene
    gpus = train_in_two_parts(scene, tmp_path / "gpu", "cuda:1", *options)
    check(gpus, "cuda:1", options, allowed)
    splat("train", scene, "-o", tmp_path / "cpu", "--device", "cpu", *SHORT, *options)
    expected, found = bits_of(tmp_path / "cpu"), bits_of(tmp_path / "gpu")
    assert found.keys() == expected.keys()
    assert ("sh_change" in found, "effective_views" in found) == (name == "filters", name.startswith("adc"))
    assert [name for name, bits in expected.items() if found[name] != bits] == []


def test_the_first_gpu_leaves_the_second_one_alone(scene: Path, tmp_path: Path) -> None:
    options = ("--strategy", "mcmc", "--pose-opt", "--bilateral-grid", "--depth-loss", "--filter-3d", "--offload")
    model = tmp_path / "run"
    gpus = train_in_two_parts(scene, model, "cuda", *options, "--masks", "masks")
    check(gpus, "cuda:0", options, RUNS["bilateral grid"][1])
    with simulated_gpus() as gpus:
        splat("eval", model, "-q")
        splat("compare", model, model, "-o", tmp_path / "compared", "-q")
        splat("edit", model, "--refine", "3", "-o", tmp_path / "refined.ply")
    assert gpus.faults == []
    assert set(gpus.operations) == set(gpus.calls) == {"cuda:0"}


def test_a_gpu_that_runs_out_of_memory_goes_back_and_ends_smaller(
    scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With steps in flight, coefficients in pinned memory, and a shortage that torch's allocator did not see."""
    refine, calls = DensityControl.refine, []

    def failing(self: DensityControl, *arguments: Any, **more: Any) -> Any:
        calls.append(self)
        if len(calls) == 2:
            raise torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported later")
        return refine(self, *arguments, **more)

    monkeypatch.setattr(DensityControl, "refine", failing)
    options = (*SHORT, "--offload", "--set", "save.steps=[5]", "--json")
    with simulated_gpus() as gpus:
        splat("train", scene, "-o", tmp_path / "run", "--device", "cuda:1", *options)
    assert gpus.faults == []
    assert set(gpus.operations) == set(gpus.calls) == {"cuda:1"}
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (back,) = [event for event in events if event["event"] == "rolled-back"]
    assert (back["cause"], back["step"], back["from_step"]) == ("memory", 5, 9)
    assert "CUDA error: out of memory; " in back["text"]
    assert len(calls) > 2
    assert load_checkpoint(tmp_path / "run" / "ckpts" / f"ckpt_{STEPS:06d}.pt").step == STEPS


def test_meshes_are_made_on_their_gpu(tmp_path: Path) -> None:
    write_ply_file(ball(), tmp_path / "ball.ply")
    with simulated_gpus() as gpus:
        for name, options in {"surface.ply": (), "closed.glb": ("--watertight",)}.items():
            splat(
                "mesh",
                tmp_path / "ball.ply",
                "-o",
                tmp_path / name,
                "--resolution",
                "24",
                "--device",
                "cuda:1",
                *options,
            )
    assert gpus.faults == []
    assert set(gpus.operations) == set(gpus.calls) == {"cuda:1"}


def test_the_doctor_renders_on_every_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with simulated_gpus() as gpus:
        splat("doctor", "--json")
    facts = json.loads(capsys.readouterr().out)
    assert [gpu["capability"] for gpu in facts["gpus"]] == ["8.0", "8.0"]
    assert all(facts["backends"][device]["works"] for device in ("cuda:0", "cuda:1"))
    assert gpus.faults == []
    assert set(gpus.calls) == {"cuda:0", "cuda:1"}


def test_as_many_ranks_as_gpus() -> None:
    with simulated_gpus():
        assert check_ranks(RankOptions(2, "sharded"), ["--ranks", "2"], device="auto") == "cuda"
        with pytest.raises(UsageError, match="3 ranks want as many GPUs, and there are 2") as caught:
            check_ranks(RankOptions(3), ["--gpus=3"], device="cuda")
        assert caught.value.remedy == "--gpus 2, or --device cpu"


@pytest.mark.parametrize("mode", ["replicated", "sharded"])
def test_each_rank_stays_on_its_gpu_and_the_bits_are_those_of_one_process(
    scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """With gloo in NCCL's place; what NCCL refuses is refused."""
    options = (*SHORT, "--batch-size", "2", "--exposure", "--depth-loss", "--filter-3d")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
    monkeypatch.setenv("SIMULATED_RANKS", str(tmp_path))
    command = [sys.executable, "-m", "tests.gpu.simulated.rank", "train", str(scene), "-o", str(tmp_path / "gpus")]
    assert launch([*command, *options, "--device", "cuda", "--distributed", mode], 2, share_cores=False) == 0
    for rank in range(2):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        assert seen == {"faults": [], "devices": [f"cuda:{rank}"], "groups": 1}
    splat("train", scene, "-o", tmp_path / "cpu", "--device", "cpu", *options)
    assert bits_of(tmp_path / "gpus") == bits_of(tmp_path / "cpu")


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="torch with CUDA asks its own runtime for devices")
def test_autograd_stays_on_its_gpu() -> None:
    program = "import ctypes, os, sys; ctypes.CDLL(sys.argv[1]).install_hooks(); "
    # It ends at once: a thread of autograd that still waits for the interpreter would abort when that is gone.
    program += "from tests.gpu.simulated.autograd_checks import main; main(); os._exit(0)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-c", program, str(guard_library())]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


# --- the simulation itself --------------------------------------------------------------------------------------------


def on(device: str, *shape: int) -> Tensor:
    return torch.ones(*shape, device=device)


MIXED: dict[str, Callable[[], object]] = {
    "two GPUs": lambda: on("cuda:0", 3) + on("cuda:1", 3),
    "a GPU and the host": lambda: on("cuda:1", 3) * torch.ones(3),
    "the current GPU by default": lambda: torch.stack([on("cuda", 3), on("cuda:1", 3)]),
    "an index of another GPU": lambda: on("cuda:0", 3)[on("cuda:1", 2).long()],
    "an index of a GPU into the host": lambda: torch.ones(3)[on("cuda:1", 2).long()],
    "rows of a GPU by the host": lambda: torch.index_select(on("cuda:1", 3), 0, torch.ones(2, dtype=torch.int64)),
    "an output of the host": lambda: torch.add(on("cuda:1", 3), 1.0, out=torch.empty(3)),
    "a number of the host that is written to": lambda: torch.zeros(()).add_(on("cuda:1", 1)[0]),
    "numbers of the host that are written": lambda: on("cuda:1", 3).index_copy_(
        0, on("cuda:1", 1).long(), torch.ones(1)
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_tensors_of_several_devices_do_not_mix(name: str) -> None:
    with simulated_gpus(), pytest.raises(RuntimeError, match=r"same device"):
        MIXED[name]()


WAITS: dict[str, tuple[str, Callable[[Tensor], object]]] = {
    "item": ("read", lambda t: t[0].item()),
    "truth": ("read", lambda t: bool((t > 0).any())),
    "tolist": ("copy", lambda t: t.tolist()),
    "cpu": ("copy", lambda t: t.cpu()),
    "copy to the host": ("copy", lambda t: torch.zeros(3).copy_(t)),
    "nonzero": ("read", lambda t: t.nonzero()),
    "mask": ("read", lambda t: t[t > 0]),
    "assignment by a mask": ("read", lambda t: t.__setitem__(t > 0, t * 2)),
    "unique": ("read", lambda t: torch.unique(t)),
    "equal": ("read", lambda t: torch.equal(t, t)),
    "repeat_interleave": ("read", lambda t: t.repeat_interleave(t.long())),
    "assignment of a number to one": ("copy", lambda t: t.__setitem__(0, 5.0)),
    "tensor of a list": ("copy", lambda t: torch.tensor([1.0], device=t.device)),
    "index by a list": ("copy", lambda t: t[[0, 2]]),
    "copy from pageable memory": ("copy", lambda t: torch.zeros(3).to(t.device)),
    "copy from pinned memory": ("copy", lambda t: torch.zeros(3).pin_memory().to(t.device)),
    "synchronize": ("synchronize", lambda t: torch.cuda.synchronize(t.device)),
}


@pytest.mark.parametrize("name", WAITS)
def test_waits_of_the_host_are_seen(name: str) -> None:
    kind, work = WAITS[name]
    with simulated_gpus() as gpus:
        tensor = on("cuda:1", 3)
        assert gpus.waits == []
        work(tensor)
        assert [(wait.kind, wait.idle) for wait in gpus.waits] == [(kind, True)]


def test_what_does_not_wait_is_not_taken_for_a_wait() -> None:
    with simulated_gpus() as gpus:
        tensor = to_device(torch.arange(3.0), torch.device("cuda:1"))
        tensor[:1] = 5.0
        tensor[tensor > 1.0] = 0.0
        tensor = torch.where(tensor > 0.0, tensor, 1.0) + torch.tensor(2.0)
        torch.sort(tensor).values.cumsum(0).repeat_interleave(torch.zeros_like(tensor).long(), output_size=0)
        torch.empty(3, pin_memory=True).copy_(tensor, non_blocking=True)
        Event().record(torch.cuda.current_stream("cuda:1"))
        assert gpus.waits == []
        assert tensor.tolist() == [3.0, 3.0, 3.0]


def test_torch_is_afterwards_as_it_was() -> None:
    with simulated_gpus():
        kept = on("cuda:1", 3)
    assert not torch.cuda.is_available()
    assert torch.cuda.Event is not Event
    for use in (lambda: kept + 1, lambda: on("cuda:1", 3), lambda: torch.ones(3).cuda()):
        with pytest.raises((RuntimeError, AssertionError)):
            use()
    assert torch.tensor([1.0]).tolist() == [1.0]


def test_a_copy_to_the_host_arrives_with_an_event_of_its_own_stream() -> None:
    with simulated_gpus() as gpus:
        landing = torch.empty(3, pin_memory=True)
        wrong, right = Event(), Event()
        landing.copy_(on("cuda:1", 3), non_blocking=True)
        wrong.record()  # on the current GPU
        right.record(torch.cuda.current_stream("cuda:1"))
        with pytest.raises(RuntimeError, match="does not match recording stream's device cuda:1"):
            wrong.record(torch.cuda.current_stream("cuda:1"))
        wrong.synchronize()
        for use in (landing.sum, landing.tolist, landing.numpy):
            with pytest.raises(Fault, match="uses pinned memory before cuda:1 is done with it"):
                use()
        right.synchronize()
        assert landing.tolist() == [1.0, 1.0, 1.0]
        assert len(gpus.faults) == 3


def test_copies_that_claim_not_to_wait_are_of_pinned_memory() -> None:
    with simulated_gpus() as gpus:
        for copy in (
            lambda: torch.ones(3).to("cuda:1", non_blocking=True),
            lambda: on("cuda:1", 3).copy_(torch.ones(3), non_blocking=True),
            lambda: torch.empty(3).copy_(on("cuda:1", 3), non_blocking=True),
        ):
            with pytest.raises(Fault, match="claims not to wait"):
                copy()
        source = torch.ones(3).pin_memory()
        source.to("cuda:1", non_blocking=True)
        source.fill_(2.0)
        with pytest.raises(Fault, match="changed before its copy"):
            torch.cuda.synchronize("cuda:1")
        assert len(gpus.faults) == 4


def test_calls_of_the_native_library_are_for_its_device_and_stream() -> None:
    with simulated_gpus() as gpus:
        first, second = (Backend.cuda(device) for device in ("cuda:0", "cuda:1"))
        gaussians = random_scene(1, 20)[0]
        job = abi.Noise(scale=0.0)
        arrays = first.arrays(there := gaussians.to("cuda:0"))
        first.call("noise", arrays, job)
        assert gpus.faults == []
        with pytest.raises(Fault, match="points to memory of cuda:0, the call is for cuda:1"):
            second.call("noise", arrays, job)
        with pytest.raises(Fault, match="on stream None"):
            replace(first, stream=0).call("noise", arrays, job)
        with torch.cuda.stream(Stream("cuda:0")):
            first.call("noise", arrays, job)
        del there
        with pytest.raises(Fault, match="memory that is freed"):
            first.call("noise", arrays, job)
        with pytest.raises(Fault, match="points to memory of cpu"):
            first.call("noise", Backend.cpu().arrays(gaussians), job)
        pinned = gaussians.map(torch.Tensor.pin_memory)
        with pytest.raises(Fault, match="means points to pinned memory"):
            first.call("noise", Backend.cpu().arrays(pinned), job)
        assert gpus.calls == {"cuda:0": 6, "cuda:1": 1}
