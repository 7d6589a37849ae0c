// What the CPU and the CUDA driver read out of the structs of the C ABI: chunks, tiles, and the groups of parameters.
#pragma once
#include <cstdint>

#include "../include/splat.h"
#include "../math/adam.h"
#include "../math/projection.h"

namespace splat {

constexpr int64_t kChunk = SPLAT_CHUNK;
static_assert(kPinhole == int(SPLAT_CAMERA_PINHOLE) && kOrtho == int(SPLAT_CAMERA_ORTHO) &&
                  kFisheye == int(SPLAT_CAMERA_FISHEYE),
              "the models of projection.h have the numbers of the ABI");

inline int64_t chunks_of(int64_t n) { return (n + kChunk - 1) / kChunk; }
inline int32_t tiles_across(int32_t pixels) { return (pixels + SPLAT_TILE - 1) / SPLAT_TILE; }
inline int64_t tiles_of(const SplatView& v) { return int64_t(tiles_across(v.width)) * tiles_across(v.height); }
// Tiles of the view's tile rows: the first, and how many.
inline int64_t first_tile(const SplatView& v) { return int64_t(v.tile_row_begin) * tiles_across(v.width); }
inline int64_t band_tiles(const SplatView& v) {
  return int64_t(v.tile_row_end - v.tile_row_begin) * tiles_across(v.width);
}

// Groups in the order of SplatGaussians, as arrays: pointer of a group, numbers a Gaussian.
constexpr int kGroups = 6, kMeans = 0, kLogScales = 2, kLogitOpacities = 3, kShN = 5;
inline void* group_of(const SplatGaussians& g, int group) {
  void* const pointers[kGroups] = {g.means, g.quats, g.log_scales, g.logit_opacities, g.sh0, g.shN};
  return pointers[group];
}
inline int64_t group_width(const SplatGaussians& g, int group) {
  const int64_t widths[kGroups] = {3, 4, 3, 1, 3, 3 * int64_t(g.shN_count)};
  return widths[group];
}

template <class Real>
inline AdamStep<Real> step_of_group(const SplatGaussians& params, const SplatAdam& adam, int group) {
  auto step = make_adam_step<Real>(adam.lr[group], adam.beta1, adam.beta2, adam.eps, adam.step);
  const double count = double(adam.total > 0 ? adam.total : params.n);
  if (group == kLogScales) step.scale_reg = Real(adam.scale_reg / (3.0 * count));
  if (group == kLogitOpacities) step.opacity_reg = Real(adam.opacity_reg / count);
  return step;
}

template <class Real>
inline MeansRate<Real> means_rate_of(const SplatAdam& adam) {
  return {Real(adam.size_power), Real(adam.log_size)};
}

}  // namespace splat
