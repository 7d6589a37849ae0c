// One Gaussian over one pixel, forward and backward, front to back: docs/math.md 6.
#pragma once
#include "tiles.h"

namespace splat {

constexpr double kMaxAlpha = 0.999;          // keeps 1 - alpha away from 0
constexpr double kMinTransmittance = 1e-4;   // a pixel stops before it falls to this

// What the blend needs of a visible Gaussian: 16 numbers, one cache line of floats.
// The conic is scaled so that log2(alpha) = log2_opacity - (a dx^2 + b dx dy + c dy^2).
enum RecordField : int {
  kRecX, kRecY, kRecA, kRecB, kRecC, kRecLog2Opacity, kRecRed, kRecGreen, kRecBlue, kRecDepth, kRecHalfX, kRecHalfY,
  kRecordSize = 16,
};

// Sums over pixels that lead back to the record: one row a (Gaussian, tile) pair.
// v = alpha dL/dalpha, dx and dy point from the mean to the pixel. The last two are sums of magnitudes, for density
// control alone: no gradient is made of them.
enum RowField : int {
  kRowV, kRowVx, kRowVy, kRowVxx, kRowVxy, kRowVyy, kRowRed, kRowGreen, kRowBlue, kRowDepth, kRowAbsX, kRowAbsY,
  kRowUsed,
  kRowSize = 16,
};
// How many of them are summed.
SPLAT_HD constexpr int row_fields(bool depth, bool abs) { return abs ? kRowUsed : depth ? kRowAbsX : kRowDepth; }

// 6.1  log2 of the unclamped alpha at the offset (dx, dy).
template <class T, class S>
SPLAT_HD T log2_alpha(const S* rec, T dx, T dy) {
  const T slope = dx * T(rec[kRecA]) + dy * T(rec[kRecB]);
  return T(rec[kRecLog2Opacity]) - dx * slope - dy * (dy * T(rec[kRecC]));
}

// 6.2  dL/dalpha of a Gaussian with cg = colour . dL/dcolour, the transmittance before it, and
// the sum `behind` of what lies behind it (later weights times their cg, background and alpha terms).
template <class T>
SPLAT_HD T alpha_vjp(T transmittance, T cg, T behind, T one_minus_alpha) {
  return transmittance * cg - behind * reciprocal_(one_minus_alpha);
}

// 6.2  From the sums of a row to the gradient of image mean, conic (A, B, C in natural units) and log opacity.
template <class T>
SPLAT_HD void row_vjp(const T* row, T a, T b, T c, T* v_mean2d, T& v_a, T& v_b, T& v_c, T& v_log_opacity) {
  v_mean2d[0] = a * row[kRowVx] + b * row[kRowVy];
  v_mean2d[1] = b * row[kRowVx] + c * row[kRowVy];
  v_a = T(-0.5) * row[kRowVxx];
  v_b = -row[kRowVxy];
  v_c = T(-0.5) * row[kRowVyy];
  v_log_opacity = row[kRowV];
}

// 6.3  A pixel's share of |dL/dmean2d|, from v dx and v dy and the conic as a record has it: divided by kLog2E it is in pixels.
template <class T, class S>
SPLAT_HD void abs_slopes(const S* rec, T vx, T vy, T& x, T& y) {
  const T b = T(rec[kRecB]);
  x = abs_(T(2) * T(rec[kRecA]) * vx + b * vy);
  y = abs_(b * vx + T(2) * T(rec[kRecC]) * vy);
}

}  // namespace splat
