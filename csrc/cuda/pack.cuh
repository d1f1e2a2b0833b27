// Types shared by all kernels, and vectorised memory access: `Pack` holds N elements of fp32, fp16
// or bf16 that one instruction of up to 16 bytes moves; arithmetic is fp32, by widen() and
// narrow().
#pragma once

#include "intrinsics.cuh"

namespace recast {

using Index = long long;
using UInt64 = unsigned long long;

// The codes by which the host's macros name a dtype: 0 fp32, 1 fp16, 2 bf16.
template <int Code>
struct Dtype;
template <>
struct Dtype<0> {
  using type = float;
};
template <>
struct Dtype<1> {
  using type = __half;
};
template <>
struct Dtype<2> {
  using type = __nv_bfloat16;
};

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ __forceinline__ void narrow(float x, float& to) { to = x; }
__device__ __forceinline__ void narrow(float x, __half& to) { to = __float2half_rn(x); }
__device__ __forceinline__ void narrow(float x, __nv_bfloat16& to) { to = __float2bfloat16_rn(x); }

// N consecutive elements, loaded and stored by 16-byte instructions, or by one smaller one.
template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
  T at[N];
};

template <int N, class T>
__device__ __forceinline__ Pack<T, N> load(const T* from) {
#if !defined(__CUDACC__)
  if constexpr (N > 1) simt::check_aligned({"load", __FILE__, __LINE__}, from, alignof(Pack<T, N>));
#endif
  return *reinterpret_cast<const Pack<T, N>*>(from);
}

template <int N, class T>
__device__ __forceinline__ void store(T* to, const Pack<T, N>& pack) {
#if !defined(__CUDACC__)
  if constexpr (N > 1) simt::check_aligned({"store", __FILE__, __LINE__}, to, alignof(Pack<T, N>));
#endif
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

// store() to global memory as explicit vector instructions. Where another branch stores the same
// elements one by one, the compiler otherwise merges the branches and stores one by one here too.
template <int N, class T>
__device__ __forceinline__ void store_whole(T* to, const Pack<T, N>& pack) {
#if defined(__CUDACC__)
  constexpr int kBytes = sizeof(T) * N;
  if constexpr (kBytes >= 16) {
#pragma unroll
    for (int k = 0; k < kBytes / 16; ++k) {
      uint4 v;
      memcpy(&v, &pack.at[16 / sizeof(T) * k], 16);
      asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to + 16 / sizeof(T) * k),
                   "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                   : "memory");
    }
  } else if constexpr (kBytes == 8) {
    uint2 v;
    memcpy(&v, &pack, 8);
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(v.x), "r"(v.y) : "memory");
  } else if constexpr (kBytes == 4) {
    unsigned v;
    memcpy(&v, &pack, 4);
    asm volatile("st.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
  } else {
    store<N>(to, pack);
  }
#else
  store<N>(to, pack);
#endif
}

template <int N, class T>
__device__ __forceinline__ Pack<T, N> zeros() {
  Pack<T, N> pack;
#pragma unroll
  for (int e = 0; e < N; ++e) narrow(0.0f, pack.at[e]);
  return pack;
}

// Tells the compiler that `at` points to global memory, so that it emits ld.global and not generic
// loads: it cannot know this of a pointer that was itself loaded from memory.
template <class T>
__device__ __forceinline__ T* in_global(T* at) {
#if defined(__CUDACC__)
  __builtin_assume(__isGlobal(at));
#endif
  return at;
}

// Element `at` of an array of int64 (`wide`) or int32.
__device__ __forceinline__ Index integer(const void* from, bool wide, Index at) {
  return wide ? static_cast<const Index*>(from)[at] : static_cast<const int*>(from)[at];
}

}  // namespace recast
