// The gradient of per-sample weights of one lookup that sums: for id i of bag b
//     out[i] = grad[b] . table[ids[i]]
// and 0 for ids without effect: padding, outside the table, in no bag. A group of LANES lanes takes
// an id and adds its products by shuffles.
//
// Macros:
//   RECAST_TABLE   dtype of the table and of `out`: 0 fp32, 1 fp16, 2 bf16; sums are fp32
//   RECAST_GRAD    dtype of `grad`, likewise
//   RECAST_LANES   lanes that share an id, a power of two up to 32: about dim, 32 at most
//   RECAST_BLOCK   threads of a block
//
// Launch: grid = ceil(n_ids / (BLOCK / LANES)), block = RECAST_BLOCK; no dynamic shared memory.
#include "intrinsics.cuh"
#include "pack.cuh"

namespace {

using recast::Index;
using recast::UInt64;
using Table = recast::Dtype<RECAST_TABLE>::type;
using Grad = recast::Dtype<RECAST_GRAD>::type;

constexpr int kLanes = RECAST_LANES;
constexpr int kGroups = RECAST_BLOCK / RECAST_LANES;

// The last bag that starts at `place` or before, by binary search; -1: none.
__device__ __forceinline__ Index bag_at(const void* offsets, bool wide, Index n_offsets,
                                        Index place) {
  Index first = 0, past = n_offsets;
  while (first < past) {
    const Index middle = (first + past) / 2;
    const bool after = recast::integer(offsets, wide, middle) > place;
    past = after ? middle : past;
    first = after ? first : middle + 1;
  }
  return first - 1;
}

}  // namespace

// `ids` (n_ids) and `offsets` (n_offsets, or null: every bag has `fixed` ids) are int64 where
// *_wide, else int32; strides in elements; `padding`: this id has no gradient; -1: none.
extern "C" __global__ void __launch_bounds__(RECAST_BLOCK)
    embedding_weight_grad(const Table* __restrict__ table, Index rows, Index dim, Index row_stride,
                          const void* __restrict__ ids, int ids_wide, Index n_ids,
                          const void* __restrict__ offsets, int offsets_wide, Index n_offsets,
                          Index fixed, Index bags, Index padding, const Grad* __restrict__ grad,
                          Index grad_stride, Table* __restrict__ out) {
  const int lane = threadIdx.x % kLanes;
  const Index place = static_cast<Index>(blockIdx.x) * kGroups + threadIdx.x / kLanes;
  float sum = 0.0f;
  if (place < n_ids) {
    const Index id = recast::integer(ids, ids_wide, place);
    const Index bag =
        offsets == nullptr ? place / fixed : bag_at(offsets, offsets_wide, n_offsets, place);
    const bool counts = static_cast<UInt64>(id) < static_cast<UInt64>(rows) && id != padding;
    if (counts && bag >= 0 && bag < bags) {
      const Table* const row = table + id * row_stride;
      const Grad* const up = grad + bag * grad_stride;
      for (Index c = lane; c < dim; c += kLanes)
        sum += recast::widen(up[c]) * recast::widen(row[c]);
    }
  }
#pragma unroll
  for (int d = kLanes / 2; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  if (place < n_ids && lane == 0) recast::narrow(sum, out[place]);
}
RECAST_KERNEL(embedding_weight_grad)
