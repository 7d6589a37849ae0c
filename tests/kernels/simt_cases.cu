// Kernels that use the emulator well, and kernels that do what it must not let pass. For test_simt.py.
#include <cstdio>
#include <exception>

#include "enter.h"

namespace splat {
namespace gpu {

// Reverses each block's 64 numbers through shared memory; without the barrier a thread reads what nobody has written.
template <bool kBarrier>
__global__ void reverse(const float* in, float* out) {
  SPLAT_SHARED(float, numbers, 64);
  const int64_t first = int64_t(blockIdx.x) * 64;
  numbers[threadIdx.x] = in[first + threadIdx.x];
  if (kBarrier) __syncthreads();
  out[first + threadIdx.x] = numbers[63 - threadIdx.x];
}

// out[0..6] of a thread: scan, its total, block sum, the next lane's number, ballot, lanes that agree, barrier's count.
__global__ void collectives(const int* in, int64_t* out) {
  const int x = in[threadIdx.x];
  int total;
  int64_t* mine = out + 8 * threadIdx.x;
  mine[0] = block_exclusive_scan(x, &total);
  mine[1] = total;
  mine[2] = block_sum(int64_t(x));
  mine[3] = __shfl_sync(kFullWarp, x, lane_id() + 1);
  mine[4] = __ballot_sync(kFullWarp, x % 2 == 0);
  mine[5] = __match_any_sync(kFullWarp, unsigned(x));
  mine[6] = __syncthreads_count(x > 3);
  mine[7] = __shfl_xor_sync(kFullWarp, __shfl_up_sync(kFullWarp, x, 1), 1);
}

__global__ void lonely_barrier(int* out) {
  if (threadIdx.x == 7) return;
  __syncthreads();
  out[threadIdx.x] = 1;
}

__global__ void two_barriers(int* out) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    out[0] = 1;
    __syncthreads();
  }
}

__global__ void outside_mask(int* out) { out[threadIdx.x] = __any_sync(0xffu, threadIdx.x == 3); }

__global__ void returned_lane(int* out) {
  if (threadIdx.x % 32 == 5) return;
  out[threadIdx.x] = __any_sync(kFullWarp, threadIdx.x == 3);
}

__global__ void parted_lanes(int* out) {
  if (threadIdx.x % 2 == 0)
    __syncwarp();
  else
    out[threadIdx.x] = __any_sync(kFullWarp, 1);
}

__global__ void too_much_shared(int* out) {
  SPLAT_SHARED(int, some, 8 * 1024);
  SPLAT_SHARED(int, more, 5 * 1024);
  some[0] = more[0] = out[0];
}

__global__ void beyond_shared(int* out) {
  SPLAT_SHARED(int, few, 4);
  few[threadIdx.x] = out[threadIdx.x];
}

// The order of arrival, which only the schedule decides.
__global__ void arrivals(unsigned* counter, int* out) {
  out[blockIdx.x * blockDim.x + threadIdx.x] = int(atomicAdd(counter, 1u));
}

__global__ void nothing(int*) {}

// Which lane of what comes back from an absent lane.
__global__ void absent_lane(float* out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0xffffu, 1.0f, 16);
}

void run(const SplatCall& call, int which, const void* in, void* out) {
  const cudaStream_t stream = stream_of(call);
  int* ints = static_cast<int*>(out);
  switch (which) {
    case 0: SPLAT_LAUNCH((reverse<true>), 4, 64, stream, static_cast<const float*>(in), static_cast<float*>(out)); break;
    case 1: SPLAT_LAUNCH((reverse<false>), 4, 64, stream, static_cast<const float*>(in), static_cast<float*>(out)); break;
    case 2: SPLAT_LAUNCH(collectives, 1, 128, stream, static_cast<const int*>(in), static_cast<int64_t*>(out)); break;
    case 3: SPLAT_LAUNCH(lonely_barrier, 1, 64, stream, ints); break;
    case 4: SPLAT_LAUNCH(two_barriers, 1, 64, stream, ints); break;
    case 5: SPLAT_LAUNCH(outside_mask, 1, 32, stream, ints); break;
    case 6: SPLAT_LAUNCH(returned_lane, 1, 32, stream, ints); break;
    case 7: SPLAT_LAUNCH(parted_lanes, 1, 32, stream, ints); break;
    case 8: SPLAT_LAUNCH(too_much_shared, 1, 32, stream, ints); break;
    case 9: SPLAT_LAUNCH(beyond_shared, 1, 5, stream, ints); break;
    case 10: SPLAT_LAUNCH(arrivals, 4, 64, stream, static_cast<unsigned*>(out), ints + 1); break;
    case 11: SPLAT_LAUNCH(nothing, 0, 32, stream, ints); break;
    case 12: SPLAT_LAUNCH(nothing, 1, 32, nullptr, ints); break;
    case 13: SPLAT_LAUNCH(nothing, 1, 2048, stream, ints); break;
    case 14: SPLAT_LAUNCH(absent_lane, 1, 32, stream, static_cast<float*>(out)); break;
    case 15: SPLAT_LAUNCH(nothing, int64_t(1) << 31, 32, stream, ints); break;
    default: check_cuda("cudaMemsetAsync", cudaMemsetAsync(out, 0, 64, nullptr)); break;
  }
}

}  // namespace gpu
}  // namespace splat

namespace {
char message[512];
}

// guarded: through the device guard, as every entry of the library; else straight on the current device.
extern "C" __attribute__((visibility("default"))) const char* run_case(int which, int device, void* stream,
                                                                       int guarded, const void* in, void* out) {
  SplatCall call = {};
  call.device = device;
  call.stream = stream;
  try {
    if (guarded) {
      splat::gpu::on_device(call, [&] { splat::gpu::run(call, which, in, out); });
    } else {
      simt::expect(device, static_cast<cudaStream_t>(stream));
      splat::gpu::run(call, which, in, out);
    }
  } catch (const std::exception& error) {
    std::snprintf(message, sizeof message, "%s", error.what());
    return message;
  }
  return "";
}
