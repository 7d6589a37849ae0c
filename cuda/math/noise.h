// The noise that lets Gaussians explore, and the random numbers it is made of: docs/math.md 9.
#pragma once
#include "activation.h"

namespace splat {

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): four words at `counter` become
// four random ones. No state: the same counter and key give the same numbers on every machine.
SPLAT_HD void philox(uint32_t* counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(0xD2511F53u) * counter[0], b = uint64_t(0xCD9E8D57u) * counter[2];
    const uint32_t c1 = counter[1], c3 = counter[3];
    counter[0] = uint32_t(b >> 32) ^ c1 ^ key0;
    counter[1] = uint32_t(b);
    counter[2] = uint32_t(a >> 32) ^ c3 ^ key1;
    counter[3] = uint32_t(a);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}

// A word's upper 24 bits as a number in (0, 1), the middle of its interval; exact in float.
template <class T>
SPLAT_HD T uniform_of(uint32_t word) { return T(int32_t(word >> 8)) * T(1.0 / 16777216.0) + T(0.5 / 16777216.0); }

// Two standard normal numbers from two uniform ones (Box and Muller). Sine and cosine of 2 pi v are minimax polynomials
// around v = 1/2, good to 5e-7 in float, so that every machine has the same bits.
template <class T>
SPLAT_HD void normal_pair(T u, T v, T* out) {
  const T radius = sqrt_(T(-1.3862943611198906) * log2_(u));
  const T x = v - T(0.5), xx = x * x;
  T s = xx * T(-12.27126191) + T(41.20539457);
  s = s * xx + T(-76.58010045);
  s = s * xx + T(81.59618387);
  s = s * xx + T(-41.3414214);
  s = s * xx + T(6.28318282);
  T c = xx * T(6.5296101) + T(-25.96831307);
  c = c * xx + T(60.16783167);
  c = c * xx + T(-85.45016554);
  c = c * xx + T(64.93911898);
  c = c * xx + T(-19.73920453);
  c = c * xx + T(0.99999999);
  out[0] = -c * radius;
  out[1] = -(s * x) * radius;
}

// How far a mean is pushed: covariance times `normal`, times `scale`, and the less the more opaque the Gaussian is.
template <class T, class S>
SPLAT_HD void exploration(const T* quat, const T* log_scale, T logit, S scale, S threshold, S steepness,
                          const T* normal, T* push) {
  T rotation[9], local[3];
  quat_to_rotation(quat, rotation);
  const T gate = activate_opacity((T(threshold) - activate_opacity(logit)) * T(steepness)) * T(scale);
  for (int k = 0; k < 3; ++k) {
    const T along = rotation[k] * normal[0] + rotation[3 + k] * normal[1] + rotation[6 + k] * normal[2];
    local[k] = square(activate_scale(log_scale[k])) * along * gate;
  }
  for (int k = 0; k < 3; ++k)
    push[k] = rotation[3 * k] * local[0] + rotation[3 * k + 1] * local[1] + rotation[3 * k + 2] * local[2];
}

}  // namespace splat
