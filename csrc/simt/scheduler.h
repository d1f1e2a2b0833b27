// What a kernel needs of the emulator: built-in variables, collectives, shared memory, and reports
// of misuse.
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
constexpr size_t kMaxLaneValue = 48;  // bytes that a lane contributes to a collective

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

// The values that the lanes of a warp contributed to a collective.
struct LaneValues {
  alignas(16) unsigned char of[kWarp][kMaxLaneValue];
  uint32_t present;  // lanes that took part: those of the mask that had not returned
};

// The lanes of `mask` wait for each other, and each contributes `bytes`. The result stays valid
// until the calling lane's next but one collective with the same mask. `orders_memory`: as
// __syncwarp does.
const LaneValues& warp_collective(const Site& site, uint32_t mask, const void* mine, size_t bytes,
                                  bool orders_memory);

// A barrier of the block, which orders memory. Returns how many threads had a true predicate.
int block_barrier(const Site& site, bool predicate);

// The block's dynamic shared memory, and its variable known by `key`.
void* dynamic_shared();
void* static_shared(const void* key, const char* name, size_t bytes);

// Called before an atomic operation: a thread that repeats them yields to others now and then, and
// it is a misuse if all threads do so for ever.
void before_atomic();

// __threadfence: orders memory between all threads that call it.
void fence();

// A 16-byte copy that is carried out only when it is waited for; a null `from` writes zeros.
void start_copy(const Site& site, void* to, const void* from);
void commit_copies();
// Calls `copy(to, from)` for all but the last `open` closed groups of the calling thread.
void wait_for_copies(int open, void (*copy)(void* to, const void* from));

// Ends the launch with this message, the kernel's name, block and thread.
[[noreturn, gnu::format(printf, 2, 3)]] void misuse(const Site* site, const char* format, ...);

struct Registration {
  Registration(const char* name, const char* signature, void (*call)(void** params));
};

}  // namespace simt
