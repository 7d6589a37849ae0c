// The emulator's scheduler, its pretended devices, and the hooks by which tests look inside.
#include "cuda_runtime.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <mutex>
#include <string>
#include <vector>

#include "fiber.h"

simt::Index threadIdx, blockIdx, blockDim, gridDim;

namespace simt {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kDevices = 4;
constexpr size_t kSharedBytes = 48 * 1024;
constexpr size_t kRedZone = 16;  // between shared arrays: must still be untouched when the block ends
constexpr size_t kMaxArrays = 64;
constexpr unsigned char kPoison = 0xff;  // as float, double and half: NaN; as int: -1

// ---- the pretended runtime -------------------------------------------------------------------------------------------

// Devices have primary contexts, made at first use and by cudaSetDevice. The one on top of a thread's stack, where
// there is one, says which device is current.
thread_local int set_device = 0;
thread_local std::vector<int> contexts;
bool has_context[kDevices] = {}, ignores_pushes = false;
int current_device() { return contexts.empty() || ignores_pushes ? set_device : contexts.back(); }
thread_local cudaError_t last_error = cudaSuccess;
thread_local int expected_device = 0;
thread_local cudaStream_t expected_stream = nullptr;
thread_local int64_t failing_launch = 0;  // counts down; the launch that makes it 0 fails
thread_local cudaError_t launch_error = cudaErrorLaunchFailure;  // what it leaves

struct Launch {
  std::string name;
  int device;
  cudaStream_t stream;
};
std::vector<Launch> trace;
std::mutex emulator;  // one launch at a time

void record(const char* name, cudaStream_t stream) {
  std::string plain(name);
  if (plain.size() > 2 && plain.front() == '(' && plain.back() == ')') plain = plain.substr(1, plain.size() - 2);
  trace.push_back({plain, current_device(), stream});
  has_context[current_device()] = true;
  if (current_device() != expected_device)
    throw Fault(plain + ": launched on device " + std::to_string(current_device()) + ", the call's is " +
                std::to_string(expected_device));
  if (stream != expected_stream) throw Fault(plain + ": launched on another stream than the call's");
}

// ---- chance ----------------------------------------------------------------------------------------------------------

uint64_t seed = 0;  // 0: everything in order
uint64_t random_state = 0;

uint64_t random_bits() {
  uint64_t z = random_state += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

template <class T>
void shuffle_unless_in_order(T* items, size_t count) {
  if (seed == 0) return;
  for (size_t i = count; i > 1; --i) std::swap(items[i - 1], items[random_bits() % i]);
}

// ---- threads ---------------------------------------------------------------------------------------------------------

struct Thread {
  enum State { kFresh, kReady, kAtWarpOp, kAtBarrier, kDone };
  State state;
  void* stack;
  Fiber fiber;
  // What it waits for, and what comes of it.
  Op op;
  unsigned mask;
  int argument, width;
  uint64_t value, result;
  const char* file;
  int line;
};

// Those that can go on. A thread is in it at most once.
class ReadyList {
 public:
  void clear() { head_ = tail_ = 0; }
  bool empty() const { return head_ == tail_; }
  void push_back(int thread) { items_[tail_++ & kMask] = thread; }
  void push_front(int thread) { items_[--head_ & kMask] = thread; }
  int pop() { return items_[head_++ & kMask]; }

 private:
  static constexpr uint32_t kMask = 2 * kMaxThreads - 1;
  int items_[kMask + 1];
  uint32_t head_ = 0, tail_ = 0;
};

struct Emulator {
  Thread threads[kMaxThreads];
  ReadyList ready;
  Fiber scheduler;
  std::vector<void*> stacks;  // idle ones; the last used is the warmest
  std::exception_ptr fault;
  Thread* self = nullptr;
  bool released_go_first = true;

  const char* kernel = "";
  Body body = nullptr;
  const void* arguments = nullptr;
  int count = 0, done = 0;

  uint32_t at_warp_op[kMaxThreads / 32];  // lanes that wait
  int at_barrier = 0, barrier_sum = 0, barrier_result = 0;
  Barrier barrier_kind = Barrier::kSync;
  Thread* first_at_barrier = nullptr;

  uint64_t block_serial = 0;
  alignas(128) unsigned char shared[kSharedBytes + kRedZone * kMaxArrays];
  size_t shared_end = 0, shared_payload = 0;
  struct Array {
    size_t end;
    const char* name;
  };
  std::vector<Array> arrays;

  int index_of(const Thread* t) const { return int(t - threads); }
  [[noreturn]] void fail(const std::string& what) const {
    throw Fault(std::string(kernel) + ", block " + std::to_string(blockIdx.x) + ": " + what);
  }
  void* take_stack();
  void free_stacks();
  void wait();
  void release(int* list, int n);
  void run_block(unsigned block);
  void stalled() const;
  void check_red_zones() const;
};

Emulator& em() {
  static Emulator* const only = new Emulator;  // large, and never gone before the last launch
  return *only;
}

std::string place(const Thread& t) {
  const std::string file(t.file);
  return file.substr(file.find_last_of('/') + 1) + ":" + std::to_string(t.line);
}

void* Emulator::take_stack() {
  if (stacks.empty()) {
    const size_t guard = size_t(sysconf(_SC_PAGESIZE));
    void* memory = mmap(nullptr, guard + kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("no memory for the emulator's stacks");
    (void)mprotect(memory, guard, PROT_NONE);
    stacks.push_back(static_cast<char*>(memory) + guard);
  }
  void* stack = stacks.back();
  stacks.pop_back();
  return stack;
}

void Emulator::free_stacks() {
  const size_t guard = size_t(sysconf(_SC_PAGESIZE));
  for (void* stack : stacks) (void)munmap(static_cast<char*>(stack) - guard, guard + kStackBytes);
  stacks.clear();
}

// The life of a fiber. Exceptions stop here: they cannot cross to another stack.
void fiber_main() {
  Emulator& e = em();
  Fiber::arrived(&e.scheduler);
  try {
    e.body(e.arguments);
  } catch (...) {
    e.fault = std::current_exception();
  }
  e.self->state = Thread::kDone;
  Fiber::switch_to(e.self->fiber, e.scheduler, true);
}

// Lets others run until this thread has been released.
void Emulator::wait() {
  Thread* const me = self;
  Fiber::switch_to(me->fiber, scheduler);
}

void Emulator::release(int* list, int n) {
  shuffle_unless_in_order(list, size_t(n));
  for (int i = 0; i < n; ++i) threads[list[i]].state = Thread::kReady;
  if (released_go_first) {
    for (int i = n; i > 0; --i) ready.push_front(list[i - 1]);
  } else {
    for (int i = 0; i < n; ++i) ready.push_back(list[i]);
  }
}

// Nobody can go on and not all are done: says who waits where.
void Emulator::stalled() const {
  std::string what;
  for (int t = 0; t < count; ++t) {
    const Thread& thread = threads[t];
    if (thread.state != Thread::kAtBarrier && thread.state != Thread::kAtWarpOp) continue;
    const bool barrier = thread.state == Thread::kAtBarrier;
    what += "thread " + std::to_string(t) + " waits for ever at " + (barrier ? "the barrier " : "the warp operation ") +
            place(thread);
    break;
  }
  fail(what + "; " + std::to_string(done) + " of " + std::to_string(count) + " threads have returned");
}

void Emulator::check_red_zones() const {
  for (const Array& array : arrays)
    for (size_t i = 0; i < kRedZone; ++i)
      if (shared[array.end + i] != kPoison) fail(std::string("wrote beyond the shared array ") + array.name);
}

void Emulator::run_block(unsigned block) {
  blockIdx = {block, 0, 0};
  ++block_serial;
  shared_end = shared_payload = 0;
  arrays.clear();
  std::fill(at_warp_op, at_warp_op + kMaxThreads / 32, 0u);
  at_barrier = barrier_sum = done = 0;
  ready.clear();
  int order[kMaxThreads];
  for (int t = 0; t < count; ++t) order[t] = t, threads[t].state = Thread::kFresh;
  shuffle_unless_in_order(order, size_t(count));
  released_go_first = seed == 0 || random_bits() % 2 == 0;
  for (int t = 0; t < count; ++t) ready.push_back(order[t]);

  while (done < count) {
    if (ready.empty()) stalled();
    const int t = ready.pop();
    self = &threads[t];
    if (self->state == Thread::kFresh) {
      self->stack = take_stack();
      self->fiber.start(self->stack, fiber_main);
    }
    threadIdx = {unsigned(t), 0, 0};
    Fiber::switch_to(scheduler, self->fiber);
    if (fault) std::rethrow_exception(fault);
    if (threads[t].state != Thread::kDone) continue;
    stacks.push_back(threads[t].stack);
    threads[t].stack = nullptr;
    ++done;
  }
  check_red_zones();
}

void run_grid(const char* kernel, unsigned blocks, int count, Body body, const void* arguments) {
  Emulator& e = em();
  e.kernel = kernel;
  e.body = body;
  e.arguments = arguments;
  e.count = count;
  e.fault = nullptr;
  for (Thread& t : e.threads) t.stack = nullptr;
  gridDim = {blocks, 1, 1};
  blockDim = {unsigned(count), 1, 1};
  std::vector<unsigned> order(blocks);
  for (unsigned b = 0; b < blocks; ++b) order[b] = b;
  shuffle_unless_in_order(order.data(), order.size());
  try {
    for (unsigned b : order) e.run_block(b);
  } catch (...) {
    for (Thread& t : e.threads)  // what the others had on their stacks is plain data: nothing to unwind
      if (t.stack != nullptr) e.stacks.push_back(t.stack);
    e.fault = nullptr;
    throw;
  }
}

// ---- warp operations -------------------------------------------------------------------------------------------------

uint64_t shuffled(const Thread* warp, unsigned present, const Thread& me, int lane) {
  const int segment = lane & ~(me.width - 1), inside = lane - segment;
  int source = lane;
  switch (me.op) {
    case Op::kShuffle: source = segment + (me.argument & (me.width - 1)); break;
    case Op::kShuffleUp: source = me.argument > inside ? lane : lane - me.argument; break;
    case Op::kShuffleDown: source = me.argument >= me.width - inside ? lane : lane + me.argument; break;
    // A lane may not read beyond its segment.
    default: source = (inside ^ me.argument) < me.width ? segment + (inside ^ me.argument) : lane; break;
  }
  return present >> source & 1u ? warp[source].value : ~uint64_t(0);  // of a lane that is not there: poison
}

// All lanes of `mask` are here: what each of them gets.
void complete(Thread* warp, unsigned mask) {
  unsigned ballot = 0;
  for (int lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1u && warp[lane].value != 0) ballot |= 1u << lane;
  for (int lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1u) == 0) continue;
    Thread& t = warp[lane];
    switch (t.op) {
      case Op::kSyncWarp: t.result = 0; break;
      case Op::kBallot: t.result = ballot; break;
      case Op::kAny: t.result = ballot != 0; break;
      case Op::kAll: t.result = ballot == mask; break;
      case Op::kMatch:
        t.result = 0;
        for (int other = 0; other < 32; ++other)
          if (mask >> other & 1u && warp[other].value == t.value) t.result |= uint64_t(1) << other;
        break;
      default: t.result = shuffled(warp, mask, t, lane); break;
    }
  }
}

bool same_operation(const Thread& a, const Thread& b) {
  return a.op == b.op && a.mask == b.mask && a.line == b.line && a.file == b.file;
}

// A lane that arrives must find the others of its mask at the same operation, on their way, or not yet anywhere.
void check_lanes(const Emulator& e, const Thread* warp, const Thread& me, int lane) {
  if ((me.mask >> lane & 1u) == 0)
    e.fail("lane " + std::to_string(lane) + " at " + place(me) + " is not in the mask that it gives");
  for (int other = 0; other < 32; ++other) {
    if ((me.mask >> other & 1u) == 0 || other == lane) continue;
    const Thread& t = warp[other];
    const char* wrong = nullptr;
    if (e.index_of(&t) >= e.count) {
      wrong = "does not exist";
    } else if (t.state == Thread::kDone) {
      wrong = "has returned";
    } else if (t.state == Thread::kAtWarpOp && !same_operation(t, me)) {
      wrong = "waits elsewhere";
    }
    if (wrong != nullptr)
      e.fail("lane " + std::to_string(other) + ", named by the mask at " + place(me) + ", " + wrong);
  }
}

}  // namespace

uint64_t warp_operation(Op op, unsigned mask, uint64_t value, int argument, int width, const char* file, int line) {
  Emulator& e = em();
  Thread& me = *e.self;
  const int index = e.index_of(&me), lane = index % 32;
  Thread* const warp = &me - lane;
  me.op = op, me.mask = mask, me.value = value, me.argument = argument, me.width = width;
  me.file = file, me.line = line;
  if (width < 1 || width > 32 || (width & (width - 1)) != 0)
    e.fail("the width at " + place(me) + " is no power of two");
  uint32_t& waiting = e.at_warp_op[index / 32];
  const bool first = (waiting & mask) == 0, last = ((waiting | 1u << lane) & mask) == mask;
  // The first and the last to come see every pair that does not fit, those between need not look.
  if (first || last || (mask >> lane & 1u) == 0) check_lanes(e, warp, me, lane);
  waiting |= 1u << lane;
  if (last) {
    complete(warp, mask);
    waiting &= ~mask;
    int others[32], n = 0;
    for (int l = 0; l < 32; ++l)
      if (mask >> l & 1u && l != lane) others[n++] = index - lane + l;
    e.release(others, n);
    return me.result;
  }
  me.state = Thread::kAtWarpOp;
  e.wait();
  return me.result;
}

int block_barrier(Barrier kind, int predicate, const char* file, int line) {
  Emulator& e = em();
  Thread& me = *e.self;
  me.file = file, me.line = line;
  if (e.at_barrier == 0) {
    e.first_at_barrier = &me;
    e.barrier_kind = kind;
    e.barrier_sum = 0;
  } else if (e.first_at_barrier->line != line || e.first_at_barrier->file != file || e.barrier_kind != kind) {
    e.fail("threads wait at different barriers: " + place(*e.first_at_barrier) + " and " + place(me));
  }
  e.barrier_sum += predicate != 0;
  if (++e.at_barrier < e.count) {
    me.state = Thread::kAtBarrier;
    e.wait();
    return e.barrier_result;
  }
  e.at_barrier = 0;
  e.barrier_result = kind == Barrier::kOr ? e.barrier_sum != 0 : e.barrier_sum;
  int all[kMaxThreads], n = 0;
  for (int t = 0; t < e.count; ++t)
    if (&e.threads[t] != &me) all[n++] = t;
  e.release(all, n);
  return e.barrier_result;
}

void* shared_memory(SharedSlot& slot, size_t bytes, size_t alignment, const char* name) {
  Emulator& e = em();
  if (slot.block == e.block_serial) return slot.memory;
  e.shared_payload = (e.shared_payload + alignment - 1) / alignment * alignment + bytes;
  if (e.shared_payload > kSharedBytes) e.fail(std::string("more than 48 KB of shared memory, with ") + name);
  if (e.arrays.size() == kMaxArrays) e.fail("too many shared arrays");
  size_t begin = e.shared_end + (e.arrays.empty() ? 0 : kRedZone);
  begin = (begin + alignment - 1) / alignment * alignment;
  const size_t end = begin + bytes;
  if (end + kRedZone > sizeof e.shared) e.fail(std::string("more than 48 KB of shared memory, with ") + name);
  std::fill(e.shared + begin, e.shared + end + kRedZone, kPoison);
  e.shared_end = end;
  e.arrays.push_back({end, name});
  slot.block = e.block_serial;
  return slot.memory = e.shared + begin;
}

void expect(int device, cudaStream_t stream) {
  expected_device = device;
  expected_stream = stream;
}

void launch_body(const char* kernel, unsigned blocks, int threads, cudaStream_t stream, Body body,
                 const void* arguments) {
  const std::lock_guard<std::mutex> lock(emulator);
  record(kernel, stream);
  if (failing_launch > 0 && --failing_launch == 0) {
    last_error = launch_error;
    return;
  }
  if (threads < 1 || threads > kMaxThreads) {
    last_error = cudaErrorInvalidConfiguration;
    return;
  }
  run_grid(trace.back().name.c_str(), blocks, threads, body, arguments);
}

}  // namespace simt

// ---- CUDA's names ----------------------------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* count) {
  *count = simt::kDevices;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = simt::current_device();
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= simt::kDevices) return simt::last_error = cudaErrorInvalidDevice;
  (simt::contexts.empty() ? simt::set_device : simt::contexts.back()) = device;
  simt::has_context[device] = true;
  return cudaSuccess;
}

namespace {

int retain_context(void** context, int device) {
  if (device < 0 || device >= simt::kDevices) return cudaErrorInvalidDevice;
  simt::has_context[device] = true;
  *context = simt::has_context + device;
  return 0;
}
int push_context(void* context) {
  simt::contexts.push_back(int(static_cast<bool*>(context) - simt::has_context));
  return 0;
}
int pop_context(void** context) {
  *context = simt::has_context + simt::contexts.back();
  simt::contexts.pop_back();
  return 0;
}

}  // namespace

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult*) {
  const std::string name = symbol;
  *function = name == "cuDevicePrimaryCtxRetain" ? reinterpret_cast<void*>(retain_context)
              : name == "cuCtxPushCurrent"       ? reinterpret_cast<void*>(push_context)
              : name == "cuCtxPopCurrent"        ? reinterpret_cast<void*>(pop_context)
                                                 : nullptr;
  return *function != nullptr ? cudaSuccess : cudaErrorInvalidValue;
}
cudaError_t cudaPeekAtLastError() { return simt::last_error; }
cudaError_t cudaGetLastError() { return std::exchange(simt::last_error, cudaSuccess); }
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    case cudaErrorNoKernelImageForDevice: return "no kernel image is available for execution on the device";
    default: return "another error";
  }
}
const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
#define SIMT_NAME(name) case name: return #name
    SIMT_NAME(cudaErrorInvalidConfiguration);
    SIMT_NAME(cudaErrorInsufficientDriver);
    SIMT_NAME(cudaErrorInvalidDeviceFunction);
    SIMT_NAME(cudaErrorInvalidDevice);
    SIMT_NAME(cudaErrorNoKernelImageForDevice);
    SIMT_NAME(cudaErrorUnsupportedPtxVersion);
    SIMT_NAME(cudaErrorLaunchOutOfResources);
#undef SIMT_NAME
    default: return "unrecognized error code";
  }
}
// Each device is an H200, whose driver knows CUDA 13.0.
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device < 0 || device >= simt::kDevices) return simt::last_error = cudaErrorInvalidDevice;
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9 : 0;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  const std::lock_guard<std::mutex> lock(simt::emulator);
  simt::record("cudaMemsetAsync", stream);
  if (bytes > 0) std::memset(memory, value, bytes);
  return cudaSuccess;
}

// ---- hooks for tests -------------------------------------------------------------------------------------------------

#define SIMT_HOOK extern "C" __attribute__((visibility("default")))

SIMT_HOOK void simt_set_schedule(uint64_t seed) { simt::seed = simt::random_state = seed; }
// A library keeps its stacks, two mappings each, and Linux allows a process 65,530 mappings.
SIMT_HOOK void simt_free_stacks(void) { simt::em().free_stacks(); }
SIMT_HOOK int32_t simt_set_device(int32_t device) { return cudaSetDevice(device); }
SIMT_HOOK int32_t simt_get_device(void) { return simt::current_device(); }
// Whether the device has a context; of the thread, as when the process began.
SIMT_HOOK int32_t simt_has_context(int32_t device) { return simt::has_context[device]; }
// As a runtime that does not follow the context that was pushed.
SIMT_HOOK void simt_ignore_pushes(int32_t on) { simt::ignores_pushes = on != 0; }
SIMT_HOOK void simt_forget_contexts(void) {
  for (bool& one : simt::has_context) one = false;
  simt::set_device = 0, simt::contexts.clear();
}
// The n-th launch from now fails: it does not run, and leaves an error behind, a number of cudaError_t.
SIMT_HOOK void simt_fail_launch(int64_t n, int32_t error) {
  simt::failing_launch = n;
  simt::launch_error = cudaError_t(error);
}
SIMT_HOOK int32_t simt_last_error(void) { return simt::last_error; }
SIMT_HOOK void simt_set_last_error(int32_t error) { simt::last_error = cudaError_t(error); }
SIMT_HOOK void simt_clear_trace(void) { simt::trace.clear(); }

// Lines of "kernel|device|stream"; returns the bytes that the whole text needs, with its final zero.
SIMT_HOOK int64_t simt_trace(char* buffer, int64_t size) {
  std::string text;
  for (const simt::Launch& launch : simt::trace)
    text += launch.name + "|" + std::to_string(launch.device) + "|" +
            std::to_string(reinterpret_cast<uintptr_t>(launch.stream)) + "\n";
  if (size > 0) std::snprintf(buffer, size_t(size), "%s", text.c_str());
  return int64_t(text.size()) + 1;
}
