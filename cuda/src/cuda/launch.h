// The one place where kernels are launched: on the caller's stream, with the launch checked, or not at all.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>

#include "../../kernels/device.cuh"

namespace splat {
namespace gpu {

inline cudaStream_t stream_of(const SplatCall& call) { return static_cast<cudaStream_t>(call.stream); }

// An error of CUDA other than lack of memory: the GPU or its driver has failed.
struct DeviceFault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void throw_cuda(const char* what, cudaError_t error) {
  const std::string message = std::string(what) + ": " + cudaGetErrorString(error);
  if (error == cudaErrorMemoryAllocation) throw std::runtime_error(message);
  throw DeviceFault(message);
}

inline void check_cuda(const char* what, cudaError_t error) {
  if (error != cudaSuccess) throw_cuda(what, error);
}

inline unsigned grid_of(const char* kernel, int64_t blocks) {
  if (blocks > INT32_MAX) throw std::runtime_error(std::string(kernel) + ": more blocks than a grid can have");
  return unsigned(blocks);
}

// enter() has checked that no error was pending, so this one is the launch's. It is cleared from the runtime, so that
// no later call reports it as its own; an error that has broken the context stays there in any case.
inline void check_launch(const char* kernel) {
  const cudaError_t error = cudaPeekAtLastError();
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();
  throw_cuda(kernel, error);
}

}  // namespace gpu
}  // namespace splat

// SPLAT_LAUNCH(kernel, blocks, threads, stream, arguments...). A kernel with template arguments goes in parentheses.
// No blocks is no launch. Throws std::runtime_error with the kernel's name.
#ifndef SPLAT_LAUNCH
#define SPLAT_LAUNCH(kernel, blocks, threads, stream, ...)                                              \
  do {                                                                                                  \
    const int64_t splat_blocks = (blocks);                                                              \
    if (splat_blocks > 0) {                                                                             \
      kernel<<<splat::gpu::grid_of(#kernel, splat_blocks), threads, 0, stream>>>(__VA_ARGS__);          \
      splat::gpu::check_launch(#kernel);                                                                \
    }                                                                                                   \
  } while (0)
#endif
