// Stacks to switch between: by hand on x86-64, where swapcontext would make a system call each time, else by ucontext.
#pragma once
#include <cstddef>
#include <cstdint>

#if defined(__SANITIZE_ADDRESS__)
#define SIMT_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SIMT_ASAN 1
#endif
#endif

#if defined(SIMT_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__) || defined(SIMT_ASAN)
#define SIMT_UCONTEXT 1
#include <ucontext.h>
#endif

namespace simt {

#ifdef SIMT_ASAN
constexpr size_t kStackBytes = 256 * 1024;
#else
constexpr size_t kStackBytes = 64 * 1024;
#endif

// A place to come back to. A fiber's function must not return: it leaves for good with `last`.
class Fiber {
 public:
  Fiber() = default;
  void start(void* stack, void (*function)());
  // Leaves `from` for `to`; returns when somebody switches back.
  static void switch_to(Fiber& from, Fiber& to, bool last = false);
  // The first thing that a fiber's function does.
  static void arrived(Fiber* came_from);

 private:
#ifdef SIMT_UCONTEXT
  ucontext_t context_;
#else
  void* stack_pointer_ = nullptr;
#endif
#ifdef SIMT_ASAN
  void* fake_stack_ = nullptr;
#endif
  const void* bottom_ = nullptr;
  size_t size_ = 0;
};

}  // namespace simt
