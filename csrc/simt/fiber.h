// A fiber: a call stack that runs when told to. One stands for one CUDA thread.
//
// The sanitizers are told of every switch. In the build for races (SIMT_TSAN) a switch orders no
// memory, so that only what CUDA says orders memory does: see `order_release`, `order_acquire`.
#pragma once

#include <cstddef>

namespace simt {

constexpr size_t kStackBytes = 128 << 10;

struct Fiber {
  void* stack_pointer = nullptr;
  char* stack = nullptr;  // lowest address; null for the fiber that is an OS thread itself
  size_t stack_bytes = 0;
  void* fake_stack = nullptr;  // of the address sanitizer
  void* history = nullptr;     // of the thread sanitizer
};

// Stacks for `count` fibers, each above an inaccessible guard page. Released by unmap_stacks.
char* map_stacks(size_t count);
void unmap_stacks(char* stacks, size_t count);
char* stack_of(char* stacks, size_t i);

// The fiber that stands for the calling OS thread.
void adopt_thread(Fiber& fiber);

// The thread sanitizer's state of a fiber; null in the other builds. Each costs half a millisecond
// and a megabyte, so they are reused, each always with the same stack.
void* new_history();

// Makes `fiber` begin in `entry` at its first switch; `entry` must not return.
void start(Fiber& fiber, char* stack, void* history, void (*entry)());
// Must be called first thing in `entry`, `from` being the fiber that switched to it.
void begin(Fiber& from);

// `last`: `from` will not be switched to again.
void switch_to(Fiber& from, Fiber& to, bool last = false);

// What happened before order_release(tag) happens before what follows order_acquire(tag).
void order_release(const void* tag);
void order_acquire(const void* tag);

// Makes the address sanitizer refuse accesses to memory, and accept them again.
void poison(const void* from, size_t bytes);
void unpoison(const void* from, size_t bytes);

}  // namespace simt
