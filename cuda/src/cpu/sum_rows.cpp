// Rows of one band of lines added to what the bands before it left. docs/math.md 6.2
#include "../../math/blend.h"
#include "lanes.h"
#include "pool.h"
#include "stages.h"

namespace splat {

// A Gaussian's rows lie in the order of its lines. So the sum over bands from top to bottom adds the same numbers in the
// same order as project_vjp does when it has all rows at once.
template <class Real>
void Stages<Real>::sum_rows(const SplatCall& call, const SplatGaussians& gaussians, const SplatFrame& frame, void* sums,
                            uint32_t* reached) {
  using F = Lanes<Real, kLanes>;
  static_assert(kRowSize == kLanes, "a row is a vector");
  parallel_for(call.threads, chunks_of(gaussians.n), [&](int64_t c) {
    for (int64_t i = c * kChunk; i < c * kChunk + frame.chunk_counts[2 * c]; ++i) {
      if (frame.row_counts[i] == 0) continue;
      const Real* row = static_cast<const Real*>(frame.rows) + int64_t(frame.row_starts[i]) * kRowSize;
      Real* sum = static_cast<Real*>(sums) + i * kRowSize;
      F total = F::load(sum);
      for (uint32_t k = 0; k < frame.row_counts[i]; ++k, row += kRowSize) total += F::load(row);
      total.store(sum);
      reached[i] = 1;
    }
  });
}

template void Stages<float>::sum_rows(const SplatCall&, const SplatGaussians&, const SplatFrame&, void*, uint32_t*);
#ifdef SPLAT_WITH_DOUBLE
template void Stages<double>::sum_rows(const SplatCall&, const SplatGaussians&, const SplatFrame&, void*, uint32_t*);
#endif

}  // namespace splat
