// The memory that a block runs in: stacks and shared memory, kept for later blocks; shared memory
// for later launches too.
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

// Shared memory is full of ones at the start of a block: NaN as a float, -1 as an integer. After
// each variable comes a stretch that may not be touched.
constexpr size_t kGap = 256;
constexpr size_t kMaxVariables = 64;

struct Room {
  char* stacks = nullptr;
  std::vector<void*> histories;
  unsigned char* arena = nullptr;
  size_t threads = 0, bytes = 0, used = 0;
  // Tags of what happened before what: the end of one block before the start of the next in this
  // room, one barrier before the next. Two each, in turn: a thread that runs ahead must not be
  // ordered before those that are still at the former.
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

// A race between blocks is only seen if nothing orders them, and using the same room does. So a
// worker has several where races are looked for: blocks that follow each other are in two rooms.
inline size_t rooms_for([[maybe_unused]] size_t threads) {
#if defined(SIMT_TSAN)
  return threads > 512 ? 1 : std::clamp<size_t>(512 / threads, 2, 8);
#else
  return 1;
#endif
}

class Rooms {
 public:
  std::vector<Room> take(size_t count) {
    std::lock_guard<std::mutex> hold(lock_);
    std::vector<Room> taken(count);
    for (Room& room : taken) {
      if (free_.empty()) break;
      room = std::move(free_.back());
      free_.pop_back();
    }
    return taken;
  }
  void give_back(std::vector<Room> rooms) {
    std::lock_guard<std::mutex> hold(lock_);
    for (Room& room : rooms) {
      // Each stack takes two mappings of the 65,530 that a process may have, and every kernel
      // library has rooms of its own.
      room.drop_stacks();
      free_.push_back(std::move(room));
    }
  }

 private:
  std::mutex lock_;
  std::vector<Room> free_;
};

inline Rooms& all_rooms() {
  static auto* rooms = new Rooms;
  return *rooms;
}

}  // namespace simt
