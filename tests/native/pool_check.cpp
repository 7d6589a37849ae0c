// run_jobs() where jobs throw, on the caller's thread and on others, and where no thread can be started. Prints what
// fails; test_pool.py.
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>

#include "pool.h"

using namespace splat;

static bool no_threads = false;

// Stands in front of the C library's.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* how, void* (*start)(void*), void* context) {
  if (no_threads) return EAGAIN;
  return ((decltype(&pthread_create))dlsym(RTLD_NEXT, "pthread_create"))(thread, how, start, context);
}

namespace {

void expect(bool holds, const char* what) {
  if (!holds) std::printf("%s\n", what);
}

// What reaches the caller of a loop whose jobs throw on the caller's thread or on the others, "" when nothing does.
std::string thrown(bool on_caller, int64_t count, std::atomic<int64_t>& ran) {
  const std::thread::id caller = std::this_thread::get_id();
  std::atomic<bool> met{false};
  try {
    parallel_for(4, count, [&](int64_t) {
      ++ran;
      if ((std::this_thread::get_id() == caller) == on_caller) {
        met = true;
        throw std::bad_alloc();
      }
      for (int spin = 0; spin < 1000000 && !met; ++spin) std::this_thread::yield();  // leaves jobs to the other threads
      // The thread that throws may lose its processor before the exception ends the loop: 100,000 jobs outlast that.
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
  } catch (const std::bad_alloc& error) {
    return error.what();
  }
  return "";
}

void check_whole_loop(const char* what) {
  std::atomic<int64_t> sum{0};
  parallel_for(4, 1000, [&](int64_t i) { sum += i; });
  expect(sum == 499500, what);
}

}  // namespace

int main() {
  no_threads = true;
  check_whole_loop("a loop without other threads");
  no_threads = false;
  for (int round = 0; round < 50; ++round)
    for (const bool on_caller : {true, false}) {
      std::atomic<int64_t> ran{0};
      expect(thrown(on_caller, 100000, ran) == "std::bad_alloc", on_caller ? "caller's exception" : "worker's exception");
      expect(ran < 100000, "jobs go on after an exception");
      check_whole_loop("a loop after an exception");
    }
  try {
    parallel_for(1, 3, [](int64_t) { throw std::runtime_error("alone"); });
    std::printf("one thread's exception\n");
  } catch (const std::runtime_error&) {
  }
  return 0;
}
