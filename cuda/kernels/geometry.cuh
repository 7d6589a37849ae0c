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

// Room for the basis functions of a degree; never empty, so that it can be an array.
template <int DEGREE>
struct ShN {
  static constexpr int kCount = (DEGREE + 1) * (DEGREE + 1) - 1;
  static constexpr int kRoom = kCount > 0 ? kCount : 1;
  static constexpr int kNumbers = 3 * kRoom;
};

// shN in use of Gaussian i. A row begins at any multiple of 4 bytes: it is read 16 bytes at a time from the last
// multiple of 16 before it, and moved to its place by selection. It is read number by number at the end of the array, in
// an array that does not begin at a multiple of 16 bytes, and at degree 4, for which the registers do not suffice.
//
// The rows of 32 Gaussians, from a multiple of 32 on, begin and end at multiples of 16 bytes. So a float4 that has a
// number of the row has none of a row that another warp or block may write meanwhile.
template <int DEGREE>
SPLAT_DEVICE void load_shN(const RawArrays& g, int64_t i, float* out) {
  constexpr int kUsed = 3 * ShN<DEGREE>::kCount, kRowQuads = DEGREE <= 3 ? (kUsed + 3 + 3) / 4 : 0;
  constexpr int kAlwaysQuads = (kUsed + 3) / 4;  // those of a row that begins at a multiple of 16 bytes
  const float* row = g.shN + i * 3 * g.shN_count;
  const unsigned shift = unsigned(uint64_t(row) >> 2) & 3u;
  const float4* from = reinterpret_cast<const float4*>(row - shift);
  const float* end = g.shN + g.n * 3 * g.shN_count;
  if (kRowQuads > 0 && uint64_t(g.shN) % sizeof(float4) == 0 &&
      reinterpret_cast<const float*>(from + kRowQuads) <= end) {
    float read[4 * kRowQuads + 4];
#pragma unroll
    for (int q = 0; q < kRowQuads; ++q) {
      const bool needed = q < kAlwaysQuads || shift > unsigned(4 * q - kUsed);
      const float4 quad = needed ? from[q] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      read[4 * q] = quad.x, read[4 * q + 1] = quad.y, read[4 * q + 2] = quad.z, read[4 * q + 3] = quad.w;
    }
#pragma unroll
    for (int k = 0; k < 4 * kRowQuads - 3 && k < kUsed; ++k) {
      const float even = shift & 2u ? read[k + 2] : read[k], odd = shift & 2u ? read[k + 3] : read[k + 1];
      out[k] = shift & 1u ? odd : even;
    }
  } else {
#pragma unroll
    for (int k = 0; k < kUsed; ++k) out[k] = row[k];
  }
}

// 1/2 + sum of coefficients times basis, for each channel, before the clamp. shN: those of the Gaussian.
template <int DEGREE>
SPLAT_DEVICE void sh_sum(const float* sh0, const float* shN, const float* basis, float* sum) {
  for (int c = 0; c < 3; ++c) sum[c] = sh0[c] * float(kSh0) + 0.5f;
#pragma unroll
  for (int k = 0; k < ShN<DEGREE>::kCount; ++k)
    for (int c = 0; c < 3; ++c) sum[c] += shN[3 * k + c] * basis[k];
}

}  // namespace gpu
}  // namespace splat
