// Barriers, votes, shuffles and reductions of a warp or block, as the CUDA C++ Programming Guide
// defines them. A collective does not wait for lanes that have returned; reading such a lane's
// value is reported as a misuse.
#pragma once

#include "simt/language.h"

#define SIMT_SITE(name) \
  ::simt::Site { #name, file, line }
#define SIMT_CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(SIMT_CALLER) { simt::block_barrier(SIMT_SITE(__syncthreads), false); }

inline int __syncthreads_count(int predicate, SIMT_CALLER) {
  return simt::block_barrier(SIMT_SITE(__syncthreads_count), predicate != 0);
}

inline int __syncthreads_and(int predicate, SIMT_CALLER) {
  return simt::block_barrier(SIMT_SITE(__syncthreads_and), predicate == 0) == 0;
}

inline int __syncthreads_or(int predicate, SIMT_CALLER) {
  return simt::block_barrier(SIMT_SITE(__syncthreads_or), predicate != 0) != 0;
}

inline void __syncwarp(unsigned mask = 0xffffffffu, SIMT_CALLER) {
  simt::warp_collective(SIMT_SITE(__syncwarp), mask, nullptr, 0, true);
}

inline void __threadfence() { simt::fence(); }

namespace simt {

template <class T>
const LaneValues& exchange(const Site& site, unsigned mask, const T& mine) {
  static_assert(sizeof(T) <= kMaxLaneValue);
  return warp_collective(site, mask, &mine, sizeof(T), false);
}

template <class T>
T value_of(const LaneValues& values, int lane) {
  return from_bytes<T>(values.of[lane]);
}

inline unsigned vote(const Site& site, unsigned mask, int predicate) {
  const LaneValues& values = exchange(site, mask, predicate);
  unsigned lanes = 0;
  for (int lane = 0; lane < kWarp; ++lane)
    if ((values.present >> lane & 1) && value_of<int>(values, lane) != 0) lanes |= 1u << lane;
  return lanes;
}

// `source`: the lane to read, or a negative number for the lane's own value.
template <class T>
T shuffle(const Site& site, unsigned mask, T mine, int source, int width) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8, "CUDA shuffles 2 to 8 bytes");
  static_assert(!std::is_same_v<T, bool> && !std::is_pointer_v<T>);
  if (width < 1 || width > kWarp || (width & (width - 1)) != 0)
    misuse(&site, "width %d is not a power of two up to 32", width);
  const LaneValues& values = exchange(site, mask, mine);
  if (source < 0) return mine;
  if (!(mask >> source & 1))
    misuse(&site, "reads lane %d, which is not in the mask %08x", source, mask);
  if (!(values.present >> source & 1)) misuse(&site, "reads lane %d, which has returned", source);
  return value_of<T>(values, source);
}

template <class T, class Combine>
T reduce(const Site& site, unsigned mask, T mine, Combine combine) {
  const LaneValues& values = exchange(site, mask, mine);
  bool first = true;
  T result{};
  for (int lane = 0; lane < kWarp; ++lane) {
    if (!(values.present >> lane & 1)) continue;
    T value = value_of<T>(values, lane);
    result = first ? value : combine(result, value);
    first = false;
  }
  return result;
}

}  // namespace simt

inline unsigned __ballot_sync(unsigned mask, int predicate, SIMT_CALLER) {
  return simt::vote(SIMT_SITE(__ballot_sync), mask, predicate);
}

inline int __any_sync(unsigned mask, int predicate, SIMT_CALLER) {
  return simt::vote(SIMT_SITE(__any_sync), mask, predicate) != 0;
}

inline int __all_sync(unsigned mask, int predicate, SIMT_CALLER) {
  return simt::vote(SIMT_SITE(__all_sync), mask, predicate == 0) == 0;
}

template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32, SIMT_CALLER) {
  int base = simt::here->lane & ~(width - 1);
  return simt::shuffle(SIMT_SITE(__shfl_sync), mask, value, base + (lane & (width - 1)), width);
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, SIMT_CALLER) {
  int within = simt::here->lane & (width - 1), by = static_cast<int>(delta);
  int source = within >= by ? simt::here->lane - by : -1;
  return simt::shuffle(SIMT_SITE(__shfl_up_sync), mask, value, source, width);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, SIMT_CALLER) {
  int within = simt::here->lane & (width - 1), by = static_cast<int>(delta);
  int source = within + by < width ? simt::here->lane + by : -1;
  return simt::shuffle(SIMT_SITE(__shfl_down_sync), mask, value, source, width);
}

// A lane may read an earlier group of `width` lanes, not a later one.
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, SIMT_CALLER) {
  int source = simt::here->lane ^ lanes;
  if (source >= (simt::here->lane | (width - 1)) + 1) source = -1;
  return simt::shuffle(SIMT_SITE(__shfl_xor_sync), mask, value, source, width);
}

template <class T>
unsigned __match_any_sync(unsigned mask, T value, SIMT_CALLER) {
  const simt::LaneValues& values = simt::exchange(SIMT_SITE(__match_any_sync), mask, value);
  unsigned lanes = 0;
  for (int lane = 0; lane < simt::kWarp; ++lane)
    if ((values.present >> lane & 1) && !std::memcmp(values.of[lane], &value, sizeof(T)))
      lanes |= 1u << lane;
  return lanes;
}

template <class T>
unsigned __match_all_sync(unsigned mask, T value, int* all, SIMT_CALLER) {
  const simt::LaneValues& values = simt::exchange(SIMT_SITE(__match_all_sync), mask, value);
  *all = 1;
  for (int lane = 0; lane < simt::kWarp; ++lane)
    if ((values.present >> lane & 1) && std::memcmp(values.of[lane], &value, sizeof(T))) *all = 0;
  return *all ? mask : 0;
}

#define SIMT_REDUCE(name, type, expression)                                 \
  inline type name(unsigned mask, type value, SIMT_CALLER) {                \
    return simt::reduce(SIMT_SITE(name), mask, value,                       \
                        [](type a, type b) -> type { return expression; }); \
  }
SIMT_REDUCE(__reduce_add_sync, unsigned, a + b)
SIMT_REDUCE(__reduce_min_sync, unsigned, a < b ? a : b)
SIMT_REDUCE(__reduce_max_sync, unsigned, a > b ? a : b)
SIMT_REDUCE(__reduce_add_sync, int, static_cast<int>(static_cast<unsigned>(a) + unsigned(b)))
SIMT_REDUCE(__reduce_min_sync, int, a < b ? a : b)
SIMT_REDUCE(__reduce_max_sync, int, a > b ? a : b)
SIMT_REDUCE(__reduce_and_sync, unsigned, a& b)
SIMT_REDUCE(__reduce_or_sync, unsigned, a | b)
SIMT_REDUCE(__reduce_xor_sync, unsigned, a ^ b)
#undef SIMT_REDUCE
