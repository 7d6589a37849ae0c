// From projected Gaussians to the tile intersections, front to back in each tile: depth sort, exact tests, emission,
// lists. docs/math.md 5
//
// A candidate is a tile of a Gaussian's rectangle. Candidates are numbered in depth order of their Gaussians, row by row
// within a rectangle, and cut into windows of equal size, so that a Gaussian over the whole image is as well spread as
// many small ones. A thread tests a candidate: sixteen 4x4 blocks, whose results are the intersection's mask. The
// kernel that tests runs twice, first to count and then to write, as the same machine code; masks are kept in between
// where they fit.
#pragma once
#include "../math/blend.h"
#include "../math/tiles.h"
#include "device.cuh"

namespace splat {
namespace gpu {

constexpr int kScanThreads = 1024;
constexpr int kListThreads = SPLAT_CHUNK;
constexpr int kRankThreads = 256;  // ranks a block
constexpr int kWindowThreads = 128;
constexpr int kWindowRounds = 4;  // candidates a thread
constexpr int kWindow = kWindowThreads * kWindowRounds;
constexpr int kWindowWarps = kWindowThreads / kWarp;
constexpr int kWindowWords = kWindow / kWarp;  // a round of a warp
constexpr int kMaskBits = kBlocksPerTile;
constexpr int64_t kPackedTiles = int64_t(1) << (32 - kMaskBits);  // a key has room for the mask up to so many tiles

// What only the device knows.
struct BinTotals {
  int64_t listed;      // Gaussians with a tile in the view's tile rows
  int64_t candidates;
  int64_t per_block;   // candidates of a block of visit_candidates: a multiple of kWindow
};

// The arguments of all kernels of binning. They run in the order of this file; where an array has one meaning after
// another, its line names the kernel that brings each.
struct BinJob {
  // The view, and projection's result; nothing here is changed but counters, tiles_per_gauss and isect_grad_starts.
  int width, height, tiles_x, tiles_y, tile_row_begin, tile_row_end;
  int64_t chunks, tiles, isect_capacity;
  int64_t windows;               // blocks of visit_candidates
  bool packed;                   // isect_keys are tile << kMaskBits | mask; else they are tiles
  const float* projected;
  const int64_t* chunk_counts;
  int64_t* counters;             // scan_windows: SPLAT_COUNT_ISECTS, SPLAT_COUNT_OVERFLOW
  uint32_t* tiles_per_gauss;     // of each visible Gaussian. count_listed: its candidates. list_isects: its intersections
  uint32_t* isect_grad_starts;   // count_listed: 0. visit_candidates: its first place in depth order
  BinTotals* totals;             // scan_chunks: listed. scan_ranks: candidates, per_block
  // Gaussians in depth order. A listed Gaussian has a candidate; its rank is its number in this order.
  int64_t* chunk_starts;         // [chunks] count_listed: listed Gaussians of the chunk. scan_chunks: of those before it
  uint32_t* keys;                // [listed] list_gaussians: bits of the depth, which the depth sort sorts by
  uint32_t* order;               // [listed] list_gaussians: index into projected. Depth sort: the same by rank
  int64_t* rank_starts;          // [listed] count_ranks: candidates before the rank in its block of ranks
  int64_t* block_starts;         // [blocks of kRankThreads ranks] count_ranks: its candidates. scan_ranks: those before it
  // Candidates, and the intersections among them.
  uint32_t* row_ends;            // [listed] visit_candidates: place behind the last of the rank's intersections
  uint16_t* candidate_masks;     // [windows * kWindow] visit_candidates, the first time: masks, where a block has one window
  int64_t* window_starts;        // [windows] visit_candidates: intersections of its candidates. scan_windows: those before
  uint32_t* isect_keys;          // [isect_capacity] visit_candidates: in depth order. Tile sort: by tile
  uint64_t* isect_values;        // [isect_capacity] likewise: place in depth order << 32 | index into projected
  uint16_t* emitted_masks;       // [isect_capacity] visit_candidates: masks in depth order, unless packed
  // Lists.
  int64_t* tile_starts;            // list_isects
  const uint32_t* isect_grad_rows; // tile sort: place in depth order of each intersection
  uint16_t* isect_masks;           // list_isects: masks in the order of the lists
};

// ---- one Gaussian, one tile ----------------------------------------------------------------------------------------

// A projected Gaussian, as the exact test needs it.
struct alignas(16) Reach {
  float x, y, a, b, c, b_over_2a, b_over_2c, tau;
};

SPLAT_DEVICE Reach reach_of(const float* proj) {
  Reach r;
  r.x = proj[kProjX], r.y = proj[kProjY];
  r.a = proj[kProjA], r.b = proj[kProjB], r.c = proj[kProjC];
  r.b_over_2a = r.b / (2 * r.a), r.b_over_2c = r.b / (2 * r.c);
  r.tau = proj[kProjLog2Opacity] - float(kMinLog2Alpha);
  return r;
}

// The part of a Gaussian's rectangle in the view's tile rows.
SPLAT_DEVICE TileRect listed_rect(const BinJob& job, const float* proj) {
  TileRect r = tile_rect(proj[kProjX], proj[kProjY], proj[kProjHalfX], proj[kProjHalfY], job.tiles_x, job.tiles_y,
                         float(job.width), float(job.height));
  r.y0 = r.y0 > job.tile_row_begin ? r.y0 : job.tile_row_begin;
  r.y1 = r.y1 < job.tile_row_end ? r.y1 : job.tile_row_end;
  r.y1 = r.y1 > r.y0 ? r.y1 : r.y0;
  return r;
}

SPLAT_DEVICE uint32_t tiles_in(const TileRect& r) { return uint32_t(r.x1 - r.x0) * uint32_t(r.y1 - r.y0); }

// The 4x4 blocks of tile (tx, ty) that lie in the image.
SPLAT_DEVICE unsigned blocks_in_image(const BinJob& job, int tx, int ty) {
  const int columns = (job.width - tx * kTile + kBlock - 1) / kBlock, rows = (job.height - ty * kTile + kBlock - 1) / kBlock;
  const unsigned in_row = columns < kBlock ? (1u << columns) - 1u : 0xfu;
  return in_row * 0x1111u & (rows < kBlock ? (1u << kBlock * rows) - 1u : 0xffffu);
}

// The 4x4 blocks of tile (tx, ty) that the Gaussian reaches.
SPLAT_DEVICE unsigned blocks_reached(const BinJob& job, const Reach& r, int tx, int ty) {
  const float left = float(tx * kTile) - r.x, top = float(ty * kTile) - r.y;
  unsigned mask = 0;
#pragma unroll
  for (int block = 0; block < kBlocksPerTile; ++block) {
    const float x0 = (float(kBlock * (block % kBlock)) + 0.5f) + left;
    const float y0 = (float(kBlock * (block / kBlock)) + 0.5f) + top;
    const float q = least_q_in_box(r.a, r.b, r.c, r.b_over_2a, r.b_over_2c, x0, y0, x0 + float(kBlock - 1),
                                   y0 + float(kBlock - 1));
    mask |= box_reaches(q, r.tau) ? 1u << block : 0u;
  }
  return mask & blocks_in_image(job, tx, ty);
}

// ---- scans ---------------------------------------------------------------------------------------------------------

// One block of kScanThreads: each number becomes the sum of those before it; returns the sum of all.
SPLAT_DEVICE long long scan_in_place(int64_t* numbers, int64_t count) {
  long long before = 0;
  for (int64_t first = 0; first < count; first += kScanThreads) {
    const int64_t k = first + threadIdx.x;
    long long total = 0;
    const long long rank = block_exclusive_scan((long long)(k < count ? numbers[k] : 0), &total);
    if (k < count) numbers[k] = before + rank;
    before += total;
  }
  return before;
}

// The last of `count` ascending numbers that is not above `value`; the first is not. Called by full warps; every lane
// gets it.
template <class Number>
SPLAT_DEVICE int64_t last_not_above(int64_t count, int64_t value, const Number& number) {
  int64_t low = 0, high = count;
  while (high - low > 1) {
    const int64_t stride = (high - low + kWarp - 1) / kWarp, at = low + lane_id() * stride;
    const unsigned votes = __ballot_sync(kFullWarp, at < high && number(at) <= value);
    low += (__popc(votes) - 1) * stride;
    high = high < low + stride ? high : low + stride;
  }
  return low;
}

// ---- Gaussians in depth order --------------------------------------------------------------------------------------

// A chunk a block: candidates of each visible Gaussian, for now in tiles_per_gauss, and Gaussians that have any.
__global__ void __launch_bounds__(kListThreads) count_listed(BinJob job) {
  if (overflowed(job.counters)) return;
  const int64_t chunk = blockIdx.x, slot = chunk * SPLAT_CHUNK + threadIdx.x;
  uint32_t tiles = 0;
  if (int64_t(threadIdx.x) < job.chunk_counts[2 * chunk]) {
    tiles = tiles_in(listed_rect(job, job.projected + slot * kProjectedSize));
    job.tiles_per_gauss[slot] = tiles;
    job.isect_grad_starts[slot] = 0;
  }
  const int listed = __syncthreads_count(tiles > 0);
  if (threadIdx.x == 0) job.chunk_starts[chunk] = listed;
}

// One block.
__global__ void __launch_bounds__(kScanThreads) scan_chunks(BinJob job) {
  if (overflowed(job.counters)) return;
  const long long listed = scan_in_place(job.chunk_starts, job.chunks);
  if (threadIdx.x == 0) job.totals->listed = listed;
}

// A chunk a block: what the depth sort sorts, in index order.
__global__ void __launch_bounds__(kListThreads) list_gaussians(BinJob job) {
  if (overflowed(job.counters)) return;
  const int64_t chunk = blockIdx.x, slot = chunk * SPLAT_CHUNK + threadIdx.x;
  const bool listed = int64_t(threadIdx.x) < job.chunk_counts[2 * chunk] && job.tiles_per_gauss[slot] > 0;
  const int64_t at = job.chunk_starts[chunk] + block_exclusive_scan(listed ? 1u : 0u);
  if (!listed) return;
  job.keys[at] = __float_as_uint(job.projected[slot * kProjectedSize + kProjDepth]);  // positive: ordered as depths are
  job.order[at] = uint32_t(slot);
}

// Candidates of each block of ranks, and before each rank in its block.
__global__ void __launch_bounds__(kRankThreads) count_ranks(BinJob job) {
  if (overflowed(job.counters)) return;
  const int64_t rank = int64_t(blockIdx.x) * kRankThreads + threadIdx.x, listed = job.totals->listed;
  if (rank - threadIdx.x >= listed) return;
  long long all = 0;
  const long long before =
      block_exclusive_scan((long long)(rank < listed ? job.tiles_per_gauss[job.order[rank]] : 0u), &all);
  if (rank < listed) job.rank_starts[rank] = before;
  if (threadIdx.x == 0) job.block_starts[blockIdx.x] = all;
}

// One block: also how many candidates a block of visit_candidates takes.
__global__ void __launch_bounds__(kScanThreads) scan_ranks(BinJob job) {
  if (overflowed(job.counters)) return;
  const long long candidates = scan_in_place(job.block_starts, (job.totals->listed + kRankThreads - 1) / kRankThreads);
  if (threadIdx.x != 0) return;
  job.totals->candidates = candidates;
  const int64_t in_one_round = job.windows * kWindow;
  job.totals->per_block = candidates == 0 ? kWindow : (candidates + in_one_round - 1) / in_one_round * kWindow;
}

// ---- candidates ----------------------------------------------------------------------------------------------------

// The Gaussians of a window's candidates, in shared memory: entry k for the k-th of them.
struct WindowGaussians {
  Reach* reaches;
  int2* corners;          // first tile of the rectangle
  uint32_t *columns, *tiles;
  uint32_t* first_tiles;  // number within its rectangle that candidate 0 of the window would have, modulo 2^32
  uint32_t* slots;        // index into projected
  uint32_t* heads;        // bit c: a Gaussian's first candidate in the window is candidate c
};

SPLAT_DEVICE int64_t rank_start(const BinJob& job, int64_t rank) {
  return job.block_starts[rank / kRankThreads] + job.rank_starts[rank];
}

// The rank of a candidate.
SPLAT_DEVICE int64_t rank_of(const BinJob& job, int64_t listed, int64_t candidate) {
  const int64_t block = last_not_above((listed + kRankThreads - 1) / kRankThreads, candidate,
                                       [&](int64_t k) { return job.block_starts[k]; });
  const int64_t first = block * kRankThreads, left = listed - first;
  const int64_t within = candidate - job.block_starts[block];
  return first + last_not_above(left < kRankThreads ? left : kRankThreads, within,
                                [&](int64_t k) { return job.rank_starts[first + k]; });
}

// Every thread of the block calls it; returns the rank of entry 0. with_reach: the test follows.
SPLAT_DEVICE int64_t load_window(const BinJob& job, const WindowGaussians& window, int64_t first, int count,
                                 bool with_reach) {
  const int64_t listed = job.totals->listed;
  const int64_t first_rank = rank_of(job, listed, first);
  __syncthreads();  // the last window has been read
  if (threadIdx.x < kWindowWords) window.heads[threadIdx.x] = 0;
  __syncthreads();
  // A rank has a candidate at least, so that as many ranks as candidates suffice. Starts ascend: the first one beyond
  // the window ends a thread's search.
  for (int k = int(threadIdx.x); k < count; k += kWindowThreads) {
    const int64_t rank = first_rank + k;
    if (rank >= listed) break;
    const int64_t start = rank_start(job, rank) - first;
    if (start >= count) break;
    const unsigned head = start > 0 ? unsigned(start) : 0u;
    atomicOr(window.heads + head / kWarp, 1u << head % kWarp);
    const uint32_t slot = job.order[rank];
    const float* proj = job.projected + int64_t(slot) * kProjectedSize;
    const TileRect rect = listed_rect(job, proj);
    window.corners[k] = {rect.x0, rect.y0};
    window.columns[k] = uint32_t(rect.x1 - rect.x0);
    window.tiles[k] = tiles_in(rect);
    window.first_tiles[k] = uint32_t(-start);
    window.slots[k] = slot;
    if (with_reach) window.reaches[k] = reach_of(proj);
  }
  __syncthreads();
  return first_rank;
}

// Row and column of the k-th tile of a rectangle, without an integer division.
struct Place2d {
  uint32_t row, column;
};
SPLAT_DEVICE Place2d place_in_rect(uint32_t k, uint32_t columns) {
  // A float's quotient is off by less than one: rows are less than 2^16 times the relative error of two roundings.
  uint32_t row = uint32_t((float(k) + 0.5f) * reciprocal_(float(columns)));
  uint32_t column = k - row * columns;
  if (int32_t(column) < 0) --row, column += columns;
  if (column >= columns) ++row, column -= columns;
  return {row, column};
}

// Blocks of candidates. Without `write`: counts intersections, and keeps their masks where a block has one window.
// With it: writes them in depth order, and where each Gaussian's begin and end.
__global__ void __launch_bounds__(kWindowThreads) visit_candidates(BinJob job, bool write) {
  if (overflowed(job.counters)) return;
  SPLAT_SHARED(Reach, reaches, kWindow);
  SPLAT_SHARED(int2, corners, kWindow);
  SPLAT_SHARED(uint32_t, columns, kWindow);
  SPLAT_SHARED(uint32_t, tiles, kWindow);
  SPLAT_SHARED(uint32_t, first_tiles, kWindow);
  SPLAT_SHARED(uint32_t, slots, kWindow);
  SPLAT_SHARED(uint32_t, heads, kWindowWords);
  SPLAT_SHARED(unsigned, found, kWindowWords);
  const WindowGaussians window = {reaches, corners, columns, tiles, first_tiles, slots, heads};
  const int64_t candidates = job.totals->candidates, per_block = job.totals->per_block;
  const int64_t begin = blockIdx.x * per_block;
  const int64_t end = begin + per_block < candidates ? begin + per_block : candidates;
  const bool kept = per_block == kWindow, test = !(write && kept);
  int64_t row = write && begin < end ? job.window_starts[blockIdx.x] : 0;
  for (int64_t first = begin; first < end; first += kWindow) {
    const int count = end - first < kWindow ? int(end - first) : kWindow;
    const int64_t first_rank = load_window(job, window, first, count, test);
    const unsigned here = lane_id() < kWindowWords ? unsigned(__popc(heads[lane_id()])) : 0u;
    const unsigned entries_before = warp_inclusive_scan(here) - here;  // of word lane_id()
    unsigned masks[kWindowRounds], entries[kWindowRounds];
#pragma unroll
    for (int r = 0; r < kWindowRounds; ++r) {
      const int c = r * kWindowThreads + int(threadIdx.x), word = r * kWindowWarps + warp_id();
      const unsigned before = __shfl_sync(kFullWarp, entries_before, word);
      entries[r] = before + unsigned(__popc(heads[word] & (kFullWarp >> (kWarp - 1 - lane_id())))) - 1u;
      masks[r] = 0;
      if (c < count && !test) masks[r] = job.candidate_masks[first + c];
      if (c < count && test) {
        const unsigned k = entries[r];
        const Place2d at = place_in_rect(first_tiles[k] + uint32_t(c), columns[k]);
        masks[r] = blocks_reached(job, reaches[k], corners[k].x + int(at.column), corners[k].y + int(at.row));
        if (kept && !write) job.candidate_masks[first + c] = uint16_t(masks[r]);
      }
      const unsigned votes = __ballot_sync(kFullWarp, masks[r] != 0);
      if (lane_id() == 0) found[word] = unsigned(__popc(votes));
    }
    __syncthreads();
    const unsigned mine = lane_id() < kWindowWords ? found[lane_id()] : 0u;
    const unsigned through = warp_inclusive_scan(mine);
    if (write) {
#pragma unroll
      for (int r = 0; r < kWindowRounds; ++r) {
        const int c = r * kWindowThreads + int(threadIdx.x);
        const unsigned votes = __ballot_sync(kFullWarp, masks[r] != 0);
        const unsigned before = __shfl_sync(kFullWarp, through - mine, r * kWindowWarps + warp_id());
        if (c >= count) continue;
        const int64_t place = row + before + __popc(votes & ((1u << lane_id()) - 1u));
        const unsigned k = entries[r];
        const uint32_t number = first_tiles[k] + uint32_t(c), slot = slots[k];
        if (number == 0) job.isect_grad_starts[slot] = uint32_t(place);
        if (number + 1 == tiles[k]) job.row_ends[first_rank + k] = uint32_t(place + (masks[r] != 0 ? 1 : 0));
        if (masks[r] == 0 || place >= job.isect_capacity) continue;
        const Place2d at = place_in_rect(number, columns[k]);
        const uint32_t tile =
            (uint32_t(corners[k].y) + at.row) * uint32_t(job.tiles_x) + uint32_t(corners[k].x) + at.column;
        job.isect_keys[place] = job.packed ? tile << kMaskBits | masks[r] : tile;
        job.isect_values[place] = uint64_t(place) << 32 | slot;
        if (!job.packed) job.emitted_masks[place] = uint16_t(masks[r]);
      }
    }
    row += __shfl_sync(kFullWarp, through, kWarp - 1);
  }
  if (!write && threadIdx.x == 0) job.window_starts[blockIdx.x] = row;
}

// One block: intersections before each block of candidates, and whether the capacity suffices.
__global__ void __launch_bounds__(kScanThreads) scan_windows(BinJob job) {
  if (overflowed(job.counters)) return;
  const int64_t used = (job.totals->candidates + job.totals->per_block - 1) / job.totals->per_block;
  const long long isects = scan_in_place(job.window_starts, used);
  __syncthreads();  // every thread has read the flag
  if (threadIdx.x != 0) return;
  job.counters[SPLAT_COUNT_ISECTS] = isects;
  if (isects > job.isect_capacity) job.counters[SPLAT_COUNT_OVERFLOW] = 1;
}

// ---- lists ---------------------------------------------------------------------------------------------------------

SPLAT_DEVICE int64_t tile_of(const BinJob& job, int64_t i) {
  return job.packed ? job.isect_keys[i] >> kMaskBits : job.isect_keys[i];
}

// Masks in tile order, and the start of each tile: intersection i starts every tile after its predecessor's up to its
// own. Also the number of each Gaussian's intersections.
__global__ void __launch_bounds__(kListThreads) list_isects(BinJob job) {
  if (overflowed(job.counters)) return;
  const int64_t isects = job.counters[SPLAT_COUNT_ISECTS];
  const int64_t i = int64_t(blockIdx.x) * kListThreads + threadIdx.x;
  if (i < job.totals->listed) {
    const uint32_t slot = job.order[i];
    job.tiles_per_gauss[slot] = job.row_ends[i] - job.isect_grad_starts[slot];
  }
  if (i < isects)
    job.isect_masks[i] = job.packed ? uint16_t(job.isect_keys[i]) : job.emitted_masks[job.isect_grad_rows[i]];
  if (i > isects) return;
  const int64_t begin = i == 0 ? 0 : tile_of(job, i - 1) + 1;
  const int64_t end = i == isects ? job.tiles : tile_of(job, i);
  for (int64_t t = begin; t <= end; ++t) job.tile_starts[t] = i;
}

}  // namespace gpu
}  // namespace splat
