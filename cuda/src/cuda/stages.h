// The stages of a view on a CUDA device, in float: each enqueues its kernels on the call's stream and returns.
#pragma once
#include "../structs.h"

namespace splat {
namespace gpu {

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
void pose_vjp(const SplatCall&, const SplatView&, const SplatFrame&, const void* pose_partials, int64_t chunks,
              void* v_viewmat);
int64_t loss_bytes(const SplatLoss&);
void loss(const SplatCall&, SplatLoss&);
void adam(const SplatCall&, const SplatGaussians& params, const SplatGaussians& gradients, const SplatAdam&);
void noise(const SplatCall&, const SplatGaussians&, const SplatNoise&);

}  // namespace gpu
}  // namespace splat
