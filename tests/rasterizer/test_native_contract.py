"""What the rasterizer promises beside its numbers: the same bits always, no half precision, no surprise memory."""

from __future__ import annotations

import hashlib
import math
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from splatcli.errors import ResourceError
from splatcli.gaussians import GROUPS, Gaussians
from splatcli.native.backend import Backend
from splatcli.rasterizer import memory_budget
from splatcli.rasterizer.adam import AdamState
from splatcli.rasterizer.context import RasterContext, view_of
from splatcli.rasterizer.memory_budget import Arena
from splatcli.rasterizer.rendering import render
from splatcli.rasterizer.step_inputs import DensifyStats, Regularisation, StepInputs
from splatcli.rasterizer.train_step import NativeEngine
from splatcli.scene.camera import Camera
from tests.native.cases import (
    ISAS,
    NEEDS_COMPILER,
    Outcome,
    Weights,
    bits,
    float32,
    float64,
    in_dtype,
    matmul_precision,
    native_loss,
    native_outcome,
)
from tests.rasterizer.fixed_budget import FixedBudget
from tests.rasterizer.scenes import leaves, random_camera, random_gaussians, random_image, random_scene

pytestmark = NEEDS_COMPILER
BUILDS = [*ISAS, "float64"]
HALVES = [torch.bfloat16, torch.float16]


def backend_of(build: str, threads: int = 1) -> Backend:
    return float64(threads) if build == "float64" else float32(build, threads)


def outcome_bits(outcome: Outcome) -> dict[str, bytes]:
    tensors = {**{f"{name} itself": t for name, t in outcome.images.items()}, **outcome.gradients}
    return {name: bits(tensor)[0] for name, tensor in tensors.items()}


def training_hash(backend: Backend, steps: int = 20) -> str:
    """A digest of all losses, parameters, moments and statistics of a short training over five views."""
    gaussians = random_gaussians(3, 700, sh_degree=2).map(lambda t: t.to(backend.dtype))
    adam = AdamState.zeros_like(gaussians)
    stats = DensifyStats(*(torch.zeros(700, dtype=backend.dtype) for _ in range(2)))
    engine = NativeEngine(backend)
    digest = hashlib.sha256()
    for i in range(steps):
        # Views of different sizes share the engine's memory.
        width, height = [(70, 50), (33, 64), (70, 50), (17, 16), (50, 41)][i % 5]
        loss = engine.step(
            gaussians,
            adam,
            StepInputs(
                random_camera(i % 5, width, height),
                (random_image(i % 5, width, height) * 255).to(torch.uint8),
                lrs=dict.fromkeys(GROUPS, 1e-3),
                sh_degree=min(2, i // 7),
                background=torch.rand(3, generator=torch.Generator().manual_seed(i), dtype=backend.dtype),
                ssim_lambda=0.2,
                antialiased=i % 2 == 1,
                stats=stats,
                regularisation=Regularisation(opacity_reg=0.01, scale_reg=0.01, noise=0.5, seed=i),
            ),
        )
        assert math.isfinite(loss)
        digest.update(repr(loss).encode())
    for bundle in (gaussians, adam.exp_avg, adam.exp_avg_sq):
        for _, tensor in bundle.items():
            digest.update(bits(tensor)[0])
    digest.update(b"".join(bits(stats.grad2d, stats.count)))
    return digest.hexdigest()


# --- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", BUILDS)
def test_any_number_of_threads_renders_the_same_bits(build: str) -> None:
    gaussians, camera = random_scene(1, 800, width=90, height=70, sh_degree=2)
    gaussians = gaussians.map(lambda t: t.to(backend_of(build).dtype))
    weights = Weights.random(1, camera)
    alone = outcome_bits(native_outcome(backend_of(build, 1), gaussians, camera, weights))
    for threads in (2, 3, 3):
        assert outcome_bits(native_outcome(backend_of(build, threads), gaussians, camera, weights)) == alone


@pytest.mark.parametrize("build", BUILDS)
def test_any_number_of_threads_trains_to_the_same_bits(build: str) -> None:
    assert len({training_hash(backend_of(build, threads)) for threads in (1, 2, 3)}) == 1


def test_threads_of_python_may_render_at_the_same_time() -> None:
    program = """
        import threading, torch
        from tests.native.cases import bits, float32
        from splatcli.rasterizer import render
        from tests.rasterizer.scenes import random_scene

        scenes = [random_scene(seed, 400, width=60, height=50) for seed in range(4)]
        expected = [bits(render(*scene, backend=float32()).image) for scene in scenes]
        failures = []

        def work(index):
            for _ in range(20):
                if bits(render(*scenes[index], backend=float32(threads=2)).image) != expected[index]:
                    failures.append(index)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        print("failures", failures)
    """
    assert run_program(program) == "failures []\n"


def test_gaussians_that_are_not_seen_do_not_change_a_bit() -> None:
    gaussians, camera = random_scene(2, 300, width=60, height=40)
    seen = render(gaussians, camera, backend=float32())
    hidden = random_gaussians(9, 300)
    hidden.means[:] = torch.from_numpy(camera.center - 3.0 * camera.viewmat[2, :3]).float()
    mixed = Gaussians(
        **{name: torch.stack([getattr(hidden, name), getattr(gaussians, name)], 1).flatten(0, 1) for name in GROUPS}
    )
    both = render(mixed, camera, backend=float32())
    assert bits(seen.image, seen.alpha, seen.depth) == bits(both.image, both.alpha, both.depth)


# --- no half precision -----------------------------------------------------------------------------------------------


def far_scene() -> tuple[Gaussians, Camera]:
    """Coordinates far from the origin, where half a digit lost in a matrix product moves everything by pixels."""
    gaussians, camera = random_scene(5, 200, width=60, height=45)
    viewmat = camera.viewmat.copy()
    offset = torch.tensor([100.0, -40.0, 250.0], dtype=torch.float64)
    gaussians.means += offset.float()
    viewmat[:3, 3] -= viewmat[:3, :3] @ offset.numpy()
    return gaussians, Camera("far", 60, 45, camera.fx, camera.fy, camera.cx, camera.cy, viewmat)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("build", BUILDS)
def test_autocast_changes_no_bit_of_render(build: str, dtype: torch.dtype) -> None:
    backend = backend_of(build)
    gaussians, camera = far_scene()
    gaussians = gaussians.map(lambda t: t.to(backend.dtype))
    weights = Weights.random(3, camera)
    plain = native_outcome(backend, gaussians, camera, weights)
    assert plain.images["alpha"].max() > 0.5, "the scene has to be in view"
    with torch.autocast("cpu", dtype=dtype):
        inside = native_outcome(backend, gaussians, camera, weights)
    assert outcome_bits(inside) == outcome_bits(plain)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("forward", "backward"), [(True, False), (False, True)])
def test_autocast_around_one_pass_alone_changes_no_bit(forward: bool, backward: bool, dtype: torch.dtype) -> None:
    gaussians, camera = far_scene()
    weights = Weights.random(3, camera)
    results = []
    for enabled in (False, True):
        parameters = leaves(gaussians)
        viewmat = torch.from_numpy(camera.viewmat).float().requires_grad_()
        with torch.autocast("cpu", dtype=dtype, enabled=enabled and forward):
            out = render(parameters, camera, viewmat=viewmat, backend=float32())
        assert out.image.dtype == out.alpha.dtype == out.depth.dtype == torch.float32
        with torch.autocast("cpu", dtype=dtype, enabled=enabled and backward):
            weights.backward(out.image, out.alpha, out.depth)
        grads = [t.grad for t in (viewmat, *(leaf for _, leaf in parameters.items()))]
        results.append(bits(out.image, out.alpha, out.depth, *grads))  # type: ignore[arg-type]
    assert results[0] == results[1]


@pytest.mark.parametrize("dtype", HALVES)
def test_autocast_changes_no_bit_of_the_loss(dtype: torch.dtype) -> None:
    engine = NativeEngine(float32())
    image, target = random_image(1, 40, 30), (random_image(2, 40, 30) * 255).to(torch.uint8)
    v_plain, v_inside = torch.empty_like(image), torch.empty_like(image)
    plain = native_loss(engine, image, target, v_plain, 0.2)
    with torch.autocast("cpu", dtype=dtype):
        assert native_loss(engine, image, target, v_inside, 0.2) == plain
    assert torch.equal(v_plain, v_inside)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("build", ["portable", ISAS[-1]])
def test_autocast_changes_no_bit_of_training(build: str, dtype: torch.dtype) -> None:
    plain = training_hash(backend_of(build), 6)
    with torch.autocast("cpu", dtype=dtype):
        assert training_hash(backend_of(build), 6) == plain


@pytest.mark.parametrize("precision", ["medium", "high"])
def test_matmul_precision_changes_no_bit(precision: str) -> None:
    gaussians, camera = far_scene()
    weights = Weights.random(3, camera)
    plain = outcome_bits(native_outcome(float32(), gaussians, camera, weights)), training_hash(float32(), 3)
    with matmul_precision(precision):
        again = outcome_bits(native_outcome(float32(), gaussians, camera, weights)), training_hash(float32(), 3)
    assert again == plain


@pytest.mark.parametrize("dtype", HALVES)
def test_half_inputs_are_computed_in_float32_with_gradients_of_their_own_dtype(dtype: torch.dtype) -> None:
    gaussians, camera = random_scene(6, 80)
    halves = gaussians.map(lambda t: t.to(dtype))
    background = torch.tensor([0.25, 0.5, 0.75], dtype=dtype)
    viewmat = torch.from_numpy(camera.viewmat).to(dtype)
    weights = Weights.random(4, camera)
    grads = []
    for own in (dtype, torch.float32):
        parameters = leaves(in_dtype(halves, own))
        pose, behind = (t.detach().clone().to(own).requires_grad_() for t in (viewmat, background))
        out = render(parameters, camera, background=behind, viewmat=pose)
        assert out.image.dtype == out.alpha.dtype == out.depth.dtype == torch.float32
        weights.backward(out.image, out.alpha, out.depth)
        tensors = {**dict(parameters.items()), "background": behind, "viewmat": pose}
        assert all(t.grad is not None and t.grad.dtype == own for t in tensors.values())
        grads.append({name: t.grad for name, t in tensors.items()} | {"image": out.image})
    for name, single in grads[1].items():
        assert single is not None
        half = grads[0][name]
        assert half is not None
        assert torch.equal(half, single.to(half.dtype)), name


# --- layouts and places ----------------------------------------------------------------------------------------------


def scattered(tensor: Tensor) -> Tensor:
    """The same numbers with strides in the opposite order and gaps between them."""
    wide = torch.full((*tensor.shape[::-1], 2), math.nan, dtype=tensor.dtype)
    view = wide[..., 0].permute(*range(tensor.dim() - 1, -1, -1))
    view.copy_(tensor)
    return view


def test_inputs_need_not_be_contiguous() -> None:
    gaussians, camera = random_scene(7, 60)
    weights = Weights.random(5, camera)
    plain = native_outcome(float32(), gaussians, camera, weights)
    apart = gaussians.map(lambda t: scattered(t).requires_grad_())
    assert not any(tensor.is_contiguous() for _, tensor in apart.items())
    background = scattered(torch.tensor([0.3, 0.6, 0.1])).requires_grad_()
    viewmat = scattered(torch.from_numpy(camera.viewmat).float()).requires_grad_()
    out = render(apart, camera, background=background, viewmat=viewmat, backend=float32())
    assert torch.equal(out.image, plain.images["image"])
    # Gradients of the images arrive in any layout too.
    torch.autograd.backward(
        [out.image, out.alpha, out.depth],
        [scattered(w.float()) for w in (weights.image, weights.alpha, weights.depth)],
    )
    for name, tensor in {**dict(apart.items()), "background": background, "viewmat": viewmat}.items():
        assert tensor.grad is not None
        assert torch.equal(tensor.grad, plain.gradients[name]), name


def test_an_expanded_gradient_is_as_good_as_any() -> None:
    gaussians, camera = random_scene(7, 30)
    results = []
    for v_image in (torch.ones(1, 1, 1).expand(29, 37, 3), torch.ones(29, 37, 3)):
        parameters = leaves(gaussians)
        torch.autograd.backward(render(parameters, camera, backend=float32()).image, v_image)
        results.append(bits(*(leaf.grad for _, leaf in parameters.items() if leaf.grad is not None)))
    assert results[0] == results[1]


def test_tensors_on_another_device_are_a_type_error() -> None:
    gaussians, camera = random_scene(8, 10)
    with pytest.raises(TypeError, match="meta"):
        render(gaussians.to("meta"), camera, backend=float32())
    with pytest.raises(TypeError, match="meta"):
        render(gaussians, camera, background=torch.zeros(3, device="meta"), backend=float32())
    with FakeTensorMode(allow_non_fake_inputs=True):
        elsewhere = Gaussians(
            **{name: torch.empty(tensor.shape, device="cuda:1") for name, tensor in gaussians.items()}
        )
    assert elsewhere.device == torch.device("cuda:1")
    with pytest.raises(TypeError, match="cuda:1"):
        float32().arrays(elsewhere)
    target = torch.zeros(camera.height, camera.width, 3, dtype=torch.uint8)
    engine = NativeEngine(float32())
    cases: list[dict[str, Any]] = [
        {"gaussians": gaussians.to("meta")},
        {"target": target.to("meta")},
        {"background": torch.zeros(3, device="meta")},
        {"adam": AdamState.zeros_like(gaussians.to("meta"))},
    ]
    for changes in cases:
        with pytest.raises(TypeError, match="meta"):
            one_step(engine, **{"gaussians": gaussians, "camera": camera, **changes})


def one_step(engine: NativeEngine, gaussians: Gaussians, camera: Camera, **changes: Any) -> float:
    plain: dict[str, Any] = {
        "camera": camera,
        "target": torch.zeros(camera.height, camera.width, 3, dtype=torch.uint8),
        "lrs": dict.fromkeys(GROUPS, 1e-3),
        "sh_degree": 0,
        "background": torch.zeros(3),
        "ssim_lambda": 0.2,
        "antialiased": False,
        "stats": None,
    }
    adam = changes.pop("adam", AdamState.zeros_like(gaussians))
    return engine.step(gaussians, adam, StepInputs(**{**plain, **changes}))


def test_wrong_arguments_are_refused() -> None:
    gaussians, camera = random_scene(8, 10, sh_degree=1)
    for degree in (2, -1):
        with pytest.raises(ValueError, match=f"sh_degree is {degree}"):
            render(gaussians, camera, sh_degree=degree)
    with pytest.raises(ValueError, match="shape"):
        render(gaussians, camera, background=torch.zeros(4))
    for shape in ((3, 4), (4, 3), (2, 8), (16,)):
        with pytest.raises(ValueError, match="shape"):
            render(gaussians, camera, viewmat=torch.zeros(*shape))


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes asked of the arena, by the buffer's name."""
    asked: dict[str, int] = {}
    plain = Arena.take

    def take(self: Arena, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        asked[name] = max(asked.get(name, 0), numel * torch.empty(0, dtype=dtype).element_size())
        return plain(self, name, numel, dtype)

    monkeypatch.setattr(Arena, "take", take)
    return asked


def test_scales_activated_twice_are_refused_before_memory_is_taken(requested: dict[str, int]) -> None:
    gaussians, _ = random_scene(9, 5000, sh_degree=0, scale=0.05)
    camera = random_camera(9, 1600, 1063)
    engine = NativeEngine(float32(), budget=FixedBudget(1 << 30))
    doubled = gaussians.detach_clone()
    doubled.log_scales = doubled.log_scales.exp()
    with pytest.raises(ResourceError) as caught:
        one_step(engine, doubled, camera)
    message = str(caught.value)
    assert "1600x1063" in message
    assert "visible Gaussians" in message
    assert "1.0 GiB allowed" in message
    assert "logarithms" in message, "the likely cause is named"
    assert caught.value.exit_code == 4
    assert sum(requested.values()) < 1 << 20, f"only what is per Gaussian was taken: {requested}"
    # The same engine goes on with a scene that fits.
    small = random_camera(9, 64, 48)
    assert math.isfinite(one_step(engine, gaussians, small))


def test_the_budget_counts_all_that_a_pair_takes(requested: dict[str, int]) -> None:
    gaussians, camera = random_scene(10, 300, width=200, height=150, scale=0.3)
    frames = NativeEngine(float32())
    one_step(frames, gaussians, camera)
    per_pair = ("isect_gaussians", "isect_grad_rows", "isect_masks", "isect_grads")
    taken = sum(requested[name] for name in per_pair)
    # Bands begin one byte below what is wanted, and the figure is not less than what is then taken.
    low, high = 0, 1 << 30
    while high - low > 1:
        middle = (low + high) // 2
        budget = FixedBudget(middle)
        try:
            one_step(NativeEngine(float32(), budget=budget), gaussians.detach_clone(), camera)
        except ResourceError:
            budget.reported = True
        low, high = (middle, high) if budget.reported else (low, middle)
    assert taken <= high <= 2.0 * (taken + requested["workspace"])


def test_render_keeps_the_budget_of_the_machine(monkeypatch: pytest.MonkeyPatch, requested: dict[str, int]) -> None:
    gaussians, camera = random_scene(10, 300, width=200, height=150, scale=0.3)
    monkeypatch.setattr(memory_budget, "free_memory", lambda device: 20_000)
    with pytest.raises(ResourceError, match="visible Gaussians would cover"):
        render(gaussians, camera, backend=float32())
    assert "isect_gaussians" not in requested


def test_the_bound_of_pairs_is_never_below_their_number() -> None:
    for seed in range(40):
        gaussians, camera = random_scene(seed, 120, width=150, height=110, scale=0.02 * (1 + seed % 12))
        context, arrays = RasterContext(float32()), float32().arrays(gaussians)
        view = view_of(camera, sh_degree=0, antialiased=False, with_depth=False)
        context.project(view, gaussians)
        context.bin(view, arrays)
        assert 0 < context.native.isects <= context.native.max_isects
        assert context.native.visible <= 120


# --- processes -------------------------------------------------------------------------------------------------------


def run_program(text: str) -> str:
    """stdout of a Python program in a process of its own; it has to end well."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(text)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_forked_child_renders_and_trains_as_its_parent_does() -> None:
    program = """
        import os, sys
        import torch
        from splatcli.rasterizer import render
        from tests.native.cases import bits, float32
        from tests.rasterizer.scenes import random_scene
        from tests.rasterizer.test_native_contract import training_hash

        def work():
            scene = random_scene(1, 500, width=60, height=50)
            return bits(render(*scene, backend=float32(threads=3)).image), training_hash(float32(threads=3), 5)

        expected = work()
        for generation in range(2):
            sys.stdout.flush()
            child = os.fork()
            if child == 0:
                # The child's child is a case of its own: it forks from a process that has forked.
                same = work() == expected
                if generation == 0:
                    grandchild = os.fork()
                    if grandchild == 0:
                        os._exit(0 if work() == expected else 1)
                    same = same and os.waitpid(grandchild, 0)[1] == 0
                os._exit(0 if same else 1)
            print("child", os.waitpid(child, 0)[1])
        print("parent", work() == expected)
    """
    assert run_program(program) == "child 0\nchild 0\nparent True\n"
