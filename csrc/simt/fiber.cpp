#include "simt/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

#if defined(SIMT_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(SIMT_TSAN)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* tag);
void __tsan_release(void* tag);
}
#endif

#if !defined(__x86_64__)
#error "the emulator switches stacks on x86-64 only"
#endif

// Saves what the calling convention asks a function to keep, and changes the stack.
extern "C" void simt_switch_stack(void** save, void* load);
asm(R"(
.text
.hidden simt_switch_stack
.globl simt_switch_stack
.type simt_switch_stack, @function
simt_switch_stack:
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
.size simt_switch_stack, .-simt_switch_stack
)");

namespace simt {

namespace {
constexpr size_t kPage = 4096;
constexpr size_t kStride = kStackBytes + kPage;
}  // namespace

char* map_stacks(size_t count) {
  void* memory = mmap(nullptr, count * kStride, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  char* stacks = static_cast<char*>(memory);
  for (size_t i = 0; i < count; ++i) mprotect(stacks + i * kStride, kPage, PROT_NONE);
  return stacks;
}

void unmap_stacks(char* stacks, size_t count) {
  unpoison(stacks, count * kStride);  // for whatever is mapped there next
  munmap(stacks, count * kStride);
}

char* stack_of(char* stacks, size_t i) { return stacks + i * kStride + kPage; }

void adopt_thread(Fiber& fiber) {
#if defined(SIMT_TSAN)
  fiber.history = __tsan_get_current_fiber();
#else
  (void)fiber;
#endif
}

void* new_history() {
#if defined(SIMT_TSAN)
  return __tsan_create_fiber(0);
#else
  return nullptr;
#endif
}

void start(Fiber& fiber, char* stack, void* history, void (*entry)()) {
  unpoison(stack, kStackBytes);
  fiber.stack = stack;
  fiber.stack_bytes = kStackBytes;
  auto top = reinterpret_cast<uintptr_t>(stack + kStackBytes) & ~uintptr_t{15};
  void** frame = reinterpret_cast<void**>(top);
  *--frame = nullptr;  // where the return address of `entry` would be
  *--frame = reinterpret_cast<void*>(entry);
  for (int saved = 0; saved < 6; ++saved) *--frame = nullptr;
  fiber.stack_pointer = frame;
  fiber.fake_stack = nullptr;
  fiber.history = history;
}

void begin(Fiber& from) {
#if defined(SIMT_ASAN)
  const void* stack = nullptr;
  __sanitizer_finish_switch_fiber(nullptr, &stack, &from.stack_bytes);
  from.stack = static_cast<char*>(const_cast<void*>(stack));
#else
  (void)from;
#endif
}

void switch_to(Fiber& from, Fiber& to, bool last) {
#if defined(SIMT_ASAN)
  __sanitizer_start_switch_fiber(last ? nullptr : &from.fake_stack, to.stack, to.stack_bytes);
#else
  (void)last;
#endif
#if defined(SIMT_TSAN)
  constexpr unsigned kOrdersNothing = 1;
  __tsan_switch_to_fiber(to.history, kOrdersNothing);
#endif
  simt_switch_stack(&from.stack_pointer, to.stack_pointer);
#if defined(SIMT_ASAN)
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

void order_release([[maybe_unused]] const void* tag) {
#if defined(SIMT_TSAN)
  __tsan_release(const_cast<void*>(tag));
#endif
}

void order_acquire([[maybe_unused]] const void* tag) {
#if defined(SIMT_TSAN)
  __tsan_acquire(const_cast<void*>(tag));
#endif
}

void poison([[maybe_unused]] const void* from, [[maybe_unused]] size_t bytes) {
#if defined(SIMT_ASAN)
  __asan_poison_memory_region(from, bytes);
#endif
}

void unpoison([[maybe_unused]] const void* from, [[maybe_unused]] size_t bytes) {
#if defined(SIMT_ASAN)
  __asan_unpoison_memory_region(from, bytes);
#endif
}

}  // namespace simt
