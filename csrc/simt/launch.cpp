// The kernels by name, the limits of a launch, and the two functions that the library exports.
#include "simt/launch.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <map>
#include <random>
#include <thread>

namespace simt {

std::string text(const char* format, ...) {
  char buffer[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(buffer, sizeof buffer, format, arguments);
  va_end(arguments);
  return buffer;
}

std::string text(const uint3& at) { return text("(%u, %u, %u)", at.x, at.y, at.z); }

std::string text(const Site& site) { return text("%s at %s:%d", site.what, site.file, site.line); }

namespace {

// Filled while the library is loaded.
std::map<std::string, Kernel>& kernels() {
  static std::map<std::string, Kernel> table;
  return table;
}

std::string refused(const std::string& name, const dim3& grid, const dim3& block, size_t shared) {
  auto threads = uint64_t{block.x} * block.y * block.z;
  if (!kernels().count(name)) return "no kernel is named " + name;
  if (threads == 0 || grid.x == 0 || grid.y == 0 || grid.z == 0)
    return "kernel " + name + ": a grid or block of size 0";
  if (threads > kMaxThreads || block.z > 64)
    return text("kernel %s: a block of %u x %u x %u threads; %d, and 64 along z, is the most",
                name.c_str(), block.x, block.y, block.z, kMaxThreads);
  if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535)
    return text("kernel %s: a grid of %u x %u x %u blocks; 2^31-1 x 65535 x 65535 is the most",
                name.c_str(), grid.x, grid.y, grid.z);
  if (shared > kMaxShared)
    return text("kernel %s: %zu bytes of shared memory; %zu is the most", name.c_str(), shared,
                kMaxShared);
  return "";
}

}  // namespace

Registration::Registration(const char* name, const char* signature, void (*call)(void** params)) {
  kernels()[name] = Kernel{signature, call};
}

}  // namespace simt

#define SIMT_EXPORT extern "C" __attribute__((visibility("default")))

// cuLaunchKernel's contract, run to its end: null, or what went wrong until the next call.
SIMT_EXPORT const char* simt_launch(const char* name, const unsigned* grid, const unsigned* block,
                                    size_t shared, void** params, int workers, unsigned seed) {
  using namespace simt;
  static thread_local std::string error;
  dim3 blocks(grid[0], grid[1], grid[2]), threads(block[0], block[1], block[2]);
  error = refused(name, blocks, threads, shared);
  if (!error.empty()) return error.c_str();
  Launch launch;
  launch.name = name;
  launch.kernel = &kernels()[name];
  launch.params = params;
  launch.grid = blocks;
  launch.block = threads;
  launch.shared = shared;
  launch.seed = seed;
  launch.blocks = int64_t{blocks.x} * blocks.y * blocks.z;
  if (seed != 0) {
    launch.order.resize(launch.blocks);
    for (int64_t i = 0; i < launch.blocks; ++i) launch.order[i] = i;
    std::shuffle(launch.order.begin(), launch.order.end(), std::mt19937(seed));
  }
  if (workers <= 1) {
    run_blocks(launch, 0);
  } else {
    std::vector<std::thread> pool;
    for (int i = 0; i < workers; ++i) pool.emplace_back([&launch, i] { run_blocks(launch, i); });
    for (std::thread& one : pool) one.join();
  }
  error = launch.error;
  return error.empty() ? nullptr : error.c_str();
}

// The types of the parameters, as "f32* i64* i32"; null for a name that is not there.
SIMT_EXPORT const char* simt_signature(const char* name) {
  auto at = simt::kernels().find(name);
  return at == simt::kernels().end() ? nullptr : at->second.signature.c_str();
}
