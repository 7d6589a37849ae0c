// Adam over contiguous numbers, sixteen at a time. docs/math.md 8.
#pragma once
#include <algorithm>

#include "../../math/adam.h"
#include "lanes.h"
#include "stages.h"

namespace splat {

// Groups in the order of SplatGaussians, as arrays: pointer of a group, numbers a Gaussian.
constexpr int kGroups = 6;
inline void* group_of(const SplatGaussians& g, int group) {
  void* const pointers[kGroups] = {g.means, g.quats, g.log_scales, g.logit_opacities, g.sh0, g.shN};
  return pointers[group];
}
inline int64_t group_width(const SplatGaussians& g, int group) {
  const int64_t widths[kGroups] = {3, 4, 3, 1, 3, 3 * int64_t(g.sh_rest)};
  return widths[group];
}

template <class Real>
SPLAT_INLINE void adam_range(const AdamStep<Real>& step, const Real* grad, Real* param, Real* exp_avg,
                             Real* exp_avg_sq, int64_t count) {
  using F = Lanes<Real, kLanes>;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    F p = F::load(param + i), m = F::load(exp_avg + i), v = F::load(exp_avg_sq + i);
    adam_update(step, F::load(grad + i), p, m, v);
    p.store(param + i), m.store(exp_avg + i), v.store(exp_avg_sq + i);
  }
  if (i == count) return;
  // The same arithmetic for the rest, so that no number depends on where it lies.
  const size_t rest = size_t(count - i);
  Real g_[kLanes] = {}, p_[kLanes] = {}, m_[kLanes] = {}, v_[kLanes] = {};
  std::copy_n(grad + i, rest, g_), std::copy_n(param + i, rest, p_);
  std::copy_n(exp_avg + i, rest, m_), std::copy_n(exp_avg_sq + i, rest, v_);
  F p = F::load(p_), m = F::load(m_), v = F::load(v_);
  adam_update(step, F::load(g_), p, m, v);
  p.store(p_), m.store(m_), v.store(v_);
  std::copy_n(p_, rest, param + i), std::copy_n(m_, rest, exp_avg + i), std::copy_n(v_, rest, exp_avg_sq + i);
}

// One Adam step on Gaussians [begin, end). `grads` are those of the range alone, group by group.
template <class Real>
inline void adam_rows(const SplatGaussians& params, const SplatAdam& adam, int64_t begin, int64_t end,
                      const Real* const* grads) {
  for (int group = 0; group < kGroups; ++group) {
    const int64_t width = group_width(params, group);
    if (width == 0) continue;
    const auto step = make_adam_step<Real>(adam.lr[group], adam.beta1, adam.beta2, adam.eps, adam.step);
    const auto at = [&](const SplatGaussians& g) { return static_cast<Real*>(group_of(g, group)) + begin * width; };
    adam_range(step, grads[group], at(params), at(adam.exp_avg), at(adam.exp_avg_sq), (end - begin) * width);
  }
}

}  // namespace splat
