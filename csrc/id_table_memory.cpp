// Memory for tables: aligned to a cache line, and in huge pages when there is much of it.
#include <algorithm>
#include <cstdlib>
#include <new>

#include "id_table.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace recast::ids {
namespace {

// The size of a huge page, and of a cache line.
constexpr size_t kBig = size_t{1} << 21, kLine = 64;

#if defined(__linux__)
size_t in_big_pages(size_t bytes) { return (bytes + kBig - 1) / kBig * kBig; }
#endif

}  // namespace

void* reserve(size_t bytes) {
  if (bytes < kMapped) {
    const size_t whole = (std::max<size_t>(bytes, 1) + kLine - 1) / kLine * kLine;
    void* memory = std::aligned_alloc(kLine, whole);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
  }
#if defined(__linux__)
  const size_t whole = in_big_pages(bytes);
  void* mapped = mmap(nullptr, whole + kBig, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  auto* first = static_cast<char*>(mapped);
  const size_t skipped = (kBig - reinterpret_cast<uintptr_t>(first) % kBig) % kBig;
  if (skipped > 0) munmap(first, skipped);
  munmap(first + skipped + whole, kBig - skipped);
  madvise(first + skipped, whole, MADV_HUGEPAGE);
  return first + skipped;
#else
  auto* memory = static_cast<char*>(std::calloc(bytes + kLine, 1));
  if (memory == nullptr) throw std::bad_alloc();
  const size_t skipped = kLine - reinterpret_cast<uintptr_t>(memory) % kLine;
  memory[skipped - 1] = static_cast<char>(skipped);  // for `release`
  return memory + skipped;
#endif
}

void release(void* memory, size_t bytes) {
  if (memory == nullptr) return;
  if (bytes < kMapped) return std::free(memory);
#if defined(__linux__)
  munmap(memory, in_big_pages(bytes));
#else
  auto* first = static_cast<char*>(memory);
  std::free(first - first[-1]);
#endif
}

}  // namespace recast::ids
