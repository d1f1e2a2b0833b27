// Atomic operations. They are relaxed, as on the device: they order no other
// memory.
#pragma once

#include "simt/language.h"

namespace simt {

template <class T>
struct Same {
  using type = T;
};
template <class T>
using NonDeduced = typename Same<T>::type;  // a parameter from which T is not deduced

template <size_t bytes>
struct Bits;
template <>
struct Bits<2> {
  using type = uint16_t;
};
template <>
struct Bits<4> {
  using type = uint32_t;
};
template <>
struct Bits<8> {
  using type = uint64_t;
};

// *at = change(*at), returning what was there.
template <class T, class Change>
T atomic_update(T* at, Change change) {
  using Word = typename Bits<sizeof(T)>::type;
  if (reinterpret_cast<uintptr_t>(at) % sizeof(T) != 0)
    misuse(nullptr, "an atomic operation on a misaligned address");
  before_atomic();
  auto* word = reinterpret_cast<Word*>(at);
  Word before = __atomic_load_n(word, __ATOMIC_RELAXED), after;
  T old;
  do {
    old = same_bits<T>(before);
    after = same_bits<Word>(static_cast<T>(change(old)));
  } while (!__atomic_compare_exchange_n(word, &before, after, false, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED));
  return old;
}

template <class T>
constexpr bool is_word =
    std::is_integral_v<T> && !std::is_same_v<T, bool> && (sizeof(T) == 4 || sizeof(T) == 8);

}  // namespace simt

template <class T>
T atomicAdd(T* at, simt::NonDeduced<T> value) {
  static_assert(simt::is_word<T> || std::is_floating_point_v<T> || std::is_same_v<T, __half> ||
                std::is_same_v<T, __nv_bfloat16>);
  return simt::atomic_update(at, [&](T old) { return static_cast<T>(old + value); });
}

// Each half is added by itself; the pair is not one atomic operation.
inline __half2 atomicAdd(__half2* at, __half2 value) {
  auto* half = reinterpret_cast<__half*>(at);
  __half low = atomicAdd(half, __low2half(value));
  return __halves2half2(low, atomicAdd(half + 1, __high2half(value)));
}

inline __nv_bfloat162 atomicAdd(__nv_bfloat162* at, __nv_bfloat162 value) {
  auto* half = reinterpret_cast<__nv_bfloat16*>(at);
  __nv_bfloat16 low = atomicAdd(half, __low2bfloat16(value));
  return __halves2bfloat162(low, atomicAdd(half + 1, __high2bfloat16(value)));
}

inline float4 atomicAdd(float4* at, float4 value) {
  auto* part = reinterpret_cast<float*>(at);
  return make_float4(atomicAdd(part, value.x), atomicAdd(part + 1, value.y),
                     atomicAdd(part + 2, value.z), atomicAdd(part + 3, value.w));
}

#define SIMT_ATOMIC(name, expression)                                                  \
  template <class T>                                                                   \
  T name(T* at, simt::NonDeduced<T> value) {                                           \
    static_assert(simt::is_word<T>);                                                   \
    return simt::atomic_update(at, [&](T old) { return static_cast<T>(expression); }); \
  }
SIMT_ATOMIC(atomicSub, old - value)
SIMT_ATOMIC(atomicMin, old < value ? old : value)
SIMT_ATOMIC(atomicMax, old > value ? old : value)
SIMT_ATOMIC(atomicAnd, old& value)
SIMT_ATOMIC(atomicOr, old | value)
SIMT_ATOMIC(atomicXor, old ^ value)
SIMT_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
SIMT_ATOMIC(atomicDec, old == 0 || old > value ? value : old - 1)
#undef SIMT_ATOMIC

template <class T>
T atomicExch(T* at, simt::NonDeduced<T> value) {
  static_assert(simt::is_word<T> || std::is_same_v<T, float>);
  return simt::atomic_update(at, [&](T) { return value; });
}

template <class T>
T atomicCAS(T* at, simt::NonDeduced<T> expected, simt::NonDeduced<T> value) {
  static_assert(simt::is_word<T> || std::is_same_v<T, unsigned short>);
  return simt::atomic_update(at, [&](T old) { return old == expected ? value : old; });
}
