// The host/device seam: what a scalar type needs so that one formula serves float, double, SIMD lanes and CUDA threads.
//
// Every function in math/ is a template over T. On the CPU T may be a vector of lanes (src/cpu/lanes.h), which
// overloads the operators and the few functions below; hence no branches on values, only select().
#pragma once

#ifdef __CUDACC__
#define SPLAT_HD __host__ __device__ inline
#define SPLAT_HD_FORCED __host__ __device__ __forceinline__
#else
#define SPLAT_HD inline
#define SPLAT_HD_FORCED inline __attribute__((always_inline))  // for what is long, and must not become a call
#endif

#include <cmath>
#include <cstdint>

namespace splat {

SPLAT_HD float sqrt_(float x) { return ::sqrtf(x); }
SPLAT_HD double sqrt_(double x) { return ::sqrt(x); }
#ifdef SPLAT_SIMT
// In the emulator these are the CPU twin's (src/simt/scalar.cpp), so that a kernel can be compared with it bit for bit.
float exp_(float x);
float log2_(float x);
#else
SPLAT_HD float exp_(float x) { return ::expf(x); }
SPLAT_HD float log2_(float x) { return ::log2f(x); }
#endif
SPLAT_HD double exp_(double x) { return ::exp(x); }
SPLAT_HD float exp2_(float x) { return ::exp2f(x); }
SPLAT_HD double exp2_(double x) { return ::exp2(x); }
SPLAT_HD double log2_(double x) { return ::log2(x); }
SPLAT_HD float abs_(float x) { return ::fabsf(x); }
SPLAT_HD double abs_(double x) { return ::fabs(x); }

// 1 / x, by whatever is fastest at about full precision.
#ifdef __CUDA_ARCH__
__device__ inline float reciprocal_(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));  // within one unit in the last place
  return y;
}
#else
SPLAT_HD float reciprocal_(float x) { return 1.0f / x; }
#endif
SPLAT_HD double reciprocal_(double x) { return 1.0 / x; }

// min and max return the second operand when either is NaN, as the SSE/AVX instructions do.
template <class T>
SPLAT_HD T min_(T a, T b) { return a < b ? a : b; }
template <class T>
SPLAT_HD T max_(T a, T b) { return a > b ? a : b; }

template <class T>
SPLAT_HD T select(bool mask, T yes, T no) { return mask ? yes : no; }

template <class T>
SPLAT_HD T square(T x) { return x * x; }
template <class T>
SPLAT_HD T dot3(const T* a, const T* b) { return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]; }
template <class T>
SPLAT_HD T clamp_(T x, T low, T high) { return min_(max_(x, low), high); }

constexpr double kLog2E = 1.4426950408889634;

}  // namespace splat
