// Which instruction set the kernels use: the machine's best, or the one asked for.
#pragma once

#include <string>
#include <vector>

namespace recast {

enum class Isa { portable, avx2, avx512 };

inline bool has(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::avx2)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
  if (isa == Isa::avx512)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           has(Isa::avx2);
#endif
  return isa == Isa::portable;
}

inline Isa best_isa() {
  if (has(Isa::avx512)) return Isa::avx512;
  return has(Isa::avx2) ? Isa::avx2 : Isa::portable;
}

// The instruction set in force; assign to choose another one (tests, comparisons).
inline Isa& isa() {
  static Isa chosen = best_isa();
  return chosen;
}

// The kernel for the instruction set in force.
template <class Function>
Function choose(Function portable, [[maybe_unused]] Function avx2,
                [[maybe_unused]] Function avx512) {
  if (isa() == Isa::avx512) return avx512;
  return isa() == Isa::avx2 ? avx2 : portable;
}

#if defined(__x86_64__)
#define RECAST_CHOOSE(name) \
  ::recast::choose<decltype(&portable::name)>(portable::name, avx2::name, avx512::name)
#else
#define RECAST_CHOOSE(name) \
  ::recast::choose<decltype(&portable::name)>(portable::name, portable::name, portable::name)
#endif

}  // namespace recast
