// What a view needs that is made band by band, since its pairs do not fit into memory at once: pairs of each line of
// tiles, and the sums of a Gaussian's rows from band to band. docs/math.md 5.4
#pragma once
#include "../math/blend.h"
#include "../math/tiles.h"
#include "device.cuh"

namespace splat {
namespace gpu {

struct LinesJob {
  int width, height, tiles_x, tiles_y;
  const float* records;
  const int64_t* chunk_counts;
  const int64_t* counters;
  int64_t* line_pairs;
};

// A record a thread, a chunk a block: differences from line to line, so that a large Gaussian costs no more than a small
// one. Integers may be added in any order; those below zero wrap around and back.
__global__ void __launch_bounds__(SPLAT_CHUNK) line_differences(LinesJob job) {
  if (overflowed(job.counters)) return;
  const int64_t chunk = blockIdx.x;
  if (int64_t(threadIdx.x) >= job.chunk_counts[2 * chunk]) return;
  const float* rec = job.records + (chunk * SPLAT_CHUNK + threadIdx.x) * kRecordSize;
  const TileRect r = tile_rect(rec[kRecX], rec[kRecY], rec[kRecHalfX], rec[kRecHalfY], job.tiles_x, job.tiles_y,
                               float(job.width), float(job.height));
  unsigned long long* lines = reinterpret_cast<unsigned long long*>(job.line_pairs);
  const unsigned long long columns = (unsigned long long)(r.x1 - r.x0);
  atomicAdd(lines + r.y0, columns);
  if (r.y1 < job.tiles_y) atomicAdd(lines + r.y1, 0ull - columns);
}

constexpr int kLinesThreads = 256;

// One block: from differences to pairs.
__global__ void __launch_bounds__(kLinesThreads) scan_lines(LinesJob job) {
  if (overflowed(job.counters)) return;
  long long before = 0;
  for (int first = 0; first < job.tiles_y; first += kLinesThreads) {
    const int line = first + int(threadIdx.x);
    const long long difference = line < job.tiles_y ? job.line_pairs[line] : 0;
    long long total = 0;
    const long long rank = block_exclusive_scan(difference, &total);
    if (line < job.tiles_y) job.line_pairs[line] = before + rank + difference;
    before += total;
  }
}

struct SumRowsJob {
  const int64_t* chunk_counts;
  const uint32_t *row_counts, *row_starts;
  const float* rows;
  const int64_t* counters;
  float* sums;
  uint32_t* reached;
};

constexpr int kSumRowsThreads = SPLAT_CHUNK;

// A chunk a block, sixteen threads a Gaussian, a field a thread. A Gaussian's rows lie in the order of its lines, so that
// the sum over bands from top to bottom adds the same numbers in the same order as project_vjp does with all rows at once.
__global__ void __launch_bounds__(kSumRowsThreads) sum_band_rows(SumRowsJob job) {
  if (overflowed(job.counters)) return;
  const int64_t chunk = blockIdx.x, visible = job.chunk_counts[2 * chunk];
  const int field = int(threadIdx.x) % kRowSize;
  for (int64_t k = threadIdx.x / kRowSize; k < visible; k += kSumRowsThreads / kRowSize) {
    const int64_t record = chunk * SPLAT_CHUNK + k;
    const uint32_t count = job.row_counts[record];
    if (count == 0) continue;
    const float* row = job.rows + int64_t(job.row_starts[record]) * kRowSize + field;
    float total = job.sums[record * kRowSize + field];
    for (uint32_t i = 0; i < count; ++i) total += row[int64_t(i) * kRowSize];
    job.sums[record * kRowSize + field] = total;
    if (field == 0) job.reached[record] = 1;
  }
}

}  // namespace gpu
}  // namespace splat
