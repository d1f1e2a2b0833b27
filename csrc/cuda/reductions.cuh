// Reductions over the lanes of a warp, or of aligned groups of a power of two of its lanes, by
// butterfly shuffles: every lane gets the result.
#pragma once

#include "intrinsics.cuh"

namespace recast {

// The lanes of this thread's group.
template <int lanes>
__device__ __forceinline__ unsigned group_mask() {
  if (lanes == 32) return 0xffffffffu;
  return ((1u << (lanes % 32)) - 1) << (threadIdx.x % 32 / lanes * lanes);
}

template <int lanes>
__device__ __forceinline__ float group_sum(float value) {
#pragma unroll
  for (int d = lanes / 2; d > 0; d /= 2)
    value += __shfl_xor_sync(group_mask<lanes>(), value, d, lanes);
  return value;
}

__device__ __forceinline__ float warp_sum(float value) { return group_sum<32>(value); }

// As fmaxf, it ignores NaN unless all are NaN.
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, d));
  return value;
}

}  // namespace recast
