// Projection of raw Gaussians, one a thread and a chunk a block; the visible ones are compacted in index order.
// docs/math.md 2-5
#pragma once
#include "adam_group.cuh"
#include "geometry.cuh"

namespace splat {
namespace gpu {

struct ProjectJob {
  View<float> view;
  RawArrays gaussians;
  bool antialiased;
  int tiles_x, tiles_y;
  float* projected;
  int32_t* ids;
  int64_t* chunk_counts;
  uint32_t* tiles_per_gauss;
  const int64_t* counters;
  LazyShN lazy;
};

SPLAT_DEVICE TileRect projected_rect(const float* proj, int tiles_x, int tiles_y, float width, float height) {
  return tile_rect(proj[kProjX], proj[kProjY], proj[kProjHalfX], proj[kProjHalfY], tiles_x, tiles_y, width, height);
}

// The geometry of Gaussian i; the tiles of its rectangle, 0 when it is culled. Only the mean is read of a Gaussian
// behind the camera.
template <bool PINHOLE>
SPLAT_DEVICE int64_t project_one(const ProjectJob& job, int64_t i, RawGeometry<float>& raw, float* proj) {
  const View<float>& view = job.view;
  load_mean(job.gaussians, i, raw.mean);
  float pc[3];
  world_to_camera(view, raw.mean, pc);
  // Every test is written so that NaN fails it.
  if (!(pc[2] > view.z_near && pc[2] < view.z_far)) return 0;
  load_shape(job.gaussians, i, raw);
  const ProjectedGeometry<float> g =
      project_geometry<PINHOLE>(view, raw, job.antialiased, job.gaussians.filter_3d != nullptr);
  const float tau = g.log2_opacity - float(kMinLog2Alpha);
  const float half_x = support_half_width(tau, g.cov.a), half_y = support_half_width(tau, g.cov.c);
  const bool alive = tau >= 0.0f && g.quat_norm2 >= float(kMinQuatNorm2) && g.cov.det >= 1e-6f &&
                     g.cov.det < float(kHuge) && half_x < float(kHuge) && half_y < float(kHuge);
  if (!alive) return 0;
  proj[kProjX] = g.mean2d[0];
  proj[kProjY] = g.mean2d[1];
  proj[kProjA] = g.conic.a * float(0.5 * kLog2E);
  proj[kProjB] = g.conic.b * float(kLog2E);
  proj[kProjC] = g.conic.c * float(0.5 * kLog2E);
  proj[kProjLog2Opacity] = g.log2_opacity;
  proj[kProjDepth] = g.pc[2];
  proj[kProjHalfX] = half_x;
  proj[kProjHalfY] = half_y;
  const TileRect r = projected_rect(proj, job.tiles_x, job.tiles_y, view.width, view.height);
  return int64_t(r.x1 - r.x0) * int64_t(r.y1 - r.y0);
}

// A Gaussian with a colour that is not finite reaches no pixel: its rectangle becomes empty.
template <int DEGREE>
SPLAT_DEVICE void colour_one(const ProjectJob& job, int64_t i, const float* mean, float* proj) {
  float direction[3], basis[ShN<DEGREE>::kRoom], shN[ShN<DEGREE>::kNumbers], sum[3];
  view_direction(job.view.center, mean, direction);
  sh_basis(DEGREE, direction, basis);
  load_shN<DEGREE>(job.gaussians, i, shN);
  sh_sum<DEGREE>(job.gaussians.sh0 + 3 * i, shN, basis, sum);
  bool finite = true;
  for (int c = 0; c < 3; ++c) {
    proj[kProjRed + c] = sh_colour(sum[c]);
    finite = finite && abs_(sum[c]) < float(kHuge);
  }
  if (!finite) proj[kProjHalfX] = __uint_as_float(0x7fc00000u);
}

// Brings shN of a warp's visible Gaussians to the step before this one, all lanes on one after another. Every lane
// calls it.
template <int DEGREE>
SPLAT_DEVICE void catch_up_shN(const LazyShN& lazy, int width, int64_t i, bool seen) {
  constexpr int kUsed = 3 * ShN<DEGREE>::kCount;
  AdamDecay<float> mine = {};
  bool late = false;
  if (seen) {
    const int64_t last_step = lazy.steps[i];
    late = last_step < lazy.now;
    if (late) {
      mine = make_adam_decay<float>(lazy.decay_table, last_step, lazy.now);
      lazy.steps[i] = int32_t(lazy.now);
    }
  }
  unsigned waiting = __ballot_sync(kFullWarp, late);
  for (; waiting != 0; waiting &= waiting - 1) {
    const int owner = __ffs(int(waiting)) - 1;
    AdamDecay<float> decay;
    decay.rate = __shfl_sync(kFullWarp, mine.rate, owner);
    decay.eps = __shfl_sync(kFullWarp, mine.eps, owner);
    decay.decay1 = __shfl_sync(kFullWarp, mine.decay1, owner);
    decay.decay2 = __shfl_sync(kFullWarp, mine.decay2, owner);
    const int64_t row = (i - lane_id() + owner) * width;
    for (int e = lane_id(); e < kUsed; e += kWarp) catch_up_at(lazy, decay, row + e);
  }
  __syncwarp();  // rows are read by the threads of their Gaussians
}

template <int DEGREE, bool PINHOLE>
__global__ void __launch_bounds__(SPLAT_CHUNK) project_chunks(ProjectJob job) {
  if (overflowed(job.counters)) return;
  const int64_t chunk = blockIdx.x, i = chunk * SPLAT_CHUNK + threadIdx.x;
  RawGeometry<float> raw;
  float proj[kProjHalfY + 1];
  const int64_t tiles = i < job.gaussians.n ? project_one<PINHOLE>(job, i, raw, proj) : 0;
  int visible = 0;
  const int rank = block_exclusive_scan(tiles > 0 ? 1 : 0, &visible);
  const long long bound = block_sum((long long)(tiles));
  if (job.lazy.steps != nullptr) catch_up_shN<DEGREE>(job.lazy, 3 * job.gaussians.shN_count, i, tiles > 0);
  if (tiles > 0) {
    colour_one<DEGREE>(job, i, raw.mean, proj);
    const int64_t slot = chunk * SPLAT_CHUNK + rank;
    float4* out = reinterpret_cast<float4*>(job.projected + slot * kProjectedSize);
    for (int q = 0; q < 3; ++q) out[q] = make_float4(proj[4 * q], proj[4 * q + 1], proj[4 * q + 2], proj[4 * q + 3]);
    job.ids[slot] = int32_t(i);
    job.tiles_per_gauss[slot] = uint32_t(tiles);
  }
  if (threadIdx.x == 0) {
    job.chunk_counts[2 * chunk] = visible;
    job.chunk_counts[2 * chunk + 1] = bound;
  }
}

constexpr int kTotalsThreads = 256;

// One block: the totals of all chunks.
__global__ void __launch_bounds__(kTotalsThreads)
    project_totals(const int64_t* chunk_counts, int64_t chunks, int64_t* counters) {
  if (overflowed(counters)) return;
  long long visible = 0, bound = 0;
  for (int64_t c = threadIdx.x; c < chunks; c += kTotalsThreads) {
    visible += chunk_counts[2 * c];
    bound += chunk_counts[2 * c + 1];
  }
  visible = block_sum(visible);
  bound = block_sum(bound);
  if (threadIdx.x != 0) return;
  counters[SPLAT_COUNT_VISIBLE] = visible;
  counters[SPLAT_COUNT_MAX_ISECTS] = bound;
}

}  // namespace gpu
}  // namespace splat
