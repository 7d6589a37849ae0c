// For a view that is made band by band, since its tile intersections do not fit into memory at once: the intersections
// of each tile row, and the sums of a Gaussian's intersection gradients from band to band. docs/math.md 5.4
#pragma once
#include "../math/blend.h"
#include "../math/tiles.h"
#include "device.cuh"

namespace splat {
namespace gpu {

struct TileRowsJob {
  int width, height, tiles_x, tiles_y;
  const float* projected;
  const int64_t* chunk_counts;
  const int64_t* counters;
  int64_t* tile_row_isects;
};

// A Gaussian a thread, a chunk a block: differences from tile row to tile row, so that a large Gaussian costs no more
// than a small one. Integers may be added in any order; those below zero wrap around and back.
__global__ void __launch_bounds__(SPLAT_CHUNK) tile_row_differences(TileRowsJob job) {
  if (overflowed(job.counters)) return;
  const int64_t chunk = blockIdx.x;
  if (int64_t(threadIdx.x) >= job.chunk_counts[2 * chunk]) return;
  const float* proj = job.projected + (chunk * SPLAT_CHUNK + threadIdx.x) * kProjectedSize;
  const TileRect r = tile_rect(proj[kProjX], proj[kProjY], proj[kProjHalfX], proj[kProjHalfY], job.tiles_x, job.tiles_y,
                               float(job.width), float(job.height));
  unsigned long long* tile_rows = reinterpret_cast<unsigned long long*>(job.tile_row_isects);
  const unsigned long long columns = (unsigned long long)(r.x1 - r.x0);
  atomicAdd(tile_rows + r.y0, columns);
  if (r.y1 < job.tiles_y) atomicAdd(tile_rows + r.y1, 0ull - columns);
}

constexpr int kTileRowsThreads = 256;

// One block: from differences to intersections.
__global__ void __launch_bounds__(kTileRowsThreads) scan_tile_rows(TileRowsJob job) {
  if (overflowed(job.counters)) return;
  long long before = 0;
  for (int first = 0; first < job.tiles_y; first += kTileRowsThreads) {
    const int tile_row = first + int(threadIdx.x);
    const long long difference = tile_row < job.tiles_y ? job.tile_row_isects[tile_row] : 0;
    long long total = 0;
    const long long rank = block_exclusive_scan(difference, &total);
    if (tile_row < job.tiles_y) job.tile_row_isects[tile_row] = before + rank + difference;
    before += total;
  }
}

struct SumIsectGradsJob {
  const int64_t* chunk_counts;
  const uint32_t *tiles_per_gauss, *isect_grad_starts;
  const float* isect_grads;
  const int64_t* counters;
  float* sums;
  uint32_t* reached;
};

constexpr int kSumIsectGradsThreads = SPLAT_CHUNK;

// A chunk a block, sixteen threads a Gaussian, a field a thread. A Gaussian's intersection gradients are in the order
// of its tile rows, so that the sum over bands from top to bottom adds the same numbers in the same order as
// project_vjp does with all of them at once.
__global__ void __launch_bounds__(kSumIsectGradsThreads) sum_band_isect_grads(SumIsectGradsJob job) {
  if (overflowed(job.counters)) return;
  const int64_t chunk = blockIdx.x, visible = job.chunk_counts[2 * chunk];
  const int field = int(threadIdx.x) % kIsectGradSize;
  for (int64_t k = threadIdx.x / kIsectGradSize; k < visible; k += kSumIsectGradsThreads / kIsectGradSize) {
    const int64_t slot = chunk * SPLAT_CHUNK + k;
    const uint32_t count = job.tiles_per_gauss[slot];
    if (count == 0) continue;
    const float* isect_grad = job.isect_grads + int64_t(job.isect_grad_starts[slot]) * kIsectGradSize + field;
    float total = job.sums[slot * kIsectGradSize + field];
    for (uint32_t i = 0; i < count; ++i) total += isect_grad[int64_t(i) * kIsectGradSize];
    job.sums[slot * kIsectGradSize + field] = total;
    if (field == 0) job.reached[slot] = 1;
  }
}

}  // namespace gpu
}  // namespace splat
