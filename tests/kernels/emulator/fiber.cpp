// How a fiber is made and how one stack is left for another.
#include "fiber.h"

#ifndef SIMT_UCONTEXT
// simt_switch(void** save, void* load): the registers that a call keeps, and the stack.
extern "C" __attribute__((visibility("hidden"))) void simt_switch(void** save, void* load);
asm(R"(
.text
.hidden simt_switch
.globl simt_switch
.type simt_switch, @function
simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size simt_switch, . - simt_switch
)");
#endif

namespace simt {

void Fiber::start(void* stack, void (*function)()) {
  bottom_ = stack;
  size_ = kStackBytes;
#ifdef SIMT_ASAN
  __asan_unpoison_memory_region(stack, kStackBytes);  // an abandoned fiber leaves its frames behind
  fake_stack_ = nullptr;
#endif
#ifdef SIMT_UCONTEXT
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack;
  context_.uc_stack.ss_size = kStackBytes;
  context_.uc_link = nullptr;
  makecontext(&context_, function, 0);
#else
  // As if `function` were about to be called: six registers, its address, and no caller.
  void** top = reinterpret_cast<void**>(static_cast<char*>(stack) + kStackBytes);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(function);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  stack_pointer_ = top;
#endif
}

void Fiber::switch_to(Fiber& from, Fiber& to, bool last) {
#ifdef SIMT_ASAN
  __sanitizer_start_switch_fiber(last ? nullptr : &from.fake_stack_, to.bottom_, to.size_);
#else
  (void)last;
#endif
#ifdef SIMT_UCONTEXT
  swapcontext(&from.context_, &to.context_);
#else
  simt_switch(&from.stack_pointer_, to.stack_pointer_);
#endif
#ifdef SIMT_ASAN
  __sanitizer_finish_switch_fiber(from.fake_stack_, nullptr, nullptr);
#endif
}

void Fiber::arrived(Fiber* came_from) {
#ifdef SIMT_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &came_from->bottom_, &came_from->size_);
#else
  (void)came_from;
#endif
}

}  // namespace simt
