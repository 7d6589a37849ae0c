// From projected Gaussians to the tile intersections, front to back in each tile: exact counts, places, emission,
// lists. docs/math.md 5
//
// A half-warp tests a tile: its lanes are the tile's sixteen 4x4 blocks, and a ballot is the intersection's mask.
// Counting and emitting call the same function on the same stored bytes.
#pragma once
#include "../math/blend.h"
#include "../math/tiles.h"
#include "device.cuh"

namespace splat {
namespace gpu {

struct BinJob {
  int width, height, tiles_x, tiles_y, tile_row_begin, tile_row_end;
  int64_t chunks, tiles, isect_capacity;
  const float* projected;
  const int64_t* chunk_counts;
  int64_t* counters;
  uint32_t *tiles_per_gauss, *isect_grad_starts;
  int64_t* chunk_first;   // [chunks] visible before the chunk
  int64_t* chunk_isects;    // [chunks] intersections of the chunk, then those before it
  uint32_t *keys, *order;  // [visible] depth bits and index into projected; sorted by depth
  int64_t* depth_starts;  // [ceil(visible / kEmitThreads)] intersections of a block of ranks, then those before it
  uint32_t *isect_tiles, *isect_places;  // [isect_capacity] tile and place of an emitted one; sorted by tile
  uint32_t *emitted_gaussians, *emitted_grad_rows;
  uint16_t* emitted_masks;
  int64_t* tile_starts;
  uint32_t *isect_gaussians, *isect_grad_rows;
  uint16_t* isect_masks;
};

// A projected Gaussian, as the exact test needs it.
struct Reach {
  float x, y, a, b, c, b_over_2a, b_over_2c, tau;
  TileRect rect;
};

// The part of a Gaussian's rectangle in the view's tile rows.
SPLAT_DEVICE TileRect listed_rect(const BinJob& job, const float* proj) {
  TileRect r = tile_rect(proj[kProjX], proj[kProjY], proj[kProjHalfX], proj[kProjHalfY], job.tiles_x, job.tiles_y,
                         float(job.width), float(job.height));
  r.y0 = r.y0 > job.tile_row_begin ? r.y0 : job.tile_row_begin;
  r.y1 = r.y1 < job.tile_row_end ? r.y1 : job.tile_row_end;
  r.y1 = r.y1 > r.y0 ? r.y1 : r.y0;
  return r;
}

SPLAT_DEVICE Reach reach_of(const BinJob& job, const float* proj) {
  Reach r;
  r.x = proj[kProjX], r.y = proj[kProjY];
  r.a = proj[kProjA], r.b = proj[kProjB], r.c = proj[kProjC];
  r.b_over_2a = r.b / (2 * r.a), r.b_over_2c = r.b / (2 * r.c);
  r.tau = proj[kProjLog2Opacity] - float(kMinLog2Alpha);
  r.rect = listed_rect(job, proj);
  return r;
}

// Whether the Gaussian reaches block (tx, ty, block) of the image.
SPLAT_DEVICE bool block_reached(const BinJob& job, const Reach& r, int tx, int ty, int block) {
  const int bx = block % kBlock, by = block / kBlock;
  if (tx * kTile + bx * kBlock >= job.width || ty * kTile + by * kBlock >= job.height) return false;
  const float x0 = (float(kBlock * bx) + 0.5f) + (float(tx * kTile) - r.x);
  const float y0 = (float(kBlock * by) + 0.5f) + (float(ty * kTile) - r.y);
  const float q = least_q_in_box(r.a, r.b, r.c, r.b_over_2a, r.b_over_2c, x0, y0, x0 + float(kBlock - 1),
                                 y0 + float(kBlock - 1));
  return box_reaches(q, r.tau);
}

// All tiles of one Gaussian by a full warp, two at a time. visit(tile, mask, number) is called by one lane of each tile
// that is reached, numbers counting them row by row; returns how many there are, in all lanes.
template <class Visit>
SPLAT_DEVICE unsigned visit_tiles(const BinJob& job, const float* proj, const Visit& visit) {
  const Reach r = reach_of(job, proj);
  const int columns = r.rect.x1 - r.rect.x0;
  const int64_t area = int64_t(columns) * int64_t(r.rect.y1 - r.rect.y0);
  const int half = lane_id() / kBlocksPerTile, block = lane_id() % kBlocksPerTile;
  unsigned found = 0;
  for (int64_t k = 0; k < area; k += 2) {
    const int64_t mine = k + half;
    const int tx = r.rect.x0 + int(mine % columns), ty = r.rect.y0 + int(mine / columns);
    const unsigned votes = __ballot_sync(kFullWarp, mine < area && block_reached(job, r, tx, ty, block));
    const unsigned low = votes & 0xffffu, high = votes >> 16;
    const unsigned mask = half == 0 ? low : high;
    if (block == 0 && mask != 0)
      visit(uint32_t(ty) * uint32_t(job.tiles_x) + uint32_t(tx), uint16_t(mask),
            found + (half != 0 && low != 0 ? 1u : 0u));
    found += (low != 0 ? 1u : 0u) + (high != 0 ? 1u : 0u);
  }
  return found;
}

constexpr int kScanThreads = 256;

// One block: visible Gaussians before each chunk.
__global__ void __launch_bounds__(kScanThreads) scan_visible(BinJob job) {
  if (overflowed(job.counters)) return;
  long long before = 0;
  for (int64_t first = 0; first < job.chunks; first += kScanThreads) {
    const int64_t c = first + threadIdx.x;
    long long total = 0;
    const long long rank = block_exclusive_scan((long long)(c < job.chunks ? job.chunk_counts[2 * c] : 0), &total);
    if (c < job.chunks) job.chunk_first[c] = before + rank;
    before += total;
  }
}

constexpr int kCountThreads = SPLAT_CHUNK;

// A chunk a block: the exact number of intersections of each visible Gaussian, and the keys of the depth sort.
__global__ void __launch_bounds__(kCountThreads) count_isects(BinJob job) {
  if (overflowed(job.counters)) return;
  const int64_t chunk = blockIdx.x, base = chunk * SPLAT_CHUNK;
  const int visible = int(job.chunk_counts[2 * chunk]);
  long long isects = 0;
  for (int k = warp_id(); k < visible; k += kCountThreads / kWarp) {
    const float* proj = job.projected + (base + k) * kProjectedSize;
    const unsigned found = visit_tiles(job, proj, [](uint32_t, uint16_t, unsigned) {});
    if (lane_id() != 0) continue;
    job.tiles_per_gauss[base + k] = found;
    isects += found;
    const int64_t at = job.chunk_first[chunk] + k;
    job.keys[at] = __float_as_uint(proj[kProjDepth]);  // bits of a positive depth order as the depths do
    job.order[at] = uint32_t(base + k);
  }
  const long long all = block_sum(isects);
  if (threadIdx.x == 0) job.chunk_isects[chunk] = all;
}

// One block: intersections before each chunk, and whether the capacity suffices.
__global__ void __launch_bounds__(kScanThreads) scan_isects(BinJob job) {
  if (overflowed(job.counters)) return;
  long long before = 0;
  for (int64_t first = 0; first < job.chunks; first += kScanThreads) {
    const int64_t c = first + threadIdx.x;
    long long total = 0;
    const long long rank = block_exclusive_scan((long long)(c < job.chunks ? job.chunk_isects[c] : 0), &total);
    if (c < job.chunks) job.chunk_isects[c] = before + rank;
    before += total;
  }
  __syncthreads();  // every thread has read the flag
  if (threadIdx.x != 0) return;
  job.counters[SPLAT_COUNT_ISECTS] = before;
  if (before > job.isect_capacity) job.counters[SPLAT_COUNT_OVERFLOW] = 1;
}

// Gradients of a Gaussian's intersections are contiguous, Gaussians in index order.
__global__ void __launch_bounds__(kCountThreads) place_isect_grads(BinJob job) {
  if (overflowed(job.counters)) return;
  const int64_t chunk = blockIdx.x, gaussian = chunk * SPLAT_CHUNK + threadIdx.x;
  const bool listed = int64_t(threadIdx.x) < job.chunk_counts[2 * chunk];
  const unsigned rank = block_exclusive_scan(listed ? job.tiles_per_gauss[gaussian] : 0u);
  if (listed) job.isect_grad_starts[gaussian] = uint32_t(job.chunk_isects[chunk] + rank);
}

constexpr int kEmitThreads = 256;  // ranks a block

// Intersections of each block of ranks.
__global__ void __launch_bounds__(kEmitThreads) count_ranks(BinJob job) {
  if (overflowed(job.counters)) return;
  const int64_t rank = int64_t(blockIdx.x) * kEmitThreads + threadIdx.x;
  const bool listed = rank < job.counters[SPLAT_COUNT_VISIBLE];
  const long long all = block_sum((long long)(listed ? job.tiles_per_gauss[job.order[rank]] : 0u));
  if (threadIdx.x == 0) job.depth_starts[blockIdx.x] = all;
}

// One block: intersections before each block of ranks.
__global__ void __launch_bounds__(kScanThreads) scan_ranks(BinJob job) {
  if (overflowed(job.counters)) return;
  const int64_t blocks = (job.counters[SPLAT_COUNT_VISIBLE] + kEmitThreads - 1) / kEmitThreads;
  long long before = 0;
  for (int64_t first = 0; first < blocks; first += kScanThreads) {
    const int64_t b = first + threadIdx.x;
    long long total = 0;
    const long long rank = block_exclusive_scan((long long)(b < blocks ? job.depth_starts[b] : 0), &total);
    if (b < blocks) job.depth_starts[b] = before + rank;
    before += total;
  }
}

// Intersections in depth order, the tiles of a Gaussian row by row.
__global__ void __launch_bounds__(kEmitThreads) emit_isects(BinJob job) {
  if (overflowed(job.counters)) return;
  SPLAT_SHARED(unsigned, offsets, kEmitThreads);
  const int64_t first = int64_t(blockIdx.x) * kEmitThreads, visible = job.counters[SPLAT_COUNT_VISIBLE];
  if (first >= visible) return;
  const int64_t rank = first + threadIdx.x;
  offsets[threadIdx.x] = block_exclusive_scan(rank < visible ? job.tiles_per_gauss[job.order[rank]] : 0u);
  __syncthreads();
  for (int k = warp_id(); k < kEmitThreads && first + k < visible; k += kEmitThreads / kWarp) {
    const uint32_t gaussian = job.order[first + k];
    const int64_t at = job.depth_starts[blockIdx.x] + offsets[k];
    const uint32_t grad_row = job.isect_grad_starts[gaussian];
    visit_tiles(job, job.projected + int64_t(gaussian) * kProjectedSize,
                [&](uint32_t tile, uint16_t mask, unsigned number) {
                  const int64_t place = at + number;
                  job.isect_tiles[place] = tile;
                  job.isect_places[place] = uint32_t(place);
                  job.emitted_gaussians[place] = gaussian;
                  job.emitted_grad_rows[place] = grad_row + number;
                  job.emitted_masks[place] = mask;
                });
  }
}

constexpr int kListThreads = 256;

// The lists in tile order, and the start of each tile: intersection i starts every tile after its predecessor's up to
// its own.
__global__ void __launch_bounds__(kListThreads) list_isects(BinJob job) {
  if (overflowed(job.counters)) return;
  const int64_t isects = job.counters[SPLAT_COUNT_ISECTS];
  const int64_t i = int64_t(blockIdx.x) * kListThreads + threadIdx.x;
  if (i < isects) {
    const uint32_t place = job.isect_places[i];
    job.isect_gaussians[i] = job.emitted_gaussians[place];
    job.isect_grad_rows[i] = job.emitted_grad_rows[place];
    job.isect_masks[i] = job.emitted_masks[place];
  }
  if (i > isects) return;
  const int64_t begin = i == 0 ? 0 : int64_t(job.isect_tiles[i - 1]) + 1;
  const int64_t end = i == isects ? job.tiles : int64_t(job.isect_tiles[i]);
  for (int64_t t = begin; t <= end; ++t) job.tile_starts[t] = i;
}

}  // namespace gpu
}  // namespace splat
