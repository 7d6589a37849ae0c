// Projection of raw Gaussians, one a thread and a chunk a block; the visible are compacted in index order. docs/math.md 2-5
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
  float* records;
  int32_t* ids;
  int64_t* chunk_counts;
  uint32_t* row_counts;
  const int64_t* counters;
  LazyRest rest;
};

SPLAT_DEVICE TileRect record_rect(const float* rec, int tiles_x, int tiles_y, float width, float height) {
  return tile_rect(rec[kRecX], rec[kRecY], rec[kRecHalfX], rec[kRecHalfY], tiles_x, tiles_y, width, height);
}

// The geometry of Gaussian i; the tiles of its rectangle, 0 when it is culled. Nothing is read of what lies behind the
// camera but its mean.
SPLAT_DEVICE int64_t project_one(const ProjectJob& job, int64_t i, RawGeometry<float>& raw, float* rec) {
  const View<float>& view = job.view;
  load_mean(job.gaussians, i, raw.mean);
  float pc[3];
  world_to_camera(view, raw.mean, pc);
  // Every test is written so that NaN fails it.
  if (!(pc[2] > view.z_near && pc[2] < view.z_far)) return 0;
  load_shape(job.gaussians, i, raw);
  const ProjectedGeometry<float> g = project_geometry(view, raw, job.antialiased, job.gaussians.smoothing != nullptr);
  const float tau = g.log2_opacity - float(kMinLog2Alpha);
  const float half_x = support_half_width(tau, g.cov.a), half_y = support_half_width(tau, g.cov.c);
  const bool alive = tau >= 0.0f && g.quat_norm2 >= float(kMinQuatNorm2) && g.cov.det >= 1e-6f &&
                     g.cov.det < float(kHuge) && half_x < float(kHuge) && half_y < float(kHuge);
  if (!alive) return 0;
  rec[kRecX] = g.mean2d[0];
  rec[kRecY] = g.mean2d[1];
  rec[kRecA] = g.conic.a * float(0.5 * kLog2E);
  rec[kRecB] = g.conic.b * float(kLog2E);
  rec[kRecC] = g.conic.c * float(0.5 * kLog2E);
  rec[kRecLog2Opacity] = g.log2_opacity;
  rec[kRecDepth] = g.pc[2];
  rec[kRecHalfX] = half_x;
  rec[kRecHalfY] = half_y;
  const TileRect r = record_rect(rec, job.tiles_x, job.tiles_y, view.width, view.height);
  return int64_t(r.x1 - r.x0) * int64_t(r.y1 - r.y0);
}

// A colour that is no number reaches no pixel: its rectangle becomes empty.
template <int DEGREE>
SPLAT_DEVICE void colour_one(const ProjectJob& job, int64_t i, const float* mean, float* rec) {
  float direction[3], basis[ShRest<DEGREE>::kRoom], sum[3];
  view_direction(job.view.center, mean, direction);
  sh_basis(DEGREE, direction, basis);
  sh_sum<DEGREE>(job.gaussians, i, basis, sum);
  bool finite = true;
  for (int c = 0; c < 3; ++c) {
    rec[kRecRed + c] = sh_colour(sum[c]);
    finite = finite && abs_(sum[c]) < float(kHuge);
  }
  if (!finite) rec[kRecHalfX] = __uint_as_float(0x7fc00000u);
}

// The SH rest of the block's visible Gaussians brought to the step before this one, a warp a Gaussian. Every thread
// calls it; `rank` is its place among the visible.
template <int DEGREE>
SPLAT_DEVICE void catch_up_rest(const LazyRest& rest, int width, int64_t base, bool seen, int rank, int visible) {
  constexpr int kUsed = 3 * ShRest<DEGREE>::kCount;
  SPLAT_SHARED(AdamGap<float>, gaps, SPLAT_CHUNK);
  SPLAT_SHARED(int, late, SPLAT_CHUNK);  // local index, or -1 for one that missed nothing
  if (seen) {
    const int64_t i = base + threadIdx.x;
    const int64_t stands = rest.steps[i];
    late[rank] = stands < rest.now ? int(threadIdx.x) : -1;
    if (stands < rest.now) {
      gaps[rank] = make_adam_gap<float>(rest.gaps, stands, rest.now);
      rest.steps[i] = int32_t(rest.now);
    }
  }
  __syncthreads();
  for (int r = warp_id(); r < visible; r += SPLAT_CHUNK / kWarp) {
    if (late[r] < 0) continue;
    const AdamGap<float> gap = gaps[r];
    const int64_t row = (base + late[r]) * width;
    for (int e = lane_id(); e < kUsed; e += kWarp) catch_up_at(rest, gap, row + e);
  }
  __syncthreads();  // rows are read by the threads of their Gaussians
}

template <int DEGREE>
__global__ void __launch_bounds__(SPLAT_CHUNK) project_chunks(ProjectJob job) {
  if (overflowed(job.counters)) return;
  const int64_t chunk = blockIdx.x, i = chunk * SPLAT_CHUNK + threadIdx.x;
  RawGeometry<float> raw;
  float rec[kRecHalfY + 1];
  const int64_t tiles = i < job.gaussians.n ? project_one(job, i, raw, rec) : 0;
  int visible = 0;
  const int rank = block_exclusive_scan(tiles > 0 ? 1 : 0, &visible);
  const long long bound = block_sum((long long)(tiles));
  if (job.rest.steps != nullptr)
    catch_up_rest<DEGREE>(job.rest, 3 * job.gaussians.sh_rest, chunk * SPLAT_CHUNK, tiles > 0, rank, visible);
  if (tiles > 0) {
    colour_one<DEGREE>(job, i, raw.mean, rec);
    const int64_t slot = chunk * SPLAT_CHUNK + rank;
    float4* out = reinterpret_cast<float4*>(job.records + slot * kRecordSize);
    for (int q = 0; q < 3; ++q) out[q] = make_float4(rec[4 * q], rec[4 * q + 1], rec[4 * q + 2], rec[4 * q + 3]);
    job.ids[slot] = int32_t(i);
    job.row_counts[slot] = uint32_t(tiles);
  }
  if (threadIdx.x == 0) {
    job.chunk_counts[2 * chunk] = visible;
    job.chunk_counts[2 * chunk + 1] = bound;
  }
}

constexpr int kTotalsThreads = 256;

// One block: what all chunks have together.
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
  counters[SPLAT_COUNT_PAIR_BOUND] = bound;
}

}  // namespace gpu
}  // namespace splat
