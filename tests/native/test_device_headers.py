"""The mathematics compiles for a GPU: cuda/math/ is one set of headers for host and device."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from splatcli.native.build import source_root
from splatcli.native.build_cuda import find_toolkit
from tests.ptx.machine import no_nvcc

#: Calls each header's functions and adjoints as a thread of a kernel would.
PROBE = """
#include "math/adam.h"
#include "math/blend.h"
#include "math/projection.h"
#include "math/sh.h"
#include "math/ssim.h"
using namespace splat;

__global__ void probe(const float* in, float* out, View<float> view, ViewGrad<float>* v_view) {
  float rotation[9], scale[3], root[9], pc[3], mean2d[2];
  quat_to_rotation(in, rotation);
  for (int k = 0; k < 3; ++k) scale[k] = activate_scale(in[4 + k]);
  covariance_root(rotation, scale, root);
  world_to_camera(view, in + 7, pc);
  const Affine<float> affine = affine_map(view, pc);
  camera_to_image(view, pc, affine.inv_z, mean2d);
  const Covariance2d<float> cov = covariance2d(affine.row0, affine.row1, root);
  const Conic<float> q = conic(cov);
  float d[3], basis[24];
  const float inv_length = view_direction(view.center, in + 7, d);
  sh_basis(4, d, basis);
  const float half = support_half_width(in[11], cov.a);
  const TileRect rect = tile_rect(mean2d[0], mean2d[1], half, half, 10, 8, 160.f, 128.f);
  const float least = least_q_in_box(q.a, q.b, q.c, q.b / (2 * q.a), q.b / (2 * q.c), 0.f, 0.f, 3.f, 3.f);
  const float alpha = exp2_(log2_alpha(in, 1.f, 2.f)) * box_reaches(least, in[11]);

  float v_mean[3] = {}, v_pc[3] = {}, v_mean2d[2], v_a = 0, v_b = 0, v_c = 0, v_log = 0, v_logit = 0, v_d[3] = {};
  float v_row0[3] = {}, v_row1[3] = {}, v_root[9] = {}, v_rotation[9] = {}, v_scale[3] = {}, v_quat[4] = {};
  isect_grad_vjp(in, q.a, q.b, q.c, v_mean2d, v_a, v_b, v_c, v_log);
  conic_vjp(q, v_a, v_b, v_c, v_a, v_b, v_c);
  covariance2d_vjp(affine.row0, affine.row1, root, cov, v_a, v_b, v_c, v_log, v_row0, v_row1, v_root);
  covariance_root_vjp(rotation, scale, v_root, v_rotation, v_scale);
  quat_to_rotation_vjp(in, v_rotation, v_quat);
  activate_scale_vjp(scale[0], v_scale[0], v_scale[1]);
  activate_opacity_vjp(activate_opacity(in[3]), v_log, v_logit);
  affine_map_vjp(view, pc, affine, v_row0, v_row1, v_pc, v_view);
  camera_to_image_vjp(view, pc, affine.inv_z, v_mean2d, v_pc);
  world_to_camera_vjp(view, in + 7, v_pc, v_mean, v_view);
  const Affine<float> wide = project_point<false>(view, pc, mean2d);
  project_point_vjp<false>(view, pc, wide, v_row0, v_row1, v_mean2d, v_pc, v_view);
  sh_basis_vjp(4, d, basis, v_d);
  view_direction_vjp(d, inv_length, v_d, v_mean, v_view->center);
  float v_mu, v_xx, v_xy, param = in[0], exp_avg = in[1], exp_avg_sq = in[2];
  const float ssim = ssim_pixel_vjp(in[0], in[1], in[2], in[3], &v_mu, &v_xx, &v_xy);
  adam_update(AdamStep<float>{}, alpha_vjp(in[0], in[1], in[2], in[3]), param, exp_avg, exp_avg_sq);
  out[0] = alpha + rect.x0 + v_quat[0] + v_scale[1] + v_logit + v_mean[0] + v_mu + v_xx + v_xy + ssim + param;
  out[1] = sh_colour(in[0]) + sh_colour_vjp(in[0], in[1]) + float(ssim_tap(int(in[2])));
}
"""


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_the_headers_compile_for_a_gpu(architecture: str, tmp_path: Path) -> None:
    if (reason := no_nvcc()) is not None:
        pytest.skip(reason)
    nvcc = str(find_toolkit().nvcc)
    source = tmp_path / "probe.cu"
    source.write_text(PROBE)
    command = [nvcc, "-std=c++17", f"-arch={architecture}", f"-I{source_root()}", "-c", str(source), "-o", "probe.o"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr
