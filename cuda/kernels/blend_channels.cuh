// Blending of any number of channels on the GPU, forward and backward, one 16x16 tile a block: docs/math.md 6. The order
// of a pixel's sums is that of the CPU twin; gradients are summed without atomics, always in the same order.
//
// Forward, sixteen channels of a tile are a block. Backward, a block computes alpha and weights once for 64 channels. For
// a batch of intersections, dL/dweight comes first: colours times dL/dpixel, summed over the channels. The gradients of the
// colours come last: weights times dL/dpixel, summed over the pixels. Both are products of small matrices; only the
// gradients of geometry are summed over warps.
#pragma once
#include "blend_vjp.cuh"

namespace splat {
namespace gpu {

constexpr int kChannelRun = 16;                    // channels that a thread has in registers
constexpr int kRunQuads = kChannelRun / 4;
constexpr int kChannelBatch = kWarp;               // intersections in shared memory
constexpr int kSumThreads = SPLAT_CHUNK;
// Blocks that a multiprocessor holds at once: without these bounds the compiler spills registers to fit more.
constexpr int kForwardBlocks = 6, kBackwardBlocks = 2;

struct ChannelLists {
  const float* colors;   // [n][count]
  const int32_t* ids;    // Gaussian of a projected one
  float* isect_grads;    // [isects][width]
  float* v_colors;       // [n][count]; null: not asked for
  int32_t count;
  int32_t first, width;  // backward: the channels of this pass
};

// Stages sixteen channels of the batch's colours from `channel` on, zeros behind the last. Threads that read the last ones
// must have passed a barrier.
SPLAT_DEVICE void stage_colors(const ChannelLists& channels, const int32_t* gaussians, int32_t count, int32_t channel,
                               float4* staged) {
  float* to = reinterpret_cast<float*>(staged);
  for (int i = int(threadIdx.x); i < kChannelBatch * kChannelRun; i += int(blockDim.x)) {
    const int isect = i / kChannelRun, c = channel + i % kChannelRun;
    const bool there = isect < count && c < channels.count;
    to[i] = there ? channels.colors[int64_t(gaussians[isect]) * channels.count + c] : 0.0f;
  }
}
// Stages the geometry of the batch at `at` in the lists, its masks and its Gaussians.
SPLAT_DEVICE void stage_batch(const BlendLists& lists, const ChannelLists& channels, int64_t at, int32_t count,
                              float4* staged, uint32_t* masks, int32_t* gaussians) {
  const int32_t mine = int32_t(threadIdx.x);
  if (mine >= count) return;
  const uint32_t slot = lists.isect_gaussians[at + mine];
  stage_projected(lists, slot, staged + mine * kQuads);
  masks[mine] = lists.isect_masks[at + mine];
  gaussians[mine] = channels.ids[slot];
}

// ---- forward -------------------------------------------------------------------------------------------------------

// As ForwardPixel, with sixteen channels.
template <bool Depth>
struct ChannelPixel {
  float transmittance, depth = 0.0f, sums[kChannelRun];

  SPLAT_DEVICE explicit ChannelPixel(bool in_image) : transmittance(in_image ? 1.0f : 0.0f) {
#pragma unroll
    for (int k = 0; k < kChannelRun; ++k) sums[k] = 0.0f;
  }
  SPLAT_DEVICE bool alive() const { return transmittance > 0.0f; }
  SPLAT_DEVICE void blend(const float* proj, const float* color, float dx, float dy, bool reached) {
    const float exponent = log2_alpha(proj, dx, dy);
    const float clamped = min_(float(kMaxAlpha), exp2_bounded(exponent));
    const float weight = select(reached && is_seen(exponent), clamped, 0.0f) * transmittance;
    const float after = transmittance - weight;
    const bool live = after > float(kMinTransmittance);
    const float w = select(live, weight, 0.0f);
    transmittance = select(live, after, -abs_(transmittance));
#pragma unroll
    for (int k = 0; k < kChannelRun; ++k) sums[k] += w * color[k];
    if (Depth) depth += w * proj[kProjDepth];
  }
  SPLAT_DEVICE void write(const BlendLists& lists, int32_t channels, int32_t channel, const float* background,
                          const BlendImages& out, int32_t x, int32_t y) const {
    if (!inside(lists, x, y)) return;
    const int64_t at = int64_t(y) * lists.width + x;
    const float t = abs_(transmittance);
#pragma unroll
    for (int k = 0; k < kChannelRun; ++k)
      if (channel + k < channels) out.image[at * channels + channel + k] = sums[k] + t * background[channel + k];
    if (channel != 0) return;
    out.alpha[at] = 1.0f - t;
    if (Depth) out.depth[at] = depth;
  }
};

// The blocks of a tile lie together, one for each sixteen channels.
template <bool Depth>
__global__ void __launch_bounds__(kFastThreads, kForwardBlocks)
    blend_channels(BlendLists lists, ChannelLists channels, const float* background, BlendImages out) {
  constexpr int kWarps = kFastThreads / kWarp;
  SPLAT_SHARED(float4, staged, kChannelBatch * kQuads);
  SPLAT_SHARED(float4, colors, kChannelBatch * kRunQuads);
  SPLAT_SHARED(uint32_t, masks, kChannelBatch);
  SPLAT_SHARED(int32_t, gaussians, kChannelBatch);
  SPLAT_SHARED(int32_t, ends, kWarps);
  if (overflowed(lists.counters)) return;
  const int32_t runs = (channels.count + kChannelRun - 1) / kChannelRun;
  const int32_t tile = lists.first_tile + int32_t(blockIdx.x) / runs;
  const int32_t channel = int32_t(blockIdx.x) % runs * kChannelRun;
  const int64_t begin = lists.tile_starts[tile];
  const int32_t isects = int32_t(lists.tile_starts[tile + 1] - begin);
  const ThreadPixels at = fast_pixels(lists, tile);
  const float x = float(at.x) + 0.5f, y = float(at.y) + 0.5f;
  ChannelPixel<Depth> upper(inside(lists, at.x, at.y)), lower(inside(lists, at.x, at.y + 1));
  int32_t end = 0;

  for (int32_t base = 0; base < isects; base += kChannelBatch) {
    if (!__syncthreads_or(upper.alive() || lower.alive())) break;  // also: the last batch has been read
    const int32_t count = isects - base < kChannelBatch ? isects - base : kChannelBatch;
    stage_batch(lists, channels, begin + base, count, staged, masks, gaussians);
    wait_for_copies();
    __syncthreads();
    stage_colors(channels, gaussians, count, channel, colors);
    __syncthreads();
    if (!__any_sync(kFullWarp, upper.alive() || lower.alive())) continue;
    const Hits hits = fast_hits(lane_id() < count ? masks[lane_id()] : 0u, at.slot);
    for (uint32_t left = hits.any; left != 0; left &= left - 1) {
      const int i = first_hit(left);
      const Splat splat = read_splat(staged + i * kQuads);
      float color[kChannelRun];
#pragma unroll
      for (int q = 0; q < kRunQuads; ++q) {
        const float4 four = colors[i * kRunQuads + q];
        color[4 * q] = four.x, color[4 * q + 1] = four.y, color[4 * q + 2] = four.z, color[4 * q + 3] = four.w;
      }
      const bool reached = has(hits.own, i);
      const float dx = x - splat.proj[kProjX];
      upper.blend(splat.proj, color, dx, y - splat.proj[kProjY], reached);
      lower.blend(splat.proj, color, dx, (y + 1.0f) - splat.proj[kProjY], reached);
    }
    end = base + count;
  }
  if (channel == 0) write_tile_end(lists, tile, end, ends);
  upper.write(lists, channels.count, channel, background, out, at.x, at.y);
  lower.write(lists, channels.count, channel, background, out, at.x, at.y + 1);
}

// ---- backward ------------------------------------------------------------------------------------------------------

// Shared memory of a block. products: dL/dweight of each intersection and pixel, then the weight in its place.
struct ChannelShared {
  float4* staged;      // [kChannelBatch][kQuads]
  float4* colors;      // [kChannelBatch][kRunQuads]
  uint32_t* masks;     // [kChannelBatch]
  int32_t* gaussians;  // [kChannelBatch]
  float* products;     // [kChannelBatch][kSimpleThreads]
  float* sums;         // [warps][kChannelBatch][kSumsStride]
  uint32_t* touched;   // [warps]
};

// Colours times the gradient of the thread's pixel, for the intersections that reach the warp. Every thread of the block
// calls it.
SPLAT_DEVICE void make_v_weights(const ChannelLists& channels, const float* v_pixel, uint32_t reached, int32_t count,
                             const ChannelShared& shared) {
  float v_weight[kChannelBatch];
#pragma unroll
  for (int i = 0; i < kChannelBatch; ++i) v_weight[i] = 0.0f;
  for (int32_t channel = 0; channel < channels.count; channel += kChannelRun) {
    __syncthreads();  // the last sixteen channels have been read
    stage_colors(channels, shared.gaussians, count, channel, shared.colors);
    __syncthreads();
    float v[kChannelRun];
#pragma unroll
    for (int k = 0; k < kChannelRun; ++k)
      v[k] = v_pixel != nullptr && channel + k < channels.count ? v_pixel[channel + k] : 0.0f;
#pragma unroll
    for (int i = 0; i < kChannelBatch; ++i) {
      if (!has(reached, i)) continue;
#pragma unroll
      for (int q = 0; q < kRunQuads; ++q) {
        const float4 four = shared.colors[i * kRunQuads + q];
        v_weight[i] += four.x * v[4 * q];
        v_weight[i] += four.y * v[4 * q + 1];
        v_weight[i] += four.z * v[4 * q + 2];
        v_weight[i] += four.w * v[4 * q + 3];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kChannelBatch; ++i) shared.products[i * kSimpleThreads + int(threadIdx.x)] = v_weight[i];
}

// Weights times gradients of the image, over the pixels of the tile: the batch's rows of the colours' gradients. A thread
// has one channel of two intersections.
SPLAT_DEVICE void write_color_grads(const BlendLists& lists, const ChannelLists& channels, int32_t tile,
                                    const float* v_image, const uint32_t* isect_grad_rows, int32_t count,
                                    const ChannelShared& shared) {
  constexpr int kApart = kSimpleThreads / kChannelRun, kWarps = kSimpleThreads / kWarp;
  static_assert(2 * kApart == kChannelBatch, "a thread has two intersections");
  const int one = int(threadIdx.x) / kChannelRun, two = one + kApart;
  for (int32_t channel = int32_t(threadIdx.x) % kChannelRun; channel < channels.width; channel += kChannelRun) {
    float first = 0.0f, second = 0.0f;
    for (int w = 0; w < kWarps; ++w) {
      const bool in_first = has(shared.touched[w], one), in_second = has(shared.touched[w], two);
      if (!in_first && !in_second) continue;
      for (int r = 0; r < kBlock; ++r) {
        const int32_t y = tile_y(lists, tile) + w / 2 * kBlock + r;
        for (int s = 0; s < 2 * kBlock; ++s) {
          const int32_t x = tile_x(lists, tile) + w % 2 * 2 * kBlock + s;
          if (!inside(lists, x, y)) continue;
          const float v = v_image[(int64_t(y) * lists.width + x) * channels.count + channels.first + channel];
          const int thread = w * kWarp + s / kBlock * kBlocksPerTile + r * kBlock + s % kBlock;
          if (in_first) first += shared.products[one * kSimpleThreads + thread] * v;
          if (in_second) second += shared.products[two * kSimpleThreads + thread] * v;
        }
      }
    }
    if (one < count) channels.isect_grads[int64_t(isect_grad_rows[one]) * channels.width + channel] = first;
    if (two < count) channels.isect_grads[int64_t(isect_grad_rows[two]) * channels.width + channel] = second;
  }
}
static_assert(kBlocksPerTile == kBlock * kBlock, "a 4x4 block has as many pixels as a tile has blocks");

// The tile's share of the background's gradient: a thread a channel.
SPLAT_DEVICE void write_channel_background(const BlendLists& lists, int32_t channels, int32_t tile,
                                           const BlendImages& out, const float* v_image, float* partials) {
  for (int32_t c = int32_t(threadIdx.x); c < channels; c += int32_t(blockDim.x)) {
    float sum = 0.0f;
    for (int i = 0; i < kTile * kTile; ++i) {
      const int32_t x = tile_x(lists, tile) + i % kTile, y = tile_y(lists, tile) + i / kTile;
      if (!inside(lists, x, y)) continue;
      const int64_t at = int64_t(y) * lists.width + x;
      sum += (1.0f - out.alpha[at]) * v_image[at * channels + c];
    }
    partials[int64_t(tile) * channels + c] = sum;
  }
}

// Fields of geometry, without gaps, and their places in an intersection's gradient.
template <bool Depth, bool Abs>
struct GeometryFields {
  static constexpr int kDepth = kGradVyy + 1, kAbs = kDepth + int(Depth), kCount = kAbs + 2 * int(Abs);
  static SPLAT_DEVICE int place(int field) {
    if (field < kDepth) return field;
    return field < kAbs ? int(kGradDepth) : int(kGradAbsX) + field - kAbs;
  }
};

// Geometry: with the gradients of projected Gaussians, from all channels.
template <bool Geometry, bool Depth, bool Abs>
__global__ void __launch_bounds__(kSimpleThreads, kBackwardBlocks)
    blend_channels_vjp(BlendLists lists, ChannelLists channels, BlendImages out, BlendImages v_out, float* isect_grads,
                       float* background_partials) {
  constexpr int kWarps = kSimpleThreads / kWarp, kSums = isect_grad_fields(Depth, Abs);
  using Fields = GeometryFields<Depth, Abs>;
  SPLAT_SHARED(float4, staged, kChannelBatch * kQuads);
  SPLAT_SHARED(float4, colors, kChannelBatch * kRunQuads);
  SPLAT_SHARED(uint32_t, masks, kChannelBatch);
  SPLAT_SHARED(int32_t, gaussians, kChannelBatch);
  SPLAT_SHARED(float, products, kChannelBatch * kSimpleThreads);
  SPLAT_SHARED(float, sums, Geometry ? kWarps * kChannelBatch * kSumsStride : 1);
  SPLAT_SHARED(uint32_t, touched, kWarps);
  static_assert(kChannelBatch * (sizeof(float4) * (kQuads + kRunQuads) + sizeof(uint32_t) + sizeof(int32_t) +
                                 sizeof(float) * (kSimpleThreads + kWarps * kSumsStride)) +
                        sizeof(uint32_t) * kWarps <= kMostShared,
                "too much shared memory: lower kChannelBatch, or store the products of half a tile at a time");
  if (overflowed(lists.counters)) return;
  const ChannelShared shared = {staged, colors, masks, gaussians, products, sums, touched};
  const int32_t tile = lists.first_tile + int32_t(blockIdx.x);
  const int64_t begin = lists.tile_starts[tile];
  const int32_t isects = int32_t(lists.tile_starts[tile + 1] - begin), stop = lists.tile_ends[tile];
  const uint32_t* rows = lists.isect_grad_rows + begin;
  const ThreadPixels at = simple_pixels(lists, tile);
  const float x = float(at.x) + 0.5f, y = float(at.y) + 0.5f;
  const bool in_image = inside(lists, at.x, at.y);
  const int64_t place = int64_t(at.y) * lists.width + at.x;
  const float* v_pixel = in_image ? v_out.image + place * channels.count : nullptr;
  float transmittance = in_image ? 1.0f : 0.0f, behind = 0.0f, v_depth = 0.0f;
  if (Geometry && in_image) {
    for (int32_t c = 0; c < channels.count; ++c) behind += out.image[place * channels.count + c] * v_pixel[c];
    if (v_out.alpha != nullptr) behind -= (1.0f - out.alpha[place]) * v_out.alpha[place];
    if (Depth) {
      v_depth = v_out.depth[place];
      behind += out.depth[place] * v_depth;
    }
  }
  if (background_partials != nullptr)
    write_channel_background(lists, channels.count, tile, out, v_out.image, background_partials);
  // Fields between those of geometry stay 0.
  if (Geometry)
    for (int i = int(threadIdx.x); i < kWarps * kChannelBatch * kSumsStride; i += kSimpleThreads) sums[i] = 0.0f;
  const int field = field_of_lane<Fields::kCount>();

  for (int32_t base = 0; base < stop; base += kChannelBatch) {
    const int32_t count = stop - base < kChannelBatch ? stop - base : kChannelBatch;
    stage_batch(lists, channels, begin + base, count, staged, masks, gaussians);
    wait_for_copies();
    __syncthreads();  // the batch is there; the last one's weights and sums have been read
    const bool working = __any_sync(kFullWarp, transmittance > 0.0f);
    const Hits hits = simple_hits(working && lane_id() < count ? masks[lane_id()] : 0u, at.slot);
    if (Geometry) make_v_weights(channels, v_pixel, hits.any, count, shared);
    for (uint32_t left = hits.any; left != 0; left &= left - 1) {
      const int i = first_hit(left);
      const Splat splat = read_splat(staged + i * kQuads);
      const float dx = x - splat.proj[kProjX], dy = y - splat.proj[kProjY];
      float* product = products + i * kSimpleThreads + int(threadIdx.x);
      float v_weight = Geometry ? *product : 0.0f;
      if (Depth) v_weight += splat.proj[kProjDepth] * v_depth;
      const PixelShare share = pixel_share(splat.proj, dx, dy, has(hits.own, i), v_weight, transmittance, behind);
      *product = share.weight;
      if (!Geometry) continue;
      const float vx = share.v * dx, vy = share.v * dy;
      float grad[kIsectGradUsed] = {share.v, vx, vy, vx * dx, vx * dy, vy * dy};
      if (Depth) grad[Fields::kDepth] = share.weight * v_depth;
      if (Abs) abs_mean2d_grads(splat.proj, vx, vy, grad[Fields::kAbs], grad[Fields::kAbs + 1]);
      transpose_reduce<Fields::kCount>(grad);
      if (field >= 0) sums[(warp_id() * kChannelBatch + i) * kSumsStride + Fields::place(field)] = grad[0];
    }
    if (lane_id() == 0) touched[warp_id()] = hits.any;
    __syncthreads();
    if (Geometry)
      write_isect_grads<kSums, kWarps, kChannelBatch>(isect_grads, rows + base, sums, touched, count);
    if (channels.v_colors != nullptr)
      write_color_grads(lists, channels, tile, v_out.image, rows + base, count, shared);
  }
  if (Geometry) clear_isect_grads(isect_grads, rows + stop, isects - stop);
  if (channels.v_colors == nullptr) return;
  for (int64_t i = threadIdx.x; i < int64_t(isects - stop) * channels.width; i += kSimpleThreads)
    channels.isect_grads[int64_t(rows[stop + i / channels.width]) * channels.width + i % channels.width] = 0.0f;
}

// Adds each Gaussian's rows to the gradients of its colours, in their order: a chunk a block, sixteen threads a Gaussian.
__global__ void __launch_bounds__(kSumThreads)
    sum_color_grads(const int64_t* counters, const int64_t* chunk_counts, const uint32_t* tiles_per_gauss,
                    const uint32_t* isect_grad_starts, ChannelLists channels) {
  if (overflowed(counters)) return;
  const int64_t chunk = blockIdx.x, visible = chunk_counts[2 * chunk];
  for (int64_t k = threadIdx.x / kChannelRun; k < visible; k += kSumThreads / kChannelRun) {
    const int64_t slot = chunk * SPLAT_CHUNK + k;
    const uint32_t isects = tiles_per_gauss[slot];
    if (isects == 0) continue;
    const float* rows = channels.isect_grads + int64_t(isect_grad_starts[slot]) * channels.width;
    float* sums = channels.v_colors + int64_t(channels.ids[slot]) * channels.count + channels.first;
    for (int32_t c = int32_t(threadIdx.x) % kChannelRun; c < channels.width; c += kChannelRun) {
      float total = sums[c];
      for (uint32_t i = 0; i < isects; ++i) total += rows[int64_t(i) * channels.width + c];
      sums[c] = total;
    }
  }
}

// The tiles' shares of the background's gradient: a block a channel.
__global__ void __launch_bounds__(kBackgroundThreads)
    sum_channel_background(const int64_t* counters, const float* partials, int64_t tiles, float* v_background) {
  if (overflowed(counters)) return;
  const int64_t channels = gridDim.x;
  float sum = 0.0f;
  for (int64_t t = threadIdx.x; t < tiles; t += kBackgroundThreads) sum += partials[t * channels + blockIdx.x];
  sum = block_sum(sum);
  if (threadIdx.x == 0) v_background[blockIdx.x] = sum;
}

}  // namespace gpu
}  // namespace splat
