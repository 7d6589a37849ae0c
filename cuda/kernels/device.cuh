// All that a kernel may use beyond math/; helpers for warps and blocks. The tests' emulator (tests/kernels/emulator) has a
// cuda_runtime.h of its own, which defines SPLAT_SHARED and SPLAT_LAUNCH.
#pragma once

#include <cuda_runtime.h>

#include "../include/splat.h"
#include "../math/elementary.h"

// An array shared by the block. T is plain data and COUNT a constant; the emulator fills it with NaN before each block.
#ifndef SPLAT_SHARED
#define SPLAT_SHARED(T, name, COUNT) __shared__ T name[COUNT]
#endif

#define SPLAT_DEVICE __device__ __forceinline__

namespace splat {

#ifdef SPLAT_TWIN_MATH
SPLAT_DEVICE float exp2_bounded(float x) { return exp2_polynomial(x); }
#else
// 2^x for x in [-126, 127]; two units in the last place.
SPLAT_DEVICE float exp2_bounded(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif

namespace gpu {

// Static shared memory that a block may have. More has to be dynamic, with cudaFuncSetAttribute at the launch.
constexpr int kMostShared = 48 * 1024;
constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int kWarp = 32;

SPLAT_DEVICE int lane_id() { return int(threadIdx.x) & (kWarp - 1); }
SPLAT_DEVICE int warp_id() { return int(threadIdx.x) / kWarp; }

// A view with more tile intersections than max_isects has no lists: nothing that reads them may run.
SPLAT_DEVICE bool overflowed(const int64_t* counters) {
  return counters != nullptr && counters[SPLAT_COUNT_OVERFLOW] != 0;
}

// The sum of a full warp in every lane, always in the same order: lanes 16 apart first, neighbours last.
template <class T>
SPLAT_DEVICE T warp_sum(T value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kFullWarp, value, offset);
  return value;
}

// The sum of the lanes up to and including this one.
template <class T>
SPLAT_DEVICE T warp_inclusive_scan(T value) {
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const T before = __shfl_up_sync(kFullWarp, value, offset);
    if (lane_id() >= offset) value += before;
  }
  return value;
}

// The sum of the threads before this one; *total, where asked for, is the sum of all. Every thread of the block calls
// it; the block is whole warps.
template <class T>
SPLAT_DEVICE T block_exclusive_scan(T value, T* total = nullptr) {
  SPLAT_SHARED(T, warp_totals, kWarp);
  const T through = warp_inclusive_scan(value);
  __syncthreads();  // the last call's totals have been read
  if (lane_id() == kWarp - 1) warp_totals[warp_id()] = through;
  __syncthreads();
  T before = T(0), all = T(0);
  for (int w = 0; w < int(blockDim.x) / kWarp; ++w) {
    if (w == warp_id()) before = all;
    all += warp_totals[w];
  }
  if (total != nullptr) *total = all;
  return before + through - value;
}

// The sum of the block in every thread, in a fixed order. Every thread of the block calls it; the block is whole warps.
template <class T>
SPLAT_DEVICE T block_sum(T value) {
  SPLAT_SHARED(T, warp_totals, kWarp);
  const T mine = warp_sum(value);
  __syncthreads();  // the last call's totals have been read
  if (lane_id() == 0) warp_totals[warp_id()] = mine;
  __syncthreads();
  T all = T(0);
  for (int w = 0; w < int(blockDim.x) / kWarp; ++w) all += warp_totals[w];
  return all;
}

}  // namespace gpu
}  // namespace splat
