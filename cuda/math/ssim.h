// Structural similarity of two windows from their filtered moments: docs/math.md 7.2 and 7.3.
#pragma once
#include "elementary.h"

namespace splat {

constexpr double kSsimC1 = 0.01 * 0.01;
constexpr double kSsimC2 = 0.03 * 0.03;
constexpr int kSsimRadius = 5;  // 11 taps, sigma 1.5, zeros outside the image

// exp(-k^2 / (2 sigma^2)) for k = 0..5, divided by their sum over 11 taps.
SPLAT_HD constexpr double ssim_tap(int k) {
  return k == 0   ? 0.2660117248617943
         : k == 1 ? 0.21300553771125366
         : k == 2 ? 0.1093606895097
         : k == 3 ? 0.03600077212843082
         : k == 4 ? 0.007598758135239184
                  : 0.0010283800844791099;
}

// Numbers of a stack of images that lie `border` pixels or more from every edge.
inline double numbers_within(int width, int height, int channels, int images, int border) {
  return double(width - 2 * border) * (height - 2 * border) * channels * images;
}

// 7.2  SSIM of one pixel and channel, from the filtered x, y, x^2 + y^2 and xy; y is the target.
// 7.3  And its derivatives with respect to the filtered x, x^2 and xy.
template <class T>
SPLAT_HD T ssim_pixel_vjp(T mu_x, T mu_y, T squares, T xy, T* v_mu_x, T* v_xx, T* v_xy) {
  const T mu_squares = mu_x * mu_x + mu_y * mu_y, mu_xy = mu_x * mu_y;
  const T a = mu_squares + T(kSsimC1);
  const T b = (squares - mu_squares) + T(kSsimC2);
  const T c = T(2) * mu_xy + T(kSsimC1);
  const T d = T(2) * (xy - mu_xy) + T(kSsimC2);
  const T inv_ab = reciprocal_(a * b);
  const T ssim = c * d * inv_ab;
  const T ssim_over_a = ssim * b * inv_ab, ssim_over_b = ssim * a * inv_ab;
  *v_xx = -ssim_over_b;
  *v_xy = T(2) * c * inv_ab;
  *v_mu_x = T(2) * (mu_y * (d - c) * inv_ab + mu_x * (ssim_over_b - ssim_over_a));
  return ssim;
}

}  // namespace splat
