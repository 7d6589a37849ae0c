// Steps that projection and its backward pass share, on sixteen Gaussians: loading rows, summing SH.
#pragma once
#include <algorithm>

#include "../../math/blend.h"
#include "../../math/geometry.h"
#include "../../math/sh.h"
#include "lanes.h"
#include "stages.h"

namespace splat {
template <class Real>
View<Real> camera_of(const SplatView& v) {
  return make_view<Real>(v.camera_model, v.viewmat, v.fx, v.fy, v.cx, v.cy, v.width, v.height, v.z_near, v.z_far);
}

// Lane k takes row lane_ids[k] of the [*, C] array at `rows`.
template <int C, class Real, int W>
SPLAT_INLINE void load_rows(const Real* rows, const int32_t* lane_ids, Lanes<Real, W>* out) {
  int32_t index[W];
  for (int k = 0; k < W; ++k) index[k] = C * lane_ids[k];
  for (int c = 0; c < C; ++c) out[c] = gather<Real, W>(rows + c, index);
}

// What decides where a Gaussian can be seen: mean, scale and 3D filter. filter_3d: SplatView's; null where it is not read.
template <class Real>
SPLAT_INLINE void load_extent(const SplatGaussians& g, int64_t base, const int32_t* lane_ids, const void* filter_3d,
                              RawGeometry<Lanes<Real, kLanes>>& raw) {
  load_rows<3>(static_cast<const Real*>(g.means) + 3 * base, lane_ids, raw.mean);
  load_rows<3>(static_cast<const Real*>(g.log_scales) + 3 * base, lane_ids, raw.log_scale);
  if (filter_3d != nullptr)
    load_rows<1>(static_cast<const Real*>(filter_3d) + base, lane_ids, &raw.filter_3d);
}
// The rest of the geometry.
template <class Real>
SPLAT_INLINE void load_shape(const SplatGaussians& g, int64_t base, const int32_t* lane_ids,
                             RawGeometry<Lanes<Real, kLanes>>& raw) {
  load_rows<4>(static_cast<const Real*>(g.quats) + 4 * base, lane_ids, raw.quat);
  load_rows<1>(static_cast<const Real*>(g.logit_opacities) + base, lane_ids, &raw.logit);
}
template <class Real>
SPLAT_INLINE RawGeometry<Lanes<Real, kLanes>> load_geometry(const SplatGaussians& g, int64_t base,
                                                            const int32_t* lane_ids,
                                                            const void* filter_3d = nullptr) {
  RawGeometry<Lanes<Real, kLanes>> raw;
  load_extent<Real>(g, base, lane_ids, filter_3d, raw);
  load_shape<Real>(g, base, lane_ids, raw);
  return raw;
}

// Requests the rows of shN of Gaussians that load_shN will read soon.
template <class Real>
SPLAT_INLINE void prefetch_shN(const SplatGaussians& g, const int32_t* ids, int count, int degree) {
  constexpr int kLine = 64 / int(sizeof(Real));
  const int width = 3 * g.shN_count, used = 3 * shN_count(degree);
  for (int k = 0; k < count; ++k) {
    const Real* row = static_cast<const Real*>(g.shN) + int64_t(ids[k]) * width;
    for (int i = 0; i < used; i += kLine) __builtin_prefetch(row + i);
  }
}

// The SH coefficients in use of sixteen Gaussians, as lanes: [3 shN_count(degree)], channels innermost.
// Rows are read sixteen numbers at a time and transposed; gathering number by number takes several times as long.
template <class Real>
SPLAT_INLINE void load_shN(const SplatGaussians& g, int64_t base, const int32_t* lane_ids, int degree,
                           Lanes<Real, kLanes>* out) {
  using F = Lanes<Real, kLanes>;
  const int width = 3 * g.shN_count, used = 3 * shN_count(degree);
  const Real* rows = static_cast<const Real*>(g.shN) + width * base;
  if (width < kLanes) {
    int32_t index[kLanes];
    for (int k = 0; k < kLanes; ++k) index[k] = width * lane_ids[k];
    for (int k = 0; k < used; ++k) out[k] = gather<Real, kLanes>(rows + k, index);
    return;
  }
  for (int done = 0; done < used; done += kLanes) {
    const int first = std::min(done, width - kLanes);  // the last piece overlaps, so that no read leaves the row
    F piece[kLanes];
    for (int k = 0; k < kLanes; ++k) piece[k] = F::load(rows + width * lane_ids[k] + first);
    transpose_16(piece);
    for (int k = done; k < std::min(used, done + kLanes); ++k) out[k] = piece[k - first];
  }
}

// The reverse: values [3 shN_count(degree)] to the rows of the lanes whose bit is set; others stay unchanged.
template <class Real>
SPLAT_INLINE void store_shN(const Lanes<Real, kLanes>* values, uint32_t lanes, const int32_t* lane_ids,
                            int32_t width, int degree, Real* rows) {
  using F = Lanes<Real, kLanes>;
  const int used = 3 * shN_count(degree);
  for (int first = 0; first < used; first += kLanes) {
    F piece[kLanes];
    for (int k = 0; k < kLanes; ++k) piece[k] = first + k < used ? values[first + k] : F(0);
    transpose_16(piece);
    const int count = std::min(kLanes, used - first);
    for (uint32_t bits = lanes; bits != 0; bits &= bits - 1) {
      const int lane = __builtin_ctz(bits);
      Real* out = rows + width * lane_ids[lane] + first;
      if (count == kLanes) piece[lane].store(out);
      else store_first(piece[lane], out, count);
    }
  }
}

// 1/2 + sum of coefficients times basis, for each channel, before the clamp. shN: from load_shN.
template <class Real>
SPLAT_INLINE void sh_sum(const SplatGaussians& g, int64_t base, const int32_t* lane_ids, int degree,
                         const Lanes<Real, kLanes>* shN, const Lanes<Real, kLanes>* basis,
                         Lanes<Real, kLanes>* sum) {
  using F = Lanes<Real, kLanes>;
  F dc[3];
  load_rows<3>(static_cast<const Real*>(g.sh0) + 3 * base, lane_ids, dc);
  for (int c = 0; c < 3; ++c) sum[c] = dc[c] * F(kSh0) + F(0.5);
  for (int k = 0; k < shN_count(degree); ++k)
    for (int c = 0; c < 3; ++c) sum[c] += shN[3 * k + c] * basis[k];
}

template <class Real>
inline TileRect projected_rect(const SplatView& view, const Real* proj) {
  return tile_rect(proj[kProjX], proj[kProjY], proj[kProjHalfX], proj[kProjHalfY], tiles_across(view.width),
                   tiles_across(view.height), Real(view.width), Real(view.height));
}
// The part of a rectangle in the view's tile rows.
inline TileRect in_tile_rows(const SplatView& view, TileRect r) {
  r.y0 = std::max(r.y0, view.tile_row_begin);
  r.y1 = std::max(r.y0, std::min(r.y1, view.tile_row_end));
  return r;
}
inline int64_t area(const TileRect& r) { return int64_t(r.x1 - r.x0) * int64_t(r.y1 - r.y0); }

}  // namespace splat
