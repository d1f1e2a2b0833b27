// Writes columns of a matrix: copies of other tensors, cast to its dtype, or zeros, for any number
// of tensors in one launch. Where the other columns are embedding lookups read sample by sample,
// embedding_samples.cu writes all of them.
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

// out: (rows, at least `columns`), any row stride. parts: in order of `first`, `columns` columns in
// all. A block writes `rows_each` rows, rows_each * columns < 2^31; consecutive threads write
// consecutive columns.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    join_columns(const Part* __restrict__ parts, int n_parts, int columns, Index rows,
                 int rows_each, Out* out, Index out_stride) {
  const Index first_row = static_cast<Index>(blockIdx.x) * rows_each;
  const int count = rows - first_row < rows_each ? static_cast<int>(rows - first_row) : rows_each;
  for (int i = threadIdx.x; i < count * columns; i += RECAST_BLOCK)
    join(parts, n_parts, first_row + i / columns, i % columns, out, out_stride);
}
RECAST_KERNEL(join_columns)
