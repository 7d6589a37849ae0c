"""gsplat 1.5.3's kernels in the PTX interpreter: compiled from its wheel, launched as its host code does.

Host functions, which need torch's headers, are cut out of its files in the cache; nothing of it is kept in the project.
The sort is CUB's, from the toolkit's own headers. What torch does beside the kernels is a list of bytes, `glue()`.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import re
import subprocess
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from splatcli.gaussians import Gaussians
from splatcli.native.build_cuda import find_toolkit
from splatcli.scene.camera import Camera
from tests.ptx.machine import Module, cuda_library, machine

WHEEL = "gsplat==1.5.3"

#: Its flags (gsplat/cuda/_backend.py).
FLAGS = ("-std=c++17", "-O3", "-use_fast_math", "--expt-relaxed-constexpr", "-w")

_HEAD = """
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include "Common.h"
#include "Utils.cuh"
template <class T> static __device__ __forceinline__ T gpuAtomicAdd(T* p, T v) { return atomicAdd(p, v); }
"""

#: Files, and the kernels in them that a training step runs, as they are instantiated.
_FILES = {
    "ProjectionEWA3DGSFused": (
        "projection_ewa_3dgs_fused_fwd_kernel<float>",
        "projection_ewa_3dgs_fused_bwd_kernel<float>",
    ),
    "SphericalHarmonicsCUDA": ("spherical_harmonics_fwd_kernel<float>", "spherical_harmonics_bwd_kernel<float>"),
    "IntersectTile": ("intersect_tile_kernel<float>", "intersect_offset_kernel"),
    "RasterizeToPixels3DGSFwd": ("rasterize_to_pixels_3dgs_fwd_kernel<3, float>",),
    "RasterizeToPixels3DGSBwd": ("rasterize_to_pixels_3dgs_bwd_kernel<3, float>",),
    "AdamCUDA": ("adam_kernel<float>",),
}

#: The call of gsplat's radix_sort_double_buffer().
_SORT = """
#include <cub/device/device_radix_sort.cuh>
extern "C" __attribute__((visibility("default"))) int sort_pairs(
    int64_t* keys, int64_t* keys_out, int32_t* values, int32_t* values_out, int64_t count, int bits, void* room,
    size_t* bytes, int* in_second) {
  cub::DoubleBuffer<int64_t> k(keys, keys_out);
  cub::DoubleBuffer<int32_t> v(values, values_out);
  const int error = cub::DeviceRadixSort::SortPairs(room, *bytes, k, v, count, 0, bits, cudaStream_t(0x51));
  *in_second = k.selector;
  return error;
}
"""


def glue(n: int, pixels: int) -> list[tuple[str, int]]:
    """Bytes that torch's kernels move beside gsplat's in a step of its trainer, for n Gaussians, and what they do.

    Elementwise kernels read and write each operand once; its own fills and the loss of fused-ssim are among them.
    """
    coefficients = 4 * 48
    return [
        ("exp, sigmoid and their gradients", n * 4 * (2 * 4 + 3 * 4)),
        ("sh0 and shN into one tensor, and its gradient cut in two", n * 4 * coefficients),
        ("directions, mask, shift and clamp of colours, and their gradients", n * (24 + 9 + 48 + 60 + 36)),
        ("sum of tile counts", n * 12),
        ("zeros for gradients", n * (4 * 9 + coefficients + 4 * 13)),
        ("densification statistics", n * 48),
        ("L1 with its gradient, and the target from 8 bits", pixels * (15 + 48 + 60)),
        ("fused SSIM with its gradient", pixels * (24 + 48 + 60 + 12)),
    ]


class Gsplat:
    """The compiled kernels."""

    def __init__(self, wheel: Path, cache: Path, architecture: str) -> None:
        version = find_toolkit().version
        key = hashlib.sha256(f"{version}{wheel.name}{FLAGS}{_HEAD}{_FILES}{architecture}".encode()).hexdigest()[:16]
        folder = cache / f"gsplat-{key}"
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=cache) as work:
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(work, [name for name in archive.namelist() if "/cuda/" in name])
                ptx = Path(work) / "ptx"
                ptx.mkdir()
                for name, kernels in _FILES.items():
                    _compile(Path(work), name, kernels, architecture)
                os.replace(ptx, folder)
        self.texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.ptx"))]
        self.kernels: dict[str, Module] = {}  # by mangled name
        for text in self.texts:
            self.kernels |= dict.fromkeys(re.findall(r"\.entry (\w+)\(", text), machine().module(text))
        source = cache / "cub-sort.cu"
        source.write_text(_SORT, encoding="utf-8")
        self.sort_library = cuda_library([source], architecture=architecture)
        self.sorter = ctypes.CDLL(str(self.sort_library), mode=os.RTLD_NOW | os.RTLD_DEEPBIND)

    def run(self, name: str, grid: Any, block: Any, *arguments: Any, shared: int = 0) -> None:
        """Run the kernel whose name has ``name`` in it; blocks and threads as numbers or up to three of them."""
        entry = next(entry for entry in self.kernels if name in entry)
        sizes = [(size,) if isinstance(size, int) else size for size in (grid, block)]
        self.kernels[entry].run(entry, *sizes, *arguments, shared=shared)

    def sort(self, keys: Tensor, values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
        """keys and values sorted by the lowest ``bits``, by CUB; overwrites them."""
        others, room = (torch.empty_like(keys), torch.empty_like(values)), torch.empty(0, dtype=torch.uint8)
        size, second = ctypes.c_size_t(0), ctypes.c_int(0)
        for _ in range(2):  # the first call asks for room
            pointers = [ctypes.c_void_p(t.data_ptr()) for t in (keys, others[0], values, others[1])]
            space = ctypes.c_void_p(room.data_ptr() if len(room) else None)
            count = ctypes.c_int64(len(keys))
            failed = self.sorter.sort_pairs(*pointers, count, bits, space, ctypes.byref(size), ctypes.byref(second))
            if failed:
                raise RuntimeError(f"CUB's sort: {machine().native.ptx_words().decode()}")
            room = torch.empty(size.value, dtype=torch.uint8)
        return others if second.value else (keys, values)

    def step(self, g: Gaussians, camera: Camera, v_image: Tensor, background: Tensor) -> Step:
        """Run one training step without its loss, from the gradient of the image."""
        step = Step(self, g, camera)
        with machine().lenient():  # its kernels name lanes that have ended in the masks of warp operations
            step.project()
            step.bin()
            step.blend(background, v_image)
            step.project_vjp()
            step.adam()
        return step


class Step:
    """The tensors of one step, by gsplat's names where they are arguments of its kernels."""

    def __init__(self, kernels: Gsplat, g: Gaussians, camera: Camera) -> None:
        self.run, self.sort = kernels.run, kernels.sort
        self.g, self.camera, self.n = g, camera, len(g)
        self.across, self.down = -(-camera.width // 16), -(-camera.height // 16)
        self.tile_bits = math.floor(math.log2(self.across * self.down)) + 1
        self.scales, self.opacities = g.log_scales.exp(), torch.sigmoid(g.logit_opacities)
        viewmat = torch.from_numpy(camera.viewmat).float().contiguous()
        K = torch.tensor([[camera.fx, 0, camera.cx], [0, camera.fy, camera.cy], [0, 0, 1]], dtype=torch.float32)
        self.view = (viewmat, K, _u(camera.width), _u(camera.height), _f(0.3))
        self.coefficients = torch.cat([g.sh0[:, None], g.shN], 1).contiguous()
        centre = torch.from_numpy(-camera.viewmat[:3, :3].T @ camera.viewmat[:3, 3]).float()
        self.directions = (g.means - centre).contiguous()

    def project(self) -> None:
        n, g = self.n, self.g
        self.radii, self.means2d = torch.zeros(n, 2, dtype=torch.int32), torch.zeros(n, 2)
        self.depths, self.conics, self.sums = torch.zeros(n), torch.zeros(n, 3), torch.zeros(n, 3)
        gaussians = (_u(1), _u(1), _u(n), g.means, None, g.quats, self.scales, self.opacities)
        limits = (_f(0.01), _f(1e10), _f(0.0), ctypes.c_int(0))
        out = (self.radii, self.means2d, self.depths, self.conics, None)
        self.run("projection_ewa_3dgs_fused_fwd", _blocks(n), 256, *gaussians, *self.view, *limits, *out)
        self.visible = (self.radii > 0).all(1)
        counts = (_u(n), _u(self.coefficients.shape[1]), _u(g.sh_degree))
        self.harmonics = (*counts, self.directions, self.coefficients, self.visible)
        self.run("spherical_harmonics_fwd", _blocks(3 * n), 256, *self.harmonics, self.sums)
        self.colours = (self.sums + 0.5).clamp_min(0).contiguous()

    def bin(self) -> None:
        n, counts = self.n, torch.zeros(self.n, dtype=torch.int32)
        head = (ctypes.c_bool(False), _u(1), _u(n), _u(0), None, None, self.means2d, self.radii, self.depths)
        tail = (_u(16), _u(self.across), _u(self.down), _u(self.tile_bits), _u(1))
        self.run("intersect_tile", _blocks(n), 256, *head, None, *tail, counts, None, None)
        ends = counts.to(torch.int64).cumsum(0)
        self.isects = int(ends[-1])
        keys, ids = torch.zeros(self.isects, dtype=torch.int64), torch.zeros(self.isects, dtype=torch.int32)
        self.run("intersect_tile", _blocks(n), 256, *head, ends, *tail, None, keys, ids)
        expected = torch.sort(keys, stable=True)[0]
        keys, self.ids = self.sort(keys, ids, 32 + self.tile_bits + 1)
        if not torch.equal(keys, expected):
            raise RuntimeError("CUB's sort does not sort")
        tiles = self.across * self.down
        self.starts = torch.zeros(tiles, dtype=torch.int32)
        sizes = (_u(1), _u(tiles), _u(self.tile_bits))
        self.run("intersect_offset", _blocks(self.isects), 256, _u(self.isects), keys, *sizes, self.starts)

    def blend(self, background: Tensor, v_image: Tensor) -> None:
        width, height = self.camera.width, self.camera.height
        self.image, alpha = torch.zeros(height, width, 3), torch.zeros(height, width)
        last, grid, block = torch.zeros(height, width, dtype=torch.int32), (1, self.down, self.across), (16, 16)
        projected = (self.means2d, self.conics, self.colours, self.opacities, background, None)
        sizes = (_u(width), _u(height), _u(16), _u(self.across), _u(self.down))
        shared = (_u(1), _u(self.n), _u(self.isects), ctypes.c_bool(False), *projected, *sizes, self.starts, self.ids)
        self.run("rasterize_to_pixels_3dgs_fwd", grid, block, *shared, self.image, alpha, last, shared=256 * 28)
        self.v_means2d, self.v_conics = torch.zeros_like(self.means2d), torch.zeros_like(self.conics)
        self.v_colours, self.v_opacities = torch.zeros_like(self.colours), torch.zeros_like(self.opacities)
        given = (alpha, last, v_image, torch.zeros(height, width), None)
        out = (self.v_means2d, self.v_conics, self.v_colours, self.v_opacities)
        self.run("rasterize_to_pixels_3dgs_bwd", grid, block, *shared, *given, *out, shared=256 * 40)

    def project_vjp(self) -> None:
        n, g = self.n, self.g
        self.v_coefficients, v_directions = torch.zeros_like(self.coefficients), torch.zeros_like(self.directions)
        v_sums = (self.v_colours * (self.sums > -0.5)).contiguous()
        out = (self.v_coefficients, v_directions)
        self.run("spherical_harmonics_bwd", _blocks(3 * n), 256, *self.harmonics, v_sums, *out)
        self.v_means, self.v_quats, self.v_scales = (torch.zeros_like(t) for t in (g.means, g.quats, g.log_scales))
        gaussians = (_u(1), _u(1), _u(n), g.means, None, g.quats, self.scales)
        given = (ctypes.c_int(0), self.radii, self.conics, None, self.v_means2d, torch.zeros(n), self.v_conics, None)
        grads = (self.v_means, None, self.v_quats, self.v_scales, None)
        self.run("projection_ewa_3dgs_fused_bwd", _blocks(n), 256, *gaussians, *self.view, *given, *grads)

    def adam(self) -> None:
        """Of all Gaussians, as torch's fused Adam, which its trainer takes unless it is asked for another."""
        coefficients = (self.v_coefficients[:, 0], self.v_coefficients[:, 1:])
        gradients = (self.v_means, self.v_quats, self.v_scales, self.v_opacities, *coefficients)
        for (_, tensor), gradient in zip(self.g.items(), gradients, strict=True):
            p, m, s = tensor.clone(), torch.zeros_like(tensor), torch.zeros_like(tensor)
            numbers = (_u(self.n), _u(p.numel() // self.n), p, gradient.contiguous(), m, s, None)
            rates = (_f(1e-3), _f(0.9), _f(0.999), _f(1e-15))
            self.run("adam_kernel", _blocks(p.numel()), 256, *numbers, *rates)


_u, _f = ctypes.c_uint32, ctypes.c_float


def _blocks(threads: int) -> int:
    return -(-threads // 256)


def _compile(work: Path, name: str, kernels: tuple[str, ...], architecture: str) -> None:
    source = work / "gsplat" / "cuda"
    text = without_host((source / "csrc" / f"{name}.cu").read_text(encoding="utf-8"))
    instances = ""
    for kernel in kernels:
        plain, _, arguments = kernel.partition("<")
        found = re.search(rf"(?s)__global__ void\s+{plain}\((.*?)\n\)", text)
        if found is None:
            raise RuntimeError(f"{WHEEL} has no {plain} in {name}.cu")
        parameters = re.sub(r"//[^\n]*|/\*.*?\*/", "", found[1]).replace("scalar_t", "float")
        if arguments:
            instances += f"template __global__ void {kernel}({parameters});\n"
    file = work / f"{name}.cu"
    file.write_text(f"{_HEAD}{text.rsplit('} // namespace gsplat', 1)[0]}{instances}\n}}\n", encoding="utf-8")
    folders = [source / "include", source / "csrc", source / "csrc" / "third_party" / "glm"]
    command = [str(find_toolkit().nvcc), *FLAGS, f"-arch=compute_{architecture}", *(f"-I{path}" for path in folders)]
    subprocess.run([*command, "-ptx", str(file), "-o", str(work / "ptx" / f"{name}.ptx")], check=True)


def without_host(text: str) -> str:
    """A file of gsplat's without host functions, which begin with `void` in column 0 and end with a brace there."""
    text = re.sub(r"#include [<\"](ATen|c10|cub)[^\n]*\n", "", text)
    text = re.sub(
        r'#include "(Common|Utils|Projection|Rasterization|SphericalHarmonics|Intersect|Adam)\.\w+"\n', "", text
    )
    text = re.sub(r"(?ms)^(template <[^>]*>\s*)?void \w+\(.*?^}\n", "", text)
    return re.sub(r"(?ms)^#define __INS__.*?^#undef __INS__\n", "", text)
