// Casts matrices of any strides to contiguous ones of one dtype, with rows padded by zeros to a
// wider stride where asked for. cast_rows takes any number of matrices described in device memory,
// cast_one a single one described by the launch arguments. A thread writes 8 elements.
//
// Macros:
//   RECAST_OUT    dtype of what is written: 0 fp32, 1 fp16, 2 bf16
//   RECAST_BLOCK  threads of a block
//
// Launch: a block for every 8 RECAST_BLOCK elements that are written to a matrix, zeros included;
// block = RECAST_BLOCK, no dynamic shared memory.
#include "intrinsics.cuh"
#include "pack.cuh"

namespace {

using recast::Index;
using Out = recast::Dtype<RECAST_OUT>::type;

constexpr int kPerThread = 8;  // elements of a thread
constexpr int kBlock = RECAST_BLOCK * kPerThread;

// Eight fields of 8 bytes, as the host writes them.
struct Matrix {
  const void* from;
  Out* to;
  Index row_step, step;   // of `from`: elements from row to row, and from column to column
  Index width, stride;    // columns of `from`; elements of a row of `to`, padding included
  Index count;            // elements of `to`
  Index dtype_and_block;  // bits 0-1: dtype of `from`, as RECAST_OUT; bits 2 and up: the
                          // number of blocks of the matrices before
};

__device__ __forceinline__ float element(const void* from, int dtype, Index at) {
  if (dtype == 0) return static_cast<const float*>(from)[at];
  if (dtype == 1) return recast::widen(static_cast<const __half*>(from)[at]);
  return recast::widen(static_cast<const __nv_bfloat16*>(from)[at]);
}

// Casts one block's part of a matrix, the kBlock elements from `first` on.
__device__ __forceinline__ void cast(const Matrix& matrix, int dtype, Index first) {
  const Index left = matrix.count - first;
  const unsigned stride = static_cast<unsigned>(matrix.stride);
  const bool is_simple = matrix.width == matrix.stride && matrix.step == 1 &&
                         matrix.row_step == matrix.width && left >= kBlock && dtype == 0 &&
                         (reinterpret_cast<Index>(matrix.from) & 15) == 0 &&
                         (reinterpret_cast<Index>(matrix.to) & 15) == 0;
  if (is_simple) {  // contiguous fp32: the most frequent case, without index arithmetic
    const Index at = first + threadIdx.x * kPerThread;
    const auto found = recast::load<kPerThread>(static_cast<const float*>(matrix.from) + at);
    recast::Pack<Out, kPerThread> made;
#pragma unroll
    for (int e = 0; e < kPerThread; ++e) recast::narrow(found.at[e], made.at[e]);
    recast::store(matrix.to + at, made);
    return;
  }
  const Index row = first / stride;
  const unsigned column_of_first = static_cast<unsigned>(first - row * stride);
  float value[kPerThread];
#pragma unroll
  for (int e = 0; e < kPerThread; ++e) {
    const unsigned at = column_of_first + e * RECAST_BLOCK + threadIdx.x, rows_below = at / stride;
    const Index column = at - rows_below * stride;
    const bool in_range = e * RECAST_BLOCK + threadIdx.x < left && column < matrix.width;
    value[e] = 0.0f;
    if (in_range)
      value[e] =
          element(matrix.from, dtype, (row + rows_below) * matrix.row_step + column * matrix.step);
  }
#pragma unroll
  for (int e = 0; e < kPerThread; ++e) {
    const int at = e * RECAST_BLOCK + threadIdx.x;
    if (at < left) recast::narrow(value[e], matrix.to[first + at]);
  }
}

}  // namespace

// Strides below 2^31. Grid: the blocks of all matrices, in the order of `matrices`.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    cast_rows(const Matrix* __restrict__ matrices, int n) {
  const int block = static_cast<int>(blockIdx.x);
  int last = 0;  // the last matrix whose first block is this one or before
  while (last + 1 < n && (matrices[last + 1].dtype_and_block >> 2) <= block) ++last;
  const Matrix matrix = matrices[last];
  const Index first = block - (matrix.dtype_and_block >> 2);
  cast(matrix, static_cast<int>(matrix.dtype_and_block & 3), first * kBlock);
}
RECAST_KERNEL(cast_rows)

// One matrix. Grid: its blocks.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    cast_one(const void* from, Out* to, Index row_step, Index step, Index width, Index stride,
             Index count, int dtype) {
  const Matrix matrix = {from, to, row_step, step, width, stride, count, 0};
  cast(matrix, dtype, static_cast<Index>(blockIdx.x) * kBlock);
}
RECAST_KERNEL(cast_one)
