// A launch as the scheduler sees it, and the words of its messages.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "simt/scheduler.h"

namespace simt {

struct Kernel {
  std::string signature;
  void (*call)(void** params);
};

struct Launch {
  std::string name;
  const Kernel* kernel;
  void** params;
  dim3 grid, block;
  size_t shared;
  unsigned seed;
  int64_t blocks;
  std::vector<int64_t> order;  // of blocks; empty: as they come
  std::atomic<int64_t> next{0};
  std::mutex lock;
  std::string error;
};

// Runs blocks of the launch on the calling OS thread until none is left.
void run_blocks(Launch& launch, unsigned worker);

[[gnu::format(printf, 1, 2)]] std::string text(const char* format, ...);
std::string text(const uint3& at);
std::string text(const Site& site);

}  // namespace simt
