// CUDA C++ for g++: the keywords, built-in variables and types that a kernel is written in.
//
// Types and their rounding (__half, __nv_bfloat16, float4, dim3) are CUDA's own headers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "simt/scheduler.h"

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#undef __grid_constant__
#undef __align__
#undef __restrict__
#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#define __restrict__ __restrict
// A plain __shared__ variable could be neither watched nor reset for each block.
#define __shared__ static_assert(false, "write RECAST_SHARED(type, name)");

#define threadIdx (::simt::here->thread)
#define blockIdx (::simt::here->block)
#define blockDim (::simt::here->block_size)
#define gridDim (::simt::here->grid_size)
constexpr int warpSize = ::simt::kWarp;

using std::max;
using std::min;

namespace simt {

template <class T>
T from_bytes(const void* bytes) {
  T value;
  std::memcpy(static_cast<void*>(&value), bytes, sizeof(T));  // the cast: __half has constructors
  return value;
}

template <class To, class From>
To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  return from_bytes<To>(&from);
}

template <class T>
struct TypeName {
  static constexpr const char* value = "any";
};
#define SIMT_TYPE_NAME(type, text)             \
  template <>                                  \
  struct TypeName<type> {                      \
    static constexpr const char* value = text; \
  };
SIMT_TYPE_NAME(bool, "bool")
SIMT_TYPE_NAME(signed char, "i8")
SIMT_TYPE_NAME(unsigned char, "u8")
SIMT_TYPE_NAME(short, "i16")
SIMT_TYPE_NAME(unsigned short, "u16")
SIMT_TYPE_NAME(int, "i32")
SIMT_TYPE_NAME(unsigned, "u32")
SIMT_TYPE_NAME(long, "i64")
SIMT_TYPE_NAME(unsigned long, "u64")
SIMT_TYPE_NAME(long long, "i64")
SIMT_TYPE_NAME(unsigned long long, "u64")
SIMT_TYPE_NAME(float, "f32")
SIMT_TYPE_NAME(double, "f64")
SIMT_TYPE_NAME(__half, "f16")
SIMT_TYPE_NAME(__nv_bfloat16, "bf16")
#undef SIMT_TYPE_NAME

// Writes "f32* i32 " for the parameters of a kernel.
template <class... Parameters>
struct Signature {
  char text[16 * (sizeof...(Parameters) + 1)] = {};
  explicit Signature(void (*)(Parameters...)) { (add<Parameters>(), ...); }
  template <class T>
  void add() {
    static_assert(std::is_pointer_v<T> || std::is_arithmetic_v<T>,
                  "a kernel takes plain pointers and numbers");
    std::strcat(text, TypeName<std::remove_cv_t<std::remove_pointer_t<T>>>::value);
    std::strcat(text, std::is_pointer_v<T> ? "* " : " ");
  }
};

template <auto kernel>
struct Call;
template <class... Parameters, void (*kernel)(Parameters...)>
struct Call<kernel> {
  static void with(void** params) {
    call(params, std::make_index_sequence<sizeof...(Parameters)>{});
  }
  template <size_t... i>
  static void call([[maybe_unused]] void** params, std::index_sequence<i...>) {
    kernel(*static_cast<std::remove_const_t<Parameters>*>(params[i])...);
  }
};

}  // namespace simt

#define RECAST_KERNEL(name)                                                                  \
  static const ::simt::Registration simt_kernel_##name(#name, ::simt::Signature(&name).text, \
                                                       &::simt::Call<&name>::with);
#define RECAST_DYNAMIC_SHARED(type, name) type* name = static_cast<type*>(::simt::dynamic_shared())
#define RECAST_SHARED(type, name)                      \
  static const char simt_shared_##name = 0;            \
  auto& name = *static_cast<std::add_pointer_t<type>>( \
      ::simt::static_shared(&simt_shared_##name, #name, sizeof(type)))
