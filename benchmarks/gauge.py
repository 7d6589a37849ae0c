"""A gauge of the CUDA kernels' speed on a machine without a GPU: what one training step would issue and move.

    make gauge                                           # or: python -m benchmarks.gauge, in the checkout
    python -m benchmarks.gauge --check                   # compare with the stored file, write nothing
    python -m benchmarks.gauge --ours --scene courtyard  # one scene, without gsplat

nvcc compiles the kernels to PTX for sm_90, which runs on the CPU in the interpreter of tests/ptx; every instruction,
sector of memory and pass over shared memory of the step is counted. ptxas and nvdisasm turn the counts into those of
machine instructions (benchmarks/sass.py). The results go to benchmarks/results/gauge.json, which is in git: a change
that worsens a kernel shows in its diff. --check exits with 1 when a kernel takes over 2 % more of anything.

Cycles are those of a quarter of a multiprocessor, summed over all warps: the busiest of issue and pipes. Nothing of
this is a time. What it leaves out is listed in docs/cuda.md.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import roofline, sass
from benchmarks.gsplat_kernels import WHEEL, Gsplat, glue
from benchmarks.sass import Ran
from splatcli.gaussians import GROUPS, Gaussians
from splatcli.native import build
from splatcli.native.backend import Backend
from splatcli.native.build_cuda import find_toolkit
from splatcli.rasterizer import AdamState, AsyncEngine, DensifyStats, NativeEngine
from splatcli.rasterizer.memory_budget import round_capacity
from splatcli.rasterizer.rendering import render
from splatcli.rasterizer.step_inputs import StepInputs
from splatcli.scene.camera import Camera
from tests.ptx.machine import Kernel, kernel_library, load, machine

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURE = "90"
#: Share by which a count may differ from the stored one before it is reported.
TOLERANCE = 0.02
#: What is compared of a kernel.
COMPARED = ("instructions", "sectors", "sectors_read", "sectors_written", "passes", "atomics", "cycles")
#: Steps on the CPU before the measured one, each on another view: some visible Gaussians have missed steps by then.
WARM = 8


@dataclass(frozen=True)
class Scene:
    """Gaussians with the cameras and target of the last of WARM + 1 steps."""

    name: str
    gaussians: Gaussians
    cameras: list[Camera]
    target: torch.Tensor


# ---- scenes ----------------------------------------------------------------------------------------------------------


def cache() -> Path:
    folder = build.cache_root() / "gauge"
    folder.mkdir(exist_ok=True)
    return folder


def courtyard() -> Scene:
    """The sample scene, trained to 50,000 Gaussians, seen at three times the size of its images."""
    from splatcli.config import DataConfig
    from splatcli.scene.read import read_scene
    from tests.formats.made import read_ply

    samples, ply = ROOT / "data" / "samples" / "courtyard", cache() / "courtyard-50k.ply"
    if not ply.is_file():
        run = cache() / f"courtyard-run-{os.getpid()}"
        splat = [sys.executable, "-m", "splatcli"]
        train = ["train", samples, "-o", run, "--iterations", "4000", "--cap-max", "50000", "--seed", "42", "-q"]
        finished = run / "finished.ply"
        for command in (train, ["export", run, "-o", finished, "-q"]):
            subprocess.run([*splat, *map(str, command)], check=True, stdout=subprocess.DEVNULL)
        os.replace(finished, ply)
        shutil.rmtree(run)
    scene = read_scene(samples, DataConfig())
    cameras = [scaled(scene.cameras[i], 3) for i in scene.train[: WARM + 1]]
    image = torch.from_numpy(scene.images.load(scene.train[WARM]))
    target = image.repeat_interleave(3, 0).repeat_interleave(3, 1).contiguous()
    return Scene("courtyard", read_ply(ply), cameras, target)


def scaled(camera: Camera, times: int) -> Camera:
    numbers = (camera.fx * times, camera.fy * times, camera.cx * times, camera.cy * times)
    return Camera(camera.name, camera.width * times, camera.height * times, *numbers, camera.viewmat)


def made(n: int) -> Scene:
    """Made Gaussians at 1920x1080, of which the cameras see 60 %: those that scripts/gpu_check measures."""
    from gpu.scenes import make_scene, make_targets

    gaussians, cameras = make_scene(n, 1920, 1080, "cpu")
    cameras = [cameras[i % len(cameras)] for i in range(WARM + 1)]
    return Scene(f"made-{n // 1000}k", gaussians, cameras, make_targets(cameras[-1:], "cpu")[0])


#: By name; the first ones are measured unless --full or --scene asks for others.
SCENES: dict[str, Callable[[], Scene]] = {
    "courtyard": courtyard,
    "made-300k": lambda: made(300_000),
    "made-1000k": lambda: made(1_000_000),
}
DEFAULT_SCENES = ("courtyard", "made-300k")


# ---- machine code ----------------------------------------------------------------------------------------------------


def local_nvdisasm() -> str | None:
    """nvdisasm of the toolkit, of the PATH, or from an earlier nvdisasm()."""
    toolkit = find_toolkit().nvcc.resolve().with_name("nvdisasm")
    candidates = (toolkit, shutil.which("nvdisasm"), *cache().glob("nvdisasm/**/bin/nvdisasm"))
    return next((str(found) for found in candidates if found is not None and Path(found).is_file()), None)


def nvdisasm() -> str:
    """nvdisasm, if need be from its wheel, which is fetched once."""
    found = local_nvdisasm()
    if found is not None:
        return found
    wheel = fetched("nvidia-cuda-nvdisasm")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(cache() / "nvdisasm")
    program = next(cache().glob("nvdisasm/**/bin/nvdisasm"))
    program.chmod(0o755)
    return str(program)


def fetched(package: str) -> Path:
    """The wheel of a package such as "gsplat==1.5.3", from the cache or by pip."""
    name = re.split("[=-]", package)[0]
    folder = cache() / "wheels" / package
    if not list(folder.glob("*.whl")):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return next(folder.glob(f"{name}*.whl"))


def embedded_ptx(library: Path) -> list[str]:
    """The PTX texts in a library's fat binaries, which the interpreter runs."""
    return [part.decode() for part in library.read_bytes().split(b"\0") if b"\n.version " in part]


def machine_code(ptx: str) -> dict[str, list[sass.Block]]:
    """The machine code that ptxas makes of a PTX text, by kernel; listings are cached."""
    ptxas = str(find_toolkit().nvcc.with_name("ptxas"))
    version = subprocess.run([ptxas, "--version"], capture_output=True, text=True, check=True).stdout
    listing = cache() / f"sass-{hashlib.sha256((version + ptx).encode()).hexdigest()[:16]}.txt"
    if not listing.is_file():
        source, binary = listing.with_suffix(f".{os.getpid()}.ptx"), listing.with_suffix(f".{os.getpid()}.cubin")
        source.write_text(ptx, encoding="utf-8")
        try:
            command = [ptxas, f"-arch=sm_{ARCHITECTURE}", "-O3", "-lineinfo", str(source), "-o", str(binary)]
            subprocess.run(command, check=True)
            done = subprocess.run([nvdisasm(), "-gp", "-c", binary], capture_output=True, text=True, check=True)
            source.write_text(done.stdout, encoding="utf-8")
            os.replace(source, listing)
        finally:
            source.unlink(missing_ok=True)
            binary.unlink(missing_ok=True)
    return sass.parse(listing.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Code:
    """PTX, block by block, and the machine code of all its kernels."""

    blocks: dict[str, list[sass.Block]]
    ptx_blocks: dict[str, list[int]]

    @classmethod
    def of(cls, texts: Iterable[str]) -> Code:
        blocks, numbers = {}, {}
        for ptx in texts:
            found = machine_code(ptx)
            blocks |= found
            numbers |= dict.fromkeys(found, sass.ptx_blocks(ptx))
        return cls(blocks, numbers)


def short_names(mangled: list[str]) -> dict[str, str]:
    """Kernels without namespace and parameters: project_chunks<3>."""
    if not mangled:
        return {}
    command = ["c++filt", *mangled]
    plain = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    plain = [re.sub(r"^void |\(anonymous namespace\)::|\w+::", "", text).split("(")[0] for text in plain]
    return dict(zip(mangled, plain, strict=True))


def summary(code: Code) -> dict[str, dict[str, Any]]:
    """What each kernel that ran since the counts were cleared issued and moved."""
    kernels = [kernel for kernel in machine().counts() if kernel.launches]
    names = short_names([kernel.name for kernel in kernels])
    result = {}
    for kernel in kernels:
        found = kernel_summary(code.blocks[kernel.name], ran_of(kernel), code.ptx_blocks[kernel.name])
        least = {"sectors_read": kernel.sectors_read, "sectors_written": kernel.sectors_written}
        result[names[kernel.name]] = {"launches": kernel.launches, "blocks": kernel.blocks, **found, **least}
    return dict(sorted(result.items(), key=lambda item: -item[1]["cycles"]))


def ran_of(kernel: Kernel) -> list[Ran]:
    return [Ran(i.opcode, i.line, i.warps, i.lanes, i.traffic) for i in kernel.instructions]


def kernel_summary(blocks: list[sass.Block], ran: list[Ran], block_of: list[int]) -> dict[str, Any]:
    opcodes = sass.issued(blocks, ran, block_of)
    shared = [one for one in ran if re.search(r"\.shared", one.opcode)]
    other = [one for one in ran if one.traffic and one not in shared]
    sectors, passes = sum(one.traffic for one in other), sum(one.traffic for one in shared)
    pipes = sass.pipes(opcodes, sectors, passes)
    busiest = max(pipes, key=lambda pipe: pipes[pipe])
    warps = sum(one.warps for one in ran)
    return {
        "cycles": round(pipes[busiest]),
        "busiest": busiest,
        "instructions": round(pipes["issue"]),
        "ptx_instructions": warps,
        "lanes": round(sum(one.lanes for one in ran) / max(1, warps), 1),
        "sectors": sectors,
        "passes": passes,
        "atomics": sum(one.lanes for one in other if re.match("atom|red", one.opcode)),
        "kinds": {
            kind: round(n) for kind, n in sorted(sass.kinds(opcodes).items(), key=lambda item: -item[1]) if n >= 0.5
        },
        "pipes": {pipe: round(n) for pipe, n in sorted(pipes.items(), key=lambda item: -item[1]) if n >= 0.5},
        "unexplained": round(sass.checked(blocks, ran, block_of), 3),
    }


# ---- the measured step -----------------------------------------------------------------------------------------------


class Engine(NativeEngine):
    """The CPU's engine, which lends the gradient of its last image."""

    def v_image(self, camera: Camera) -> torch.Tensor:
        return self._pipeline._images(camera)[1]


def our_step(scene: Scene) -> tuple[dict[str, Any], Gaussians, torch.Tensor]:
    """Our kernels in one training step; the Gaussians before it; the gradient of the image.

    The loss is held against the CPU's.
    """
    gaussians = scene.gaussians.detach_clone()
    adam, stats = AdamState.zeros_like(gaussians), DensifyStats.zeros(len(gaussians))
    cpu = Engine(Backend.cpu())

    def inputs(camera: Camera) -> StepInputs:
        lrs = dict.fromkeys(GROUPS, 1e-7)  # so small that all steps do the same work
        return StepInputs(camera, scene.target, lrs, gaussians.sh_degree, torch.zeros(3), 0.2, False, stats)

    for camera in scene.cameras[:-1]:
        cpu.step(gaussians, adam, inputs(camera))
    before = gaussians.detach_clone()
    library = kernel_library(architecture=ARCHITECTURE)
    ours, moments = gaussians.detach_clone(), copy.deepcopy(adam)
    expected = cpu.step(gaussians, adam, inputs(scene.cameras[-1]))
    backend = Backend(load(library), torch.float32, 0, torch.device("cpu"), 0, 0x51, True)
    engine = AsyncEngine(backend, capacity=round_capacity(cpu.context.native.isects))
    with machine().profile():
        losses = engine.submit(ours, moments, inputs(scene.cameras[-1])) + engine.drain()
    if not abs(losses[0] - expected) < 1e-4:
        raise SystemExit(f"gauge: {scene.name}: the loss is {losses[0]} in PTX and {expected} on the CPU")
    assert engine.context.counters is not None
    visible, _, isects, _ = engine.context.counters.tolist()
    camera = scene.cameras[-1]
    v_image = cpu.v_image(camera).clone()
    return {
        "gaussians": len(ours),
        "visible": visible,
        "width": camera.width,
        "height": camera.height,
        "isects": isects,
        "ours": summary(Code.of(embedded_ptx(library))),
    }, before, v_image  # fmt: skip


def gsplat_step(scene: Scene, gaussians: Gaussians, v_image: torch.Tensor) -> dict[str, Any]:
    """gsplat's kernels in the same step. Its image is held against ours."""
    camera, background = scene.cameras[-1], torch.zeros(3)
    theirs = Gsplat(fetched(WHEEL), cache(), ARCHITECTURE)
    with machine().profile():
        found = theirs.step(gaussians, camera, v_image, background)
    ours = render(gaussians, camera, background=background, sh_degree=gaussians.sh_degree, backend=Backend.cpu()).image
    apart = float((found.image - ours).abs().mean())
    if not apart < 1e-3:
        raise SystemExit(f"gauge: {scene.name}: gsplat's image and ours differ by {apart} on average")
    code = Code.of([*theirs.texts, *embedded_ptx(theirs.sort_library)])
    return {
        "gsplat": summary(code),
        "gsplat_isects": found.isects,
        "gsplat_glue_bytes": dict(glue(len(gaussians), camera.width * camera.height)),
    }


# ---- results ---------------------------------------------------------------------------------------------------------


def changes(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[float, str]]:
    """Kernels of two results that differ by more than TOLERANCE: the share, and words."""
    found = []
    for scene, result in new["scenes"].items():
        for side in ("ours", "gsplat"):
            before = old.get("scenes", {}).get(scene, {}).get(side, {})
            after = result.get(side, {})
            if not before:
                continue
            for kernel in before.keys() | after.keys():
                label = f"{scene}: {kernel}" if side == "ours" else f"{scene}: gsplat's {kernel}"
                if kernel not in before or kernel not in after:
                    found.append((0.0, f"{label} is {'new' if kernel in after else 'gone'}"))
                    continue
                for what in before[kernel].keys() & set(COMPARED):
                    a, b = before[kernel][what], after[kernel][what]
                    share = (b - a) / a if a else float(b > 0)
                    if abs(share) > TOLERANCE:
                        found.append((share, f"{label}: {what} {a:,} -> {b:,} ({share:+.1%})"))
    return sorted(found, key=lambda change: (-change[0], change[1]))


#: Columns of a table: title, width with sign of the format, and value of a kernel.
COLUMNS: list[tuple[str, str, Callable[[dict[str, Any]], Any]]] = [
    ("Mcycles", "10.3f", lambda one: one["cycles"] / 1e6),
    ("busiest", ">9", lambda one: one["busiest"]),
    ("Minstr", "10.3f", lambda one: one["instructions"] / 1e6),
    ("lanes", "6.1f", lambda one: one["lanes"]),
    ("MB", "10.2f", lambda one: one["sectors"] * 32 / 1e6),
    ("least", "10.2f", lambda one: (one["sectors_read"] + one["sectors_written"]) * 32 / 1e6),
    ("Mpasses", "9.3f", lambda one: one["passes"] / 1e6),
    ("Matom", "8.3f", lambda one: one["atomics"] / 1e6),
    ("off", "6.1%", lambda one: one["unexplained"]),
]


def total(kernels: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The sums of what is compared, over all kernels."""
    return {what: sum(one[what] for one in kernels.values()) for what in COMPARED}


def shown(name: str, result: dict[str, Any]) -> str:
    size = f"{result['width']}x{result['height']}"
    counts = (
        f"{result['gaussians']:,} Gaussians, {result['visible']:,} visible, {result['isects']:,} tile intersections"
    )
    lines = [f"{name}: {size}, {counts}"]
    for side in ("ours", "gsplat"):
        if side in result:
            heads = [f"{title:>{re.split('[.]', form.strip('>f%'))[0]}}" for title, form, _ in COLUMNS]
            lines.append(f"  {side:42}" + "".join(heads))
            for kernel, one in result[side].items():
                lines.append(f"  {kernel[:42]:42}" + "".join(f"{value(one):{form}}" for _, form, value in COLUMNS))
            together = total(result[side]) | {"busiest": "", "lanes": 0.0, "unexplained": 0.0}
            lines.append(f"  {'together':42}" + "".join(f"{value(together):{form}}" for _, form, value in COLUMNS))
    return "\n".join(lines)


def written(results: dict[str, Any]) -> str:
    """JSON with a number a line, kinds and pipes on one line each: what changes shows in a diff."""
    text = json.dumps(results, indent=1)
    return re.sub(r"\{[^{}]*\}", lambda found: re.sub(r"\s*\n\s*", " ", found[0]), text) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scene", action="append", choices=list(SCENES), help="this one alone; may be repeated")
    parser.add_argument("--full", action="store_true", help="all scenes; takes an hour")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--ours", action="store_true", help="without gsplat: its stored counts stay")
    which.add_argument("--gsplat", action="store_true", help="count gsplat anew; else only with another nvcc")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 when a kernel takes over 2 %% more")
    parser.add_argument("--out", type=Path, default=roofline.RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    old = json.loads(roofline.RESULTS.read_text(encoding="utf-8")) if roofline.RESULTS.is_file() else {"scenes": {}}
    names = options.scene or (list(SCENES) if options.full else DEFAULT_SCENES)
    new: dict[str, Any] = {
        "command": "make gauge",
        "date": datetime.date.today().isoformat(),
        "nvcc": find_toolkit().version,
        "architecture": f"sm_{ARCHITECTURE}",
        "scenes": {},
    }
    for name in names:
        started = time.perf_counter()
        scene, known = SCENES[name](), old["scenes"].get(name, {})
        result, gaussians, v_image = our_step(scene)
        stale = old.get("nvcc") != new["nvcc"] or "gsplat" not in known
        if options.gsplat or (stale and not options.ours):
            result |= gsplat_step(scene, gaussians, v_image)
        else:
            result |= {key: value for key, value in known.items() if key.startswith("gsplat")}
        new["scenes"][name] = result
        print(shown(name, result), f"\n{time.perf_counter() - started:.0f} s\n", flush=True)
    different = changes(old, new)
    print("\n".join(words for _, words in different) or f"no kernel differs by more than {TOLERANCE:.0%}")
    if options.check:
        return int(any(share > TOLERANCE for share, _ in different))
    new["scenes"] = {
        name: (old["scenes"] | new["scenes"])[name] for name in SCENES if name in old["scenes"] | new["scenes"]
    }
    options.out.write_text(written(new), encoding="utf-8")
    if options.out == roofline.RESULTS:
        roofline.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
