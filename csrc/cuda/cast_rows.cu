// Matrices cast to one dtype, with zeros behind their rows where these are to be wider: any number
// of them in one launch, or one whose description comes with the launch.
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

constexpr int kEach = 8;  // elements of a thread
constexpr int kBlock = RECAST_BLOCK * kEach;

// Eight fields of 8 bytes, as the host writes them.
struct Matrix {
  const void* from;
  Out* to;
  Index row_step, step;  // of `from`: elements from row to row, and from column to column
  Index width, stride;   // columns of `from`; elements of a row of `to`, which lie without gaps
  Index count;           // elements of `to`
  Index what;            // dtype of `from`, as RECAST_OUT; above these 2 bits, blocks of the
                         // matrices before
};

__device__ __forceinline__ float element(const void* from, int dtype, Index at) {
  if (dtype == 0) return static_cast<const float*>(from)[at];
  if (dtype == 1) return recast::widen(static_cast<const __half*>(from)[at]);
  return recast::widen(static_cast<const __nv_bfloat16*>(from)[at]);
}

// The part of a matrix that begins with element `first`.
__device__ __forceinline__ void cast(const Matrix& matrix, int dtype, Index first) {
  const Index left = matrix.count - first;
  const unsigned stride = static_cast<unsigned>(matrix.stride);
  const bool is_whole = matrix.width == matrix.stride && matrix.step == 1 &&
                        matrix.row_step == matrix.width && left >= kBlock && dtype == 0 &&
                        (reinterpret_cast<Index>(matrix.from) & 15) == 0 &&
                        (reinterpret_cast<Index>(matrix.to) & 15) == 0;
  if (is_whole) {  // the most frequent case, without the arithmetic
    const Index at = first + threadIdx.x * kEach;
    const auto found = recast::load<kEach>(static_cast<const float*>(matrix.from) + at);
    recast::Pack<Out, kEach> made;
#pragma unroll
    for (int e = 0; e < kEach; ++e) recast::narrow(found.at[e], made.at[e]);
    recast::store(matrix.to + at, made);
    return;
  }
  const Index top = first / stride;
  const unsigned before = static_cast<unsigned>(first - top * stride);
  float value[kEach];
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const unsigned at = before + e * RECAST_BLOCK + threadIdx.x, down = at / stride;
    const Index column = at - down * stride;
    const bool is_there = e * RECAST_BLOCK + threadIdx.x < left && column < matrix.width;
    value[e] = 0.0f;
    if (is_there)
      value[e] = element(matrix.from, dtype, (top + down) * matrix.row_step + column * matrix.step);
  }
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int at = e * RECAST_BLOCK + threadIdx.x;
    if (at < left) recast::narrow(value[e], matrix.to[first + at]);
  }
}

}  // namespace

// Strides below 2^31. Grid: the blocks of all matrices, which are in this order.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    cast_rows(const Matrix* __restrict__ matrices, int n) {
  const int block = static_cast<int>(blockIdx.x);
  int last = 0;  // the last matrix that begins at this block or before
  while (last + 1 < n && (matrices[last + 1].what >> 2) <= block) ++last;
  const Matrix matrix = matrices[last];
  const Index first = block - (matrix.what >> 2);
  cast(matrix, static_cast<int>(matrix.what & 3), first * kBlock);
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
