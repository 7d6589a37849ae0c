// Threads: numbered jobs run by a fixed pool, in any order; results never depend on who ran which.
#pragma once
#include <cstdint>

namespace splat {

// Runs job(context, i) for i in [0, count) on at most `threads` threads, the caller among them; returns when all
// are done. One parallel loop at a time: a second caller waits. Jobs must not call it again. When a job throws (no
// memory for its scratch, say), jobs that have not begun are left out, and the exception reaches the caller once no
// thread works on the loop any more.
void run_jobs(int threads, int64_t count, void (*job)(void* context, int64_t i), void* context);

// The same for any callable.
template <class F>
void parallel_for(int threads, int64_t count, const F& f) {
  const auto job = [](void* context, int64_t i) { (*static_cast<const F*>(context))(i); };
  run_jobs(threads, count, job, const_cast<F*>(&f));
}

}  // namespace splat
