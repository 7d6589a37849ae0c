// One Adam step on one number: docs/math.md 8.
#pragma once
#include "activation.h"

namespace splat {

// The numbers that a whole group shares at a step.
template <class T>
struct AdamStep {
  T beta1, beta2, one_minus_beta1, one_minus_beta2;
  T step_size;           // learning rate / (1 - beta1^t)
  T inv_sqrt_correction;  // 1 / sqrt(1 - beta2^t)
  T eps;
  T opacity_reg, scale_reg;  // weights of regularisers on the parameter itself; 0 where they do not belong
};

template <class T>
SPLAT_HD AdamStep<T> make_adam_step(double lr, double beta1, double beta2, double eps, int64_t step) {
  AdamStep<T> s;
  s.beta1 = T(beta1), s.beta2 = T(beta2);
  s.one_minus_beta1 = T(1.0 - beta1), s.one_minus_beta2 = T(1.0 - beta2);
  s.step_size = T(lr / (1.0 - ::pow(beta1, double(step))));
  s.inv_sqrt_correction = T(1.0 / ::sqrt(1.0 - ::pow(beta2, double(step))));
  s.eps = T(eps);
  s.opacity_reg = s.scale_reg = T(0);
  return s;
}

// 8.2  Gradient of weight times the opacity, and of weight times the standard deviation, by the raw parameter.
template <class T>
SPLAT_HD T opacity_reg_vjp(T weight, T logit) {
  T v_logit = T(0);
  activate_opacity_vjp(activate_opacity(logit), weight, v_logit);
  return v_logit;
}
template <class T>
SPLAT_HD T scale_reg_vjp(T weight, T log_scale) {
  T v_log_scale = T(0);
  activate_scale_vjp(activate_scale(log_scale), weight, v_log_scale);
  return v_log_scale;
}

// step_size: that of the number, which is the group's or a multiple of it.
template <class T, class S>
SPLAT_HD void adam_update(const AdamStep<S>& s, T step_size, T grad, T& param, T& exp_avg, T& exp_avg_sq) {
  if (s.opacity_reg != S(0)) grad = grad + opacity_reg_vjp(T(s.opacity_reg), param);
  if (s.scale_reg != S(0)) grad = grad + scale_reg_vjp(T(s.scale_reg), param);
  exp_avg = exp_avg * T(s.beta1) + grad * T(s.one_minus_beta1);
  exp_avg_sq = exp_avg_sq * T(s.beta2) + grad * grad * T(s.one_minus_beta2);
  const T denominator = rough_sqrt_(exp_avg_sq) * T(s.inv_sqrt_correction) + T(s.eps);
  param = param - rough_quotient_(step_size * exp_avg, denominator);
}
template <class T, class S>
SPLAT_HD void adam_update(const AdamStep<S>& s, T grad, T& param, T& exp_avg, T& exp_avg_sq) {
  adam_update(s, T(s.step_size), grad, param, exp_avg, exp_avg_sq);
}

// 8.7  Factor of the rate of a mean: its Gaussian's size over a typical one, to a power; a tenth to ten times.
template <class T>
struct MeansRate {
  T power, log_size;  // power 0: one rate for all
};
constexpr double kLogRateLimit = 2.302585092994046;

template <class T, class S>
SPLAT_HD T means_rate(const MeansRate<S>& s, const T* log_scale) {
  const T a = log_scale[0], b = log_scale[1], c = log_scale[2];
  const T second = max_(min_(a, b), min_(max_(a, b), c));  // of the three
  return exp_(clamp_(T(s.power) * (second - T(s.log_size)), T(-kLogRateLimit), T(kLogRateLimit)));
}

// The effect on one number of all the steps that it missed, at once: docs/math.md 8.1
template <class T>
struct AdamDecay {
  T rate;            // of exp_avg / sqrt(exp_avg_sq)
  T eps;             // beside that root
  T decay1, decay2;  // of the moments
};

// Row s of `table` is for numbers whose last step was s, the last row for all later ones: two sums over all steps to
// come, A and B of docs/math.md 8.1.
struct AdamDecayTable {
  const double* table;  // [rows, 2]
  int64_t rows;
  double beta1, beta2, lr, eps;
  double ratio_a, ratio_b;  // by which the terms of the sums fall
};

inline AdamDecayTable make_adam_decay_table(const double* table, int64_t rows, double beta1, double beta2, double lr,
                                            double eps) {
  return {table, rows, beta1, beta2, lr, eps, beta1 / ::sqrt(beta2), beta1 / beta2};
}

// Only multiplications, so that every machine has the same bits.
template <class T>
SPLAT_HD T power(T base, int64_t exponent) {
  T result = T(1);
  for (; exponent > 0; exponent >>= 1, base = base * base)
    if (exponent & 1) result = result * base;
  return result;
}

// From `last_step` to step `now`, which is later.
template <class T>
SPLAT_HD AdamDecay<T> make_adam_decay(const AdamDecayTable& g, int64_t last_step, int64_t now) {
  const int64_t last = g.rows - 1;
  const double* from = g.table + 2 * (last_step < last ? last_step : last);
  const double* to = g.table + 2 * (now < last ? now : last);
  const double a = from[0] - power(g.ratio_a, now - last_step) * to[0];
  const double b = from[1] - power(g.ratio_b, now - last_step) * to[1];
  AdamDecay<T> decay;
  decay.rate = T(g.lr * a);
  decay.eps = T(g.eps * (b / a));
  decay.decay1 = power(T(g.beta1), now - last_step);
  decay.decay2 = power(T(g.beta2), now - last_step);
  return decay;
}

template <class T, class S>
SPLAT_HD void adam_catch_up(const AdamDecay<S>& decay, T& param, T& exp_avg, T& exp_avg_sq) {
  param = param - rough_quotient_(T(decay.rate) * exp_avg, rough_sqrt_(exp_avg_sq) + T(decay.eps));
  exp_avg = exp_avg * T(decay.decay1);
  exp_avg_sq = exp_avg_sq * T(decay.decay2);
}

}  // namespace splat
