// Backward blending on the GPU, one 16x16 tile a block: docs/math.md 6.2. No atomics: every pair owns a row.
//
// Tiles are walked front to back again with the forward pass's arithmetic. The pixels' shares of a pair are summed over
// a warp, then over the warps in shared memory, always in the same order.
#pragma once
#include "blend.cuh"

namespace splat {
namespace gpu {

constexpr int kRowQuads = kRowSize / 4;
constexpr int kSumsStride = 4 * kQuads;  // floats of a warp's sums of a pair: whole float4s
static_assert(kRowUsed <= kSumsStride, "a warp's sums hold a row");

// ---- a pixel -------------------------------------------------------------------------------------------------------

// What a pixel's share of a row is made of; 0 where the pair is not blended.
struct PixelShare {
  float v, weight;
};

// Transmittance 0: the pixel has stopped, or lies outside the image.
template <bool Depth>
struct BackwardPixel {
  float transmittance = 0.0f, behind = 0.0f, red = 0.0f, green = 0.0f, blue = 0.0f, depth = 0.0f;

  // Gradients of the images, and what they make of everything that was blended; the alpha gradient may be absent.
  SPLAT_DEVICE void read(const BlendLists& lists, const BlendImages& out, const BlendImages& v_out, int32_t x,
                         int32_t y, float* v_background) {
    if (!inside(lists, x, y)) return;
    const int64_t at = int64_t(y) * lists.width + x;
    const float left = 1.0f - out.alpha[at], v_alpha = v_out.alpha != nullptr ? v_out.alpha[at] : 0.0f;
    red = v_out.image[3 * at], green = v_out.image[3 * at + 1], blue = v_out.image[3 * at + 2];
    behind = out.image[3 * at] * red + out.image[3 * at + 1] * green + out.image[3 * at + 2] * blue - left * v_alpha;
    if (Depth) {
      depth = v_out.depth[at];
      behind += out.depth[at] * depth;
    }
    v_background[0] += left * red, v_background[1] += left * green, v_background[2] += left * blue;
    transmittance = 1.0f;
  }
  SPLAT_DEVICE bool alive() const { return transmittance > 0.0f; }

  SPLAT_DEVICE PixelShare step(const float* rec, float dx, float dy, bool reached) {
    const float exponent = log2_alpha(rec, dx, dy), raw = exp2_bounded(exponent);
    const float alpha = select(reached && is_seen(exponent), min_(float(kMaxAlpha), raw), 0.0f);
    const float before = transmittance, share = alpha * before, after = before - share;
    const bool live = after > float(kMinTransmittance);
    const float live_alpha = select(live, alpha, 0.0f), weight = select(live, share, 0.0f);
    transmittance = select(live, after, 0.0f);
    float cg = rec[kRecRed] * red + rec[kRecGreen] * green + rec[kRecBlue] * blue;
    if (Depth) cg += rec[kRecDepth] * depth;
    behind -= weight * cg;
    // No gradient reaches geometry or opacity where alpha was clamped.
    const float free_alpha = select(raw <= float(kMaxAlpha), live_alpha, 0.0f);
    return {free_alpha * alpha_vjp(before, cg, behind, 1.0f - alpha), weight};
  }
  SPLAT_DEVICE void add_colour(float weight, float* sums) const {
    sums[kRowRed] += weight * red;
    sums[kRowGreen] += weight * green;
    sums[kRowBlue] += weight * blue;
    if (Depth) sums[kRowDepth] += weight * depth;
  }
};

// ---- sums ----------------------------------------------------------------------------------------------------------

// Sums each of N values over the warp by halves: lanes `Apart` apart share the values out between them, so that each
// level moves half as many. Ends with the sum of value field_of_lane<N>() in values[0].
template <int N, int Apart = kWarp / 2>
SPLAT_DEVICE void transpose_reduce(float* values) {
  constexpr int kHalf = (N + 1) / 2;
  const bool second = (lane_id() & Apart) != 0;
#pragma unroll
  for (int k = 0; k < kHalf; ++k) {
    const bool paired = k + kHalf < N;  // the middle one of an odd number stays with both
    const float other = paired ? values[k + kHalf] : values[k];
    const float give = second ? values[k] : other, keep = second ? other : values[k];
    values[k] = keep + __shfl_xor_sync(kFullWarp, give, Apart);
  }
  if constexpr (Apart > 1) transpose_reduce<kHalf, Apart / 2>(values);
}
// The value whose sum the lane ends with; -1 in lanes that hold a copy.
template <int N>
SPLAT_DEVICE int field_of_lane() {
  int first = 0, owned = N, slots = N;
  for (int apart = kWarp / 2; apart > 0; apart /= 2) {
    const int half = (slots + 1) / 2;
    if (lane_id() & apart) {
      first += half;
      owned -= half;
    } else {
      owned = owned < half ? owned : half;
    }
    slots = half;
  }
  return owned > 0 ? first : -1;
}

// A quarter of a row from the warps' sums. touched[w] says which pairs of the batch warp w has sums of.
template <int Fields, int Warps, int Batch>
SPLAT_DEVICE float4 row_quad(const float* sums, const uint32_t* touched, int pair, int quad) {
  float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (quad >= kQuads) return total;
#pragma unroll
  for (int w = 0; w < Warps; ++w) {
    if ((touched[w * (Batch / kWarp) + pair / kWarp] >> (pair % kWarp) & 1u) == 0) continue;
    const float* from = sums + (w * Batch + pair) * kSumsStride + 4 * quad;
    const int fields = quad < kQuads - 1 ? 4 : Fields - 4 * (kQuads - 1);
    total.x += from[0];
    if (fields > 1) total.y += from[1];
    if (fields <= 2) continue;
    total.z += from[2];
    total.w += from[3];
  }
  return total;
}
static_assert(kRowBlue == 8 && kRowUsed == 12 && kQuads == 3, "the third quarter holds blue and what not all rows have");

SPLAT_DEVICE float4* row_of(float* rows, uint32_t row) {
  return reinterpret_cast<float4*>(rows + int64_t(row) * kRowSize);
}

// The rows of the batch's pairs, whole, four threads a row.
template <int Fields, int Warps, int Batch>
SPLAT_DEVICE void write_rows(float* rows, const uint32_t* pair_rows, const float* sums, const uint32_t* touched,
                             int32_t count) {
  for (int32_t i = int32_t(threadIdx.x); i < count * kRowQuads; i += int32_t(blockDim.x)) {
    const int pair = i / kRowQuads, quad = i % kRowQuads;
    row_of(rows, pair_rows[pair])[quad] = row_quad<Fields, Warps, Batch>(sums, touched, pair, quad);
  }
}
// Zeros in the rows of pairs that nothing looked at.
SPLAT_DEVICE void clear_rows(float* rows, const uint32_t* pair_rows, int32_t count) {
  for (int32_t i = int32_t(threadIdx.x); i < count * kRowQuads; i += int32_t(blockDim.x))
    row_of(rows, pair_rows[i / kRowQuads])[i % kRowQuads] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

// The tile's share of the background's gradient, from each thread's.
SPLAT_DEVICE void write_background(const float* mine, float* background_partials, int32_t tile) {
#pragma unroll
  for (int c = 0; c < 3; ++c) {
    const float sum = block_sum(mine[c]);
    if (threadIdx.x == 0) background_partials[3 * int64_t(tile) + c] = sum;
  }
}

// ---- simple kernel -------------------------------------------------------------------------------------------------

template <bool Depth, bool Abs>
__global__ void __launch_bounds__(kSimpleThreads)
    blend_vjp_simple(BlendLists lists, BlendImages out, BlendImages v_out, float* rows, float* background_partials) {
  constexpr int kBatch = kWarp, kWarps = kSimpleThreads / kWarp, kSums = row_fields(Depth, Abs);
  SPLAT_SHARED(float4, staged, kBatch * kQuads);
  SPLAT_SHARED(float, sums, kWarps * kBatch * kSumsStride);
  SPLAT_SHARED(uint32_t, touched, kWarps);
  if (overflowed(lists.counters)) return;
  const int32_t tile = tile_of_block(lists);
  const int64_t begin = lists.tile_starts[tile];
  const int32_t pairs = int32_t(lists.tile_starts[tile + 1] - begin), stop = lists.tile_ends[tile];
  const ThreadPixels at = simple_pixels(lists, tile);
  const float x = float(at.x) + 0.5f, y = float(at.y) + 0.5f;
  float v_background[3] = {0.0f, 0.0f, 0.0f};
  BackwardPixel<Depth> pixel;
  pixel.read(lists, out, v_out, at.x, at.y, v_background);
  if (background_partials != nullptr) write_background(v_background, background_partials, tile);

  for (int32_t base = 0; base < stop; base += kBatch) {
    const int32_t count = stop - base < kBatch ? stop - base : kBatch;
    const int32_t mine = int32_t(threadIdx.x);
    if (mine < count) stage_record(lists, lists.pair_records[begin + base + mine], staged + mine * kQuads);
    wait_for_copies();
    __syncthreads();  // this batch is there; the last one's sums have been read
    const uint32_t mask = lane_id() < count ? lists.pair_masks[begin + base + lane_id()] : 0u;
    const Hits hits = simple_hits(mask, at.slot);
    for (uint32_t left = hits.any; left != 0; left &= left - 1) {
      const int i = first_hit(left);
      const Splat splat = read_splat(staged + i * kQuads);
      const float dx = x - splat.rec[kRecX], dy = y - splat.rec[kRecY];
      const PixelShare share = pixel.step(splat.rec, dx, dy, has(hits.own, i));
      const float vx = share.v * dx, vy = share.v * dy;
      float row[kRowUsed] = {share.v, vx, vy, vx * dx, vx * dy, vy * dy};
      pixel.add_colour(share.weight, row);
      if (Abs) abs_slopes(splat.rec, vx, vy, row[kRowAbsX], row[kRowAbsY]);
#pragma unroll
      for (int f = 0; f < kSums; ++f) {
        const float sum = warp_sum(row[f]);
        if (lane_id() == 0) sums[(warp_id() * kBatch + i) * kSumsStride + f] = sum;
      }
    }
    if (lane_id() == 0) touched[warp_id()] = hits.any;
    __syncthreads();
    write_rows<kSums, kWarps, kBatch>(rows, lists.pair_rows + begin + base, sums, touched, count);
  }
  clear_rows(rows, lists.pair_rows + begin + stop, pairs - stop);
}

// ---- fast kernel ---------------------------------------------------------------------------------------------------

constexpr int kFastBatch = 64;
constexpr int kFastWarps = kFastThreads / kWarp;
constexpr int kFastGroups = kFastBatch / kWarp;
// Blocks a multiprocessor shall hold at once: left to itself the compiler spills to make room for more.
constexpr int kFastBlocks = 7;

// A tile with very many pairs would still run when all else is done. Such a tile is cut into parts, each for a block of
// its own, which first replays the pairs before its part. That repeats a quarter or so of a pair's arithmetic, but
// needs no memory for checkpoints, and ends in the bits that a walk without cuts has there: no result depends on it.
constexpr int kParts = 4;
constexpr int kLongPairs = 512;   // it takes so many to be worth it, and
constexpr int kLongShare = 2048;  // more than all / 2048: half of what a big GPU has for each block that it holds

// Blocks come in this order, since those that come first are done first: for each part but the first some scouts, each
// of which looks for long tiles among 32; then a block a tile, which takes the first part of a long one.
SPLAT_HD int32_t scouts_of(int32_t tiles) { return (tiles + kWarp - 1) / kWarp; }
SPLAT_HD int64_t fast_vjp_blocks(int32_t tiles) { return int64_t(kParts - 1) * scouts_of(tiles) + tiles; }

// end: of the view's tiles.
SPLAT_DEVICE bool is_long(const BlendLists& lists, int32_t end, int32_t tile) {
  const int32_t stop = lists.tile_ends[tile];
  return stop > kLongPairs && int64_t(stop) * kLongShare > lists.tile_starts[end];
}

// Staged pairs and sums of a block.
struct FastShared {
  float4* staged;     // two batches
  uint32_t* masks;    // two batches
  float* sums;        // [warps][kFastBatch][kSumsStride]
  uint32_t* touched;  // [warps][kFastGroups]
};

// A lane's two pixels.
template <bool Depth, bool Abs>
struct PixelPair {
  static constexpr int kSums = row_fields(Depth, Abs);
  float x, y;  // centre of the upper one
  BackwardPixel<Depth> upper, lower;

  SPLAT_DEVICE bool alive() const { return upper.alive() || lower.alive(); }
  // What the pair leaves behind it, and nothing else.
  SPLAT_DEVICE void replay(const Splat& splat, bool reached) {
    const float dx = x - splat.rec[kRecX];
    upper.step(splat.rec, dx, y - splat.rec[kRecY], reached);
    lower.step(splat.rec, dx, (y + 1.0f) - splat.rec[kRecY], reached);
  }
  // Also sums over the warp; false when there was nothing to sum. The lane's sum goes to sums[field].
  SPLAT_DEVICE bool sum(const Splat& splat, bool reached, int field, float* sums) {
    const float dx = x - splat.rec[kRecX];
    const float upper_dy = y - splat.rec[kRecY], lower_dy = (y + 1.0f) - splat.rec[kRecY];
    const PixelShare a = upper.step(splat.rec, dx, upper_dy, reached);
    const PixelShare b = lower.step(splat.rec, dx, lower_dy, reached);
    // Masks are generous, and pixels stop.
    if (!__any_sync(kFullWarp, a.weight + b.weight > 0.0f)) return false;
    const float v = a.v + b.v, vx = v * dx, a_vy = a.v * upper_dy, b_vy = b.v * lower_dy, vy = a_vy + b_vy;
    float row[kRowUsed] = {v, vx, vy, vx * dx, vy * dx, a_vy * upper_dy + b_vy * lower_dy};
    upper.add_colour(a.weight, row);
    lower.add_colour(b.weight, row);
    if (Abs) {
      float x, y;
      abs_slopes(splat.rec, a.v * dx, a_vy, row[kRowAbsX], row[kRowAbsY]);
      abs_slopes(splat.rec, b.v * dx, b_vy, x, y);
      row[kRowAbsX] += x, row[kRowAbsY] += y;
    }
    transpose_reduce<kSums>(row);
    if (field >= 0) sums[field] = row[0];
    return true;
  }
};

// Rows of a tile's pairs [first, end); first is a multiple of kFastBatch.
template <bool Depth, bool Abs>
SPLAT_DEVICE void blend_vjp_part(const BlendLists& lists, int64_t begin, int32_t first, int32_t end, int32_t slot,
                                 PixelPair<Depth, Abs>& pixels, const FastShared& shared, float* rows) {
  const int field = field_of_lane<PixelPair<Depth, Abs>::kSums>();
  // A part before this one, if any, ended with all its pairs read, and its sums are not written to before the barrier.
  Stager<kFastBatch> stager(lists, begin, end, shared.staged, shared.masks);
  int buffer = 0;
  for (int32_t base = 0; base < end; base += kFastBatch, buffer ^= 1) {
    wait_for_copies();
    __syncthreads();  // this batch is there; the last one and its sums have been read
    stager.fetch_after(lists, base, buffer);
    const int32_t count = end - base < kFastBatch ? end - base : kFastBatch;
    for (int group = 0; group < kFastGroups; ++group) {
      const int from = buffer * kFastBatch + group * kWarp;
      const bool working = __any_sync(kFullWarp, pixels.alive()) && group * kWarp + lane_id() < count;
      const Hits hits = fast_hits(working ? shared.masks[from + lane_id()] : 0u, slot);
      float* sums = shared.sums + (warp_id() * kFastBatch + group * kWarp) * kSumsStride;
      uint32_t summed = 0;
      for (uint32_t left = hits.any; left != 0; left &= left - 1) {
        const int i = first_hit(left);
        const Splat splat = read_splat(shared.staged + (from + i) * kQuads);
        if (base < first) {
          pixels.replay(splat, has(hits.own, i));
        } else if (pixels.sum(splat, has(hits.own, i), field, sums + i * kSumsStride)) {
          summed |= 1u << i;
        }
      }
      if (lane_id() == 0) shared.touched[warp_id() * kFastGroups + group] = summed;
    }
    if (base < first) continue;
    __syncthreads();
    write_rows<PixelPair<Depth, Abs>::kSums, kFastWarps, kFastBatch>(rows, lists.pair_rows + begin + base, shared.sums,
                                                                     shared.touched, count);
  }
}

template <bool Depth, bool Abs>
SPLAT_DEVICE void blend_vjp_tile(const BlendLists& lists, int32_t tile, bool cut, int part, const BlendImages& out,
                                 const BlendImages& v_out, const FastShared& shared, float* rows,
                                 float* background_partials) {
  const int64_t begin = lists.tile_starts[tile];
  const int32_t pairs = int32_t(lists.tile_starts[tile + 1] - begin), stop = lists.tile_ends[tile];
  const int32_t length = cut ? (stop / kParts / kFastBatch + 1) * kFastBatch : stop;  // of a part
  if (part != 0 && part * length >= stop) return;
  const int32_t end = (part + 1) * length < stop ? (part + 1) * length : stop;
  const ThreadPixels at = fast_pixels(lists, tile);
  float v_background[3] = {0.0f, 0.0f, 0.0f};
  PixelPair<Depth, Abs> pixels = {float(at.x) + 0.5f, float(at.y) + 0.5f, {}, {}};
  pixels.upper.read(lists, out, v_out, at.x, at.y, v_background);
  pixels.lower.read(lists, out, v_out, at.x, at.y + 1, v_background);
  if (part == 0) {
    if (background_partials != nullptr) write_background(v_background, background_partials, tile);
    clear_rows(rows, lists.pair_rows + begin + stop, pairs - stop);
  }
  blend_vjp_part<Depth, Abs>(lists, begin, part * length, end, at.slot, pixels, shared, rows);
}

template <bool Depth, bool Abs>
__global__ void __launch_bounds__(kFastThreads, kFastBlocks)
    blend_vjp_fast(BlendLists lists, int32_t tiles, BlendImages out, BlendImages v_out, float* rows,
                   float* background_partials) {
  SPLAT_SHARED(float4, staged, 2 * kFastBatch * kQuads);
  SPLAT_SHARED(uint32_t, masks, 2 * kFastBatch);
  SPLAT_SHARED(float, sums, kFastWarps * kFastBatch * kSumsStride);
  SPLAT_SHARED(uint32_t, touched, kFastWarps * kFastGroups);
  if (overflowed(lists.counters)) return;
  const FastShared shared = {staged, masks, sums, touched};
  const int32_t scouts = scouts_of(tiles), block = int32_t(blockIdx.x) - (kParts - 1) * scouts;
  const int32_t end = lists.first_tile + tiles;
  if (block >= 0) {
    const int32_t tile = lists.first_tile + block;
    blend_vjp_tile<Depth, Abs>(lists, tile, is_long(lists, end, tile), 0, out, v_out, shared, rows, background_partials);
    return;
  }
  // A scout's tiles lie far apart, for long ones lie together. Every warp looks at the same tiles.
  const int32_t first = lists.first_tile + int32_t(blockIdx.x) % scouts, part = 1 + int32_t(blockIdx.x) / scouts;
  const int32_t tile = first + lane_id() * scouts;
  uint32_t wanted = __ballot_sync(kFullWarp, tile < end && is_long(lists, end, tile));
  for (; wanted != 0; wanted &= wanted - 1)
    blend_vjp_tile<Depth, Abs>(lists, first + first_hit(wanted) * scouts, true, part, out, v_out, shared, rows, nullptr);
}

// The tiles' shares of the background's gradient, summed by one block.
constexpr int kBackgroundThreads = 256;
__global__ void __launch_bounds__(kBackgroundThreads)
    sum_background(const int64_t* counters, const float* partials, int64_t tiles, float* v_background) {
  if (overflowed(counters)) return;
  float sums[3] = {0.0f, 0.0f, 0.0f};
  for (int64_t t = threadIdx.x; t < tiles; t += kBackgroundThreads)
    for (int c = 0; c < 3; ++c) sums[c] += partials[3 * t + c];
#pragma unroll
  for (int c = 0; c < 3; ++c) {
    const float sum = block_sum(sums[c]);
    if (threadIdx.x == 0) v_background[c] = sum;
  }
}

}  // namespace gpu
}  // namespace splat
