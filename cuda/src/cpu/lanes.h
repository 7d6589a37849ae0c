// Lanes<T, W>: W numbers that the math/ templates take for one. The only file with compiler-specific vector code.
//
// A Lanes wider than a machine register is a pair of halves, down to the register width of the instruction set that
// the including file is compiled for. Without FMA (the portable build) every operation rounds as in scalar code.
#pragma once
#include <cstring>
#include <limits>
#include <type_traits>

#include "../../math/elementary.h"

#if defined(__AVX512F__) && defined(__AVX512DQ__)
#include <immintrin.h>
#define SPLAT_VECTOR_BYTES 64
#elif defined(__AVX2__)
#include <immintrin.h>
#define SPLAT_VECTOR_BYTES 32
#else
#if defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#define SPLAT_VECTOR_BYTES 16
#endif

#define SPLAT_INLINE inline __attribute__((always_inline))

namespace splat {
template <class T>
struct IntFor;
template <>
struct IntFor<float> {
  using type = int32_t;
};
template <>
struct IntFor<double> {
  using type = int64_t;
};

template <class T, int W, bool Native = (W * sizeof(T) <= SPLAT_VECTOR_BYTES)>
struct Lanes;
template <class T, int W, bool Native = (W * sizeof(T) <= SPLAT_VECTOR_BYTES)>
struct LaneMask;

// ---- masks -------------------------------------------------------------------------------------------------------

template <class T, int W>
struct LaneMask<T, W, true> {
  typedef typename IntFor<T>::type Raw __attribute__((vector_size(W * sizeof(T))));
  Raw v;
  friend SPLAT_INLINE LaneMask operator&(LaneMask a, LaneMask b) { return {a.v & b.v}; }
  friend SPLAT_INLINE LaneMask operator|(LaneMask a, LaneMask b) { return {a.v | b.v}; }
  SPLAT_INLINE uint32_t bits() const {
#if defined(__AVX2__)
    if constexpr (sizeof(T) == 4 && W == 8) return uint32_t(_mm256_movemask_ps((__m256)v));
    if constexpr (sizeof(T) == 8 && W == 4) return uint32_t(_mm256_movemask_pd((__m256d)v));
#endif
#if defined(__SSE2__)
    if constexpr (sizeof(T) == 4 && W == 4) return uint32_t(_mm_movemask_ps((__m128)v));
    if constexpr (sizeof(T) == 8 && W == 2) return uint32_t(_mm_movemask_pd((__m128d)v));
#elif defined(__aarch64__)
    if constexpr (sizeof(T) == 4 && W == 4) return vaddvq_u32(vandq_u32((uint32x4_t)v, (uint32x4_t){1, 2, 4, 8}));
#endif
    uint32_t out = 0;
    for (int i = 0; i < W; ++i) out |= uint32_t(v[i] & 1) << i;
    return out;
  }
};
template <class T, int W>
struct LaneMask<T, W, false> {
  using Half = LaneMask<T, W / 2>;
  Half lo, hi;
  friend SPLAT_INLINE LaneMask operator&(LaneMask a, LaneMask b) { return {a.lo & b.lo, a.hi & b.hi}; }
  friend SPLAT_INLINE LaneMask operator|(LaneMask a, LaneMask b) { return {a.lo | b.lo, a.hi | b.hi}; }
  SPLAT_INLINE uint32_t bits() const { return lo.bits() | (hi.bits() << (W / 2)); }
};
#if SPLAT_VECTOR_BYTES == 64
template <>
struct LaneMask<float, 16, true> {
  __mmask16 v;
  friend SPLAT_INLINE LaneMask operator&(LaneMask a, LaneMask b) { return {__mmask16(a.v & b.v)}; }
  friend SPLAT_INLINE LaneMask operator|(LaneMask a, LaneMask b) { return {__mmask16(a.v | b.v)}; }
  SPLAT_INLINE uint32_t bits() const { return v; }
};
#endif
template <class T, int W>
SPLAT_INLINE bool any(LaneMask<T, W> m) { return m.bits() != 0; }

// ---- numbers -----------------------------------------------------------------------------------------------------

template <class T, int W>
struct Lanes<T, W, true> {
  typedef T Raw __attribute__((vector_size(W * sizeof(T))));
  typedef typename IntFor<T>::type IntRaw __attribute__((vector_size(W * sizeof(T))));
  using Mask = LaneMask<T, W>;
  static constexpr bool kNative = true;
  Raw v;
  Lanes() = default;
  SPLAT_INLINE Lanes(Raw raw) : v(raw) {}
  template <class S, class = typename std::enable_if<std::is_arithmetic<S>::value>::type>
  SPLAT_INLINE Lanes(S x) : v(broadcast(T(x))) {}
  // The intrinsics let a number in memory be broadcast by the load itself.
  static SPLAT_INLINE Raw broadcast(T x) {
#if SPLAT_VECTOR_BYTES == 64
    if constexpr (sizeof(T) == 4 && W == 16) return (Raw)_mm512_set1_ps(x);
#elif SPLAT_VECTOR_BYTES == 32
    if constexpr (sizeof(T) == 4 && W == 8) return (Raw)_mm256_set1_ps(x);
#endif
    return Raw{} + x;
  }
  static SPLAT_INLINE Lanes load(const T* p) {
    Lanes r;
    std::memcpy(&r.v, p, sizeof(Raw));
    return r;
  }
  SPLAT_INLINE void store(T* p) const { std::memcpy(p, &v, sizeof(Raw)); }
  friend SPLAT_INLINE Lanes operator+(Lanes a, Lanes b) { return {a.v + b.v}; }
  friend SPLAT_INLINE Lanes operator-(Lanes a, Lanes b) { return {a.v - b.v}; }
  friend SPLAT_INLINE Lanes operator*(Lanes a, Lanes b) { return {a.v * b.v}; }
  friend SPLAT_INLINE Lanes operator/(Lanes a, Lanes b) { return {a.v / b.v}; }
  friend SPLAT_INLINE Lanes operator-(Lanes a) { return {-a.v}; }
  SPLAT_INLINE Lanes& operator+=(Lanes b) { return v += b.v, *this; }
  SPLAT_INLINE Lanes& operator-=(Lanes b) { return v -= b.v, *this; }
#if SPLAT_VECTOR_BYTES == 64
#define SPLAT_COMPARE(op, code)                                                          \
  friend SPLAT_INLINE Mask operator op(Lanes a, Lanes b) {                               \
    if constexpr (sizeof(T) == 4 && W == 16) {                                           \
      return {_mm512_cmp_ps_mask(__m512(a.v), __m512(b.v), code)};                       \
    } else {                                                                             \
      return {(typename Mask::Raw)(a.v op b.v)};                                         \
    }                                                                                    \
  }
#else
#define SPLAT_COMPARE(op, code) \
  friend SPLAT_INLINE Mask operator op(Lanes a, Lanes b) { return {(typename Mask::Raw)(a.v op b.v)}; }
#endif
  SPLAT_COMPARE(<, _CMP_LT_OQ)
  SPLAT_COMPARE(<=, _CMP_LE_OQ)
  SPLAT_COMPARE(>, _CMP_GT_OQ)
  SPLAT_COMPARE(>=, _CMP_GE_OQ)
#undef SPLAT_COMPARE
};
template <class T, int W>
struct Lanes<T, W, false> {
  using Half = Lanes<T, W / 2>;
  using Mask = LaneMask<T, W>;
  static constexpr bool kNative = false;
  Half lo, hi;
  Lanes() = default;
  SPLAT_INLINE Lanes(Half a, Half b) : lo(a), hi(b) {}
  template <class S, class = typename std::enable_if<std::is_arithmetic<S>::value>::type>
  SPLAT_INLINE Lanes(S x) : lo(x), hi(x) {}
  static SPLAT_INLINE Lanes load(const T* p) { return {Half::load(p), Half::load(p + W / 2)}; }
  SPLAT_INLINE void store(T* p) const { lo.store(p), hi.store(p + W / 2); }
#define SPLAT_BINARY(op) \
  friend SPLAT_INLINE Lanes operator op(Lanes a, Lanes b) { return {a.lo op b.lo, a.hi op b.hi}; }
  SPLAT_BINARY(+)
  SPLAT_BINARY(-)
  SPLAT_BINARY(*)
  SPLAT_BINARY(/)
#undef SPLAT_BINARY
  friend SPLAT_INLINE Lanes operator-(Lanes a) { return {-a.lo, -a.hi}; }
  SPLAT_INLINE Lanes& operator+=(Lanes b) { return lo += b.lo, hi += b.hi, *this; }
  SPLAT_INLINE Lanes& operator-=(Lanes b) { return lo -= b.lo, hi -= b.hi, *this; }
#define SPLAT_COMPARE(op) \
  friend SPLAT_INLINE Mask operator op(Lanes a, Lanes b) { return {a.lo op b.lo, a.hi op b.hi}; }
  SPLAT_COMPARE(<)
  SPLAT_COMPARE(<=)
  SPLAT_COMPARE(>)
  SPLAT_COMPARE(>=)
#undef SPLAT_COMPARE
};

// ---- functions that math/ and the drivers call ---------------------------------------------------------------------

template <class T, int W>
SPLAT_INLINE Lanes<T, W> select(LaneMask<T, W> m, Lanes<T, W> yes, Lanes<T, W> no) {
  if constexpr (!Lanes<T, W>::kNative) {
    return {select(m.lo, yes.lo, no.lo), select(m.hi, yes.hi, no.hi)};
#if SPLAT_VECTOR_BYTES == 64
  } else if constexpr (sizeof(T) == 4 && W == 16) {
    return {(typename Lanes<T, W>::Raw)_mm512_mask_blend_ps(m.v, __m512(no.v), __m512(yes.v))};
#elif SPLAT_VECTOR_BYTES == 32
  } else if constexpr (sizeof(T) == 4 && W == 8) {
    return {(typename Lanes<T, W>::Raw)_mm256_blendv_ps(__m256(no.v), __m256(yes.v), (__m256)m.v)};
#endif
  } else {
    return {m.v ? yes.v : no.v};
  }
}
// The numbers whose mask is set, 0 in the other lanes.
template <class T, int W>
SPLAT_INLINE Lanes<T, W> select_or_zero(LaneMask<T, W> m, Lanes<T, W> yes) {
  if constexpr (!Lanes<T, W>::kNative) {
    return {select_or_zero(m.lo, yes.lo), select_or_zero(m.hi, yes.hi)};
#if SPLAT_VECTOR_BYTES == 64
  } else if constexpr (sizeof(T) == 4 && W == 16) {
    return {(typename Lanes<T, W>::Raw)_mm512_maskz_mov_ps(m.v, __m512(yes.v))};
#endif
  } else {
    using Raw = typename Lanes<T, W>::Raw;
    return {(Raw)(m.v & (decltype(m.v))yes.v)};
  }
}
template <class T, int W>
SPLAT_INLINE Lanes<T, W> min_(Lanes<T, W> a, Lanes<T, W> b) {
#if SPLAT_VECTOR_BYTES == 64
  if constexpr (sizeof(T) == 4 && W == 16) {
    return {(typename Lanes<T, W>::Raw)_mm512_min_ps(__m512(a.v), __m512(b.v))};
  } else
#elif SPLAT_VECTOR_BYTES == 32
  if constexpr (sizeof(T) == 4 && W == 8) {
    return {(typename Lanes<T, W>::Raw)_mm256_min_ps(__m256(a.v), __m256(b.v))};
  } else
#endif
  if constexpr (!Lanes<T, W>::kNative) {
    return {min_(a.lo, b.lo), min_(a.hi, b.hi)};
  } else
    return select(a < b, a, b);
}
template <class T, int W>
SPLAT_INLINE Lanes<T, W> max_(Lanes<T, W> a, Lanes<T, W> b) {
#if SPLAT_VECTOR_BYTES == 64
  if constexpr (sizeof(T) == 4 && W == 16) {
    return {(typename Lanes<T, W>::Raw)_mm512_max_ps(__m512(a.v), __m512(b.v))};
  } else
#elif SPLAT_VECTOR_BYTES == 32
  if constexpr (sizeof(T) == 4 && W == 8) {
    return {(typename Lanes<T, W>::Raw)_mm256_max_ps(__m256(a.v), __m256(b.v))};
  } else
#endif
  if constexpr (!Lanes<T, W>::kNative) {
    return {max_(a.lo, b.lo), max_(a.hi, b.hi)};
  } else
    return select(a > b, a, b);
}
template <class T, int W>
SPLAT_INLINE Lanes<T, W> abs_(Lanes<T, W> a) {
  if constexpr (!Lanes<T, W>::kNative) {
    return {abs_(a.lo), abs_(a.hi)};
  } else {
    using L = Lanes<T, W>;
    using Int = typename L::IntRaw;
    constexpr auto kMagnitude = std::numeric_limits<typename IntFor<T>::type>::max();  // all bits but the sign
    return {(typename L::Raw)((Int)a.v & (Int{} + kMagnitude))};
  }
}

// Applies a scalar function to each lane; for what no vector instruction does and no hot path needs.
template <class T, int W, class F>
SPLAT_INLINE Lanes<T, W> each(Lanes<T, W> a, F f) {
  T x[W];
  a.store(x);
  for (int i = 0; i < W; ++i) x[i] = f(x[i]);
  return Lanes<T, W>::load(x);
}

template <class T, int W>
SPLAT_INLINE Lanes<T, W> sqrt_(Lanes<T, W> a) {
  if constexpr (!Lanes<T, W>::kNative) {
    return {sqrt_(a.lo), sqrt_(a.hi)};
#if SPLAT_VECTOR_BYTES == 64
  } else if constexpr (sizeof(T) == 4 && W == 16) {
    return {(typename Lanes<T, W>::Raw)_mm512_sqrt_ps(__m512(a.v))};
#elif SPLAT_VECTOR_BYTES == 32
  } else if constexpr (sizeof(T) == 4 && W == 8) {
    return {(typename Lanes<T, W>::Raw)_mm256_sqrt_ps(__m256(a.v))};
#elif defined(__SSE2__)
  } else if constexpr (sizeof(T) == 4 && W == 4) {
    return {(typename Lanes<T, W>::Raw)_mm_sqrt_ps(__m128(a.v))};
#elif defined(__aarch64__)
  } else if constexpr (sizeof(T) == 4 && W == 4) {
    return {(typename Lanes<T, W>::Raw)vsqrtq_f32((float32x4_t)a.v)};
#endif
  } else {
    return each(a, [](T x) { return splat::sqrt_(x); });
  }
}

// 1 / x for normal x. A division stalls AVX-512 for sixteen cycles; an estimate of 14 bits and a Newton step do not.
template <class T, int W>
SPLAT_INLINE Lanes<T, W> reciprocal_(Lanes<T, W> x) {
  return Lanes<T, W>(1) / x;
}

// The polynomials of math/elementary.h, a register at a time.
template <int W>
struct Bits<Lanes<float, W, true>> {
  using L = Lanes<float, W>;
  using Int = typename L::IntRaw;
  static SPLAT_INLINE Int of(L x) { return (Int)x.v; }
  static SPLAT_INLINE L number(Int bits) { return {(typename L::Raw)bits}; }
  static SPLAT_INLINE L converted(Int i) { return {__builtin_convertvector(i, typename L::Raw)}; }
  static SPLAT_INLINE Int plus(Int a, Int b) { return a + b; }
  static SPLAT_INLINE Int minus(Int a, Int b) { return a - b; }
  static SPLAT_INLINE Int left(Int bits, int by) { return bits << by; }
};
#define SPLAT_ELEMENTARY(name, polynomial, of_double)                   \
  template <int W>                                                      \
  SPLAT_INLINE Lanes<float, W> name(Lanes<float, W> x) {                \
    if constexpr (!Lanes<float, W>::kNative) {                          \
      return {name(x.lo), name(x.hi)};                                  \
    } else {                                                            \
      return polynomial(x);                                             \
    }                                                                   \
  }                                                                     \
  template <int W>                                                      \
  SPLAT_INLINE Lanes<double, W> name(Lanes<double, W> x) {              \
    return each(x, [](double v) { return splat::of_double(v); });       \
  }
SPLAT_ELEMENTARY(exp2_bounded, exp2_polynomial, exp2_)
SPLAT_ELEMENTARY(exp_, exp_polynomial, exp_)
SPLAT_ELEMENTARY(log2_, log2_polynomial, log2_)
SPLAT_ELEMENTARY(atan_rest, atan_rest_polynomial, atan_rest)
#undef SPLAT_ELEMENTARY

#if SPLAT_VECTOR_BYTES == 32
// All bits of the first `count` of eight lanes.
SPLAT_INLINE __m256i first_lanes(int count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
#endif

// The first `count` of sixteen numbers; the other lanes are 0 when loaded and stay in memory as they are when stored.
template <class T>
SPLAT_INLINE Lanes<T, 16> load_first(const T* p, int count) {
#if SPLAT_VECTOR_BYTES == 64
  if constexpr (sizeof(T) == 4) {
    return {(typename Lanes<T, 16>::Raw)_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1u), p)};
  }
#elif SPLAT_VECTOR_BYTES == 32
  if constexpr (sizeof(T) == 4) {
    using Raw = typename Lanes<T, 8>::Raw;
    return {Lanes<T, 8>((Raw)_mm256_maskload_ps(p, first_lanes(count))),
            Lanes<T, 8>((Raw)_mm256_maskload_ps(p + 8, first_lanes(count - 8)))};
  }
#endif
  T x[16] = {};
  for (int i = 0; i < count; ++i) x[i] = p[i];
  return Lanes<T, 16>::load(x);
}
template <class T>
SPLAT_INLINE void store_first(Lanes<T, 16> a, T* p, int count) {
#if SPLAT_VECTOR_BYTES == 64
  if constexpr (sizeof(T) == 4) {
    _mm512_mask_storeu_ps(p, __mmask16((1u << count) - 1u), __m512(a.v));
    return;
  }
#elif SPLAT_VECTOR_BYTES == 32
  if constexpr (sizeof(T) == 4) {
    _mm256_maskstore_ps(p, first_lanes(count), __m256(a.lo.v));
    _mm256_maskstore_ps(p + 8, first_lanes(count - 8), __m256(a.hi.v));
    return;
  }
#endif
  T x[16];
  a.store(x);
  for (int i = 0; i < count; ++i) p[i] = x[i];
}

// Sixteen consecutive numbers of an array and those up to sixteen before and after them; the array begins and ends with
// sixteen numbers that advance() does not stop at. AVX-512 moves lanes between registers: a load across a cache line
// takes as long as two.
template <class T>
struct Neighbours {
  const T* at;
#if SPLAT_VECTOR_BYTES == 64
  __m512 left, middle, right;
#endif
  SPLAT_INLINE explicit Neighbours(const T* array) : at(array) {
#if SPLAT_VECTOR_BYTES == 64
    if constexpr (sizeof(T) == 4) middle = _mm512_loadu_ps(array), right = _mm512_loadu_ps(array + 16);
#endif
  }
  SPLAT_INLINE void advance() {
    at += 16;
#if SPLAT_VECTOR_BYTES == 64
    if constexpr (sizeof(T) == 4) left = middle, middle = right, right = _mm512_loadu_ps(at + 16);
#endif
  }
  // The sixteen numbers that begin `by` numbers from here.
  template <int by>
  SPLAT_INLINE Lanes<T, 16> shifted() const {
#if SPLAT_VECTOR_BYTES == 64
    if constexpr (sizeof(T) == 4) {
      if constexpr (by == 0) return {(typename Lanes<T, 16>::Raw)middle};
      const auto bits = [](__m512 x) { return _mm512_castps_si512(x); };
      const __m512i lanes = by < 0 ? _mm512_alignr_epi32(bits(middle), bits(left), by < 0 ? 16 + by : 0)
                                   : _mm512_alignr_epi32(bits(right), bits(middle), by < 0 ? 0 : by);
      return {(typename Lanes<T, 16>::Raw)_mm512_castsi512_ps(lanes)};
    }
#endif
    return Lanes<T, 16>::load(at + by);
  }
};

// Sixteen bytes as numbers.
template <class T>
SPLAT_INLINE Lanes<T, 16> load_bytes(const uint8_t* p) {
#if SPLAT_VECTOR_BYTES == 64
  if constexpr (sizeof(T) == 4) {
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
    return {(typename Lanes<T, 16>::Raw)_mm512_cvtepi32_ps(wide)};
  }
#elif SPLAT_VECTOR_BYTES == 32
  if constexpr (sizeof(T) == 4) {
    const auto eight = [](const uint8_t* q) {
      const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)q));
      return Lanes<T, 8>((typename Lanes<T, 8>::Raw)_mm256_cvtepi32_ps(wide));
    };
    return {eight(p), eight(p + 8)};
  }
#endif
  T x[16];
  for (int i = 0; i < 16; ++i) x[i] = T(p[i]);
  return Lanes<T, 16>::load(x);
}

// Lane i takes p[index[i]].
template <class T, int W>
SPLAT_INLINE Lanes<T, W> gather(const T* p, const int32_t* index) {
#if SPLAT_VECTOR_BYTES == 64
  if constexpr (sizeof(T) == 4 && W == 16) {
    // Sixteen loads are as fast as the gather instruction where that is fast, and faster elsewhere.
    const __m256 lo = _mm256_setr_ps(p[index[0]], p[index[1]], p[index[2]], p[index[3]], p[index[4]], p[index[5]],
                                     p[index[6]], p[index[7]]);
    const __m256 hi = _mm256_setr_ps(p[index[8]], p[index[9]], p[index[10]], p[index[11]], p[index[12]], p[index[13]],
                                     p[index[14]], p[index[15]]);
    return {(typename Lanes<T, W>::Raw)_mm512_insertf32x8(_mm512_castps256_ps512(lo), hi, 1)};
  }
#endif
  if constexpr (!Lanes<T, W>::kNative) {
    return {gather<T, W / 2>(p, index), gather<T, W / 2>(p, index + W / 2)};
  }
#if SPLAT_VECTOR_BYTES == 32
  // Eight loads are as fast as the gather instruction where that is fast, and faster elsewhere.
  if constexpr (sizeof(T) == 4 && W == 8) {
    return {(typename Lanes<T, W>::Raw)_mm256_setr_ps(p[index[0]], p[index[1]], p[index[2]], p[index[3]], p[index[4]],
                                                      p[index[5]], p[index[6]], p[index[7]])};
  }
#endif
  T x[W];
  for (int i = 0; i < W; ++i) x[i] = p[index[i]];
  return Lanes<T, W>::load(x);
}

#if SPLAT_VECTOR_BYTES == 32
// Swaps rows and columns of eight vectors of eight lanes.
template <class T>
SPLAT_INLINE void transpose_8(Lanes<T, 8>* m) {
  __m256 a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_ps(__m256(m[i].v), __m256(m[i + 1].v));
    a[i + 1] = _mm256_unpackhi_ps(__m256(m[i].v), __m256(m[i + 1].v));
  }
  for (int i = 0; i < 8; i += 4) {
    for (int k = 0; k < 2; ++k) {
      b[i + 2 * k] = _mm256_shuffle_ps(a[i + k], a[i + k + 2], 0x44);
      b[i + 2 * k + 1] = _mm256_shuffle_ps(a[i + k], a[i + k + 2], 0xee);
    }
  }
  for (int k = 0; k < 4; ++k) {
    m[k] = {(typename Lanes<T, 8>::Raw)_mm256_permute2f128_ps(b[k], b[4 + k], 0x20)};
    m[4 + k] = {(typename Lanes<T, 8>::Raw)_mm256_permute2f128_ps(b[k], b[4 + k], 0x31)};
  }
}
#endif

// Swaps rows and columns of sixteen vectors of sixteen lanes.
template <class T>
SPLAT_INLINE void transpose_16(Lanes<T, 16>* m) {
#if SPLAT_VECTOR_BYTES == 64
  if constexpr (sizeof(T) == 4) {
    __m512 a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
      a[i] = _mm512_unpacklo_ps(__m512(m[i].v), __m512(m[i + 1].v));
      a[i + 1] = _mm512_unpackhi_ps(__m512(m[i].v), __m512(m[i + 1].v));
    }
    for (int i = 0; i < 16; i += 4) {
      for (int k = 0; k < 2; ++k) {
        const __m512d low = _mm512_castps_pd(a[i + k]), high = _mm512_castps_pd(a[i + k + 2]);
        b[i + 2 * k] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
        b[i + 2 * k + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
      }
    }
    // Lane 4 q + r of b[4 i + k] now holds row 4 i + r of column 4 q + k; what is left is a 4x4 of 128-bit parts.
    for (int k = 0; k < 4; ++k) {
      const __m512 t0 = _mm512_shuffle_f32x4(b[k], b[4 + k], 0x88), t1 = _mm512_shuffle_f32x4(b[k], b[4 + k], 0xdd);
      const __m512 t2 = _mm512_shuffle_f32x4(b[8 + k], b[12 + k], 0x88),
                   t3 = _mm512_shuffle_f32x4(b[8 + k], b[12 + k], 0xdd);
      m[k] = {(typename Lanes<T, 16>::Raw)_mm512_shuffle_f32x4(t0, t2, 0x88)};
      m[8 + k] = {(typename Lanes<T, 16>::Raw)_mm512_shuffle_f32x4(t0, t2, 0xdd)};
      m[4 + k] = {(typename Lanes<T, 16>::Raw)_mm512_shuffle_f32x4(t1, t3, 0x88)};
      m[12 + k] = {(typename Lanes<T, 16>::Raw)_mm512_shuffle_f32x4(t1, t3, 0xdd)};
    }
    return;
  }
#elif SPLAT_VECTOR_BYTES == 32
  if constexpr (sizeof(T) == 4) {
    Lanes<T, 8> quarter[4][8];
    for (int i = 0; i < 8; ++i) {
      quarter[0][i] = m[i].lo, quarter[1][i] = m[i].hi;
      quarter[2][i] = m[8 + i].lo, quarter[3][i] = m[8 + i].hi;
    }
    for (auto& q : quarter) transpose_8(q);
    for (int i = 0; i < 8; ++i) {
      m[i] = {quarter[0][i], quarter[2][i]};
      m[8 + i] = {quarter[1][i], quarter[3][i]};
    }
    return;
  }
#endif
  T rows[16][16], column[16];
  for (int i = 0; i < 16; ++i) m[i].store(rows[i]);
  for (int j = 0; j < 16; ++j) {
    for (int i = 0; i < 16; ++i) column[i] = rows[i][j];
    m[j] = Lanes<T, 16>::load(column);
  }
}

// Sum of all lanes in a fixed order: halves are added until one number is left.
template <class T, int W>
SPLAT_INLINE T sum(Lanes<T, W> a) {
  T x[W];
  a.store(x);
  for (int width = W / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) x[i] += x[i + width];
  return x[0];
}

// out[k] = sum of all lanes of values[k], for k < N <= 16; the rest of out is zero.
template <int N, class T, int W>
SPLAT_INLINE void sum_each(const Lanes<T, W>* values, T* out) {
#if SPLAT_VECTOR_BYTES == 64
  if constexpr (sizeof(T) == 4 && W == 16) {
    // Two vectors fold into one at each level, halves first as in sum(), until lane k holds the sum of vector k.
    const auto at = [&](int k) { return k < N ? __m512(values[k].v) : _mm512_setzero_ps(); };
    __m512 fours[4];
    for (int r = 0; r < 4; ++r) {
      const __m512 a = at(r), b = at(r + 4), c = at(r + 8), d = at(r + 12);
      const __m512 ab = _mm512_shuffle_f32x4(a, b, 0x44) + _mm512_shuffle_f32x4(a, b, 0xee);
      const __m512 cd = _mm512_shuffle_f32x4(c, d, 0x44) + _mm512_shuffle_f32x4(c, d, 0xee);
      fours[r] = _mm512_shuffle_f32x4(ab, cd, 0x88) + _mm512_shuffle_f32x4(ab, cd, 0xdd);
    }
    const auto pairs = [](__m512 a, __m512 b) {
      const __m512d p = _mm512_castps_pd(a), q = _mm512_castps_pd(b);
      return _mm512_castpd_ps(_mm512_unpacklo_pd(p, q)) + _mm512_castpd_ps(_mm512_unpackhi_pd(p, q));
    };
    const __m512 low = pairs(fours[0], fours[1]), high = pairs(fours[2], fours[3]);
    _mm512_storeu_ps(out, _mm512_shuffle_ps(low, high, 0x88) + _mm512_shuffle_ps(low, high, 0xdd));
    return;
  }
#elif SPLAT_VECTOR_BYTES == 32
  if constexpr (sizeof(T) == 4 && W == 8) {
    // The same by eight vectors at once.
    const auto at = [&](int k) { return k < N ? __m256(values[k].v) : _mm256_setzero_ps(); };
    for (int first = 0; first < 16; first += 8) {
      __m256 fours[4];
      for (int r = 0; r < 4; ++r) {
        const __m256 a = at(first + r), b = at(first + r + 4);
        fours[r] = _mm256_permute2f128_ps(a, b, 0x20) + _mm256_permute2f128_ps(a, b, 0x31);
      }
      const __m256 low = _mm256_shuffle_ps(fours[0], fours[1], 0x44) + _mm256_shuffle_ps(fours[0], fours[1], 0xee);
      const __m256 high = _mm256_shuffle_ps(fours[2], fours[3], 0x44) + _mm256_shuffle_ps(fours[2], fours[3], 0xee);
      _mm256_storeu_ps(out + first, _mm256_shuffle_ps(low, high, 0x88) + _mm256_shuffle_ps(low, high, 0xdd));
    }
    return;
  }
#endif
  if constexpr (!Lanes<T, W>::kNative) {
    Lanes<T, W / 2> halves[N];
    for (int k = 0; k < N; ++k) halves[k] = values[k].lo + values[k].hi;
    sum_each<N>(halves, out);
  } else {
    for (int k = 0; k < 16; ++k) out[k] = k < N ? sum(values[k]) : T(0);
  }
}

#if SPLAT_VECTOR_BYTES == 32
// The positions of the bits that are set in each byte, in order, a byte each.
struct BitPositions {
  int64_t of[256];
  constexpr BitPositions() : of() {
    for (int byte = 0; byte < 256; ++byte) {
      uint64_t positions = 0;
      int count = 0;
      for (int bit = 0; bit < 8; ++bit)
        if (byte >> bit & 1) positions |= uint64_t(bit) << (8 * count++);
      of[byte] = int64_t(positions);
    }
  }
};
inline constexpr BitPositions kBitPositions;
#endif

// Writes base + i for each i < 16 whose masks[i] has a bit of `bits`, in order; returns how many. May write 16 numbers.
inline int compress_16(const uint16_t* masks, uint32_t bits, int32_t base, int32_t* out) {
#if SPLAT_VECTOR_BYTES == 64
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)masks));
  const __mmask16 hit = _mm512_test_epi32_mask(wide, _mm512_set1_epi32(int(bits)));
  const __m512i index = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  _mm512_storeu_si512(out, _mm512_maskz_compress_epi32(hit, _mm512_add_epi32(index, _mm512_set1_epi32(base))));
  return __builtin_popcount(hit);
#elif SPLAT_VECTOR_BYTES == 32
  const __m256i mine = _mm256_and_si256(_mm256_loadu_si256((const __m256i*)masks), _mm256_set1_epi16(short(bits)));
  const __m256i none = _mm256_cmpeq_epi16(mine, _mm256_setzero_si256());
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(none), _mm256_extracti128_si256(none, 1));
  const uint32_t hit = ~uint32_t(_mm_movemask_epi8(bytes)) & 0xffffu;
  const auto positions = [&](uint32_t byte, int32_t from) {
    const __m256i wide = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(kBitPositions.of[byte]));
    return _mm256_add_epi32(wide, _mm256_set1_epi32(from));
  };
  const int low = __builtin_popcount(hit & 0xffu);
  _mm256_storeu_si256((__m256i*)out, positions(hit & 0xffu, base));
  _mm256_storeu_si256((__m256i*)(out + low), positions(hit >> 8, base + 8));
  return low + __builtin_popcount(hit >> 8);
#else
  int count = 0;
  for (int i = 0; i < 16; ++i) {
    out[count] = base + i;
    count += (masks[i] & bits) != 0;
  }
  return count;
#endif
}

}  // namespace splat
