// Factors of matrix products as the tensor cores take them: registers of one TF32 number, or of two
// of 16 bits, of which tiles of 16 rows, kDepth and 8 columns are multiplied at a time
// (intrinsics.cuh says which lane holds what).
//
// RECAST_PRODUCT: dtype of the factors: 0 fp32, as TF32; 1 fp16; 2 bf16. Sums are fp32.
#pragma once

#include "intrinsics.cuh"
#include "pack.cuh"

namespace {

using Product = recast::Dtype<RECAST_PRODUCT>::type;

constexpr bool kHalf = RECAST_PRODUCT != 0;  // else TF32
constexpr int kEach = kHalf ? 2 : 1;         // elements of a register
constexpr int kDepth = 8 * kEach;

__device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4],
                                         const unsigned (&b)[2]) {
#if RECAST_PRODUCT == 1
  recast::mma_fp16(c, a, b, c);
#elif RECAST_PRODUCT == 2
  recast::mma_bf16(c, a, b, c);
#else
  recast::mma_tf32(c, a, b, c);
#endif
}

__device__ __forceinline__ unsigned bits_of(__half x) { return __half_as_ushort(x); }
__device__ __forceinline__ unsigned bits_of(__nv_bfloat16 x) { return __bfloat16_as_ushort(x); }

// A register of a factor: of elements `low` and, of 16-bit ones, `high`.
__device__ __forceinline__ unsigned word(float low, [[maybe_unused]] float high) {
#if RECAST_PRODUCT == 0
  return recast::to_tf32(low);
#else
  Product first, second;
  recast::narrow(low, first);
  recast::narrow(high, second);
  return bits_of(first) | bits_of(second) << 16;
#endif
}

}  // namespace
