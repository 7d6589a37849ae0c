// Enqueues binning: kernels/bin.cuh, radix_sort.cuh and order_tiles.cuh. Every buffer has the caller's capacity; only
// the device knows how much of it is used.
//
// Workspace, bytes: 16 a visible Gaussian for the depth sort and 16 a chunk; 24 a tile intersection, 26 where there are
// more tiles than a key packs with a mask; 1 KB of histograms for every 3,072 of either.
#include "../../kernels/bin.cuh"

#include "../../kernels/order_tiles.cuh"
#include "../../kernels/radix_sort.cuh"
#include "launch.h"
#include "stages.h"

namespace splat {
namespace gpu {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The caller's workspace, cut up.
struct Workspace {
  BinTotals* totals;
  int64_t *chunk_starts, *block_starts, *window_starts;
  int64_t* rank_starts;  // over the keys, which the depth sort no longer needs
  uint32_t *keys[2], *order[2];
  uint32_t* isect_keys[2];
  uint64_t* isect_values[2];
  uint16_t* candidate_masks;  // over the second keys and values, which emission does not write
  uint16_t* emitted_masks;
  uint32_t *histograms, *sort_totals;
  int64_t windows, bytes;
  bool packed;

  Workspace(void* base, int64_t visible, int64_t isects, int64_t tiles) {
    char* at = static_cast<char*>(base);
    packed = tiles <= kPackedTiles;
    windows = kWindowsAnIsect * isects / kWindow + 1;
    take(at, totals, 1);
    take(at, chunk_starts, chunks_of(visible));
    take(at, block_starts, ceil_div(visible, kRankThreads));
    take(at, window_starts, windows);
    take(at, rank_starts, visible);
    keys[0] = reinterpret_cast<uint32_t*>(rank_starts), keys[1] = keys[0] + visible;
    for (int k = 0; k < 2; ++k) take(at, order[k], visible);
    take(at, isect_keys[0], isects);
    take(at, isect_values[0], isects);
    take(at, isect_values[1], isects + kWindow * sizeof(uint16_t) / sizeof(uint64_t));
    take(at, isect_keys[1], isects);
    candidate_masks = reinterpret_cast<uint16_t*>(isect_values[1]);
    take(at, emitted_masks, packed ? 0 : isects);
    const int64_t most = visible > isects ? visible : isects;
    take(at, histograms, kDigits * ceil_div(most, kSortItems));
    take(at, sort_totals, kDigits);
    bytes = at - static_cast<char*>(base);
  }

 private:
  // Candidates that have a mask kept for them, for each intersection there is room for. With more, every block tests
  // its candidates twice.
  static constexpr int64_t kWindowsAnIsect = 3;
  static_assert(kWindowsAnIsect * sizeof(uint16_t) <= sizeof(uint64_t), "masks fit into the second values");

  template <class T>
  static void take(char*& at, T*& out, int64_t count) {
    out = reinterpret_cast<T*>(at);
    at += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
  }
};

// Sorts by bits [low, high) of the keys, at least one digit. The result is in keys[0] and values[0]; values of the last
// pass go to low_out and high_out, where given.
template <class Value>
void radix_sort(cudaStream_t stream, int low, int high, int64_t room, const int64_t* count, const int64_t* counters,
                uint32_t** keys, Value** values, const Workspace& work, uint32_t* low_out = nullptr,
                uint32_t* high_out = nullptr) {
  SortPass<Value> pass = {};
  pass.count = count;
  pass.counters = counters;
  pass.histograms = work.histograms;
  pass.totals = work.sort_totals;
  pass.blocks = ceil_div(room, kSortItems);
  pass.shift = low;
  do {
    pass.keys = keys[0], pass.values = values[0];
    pass.keys_out = keys[1], pass.values_out = values[1];
    if (pass.shift + kDigitBits >= high) pass.low_out = low_out, pass.high_out = high_out;
    SPLAT_LAUNCH(sort_histogram<Value>, pass.blocks, kSortThreads, stream, pass);
    SPLAT_LAUNCH(sort_scan<Value>, pass.blocks > 0 ? kDigits : 0, kSortThreads, stream, pass);
    SPLAT_LAUNCH(sort_scatter<Value>, pass.blocks, kSortThreads, stream, pass);
    uint32_t* swapped = keys[0];
    keys[0] = keys[1], keys[1] = swapped;
    Value* exchanged = values[0];
    values[0] = values[1], values[1] = exchanged;
    pass.shift += kDigitBits;
  } while (pass.shift < high);
}

int bits_of(int64_t count) {
  int bits = 0;
  while ((count - 1) >> bits > 0) ++bits;
  return bits;
}

}  // namespace

int64_t bin_bytes(const SplatView& view, const SplatFrame& frame) {
  return Workspace(nullptr, frame.visible, frame.max_isects, tiles_of(view)).bytes;
}

void bin(const SplatCall& call, const SplatView& view, const SplatGaussians& gaussians, SplatFrame& frame) {
  Workspace work(frame.workspace, frame.visible, frame.max_isects, tiles_of(view));
  BinJob job = {};
  job.width = view.width, job.height = view.height;
  job.tiles_x = tiles_across(view.width), job.tiles_y = tiles_across(view.height);
  job.tile_row_begin = view.tile_row_begin, job.tile_row_end = view.tile_row_end;
  job.chunks = chunks_of(gaussians.n);
  job.tiles = tiles_of(view);
  job.isect_capacity = frame.max_isects;
  job.windows = work.windows, job.packed = work.packed;
  job.projected = static_cast<const float*>(frame.projected);
  job.chunk_counts = frame.chunk_counts;
  job.counters = frame.counters;
  job.tiles_per_gauss = frame.tiles_per_gauss, job.isect_grad_starts = frame.isect_grad_starts;
  job.totals = work.totals;
  job.chunk_starts = work.chunk_starts, job.block_starts = work.block_starts, job.rank_starts = work.rank_starts;
  job.window_starts = work.window_starts, job.candidate_masks = work.candidate_masks;
  job.keys = work.keys[0], job.order = work.order[0];
  job.isect_keys = work.isect_keys[0], job.isect_values = work.isect_values[0];
  job.emitted_masks = work.emitted_masks;
  job.tile_starts = frame.tile_starts;
  job.isect_grad_rows = frame.isect_grad_rows, job.isect_masks = frame.isect_masks;

  const cudaStream_t stream = stream_of(call);
  SPLAT_LAUNCH(count_listed, job.chunks, kListThreads, stream, job);
  SPLAT_LAUNCH(scan_chunks, 1, kScanThreads, stream, job);
  SPLAT_LAUNCH(list_gaussians, job.chunks, kListThreads, stream, job);
  radix_sort(stream, 0, 32, frame.visible, &work.totals->listed, frame.counters, work.keys, work.order, work);
  job.order = work.order[0], job.row_ends = work.order[1];
  SPLAT_LAUNCH(count_ranks, ceil_div(frame.visible, kRankThreads), kRankThreads, stream, job);
  SPLAT_LAUNCH(scan_ranks, 1, kScanThreads, stream, job);
  SPLAT_LAUNCH(visit_candidates, work.windows, kWindowThreads, stream, job, false);
  SPLAT_LAUNCH(scan_windows, 1, kScanThreads, stream, job);
  SPLAT_LAUNCH(visit_candidates, work.windows, kWindowThreads, stream, job, true);
  const int low = work.packed ? kMaskBits : 0;
  radix_sort(stream, low, low + bits_of(job.tiles), frame.max_isects, frame.counters + SPLAT_COUNT_ISECTS,
             frame.counters, work.isect_keys, work.isect_values, work, frame.isect_gaussians, frame.isect_grad_rows);
  job.isect_keys = work.isect_keys[0];
  const int64_t listed = frame.max_isects + 1 > frame.visible ? frame.max_isects + 1 : frame.visible;
  SPLAT_LAUNCH(list_isects, ceil_div(listed, kListThreads), kListThreads, stream, job);
  if (frame.tile_order == nullptr) return;
  const OrderJob order = {frame.counters, frame.tile_starts, frame.tile_order, first_tile(view), band_tiles(view)};
  SPLAT_LAUNCH(order_tiles, 1, kOrderThreads, stream, order);
}

}  // namespace gpu
}  // namespace splat
