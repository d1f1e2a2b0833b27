// Columns of a matrix that are copied from other tensors, cast to its dtype, or zeros: all of them
// in one launch, however many tensors there are.
//
// Macros:
//   RECAST_OUT    dtype of the matrix: 0 fp32, 1 fp16, 2 bf16
//   RECAST_BLOCK  threads of a block
//
// Launch: grid = ceil(rows / rows_each), block = RECAST_BLOCK, no dynamic shared memory.
#include "intrinsics.cuh"
#include "pack.cuh"

namespace {

using recast::Index;
using Out = recast::Dtype<RECAST_OUT>::type;

// Neighbouring columns from one tensor, six fields of 8 bytes as the host writes them.
struct Part {
  const void* from;      // null: zeros
  Index row_step, step;  // elements from row to row, and from column to column
  Index dtype;           // as RECAST_OUT
  Index first;           // columns of the parts before
  Index column;          // of the matrix, where its first one goes
};

__device__ __forceinline__ float element(const Part& part, Index at) {
  if (part.from == nullptr) return 0.0f;
  if (part.dtype == 0) return static_cast<const float*>(part.from)[at];
  if (part.dtype == 1) return recast::widen(static_cast<const __half*>(part.from)[at]);
  return recast::widen(static_cast<const __nv_bfloat16*>(part.from)[at]);
}

}  // namespace

// out (rows, more than these columns) with any row stride; parts by ascending `first`, of `columns`
// columns in all, rows_each * columns below 2^31. Neighbouring threads write neighbouring columns.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    join_columns(const Part* __restrict__ parts, int n_parts, int columns, Index rows,
                 int rows_each, Out* out, Index out_stride) {
  const Index top = static_cast<Index>(blockIdx.x) * rows_each;
  const int count = rows - top < rows_each ? static_cast<int>(rows - top) : rows_each;
  for (int i = threadIdx.x; i < count * columns; i += RECAST_BLOCK) {
    const Index row = top + i / columns;
    const int column = i % columns;
    int last = 0;  // the last part that begins at this column or before
    for (int n = n_parts; n > 1;) {
      const int half = n / 2;
      const bool behind = parts[last + half].first <= column;
      last += behind ? half : 0;
      n = behind ? n - half : half;
    }
    const Part& part = parts[last];
    const Index c = column - part.first;
    recast::narrow(element(part, row * part.row_step + c * part.step),
                   out[row * out_stride + part.column + c]);
  }
}
RECAST_KERNEL(join_columns)
