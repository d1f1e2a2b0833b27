// What the kernels of a compressed interaction on tensor cores share: products of pairs exist in
// registers only, as one factor of a matrix product, of which tiles of 16 rows, kDepth and 8
// columns are multiplied at a time (intrinsics.cuh says which lane holds what).
#pragma once

#include "product_words.cuh"

namespace {

using recast::Index;
using In = recast::Dtype<RECAST_IN>::type;

// (batch, features, D) with any strides; a column is one sample's element.
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

// Two products at once, each rounded like the product of the two as fp32.
__device__ __forceinline__ unsigned times(unsigned a, unsigned b) {
#if !defined(__CUDACC__)
  return word(low_of(a) * low_of(b), low_of(a >> 16) * low_of(b >> 16));
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

// N columns side by side, from the first on.
template <int N>
struct Columns {
  Index at[RECAST_VEC == 1 ? N : 1];  // elements from a feature's first number
};

// RECAST_VEC N: all of them are one sample's, and lie side by side.
template <int N, class T>
__device__ __forceinline__ Columns<N> columns_of(const View<T>& view, int first, int dim,
                                                 int columns) {
  Columns<N> found;
#pragma unroll
  for (int j = 0; j < (RECAST_VEC == 1 ? N : 1); ++j) {
    const int c = first + j < columns ? first + j : 0;  // its results are not stored
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

// `first`: the number of the first column, of `all`.
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

// Tiles of a weight from global to shared memory, some steps ahead of the one that uses them: those
// of a step are `pieces` runs of `run` words, `apart` words from one to the next.
constexpr int kAhead = 3;

__device__ __forceinline__ void bring(unsigned* to, const unsigned* from, int pieces, int run,
                                      Index apart) {
  for (int w = threadIdx.x; w < pieces * run / 4; w += blockDim.x) {
    const int piece = w / (run / 4), at = w % (run / 4) * 4;
    recast::async_copy_16(to + piece * run + at, from + piece * apart + at);
  }
}

}  // namespace
