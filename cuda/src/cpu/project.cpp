// Projection of raw Gaussians: sixteen at a time, then colours for those that survive. docs/math.md 2 to 5.
#include <algorithm>
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

template <class Real>
struct ChunkProjector {
  using F = Lanes<Real, kLanes>;
  const SplatView& view;
  const SplatGaussians& gaussians;
  const SplatFrame& frame;
  const SplatAdam* lazy;
  const View<Real> pinhole;

  // Geometry of lanes `first`..: appends the survivors to the chunk's projected Gaussians; returns the upper bound of
  // their tile intersections.
  int64_t geometry(int64_t chunk, int first, int count, int& visible) const {
    int32_t lane_ids[kLanes];
    for (int k = 0; k < kLanes; ++k) lane_ids[k] = first + (k < count ? k : count - 1);
    const RawGeometry<F> raw = load_geometry<Real>(gaussians, chunk * kChunk, lane_ids, view.filter_3d);
    const ProjectedGeometry<F> g =
        project_geometry(pinhole, raw, view.antialiased != 0, view.filter_3d != nullptr);
    const F tau = g.log2_opacity - F(kMinLog2Alpha);
    const F half_x = support_half_width(tau, g.cov.a), half_y = support_half_width(tau, g.cov.c);

    // Every test is written so that NaN fails it.
    const auto alive = (g.pc[2] > F(view.z_near)) & (g.pc[2] < F(view.z_far)) & (tau >= F(0)) &
                       (g.quat_norm2 >= F(kMinQuatNorm2)) & (g.cov.det >= F(1e-6)) & (g.cov.det < F(kHuge)) &
                       (half_x < F(kHuge)) & (half_y < F(kHuge));
    uint32_t bits = alive.bits() & ((1u << count) - 1u);
    if (bits == 0) return 0;

    Real fields[kProjectedSize][kLanes];
    g.mean2d[0].store(fields[kProjX]);
    g.mean2d[1].store(fields[kProjY]);
    (g.conic.a * F(0.5 * kLog2E)).store(fields[kProjA]);
    (g.conic.b * F(kLog2E)).store(fields[kProjB]);
    (g.conic.c * F(0.5 * kLog2E)).store(fields[kProjC]);
    g.log2_opacity.store(fields[kProjLog2Opacity]);
    g.pc[2].store(fields[kProjDepth]);
    half_x.store(fields[kProjHalfX]);
    half_y.store(fields[kProjHalfY]);

    int64_t bound = 0;
    for (; bits != 0; bits &= bits - 1) {
      const int k = __builtin_ctz(bits);
      Real* proj = static_cast<Real*>(frame.projected) + (chunk * kChunk + visible) * kProjectedSize;
      for (int f : {kProjX, kProjY, kProjA, kProjB, kProjC, kProjLog2Opacity, kProjDepth, kProjHalfX, kProjHalfY})
        proj[f] = fields[f][k];
      const int64_t tiles = projected_tiles(view, proj);
      if (tiles == 0) continue;  // the slot is taken by the next one
      frame.ids[chunk * kChunk + visible] = int32_t(chunk * kChunk + first + k);
      frame.tiles_per_gauss[chunk * kChunk + visible] = uint32_t(tiles);
      bound += tiles;
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
    view_direction(pinhole.center, mean, direction);
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
    for (int i = 0; i < count; i += kLanes) bound += geometry(chunk, i, std::min(kLanes, count - i), visible);
    if (lazy != nullptr) catch_up_shN<Real>(gaussians, *lazy, frame.ids + chunk * kChunk, visible, view.sh_degree);
    for (int i = 0; i < visible; i += kLanes) colours(chunk, i, std::min(kLanes, visible - i));
    frame.chunk_counts[2 * chunk] = visible;
    frame.chunk_counts[2 * chunk + 1] = bound;
  }
};

}  // namespace

template <class Real>
void Stages<Real>::project(const SplatCall& call, const SplatView& view, const SplatGaussians& gaussians,
                           SplatFrame& frame, const SplatAdam* lazy) {
  const ChunkProjector<Real> job{view, gaussians, frame, lazy, pinhole_of<Real>(view)};
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
