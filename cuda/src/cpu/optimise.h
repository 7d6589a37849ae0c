// Adam over contiguous numbers, sixteen at a time. docs/math.md 8.
#pragma once
#include <algorithm>

#include "../../math/adam.h"
#include "../../math/sh.h"
#include "geometry.h"
#include "lanes.h"
#include "stages.h"

namespace splat {

// Numbers of the moments that are requested ahead of the step; the parameters have been read before.
constexpr int64_t kMomentsAhead = 256;

// step_sizes: of each number; null: all have that of `step`.
template <class Real>
SPLAT_INLINE void adam_range(const AdamStep<Real>& step, const Real* grad, Real* param, Real* exp_avg,
                             Real* exp_avg_sq, int64_t count, const Real* step_sizes = nullptr) {
  using F = Lanes<Real, kLanes>;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    __builtin_prefetch(exp_avg + i + kMomentsAhead, 1), __builtin_prefetch(exp_avg_sq + i + kMomentsAhead, 1);
    F p = F::load(param + i), m = F::load(exp_avg + i), v = F::load(exp_avg_sq + i);
    const F size = step_sizes == nullptr ? F(step.step_size) : F::load(step_sizes + i);
    adam_update(step, size, F::load(grad + i), p, m, v);
    p.store(param + i), m.store(exp_avg + i), v.store(exp_avg_sq + i);
  }
  if (i == count) return;
  // The same arithmetic for the last few, so that no number depends on its position.
  const int left = int(count - i);
  F p = load_first(param + i, left), m = load_first(exp_avg + i, left), v = load_first(exp_avg_sq + i, left);
  const F size = step_sizes == nullptr ? F(step.step_size) : load_first(step_sizes + i, left);
  adam_update(step, size, load_first(grad + i, left), p, m, v);
  store_first(p, param + i, left), store_first(m, exp_avg + i, left), store_first(v, exp_avg_sq + i, left);
}

template <class Real>
SPLAT_INLINE void catch_up_range(const AdamDecay<Real>& decay, Real* param, Real* exp_avg, Real* exp_avg_sq,
                                 int64_t count) {
  using F = Lanes<Real, kLanes>;
  for (int64_t i = 0; i < count; i += kLanes) {
    const int left = int(std::min<int64_t>(kLanes, count - i));
    const bool all = left == kLanes;
    F p = all ? F::load(param + i) : load_first(param + i, left);
    F m = all ? F::load(exp_avg + i) : load_first(exp_avg + i, left);
    F v = all ? F::load(exp_avg_sq + i) : load_first(exp_avg_sq + i, left);
    adam_catch_up(decay, p, m, v);
    if (all) p.store(param + i), m.store(exp_avg + i), v.store(exp_avg_sq + i);
    else store_first(p, param + i, left), store_first(m, exp_avg + i, left), store_first(v, exp_avg_sq + i, left);
  }
}

// Brings shN of the listed Gaussians, whose ids ascend, to the step before this one.
template <class Real>
inline void catch_up_shN(const SplatGaussians& params, const SplatAdam& adam, const int32_t* ids, int count,
                         int sh_degree) {
  const int64_t used = 3 * shN_count(sh_degree), width = 3 * int64_t(params.shN_count), now = adam.step - 1;
  const AdamDecayTable table =
      make_adam_decay_table(adam.decay_table, adam.decay_rows, adam.beta1, adam.beta2, adam.lr[kGroups - 1], adam.eps);
  const auto at = [&](const SplatGaussians& g, int64_t i) { return static_cast<Real*>(g.shN) + i * width; };
  for (int k = 0; k < count; ++k) {
    const int64_t i = ids[k];
    if (adam.sh_last_step[i] >= now) continue;
    catch_up_range(make_adam_decay<Real>(table, adam.sh_last_step[i], now), at(params, i), at(adam.exp_avg, i),
                   at(adam.exp_avg_sq, i), used);
    adam.sh_last_step[i] = int32_t(now);
  }
}

// One Adam step on shN of the listed Gaussians of a chunk, whose ids ascend. `grads` [chunk, width].
template <class Real>
inline void adam_shN(const SplatGaussians& params, const SplatAdam& adam, int64_t begin, const int32_t* ids, int count,
                     int sh_degree, const Real* grads) {
  const int64_t used = 3 * shN_count(sh_degree), width = 3 * int64_t(params.shN_count);
  const auto step = make_adam_step<Real>(adam.lr[kGroups - 1], adam.beta1, adam.beta2, adam.eps, adam.step);
  const auto at = [&](const SplatGaussians& g, int64_t i) { return static_cast<Real*>(g.shN) + i * width; };
  for (int k = 0; k < count;) {
    int run = 1;  // neighbours in one go, where their numbers are
    while (used == width && k + run < count && ids[k + run] == ids[k] + run) ++run;
    const int64_t i = ids[k];
    if (used > 0)
      adam_range(step, grads + (i - begin) * width, at(params, i), at(adam.exp_avg, i), at(adam.exp_avg_sq, i),
                 (run - 1) * width + used);
    for (int j = 0; j < run; ++j) adam.sh_last_step[i + j] = int32_t(adam.step);
    k += run;
  }
}

// The step sizes [3 (end - begin)] of the means of Gaussians [begin, end), at most a chunk of them.
template <class Real>
inline void means_step_sizes(const SplatGaussians& params, const MeansRate<Real>& rate, Real step_size, int64_t begin,
                             int64_t end, Real* out) {
  const int count = int(end - begin);
  const Real* log_scales = static_cast<const Real*>(params.log_scales) + 3 * begin;
  for (int i = 0; i < count; i += kLanes) {
    int32_t lane_ids[kLanes];
    for (int k = 0; k < kLanes; ++k) lane_ids[k] = std::min(i + k, count - 1);
    Lanes<Real, kLanes> log_scale[3];
    load_rows<3>(log_scales, lane_ids, log_scale);
    Real factors[kLanes];
    means_rate(rate, log_scale).store(factors);
    for (int k = 0; k < std::min(kLanes, count - i); ++k)
      for (int c = 0; c < 3; ++c) out[3 * (i + k) + c] = step_size * factors[k];
  }
}

// One Adam step on Gaussians [begin, end) of a chunk, groups [0, groups). `grads` are those of the range alone, group
// by group.
// SH coefficients above `sh_degree` are not in use: they have no gradient and stay as they are.
template <class Real>
inline void adam_rows(const SplatGaussians& params, const SplatAdam& adam, int64_t begin, int64_t end, int sh_degree,
                      const Real* const* grads, int groups = kGroups) {
  for (int group = 0; group < groups; ++group) {
    const int64_t width = group_width(params, group);
    const int64_t used = group == kGroups - 1 ? std::min<int64_t>(width, 3 * shN_count(sh_degree)) : width;
    if (used == 0) continue;
    const auto step = step_of_group<Real>(params, adam, group);
    const auto at = [&](const SplatGaussians& g) { return static_cast<Real*>(group_of(g, group)) + begin * width; };
    Real *param = at(params), *exp_avg = at(adam.exp_avg), *exp_avg_sq = at(adam.exp_avg_sq);
    if (used == width) {
      Real step_sizes[3 * kChunk];
      const bool sized = group == kMeans && adam.size_power > 0.0;  // log-scales come later: those before the step
      if (sized)
        means_step_sizes(params, means_rate_of<Real>(adam), step.step_size, begin, end, step_sizes);
      adam_range(step, grads[group], param, exp_avg, exp_avg_sq, (end - begin) * width, sized ? step_sizes : nullptr);
      continue;
    }
    for (int64_t row = 0; row < (end - begin) * width; row += width)
      adam_range(step, grads[group] + row, param + row, exp_avg + row, exp_avg_sq + row, used);
  }
}

}  // namespace splat
