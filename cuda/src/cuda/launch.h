// The one place where kernels are launched: on the caller's stream, with the launch checked, or not at all.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>

#include "../../kernels/device.cuh"

namespace splat {
namespace gpu {

inline cudaStream_t stream_of(const SplatCall& call) { return static_cast<cudaStream_t>(call.stream); }

// The GPU or its driver has failed, and every later call of this process on the device fails too.
struct DeviceFault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// CUDA refuses a launch or a call, and the device is sound: library, driver and GPU do not fit together.
struct LaunchRefused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The "sticky" errors, which leave the context unusable, and those that stand for a fault of the hardware.
inline bool breaks_device(cudaError_t error) {
  switch (int(error)) {
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case 226:  // cudaErrorContained, since CUDA 12.8
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorContextIsDestroyed:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case 721:  // cudaErrorTensorMemoryLeak, since CUDA 12.8
    case cudaErrorMpsClientTerminated:
    case cudaErrorExternalDevice:
    case cudaErrorUnknown: return true;
    default: return false;
  }
}

inline void throw_cuda(const std::string& what, cudaError_t error, const std::string& facts = "") {
  const std::string message = what + ": " + cudaGetErrorString(error);
  if (error == cudaErrorMemoryAllocation) throw std::runtime_error(message);
  if (breaks_device(error)) throw DeviceFault(message);
  throw LaunchRefused(message + " (" + cudaGetErrorName(error) + ")" + facts);
}

inline void check_cuda(const char* what, cudaError_t error) {
  if (error != cudaSuccess) throw_cuda(what, error);
}

// "9.0": of a compute capability, or of a CUDA version.
inline std::string version_words(int major, int minor) { return std::to_string(major) + "." + std::to_string(minor); }

// What of library, driver and GPU does not fit where a call is refused. Leaves no error in the runtime.
inline std::string build_facts() {
  std::string text = "; the library has code for compute capability ";
  const char* separator = "";
  for (const int arch : {__CUDA_ARCH_LIST__}) {
    text += separator + version_words(arch / 100, arch % 100 / 10);
    separator = ", ";
  }
  text += " and CUDA " + version_words(CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
  int device = 0, major = 0, minor = 0, driver = 0;
  if (cudaGetDevice(&device) == cudaSuccess &&
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess)
    text += "; the GPU has compute capability " + version_words(major, minor);
  if (cudaDriverGetVersion(&driver) == cudaSuccess)
    text += "; the driver knows CUDA " + version_words(driver / 1000, driver % 1000 / 10);
  (void)cudaGetLastError();
  return text;
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
  throw_cuda(kernel, error, build_facts());
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
