// A stable radix sort of (key, value) pairs whose number only the device knows: histogram, scan, scatter for each
// digit.
//
// A block takes kSortItems consecutive pairs. For every digit value, the histograms of all blocks are scanned in block
// order; within a block pairs keep their order, warp by warp. So equal keys stay as they were, and nothing depends on
// the order in which blocks run. A block sorts its pairs by digit in shared memory first, so that pairs of a digit
// value leave it side by side.
#pragma once
#include "device.cuh"

namespace splat {
namespace gpu {

constexpr int kDigitBits = 8;
constexpr int kDigits = 1 << kDigitBits;
constexpr int kSortThreads = 256;
constexpr int kSortWarps = kSortThreads / kWarp;
constexpr int kSortRounds = 12;  // pairs a thread
constexpr int kSortItems = kSortThreads * kSortRounds;
static_assert(kSortThreads == kDigits, "a thread looks after one digit value");
static_assert(kSortItems <= 1 << 16, "places within a block are stored in 16 bits");

template <class Value>
struct SortPass {
  const uint32_t* keys;
  const Value* values;
  uint32_t* keys_out;
  Value* values_out;
  const int64_t* count;     // on the device
  const int64_t* counters;  // as in SplatFrame
  uint32_t* histograms;     // [kDigits, blocks], then where each block's pairs begin within their digit value
  uint32_t* totals;         // [kDigits]
  int64_t blocks;           // by capacity
  int shift;
  uint32_t *low_out, *high_out;  // of 64-bit values: the two halves go here and not to values_out, unless null
};

SPLAT_DEVICE uint32_t digit_of(uint32_t key, int shift) { return (key >> shift) & (kDigits - 1); }

// Pair of round r within the block: a warp's pairs of a round are neighbours, a warp's rounds follow each other.
SPLAT_DEVICE int sort_item(int round) { return (warp_id() * kSortRounds + round) * kWarp + lane_id(); }

// Pairs of this block.
SPLAT_DEVICE int sort_items(int64_t count) {
  const int64_t left = count - int64_t(blockIdx.x) * kSortItems;
  return left < kSortItems ? int(left) : kSortItems;
}

template <class Value>
__global__ void __launch_bounds__(kSortThreads) sort_histogram(SortPass<Value> pass) {
  if (overflowed(pass.counters)) return;
  SPLAT_SHARED(unsigned, histogram, kDigits);
  const int items = sort_items(*pass.count);
  if (items <= 0) return;
  histogram[threadIdx.x] = 0;
  __syncthreads();
  const uint32_t* keys = pass.keys + int64_t(blockIdx.x) * kSortItems;
#pragma unroll
  for (int r = 0; r < kSortRounds; ++r) {
    const int i = r * kSortThreads + int(threadIdx.x);
    if (i < items) atomicAdd(&histogram[digit_of(keys[i], pass.shift)], 1u);
  }
  __syncthreads();
  pass.histograms[threadIdx.x * pass.blocks + blockIdx.x] = histogram[threadIdx.x];
}

// One block a digit value: the pairs of earlier blocks that have it.
template <class Value>
__global__ void __launch_bounds__(kSortThreads) sort_scan(SortPass<Value> pass) {
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

// Lanes of a full warp with this lane's digit; none for a lane without a pair.
SPLAT_DEVICE unsigned same_digit(uint32_t digit, bool valid) {
  const unsigned peers = __match_any_sync(kFullWarp, valid ? digit : unsigned(kDigits));
  return valid ? peers : 0u;
}

template <class Value>
__global__ void __launch_bounds__(kSortThreads) sort_scatter(SortPass<Value> pass) {
  if (overflowed(pass.counters)) return;
  SPLAT_SHARED(uint32_t, sorted_keys, kSortItems);
  SPLAT_SHARED(Value, sorted_values, kSortItems);
  SPLAT_SHARED(uint16_t, warp_starts, kSortWarps * kDigits);
  SPLAT_SHARED(uint32_t, places, kDigits);  // of a digit value's pairs: place in the output less place in the block
  const int items = sort_items(*pass.count);
  if (items <= 0) return;
  for (int w = 0; w < kSortWarps; ++w) warp_starts[w * kDigits + threadIdx.x] = 0;
  __syncthreads();

  // Rank of each pair among those of its digit value in its warp.
  const int64_t block_first = int64_t(blockIdx.x) * kSortItems;
  uint16_t* const mine = warp_starts + warp_id() * kDigits;
  uint32_t keys[kSortRounds];
  uint16_t ranks[kSortRounds];
#pragma unroll
  for (int r = 0; r < kSortRounds; ++r) {
    const int i = sort_item(r);
    keys[r] = i < items ? pass.keys[block_first + i] : 0u;
  }
#pragma unroll
  for (int r = 0; r < kSortRounds; ++r) {
    const uint32_t digit = digit_of(keys[r], pass.shift);
    const unsigned peers = same_digit(digit, sort_item(r) < items);
    const unsigned earlier = unsigned(__popc(peers & ((1u << lane_id()) - 1u)));
    const unsigned before = peers != 0 ? mine[digit] : 0u;
    __syncwarp();  // all have read before the first lane of each digit counts its peers
    if (peers != 0 && earlier == 0) mine[digit] = uint16_t(before + unsigned(__popc(peers)));
    __syncwarp();
    ranks[r] = uint16_t(before + earlier);
  }
  __syncthreads();

  // Where each warp's pairs of each digit value begin in the block, and in the output.
  unsigned in_block = 0;
  for (int w = 0; w < kSortWarps; ++w) in_block += warp_starts[w * kDigits + threadIdx.x];
  unsigned at = block_exclusive_scan(in_block);
  places[threadIdx.x] = block_exclusive_scan(pass.totals[threadIdx.x]) +
                        pass.histograms[threadIdx.x * pass.blocks + blockIdx.x] - at;
  for (int w = 0; w < kSortWarps; ++w) {
    const unsigned here = warp_starts[w * kDigits + threadIdx.x];
    warp_starts[w * kDigits + threadIdx.x] = uint16_t(at);
    at += here;
  }
  __syncthreads();

#pragma unroll
  for (int r = 0; r < kSortRounds; ++r) {
    const int i = sort_item(r);
    if (i >= items) continue;
    const unsigned place = ranks[r] + mine[digit_of(keys[r], pass.shift)];
    sorted_keys[place] = keys[r];
    sorted_values[place] = pass.values[block_first + i];
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kSortRounds; ++r) {
    const int i = r * kSortThreads + int(threadIdx.x);
    if (i >= items) continue;
    const uint32_t key = sorted_keys[i], place = places[digit_of(key, pass.shift)] + uint32_t(i);
    pass.keys_out[place] = key;
    if (sizeof(Value) == 8 && pass.low_out != nullptr) {
      pass.low_out[place] = uint32_t(sorted_values[i]);
      pass.high_out[place] = uint32_t(uint64_t(sorted_values[i]) >> 32);
    } else {
      pass.values_out[place] = sorted_values[i];
    }
  }
}

}  // namespace gpu
}  // namespace splat
