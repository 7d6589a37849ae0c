// The guarded entry of every call on a device: it sets the device and restores the caller's, also after an error.
#pragma once
#include "launch.h"

namespace splat {
namespace gpu {

class DeviceGuard {
 public:
  explicit DeviceGuard(const SplatCall& call) : wanted_(call.device) {
    check_cuda("asking for the current device", cudaGetDevice(&previous_));
    if (wanted_ == previous_) return;
    const cudaError_t error = cudaSetDevice(wanted_);
    if (error == cudaSuccess) return;
    (void)cudaGetLastError();  // ours, like a failed launch
    throw_cuda(("device " + std::to_string(wanted_)).c_str(), error);
  }
  ~DeviceGuard() {
    if (wanted_ != previous_) (void)cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int wanted_, previous_ = 0;
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
