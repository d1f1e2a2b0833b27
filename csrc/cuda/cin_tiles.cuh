// What the tensor-core kernels of a compressed interaction network (CIN) layer share. The products
// of pairs of features exist in registers only, as one operand of a matrix product; see
// mma_operands.cuh.
#pragma once

#include "mma_operands.cuh"

namespace {

using recast::Index;
using In = recast::Dtype<RECAST_IN>::type;

// (batch, features, D) with any strides. A column is one element d of one sample.
template <class T>
struct View {
  T* at;
  Index sample, feature, element;
};

#if RECAST_PRODUCT != 0
#if !defined(__CUDACC__)
__device__ __forceinline__ float low_of(unsigned bits) {
  const auto half = static_cast<unsigned short>(bits);
#if RECAST_PRODUCT == 1
  return recast::widen(__ushort_as_half(half));
#else
  return recast::widen(__ushort_as_bfloat16(half));
#endif
}
#endif

// Two 16-bit products in one register, each rounded once, as by a product in fp32.
__device__ __forceinline__ unsigned times(unsigned a, unsigned b) {
#if !defined(__CUDACC__)
  return pack_operand(low_of(a) * low_of(b), low_of(a >> 16) * low_of(b >> 16));
#elif RECAST_PRODUCT == 1
  const __half2 made = __hmul2(*reinterpret_cast<__half2*>(&a), *reinterpret_cast<__half2*>(&b));
  return *reinterpret_cast<const unsigned*>(&made);
#else
  const __nv_bfloat162 made =
      __hmul2(*reinterpret_cast<__nv_bfloat162*>(&a), *reinterpret_cast<__nv_bfloat162*>(&b));
  return *reinterpret_cast<const unsigned*>(&made);
#endif
}
#endif

// The offsets of N consecutive columns.
template <int N>
struct Columns {
  Index at[RECAST_VEC == 1 ? N : 1];  // in elements, from the start of a feature
};

// With RECAST_VEC = N all of them belong to one sample and are contiguous.
template <int N, class T>
__device__ __forceinline__ Columns<N> columns_of(const View<T>& view, int first, int dim,
                                                 int columns) {
  Columns<N> found;
#pragma unroll
  for (int j = 0; j < (RECAST_VEC == 1 ? N : 1); ++j) {
    const int c =
        first + j < columns ? first + j : 0;  // out of range: column 0, whose result is not stored
    found.at[j] = c / dim * view.sample + c % dim * view.element;
  }
  return found;
}

template <int N, class T>
__device__ __forceinline__ recast::Pack<T, N> read(const T* feature, const Columns<N>& columns) {
  if constexpr (RECAST_VEC != 1) {
    return recast::load<N>(feature + columns.at[0]);
  } else {
    recast::Pack<T, N> found;
#pragma unroll
    for (int j = 0; j < N; ++j) found.at[j] = feature[columns.at[j]];
    return found;
  }
}

// Writes N columns from column `first` on, of `all` that exist.
template <int N, class T>
__device__ __forceinline__ void write(T* feature, const Columns<N>& columns, int first, int all,
                                      const recast::Pack<T, N>& values) {
  if constexpr (RECAST_VEC != 1) {
    if (first < all) recast::store<N>(feature + columns.at[0], values);
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (first + j < all) feature[columns.at[j]] = values.at[j];
  }
}

// Tiles of a weight go to shared memory through a ring of kStages buffers, by cp.async. A step's
// tiles are `pieces` contiguous runs of `run` words, `apart` words from one to the next.
constexpr int kStages = 3;

__device__ __forceinline__ void copy_async(unsigned* to, const unsigned* from, int pieces, int run,
                                           Index apart) {
  for (int w = threadIdx.x; w < pieces * run / 4; w += blockDim.x) {
    const int piece = w / (run / 4), at = w % (run / 4) * 4;
    recast::async_copy_16(to + piece * run + at, from + piece * apart + at);
  }
}

}  // namespace
