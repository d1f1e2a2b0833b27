// Memory for tables: aligned to a cache line, and in huge pages when there is much of it.
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <new>

#include "id_table.h"

namespace recast::ids {
namespace {

// The size of a huge page, and of a cache line.
constexpr size_t kBig = size_t{1} << 21, kLine = 64;

size_t in_big_pages(size_t bytes) { return (bytes + kBig - 1) / kBig * kBig; }

}  // namespace

void* reserve(size_t bytes) {
  if (bytes < kMapped) {
    const size_t whole = (std::max<size_t>(bytes, 1) + kLine - 1) / kLine * kLine;
    void* memory = std::aligned_alloc(kLine, whole);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
  }
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
}

void release(void* memory, size_t bytes) {
  if (memory == nullptr) return;
  if (bytes < kMapped) return std::free(memory);
  munmap(memory, in_big_pages(bytes));
}

}  // namespace recast::ids
