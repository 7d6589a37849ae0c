// The guarded entry of every call on a device: it sets the device and restores the caller's, also after an error.
#pragma once
#include <atomic>

#include "launch.h"

namespace splat {
namespace gpu {

// The driver's functions for the context that is current in a thread.
class Contexts {
 public:
  static Contexts& get() {
    static Contexts found;
    return found;
  }
  // Makes the device's primary context, the one that the runtime uses, current on top of what the thread has.
  bool push(int device) {
    if (!all_ || device < 0 || device >= kDevices) return false;
    void* context = kept_[device].load();
    if (context == nullptr) {
      if (retain_(&context, device) != 0) return false;
      kept_[device] = context;
    }
    return push_(context) == 0;
  }
  void pop() {
    void* context = nullptr;
    (void)pop_(&context);
  }

 private:
  static constexpr int kDevices = 64;
  int (*retain_)(void** context, int device) = nullptr;
  int (*push_)(void* context) = nullptr;
  int (*pop_)(void** context) = nullptr;
  bool all_;
  std::atomic<void*> kept_[kDevices] = {};  // as long as the process, which has tensors there

  Contexts()
      : all_(find("cuDevicePrimaryCtxRetain", retain_) && find("cuCtxPushCurrent", push_) &&
             find("cuCtxPopCurrent", pop_)) {}
  template <class Function>
  static bool find(const char* name, Function& function) {
    void* address = nullptr;
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &address, 12000, cudaEnableDefault);
#else
    const cudaError_t error = cudaGetDriverEntryPoint(name, &address, cudaEnableDefault);
#endif
    if (error != cudaSuccess) (void)cudaGetLastError();
    function = error == cudaSuccess ? reinterpret_cast<Function>(address) : nullptr;
    return function != nullptr;
  }
};

// Makes the call's device current and the caller's again. Since CUDA 12 cudaSetDevice creates a context, hundreds of
// megabytes, so a process that works on device 1 alone must not be sent back to device 0 by it. The primary context is
// pushed and popped instead: then the caller has the context that it had, or none. Where the runtime does not follow
// the pushed context, or the driver lacks a function, cudaSetDevice does both.
class DeviceGuard {
 public:
  explicit DeviceGuard(const SplatCall& call) : wanted_(call.device) {
    const cudaError_t unknown = cudaGetDevice(&previous_);
    if (unknown != cudaSuccess) throw_cuda("asking for the current device", unknown, build_facts());
    if (wanted_ == previous_ || push()) return;
    const cudaError_t error = cudaSetDevice(wanted_);
    if (error == cudaSuccess) return;
    (void)cudaGetLastError();  // ours, like a failed launch
    throw_cuda("device " + std::to_string(wanted_), error);
  }
  ~DeviceGuard() {
    if (pushed_) {
      Contexts::get().pop();
    } else if (wanted_ != previous_) {
      (void)cudaSetDevice(previous_);
    }
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int wanted_, previous_ = 0;
  bool pushed_ = false;

  bool push() {
    if (!Contexts::get().push(wanted_)) return false;
    int now = -1;
    pushed_ = cudaGetDevice(&now) == cudaSuccess && now == wanted_;
    if (!pushed_) Contexts::get().pop();
    return pushed_;
  }
};

// Runs `work` on the call's device. An error that was there before is reported as such and stays pending.
template <class Work>
void on_device(const SplatCall& call, Work work) {
#ifdef SPLAT_EXPECT  // the emulator's: launches must be on this device and stream
  SPLAT_EXPECT(call.device, stream_of(call));
#endif
  const DeviceGuard guard(call);
  check_cuda("an earlier CUDA call failed", cudaPeekAtLastError());
  work();
}

}  // namespace gpu
}  // namespace splat
