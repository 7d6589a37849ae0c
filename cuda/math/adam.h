// One Adam step on one number: docs/math.md 8.
#pragma once
#include "hd.h"

namespace splat {

// What is the same for all numbers of a group at a step.
template <class T>
struct AdamStep {
  T beta1, beta2, one_minus_beta1, one_minus_beta2;
  T step_size;           // learning rate / (1 - beta1^t)
  T inv_sqrt_correction;  // 1 / sqrt(1 - beta2^t)
  T eps;
};

template <class T>
SPLAT_HD AdamStep<T> make_adam_step(double lr, double beta1, double beta2, double eps, int64_t step) {
  AdamStep<T> s;
  s.beta1 = T(beta1), s.beta2 = T(beta2);
  s.one_minus_beta1 = T(1.0 - beta1), s.one_minus_beta2 = T(1.0 - beta2);
  s.step_size = T(lr / (1.0 - ::pow(beta1, double(step))));
  s.inv_sqrt_correction = T(1.0 / ::sqrt(1.0 - ::pow(beta2, double(step))));
  s.eps = T(eps);
  return s;
}

template <class T, class S>
SPLAT_HD void adam_update(const AdamStep<S>& s, T grad, T& param, T& exp_avg, T& exp_avg_sq) {
  exp_avg = exp_avg * T(s.beta1) + grad * T(s.one_minus_beta1);
  exp_avg_sq = exp_avg_sq * T(s.beta2) + grad * grad * T(s.one_minus_beta2);
  const T denominator = sqrt_(exp_avg_sq) * T(s.inv_sqrt_correction) + T(s.eps);
  param = param - T(s.step_size) * exp_avg / denominator;
}

}  // namespace splat
