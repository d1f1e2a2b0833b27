// Columns of a matrix that are copied from other tensors, cast to its dtype, or zeros: all of them
// in one launch, however many tensors there are. Beside lookups that are read by samples,
// embedding_samples.cu writes them.
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

#include "joined_parts.cuh"

}  // namespace

// out (rows, more than these columns) with any row stride; parts by ascending `first`, of `columns`
// columns in all, rows_each * columns below 2^31. Neighbouring threads write neighbouring columns.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    join_columns(const Part* __restrict__ parts, int n_parts, int columns, Index rows,
                 int rows_each, Out* out, Index out_stride) {
  const Index top = static_cast<Index>(blockIdx.x) * rows_each;
  const int count = rows - top < rows_each ? static_cast<int>(rows - top) : rows_each;
  for (int i = threadIdx.x; i < count * columns; i += RECAST_BLOCK)
    join(parts, n_parts, top + i / columns, i % columns, out, out_stride);
}
RECAST_KERNEL(join_columns)
