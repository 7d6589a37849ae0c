// The order in which blocks take tiles: long lists first. A tile of many intersections that begins last would still run
// when all others are done. No result depends on the order.
#pragma once
#include "device.cuh"

namespace splat {
namespace gpu {

constexpr int kOrderThreads = 1024;
constexpr int kOrderWarps = kOrderThreads / kWarp;
constexpr int kLevels = 64;  // of length, in equal steps up to the longest list
constexpr int kLevelEntries = kLevels * kOrderWarps;
static_assert(kLevelEntries == 2 * kOrderThreads, "a thread scans two entries");

struct OrderJob {
  const int64_t* counters;
  const int64_t* tile_starts;
  int32_t* tile_order;        // [tiles]
  int64_t first_tile, tiles;  // those of the view's tile rows
};

SPLAT_DEVICE uint32_t list_length(const OrderJob& job, int64_t k) {
  const int64_t tile = job.first_tile + k;
  return uint32_t(job.tile_starts[tile + 1] - job.tile_starts[tile]);
}

// The level of a list's length, 0 for the longest lists.
SPLAT_DEVICE int level_of(uint32_t length, float scale) {
  const int level = int(float(length) * scale);
  return level < kLevels ? kLevels - 1 - level : 0;
}

SPLAT_DEVICE int first_lane(unsigned lanes) { return __ffs(int(lanes)) - 1; }
// The lanes of the warp whose tile has this lane's level, a bit each; none for a lane without a tile (not valid). Called
// by full warps.
SPLAT_DEVICE unsigned same_level(int level, bool valid) {
  const unsigned peers = __match_any_sync(kFullWarp, valid ? unsigned(level) : unsigned(kLevels));
  return valid ? peers : 0u;
}

// One block. A warp has consecutive tiles, and tiles of a level keep their order, so that neighbours, which share
// Gaussians, stay neighbours, and the order does not depend on that of the threads.
__global__ void __launch_bounds__(kOrderThreads) order_tiles(OrderJob job) {
  if (overflowed(job.counters)) return;
  SPLAT_SHARED(uint32_t, longest, kOrderWarps);
  SPLAT_SHARED(uint32_t, starts, kLevelEntries);  // [warps][levels] number of tiles, then their first place in the order
  const int64_t rounds = (job.tiles + kOrderThreads - 1) / kOrderThreads;
  const int64_t first = warp_id() * rounds * kWarp + lane_id();
  uint32_t most = 0;
  for (int64_t r = 0; r < rounds; ++r) {
    const int64_t k = first + r * kWarp;
    const uint32_t length = k < job.tiles ? list_length(job, k) : 0u;
    most = length > most ? length : most;
  }
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const uint32_t other = __shfl_xor_sync(kFullWarp, most, offset);
    most = other > most ? other : most;
  }
  if (lane_id() == 0) longest[warp_id()] = most;
  for (int e = int(threadIdx.x); e < kLevelEntries; e += kOrderThreads) starts[e] = 0;
  __syncthreads();
  for (int w = 0; w < kOrderWarps; ++w) most = longest[w] > most ? longest[w] : most;
  const float scale = float(kLevels) / (float(most) + 1.0f);

  uint32_t* const mine = starts + warp_id() * kLevels;
  for (int64_t r = 0; r < rounds; ++r) {
    const int64_t k = first + r * kWarp;
    const int level = k < job.tiles ? level_of(list_length(job, k), scale) : 0;
    const unsigned peers = same_level(level, k < job.tiles);
    if (peers != 0 && first_lane(peers) == lane_id()) mine[level] += uint32_t(__popc(peers));
    __syncwarp();
  }
  __syncthreads();

  // A thread has a level's tiles of two neighbouring warps.
  const int level_here = int(threadIdx.x) / (kOrderWarps / 2), pair = int(threadIdx.x) % (kOrderWarps / 2);
  uint32_t* const lower = starts + 2 * pair * kLevels + level_here;
  uint32_t* const upper = lower + kLevels;
  const uint32_t in_lower = *lower, before = block_exclusive_scan(in_lower + *upper);
  *lower = before, *upper = before + in_lower;
  __syncthreads();

  for (int64_t r = 0; r < rounds; ++r) {
    const int64_t k = first + r * kWarp;
    const int level = k < job.tiles ? level_of(list_length(job, k), scale) : 0;
    const unsigned peers = same_level(level, k < job.tiles);
    const uint32_t at = peers != 0 ? mine[level] : 0u;
    __syncwarp();  // all have read before the first lane of each level counts its peers
    if (peers != 0) {
      job.tile_order[at + unsigned(__popc(peers & ((1u << lane_id()) - 1u)))] = int32_t(job.first_tile + k);
      if (first_lane(peers) == lane_id()) mine[level] = at + uint32_t(__popc(peers));
    }
    __syncwarp();
  }
}

}  // namespace gpu
}  // namespace splat
