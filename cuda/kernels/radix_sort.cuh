// A stable radix sort of (key, value) pairs whose number only the device knows: histogram, scan, scatter for each
// digit.
//
// A block takes kSortItems consecutive pairs. For every digit value, the histograms of all blocks are scanned in block
// order; within a block pairs keep their order, warp by warp. So equal keys stay as they were, and nothing depends on
// the order in which blocks run.
#pragma once
#include "device.cuh"

namespace splat {
namespace gpu {

constexpr int kDigitBits = 8;
constexpr int kDigits = 1 << kDigitBits;
constexpr int kSortThreads = 256;
constexpr int kSortWarps = kSortThreads / kWarp;
constexpr int kSortRounds = 8;  // pairs a thread
constexpr int kSortItems = kSortThreads * kSortRounds;
static_assert(kSortThreads == kDigits, "a thread looks after one digit value");

struct SortPass {
  const uint32_t *keys, *values;
  uint32_t *keys_out, *values_out;
  const int64_t* count;     // on the device
  const int64_t* counters;  // as in SplatFrame
  uint32_t* histograms;     // [kDigits, blocks], then where each block's pairs begin within their digit value
  uint32_t* totals;         // [kDigits]
  int64_t blocks;           // by capacity
  int shift;
};

SPLAT_DEVICE uint32_t digit_of(uint32_t key, int shift) { return (key >> shift) & (kDigits - 1); }

// Item of round r: a warp's items of a round are neighbours, a warp's rounds follow each other.
SPLAT_DEVICE int64_t sort_item(int64_t block, int round) {
  return block * kSortItems + (warp_id() * kSortRounds + round) * kWarp + lane_id();
}

__global__ void __launch_bounds__(kSortThreads) sort_histogram(SortPass pass) {
  if (overflowed(pass.counters)) return;
  SPLAT_SHARED(unsigned, histogram, kDigits);
  histogram[threadIdx.x] = 0;
  __syncthreads();
  const int64_t count = *pass.count;
  for (int r = 0; r < kSortRounds; ++r) {
    const int64_t i = sort_item(blockIdx.x, r);
    if (i < count) atomicAdd(&histogram[digit_of(pass.keys[i], pass.shift)], 1u);
  }
  __syncthreads();
  pass.histograms[threadIdx.x * pass.blocks + blockIdx.x] = histogram[threadIdx.x];
}

// One block a digit value: the pairs of earlier blocks that have it. Blocks beyond the last pair hold zeros.
__global__ void __launch_bounds__(kSortThreads) sort_scan(SortPass pass) {
  if (overflowed(pass.counters)) return;
  uint32_t* row = pass.histograms + int64_t(blockIdx.x) * pass.blocks;
  const int64_t used = (*pass.count + kSortItems - 1) / kSortItems;
  unsigned before = 0;
  for (int64_t first = 0; first < used; first += kSortThreads) {
    const int64_t b = first + threadIdx.x;
    const unsigned mine = b < used ? row[b] : 0u;
    unsigned total = 0;
    const unsigned rank = block_exclusive_scan(mine, &total);
    if (b < used) row[b] = before + rank;
    before += total;
  }
  if (threadIdx.x == 0) pass.totals[blockIdx.x] = before;
}

// Lanes of a full warp with this lane's digit.
SPLAT_DEVICE unsigned same_digit(uint32_t digit, bool valid) {
  const unsigned peers = __match_any_sync(kFullWarp, valid ? digit : unsigned(kDigits));
  return valid ? peers : 0u;
}

__global__ void __launch_bounds__(kSortThreads) sort_scatter(SortPass pass) {
  if (overflowed(pass.counters)) return;
  SPLAT_SHARED(unsigned, starts, kDigits);
  SPLAT_SHARED(unsigned, warp_counts, kSortWarps * kDigits);
  const int64_t count = *pass.count;
  starts[threadIdx.x] =
      block_exclusive_scan(pass.totals[threadIdx.x]) + pass.histograms[threadIdx.x * pass.blocks + blockIdx.x];
  for (int w = 0; w < kSortWarps; ++w) warp_counts[w * kDigits + threadIdx.x] = 0;
  __syncthreads();

  // How many of a digit value each warp has; the first lane of those that share it adds them up.
  unsigned* mine = warp_counts + warp_id() * kDigits;
  for (int r = 0; r < kSortRounds; ++r) {
    const int64_t i = sort_item(blockIdx.x, r);
    const bool valid = i < count;
    const uint32_t digit = valid ? digit_of(pass.keys[i], pass.shift) : 0u;
    const unsigned peers = same_digit(digit, valid);
    if (valid && __ffs(int(peers)) - 1 == lane_id()) mine[digit] += unsigned(__popc(peers));
    __syncwarp();
  }
  __syncthreads();
  unsigned at = starts[threadIdx.x];
  for (int w = 0; w < kSortWarps; ++w) {
    const unsigned here = warp_counts[w * kDigits + threadIdx.x];
    warp_counts[w * kDigits + threadIdx.x] = at;
    at += here;
  }
  __syncthreads();

  for (int r = 0; r < kSortRounds; ++r) {
    const int64_t i = sort_item(blockIdx.x, r);
    const bool valid = i < count;
    const uint32_t key = valid ? pass.keys[i] : 0u;
    const uint32_t digit = digit_of(key, pass.shift);
    const unsigned peers = same_digit(digit, valid);
    const unsigned rank = unsigned(__popc(peers & ((1u << lane_id()) - 1u)));
    const unsigned place = valid ? mine[digit] + rank : 0u;
    __syncwarp();  // all have read before the first lane of each digit moves it on
    if (valid) {
      pass.keys_out[place] = key;
      pass.values_out[place] = pass.values[i];
      if (rank == 0) mine[digit] += unsigned(__popc(peers));
    }
    __syncwarp();
  }
}

}  // namespace gpu
}  // namespace splat
