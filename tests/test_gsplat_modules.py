"""gsplat's module paths: every name has a place, `import gsplat` can be ours, and programs run unchanged."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from splatcli import gsplat
from splatcli.rasterizer.adam import SelectiveAdam
from tests.native.cases import NEEDS_COMPILER

ROOT = Path(__file__).resolve().parents[1]

#: A program as they are written for gsplat: names of several modules, one that it only imports, and a loop.
PROGRAM = """
import sys
import torch
import gsplat.utils
from fused_ssim import fused_ssim
from gsplat import RollingShutterType, rasterization_2dgs, spherical_harmonics
from gsplat.compression import PngCompression
from gsplat.cuda._wrapper import fully_fused_projection, isect_offset_encode, isect_tiles, rasterize_to_pixels
from gsplat.distributed import cli
from gsplat.rendering import rasterization
from gsplat.strategy import DefaultStrategy
from gsplat.strategy.ops import _update_param_with_optimizer, remove
from helper import SIZE


def main(local_rank, world_rank, world_size, args):
    assert (local_rank, world_rank, world_size) == (0, 0, 1)
    torch.manual_seed(0)
    params = torch.nn.ParameterDict({
        "means": torch.rand(20, 3) + torch.tensor([-0.5, -0.5, 2.0]), "quats": torch.rand(20, 4),
        "scales": torch.full((20, 3), -2.5), "opacities": torch.zeros(20), "colors": torch.rand(20, 3),
    })
    optimizers = {name: torch.optim.Adam([value], 1e-2) for name, value in params.items()}
    strategy = DefaultStrategy(refine_start_iter=0, refine_every=2, grow_grad2d=1e-9)
    state = strategy.initialize_state()
    K = torch.tensor([[20.0, 0, SIZE / 2], [0, 20.0, SIZE / 2], [0, 0, 1]])
    for step in range(4):
        image, _, info = rasterization(
            params["means"], params["quats"], params["scales"].exp(), params["opacities"].sigmoid(), params["colors"],
            torch.eye(4)[None], K[None], SIZE, SIZE, packed=False, rolling_shutter=RollingShutterType.GLOBAL,
        )
        strategy.step_pre_backward(params, optimizers, state, step, info)
        (1 - fused_ssim(image.permute(0, 3, 1, 2), torch.ones(1, 3, SIZE, SIZE))).backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        strategy.step_post_backward(params, optimizers, state, step, info)
    print(args, len(params["means"]), sys.argv[1:])


if __name__ == "__main__":
    cli(main, "trained", verbose=True)
"""


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "splatcli.gsplat", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, timeout=120)


@NEEDS_COMPILER
def test_a_program_for_gsplat_runs_unchanged(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there/program.py").write_text(PROGRAM)
    (tmp_path / "there/helper.py").write_text("SIZE = 24\n")
    done = run("there/program.py", "default", "--steps=4", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    words = done.stdout.split(maxsplit=2)
    assert words[0] == "trained"
    assert int(words[1]) > 20
    assert words[2].strip() == "['default', '--steps=4']"


#: A program that takes its tensors to DEVICE in the ways that there are.
ON_DEVICE = """
import threading
import torch
from gsplat import DefaultStrategy, rasterization

device = torch.device(DEVICE)
torch.manual_seed(0)
generator = torch.Generator(device=DEVICE).manual_seed(3)
params = torch.nn.ParameterDict({
    "means": torch.rand(20, 3, generator=generator, device=DEVICE) + torch.tensor([-0.5, -0.5, 2.0]).to(device),
    "quats": torch.rand((20, 4), device=device), "scales": torch.full((20, 3), -2.5).to(DEVICE),
    "opacities": torch.zeros(20).to(device, non_blocking=True), "colors": torch.rand(20, 3).to(device=DEVICE),
}).to(device)
assert params["means"].is_leaf
assert params["means"].device == torch.empty(0, device=DEVICE).device == device
optimizers = {name: torch.optim.Adam([value], 1e-2) for name, value in params.items()}
strategy = DefaultStrategy(refine_start_iter=0, refine_every=2, grow_grad2d=1e-9)
state = strategy.initialize_state()
network = torch.nn.Linear(3, 3, device=DEVICE)
for step in range(4):
    colors = network(params["colors"]).sigmoid()
    K = torch.tensor([[[20.0, 0, 12], [0, 20.0, 12], [0, 0, 1]]], device=DEVICE)
    image, _, info = rasterization(
        params["means"], params["quats"], params["scales"].exp(), params["opacities"].sigmoid(), colors,
        torch.eye(4, device=DEVICE)[None], K, 24, 24, packed=False,
    )
    strategy.step_pre_backward(params, optimizers, state, step, info)
    (image - torch.rand(24, 24, 3).to(DEVICE)).abs().mean().backward()
    for optimizer in optimizers.values():
        optimizer.step()
        optimizer.zero_grad()
    strategy.step_post_backward(params, optimizers, state, step, info)
torch.save({"means": params["means"], "device": DEVICE}, "saved.pt")
loaded = torch.load("saved.pt", map_location=DEVICE)
found = [torch.load("saved.pt", map_location={DEVICE: DEVICE})["means"].detach()]
assert loaded["device"] == DEVICE
thread = threading.Thread(target=lambda: found.append(loaded["means"].detach() + torch.ones(3, device=DEVICE)))
thread.start()
thread.join()
torch.set_default_device(DEVICE)
found.append(torch.arange(3, dtype=torch.float32))
assert found[-1].device == device
print([value.double().sum().item().hex() for value in (*params.values(), *found)])
"""

#: What programs call of torch.cuda, and what has no CPU's name.
OF_CUDA = """
import torch

with torch.cuda.device(0), torch.cuda.stream(torch.cuda.Stream()):
    torch.cuda.set_device("cuda:0")
    torch.cuda.manual_seed_all(0)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for tensor in (torch.ones(3).cuda(), torch.ones(3).to(0), torch.ones(3, device=0), torch.ones(3).pin_memory(),
                   torch.ones(3).type("torch.cuda.FloatTensor"), torch.cuda.FloatTensor([1, 1, 1]),
                   torch.nn.ParameterDict({"a": torch.ones(3)}).cuda()["a"].detach()):
        assert tensor.equal(torch.ones(3)), tensor
    torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
    end.record()
    torch.cuda.synchronize()
assert 0 <= begin.elapsed_time(end) < 1e5
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()
assert torch.cuda.max_memory_allocated() == torch.cuda.current_device() == torch.cuda.device_count() == 0
free, total = torch.cuda.mem_get_info()
assert 0 < free <= total
torch.cuda.set_rng_state(torch.cuda.get_rng_state())
with torch.cuda.nvtx.range("step"):
    torch.cuda.ipc_collect()
assert torch.cuda.memory_summary() == ""
try:  # torch.compile() takes this error for no GPU
    torch.cuda.get_device_properties(0)
except (AssertionError, RuntimeError):
    print("no properties")
assert torch.device("cuda", 0) == torch.device("cpu") != torch.device("meta")
assert isinstance(torch.Generator("cuda"), torch.Generator) and isinstance(torch.default_generator, torch.Generator)
assert not torch.cuda.is_available()
print(torch.cuda.get_device_name())
"""
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="programs that ask for a GPU find one")


@WITHOUT_GPU
@NEEDS_COMPILER
def test_a_program_that_asks_for_a_gpu_does_the_same_on_the_cpu(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(OF_CUDA)
    done = run("program.py", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "no properties\nCPU\n"), done.stderr
    said = 'the program asks torch for a GPU, and there is none: "cuda" is the CPU\n'
    assert done.stderr == said
    results = {}
    for device in ("cuda", "cuda:0", "cpu"):
        (tmp_path / "program.py").write_text(f"DEVICE = {device!r}\n{ON_DEVICE}")
        done = run("program.py", folder=tmp_path)
        assert (done.returncode, done.stderr) == (0, "" if device == "cpu" else said)
        results[device] = done.stdout
    assert results["cuda"] == results["cuda:0"] == results["cpu"]
    assert len(results["cpu"]) > 100


#: A program as they are written for the original program's rasterizer, on a GPU.
ORIGINAL = """
import math
import torch
from diff_gaussian_rasterization import GaussianRasterizationSettings, GaussianRasterizer
from simple_knn._C import distCUDA2
try:
    from diff_gaussian_rasterization import SparseGaussianAdam
except ImportError:
    SparseGaussianAdam = None

torch.manual_seed(0)
torch.cuda.set_device(torch.device("cuda:0"))
points = (torch.rand(60, 3, device="cuda") - 0.5) * torch.tensor([2.0, 2.0, 0.5]).cuda()
points += torch.tensor([0, 0, 3.0]).cuda()
dist2 = torch.clamp_min(distCUDA2(points.float().cuda()), 1e-7)
others = torch.cdist(points, points).square().sort(dim=1).values[:, 1:4].mean(dim=1)
assert torch.allclose(dist2, others, rtol=1e-4)
xyz = torch.nn.Parameter(points.requires_grad_(True))
scaling = torch.nn.Parameter(torch.log(torch.sqrt(dist2))[..., None].repeat(1, 3).requires_grad_(True))
rotation = torch.nn.Parameter(torch.zeros((60, 4), device="cuda").index_fill_(1, torch.tensor(0).cuda(), 1.0))
opacity = torch.nn.Parameter(torch.zeros((60, 1), dtype=torch.float, device="cuda"))
features = torch.nn.Parameter(torch.rand((60, 4, 3), device="cuda") - 0.5)
optimizer = torch.optim.Adam([xyz, scaling, rotation, opacity, features], lr=0.01, eps=1e-15)
projection = torch.zeros(4, 4)
projection[0, 0] = projection[1, 1] = 2.0
projection[2, 2], projection[2, 3], projection[3, 2] = 1.0, -0.01, 1.0
world_view = torch.eye(4).cuda()
settings = GaussianRasterizationSettings(
    image_height=32, image_width=32, tanfovx=0.5, tanfovy=0.5, bg=torch.zeros(3, device="cuda"), scale_modifier=1.0,
    viewmatrix=world_view, projmatrix=world_view @ projection.T.cuda(), sh_degree=1,
    campos=world_view.inverse()[3, :3], prefiltered=False, debug=False,
)
target = torch.linspace(0, 1, 32).expand(3, 32, 32).cuda()
losses = []
for _ in range(30):
    screen = torch.zeros_like(xyz, dtype=xyz.dtype, requires_grad=True, device="cuda") + 0
    screen.retain_grad()
    image, radii = GaussianRasterizer(raster_settings=settings)(
        means3D=xyz, means2D=screen, shs=features, colors_precomp=None, opacities=opacity.sigmoid(),
        scales=scaling.exp(), rotations=torch.nn.functional.normalize(rotation), cov3D_precomp=None,
    )
    loss = (image - target).abs().mean()
    loss.backward()
    assert screen.grad[radii > 0, :2].norm(dim=-1).gt(0).any()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    losses.append(loss.item())
print(losses[-1] < 0.8 * losses[0], SparseGaussianAdam)
"""


@WITHOUT_GPU
@NEEDS_COMPILER
def test_a_program_for_the_original_rasterizer_runs_unchanged(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(ORIGINAL)
    done = run("program.py", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "True None\n"), done.stderr


def test_modules_that_are_installed_stay_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "simple_knn").mkdir()
    (tmp_path / "simple_knn" / "__init__.py").write_text("theirs = True\n")
    (tmp_path / "fused_ssim.py").write_text("theirs = True\n")
    program = (
        "import simple_knn, fused_ssim, diff_gaussian_rasterization\n"
        "print(simple_knn.theirs, fused_ssim.theirs, diff_gaussian_rasterization.GaussianRasterizer.__module__)\n"
        "try:\n    import simple_knn._C\nexcept ImportError:\n    print('no _C')\n"
    )
    (tmp_path / "program.py").write_text(program)
    done = run("program.py", folder=tmp_path)
    assert done.stdout == "True True splatcli.rasterizer.inria_api\nno _C\n", done.stderr


@WITHOUT_GPU
def test_torch_is_as_it_was_after_a_program(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import torch\ntorch.ones(3).cuda()\nraise SystemExit(3)\n")
    code = (
        "import sys, threading, torch, splatcli.gsplat as gsplat\n"
        "before = torch.load, torch.Generator, torch.cuda.synchronize, threading.Thread.run\n"
        "try:\n    gsplat.run_program(['program.py'])\nexcept SystemExit as end:\n    assert end.code == 3\n"
        "with gsplat.cpu_for_cuda():\n    assert torch.ones(2, device='cuda').sum() == 2\n"
        "assert before == (torch.load, torch.Generator, torch.cuda.synchronize, threading.Thread.run)\n"
        "try:\n    torch.ones(3).cuda()\nexcept (AssertionError, RuntimeError):\n    print('no GPU')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, text=True, capture_output=True)
    assert done.stdout == "no GPU\n", done.stderr


def test_a_program_that_asks_for_a_gpu_is_answered(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("raise AssertionError('Torch not compiled with CUDA enabled')")
    done = run("program.py", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        'help: the program asks torch for a GPU, and there is none: write "cpu" in it for "cuda"'
    )


def test_the_runner_has_a_help(capsys: pytest.CaptureFixture[str]) -> None:
    gsplat.run_program(["--help"])
    assert capsys.readouterr().out.startswith("python -m splatcli.gsplat program.py [its arguments]\n")


@pytest.mark.parametrize(
    ("arguments", "text"), [((), "no program is named"), (("absent.py",), "there is no such program")]
)
def test_a_program_that_is_not_there_is_named(arguments: tuple[str, ...], text: str, tmp_path: Path) -> None:
    done = run(*arguments, folder=tmp_path)
    assert done.returncode == 2
    assert text in done.stderr
    assert "help: " in done.stderr
    assert "Traceback" not in done.stderr


def test_every_name_is_found_or_says_what_to_do() -> None:
    assert gsplat._SERVED.keys().isdisjoint(gsplat._UNSERVED)
    for name in gsplat._SERVED:
        assert getattr(gsplat, name) is not None
    for name, remedy in gsplat._UNSERVED.items():
        made = getattr(gsplat, name)
        assert isinstance(made, type)  # may stand in an annotation or after isinstance()
        assert getattr(gsplat, name) is made
        with pytest.raises(NotImplementedError) as caught:
            made(1, width=2)
        assert str(caught.value) == f"gsplat.{name} is not supported; {remedy}"
    assert [gsplat.has_3dgs(), gsplat.has_2dgs(), gsplat.has_3dgut()] == [True, False, False]
    with pytest.raises(AttributeError, match="no attribute 'rasterisation'"):
        _ = gsplat.rasterisation
    assert {"rasterization", "rasterization_2dgs", "cli"} <= set(dir(gsplat))


@pytest.mark.parametrize("path", gsplat._MODULES)
def test_every_module_has_its_names(path: str) -> None:
    module = importlib.import_module(f"splatcli.gsplat.{path}")
    whole: Any = gsplat
    for part in path.split("."):
        whole = getattr(whole, part)
    assert whole is module
    for name in gsplat._MODULES[path]:
        assert getattr(module, name) is getattr(gsplat, name)
        assert name in dir(module)
    with pytest.raises(AttributeError, match="absent"):
        _ = module.absent
    with pytest.raises(ImportError):
        exec(f"from splatcli.gsplat.{path} import absent")


def test_top_names_are_the_same_objects() -> None:
    import splatcli

    for name in ("rasterization", "spherical_harmonics", "DefaultStrategy", "export_splats"):
        assert getattr(gsplat, name) is getattr(splatcli, name)


def test_install_does_not_replace_another_gsplat(tmp_path: Path) -> None:
    (tmp_path / "gsplat.py").write_text("")
    program = "import gsplat, splatcli.gsplat\nsplatcli.gsplat.install()"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
        capture_output=True, timeout=120,
    )  # fmt: skip
    assert "another gsplat is imported already" in done.stderr


def test_only_visible_rows_take_a_step() -> None:
    """Adam without bias correction, in double precision by hand."""
    param = torch.arange(12.0, dtype=torch.float64).view(4, 3).requires_grad_()
    before, gradient = param.detach().clone(), torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)
    optimizer = SelectiveAdam([{"params": [param], "lr": 0.1}], eps=1e-8, betas=(0.9, 0.99))
    visible = torch.tensor([True, False, True, True])
    mean, square = torch.zeros_like(before), torch.zeros_like(before)
    expected = before.clone()
    for mask in (visible, visible & (torch.arange(4) != 2)):
        param.grad = gradient.clone()
        optimizer.step(mask)
        mean[mask] = 0.9 * mean[mask] + 0.1 * gradient[mask]
        square[mask] = 0.99 * square[mask] + 0.01 * gradient[mask] ** 2
        expected[mask] -= 0.1 * mean[mask] / (square[mask].sqrt() + 1e-8)
        torch.testing.assert_close(param.detach(), expected)
    assert torch.equal(param.detach()[1], before[1])
    torch.testing.assert_close(optimizer.state[param]["exp_avg"], mean)
    assert next(iter(inspect.signature(SelectiveAdam).parameters)) == "params"
    two = SelectiveAdam([{"params": [param, before.clone().requires_grad_()]}])
    with pytest.raises(ValueError, match="has 2 parameters, not one"):
        two.step(visible)


#: What a typed program takes from gsplat's modules; each line of reveal_type() is followed by a part of its answer.
TYPED = """
import torch

from splatcli.gsplat.optimizers import SelectiveAdam
from splatcli.gsplat.rendering import rasterization
from splatcli.gsplat.strategy import DefaultStrategy, MCMCStrategy
from splatcli.gsplat.strategy.ops import _update_param_with_optimizer, remove
from splatcli.gsplat.utils import depth_to_points


def loop(splats: torch.nn.ParameterDict, optimizers: dict[str, torch.optim.Optimizer]) -> None:
    strategy = DefaultStrategy(verbose=False)
    strategy.check_sanity(splats, optimizers)
    state = strategy.initialize_state(scene_scale=1.0)
    strategy.step_post_backward(splats, optimizers, state, 0, {}, packed=False)
    remove(splats, optimizers, state, torch.zeros(1))
    reveal_type(MCMCStrategy(cap_max=10).cap_max)  # int
    reveal_type(depth_to_points)  # depths: torch._tensor.Tensor
    reveal_type(rasterization)  # means: torch._tensor.Tensor
    reveal_type(SelectiveAdam)  # -> splatcli.rasterizer.adam.SelectiveAdam
"""


def test_modules_have_the_types_of_what_they_serve(tmp_path: Path) -> None:
    (tmp_path / "typed.py").write_text(TYPED)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "typed.py"]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout
    revealed = [line for line in done.stdout.splitlines() if "Revealed type" in line]
    wanted = [line.partition("  # ")[2] for line in TYPED.splitlines() if "reveal_type" in line]
    assert len(revealed) == len(wanted)
    for line, part in zip(revealed, wanted, strict=True):
        assert part in line


@pytest.mark.parametrize("path", gsplat._MODULES)
def test_each_module_has_a_stub_of_its_names(path: str) -> None:
    place = ROOT / "splatcli" / "gsplat" / path.replace(".", "/")
    stub = place / "__init__.pyi" if place.is_dir() else place.with_suffix(".pyi")
    names: list[str] = []
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.Assign):
            names = ast.literal_eval(node.value)
    assert sorted(names) == sorted(gsplat._MODULES[path])
