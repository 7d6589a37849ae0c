// Backward blending on the GPU, one 16x16 tile a block: docs/math.md 6.2. No atomics: every tile intersection has
// a gradient of its own in memory.
//
// Tiles are walked front to back again with the forward pass's arithmetic. The pixels' shares of an intersection's
// gradient are summed over a warp, then over the warps in shared memory, always in the same order.
#pragma once
#include "blend.cuh"

namespace splat {
namespace gpu {

constexpr int kIsectGradQuads = kIsectGradSize / 4;
constexpr int kSumsStride = 4 * kQuads;  // floats of a warp's sums of an intersection: whole float4s
static_assert(kIsectGradUsed <= kSumsStride, "a warp's sums hold a gradient");

// ---- a pixel -------------------------------------------------------------------------------------------------------

// Of a pixel and an intersection: v is alpha dL/dalpha, 0 where alpha is clamped, and weight is alpha T, with the
// transmittance T in front of it. Both are 0 where the Gaussian is not blended.
struct PixelShare {
  float v, weight;
};

// One step of a pixel's walk front to back. v_weight: dL/dweight of the intersection, its colour (and depth) times
// dL/dpixel. behind: the sum of weight times v_weight over this intersection and those behind it, with the background's
// term. The step subtracts this intersection's term, which leaves the suffix sum of those behind it. transmittance is
// updated likewise.
SPLAT_DEVICE PixelShare pixel_share(const float* proj, float dx, float dy, bool reached, float v_weight,
                                    float& transmittance, float& behind) {
  const float exponent = log2_alpha(proj, dx, dy), raw = exp2_bounded(exponent);
  const float alpha = select(reached && is_seen(exponent), min_(float(kMaxAlpha), raw), 0.0f);
  const float before = transmittance, share = alpha * before, after = before - share;
  const bool live = after > float(kMinTransmittance);
  const float live_alpha = select(live, alpha, 0.0f), weight = select(live, share, 0.0f);
  transmittance = select(live, after, 0.0f);
  behind -= weight * v_weight;
  // No gradient reaches geometry or opacity where alpha was clamped.
  const float free_alpha = select(raw <= float(kMaxAlpha), live_alpha, 0.0f);
  return {free_alpha * alpha_vjp(before, v_weight, behind, 1.0f - alpha), weight};
}

// Transmittance 0: the pixel has stopped, or lies outside the image.
template <bool Depth>
struct BackwardPixel {
  float transmittance = 0.0f, behind = 0.0f, red = 0.0f, green = 0.0f, blue = 0.0f, depth = 0.0f;

  // dL/dpixel of the images, and the suffix sum in front of the first intersection: the pixel of the image, background
  // included, times dL/dpixel, less T_N dL/dalpha, where T_N is the transmittance behind all. v_out.alpha may be absent.
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

  SPLAT_DEVICE PixelShare step(const float* proj, float dx, float dy, bool reached) {
    float v_weight = proj[kProjRed] * red + proj[kProjGreen] * green + proj[kProjBlue] * blue;
    if (Depth) v_weight += proj[kProjDepth] * depth;
    return pixel_share(proj, dx, dy, reached, v_weight, transmittance, behind);
  }
  SPLAT_DEVICE void colour_grads(float weight, float* grads) const {
    grads[kGradRed] = weight * red;
    grads[kGradGreen] = weight * green;
    grads[kGradBlue] = weight * blue;
    grads[kGradDepth] = Depth ? weight * depth : 0.0f;
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

// A quarter of an intersection's gradient from the warps' sums. touched[w] has the intersections of the batch that warp
// w has sums of.
template <int Fields, int Warps, int Batch>
SPLAT_DEVICE float4 isect_grad_quad(const float* sums, const uint32_t* touched, int isect, int quad) {
  float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (quad >= kQuads) return total;
#pragma unroll
  for (int w = 0; w < Warps; ++w) {
    if ((touched[w * (Batch / kWarp) + isect / kWarp] >> (isect % kWarp) & 1u) == 0) continue;
    const float* from = sums + (w * Batch + isect) * kSumsStride + 4 * quad;
    const int fields = quad < kQuads - 1 ? 4 : Fields - 4 * (kQuads - 1);
    total.x += from[0];
    if (fields > 1) total.y += from[1];
    if (fields <= 2) continue;
    total.z += from[2];
    total.w += from[3];
  }
  return total;
}
static_assert(kGradBlue == 8 && kIsectGradUsed == 12 && kQuads == 3,
              "the third quarter holds blue and the optional fields");

SPLAT_DEVICE float4* isect_grad_at(float* isect_grads, uint32_t grad) {
  return reinterpret_cast<float4*>(isect_grads + int64_t(grad) * kIsectGradSize);
}

// Writes the whole gradients of the batch's intersections, four threads each.
template <int Fields, int Warps, int Batch>
SPLAT_DEVICE void write_isect_grads(float* isect_grads, const uint32_t* isect_grad_rows, const float* sums,
                                    const uint32_t* touched, int32_t count) {
  for (int32_t i = int32_t(threadIdx.x); i < count * kIsectGradQuads; i += int32_t(blockDim.x)) {
    const int isect = i / kIsectGradQuads, quad = i % kIsectGradQuads;
    isect_grad_at(isect_grads, isect_grad_rows[isect])[quad] =
        isect_grad_quad<Fields, Warps, Batch>(sums, touched, isect, quad);
  }
}
// Zeros for intersections that no pixel evaluated.
SPLAT_DEVICE void clear_isect_grads(float* isect_grads, const uint32_t* isect_grad_rows, int32_t count) {
  for (int32_t i = int32_t(threadIdx.x); i < count * kIsectGradQuads; i += int32_t(blockDim.x))
    isect_grad_at(isect_grads, isect_grad_rows[i / kIsectGradQuads])[i % kIsectGradQuads] =
        make_float4(0.0f, 0.0f, 0.0f, 0.0f);
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
__global__ void __launch_bounds__(kSimpleThreads) blend_vjp_simple(BlendLists lists, BlendImages out, BlendImages v_out,
                                                                   float* isect_grads, float* background_partials) {
  constexpr int kBatch = kWarp, kWarps = kSimpleThreads / kWarp, kSums = isect_grad_fields(Depth, Abs);
  SPLAT_SHARED(float4, staged, kBatch * kQuads);
  SPLAT_SHARED(float, sums, kWarps * kBatch * kSumsStride);
  SPLAT_SHARED(uint32_t, touched, kWarps);
  if (overflowed(lists.counters)) return;
  const int32_t tile = lists.first_tile + int32_t(blockIdx.x);  // in row order: an order costs a register too many
  const int64_t begin = lists.tile_starts[tile];
  const int32_t isects = int32_t(lists.tile_starts[tile + 1] - begin), stop = lists.tile_ends[tile];
  const ThreadPixels at = simple_pixels(lists, tile);
  const float x = float(at.x) + 0.5f, y = float(at.y) + 0.5f;
  float v_background[3] = {0.0f, 0.0f, 0.0f};
  BackwardPixel<Depth> pixel;
  pixel.read(lists, out, v_out, at.x, at.y, v_background);
  if (background_partials != nullptr) write_background(v_background, background_partials, tile);

  for (int32_t base = 0; base < stop; base += kBatch) {
    const int32_t count = stop - base < kBatch ? stop - base : kBatch;
    const int32_t mine = int32_t(threadIdx.x);
    if (mine < count) stage_projected(lists, lists.isect_gaussians[begin + base + mine], staged + mine * kQuads);
    wait_for_copies();
    __syncthreads();  // this batch is there; the last one's sums have been read
    const uint32_t mask = lane_id() < count ? lists.isect_masks[begin + base + lane_id()] : 0u;
    const Hits hits = simple_hits(mask, at.slot);
    for (uint32_t left = hits.any; left != 0; left &= left - 1) {
      const int i = first_hit(left);
      const Splat splat = read_splat(staged + i * kQuads);
      const float dx = x - splat.proj[kProjX], dy = y - splat.proj[kProjY];
      const PixelShare share = pixel.step(splat.proj, dx, dy, has(hits.own, i));
      const float vx = share.v * dx, vy = share.v * dy;
      float grad[kIsectGradUsed] = {share.v, vx, vy, vx * dx, vx * dy, vy * dy};
      pixel.colour_grads(share.weight, grad);
      if (Abs) abs_mean2d_grads(splat.proj, vx, vy, grad[kGradAbsX], grad[kGradAbsY]);
#pragma unroll
      for (int f = 0; f < kSums; ++f) {
        const float sum = warp_sum(grad[f]);
        if (lane_id() == 0) sums[(warp_id() * kBatch + i) * kSumsStride + f] = sum;
      }
    }
    if (lane_id() == 0) touched[warp_id()] = hits.any;
    __syncthreads();
    write_isect_grads<kSums, kWarps, kBatch>(isect_grads, lists.isect_grad_rows + begin + base, sums, touched, count);
  }
  clear_isect_grads(isect_grads, lists.isect_grad_rows + begin + stop, isects - stop);
}

// ---- fast kernel ---------------------------------------------------------------------------------------------------

// A warp has half a tile, 16x8 pixels, and a lane a column of a 4x4 block: the sums over the warp, a third of the
// instructions of an intersection, then serve 128 pixels. Larger parts than the forward pass's pay here, since the sums
// cost more than the pixels that an intersection does not reach.
constexpr int kFastBatch = 64;
constexpr int kVjpThreads = 64;
constexpr int kVjpWarps = kVjpThreads / kWarp;
constexpr int kVjpSlots = kBlocksPerTile / kVjpWarps;  // 4x4 blocks of a warp
constexpr int kFastGroups = kFastBatch / kWarp;
static_assert(kVjpSlots * kBlock == kWarp, "a lane is a column of a block");
// Blocks that a multiprocessor holds at once: without this bound the compiler spills registers to fit more.
constexpr int kFastBlocks = 10;

SPLAT_DEVICE ThreadPixels column_pixels(const BlendLists& lists, int32_t tile) {
  const int slot = lane_id() / kBlock, block = warp_id() * kVjpSlots + slot;
  return {tile_x(lists, tile) + block % kBlockSide * kBlock + lane_id() % kBlock,
          tile_y(lists, tile) + block / kBlockSide * kBlock, slot};
}
SPLAT_DEVICE Hits column_hits(uint32_t mask, int slot) {
  Hits hits = {0, 0};
  mask >>= warp_id() * kVjpSlots;
#pragma unroll
  for (int s = 0; s < kVjpSlots; ++s) {
    const uint32_t reached = __ballot_sync(kFullWarp, (mask >> s & 1u) != 0);
    hits.any |= reached;
    if (s == slot) hits.own = reached;
  }
  return hits;
}

// A tile with very many intersections would still run when all others are done. Such a tile is cut into parts, each for
// a block of its own, which first computes transmittance and suffix sum of its pixels over the intersections before its
// part, without gradients. That repeats about a quarter of the arithmetic, needs no memory for checkpoints, and gives the
// same bits as a walk without cuts.
constexpr int kParts = 4;
constexpr int kLongIsects = 512;   // fewer are not worth a cut, and
constexpr int kLongShare = 2048;  // a long tile has more than all / 2048, half of a block's share on a big GPU

// Blocks come in this order, since those that come first are done first: for each part but the first some scouts, each
// of which searches 32 tiles for long ones; then a block a tile, which takes the first part of a long one.
SPLAT_HD int32_t scouts_of(int32_t tiles) { return (tiles + kWarp - 1) / kWarp; }
SPLAT_HD int64_t fast_vjp_blocks(int32_t tiles) { return int64_t(kParts - 1) * scouts_of(tiles) + tiles; }

// end: of the view's tiles.
SPLAT_DEVICE bool is_long(const BlendLists& lists, int32_t end, int32_t tile) {
  const int32_t stop = lists.tile_ends[tile];
  return stop > kLongIsects && int64_t(stop) * kLongShare > lists.tile_starts[end];
}

// Staged intersections and sums of a block.
struct FastShared {
  float4* staged;     // two batches
  uint32_t* masks;    // two batches
  float* sums;        // [warps][kFastBatch][kSumsStride]
  uint32_t* touched;  // [warps][kFastGroups]
};

// A lane's pixels, one below the other.
template <bool Depth, bool Abs>
struct PixelColumn {
  static constexpr int kSums = isect_grad_fields(Depth, Abs);
  float x, y;  // centre of the uppermost
  BackwardPixel<Depth> pixels[kBlock];

  SPLAT_DEVICE bool alive() const {
    bool any = false;
#pragma unroll
    for (int k = 0; k < kBlock; ++k) any = any || pixels[k].alive();
    return any;
  }
  // Updates the pixels as the intersection does, without its gradient.
  SPLAT_DEVICE void replay(const Splat& splat, bool reached) {
    const float dx = x - splat.proj[kProjX];
#pragma unroll
    for (int k = 0; k < kBlock; ++k) pixels[k].step(splat.proj, dx, (y + float(k)) - splat.proj[kProjY], reached);
  }
  // Also sums over the warp; false when there was nothing to sum. The lane's sum goes to sums[field].
  SPLAT_DEVICE bool sum(const Splat& splat, bool reached, int field, float* sums) {
    const float dx = x - splat.proj[kProjX];
    float dy[kBlock], weight = 0.0f;
    PixelShare shares[kBlock];
#pragma unroll
    for (int k = 0; k < kBlock; ++k) {
      dy[k] = (y + float(k)) - splat.proj[kProjY];
      shares[k] = pixels[k].step(splat.proj, dx, dy[k], reached);
      weight += shares[k].weight;
    }
    // A mask may have blocks of which no pixel blends the Gaussian, and pixels stop at the least transmittance.
    if (!__any_sync(kFullWarp, weight > 0.0f)) return false;
    float grad[kIsectGradUsed];
#pragma unroll
    for (int k = 0; k < kBlock; ++k) {
      const float v = shares[k].v, vy = v * dy[k];
      float mine[kIsectGradUsed] = {v, 0.0f, vy, 0.0f, 0.0f, vy * dy[k]};
      pixels[k].colour_grads(shares[k].weight, mine);
      if (Abs) abs_mean2d_grads(splat.proj, v * dx, vy, mine[kGradAbsX], mine[kGradAbsY]);
#pragma unroll
      for (int f = 0; f < kSums; ++f) grad[f] = k == 0 ? mine[f] : grad[f] + mine[f];
    }
    grad[kGradVx] = grad[kGradV] * dx;
    grad[kGradVxx] = grad[kGradVx] * dx;
    grad[kGradVxy] = grad[kGradVy] * dx;
    transpose_reduce<kSums>(grad);
    if (field >= 0) sums[field] = grad[0];
    return true;
  }
};

// Gradients of a tile's intersections [first, end); first is a multiple of kFastBatch.
template <bool Depth, bool Abs>
SPLAT_DEVICE void blend_vjp_part(const BlendLists& lists, int64_t begin, int32_t first, int32_t end, int32_t slot,
                                 PixelColumn<Depth, Abs>& pixels, const FastShared& shared, float* isect_grads) {
  const int field = field_of_lane<PixelColumn<Depth, Abs>::kSums>();
  // A part before this one, if any, ended with all its intersections read; its sums are written only after the barrier.
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
      const Hits hits = column_hits(working ? shared.masks[from + lane_id()] : 0u, slot);
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
    write_isect_grads<PixelColumn<Depth, Abs>::kSums, kVjpWarps, kFastBatch>(
        isect_grads, lists.isect_grad_rows + begin + base, shared.sums, shared.touched, count);
  }
}

template <bool Depth, bool Abs>
SPLAT_DEVICE void blend_vjp_tile(const BlendLists& lists, int32_t tile, bool cut, int part, const BlendImages& out,
                                 const BlendImages& v_out, const FastShared& shared, float* isect_grads,
                                 float* background_partials) {
  const int64_t begin = lists.tile_starts[tile];
  const int32_t isects = int32_t(lists.tile_starts[tile + 1] - begin), stop = lists.tile_ends[tile];
  const int32_t length = cut ? (stop / kParts / kFastBatch + 1) * kFastBatch : stop;  // of a part
  if (part != 0 && part * length >= stop) return;
  const int32_t end = (part + 1) * length < stop ? (part + 1) * length : stop;
  const ThreadPixels at = column_pixels(lists, tile);
  float v_background[3] = {0.0f, 0.0f, 0.0f};
  PixelColumn<Depth, Abs> pixels = {float(at.x) + 0.5f, float(at.y) + 0.5f, {}};
#pragma unroll
  for (int k = 0; k < kBlock; ++k) pixels.pixels[k].read(lists, out, v_out, at.x, at.y + k, v_background);
  if (part == 0) {
    if (background_partials != nullptr) write_background(v_background, background_partials, tile);
    clear_isect_grads(isect_grads, lists.isect_grad_rows + begin + stop, isects - stop);
  }
  blend_vjp_part<Depth, Abs>(lists, begin, part * length, end, at.slot, pixels, shared, isect_grads);
}

template <bool Depth, bool Abs>
__global__ void __launch_bounds__(kVjpThreads, kFastBlocks)
    blend_vjp_fast(BlendLists lists, int32_t tiles, BlendImages out, BlendImages v_out, float* isect_grads,
                   float* background_partials) {
  SPLAT_SHARED(float4, staged, 2 * kFastBatch * kQuads);
  SPLAT_SHARED(uint32_t, masks, 2 * kFastBatch);
  SPLAT_SHARED(float, sums, kVjpWarps * kFastBatch * kSumsStride);
  SPLAT_SHARED(uint32_t, touched, kVjpWarps * kFastGroups);
  if (overflowed(lists.counters)) return;
  const FastShared shared = {staged, masks, sums, touched};
  const int32_t scouts = scouts_of(tiles), block = int32_t(blockIdx.x) - (kParts - 1) * scouts;
  const int32_t end = lists.first_tile + tiles;
  if (block >= 0) {
    const int32_t tile = tile_at(lists, block);
    blend_vjp_tile<Depth, Abs>(lists, tile, is_long(lists, end, tile), 0, out, v_out, shared, isect_grads,
                               background_partials);
    return;
  }
  // A scout's tiles are far apart, since long ones are close together. Every warp checks the same tiles.
  const int32_t first = int32_t(blockIdx.x) % scouts, part = 1 + int32_t(blockIdx.x) / scouts;
  const int32_t k = first + lane_id() * scouts;
  uint32_t wanted = __ballot_sync(kFullWarp, k < tiles && is_long(lists, end, tile_at(lists, k)));
  for (; wanted != 0; wanted &= wanted - 1)
    blend_vjp_tile<Depth, Abs>(lists, tile_at(lists, first + first_hit(wanted) * scouts), true, part, out, v_out,
                               shared, isect_grads, nullptr);
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
