// Real spherical harmonics, degree 0 to 4, with INRIA's order and signs: docs/math.md 4.
#pragma once
#include "elementary.h"

namespace splat {

// Numbers, not arrays: device code cannot read a host array. kShL_k is the k-th distinct factor of degree L.
constexpr double kSh0 = 0.28209479177387814;
constexpr double kSh1 = 0.4886025119029199;
constexpr double kSh2_0 = 1.0925484305920792, kSh2_1 = 0.31539156525252005, kSh2_2 = 0.5462742152960396;
constexpr double kSh3_0 = 0.5900435899266435, kSh3_1 = 2.890611442640554, kSh3_2 = 0.4570457994644658;
constexpr double kSh3_3 = 0.3731763325901154, kSh3_4 = 1.445305721320277;
constexpr double kSh4_0 = 2.5033429417967046, kSh4_1 = 1.7701307697799304, kSh4_2 = 0.9461746957575601;
constexpr double kSh4_3 = 0.6690465435572892, kSh4_4 = 0.10578554691520431, kSh4_5 = 0.47308734787878004;
constexpr double kSh4_6 = 0.6258357354491761;

SPLAT_HD int shN_count(int degree) { return (degree + 1) * (degree + 1) - 1; }

// 4.1  The (degree + 1)^2 - 1 functions beside the constant one, at the unit direction d.
template <class T>
SPLAT_HD void sh_basis(int degree, const T* d, T* basis) {
  const T x = d[0], y = d[1], z = d[2];
  if (degree < 1) return;
  basis[0] = T(-kSh1) * y;
  basis[1] = T(kSh1) * z;
  basis[2] = T(-kSh1) * x;
  if (degree < 2) return;
  const T xx = x * x, yy = y * y, zz = z * z, xy = x * y, yz = y * z, xz = x * z;
  basis[3] = T(kSh2_0) * xy;
  basis[4] = T(-kSh2_0) * yz;
  basis[5] = T(kSh2_1) * (T(2) * zz - xx - yy);
  basis[6] = T(-kSh2_0) * xz;
  basis[7] = T(kSh2_2) * (xx - yy);
  if (degree < 3) return;
  basis[8] = T(-kSh3_0) * y * (T(3) * xx - yy);
  basis[9] = T(kSh3_1) * xy * z;
  basis[10] = T(-kSh3_2) * y * (T(4) * zz - xx - yy);
  basis[11] = T(kSh3_3) * z * (T(2) * zz - T(3) * (xx + yy));
  basis[12] = T(-kSh3_2) * x * (T(4) * zz - xx - yy);
  basis[13] = T(kSh3_4) * z * (xx - yy);
  basis[14] = T(-kSh3_0) * x * (xx - T(3) * yy);
  if (degree < 4) return;
  basis[15] = T(kSh4_0) * xy * (xx - yy);
  basis[16] = T(-kSh4_1) * yz * (T(3) * xx - yy);
  basis[17] = T(kSh4_2) * xy * (T(7) * zz - T(1));
  basis[18] = T(-kSh4_3) * yz * (T(7) * zz - T(3));
  basis[19] = T(kSh4_4) * (zz * (T(35) * zz - T(30)) + T(3));
  basis[20] = T(-kSh4_3) * xz * (T(7) * zz - T(3));
  basis[21] = T(kSh4_5) * (xx - yy) * (T(7) * zz - T(1));
  basis[22] = T(-kSh4_1) * xz * (xx - T(3) * yy);
  basis[23] = T(kSh4_6) * (xx * (xx - T(3) * yy) - yy * (T(3) * xx - yy));
}
// v_d += sum of v_basis[k] times the gradient of function k, taken as a polynomial in x, y, z.
template <class T>
SPLAT_HD void sh_basis_vjp(int degree, const T* d, const T* v_basis, T* v_d) {
  const T x = d[0], y = d[1], z = d[2];
  const T* g = v_basis;
  if (degree < 1) return;
  T gx = T(-kSh1) * g[2], gy = T(-kSh1) * g[0], gz = T(kSh1) * g[1];
  if (degree >= 2) {
    gx += T(kSh2_0) * (y * g[3] - z * g[6]) - T(2 * kSh2_1) * x * g[5] + T(2 * kSh2_2) * x * g[7];
    gy += T(kSh2_0) * (x * g[3] - z * g[4]) - T(2 * kSh2_1) * y * g[5] - T(2 * kSh2_2) * y * g[7];
    gz += T(-kSh2_0) * (y * g[4] + x * g[6]) + T(4 * kSh2_1) * z * g[5];
  }
  if (degree >= 3) {
    const T xx = x * x, yy = y * y, zz = z * z, xy = x * y, yz = y * z, xz = x * z;
    gx += T(-6 * kSh3_0) * xy * g[8] + T(kSh3_1) * yz * g[9] + T(2 * kSh3_2) * xy * g[10] -
          T(6 * kSh3_3) * xz * g[11] - T(kSh3_2) * (T(4) * zz - T(3) * xx - yy) * g[12] +
          T(2 * kSh3_4) * xz * g[13] - T(3 * kSh3_0) * (xx - yy) * g[14];
    gy += T(-3 * kSh3_0) * (xx - yy) * g[8] + T(kSh3_1) * xz * g[9] -
          T(kSh3_2) * (T(4) * zz - xx - T(3) * yy) * g[10] - T(6 * kSh3_3) * yz * g[11] +
          T(2 * kSh3_2) * xy * g[12] - T(2 * kSh3_4) * yz * g[13] + T(6 * kSh3_0) * xy * g[14];
    gz += T(kSh3_1) * xy * g[9] - T(8 * kSh3_2) * yz * g[10] +
          T(kSh3_3) * (T(6) * zz - T(3) * (xx + yy)) * g[11] - T(8 * kSh3_2) * xz * g[12] +
          T(kSh3_4) * (xx - yy) * g[13];
    if (degree >= 4) {
      gx += T(kSh4_0) * y * (T(3) * xx - yy) * g[15] - T(6 * kSh4_1) * x * yz * g[16] +
            T(kSh4_2) * y * (T(7) * zz - T(1)) * g[17] - T(kSh4_3) * z * (T(7) * zz - T(3)) * g[20] +
            T(2 * kSh4_5) * x * (T(7) * zz - T(1)) * g[21] - T(3 * kSh4_1) * z * (xx - yy) * g[22] +
            T(4 * kSh4_6) * x * (xx - T(3) * yy) * g[23];
      gy += T(kSh4_0) * x * (xx - T(3) * yy) * g[15] - T(3 * kSh4_1) * z * (xx - yy) * g[16] +
            T(kSh4_2) * x * (T(7) * zz - T(1)) * g[17] - T(kSh4_3) * z * (T(7) * zz - T(3)) * g[18] -
            T(2 * kSh4_5) * y * (T(7) * zz - T(1)) * g[21] + T(6 * kSh4_1) * x * yz * g[22] -
            T(4 * kSh4_6) * y * (T(3) * xx - yy) * g[23];
      gz += T(-kSh4_1) * y * (T(3) * xx - yy) * g[16] + T(14 * kSh4_2) * x * yz * g[17] -
            T(kSh4_3) * y * (T(21) * zz - T(3)) * g[18] + T(kSh4_4) * z * (T(140) * zz - T(60)) * g[19] -
            T(kSh4_3) * x * (T(21) * zz - T(3)) * g[20] + T(14 * kSh4_5) * z * (xx - yy) * g[21] -
            T(kSh4_1) * x * (xx - T(3) * yy) * g[22];
    }
  }
  v_d[0] += gx;
  v_d[1] += gy;
  v_d[2] += gz;
}

// 4.3  Unit direction from the camera to a point.
template <class T, class S>
SPLAT_HD T view_direction(const S* center, const T* p, T* d) {
  for (int i = 0; i < 3; ++i) d[i] = p[i] - T(center[i]);
  const T inv_length = T(1) / sqrt_(dot3(d, d));
  for (int i = 0; i < 3; ++i) d[i] = d[i] * inv_length;
  return inv_length;
}
template <class T>
SPLAT_HD void view_direction_vjp(const T* d, T inv_length, const T* v_d, T* v_p, T* v_center) {
  const T along = dot3(d, v_d);
  for (int i = 0; i < 3; ++i) {
    const T g = (v_d[i] - along * d[i]) * inv_length;
    v_p[i] += g;
    if (v_center != nullptr) v_center[i] -= g;
  }
}

// 4.2  Colour is max(0, 1/2 + sum); the gradient passes where the sum is exactly 0, so that black can learn.
template <class T>
SPLAT_HD T sh_colour(T unclamped) { return max_(unclamped, T(0)); }
template <class T>
SPLAT_HD T sh_colour_vjp(T unclamped, T v_colour) { return select(unclamped >= T(0), v_colour, T(0)); }

}  // namespace splat
