// The host/device seam: what a scalar type needs so that one formula serves float, double, SIMD lanes and CUDA threads.
//
// Every function in math/ is a template over T. On the CPU T may be a vector of lanes (src/cpu/lanes.h), which
// overloads the operators and the few functions here and in elementary.h; hence no branches on values, only select().
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

SPLAT_HD float abs_(float x) { return ::fabsf(x); }
SPLAT_HD double abs_(double x) { return ::fabs(x); }

// min and max return the second operand when either is NaN, as the SSE/AVX instructions do.
template <class T>
SPLAT_HD T min_(T a, T b) { return a < b ? a : b; }
template <class T>
SPLAT_HD T max_(T a, T b) { return a > b ? a : b; }

// The same for operands of which none is NaN; of zeros either sign. One instruction on a GPU.
template <class T>
SPLAT_HD T min_ordered(T a, T b) { return min_(a, b); }
template <class T>
SPLAT_HD T max_ordered(T a, T b) { return max_(a, b); }
#ifdef __CUDA_ARCH__
__device__ inline float min_ordered(float a, float b) { return fminf(a, b); }
__device__ inline float max_ordered(float a, float b) { return fmaxf(a, b); }
#endif

template <class T>
SPLAT_HD T select(bool mask, T yes, T no) { return mask ? yes : no; }

template <class T>
SPLAT_HD T square(T x) { return x * x; }
template <class T>
SPLAT_HD T dot3(const T* a, const T* b) { return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]; }
template <class T>
SPLAT_HD T clamp_(T x, T low, T high) { return min_(max_(x, low), high); }
template <class T>
SPLAT_HD T clamp_ordered(T x, T low, T high) { return min_ordered(max_ordered(x, low), high); }

constexpr double kLog2E = 1.4426950408889634;

}  // namespace splat
