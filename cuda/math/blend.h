// One Gaussian over one pixel, forward and backward, front to back: docs/math.md 6.
#pragma once
#include "tiles.h"

namespace splat {

constexpr double kMaxAlpha = 0.999;          // keeps 1 - alpha away from 0
constexpr double kMinTransmittance = 1e-4;   // a pixel stops before it falls to this

// A projected Gaussian, as the blend needs it: 16 numbers, one cache line of floats.
// The conic is scaled so that log2(alpha) = log2_opacity - (a dx^2 + b dx dy + c dy^2).
enum ProjectedField : int {
  kProjX, kProjY, kProjA, kProjB, kProjC, kProjLog2Opacity, kProjRed, kProjGreen, kProjBlue, kProjDepth, kProjHalfX,
  kProjHalfY,
  kProjectedSize = 16,
};

// The gradient of a tile intersection: sums over the pixels of the tile, of which isect_grad_vjp makes the gradient of
// the projected Gaussian. v = alpha dL/dalpha, dx and dy point from the mean to the pixel. The last two are sums of
// magnitudes, for densification alone: nothing is differentiated through them.
enum IsectGradField : int {
  kGradV, kGradVx, kGradVy, kGradVxx, kGradVxy, kGradVyy, kGradRed, kGradGreen, kGradBlue, kGradDepth, kGradAbsX,
  kGradAbsY,
  kIsectGradUsed,
  kIsectGradSize = 16,
};
// The number of fields that are summed.
SPLAT_HD constexpr int isect_grad_fields(bool depth, bool abs) {
  return abs ? kIsectGradUsed : depth ? kGradAbsX : kGradDepth;
}

// 6.1  log2 of the unclamped alpha at the offset (dx, dy).
template <class T, class S>
SPLAT_HD T log2_alpha(const S* proj, T dx, T dy) {
  const T slope = dx * T(proj[kProjA]) + dy * T(proj[kProjB]);
  return T(proj[kProjLog2Opacity]) - dx * slope - dy * (dy * T(proj[kProjC]));
}

// 6.2  dL/dalpha of a Gaussian with cg = colour . dL/dcolour, the transmittance before it, and
// the sum `behind` of what lies behind it (later weights times their cg, background and alpha terms).
template <class T>
SPLAT_HD T alpha_vjp(T transmittance, T cg, T behind, T one_minus_alpha) {
  return transmittance * cg - behind * reciprocal_(one_minus_alpha);
}

// 6.2  From the sums over pixels to the gradient of image mean, conic (A, B, C in natural units) and log opacity.
template <class T>
SPLAT_HD void isect_grad_vjp(const T* sums, T a, T b, T c, T* v_mean2d, T& v_a, T& v_b, T& v_c, T& v_log_opacity) {
  v_mean2d[0] = a * sums[kGradVx] + b * sums[kGradVy];
  v_mean2d[1] = b * sums[kGradVx] + c * sums[kGradVy];
  v_a = T(-0.5) * sums[kGradVxx];
  v_b = -sums[kGradVxy];
  v_c = T(-0.5) * sums[kGradVyy];
  v_log_opacity = sums[kGradV];
}

// 6.3  A pixel's share of |dL/dmean2d|, from v dx, v dy and the scaled conic: divided by kLog2E it is in pixels.
template <class T, class S>
SPLAT_HD void abs_mean2d_grads(const S* proj, T vx, T vy, T& x, T& y) {
  const T b = T(proj[kProjB]);
  x = abs_(T(2) * T(proj[kProjA]) * vx + b * vy);
  y = abs_(b * vx + T(2) * T(proj[kProjC]) * vy);
}

}  // namespace splat
