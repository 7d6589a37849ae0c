// Just enough of CUDA, under its header's name, to run the kernels on a CPU, one thread at a time, and to be strict about it. For tests only.
//
// Every CUDA thread is a fiber. A block runs alone; its threads switch only at barriers and warp operations, in an
// order that a seed shuffles. What real hardware would leave to chance is made to fail: shared memory starts as NaN, a
// barrier that not all threads reach or a warp operation without one of its lanes ends the launch with a message, and
// so does a launch on another device or stream than the call's.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <tuple>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

// ---- the runtime ---------------------------------------------------------------------------------------------------

typedef struct CUstream_st* cudaStream_t;
enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInsufficientDriver = 35,
  cudaErrorInvalidDeviceFunction = 98,
  cudaErrorInvalidDevice = 101,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorECCUncorrectable = 214,
  cudaErrorNvlinkUncorrectable = 220,
  cudaErrorUnsupportedPtxVersion = 222,
  cudaErrorIllegalAddress = 700,
  cudaErrorLaunchOutOfResources = 701,
  cudaErrorLaunchTimeout = 702,
  cudaErrorContextIsDestroyed = 709,
  cudaErrorAssert = 710,
  cudaErrorHardwareStackError = 714,
  cudaErrorIllegalInstruction = 715,
  cudaErrorMisalignedAddress = 716,
  cudaErrorInvalidAddressSpace = 717,
  cudaErrorInvalidPc = 718,
  cudaErrorLaunchFailure = 719,
  cudaErrorMpsClientTerminated = 810,
  cudaErrorExternalDevice = 911,
  cudaErrorUnknown = 999
};
enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor = 75, cudaDevAttrComputeCapabilityMinor = 76 };
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaPeekAtLastError();
cudaError_t cudaGetLastError();
const char* cudaGetErrorString(cudaError_t error);
const char* cudaGetErrorName(cudaError_t error);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDriverGetVersion(int* version);
#define CUDART_VERSION 13000
#define __CUDA_ARCH_LIST__ 800
#define cudaEnableDefault 0
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess = 0, cudaDriverEntryPointSymbolNotFound = 1 };
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version,
                                             unsigned long long flags, cudaDriverEntryPointQueryResult* = nullptr);
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream);

// ---- types and variables -------------------------------------------------------------------------------------------

struct alignas(8) float2 { float x, y; };
struct float3 { float x, y, z; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float3 make_float3(float x, float y, float z) { return {x, y, z}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace simt {

struct Index { unsigned x, y, z; };

}  // namespace simt

extern simt::Index threadIdx, blockIdx, blockDim, gridDim;

// ---- how the emulator is driven ------------------------------------------------------------------------------------

namespace simt {

// What a kernel did wrong.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Launches that follow must be on this device, made current, and on this stream.
void expect(int device, cudaStream_t stream);

typedef void (*Body)(const void* arguments);
void launch_body(const char* kernel, unsigned blocks, int threads, cudaStream_t stream, Body body,
                 const void* arguments);

// Arguments are copied once, as a launch does, and again for each thread, as parameters by value are.
template <class... Parameters, class... Arguments>
void launch(const char* name, unsigned blocks, int threads, cudaStream_t stream, void (*kernel)(Parameters...),
            const Arguments&... arguments) {
  using Packed = std::pair<void (*)(Parameters...), std::tuple<std::remove_cv_t<Parameters>...>>;
  static_assert((std::is_trivially_copyable<std::remove_cv_t<Parameters>>::value && ...), "parameters are plain data");
  const Packed packed(kernel, std::tuple<std::remove_cv_t<Parameters>...>(arguments...));
  const Body body = [](const void* memory) {
    const Packed& p = *static_cast<const Packed*>(memory);
    std::apply(p.first, p.second);
  };
  launch_body(name, blocks, threads, stream, body, &packed);
}

// Where a declaration of shared memory lies in the block that runs now.
struct SharedSlot {
  uint64_t block = 0;
  void* memory = nullptr;
};
void* shared_memory(SharedSlot& slot, size_t bytes, size_t alignment, const char* name);

enum class Op { kSyncWarp, kBallot, kAny, kAll, kShuffle, kShuffleUp, kShuffleDown, kShuffleXor, kMatch };
enum class Barrier { kSync, kOr, kCount };
uint64_t warp_operation(Op op, unsigned mask, uint64_t value, int argument, int width, const char* file, int line);
int block_barrier(Barrier kind, int predicate, const char* file, int line);

template <class T>
T shuffle(Op op, unsigned mask, T value, int argument, int width, const char* file, int line) {
  static_assert(std::is_arithmetic<T>::value && sizeof(T) >= 4 && sizeof(T) <= 8, "shuffles move 4 or 8 bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = warp_operation(op, mask, bits, argument, width, file, line);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace simt

#define SPLAT_SHARED(T, name, COUNT)                                                                    \
  static_assert(std::is_trivially_copyable<T>::value && (COUNT) > 0, "shared arrays are plain data");   \
  static simt::SharedSlot name##_slot;                                                                  \
  T* const name = static_cast<T*>(simt::shared_memory(name##_slot, sizeof(T) * (COUNT), alignof(T), #name))

// As in src/cuda/launch.h.
#define SPLAT_LAUNCH(kernel, blocks, threads, stream, ...)                                              \
  do {                                                                                                  \
    const int64_t splat_blocks = (blocks);                                                              \
    if (splat_blocks > 0) {                                                                             \
      simt::launch(#kernel, splat::gpu::grid_of(#kernel, splat_blocks), threads, stream, kernel,        \
                   __VA_ARGS__);                                                                        \
      splat::gpu::check_launch(#kernel);                                                                \
    }                                                                                                   \
  } while (0)
#define SPLAT_EXPECT(device, stream) simt::expect(device, stream)

// ---- intrinsics ----------------------------------------------------------------------------------------------------

#define SIMT_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(SIMT_SITE) { simt::block_barrier(simt::Barrier::kSync, 0, file, line); }
inline int __syncthreads_or(int predicate, SIMT_SITE) {
  return simt::block_barrier(simt::Barrier::kOr, predicate, file, line);
}
inline int __syncthreads_count(int predicate, SIMT_SITE) {
  return simt::block_barrier(simt::Barrier::kCount, predicate, file, line);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, SIMT_SITE) {
  simt::warp_operation(simt::Op::kSyncWarp, mask, 0, 0, 32, file, line);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, SIMT_SITE) {
  return unsigned(simt::warp_operation(simt::Op::kBallot, mask, predicate != 0, 0, 32, file, line));
}
inline int __any_sync(unsigned mask, int predicate, SIMT_SITE) {
  return int(simt::warp_operation(simt::Op::kAny, mask, predicate != 0, 0, 32, file, line));
}
inline int __all_sync(unsigned mask, int predicate, SIMT_SITE) {
  return int(simt::warp_operation(simt::Op::kAll, mask, predicate != 0, 0, 32, file, line));
}
inline unsigned __match_any_sync(unsigned mask, unsigned value, SIMT_SITE) {
  return unsigned(simt::warp_operation(simt::Op::kMatch, mask, value, 0, 32, file, line));
}
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, SIMT_SITE) {
  return simt::shuffle(simt::Op::kShuffle, mask, value, source, width, file, line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, SIMT_SITE) {
  return simt::shuffle(simt::Op::kShuffleUp, mask, value, int(delta), width, file, line);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, SIMT_SITE) {
  return simt::shuffle(simt::Op::kShuffleDown, mask, value, int(delta), width, file, line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, SIMT_SITE) {
  return simt::shuffle(simt::Op::kShuffleXor, mask, value, bits, width, file, line);
}
#undef SIMT_SITE

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(unsigned(x)); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll((unsigned long long)x); }
inline unsigned __brev(unsigned x) {
  unsigned y = 0;
  for (int i = 0; i < 32; ++i) y |= (x >> i & 1u) << (31 - i);
  return y;
}
template <class To, class From>
To simt_bits(From from) {
  To to;
  static_assert(sizeof to == sizeof from, "");
  std::memcpy(&to, &from, sizeof to);
  return to;
}
inline unsigned __float_as_uint(float x) { return simt_bits<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return simt_bits<float>(x); }
inline int __float_as_int(float x) { return simt_bits<int>(x); }
inline float __int_as_float(int x) { return simt_bits<float>(x); }
template <class T>
T __ldg(const T* p) { return *p; }
inline void __threadfence() {}

// One thread runs at a time and switches nowhere else, so plain reads and writes are atomic.
#define SIMT_ATOMIC(name, T, expression)   \
  inline T name(T* address, T value) {     \
    const T old = *address;                \
    *address = (T)(expression);            \
    return old;                            \
  }
#define SIMT_ATOMICS(T)                                       \
  SIMT_ATOMIC(atomicMax, T, old < value ? value : old)        \
  SIMT_ATOMIC(atomicMin, T, value < old ? value : old)        \
  SIMT_ATOMIC(atomicOr, T, old | value)                       \
  SIMT_ATOMIC(atomicAnd, T, old & value)                      \
  SIMT_ATOMIC(atomicExch, T, value)                           \
  inline T atomicCAS(T* address, T compare, T value) {        \
    const T old = *address;                                   \
    if (old == compare) *address = value;                     \
    return old;                                               \
  }
SIMT_ATOMICS(int)
SIMT_ATOMICS(unsigned)
SIMT_ATOMICS(unsigned long long)
SIMT_ATOMIC(atomicAdd, int, unsigned(old) + unsigned(value))
SIMT_ATOMIC(atomicAdd, unsigned, old + value)
SIMT_ATOMIC(atomicAdd, unsigned long long, old + value)
#undef SIMT_ATOMICS
#undef SIMT_ATOMIC

#define SIMT_MIN_MAX(T)                                   \
  inline T min(T a, T b) { return b < a ? b : a; }        \
  inline T max(T a, T b) { return a < b ? b : a; }
SIMT_MIN_MAX(int)
SIMT_MIN_MAX(unsigned)
SIMT_MIN_MAX(long)
SIMT_MIN_MAX(unsigned long)
SIMT_MIN_MAX(long long)
SIMT_MIN_MAX(unsigned long long)
#undef SIMT_MIN_MAX
