// Kernels of L1 + SSIM and its gradient: docs/math.md 7, the same arithmetic in the same order as src/cpu/loss.cpp.
//
// An image's row is 3 W numbers, channels interleaved, or W. Images of a stack lie one below the other, and each has
// strips of its own. A block walks down a strip. Each row comes in through shared memory, a plane a channel, where the
// taps along x are; the eleven rows that the taps along y see stay in the threads' registers. So a number is filtered
// for the price of one dimension, and nothing of it touches device memory.
//
// A thread filters two neighbouring pixels of one channel: of the 22 numbers under their taps 12 differ. Neighbouring
// threads have the channels of a pair of pixels, then the next pair, and the derivative maps lie in this order.
#pragma once

#include "../math/ssim.h"
#include "device.cuh"

namespace splat {
namespace gpu {

constexpr int kLossTaps = 2 * kSsimRadius + 1;
constexpr int kLossThreads = 96;                // of a block
constexpr int kLossColumns = 2 * kLossThreads;  // numbers a strip is wide
constexpr int kLossRows = 45;                   // its height; with five more rows above and below five rounds of eleven
constexpr int kLossMoments = 4;
constexpr int kLossMaps = 3;  // derivatives by the filtered x, x^2 and xy
constexpr int kLossSumThreads = 256;

constexpr int kLossReach = (kSsimRadius + 1) / 2;  // pairs of pixels to either side that a filter sees
template <int kChannels>
constexpr int kLossPairs = kLossThreads / kChannels;  // of pixels, that a strip is wide
// Pairs from one channel's plane to the next in shared memory: 11 more than a multiple of 32. Thread 3 p + c is at pair
// p of plane c; three times that place differs from the thread's number by multiples of 32, so that neighbouring
// threads meet different banks.
template <int kChannels>
constexpr int kLossPlane = (kLossPairs<kChannels> + 2 * kLossReach + 20) / 32 * 32 + 11;

struct LossArrays {
  const float* image;       // [images, height, width]
  const void* target;       // uint8 or float, likewise
  float4* mean_square;      // [images, height, records] derivatives by the filtered x and x^2, of a pair of pixels
  float2* product;          // likewise, by the filtered xy
  double* partials;         // [blocks, 2] sums of |x - y| and of SSIM
  const int64_t* counters;  // may be null
  int width, height;        // numbers a row, rows of an image
  int records;              // of a row of maps: [pairs, channels]; they are 0 beyond an odd width
  int across, down;         // strips side by side, and below each other
  int images;
  int border;               // rows at each edge whose SSIM does not count, and as many pixels of a row
};

// Consecutive ones of the rows that a block sees.
struct LossRows {
  int from, count;
  SPLAT_DEVICE bool have(int i) const { return unsigned(i - from) < unsigned(count); }
};

// The strip of this block. Rows y are the stack's, of which there are at most 2^31 - 1. Rows i are those of input that
// come by, 0 to rows - 1: the strip's, and five more above and below; with row i, the filters reach row y0 + i - 10.
struct LossStrip {
  int first;     // number of a row where it begins
  int y0, rows;
  int above;     // rows of its image above it
  SPLAT_DEVICE explicit LossStrip(const LossArrays& a)
      : first(int(blockIdx.x) % a.across * kLossColumns), above(int(blockIdx.x) / a.across % a.down * kLossRows) {
    y0 = int(blockIdx.x) / a.across / a.down * a.height + above;
    rows = (above + kLossRows < a.height ? kLossRows : a.height - above) + 2 * kSsimRadius;
  }
  // Rows of input that are in the image.
  SPLAT_DEVICE LossRows in_image(const LossArrays& a) const {
    const int from = kSsimRadius - above, end = from + a.height;
    return {from, (end < rows ? end : rows) - from};
  }
  // Those with which the filters reach a row whose SSIM is in the mean.
  SPLAT_DEVICE LossRows counted(const LossArrays& a) const {
    return {a.border - above + 2 * kSsimRadius, a.height - 2 * a.border};
  }
  // Where the thread's record of the maps lies in a row; it may be beyond the image.
  SPLAT_DEVICE int record() const { return first / 2 + int(threadIdx.x); }
};

SPLAT_DEVICE float loss_number(float x) { return x; }
SPLAT_DEVICE float loss_number(uint8_t x) { return float(x) * float(1.0 / 255.0); }

// The numbers of an input row that a thread brings, kLossThreads apart; the last ones only some threads. Outside the
// image lie zeros.
template <class Target, int kChannels>
struct LossFetch {
  static constexpr int kEach = 3, kSlots = kLossColumns + 2 * kChannels * kSsimRadius;
  static_assert(kSlots <= kEach * kLossThreads && kLossThreads % kChannels == 0, "threads bring a whole row");
  const LossRows rows;
  const float* image;    // of the next row
  const Target* target;
  float x[kEach];
  Target t[kEach];
  bool inside[kEach];
  SPLAT_DEVICE LossFetch(const LossArrays& a, const LossStrip& strip) : rows(strip.in_image(a)) {
    const int c = strip.first - kChannels * kSsimRadius + int(threadIdx.x);
    const int64_t at = int64_t(strip.y0 - kSsimRadius) * a.width + c;
    image = a.image + at, target = static_cast<const Target*>(a.target) + at;
#pragma unroll
    for (int j = 0; j < kEach; ++j)
      x[j] = 0.0f, t[j] = 0, inside[j] = c + j * kLossThreads >= 0 && c + j * kLossThreads < a.width;
  }
  // Fetches the next row, row i.
  SPLAT_DEVICE void next(const LossArrays& a, int i) {
    const bool in_image = rows.have(i);
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      if (j + 1 == kEach && int(threadIdx.x) >= kSlots - j * kLossThreads) continue;
      if (!in_image)
        x[j] = 0.0f, t[j] = 0;
      else if (inside[j])
        x[j] = image[j * kLossThreads], t[j] = target[j * kLossThreads];
    }
    image += a.width, target += a.width;
  }
  // x and target of the row side by side, a plane a channel.
  SPLAT_DEVICE void store(float2* row) const {
    float2* mine = row + int(threadIdx.x) % kChannels * 2 * kLossPlane<kChannels> + int(threadIdx.x) / kChannels;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      if (j + 1 == kEach && int(threadIdx.x) >= kSlots - j * kLossThreads) continue;
      mine[j * (kLossThreads / kChannels)] = make_float2(x[j], loss_number(t[j]));
    }
  }
};

// The last eleven rows of N quantities of two pixels, filtered along x; row i is in slot i mod 11. Slots are constants
// where the loops over them are unrolled, so that the window stays in registers.
template <int N>
struct LossWindow {
  float rows[kLossTaps][N][2];
  // Quantity n of a pixel filtered both ways at the row five above the newest, which is in `slot`.
  SPLAT_DEVICE float filtered(int slot, int n, int pixel) const {
    const int centre = slot + kLossTaps - kSsimRadius;
    float sum = rows[centre % kLossTaps][n][pixel] * float(ssim_tap(0));
#pragma unroll
    for (int k = 1; k <= kSsimRadius; ++k) {
      const float above = rows[(centre - k) % kLossTaps][n][pixel], below = rows[(centre + k) % kLossTaps][n][pixel];
      sum += (above + below) * float(ssim_tap(k));
    }
    return sum;
  }
};

// Filters along x around the two pixels in the middle of twelve.
SPLAT_DEVICE void filter_pair(const float* x, float* sums) {
#pragma unroll
  for (int pixel = 0; pixel < 2; ++pixel) {
    const float* centre = x + kSsimRadius + pixel;
    float sum = centre[0] * float(ssim_tap(0));
#pragma unroll
    for (int k = 1; k <= kSsimRadius; ++k) sum += (centre[-k] + centre[k]) * float(ssim_tap(k));
    sums[pixel] = sum;
  }
}

// Sums of |x - y| and of SSIM, and, kGradient, the derivative maps. A block a strip, kLossThreads threads.
// Rows go through two buffers in turn, so that one barrier a row is enough; the next one is fetched meanwhile.
template <class Target, int kChannels, bool kGradient>
__global__ void __launch_bounds__(kLossThreads, 4) loss_statistics(LossArrays a) {
  constexpr int kRow = kChannels * kLossPlane<kChannels>;  // pairs of x and target
  SPLAT_SHARED(float4, input, 2 * kRow);
  if (overflowed(a.counters)) return;
  const LossStrip strip(a);
  const int pair = int(threadIdx.x) / kChannels, here = int(threadIdx.x) % kChannels * kLossPlane<kChannels> + pair;
  const bool inside = strip.record() < a.records;
  // Whether the SSIM around each of the two is in the mean, in the rows where any is.
  const LossRows counted_rows = strip.counted(a);
  const int pixel = strip.first / kChannels + 2 * pair, end = a.width / kChannels - a.border;
  const bool counted[2] = {pixel >= a.border && pixel < end, pixel + 1 >= a.border && pixel + 1 < end};
  float4* mean_square = a.mean_square + int64_t(strip.y0) * a.records + strip.record();
  float2* product = a.product + int64_t(strip.y0) * a.records + strip.record();
  LossWindow<kLossMoments> window;
  float sum_l1 = 0.0f, sum_ssim = 0.0f;
  LossFetch<Target, kChannels> fetch(a, strip);
  fetch.next(a, 0);
  for (int round = 0; round < strip.rows; round += kLossTaps) {
#pragma unroll
    for (int slot = 0; slot < kLossTaps; ++slot) {
      const int i = round + slot;
      if (i >= strip.rows) break;
      float4* buffer = input + (i & 1) * kRow;
      fetch.store(reinterpret_cast<float2*>(buffer));
      __syncthreads();
      fetch.next(a, i + 1);
      float x[kLossTaps + 1], t[kLossTaps + 1], plus[kLossTaps + 1], minus[kLossTaps + 1];
#pragma unroll
      for (int k = 0; k <= kLossTaps; k += 2) {
        const float4 two = buffer[here + k / 2];
        x[k] = two.x, t[k] = two.y, x[k + 1] = two.z, t[k + 1] = two.w;
      }
#pragma unroll
      for (int k = 0; k <= kLossTaps; ++k) plus[k] = square(x[k] + t[k]), minus[k] = square(x[k] - t[k]);
      if (i >= kSsimRadius && i < strip.rows - kSsimRadius)
        sum_l1 += abs_(x[kSsimRadius] - t[kSsimRadius]) + abs_(x[kSsimRadius + 1] - t[kSsimRadius + 1]);
      filter_pair(x, window.rows[slot][0]);
      filter_pair(t, window.rows[slot][1]);
      filter_pair(plus, window.rows[slot][2]);
      filter_pair(minus, window.rows[slot][3]);
      if (i < 2 * kSsimRadius || !inside) continue;
      const bool row_counts = counted_rows.have(i);
      float derivative[2][kLossMaps];
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        float f[kLossMoments];
#pragma unroll
        for (int n = 0; n < kLossMoments; ++n) f[n] = window.filtered(slot, n, p);
        const float squares = (f[2] + f[3]) * 0.5f, xy = (f[2] - f[3]) * 0.25f;
        float* d = derivative[p];
        const float ssim = ssim_pixel_vjp(f[0], f[1], squares, xy, &d[0], &d[1], &d[2]);
        const bool counts = row_counts && counted[p];
        if (counts) sum_ssim += ssim;
        for (int m = 0; m < kLossMaps; ++m) d[m] = counts ? d[m] : 0.0f;
      }
      if constexpr (kGradient) {
        *mean_square = make_float4(derivative[0][0], derivative[0][1], derivative[1][0], derivative[1][1]);
        *product = make_float2(derivative[0][2], derivative[1][2]);
        mean_square += a.records, product += a.records;
      }
    }
  }
  // A thread adds at most 90 numbers in float; from here on doubles keep what they are given.
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

// The derivative maps at a pair of pixels.
struct LossDerivatives {
  float4 mean_square = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float2 product = make_float2(0.0f, 0.0f);
  SPLAT_DEVICE void store(float4* to_mean_square, float2* to_product) const {
    *to_mean_square = mean_square, *to_product = product;
  }
};

// Along x: the twelve places around the thread's pair, of which its own are in registers.
SPLAT_DEVICE void filter_derivatives(const LossDerivatives& own, const float4* mean_square, const float2* product,
                                     float (*sums)[2]) {
  float taps[kLossMaps][kLossTaps + 1];
  const auto put = [&taps](int place, float mean, float square, float xy) {
    taps[0][place] = mean, taps[1][place] = square, taps[2][place] = xy;
  };
  // The outermost pairs have one pixel in reach.
  const float2 left = reinterpret_cast<const float2*>(mean_square - kLossReach)[1];
  const float2 right = reinterpret_cast<const float2*>(mean_square + kLossReach)[0];
  put(0, left.x, left.y, product[-kLossReach].y);
  put(kLossTaps, right.x, right.y, product[kLossReach].x);
#pragma unroll
  for (int k = 1 - kLossReach; k < kLossReach; ++k) {
    const float4 both = k == 0 ? own.mean_square : mean_square[k];
    const float2 xy = k == 0 ? own.product : product[k];
    put(kSsimRadius + 2 * k, both.x, both.y, xy.x);
    put(kSsimRadius + 2 * k + 1, both.z, both.w, xy.y);
  }
#pragma unroll
  for (int m = 0; m < kLossMaps; ++m) filter_pair(taps[m], sums[m]);
}

// dL/dimage from the derivative maps, filtered once more: the filter is its own adjoint. A block a strip.
// A warp's numbers of an image lie in 8 sectors, which each of its two loads and stores touches: once more than needed,
// but less work than an exchange between threads.
template <class Target, int kChannels>
__global__ void __launch_bounds__(kLossThreads, 4)
    loss_gradient(LossArrays a, float l1_scale, float ssim_scale, float* v_image) {
  constexpr int kPlane = kLossPlane<kChannels>, kRow = kChannels * kPlane, kBuffer = kRow + (kRow + 1) / 2;
  constexpr int kSide = kLossReach * kChannels;  // records to either side of the strip
  static_assert(2 * kSide <= kWarp, "a warp brings them");
  SPLAT_SHARED(float4, input, 2 * kBuffer);  // mean_square, then product
  if (overflowed(a.counters)) return;
  const LossStrip strip(a);
  const int thread = int(threadIdx.x);
  const auto place = [](int record) { return record % kChannels * kPlane + record / kChannels; };
  const int here = place(thread + kSide);
  // The record beside the strip that the thread brings.
  const int side = thread < kSide ? thread : thread + kLossThreads, side_here = place(side);
  const int apart = side - kSide - thread;
  const bool inside = strip.record() < a.records, brings = thread < 2 * kSide;
  const bool side_inside = strip.record() + apart >= 0 && strip.record() + apart < a.records;
  const LossRows in_image = strip.in_image(a);
  const int64_t at = int64_t(strip.y0 - kSsimRadius) * a.records + strip.record();
  const float4* mean_square = a.mean_square + at;
  const float2* product = a.product + at;
  LossDerivatives own, beside;
  const auto fetch = [&](int i) {
    own = beside = {};
    const bool row = in_image.have(i);
    if (row && inside) own.mean_square = *mean_square, own.product = *product;
    if (brings && row && side_inside) beside.mean_square = mean_square[apart], beside.product = product[apart];
    mean_square += a.records, product += a.records;
  };
  // The thread's two numbers.
  const int first = strip.first + thread / kChannels * 2 * kChannels + thread % kChannels;
  const bool second = first + kChannels < a.width;
  const int64_t number = int64_t(strip.y0) * a.width + first;
  const float* image = a.image + number;
  const Target* target = static_cast<const Target*>(a.target) + number;
  float* gradient = v_image + number;
  float x[2] = {};
  Target t[2] = {};
  LossWindow<kLossMaps> window;
  fetch(0);
  for (int round = 0; round < strip.rows; round += kLossTaps) {
#pragma unroll
    for (int slot = 0; slot < kLossTaps; ++slot) {
      const int i = round + slot;
      if (i >= strip.rows) break;
      float4* in = input + (i & 1) * kBuffer;
      own.store(in + here, reinterpret_cast<float2*>(in + kRow) + here);
      if (brings) beside.store(in + side_here, reinterpret_cast<float2*>(in + kRow) + side_here);
      __syncthreads();
      const LossDerivatives centre = own;
      fetch(i + 1);
      // Fetched before the filters run, which need none of it.
      const bool finishes = i >= 2 * kSsimRadius && inside;
      if (finishes) x[0] = image[0], t[0] = target[0];
      if (finishes && second) x[1] = image[kChannels], t[1] = target[kChannels];
      filter_derivatives(centre, in + here, reinterpret_cast<float2*>(in + kRow) + here, window.rows[slot]);
      if (!finishes) continue;
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        const float y = loss_number(t[p]);
        const float ssim =
            window.filtered(slot, 0, p) + 2.0f * x[p] * window.filtered(slot, 1, p) + y * window.filtered(slot, 2, p);
        const float l1 = select(x[p] > y, l1_scale, select(x[p] < y, -l1_scale, 0.0f));
        if (p == 0 || second) gradient[p * kChannels] = l1 + ssim * ssim_scale;
      }
      image += a.width, target += a.width, gradient += a.width;
    }
  }
}

}  // namespace gpu
}  // namespace splat
