// Depth sort, exact ellipse-block tests, and the lists of tile intersections, front to back. docs/math.md 5.
//
// The visible Gaussians are cut into ranges of equal depth rank whose number depends on their count alone; every range
// is one job, and each combination of range and tile has its own place in the output. So the lists are the same for any
// number of threads.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "geometry.h"
#include "pool.h"

namespace splat {
namespace {

struct SortItem {
  uint32_t key, gaussian;
};
struct Isect {
  uint32_t gaussian, tile;
  uint16_t mask;
};

constexpr int64_t kMaxRanges = 64;
constexpr int64_t kMinRange = 256;
constexpr int kSortBlocks = 16;
constexpr int kMaxDigitBits = 10;

int64_t ranges_of(int64_t visible) {
  return std::max<int64_t>(1, std::min(kMaxRanges, (visible + kMinRange - 1) / kMinRange));
}

// The caller's workspace, cut up in the order of use.
struct Workspace {
  SortItem *items, *spare;       // [visible] each
  Isect* isects;                   // [max_isects]
  uint32_t* range_counts;        // [ranges, tiles] intersections, then their first place in the output
  int64_t* range_starts;         // [ranges + 1] into isects
  int64_t* range_ends;           // [ranges]
  uint32_t* histograms;          // [kSortBlocks, 1 << kMaxDigitBits]
  int64_t bytes;

  Workspace(void* base, int64_t visible, int64_t bound, int64_t tiles) {
    char* at = static_cast<char*>(base);
    const int64_t ranges = ranges_of(visible);
    take(at, items, visible);
    take(at, spare, visible);
    take(at, isects, bound);
    take(at, range_counts, ranges * tiles);
    take(at, range_starts, ranges + 1);
    take(at, range_ends, ranges);
    take(at, histograms, int64_t(kSortBlocks) << kMaxDigitBits);
    bytes = at - static_cast<char*>(base);
  }

 private:
  template <class T>
  static void take(char*& at, T*& out, int64_t count) {
    out = reinterpret_cast<T*>(at);
    at += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
  }
};

// Bits of a positive depth, which order as the depths do.
uint32_t depth_key(float z) {
  uint32_t bits;
  std::memcpy(&bits, &z, sizeof bits);
  return bits;
}

// Stable least-significant-digit radix sort of `count` items; only the bits in which keys differ are sorted.
SortItem* radix_sort(int threads, SortItem* items, SortItem* spare, uint32_t* histograms, int64_t count,
                     uint32_t low, uint32_t high) {
  if (count == 0) return items;
  int bits = 0;
  while (bits < 32 && ((high - low) >> bits) != 0) ++bits;
  const int passes = (bits + kMaxDigitBits - 1) / kMaxDigitBits;
  const int digit = passes == 0 ? 0 : (bits + passes - 1) / passes;
  const uint32_t buckets = 1u << digit;
  const int64_t block = (count + kSortBlocks - 1) / kSortBlocks;
  for (int pass = 0; pass < passes; ++pass) {
    const int shift = pass * digit;
    const auto bucket_of = [=](const SortItem& item) { return ((item.key - low) >> shift) & (buckets - 1); };
    parallel_for(threads, kSortBlocks, [&](int64_t b) {
      uint32_t* histogram = histograms + b * buckets;
      std::memset(histogram, 0, buckets * sizeof *histogram);
      for (int64_t i = b * block; i < std::min(count, (b + 1) * block); ++i) ++histogram[bucket_of(items[i])];
    });
    uint32_t place = 0;
    for (uint32_t k = 0; k < buckets; ++k) {
      for (int b = 0; b < kSortBlocks; ++b) {
        const uint32_t here = histograms[b * buckets + k];
        histograms[b * buckets + k] = place;
        place += here;
      }
    }
    parallel_for(threads, kSortBlocks, [&](int64_t b) {
      uint32_t* next = histograms + b * buckets;
      for (int64_t i = b * block; i < std::min(count, (b + 1) * block); ++i)
        spare[next[bucket_of(items[i])]++] = items[i];
    });
    std::swap(items, spare);
  }
  return items;
}

// Offsets of the first pixel centre of each 4x4 block from the tile's corner.
template <class Real>
struct BlockCorners {
  Real x[kLanes], y[kLanes];
  BlockCorners() {
    for (int b = 0; b < kLanes; ++b) {
      x[b] = Real(kBlock * (b % kBlock)) + Real(0.5);
      y[b] = Real(kBlock * (b / kBlock)) + Real(0.5);
    }
  }
};

template <class Real>
struct Emitter {
  using F = Lanes<Real, kLanes>;
  const SplatView& view;
  const SplatFrame& frame;
  const Workspace& work;
  const SortItem* order;
  const int64_t ranges, tiles;

  int64_t first_rank(int64_t range) const { return frame.visible * range / ranges; }
  const Real* projected(int64_t i) const { return static_cast<const Real*>(frame.projected) + i * kProjectedSize; }

  // The upper bound of the intersections that a range emits, so that its place in the list is known beforehand: the
  // tiles of the rectangles, which projection has left in tiles_per_gauss for the whole image.
  void bound(int64_t range) const {
    const bool whole = view.tile_row_begin == 0 && view.tile_row_end == tiles_across(view.height);
    int64_t total = 0;
    for (int64_t rank = first_rank(range); rank < first_rank(range + 1); ++rank) {
      const uint32_t id = order[rank].gaussian;
      total += whole ? frame.tiles_per_gauss[id] : area(in_tile_rows(view, projected_rect(view, projected(id))));
    }
    work.range_starts[range + 1] = total;
  }

  void emit(int64_t range) const {
    const BlockCorners<Real> corners;
    const F corner_x = F::load(corners.x), corner_y = F::load(corners.y);
    const int32_t tiles_x = tiles_across(view.width), blocks_x = (view.width + kBlock - 1) / kBlock,
                  blocks_y = (view.height + kBlock - 1) / kBlock;
    uint32_t* counts = work.range_counts + range * tiles;
    std::memset(counts, 0, size_t(tiles) * sizeof *counts);
    Isect* out = work.isects + work.range_starts[range];
    for (int64_t rank = first_rank(range); rank < first_rank(range + 1); ++rank) {
      const uint32_t id = order[rank].gaussian;
      const Real* proj = projected(id);
      if (rank + 8 < frame.visible) __builtin_prefetch(projected(order[rank + 8].gaussian));
      const TileRect rect = in_tile_rows(view, projected_rect(view, proj));
      const F a = proj[kProjA], b = proj[kProjB], c = proj[kProjC];
      const F b_over_2a = F(proj[kProjB] / (2 * proj[kProjA])), b_over_2c = F(proj[kProjB] / (2 * proj[kProjC]));
      const F tau = proj[kProjLog2Opacity] - Real(kMinLog2Alpha);
      const Isect* const begin = out;
      // Without a branch on the mask, which would often be mispredicted.
      for (int32_t ty = rect.y0; ty < rect.y1; ++ty) {
        const F y0 = corner_y + F(Real(ty * kTile) - proj[kProjY]);
        for (int32_t tx = rect.x0; tx < rect.x1; ++tx) {
          const F x0 = corner_x + F(Real(tx * kTile) - proj[kProjX]);
          const F q = least_q_in_box(a, b, c, b_over_2a, b_over_2c, x0, y0, x0 + F(kBlock - 1), y0 + F(kBlock - 1));
          const uint32_t mask = box_reaches(q, tau).bits() & blocks_inside(blocks_x - 4 * tx, blocks_y - 4 * ty);
          const uint32_t tile = uint32_t(ty * tiles_x + tx), reached = mask != 0;
          *out = {id, tile, uint16_t(mask)};
          out += reached;
          counts[tile] += reached;
        }
      }
      frame.tiles_per_gauss[id] = uint32_t(out - begin);
    }
    work.range_ends[range] = out - work.isects;
  }

  // Bits of the blocks that lie in the image, given how many columns and rows of blocks are left from the tile on.
  static uint32_t blocks_inside(int32_t columns, int32_t rows) {
    const uint32_t row = columns >= 4 ? 0xfu : (1u << columns) - 1u;
    const uint32_t all = row * 0x1111u;
    return rows >= 4 ? all : all & ((1u << (4 * rows)) - 1u);
  }

  // Turns the counts of each range into its first place in the tile's list; `starts` holds each tile's start.
  void place(int64_t tile_begin, int64_t tile_end) const {
    for (int64_t t = tile_begin; t < tile_end; ++t) {
      int64_t at = frame.tile_starts[t];
      for (int64_t r = 0; r < ranges; ++r) {
        uint32_t& slot = work.range_counts[r * tiles + t];
        const uint32_t count = slot;
        slot = uint32_t(at);
        at += count;
      }
    }
  }

  void scatter_range(int64_t range) const {
    uint32_t* next = work.range_counts + range * tiles;
    uint32_t last = ~0u, grad_row = 0;
    const int64_t end = work.range_ends[range];
    for (int64_t i = work.range_starts[range]; i < end; ++i) {
      const Isect isect = work.isects[i];
      const uint32_t first = frame.isect_grad_starts[isect.gaussian];
      grad_row = isect.gaussian == last ? grad_row + 1 : first;
      last = isect.gaussian;
      if (i + 16 < end) {
        const uint32_t soon = next[work.isects[i + 16].tile];
        __builtin_prefetch(frame.isect_gaussians + soon, 1);
        __builtin_prefetch(frame.isect_grad_rows + soon, 1);
        __builtin_prefetch(frame.isect_masks + soon, 1);
      }
      const uint32_t at = next[isect.tile]++;
      frame.isect_gaussians[at] = isect.gaussian;
      frame.isect_grad_rows[at] = grad_row;
      frame.isect_masks[at] = isect.mask;
    }
  }
};

// Counts the intersections of all ranges, tile by tile.
template <class Real>
void count_tiles(int threads, const Emitter<Real>& e) {
  constexpr int64_t kTilesAJob = 256;
  const int64_t jobs = (e.tiles + kTilesAJob - 1) / kTilesAJob;
  parallel_for(threads, jobs, [&](int64_t job) {
    const int64_t begin = job * kTilesAJob, end = std::min(e.tiles, begin + kTilesAJob);
    std::memset(e.frame.tile_starts + begin + 1, 0, size_t(end - begin) * sizeof(int64_t));
    for (int64_t r = 0; r < e.ranges; ++r)
      for (int64_t t = begin; t < end; ++t) e.frame.tile_starts[t + 1] += e.work.range_counts[r * e.tiles + t];
  });
  e.frame.tile_starts[0] = 0;
  for (int64_t t = 0; t < e.tiles; ++t) e.frame.tile_starts[t + 1] += e.frame.tile_starts[t];
  parallel_for(threads, jobs, [&](int64_t job) {
    e.place(job * kTilesAJob, std::min(e.tiles, (job + 1) * kTilesAJob));
  });
}

// The visible Gaussians in depth order; equal depths in index order.
template <class Real>
SortItem* sort_by_depth(const SplatCall& call, const SplatGaussians& gaussians, const SplatFrame& frame,
                        const Workspace& work) {
  const Real* projected = static_cast<const Real*>(frame.projected);
  const int64_t chunks = chunks_of(gaussians.n);
  const auto first_chunk = [=](int64_t block) { return chunks * block / kSortBlocks; };
  int64_t starts[kSortBlocks + 1] = {};
  for (int64_t b = 0; b < kSortBlocks; ++b) {
    starts[b + 1] = starts[b];
    for (int64_t c = first_chunk(b); c < first_chunk(b + 1); ++c) starts[b + 1] += frame.chunk_counts[2 * c];
  }
  uint32_t lows[kSortBlocks], highs[kSortBlocks];
  parallel_for(call.threads, kSortBlocks, [&](int64_t b) {
    SortItem* out = work.items + starts[b];
    uint32_t low = ~0u, high = 0;
    for (int64_t c = first_chunk(b); c < first_chunk(b + 1); ++c) {
      for (int64_t i = c * kChunk; i < c * kChunk + frame.chunk_counts[2 * c]; ++i) {
        const uint32_t key = depth_key(float(projected[i * kProjectedSize + kProjDepth]));
        low = std::min(low, key), high = std::max(high, key);
        *out++ = {key, uint32_t(i)};
      }
    }
    lows[b] = low, highs[b] = high;
  });
  const int64_t count = starts[kSortBlocks];
  if constexpr (sizeof(Real) == 8) {
    // Depths that are one float apart still have an order.
    std::stable_sort(work.items, work.items + count, [=](const SortItem& a, const SortItem& b) {
      return projected[int64_t(a.gaussian) * kProjectedSize + kProjDepth] <
             projected[int64_t(b.gaussian) * kProjectedSize + kProjDepth];
    });
    return work.items;
  }
  return radix_sort(call.threads, work.items, work.spare, work.histograms, count,
                    *std::min_element(lows, lows + kSortBlocks), *std::max_element(highs, highs + kSortBlocks));
}

// Gradients of a Gaussian's intersections are contiguous, Gaussians in index order.
void place_isect_grads(const SplatGaussians& gaussians, SplatFrame& frame) {
  int64_t grad_row = 0;
  for (int64_t c = 0; c < chunks_of(gaussians.n); ++c) {
    for (int64_t i = c * kChunk; i < c * kChunk + frame.chunk_counts[2 * c]; ++i) {
      frame.isect_grad_starts[i] = uint32_t(grad_row);
      grad_row += frame.tiles_per_gauss[i];
    }
  }
  frame.isects = grad_row;
}

}  // namespace

template <class Real>
int64_t Stages<Real>::bin_bytes(const SplatView& view, const SplatFrame& frame) {
  const int64_t tiles = tiles_of(view);
  return Workspace(nullptr, frame.visible, frame.max_isects, tiles).bytes;
}

template <class Real>
void Stages<Real>::bin(const SplatCall& call, const SplatView& view, const SplatGaussians& gaussians,
                       SplatFrame& frame) {
  const int64_t tiles = tiles_of(view);
  const Workspace work(frame.workspace, frame.visible, frame.max_isects, tiles);
  const SortItem* order = sort_by_depth<Real>(call, gaussians, frame, work);
  const Emitter<Real> emitter{view, frame, work, order, ranges_of(frame.visible), tiles};

  parallel_for(call.threads, emitter.ranges, [&](int64_t r) { emitter.bound(r); });
  work.range_starts[0] = 0;
  for (int64_t r = 0; r < emitter.ranges; ++r) work.range_starts[r + 1] += work.range_starts[r];
  if (work.range_starts[emitter.ranges] > frame.max_isects)
    throw std::runtime_error("more tile intersections than max_isects");
  parallel_for(call.threads, emitter.ranges, [&](int64_t r) { emitter.emit(r); });
  place_isect_grads(gaussians, frame);
  count_tiles(call.threads, emitter);
  parallel_for(call.threads, emitter.ranges, [&](int64_t r) { emitter.scatter_range(r); });
}

// Differences from tile row to tile row first, so that a large Gaussian costs no more than a small one.
template <class Real>
void Stages<Real>::tile_row_isects(const SplatView& view, const SplatGaussians& gaussians, const SplatFrame& frame,
                                   int64_t* out) {
  const int32_t tile_rows = tiles_across(view.height);
  for (int64_t c = 0; c < chunks_of(gaussians.n); ++c) {
    for (int64_t i = c * kChunk; i < c * kChunk + frame.chunk_counts[2 * c]; ++i) {
      const TileRect r = projected_rect(view, static_cast<const Real*>(frame.projected) + i * kProjectedSize);
      out[r.y0] += r.x1 - r.x0;
      if (r.y1 < tile_rows) out[r.y1] -= r.x1 - r.x0;
    }
  }
  for (int32_t tile_row = 1; tile_row < tile_rows; ++tile_row) out[tile_row] += out[tile_row - 1];
}

template int64_t Stages<float>::bin_bytes(const SplatView&, const SplatFrame&);
template void Stages<float>::tile_row_isects(const SplatView&, const SplatGaussians&, const SplatFrame&, int64_t*);
template void Stages<float>::bin(const SplatCall&, const SplatView&, const SplatGaussians&, SplatFrame&);
#ifdef SPLAT_WITH_DOUBLE
template int64_t Stages<double>::bin_bytes(const SplatView&, const SplatFrame&);
template void Stages<double>::tile_row_isects(const SplatView&, const SplatGaussians&, const SplatFrame&, int64_t*);
template void Stages<double>::bin(const SplatCall&, const SplatView&, const SplatGaussians&, SplatFrame&);
#endif

}  // namespace splat
