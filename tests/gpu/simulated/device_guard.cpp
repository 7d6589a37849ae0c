// Two CUDA devices for a torch that has none: what its C++ asks about a device between two operations of Python, such as
// the guard around an indexed assignment and the threads of autograd. Operations themselves never reach it.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr auto kCuda = c10::DeviceType::CUDA;
constexpr c10::DeviceIndex kCount = 2;
thread_local c10::DeviceIndex current = 0;

struct Guard final : c10::impl::NoOpDeviceGuardImpl<kCuda> {
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    current = device.index();
    return before;
  }
  c10::Device getDevice() const override { return {kCuda, current}; }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kCount; }
};

const Guard guard;
const c10::impl::DeviceGuardImplInterface* before = nullptr;

auto& registered() { return c10::impl::device_guard_impl_registry[static_cast<size_t>(kCuda)]; }

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kCount; }
  c10::DeviceIndex current_device() const override { return current; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};

}  // namespace

extern "C" {

void install() { before = registered().exchange(&guard); }
void uninstall() { registered().store(before); }

// For a process that has not imported torch, which asks for them once: autograd needs an accelerator.
void install_hooks() {
  at::CUDAHooksRegistry()->Register("CUDAHooks", [](at::CUDAHooksArgs) -> std::unique_ptr<at::CUDAHooksInterface> {
    return std::make_unique<Hooks>();
  });
}

int get_device() { return current; }
void set_device(int device) { current = static_cast<c10::DeviceIndex>(device); }
}
