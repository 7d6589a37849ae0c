// One number's Adam step, for the kernels that have its gradient at hand. docs/math.md 8
#pragma once
#include "../math/adam.h"
#include "device.cuh"

namespace splat {
namespace gpu {

// A group's numbers: parameters, both moments, and the step that they share.
struct AdamGroup {
  float *param, *exp_avg, *exp_avg_sq;
  AdamStep<float> step;
};

SPLAT_DEVICE void adam_at(const AdamGroup& group, int64_t i, float step_size, float grad) {
  float p = group.param[i], m = group.exp_avg[i], v = group.exp_avg_sq[i];
  adam_update(group.step, step_size, grad, p, m, v);
  group.param[i] = p, group.exp_avg[i] = m, group.exp_avg_sq[i] = v;
}

// Steps of several numbers by one thread: all are loaded before the first one is needed. at(k) is the place of the k-th
// in the group's arrays, step_size(k) its own; those without in_use(k) stay.
template <int COUNT, class At, class InUse, class StepSize, class Grad>
SPLAT_DEVICE void adam_several(const AdamGroup& group, const AdamStep<float>& step, At at, InUse in_use,
                               StepSize step_size, Grad grad) {
  float p[COUNT], m[COUNT], v[COUNT];
#pragma unroll
  for (int k = 0; k < COUNT; ++k)
    if (in_use(k)) p[k] = group.param[at(k)], m[k] = group.exp_avg[at(k)], v[k] = group.exp_avg_sq[at(k)];
#pragma unroll
  for (int k = 0; k < COUNT; ++k) {
    if (!in_use(k)) continue;
    adam_update(step, step_size(k), grad(k), p[k], m[k], v[k]);
    group.param[at(k)] = p[k], group.exp_avg[at(k)] = m[k], group.exp_avg_sq[at(k)] = v[k];
  }
}

// shN of Gaussians, which miss the steps of views that do not reach them.
struct LazyShN {
  float *param, *exp_avg, *exp_avg_sq;
  int32_t* steps;  // null: nothing is ever missed
  AdamDecayTable decay_table;
  int64_t now;  // the step before this one
};

SPLAT_DEVICE void catch_up_at(const LazyShN& lazy, const AdamDecay<float>& decay, int64_t i) {
  float p = lazy.param[i], m = lazy.exp_avg[i], v = lazy.exp_avg_sq[i];
  adam_catch_up(decay, p, m, v);
  lazy.param[i] = p, lazy.exp_avg[i] = m, lazy.exp_avg_sq[i] = v;
}

}  // namespace gpu
}  // namespace splat
