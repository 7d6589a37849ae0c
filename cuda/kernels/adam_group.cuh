// One number's Adam step, for the kernels that have its gradient at hand. docs/math.md 8
#pragma once
#include "../math/adam.h"
#include "device.cuh"

namespace splat {
namespace gpu {

// A group's numbers: parameters, both moments, and what is the same for all of them at a step.
struct AdamGroup {
  float *param, *exp_avg, *exp_avg_sq;
  AdamStep<float> step;
};

SPLAT_DEVICE void adam_at(const AdamGroup& group, int64_t i, float grad) {
  float p = group.param[i], m = group.exp_avg[i], v = group.exp_avg_sq[i];
  adam_update(group.step, grad, p, m, v);
  group.param[i] = p, group.exp_avg[i] = m, group.exp_avg_sq[i] = v;
}

}  // namespace gpu
}  // namespace splat
