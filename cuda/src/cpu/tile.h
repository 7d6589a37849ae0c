// A 16x16 tile as the blending drivers walk it: its pixels as lanes, alpha over a block, the lists of a block.
#pragma once
#include <algorithm>

#include "../../math/blend.h"
#include "lanes.h"
#include "pool.h"
#include "stages.h"

namespace splat {

constexpr int kPixels = kTile * kTile;
// Projected Gaussians and rows of gradients are fetched this many intersections before they are needed.
constexpr int kAhead = 4, kAheadStored = 8;

// Lane of a pixel within its tile: blocks row by row, pixels row by row in each.
inline int lane_of(int x, int y) {
  return ((y / kBlock) * kBlock + x / kBlock) * kLanes + (y % kBlock) * kBlock + x % kBlock;
}

// A tile, as both directions need it.
template <class Real>
struct Tile {
  using F = Lanes<Real, kLanes>;
  int32_t x0, y0, width, height;  // pixels that lie in the image
  int64_t begin, end;             // intersections

  Tile(const SplatView& view, const SplatFrame& frame, int64_t index) {
    const int32_t tiles_x = tiles_across(view.width);
    x0 = int32_t(index % tiles_x) * kTile;
    y0 = int32_t(index / tiles_x) * kTile;
    width = std::min(kTile, view.width - x0);
    height = std::min(kTile, view.height - y0);
    begin = frame.tile_starts[index];
    end = frame.tile_starts[index + 1];
  }
  // Pixel centres of block 0; block b lies (b % 4, b / 4) blocks further.
  static F lane_x() {
    Real x[kLanes];
    for (int k = 0; k < kLanes; ++k) x[k] = Real(k % kBlock) + Real(0.5);
    return F::load(x);
  }
  static F lane_y() {
    Real y[kLanes];
    for (int k = 0; k < kLanes; ++k) y[k] = Real(k / kBlock) + Real(0.5);
    return F::load(y);
  }
  // 1 for lanes inside the image, 0 outside: the transmittance that each pixel starts with.
  void initial_transmittance(Real* lanes) const {
    std::fill(lanes, lanes + kPixels, Real(1));
    if (width == kTile && height == kTile) return;
    for (int y = 0; y < kTile; ++y)
      for (int x = 0; x < kTile; ++x) lanes[lane_of(x, y)] = Real(x < width && y < height);
  }
  // The sixteen pixels of a row lie in four blocks, four lanes in each.
  static SPLAT_INLINE void row_from_lanes(const Real* lanes, int y, Real* row) {
    for (int b = 0; b < kTile; b += kBlock) std::copy_n(lanes + lane_of(b, y), kBlock, row + b);
  }
};

// alpha of a projected Gaussian over a block, 0 where it is below 1/255.
template <class Real, class F>
SPLAT_INLINE F block_alpha(const Real* proj, F dx, F dy) {
  const F exponent = log2_alpha(proj, dx, dy);
  return select_or_zero(exponent >= F(kMinLog2Alpha), min_(F(kMaxAlpha), exp2_bounded(exponent)));
}
// The same before the upper clamp, as the backward pass needs it.
template <class Real, class F>
SPLAT_INLINE F unclamped_alpha(const Real* proj, F dx, F dy) {
  const F exponent = log2_alpha(proj, dx, dy);
  return select_or_zero(exponent >= F(kMinLog2Alpha), exp2_bounded(exponent));
}

// Positions, from `base` on, of the intersections that reach the block.
inline int list_block(const SplatFrame& frame, int64_t base, int64_t isects, uint32_t bit, int32_t* list) {
  int count = 0;
  const uint16_t* masks = frame.isect_masks + base;
  int64_t i = 0;
  for (; i + kLanes <= isects; i += kLanes) count += compress_16(masks + i, bit, int32_t(i), list + count);
  for (; i < isects; ++i) {
    list[count] = int32_t(i);
    count += (masks[i] & bit) != 0;
  }
  return count;
}

// Copies the first `pixels` of a tile's row; a whole row needs no call of the library.
template <int Channels, class Real>
SPLAT_INLINE void copy_row(const Real* from, size_t pixels, Real* to) {
  if (pixels == kTile) {
    std::copy_n(from, Channels * kTile, to);
  } else {
    std::copy_n(from, Channels * pixels, to);
  }
}

// Runs a job for each tile of the view's tile rows, by its number in the image.
template <class Job>
void for_tiles(const SplatCall& call, const SplatView& view, const Job& job) {
  const int64_t first = first_tile(view);
  parallel_for(call.threads, band_tiles(view), [&](int64_t i) { job(first + i); });
}

}  // namespace splat
