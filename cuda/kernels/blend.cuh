// Forward blending on the GPU, one 16x16 tile a block: docs/math.md 6.1. Also the parts that both directions share.
//
// Two variants with the same arithmetic a pixel, in the same order as the CPU twin. Simple: 256 threads with one pixel
// each. Fast: 128 threads with two, and 64 with four for the gradients, so that a projected Gaussian read from shared
// memory and a sum over the warp serve more of them.
#pragma once
#include "../math/blend.h"
#include "device.cuh"

namespace splat {
namespace gpu {

constexpr int kQuads = 3;             // float4s of a projected Gaussian that the blend reads: all up to the depth
constexpr int kBlockSide = kTile / kBlock;
constexpr int kSimpleThreads = 256;   // a warp is two 4x4 blocks side by side
constexpr int kFastThreads = 128;     // a warp is 8x8 pixels: four 4x4 blocks
static_assert(kProjDepth < 4 * kQuads, "the blend reads the depth");

// A view and its lists, as the kernels need them.
struct BlendLists {
  const int64_t* counters;
  const int64_t* tile_starts;
  const int32_t* tile_order;  // null: row by row
  const float* projected;
  const uint32_t* isect_gaussians;
  const uint32_t* isect_grad_rows;
  const uint16_t* isect_masks;
  int32_t* tile_ends;
  int32_t width, height, tiles_x, first_tile;
};
struct BlendImages {
  float *image, *alpha, *depth;
};

// The tile that is the k-th to be taken of those in the view's tile rows.
SPLAT_DEVICE int32_t tile_at(const BlendLists& lists, int32_t k) {
  return lists.tile_order == nullptr ? lists.first_tile + k : lists.tile_order[k];
}
SPLAT_DEVICE int32_t tile_of_block(const BlendLists& lists) { return tile_at(lists, int32_t(blockIdx.x)); }

// ---- where a thread's pixels lie ---------------------------------------------------------------------------------

// Pixels (x, y) and, in the fast variants, (x, y + 1): both in the same 4x4 block.
struct ThreadPixels {
  int32_t x, y;
  int32_t slot;  // of the block among those of the warp
};
SPLAT_DEVICE int32_t tile_x(const BlendLists& lists, int32_t tile) { return tile % lists.tiles_x * kTile; }
SPLAT_DEVICE int32_t tile_y(const BlendLists& lists, int32_t tile) { return tile / lists.tiles_x * kTile; }

// Lanes as on the CPU: blocks row by row, pixels row by row in each.
SPLAT_DEVICE ThreadPixels simple_pixels(const BlendLists& lists, int32_t tile) {
  const int thread = int(threadIdx.x), block = thread / kBlocksPerTile, at = thread % kBlocksPerTile;
  return {tile_x(lists, tile) + block % kBlockSide * kBlock + at % kBlock,
          tile_y(lists, tile) + block / kBlockSide * kBlock + at / kBlock, block % 2};
}
SPLAT_DEVICE ThreadPixels fast_pixels(const BlendLists& lists, int32_t tile) {
  const int slot = lane_id() / 8, at = lane_id() % 8;
  return {tile_x(lists, tile) + warp_id() % 2 * 8 + slot % 2 * kBlock + at % kBlock,
          tile_y(lists, tile) + warp_id() / 2 * 8 + slot / 2 * kBlock + at / kBlock * 2, slot};
}
// The bit of an intersection's mask for a block of this warp.
SPLAT_DEVICE uint32_t simple_bit(int slot) { return 1u << (2 * warp_id() + slot); }
SPLAT_DEVICE uint32_t fast_bit(int slot) {
  return 1u << ((warp_id() / 2 * 2 + slot / 2) * kBlockSide + warp_id() % 2 * 2 + slot % 2);
}

SPLAT_DEVICE bool inside(const BlendLists& lists, int32_t x, int32_t y) { return x < lists.width && y < lists.height; }

// ---- intersections in shared memory --------------------------------------------------------------------------------

struct Splat {
  float proj[4 * kQuads];
};
SPLAT_DEVICE Splat read_splat(const float4* staged) {
  const float4 a = staged[0], b = staged[1], c = staged[2];
  return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w, c.x, c.y, c.z, c.w}};
}

// Copies 16 bytes to shared memory without passing through registers; they are there after wait_for_copies() and a
// barrier.
SPLAT_DEVICE void copy_quad(float4* shared, const float4* global) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const unsigned address = unsigned(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
#else
  *shared = *global;
#endif
}
SPLAT_DEVICE void wait_for_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
SPLAT_DEVICE void stage_projected(const BlendLists& lists, uint32_t gaussian, float4* staged) {
  const float4* from = reinterpret_cast<const float4*>(lists.projected + int64_t(gaussian) * kProjectedSize);
#pragma unroll
  for (int q = 0; q < kQuads; ++q) copy_quad(staged + q, from + q);
}

// Brings batches of a tile's intersections into two buffers of shared memory in turn. A thread reads the index and mask
// of its intersection one batch before they are needed, so that it never waits for memory before it can ask for more.
template <int Batch>
struct Stager {
  const uint32_t* gaussians;  // of the tile
  const uint16_t* tile_masks;
  int32_t end;
  float4* staged;
  uint32_t* masks;
  uint32_t gaussian = 0, mask = 0;

  SPLAT_DEVICE Stager(const BlendLists& lists, int64_t begin, int32_t isects, float4* shared, uint32_t* shared_masks)
      : gaussians(lists.isect_gaussians + begin), tile_masks(lists.isect_masks + begin), end(isects), staged(shared),
        masks(shared_masks) {
    look_up(0);
    copy(lists, 0, 0);
    look_up(Batch);
  }
  SPLAT_DEVICE bool takes_part(int32_t base) const {
    return int(threadIdx.x) < Batch && base + int32_t(threadIdx.x) < end;
  }
  SPLAT_DEVICE void look_up(int32_t base) {
    if (!takes_part(base)) return;
    gaussian = gaussians[base + int32_t(threadIdx.x)];
    mask = tile_masks[base + int32_t(threadIdx.x)];
  }
  SPLAT_DEVICE void copy(const BlendLists& lists, int32_t base, int buffer) {
    if (!takes_part(base)) return;
    const int at = buffer * Batch + int(threadIdx.x);
    stage_projected(lists, gaussian, staged + at * kQuads);
    masks[at] = mask;
  }
  // Called when the batch at `base` has arrived and all threads have read the one before it, whose buffer is refilled.
  SPLAT_DEVICE void fetch_after(const BlendLists& lists, int32_t base, int buffer) {
    copy(lists, base + Batch, buffer ^ 1);
    look_up(base + 2 * Batch);
  }
};

// Which of up to 32 intersections reach the blocks of this warp: bit i is that of lane i.
struct Hits {
  uint32_t own;  // the lane's own block
  uint32_t any;
};
SPLAT_DEVICE Hits simple_hits(uint32_t mask, int slot) {
  const uint32_t first = __ballot_sync(kFullWarp, (mask & simple_bit(0)) != 0);
  const uint32_t second = __ballot_sync(kFullWarp, (mask & simple_bit(1)) != 0);
  return {slot == 0 ? first : second, first | second};
}
SPLAT_DEVICE Hits fast_hits(uint32_t mask, int slot) {
  Hits hits = {0, 0};
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    const uint32_t reached = __ballot_sync(kFullWarp, (mask & fast_bit(s)) != 0);
    hits.any |= reached;
    if (s == slot) hits.own = reached;
  }
  return hits;
}
SPLAT_DEVICE int first_hit(uint32_t hits) { return __ffs(int(hits)) - 1; }
SPLAT_DEVICE bool has(uint32_t hits, int i) { return (hits >> i & 1u) != 0; }

// Whether log2 of the unclamped alpha is enough to be seen; NaN is not.
SPLAT_DEVICE bool is_seen(float exponent) { return exponent >= float(kMinLog2Alpha); }

// ---- forward -------------------------------------------------------------------------------------------------------

// Straight code without branches: most lanes of a warp that an intersection reaches have work, and the two pixels of a
// lane overlap. Transmittance is negative once the pixel has stopped, and 0 outside the image: its size is what the
// image keeps.
template <bool Depth>
struct ForwardPixel {
  float transmittance, red = 0.0f, green = 0.0f, blue = 0.0f, depth = 0.0f;

  SPLAT_DEVICE explicit ForwardPixel(bool in_image) : transmittance(in_image ? 1.0f : 0.0f) {}
  SPLAT_DEVICE bool alive() const { return transmittance > 0.0f; }
  // reached: the intersection's mask has the pixel's block.
  SPLAT_DEVICE void blend(const float* proj, float dx, float dy, bool reached) {
    const float exponent = log2_alpha(proj, dx, dy);
    const float clamped = min_(float(kMaxAlpha), exp2_bounded(exponent));
    const float weight = select(reached && is_seen(exponent), clamped, 0.0f) * transmittance;
    const float after = transmittance - weight;
    const bool live = after > float(kMinTransmittance);
    const float w = select(live, weight, 0.0f);
    transmittance = select(live, after, -abs_(transmittance));
    red += w * proj[kProjRed];
    green += w * proj[kProjGreen];
    blue += w * proj[kProjBlue];
    if (Depth) depth += w * proj[kProjDepth];
  }
  SPLAT_DEVICE void write(const BlendLists& lists, const float* background, const BlendImages& out, int32_t x,
                          int32_t y) const {
    if (!inside(lists, x, y)) return;
    const int64_t at = int64_t(y) * lists.width + x;
    const float t = abs_(transmittance);
    out.image[3 * at] = red + t * background[0];
    out.image[3 * at + 1] = green + t * background[1];
    out.image[3 * at + 2] = blue + t * background[2];
    out.alpha[at] = 1.0f - t;
    if (Depth) out.depth[at] = depth;
  }
};

// Writes the largest of the warps' ends as the tile's.
SPLAT_DEVICE void write_tile_end(const BlendLists& lists, int32_t tile, int32_t warp_end, int32_t* shared_ends) {
  if (lane_id() == 0) shared_ends[warp_id()] = warp_end;
  __syncthreads();
  if (threadIdx.x != 0) return;
  int32_t end = 0;
  for (int w = 0; w < int(blockDim.x) / kWarp; ++w) end = shared_ends[w] > end ? shared_ends[w] : end;
  lists.tile_ends[tile] = end;
}

template <bool Depth>
__global__ void __launch_bounds__(kSimpleThreads)
    blend_simple(BlendLists lists, const float* background, BlendImages out) {
  SPLAT_SHARED(float4, staged, kSimpleThreads * kQuads);
  SPLAT_SHARED(uint32_t, masks, kSimpleThreads);
  SPLAT_SHARED(int32_t, ends, kSimpleThreads / kWarp);
  if (overflowed(lists.counters)) return;
  const int32_t tile = tile_of_block(lists);
  const int64_t begin = lists.tile_starts[tile];
  const int32_t isects = int32_t(lists.tile_starts[tile + 1] - begin);
  const ThreadPixels at = simple_pixels(lists, tile);
  const float x = float(at.x) + 0.5f, y = float(at.y) + 0.5f;
  ForwardPixel<Depth> pixel(inside(lists, at.x, at.y));
  int32_t end = 0;  // intersections up to the last that the warp evaluated

  for (int32_t base = 0; base < isects; base += kSimpleThreads) {
    if (!__syncthreads_or(pixel.alive())) break;  // also: the last batch has been read
    const int32_t count = isects - base < kSimpleThreads ? isects - base : kSimpleThreads;
    const int32_t mine = int32_t(threadIdx.x);
    if (mine < count) {
      stage_projected(lists, lists.isect_gaussians[begin + base + mine], staged + mine * kQuads);
      masks[mine] = lists.isect_masks[begin + base + mine];
    }
    wait_for_copies();
    __syncthreads();
    for (int32_t group = 0; group < count; group += kWarp) {
      if (!__any_sync(kFullWarp, pixel.alive())) break;
      const Hits hits = simple_hits(group + lane_id() < count ? masks[group + lane_id()] : 0u, at.slot);
      for (uint32_t left = hits.any; left != 0; left &= left - 1) {
        const int i = first_hit(left);
        const Splat splat = read_splat(staged + (group + i) * kQuads);
        pixel.blend(splat.proj, x - splat.proj[kProjX], y - splat.proj[kProjY], has(hits.own, i));
      }
      end = base + group + kWarp;
    }
  }
  write_tile_end(lists, tile, end < isects ? end : isects, ends);
  pixel.write(lists, background, out, at.x, at.y);
}

template <bool Depth>
__global__ void __launch_bounds__(kFastThreads) blend_fast(BlendLists lists, const float* background, BlendImages out) {
  constexpr int kBatch = kFastThreads;
  SPLAT_SHARED(float4, staged, 2 * kBatch * kQuads);
  SPLAT_SHARED(uint32_t, masks, 2 * kBatch);
  SPLAT_SHARED(int32_t, ends, kFastThreads / kWarp);
  if (overflowed(lists.counters)) return;
  const int32_t tile = tile_of_block(lists);
  const int64_t begin = lists.tile_starts[tile];
  const int32_t isects = int32_t(lists.tile_starts[tile + 1] - begin);
  const ThreadPixels at = fast_pixels(lists, tile);
  const float x = float(at.x) + 0.5f, y = float(at.y) + 0.5f;
  ForwardPixel<Depth> upper(inside(lists, at.x, at.y)), lower(inside(lists, at.x, at.y + 1));
  int32_t end = 0;

  Stager<kBatch> stager(lists, begin, isects, staged, masks);
  int buffer = 0;
  for (int32_t base = 0; base < isects; base += kBatch, buffer ^= 1) {
    wait_for_copies();
    if (!__syncthreads_or(upper.alive() || lower.alive())) break;  // also: this batch is there, the last has been read
    stager.fetch_after(lists, base, buffer);
    const int32_t count = isects - base < kBatch ? isects - base : kBatch;
    const uint32_t* batch_masks = masks + buffer * kBatch;
    const float4* batch = staged + buffer * kBatch * kQuads;
    for (int32_t group = 0; group < count; group += kWarp) {
      if (!__any_sync(kFullWarp, upper.alive() || lower.alive())) break;
      const Hits hits = fast_hits(group + lane_id() < count ? batch_masks[group + lane_id()] : 0u, at.slot);
      for (uint32_t left = hits.any; left != 0; left &= left - 1) {
        const int i = first_hit(left);
        const Splat splat = read_splat(batch + (group + i) * kQuads);
        const bool reached = has(hits.own, i);
        const float dx = x - splat.proj[kProjX];
        upper.blend(splat.proj, dx, y - splat.proj[kProjY], reached);
        lower.blend(splat.proj, dx, (y + 1.0f) - splat.proj[kProjY], reached);
      }
      end = base + group + kWarp;
    }
  }
  wait_for_copies();
  write_tile_end(lists, tile, end < isects ? end : isects, ends);
  upper.write(lists, background, out, at.x, at.y);
  lower.write(lists, background, out, at.x, at.y + 1);
}

}  // namespace gpu
}  // namespace splat
