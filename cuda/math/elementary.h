// Square root, exponential, logarithm, arctangent, reciprocal: what each build takes for them, and the CPU's own polynomials.
//
// With SPLAT_TWIN_MATH float functions are the CPU library's also in kernels. Such a build of the kernels, without
// fused multiply-add, rounds as the portable CPU library does, so that tests compare the two bit for bit.
#pragma once
#include <cstring>

#include "hd.h"

namespace splat {

SPLAT_HD float sqrt_(float x) { return ::sqrtf(x); }
SPLAT_HD double sqrt_(double x) { return ::sqrt(x); }

// ---- polynomials -----------------------------------------------------------------------------------------------------

// The bits of a number as integers. src/cpu/lanes.h has them for vectors.
template <class T>
struct Bits;
template <>
struct Bits<float> {
  using Int = int32_t;
  static SPLAT_HD Int of(float x) {
    Int bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
  }
  static SPLAT_HD float number(Int bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
  }
  static SPLAT_HD float converted(Int i) { return float(i); }
  // Sums and shifts may wrap around.
  static SPLAT_HD Int plus(Int a, Int b) { return Int(uint32_t(a) + uint32_t(b)); }
  static SPLAT_HD Int minus(Int a, Int b) { return Int(uint32_t(a) - uint32_t(b)); }
  static SPLAT_HD Int left(Int bits, int by) { return Int(uint32_t(bits) << by); }
};

// 2^x for x in [-126, 127], about 1e-7 relative; outside it, and for NaN, the result is meaningless.
// Split at the nearest integer by adding 1.5 * 2^23; the rest goes through a minimax polynomial.
template <class T>
SPLAT_HD_FORCED T exp2_polynomial(T x) {
  using B = Bits<T>;
  const T shifted = x + T(12582912.0f);
  const T f = x - (shifted - T(12582912.0f));
  T p = f * T(1.326472718e-03f) + T(9.671512641e-03f);
  p = p * f + T(5.550733743e-02f);
  p = p * f + T(2.402224209e-01f);
  p = p * f + T(6.931469776e-01f);
  p = p * f + T(1.0f);
  return B::number(B::plus(B::of(p), B::left(B::of(shifted), 23)));
}

// e^x with about 2e-7 relative error; saturates instead of overflowing; NaN stays NaN.
template <class T>
SPLAT_HD_FORCED T exp_polynomial(T x) {
  using B = Bits<T>;
  x = min_(T(88.0f), max_(T(-87.0f), x));
  const T shifted = x * T(1.44269504f) + T(12582912.0f);
  const T n = shifted - T(12582912.0f);
  const T r = (x - n * T(0.693359375f)) - n * T(-2.12194440e-4f);
  T p = r * T(1.0f / 720.0f) + T(1.0f / 120.0f);
  p = p * r + T(1.0f / 24.0f);
  p = p * r + T(1.0f / 6.0f);
  p = p * r + T(0.5f);
  p = p * r + T(1.0f);
  p = p * r + T(1.0f);
  // A product, not an addition to the exponent, so that NaN survives.
  return p * B::number(B::left(B::of(shifted) + 127, 23));
}

// log2 of a positive normal number, about 1e-7 absolute; NaN stays NaN.
template <class T>
SPLAT_HD_FORCED T log2_polynomial(T x) {
  using B = Bits<T>;
  const typename B::Int bits = B::of(x);
  const typename B::Int exponent = (bits - 0x3f3504f3) >> 23;  // mantissa in [sqrt(1/2), sqrt(2))
  const T m = B::number(B::minus(bits, B::left(exponent, 23)));
  const T e = B::converted(exponent);
  const T s = (m - T(1.0f)) / (m + T(1.0f)), ss = s * s;
  T p = ss * T(0.32059889f) + T(0.41219858f);
  p = p * ss + T(0.57707802f);
  p = p * ss + T(0.96179669f);
  p = p * ss + T(2.8853901f);
  return select(x >= x, p * s + e, x);
}

// R of the arctangent, atan(t) = t (1 - w/3 + w^2 R(w)) with w = t^2 in [0, 1]; about 2e-8 absolute. docs/math.md 3.10
template <class T>
SPLAT_HD_FORCED T atan_rest_polynomial(T w) {
  T p = w * T(2.097505610e-03f) + T(-1.182577293e-02f);
  p = p * w + T(3.120547533e-02f);
  p = p * w + T(-5.376588553e-02f);
  p = p * w + T(7.304657996e-02f);
  p = p * w + T(-9.021895379e-02f);
  p = p * w + T(1.110473946e-01f);
  p = p * w + T(-1.428548247e-01f);
  p = p * w + T(1.999999881e-01f);
  return p;
}

// ---- what a build takes ----------------------------------------------------------------------------------------------

#ifdef SPLAT_TWIN_MATH
SPLAT_HD float exp_(float x) { return exp_polynomial(x); }
SPLAT_HD float log2_(float x) { return log2_polynomial(x); }
#else
SPLAT_HD float exp_(float x) { return ::expf(x); }
SPLAT_HD float log2_(float x) { return ::log2f(x); }
#endif
SPLAT_HD double exp_(double x) { return ::exp(x); }
SPLAT_HD float exp2_(float x) { return ::exp2f(x); }
SPLAT_HD double exp2_(double x) { return ::exp2(x); }
SPLAT_HD double log2_(double x) { return ::log2(x); }
SPLAT_HD float atan_rest(float w) { return atan_rest_polynomial(w); }
SPLAT_HD double atan_rest(double w) {
  if (!(w < 0.1)) return ((::atan(::sqrt(w)) / ::sqrt(w) - 1.0) / w + 1.0 / 3.0) / w;
  double series = 0.0;
  for (int k = 16; k >= 0; --k) series = 1.0 / (2 * k + 5) - w * series;
  return series;
}

// 1 / x, by whatever is fastest at about full precision.
#if defined(__CUDA_ARCH__) && !defined(SPLAT_TWIN_MATH)
__device__ inline float reciprocal_(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));  // within one unit in the last place
  return y;
}
#else
SPLAT_HD float reciprocal_(float x) { return 1.0f / x; }
#endif
SPLAT_HD double reciprocal_(double x) { return 1.0 / x; }

// Square root and quotient where a few units in the last place do not matter: exact everywhere but in a GPU's float,
// where the root of a subnormal number is 0 and the divisor lies between 2^-126 and 2^126.
template <class T>
SPLAT_HD_FORCED T rough_sqrt_(T x) {
  return sqrt_(x);
}
template <class T>
SPLAT_HD_FORCED T rough_quotient_(T a, T b) {
  return a / b;
}
#if defined(__CUDA_ARCH__) && !defined(SPLAT_TWIN_MATH)
__device__ inline float rough_sqrt_(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float rough_quotient_(float a, float b) { return a * reciprocal_(b); }
#endif

}  // namespace splat
