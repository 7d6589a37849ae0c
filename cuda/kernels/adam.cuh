// Dense Adam on contiguous numbers, from gradients in memory; a step on one view does Adam in project_vjp.cuh. docs/math.md 8
#pragma once
#include "adam_group.cuh"

namespace splat {
namespace gpu {

constexpr int kAdamThreads = 256;
constexpr int kAdamItems = 4;  // numbers a thread

// log_scales: of the Gaussians whose means the group has, where each has a rate of its own; else null.
__global__ void __launch_bounds__(kAdamThreads)
    adam_dense(AdamGroup group, const float* grads, int64_t count, MeansRate<float> rate, const float* log_scales) {
  const int64_t first = int64_t(blockIdx.x) * kAdamThreads * kAdamItems + threadIdx.x;
  for (int k = 0; k < kAdamItems; ++k) {
    const int64_t i = first + k * kAdamThreads;
    if (i >= count) continue;
    float step_size = group.step.step_size;
    if (log_scales != nullptr) step_size *= means_rate(rate, log_scales + i / 3 * 3);
    adam_at(group, i, step_size, grads[i]);
  }
}

}  // namespace gpu
}  // namespace splat
