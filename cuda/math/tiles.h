// The part of the image that a Gaussian can reach: docs/math.md 5. Counting and writing call the same functions.
#pragma once
#include "elementary.h"

namespace splat {

constexpr int kTile = 16;           // pixels a side: one work unit
constexpr int kBlock = 4;           // pixels a side: one vector of lanes
constexpr int kBlocksPerTile = 16;  // one bit each in a 16-bit mask

// 5.1  Contributions below 1/255 are skipped, so a Gaussian ends where log2(opacity) - q = -log2(255).
constexpr double kMinLog2Alpha = -7.994353436858858;

// 5.1  Half width of the support along an axis, given tau = log2(255 opacity) and the variance on that axis.
// q is in units of log2, hence 2 ln 2.
template <class T>
SPLAT_HD T support_half_width(T tau, T variance) {
  return sqrt_(T(2.0 * 0.6931471805599453) * tau * variance);
}

// 5.2  Tiles [x0, x1) x [y0, y1) that hold a pixel centre inside the support's box.
struct TileRect {
  int32_t x0, y0, x1, y1;
};
template <class T>
SPLAT_HD int32_t floor_to_tile(T pixel, int32_t tiles) {
  // Compared before the conversion, so that no float outside the range of an integer is converted; NaN gives 0.
  const T limit = T(tiles * kTile);
  const T inside = pixel > T(0) ? (pixel < limit ? pixel : limit) : T(0);
  return int32_t(inside) / kTile;
}
template <class T>
SPLAT_HD TileRect tile_rect(T x, T y, T half_x, T half_y, int32_t tiles_x, int32_t tiles_y, T width, T height) {
  // The centre of pixel j lies at j + 0.5; the tiny margin keeps rounding from losing a pixel on the contour.
  const T margin = T(1e-3);
  const T left = x - half_x - T(0.5) - margin, right = x + half_x - T(0.5) + margin;
  const T top = y - half_y - T(0.5) - margin, bottom = y + half_y - T(0.5) + margin;
  const bool inside = right >= T(0) && bottom >= T(0) && left <= width - T(1) && top <= height - T(1);
  if (!inside) return {0, 0, 0, 0};  // also when any of them is NaN
  TileRect r;
  r.x0 = floor_to_tile(left, tiles_x);
  r.y0 = floor_to_tile(top, tiles_y);
  r.x1 = floor_to_tile(right, tiles_x) + 1;
  r.y1 = floor_to_tile(bottom, tiles_y) + 1;
  r.x1 = r.x1 < tiles_x ? r.x1 : tiles_x;
  r.y1 = r.y1 < tiles_y ? r.y1 : tiles_y;
  return r;
}

// 5.3  Least value of q = a dx^2 + b dx dy + c dy^2 over the box [x0, x1] x [y0, y1] of offsets from the mean.
// q is convex, so with the mean outside the least value lies on an edge that faces it. No argument is NaN.
template <class T>
SPLAT_HD T least_q_in_box(T a, T b, T c, T half_b_over_a, T half_b_over_c, T x0, T y0, T x1, T y1) {
  const T near_x = clamp_ordered(T(0), x0, x1), near_y = clamp_ordered(T(0), y0, y1);
  const T y_on_x_edge = clamp_ordered(-half_b_over_c * near_x, y0, y1);
  const T x_on_y_edge = clamp_ordered(-half_b_over_a * near_y, x0, x1);
  const T q_x = near_x * (a * near_x + b * y_on_x_edge) + c * y_on_x_edge * y_on_x_edge;
  const T q_y = x_on_y_edge * (a * x_on_y_edge + b * near_y) + c * near_y * near_y;
  return min_ordered(q_x, q_y);
}
// 5.3  Whether the box can hold a contribution: a little generous, the blend decides.
template <class T>
SPLAT_HD auto box_reaches(T least_q, T tau) {
  return least_q <= tau * T(1 + 1e-4) + T(1e-4);
}

}  // namespace splat
