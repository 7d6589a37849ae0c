// The loads of one Gaussian that projection and its backward pass share.
#pragma once
#include "../math/blend.h"
#include "../math/geometry.h"
#include "../math/sh.h"
#include "device.cuh"

namespace splat {
namespace gpu {

// Raw parameters; see SplatGaussians.
struct RawArrays {
  const float *means, *quats, *log_scales, *logit_opacities, *sh0, *shN;
  int64_t n;
  int shN_count;
  const float* filter_3d;  // null without a 3D filter
};

SPLAT_DEVICE void load_mean(const RawArrays& g, int64_t i, float* mean) {
  for (int k = 0; k < 3; ++k) mean[k] = g.means[3 * i + k];
}

// Everything but the mean and the colours.
SPLAT_DEVICE void load_shape(const RawArrays& g, int64_t i, RawGeometry<float>& raw) {
  for (int k = 0; k < 4; ++k) raw.quat[k] = g.quats[4 * i + k];
  for (int k = 0; k < 3; ++k) raw.log_scale[k] = g.log_scales[3 * i + k];
  raw.logit = g.logit_opacities[i];
  if (g.filter_3d != nullptr) raw.filter_3d = g.filter_3d[i];
}

// 1/2 + sum of coefficients times basis, for each channel, before the clamp.
template <int DEGREE>
SPLAT_DEVICE void sh_sum(const RawArrays& g, int64_t i, const float* basis, float* sum) {
  for (int c = 0; c < 3; ++c) sum[c] = g.sh0[3 * i + c] * float(kSh0) + 0.5f;
  const float* shN = g.shN + i * 3 * g.shN_count;
#pragma unroll
  for (int k = 0; k < (DEGREE + 1) * (DEGREE + 1) - 1; ++k)
    for (int c = 0; c < 3; ++c) sum[c] += shN[3 * k + c] * basis[k];
}

// Room for the basis functions of a degree; never empty, so that it can be an array.
template <int DEGREE>
struct ShN {
  static constexpr int kCount = (DEGREE + 1) * (DEGREE + 1) - 1;
  static constexpr int kRoom = kCount > 0 ? kCount : 1;
};

}  // namespace gpu
}  // namespace splat
