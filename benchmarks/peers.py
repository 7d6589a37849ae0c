"""A training step on the CPU beside the same step of other programs: one model, one view, one run, one thread.

    python -m benchmarks.peers CHECKPOINT [-r F] [--gsplat PATH] [--opensplat PATH [--opensplat-resume]] [--rounds 5]
                               [--out FILE]

CHECKPOINT is a trained run's (its scene must still be where it was); -r takes the images at another size. The first
training view is stepped again and again. A step is projection, colours, blending, L1 + SSIM, the gradients of all
parameters, and Adam. Times are CPU times of the process with one thread, the least of all rounds, in turn.

- splat: the native step of this project.
- splat, plain torch: the reference renderer of this project by autograd, on the same inputs (once; it is slow).
- gsplat, torch reference: the parts of gsplat that are written in torch (gsplat/cuda/_torch_impl.py: projection,
  spherical harmonics, accumulate), with torch's L1 + SSIM and fused Adam. --gsplat is the folder that holds the
  package gsplat; without it an installed one is used, or none. gsplat leaves the list of pairs of a Gaussian and a
  pixel to CUDA, and transmittances to nerfacc, which needs CUDA too. The list is made here and is not timed; the two
  functions of nerfacc are a few lines of torch below, and are timed. Its image must agree with ours.
- OpenSplat, --cpu: a whole run of its program, minus its start: CPU time from the first to the last step that its log
  reports, by the steps between, the least of --opensplat-rounds. --opensplat is the binary; it is run as
  "opensplat SCENE -n STEPS --cpu -d F --num-downscales 0 -o FILE", with one thread, from the scene's points. Ours is
  timed from the same points too, its training views in turn, before each of its runs. --opensplat-resume times both
  from the checkpoint's Gaussians as well: it resumes from a PLY of them, at the step from which it uses their SH
  degree. Versions that centre and scale a model by default need --opensplat-options=--keep-crs.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.step import torch_loss
from splatcli.bench import describe_machine
from splatcli.checkpoint.file import load_checkpoint
from splatcli.checkpoint.state import Checkpoint
from splatcli.formats.ply import property_names, write_ply
from splatcli.gaussians import Gaussians
from splatcli.native import abi
from splatcli.native.backend import Backend, chosen_isa
from splatcli.rasterizer import AdamState, NativeEngine
from splatcli.rasterizer.context import RasterContext, view_of
from splatcli.rasterizer.reference_engine import ReferenceEngine
from splatcli.rasterizer.rendering import render
from splatcli.rasterizer.step_inputs import StepInputs
from splatcli.scene.camera import Camera
from splatcli.scene.read import read_scene
from splatcli.scene.scene import Scene
from splatcli.train.init import gaussians_from_points
from splatcli.train.schedule import learning_rates

#: A pair counts from this alpha on, and while more light than this is left (docs/math.md 5.1).
_LOG2_ALPHA_MIN, _LIGHT_MIN = -7.994353436858858, 1e-4

#: The largest difference of a peer's image from ours for which both have done the same work.
SAME_IMAGE = 2e-3

OURS, REFERENCE = "splat", "splat, plain torch"
GSPLAT, OPENSPLAT = "gsplat, torch reference", "OpenSplat, --cpu"
OURS_FROM_POINTS, OURS_IN_TURN = "splat, from the scene's points", "splat, training views in turn"
OPENSPLAT_RESUMED = "OpenSplat, --cpu, the same model"


def cpu_time(step: Callable[[], object], rounds: int) -> float:
    """Return the CPU time in ms of the fastest of ``rounds`` calls, after one that does not count if there are more."""
    times = []
    for _ in range(rounds + (rounds > 1)):
        started = time.process_time()
        step()
        times.append(1e3 * (time.process_time() - started))
    return min(times[1:] or times)


# gsplat


def load_gsplat(folder: Path | None) -> types.ModuleType | None:
    """Return gsplat's torch implementations, which need no CUDA, or None where there is no gsplat.

    Raises SystemExit when ``folder`` is given and has none.
    """
    if folder is None:
        found = importlib.util.find_spec("gsplat")
        if found is None or not found.submodule_search_locations:
            return None
        package = Path(found.submodule_search_locations[0])
    else:
        package = folder / "gsplat"
    file = package / "cuda" / "_torch_impl.py"
    if not file.is_file():
        raise SystemExit(f"{file} does not exist: give the folder that holds the package gsplat with --gsplat")
    spec = importlib.util.spec_from_file_location("gsplat_torch_impl", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def render_weight_from_alpha(alphas: Tensor, ray_indices: Tensor, n_rays: int) -> tuple[Tensor, Tensor]:
    """Return (weights, transmittances) [M] of pairs that lie ray by ray, front to back, as nerfacc does."""
    logs = torch.log1p(-alphas).double()
    before = logs.cumsum(0) - logs
    first = torch.ones_like(ray_indices, dtype=torch.bool)
    first[1:] = ray_indices[1:] != ray_indices[:-1]
    run = first.cumsum(0) - 1
    light = (before - before[first][run]).exp().to(alphas.dtype)
    return alphas * light, light


def accumulate_along_rays(weights: Tensor, values: Tensor | None, ray_indices: Tensor, n_rays: int) -> Tensor:
    """Return [n_rays, D] the weighted sums of values [M, D], or [n_rays, 1] those of the weights, as nerfacc does."""
    source = weights[:, None] if values is None else weights[:, None] * values
    return source.new_zeros(n_rays, source.shape[1]).index_add(0, ray_indices, source)


@torch.no_grad()
def pairs_of(backend: Backend, gaussians: Gaussians, camera: Camera, sh_degree: int) -> tuple[Tensor, Tensor]:
    """Return (Gaussians [M], pixels [M]) of all pairs that contribute, pixel by pixel, front to back."""
    view = view_of(camera, sh_degree=sh_degree, antialiased=False, with_depth=False)
    context = RasterContext(backend)
    context.bin(view, context.project(view, gaussians), with_grads=False)
    take = context.arena.take
    across, down = -(-camera.width // abi.TILE), -(-camera.height // abi.TILE)
    starts = take("tile_starts", 0, torch.int64)[: across * down + 1].tolist()
    listed, ids = take("isect_gaussians", 0, torch.int32), take("ids", 0, torch.int32)
    projected = take("projected", 0, torch.float32)
    projected = projected[: len(projected) // abi.PROJECTED * abi.PROJECTED].view(-1, abi.PROJECTED)
    side = torch.arange(abi.TILE)
    x, y = side.repeat(abi.TILE), side.repeat_interleave(abi.TILE)
    found = []
    for tile in range(across * down):
        slots = listed[starts[tile] : starts[tile + 1]].long()
        rows = projected[slots]
        px, py = x + tile % across * abi.TILE, y + tile // across * abi.TILE
        dx, dy = px + 0.5 - rows[:, 0:1], py + 0.5 - rows[:, 1:2]
        exponent = rows[:, 5:6] - dx * (dx * rows[:, 2:3] + dy * rows[:, 3:4]) - dy * dy * rows[:, 4:5]
        alpha = torch.where(exponent >= _LOG2_ALPHA_MIN, torch.exp2(exponent).clamp(max=0.999), 0.0)
        inside = (px < camera.width) & (py < camera.height)
        live = (alpha > 0) & (torch.cumprod(1.0 - alpha, 0) > _LIGHT_MIN) & inside
        pixel, place = live.T.nonzero(as_tuple=True)
        found.append((ids[slots[place]].long(), py[pixel] * camera.width + px[pixel]))
    which, pixels = (torch.cat(parts) for parts in zip(*found, strict=True))
    order = pixels.argsort(stable=True)
    return which[order], pixels[order]


class GsplatStep:
    """A training step of gsplat's functions in torch."""

    def __init__(self, module: types.ModuleType, gaussians: Gaussians, inputs: StepInputs, backend: Backend) -> None:
        self._impl, self._inputs = module, inputs
        self._leaves = gaussians.map(lambda tensor: tensor.detach().clone().requires_grad_(True))
        self._adam = torch.optim.Adam(
            [{"params": [leaf], "lr": inputs.lrs[name]} for name, leaf in self._leaves.items()], eps=1e-15, fused=True
        )
        self._target = (inputs.target.float() / 255.0).permute(2, 0, 1)[None].contiguous()
        self.pairs = pairs_of(backend, gaussians, inputs.camera, inputs.sh_degree)

    def render(self) -> Tensor:
        """Return the image [H, W, 3] on black."""
        impl, g, camera = self._impl, self._leaves, self._inputs.camera
        viewmat = torch.from_numpy(camera.viewmat).float()
        intrinsics = torch.tensor([[camera.fx, 0.0, camera.cx], [0.0, camera.fy, camera.cy], [0.0, 0.0, 1.0]])
        covars, _ = impl._quat_scale_to_covar_preci(g.quats, g.log_scales.exp(), True, False)
        _, means2d, _, conics, _ = impl._fully_fused_projection(
            g.means, covars, viewmat[None], intrinsics[None], camera.width, camera.height
        )
        directions = g.means - torch.from_numpy(camera.center).float()
        coefficients = torch.cat([g.sh0[:, None], g.shN], dim=1)
        colours = impl._spherical_harmonics(self._inputs.sh_degree, directions, coefficients)
        which, pixels = self.pairs
        image, _ = impl.accumulate(
            means2d,
            conics,
            g.logit_opacities.sigmoid()[None],
            (colours + 0.5).clamp(min=0.0)[None],
            which,
            pixels,
            torch.zeros_like(which),
            camera.width,
            camera.height,
        )
        return image[0]  # type: ignore[no-any-return]

    def step(self) -> None:
        self._adam.zero_grad(set_to_none=True)
        image = self.render().permute(2, 0, 1)[None]
        torch_loss(image, self._target, self._inputs.ssim_lambda).backward()  # type: ignore[no-untyped-call]
        self._adam.step()


def stand_in_for_nerfacc() -> types.ModuleType:
    """Return the two functions under the name by which gsplat imports them."""
    module = types.ModuleType("nerfacc")
    module.render_weight_from_alpha = render_weight_from_alpha  # type: ignore[attr-defined]
    module.accumulate_along_rays = accumulate_along_rays  # type: ignore[attr-defined]
    return module


# OpenSplat

_STEP = re.compile(r"Step (\d+):")


#: OpenSplat raises the SH degree by one after each of these many steps.
_STEPS_A_DEGREE = 1000


def opensplat_model(gaussians: Gaussians) -> bytes:
    """Return the PLY from which OpenSplat resumes: its own header, whose step is the first of the full SH degree."""
    buffer = io.BytesIO()
    write_ply(gaussians, buffer)
    header = [
        "ply",
        "format binary_little_endian 1.0",
        f"comment Generated by opensplat at iteration {_STEPS_A_DEGREE * gaussians.sh_degree}",
        f"element vertex {len(gaussians)}",
        *(f"property float {name}" for name in property_names(gaussians.shN.shape[1])),
        "end_header\n",
    ]
    return "\n".join(header).encode("ascii") + buffer.getvalue().partition(b"end_header\n")[2]


def opensplat_step(
    binary: Path,
    scene: Path,
    steps: int,
    factor: float,
    words: Sequence[str] = (),
    model: Gaussians | None = None,
) -> dict[str, float]:
    """Run OpenSplat on the CPU with one thread; return {"step_ms": CPU time of a step, "steps": those it is of}.

    words: further options for it. model: it resumes from these Gaussians instead of starting from the scene's points.
    Raises SystemExit when it cannot be run, fails, or reports fewer than two steps.
    """
    with tempfile.TemporaryDirectory() as folder:
        first = 0 if model is None else _STEPS_A_DEGREE * model.sh_degree
        command = [str(binary.resolve()), str(scene), "-n", str(first + steps), "--cpu", "-d", f"{factor:g}"]
        command += ["--num-downscales", "0", "-o", str(Path(folder) / "splat.ply"), *words]
        if model is not None:
            start = Path(folder) / "model.ply"
            start.write_bytes(opensplat_model(model))
            command += ["--resume", str(start)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        try:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1, env=environment
            )
        except OSError as e:
            raise SystemExit(
                f"{binary} cannot be run: {e.strerror}; give OpenSplat's binary with --opensplat"
            ) from None
        reported, last = [], ""
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                last = line.strip() or last
                if found := _STEP.search(line):
                    reported.append((int(found[1]), _cpu_seconds(process.pid)))
        code = process.returncode
    if code != 0:
        raise SystemExit(f"{' '.join(command)} ended with {code}: {last}")
    if len(reported) < 2 or reported[-1][0] <= reported[0][0]:
        raise SystemExit(f"{' '.join(command)} reported fewer than two steps: raise --opensplat-steps")
    (started, began), (final, ended) = reported[0], reported[-1]
    return {"step_ms": round(1e3 * (ended - began) / (final - started), 1), "steps": final - started}


def _cpu_seconds(pid: int) -> float:
    """CPU time of a running process and of its threads; Linux."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ours_in_turn(
    backend: Backend,
    scene: Scene,
    views: Sequence[int],
    gaussians: Gaussians,
    steps: int,
    rates: dict[str, float],
    sh_degree: int,
) -> dict[str, float]:
    """Return {"step_ms": CPU time of our step on copies of ``gaussians``, ``views`` in turn}."""
    copy = gaussians.detach_clone()
    adam, engine = AdamState.zeros_like(copy), NativeEngine(backend)
    inputs = [
        _inputs(scene.cameras[i], torch.from_numpy(scene.images.load(i)), rates, sh_degree) for i in views[:steps]
    ]
    engine.step(copy, adam, inputs[0])
    started = time.process_time()
    for k in range(steps):
        engine.step(copy, adam, inputs[k % len(inputs)])
    seconds = time.process_time() - started
    return {"step_ms": round(1e3 * seconds / steps, 2), "gaussians": len(copy), "steps": steps}


def from_points(scene: Scene, checkpoint: Checkpoint) -> Gaussians:
    """Return Gaussians at the scene's points. Raises SystemExit when it has none."""
    if scene.points is None:
        raise SystemExit("the scene has no points, from which OpenSplat could start")
    colours = (scene.points.rgb / 255.0).astype(np.float32)
    return gaussians_from_points(scene.points.xyz, colours, checkpoint.config)


def _inputs(camera: Camera, target: Tensor, rates: dict[str, float], sh_degree: int) -> StepInputs:
    return StepInputs(
        camera,
        target,
        lrs=rates,
        sh_degree=sh_degree,
        background=torch.zeros(3),
        ssim_lambda=0.2,
        antialiased=False,
        stats=None,
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the result as JSON."""
    torch.set_num_threads(1)
    checkpoint = load_checkpoint(options.checkpoint)
    data = checkpoint.config.data
    if options.resolution is not None:
        data = data.model_copy(update={"resolution": options.resolution})
    if options.opensplat is not None and data.resolution is None:
        raise SystemExit("OpenSplat takes images at a factor: give it with -r")
    scene = read_scene(Path(checkpoint.dataset.root), data)
    index = checkpoint.train[0]
    camera, target = scene.cameras[index], torch.from_numpy(scene.images.load(index))
    backend, gaussians = Backend.cpu(threads=1), checkpoint.gaussians.detach_clone()
    rates = learning_rates(checkpoint.config.optim, checkpoint.config.schedule, checkpoint.dataset.extent, 10**9)
    # Tiny steps: the Gaussians stay those of the checkpoint, so that all steps do the same work.
    inputs = _inputs(camera, target, {k: rate * 1e-3 for k, rate in rates.items()}, gaussians.sh_degree)
    result: dict[str, Any] = {
        **describe_machine(),
        "threads": 1,
        "isa": chosen_isa(),
        "scene": Path(checkpoint.dataset.root).name,
        "size": f"{camera.width}x{camera.height}",
        "gaussians": len(gaussians),
        "programs": [],
    }

    def report(program: str, **facts: Any) -> None:
        result["programs"].append({"program": program, **facts})
        print(json.dumps(result["programs"][-1]), flush=True)

    peer = None
    if (module := load_gsplat(options.gsplat)) is not None:
        sys.modules["nerfacc"] = stand_in_for_nerfacc()
        peer = GsplatStep(module, gaussians, inputs, backend)
        with torch.no_grad():
            image = render(gaussians, camera, sh_degree=inputs.sh_degree, backend=backend).image
            difference = float((peer.render() - image).abs().max())
        if not difference < SAME_IMAGE:
            raise SystemExit(f"gsplat's image differs from ours by {difference:.3g}: it has not done the same work")
    ours = NativeEngine(backend)
    adam, slow = AdamState.zeros_like(gaussians), ReferenceEngine()
    steps: dict[str, Callable[[], object]] = {OURS: lambda: ours.step(gaussians, adam, inputs)}
    if peer is not None:
        steps[GSPLAT] = peer.step
    times = {name: min(cpu_time(step, options.rounds) for _ in range(2)) for name, step in steps.items()}
    copy, moments = gaussians.detach_clone(), AdamState.zeros_like(gaussians)
    times[REFERENCE] = cpu_time(lambda: slow.step(copy, moments, inputs), 1)
    for name, ms in times.items():
        facts = {"pairs": len(peer.pairs[0]), "image_difference": difference} if peer and name == GSPLAT else {}
        report(name, step_ms=round(ms, 2), ratio=round(ms / times[OURS], 1), **facts)
    if options.opensplat is not None:
        words, steps_each = shlex.split(options.opensplat_options), options.opensplat_steps

        def beside_opensplat(
            own_name: str, name: str, start: Gaussians, sh_degree: int, model: Gaussians | None
        ) -> None:
            own, theirs = [], []
            for _ in range(options.opensplat_rounds):
                own.append(ours_in_turn(backend, scene, checkpoint.train, start, steps_each, rates, sh_degree))
                root, factor = Path(checkpoint.dataset.root), data.resolution or 1.0
                theirs.append(opensplat_step(options.opensplat, root, steps_each, factor, words, model))
            ours_least, least = (min(rounds, key=lambda entry: entry["step_ms"]) for rounds in (own, theirs))
            report(own_name, **ours_least)
            report(name, **least, ratio=round(least["step_ms"] / ours_least["step_ms"], 1))

        beside_opensplat(OURS_FROM_POINTS, OPENSPLAT, from_points(scene, checkpoint), 0, None)
        if options.opensplat_resume:
            trained = checkpoint.gaussians
            beside_opensplat(OURS_IN_TURN, OPENSPLAT_RESUMED, trained, trained.sh_degree, trained)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("-r", "--resolution", type=float)
    parser.add_argument("--gsplat", type=Path, metavar="PATH", help="the folder that holds the package gsplat")
    parser.add_argument("--opensplat", type=Path, metavar="PATH", help="OpenSplat's binary")
    parser.add_argument("--opensplat-steps", type=int, default=80, metavar="STEPS", help="steps of its run")
    parser.add_argument("--opensplat-rounds", type=int, default=1, metavar="ROUNDS", help="runs of it, least counts")
    parser.add_argument("--opensplat-resume", action="store_true", help="time it from the checkpoint's Gaussians too")
    parser.add_argument(
        "--opensplat-options", default="", metavar="OPTIONS", help="further options for it, as one word"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="a JSON file; figures in the documentation are in results/peers.json")
    options = parser.parse_args()
    result = measure(options)
    print(sentence(result))
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def sentence(result: dict[str, Any]) -> str:
    """Return the ratios in one sentence, as docs/cpu.md has them."""
    by_name = {entry["program"]: entry for entry in result["programs"]}
    parts = [
        f"{name} {entry['step_ms']:,.0f} ms ({entry['ratio']:,.0f} times)"
        for name, entry in by_name.items()
        if "ratio" in entry and name != OURS
    ]
    text = f"splat takes {by_name[OURS]['step_ms']:.1f} ms"
    return text + ("".join(f", {part}" for part in parts)) + "."


if __name__ == "__main__":
    main()
