// Adds the intersection gradients of one band to the sums of the bands before it. docs/math.md 6.2
#include "../../math/blend.h"
#include "lanes.h"
#include "pool.h"
#include "stages.h"

namespace splat {

// A Gaussian's intersection gradients are in the order of its tile rows. So the sum over bands from top to bottom adds
// the same numbers in the same order as project_vjp does when it has all of them at once.
template <class Real>
void Stages<Real>::sum_isect_grads(const SplatCall& call, const SplatGaussians& gaussians, const SplatFrame& frame,
                                   void* sums, uint32_t* reached) {
  using F = Lanes<Real, kLanes>;
  static_assert(kIsectGradSize == kLanes, "a gradient is a vector");
  parallel_for(call.threads, chunks_of(gaussians.n), [&](int64_t c) {
    for (int64_t i = c * kChunk; i < c * kChunk + frame.chunk_counts[2 * c]; ++i) {
      if (frame.tiles_per_gauss[i] == 0) continue;
      const Real* isect_grad =
          static_cast<const Real*>(frame.isect_grads) + int64_t(frame.isect_grad_starts[i]) * kIsectGradSize;
      Real* sum = static_cast<Real*>(sums) + i * kIsectGradSize;
      F total = F::load(sum);
      for (uint32_t k = 0; k < frame.tiles_per_gauss[i]; ++k, isect_grad += kIsectGradSize)
        total += F::load(isect_grad);
      total.store(sum);
      reached[i] = 1;
    }
  });
}

template void Stages<float>::sum_isect_grads(const SplatCall&, const SplatGaussians&, const SplatFrame&, void*,
                                             uint32_t*);
#ifdef SPLAT_WITH_DOUBLE
template void Stages<double>::sum_isect_grads(const SplatCall&, const SplatGaussians&, const SplatFrame&, void*,
                                              uint32_t*);
#endif

}  // namespace splat
