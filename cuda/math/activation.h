// Activation of raw parameters: docs/math.md 2. Every kernel activates here.
#pragma once
#include "elementary.h"

namespace splat {

// 2.1  Standard deviation from its stored logarithm.
template <class T>
SPLAT_HD T activate_scale(T log_scale) { return exp_(log_scale); }
template <class T>
SPLAT_HD void activate_scale_vjp(T scale, T v_scale, T& v_log_scale) { v_log_scale += v_scale * scale; }

// 2.2  Opacity from its stored logit.
template <class T>
SPLAT_HD T activate_opacity(T logit) { return T(1) / (T(1) + exp_(-logit)); }
template <class T>
SPLAT_HD void activate_opacity_vjp(T opacity, T v_opacity, T& v_logit) {
  v_logit += v_opacity * opacity * (T(1) - opacity);
}

// 2.3  Rotation (row major) from an unnormalised quaternion w x y z; |q|^2 divides inside, so no normalised
// quaternion ever exists outside this function.
template <class T>
SPLAT_HD void quat_to_rotation(const T* q, T* rotation) {
  const T w = q[0], x = q[1], y = q[2], z = q[3];
  const T s = T(2) / (w * w + x * x + y * y + z * z);
  rotation[0] = T(1) - s * (y * y + z * z);
  rotation[1] = s * (x * y - w * z);
  rotation[2] = s * (x * z + w * y);
  rotation[3] = s * (x * y + w * z);
  rotation[4] = T(1) - s * (x * x + z * z);
  rotation[5] = s * (y * z - w * x);
  rotation[6] = s * (x * z - w * y);
  rotation[7] = s * (y * z + w * x);
  rotation[8] = T(1) - s * (x * x + y * y);
}
template <class T>
SPLAT_HD void quat_to_rotation_vjp(const T* q, const T* v_rotation, T* v_q) {
  const T w = q[0], x = q[1], y = q[2], z = q[3];
  const T* g = v_rotation;
  const T s = T(2) / (w * w + x * x + y * y + z * z);
  const T a = g[7] - g[5], b = g[2] - g[6], c = g[3] - g[1];  // the antisymmetric part, paired with w
  const T d = g[1] + g[3], e = g[2] + g[6], f = g[5] + g[7];  // the symmetric part, off the diagonal
  const T u[4] = {s * (x * a + y * b + z * c),
                  s * (w * a + y * d + z * e - T(2) * x * (g[4] + g[8])),
                  s * (w * b + x * d + z * f - T(2) * y * (g[0] + g[8])),
                  s * (w * c + x * e + y * f - T(2) * z * (g[0] + g[4]))};
  // Scaling q leaves the rotation as it is, so the gradient has no part along q: s = 2/|q|^2 takes it out.
  const T along = (u[0] * w + u[1] * x + u[2] * y + u[3] * z) * s * T(0.5);
  for (int k = 0; k < 4; ++k) v_q[k] += u[k] - along * q[k];
}

// 2.4  The 3D filter: turns a standard deviation into that of the Gaussian blurred by `sigma`. Returns the ratio of the
// old to the new one; opacity is scaled by the product of the three ratios, which keeps the Gaussian's mass.
template <class T>
SPLAT_HD T filter_3d_scale(T sigma, T& scale) {
  const T before = scale;
  scale = sqrt_(before * before + sigma * sigma);
  return select(scale > T(0), before / scale, T(1));
}
// v_log_scale: of the logarithm of the blurred scale, and then of the stored one. v_log_share: of the ratio's
// logarithm.
template <class T>
SPLAT_HD void filter_3d_scale_vjp(T share, T v_log_share, T& v_log_scale) {
  const T square = share * share;
  v_log_scale = v_log_scale * square + v_log_share * (T(1) - square);
}

}  // namespace splat
