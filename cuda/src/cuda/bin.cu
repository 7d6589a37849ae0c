// Enqueues binning: kernels/bin.cuh and kernels/radix_sort.cuh. Every buffer has the caller's capacity; only the
// device knows how much of it is used.
//
// Workspace, bytes: 8 a visible Gaussian twice for the depth sort and 16 a chunk; 26 a tile intersection; 1 KB of
// histograms for every 2,048 of either.
#include "../../kernels/bin.cuh"

#include "../../kernels/radix_sort.cuh"
#include "launch.h"
#include "stages.h"

namespace splat {
namespace gpu {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The caller's workspace, cut up.
struct Workspace {
  int64_t *chunk_first, *chunk_isects, *depth_starts;
  uint32_t *keys[2], *order[2];
  uint32_t *isect_tiles[2], *isect_places[2];
  uint32_t *emitted_gaussians, *emitted_grad_rows;
  uint16_t* emitted_masks;
  uint32_t *histograms, *totals;
  int64_t bytes;

  Workspace(void* base, int64_t visible, int64_t isects) {
    char* at = static_cast<char*>(base);
    take(at, chunk_first, chunks_of(visible));
    take(at, chunk_isects, chunks_of(visible));
    take(at, depth_starts, ceil_div(visible, kEmitThreads));
    for (int k = 0; k < 2; ++k) take(at, keys[k], visible), take(at, order[k], visible);
    for (int k = 0; k < 2; ++k) take(at, isect_tiles[k], isects), take(at, isect_places[k], isects);
    take(at, emitted_gaussians, isects);
    take(at, emitted_grad_rows, isects);
    take(at, emitted_masks, isects);
    const int64_t most = visible > isects ? visible : isects;
    take(at, histograms, kDigits * ceil_div(most, kSortItems));
    take(at, totals, kDigits);
    bytes = at - static_cast<char*>(base);
  }

 private:
  template <class T>
  static void take(char*& at, T*& out, int64_t count) {
    out = reinterpret_cast<T*>(at);
    at += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
  }
};

// Sorts by the lowest `bits` of the keys; the result is in keys[0] and values[0].
void radix_sort(cudaStream_t stream, int bits, int64_t room, const int64_t* count, const int64_t* counters,
                uint32_t** keys, uint32_t** values, const Workspace& work) {
  SortPass pass = {};
  pass.count = count;
  pass.counters = counters;
  pass.histograms = work.histograms;
  pass.totals = work.totals;
  pass.blocks = ceil_div(room, kSortItems);
  for (pass.shift = 0; pass.shift < bits; pass.shift += kDigitBits) {
    pass.keys = keys[0], pass.values = values[0];
    pass.keys_out = keys[1], pass.values_out = values[1];
    SPLAT_LAUNCH(sort_histogram, pass.blocks, kSortThreads, stream, pass);
    SPLAT_LAUNCH(sort_scan, pass.blocks > 0 ? kDigits : 0, kSortThreads, stream, pass);
    SPLAT_LAUNCH(sort_scatter, pass.blocks, kSortThreads, stream, pass);
    uint32_t* swapped = keys[0];
    keys[0] = keys[1], keys[1] = swapped;
    swapped = values[0];
    values[0] = values[1], values[1] = swapped;
  }
}

int bits_of(int64_t count) {
  int bits = 0;
  while ((count - 1) >> bits > 0) ++bits;
  return bits;
}

}  // namespace

int64_t bin_bytes(const SplatView&, const SplatFrame& frame) {
  return Workspace(nullptr, frame.visible, frame.max_isects).bytes;
}

void bin(const SplatCall& call, const SplatView& view, const SplatGaussians& gaussians, SplatFrame& frame) {
  Workspace work(frame.workspace, frame.visible, frame.max_isects);
  BinJob job = {};
  job.width = view.width, job.height = view.height;
  job.tiles_x = tiles_across(view.width), job.tiles_y = tiles_across(view.height);
  job.tile_row_begin = view.tile_row_begin, job.tile_row_end = view.tile_row_end;
  job.chunks = chunks_of(gaussians.n);
  job.tiles = tiles_of(view);
  job.isect_capacity = frame.max_isects;
  job.projected = static_cast<const float*>(frame.projected);
  job.chunk_counts = frame.chunk_counts;
  job.counters = frame.counters;
  job.tiles_per_gauss = frame.tiles_per_gauss, job.isect_grad_starts = frame.isect_grad_starts;
  job.chunk_first = work.chunk_first, job.chunk_isects = work.chunk_isects;
  job.keys = work.keys[0], job.order = work.order[0];
  job.depth_starts = work.depth_starts;
  job.emitted_gaussians = work.emitted_gaussians, job.emitted_grad_rows = work.emitted_grad_rows;
  job.emitted_masks = work.emitted_masks;
  job.tile_starts = frame.tile_starts;
  job.isect_gaussians = frame.isect_gaussians, job.isect_grad_rows = frame.isect_grad_rows,
  job.isect_masks = frame.isect_masks;

  const cudaStream_t stream = stream_of(call);
  SPLAT_LAUNCH(scan_visible, 1, kScanThreads, stream, job);
  SPLAT_LAUNCH(count_isects, job.chunks, kCountThreads, stream, job);
  SPLAT_LAUNCH(scan_isects, 1, kScanThreads, stream, job);
  SPLAT_LAUNCH(place_isect_grads, job.chunks, kCountThreads, stream, job);
  radix_sort(stream, 32, frame.visible, frame.counters + SPLAT_COUNT_VISIBLE, frame.counters, work.keys, work.order,
             work);
  job.order = work.order[0];
  const int64_t rank_blocks = ceil_div(frame.visible, kEmitThreads);
  SPLAT_LAUNCH(count_ranks, rank_blocks, kEmitThreads, stream, job);
  SPLAT_LAUNCH(scan_ranks, 1, kScanThreads, stream, job);
  job.isect_tiles = work.isect_tiles[0], job.isect_places = work.isect_places[0];
  SPLAT_LAUNCH(emit_isects, rank_blocks, kEmitThreads, stream, job);
  radix_sort(stream, bits_of(job.tiles), frame.max_isects, frame.counters + SPLAT_COUNT_ISECTS, frame.counters,
             work.isect_tiles, work.isect_places, work);
  job.isect_tiles = work.isect_tiles[0], job.isect_places = work.isect_places[0];
  SPLAT_LAUNCH(list_isects, ceil_div(frame.max_isects + 1, kListThreads), kListThreads, stream, job);
}

}  // namespace gpu
}  // namespace splat
