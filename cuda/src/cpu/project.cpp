// Projection of raw Gaussians: sixteen at a time, then colours for those that survive. docs/math.md 2 to 5.
#include <algorithm>
#include <cmath>
#include <limits>

#include "../../math/blend.h"
#include "../../math/projection.h"
#include "../../math/sh.h"
#include "geometry.h"
#include "lanes.h"
#include "optimise.h"
#include "pool.h"
#include "stages.h"

namespace splat {
namespace {

// A bound of where Gaussians can be seen, from mean and largest scale alone. Sixteen neighbours that all lie outside
// need no covariance, and a chunk whose bounds lie outside is not read. What it rejects, the exact tests reject too,
// whatever either rounds.
//
// 3.4 bounds the standard deviation on an image axis: s f |row of J R| / z, with x/z clamped. At opacity 1 the support
// ends at sqrt(2 ln 255) = 3.33 of them (5.1). All is multiplied by z. An orthographic camera has the same with z = 1 and
// no slopes in J; of a fisheye's Gaussians only the near plane rejects.
template <class Real>
struct Frustum {
  using F = Lanes<Real, kLanes>;
  static constexpr double kReach = 3.36, kBlurReach = 4;  // the second is in pixels, with the margin of tile_rect
  static constexpr double kRounding = 1e-5;               // of a camera coordinate, relative to the terms of its sum
  struct Axis {
    Real focal, offset, half, per_scale, per_error;
    Axis(double f, double centre, double size, double norm, double norm_z, double low, double high)
        : focal(Real(f)), offset(Real(centre - 0.5 * size)), half(Real(0.5 * size + kBlurReach)),
          per_scale(Real(kReach * f * (norm + std::max(std::abs(low), std::abs(high)) * norm_z))),
          per_error(Real(f + std::abs(centre - 0.5 * size) + 0.5 * size + kBlurReach)) {}
    SPLAT_INLINE typename F::Mask misses(F along, F z, F in_front, F scale, F error) const {
      const F distance = abs_(along * F(focal) + z * F(offset)) * F(0.999);
      return distance > in_front * F(half) + scale * F(per_scale) + error * F(per_error);
    }
    // The same for all points of a box around `centre` with half sides `extent`; `row` is that of the rotation.
    bool misses(const View<Real>& v, int row, const double* centre, const double* extent, double in_front, double scale,
                double error) const {
      const bool flat = v.model == kOrtho;
      double middle = double(v.translation[row]) * focal + (flat ? 1.0 : double(v.translation[2])) * offset, reach = 0;
      for (int k = 0; k < 3; ++k) {
        const double slope = double(v.rotation[3 * row + k]) * focal + (flat ? 0.0 : double(v.rotation[6 + k])) * offset;
        middle += slope * centre[k], reach += std::abs(slope) * extent[k];
      }
      return (std::abs(middle) - reach) * 0.999 > in_front * half + scale * per_scale + error * per_error;
    }
  };
  const View<Real>& view;
  const bool filtered;
  const Real entries, translation;  // the largest of the pose, for the rounding
  const Axis x, y;

  static double norm(const View<Real>& v, int row) {
    return std::sqrt(double(v.rotation[3 * row]) * v.rotation[3 * row] +
                     double(v.rotation[3 * row + 1]) * v.rotation[3 * row + 1] +
                     double(v.rotation[3 * row + 2]) * v.rotation[3 * row + 2]);
  }
  template <int N>
  static Real largest(const Real (&values)[N]) {
    Real most = 0;
    for (const Real value : values) most = std::max(most, std::abs(value));
    return most;
  }
  Frustum(const View<Real>& v, bool with_filter)
      : view(v), filtered(with_filter), entries(largest(v.rotation)), translation(largest(v.translation)),
        x(v.fx, v.cx, v.width, norm(v, 0), v.model == kOrtho ? 0 : norm(v, 2), v.x_min, v.x_max),
        y(v.fy, v.cy, v.height, norm(v, 1), v.model == kOrtho ? 0 : norm(v, 2), v.y_min, v.y_max) {}

  // Whether none of the lanes can be seen; false where anything is NaN.
  template <bool PINHOLE>
  SPLAT_INLINE bool misses(const RawGeometry<F>& raw) const {
    F pc[3];
    world_to_camera(view, raw.mean, pc);
    const F terms = (abs_(raw.mean[0]) + abs_(raw.mean[1]) + abs_(raw.mean[2])) * F(entries) + F(translation);
    const F error = terms * F(kRounding);
    const auto behind = pc[2] < F(view.z_near) - error;
    if (behind.bits() == kAll) return true;
    if (!PINHOLE && view.model != kOrtho) return false;
    F scale = activate_scale(max_(raw.log_scale[0], max_(raw.log_scale[1], raw.log_scale[2])));
    if (filtered) scale = scale + abs_(raw.filter_3d);
    const F z = PINHOLE ? pc[2] : F(1), in_front = max_(z, F(0));
    return (behind | x.misses(pc[0], z, in_front, scale, error) | y.misses(pc[1], z, in_front, scale, error)).bits() ==
           kAll;
  }
  // Whether nothing within the bounds of a chunk can be seen; false where anything is NaN.
  bool misses(const Real* bounds) const {
    double centre[3], extent[3], terms = translation;
    for (int k = 0; k < 3; ++k) {
      const double low = bounds[k], high = bounds[3 + k];
      centre[k] = 0.5 * (low + high), extent[k] = 0.5 * (high - low);
      terms += std::max(std::abs(low), std::abs(high)) * entries;
    }
    const double error = terms * kRounding;
    double z = view.translation[2], reach = 0;
    for (int k = 0; k < 3; ++k)
      z += double(view.rotation[6 + k]) * centre[k], reach += std::abs(double(view.rotation[6 + k])) * extent[k];
    if (z + reach < view.z_near - error) return true;
    if (view.model == kFisheye) return false;
    const double in_front = view.model == kOrtho ? 1.0 : std::max(z + reach, 0.0);
    const double scale = std::exp(double(bounds[6])) * 1.001 + (filtered ? double(bounds[7]) : 0.0);
    return x.misses(view, 0, centre, extent, in_front, scale, error) ||
           y.misses(view, 1, centre, extent, in_front, scale, error);
  }
  static constexpr uint32_t kAll = (1u << kLanes) - 1u;
};

template <class Real>
struct ChunkProjector {
  using F = Lanes<Real, kLanes>;
  const SplatView& view;
  const SplatGaussians& gaussians;
  const SplatFrame& frame;
  const SplatAdam* lazy;
  const View<Real> camera;
  const Frustum<Real> frustum;

  // The upper bounds of the tiles that sixteen projected Gaussians reach.
  SPLAT_INLINE void count_tiles(const F* rows, int64_t* tiles) const {
    Real x[kLanes], y[kLanes], half_x[kLanes], half_y[kLanes];
    rows[kProjX].store(x), rows[kProjY].store(y), rows[kProjHalfX].store(half_x), rows[kProjHalfY].store(half_y);
    const int32_t across = tiles_across(view.width), down = tiles_across(view.height);
    const Real width = Real(view.width), height = Real(view.height);
    for (int k = 0; k < kLanes; ++k) {  // vectorised by the compiler
      const TileRect r = tile_rect(x[k], y[k], half_x[k], half_y[k], across, down, width, height);
      tiles[k] = area(r);
    }
  }

  // Geometry of lanes `first`..: appends the survivors to the chunk's projected Gaussians; returns the upper bound of
  // their tile intersections.
  template <bool PINHOLE>
  int64_t geometry(int64_t chunk, int first, int count, int& visible) const {
    int32_t lane_ids[kLanes];
    for (int k = 0; k < kLanes; ++k) lane_ids[k] = first + (k < count ? k : count - 1);
    RawGeometry<F> raw;
    load_extent<Real>(gaussians, chunk * kChunk, lane_ids, view.filter_3d, raw);
    if (frustum.template misses<PINHOLE>(raw)) return 0;
    load_shape<Real>(gaussians, chunk * kChunk, lane_ids, raw);
    const ProjectedGeometry<F> g =
        project_geometry<PINHOLE>(camera, raw, view.antialiased != 0, view.filter_3d != nullptr);
    const F tau = g.log2_opacity - F(kMinLog2Alpha);
    const F half_x = support_half_width(tau, g.cov.a), half_y = support_half_width(tau, g.cov.c);

    // Every test is written so that NaN fails it.
    const auto alive = (g.pc[2] > F(view.z_near)) & (g.pc[2] < F(view.z_far)) & (tau >= F(0)) &
                       (g.quat_norm2 >= F(kMinQuatNorm2)) & (g.cov.det >= F(1e-6)) & (g.cov.det < F(kHuge)) &
                       (half_x < F(kHuge)) & (half_y < F(kHuge));
    uint32_t bits = alive.bits() & ((1u << count) - 1u);
    if (bits == 0) return 0;

    F rows[kProjectedSize];
    for (F& field : rows) field = F(0);
    rows[kProjX] = g.mean2d[0], rows[kProjY] = g.mean2d[1];
    rows[kProjA] = g.conic.a * F(0.5 * kLog2E), rows[kProjB] = g.conic.b * F(kLog2E);
    rows[kProjC] = g.conic.c * F(0.5 * kLog2E);
    rows[kProjLog2Opacity] = g.log2_opacity;
    rows[kProjDepth] = g.pc[2];
    rows[kProjHalfX] = half_x, rows[kProjHalfY] = half_y;
    int64_t tiles[kLanes];
    count_tiles(rows, tiles);
    transpose_16(rows);

    int64_t bound = 0;
    for (; bits != 0; bits &= bits - 1) {
      const int k = __builtin_ctz(bits);
      if (tiles[k] == 0) continue;
      rows[k].store(static_cast<Real*>(frame.projected) + (chunk * kChunk + visible) * kProjectedSize);
      frame.ids[chunk * kChunk + visible] = int32_t(chunk * kChunk + first + k);
      frame.tiles_per_gauss[chunk * kChunk + visible] = uint32_t(tiles[k]);
      bound += tiles[k];
      ++visible;
    }
    return bound;
  }

  void colours(int64_t chunk, int first, int count) const {
    int32_t lane_ids[kLanes];
    const int32_t* ids = frame.ids + chunk * kChunk + first;
    for (int k = 0; k < kLanes; ++k) lane_ids[k] = ids[k < count ? k : count - 1] - int32_t(chunk * kChunk);
    F mean[3], direction[3];
    load_rows<3>(static_cast<const Real*>(gaussians.means) + 3 * chunk * kChunk, lane_ids, mean);
    view_direction(camera.center, mean, direction);
    F basis[24], shN[72], sum[3];
    sh_basis(view.sh_degree, direction, basis);
    load_shN<Real>(gaussians, chunk * kChunk, lane_ids, view.sh_degree, shN);
    sh_sum<Real>(gaussians, chunk * kChunk, lane_ids, view.sh_degree, shN, basis, sum);
    Real rgb[3][kLanes];
    for (int c = 0; c < 3; ++c) sh_colour(sum[c]).store(rgb[c]);
    Real* proj = static_cast<Real*>(frame.projected) + (chunk * kChunk + first) * kProjectedSize;
    // A Gaussian with a colour that is not finite reaches no pixel: its rectangle becomes empty.
    const uint32_t finite = ((abs_(sum[0]) < F(kHuge)) & (abs_(sum[1]) < F(kHuge)) & (abs_(sum[2]) < F(kHuge))).bits();
    for (int k = 0; k < count; ++k, proj += kProjectedSize) {
      for (int c = 0; c < 3; ++c) proj[kProjRed + c] = rgb[c][k];
      if ((finite >> k & 1) == 0) proj[kProjHalfX] = std::numeric_limits<Real>::quiet_NaN();
    }
  }

  void operator()(int64_t chunk) const {
    const int count = int(std::min(kChunk, gaussians.n - chunk * kChunk));
    int visible = 0;
    int64_t bound = 0;
    if (view.bounds != nullptr && frustum.misses(static_cast<const Real*>(view.bounds) + chunk * SPLAT_BOUNDS)) {
      frame.chunk_counts[2 * chunk] = frame.chunk_counts[2 * chunk + 1] = 0;
      return;
    }
    for (int i = 0; i < count; i += kLanes) {
      const int lanes = std::min(kLanes, count - i);
      bound += camera.model == kPinhole ? geometry<true>(chunk, i, lanes, visible)
                                        : geometry<false>(chunk, i, lanes, visible);
    }
    if (lazy != nullptr) catch_up_shN<Real>(gaussians, *lazy, frame.ids + chunk * kChunk, visible, view.sh_degree);
    const int32_t* ids = frame.ids + chunk * kChunk;
    for (int i = 0; i < visible; i += kLanes) {
      const int next = i + kLanes;
      prefetch_shN<Real>(gaussians, ids + next, std::min(kLanes, visible - next), view.sh_degree);
      colours(chunk, i, std::min(kLanes, visible - i));
    }
    frame.chunk_counts[2 * chunk] = visible;
    frame.chunk_counts[2 * chunk + 1] = bound;
  }
};

}  // namespace

template <class Real>
void Stages<Real>::project(const SplatCall& call, const SplatView& view, const SplatGaussians& gaussians,
                           SplatFrame& frame, const SplatAdam* lazy) {
  const View<Real> camera = camera_of<Real>(view);
  const Frustum<Real> frustum(camera, view.filter_3d != nullptr);
  const ChunkProjector<Real> job{view, gaussians, frame, lazy, camera, frustum};
  const int64_t chunks = chunks_of(gaussians.n);
  parallel_for(call.threads, chunks, job);
  frame.visible = frame.max_isects = 0;
  for (int64_t c = 0; c < chunks; ++c) {
    frame.visible += frame.chunk_counts[2 * c];
    frame.max_isects += frame.chunk_counts[2 * c + 1];
  }
}

template void Stages<float>::project(const SplatCall&, const SplatView&, const SplatGaussians&, SplatFrame&,
                                     const SplatAdam*);
#ifdef SPLAT_WITH_DOUBLE
template void Stages<double>::project(const SplatCall&, const SplatView&, const SplatGaussians&, SplatFrame&,
                                      const SplatAdam*);
#endif

}  // namespace splat
