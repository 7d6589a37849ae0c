// Adam alone, group by group: kernels/adam.cuh. 16 bytes read and 12 written for each number.
#include "../../kernels/adam.cuh"

#include "arrays.h"
#include "launch.h"
#include "stages.h"

namespace splat {
namespace gpu {

void adam(const SplatCall& call, const SplatGaussians& params, const SplatGaussians& gradients,
          const SplatAdam& adam) {
  constexpr int64_t kBlock = kAdamThreads * kAdamItems;
  for (int group = 0; group < kGroups; ++group) {
    const int64_t count = params.n * group_width(params, group);
    SPLAT_LAUNCH(adam_dense, (count + kBlock - 1) / kBlock, kAdamThreads, stream_of(call),
                 adam_group(params, adam, group), static_cast<const float*>(group_of(gradients, group)), count,
                 means_rate_of<float>(adam),
                 group == kMeans && adam.size_power > 0.0 ? static_cast<const float*>(params.log_scales) : nullptr);
  }
}

}  // namespace gpu
}  // namespace splat
