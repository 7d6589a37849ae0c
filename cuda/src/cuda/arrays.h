// The structs of the C ABI as the kernels take them.
#pragma once
#include "../structs.h"
#include "../../kernels/adam_group.cuh"
#include "../../kernels/geometry.cuh"

namespace splat {
namespace gpu {

inline View<float> camera_of(const SplatView& v) {
  return make_view<float>(v.camera_model, v.viewmat, v.fx, v.fy, v.cx, v.cy, v.width, v.height, v.z_near, v.z_far);
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

inline AdamGroup adam_group(const SplatGaussians& params, const SplatAdam& adam, int group) {
  const auto numbers = [group](const SplatGaussians& g) { return static_cast<float*>(group_of(g, group)); };
  return {numbers(params), numbers(adam.exp_avg), numbers(adam.exp_avg_sq), step_of_group<float>(params, adam, group)};
}

inline LazyShN lazy_shN(const SplatGaussians& params, const SplatAdam* adam) {
  if (adam == nullptr) return {};
  return {
      static_cast<float*>(params.shN),
      static_cast<float*>(adam->exp_avg.shN),
      static_cast<float*>(adam->exp_avg_sq.shN),
      adam->sh_last_step,
      make_adam_decay_table(adam->decay_table, adam->decay_rows, adam->beta1, adam->beta2, adam->lr[kShN], adam->eps),
      adam->step - 1};
}

}  // namespace gpu
}  // namespace splat
