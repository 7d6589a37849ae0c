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

// The SH rest of Gaussians that miss the steps of views that do not reach them.
struct LazyRest {
  float *param, *exp_avg, *exp_avg_sq;
  int32_t* steps;  // null: nothing is ever missed
  AdamGaps gaps;
  int64_t now;  // the step before this one
};

SPLAT_DEVICE void catch_up_at(const LazyRest& rest, const AdamGap<float>& gap, int64_t i) {
  float p = rest.param[i], m = rest.exp_avg[i], v = rest.exp_avg_sq[i];
  adam_catch_up(gap, p, m, v);
  rest.param[i] = p, rest.exp_avg[i] = m, rest.exp_avg_sq[i] = v;
}

}  // namespace gpu
}  // namespace splat
