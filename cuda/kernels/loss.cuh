// Kernels of L1 + SSIM and its gradient: docs/math.md 7, the same arithmetic in the same order as src/cpu/loss.cpp.
//
// An image's row is 3 W numbers, channels interleaved, so taps lie three numbers apart; of planes, kStep = 1, they are
// neighbours. Images of a stack lie one below the other, and each has strips of its own. A block walks down a strip of
// numbers, one column a thread. Each row comes in through shared memory, where the taps along x are; the eleven rows
// that the taps along y see stay in the thread's registers. So a number is filtered for the price of one dimension,
// and nothing of it touches device memory.
#pragma once

#include "../math/ssim.h"
#include "device.cuh"

namespace splat {
namespace gpu {

constexpr int kLossTaps = 2 * kSsimRadius + 1;
constexpr int kLossColumns = 192;            // numbers a strip is wide, and threads of its block
constexpr int kLossRows = 45;                // its height; with five more rows above and below five rounds of eleven
constexpr int kLossMoments = 4;
constexpr int kLossMaps = 3;  // derivatives by the filtered x, x^2 and xy
constexpr int kLossSumThreads = 256;

// Numbers to either side that a filter sees, and numbers of a row that a strip needs.
template <int kStep>
constexpr int kLossReach = kStep * kSsimRadius;
template <int kStep>
constexpr int kLossInput = kLossColumns + 2 * kLossReach<kStep>;

struct LossArrays {
  const float* image;       // [images, height, width]
  const void* target;       // uint8 or float, likewise
  float* maps;              // [kLossMaps, images, height, width]
  double* partials;         // [blocks, 2] sums of |x - y| and of SSIM
  const int64_t* counters;  // may be null
  int width, height;        // numbers a row, rows of an image
  int across, down;         // strips side by side, and below each other
  int images;
  int border;               // rows at each edge whose SSIM does not count, and as many pixels of a row

  // By the stack's rows, of which there are at most 2^31 - 1.
  SPLAT_DEVICE int64_t at(int y, int c) const { return int64_t(y) * width + c; }
  SPLAT_DEVICE int64_t size() const { return int64_t(height) * width * images; }
};

// The strip of this block, and the column of this thread in it. Rows are the stack's.
template <int kStep>
struct LossStrip {
  int first, column;  // columns: where the strip's input begins, kLossReach to its left; the thread's
  int top;            // of its image
  int y0, y1;
  SPLAT_DEVICE explicit LossStrip(const LossArrays& a)
      : first(int(blockIdx.x) % a.across * kLossColumns - kLossReach<kStep>),
        column(first + kLossReach<kStep> + int(threadIdx.x)), top(int(blockIdx.x) / a.across / a.down * a.height),
        y0(top + int(blockIdx.x) / a.across % a.down * kLossRows),
        y1(y0 - top + kLossRows < a.height ? y0 + kLossRows : top + a.height) {}
  SPLAT_DEVICE bool in_image(const LossArrays& a, int y) const { return y >= top && y - top < a.height; }
  // Whether the SSIM around the thread's number of row y is in the mean.
  SPLAT_DEVICE bool counts(const LossArrays& a, int y) const {
    const int margin = kStep * a.border;
    return y - top >= a.border && y - top < a.height - a.border && column >= margin && column < a.width - margin;
  }
  // Rows of input that come by: the strip's, and those that its taps see.
  SPLAT_DEVICE int rows() const { return y1 - y0 + 2 * kSsimRadius; }
};

SPLAT_DEVICE float loss_number(float x) { return x; }
SPLAT_DEVICE float loss_number(uint8_t x) { return float(x) * float(1.0 / 255.0); }

// The numbers that a thread brings of a row: its own place in the input, and one of the places beyond the last
// thread's. Outside the image lie zeros.
template <int kStep>
struct LossPair {
  float own, beyond;
  template <class T>
  SPLAT_DEVICE void load(const T* plane, const LossArrays& a, const LossStrip<kStep>& strip, int y) {
    const bool row = strip.in_image(a, y);
    const int c = strip.first + int(threadIdx.x), d = c + kLossColumns;
    own = row && c >= 0 && c < a.width ? loss_number(plane[a.at(y, c)]) : 0.0f;
    beyond =
        row && threadIdx.x < 2 * kLossReach<kStep> && d < a.width ? loss_number(plane[a.at(y, d)]) : 0.0f;
  }
  SPLAT_DEVICE void store(float* input) const {
    input[threadIdx.x] = own;
    if (threadIdx.x < 2 * kLossReach<kStep>) input[kLossColumns + threadIdx.x] = beyond;
  }
};

// The last eleven rows of N quantities, filtered along x; row i is in slot i mod 11. Slots are constants where the
// loops over them are unrolled, so that the window stays in registers.
template <int N>
struct LossWindow {
  float rows[kLossTaps][N];
  // Quantity n filtered both ways at the row five above the newest, which is in `slot`.
  SPLAT_DEVICE float filtered(int slot, int n) const {
    const int centre = slot + kLossTaps - kSsimRadius;
    float sum = rows[centre % kLossTaps][n] * float(ssim_tap(0));
#pragma unroll
    for (int k = 1; k <= kSsimRadius; ++k)
      sum += (rows[(centre - k) % kLossTaps][n] + rows[(centre + k) % kLossTaps][n]) * float(ssim_tap(k));
    return sum;
  }
};

// Filters x, y, (x + y)^2 and (x - y)^2 along x, around the thread's number.
template <int kStep>
SPLAT_DEVICE void filter_moments(const float* x, const float* y, float* sums) {
  const float w = float(ssim_tap(0));
  sums[0] = x[0] * w, sums[1] = y[0] * w;
  sums[2] = square(x[0] + y[0]) * w, sums[3] = square(x[0] - y[0]) * w;
#pragma unroll
  for (int k = 1; k <= kSsimRadius; ++k) {
    const float tap = float(ssim_tap(k));
    const float x0 = x[-kStep * k], x1 = x[kStep * k], y0 = y[-kStep * k], y1 = y[kStep * k];
    sums[0] += (x0 + x1) * tap;
    sums[1] += (y0 + y1) * tap;
    sums[2] += (square(x0 + y0) + square(x1 + y1)) * tap;
    sums[3] += (square(x0 - y0) + square(x1 - y1)) * tap;
  }
}

template <int kStep>
SPLAT_DEVICE float filter_row(const float* x) {
  float sum = x[0] * float(ssim_tap(0));
#pragma unroll
  for (int k = 1; k <= kSsimRadius; ++k) sum += (x[-kStep * k] + x[kStep * k]) * float(ssim_tap(k));
  return sum;
}

// Sums of |x - y| and of SSIM, and, kGradient, the derivative maps. A block a strip, kLossColumns threads.
// Rows go through two buffers in turn, so that one barrier a row is enough; the next one is fetched meanwhile.
template <class Target, int kStep, bool kGradient>
__global__ void __launch_bounds__(kLossColumns) loss_statistics(LossArrays a) {
  constexpr int kInput = kLossInput<kStep>;
  SPLAT_SHARED(float, input, 4 * kInput);
  if (overflowed(a.counters)) return;
  const LossStrip<kStep> strip(a);
  const Target* target = static_cast<const Target*>(a.target);
  const int rows = strip.rows(), here = kLossReach<kStep> + int(threadIdx.x);
  LossWindow<kLossMoments> window;
  LossPair<kStep> x, t;
  float sum_l1 = 0.0f, sum_ssim = 0.0f;
  x.load(a.image, a, strip, strip.y0 - kSsimRadius);
  t.load(target, a, strip, strip.y0 - kSsimRadius);
  for (int round = 0; round < rows; round += kLossTaps) {
#pragma unroll
    for (int slot = 0; slot < kLossTaps; ++slot) {
      const int i = round + slot;
      if (i >= rows) break;
      float* images = input + (i & 1) * 2 * kInput;
      x.store(images);
      t.store(images + kInput);
      __syncthreads();
      const int newest = strip.y0 - kSsimRadius + i, y = newest - kSsimRadius;
      if (i + 1 < rows) {
        x.load(a.image, a, strip, newest + 1);
        t.load(target, a, strip, newest + 1);
      }
      if (newest >= strip.y0 && newest < strip.y1) sum_l1 += abs_(images[here] - images[kInput + here]);
      filter_moments<kStep>(images + here, images + kInput + here, window.rows[slot]);
      if (y < strip.y0 || strip.column >= a.width) continue;
      float f[kLossMoments], derivative[kLossMaps];
#pragma unroll
      for (int n = 0; n < kLossMoments; ++n) f[n] = window.filtered(slot, n);
      const float squares = (f[2] + f[3]) * 0.5f, xy = (f[2] - f[3]) * 0.25f;
      const float ssim = ssim_pixel_vjp(f[0], f[1], squares, xy, &derivative[0], &derivative[1], &derivative[2]);
      const bool counts = strip.counts(a, y);
      if (counts) sum_ssim += ssim;
      if constexpr (kGradient) {
        float* map = a.maps + a.at(y, strip.column);
        for (int m = 0; m < kLossMaps; ++m) map[m * a.size()] = counts ? derivative[m] : 0.0f;
      }
    }
  }
  // A thread adds at most 45 numbers in float; from here on doubles keep what they are given.
  const double l1 = block_sum(double(sum_l1)), ssim = block_sum(double(sum_ssim));
  if (threadIdx.x != 0) return;
  a.partials[2 * int64_t(blockIdx.x)] = l1;
  a.partials[2 * int64_t(blockIdx.x) + 1] = ssim;
}

// The means from the strips' sums, always in the same order. One block of kLossSumThreads threads.
__global__ void __launch_bounds__(kLossSumThreads)
    loss_means(const double* partials, int64_t strips, double l1_count, double ssim_count, const int64_t* counters,
               double* means) {
  if (overflowed(counters)) return;
  double l1 = 0, ssim = 0;
  for (int64_t s = threadIdx.x; s < strips; s += kLossSumThreads) l1 += partials[2 * s], ssim += partials[2 * s + 1];
  l1 = block_sum(l1), ssim = block_sum(ssim);
  if (threadIdx.x == 0) means[0] = l1 / l1_count, means[1] = ssim / ssim_count;
}

// dL/dimage from the derivative maps, filtered once more: the filter is its own adjoint. A block a strip.
// Four blocks at least on a multiprocessor: without being asked the compiler takes registers for three.
template <class Target, int kStep>
__global__ void __launch_bounds__(kLossColumns, 4)
    loss_gradient(LossArrays a, float l1_scale, float ssim_scale, float* v_image) {
  constexpr int kInput = kLossInput<kStep>;
  SPLAT_SHARED(float, input, 2 * kLossMaps * kInput);
  if (overflowed(a.counters)) return;
  const LossStrip<kStep> strip(a);
  const Target* target = static_cast<const Target*>(a.target);
  const int rows = strip.rows(), here = kLossReach<kStep> + int(threadIdx.x);
  LossWindow<kLossMaps> window;
  LossPair<kStep> maps[kLossMaps];
#pragma unroll
  for (int m = 0; m < kLossMaps; ++m) maps[m].load(a.maps + m * a.size(), a, strip, strip.y0 - kSsimRadius);
  for (int round = 0; round < rows; round += kLossTaps) {
#pragma unroll
    for (int slot = 0; slot < kLossTaps; ++slot) {
      const int i = round + slot;
      if (i >= rows) break;
      float* buffer = input + (i & 1) * kLossMaps * kInput;
#pragma unroll
      for (int m = 0; m < kLossMaps; ++m) maps[m].store(buffer + m * kInput);
      __syncthreads();
      const int newest = strip.y0 - kSsimRadius + i, y = newest - kSsimRadius;
      const bool inside = y >= strip.y0 && strip.column < a.width;
      // Fetched before the filters run, which need none of it.
      const int64_t at = a.at(inside ? y : 0, strip.column);
      const float x = inside ? a.image[at] : 0.0f, t = inside ? loss_number(target[at]) : 0.0f;
#pragma unroll
      for (int m = 0; m < kLossMaps; ++m) {
        if (i + 1 < rows) maps[m].load(a.maps + m * a.size(), a, strip, newest + 1);
        window.rows[slot][m] = filter_row<kStep>(buffer + m * kInput + here);
      }
      if (!inside) continue;
      const float ssim =
          window.filtered(slot, 0) + 2.0f * x * window.filtered(slot, 1) + t * window.filtered(slot, 2);
      const float sign = select(x > t, 1.0f, select(x < t, -1.0f, 0.0f));
      v_image[at] = sign * l1_scale + ssim * ssim_scale;
    }
  }
}

}  // namespace gpu
}  // namespace splat
