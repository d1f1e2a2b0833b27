// Replaces operator new, when loaded before everything else, by one that fails on demand: for the
// large allocations of one library, so that no other code has to bear it.
#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

constexpr std::size_t kLarge = 512;  // bytes: small ones would be too many to fail each in turn

std::atomic<const char*> library{nullptr};  // null: nothing fails
std::atomic<long> left{0};                  // allocations until the others fail
std::atomic<long> failed{0}, failed_in_parallel{0};

bool in_parallel() {
  static const auto ask = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "omp_in_parallel"));
  return ask != nullptr && ask() != 0;
}

bool fails(std::size_t bytes, const void* caller) {
  const char* const watched = library.load();
  Dl_info of;
  if (watched == nullptr || bytes < kLarge || dladdr(caller, &of) == 0) return false;
  if (std::strcmp(of.dli_fname, watched) != 0 || left.fetch_sub(1) > 0) return false;
  ++failed;
  if (in_parallel()) ++failed_in_parallel;
  return true;
}

void* allocate(std::size_t bytes, const void* caller) {
  void* const memory = fails(bytes, caller) ? nullptr : std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes, __builtin_return_address(0)); }
void* operator new[](std::size_t bytes) { return allocate(bytes, __builtin_return_address(0)); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

// From now on all large allocations of the library at `path` fail, but for the first `count`.
extern "C" void fail_after(const char* path, long count) {
  failed = failed_in_parallel = 0;
  left = count;
  library = path;
}

// Ends that; how many have failed, in all (`which` 0) or within a parallel loop (1).
extern "C" long stop_failing(int which) {
  library = nullptr;
  return which == 0 ? failed : failed_in_parallel;
}
