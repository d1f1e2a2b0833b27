// The memory that a block runs in: the stacks of its threads and its shared memory. Both are reused
// by later blocks, shared memory by later launches too.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "simt/fiber.h"

namespace simt {

inline size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// At the start of a block all bits of shared memory are 1: NaN as a float, -1 as an integer, so
// that reads of uninitialised variables show. kGap poisoned bytes follow each variable.
constexpr size_t kGap = 256;
constexpr size_t kMaxVariables = 64;

struct BlockMemory {
  char* stacks = nullptr;
  std::vector<void*> histories;
  unsigned char* arena = nullptr;
  size_t threads = 0, bytes = 0, used = 0;
  // Tags by which the thread sanitizer learns the order of events: the end of one block before the
  // start of the next in this memory, one barrier before the next. Two each, used alternately: a
  // thread that runs ahead must not be ordered before those still at the previous one.
  uint64_t ends[2] = {}, barriers[2] = {};
  unsigned blocks = 0;

  void reserve(size_t for_threads, size_t for_bytes) {
    if (for_threads > threads) {
      drop_stacks();
      stacks = map_stacks(for_threads);
      threads = for_threads;
      while (histories.size() < threads) histories.push_back(new_history());
    }
    if (for_bytes > bytes) {
      std::free(arena);
      bytes = round_up(for_bytes, 256);
      arena = static_cast<unsigned char*>(std::aligned_alloc(256, bytes));
      if (!arena) throw std::bad_alloc();
      used = bytes;
    }
  }

  void drop_stacks() {
    if (stacks) unmap_stacks(stacks, threads);
    stacks = nullptr;
    threads = 0;
  }
};

// A race between blocks is only found if nothing orders the blocks, and reusing memory does. So in
// the build for races a worker alternates between several memories.
inline size_t memories_for([[maybe_unused]] size_t threads) {
#if defined(SIMT_TSAN)
  return threads > 512 ? 1 : std::clamp<size_t>(512 / threads, 2, 8);
#else
  return 1;
#endif
}

class MemoryPool {
 public:
  std::vector<BlockMemory> take(size_t count) {
    std::lock_guard<std::mutex> hold(lock_);
    std::vector<BlockMemory> value_of(count);
    for (BlockMemory& memory : value_of) {
      if (free_.empty()) break;
      memory = std::move(free_.back());
      free_.pop_back();
    }
    return value_of;
  }
  void give_back(std::vector<BlockMemory> memories) {
    std::lock_guard<std::mutex> hold(lock_);
    for (BlockMemory& memory : memories) {
      // Each stack takes two of the 65,530 mappings that a process may have, and every kernel
      // library has a pool of its own.
      memory.drop_stacks();
      free_.push_back(std::move(memory));
    }
  }

 private:
  std::mutex lock_;
  std::vector<BlockMemory> free_;
};

inline MemoryPool& memory_pool() {
  static auto* memories = new MemoryPool;
  return *memories;
}

}  // namespace simt
