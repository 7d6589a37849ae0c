// The structs of the C ABI as the kernels take them.
#pragma once
#include "../../include/splat.h"
#include "../../kernels/adam_group.cuh"
#include "../../kernels/geometry.cuh"

namespace splat {
namespace gpu {

inline View<float> pinhole_of(const SplatView& v) {
  return make_view<float>(v.viewmat, v.fx, v.fy, v.cx, v.cy, v.width, v.height, v.z_near, v.z_far);
}

// filter_3d: SplatView's; null where it is not read.
inline RawArrays raw_arrays(const SplatGaussians& g, const void* filter_3d = nullptr) {
  RawArrays out;
  out.means = static_cast<const float*>(g.means);
  out.quats = static_cast<const float*>(g.quats);
  out.log_scales = static_cast<const float*>(g.log_scales);
  out.logit_opacities = static_cast<const float*>(g.logit_opacities);
  out.sh0 = static_cast<const float*>(g.sh0);
  out.shN = static_cast<const float*>(g.shN);
  out.n = g.n;
  out.shN_count = g.shN_count;
  out.filter_3d = static_cast<const float*>(filter_3d);
  return out;
}

constexpr int kGroupCount = 6, kLogScales = 2, kLogitOpacities = 3;

// Groups in the order of SplatGaussians, as arrays: pointer of a group, numbers a Gaussian.
inline float* group_of(const SplatGaussians& g, int group) {
  void* const pointers[kGroupCount] = {g.means, g.quats, g.log_scales, g.logit_opacities, g.sh0, g.shN};
  return static_cast<float*>(pointers[group]);
}
inline int64_t group_width(const SplatGaussians& g, int group) {
  const int64_t widths[kGroupCount] = {3, 4, 3, 1, 3, 3 * int64_t(g.shN_count)};
  return widths[group];
}

inline AdamGroup adam_group(const SplatGaussians& params, const SplatAdam& adam, int group) {
  auto step = make_adam_step<float>(adam.lr[group], adam.beta1, adam.beta2, adam.eps, adam.step);
  const double count = double(adam.total > 0 ? adam.total : params.n);
  if (group == kLogScales) step.scale_reg = float(adam.scale_reg / (3.0 * count));
  if (group == kLogitOpacities) step.opacity_reg = float(adam.opacity_reg / count);
  return {group_of(params, group), group_of(adam.exp_avg, group), group_of(adam.exp_avg_sq, group), step};
}

inline LazyShN lazy_shN(const SplatGaussians& params, const SplatAdam* adam) {
  if (adam == nullptr) return {};
  constexpr int group = kGroupCount - 1;
  return {
      group_of(params, group),
      group_of(adam->exp_avg, group),
      group_of(adam->exp_avg_sq, group),
      adam->sh_last_step,
      make_adam_decay_table(adam->decay_table, adam->decay_rows, adam->beta1, adam->beta2, adam->lr[group], adam->eps),
      adam->step - 1};
}

}  // namespace gpu
}  // namespace splat
