// The stages of a view on the CPU, for float and, in the portable build, double (where gradients are checked).
//
// The whole library is built once an instruction set, each into a file of its own, so that no inline function
// compiled for a newer processor can end up in the code for an older one.
#pragma once
#include "../structs.h"

namespace splat {

constexpr int kLanes = 16;

template <class Real>
struct Stages {
  // lazy: null, or an Adam with sh_last_step, whose missed steps of shN are applied.
  static void project(const SplatCall&, const SplatView&, const SplatGaussians&, SplatFrame&, const SplatAdam* lazy);
  static void tile_row_isects(const SplatView&, const SplatGaussians&, const SplatFrame&, int64_t* out);
  static int64_t bin_bytes(const SplatView&, const SplatFrame&);
  static void bin(const SplatCall&, const SplatView&, const SplatGaussians&, SplatFrame&);
  static void blend(const SplatCall&, const SplatView&, const SplatFrame&, const void* background,
                    const SplatImages& out);
  static void blend_vjp(const SplatCall&, const SplatView&, const SplatFrame&, const void* background,
                        const SplatImages& out, const SplatImages& v_out, void* background_partials,
                        void* v_background);
  // The same of any number of channels, which blend() and blend_vjp() go on to.
  static void blend_channels(const SplatCall&, const SplatView&, const SplatFrame&, const void* background,
                             const SplatImages& out);
  static void blend_channels_vjp(const SplatCall&, const SplatView&, const SplatFrame&, const SplatImages& out,
                                 const SplatImages& v_out, void* background_partials, void* v_background);
  static void sum_isect_grads(const SplatCall&, const SplatGaussians&, const SplatFrame&, void* sums,
                              uint32_t* reached);
  static void project_vjp(const SplatCall&, const SplatView&, const SplatGaussians&, const SplatFrame&,
                          const SplatProjectGrad&);
  static void pose_vjp(const SplatView&, const void* pose_partials, int64_t chunks, void* v_viewmat);
  static int64_t loss_bytes(const SplatLoss&);
  static void loss(const SplatCall&, SplatLoss&);
  static void adam(const SplatCall&, const SplatGaussians& params, const SplatGaussians& gradients,
                   const SplatAdam&);
  static void noise(const SplatCall&, const SplatGaussians&, const SplatNoise&);
};

}  // namespace splat
