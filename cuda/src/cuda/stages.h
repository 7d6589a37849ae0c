// The stages of a view on a CUDA device, in float: each enqueues its kernels on the call's stream and returns.
#pragma once
#include "../../include/splat.h"

namespace splat {
namespace gpu {

constexpr int64_t kChunk = SPLAT_CHUNK;

inline int64_t chunks_of(int64_t n) { return (n + kChunk - 1) / kChunk; }
inline int32_t tiles_across(int32_t pixels) { return (pixels + SPLAT_TILE - 1) / SPLAT_TILE; }
inline int64_t tiles_of(const SplatView& view) {
  return int64_t(tiles_across(view.width)) * tiles_across(view.height);
}

// Tiles of the view's tile rows: the first, and how many.
inline int64_t first_tile(const SplatView& v) { return int64_t(v.tile_row_begin) * tiles_across(v.width); }
inline int64_t band_tiles(const SplatView& v) {
  return int64_t(v.tile_row_end - v.tile_row_begin) * tiles_across(v.width);
}

// lazy: null, or an Adam with sh_last_step, whose missed steps of shN are applied.
void project(const SplatCall&, const SplatView&, const SplatGaussians&, SplatFrame&, const SplatAdam* lazy);
void tile_row_isects(const SplatCall&, const SplatView&, const SplatGaussians&, const SplatFrame&, int64_t* out);
int64_t bin_bytes(const SplatView&, const SplatFrame&);
void bin(const SplatCall&, const SplatView&, const SplatGaussians&, SplatFrame&);
void blend(const SplatCall&, const SplatView&, const SplatFrame&, const void* background, const SplatImages& out);
void blend_vjp(const SplatCall&, const SplatView&, const SplatFrame&, const void* background, const SplatImages& out,
               const SplatImages& v_out, void* background_partials, void* v_background);
void sum_isect_grads(const SplatCall&, const SplatGaussians&, const SplatFrame&, void* sums, uint32_t* reached);
void project_vjp(const SplatCall&, const SplatView&, const SplatGaussians&, const SplatFrame&,
                 const SplatProjectGrad&);
int64_t loss_bytes(const SplatLoss&);
void loss(const SplatCall&, SplatLoss&);
void adam(const SplatCall&, const SplatGaussians& params, const SplatGaussians& gradients, const SplatAdam&);
void noise(const SplatCall&, const SplatGaussians&, const SplatNoise&);

}  // namespace gpu
}  // namespace splat
