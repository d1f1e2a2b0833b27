// Operands of tensor-core products in the dtype of RECAST_PRODUCT: each register of a fragment
// holds one TF32 number or two 16-bit ones. One mma multiplies 16 rows x kDepth by kDepth x 8
// columns; intrinsics.cuh says which lane holds which element.
//
// RECAST_PRODUCT: dtype of the operands: 0 fp32, as TF32; 1 fp16; 2 bf16. Accumulators are fp32.
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

// One register of an operand: `low` as TF32, or `low` and `high` rounded to 16 bits each.
__device__ __forceinline__ unsigned pack_operand(float low, [[maybe_unused]] float high) {
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
