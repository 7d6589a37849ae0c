#include "pool.h"

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace splat {
namespace {

void relax();

// Subnormal numbers cost a hundred cycles each and carry nothing here; the caller's mode comes back at the end.
class FlushSubnormals {
#if defined(__SSE2__)
 public:
  FlushSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushSubnormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
 public:
  FlushSubnormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(saved_ | (uint64_t(1) << 24)));
  }
  ~FlushSubnormals() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

class Pool {
 public:
  void run(int threads, int64_t count, void (*job)(void*, int64_t), void* context) {
    std::lock_guard<std::mutex> one_loop(loop_mutex_);
    grow(threads - 1);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = job, context_ = context, count_ = count;
      next_.store(0, std::memory_order_relaxed);
      helpers_ = threads - 1;
      error_ = nullptr;
      open_ = true;
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    work();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      open_ = false;  // who has not come by now need not come
    }
    for (int spin = 0; busy_.load(std::memory_order_acquire) != 0; ++spin) {
      if (spin < 4000) relax();
      else std::this_thread::yield();
    }
    if (error_ != nullptr) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  // Starts threads up to so many; where the system grants fewer, the loop goes on with those.
  void grow(int helpers) {
    try {
      while (int(workers_.size()) < helpers) {
        const int index = int(workers_.size());
        workers_.emplace_back([this, index] { serve(index); });
        workers_.back().detach();
      }
    } catch (const std::system_error&) {
    }
  }
  // Runs jobs until none is left. An exception of a job, on any thread, ends the loop; the first one reaches the caller.
  void work() {
    FlushSubnormals scope;
    try {
      for (;;) {
        const int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
        if (i >= count_) return;
        job_(context_, i);
      }
    } catch (...) {
      next_.store(count_, std::memory_order_relaxed);
      std::lock_guard<std::mutex> lock(mutex_);
      if (error_ == nullptr) error_ = std::current_exception();
    }
  }
  void serve(int index) {
    uint64_t seen = 0;
    for (;;) {
      // Kernels follow each other within microseconds: spin a little before sleeping.
      for (int spin = 0; spin < 4000 && generation_.load(std::memory_order_acquire) == seen; ++spin) relax();
      bool called;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return generation_.load(std::memory_order_acquire) != seen; });
        seen = generation_.load(std::memory_order_acquire);
        called = open_ && index < helpers_;
        if (called) busy_.fetch_add(1, std::memory_order_relaxed);
      }
      if (!called) continue;
      work();
      busy_.fetch_sub(1, std::memory_order_release);
    }
  }

  std::mutex loop_mutex_, mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
  std::atomic<uint64_t> generation_{0};
  std::atomic<int64_t> next_{0};
  std::atomic<int> busy_{0};
  int helpers_ = 0;
  bool open_ = false;
  std::exception_ptr error_;
  void (*job_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
  int64_t count_ = 0;
};

// Never destroyed: its threads may still sleep in it while the process exits. A forked child starts a new one,
// since threads do not survive a fork.
std::atomic<Pool*> pool{nullptr};
std::mutex pool_mutex;

Pool& the_pool() {
  Pool* current = pool.load(std::memory_order_acquire);
  if (current != nullptr) return *current;
  std::lock_guard<std::mutex> lock(pool_mutex);
  if (pool.load(std::memory_order_relaxed) == nullptr) {
#if defined(__unix__) || defined(__APPLE__)
    pthread_atfork(nullptr, nullptr, [] { pool.store(nullptr, std::memory_order_release); });
#endif
    pool.store(new Pool, std::memory_order_release);
  }
  return *pool.load(std::memory_order_relaxed);
}

void relax() {
#if defined(__SSE2__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

void run_jobs(int threads, int64_t count, void (*job)(void*, int64_t), void* context) {
  if (threads > count) threads = int(count);
  if (threads > 1) return the_pool().run(threads, count, job, context);
  FlushSubnormals scope;
  for (int64_t i = 0; i < count; ++i) job(context, i);
}

}  // namespace splat
