// What a kernel asks of the emulator: who am I, meet the others, shared memory, report a misuse.
//
// A block runs on one OS thread, its CUDA threads as fibers; blocks are spread over several OS
// threads. A fiber runs until it must wait. This header is what kernels are compiled against, so it
// is small and uses no container: kernels are watched by the sanitizers, the scheduler is not.
#pragma once

#include <vector_functions.h>
#include <vector_types.h>

#include <cstddef>
#include <cstdint>

namespace simt {

constexpr int kWarp = 32;
constexpr int kMaxThreads = 1024;         // of a block
constexpr size_t kMaxShared = 227 << 10;  // bytes of a block, from sm_90 on
constexpr size_t kMaxStaticShared = 48 << 10;
constexpr size_t kMaxDeposit = 48;  // bytes that a lane brings to a meeting

// The built-in variables of the running CUDA thread.
struct Here {
  uint3 thread;
  uint3 block;
  dim3 block_size;
  dim3 grid_size;
  int lane;
};
extern thread_local const Here* here;

// A collective operation in the source.
struct Site {
  const char* what;
  const char* file;
  int line;
};

// What the lanes of a warp brought to a meeting.
struct Deposits {
  alignas(16) unsigned char of[kWarp][kMaxDeposit];
  uint32_t present;  // lanes that came: those of the mask that had not returned
};

// The lanes of `mask` meet, each bringing `bytes`. What is returned stays until the calling lane
// comes to its second next meeting with the same mask. `orders_memory`: as __syncwarp does.
const Deposits& meet(const Site& site, uint32_t mask, const void* mine, size_t bytes,
                     bool orders_memory);

// All threads of the block meet, memory is ordered. Returns how many had a true predicate.
int meet_block(const Site& site, bool predicate);

// The block's dynamic shared memory, and its variable known by `key`.
void* dynamic_shared();
void* static_shared(const void* key, const char* name, size_t bytes);

// Before an atomic operation: one that is repeated without end gives way to other threads, and is a
// misuse when none of them goes on either.
void try_again();

// __threadfence: orders memory between all threads that call it.
void fence();

// A 16-byte copy that happens when waited for, not before; a null `from` writes zeros.
void copy_later(const Site& site, void* to, const void* from);
void close_copies();
// Calls `copy(to, from)` for all but the last `open` closed groups of the calling thread.
void await_copies(int open, void (*copy)(void* to, const void* from));

// Ends the launch with this message, the kernel's name, block and thread.
[[noreturn, gnu::format(printf, 2, 3)]] void misuse(const Site* site, const char* format, ...);

struct Registration {
  Registration(const char* name, const char* signature, void (*call)(void** params));
};

}  // namespace simt
